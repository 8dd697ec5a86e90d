"""A pack in memory: its JSON, parsed once, and its media; and the sub-samples in it.

Packs of tars and of single files all become a `Pack`.
"""

import functools
import itertools
import operator
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from task_encoders.packs.pack_format import Tree, checksum, is_video_name
from task_encoders.samples import (
    TASKS,
    SampleError,
    SourceSample,
    Turn,
    check_sample,
    make_turn,
    options_of_media,
    refuse_codec_input,
)
from task_encoders.storage.paths import REMEDY

#: An image member by its number in the pack, or by its sub-sample's and its own there: 'img0.jpg',
#: 'img000.png', 'img2_0.jpg'.
_NUMBERED: Final = re.compile(r"img(\d+)(?:_(\d+))?\.[^.]+")


#: Error of VQA packs without questions; after their place and numbers.
LOST_PROMPTS: Final = (
    "{} of {} sub-samples have no prompt under task vqa: a converter that reads 'prompts' loses "
    "those of files that hold 'prompt'; give it the files that offline-packing export writes, "
    "which hold both, or pack the data again"
)


class PackFormatError(ValueError):
    """A pack whose JSON cannot be aligned with its sub-samples at all."""


class Pack(NamedTuple):
    """One pack."""

    key: str
    #: its JSON, see pack_format.py: parsed, or still as bytes where nothing has looked into it
    record: Any
    #: by member name; media that the pack refers to are read when asked for (`stored_media`)
    media: Mapping[str, Any]


class SubSample(NamedTuple):
    """One sample to encode."""

    key: str
    #: or why it cannot be used
    sample: SourceSample | SampleError
    #: the files, in the order of the sample's names
    images: tuple[bytes, ...] = ()
    videos: tuple[bytes, ...] = ()
    #: as stored in its pack
    num_tokens: int | None = None
    #: the sub-samples with which it shares its first tokens and media
    tree: Tree | None = None


@dataclass(frozen=True, slots=True)
class RestoredPack:
    """A pack read back.

    `sub_samples` holds, in the order of the pack, a sample or the error that makes it unusable: a
    pack is never lost for one sub-sample. `task` and `num_tokens` are None in packs without `meta`.
    """

    sub_samples: tuple[SourceSample | SampleError, ...]
    keys: tuple[str, ...]
    task: str | None
    num_tokens: tuple[int, ...] | None
    #: of the bytes of its media, by member name; {}: they are elsewhere, or others wrote it
    checksums: Mapping[str, str] = field(default_factory=dict)
    #: in the order of their sub-samples
    trees: Sequence[Tree] = ()


def parse_json(record: bytes | Mapping[str, Any] | None, key: str) -> Mapping[str, Any]:
    """Return a pack's JSON as an object, from its bytes or as some decoder already parsed it.

    Raises:
        PackFormatError: it is not a JSON object.
    """
    if isinstance(record, bytes | bytearray | memoryview):
        try:
            record = orjson.loads(record)
        except orjson.JSONDecodeError as error:
            raise PackFormatError(f"pack {key!r}: JSON cannot be parsed: {error}") from error
    if record is None:
        raise PackFormatError(f"pack {key!r} has no .json member")
    if not isinstance(record, Mapping):
        raise PackFormatError(f"pack {key!r}: JSON is {type(record).__name__}, not an object")
    return record


def count_lost_prompts(record: Mapping[str, Any]) -> int:
    """Count the sub-samples of a pack that has no list of prompts at all, which is how converters
    lose them; else return 0."""
    captions = record.get("captions")
    return len(captions) if isinstance(captions, list) and _prompts_of(record) is None else 0


def _prompts_of(record: Mapping[str, Any]) -> str | None:
    """Return the field of a pack's prompts."""
    return next((name for name in ("prompt", "prompts") if record.get(name)), None)


