"""Chat templates with marks around what an assistant writes, for transformers' assistant mask."""

_BEGIN, _STOP = "{% generation %}", "{% endgeneration %}"


def marked(template: str) -> str:
    """A template of `qwen_templates` with such marks."""
    begin = template.find("{% if message['content'] is string %}")
    if begin >= 0:
        content = template[begin : template.index("<|im_end|>\n{% endfor %}")] + "<|im_end|>"
        return template.replace(
            content + "\n",
            "{% if message['role'] == 'assistant' %}"
            + f"{_BEGIN}{content}{_STOP}{{% else %}}{content}{{% endif %}}{{{{ '\\n' }}}}",
        )
    header = "{{- '<|im_start|>assistant\\n'"
    head, _, answer = template.partition(header)
    end = "{{- '<|im_end|>\\n' }}\n\n    {%- elif message.role == 'tool'"
    assert end in answer
    answer, _, rest = answer.partition(end)
    opened = answer.removeprefix(" }}")
    opened = opened if opened != answer else "{{-" + answer.removeprefix(" +")
    return (
        f"{head}{header} }}}}{{%- generation %}}{opened}"
        + "{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}"
        + end.removeprefix("{{- '<|im_end|>\\n' }}")
        + rest
    )
