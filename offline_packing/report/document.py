"""The report as one document: the content of report.json, from which the page is drawn. Equal
stages give equal bytes; the fields are described in docs/formats.md."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from offline_packing.index.rows import name_rows
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.report.complete_stages import CompleteStages, open_complete_stages
from offline_packing.report.pack_figures import pack_figures, saving_figures
from offline_packing.report.pack_picture import choose_packs, padded_rows
from offline_packing.report.sample_figures import (
    SOURCE_SUMS,
    length_figures,
    overlong_figures,
    source_sums,
)
from offline_packing.report.set_aside import SetAside, count_set_aside
from offline_packing.runs.manifest import Manifest, stored_config
from offline_packing.runs.run import Run
from offline_packing.runs.workspace import Workspace
from offline_packing.storage.files import hash_file, read_json
from task_encoders.pack_format import pack_key

REPORT_VERSION: Final = 1
#: Packs, and rows of padded batches, that are drawn.
_NUM_DRAWN: Final = 24

Document = dict[str, Any]


def build_document(run: Run) -> Document:
    """All figures of the complete stages of an output. What needs a plan is null
    without one, what needs shards is null without a manifest.

    Raises:
        StageError: not even the index is complete, or a stage was made with other settings.
    """
    stages, manifest = open_complete_stages(run)
    plan = stages.plan if stages.plan is not None and stages.plan.num_packs else None
    info = stages.samples.info
    set_aside = count_set_aside(stages)
    sources = _sources(stages, set_aside)
    num_set_aside = sum(set_aside.by_reason.values())
    return {
        "version": REPORT_VERSION,
        "task": run.config.task,
        "seq_length": run.config.pack.seq_length,
        "pad_multiple": run.config.pack.pad_multiple,
        "stages": {"measure": True, "plan": plan is not None, "write": manifest is not None},
        "made_from": made_from(run.workspace, manifest),
        "samples": {
            "found": sum(source["samples"] for source in sources),
            "packed": sum(source["packed"] for source in sources) if plan else None,
            "set_aside": num_set_aside,
        },
        "unused_images": info.num_unused_images,
        "plan": _plan(stages, plan) if plan else None,
        "saving": saving_figures(stages, plan) if plan else None,
        "lengths": length_figures(stages),
        "loss": _loss(sources),
        "packs": pack_figures(stages, plan) if plan else None,
        "sources": sources,
        "set_aside": set_aside.document(),
        "overlong": overlong_figures(stages),
        "shards": None if manifest is None else _shards(manifest),
        "drawn": _drawn(stages, plan) if plan else None,
        "origin": [{"fingerprint": info.fingerprint, "config": stored_config(run.config)}],
        "library_versions": info.versions,
    }


def made_from(workspace: Workspace, manifest: Manifest | None) -> dict[str, str | None]:
    """What identifies the stages that a report describes."""
    index, plan = workspace.index_info, read_json(workspace.plan_info) or {}
    return {
        "index": hash_file(index) if index.exists() else None,
        "plan": plan.get("hash"),
        "shards": None if manifest is None else manifest["content_hash"],
    }


def _plan(stages: CompleteStages, plan: PackPlan) -> dict[str, Any]:
    num_tokens = int(stages.packed(stages.columns["num_tokens"]).sum(dtype=np.int64))
    return {
        "strategy": plan.info.strategy,
        "packs": plan.num_packs,
        "lower_bound": plan.info.lower_bound,
        "gap": plan.gap,
        "fill": num_tokens / (plan.num_packs * plan.info.seq_length),
        "packing_factor": len(plan.sample_ids) / plan.num_packs,
    }


def _sources(stages: CompleteStages, set_aside: SetAside) -> list[dict[str, Any]]:
    """One entry per source. They sum up to `samples` of the document."""
    sums, config = source_sums(stages), stages.run.config
    total = sum(sums["tokens"]) or 1
    lines = []
    for i, (source, name) in enumerate(zip(config.source, config.source_names(), strict=True)):
        own = {name: values[i] for name, values in sums.items()}
        measured, planned = set_aside.by_source[i, False], set_aside.by_source[i, True]
        usable = own["rows"] if stages.plan is None else own["used"] + planned
        lines.append(
            {
                "name": name,
                "path": source.path,
                "format": source.format,
                "generation": 0,
                "repeat": source.repeat,
                "weight": source.weight,
                "samples": usable + measured,
                "set_aside": measured + planned,
                "packed": own["packed"],
                "times_used": own["packed"] / (own["used"] or 1),
                "bytes": own["bytes"],
                **{column: own[column] for column in SOURCE_SUMS},
                "share_of_tokens": own["tokens"] / total,
            }
        )
    return lines


def _loss(sources: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tokens = sum(source["tokens"] for source in sources)
    loss_tokens = sum(source["loss_tokens"] for source in sources)
    return {"tokens": tokens, "loss_tokens": loss_tokens, "share": loss_tokens / (tokens or 1)}


def _shards(manifest: Manifest) -> list[dict[str, Any]]:
    """One entry per split."""
    lines = []
    for split in manifest["counts"]["packs"]:
        shards = [shard for shard in manifest["shards"] if shard["split"] == split]
        sums = {name: sum(s[name] for s in shards) for name in ("packs", "samples", "tokens")}
        ranges = {
            f"{which.__name__}_{name}": which((s[name] for s in shards), default=0)
            for name in ("packs", "bytes")
            for which in (min, max)
        }
        num_bytes = sum(shard["bytes"] for shard in shards)
        lines.append({"split": split, "shards": len(shards), **sums, "bytes": num_bytes, **ranges})
    return lines


def _drawn(stages: CompleteStages, plan: PackPlan) -> dict[str, Any]:
    """Some packs with the names of their samples, and samples in padded batches."""
    config = stages.run.config
    numbers = choose_packs(plan.num_packs, _NUM_DRAWN)
    rows = [plan.pack(number).astype(np.int64) for number in numbers.tolist()]
    named = name_rows(stages.samples, np.concatenate(rows))
    lengths, images = stages.columns["num_tokens"], stages.columns["num_images"]
    packs, start = [], 0
    for number, ids in zip(numbers.tolist(), rows, strict=True):
        names = named.slice(start, len(ids))
        start += len(ids)
        packs.append(
            {
                "key": pack_key(number, config.output.key_prefix),
                "keys": names["key"].to_pylist(),
                "sources": names["source_id"].to_pylist(),
                "tokens": lengths[ids].tolist(),
                "images": images[ids].tolist(),
            }
        )
    padded = padded_rows(
        stages.packed(lengths),
        config.report.padded_batch_size,
        _NUM_DRAWN,
        config.pack.seed,
    )
    return {"packs": packs, "padded": [list(row) for row in padded]}
