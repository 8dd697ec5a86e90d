"""report: index, plan and manifest -> report.html and report.json, as far as they exist.

_packing/report/report.html    one self-contained page for people
_packing/report/report.json    the same figures; docs/formats.md describes the fields
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offline_packing.index.rows import name_samples, sums_by_source
from offline_packing.layouts.shards import samples_of_splits
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.report.complete_stages import (
    CompleteStages,
    SetAside,
    count_set_aside,
    open_complete_stages,
)
from offline_packing.report.figures import (
    length_figures,
    overlong_figures,
    pack_figures,
    saving_figures,
    slot_idle,
    split_figures,
)
from offline_packing.report.pages import render_report
from offline_packing.runs.manifest import read_manifest, stored_config
from offline_packing.runs.run import Run, Workspace
from offline_packing.runs.warnings import run_warnings
from offline_packing.storage.files import hash_file, read_json, to_json, write_atomically
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack_format import pack_key

REPORT_VERSION: Final = 1
#: Packs, and rows of padded batches, that are drawn.
_NUM_DRAWN: Final = 24
#: Columns summed up per source: columns num_NAME of the index.
_SUMS: Final = ("tokens", "loss_tokens", "images", "vision_patches", "turns")

Document = dict[str, Any]


def report(run: Run) -> str:
    """Write the report; returns what became of the samples, in one line. Raises StageError if not
    even the index is complete, or a stage was made with other settings."""
    document = _document(open_complete_stages(run))
    folder = run.workspace.report
    folder.mkdir(parents=True, exist_ok=True)
    line = _verdict(document)
    write_atomically(folder / "report.html", render_report(document, line))
    write_atomically(folder / "report.json", to_json(document))
    return line


def report_status(workspace: Workspace) -> str | None:
    """Path of the report, and whether it is up to date with the stages; None without one."""
    document = read_json(workspace.report / "report.json")
    if document is None:
        return None
    current = _made_from(workspace, read_manifest(workspace.root))
    old = "" if document["made_from"] == current else ", out of date: run report again"
    return f"{workspace.report / 'report.html'}{old}"


def _document(stages: CompleteStages) -> Document:
    """The content of report.json, from which the page is drawn. Equal stages give equal bytes. What
    needs a plan is null without one, what needs shards is null without a manifest."""
    run, plan, manifest, info = stages.run, stages.plan, stages.manifest, stages.samples.info
    config = stored_config(run.config, stages.key_prefix)
    set_aside = count_set_aside(stages)
    aside = set_aside.by_reason.total()
    sources = _sources(stages, set_aside)
    found, packed, tokens, loss_tokens = (
        sum(source[name] for source in sources)
        for name in ("samples", "packed", "tokens", "loss_tokens")
    )
    return {
        "version": REPORT_VERSION,
        "task": run.config.task,
        "seq_length": run.config.pack.seq_length,
        "pad_multiple": run.config.pack.padding,
        "stages": {"measure": True, "plan": plan is not None, "write": manifest is not None},
        "made_from": _made_from(run.workspace, manifest),
        "samples": {"found": found, "packed": packed if plan else None, "set_aside": aside},
        "unused_images": info.num_unused_images,
        **({"split_turns": info.splitting} if info.split else {}),
        "warnings": run_warnings(run.config, stages.samples, plan),
        "plan": _plan(stages, plan, tokens) if plan else None,
        "saving": saving_figures(stages, plan) if plan else None,
        "lengths": length_figures(stages),
        "loss": {
            "tokens": tokens,
            "loss_tokens": loss_tokens,
            "share": loss_tokens / (tokens or 1),
        },
        "packs": pack_figures(stages, plan) if plan else None,
        "sources": sources,
        "set_aside": set_aside.document(),
        "overlong": overlong_figures(stages),
        "shards": None if manifest is None else _shards(manifest),
        "drawn": _drawn(stages, plan) if plan else None,
        "origin": [{"fingerprint": info.fingerprint, "config": config}],
        "library_versions": info.versions,
    }


def _verdict(document: Document) -> str:
    """Describe in one line what became of the samples."""
    samples, plan = document["samples"], document["plan"]
    if plan is None:
        usable = samples["found"] - samples["set_aside"]
        return (
            f"{samples['found']:,} samples = {usable:,} measured + {samples['set_aside']:,} set "
            "aside; no packs yet: run plan"
        )
    above = (plan["slots"] or plan["packs"]) - plan["lower_bound"]
    used = samples["found"] - samples["set_aside"]
    # of several epochs, or of a source that repeats
    uses = "" if samples["packed"] == used else f", {samples['packed']:,} times in all"
    slots = f" in {plan['slots']:,} slots" if plan["slots"] else ""
    line = (
        f"{samples['found']:,} samples = {used:,} packed{uses} + "
        f"{samples['set_aside']:,} set aside; {plan['packs']:,} packs{slots}, "
        f"{above:,} above the lower bound; {plan['fill']:.2%} full"
    )
    line += f"; {document['split_turns']}" if "split_turns" in document else ""
    return line if document["stages"]["write"] else f"{line}; not written yet: run write"


def _made_from(workspace: Workspace, manifest: Manifest | None) -> dict[str, str | None]:
    """Identity of the stages that a report describes."""
    index, plan = workspace.index_info, read_json(workspace.plan_info) or {}
    return {
        "index": hash_file(index) if index.exists() else None,
        "plan": plan.get("hash"),
        "shards": None if manifest is None else manifest.content_hash,
    }


def _plan(stages: CompleteStages, plan: PackPlan, num_tokens: int) -> dict[str, Any]:
    return {
        "strategy": plan.info.strategy,
        "packs": plan.num_packs,
        "lower_bound": plan.info.lower_bound,
        "gap": plan.gap,
        "fill": num_tokens / plan.room,
        "packing_factor": plan.packing_factor,
        "slots": None if plan.cp_sizes is None else len(plan.slot_offsets) - 1,
        "idle_in_slots": slot_idle(stages, plan),
        "picture_split": split_figures(stages, plan),
        "splits": _splits(stages, plan),
    }


def _sources(stages: CompleteStages, set_aside: SetAside) -> list[dict[str, Any]]:
    """One entry per source. They add up to `samples` of the document."""
    config = stages.run.config
    columns = [f"num_{name}" for name in _SUMS]
    sums = sums_by_source(stages.samples, stages.num_uses, len(config.source), columns)
    total = sum(sums["num_tokens"]) or 1
    lines = []
    for i, (source, name) in enumerate(zip(config.source, config.source_names(), strict=True)):
        own = {name: values[i] for name, values in sums.items()}
        aside = set_aside.by_source[i, False] + set_aside.by_source[i, True]
        lines.append(
            {
                "name": name,
                "path": source.path,
                "format": source.format,
                "repeat": source.repeat,
                "weight": source.weight,
                "samples": own["used"] + aside,
                "set_aside": aside,
                "packed": own["uses"],
                "times_used": own["uses"] / (own["used"] or 1),
                "bytes": own["bytes"],
                **{name: own[f"num_{name}"] for name in _SUMS},
                "share_of_tokens": own["num_tokens"] / total,
            }
        )
    return lines


def _splits(stages: CompleteStages, plan: PackPlan) -> list[dict[str, Any]]:
    """Packs and different samples of each split; [] where there is one."""
    shares = stages.run.config.output.split
    if len(shares) == 1:
        return []
    total = len(np.unique(plan.sample_ids))
    return [
        {
            "split": name,
            "asked": shares[name],
            "share": samples / total,
            "samples": samples,
            "packs": len(own),
        }
        for name, own, samples in samples_of_splits(plan, shares)
    ]


def _shards(manifest: Manifest) -> list[dict[str, Any]]:
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


def _drawn(stages: CompleteStages, plan: PackPlan) -> dict[str, Any]:
    """Some packs, evenly over all, with the names of their samples; and samples in padded
    batches."""
    config = stages.run.config
    chosen = np.linspace(0, plan.num_packs - 1, min(_NUM_DRAWN, plan.num_packs))
    numbers = np.unique(chosen.astype(np.int64)).tolist()
    rows = [plan.pack(number).astype(np.int64) for number in numbers]
    named = name_samples(stages.samples, np.concatenate(rows))
    lengths, images = stages.columns["num_tokens"], stages.columns["num_images"]
    packs, start = [], 0
    for number, ids in zip(numbers, rows, strict=True):
        names = named.slice(start, len(ids))
        start += len(ids)
        packs.append(
            {
                "key": pack_key(number, stages.key_prefix or ""),
                "keys": names["key"].to_pylist(),
                "sources": names["source_id"].to_pylist(),
                "tokens": lengths[ids].tolist(),
                "images": images[ids].tolist(),
            }
        )
    batch_size, seed = config.report.padded_batch_size, config.pack.seed
    return {"packs": packs, "padded": _padded_rows(stages.packed(lengths), batch_size, seed)}


def _padded_rows(lengths: npt.NDArray[np.integer], batch_size: int, seed: int) -> list[list[int]]:
    """[tokens, padded to] of samples in random batches: whole batches, about as many rows as packs
    are drawn. `lengths` (num_packed,) has one sample at least."""
    wanted = min(len(lengths), -(-_NUM_DRAWN // batch_size) * batch_size)
    chosen = np.random.default_rng(seed).choice(len(lengths), wanted, replace=False)
    batches = (lengths[chosen[i : i + batch_size]].tolist() for i in range(0, wanted, batch_size))
    return [[length, max(batch)] for batch in batches for length in batch]
