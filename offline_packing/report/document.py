"""The report as one document: what report.json holds, and the page is drawn from. Equal stages
give equal bytes; the fields are described in docs/formats.md."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from offline_packing.index.rows import name_rows
from offline_packing.report.complete_stages import CompleteStages, open_complete_stages
from offline_packing.report.pack_figures import pack_figures, saving_figures
from offline_packing.report.pack_rows import choose_packs, padded_rows
from offline_packing.report.sample_figures import length_figures, overlong_figures, source_sums
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
    """All figures of an output, as far as its stages are complete. What needs a plan is null
    without one, what needs shards is null without a manifest.

    Raises:
        StageError: not even the index is complete, or a stage was made otherwise.
    """
    stages, manifest = open_complete_stages(run)
    generations = [stages]
    planned = all(g.plan is not None and g.plan.num_packs > 0 for g in generations)
    set_aside = count_set_aside(generations)
    sources = _sources(generations, set_aside)
    usable = sum(source["packed"] for source in sources)  # without a plan: all that was measured
    num_set_aside = sum(set_aside.by_reason.values())
    return {
        "version": REPORT_VERSION,
        "task": run.config.task,
        "seq_length": run.config.pack.seq_length,
        "pad_multiple": run.config.pack.pad_multiple,
        "stages": {"measure": True, "plan": planned, "write": manifest is not None},
        "made_from": made_from(run.workspace, manifest),
        "samples": {
            "found": usable + num_set_aside,
            "packed": usable if planned else None,
            "set_aside": num_set_aside,
        },
        "unused_images": sum(g.samples.info.num_unused_images for g in generations),
        "plan": _plan(generations) if planned else None,
        "saving": saving_figures(generations) if planned else None,
        "lengths": length_figures(generations),
        "loss": _loss(sources),
        "packs": pack_figures(generations) if planned else None,
        "sources": sources,
        "set_aside": set_aside.document(),
        "overlong": overlong_figures(generations),
        "shards": None if manifest is None else _shards(manifest),
        "drawn": _drawn(generations[0]) if planned else None,
        "origin": [
            {
                "fingerprint": g.samples.info.fingerprint,
                "config": stored_config(g.run.config),
            }
            for g in generations
        ],
        "library_versions": generations[0].samples.info.versions,
    }


def made_from(workspace: Workspace, manifest: Manifest | None) -> dict[str, str | None]:
    """What identifies the stages that a report tells of."""
    index, plan = workspace.index_info, read_json(workspace.plan_info) or {}
    return {
        "index": hash_file(index) if index.exists() else None,
        "plan": plan.get("hash"),
        "shards": None if manifest is None else manifest["content_hash"],
    }


def _plan(generations: Sequence[CompleteStages]) -> dict[str, Any]:
    plans = [g.plan for g in generations if g.plan is not None]
    num_packs = sum(plan.num_packs for plan in plans)
    lower_bound = sum(plan.info.lower_bound for plan in plans)
    num_samples = sum(len(plan.sample_ids) for plan in plans)
    num_tokens = sum(
        int(g.columns["num_tokens"][g.is_packed].sum(dtype=np.int64)) for g in generations
    )
    return {
        "strategy": plans[0].info.strategy,
        "packs": num_packs,
        "lower_bound": lower_bound,
        "gap": num_packs / lower_bound - 1,
        "fill": num_tokens / (num_packs * plans[0].info.seq_length),
        "packing_factor": num_samples / num_packs,
    }


def _sources(generations: Sequence[CompleteStages], set_aside: SetAside) -> list[dict[str, Any]]:
    """One entry per source. They sum up to `samples` of the document."""
    lines: list[dict[str, Any]] = []
    for generation, aside in zip(generations, set_aside.by_source, strict=True):
        sums = source_sums(generation)
        prefixes = generation.run.config.key_prefixes()
        for i, source in enumerate(generation.run.config.source):
            measured, planned = aside[i, False], aside[i, True]
            own = {name: values[i] for name, values in sums.items()}
            usable = own.pop("rows") if generation.plan is None else own["packed"] + planned
            lines.append(
                {
                    "name": prefixes[i].rstrip("/") or source.path.rstrip("/").rpartition("/")[2],
                    "path": source.path,
                    "format": source.format,
                    "generation": 0,
                    "repeat": source.repeat,
                    "weight": source.weight,
                    "samples": usable + measured,
                    "set_aside": measured + planned,
                    **{name: value for name, value in own.items() if name != "rows"},
                }
            )
    total = sum(line["tokens"] for line in lines)
    return [{**line, "share_of_tokens": line["tokens"] / (total or 1)} for line in lines]


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


def _drawn(generation: CompleteStages) -> dict[str, Any]:
    """Some packs with the names of their samples, and samples in padded batches."""
    plan, config = generation.plan, generation.run.config
    assert plan is not None
    numbers = choose_packs(plan.num_packs, _NUM_DRAWN)
    rows = [plan.pack(number).astype(np.int64) for number in numbers.tolist()]
    named = name_rows(generation.samples, np.concatenate(rows))
    lengths, images = generation.columns["num_tokens"], generation.columns["num_images"]
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
        lengths[generation.is_packed],
        config.report.padded_batch_size,
        _NUM_DRAWN,
        config.pack.seed,
    )
    return {"packs": packs, "padded": [list(row) for row in padded]}
