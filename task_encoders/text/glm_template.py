"""The chat template of published GLM-4.5V and GLM-4.6V checkpoints, for processors that come
without one. Jinja, as transformers reads it."""

from typing import Final

from task_encoders.text.dialect import Dialect
from task_encoders.text.jinja_template import THOUGHT, WRITE
from task_encoders.text.pieces import Image, Video

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

_TOOLS: Final = r"""
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

_MEDIUM: Final = """{%- set name = part.type + '|>' %}
                {{- '<|begin_of_' + name + '<|' + name + '<|end_of_' + name }}"""

#: All answers begin with thoughts: those before the last question with empty ones.
GLM_TEMPLATE: Final = (
    WRITE.replace("MEDIUM", _MEDIUM)
    + r"""{%- set state = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set state.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{{- '[gMASK]<sop>' }}
{%- if tools %}"""
    + _TOOLS
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
