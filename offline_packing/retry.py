"""retry: bring an output to completion, or back to what was written."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from offline_packing.append import append
from offline_packing.errors import StageError
from offline_packing.layouts import LAYOUTS
from offline_packing.manifest import (
    Manifest,
    earlier_shards,
    finish_layout,
    read_manifest,
    stages_of_manifest,
)
from offline_packing.measure import measure
from offline_packing.plan_stage import plan
from offline_packing.shard_layout import plan_shards
from offline_packing.shard_tasks import ShardTask, iterate_tasks
from offline_packing.stage import Stage
from offline_packing.status import num_appends
from offline_packing.write import open_plan, write


@dataclass(frozen=True)
class RepairTask:
    """One shard and its line in the manifest."""

    shard: ShardTask
    expected: Mapping[str, Any]

    @property
    def number(self) -> int:
        """What tells the task from the others."""
        return self.shard.number


def retry(stage: Stage) -> str:
    """Go on where a run ended; in a complete output, write those shards again that are missing or
    damaged, from the same source to the same bytes. All others stay as they are.

    Returns:
        What was done, as text.
    """
    manifest = read_manifest(stage)
    if manifest is None:
        measure(stage)
        plan(stage)
        return f"{len(write(stage)['shards']):,} shards are complete"
    if num_appends(stage.workspace) > len(manifest["appended"]):
        return f"{len(append(stage)['shards']):,} shards are complete"
    with stage.unpacked_files():
        written = [
            name for own in stages_of_manifest(stage, manifest) for name in _repair(own, manifest)
        ]
    finish_layout(stage, manifest)
    return f"wrote {len(written):,} damaged shards again: {', '.join(sorted(written)) or 'none'}"


def _repair(stage: Stage, manifest: Manifest) -> list[str]:
    """Names of the shards of one generation that had to be written again."""
    samples, packs, _ = open_plan(stage)
    for left_by_kill in stage.workspace.write.glob("*.repair"):
        shutil.rmtree(left_by_kill)
    shards = plan_shards(stage.config.output, samples, packs, earlier_shards(stage))
    layout = LAYOUTS[stage.config.output.layout]
    lines = {line["name"]: line for line in manifest["shards"]}
    tasks = (
        RepairTask(task, lines[layout.shard_file(task.shard.name)])
        for task in iterate_tasks(stage, samples, packs, shards)
    )
    return [name for name in stage.engine.run(repair_shard, tasks) if name is not None]


def repair_shard(task: RepairTask) -> str | None:
    """Write a shard again if it is damaged; returns its name if so.

    It is written elsewhere first, and its hash, not the times of the source's files, says whether
    it is what it was: a JSONL file may have grown since, or the source may have moved.

    Raises:
        StageError: the source does not give the same bytes any more.
    """
    shard = task.shard
    layout = LAYOUTS[shard.layout]
    expected = task.expected["xxh3_128"]
    if shard.fragment_path.exists() and not layout.find_damage(shard, expected):
        return None
    scratch = shard.fragment_path.with_suffix(".repair")
    scratch.mkdir()
    try:
        with shard.rows_at_hand():
            fragment = layout.write(replace(shard, folder=scratch, check_times=False))
        if fragment.xxh3_128 != expected:
            raise StageError(
                f"{fragment.name} cannot be written as it was: the source changed; pack it again "
                "with another output.path"
            )
        for path in sorted(scratch.rglob("*")):
            target = shard.folder / path.relative_to(scratch)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                path.replace(target)
        fragment.save(shard.fragment_path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return fragment.name
