"""One module per model family, and `FAMILIES`.

May import: samples, media, text, sample_encoder.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from task_encoders.media.video import VideoSettings
from task_encoders.sample_encoder import SampleEncoder
from task_encoders.text.tokenizer import QWEN2_5_TEXT_TOKENS


def _qwen2_vl(**options: Any) -> SampleEncoder:
    from task_encoders.families.qwen2_vl import Qwen2VLSampleEncoder

    return Qwen2VLSampleEncoder(**options)


def _qwen2_5_vl(**options: Any) -> SampleEncoder:
    from task_encoders.families.qwen2_vl import Qwen2VLSampleEncoder, read_tokens_per_second

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
        max_image_pixels: an image with more pixels in its file is refused (media.image's default).
        video: which frames of a video are taken, and their limits (media.video's default).

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
