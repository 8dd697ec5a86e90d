"""preview: packs as training sees them: read from the shards, restored and encoded by the task
encoder, and their tokens spelled out with what is trained and what is not."""

import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from offline_packing.errors import StageError
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.energon_metadata import check_energon
from offline_packing.runs.manifest import Manifest, require_manifest
from offline_packing.runs.run import Run
from task_encoders.families import ModelSettings
from task_encoders.media.image import MAX_IMAGE_PIXELS, decode_image
from task_encoders.media.video_file import decode_frames, read_video_header
from task_encoders.pack_format import JSON_PART, pack_key, parse_json, restore_pack
from task_encoders.sample_encoder import IGNORE_INDEX, SampleEncoder
from task_encoders.samples import SourceSample
from task_encoders.settings import PackingSettings
from task_encoders.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedRowSample
    from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder

#: Control tokens that stand for pixels: shown as one, with everything between their tags.
_PADS: Final = {"<|image_pad|>": "image", "<|video_pad|>": "video"}


@dataclass(frozen=True)
class Piece:
    """Tokens shown as one: `kind` is text, control, vision or padding."""

    kind: str
    text: str


@dataclass(frozen=True)
class Span:
    """Tokens in a row that all carry loss, or that all carry none."""

    trained: bool
    num_tokens: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class MediumPreview:
    """One image or video of a sub-sample, upright: size in pixels, grid (t, h, w) in
    patches."""

    name: str
    width: int
    height: int
    grid: tuple[int, ...]
    #: the image's file; of a video the first frame that is trained on, as PNG
    picture: bytes
    #: that are trained on; None: an image
    num_frames: int | None = None

    def __str__(self) -> str:
        frames = "" if self.num_frames is None else f"{self.num_frames} frames "
        return f"{frames}{self.width}x{self.height} -> {self.grid[1]}x{self.grid[2]}"


