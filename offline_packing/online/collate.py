"""Samples as dicts to one row for transformers, without padding between them.

samples of 4, 2, 3 and 1 tokens
input_ids    [A B C D E F G H I J]
position_ids [0 1 2 3 0 1 0 1 2 0]
cu_seq_lens  [0 4 6 9 10]
"""

import reprlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np
import torch

from task_encoders.concatenate import boundaries, place_samples
from task_encoders.model_inputs import media_kwargs, segment_kwargs
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX, SampleError
from task_encoders.settings import FRACTIONS

#: Fields with one value per token, without input_ids and position_ids, and their value in padding.
_PER_TOKEN: Final = {
    "labels": IGNORE_INDEX,
    "mm_token_type_ids": 0,
    "token_type_ids": 0,
    "loss_scale": 0,
    "loss_mask": 0,
}
#: Fields that a sample without media may lack.
_ZERO_BY_DEFAULT: Final = ("mm_token_type_ids", "token_type_ids")
#: Pixels and grids of images and videos, as `media_kwargs` takes them.
_MEDIA: Final = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
#: Stay lists: models take images of several sizes that way.
_IMAGES: Final = "images"
#: The boundaries replace them.
_LEFT_OUT: Final = ("attention_mask", "length", "lengths")


def count_tokens(sample: Any) -> int:
    """Count the tokens of a sample: its `length`, or those of its `input_ids` or `tokens`. Raises
    SampleError if it has none of them, or they contradict each other."""
    if isinstance(sample, Mapping):
        ids, length = sample.get("input_ids"), sample.get("length")
    else:
        ids, length = getattr(sample, "tokens", None), getattr(sample, "length", None)
    found = length if ids is None else np.shape(ids)[-1]
    if found is None:
        raise SampleError("bad_record", "it has neither length nor input_ids")
    if ids is not None and np.ndim(ids) > 1 and np.shape(ids) != (1, found):
        raise SampleError("bad_record", f"its input_ids have shape {np.shape(ids)}, not (n,)")
    if not hasattr(found, "__index__") or isinstance(found, bool):
        raise SampleError("bad_record", f"its length is {found!r}, not a whole number")
    if length is not None and length != found:
        raise SampleError("bad_record", f"its length is {length}, and it has {found} input_ids")
    return int(found)


def padding_free_collator(
    samples: Sequence[Any], *, pad_to_length: int | None = None, pad_token_id: int = 0
) -> dict[str, Any]:
    """Join all samples into one row of S tokens, as the arguments of transformers' models.

    Args:
        samples: mappings with `input_ids` (n,), and other arguments of the model: `labels` (not
            shifted; default, if no sample has any: input_ids), M-RoPE's `position_ids` (3, n),
            `pixel_values` and grids (joined along their first dimension), ...; or `EncodedSample`
            of one family; or packs: lists of these. Lists of numbers, or of arrays of one shape,
            are arrays, and `images` that are lists one list. None, `attention_mask` and `length`
            are left out.
        pad_to_length: a last segment of padding fills the joined row up to this length.

    Returns:
        input_ids, labels (1, S); position_ids (1, S), or (4, 1, S) with M-RoPE, which begin at 0
        again in each sample; cu_seq_lens_q/k (P + 1,), max_length_q/k; use_cache; the other fields.

    Raises:
        ValueError: there is no sample, one has no tokens or lacks a field that others have, a
            field cannot be joined, or the row is longer than `pad_to_length`.
    """
    packs = [s if isinstance(s, list | tuple) else [s] for s in samples]
    flat = list(chain.from_iterable(packs))
    rows = [_fields(sample) for sample in flat]
    missing = sum("labels" not in row for row in rows)
    if 0 < missing < len(rows):  # all of their tokens would be trained
        raise ValueError(
            f"{missing} of {len(rows)} samples of a row have no labels; give labels to all "
            f"({IGNORE_INDEX} where nothing is learned), or to none"
        )
    for row in rows:  # the model shifts the joined row: nothing is learned across a boundary
        row["labels"] = row.get("labels", row["input_ids"]).clone()
        row["labels"][:1] = IGNORE_INDEX
    lengths = [len(row["input_ids"]) for row in rows]
    starts, total = place_samples(lengths, pad_to_length)
    padding = total - int(starts[-1])
    positions = _positions([row.pop("position_ids", None) for row in rows], lengths, padding)
    fills = _PER_TOKEN | {"input_ids": pad_token_id}
    fields = {
        name: _join(name, rows, padding, fills.get(name))
        for name in dict.fromkeys(chain.from_iterable(rows))
    }
    for layout in {one.image_layout for one in flat if isinstance(one, EncodedSample)}:
        imgs, grids, clips, clip_grids = (fields.pop(name, torch.empty(0)) for name in _MEDIA)
        fields |= media_kwargs(imgs, grids, clips, clip_grids, layout)
    return fields | segment_kwargs(positions, boundaries(starts, total))


