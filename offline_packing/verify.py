"""verify: re-read what was written and compare it with the plan; `deep`: also with the source.

shards      there, with the hash they were written with; .tar.idx; the layout's own counts
packs       the planned keys, within seq_length
samples     each one in exactly one pack or set aside, with its measured length
deep        same turns and media bytes as the source; re-encoded from the pack's own bytes, as many
            tokens as measured
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from offline_packing.files import read_json
from offline_packing.index import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.manifest import (
    Manifest,
    earlier_shards,
    read_manifest,
    require_manifest,
    stages_of_manifest,
)
from offline_packing.pack_plan import PackPlan
from offline_packing.shard_layout import Shard, plan_shards
from offline_packing.shard_tasks import iterate_tasks
from offline_packing.stage import Stage
from offline_packing.verify_shard import ShardReport, VerifyTask, verify_shard
from offline_packing.write import check_layout, layout_fingerprint, open_plan


@dataclass(frozen=True)
class VerifyResult:
    """What `verify` found. `ok` is the answer."""

    num_shards: int
    num_packs: int
    num_samples: int
    num_set_aside: int
    #: compared with the source, and encoded again; 0 unless deep
    num_images: int
    num_videos: int
    num_tokens: int
    num_problems: int
    #: the first of them
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it should be."""
        return self.num_problems == 0


def verify(stage: Stage, *, deep: bool = False) -> VerifyResult:
    """Check the packed dataset, what was appended to it included.

    Args:
        deep: also compare with the source, and encode every sample again.

    Raises:
        StageError: there is no complete dataset to check, or the source cannot be read.
    """
    manifest = _require_complete(stage)
    total = ShardReport()
    num_set_aside = 0
    with stage.unpacked_files():
        for own in stages_of_manifest(stage, manifest):
            num_set_aside += _verify_generation(own, manifest, deep, total)
    counts = manifest["counts"]
    if counts["samples"] != counts["packed"] + num_set_aside:
        total.problem(
            f"manifest.json: {counts['samples']} samples are not {counts['packed']} packed + "
            f"{num_set_aside} set aside"
        )
    return VerifyResult(
        num_shards=len(manifest["shards"]),
        num_packs=total.num_packs,
        num_samples=total.num_samples,
        num_set_aside=num_set_aside,
        num_images=total.num_images,
        num_videos=total.num_videos,
        num_tokens=total.num_tokens,
        num_problems=total.num_problems,
        problems=tuple(total.problems),
    )


def preview_verify(stage: Stage) -> str:
    """What `verify` would check. Raises StageError as `verify`."""
    counts = _require_complete(stage)["counts"]
    packs = sum(counts["packs"].values())
    return f"would check {counts['packed']:,} samples in {packs:,} packs"


def _require_complete(stage: Stage) -> Manifest:
    manifest = read_manifest(stage)
    if manifest is None:
        open_plan(stage)  # where an earlier stage is missing, this says which
        return require_manifest(stage)
    return manifest


def render_result(result: VerifyResult, *, deep: bool) -> str:
    """The result as a table, problems below."""
    deep_lines = [
        f"{'images':<16}{result.num_images:,}, bytes compared with the source",
        *([f"{'videos':<16}{result.num_videos:,}, likewise"] if result.num_videos else []),
        f"{'tokens':<16}{result.num_tokens:,}, encoded again",
    ]
    lines = [
        f"{'shards':<16}{result.num_shards:,}, bytes compared with their hash",
        f"{'packs':<16}{result.num_packs:,}",
        f"{'samples':<16}{result.num_samples:,} packed, {result.num_set_aside:,} set aside",
        *(deep_lines if deep else []),
        f"{'problems':<16}{result.num_problems:,}",
        *(f"  {problem}" for problem in result.problems),
    ]
    return "\n".join(lines) + "\n"


def _verify_generation(stage: Stage, manifest: Manifest, deep: bool, total: ShardReport) -> int:
    """Check the shards of one generation; returns how many samples it set aside."""
    samples, plan, info = open_plan(stage)
    started = read_json(stage.workspace.write / "started.json") or {}
    check_layout(stage, started, layout_fingerprint(stage, info["hash"]))
    shards = plan_shards(stage.config.output, samples, plan, earlier_shards(stage))
    own = [shard for shard in shards if stage.engine.owns(shard)]
    lines = [line for line in manifest["shards"] if line["generation"] == stage.generation]
    _check_shard_list(stage, shards, manifest, total)
    hashes: list[npt.NDArray[np.uint64]] = []
    with stage.bar("verify", sum(shard.num_packs for shard in own), "pack") as bar:
        tasks = _tasks(stage, samples, plan, own, lines, deep)
        for report in stage.engine.run(verify_shard, tasks):
            bar.update(report.num_packs)
            hashes += report.key_hashes
            total.add(report)
    _check_each_once(samples, plan, own, hashes, total)
    return samples.info.num_set_aside + sum(info["set_aside"].values())


def _tasks(
    stage: Stage,
    samples: Index,
    plan: PackPlan,
    shards: Sequence[Shard],
    lines: Sequence[Mapping[str, Any]],
    deep: bool,
) -> Iterator[VerifyTask]:
    layout = LAYOUTS[stage.config.output.layout]
    expected = {line["name"]: line for line in lines}
    listed = [shard for shard in shards if layout.shard_file(shard.name) in expected]
    for task in iterate_tasks(stage, samples, plan, listed):
        line = expected[layout.shard_file(task.shard.name)]
        yield VerifyTask(task, line, stage.config.pack.pad_multiple, deep)


def _check_shard_list(
    stage: Stage, shards: Sequence[Shard], manifest: Manifest, total: ShardReport
) -> None:
    """Plan, manifest and the layout's metadata name the same shards."""
    layout = LAYOUTS[stage.config.output.layout]
    planned = {layout.shard_file(shard.name): shard.num_packs for shard in shards}
    lines = manifest["shards"]
    named = {
        line["name"]: line["packs"] for line in lines if line["generation"] == stage.generation
    }
    if named != planned:
        total.problem("manifest.json does not list the planned shards with their packs")
    all_packs = {line["name"]: line["packs"] for line in lines}
    if stage.generation == 0:
        for problem in layout.find_wrong_counts(stage.workspace.root, all_packs):
            total.problem(problem)


def _check_each_once(
    samples: Index,
    plan: PackPlan,
    shards: Sequence[Shard],
    found_hashes: Sequence[npt.NDArray[np.uint64]],
    total: ShardReport,
) -> None:
    """The samples found are those of the plan, and no row of the index is in two places."""
    ids = [
        plan.sample_ids[
            plan.pack_offsets[shard.first_pack] : plan.pack_offsets[
                shard.first_pack + shard.num_packs
            ]
        ]
        for shard in shards
    ]
    hashes = samples.array("key_hash")
    expected = np.sort(hashes[np.concatenate([*ids, np.empty(0, np.int64)])])
    found = np.sort(np.concatenate([*found_hashes, np.empty(0, np.uint64)]))
    if len(np.unique(plan.sample_ids)) != len(plan.sample_ids):
        total.problem("the plan holds a sample twice")
    lost = len(np.setdiff1d(expected, found))
    repeated = len(found) - len(np.unique(found))
    if lost or repeated or not np.array_equal(expected, found):
        total.problem(f"{lost:,} samples are in no pack, {repeated:,} in more than one")
