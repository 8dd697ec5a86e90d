"""retry: bring an output to completion, or back to what was written."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offline_packing.errors import StageError
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.shard_layout import Shard
from offline_packing.layouts.shard_tasks import ShardTask
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan, restore_plan
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.manifest import (
    Manifest,
    finish_layout,
    read_manifest,
)
from offline_packing.runs.run import Run
from offline_packing.runs.shards import iterate_tasks, plan_shards
from offline_packing.storage.files import read_json, to_json, write_atomically
from offline_packing.verify.damage import (
    Damage,
    expected_started,
    find_metadata_damage,
    find_stage_damage,
)
from offline_packing.verify.shard import find_damage
from offline_packing.write.write import write


@dataclass(frozen=True)
class RepairTask:
    """One shard and its line in the manifest."""

    shard: ShardTask
    expected: Mapping[str, Any]

    @property
    def number(self) -> int:
        """What tells the task from the others."""
        return self.shard.number


def retry(run: Run) -> str:
    """Go on where a run ended; in a complete output, write again what is missing or damaged of
    shards, plan and metadata, to the same bytes. All else stays as it is.

    The source is needed for shards only.

    Returns:
        What was done, as text.

    Raises:
        StageError: something is damaged that only measuring again can repair, or the source does
            not give the same bytes any more.
    """
    manifest = read_manifest(run)
    if manifest is None:
        samples = measure(run)
        shards = write(run, samples, plan(run, samples))["shards"]
        return f"{len(shards):,} shards are complete"
    files: list[str] = []
    written: list[str] = []
    with run.unpacked_files():
        damage = find_stage_damage(run, manifest)
        left = [one for one in damage if not one.is_repairable]
        if all(one.is_aside for one in left):  # without the index neither can be made again
            repairable = [one for one in damage if one.is_repairable]
            _repair_plan(run, manifest, repairable)
            files += [one.name for one in repairable]
            written += _repair_shards(run, manifest)
    files += _repair_metadata(run, manifest)
    if left:
        raise StageError(f"{run.workspace.root}: {left[0]}; what else could be repaired is")
    others = f"; and {', '.join(files)}" if files else ""
    return (
        f"wrote {len(written):,} damaged shards again: {', '.join(sorted(written)) or 'none'}"
        f"{others}"
    )


def _repair_plan(run: Run, manifest: Manifest, damage: Sequence[Damage]) -> None:
    """Make the plan again, and what says which layout it was written in."""
    started = run.workspace.started
    if any(run.workspace.root / one.name != started for one in damage):
        restore_plan(run, open_index(run), manifest["plan"])
    if damage:
        content = expected_started(run, manifest, read_json(run.workspace.plan_info)["hash"])
        run.workspace.write.mkdir(exist_ok=True)
        write_atomically(started, content)


def _repair_metadata(run: Run, manifest: Manifest) -> list[str]:
    """Names of the layout's files that were damaged."""
    damage = find_metadata_damage(run, manifest)
    if damage:
        LAYOUTS[manifest["layout"]].check_ready()
        now = finish_layout(run, manifest)
        if now != manifest:  # by another version of Energon
            write_atomically(run.workspace.manifest, to_json(now))
    return [one.name for one in damage]


def _repair_shards(run: Run, manifest: Manifest) -> list[str]:
    """Names of the shards that had to be written again."""
    samples, packs = open_index(run), open_plan(run).packs
    for left_by_kill in run.workspace.write.glob("*.repair"):
        shutil.rmtree(left_by_kill)
    shards = plan_shards(run, samples, packs)
    layout = LAYOUTS[run.config.output.layout]
    lines = {line["name"]: line for line in manifest["shards"]}

    def tasks(some: Sequence[Shard], *, with_sources: bool) -> Iterator[RepairTask]:
        for task in iterate_tasks(run, samples, packs, some, with_sources=with_sources):
            yield RepairTask(task, lines[layout.shard_file(task.shard.name)])

    checked = run.engine.run(is_damaged, tasks(shards, with_sources=False))
    numbers = {number for number, damaged in checked if damaged}
    damaged = [shard for shard in shards if shard.number in numbers]
    return list(run.engine.run(repair_shard, tasks(damaged, with_sources=True)))


def is_damaged(task: RepairTask) -> tuple[int, bool]:
    """Number of a shard, and whether it or its fragment is missing or damaged."""
    return task.number, bool(find_damage(task.shard, task.expected))


def repair_shard(task: RepairTask) -> str:
    """Write a shard again; returns its name.

    It is written elsewhere first, and its hash, not the times of the source's files, says whether
    it is what it was: a JSONL file may have grown since, or the source may have moved.

    Raises:
        StageError: the source does not give the same bytes any more.
    """
    shard = task.shard
    scratch = shard.fragment_path.with_suffix(".repair")
    scratch.mkdir()
    try:
        with shard.rows_at_hand():
            fragment = LAYOUTS[shard.layout].write(
                replace(shard, folder=scratch, check_times=False)
            )
        if fragment.xxh3_128 != task.expected["xxh3_128"]:
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
