"""A chat template in Jinja, as transformers runs it, its literal texts, and parts of several."""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

from task_encoders.samples import SampleError

#: Methods and filters whose result depends on the white space around a text.
_TRIMS: Final = frozenset(("trim", "strip", "lstrip", "rstrip", "split", "splitlines"))
#: A noncharacter that can be found again in what a template writes.
_ASKED: Final = "\ufdd0"
#: Variables that every template is given.
_GIVEN: Final = frozenset(("messages", "tools", "add_generation_prompt"))

#: The thought at the beginning of an answer's text, apart from the rest of it.
THOUGHT: Final = r"""
        {%- set thought = message.reasoning_content %}
        {%- if thought is not string and '</think>' in text %}
            {%- set thought = text.split('</think>')[0].rstrip('\n').split('<think>')[-1] %}
            {%- set text = text.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
"""
#: A macro that writes a message's content. MEDIUM: lines for an image or a video, `part.type`.
WRITE: Final = r"""
{%- macro write(content) %}
    {%- if content is string %}
        {{- content }}
    {%- else %}
        {%- for part in content %}
            {%- if part.type == 'text' %}
                {{- part.text }}
            {%- else %}
                MEDIUM
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""


class JinjaTemplate:
    """A compiled template."""

    def __init__(
        self,
        source: str,
        variables: Mapping[str, Any] = MappingProxyType({}),
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`variables`: other names that the template may refer to, such as `bos_token`. `options`:
        variables that it must read.

        Raises:
            ValueError: it is not valid Jinja, or does not read one of the options.
        """
        import jinja2
        from jinja2.meta import find_undeclared_variables

        environment = _environment()
        try:
            syntax = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid Jinja: {error}") from error
        reads = find_undeclared_variables(syntax) - _GIVEN - variables.keys()
        if unread := sorted(options.keys() - reads):
            raise ValueError(
                f"template_options {', '.join(unread)}: the chat template reads no such variable; "
                f"it reads {', '.join(sorted(reads)) or 'none'}"
            )
        self.source, self._variables, self.options = source, variables, options
        #: whether it trims texts, and the words that it searches for in them
        self.trims, self.words = _looks_at(syntax)

    def __reduce__(self) -> tuple[type["JinjaTemplate"], tuple[Any, ...]]:
        found = self.source, dict(self._variables), dict(self.options)
        return type(self), found  # what Jinja compiles cannot be pickled

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """Render these messages. Raises SampleError if it cannot."""
        import jinja2

        try:
            given = {"messages": messages, "tools": tools, "add_generation_prompt": False}
            return self._template.render({**self._variables, **self.options, **given})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise SampleError(
                "not_in_template", f"the chat template: {' '.join(str(error).split())}"[:200]
            ) from error

    @cached_property
    def takes_argument_text(self) -> bool:
        """Whether a call's arguments may be JSON text; otherwise they must be its object."""
        call = {"type": "function", "function": {"name": "f", "arguments": _ASKED}}
        return self._writes({"content": "b", "tool_calls": [call]})

    def _writes(self, answer: Mapping[str, Any], tools: Any = None) -> bool:
        asked = {"role": "user", "content": "a"}
        try:
            return _ASKED in self.render([asked, {"role": "assistant", **answer}], tools)
        except SampleError:
            return False

    @cached_property
    def writes_tools(self) -> bool:
        tool = {"name": _ASKED, "description": "", "parameters": {"type": "object"}}
        return self._writes({"content": "b"}, [{"type": "function", "function": tool}])

    @cached_property
    def writes_thoughts(self) -> bool:
        return self._writes({"content": "b", "reasoning_content": _ASKED, "thinking": _ASKED})

    @cached_property
    def writes_calls(self) -> bool:
        call = {"type": "function", "function": {"name": "f", "arguments": {"a": _ASKED}}}
        return self._writes({"content": "b", "tool_calls": [call]})


def _looks_at(syntax: Any) -> tuple[bool, list[str]]:
    """Whether a template trims texts, and the words that it searches for in them: only those with
    punctuation, since it looks up names of fields in the same way."""
    from jinja2 import nodes

    names = {node.name for node in syntax.find_all(nodes.Filter)}
    names |= {node.attr for node in syntax.find_all(nodes.Getattr)}
    asked: list[Any] = [
        argument
        for call in syntax.find_all(nodes.Call)
        if isinstance(call.node, nodes.Getattr)
        for argument in call.args
    ]
    for comparison in syntax.find_all(nodes.Compare):
        if any(operand.op in ("in", "notin") for operand in comparison.ops):
            asked.append(comparison.expr)
    found = {one.value for one in asked if isinstance(one, nodes.Const)}
    words = [word for word in found if isinstance(word, str) and re.search(r"[^\w\s]", word)]
    return not _TRIMS.isdisjoint(names), sorted(words, key=lambda word: (-len(word), word))


def _environment() -> Any:
    """Jinja as transformers sets it up for chat templates, except for the time of day."""
    import jinja2
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}: a block around an answer's words, written like any other."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    return environment
