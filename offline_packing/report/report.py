"""report: index, plan and manifest -> report.html and report.json, as far as they exist.

_packing/report/report.html    one self-contained page for people
_packing/report/report.json    the same figures
"""

from collections import defaultdict
from operator import methodcaller
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import PackConfig
from offline_packing.index.rows import name_samples, of_uses, pack_table
from offline_packing.index.set_aside import read_set_aside
from offline_packing.index.table import Index
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.planner.samples import OVER_SEQ_LENGTH
from offline_packing.report.pages import render_report
from offline_packing.runs.artifacts import check_layout, key_prefix, open_index, open_plan
from offline_packing.runs.figures import Figures, count_uses, run_figures
from offline_packing.runs.manifest import read_manifest, stored_config
from offline_packing.runs.run import Run, Workspace
from offline_packing.runs.set_aside import aside_while_measuring, aside_while_planning
from offline_packing.storage.files import hash_file, read_json, to_json, write_atomically
from task_encoders.families import model_cost
from task_encoders.packs.manifest import Manifest, PackColumns
from task_encoders.packs.pack_format import pack_key
from task_encoders.samples import REASONS

REPORT_VERSION: Final = 1
#: Packs, and rows of padded batches, that are drawn.
_NUM_DRAWN: Final = 24
#: Examples kept of each reason, and the text that is kept of an example's detail.
_NUM_EXAMPLES: Final = 5
_DETAIL_LENGTH: Final = 200

Examples = defaultdict[str, list[dict[str, str]]]


def report(run: Run) -> str:
    """Write the report; returns the numbers of packed and other samples in one line. Raises
    StageError if not even the index is complete, or a stage was made with other settings."""
    document = _document(run)
    folder = run.workspace.report
    folder.mkdir(parents=True, exist_ok=True)
    line = _verdict(document)
    write_atomically(folder / "report.html", render_report(document, line))
    write_atomically(folder / "report.json", to_json(document))
    return line


def report_status(workspace: Workspace) -> str | None:
    """Path of the report, and whether it is up to date with the stages; None without one."""
    document = read_json(workspace.report / "report.json", "run report again")
    if document is None:
        return None
    current = _made_from(workspace, read_manifest(workspace.root))
    old = "" if document.get("made_from") == current else ", out of date: run report again"
    return f"{workspace.report / 'report.html'}{old}"


def _document(run: Run) -> Figures:
    """The content of report.json, from which the page is drawn. Equal stages give equal bytes.
    Figures of a plan are null without one, figures of shards without a manifest."""
    config, workspace = run.config, run.workspace
    manifest, samples = read_manifest(workspace.root), open_index(run)
    stored = open_plan(run) if workspace.plan_info.exists() else None
    if stored is not None and manifest is not None:
        check_layout(run, stored.hash)
    prefix = key_prefix(run, stored.hash) if stored else None
    plan = stored.packs if stored else None
    table = pack_table(samples, plan, model_cost(config.model)) if plan else None
    found = run_figures(config, samples, plan, stored.set_aside if stored else {}, table)
    tables = aside_while_measuring(workspace, samples.info)
    tables += aside_while_planning(workspace) if stored else []
    by_source, examples = _set_aside(config, tables)
    for source, count in zip(found["sources"], by_source.tolist(), strict=True):
        source["set_aside"] = count
    for entry in found["set_aside"]:
        entry["explanation"] = REASONS[entry["reason"]]
        entry["examples"] = examples[entry["reason"]]
    return {
        **found,
        "version": REPORT_VERSION,
        "stages": {"measure": True, "plan": plan is not None, "write": manifest is not None},
        "made_from": _made_from(workspace, manifest),
        "lengths": length_figures(config.pack, samples),
        "packs": pack_figures(config, samples, plan, table) if plan and table else None,
        "online": online_figures(config.pack, samples, plan) if plan else None,
        "overlong": overlong_figures(config.pack, samples, plan),
        "shards": None if manifest is None else _shards(manifest),
        "drawn": _drawn(config, samples, plan, prefix or "") if plan else None,
        "fingerprint": samples.info.fingerprint,
        "config": stored_config(config, prefix),
        "library_versions": samples.info.versions,
    }