def restore_pack(
    record: bytes | Mapping[str, Any], key: str, task: str | None = None
) -> RestoredPack:
    """Read a pack's JSON.

    Args:
        key: the pack's key, for sub-samples without a key.
        task: the task to restore as, where it is already known; otherwise `meta.task`; a pack
            without either is restored as captioning.

    Raises:
        PackFormatError: not a JSON object, a missing list, lists of different length, or an unknown
            task.
    """
    record = parse_json(record, key)
    meta = record.get("meta") or {}
    if not isinstance(meta, Mapping):
        raise PackFormatError(f"pack {key!r}: meta is not an object")
    captions = _column(record, "captions", key)
    count = len(captions)
    without = [None] * count
    videos = _column(record, "videos", key, count) if "videos" in record else without
    has_images = "images" in record or "videos" not in record
    images = _column(record, "images", key, count) if has_images else without
    given = _prompts_of(record)
    prompts = _column(record, given, key, count) if given else [""] * count
    own = {"keys": [f"{key}/{i}" for i in range(count)], "system": without}
    own |= {"tools": [""] * count, "turns": without, "options": without}
    stored = own | {name: one for name, one in meta.items() if one}
    keys, systems, tools, details, asked = (_column(stored, name, key, count) for name in own)
    codec = [
        _column({name: without, **record}, name, key, count) for name in ("patch_positions", "fps")
    ]
    num_tokens = tuple(_column(meta, "num_tokens", key, count)) if "num_tokens" in meta else None
    checksums = meta.get("checksums", {})
    if not isinstance(checksums, Mapping):
        raise PackFormatError(f"pack {key!r}: meta.checksums is not an object")
    sub_task = task or meta.get("task") or "captioning"
    if sub_task not in TASKS:
        raise PackFormatError(f"pack {key!r}: unknown task {sub_task!r}; valid: {', '.join(TASKS)}")
    columns = keys, images, videos, prompts, captions, systems, tools, details, asked, *codec
    subs = tuple(_restore_sub_sample(own, sub_task) for own in zip(*columns, strict=True))
    described = meta.get("task"), num_tokens, checksums
    return RestoredPack(subs, tuple(keys), *described, _trees(meta.get("trees", []), count, key))


def _trees(stored: Any, count: int, key: str) -> list[Tree]:
    """Read `meta.trees` of a pack of `count` sub-samples."""
    try:
        trees = [Tree(*map(operator.index, one)) for one in stored]
    except TypeError as error:
        raise PackFormatError(f"pack {key!r}: meta.trees is {stored!r}"[:200]) from error
    ends = [0, *(tree.end for tree in trees)]
    firsts = [*(tree.first for tree in trees), count]
    lowest = min([0, *itertools.chain(*trees), *(tree.num_tokens - 1 for tree in trees)])
    if lowest < 0 or any(map(operator.gt, ends, firsts)):
        raise PackFormatError(f"pack {key!r}: meta.trees {stored} are not of {count} sub-samples")
    return trees


def sub_samples_of_pack(pack: Pack, task: str) -> list[SubSample]:
    """Return the sub-samples of a pack whose JSON is parsed, in order.

    Args:
        task: what its sub-samples are. One whose medium is not the one that was packed, by its
            checksum, is replaced by the error.

    Raises:
        PackFormatError: the pack's lists cannot be aligned, or a medium has changed.
    """
    restored = restore_pack(pack.record, pack.key, task)
    samples = [sub for sub in restored.sub_samples if isinstance(sub, SourceSample)]
    members = {}
    if not {name for sample in samples for name in sample.images} <= pack.media.keys():
        members = match_images(pack.record.get("images"), pack.key.rpartition("/")[2], pack.media)
    tree_of = {i: tree for tree in restored.trees for i in range(tree.first, tree.end)}
    read = functools.cache(pack.media.__getitem__)  # a tree's media once
    lengths = restored.num_tokens or [None] * len(restored.keys)
    columns = restored.keys, restored.sub_samples, lengths
    found = []
    for number, (key, sample, num_tokens) in enumerate(zip(*columns, strict=True)):
        tree = tree_of.get(number)  # also of a bad sample: a tree is read as a whole
        if isinstance(sample, SourceSample):
            count = len(sample.images)
            names = [*(members.get(name, name) for name in sample.images), *sample.videos]
            missing = next((name for name in names if name not in pack.media), None)
            if missing is None:
                files = tuple(map(read, names))
                sample = find_damage(names, files, restored.checksums) or sample
            else:
                sample = SampleError("missing_image", f"no member {missing!r}")
        if isinstance(sample, SampleError):
            found.append(SubSample(key, sample, tree=tree))
        else:
            media = files[:count], files[count:]
            found.append(SubSample(key, sample, *media, num_tokens, tree))
    return found


