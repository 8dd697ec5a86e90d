"""A pack on disk: the names of its members and its JSON. `pack.py` reads it.

A pack is one WebDataset sample: the media with their original bytes and extension, and one JSON.

    ps_00000000.img000.jpg
    ps_00000000.img001.png
    ps_00000000.json

The flat form holds one image and one turn per sub-sample (captioning, VQA):

    {"images": ["img000.jpg", ...], "prompt": [str, ...], "captions": [str, ...], "meta": {...}}

The nested form holds any number of images and turns. A whole pack uses it if any sub-sample needs
it, and every multi-turn pack does:

    {"images": [["img000.jpg"], [], ...], "prompt": [[str, ...], ...], "captions": [[str], ...]}

A pack with videos is nested and has one more list, whose names are numbered separately:

    {"images": [["img000.jpg"], [], ...], "videos": [[], ["vid000.mp4"], ...], ...}

`meta` holds `task`, and per sub-sample `keys`, `num_tokens` and `system` (null: the template's
default); if any has them, also `tools` (JSON; "": none) and `turns`, the fields of turns besides
prompt and answer (`Turn.details`; null: none), and `options`, those of each medium's, images first
(`MediumOptions`; null: none). `trees` lists sub-samples that begin
with the same media, each entry a `Tree`; their media are named by all of them, and are members
once. `generation` is the output's (see `Manifest`); `checksums` are of the media in the pack, by
member name; in their place `media` says where media are that a pack refers to (`stored_media`).

Packs written by others may have `prompts` for `prompt`, or neither; `img0` for `img000`; empty or
null names for missing media; `videos` without `images`; no `meta`; and names of images that differ
from the members' (see `pack.match_images`).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson
import xxhash

from task_encoders.samples import SourceSample
from task_encoders.samples.medium_options import options_json

JSON_PART: Final = "json"

#: Extensions written as they are. Anything else is named after the image's own format: a member's
#: name decides what readers do with it, so a source must not choose it freely.
IMAGE_EXTENSIONS: Final = frozenset("jpg jpeg png webp avif gif bmp tif tiff".split())
VIDEO_EXTENSIONS: Final = frozenset({"mp4", "m4v", "mov", "3gp", "webm", "mkv", "avi"})
MEDIA_EXTENSIONS: Final = IMAGE_EXTENSIONS | VIDEO_EXTENSIONS


class Tree(NamedTuple):
    """Consecutive sub-samples of a pack that begin alike."""

    first: int  #: number of the first of them
    num_samples: int
    num_tokens: int  #: equal tokens at their beginning, the trunk (`rows.trees`)
    num_images: int
    num_videos: int

    @property
    def end(self) -> int:
        """Number of the sub-sample after them."""
        return self.first + self.num_samples


@dataclass(frozen=True, slots=True)
class PackedSubSample:
    """One sub-sample to be written into a pack: the sample, one extension per medium (images first,
    then videos), its length."""

    sample: SourceSample
    extensions: tuple[str, ...]
    num_tokens: int


def pack_key(index: int, prefix: str = "") -> str:
    """Return a pack's key, `ps_00000042`; `prefix` keeps the keys of blended datasets apart."""
    return f"{prefix}ps_{index:08d}"


def index_of_key(key: str) -> int:
    """Return the `index` of a `pack_key`."""
    return int(key.rpartition("_")[2])


def extension_of(name: str) -> str:
    """Return the extension of a file name, which may be an extension alone."""
    return name.rpartition(".")[2].lower()


def image_extension(name: str, image_format: str) -> str:
    """Return the extension of a pack member: the source's own if it is a known image extension,
    else that of the format found in the header ('JPEG' -> 'jpg')."""
    extension = extension_of(name)
    if extension in IMAGE_EXTENSIONS:
        return extension
    return {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif"}.get(image_format, image_format.lower())


def is_image_name(name: str) -> bool:
    """Tell whether a file name, or an extension alone, is an image's."""
    return extension_of(name) in IMAGE_EXTENSIONS


def is_video_name(name: str) -> bool:
    """Tell whether a file name, or an extension alone, is a video's."""
    return extension_of(name) in VIDEO_EXTENSIONS


def video_extension(name: str, container: str) -> str:
    """Return the extension of the container found in the header; see `image_extension`."""
    return extension_of(name) if is_video_name(name) else container


def media_part_names(extensions: Sequence[str]) -> list[str]:
    """Name the members of all media of a pack, in order: ['jpg', 'mp4', 'png'] -> ['img000.jpg',
    'vid000.mp4', 'img001.png']."""
    images, videos = itertools.count(), itertools.count()
    return [
        f"vid{next(videos):03d}.{extension}"
        if is_video_name(extension)
        else f"img{next(images):03d}.{extension}"
        for extension in extensions
    ]


#: Checksum of a medium's bytes in a pack: xxh3_64 in 16 hexadecimal digits.
checksum = xxhash.xxh3_64_hexdigest


def pack_json(
    sub_samples: Sequence[PackedSubSample],
    task: str,
    *,
    trees: Sequence[Tree] = (),
    generation: str = "",
    media: Sequence[bytes] = (),
    places: Sequence[Sequence[Any]] = (),
) -> bytes:
    """Write the JSON of a pack. Media are named in the order of `media_part_names` over all
    sub-samples.

    Deterministic: same sub-samples, same bytes.

    Args:
        trees: the extensions of all but a tree's first sub-sample are without those of its media.
        generation: of the output that the pack is written for.
        media: content of all media in that order, for their checksums.
        places: of all media, if the pack refers to them (`stored_media`).
    """
    all_names = media_part_names([e for sub in sub_samples for e in sub.extensions])
    names = iter(all_names)
    own_names = [[next(names) for _ in sub.extensions] for sub in sub_samples]
    images = [[name for name in own if not is_video_name(name)] for own in own_names]
    videos = [[name for name in own if is_video_name(name)] for own in own_names]
    for tree in trees:
        for number in range(tree.first + 1, tree.end):
            images[number] = images[tree.first][: tree.num_images] + images[number]
            videos[number] = videos[tree.first][: tree.num_videos] + videos[number]
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
    if any(sample.options for sample in samples):
        asked = [options_json(sample.options) or None for sample in samples]
        record["meta"]["options"] = asked
    if trees:
        record["meta"]["trees"] = [list(tree) for tree in trees]
    if generation:
        record["meta"]["generation"] = generation
    if media:
        record["meta"]["checksums"] = dict(zip(all_names, map(checksum, media), strict=True))
    if places:
        record["meta"]["media"] = dict(zip(all_names, places, strict=True))
    return orjson.dumps(record)
