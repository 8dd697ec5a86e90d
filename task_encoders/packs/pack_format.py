"""A pack on disk, in both directions.

A pack is one WebDataset sample: the media with their original bytes and extension, and one JSON.

    ps_00000000.img000.jpg
    ps_00000000.img001.png
    ps_00000000.json

The flat form holds one image and one turn per sub-sample (captioning, VQA):

    {"images": ["img000.jpg", ...], "prompt": [str, ...], "captions": [str, ...], "meta": {...}}

The nested form holds any number of either, and is used for the whole pack where any sub-sample
needs it, and for every multi-turn pack:

    {"images": [["img000.jpg"], [], ...], "prompt": [[str, ...], ...], "captions": [[str], ...]}

A pack with videos is nested and has one more list, whose names are numbered separately:

    {"images": [["img000.jpg"], [], ...], "videos": [[], ["vid000.mp4"], ...], ...}

`meta` holds `task`, and per sub-sample `keys`, `num_tokens` and `system` (null: the template's
default); if any has them, also `tools` (JSON; "": none) and `turns`, which holds what its turns
have besides prompt and answer (`Turn.details`; null: nothing); in packs that are tokenized,
`token_ids` and `loss` (see `TokenizedText`) with `tokenized_with`. Packs written by others are read
as well: `prompts` for `prompt`, or neither; `img0` for `img000`; empty or null names for
sub-samples without such media; no `images` beside `videos`; no `meta`; names of images that differ
from the members', see `match_images`.
"""

import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from task_encoders.packs.tokenized import TokenizedPack, TokenizedText
from task_encoders.samples import SampleError, SourceSample, check_sample, make_turn

JSON_PART: Final = "json"
#: In an output whose packs refer to media: what Energon reads there, see references.py.
METADATASET: Final = "metadataset.yaml"

#: Extensions written as they are. Anything else is named after the image's own format: a member's
#: name decides what readers do with it, so a source must not choose it freely.
IMAGE_EXTENSIONS: Final = frozenset({"jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff"})
VIDEO_EXTENSIONS: Final = frozenset({"mp4", "m4v", "mov", "3gp", "webm", "mkv", "avi"})
MEDIA_EXTENSIONS: Final = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS


#: An image member by its number in the pack: 'img0.jpg', 'img000.png'.
_NUMBERED: Final = re.compile(r"img(\d+)\.[^.]+")


class PackFormatError(ValueError):
    """A pack whose JSON cannot be aligned with its sub-samples at all."""


@dataclass(frozen=True, slots=True)
class PackedSubSample:
    """One sub-sample on its way into a pack: the sample, one extension per medium (images first,
    then videos), its length."""

    sample: SourceSample
    extensions: tuple[str, ...]
    num_tokens: int


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
    tokenized: TokenizedPack | None = None


def pack_key(index: int, prefix: str = "") -> str:
    """`ps_00000042`. `prefix` keeps the keys of blended datasets apart."""
    return f"{prefix}ps_{index:08d}"


