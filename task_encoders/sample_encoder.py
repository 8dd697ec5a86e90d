"""Lengths and arrays of samples; `families` has an encoder of them for each model family.

The invariant that the whole system rests on, for every sample:

    encoder.measure(sample, sizes).num_tokens == len(encoder.encode(sample, images).tokens)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from task_encoders.media.patches import Normalisation
from task_encoders.samples import IGNORE_INDEX


class Prefix(NamedTuple):
    """Beginning of a sample that others may share (see `as_tree`): all up to its last leading
    medium, without loss. Leading media are the first one, and media after it with nothing of the
    sample's own text between them."""

    #: of `families.base.spans`, which describe its tokens and their positions
    spans: Sequence[Sequence[Any]]
    #: tokens of a trunk: one less where the token after the media is trained
    num_tokens: int
    num_images: int
    num_videos: int


class SampleLength(NamedTuple):
    """Length of one sample, known without decoding its media. `grid_thw` holds the grids of
    the images, then those of the videos."""

    num_tokens: int
    num_loss_tokens: int
    num_vision_patches: int
    grid_thw: tuple[tuple[int, int, int], ...]
    prefix: Prefix | None = None


#: Place of a medium among a sample's tokens: its first one, and how many it has.
Place = tuple[int, int]


class TokenizedSample(NamedTuple):
    """A sample's token ids as they are trained, with all the tokens of its media."""

    tokens: npt.NDArray[np.int64]  #: (S,)
    loss_weights: npt.NDArray[np.float32]  #: (S,), not shifted; 0 where there is no loss
    images: Sequence[Place]
    videos: Sequence[Place]

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels of the tokens, (S,)."""
        return labels_of(self.tokens, self.loss_weights)


def labels_of(
    tokens: npt.NDArray[np.int64], loss_weights: npt.NDArray[np.float32]
) -> npt.NDArray[np.int64]:
    """Return (S,) each token that has a weight, and IGNORE_INDEX for the others."""
    return np.where(loss_weights > 0, tokens, IGNORE_INDEX)


def sizes_of(
    length: SampleLength, images: Sequence[object], videos: Sequence[object]
) -> dict[str, int]:
    """Return the tokens of a sample, and each size that `pack.budgets` may limit (BudgetName)."""
    return {
        "tokens": length.num_tokens,
        "vision_patches": length.num_vision_patches,
        "images": len(images),
        "videos": len(videos),
    }


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One sample as arrays: S tokens, N images with P patches and M videos with Q patches in all.
    Pixels are bytes; `normalisation` turns each patch into D = C·T·p·p values.

    `loss_weights` are not shifted: loss_weights[i] weighs the loss of token i. The first is always
    0, so that in a packed row a shift over the whole row stays inside every sub-sample.
    """

    key: str
    tokens: npt.NDArray[np.int64]  #: (S,)
    loss_weights: npt.NDArray[np.float32]  #: (S,)
    position_ids: npt.NDArray[np.int64]  #: (3, S) temporal, height, width; or (1, S)
    image_pixels: npt.NDArray[np.uint8]  #: (P, C·p·p)
    image_grid_thw: npt.NDArray[np.int32]  #: (N, 3) in patches
    video_pixels: npt.NDArray[np.uint8]  #: (Q, C·T·p·p)
    video_grid_thw: npt.NDArray[np.int32]  #: (M, 3) in patches
    normalisation: Normalisation
    image_layout: str = "patches"  #: see model_inputs.IMAGE_LAYOUTS

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """Labels of the tokens, (S,)."""
        return labels_of(self.tokens, self.loss_weights)

    @property
    def pixel_values(self) -> npt.NDArray[np.float32]:
        """Values of the patches of all images, (P, D)."""
        return self.normalisation.values(self.image_pixels, self.normalisation.repeats)

    @property
    def pixel_values_videos(self) -> npt.NDArray[np.float32]:
        """Values of the patches of all videos, (Q, D)."""
        return self.normalisation.values(self.video_pixels)


#: Patches (P, C·p·p), or (Q, C·T·p·p) of a video, and the family's description of their grid.
EncodedMedium = tuple[npt.NDArray[np.uint8], Any]
