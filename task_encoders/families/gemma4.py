"""Gemma 4: images keep their shape and fill a budget of tokens, each 3 by 3 patches of 16² pixels.

caption   <bos> <|image> <|image|>… <image|> caption <eos>
question  <bos> <|turn>user\\n <|image> <|image|>… <image|> question <turn|>\\n
          <|turn>model\\n answer <turn|>
video     00:00 <|image> <|video|>… <image|> 00:02 <|image> <|video|>… <image|>

There are several chat templates: the checkpoint's decides. After a call the model hands over with
`<|tool_response>`; the result follows, and the same turn goes on.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar, Final, Literal

import numpy as np

from task_encoders.families.base.cost import ModelCost, TransformerShape
from task_encoders.families.base.family import (
    TINY,
    TINY_TOWER,
    Family,
    FamilyEncoder,
    Preset,
    ResizedOptions,
)
from task_encoders.families.base.spans import BlankImage, Medium, Span, two_tokens
from task_encoders.field_types import Count
from task_encoders.media.image import VisionSettings
from task_encoders.media.patches import Normalisation, rescale_then_normalise
from task_encoders.media.video import SampledVideo, sampled_frames
from task_encoders.media.video_file import VideoHeader
from task_encoders.text.pieces import Control, Dialect, Image, Text, Video

#: Side of a token in pixels.
TOKEN: Final = 48
#: Frames per second of a video that does not say, as in transformers.
_DEFAULT_FPS: Final = 24.0

_DIALECT: Final = Dialect(
    r"<bos>|<\|\w+\|?>|<\w+\|>|<\|\"\|>",
    r"(?:<\|turn>model\n|<tool_response\|>(?:<\|(?:image|video)\|>)*+(?!<\|tool_response>|<turn\|>))"
    r"((?:(?!<\|turn>).)*?(?:<turn\|>|<\|tool_response>))",
    {"<|image|>": Image(), "<|video|>": Video()},
)


class Gemma4Options(ResizedOptions):
    """The budgets of transformers' processors, by their names there."""

    #: most tokens of an image: 70, 140, 280, 560 or 1120; it is resized to fill them
    max_soft_tokens: Literal[70, 140, 280, 560, 1120] = 280
    #: the same of a video's frame
    video_max_soft_tokens: Literal[70, 140, 280, 560, 1120] = 70
    #: frames taken from a video, spread evenly; a shorter one is taken whole
    video_max_frames: Count = 32


