"""The task of `verify`: re-read one shard."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import InstanceOf

from offline_packing.config.sections import PackConfig
from offline_packing.errors import StageError, as_sample_error
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.container import read_pack, read_packs, shard_file
from offline_packing.layouts.shards import (
    PlannedSample,
    PlannedShard,
    ShardTask,
    fragment_file,
    trees_of,
)
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.run import Run, open_encoder
from offline_packing.runs.tasks import iterate_tasks
from offline_packing.storage.receipts import load_receipt
from offline_packing.verify.damage import Damage, FileCheck, check_file
from task_encoders.families import ModelOptions
from task_encoders.media.video_file import MissingPyAVError
from task_encoders.packs.manifest import Manifest, ShardLine
from task_encoders.packs.pack import (
    Pack,
    PackFormatError,
    SubSample,
    parse_json,
    restore_pack,
    sub_samples_of_pack,
)
from task_encoders.packs.pack_format import Tree
from task_encoders.packs.stored_media import StoredMedia
from task_encoders.samples import SampleError, SourceSample
from task_encoders.storage.paths import REMEDY

if TYPE_CHECKING:
    from task_encoders.concatenate import PackedRow

#: Problems kept; all are counted.
_KEPT: Final = 20
_Hashes = InstanceOf[npt.NDArray[np.uint64]]


@dataclass
class VerifyResult:
    """Result of re-reading one shard, or all of them."""

    num_shards: int = 0
    num_packs: int = 0
    num_samples: int = 0
    #: of all rows without padding: as in the manifest
    num_row_tokens: int = 0
    num_set_aside: int = 0
    #: of all ranks, if pack.order.uniform promises something of them
    num_steps: int = 0
    #: compared with the source and encoded again; 0 unless deep
    num_images: int = 0
    num_videos: int = 0
    num_tokens: int = 0
    #: split of a shard, and hash of the bytes of each of its media; only if deep
    media_hashes: list[tuple[str, _Hashes]] = field(default_factory=list, compare=False)
    #: a line on media or samples that are in one split only
    apart: str = ""
    #: of all shards: read, packed and set aside, if samples were made of several
    records: tuple[int, ...] = ()
    num_problems: int = 0
    #: problems of damaged files, which can be made again
    num_repairable: int = 0
    #: problems of media that are damaged in the source as well
    num_in_source: int = 0
    #: the first problems
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no problem was found."""
        return self.num_problems == 0

    def problem(self, text: str, *, repairable: bool = False) -> None:
        """Count a problem; the first ones are kept."""
        self.num_problems += 1
        self.num_repairable += repairable
        if len(self.problems) < _KEPT:
            self.problems.append(text)

    def add(self, other: "VerifyResult") -> None:
        """Add the findings of another check."""
        for name, value in vars(other).items():
            setattr(self, name, operator.iadd(getattr(self, name), value))
        del self.problems[_KEPT:]


@dataclass(frozen=True)
class VerifyTask:
    """One shard: its expected packs, its line in the manifest, and the options of packing. A deep
    one also compares it with the source."""

    shard: ShardTask
    expected: ShardLine
    pack: PackConfig
    model: ModelOptions
    deep: bool
    #: of the shard's files; none if these are some packs of their shard, not all
    checks: Sequence[FileCheck] = ()


def verify_tasks(
    run: Run,
    samples: Index,
    plan: PackPlan,
    manifest: Manifest,
    shards: Sequence[PlannedShard],
    *,
    deep: bool = False,
    is_part: bool = False,
) -> Iterator[VerifyTask]:
    """Yield the task of each shard that the manifest lists; only deep tasks need the source."""
    config, root = run.config, run.workspace.root
    receipt = load_receipt(run.workspace.packing, "write")
    recorded = {} if is_part or receipt is None else receipt.files
    lines = {line.name: line for line in manifest.shards}
    listed = [shard for shard in shards if shard_file(shard.name) in lines]
    for task in iterate_tasks(run, samples, plan, listed, with_sources=deep):
        line = lines[shard_file(task.shard.name)]
        names = (line.name, f"{line.name}.idx", fragment_file(task.shard.name))
        own = [name for name in names if name in recorded]
        checks = [FileCheck(root, name, recorded[name], "_packing/write.json") for name in own]
        yield VerifyTask(task, line, config.pack, config.model, deep, checks)


