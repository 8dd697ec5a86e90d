"""LLaVA-OneVision-2: Qwen2-VL's template and tokens, patches of one frame and of the checkpoint's
size, and positions that count tokens."""

from dataclasses import replace
from typing import Annotated, Final, Literal

from pydantic import Field

from task_encoders.families.base.family import Family, FamilyEncoder, beside_lengths
from task_encoders.families.qwen2_vl import (
    LLAVA_ONEVISION_1_5,
    LlavaOneVision15Encoder,
    QwenImageOptions,
)
from task_encoders.field_types import Count
from task_encoders.text.tokenizer import checkpoint_json


class LlavaOneVision2Options(QwenImageOptions):
    """Limits of the merged checkpoints' image processor; the project's packer counts with a
    max_pixels of 12,845,056."""

    min_pixels: Count = 3136
    max_pixels: Count = 2000 * 2000
    #: side of a patch in pixels, an even number: 14 or 16 in published checkpoints
    patch_size: Annotated[Count, Field(multiple_of=2)] = 14
    #: patches of a token on each side: 2 or 3 in published checkpoints
    merge_size: Literal[1, 2, 3] = 2
    resize: Literal["pil", "torch"] = beside_lengths("torch")


class LlavaOneVision2Encoder(LlavaOneVision15Encoder):
    """Frames of a video are images to this model: it takes no video files, and no codec input."""

    LENGTHS_OF = "llava_onevision_2"
    sample_video = FamilyEncoder.sample_video

    def __init__(self, options: LlavaOneVision2Options) -> None:
        sizes = {"patch_size": options.patch_size, "merge_size": options.merge_size}
        vision = checkpoint_json(options.processor, "config.json").get("vision_config", {})
        named = {"patch_size": "patch_size", "merge_size": "spatial_merge_size"}
        for name, size in sizes.items():
            if (own := vision.get(named[name], size)) != size:
                raise ValueError(
                    f"{name} {size}, and {own} in the config.json of {options.processor}; set "
                    f"model.{name}={own}"
                )
        super().__init__(options, temporal_patch_size=1, **sizes)
        self.IMAGE_LAYOUT = f"placed_{options.merge_size}"


#: The model is not part of transformers.
LLAVA_ONEVISION_2: Final = Family(
    "llava_onevision_2",
    LlavaOneVision2Options,
    LlavaOneVision2Encoder,
    replace(LLAVA_ONEVISION_1_5.cost, name="LLaVA-OneVision-2-8B"),
    None,
    other_names=("llava_onevision2",),
)
