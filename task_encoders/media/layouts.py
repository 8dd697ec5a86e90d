"""Forms in which transformers' models take images and videos, from rows of pixel values."""

import math
from collections.abc import Callable, Mapping
from typing import Final

import torch


def _patches(imgs: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Patches (L, D) as they are, with their grids (N, 3)."""
    return {"pixel_values": imgs, "image_grid_thw": grids}


def _video_patches(videos: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same of videos."""
    return {"pixel_values_videos": videos, "video_grid_thw": grids}


def _squares(imgs: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Images of one size, each a row of its own: (N, 3, H, H)."""
    return {"pixel_values": _whole(imgs, 1, 1)}


def _tiles(imgs: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tiles of one size, in patches row by row, (T, 3, H, W): each image has t."""
    return {"pixel_values": _whole(imgs, *grids[0, 1:].tolist())}


def _padded(imgs: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Images of any size, in patches row by row: (N, 3, H, W), zero beyond each one's own height
    and width, which are image_sizes (N, 2)."""
    shapes = grids[:, 1:].tolist()
    sizes = grids[:, 1:] * math.isqrt(imgs.shape[1] // 3)
    padded = imgs.new_zeros(len(grids), 3, *sizes.amax(0).tolist())
    parts = imgs.split([rows * columns for rows, columns in shapes])
    for image, part, shape in zip(padded, parts, shapes, strict=True):
        (own,) = _whole(part, *shape)
        image[:, : own.shape[1], : own.shape[2]] = own
    return {"pixel_values": padded, "image_sizes": sizes}


def _whole(patches: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Images in patches (N·rows·columns, 3·p·p), whole: (N, 3, rows·p, columns·p)."""
    size = math.isqrt(patches.shape[1] // 3)
    cut = patches.reshape(-1, rows, columns, 3, size, size).permute(0, 3, 1, 4, 2, 5)
    return cut.reshape(-1, 3, rows * size, columns * size)


def _sequences(imgs: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A sequence for each image, see `_in_sequences`."""
    values, places = _in_sequences(imgs, grids)
    return {"pixel_values": values, "image_position_ids": places}


def _frame_sequences(videos: torch.Tensor, grids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A sequence for each frame, of which each video has t."""
    steps = grids[:, 0]
    values, places = _in_sequences(videos, grids.repeat_interleave(steps, 0))
    return {
        "pixel_values_videos": values,
        "video_position_ids": places,
        "num_frames_per_video": steps,
    }


def _in_sequences(pixels: torch.Tensor, grids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches (N, L, D) row by row, zero after each picture's own, and their columns and rows
    (N, L, 2), -1 there."""
    parts = pixels.split(grids[:, 1:].prod(1).tolist())
    places = [
        torch.cartesian_prod(*map(torch.arange, one)).flip(1) for one in grids[:, 1:].tolist()
    ]
    pad = torch.nn.utils.rnn.pad_sequence
    positions = pad(places, batch_first=True, padding_value=-1).to(grids.device)
    return pad(list(parts), batch_first=True), positions


#: Forms in which transformers' models take images, from rows of pixels and grids in patches.
IMAGE_LAYOUTS: Final[Mapping[str, Callable[..., dict[str, torch.Tensor]]]] = {
    "patches": _patches,
    "squares": _squares,
    "padded": _padded,
    "tiles": _tiles,
    "sequences": _sequences,
}
#: The same of videos, where families with this form of images take any.
VIDEO_LAYOUTS: Final[Mapping[str, Callable[..., dict[str, torch.Tensor]]]] = {
    "patches": _video_patches,
    "sequences": _frame_sequences,
}
