"""verify: re-read what was written and compare it with the plan; `deep`: also with the source.

shards      there, with the hash they were written with; .tar.idx; the layout's own counts
packs       the planned keys, within seq_length
samples     each one in exactly one pack or set aside, with its measured length
deep        same turns and media bytes as the source; re-encoded from the pack's own bytes, as many
            tokens as measured
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from offline_packing.errors import StageError
from offline_packing.files import read_json
from offline_packing.index import Index, key_hash
from offline_packing.layouts import LAYOUTS
from offline_packing.manifest import (
    Manifest,
    earlier_shards,
    require_manifest,
    stages_of_manifest,
)
from offline_packing.pack_plan import PackPlan
from offline_packing.shard_layout import Shard, plan_shards
from offline_packing.shard_tasks import Row, ShardTask, iterate_tasks
from offline_packing.stage import Stage, open_encoder
from offline_packing.write import check_layout, layout_fingerprint, open_plan
from task_encoders.pack_format import JSON_PART, PackFormatError, parse_json, restore_pack
from task_encoders.samples import SampleError, SourceSample

#: Problems kept per shard; all are counted.
_KEPT: Final = 20


@dataclass
class ShardReport:
    """What re-reading one shard, or all of them, found."""

    num_packs: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_images: int = 0
    num_problems: int = 0
    problems: list[str] = field(default_factory=list)
    #: key_hash of every sample found: one array per pack
    key_hashes: list[npt.NDArray[np.uint64]] = field(default_factory=list)

    def problem(self, text: str) -> None:
        """Count a problem; the first ones are kept."""
        self.num_problems += 1
        if len(self.problems) < _KEPT:
            self.problems.append(text)

    def add(self, other: "ShardReport") -> None:
        """Add what was found elsewhere, all but the hashes."""
        self.num_packs += other.num_packs
        self.num_samples += other.num_samples
        self.num_tokens += other.num_tokens
        self.num_images += other.num_images
        self.num_problems += other.num_problems
        self.problems = (self.problems + other.problems)[:_KEPT]


@dataclass(frozen=True)
class VerifyResult:
    """What `verify` found. `ok` is the answer."""

    num_shards: int
    num_packs: int
    num_samples: int
    num_set_aside: int
    #: compared with the source, and encoded again; 0 unless deep
    num_images: int
    num_tokens: int
    num_problems: int
    #: the first of them
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is as it should be."""
        return self.num_problems == 0


@dataclass(frozen=True)
class VerifyTask:
    """One shard: what it should hold, its line in the manifest, and the padding of samples."""

    shard: ShardTask
    expected: Mapping[str, Any]
    pad_multiple: int
    deep: bool

    @property
    def number(self) -> int:
        """What tells the task from the others."""
        return self.shard.number


def verify(stage: Stage, *, deep: bool = False) -> VerifyResult:
    """Check the packed dataset, what was appended to it included.

    Args:
        deep: also compare with the source, and encode every sample again.

    Raises:
        StageError: there is no complete dataset to check, or the source cannot be read.
    """
    open_plan(stage)  # where a stage is missing, this says which
    manifest = require_manifest(stage)
    total = ShardReport()
    num_set_aside = 0
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
        num_tokens=total.num_tokens,
        num_problems=total.num_problems,
        problems=tuple(total.problems),
    )


def render_result(result: VerifyResult, *, deep: bool) -> str:
    """The result as a table, problems below."""
    deep_lines = [
        f"{'images':<16}{result.num_images:,}, bytes compared with the source",
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
    repeated = sum(info["repeated_set_aside"].values())
    return samples.info.num_set_aside - repeated + sum(info["set_aside"].values())


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


def verify_shard(task: VerifyTask) -> ShardReport:
    """Re-read one shard."""
    report = ShardReport()
    layout = LAYOUTS[task.shard.layout]
    for problem in layout.find_damage(task.shard, task.expected["xxh3_128"]):
        report.problem(problem)
    keys = task.shard.keys()
    planned = task.shard.packs()
    try:
        for key, parts in layout.read_packs(task.shard):
            planned_key, rows = next(planned, ("", []))
            if key != planned_key:
                report.problem(
                    f"{task.expected['name']} does not hold the packs {keys[0]} to {keys[-1]}"
                )
                return report
            report.num_packs += 1
            _verify_pack(task, key, parts, rows, report)
    except StageError as error:
        if not report.num_problems:
            report.problem(str(error))
        return report
    if next(planned, None) is not None:
        report.problem(f"{task.expected['name']} does not hold all packs up to {keys[-1]}")
    return report


def _verify_pack(
    task: VerifyTask,
    key: str,
    parts: Mapping[str, bytes],
    rows: Sequence[Row],
    report: ShardReport,
) -> None:
    """Compare one pack with its rows of the index, and with their sources if the task is deep."""
    where = f"{task.expected['name']}: {key}"
    try:
        pack = restore_pack(parse_json(parts[JSON_PART], key), key, None)
    except (KeyError, PackFormatError) as error:
        report.problem(f"{where}: no usable JSON: {error}")
        return
    if pack.task != task.shard.task:
        report.problem(f"{where}: task is {pack.task}, not {task.shard.task}")
    if list(pack.keys) != [row.key for row in rows]:
        report.problem(f"{where}: it does not hold the planned samples")
        return
    lengths = [row.num_tokens for row in rows]
    if list(pack.num_tokens or ()) != lengths:
        report.problem(f"{where}: meta.num_tokens is not what was measured")
    padded = sum(-(-length // task.pad_multiple) * task.pad_multiple for length in lengths)
    if padded > task.shard.seq_length:
        report.problem(f"{where}: {padded} tokens > seq_length {task.shard.seq_length}")
    hashes = [key_hash(row.source_id, row.key) for row in rows]
    report.key_hashes.append(np.array(hashes, dtype=np.uint64))
    report.num_samples += len(rows)
    for row, sub in zip(rows, pack.sub_samples, strict=True):
        sub_where = f"{where}: {row.key!r}"
        if isinstance(sub, SampleError):
            report.problem(f"{sub_where}: {sub}")
        elif any(name not in parts for name in sub.images) or len(sub.images) != len(row.media):
            report.problem(f"{sub_where}: its images are not those that were measured")
        elif task.deep:
            _verify_sub_sample(task.shard, row, sub, parts, sub_where, report)


def _verify_sub_sample(
    task: ShardTask,
    row: Row,
    sub: SourceSample,
    parts: Mapping[str, bytes],
    where: str,
    report: ShardReport,
) -> None:
    """Compare one sub-sample with its source, and encode it."""
    images = [parts[name] for name in sub.images]
    try:
        source = LAYOUTS[task.layout].stored_form(task.read_sample(row))
        if (sub.turns, sub.system) != (source.turns, source.system):
            report.problem(f"{where}: text differs from the source")
            return
        if images != task.read_images(row):
            report.problem(f"{where}: image bytes differ from the source")
            return
        num_tokens = len(open_encoder(task.model).encode(sub, images).tokens)
    except (SampleError, StageError) as error:
        report.problem(f"{where}: {error}")
        return
    report.num_images += len(images)
    report.num_tokens += num_tokens
    if num_tokens != row.num_tokens:
        report.problem(f"{where}: encodes to {num_tokens} tokens, measured {row.num_tokens}")