def _fields(sample: Any) -> dict[str, Any]:
    """Return a sample's arrays, and its images if a list; fields with a value per token as (n,)."""
    if isinstance(sample, EncodedSample):
        sample = _encoded_fields(sample)
    given = sample.get("input_ids")
    ids = None if given is None else _as_tensor("input_ids", given)
    if ids is None or not ids.numel():
        state = "missing" if ids is None else "empty"
        raise ValueError(f"input_ids of a sample with {sorted(sample)} is {state}; give its tokens")
    count = ids.shape[-1]
    found: dict[str, Any] = {}
    for name, value in sample.items():
        if name in _LEFT_OUT or value is None:
            continue
        if name == _IMAGES and isinstance(value, list | tuple):
            found[name] = list(value)
            continue
        tensor = _as_tensor(name, value)
        if name == "input_ids" or name in _PER_TOKEN:
            if tensor.shape not in ((count,), (1, count)):
                raise ValueError(
                    f"{name} of a sample of {count} tokens has shape {tuple(tensor.shape)}; give "
                    f"one value per token, ({count},)"
                )
            tensor = tensor.flatten()
        if tensor.numel():
            found[name] = tensor
    return found


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    """Convert an array, or a value that can be one; rows are joined along its first dimension."""
    if isinstance(value, torch.Tensor):
        return torch.atleast_1d(value)
    try:
        if not isinstance(value, np.ndarray | np.generic | list | tuple | float | int):
            raise TypeError
        if isinstance(value, list | tuple) and value and isinstance(value[0], torch.Tensor):
            return torch.stack(list(value))
        tensor = torch.atleast_1d(torch.as_tensor(np.asarray(value)))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"field {name!r} of a sample, {type(value).__name__} {reprlib.repr(value)}, is not an "
            "array and cannot be joined to a row; make it an array, or remove it from the samples"
        ) from error
    from_list = tensor.is_floating_point() and not isinstance(value, np.ndarray | np.generic)
    return tensor.to(torch.get_default_dtype()) if from_list else tensor


def _encoded_fields(sample: EncodedSample) -> dict[str, Any]:
    if ((sample.loss_weights > 0) & (sample.loss_weights != 1)).any():
        what = f"sample {sample.key!r}"
        raise ValueError(FRACTIONS.format(what, "transformers' models"))
    fields: dict[str, Any] = {"input_ids": sample.tokens, "labels": sample.labels}
    if len(sample.position_ids) > 1:
        fields["position_ids"] = sample.position_ids
    if len(sample.image_grid_thw):
        fields["pixel_values"] = sample.pixel_values
        fields["image_grid_thw"] = sample.image_grid_thw.astype(np.int64)
    if len(sample.video_grid_thw):
        fields["pixel_values_videos"] = sample.pixel_values_videos
        fields["video_grid_thw"] = sample.video_grid_thw.astype(np.int64)
    return fields


def _positions(
    given: Sequence[torch.Tensor | None], lengths: Sequence[int], padding: int
) -> torch.Tensor:
    """Join positions to (3, 1, S) if any sample has M-RoPE's rows, (3, n) or with a row before them
    (4, n); without any of them to (1, 1, S), which is ignored."""
    rows = []
    for positions, length in zip(given, lengths, strict=True):
        shape = () if positions is None else tuple(positions.shape)
        if shape not in ((), *((*n, length) for n in ((), (1,), (3,), (4,), (3, 1), (4, 1)))):
            raise ValueError(
                f"position_ids of a sample of {length} tokens have shape {shape}, not "
                f"({length},), (3, {length}) or (4, {length})"
            )
        is_media = positions is not None and positions.numel() > length
        rows.append(positions.reshape(-1, length)[-3:] if is_media else None)  # type: ignore[union-attr]
    if not any(row is not None for row in rows):
        return torch.zeros(1, 1, sum(lengths) + padding)
    parts = [
        torch.arange(length).expand(3, -1) if row is None else row
        for row, length in zip([*rows, None], [*lengths, padding], strict=True)
    ]
    return torch.cat(parts, dim=1)[:, None]


def _join(name: str, rows: Sequence[Mapping[str, Any]], padding: int, fill: int | None) -> Any:
    """Join a field of all rows: to (1, S), with `fill` in `padding` places at the end; or, if
    `fill` is None and it is not per token, along its first dimension."""
    if name in _ZERO_BY_DEFAULT:
        rows = [{name: torch.zeros_like(row["input_ids"]), **row} for row in rows]
    parts = [row[name] for row in rows if name in row]
    if fill is not None:
        if len(parts) < len(rows):
            raise ValueError(f"{name} has not one value per token in all samples of a row")
        return torch.nn.functional.pad(torch.cat(parts), (0, padding), value=fill)[None]
    if all(isinstance(part, list) for part in parts):
        return list(chain.from_iterable(parts))
    try:
        return torch.cat(parts)
    except (TypeError, RuntimeError) as error:
        shapes = [tuple(part.shape) if hasattr(part, "shape") else "a list" for part in parts]
        raise ValueError(
            f"field {name!r} of the samples of a row has {shapes}; give arrays that differ in "
            "their first dimension only"
        ) from error