def find_damage(
    names: Iterable[str], media: Iterable[bytes], checksums: Mapping[str, str]
) -> SampleError | None:
    """Return the error of the first medium whose bytes have changed since packing: a picture with
    some bytes zeroed may decode without an error."""
    for name, data in zip(names, media, strict=True):
        expected = checksums.get(name)
        if expected is not None and checksum(data) != expected:
            reason = "truncated_video" if is_video_name(name) else "truncated_image"
            return SampleError(
                reason,
                f"{name} has the xxh3_64 {checksum(data)}, was packed with {expected}; {REMEDY}",
            )
    return None


def match_images(images: Any, key: str, members: Collection[str]) -> dict[str, str]:
    """Find the member for each image name in a pack's JSON; names without a member are left out.

    A name is a member's, possibly with the pack's key in front. Some converters leave in the JSON
    the paths that the images came from, or names of their choice: if no name is a member's, the
    i-th name of a flat pack means the member `img{i}`, and the j-th name in the i-th list of a
    nested one `img{i}_{j}`.

    Args:
        images: `images` of the JSON, in either form.
        key: the pack's key.
        members: names of the pack's image members, without the key.
    """
    entries = images if isinstance(images, list) else []
    names = [n for entry in entries for n in (entry if isinstance(entry, list) else [entry])]
    candidates = {name: name.removeprefix(f"{key}.") for name in names if isinstance(name, str)}
    known = frozenset(members)
    found = {name: member for name, member in candidates.items() if member in known}
    if found or not all(isinstance(name, str) for name in names):
        return found
    by_number = {}
    for member in members:
        if match := _NUMBERED.fullmatch(member):
            by_number[tuple(int(number) for number in match.groups() if number)] = member
    for i, entry in enumerate(entries):
        is_list = isinstance(entry, list)
        for j, name in enumerate(entry if is_list else [entry]):
            place = (i, j) if is_list else (i,)
            if name and place in by_number:
                found[name] = by_number[place]
    return found


def _column(record: Mapping[str, Any], name: str, key: str, count: int | None = None) -> list[Any]:
    column = record.get(name)
    if not isinstance(column, list):
        raise PackFormatError(f"pack {key!r}: no list {name!r}")
    if count is not None and len(column) != count:
        raise PackFormatError(f"pack {key!r}: {len(column)} {name} for {count} captions")
    return column


def _strings(value: Any, what: str) -> list[str]:
    """List the names in an entry of either form: 'x' -> ['x'], ['x', 'y'] -> ['x', 'y']."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, str) for v in values):
        raise SampleError("bad_record", f"{what} is not text: {value!r}"[:200])
    return values


def _restore_sub_sample(entry: Sequence[Any], task: str) -> SourceSample | SampleError:
    """Restore a sample from its entry in each column of a pack, or return why it is unusable."""
    key, images, videos, prompts, captions, system, tools, details, asked, *codec = entry
    try:
        refuse_codec_input(*codec)
        image_names = tuple(filter(None, _strings([] if images is None else images, "images")))
        video_names = tuple(filter(None, _strings([] if videos is None else videos, "videos")))
        answers = _strings(captions, "captions")
        questions = _strings(prompts, "prompt")
        if task == "captioning" and not questions:
            questions = [""] * len(answers)
        if len(questions) != len(answers):
            raise SampleError("bad_record", f"{len(questions)} prompts, {len(answers)} captions")
        if not isinstance(tools, str):
            raise SampleError("bad_record", f"meta.tools is not text: {tools!r}"[:200])
        if details is None:
            turns = tuple(map(Turn, questions, answers))
        elif isinstance(details, list) and len(details) == len(answers):
            turns = tuple(map(make_turn, questions, answers, details))
        else:
            raise SampleError("bad_record", f"meta.turns does not describe {len(answers)} turns")
        counts = len(image_names), len(video_names)
        options = () if asked is None else options_of_media(asked, *counts)
        sample = SourceSample(key, task, turns, image_names, system, video_names, tools, options)
        check_sample(sample)
    except SampleError as error:
        return error
    return sample