def verify_shard(task: VerifyTask) -> VerifyResult:
    """Re-read one shard."""
    report = VerifyResult()
    damage = Damage()
    for one in task.checks:
        damage |= check_file(one)
    for name, fault in damage.items():
        report.problem(f"{name} {fault}; {REMEDY}")
    _verify_packs(task, report)
    if damage:  # once rewritten, it has none of the others either
        report.num_repairable = report.num_problems
    if report.media_hashes:
        hashes = np.unique(np.concatenate([own for _, own in report.media_hashes]))
        report.media_hashes = [(task.shard.shard.split, hashes)]
    return report


def _verify_packs(task: VerifyTask, report: VerifyResult) -> None:
    """Compare the packs of a shard with the plan."""
    name = task.expected.name
    keys = task.shard.pack_keys()
    planned = task.shard.packs()
    folder = task.shard.folder
    stored: Iterator[Pack] = (read_pack(folder, name, key) for key in keys)
    if task.checks:
        stored = read_packs(folder, folder / name)
    try:
        with task.shard.rows_at_hand() if task.deep else nullcontext():
            for pack in stored:
                planned_key, samples = next(planned, ("", []))
                if pack.key != planned_key:
                    report.problem(f"{name} does not hold the packs {keys[0]} to {keys[-1]}")
                    return
                report.num_packs += 1
                for text in _pack_problems(task, pack, samples, report):
                    report.problem(f"{name}: {pack.key}: {text}")
    except StageError as error:
        if not report.num_problems:
            report.problem(str(error))
        return
    if next(planned, None) is not None:
        report.problem(f"{name} does not hold all packs up to {keys[-1]}")
    counts = task.expected.samples, task.expected.tokens
    is_fine = task.checks and not report.num_problems
    if is_fine and (report.num_samples, report.num_row_tokens) != counts:
        text = "manifest.json: {} does not hold {:,} samples and {:,} tokens"
        report.problem(text.format(name, *counts))


