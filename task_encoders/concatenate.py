"""Encoded samples as one packed row, and k rows as one.

    samples of 3, 2 and 4 tokens
    tokens       [a a a b b c c c c]
    cu_lengths   [0 3 5 9]
    position_ids [0 1 2 0 1 0 1 2 3]      (text; media as in M-RoPE), per sub-sample

A row is never padded unless asked to. `multiple` pads every sub-sample inside its own segment;
`pad_to_length` adds a last segment of padding, so that `cu_lengths[-1]` is always the row's length.
Samples that share a prefix are a trunk and branches (`rows.trees`): `parents` names the trunk of
each segment, and a tree is padded as a whole.

Pixels become values when they are asked for, in one pass from the bytes of all samples of a micro
batch to its memory; or, with `pixel_transport="uint8"`, on the device
(`model_inputs.normalise_pixels`).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from task_encoders import buffers
from task_encoders.media.patches import Normalisation, PixelTransport
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX

#: `map`, or a thread pool's.
Map = Callable[..., Iterable[Any]]


@dataclass(eq=False)
class Pixels:
    """Pixels of all images, or of all videos, of a row: bytes by sample until they are asked for,
    then one tensor. So pixels of k rows are written once, to the memory of their micro batch."""

    #: (P, n) each: bytes of a sample as an array, or final pixels as a tensor
    parts: Sequence[npt.NDArray[np.uint8] | torch.Tensor]
    #: converts bytes to values; None: bytes stay bytes
    normalisation: Normalisation | None
    #: how often a frame is repeated in its values
    repeats: int = 1
    #: how to go over the parts, here or in threads
    map_: Map = map

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def tensor(self) -> torch.Tensor:
        """(len, D) float32, or uint8 where bytes stay bytes; the same tensor every time."""
        filled = [part for part in self.parts if len(part)] or self.parts[:1]
        if len(filled) > 1 or not isinstance(filled[0], torch.Tensor):
            filled = [self._write(filled)]
        self.parts = filled
        return self.parts[0]  # type: ignore[return-value]

    def _write(self, parts: Sequence[npt.NDArray[np.uint8] | torch.Tensor]) -> torch.Tensor:
        """Write the parts into one tensor."""
        values, width = self.normalisation, parts[0].shape[1]
        if values is not None and not isinstance(parts[0], torch.Tensor):
            width *= self.repeats
        ends = np.cumsum([len(part) for part in parts])
        dtype = np.uint8 if values is None else np.float32
        pixels = buffers.empty((int(ends[-1]), width), dtype)

        def write(part: npt.NDArray[np.uint8] | torch.Tensor, place: npt.NDArray[Any]) -> None:
            if values is None or isinstance(part, torch.Tensor):
                np.copyto(place, part)
            else:
                values.values(part, self.repeats, place)

        for _ in self.map_(write, parts, np.split(pixels, ends[:-1])):
            pass
        return torch.from_numpy(pixels)

    def __reduce__(self) -> tuple[Any, ...]:
        """Join to one tensor, which goes to another process through shared memory."""
        return type(self), ([self.tensor], self.normalisation, self.repeats)


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of S tokens in P segments, with N images (L patches in all) and M videos (K patches
    in all). A patch has D values or, with `normalisation`, bytes (one frame for images)."""

    tokens: torch.Tensor  #: (S,) int64
    loss_weights: torch.Tensor  #: (S,) float32, not shifted, 0 at each sub-sample's first token
    position_ids: torch.Tensor  #: (3, S) or (1, S) int64
    attn_mask: torch.Tensor  #: (S,) bool, True = padding
    cu_lengths: torch.Tensor  #: (P + 1,) int32
    #: (P,) int32, the trunk whose tokens a segment sees as well, -1: none; (0,) without trees
    parents: torch.Tensor
    images: Pixels
    image_grid_thw: torch.Tensor  #: (N, 3) int32
    videos: Pixels
    video_grid_thw: torch.Tensor  #: (M, 3) int32
    media_counts: torch.Tensor  #: (P, 2) int32, images and videos of each segment
    is_padded: bool  #: whether padding was requested, needed or not
    normalisation: Normalisation | None = None  #: None: pixels are values already
    image_layout: str = "patches"  #: see model_inputs.IMAGE_LAYOUTS

    @property
    def labels(self) -> torch.Tensor:
        """(S,) int64, not shifted, IGNORE_INDEX where there is no loss."""
        return torch.where(self.loss_weights > 0, self.tokens, IGNORE_INDEX)

    @property
    def pixel_values(self) -> torch.Tensor:
        """(L, D) float32, or (L, C·p·p) uint8."""
        return self.images.tensor

    @property
    def pixel_values_videos(self) -> torch.Tensor:
        """(K, D) float32 or uint8."""
        return self.videos.tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all of its tensors by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        tensors = {name: one for name, one in values.items() if isinstance(one, torch.Tensor)}
        pixels = {"pixel_values": self.images, "pixel_values_videos": self.videos}
        return tensors | {name: one.tensor for name, one in pixels.items()}


