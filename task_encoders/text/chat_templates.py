"""A chat template in Jinja, cut into pieces: its own text, and the places of a sample's texts.

A template is rendered once for each *shape* of conversation, with marks in place of texts, and the
result is cut at the marks, at media and at control tokens. Every sample of that shape is then
assembled from the cut parts and its own texts:

    user, assistant  ->  <|im_start|>user\\n⟨0⟩<|im_end|>\\n<|im_start|>assistant\\n⟨1⟩<|im_end|>\\n

A text becomes one mark, except for what the template could look at: white space at its ends if the
template trims texts, and words such as `</think>` if it searches for them. These stay in the shape,
as do the places of media, and tools and calls, which templates write as JSON or in a form of their
own. So texts are never searched for control tokens, and templates decide as they would with the
real texts; `template_proof` checks that against transformers.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from task_encoders.samples import (
    MEDIA_KINDS,
    SampleError,
    SourceSample,
    media_in_front,
    split_at_media,
)
from task_encoders.text.pieces import (
    CHATML,
    SHOWN,
    Answer,
    Control,
    Dialect,
    Fixed,
    Image,
    Piece,
    Text,
    Video,
    hide,
)

#: Methods and filters whose result depends on the white space around a text.
_TRIMS: Final = frozenset(("trim", "strip", "lstrip", "rstrip", "split", "splitlines"))
#: A noncharacter that can be found again in what a template writes.
_ASKED: Final = "\ufdd0"
_QUESTION: Final = {"role": "user", "content": "a"}
#: A thought, under the names that it has in one template or another.
_THOUGHT: Final = {"reasoning_content": _ASKED, "thinking": _ASKED}
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
        """Compile a template. `variables` are other names that it may refer to, such as
        `bos_token`; `options` are variables that it must read.

        Raises:
            ValueError: it is not valid Jinja, or does not read one of the options.
        """
        #: whether it trims texts, and the words that it searches for in them
        self._template, names, self.trims, self.words = _compiled(source)
        reads = names - _GIVEN - variables.keys()
        if unread := sorted(options.keys() - reads):
            raise ValueError(
                f"template_options {', '.join(unread)}: the chat template reads no such variable; "
                f"it reads {', '.join(sorted(reads)) or 'none'}"
            )
        self.source, self.variables, self.options = source, variables, options
        self.reads = reads

    def __reduce__(self) -> tuple[type["JinjaTemplate"], tuple[Any, ...]]:
        found = self.source, dict(self.variables), dict(self.options)
        return type(self), found  # what Jinja compiles cannot be pickled

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """Render these messages. Raises SampleError if it cannot."""
        import jinja2

        try:
            given = {"messages": messages, "tools": tools, "add_generation_prompt": False}
            return self._template.render({**self.variables, **self.options, **given})
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise SampleError(
                "not_in_template", f"the chat template: {' '.join(str(error).split())}"[:200]
            ) from error

    @functools.cached_property
    def writes(self) -> frozenset[str]:
        """What an answer may come with: tools, thoughts, calls, and "argument text", where a call's
        arguments may be JSON text; otherwise they must be its object."""

        def calls(arguments: Any) -> dict[str, Any]:
            call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
            return {"content": "b", "tool_calls": [call]}

        tool = {"name": _ASKED, "description": "", "parameters": {"type": "object"}}
        answers: dict[str, tuple[dict[str, Any], Any]] = {
            "tools": ({"content": "b"}, [{"type": "function", "function": tool}]),
            "thoughts": ({"content": "b", **_THOUGHT}, None),
            "calls": (calls({"a": _ASKED}), None),
            "argument text": (calls(_ASKED), None),
        }
        found = set()
        for name, (answer, tools) in answers.items():
            with suppress(SampleError):
                if _ASKED in self.render([_QUESTION, {"role": "assistant", **answer}], tools):
                    found.add(name)
        return frozenset(found)

    @functools.cached_property
    def keeps_thoughts(self) -> bool:
        """Whether it writes the thought of an answer before the last question."""
        answer = {"role": "assistant", "content": "b"}
        return _ASKED in self.render([_QUESTION, answer | _THOUGHT, _QUESTION, answer])


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> tuple[Any, frozenset[str], bool, list[str]]:
    """Compile a template; return it with the names of its variables, and what `_looks_at` tells."""
    import jinja2
    from jinja2.meta import find_undeclared_variables

    environment = _environment()
    try:
        syntax = environment.parse(source)
        template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error
    return template, frozenset(find_undeclared_variables(syntax)), *_looks_at(syntax)


def _looks_at(syntax: Any) -> tuple[bool, list[str]]:
    """Tell whether a template trims texts, and list the words that it searches for in them: only
    words with punctuation, since templates look up names of fields in the same way."""
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
    """Set up Jinja as transformers does for chat templates, but without the time of day."""
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


# Noncharacters, which texts do not contain, around a text's number.
_MARK: Final = "\ufdd0"
_MARK_END: Final = "\ufdd1"
_NUMBERED: Final = re.compile(f"{_MARK}(\\d+){_MARK_END}")

#: Number of shapes that are kept; a shape with tools contains them in full.
_MAX_SHAPES: Final = 1024

#: A conversation: tools, then each message as (role, (skeleton, placeholder, skeleton, …)), or an
#: answer as ("assistant", skeleton, skeleton of the thought, calls). A skeleton is a text in which
#: marks replace what no template looks at.
_Shape = tuple[Any, ...]


class _Words(NamedTuple):
    """Words between control tokens: the first ones, then texts by number, each with the words that
    follow it. `turn`: the one whose answer they are part of."""

    begin: str
    texts: tuple[tuple[int, str], ...]
    header: str = ""
    turn: int = -1


class _AnswerControl(NamedTuple):
    """A control token in an answer, or at its end."""

    token: str
    turn: int


_Part = Control | Text | Fixed | Image | Video | _Words | _AnswerControl


class ChatTemplate:
    """Pieces of conversations, as a chat template writes them."""

    def __init__(self, jinja: JinjaTemplate, dialect: Dialect = CHATML) -> None:
        self.jinja, self.dialect = jinja, dialect
        # Control tokens among them are data in a text, and not what the template searches for.
        words = "|".join(
            re.escape(word) for word in jinja.words if not dialect.controls.fullmatch(word)
        )
        self._words = re.compile(f"({words})") if words else None
        looks = bool(words) or self.jinja.trims
        self._skeleton = self._looked_at if looks else _one_mark
        self._shapes: dict[_Shape, tuple[_Part, ...]] = {}

    def pieces(self, sample: SourceSample, weights: Sequence[float]) -> list[Piece]:
        """Return the pieces of a checked conversation; no white space follows the very last answer.

        Args:
            weights: the loss weight of each turn's answer.

        Raises:
            SampleError: the template does not write all of the sample.
        """
        shape, texts = self._shape(sample)
        parts = self._shapes.get(shape)
        if parts is None:
            parts = self._cut(shape)
            if len(self._shapes) >= _MAX_SHAPES:
                self._shapes.clear()
            self._shapes[shape] = parts
        pieces: list[Piece] = []
        for part in parts:
            if isinstance(part, _AnswerControl):
                pieces.append(Control(part.token, weights[part.turn]))
            elif not isinstance(part, _Words):
                pieces.append(part)
            else:
                text = part.begin
                for number, after in part.texts:
                    text += texts[number] + after
                if part.turn >= 0 and weights[part.turn]:
                    pieces.append(Answer(part.header, text, weights[part.turn]))
                else:
                    pieces.append(Text(part.header + text))
        return pieces

    def left_out(self, sample: SourceSample) -> list[str]:
        """Return the thoughts of a conversation that the template leaves out. Of other texts,
        `pieces` refuses to leave out any."""
        self.pieces(sample, [0] * len(sample.turns))  # keeps the shape
        shape, texts = self._shape(sample)
        words = [part for part in self._shapes[shape] if isinstance(part, _Words)]
        written = {number for part in words for number, _ in part.texts}
        return [text for number, text in enumerate(texts) if number not in written]

    def _shape(self, sample: SourceSample) -> tuple[_Shape, list[str]]:
        """Return the shape of a conversation, and the texts that its marks stand for."""
        texts: list[str] = []
        shape: list[Any] = [sample.tools]
        skeleton, front = self._skeleton, media_in_front(sample)
        if sample.system is not None:
            shape.append(("system", (skeleton(sample.system, texts),)))
        for turn in sample.turns:
            for role, text in (*turn.before, (turn.role, front + turn.prompt)):
                parts = split_at_media(sample, text)
                for i in range(0, len(parts), 2):
                    parts[i] = skeleton(parts[i], texts)
                shape.append((role, tuple(parts)))
            front = ""
            answer = skeleton(turn.answer, texts)
            thought = None if turn.thought is None else skeleton(turn.thought, texts)
            shape.append(("assistant", answer, thought, turn.calls))
        return tuple(shape), texts

    def _looked_at(self, text: str, texts: list[str]) -> str:
        """Replace by marks what the template does not look at in a text; add that to `texts`."""
        skeleton = ""
        for i, part in enumerate(self._words.split(text) if self._words else (text,)):
            core = part.strip()
            if i % 2 or not core:
                skeleton += part
                continue
            skeleton += part.replace(core, f"{_MARK}{len(texts)}{_MARK_END}")
            texts.append(core)
        return skeleton

    def _cut(self, shape: _Shape) -> tuple[_Part, ...]:
        """Cut the text of the template for a shape. Raises SampleError."""
        tools, messages, needed = self._messages(shape)
        written = self.jinja.render(messages, tools)
        missing = needed.difference(map(int, _NUMBERED.findall(written)))
        if missing:
            roles = ", ".join(message["role"] for message in messages)
            raise SampleError(
                "not_in_template", f"the chat template leaves out a message; roles: {roles}"[:200]
            )
        written = written.rstrip() + self.dialect.endings["tool_calls" in messages[-1]]
        parts: list[_Part] = []
        start = turn = 0
        for turn, found in enumerate(self.dialect.answers.finditer(written), 1):
            parts += self._parts(written[start : found.start(1)])
            header = ""
            if parts and isinstance(parts[-1], Text):
                header = parts[-1].text
                del parts[-1]
            parts += self._parts(found[1], header, turn - 1)
            start = found.end(1)
        parts += self._parts(written[start:])
        num_answers = sum(message["role"] == "assistant" for message in messages)
        if turn != num_answers:
            raise SampleError(
                "not_in_template",
                f"the chat template writes {turn} of {num_answers} answers as its family's does",
            )
        asked = [message["content"] for message in messages]
        kinds = [part["type"] for one in asked if not isinstance(one, str) for part in one]
        for name, kind in (("image", Image), ("video", Video)):
            if kinds.count(name) != sum(type(part) is kind for part in parts):
                raise SampleError("not_in_template", "the chat template leaves out a medium")
        # Parts that no sample changes are one wherever they follow each other.
        runs = itertools.groupby(parts, lambda part: isinstance(part, Control | Text))
        joined = [[Fixed(tuple(run))] if is_fixed else list(run) for is_fixed, run in runs]  # type: ignore
        return tuple(itertools.chain(*joined))

    def _parts(self, written: str, header: str = "", turn: int = -1) -> Iterator[_Part]:
        """Cut rendered text into parts: of one turn's answer with its header, or of no answer."""
        for i, text in enumerate(self.dialect.cut(written)):
            if i % 2:
                medium = self.dialect.media.get(text)
                control = Control(text) if turn < 0 else _AnswerControl(text, turn)
                yield control if medium is None else medium
                continue
            begin, *rest = _NUMBERED.split(text.translate(SHOWN))  # 'a⟨3⟩b' -> 'a', '3', 'b'
            texts = tuple(zip(map(int, rest[::2]), rest[1::2], strict=True))
            words = _Words(begin, texts, header if i == 0 else "", turn)
            if words.texts or (turn >= 0 and (text or words.header)):
                yield words
            elif text:
                yield Text(words.begin)

    def _messages(self, shape: _Shape) -> tuple[Any, list[dict[str, Any]], set[int]]:
        """Return tools and messages as a template takes them, with numbered marks, and the numbers
        of the texts that it must write: all but thoughts, which it may show in only some
        answers."""
        tools = hide(_parsed(shape[0], list)) if shape[0] else None
        if tools and "tools" not in self.jinja.writes:
            raise SampleError("not_in_template", "the chat template writes no tools")
        messages: list[dict[str, Any]] = []
        needed: set[int] = set()
        for role, said, *more in shape[1:]:
            if role != "assistant":
                content = said[0]
                if len(said) > 1:
                    content = [
                        {"type": MEDIA_KINDS[part]} if i % 2 else {"type": "text", "text": part}
                        for i, part in enumerate(said)
                        if part
                    ]
                messages.append({"role": role, "content": content})
                needed.update(map(int, _NUMBERED.findall("".join(said))))
                continue
            thought, calls = more
            messages.append({"role": role, "content": said})
            if self._words is None or not self._words.search(said):
                needed.update(map(int, _NUMBERED.findall(said)))
            if thought is not None:
                if "thoughts" not in self.jinja.writes:
                    raise SampleError("not_in_template", "the chat template writes no thoughts")
                messages[-1] |= {"reasoning_content": thought, "thinking": thought}
            if calls:
                messages[-1]["tool_calls"] = [self._call(call) for call in calls]
        return tools, messages, needed

    def _call(self, call: str) -> dict[str, Any]:
        if "calls" not in self.jinja.writes:
            raise SampleError("not_in_template", "the chat template writes no tool calls")
        function = _parsed(call, dict)
        takes_text = "argument text" in self.jinja.writes
        if not takes_text and isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed(function["arguments"], dict)
        return {"type": "function", "function": hide(function)}


def _parsed(text: str, kind: type) -> Any:
    """Parse the JSON text of a list or an object (`kind`). Raises SampleError for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise SampleError("bad_record", f"tools or calls: {error}") from error
    if not isinstance(value, kind):
        raise SampleError("bad_record", f"tools or calls: not a {kind.__name__}: {text[:100]!r}")
    return value


def _one_mark(text: str, texts: list[str]) -> str:
    """Replace a text by one mark, and add the text to `texts`."""
    if not text:
        return ""
    texts.append(text)
    return f"{_MARK}{len(texts) - 1}{_MARK_END}"
