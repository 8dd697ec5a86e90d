"""Mistral 3 (Small 3.1 and 3.2, Ministral 3, Small 4, Medium 3.5): Pixtral's tower, whose images
keep their shape.

    an image of 2 by 3 tokens   [IMG] [IMG] [IMG] [IMG_BREAK] [IMG] [IMG] [IMG] [IMG_END]
"""

import math
from collections.abc import Iterable
from typing import Any, ClassVar, Final

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
from task_encoders.samples import SampleError
from task_encoders.text.pieces import Control, Dialect, Image
from task_encoders.versions import require

_PAIRS: Final = "INST|AVAILABLE_TOOLS|TOOL_RESULTS|SYSTEM_PROMPT|MODEL_SETTINGS|THINK"
_ALONE: Final = "IMG|TOOL_CALLS|TOOL_CONTENT|ARGS|CALL_ID"

#: An answer has no header: it begins after a question or a result that nothing else follows.
MISTRAL: Final = Dialect(
    rf"</?s>|\[/?(?:{_PAIRS})\]|\[(?:{_ALONE})\]",
    r"\[/(?:INST|TOOL_RESULTS)\]"
    r"(?!\[(?:INST|TOOL_RESULTS|SYSTEM_PROMPT|AVAILABLE_TOOLS|MODEL_SETTINGS)\])(.*?</s>)",
    {"[IMG]": Image()},
)

#: A message of one text and one image is written with the image in front.
MISTRAL_TEMPLATE: Final = r"""
{%- macro write(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- if content|length == 2 and content[0].type == 'text' and content[1].type == 'image' %}
            {%- set content = [content[1], content[0]] %}
        {%- endif %}
        {%- for part in content %}
            {%- if part.type not in ['text', 'image'] %}
                {{- raise_exception('Only text and images are supported.') }}
            {%- endif %}
            {{- part.text if part.type == 'text' else '[IMG]' }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set state = namespace(tools=tools, before='') %}
{{- bos_token }}
{%- for message in messages %}
    {%- set role, content = message.role, message.content %}
    {%- if role == 'tool' and state.before not in ['assistant', 'tool']
            or role == 'system' and state.before in ['assistant', 'tool']
            or role not in ['user', 'assistant', 'tool', 'system']
            or role != 'user' and content is not string
            or role == 'user' == state.before and (content is not string
                or loop.previtem.content is not string) %}
        {{- raise_exception('Unexpected role ' ~ role ~ ' after ' ~ state.before) }}
    {%- elif role == 'system' %}
        {{- '[SYSTEM_PROMPT]' ~ content ~ '[/SYSTEM_PROMPT]' }}
    {%- elif role == 'user' %}
        {%- if state.before == 'user' %}
            {{- '\n\n' }}
        {%- else %}
            {%- if state.tools %}
                {{- '[AVAILABLE_TOOLS]' ~ (state.tools | tojson) ~ '[/AVAILABLE_TOOLS]' }}
                {%- set state.tools = none %}
            {%- endif %}
            {{- '[INST]' }}
        {%- endif %}
        {{- write(content) }}
        {%- if loop.last or loop.nextitem.role != 'user' %}
            {{- '[/INST]' }}
        {%- endif %}
    {%- elif role == 'tool' %}
        {{- '[TOOL_RESULTS]' ~ content ~ '[/TOOL_RESULTS]' }}
    {%- else %}
        {%- if message.reasoning_content %}
            {{- '[THINK]' ~ message.reasoning_content ~ '[/THINK]' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {%- set given = call.arguments %}
            {{- '[TOOL_CALLS]' ~ call.name ~ '[ARGS]' }}
            {{- (given or '{}') if given is string else given | tojson }}
        {%- endfor %}
        {{- eos_token }}
    {%- endif %}
    {%- set state.before = role %}
{%- endfor %}"""


#: The first transformers that reads tekken.json.
_SINCE: Final = "5.15"
_MERGE: Final = 2  # patches of a token on each side


class Mistral3Options(ResizedOptions):
    """Images of any shape, made smaller where a side is longer than `longest_edge`."""

    #: longest side of an image after resizing, in pixels
    longest_edge: Count = 1540
    #: side of a patch in pixels; a token is a square of four patches
    patch_size: Count = 14


class Mistral3Encoder(FamilyEncoder):
    """Patches of an image row by row, and a token after each row of tokens."""

    LENGTHS_OF = "mistral3"
    POSITION_ROWS = 1
    IMAGE_LAYOUT = "padded"
    MEDIA_TOKENS: ClassVar = {"image_token_id": "[IMG]"}
    PAD_TOKEN = "<pad>"
    TEMPLATE = MISTRAL_TEMPLATE
    DIALECT = MISTRAL
    CAPTION_START = (Control("<s>"),)
    CAPTION_END = Control("</s>", 1.0)

    options: Mistral3Options

    def __init__(self, options: Mistral3Options) -> None:
        require("transformers", f">={_SINCE}", "Mistral's tokenizer")
        patch, resize = options.patch_size, options.resize
        vision = VisionSettings(
            patch_size=patch, temporal_patch_size=1, merge_size=1, resize=resize
        )
        super().__init__(options, vision)
        self._row_ends = [self.tokenizer.special_id(f"[IMG_{name}]") for name in ("BREAK", "END")]

    def image_medium(self, height: int, width: int) -> Medium:
        ratio = max(height, width) / self.options.longest_edge
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        if not min(height, width):
            raise SampleError("aspect_ratio", "less than a pixel wide after resizing")
        token = _MERGE * self.options.patch_size
        return Medium((1, _MERGE * -(-height // token), _MERGE * -(-width // token)))

    def medium_spans(self, medium: Medium) -> Iterable[Span]:
        rows, columns = (side // _MERGE for side in medium.grid[1:])
        ids = np.full((rows, columns + 1), self.image_token_id)
        ids[:, -1], ids[-1, -1] = self._row_ends
        return [Span(ids.ravel(), ids.size)]  # type: ignore[arg-type]

    @staticmethod
    def blank_image(hf_config: Any) -> BlankImage:
        return two_tokens(hf_config.vision_config.patch_size, hf_config.spatial_merge_size)


MISTRAL3: Final = Family(
    "mistral3",
    Mistral3Options,
    Mistral3Encoder,
    ModelCost(
        "Ministral-3-8B",
        TransformerShape(4096, 34, 14336, kv_share=1 / 4, query_size=4096),
        TransformerShape(1024, 24, 4096, causal=False),
        head=4096 * 131_072,
        merger=6_291_456.0,
    ),
    "Mistral3",
    since=_SINCE,
    tensor_names="llava",
    tiny=Preset(
        {**TINY, "model_type": "ministral3", "vocab_size": 131_072, "head_dim": 16},
        {
            **TINY_TOWER,
            "model_type": "pixtral",
            "patch_size": Mistral3Options.model_fields["patch_size"].default,
            "image_size": Mistral3Options.model_fields["longest_edge"].default,
        },
        {"image_token_id": 10, "spatial_merge_size": _MERGE, "tie_word_embeddings": False},
    ),
    megatron_core=True,
)