def _verdict(document: Figures) -> str:
    """Describe in one line what became of the samples."""
    samples, plan = document["samples"], document["plan"]
    if plan is None:
        usable = samples["found"] - samples["set_aside"]
        return (
            f"{samples['found']:,} samples = {usable:,} measured + {samples['set_aside']:,} set "
            "aside; no packs yet: run plan"
        )
    above = plan["packs"] - plan["lower_bound"]
    used = samples["found"] - samples["set_aside"]
    # of several epochs, or of a source that repeats
    uses = "" if plan["samples"] == used else f", {plan['samples']:,} times in all"
    line = (
        f"{samples['found']:,} samples = {used:,} packed{uses} + "
        f"{samples['set_aside']:,} set aside; {plan['packs']:,} packs, "
        f"{above:,} above the lower bound; {plan['fill']:.2%} full"
    )
    line += f"; {document['split_turns']}" if document["split_turns"] else ""
    return line if document["stages"]["write"] else f"{line}; not written yet: run write"


def _made_from(workspace: Workspace, manifest: Manifest | None) -> dict[str, str | None]:
    """Identity of the stages that a report describes."""
    index, plan = workspace.index_info, workspace.read_plan() or {}
    return {
        "index": hash_file(index) if index.exists() else None,
        "plan": plan.get("hash"),
        "shards": None if manifest is None else manifest.content_hash,
    }


def _set_aside(config: PackingConfig, paths: list[Path]) -> tuple[npt.NDArray[np.int64], Examples]:
    """Samples set aside of each source (num_sources,), and some of each reason, from their tables,
    which are read one batch of rows at a time."""
    by_source, examples = np.zeros(len(config.source), np.int64), Examples(list)
    for table in read_set_aside(paths):
        by_source += np.bincount(_source_numbers(table, config), minlength=len(by_source))
        for reason in pc.unique(table["reason"]).to_pylist():
            kept = examples[reason]
            if len(kept) < _NUM_EXAMPLES:
                rows = table.filter(pc.equal(table["reason"], reason)).drop(["reason"])
                for row in rows.slice(0, _NUM_EXAMPLES - len(kept)).to_pylist():
                    kept.append({**row, "detail": row["detail"][:_DETAIL_LENGTH]})
    return by_source, examples


def _source_numbers(table: pa.Table, config: PackingConfig) -> npt.NDArray[np.int32]:
    """(num_rows,) the number of each row's source."""
    numbers = np.zeros(len(table), np.int32)
    prefixes = list(enumerate(zip(config.source, config.key_prefixes(), strict=True)))
    # The longest prefix that fits decides among sources with one path: it comes last.
    for number, (source, prefix) in sorted(prefixes, key=lambda item: len(item[1][1])):
        own = pc.and_(
            pc.equal(table["source"], source.path), pc.starts_with(table["key"], pattern=prefix)
        )
        numbers[own.to_numpy()] = number
    return numbers


def _shards(manifest: Manifest) -> list[Figures]:
    """One entry per split."""
    lines = []
    for split in manifest.counts.packs:
        shards = [shard for shard in manifest.shards if shard.split == split]
        names = ("packs", "samples", "tokens", "bytes")
        line = {"split": split, "shards": len(shards)}
        line |= {name: sum(getattr(shard, name) for shard in shards) for name in names}
        for name in ("packs", "bytes"):
            line[f"min_{name}"] = min((getattr(shard, name) for shard in shards), default=0)
            line[f"max_{name}"] = max((getattr(shard, name) for shard in shards), default=0)
        lines.append(line)
    return lines