#: Pixels, and the grids that they fill.
_GRIDS_OF: Final = {"images": "image_grid_thw", "videos": "video_grid_thw"}
#: Tensors whose first dimension is the row's tokens, segments or media.
_BY_TOKEN_OR_MEDIUM: Final = (
    *("tokens", "loss_weights", "attn_mask", "media_counts"),
    *_GRIDS_OF.values(),
)


def concatenate(
    samples: Sequence[EncodedSample],
    *,
    pad_token_id: int,
    parents: Sequence[int] | None = None,
    multiple: int = 1,
    pad_to_length: int | None = None,
    cross_sample_attention: bool = False,
    pixel_transport: PixelTransport = "float32",
    map_: Map = map,
) -> PackedRow:
    """Concatenate a pack's samples into one row.

    Args:
        parents: the trunk of each sample, which comes before it; -1: none.
        multiple: every sub-sample, or tree, is padded to a multiple of this many tokens; with
            `cross_sample_attention` the row is: between samples, later ones would see the padding.
        pad_to_length: the row is padded to this length.
        cross_sample_attention: one segment of all, unlike unpacked training.
        pixel_transport: "uint8" leaves the conversion of pixels to values to the device.
        map_: how to go over the samples' pixels, here or in threads.

    Raises:
        ValueError: no samples, a row longer than `pad_to_length`, or see `check_parents`.
    """
    check_parents(parents or (), len(samples))
    if parents is not None and cross_sample_attention:
        raise ValueError("cross_sample_attention: branches would see each other")
    padded = [-1] + [0] * (len(samples) - 1) if cross_sample_attention else parents
    lengths = _padded_lengths([len(sample.tokens) for sample in samples], padded, multiple)
    starts, total = place_samples(lengths, pad_to_length)
    tokens = np.full(total, pad_token_id, dtype=np.int64)
    loss_weights = np.zeros(total, dtype=np.float32)
    padding = np.ones(total, dtype=np.bool_)
    position_ids = np.empty((len(samples[0].position_ids), total), dtype=np.int64)
    position_ids[:, starts[-1] :] = np.arange(total - starts[-1])
    offset = 0
    for sample, start, end in zip(samples, starts, starts[1:], strict=False):
        real = slice(start, start + len(sample.tokens))
        tokens[real] = sample.tokens
        loss_weights[real] = sample.loss_weights
        loss_weights[start] = 0  # so that shifting the whole row never crosses a boundary
        padding[real] = False
        position_ids[:, real] = sample.position_ids + offset
        first = position_ids[:, real].max() + 1
        position_ids[:, real.stop : end] = first + np.arange(end - real.stop)
        if cross_sample_attention:
            offset = first + end - real.stop
    ends = boundaries(starts[[0, -1]] if cross_sample_attention else starts, total)
    media_counts = np.zeros((len(ends) - 1, 2), np.int32)  # 0 in padding
    own = [(len(s.image_grid_thw), len(s.video_grid_thw)) for s in samples]
    np.add.at(media_counts, np.searchsorted(ends.numpy(), starts[:-1], "right") - 1, own)
    normalisation, as_bytes = samples[0].normalisation, pixel_transport == "uint8"
    applied = None if as_bytes else normalisation
    return PackedRow(
        tokens=torch.from_numpy(tokens),
        loss_weights=torch.from_numpy(loss_weights),
        position_ids=torch.from_numpy(position_ids),
        attn_mask=torch.from_numpy(padding),
        cu_lengths=ends,
        parents=_as_parents(parents, len(ends) - 1),
        images=Pixels([s.image_pixels for s in samples], applied, normalisation.repeats, map_),
        image_grid_thw=torch.from_numpy(np.concatenate([s.image_grid_thw for s in samples])),
        videos=Pixels([s.video_pixels for s in samples], applied, 1, map_),
        video_grid_thw=torch.from_numpy(np.concatenate([s.video_grid_thw for s in samples])),
        media_counts=torch.from_numpy(media_counts),
        is_padded=multiple > 1 or pad_to_length is not None,
        normalisation=normalisation if as_bytes else None,
        image_layout=samples[0].image_layout,
    )


def check_parents(parents: Sequence[int], num_segments: int) -> None:
    """Check that each parent of a row's segments is -1 or an earlier segment without one; a row
    without trees has no parents. Raises ValueError."""
    if parents and not (
        len(parents) == num_segments
        and all(-1 <= one < i and (one < 0 or parents[one] < 0) for i, one in enumerate(parents))
    ):
        raise ValueError(
            f"parents {[*parents]} are not trunks that stand before branches, or -1, for each of "
            f"{num_segments} segments"
        )


def _padded_lengths(
    lengths: Sequence[int], parents: Sequence[int] | None, multiple: int
) -> list[int]:
    """Round the length of each sample up to a multiple; of a tree, the sum, by its last branch."""
    found, tree = [], 0
    following = [*parents[1:], -1] if parents else [-1] * len(lengths)
    for length, parent in zip(lengths, following, strict=True):
        tree += length
        is_last = parent < 0
        found.append(length + -tree % multiple if is_last else length)
        tree = 0 if is_last else tree
    return found