class Gemma4Encoder(FamilyEncoder):
    """Patches of an image row by row, (p·p·3) with the channels last. Under `resize: torch`,
    values of frames are within 1e-7 of transformers', which divides frames by 255 but multiplies
    images."""

    LENGTHS_OF = "gemma4"
    #: Patches along the side of a token.
    POOL: ClassVar[int] = 3
    POSITION_ROWS = 1
    IMAGE_LAYOUT = "sequences"
    MEDIA_TOKENS: ClassVar = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
    }
    PAD_TOKEN = "<pad>"
    TEMPLATE = ""  # there are several: a checkpoint comes with one
    DIALECT = _DIALECT
    CAPTION_START = (Control("<bos>"),)
    CAPTION_END = Control("<eos>", 1.0)
    AROUND_PICTURE = ("<|image>", "<image|>")

    options: Gemma4Options

    def __init__(self, options: Gemma4Options) -> None:
        vision = VisionSettings(
            patch_size=TOKEN // self.POOL,
            temporal_patch_size=1,
            merge_size=self.POOL,
            resize=options.resize,
            channels_last=True,
        )
        super().__init__(options, vision)
        if not self.template.jinja.source:
            raise ValueError(
                f"{options.processor} has no chat template; copy chat_template.jinja into it "
                "from a checkpoint that was trained on conversations (google/gemma-4-*-it)"
            )
        self.normalisation = Normalisation(_VALUES[options.resize], repeats=1)
        encode = self.tokenizer.encode
        for text in ("user\n", "What", " ", "1", "é:"):  # before a video's first time
            if encode(f"{text}00:00 ") != [*encode(text), *encode("00:00 ")]:
                raise ValueError(
                    f"the tokenizer of {options.processor!r} joins digits with the text before "
                    "them, unlike Gemma's; use the tokenizer files of a published checkpoint"
                )

    def image_medium(self, height: int, width: int) -> Medium:
        return Medium((1, *self._patches(height, width, self.options.max_soft_tokens)))

    def sample_video(self, header: VideoHeader) -> SampledVideo:
        num_sampled = min(self.options.video_max_frames, header.num_frames)
        grid = self._patches(header.height, header.width, self.options.video_max_soft_tokens)
        frames = sampled_frames(header.num_frames, num_sampled)
        return SampledVideo((num_sampled, *grid), frames, 1.0, header.fps)

    def _patches(self, height: int, width: int, max_soft_tokens: int) -> tuple[int, int]:
        """Return the height and width, in patches, of an image of this size: its shape, scaled to
        the budget (transformers' get_aspect_ratio_preserving_size)."""
        factor = math.sqrt(max_soft_tokens * TOKEN**2 / (height * width))
        rows, columns = (math.floor(factor * side / TOKEN) for side in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, max_soft_tokens)
        elif columns == 0:
            rows, columns = min(height // width, max_soft_tokens), 1
        return rows * self.POOL, columns * self.POOL

    def medium_spans(self, medium: Medium) -> Iterator[Span]:
        video, grid = medium.video, (1, *medium.grid[1:])
        if video is None:
            yield from self.picture_spans(self.image_token_id, grid)
            return
        for i, frame in enumerate(video.frames):
            minutes, seconds = divmod(int(frame / (video.fps or _DEFAULT_FPS)), 60)
            yield from self.texts.spans(Text(f"{' ' * (i > 0)}{minutes:02d}:{seconds:02d} "))
            yield from self.picture_spans(self.video_token_id, grid)

    @staticmethod
    def blank_image(hf_config: Any) -> BlankImage:
        vision = hf_config.vision_config
        return two_tokens(vision.patch_size, vision.pooling_kernel_size)


#: The value of each byte in transformers' backends, the same in all channels.
_VALUES: Final = {
    "pil": rescale_then_normalise((0.0,), (1.0,)),
    "torch": np.arange(256, dtype=np.float32)[None] * np.float32(1 / 255),
}


_TINY: Final = {
    **TINY,
    "vocab_size": 262_144,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 96,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}

#: Of both models; the other sizes differ.
_SHAPE: Final = TransformerShape(
    0, 30, 0, kv_share=1 / 2, query_size=4096, widening=2.0, window=1024
)

#: As in 26B-A4B and 31B, one layer in six sees everything before it. The others see a window, and
#: all of an image in it.
GEMMA4: Final = Family(
    "gemma4",
    Gemma4Options,
    Gemma4Encoder,
    ModelCost(
        "Gemma-4-26B-A4B",
        replace(_SHAPE, hidden_size=2816, ffn_size=2112 + 8 * 704, num_quadratic_layers=5),
        TransformerShape(1152, 27, 4304, causal=False),
        head=2816 * 262_144,
        merger=360_448.0,
    ),
    "Gemma4",
    since="5.13",  # with videos 5.19
    tiny=Preset(
        {
            **_TINY,
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
        {**TINY_TOWER, "num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 3},
        {"tie_word_embeddings": True},
    ),
)


class Gemma4UnifiedEncoder(Gemma4Encoder):
    """A patch per token."""

    LENGTHS_OF = "gemma4_unified"
    POOL = 1

    @staticmethod
    def blank_image(hf_config: Any) -> BlankImage:
        return two_tokens(TOKEN, 1)


GEMMA4_UNIFIED: Final = Family(
    "gemma4_unified",
    Gemma4Options,
    Gemma4UnifiedEncoder,
    ModelCost(
        "Gemma-4-12B",
        replace(_SHAPE, hidden_size=3840, num_layers=48, ffn_size=15_360, num_quadratic_layers=8),
        TransformerShape(0, 0, 0),  # no tower
        head=3840 * 262_144,
        merger=41_287_680.0,
    ),
    "Gemma4Unified",
    since="5.13",  # with videos 5.19
    tiny=Preset(
        {
            **_TINY,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
        {"patch_size": 16, "pooling_kernel_size": 3, "mm_embed_dim": 32, "output_proj_dims": 32},
        {"tie_word_embeddings": True},
    ),
)