def _drawn(config: PackingConfig, samples: Index, plan: PackPlan, prefix: str) -> Figures:
    """Some packs, evenly over all, with the names of their samples; and samples in padded
    batches."""
    chosen = np.linspace(0, plan.num_packs - 1, min(_NUM_DRAWN, plan.num_packs))
    numbers = np.unique(chosen.astype(np.int64)).tolist()
    rows = [plan.pack(number).astype(np.int64) for number in numbers]
    named = name_samples(samples, np.concatenate(rows))
    lengths = samples.array("num_tokens")
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
    packed = np.repeat(lengths, count_uses(samples, plan))
    padded = _padded_rows(packed, config.report.padded_batch_size, config.pack.seed)
    return {"packs": packs, "padded": padded}


def _padded_rows(lengths: npt.NDArray[np.integer], batch_size: int, seed: int) -> list[list[int]]:
    """[tokens, padded to] of about `_NUM_DRAWN` samples in random whole batches. `lengths`
    (num_packed,) has at least one sample."""
    wanted = min(len(lengths), -(-_NUM_DRAWN // batch_size) * batch_size)
    chosen = np.random.default_rng(seed).choice(len(lengths), wanted, replace=False)
    batches = (lengths[chosen[i : i + batch_size]].tolist() for i in range(0, wanted, batch_size))
    return [[length, max(batch)] for batch in batches for length in batch]


#: Lower ends of the bands that packs are counted in, as shares of seq_length.
_FILL_BANDS: Final = (1.0, 0.999, 0.99, 0.95, 0.9, 0.75, 0.5, 0.0)
#: Factors of seq_length tried for samples that are too long.
_LONGER: Final = (2, 4)
#: Samples whose packing in small buffers is tried, and the sizes of the buffers.
_TRIED_SAMPLES: Final = 50_000
_BUFFERS: Final = (100, 1000)
#: Bins of a logarithmic histogram per doubling, and of one of equal width.
_BINS_PER_DOUBLING: Final = 4
_MAX_BINS: Final = 40
_QUANTILES: Final = {"min": 0, "p5": 5, "p50": 50, "p95": 95, "max": 100}


def length_figures(pack: PackConfig, samples: Index) -> dict[str, Any] | None:
    """Lengths in tokens of all measured samples; None without any."""
    lengths = samples.array("num_tokens")
    if not len(lengths):
        return None
    return {**spread(lengths), **log_histogram(lengths, pack.seq_length)}


def overlong_figures(pack: PackConfig, samples: Index, plan: PackPlan | None) -> dict[str, Any]:
    """Samples with more tokens than a pack holds, and what longer sequences would save."""
    lengths = samples.array("num_tokens")

    def longest(factor: int) -> int:
        """Longest sample that such a sequence holds when it is padded to the multiple."""
        return factor * pack.seq_length // pack.padding * pack.padding

    if plan is None:
        lengths = lengths[lengths > longest(1)]
    else:
        codes = [i for i, name in enumerate(plan.info.reason_names) if name == OVER_SEQ_LENGTH]
        lengths = lengths[plan.set_aside_ids[np.isin(plan.set_aside_reasons, codes)]]
    saved = {factor: lengths[lengths <= longest(factor)] for factor in _LONGER}
    return {
        "samples": len(lengths),
        "tokens": int(lengths.sum(dtype=np.int64)),
        "longest": int(lengths.max(initial=0)),
        "saved_by": [
            {
                "seq_length": factor * pack.seq_length,
                "samples": len(some),
                "tokens": int(some.sum(dtype=np.int64)),
            }
            for factor, some in saved.items()
        ],
    }


def pack_figures(
    config: PackingConfig, samples: Index, plan: PackPlan, table: PackColumns
) -> dict[str, Any]:
    """Fill, samples and cost per pack. The plan has one pack at least."""

    def sums(column: str, kind: type = np.int64, power: int = 1) -> npt.NDArray[Any]:
        def values(index: Index) -> npt.NDArray[Any]:
            return index.array(column).astype(kind, copy=False) ** power

        each = of_uses(samples, plan, values)
        return np.add.reduceat(each, plan.pack_offsets[:-1], dtype=kind)

    num_samples, tokens = np.diff(plan.pack_offsets), sums("num_tokens")
    at_least = [int((tokens >= share * plan.info.seq_length).sum()) for share in _FILL_BANDS]
    bands = zip(_FILL_BANDS, np.diff(at_least, prepend=0).tolist(), strict=True)
    values = {
        "tokens": tokens,
        "attention": sums("num_tokens", np.float64, 2),
        "vision_patches": sums("num_vision_patches"),
        "images": sums("num_images"),
        "samples": num_samples,
        "operations": table.cost,
    }
    return {
        "fill_bands": [{"at_least": share, "packs": count} for share, count in bands],
        "samples_per_pack": linear_histogram(num_samples),
        "spread": {name: spread(some) for name, some in values.items()},
        "cost_of": model_cost(config.model).name,
    }


def online_figures(pack: PackConfig, samples: Index, plan: PackPlan) -> list[dict[str, Any]]:
    """Fill that first-fit-decreasing reaches on buffers of some samples in random order."""
    from offline_packing.planner.strategies.peers.placing import first_fit_decreasing

    ids = plan.sample_ids
    rng = np.random.default_rng(pack.seed)
    drawn = rng.permutation(rng.choice(len(ids), min(len(ids), _TRIED_SAMPLES), replace=False))
    lengths = samples.array("num_tokens")[ids[drawn]]
    counted = -(-lengths // pack.padding) * pack.padding
    figures = []
    for size in _BUFFERS:
        buffers = (counted[start : start + size] for start in range(0, len(counted), size))
        plans = [first_fit_decreasing(buffer, pack.seq_length) for buffer in buffers]
        num_packs = sum(len(made.pack_offsets) - 1 for made in plans)
        fill = int(lengths.sum(dtype=np.int64)) / (num_packs * pack.seq_length)
        figures.append({"buffer": size, "samples": len(lengths), "fill": fill})
    return figures


def spread(values: npt.NDArray[Any]) -> dict[str, float | int]:
    """mean, min, p5, p50, p95 and max; quantiles are values that occur. Not for empty arrays."""
    points = np.percentile(values, list(_QUANTILES.values()), method="inverted_cdf")
    quantiles = {name: p.item() for name, p in zip(_QUANTILES, points, strict=True)}
    return {"mean": float(values.mean(dtype=np.float64)), **quantiles}


def linear_histogram(values: npt.NDArray[np.integer]) -> dict[str, list[int]]:
    """edges (n + 1) and counts (n) of at most 40 bins of equal width, from the smallest value on;
    bin i holds edges[i] <= value < edges[i + 1]. Not for empty arrays."""
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // _MAX_BINS)
    counts = np.bincount((values - low) // width)
    return {"edges": (low + width * np.arange(len(counts) + 1)).tolist(), "counts": counts.tolist()}


def log_histogram(values: npt.NDArray[np.integer], limit: int) -> dict[str, list[int]]:
    """edges (n + 1) and counts (n) of positive integers, from the first bin that holds anything to
    the last, in bins that do not depend on the data: edges 0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14,
    16, 20, ..., and `limit`; bin i holds edges[i] < value <= edges[i + 1]. Not for empty arrays."""
    steps = 2.0 ** (np.arange(32 * _BINS_PER_DOUBLING) / _BINS_PER_DOUBLING)
    edges = np.union1d(np.ceil(steps).astype(np.int64), [0, limit])
    counts = np.histogram(values, edges + 1)[0]
    used = np.flatnonzero(counts)
    bins = slice(used[0], used[-1] + 1)
    return {"edges": edges[bins.start : bins.stop + 1].tolist(), "counts": counts[bins].tolist()}
