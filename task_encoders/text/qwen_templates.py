"""Chat templates of published Qwen checkpoints, for processors that come without
one. Jinja, as transformers reads it."""

from typing import Final

from task_encoders.text.chat_templates import THOUGHT, WRITE

DEFAULT_SYSTEM: Final = "You are a helpful assistant."

QWEN2_VL_TEMPLATE: Final = (
    "{% set count = namespace(image=0, video=0) %}{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{% set count.image = count.image + 1 %}"
    "{% if add_vision_id %}Picture {{ count.image }}: {% endif %}"
    "<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif content['type'] == 'video' %}{% set count.video = count.video + 1 %}"
    "{% if add_vision_id %}Video {{ count.video }}: {% endif %}"
    "<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_CONTENTS: Final = (
    WRITE.replace("MEDIUM", "{{- '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}")
    + r"""{%- set system = write(messages[0].content) if messages[0].role == 'system' else none %}
"""
)

_RESULT: Final = r"""
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user' if loop.first or loop.previtem.role != 'tool' }}
        {{- '\n<tool_response>\n' + text + '\n</tool_response>' }}
        {{- '<|im_end|>\n' if loop.last or loop.nextitem.role != 'tool' }}
"""

#: Tools and their results; apart from these, only messages of a user and an assistant.
QWEN3_VL_TEMPLATE: Final = (
    _CONTENTS
    + r"""
{%- if tools %}
    {{- '<|im_start|>system\n' + (system + '\n\n' if system is string else '') }}
    {{- '# Tools\n\nYou may call one or more functions to assist with the user query.\n\n' }}
    {{- 'You are provided with function signatures within <tools></tools> XML tags:\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nFor each function call, return a json object with function name and ' }}
    {{- 'arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{"name": ' }}
    {{- '<function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n' }}
{%- elif system is string %}
    {{- '<|im_start|>system\n' + system + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set text = write(message.content) %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\n' + text + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' + text }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- '\n' if message.content or not loop.first }}
            {{- '<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
"""
    + _RESULT
    + r"""
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n' if add_generation_prompt }}"""
)

#: Contents are trimmed; only answers after the last question show thoughts.
QWEN3_5_TEMPLATE: Final = (
    _CONTENTS
    + r"""
{%- if tools %}
    {{- '<|im_start|>system\n# Tools\n\n' }}
    {{- 'You have access to the following functions:\n\n<tools>' }}
    {%- for tool in tools %}
        {{- '\n' + tool | tojson }}
    {%- endfor %}
    {{- '\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with ' }}
    {{- 'NO suffix:\n\n<tool_call>\n<function=example_function_name>\n' }}
    {{- '<parameter=example_parameter_1>\nvalue_1\n</parameter>\n' }}
    {{- '<parameter=example_parameter_2>\nThis is the value for the second parameter\n' }}
    {{- 'that can span\nmultiple lines\n</parameter>\n</function>\n</tool_call>\n\n' }}
    {{- '<IMPORTANT>\nReminder:\n- Function calls MUST follow the specified format: an inner ' }}
    {{- '<function=...></function> block must be nested within <tool_call></tool_call> XML ' }}
    {{- 'tags\n- Required parameters MUST be specified\n- You may provide optional reasoning ' }}
    {{- 'for your function call in natural language BEFORE the function call, but NOT after\n' }}
    {{- '- If there is no function call available, answer the question like normal with your ' }}
    {{- 'current knowledge and do not tell the user about function calls\n</IMPORTANT>' }}
    {{- '\n\n' + system | trim if system is string and system | trim }}
    {{- '<|im_end|>\n' }}
{%- elif system is string %}
    {{- '<|im_start|>system\n' + system | trim + '<|im_end|>\n' }}
{%- endif %}
{%- set state = namespace(last=-1) %}
{%- for message in messages %}
    {%- set text = write(message.content) | trim %}
    {%- set is_result = text.startswith('<tool_response>') and text.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not is_result %}
        {%- set state.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if state.last < 0 %}
    {{- raise_exception('No user query found in messages.') }}
{%- endif %}
{%- for message in messages %}
    {%- set text = write(message.content) | trim %}
    {%- if message.role == 'system' and not loop.first %}
        {{- raise_exception('System message must be at the beginning.') }}
    {%- elif message.role == 'user' %}
        {{- '<|im_start|>user\n' + text + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}"""
    + THOUGHT
    + r"""        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > state.last %}
            {{- '<think>\n' + (thought or '') | trim + '\n</think>\n\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function or call %}
            {{- ('\n\n' if text | trim else '') if loop.first else '\n' }}
            {{- '<tool_call>\n<function=' + call.name + '>\n' }}
            {%- for name, value in (call.arguments or {}) | items %}
                {{- '<parameter=' + name + '>\n' }}
                {{- value | string if value is string or value is not iterable else value|tojson }}
                {{- '\n</parameter>\n' }}
            {%- endfor %}
            {{- '</function>\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
"""
    + _RESULT
    + r"""
    {%- elif message.role != 'system' %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}"""
)