@dataclass(frozen=True)
class SubSamplePreview:
    """One segment of a row. `num_tokens` counts its padding."""

    sample: SourceSample
    num_tokens: int
    num_loss_tokens: int
    images: tuple[MediumPreview, ...]
    videos: tuple[MediumPreview, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class PackPreview:
    """One pack as a row."""

    key: str
    shard: str
    split: str
    seq_length: int
    cu_lengths: tuple[int, ...]
    sub_samples: tuple[SubSamplePreview, ...]
    #: "key: reason: detail" of what the task encoder leaves out
    dropped: tuple[str, ...]

    @property
    def fill(self) -> float:
        """Tokens over seq_length."""
        return self.cu_lengths[-1] / self.seq_length


def preview(
    run: Run, *, num_packs: int = 3, packs: Sequence[str] = (), seed: int = 0
) -> Iterator[PackPreview]:
    """Packs of a complete output.

    Args:
        num_packs: how many are drawn if none are named.
        packs: keys or numbers of packs.
        seed: decides which are drawn.

    Raises:
        StageError: the packs are not written, there is no such pack, or the configuration's model
            is not the one that they were measured with.
    """
    check_energon()
    manifest = require_manifest(run)
    numbers = choose(manifest, num_packs, packs, seed)
    task_encoder = _task_encoder(run, manifest)
    return (_preview_pack(run, manifest, task_encoder, number) for number in numbers)


def choose(manifest: Manifest, num_packs: int, packs: Sequence[str], seed: int) -> list[int]:
    """Numbers of the named packs, or of some drawn ones, ascending. Raises StageError where there
    is no such pack."""
    total = sum(shard["packs"] for shard in manifest["shards"])
    if not packs:
        drawn = np.random.default_rng(seed).choice(total, min(num_packs, total), replace=False)
        return sorted(drawn.tolist())
    prefix = manifest["config"]["output"]["key_prefix"]
    form = re.compile(rf"(?:{re.escape(prefix)}ps_)?(\d+)")
    numbers = []
    for name in packs:
        match = form.fullmatch(name)
        if match is None or int(match[1]) >= total:
            raise StageError(
                f"no pack {name!r}; there are {pack_key(0, prefix)} to "
                f"{pack_key(total - 1, prefix)}, or 0 to {total - 1}"
            )
        numbers.append(int(match[1]))
    return numbers


def _task_encoder(run: Run, manifest: Manifest) -> "Qwen2VLTaskEncoder":
    from task_encoders.packed_task_encoder import Qwen2VLTaskEncoder, check_manifest

    task = manifest["task"]
    try:
        task_encoder = Qwen2VLTaskEncoder(
            model=run.config.model,
            seq_length=manifest["seq_length"],
            pad_multiple=manifest["pad_multiple"],
            settings=PackingSettings(packed=True, vqa=task == "vqa", bmr=task == "bmr"),
        )
        check_manifest(run.workspace.root, task_encoder)
    except ValueError as error:
        raise StageError(str(error)) from error
    return task_encoder


def _preview_pack(
    run: Run, manifest: Manifest, task_encoder: "Qwen2VLTaskEncoder", number: int
) -> PackPreview:
    shards = manifest["shards"]
    ends = np.cumsum([shard["packs"] for shard in shards])
    shard = shards[int(np.searchsorted(ends, number, side="right"))]
    key = pack_key(number, manifest["config"]["output"]["key_prefix"])
    members = LAYOUTS[manifest["layout"]].read_pack(run.workspace.root, shard["name"], key)
    row = encode_pack(task_encoder, key, members)
    return PackPreview(
        key=key,
        shard=shard["name"],
        split=shard["split"],
        seq_length=manifest["seq_length"],
        cu_lengths=tuple(row.row.cu_lengths.tolist()),
        sub_samples=tuple(_sub_samples(run, task_encoder, row, members)),
        dropped=tuple(row.dropped),
    )


def encode_pack(
    task_encoder: "Qwen2VLTaskEncoder", key: str, members: Mapping[str, bytes]
) -> "PackedRowSample":
    """A pack's members as the row that the loader's task encoder makes of them.

    Raises:
        StageError: the pack cannot be used.
    """
    from megatron.energon.errors import FatalSampleError

    from task_encoders.energon_samples import PackedSample, part_filter, sample_loader

    parts = {name: data for name, data in members.items() if part_filter(name)}
    try:
        loaded = sample_loader({"__key__": key, **parts})
        sample = PackedSample(__key__=key, __restore_key__=(), __subflavors__={}, **loaded)
        return task_encoder.encode_sample(sample)
    except (FatalSampleError, ValueError) as error:
        raise StageError(f"pack {key!r} cannot be trained on: {error}") from error


def _sub_samples(
    run: Run,
    task_encoder: "Qwen2VLTaskEncoder",
    row: "PackedRowSample",
    members: Mapping[str, bytes],
) -> Iterator[SubSamplePreview]:
    """What the row's segments were made from, next to the result."""
    key = row.__key__
    max_image_pixels = run.config.model.max_image_pixels or MAX_IMAGE_PIXELS
    restored = restore_pack(parse_json(members[JSON_PART], key), key)
    samples = (sub for sub in restored.sub_samples if isinstance(sub, SourceSample))
    image_grids, video_grids = (
        iter(grids.tolist()) for grids in (row.row.image_grid_thw, row.row.video_grid_thw)
    )
    bounds = itertools.pairwise(row.row.cu_lengths.tolist())
    for sub_key, (start, end) in zip(row.sub_sample_keys, bounds, strict=True):
        sample = next(sample for sample in samples if sample.key == sub_key)
        images = tuple(
            _image(name, members[name], next(image_grids), max_image_pixels)
            for name in sample.images
        )
        videos = tuple(
            _video(name, members[name], next(video_grids), task_encoder.encoder, run.config.model)
            for name in sample.videos
        )
        labels = row.row.labels[start:end].numpy()
        spans = spell_row(
            row.row.tokens[start:end].numpy(),
            labels,
            row.row.attn_mask[start:end].numpy(),
            task_encoder.encoder.tokenizer,
            [f"{image.grid[1]}x{image.grid[2]}" for image in images],
            [f"{v.num_frames} frames {v.grid[1]}x{v.grid[2]}" for v in videos],
        )
        num_loss_tokens = int((labels != IGNORE_INDEX).sum())
        yield SubSamplePreview(sample, end - start, num_loss_tokens, images, videos, tuple(spans))


def _image(name: str, data: bytes, grid: Sequence[int], max_image_pixels: int) -> MediumPreview:
    image = decode_image(data, max_image_pixels=max_image_pixels)
    return MediumPreview(name, image.width, image.height, tuple(grid), data)


def _video(
    name: str, data: bytes, grid: Sequence[int], encoder: SampleEncoder, model: ModelSettings
) -> MediumPreview:
    limit = model.max_image_pixels or MAX_IMAGE_PIXELS
    header = read_video_header(
        io.BytesIO(data), max_frame_pixels=limit, max_frames=model.max_video_frames
    )
    frames = encoder.sample_video(header).frames
    first = next(decode_frames(data, header, frames[:1], limit))
    buffer = io.BytesIO()
    first.save(buffer, "PNG")
    picture = buffer.getvalue()
    return MediumPreview(name, first.width, first.height, tuple(grid), picture, len(frames))


def spell_row(
    tokens: npt.NDArray[np.int64],
    labels: npt.NDArray[np.int64],
    is_padding: npt.NDArray[np.bool_],
    tokenizer: Tokenizer,
    images: Sequence[str],
    videos: Sequence[str],
) -> Iterator[Span]:
    """A segment as text, in spans with loss and without.

    Args:
        tokens, labels, is_padding: (num_tokens,) of one segment.
        images, videos: the size of each, in order, as it is to be shown.
    """
    trained = labels != IGNORE_INDEX
    remaining = {"image": iter(images), "video": iter(videos)}
    # A pair changes where a span ends: [0 0 0 1 1 0] -> 3, 5
    kinds = 2 * trained + is_padding
    cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), len(tokens)]
    for start, end in itertools.pairwise(cuts):
        if is_padding[start]:
            pieces = [Piece("padding", f"[padding: {end - start:,} tokens]")]
        else:
            spelled = tokenizer.spell(tokens[start:end].tolist())
            pieces = list(_pieces(spelled, remaining))
        yield Span(bool(trained[start]), end - start, tuple(pieces))


def _pieces(
    spelled: Iterator[tuple[str, bool]], sizes: Mapping[str, Iterator[str]]
) -> Iterator[Piece]:
    """Text and control tokens, with those for pixels merged into one per image or video."""
    for (text, is_control), some in itertools.groupby(spelled):
        count = len(list(some))
        if is_control and text in _PADS:
            size = next(sizes[_PADS[text]])
            yield Piece("vision", f"[{_PADS[text]} {size}: {count:,} tokens]")
        else:
            yield from [Piece("control" if is_control else "text", text)] * count
