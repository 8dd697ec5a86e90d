"""What every sample encoder offers, and the registry of model families.

The invariant that the whole system rests on, for every sample:

    encoder.measure(sample, sizes).num_tokens == len(encoder.encode(sample, images).tokens)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from task_encoders.samples import SourceSample
from task_encoders.tokenizer import QWEN2_5_TEXT_TOKENS, Tokenizer
from task_encoders.video import VideoSettings
from task_encoders.video_file import VideoHeader

#: Label of a position that carries no loss, as torch's cross_entropy and transformers have it.
IGNORE_INDEX: Final = -100


@dataclass(frozen=True, slots=True)
class SampleLength:
    """What one sample will cost, known without decoding its media. `grid_thw` holds the grids of
    the images, then those of the videos."""

    num_tokens: int
    num_loss_tokens: int
    num_vision_patches: int
    grid_thw: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True)
class EncodedSample:
    """One sample as arrays. S tokens, N images of P patches and M videos of Q patches in all, of
    D = C·T·p·p values each.

    `labels` are not shifted: labels[i] is the token at i, or IGNORE_INDEX. The first is always
    IGNORE_INDEX, so that in a packed row a shift over the whole row stays inside every sub-sample.
    """

    key: str
    tokens: npt.NDArray[np.int64]  #: (S,)
    labels: npt.NDArray[np.int64]  #: (S,)
    position_ids: npt.NDArray[np.int64]  #: (3, S) temporal, height, width
    pixel_values: npt.NDArray[np.float32]  #: (P, D)
    image_grid_thw: npt.NDArray[np.int32]  #: (N, 3) in patches
    pixel_values_videos: npt.NDArray[np.float32]  #: (Q, D)
    video_grid_thw: npt.NDArray[np.int32]  #: (M, 3) in patches


class SampleEncoder(Protocol):
    """Turns one sample into its length, or into its arrays, by the same code."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Text to ids, and back."""

    @property
    def pad_token_id(self) -> int:
        """Id of the padding token."""

    @property
    def fingerprint(self) -> Mapping[str, str | int]:
        """Everything that lengths depend on: family, tokenizer, template, pixel limits, frames."""

    def measure(
        self,
        sample: SourceSample,
        image_sizes: Sequence[tuple[int, int]],
        videos: Sequence[VideoHeader] = (),
    ) -> SampleLength:
        """Length of a sample whose images have these (height, width), EXIF orientation applied,
        and whose videos have these headers.

        Raises:
            SampleError: the sample cannot be encoded.
        """

    def encode(
        self, sample: SourceSample, images: Sequence[bytes], videos: Sequence[bytes] = ()
    ) -> EncodedSample:
        """Arrays of a sample whose images and videos are these files.

        Raises:
            SampleError: the sample cannot be encoded.
            MissingPyAVError: it has videos, and PyAV is not installed.
        """


def _qwen2_vl(**options: Any) -> SampleEncoder:
    from task_encoders.qwen2_vl import Qwen2VLSampleEncoder

    return Qwen2VLSampleEncoder(**options)


def _qwen2_5_vl(**options: Any) -> SampleEncoder:
    from task_encoders.qwen2_vl import Qwen2VLSampleEncoder, read_tokens_per_second

    rate = read_tokens_per_second(options["processor"])
    return Qwen2VLSampleEncoder(tokens_per_second=rate, text_tokens=QWEN2_5_TEXT_TOKENS, **options)


#: A model family is one module and one line here. Qwen2.5-VL has Qwen2-VL's tokens; the positions
#: of its videos follow the time.
FAMILIES: Final[Mapping[str, Callable[..., SampleEncoder]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
}


def build_sample_encoder(
    family: str = "qwen2_vl",
    processor: str = "builtin",
    *,
    min_pixels: int = 56 * 56,
    max_pixels: int = 28 * 28 * 5120,
    max_aspect_ratio: float = 200,
    max_image_pixels: int | None = None,
    video: VideoSettings | None = None,
) -> SampleEncoder:
    """The sample encoder of a model family.

    Args:
        family: a name in FAMILIES.
        processor: "builtin" (the Qwen vocabulary, no hub), a checkpoint folder, or a hub name.
        min_pixels, max_pixels: limits of an image after resizing; those the model trains with.
        max_aspect_ratio: an image longer than this in one direction is refused.
        max_image_pixels: an image with more pixels in its file is refused (vision.py's default).
        video: which frames of a video are taken, and their limits (video.py's default).

    Raises:
        ValueError: unknown family, or a checkpoint whose chat template is not the family's.
    """
    if family not in FAMILIES:
        raise ValueError(f"unknown model family {family!r}; valid: {', '.join(FAMILIES)}")
    options: dict[str, Any] = {"max_image_pixels": max_image_pixels} if max_image_pixels else {}
    return FAMILIES[family](
        processor=processor,
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        max_aspect_ratio=max_aspect_ratio,
        video=video or VideoSettings(),
        **options,
    )
