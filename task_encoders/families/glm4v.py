"""GLM-4.1V and 4.5V (`glm4v`), and GLM-4.6V (`glm46v`), which takes other frames of a video.

Pixel limits of an image count two frames, those of a video all its frames. A video is a run of
pictures of two frames each, each followed by its time:

    <|begin_of_video|> <|begin_of_image|> … <|end_of_image|> 0 <|begin_of_image|> … <|end_of_video|>

These pictures have the tokens of images, so transformers' models take a row's images or its videos,
never both. Here the pictures of videos are encoded as images.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Final, Self

import numpy as np
from pydantic import Field, model_validator

from task_encoders.families.base.cost import ModelCost, TransformerShape
from task_encoders.families.base.family import (
    TINY,
    Family,
    FamilyEncoder,
    Preset,
    ResizedOptions,
    rope,
)
from task_encoders.families.base.spans import Medium, Span
from task_encoders.field_types import Count, Number
from task_encoders.media.image import VisionSettings
from task_encoders.media.video import SampledVideo, volume_resize
from task_encoders.media.video_file import VideoHeader
from task_encoders.samples import SampleError
from task_encoders.text.chat_templates import THOUGHT, WRITE
from task_encoders.text.pieces import Control, Dialect, Image, Text, Video

#: An answer ends with the next message's first token, which is added to the very last one.
GLM: Final = Dialect(
    r"<\|\w+\|>|\[gMASK\]|<sop>",
    r"<\|assistant\|>(.*?<\|(?:user|observation|system)\|>)",
    {
        "<|begin_of_image|><|image|><|end_of_image|>": Image(),
        "<|begin_of_video|><|video|><|end_of_video|>": Video(),
    },
    endings=("<|user|>", "<|observation|>"),
)

_TOOL_TEXT: Final = r"""
    {{- '<|system|>\n# Tools\n\nYou may call one or more functions to assist with the user ' }}
    {{- 'query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n' }}
    {{- '<tools>\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(ensure_ascii=False) + '\n' }}
    {%- endfor %}
    {{- '</tools>\n\nFor each function call, output the function name and arguments within the ' }}
    {{- 'following XML format:\n<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n' }}
    {{- '<arg_value>{arg-value-1}</arg_value>\n<arg_key>{arg-key-2}</arg_key>\n' }}
    {{- '<arg_value>{arg-value-2}</arg_value>\n...\n</tool_call>' }}
"""

_MEDIUM_TEXT: Final = """{%- set name = part.type + '|>' %}
                {{- '<|begin_of_' + name + '<|' + name + '<|end_of_' + name }}"""

#: All answers begin with thoughts, which are empty before the last question.
GLM_TEMPLATE: Final = (
    WRITE.replace("MEDIUM", _MEDIUM_TEXT)
    + r"""{%- set state = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set state.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{{- '[gMASK]<sop>' }}
{%- if tools %}"""
    + _TOOL_TEXT
    + r"""
{%- endif %}
{%- for message in messages %}
    {%- set text = write(message.content) %}
    {%- if message.role == 'user' %}
        {{- '<|user|>\n' + text }}
        {%- if enable_thinking is defined and not enable_thinking %}
            {{- '/nothink' if not text.endswith('/nothink') }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}"""
    + THOUGHT
    + r"""        {{- '<|assistant|>\n<think>' }}
        {{- thought.strip() if thought and loop.index0 > state.last }}
        {{- '</think>' }}
        {{- '\n' + text.strip() if text.strip() }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n<tool_call>' + call.name + '\n' }}
            {%- for name, value in call.arguments.items() %}
                {{- '<arg_key>' + name + '</arg_key>\n<arg_value>' }}
                {{- value if value is string else value | tojson(ensure_ascii=False) }}
                {{- '</arg_value>\n' }}
            {%- endfor %}
            {{- '</tool_call>' }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {{- '<|observation|>' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
    {%- elif message.role == 'system' %}
        {{- '<|system|>\n' + text }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {{- '\n<think></think>' if enable_thinking is defined and not enable_thinking }}
{%- endif %}"""
)


_PATCH: Final = 14
#: Pixels of one token: a square of 2 by 2 patches.
_TOKEN: Final = (2 * _PATCH) ** 2
#: Frames of a picture.
DEPTH: Final = 2


class GlmOptions(ResizedOptions):
    """Defaults of transformers' processors; limits of pixels are `size` in a checkpoint's files."""

    #: limits of an image, counted twice (for its two frames), after resizing, as in training
    min_pixels: Count = 16 * _TOKEN
    #: see min_pixels
    max_pixels: Count = 15_000 * _TOKEN
    #: an image or a video longer than this in one direction is set aside
    max_aspect_ratio: Annotated[Number, Field(ge=1)] = 200.0
    #: limits of a whole video after resizing
    video_min_pixels: Count = 16 * _TOKEN
    #: see video_min_pixels
    video_max_pixels: Count = 60_000 * _TOKEN

    @model_validator(mode="after")
    def _check_limits(self) -> Self:
        self.check_range("min_pixels", "max_pixels", _TOKEN)
        self.check_range("video_min_pixels", "video_max_pixels", _TOKEN)
        return self


class GlmEncoder(FamilyEncoder):
    """Common parts: one picture per step of a video."""

    MEDIA_TOKENS: ClassVar = {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    }
    PAD_TOKEN = "<|endoftext|>"
    TEMPLATE = GLM_TEMPLATE
    DIALECT = GLM
    CAPTION_START = (Control("[gMASK]"), Control("<sop>"))
    CAPTION_END = Control("<|endoftext|>", 1.0)
    VIDEOS_AS_IMAGES = True
    IMAGE_DEPTH = DEPTH
    AROUND_PICTURE = ("<|begin_of_image|>", "<|end_of_image|>")

    options: GlmOptions

    def __init__(self, options: GlmOptions) -> None:
        vision = VisionSettings(
            patch_size=_PATCH, max_aspect_ratio=options.max_aspect_ratio, resize=options.resize
        )
        super().__init__(options, vision)

    def image_medium(self, height: int, width: int) -> Medium:
        limits = self.options.min_pixels, self.options.max_pixels
        return Medium(self.grid_of(volume_resize(DEPTH, height, width, self.vision, limits)))

    def sample_video(self, header: VideoHeader) -> SampledVideo:
        if header.fps is None:
            raise SampleError("bad_video", f"{header.num_frames} frames without a frame rate")
        frames = list(dict.fromkeys(self.frame_numbers(header.num_frames, header.fps)))
        if not frames:
            raise SampleError("bad_video", f"{header.num_frames / header.fps:.2f} s: no frame")
        num_frames = len(frames) + len(frames) % DEPTH  # the last one is repeated
        limits = self.options.video_min_pixels, self.options.video_max_pixels
        size = volume_resize(num_frames, header.height, header.width, self.vision, limits)
        return self.sampled(header, frames, size)

    @abstractmethod
    def frame_numbers(self, total: int, fps: float) -> Sequence[int]:
        """Return the numbers of the frames that are taken, ascending; repeated ones count once."""

    @abstractmethod
    def time_text(self, seconds: float) -> str:
        """Write the time of a picture, which follows it."""

    def medium_spans(self, medium: Medium) -> Iterator[Span]:
        picture = self.picture_spans(self.image_token_id, (1, *medium.grid[1:]))
        if medium.video is None:
            yield from picture
            return
        yield from self.texts.spans(Control("<|begin_of_video|>"))
        for number in medium.video.frames[::DEPTH]:
            yield from picture
            yield from self.texts.spans(Text(self.time_text(number / (medium.video.fps or 1.0))))
        yield from self.texts.spans(Control("<|end_of_video|>"))


class Glm4vOptions(GlmOptions):
    """Options of GLM-4.1V and 4.5V."""

    #: frames taken per second of video
    video_fps: Annotated[Number, Field(gt=0)] = 2.0
    #: seconds; a longer video gives the number of frames of one of this length
    video_max_seconds: Count = 300


class Glm4vEncoder(GlmEncoder):
    """Frames at a constant rate, and whole seconds."""

    LENGTHS_OF = "glm4v"

    options: Glm4vOptions

    def frame_numbers(self, total: int, fps: float) -> Sequence[int]:
        rate, longest = self.options.video_fps, self.options.video_max_seconds
        seconds = total / fps
        if seconds <= longest:
            times = [i * fps / rate for i in range(max(math.floor(seconds * rate), 1))]
        elif (wanted := int(longest * rate)) >= total:
            return range(total)
        else:
            times = [time * fps for time in np.linspace(0, seconds, wanted)]
        return [min(total - 1, math.ceil(time)) for time in times]

    def time_text(self, seconds: float) -> str:
        return str(int(seconds))


class Glm46vEncoder(GlmEncoder):
    """The rate follows the duration; tenths of seconds."""

    LENGTHS_OF = "glm46v"

    def frame_numbers(self, total: int, fps: float) -> Sequence[int]:
        seconds = total / fps
        shown = min(seconds, 2400)
        rate = DEPTH * (3 if shown <= 30 else 1 if shown <= 300 else 0.5)
        wanted = min(int(shown * rate), 640)
        frames: list[int] = []
        if total >= wanted:
            times, time = np.arange(total) * (1 / fps), 0.0
            number = 0
            while number < total:
                frames.append(number)
                time += 1 / rate
                if time >= int(seconds):
                    break
                number = max(number + 1, int(np.searchsorted(times, time)))
        if len(frames) < wanted:
            ends = (frames[0], frames[-1]) if frames else (0, total - 1)
            return np.linspace(*ends, wanted, dtype=int).tolist()
        if len(frames) > wanted:
            return np.linspace(0, total - 1, wanted, dtype=int).tolist()
        return frames

    def time_text(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


GLM4V: Final = Family(
    "glm4v",
    Glm4vOptions,
    Glm4vEncoder,
    ModelCost(
        "GLM-4.1V-9B",
        TransformerShape(4096, 40, 13_696, kv_share=1 / 16, query_size=4096),
        TransformerShape(1536, 24, 4096, causal=False),
        head=4096 * 151_552,
        merger=52_559_872.0,
    ),
    "Glm4v",
    processor="Glm4vProcessor",
    tiny=Preset(
        {
            **TINY,
            "vocab_size": 151_552,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope(1e4, [1, 1, 2], partial_rotary_factor=0.5),
        },
        {
            "model_type": "glm4v_vision",
            "depth": 2,
            "hidden_size": 32,
            "hidden_act": "silu",
            "intermediate_size": 96,  # of the merger
            "num_heads": 2,
            "out_hidden_size": 64,
        },
        {"tie_word_embeddings": True},
    ),
)
GLM46V: Final = Family(
    "glm46v",
    GlmOptions,
    Glm46vEncoder,
    replace(GLM4V.cost, name="GLM-4.6V-Flash"),
    "Glm46V",
    other_names=("glm46v", "glm4v"),
    processor="Glm46VProcessor",
    tiny=GLM4V.tiny,
)
