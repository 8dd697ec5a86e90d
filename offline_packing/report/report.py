"""report: index, plan and manifest -> report.html and report.json, as far as they exist.

_packing/report/report.html    one self-contained page for people
_packing/report/report.json    the same figures
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import PackConfig
from offline_packing.errors import DamagedError
from offline_packing.index.rows import name_samples, of_uses, pack_table
from offline_packing.index.set_aside import read_set_aside
from offline_packing.index.table import Index, IndexInfo
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.samples import OVER_SEQ_LENGTH
from offline_packing.report.pages import render_report
from offline_packing.runs.artifacts import check_layout, key_prefix, open_index, open_plan
from offline_packing.runs.figures import (
    Bars,
    Figure,
    Row,
    Table,
    as_values,
    by_section,
    run_figures,
    spread,
)
from offline_packing.runs.manifest import read_manifest, stored_config
from offline_packing.runs.run import Run, Workspace
from offline_packing.runs.set_aside import aside_while_measuring, aside_while_planning
from offline_packing.storage.files import (
    hash_bytes,
    hash_file,
    read_json,
    to_json,
    write_atomically,
)
from task_encoders.families import model_cost
from task_encoders.packs.manifest import Manifest, PackColumns
from task_encoders.packs.pack_format import pack_key
from task_encoders.versions import VERSION

REPORT_VERSION: Final = 2
#: Packs that are drawn.
_NUM_DRAWN: Final = 24
#: Examples kept of each reason, and the text that is kept of an example's detail.
_NUM_EXAMPLES: Final = 5
_DETAIL_LENGTH: Final = 200


def report(run: Run, *, again: bool = True) -> str:
    """Write the report, or find it up to date unless `again`; return the numbers of packed and
    other samples in one line. Raises StageError if not even the index is complete, or a stage was
    made with other settings. Equal stages give equal bytes."""
    config, workspace = run.config, run.workspace
    manifest = read_manifest(workspace.root)
    made_from = _made_from(run, manifest)
    with suppress(DamagedError):  # the report is written again
        if not again and (known := _read(workspace)) and _is_current(workspace, known, made_from):
            return str(known["verdict"])
    samples = open_index(run)
    stored = open_plan(run) if workspace.read_plan() else None
    if stored is not None and manifest is not None:
        check_layout(run, stored.hash)
    plan, prefix = (stored.packs, key_prefix(run, stored.hash)) if stored else (None, None)
    table = pack_table(samples, plan, model_cost(config.model)) if plan else None
    found = [*run_figures(config, samples, plan, stored.set_aside if stored else {}, table)]
    if plan and table:
        found += [*_packs(config, samples, plan, table), *_online(config.pack, samples, plan)]
    found += [*_overlong(config.pack, samples, plan)]
    if manifest is not None:
        found.append(_shards(manifest))
    tables = aside_while_measuring(workspace, samples.info)
    found += _set_aside(tables + (aside_while_planning(workspace) if stored else []))
    values = as_values(found)
    document = {
        "version": REPORT_VERSION,
        "made_from": made_from,
        "verdict": _verdict(values, plan, written=manifest is not None),
        "seq_length": config.pack.seq_length,
        "figures": values,
        "drawn": _drawn(samples, plan, prefix or "") if plan else None,
        "fingerprint": samples.info.fingerprint,
        "config": stored_config(config, prefix),
        "library_versions": samples.info.versions,
    }
    workspace.report.mkdir(parents=True, exist_ok=True)
    page = render_report(document, by_section(found), config.source_names())
    document["page"] = hash_bytes(page)
    write_atomically(workspace.report / "report.html", page)
    write_atomically(workspace.report / "report.json", to_json(document))
    return str(document["verdict"])


def report_status(run: Run, manifest: Manifest | None) -> str | None:
    """Return the path of the report, and whether it is up to date; None: there is none."""
    workspace = run.workspace
    if (document := _read(workspace)) is None:
        return None
    is_current = _is_current(workspace, document, _made_from(run, manifest))
    old = "" if is_current else ", out of date: run report again"
    return f"{workspace.report / 'report.html'}{old}"


def _read(workspace: Workspace) -> Any:
    """Read report.json; return None if there is none."""
    return read_json(workspace.report / "report.json", "run report again")


def _is_current(workspace: Workspace, document: Mapping[str, Any], made_from: object) -> bool:
    """Tell whether the report of a report.json would be written again as it is."""
    page = workspace.report / "report.html"
    is_whole = page.is_file() and hash_file(page) == document.get("page")
    return is_whole and document.get("made_from") == made_from


def _verdict(values: Mapping[str, Any], plan: PackPlan | None, *, written: bool) -> str:
    """Describe in one line what became of the samples."""
    found, aside = (values["samples"][name] for name in ("found", "set aside"))
    used = found - aside
    if plan is None:
        return (
            f"{found:,} samples = {used:,} measured + {aside:,} set aside; no packs yet: run plan"
        )
    # of several epochs, or of a source that repeats
    total = len(plan.sample_ids)
    times = "" if total == used else f", {total:,} times in all"
    line = (
        f"{found:,} samples = {used:,} packed{times} + {aside:,} set aside; {plan.num_packs:,} "
        f"packs, {plan.num_packs - plan.info.lower_bound:,} above the lower bound; "
        f"{values['packs']['fill']:.2%} full"
    )
    line += f"; {values['samples']['too long']}" if "too long" in values["samples"] else ""
    return line if written else f"{line}; not written yet: run write"


def _made_from(run: Run, manifest: Manifest | None) -> dict[str, str | None]:
    """Identify the stages that a report describes, and the settings that only it depends on."""
    config, workspace = run.config, run.workspace
    index, plan = IndexInfo.load(workspace.packing), workspace.read_plan()
    own = [VERSION, config.report.model_dump(mode="json"), *config.source_names()]
    return {
        "index": None if index is None else index.hash,
        "plan": None if plan is None else plan.facts.hash,
        "shards": None if manifest is None else manifest.content_hash,
        "settings": hash_bytes(to_json([*own, stored_config(config)])),
    }


def _set_aside(paths: list[Path]) -> Iterator[Table]:
    """Yield the samples set aside of each source, and examples of each reason, from their tables,
    which are read one batch of rows at a time."""
    by_source, examples = Counter[str](), defaultdict[str, list[list[str]]](list)
    for table in read_set_aside(paths):
        counts = pc.value_counts(table["source"]).to_pylist()
        by_source.update({one["values"]: one["counts"] for one in counts})
        for reason in pc.unique(table["reason"]).to_pylist():
            kept = examples[reason]
            if len(kept) < _NUM_EXAMPLES:
                rows = table.filter(pc.equal(table["reason"], reason))
                for row in rows.slice(0, _NUM_EXAMPLES - len(kept)).to_pylist():
                    kept.append([reason, row["key"], row["detail"][:_DETAIL_LENGTH]])
    if examples:
        rows = [row for reason in sorted(examples) for row in examples[reason]]
        yield Table("set aside", {"reason": "", "for example": "", "detail": ""}, rows)
        yield Table("set aside by source", {"path": "", "samples": ","}, sorted(by_source.items()))


def _shards(manifest: Manifest) -> Table:
    """Return a row for each split."""
    rows = []
    for split in manifest.counts.packs:
        shards = [shard for shard in manifest.shards if shard.split == split]
        packs, some, tokens, size = (
            [getattr(shard, name) for shard in shards] or [0]
            for name in ("packs", "samples", "tokens", "bytes")
        )
        sums = map(sum, (packs, some, tokens, size))
        rows.append([split, len(shards), *sums, min(packs), max(packs), min(size), max(size)])
    names = (
        "shards, packs, samples, tokens, bytes, fewest packs, most packs, fewest bytes, most bytes"
    )
    return Table("shards", {"split": "", **dict.fromkeys(names.split(", "), ",")}, rows)


def _drawn(samples: Index, plan: PackPlan, prefix: str) -> list[dict[str, Any]]:
    """Return some packs, evenly over all, with the names of their samples."""
    chosen = np.linspace(0, plan.num_packs - 1, min(_NUM_DRAWN, plan.num_packs))
    numbers = np.unique(chosen.astype(np.int64)).tolist()
    rows = [plan.pack(number).astype(np.int64) for number in numbers]
    named = name_samples(samples, np.concatenate(rows))
    tokens, images = (
        of_uses(samples, plan, methodcaller("array", f"num_{name}"))
        for name in ("tokens", "images")
    )
    packs, start = [], 0
    for number, ids in zip(numbers, rows, strict=True):
        places = slice(*plan.pack_offsets[number : number + 2])
        names = named.slice(start, len(ids))
        start += len(ids)
        packs.append(
            {
                "key": pack_key(number, prefix),
                "keys": names["key"].to_pylist(),
                "sources": names["source_id"].to_pylist(),
                "tokens": tokens[places].tolist(),
                "images": images[places].tolist(),
            }
        )
    return packs


#: Lower ends of the bands that packs are counted in, as shares of seq_length.
_FILL_BANDS: Final = (0.0, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
#: Factors of seq_length tried for samples that are too long.
_LONGER: Final = (2, 4)
#: Samples whose packing in small buffers is tried, and the sizes of the buffers.
_TRIED_SAMPLES: Final = 50_000
_BUFFERS: Final = (100, 1000)


def _overlong(pack: PackConfig, samples: Index, plan: PackPlan | None) -> Iterator[Figure]:
    """Yield samples with more tokens than a pack holds, and what longer sequences would save."""
    lengths = samples.array("num_tokens")

    def longest(factor: int) -> int:
        """Return the longest sample that fits a sequence of `factor` times the length, padded."""
        return factor * pack.seq_length // pack.padding * pack.padding

    if plan is None:
        lengths = lengths[lengths > longest(1)]
    else:
        codes = [i for i, name in enumerate(plan.info.reason_names) if name == OVER_SEQ_LENGTH]
        lengths = lengths[plan.set_aside_ids[np.isin(plan.set_aside_reasons, codes)]]
    if not len(lengths):
        return
    tokens = int(lengths.sum(dtype=np.int64))
    text = f"{len(lengths):,} with {tokens:,} tokens; the longest has {lengths.max():,}"
    yield Row("too long for a sequence", "samples", text, len(lengths))
    rows = []
    for factor in _LONGER:
        some = lengths[lengths <= longest(factor)]
        saved = int(some.sum(dtype=np.int64))
        rows.append([factor * pack.seq_length, len(some), saved, saved / tokens])
    columns = {"with seq_length": ",", "samples kept": ",", "tokens": ",", "of what is lost": ".1%"}
    yield Table("too long for a sequence", columns, rows)


def _packs(
    config: PackingConfig, samples: Index, plan: PackPlan, table: PackColumns
) -> Iterator[Figure]:
    """Yield packs by fill, and work per pack. The plan has one pack at least."""

    def sums(column: str, dtype: type = np.int64, power: int = 1) -> npt.NDArray[Any]:
        def values(index: Index) -> npt.NDArray[Any]:
            return index.array(column).astype(dtype, copy=False) ** power

        each = of_uses(samples, plan, values)
        return np.add.reduceat(each, plan.pack_offsets[:-1], dtype=dtype)

    tokens, seq_length = sums("num_tokens"), plan.info.seq_length
    ends = np.ceil(np.array(_FILL_BANDS) * seq_length).astype(np.int64) - 1
    edges = np.unique([0, *ends[1:], seq_length])
    counts = np.histogram(tokens, edges + 1)[0]
    first = int(np.flatnonzero(counts)[0])
    yield Bars("packs by tokens", edges[first:].tolist(), counts[first:].tolist())
    values = {
        "tokens": tokens,
        "sum of squared lengths, as attention costs": sums("num_tokens", np.float64, 2),
        "vision patches": sums("num_vision_patches"),
        "images": sums("num_images"),
        "samples": np.diff(plan.pack_offsets),
        f"10⁹ forward operations of {model_cost(config.model).name}": table.cost / 1e9,
    }
    spreads = {name: spread(some) for name, some in values.items()}
    columns = ("mean", "min", "p5", "p50", "p95", "max")
    rows = [
        [name, *(of[c] for c in columns), of["max"] / of["p50"] if of["p50"] else None]
        for name, of in spreads.items()
        if of["max"]
    ]
    forms = {"a pack has": "", **dict.fromkeys(columns, ",.0f"), "max / p50": ".2f"}
    note = "Ranks wait for the one with the most expensive pack."
    yield Table("work per pack", forms, rows, note)


def _online(pack: PackConfig, samples: Index, plan: PackPlan) -> Iterator[Row]:
    """Yield the fill that first-fit-decreasing reaches on buffers of some samples in random
    order."""
    from offline_packing.planner.strategies.peers.placing import first_fit_decreasing

    ids = plan.sample_ids
    rng = np.random.default_rng(pack.seed)
    drawn = rng.permutation(rng.choice(len(ids), min(len(ids), _TRIED_SAMPLES), replace=False))
    lengths = samples.array("num_tokens")[ids[drawn]]
    counted = -(-lengths // pack.padding) * pack.padding
    for size in _BUFFERS:
        buffers = (counted[start : start + size] for start in range(0, len(counted), size))
        plans = [first_fit_decreasing(buffer, pack.seq_length) for buffer in buffers]
        num_packs = sum(len(made.pack_offsets) - 1 for made in plans)
        fill = int(lengths.sum(dtype=np.int64)) / (num_packs * pack.seq_length)
        note = f"first-fit-decreasing while training, tried on {len(lengths):,} samples"
        yield Row("saving", f"fill by buffers of {size:,}", f"{fill:.2%}", fill, note)
