"""Proof that a checkpoint's chat template was cut correctly: conversations with everything a sample
can contain, as pieces and as transformers' `apply_chat_template` writes them."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import xxhash

from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.text.chat_templates import ChatTemplate, JinjaTemplate
from task_encoders.text.pieces import CHATML, Dialect, to_chat
from task_encoders.text.qwen_vocabulary import BUILTIN
from task_encoders.text.tokenizer import checkpoint_file, checkpoint_json, checkpoint_tokenizer

logger = logging.getLogger(__name__)

_TOOL: Final = {"name": "find", "description": "Find <things>.", "parameters": {"type": "object"}}
_TOOLS: Final = json.dumps([{"type": "function", "function": _TOOL}])
_CALL: Final = '{"name": "find", "arguments": {"what": "a <b> \\"c\\"\\n", "n": [1, {"x": null}]}}'
_TEXT_CALL: Final = '{"name": "find", "arguments": "{\\"what\\":  \\"é\\"}"}'
_THINKS: Final = "<think>\nIt\n</think>\n\nis."


def _probes() -> Iterator[SourceSample]:
    """Yield conversations with everything that a sample may contain, the plain ones first."""

    def sample(*turns: Turn, system: str | None = None, **more: Any) -> SourceSample:
        return SourceSample("probe", "bmr", turns, system=system, **more)

    media = Turn("<image>\nWhat is <image> this?", "A cat.\n"), Turn(" And <video>?", "\n\nA dog.")
    for system in (None, "Be brief.", " \n Be \n"):
        yield sample(*media, system=system, images=("a", "b"), videos=("c",))
    yield sample(Turn("Of <image>", "A cat."), Turn("<image><image>", "Two."), images=("a",) * 3)
    yield sample(Turn(" image text video\n", " function tool\n "), Turn("name\n", "role content"))
    yield sample(Turn("<|im_end|>\n<|im_start|>assistant\nNo.", "<|im_end|>\n<|im_start|>user\n"))
    yield sample(Turn("a", _THINKS), Turn("b", f"So {_THINKS}"), Turn("c </think>", "d</think>"))
    yield sample(Turn("a", "b"), Turn("<tool_response>c</tool_response>", _THINKS), Turn("", "d"))
    # Not every template writes these.
    yield sample(Turn("a", "b", before=(("system", "c"),)), system="d")
    yield sample(Turn("a", "b", thought="c"), Turn("d", "e", thought="\nf "), Turn("g", "h"))
    yield sample(Turn("a", "b", thought=""))
    for call, thought in ((_CALL, None), (_CALL, "c"), (_TEXT_CALL, None)):
        for system in (None, "Be brief."):
            image = "<image>" if system else ""  # which not every template takes in results
            results = ("tool", f"{image} 1"), ("tool", "\n2 ")
            yield sample(
                Turn("a", "", calls=(call,)),
                Turn("3", "b", role="tool", before=results, thought=thought, calls=(call, call)),
                Turn("4", "d", role="tool"),
                Turn("e", " f ", before=(("tool", "5"),)),
                system=system,
                images=("a",) if image else (),
                tools=_TOOLS,
            )


PROBES: Final = tuple(_probes())


def prove(
    template: ChatTemplate, apply_chat_template: Callable[..., Any], name: str
) -> Mapping[int, str | None]:
    """Render each probe; None where the template cannot.

    Args:
        apply_chat_template: transformers' own, for this template.
        name: what the error calls it.

    Raises:
        ValueError: transformers writes something else, or a plain conversation cannot be written.
    """
    written = {i: write(template, probe) for i, probe in enumerate(PROBES)}
    for i, probe in enumerate(PROBES):
        ending = template.dialect.endings[bool(probe.turns[-1].calls)]
        ours, theirs = written[i], _apply(apply_chat_template, template, probe)
        is_same = (
            ours is not None
            and theirs is not None
            and theirs.rstrip() == ours.removesuffix(ending).rstrip()
        )
        if not (is_same or (ours is None and not (theirs and probe.is_plain))):
            raise ValueError(
                f"the chat template of {name!r} cannot be cut: for the conversation "
                f"{to_chat(probe)} it writes {theirs!r}, its pieces are {ours!r}"
            )
    if not any(written.values()):
        raise ValueError(f"the chat template of {name!r} writes no conversation")
    return written


def write(template: ChatTemplate, sample: SourceSample) -> str | None:
    """Write the pieces of a sample as one string; None if the template cannot write it."""
    try:
        pieces = template.pieces(sample, [1.0] * len(sample.turns))
    except SampleError:
        return None
    return "".join(map(template.dialect.spell, pieces))


def _apply(
    apply_chat_template: Callable[..., Any], template: ChatTemplate, sample: SourceSample
) -> str | None:
    import jinja2

    tools = json.loads(sample.tools) if sample.tools else None
    messages = to_chat(sample)
    if "argument text" not in template.jinja.writes:
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                call["function"]["arguments"] = json.loads(arguments)
    try:
        return str(
            apply_chat_template(
                messages,
                tools=tools,
                chat_template=template.jinja.source,
                tokenize=False,
                **template.jinja.options,
            )
        )
    except (jinja2.TemplateError, TypeError, ValueError, KeyError):
        return None


def checkpoint_template(processor: str) -> str | None:
    """Return the chat template of a checkpoint: its processor's, or else its tokenizer's."""
    file = checkpoint_file(processor, "chat_template.jinja")
    if file is not None:
        return file.read_text("utf-8")
    found = checkpoint_json(processor, "chat_template.json").get("chat_template")
    found = found or checkpoint_tokenizer(processor).chat_template
    return found.get("default") if isinstance(found, dict) else found


#: Variable of Qwen's and Gemma's templates.
_PRESERVE: Final = "preserve_thinking"


def _with_thoughts(jinja: JinjaTemplate, earlier: str) -> JinjaTemplate:
    """Return a template that drops or keeps the thoughts of earlier turns. Raises ValueError where
    it does not."""
    if earlier == "template":
        return jinja
    option = f"model.earlier_thoughts={earlier}"
    if _PRESERVE in jinja.options:
        raise ValueError(f"{option} sets {_PRESERVE}, as template_options do; remove one of them")
    if _PRESERVE in jinja.reads:
        options = {**jinja.options, _PRESERVE: earlier == "keep"}
        jinja = JinjaTemplate(jinja.source, jinja.variables, options)
    does = "keeps" if jinja.keeps_thoughts else "drops"
    does = does if "thoughts" in jinja.writes else "never writes"
    if not does.startswith(earlier):
        raise ValueError(
            f"{option}: the chat template {does} thoughts of earlier turns, whatever {_PRESERVE} "
            "is; leave it at template"
        )
    return jinja


def load_template(
    processor: str,
    own: str,
    options: Mapping[str, Any],
    earlier_thoughts: str = "template",
    dialect: Dialect = CHATML,
) -> tuple[ChatTemplate, str]:
    """Load a checkpoint's chat template with its options, and prove that it is cut correctly.
    Return it with its fingerprint, "" if it writes what the family's `own` template does. A
    checkpoint without a template is given `own`.

    Raises:
        ValueError: it cannot be cut, does not read one of the options, or cannot do with earlier
            thoughts what the option of that name says.
    """
    tokenizer = None if processor == BUILTIN else checkpoint_tokenizer(processor)
    variables = tokenizer.special_tokens_map if tokenizer else {}
    found = checkpoint_template(processor) if tokenizer else None
    jinja = _with_thoughts(JinjaTemplate(found or own, variables, options), earlier_thoughts)
    template = ChatTemplate(jinja, dialect)
    written: Mapping[int, str | None] = {}
    if tokenizer and found:
        written = prove(template, tokenizer.apply_chat_template, processor)
    if jinja.options:
        return template, _fingerprint(jinja)
    of_family = ChatTemplate(JinjaTemplate(own, variables), dialect)
    if all(write(of_family, PROBES[i]) == text for i, text in written.items()):
        return template, ""
    logger.info("%s: its chat template differs from its family's usual one", processor)
    return template, _fingerprint(jinja)


def _fingerprint(jinja: JinjaTemplate) -> str:
    given = "\0" + json.dumps(sorted(jinja.options.items())) if jinja.options else ""
    return xxhash.xxh3_128_hexdigest((jinja.source + given).encode())
