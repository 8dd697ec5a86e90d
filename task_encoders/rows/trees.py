"""Samples that begin with the same media, as a trunk and branches.

    samples  [s s v v v a a]  [s s v v v b b b]        s: system message, v: the medium
    shared   5
    segments [s s v v v] [a a] [b b b]                 parents  [-1, 0, 0]

Each branch continues the positions of its own sample. Its first token must not be trained, as the
trunk's last token, which would predict it, has many successors; where the token after the media is
trained (captions), the trunk ends a token earlier.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch

from task_encoders.concatenate import pixel_rows
from task_encoders.model_inputs import token_types
from task_encoders.sample_encoder import EncodedSample

_MEDIA: Final = ("image_grid_thw", "video_grid_thw", "image_pixels", "video_pixels")


def as_tree(
    samples: Sequence[EncodedSample],
    shared: int,
    num_images: int,
    num_videos: int,
    media_token_ids: Mapping[str, int],
) -> list[EncodedSample]:
    """Cut samples into their trunk and branches.

    Args:
        shared: tokens at the beginning of all samples that are equal, the trunk.
        num_images, num_videos: media in them, equal as well.
        media_token_ids: see FamilyEncoder; every medium has equally many tokens per patch.

    Raises:
        ValueError: the samples are not equal so far, or tokens of the trunk, or the token after it,
            are trained; or the trunk has no token, or not the tokens of its media.
    """
    if shared < 1:
        raise ValueError(f"a trunk of {shared} tokens; samples of a tree share at least one")
    media = slice(num_images), slice(num_videos)
    alike = [_part(sample, slice(shared), *media) for sample in samples]
    for sample, own in zip(samples, alike, strict=True):
        if len(sample.tokens) <= shared or not all(
            np.array_equal(getattr(own, name), getattr(alike[0], name))
            for name in ("tokens", "position_ids", *_MEDIA)
        ):
            raise ValueError(f"sample {own.key!r} does not begin as {alike[0].key!r} does")
        if sample.loss_weights[: shared + 1].any():
            raise ValueError(
                f"sample {own.key!r} has loss in the {shared} tokens that it shares, or the next"
            )

    def size(one: EncodedSample) -> tuple[int, int]:
        """Return the tokens of media, and their patches."""
        grids = np.concatenate([one.image_grid_thw, one.video_grid_thw])
        kinds = token_types(torch.from_numpy(one.tokens), media_token_ids)
        return int(kinds.count_nonzero()), int(grids.prod(1).sum())

    (tokens, patches), (own_tokens, own_patches) = size(samples[0]), size(alike[0])
    counts = len(alike[0].image_grid_thw), len(alike[0].video_grid_thw)
    if own_tokens * patches != tokens * own_patches or counts != (num_images, num_videos):
        raise ValueError(
            f"the first {shared} tokens of sample {samples[0].key!r} do not end after its first "
            f"{num_images} images and {num_videos} videos"
        )
    rest = slice(shared, None), slice(num_images, None), slice(num_videos, None)
    return [alike[0], *(_part(one, *rest) for one in samples)]


def _part(sample: EncodedSample, tokens: slice, images: slice, videos: slice) -> EncodedSample:
    """Take some of a sample's tokens and media."""

    def pixels(all_pixels: np.ndarray, grids: np.ndarray, media: slice) -> np.ndarray:
        ends = np.cumsum([0, *pixel_rows(len(all_pixels), grids)])
        begin, end, _ = media.indices(len(grids))
        return all_pixels[ends[begin] : ends[max(begin, end)]]

    return replace(
        sample,
        tokens=sample.tokens[tokens],
        loss_weights=sample.loss_weights[tokens],
        position_ids=sample.position_ids[:, tokens],
        image_pixels=pixels(sample.image_pixels, sample.image_grid_thw, images),
        image_grid_thw=sample.image_grid_thw[images],
        video_pixels=pixels(sample.video_pixels, sample.video_grid_thw, videos),
        video_grid_thw=sample.video_grid_thw[videos],
    )