def _as_parents(parents: Sequence[int] | None, num_segments: int) -> torch.Tensor:
    """Return parents as int32, with -1 for a last segment of padding; (0,) without trees."""
    if parents is None or max(parents, default=-1) < 0:
        return torch.empty(0, dtype=torch.int32)
    return torch.tensor([*parents, *[-1] * (num_segments - len(parents))], dtype=torch.int32)


def place_samples(
    lengths: Sequence[int], pad_to_length: int | None
) -> tuple[npt.NDArray[np.int64], int]:
    """Return the boundaries of a row's samples, (P + 1,), and the row's length. Raises ValueError:
    no samples, or a row longer than `pad_to_length`."""
    if not lengths:
        raise ValueError("a row needs at least one sample")
    starts = np.cumsum([0, *lengths])
    total = pad_to_length or int(starts[-1])
    if starts[-1] > total:
        raise ValueError(f"a row of {starts[-1]} tokens does not fit pad_to_length {pad_to_length}")
    return starts, total


def boundaries(starts: npt.NDArray[np.int64], total: int) -> torch.Tensor:
    """Return cu_lengths: a segment from each start to the next, then one of padding, if any."""
    ends = [*starts.tolist(), total] if total > starts[-1] else starts.tolist()
    return torch.tensor(ends, dtype=torch.int32)


def merge_rows(rows: Sequence[PackedRow]) -> PackedRow:
    """Join k rows to one: a micro batch of k packs without padding.

    Segments stay as they are: cu_lengths [0, 3, 5] and [0, 4] give [0, 3, 5, 9].
    """
    ends, parents = [rows[0].cu_lengths[:1]], list[int]()
    length = 0
    for row in rows:
        ends.append(row.cu_lengths[1:] + length)
        own, count = row.parents.tolist(), len(row.cu_lengths) - 1
        check_parents(own, count)
        parents += [one + len(parents) if one >= 0 else -1 for one in own] or [-1] * count
        length += len(row.tokens)
    joined: dict[str, Any] = {
        name: torch.cat([getattr(row, name) for row in rows]) for name in _BY_TOKEN_OR_MEDIUM
    }
    for name in _GRIDS_OF:
        parts = [part for row in rows for part in getattr(row, name).parts]
        joined[name] = replace(getattr(rows[0], name), parts=parts)
    return replace(
        rows[0],
        **joined,
        position_ids=torch.cat([row.position_ids for row in rows], dim=1),
        cu_lengths=torch.cat(ends),
        parents=_as_parents(parents, len(parents)),
        is_padded=any(row.is_padded for row in rows),
    )


def split_row(row: PackedRow) -> list[PackedRow]:
    """Split a row into its sub-samples, each a row of one segment, with its own padding, and with
    the tokens and media of its trunk; a segment that is nothing but padding is left out.
    `merge_rows` joins them again, but the trunks of trees are then repeated for each branch."""
    segments = _segments(row)
    parents = row.parents.tolist() or [-1] * len(segments)
    check_parents(parents, len(segments))
    found = []
    for number, (own, parent) in enumerate(zip(segments, parents, strict=True)):
        if own.attn_mask.all() or number in parents:
            continue
        if parent >= 0:
            trunk = segments[parent]
            own = merge_rows([trunk, own])  # pixels that are all the trunk's stay where they are
            counts = own.media_counts.sum(0, keepdim=True, dtype=torch.int32)
            own = replace(own, cu_lengths=own.cu_lengths[[0, -1]], media_counts=counts)
        found.append(own)
    return found


def _segments(row: PackedRow) -> list[PackedRow]:
    """Return each segment as a row without a trunk."""
    lengths = row.cu_lengths.diff().tolist()
    images, videos = row.media_counts.T.tolist()
    parts = {
        "tokens": row.tokens.split(lengths),
        "loss_weights": row.loss_weights.split(lengths),
        "position_ids": row.position_ids.split(lengths, dim=1),
        "attn_mask": row.attn_mask.split(lengths),
        "media_counts": row.media_counts.split(1),
        "image_grid_thw": row.image_grid_thw.split(images),
        "video_grid_thw": row.video_grid_thw.split(videos),
    }
    for pixels, grids in _GRIDS_OF.items():
        all_pixels, grid_thw = getattr(row, pixels), getattr(row, grids).numpy()
        ends = np.cumsum([0, *pixel_rows(len(all_pixels), grid_thw)])
        sizes = np.diff(ends[np.cumsum([0, *map(len, parts[grids])])]).tolist()
        cut = all_pixels.tensor.split(sizes)
        parts[pixels] = [replace(all_pixels, parts=[own]) for own in cut]
    return [
        replace(
            row,
            cu_lengths=torch.tensor([0, length], dtype=torch.int32),
            parents=_as_parents(None, 1),
            **dict(zip(parts, values, strict=True)),
        )
        for length, *values in zip(lengths, *parts.values(), strict=True)
    ]


def pixel_rows(num_rows: int, grids: npt.NDArray[Any]) -> list[int]:
    """Count the rows of pixels of each medium: its patches; or one, if a whole image is a row."""
    patches: list[int] = grids.prod(1).tolist()
    return patches if num_rows > len(grids) else [1] * len(grids)
