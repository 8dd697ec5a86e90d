"""Convert a batch to the arguments of a model: pixel values, megatron-core's PackedSeqParams,
transformers' arguments."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from task_encoders.samples import IGNORE_INDEX
from task_encoders.settings import TREES

if TYPE_CHECKING:
    from task_encoders.energon_samples import PackedBatch

#: Media fields of a row, by the names of transformers' models.
MEDIA_INPUTS = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")


def required_pad_multiple(
    *, context_parallel: int = 1, tensor_parallel: int = 1, sequence_parallel: bool = False
) -> int:
    """Return the divisor that `pack.pad_multiple` needs, so that every sub-sample can be cut.

    Context parallelism cuts each sub-sample into 2·CP chunks; sequence parallelism cuts each rank's
    part of the row into TP. FP8 asks for 16 (or 128, by recipe) on top: pass the least common
    multiple.
    """
    multiple = 2 * context_parallel if context_parallel > 1 else 1
    return math.lcm(multiple, context_parallel * tensor_parallel if sequence_parallel else 1)


def normalise_pixels(batch: "PackedBatch") -> "PackedBatch":
    """Convert a batch's pixels to float32 values on the batch's device.

    They equal those of `pixel_transport: float32` bit for bit: each byte's value is looked up. A
    batch that already contains values is returned unchanged.
    """
    table = getattr(batch, "byte_values", None)  # a trainer's own batch may lack it
    if table is None or not len(table):
        return batch
    imgs, videos = batch.imgs, batch.pixel_values_videos
    if len(batch.image_grid_thw):
        imgs = look_up(imgs, table, batch.frame_repeats)
    if len(batch.video_grid_thw):
        videos = look_up(videos, table)
    return replace(
        batch, imgs=imgs.float(), pixel_values_videos=videos.float(), byte_values=table[:0]
    )


def look_up(rows: torch.Tensor, table: torch.Tensor, repeats: int = 1) -> torch.Tensor:
    """Convert (P, C·n) bytes to (P, C·repeats·n) values, as `Normalisation.values` does."""
    channels = torch.arange(len(table), dtype=torch.int32, device=rows.device)
    index = rows.reshape(len(rows), len(table), -1).int() + 256 * channels[:, None]
    values = table.flatten().index_select(0, index.flatten()).reshape(index.shape)
    return values[:, :, None].expand(-1, -1, repeats, -1).reshape(len(rows), -1)


def refuse_trees(batch: "PackedBatch") -> None:
    """Raise ValueError for a row whose segments share prefixes, which ordinary attention would
    train without them."""
    parents = getattr(batch, "parents", None)  # a trainer's own batch may lack it
    if parents is not None and parents.numel():
        raise ValueError(TREES.format("the row"))


def to_packed_seq_params(batch: "PackedBatch", cp_group: Any = None, *, trees: bool = False) -> Any:
    """Make megatron-core's `PackedSeqParams` in thd format.

    `cu_seqlens_*` count real tokens: cu_lengths [0, 4, 8], attn_mask ...x ..xx -> [0, 3, 5]. A
    segment of nothing but padding (a row's tail) keeps its length: it harms no other segment, and
    attention needs at least one key. If padding was asked for, `cu_seqlens_*_padded` hold the
    boundaries in the row, even if it happened to need none: under context parallelism models read
    them in any case. Otherwise they are None.

    Args:
        cp_group: the ranks that share the row, if several do.
        trees: the caller hands `batch.parents` to an attention that knows them.

    Raises:
        ValueError: the row holds prefix trees, and `trees` is false.
    """
    if not trees:
        refuse_trees(batch)
    from megatron.core.packed_seq_params import PackedSeqParams

    padded = batch.cu_lengths.flatten()
    starts = padded.long()
    real = torch.cat([batch.attn_mask.new_zeros(1), ~batch.attn_mask.flatten()]).long().cumsum(0)
    counts = real[starts].diff()
    counts = torch.where(counts == 0, starts.diff(), counts)
    logical = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)
    # A trainer's own batch of the same names may lack the flag.
    is_padded = getattr(batch, "is_padded", False) or not torch.equal(logical, padded)
    longest = int(padded.diff().max())
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=logical,
        cu_seqlens_kv=logical,
        cu_seqlens_q_padded=padded if is_padded else None,
        cu_seqlens_kv_padded=padded if is_padded else None,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        cp_group=cp_group,
    )


def pad_batch(batch: "PackedBatch", length: int, pad_token_id: int) -> "PackedBatch":
    """Fill the batch's row up to `length` by one more segment, of padding.

    Packs of 3 and 2 tokens in a row of 8: cu_lengths [0, 3, 5] -> [0, 3, 5, 8].

    Raises:
        ValueError: the row is longer.
    """
    padding = length - batch.tokens.shape[1]
    if padding < 0:
        raise ValueError(f"a row of {batch.tokens.shape[1]} tokens does not fit length {length}")

    def filled(tensor: torch.Tensor, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (0, padding), value=value)

    positions = torch.arange(padding, device=batch.tokens.device).expand(
        *batch.position_ids.shape[:-1], -1
    )
    boundaries = [batch.cu_lengths, batch.cu_lengths.new_full((1, int(padding > 0)), length)]
    cu_lengths = torch.cat(boundaries, dim=1)
    return replace(
        batch,
        tokens=filled(batch.tokens, pad_token_id),
        labels=filled(batch.labels, IGNORE_INDEX),
        loss_mask=filled(batch.loss_mask, 0),
        attn_mask=filled(batch.attn_mask, True),
        position_ids=torch.cat([batch.position_ids, positions], dim=-1),
        cu_lengths=cu_lengths,
        parents=torch.nn.functional.pad(
            batch.parents, (0, int(padding > 0 and batch.parents.numel() > 0)), value=-1
        ),
        max_lengths=cu_lengths.flatten().diff().max()[None],
        is_padded=True,
    )


def to_transformers_kwargs(batch: "PackedBatch") -> dict[str, Any]:
    """Make the arguments for the forward of transformers' models.

    Two of its traps are avoided here. M-RoPE positions need four rows, the first restarting at
    every boundary: transformers builds the block-diagonal mask from it, and with the other three
    alone silently attends across samples. And `use_cache` must be off, or it does the same. No
    `attention_mask` is passed, as that would switch the detection off.

    Recurrent layers (Qwen3.5's linear attention) need more, as transformers refuses boundaries in
    them without flash-linear-attention: first give the model to
    `launch.model.segments.isolate_segments`.

    Returns:
        input_ids, labels (1, S), position_ids (4, 1, S), or (1, S) for families whose positions
        count tokens, use_cache, flash attention's cu_seq_lens_q/k (P + 1,) and max_length_q/k, and
        with images what the family's `image_layout` makes of them; likewise for videos. Labels are
        shifted inside the model, whose loss takes no weights: where `loss_mask` holds values other
        than 0 and 1, labels are left out: compute the loss from the logits.

    Raises:
        ValueError: the row holds prefix trees.
    """
    return token_kwargs(batch) | pixel_kwargs(batch)


def token_kwargs(batch: "PackedBatch", *, trees: bool = False) -> dict[str, Any]:
    """Make what `to_transformers_kwargs` does but for media. Raises ValueError as it does, unless
    `trees`: attention then needs the row's segments as a separate argument (`row_trees`)."""
    if not trees:
        refuse_trees(batch)
    weights = batch.loss_mask
    labels = {} if ((weights > 0) & (weights != 1)).any() else {"labels": batch.labels}
    segments = segment_kwargs(batch.position_ids, None if trees else batch.cu_lengths)
    return {"input_ids": batch.tokens, **labels, **segments}


def pixel_kwargs(batch: "PackedBatch") -> dict[str, Any]:
    """Make the media among the arguments of `to_transformers_kwargs`, on the batch's device."""
    batch = normalise_pixels(batch)
    videos = batch.pixel_values_videos, batch.video_grid_thw
    return media_kwargs(batch.imgs, batch.image_grid_thw, *videos, layout=batch.image_layout)


def flash_attention_kwargs(cu_seqlens: torch.Tensor) -> dict[str, Any]:
    """Return the boundaries (P + 1,) as transformers' models hand them to flash attention, which
    otherwise finds them in position_ids again in every layer, waiting for the device each time."""
    cu_seqlens = cu_seqlens.flatten().to(torch.int32)
    longest = int(cu_seqlens.diff().max())
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def segment_kwargs(position_ids: torch.Tensor, cu_seqlens: torch.Tensor | None) -> dict[str, Any]:
    """Make the arguments by which transformers' models keep the segments of a row of S tokens
    apart.

    Args:
        position_ids: (1, 1, S) or (3, 1, S), of a batch.
        cu_seqlens: the row's P + 1 boundaries, of any shape; None: attention has them from
            elsewhere, and a branch continues the positions of its own sample.

    Returns:
        position_ids (1, S), or (4, 1, S) whose first row restarts at every boundary; use_cache; and
        those of `flash_attention_kwargs`.
    """
    positions, flash = position_ids[0], dict[str, Any]()
    if cu_seqlens is not None:
        boundaries = cu_seqlens.flatten().long()
        starts = torch.repeat_interleave(boundaries[:-1], boundaries.diff())
        positions = (torch.arange(position_ids.shape[-1], device=starts.device) - starts)[None]
        flash = flash_attention_kwargs(boundaries)
    if len(position_ids) > 1:
        positions = torch.cat([positions[None], position_ids])
    return {"position_ids": positions, "use_cache": False, **flash}


def token_types(tokens: torch.Tensor, media_token_ids: Mapping[str, int]) -> torch.Tensor:
    """Return transformers' `mm_token_type_ids` of any shape: 0 text, 1 image, 2 video.
    `media_token_ids` are those of a sample encoder."""
    types = torch.zeros_like(tokens)
    for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
        if name in media_token_ids:
            types[tokens == media_token_ids[name]] = kind
    return types


def media_kwargs(
    imgs: torch.Tensor,
    image_grid_thw: torch.Tensor,
    pixel_values_videos: torch.Tensor | None = None,
    video_grid_thw: torch.Tensor | None = None,
    layout: str = "patches",
) -> dict[str, Any]:
    """Make the media arguments of transformers' models from a batch's fields with pixels as values.
    `layout` is a name in model_inputs.IMAGE_LAYOUTS."""
    kwargs: dict[str, Any] = {}
    if len(image_grid_thw):
        kwargs |= IMAGE_LAYOUTS[layout](imgs, image_grid_thw.long())
    if video_grid_thw is not None and len(video_grid_thw):
        kwargs |= VIDEO_LAYOUTS[layout](pixel_values_videos, video_grid_thw.long())
    return kwargs


def _placed(merge: int, imgs: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Add (P, 3), the place of each patch in its image, in blocks of merge²: (0, row, column)."""
    places = []
    for _, rows, columns in grids.tolist():
        numbers = torch.arange(rows * columns, device=grids.device)
        cut = numbers.view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()
        places.append(torch.stack([torch.zeros_like(cut), cut // columns, cut % columns], 1))
    return {"pixel_values": imgs, "image_grid_thw": grids, "patch_positions": torch.cat(places)}


def _tiles(imgs: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Put tiles of one size together from patches row by row, (T, 3, H, W): each image has t."""
    return {"pixel_values": _whole(imgs, *grids[0, 1:].tolist())}


def _padded(imgs: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Put images of any size together from patches row by row: (N, 3, H, W), zero beyond each one's
    own height and width, which are image_sizes (N, 2)."""
    shapes = grids[:, 1:].tolist()
    sizes = grids[:, 1:] * math.isqrt(imgs.shape[1] // 3)
    padded = imgs.new_zeros(len(grids), 3, *sizes.amax(0).tolist())
    parts = imgs.split([rows * columns for rows, columns in shapes])
    for image, part, shape in zip(padded, parts, shapes, strict=True):
        (own,) = _whole(part, *shape)
        image[:, : own.shape[1], : own.shape[2]] = own
    return {"pixel_values": padded, "image_sizes": sizes}


def _whole(patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Put images together from patches (N·rows·columns, 3·p·p): (N, 3, rows·p, columns·p)."""
    size = math.isqrt(patches.shape[1] // 3)
    cut = patches.reshape(-1, rows, columns, 3, size, size).permute(0, 3, 1, 4, 2, 5)
    return cut.reshape(-1, 3, rows * size, columns * size)


def _frame_sequences(videos: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make one sequence per frame; each video has t frames."""
    steps = grids[:, 0]
    values, places = _in_sequences(videos, grids.repeat_interleave(steps, 0))
    return {
        "pixel_values_videos": values,
        "video_position_ids": places,
        "num_frames_per_video": steps,
    }


def _in_sequences(pixels: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad patches row by row to (N, L, D), zero after each picture's own, and their columns and
    rows to (N, L, 2), -1 there."""
    parts = pixels.split(grids[:, 1:].prod(1).tolist())
    places = [
        torch.cartesian_prod(*map(torch.arange, one)).flip(1) for one in grids[:, 1:].tolist()
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    positions = pad(places, batch_first=True, padding_value=-1).to(grids.device)
    return pad(list(parts), batch_first=True), positions


#: Forms in which transformers' models take images, from rows of pixels and grids in patches.
IMAGE_LAYOUTS: Final[Mapping[str, Callable[..., dict[str, torch.Tensor]]]] = {
    "patches": lambda imgs, grids: {"pixel_values": imgs, "image_grid_thw": grids},
    **{f"placed_{merge}": partial(_placed, merge) for merge in (1, 2, 3)},
    "squares": lambda imgs, _: {"pixel_values": _whole(imgs, 1, 1)},  # (N, 3, H, H)
    "padded": _padded,
    "tiles": _tiles,
    "sequences": lambda imgs, grids: dict(
        zip(("pixel_values", "image_position_ids"), _in_sequences(imgs, grids), strict=True)
    ),
}
#: The same of videos, where families with this form of images take any.
VIDEO_LAYOUTS: Final[Mapping[str, Callable[..., dict[str, torch.Tensor]]]] = {
    "patches": lambda videos, grids: {"pixel_values_videos": videos, "video_grid_thw": grids},
    "sequences": _frame_sequences,
}