def image_extension(name: str, image_format: str) -> str:
    """Extension for a pack member: the source's own if it is a known image extension, else the
    one of the format found in the header ('JPEG' -> 'jpg')."""
    extension = name.rpartition(".")[2].lower()
    if extension in IMAGE_EXTENSIONS:
        return extension
    return {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif"}.get(image_format, image_format.lower())


def is_video_name(name: str) -> bool:
    """Whether a file name, or an extension alone, is a video's."""
    return name.rpartition(".")[2].lower() in VIDEO_EXTENSIONS


def video_extension(name: str, container: str) -> str:
    """As `image_extension`, with the extension of the container found in the header."""
    return name.rpartition(".")[2].lower() if is_video_name(name) else container


def media_part_names(extensions: Sequence[str]) -> list[str]:
    """Member names of all media of a pack, in order: ['jpg', 'mp4', 'png'] ->
    ['img000.jpg', 'vid000.mp4', 'img001.png']."""
    images, videos = itertools.count(), itertools.count()
    return [
        f"vid{next(videos):03d}.{extension}"
        if is_video_name(extension)
        else f"img{next(images):03d}.{extension}"
        for extension in extensions
    ]


def pack_json(
    sub_samples: Sequence[PackedSubSample], task: str, tokenized: TokenizedPack | None = None
) -> bytes:
    """The JSON of a pack. Media are named in the order of `media_part_names` over all sub-samples.

    Deterministic: same sub-samples, same bytes.
    """
    names = iter(media_part_names([e for sub in sub_samples for e in sub.extensions]))
    media = [[next(names) for _ in sub.extensions] for sub in sub_samples]
    images = [[name for name in own if not is_video_name(name)] for own in media]
    videos = [[name for name in own if is_video_name(name)] for own in media]
    samples = [sub.sample for sub in sub_samples]
    prompts: list[Any] = [[turn.prompt for turn in sample.turns] for sample in samples]
    captions: list[Any] = [[turn.answer for turn in sample.turns] for sample in samples]
    record: dict[str, Any] = {"images": images, "prompt": prompts, "captions": captions}
    if any(videos):
        record = {"images": images, "videos": videos, "prompt": prompts, "captions": captions}
    elif task != "bmr" and all(len(i) == len(p) == 1 for i, p in zip(images, prompts, strict=True)):
        record = {name: [first for (first,) in column] for name, column in record.items()}
    record["meta"] = {
        "task": task,
        "keys": [sample.key for sample in samples],
        "num_tokens": [sub.num_tokens for sub in sub_samples],
        "system": [sample.system for sample in samples],
    }
    if any(sample.tools for sample in samples):
        record["meta"]["tools"] = [sample.tools for sample in samples]
    details = [[turn.details for turn in sample.turns] for sample in samples]
    if any(map(any, details)):
        record["meta"]["turns"] = [found if any(found) else None for found in details]
    if tokenized is not None:
        record["meta"] |= tokenized.meta()
    return orjson.dumps(record)


def parse_json(record: bytes | Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A pack's JSON as an object, from its bytes or as some decoder already parsed it.

    Raises:
        PackFormatError: it is not a JSON object.
    """
    if isinstance(record, bytes | bytearray | memoryview):
        try:
            record = orjson.loads(record)
        except orjson.JSONDecodeError as error:
            raise PackFormatError(f"pack {key!r}: JSON cannot be parsed: {error}") from error
    if not isinstance(record, Mapping):
        raise PackFormatError(f"pack {key!r}: JSON is {type(record).__name__}, not an object")
    return record


def restore_pack(
    record: bytes | Mapping[str, Any], key: str, task: str | None = None
) -> RestoredPack:
    """Read a pack's JSON.

    Args:
        key: the pack's key, for the keys of sub-samples that have none of their own.
        task: the task to restore as, where it is already known; otherwise `meta.task`; a pack
            without either is restored as captioning.

    Raises:
        PackFormatError: not a JSON object, a missing list, or lists of different length.
    """
    record = parse_json(record, key)
    meta = record.get("meta") or {}
    captions = _column(record, ("captions",), key)
    count = len(captions)
    without = [None] * count
    has_videos = "videos" in record
    videos = _column(record, ("videos",), key, count) if has_videos else without
    has_images = "images" in record or not has_videos
    images = _column(record, ("images",), key, count) if has_images else without
    given = tuple(name for name in ("prompt", "prompts") if record.get(name))
    prompts = _column(record, given, key, count) if given else [""] * count
    keys = tuple(meta.get("keys") or (f"{key}/{i}" for i in range(count)))
    systems = tuple(meta.get("system") or (None,) * count)
    tools = _column({"tools": [""] * count, **meta}, ("tools",), key, count)
    details = _column({"turns": [None] * count, **meta}, ("turns",), key, count)
    num_tokens = tuple(meta["num_tokens"]) if "num_tokens" in meta else None
    described = [keys, systems] if num_tokens is None else [keys, systems, num_tokens]
    if any(len(column) != count for column in described):
        raise PackFormatError(f"pack {key!r}: meta does not describe its {count} sub-samples")
    sub_task = task or meta.get("task") or "captioning"
    subs = tuple(
        _restore_sub_sample(*columns, task=sub_task)
        for columns in zip(
            *(keys, images, videos, prompts, captions, systems, tools, details), strict=True
        )
    )
    return RestoredPack(subs, keys, meta.get("task"), num_tokens, _tokenized(meta, key, count))


def _tokenized(meta: Mapping[str, Any], key: str, count: int) -> TokenizedPack | None:
    if "tokenized_with" not in meta:
        return None
    ids, loss = (_column(meta, (name,), key, count) for name in ("token_ids", "loss"))
    return TokenizedPack(tuple(map(TokenizedText, ids, loss)), meta["tokenized_with"])


def match_images(images: Any, key: str, members: Collection[str]) -> dict[str, str]:
    """The member that each image name in a pack's JSON means; names that mean none are left out.

    A name is a member's, possibly with the pack's key in front. Some converters leave in the JSON
    the paths that the images came from: where a flat pack names no member at all, its i-th name
    means the member `img{i}`.

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
    if found or not all(isinstance(entry, str) for entry in entries):
        return found
    numbered = ((_NUMBERED.fullmatch(member), member) for member in members)
    by_number = {int(match[1]): member for match, member in numbered if match}
    return {name: by_number[i] for i, name in enumerate(entries) if name and i in by_number}


def _column(
    record: Mapping[str, Any], names: tuple[str, ...], key: str, count: int | None = None
) -> list[Any]:
    column = next((record[name] for name in names if name in record), None)
    if not isinstance(column, list):
        raise PackFormatError(f"pack {key!r}: no list {names[0]!r}")
    if count is not None and len(column) != count:
        raise PackFormatError(f"pack {key!r}: {len(column)} {names[0]} for {count} captions")
    return column


def _strings(value: Any, what: str) -> list[str]:
    """One sub-sample's entry in either form: 'x' -> ['x'], ['x', 'y'] -> ['x', 'y']."""
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, str) for v in values):
        raise SampleError("bad_record", f"{what} is not text: {value!r}"[:200])
    return values


def _restore_sub_sample(
    key: str,
    images: Any,
    videos: Any,
    prompts: Any,
    captions: Any,
    system: str | None,
    tools: str,
    details: Any,
    *,
    task: str,
) -> SourceSample | SampleError:
    try:
        image_names = tuple(filter(None, _strings([] if images is None else images, "images")))
        video_names = tuple(filter(None, _strings([] if videos is None else videos, "videos")))
        answers = _strings(captions, "captions")
        questions = _strings(prompts, "prompt")
        if task == "captioning" and not questions:
            questions = [""] * len(answers)
        if len(questions) != len(answers):
            raise SampleError("bad_record", f"{len(questions)} prompts, {len(answers)} captions")
        details = [None] * len(answers) if details is None else details
        if not isinstance(details, list) or len(details) != len(answers):
            raise SampleError("bad_record", f"meta.turns does not describe {len(answers)} turns")
        if not isinstance(tools, str):
            raise SampleError("bad_record", f"meta.tools is not text: {tools!r}"[:200])
        turns = tuple(map(make_turn, questions, answers, details))
        sample = SourceSample(key, task, turns, image_names, system, video_names, tools)
        check_sample(sample)
    except SampleError as error:
        return error
    return sample
