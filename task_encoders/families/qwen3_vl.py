"""Qwen3-VL and Qwen3.5, dense and mixture of experts: one processor, two templates. Qwen3.6
and 3.8 are Qwen3.5 to transformers, and in their config.json; their checkpoints have own templates.

A video is a run of steps in time, each with its time in words and its own vision tags:

    <|vision_start|> <0.3 seconds> <|vision_start|> … <|vision_end|> <1.3 seconds> … <|vision_end|>

Without the outer tags, the first time is tokenized with the text in front of it: ` <` is a token of
`it: <0.3 seconds>`. No token joins `<` and a digit: the rest waits until the video is known.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal

import numpy as np

from task_encoders.families.base.cost import ModelCost, TransformerShape
from task_encoders.families.base.family import TINY, Family, Preset, beside_lengths, rope
from task_encoders.families.base.spans import Medium, Span
from task_encoders.families.qwen2_vl import TINY_VISION, QwenVLEncoder, QwenVLOptions
from task_encoders.field_types import Count, if_other_than
from task_encoders.media.video import SampledVideo, volume_resize
from task_encoders.media.video_file import VideoHeader
from task_encoders.samples import SampleError, SourceSample
from task_encoders.text.pieces import Answer, Fixed, Piece, Text, Video
from task_encoders.text.qwen_templates import QWEN3_5_TEMPLATE, QWEN3_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import MEDIA_TOKEN_IDS, QWEN3_TEXT_TOKENS, VOCAB_SIZE

_PATCH: Final = 16
#: Pixels of one token: a square of 2 by 2 patches.
_TOKEN: Final = (2 * _PATCH) ** 2


class Qwen3VLOptions(QwenVLOptions):
    """Options of transformers' processor classes. Limits of videos count all frames together; in
    published checkpoints they are the pixels of 4 and 24,576 tokens. These processors resize with
    torch; the ones published with Qwen2-VL and Qwen2.5-VL resize with Pillow."""

    min_pixels: Count = 64 * _TOKEN
    max_pixels: Count = 16_384 * _TOKEN
    video_min_pixels: Count = 128 * _TOKEN
    video_max_pixels: Count = 768 * _TOKEN
    resize: Literal["pil", "torch"] = beside_lengths("torch")
    #: whether <|vision_start|> and <|vision_end|> enclose a whole video, besides each of its steps:
    #: true as in transformers since 5.10; false as in 4.57 to 5.9, two tokens fewer
    outer_video_tags: Annotated[bool, if_other_than(True)] = True


class Qwen3VLEncoder(QwenVLEncoder):
    """Timestamps before each step of a video."""

    LENGTHS_OF = "qwen3_vl"
    PATCH_SIZE = _PATCH
    MEAN = STD = (0.5, 0.5, 0.5)
    TEXT_TOKENS = QWEN3_TEXT_TOKENS
    TEMPLATE = QWEN3_VL_TEMPLATE

    options: Qwen3VLOptions

    def notes(self, sample: SourceSample) -> Iterator[tuple[str, str]]:
        yield from super().notes(sample)
        if sample.videos and self.options.outer_video_tags:
            line = "videos have outer vision tags, as transformers writes them since 5.10; for "
            yield f"{line}trainers with 4.57 to 5.9 set model.outer_video_tags: false", ""

    def _placed(self, *given: Any) -> list[tuple[Piece, Sequence[Span]]]:
        """Put the `<` of a video's first time in front of the video if there are no outer tags, or
        into the last token of the text before it if both are one token."""
        placed = super()._placed(*given)
        (opening,) = self.texts.spans(Text("<"))
        for i, (part, own) in enumerate([] if self.options.outer_video_tags else placed):
            before, spans = placed[i - 1] if i else (Text(""), [])
            if not isinstance(part, Video):
                continue
            last = before.pieces[-1] if isinstance(before, Fixed) else before
            text = last.text if isinstance(last, Text | Answer) else ""
            alone, joined = self.tokenizer.encode(text), self.tokenizer.encode(f"{text}<")
            if joined == [*alone, *opening.ids]:
                placed[i] = part, [opening, *own]
            else:
                *others, span = spans
                ids = [*span.ids[: span.num_tokens - len(alone)], *joined]
                placed[i - 1] = before, [*others, span._replace(ids=ids, num_tokens=len(ids))]
        return placed

    def _sample_clip(self, header: VideoHeader, first: int) -> SampledVideo:
        # As transformers' Qwen3VLVideoProcessor counts frames: any number, also an odd one.
        options, total = self.options, header.num_frames
        if header.fps is None and total > 1:
            raise SampleError("bad_video", f"{total} frames without a frame rate")
        wanted = 1 if header.fps is None else int(total / header.fps * options.video_fps)
        num_sampled = min(max(wanted, options.video_min_frames), options.video_max_frames, total)
        num_sampled = self._asked_frames(total) or num_sampled
        frames = np.linspace(first, first + total - 1, num_sampled).round().astype(int)
        depth = self.vision.temporal_patch_size
        volume = max(num_sampled, depth)
        least, most = self._limits(options.video_min_pixels, options.video_max_pixels, volume)
        if options.video_max_tokens is not None:  # transformers' cap_pixels_per_frame
            share = min(options.video_max_tokens * self.vision.factor**2, most // volume)
            most = max(share, int(least * 1.05)) * volume
        limits = least, most
        size = volume_resize(volume, header.height, header.width, self.vision, limits)
        return self.sampled(header, frames.tolist(), size)

    def medium_spans(self, medium: Medium) -> Iterator[Span]:
        """Yield the tokens of an image, or of a video: each step follows the time in its middle in
        seconds, the mean of the times of its first and last frame."""
        video = medium.video
        if video is None:
            yield from super().medium_spans(medium)
            return
        depth, is_tagged = self.vision.temporal_patch_size, self.options.outer_video_tags
        frames = [*video.frames, *[video.frames[-1]] * (-len(video.frames) % depth)]
        times = [number / (video.fps or 1.0) for number in frames]
        step = self.picture_spans(self.video_token_id, (1, *video.grid[1:]))
        before, _, after = step
        if is_tagged:
            yield before
        for i in range(0, len(times), depth):
            seconds = (times[i] + times[i + depth - 1]) / 2
            opening = "<" if i or is_tagged else ""  # or see `_placed`
            yield from self.texts.spans(Text(f"{opening}{seconds:.1f} seconds>"))
            yield from step
        if is_tagged:
            yield after


class Qwen35Encoder(Qwen3VLEncoder):
    """Another template: it trims contents, and writes the thoughts of the answers after the last
    question even where there are none."""

    LENGTHS_OF = "qwen3_5"
    TEMPLATE = QWEN3_5_TEMPLATE
    HAS_BUILTIN = False


_TINY: Final = {**TINY, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-6}

QWEN3_VL: Final = Family(
    "qwen3_vl",
    Qwen3VLOptions,
    Qwen3VLEncoder,
    ModelCost(
        "Qwen3-VL-8B",
        TransformerShape(4096, 36, 12288, kv_share=1 / 4, query_size=4096),
        TransformerShape(1152, 27, 4304, ffn_matrices=2, causal=False),
        head=4096 * 151_936,
        merger=40_108_032,
    ),
    "Qwen3VL",
    tensor_names="nested",
    tiny=Preset(
        {**_TINY, "head_dim": 16, "rope_parameters": rope(5e6, [4, 2, 2], mrope_interleaved=True)},
        {**TINY_VISION, "deepstack_visual_indexes": [0, 1]},
        {**MEDIA_TOKEN_IDS, "tie_word_embeddings": True},
    ),
    megatron_core=True,
)
#: Three layers in four are recurrent; heads of the others are rotated by a quarter.
QWEN3_5: Final = Family(
    "qwen3_5",
    Qwen3VLOptions,
    Qwen35Encoder,
    ModelCost(
        "Qwen3.5-9B",
        TransformerShape(4096, 32, 12288, kv_share=1 / 4, query_size=4096, num_quadratic_layers=8),
        QWEN3_VL.cost.vision,
        head=4096 * 248_320,
        merger=10_027_008,
    ),
    "Qwen3_5",
    tiny=Preset(
        {
            **_TINY,
            "num_hidden_layers": 4,
            "vocab_size": 248_320,
            "head_dim": 32,
            "rope_parameters": rope(
                1e7, [2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25
            ),
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        TINY_VISION,
        {
            "image_token_id": 248_056,
            "video_token_id": 248_057,
            "vision_start_token_id": 248_053,
            "vision_end_token_id": 248_054,
            "tie_word_embeddings": True,
        },
    ),
    is_recurrent=True,
)
