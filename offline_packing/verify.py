"""verify: re-read everything that was written and compare it with the source and the index.

shards      hash, .tar.idx, pack keys, Energon's counts
samples     each one in exactly one pack or set aside; same turns and media bytes as the source
packs       within seq_length
lengths     re-encoded from the pack's own bytes: equal to the measured number of tokens
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from offline_packing.errors import StageError
from offline_packing.files import hash_file, read_json
from offline_packing.index import Index, key_hash
from offline_packing.pack_plan import PackPlan
from offline_packing.shard_tasks import Row, Shard, ShardTask, iterate_tasks, plan_shards
from offline_packing.stage import Stage, open_encoder
from offline_packing.tar_shards import PackEntry, index_bytes, scan_tar
from offline_packing.write import check_layout, layout_fingerprint, open_plan
from task_encoders.pack_format import JSON_PART, PackFormatError, parse_json, restore_pack
from task_encoders.samples import SampleError, SourceSample

logger = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class VerifyResult:
    """What `verify` found. `ok` is the answer."""

    num_shards: int
    num_packs: int
    num_samples: int
    num_set_aside: int
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


def verify(stage: Stage) -> VerifyResult:
    """Check the packed dataset against its source.

    Raises:
        StageError: there is no complete dataset to check, or the source cannot be read.
    """
    samples, plan, info = open_plan(stage)
    manifest = read_json(stage.workspace.manifest)
    if manifest is None:
        raise StageError(f"no manifest in {stage.workspace.root}; run write first")
    started = read_json(stage.workspace.write / "started.json") or {}
    check_layout(stage, started, layout_fingerprint(stage, info["hash"]))
    total = ShardReport()
    shards = plan_shards(stage, samples, plan)
    _check_shard_list(stage, shards, manifest, total)
    with stage.bar("verify", plan.num_packs, "pack") as bar:
        tasks = _tasks(stage, samples, plan, shards, manifest)
        for report in stage.engine.run(verify_shard, tasks):
            bar.update(report.num_packs)
            _merge(total, report)
    _check_each_once(samples, plan, total)
    num_set_aside = samples.info.num_set_aside + sum(info["set_aside"].values())
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


def render_result(result: VerifyResult) -> str:
    """The result as a table, problems below."""
    lines = [
        f"{'shards':<16}{result.num_shards:,}",
        f"{'packs':<16}{result.num_packs:,}",
        f"{'samples':<16}{result.num_samples:,} packed, {result.num_set_aside:,} set aside",
        f"{'images':<16}{result.num_images:,}, bytes compared with the source",
        f"{'tokens':<16}{result.num_tokens:,}, encoded again",
        f"{'problems':<16}{result.num_problems:,}",
        *(f"  {problem}" for problem in result.problems),
    ]
    return "\n".join(lines) + "\n"


def _tasks(
    stage: Stage,
    samples: Index,
    plan: PackPlan,
    shards: Sequence[Shard],
    manifest: Mapping[str, Any],
) -> Iterator[VerifyTask]:
    expected = {shard["name"]: shard for shard in manifest["shards"]}
    listed = [shard for shard in shards if f"{shard.name}.tar" in expected]
    for task in iterate_tasks(stage, samples, plan, listed):
        yield VerifyTask(task, expected[task.tar_path.name], stage.config.pack.pad_multiple)


def _check_shard_list(
    stage: Stage, shards: Sequence[Shard], manifest: Mapping[str, Any], total: ShardReport
) -> None:
    """The manifest, Energon's counts and the plan name the same shards."""
    planned = {f"{shard.name}.tar": shard.num_packs for shard in shards}
    named = {shard["name"]: shard["packs"] for shard in manifest["shards"]}
    energon = (read_json(stage.workspace.nv_meta / ".info.json") or {}).get("shard_counts")
    for name, found in (("manifest.json", named), (".nv-meta/.info.json", energon)):
        if found != planned:
            total.problem(f"{name} does not list the planned shards with their packs")


def _merge(total: ShardReport, report: ShardReport) -> None:
    total.num_packs += report.num_packs
    total.num_samples += report.num_samples
    total.num_tokens += report.num_tokens
    total.num_images += report.num_images
    total.num_problems += report.num_problems
    total.problems = (total.problems + report.problems)[:_KEPT]
    total.key_hashes += report.key_hashes


