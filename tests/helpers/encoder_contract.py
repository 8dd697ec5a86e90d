"""What every encoder must hold for every sample: what is measured and stored is what is encoded."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from task_encoders.media.image import read_image_header
from task_encoders.media.video_file import read_video_header
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX, SourceSample

#: By name, something and what it should equal.
Pairs = Mapping[str, tuple[Any, Any]]


def own_pairs(
    encoder: Any,
    sample: SourceSample,
    images: list[bytes],
    videos: list[bytes],
    encoded: EncodedSample,
) -> Pairs:
    """What is measured and tokenized of a sample, with what is encoded of it."""
    headers = [read_image_header(io.BytesIO(data)) for data in images]
    sizes = [(header.height, header.width) for header in headers]
    clips = [read_video_header(io.BytesIO(data)) for data in videos]
    measured = encoder.measure(sample, sizes, clips)
    tokenized = encoder.tokenize(sample, sizes, clips)
    rows = len(encoded.pixel_values) + len(encoded.pixel_values_videos)
    grids = np.concatenate([encoded.image_grid_thw, encoded.video_grid_thw])
    expected = [[*grid] for grid in measured.grid_thw]
    if videos and not len(encoded.video_grid_thw):  # its steps are pictures among the images
        of_videos = expected[len(images) :]
        steps = [[1, *grid[1:]] for grid in of_videos for _ in range(grid[0])]
        expected = expected[: len(images)] + steps
    names = ("tokens", "labels", "loss_weights")
    return {
        "length": (measured.num_tokens, len(encoded.tokens)),
        "length of the loss": (measured.num_loss_tokens, (encoded.labels != IGNORE_INDEX).sum()),
        "patches": (measured.num_vision_patches, rows),
        "patches of the grids": (grids.prod(1).sum(), rows),
        "grids": (sorted(expected), sorted(grids.tolist())),
        **{f"own {name}": (getattr(tokenized, name), getattr(encoded, name)) for name in names},
    }


def unequal(pairs: Pairs) -> list[str]:
    """Names of the pairs that differ, in shape or in a value."""
    return [name for name, pair in pairs.items() if not np.array_equal(*pair)]
