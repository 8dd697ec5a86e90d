"""transformers' processor for the built-in vocabulary: for checkpoints and proofs of parity."""

from typing import Any

from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.families.qwen2_vl import Qwen2VLEncoder
from task_encoders.text.builtin_tokenizer import builtin_tokenizer
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE
from task_encoders.versions import require_supported


def has_builtin_processor(family: str) -> bool:
    """Whether `builtin_processor` can make one."""
    return issubclass(FAMILIES[family].build, Qwen2VLEncoder)


def builtin_processor(family: str | None = None, **options: Any) -> Any:
    """A Qwen2-VL processor for images and text (its video part needs torchvision).

    Args:
        family: one with Qwen2-VL's template.
        options: those of ModelOptions that images depend on.

    Raises:
        ValueError: the family has another template, or none of that name is known.
    """
    require_supported("transformers")
    from transformers import Qwen2VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    encoder = build_sample_encoder(family, **options)
    if not isinstance(encoder, Qwen2VLEncoder):
        raise ValueError(f"family {family} has no built-in processor; name a checkpoint")

    class ImageTextProcessor(Qwen2VLProcessor):
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    limits = {"min_pixels": encoder.vision.min_pixels, "max_pixels": encoder.vision.max_pixels}
    return ImageTextProcessor(
        image_processor=Qwen2VLImageProcessorPil(**limits),
        tokenizer=builtin_tokenizer(encoder.TEXT_TOKENS),
        chat_template=QWEN2_VL_TEMPLATE,
    )