def _check_each_once(samples: Index, plan: PackPlan, total: ShardReport) -> None:
    """The samples found are those of the plan, and no row of the index is in two places."""
    hashes = samples.array("key_hash")
    expected = np.sort(hashes[plan.sample_ids])
    found = np.sort(np.concatenate([*total.key_hashes, np.empty(0, np.uint64)]))
    if len(np.unique(plan.sample_ids)) != len(plan.sample_ids):
        total.problem("the plan holds a sample twice")
    lost = len(np.setdiff1d(expected, found))
    repeated = len(found) - len(np.unique(found))
    if lost or repeated or not np.array_equal(expected, found):
        total.problem(f"{lost:,} samples are in no pack, {repeated:,} in more than one")


def verify_shard(task: VerifyTask) -> ShardReport:
    """Re-read one shard."""
    report = ShardReport()
    path = task.shard.tar_path
    if not path.is_file():
        report.problem(f"{path.name} is missing")
        return report
    if hash_file(path) != task.expected["xxh3_128"]:
        report.problem(f"{path.name} is not what was written: its hash differs")
    try:
        entries = list(scan_tar(path))
    except StageError as error:
        report.problem(str(error))
        return report
    _check_index(path, entries, report)
    packs = list(task.shard.packs())
    if [entry.key for entry in entries] != [key for key, _ in packs]:
        report.problem(f"{path.name} does not hold the packs {packs[0][0]} to {packs[-1][0]}")
        return report
    with open(path, "rb") as file:
        for entry, (_, rows) in zip(entries, packs, strict=True):
            report.num_packs += 1
            _verify_pack(task, entry, rows, file, report)
    return report


def _check_index(path: Path, entries: Sequence[PackEntry], report: ShardReport) -> None:
    try:
        found = path.with_suffix(".tar.idx").read_bytes()
    except OSError:
        report.problem(f"{path.name}.idx is missing")
        return
    if found != index_bytes(entries):
        report.problem(f"{path.name}.idx does not match the tar")


def _verify_pack(
    task: VerifyTask, entry: PackEntry, rows: Sequence[Row], file: BinaryIO, report: ShardReport
) -> None:
    """Compare one pack with its rows of the index and with their sources."""
    where = f"{task.shard.tar_path.name}: {entry.key}"
    parts: dict[str, bytes] = {}
    for part in entry.parts:
        file.seek(part.offset)
        parts[part.name] = file.read(part.size)
    try:
        pack = restore_pack(parse_json(parts[JSON_PART], entry.key), entry.key, None)
    except (KeyError, PackFormatError) as error:
        report.problem(f"{where}: no usable JSON: {error}")
        return
    if pack.task != task.shard.task:
        report.problem(f"{where}: task is {pack.task}, not {task.shard.task}")
    if list(pack.keys) != [row["key"] for row in rows]:
        report.problem(f"{where}: it does not hold the planned samples")
        return
    lengths = [row["num_tokens"] for row in rows]
    if list(pack.num_tokens or ()) != lengths:
        report.problem(f"{where}: meta.num_tokens is not what was measured")
    padded = sum(-(-length // task.pad_multiple) * task.pad_multiple for length in lengths)
    if padded > task.shard.seq_length:
        report.problem(f"{where}: {padded} tokens > seq_length {task.shard.seq_length}")
    hashes = [key_hash(row["source_id"], key) for row, key in zip(rows, pack.keys, strict=True)]
    report.key_hashes.append(np.array(hashes, dtype=np.uint64))
    for row, sub in zip(rows, pack.sub_samples, strict=True):
        report.num_samples += 1
        _verify_sub_sample(task.shard, row, sub, parts, f"{where}: {row['key']!r}", report)


def _verify_sub_sample(
    task: ShardTask,
    row: Row,
    sub: SourceSample | SampleError,
    parts: Mapping[str, bytes],
    where: str,
    report: ShardReport,
) -> None:
    """Compare one sub-sample with its source, and encode it."""
    try:
        if isinstance(sub, SampleError):
            raise sub
        source = task.read_sample(row)
        if (sub.turns, sub.system, len(sub.images)) != (
            source.turns,
            source.system,
            len(source.images),
        ):
            report.problem(f"{where}: text or number of images differs from the source")
            return
        images = [parts.get(name, b"") for name in sub.images]
        if images != task.read_images(row):
            report.problem(f"{where}: image bytes differ from the source")
            return
        num_tokens = len(open_encoder(task.model).encode(sub, images).tokens)
    except (SampleError, StageError) as error:
        report.problem(f"{where}: {error}")
        return
    report.num_images += len(images)
    report.num_tokens += num_tokens
    if num_tokens != row["num_tokens"]:
        report.problem(f"{where}: encodes to {num_tokens} tokens, measured {row['num_tokens']}")
