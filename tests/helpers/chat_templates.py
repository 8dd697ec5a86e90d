"""What the chat templates of published checkpoints write for conversations with media, tools left
out: transformers renders these, and the encoders are held against that."""

_PARTS = (
    "{%- macro parts(content) %}{% for part in content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endmacro %}"
)

QWEN3_VL = (
    _PARTS
    + "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    + "{{ parts(message.content) }}{{ '<|im_end|>\n' }}{% endfor %}"
)

#: Contents are trimmed; only answers behind the last question show what was thought.
QWEN3_5 = (
    _PARTS
    + """
{%- set state = namespace(last=-1) %}
{%- for message in messages %}
    {%- set content = parts(message.content)|trim %}
    {%- set is_result = content.startswith('<tool_response>')
        and content.endswith('</tool_response>') %}
    {%- if message.role == 'user' and not is_result %}{% set state.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = parts(message.content)|trim %}
    {%- set thought = '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
        {%- set thought = thought.lstrip('\n')|trim %}
        {%- set content = content.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' and loop.index0 > state.last %}
        {{- '<think>\n' + thought + '\n</think>\n\n' }}
    {%- endif %}
    {{- content + '<|im_end|>\n' }}
{%- endfor %}"""
)