def _pack_problems(
    task: VerifyTask, stored: Pack, samples: Sequence[PlannedSample], report: VerifyResult
) -> Iterator[str]:
    """Compare one pack with its rows of the index, and with their sources if the task is deep."""
    try:
        pack = restore_pack(stored.record, stored.key)
    except PackFormatError as error:
        yield f"no usable JSON: {error}"
        return
    if pack.task != task.shard.task:
        yield f"task is {pack.task}, not {task.shard.task}"
    if list(pack.keys) != [sample.key for sample in samples]:
        yield "does not hold the planned samples"
        return
    lengths = [sample.num_tokens for sample in samples]
    if list(pack.num_tokens or ()) != lengths:
        yield "meta.num_tokens is not what was measured"
    trees = trees_of(samples)
    if list(pack.trees) != [tree for tree in trees if tree.num_samples > 1]:
        yield "meta.trees is not what was planned"
        return
    multiple, room = task.pack.padding, task.pack.seq_length
    in_row = [
        sum(lengths[tree.first : tree.end]) - (tree.num_samples - 1) * tree.num_tokens
        for tree in trees
    ]
    padded = sum(-(-length // multiple) * multiple for length in in_row)
    if padded > room:
        yield f"{padded} tokens > seq_length {room}"
    report.num_samples += len(samples)
    report.num_row_tokens += sum(in_row)
    from_row = _from_rows(task, stored, pack.trees)
    for tree in trees:
        own, is_tree = slice(tree.first, tree.end), tree.num_samples > 1
        parts = next(from_row) if task.deep and is_tree else [None] * tree.num_samples
        columns = samples[own], pack.sub_samples[own], parts
        for sample, sub, part in zip(*columns, strict=True):
            problem = _sub_sample_problem(task, sample, sub, stored.media, report, part)
            if problem is not None:
                yield f"{sample.key!r}: {problem}"


def _from_rows(
    task: VerifyTask, stored: Pack, trees: Sequence[Tree]
) -> Iterator[list["PackedRow | str | None"]]:
    """Encode each tree as a row, and yield its samples as the row gives them back, or why it does
    not."""
    from megatron.energon.errors import FatalSampleError

    from task_encoders.concatenate import split_row
    from task_encoders.rows.row_encoder import RowEncoder

    encoder, room = open_encoder(task.model), task.pack.seq_length
    rows = RowEncoder(encoder, room, 1, False, False, "uint8", 1, check_lengths=False)
    pack = stored._replace(record=parse_json(stored.record, stored.key))
    subs = list[SubSample]()
    for tree in trees:
        try:
            subs = subs or sub_samples_of_pack(pack, task.shard.task)
            own = subs[tree.first : tree.end]
            row, keys, _ = rows.encode(own)
            parts = dict(zip(keys, split_row(row), strict=True))
            yield [parts.get(one.key, "is left out of its tree") for one in own]
        except (FatalSampleError, PackFormatError, SampleError, StageError) as error:
            yield [str(error)] * tree.num_samples


def _sub_sample_problem(
    task: VerifyTask,
    sample: PlannedSample,
    sub: SourceSample | SampleError,
    media: Mapping[str, bytes],
    report: VerifyResult,
    part: "PackedRow | str | None",
) -> str | None:
    """Compare one sub-sample with its row of the index; if deep, also its source and length, and
    its part of a tree's row."""
    if isinstance(sub, SampleError):
        return str(sub)
    counts = (len(sample.media), sample.num_videos)
    if (len(sub.media), len(sub.videos)) != counts or any(one not in media for one in sub.media):
        return "its media are not those that were measured"
    is_same = False
    try:
        if not task.deep:
            if isinstance(media, StoredMedia):  # open what the pack only refers to
                for name in sub.media:
                    media.check(name)
            return None
        images = [media[name] for name in sub.images]
        videos = [media[name] for name in sub.videos]
        measured = task.shard.read_sample(sample)
        source = LAYOUTS[task.shard.layout].stored_form(measured)
        if (sub.turns, sub.system, sub.tools) != (source.turns, source.system, source.tools):
            return "text differs from the source"
        if sub.options != source.options:
            return "options of media differ from the source"
        originals = task.shard.read_media(sample, sample.media)
        if images + videos != originals:
            kind = "image" if images != originals[: len(images)] else "video"
            return f"{kind} bytes differ from the source"
        is_same = True
        encoded = open_encoder(task.model).encode(sub, images, videos)
    except (StageError, PackFormatError, MissingPyAVError) as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - of this sample
        problem = str(as_sample_error(error))
        if not is_same or not sample.media:
            return problem
        report.num_in_source += 1
        places = ", ".join(sorted({medium.container for medium in sample.media}))
        return f"{problem}; the source has the same bytes: repair or remove the sample in {places}"
    num_tokens = len(encoded.tokens)
    hashes = [xxhash.xxh3_64_intdigest(data) for data in (*images, *videos)]
    report.media_hashes.append((task.shard.shard.split, np.array(hashes, np.uint64)))
    report.num_images += len(images)
    report.num_videos += len(videos)
    report.num_tokens += num_tokens
    if num_tokens != sample.num_tokens:
        return f"encodes to {num_tokens} tokens, measured {sample.num_tokens}"
    if part is None or isinstance(part, str):
        return part
    import torch

    from task_encoders.concatenate import concatenate

    alone = concatenate([encoded], pad_token_id=0, pixel_transport="uint8").tensors()
    found = part.tensors()
    names = " and ".join(name for name, own in alone.items() if not torch.equal(own, found[name]))
    return f"from its tree it has other {names} than alone" if names else None
