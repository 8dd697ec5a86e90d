"""Chat templates: what they cannot write is refused; which answers, and which thoughts of earlier
turns, are written and carry loss; and checkpoints with templates of their own. That tokens and
labels equal transformers' is tested in `families/test_contract.py`."""

import json
import os
import pickle
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_encoders.families import build_sample_encoder, model_options
from task_encoders.samples import SampleError, SourceSample, Turn
from task_encoders.text.chat_templates import ChatTemplate, JinjaTemplate
from task_encoders.text.pieces import to_chat
from task_encoders.text.qwen_templates import QWEN2_VL_TEMPLATE, QWEN3_VL_TEMPLATE
from task_encoders.text.qwen_vocabulary import QWEN3_TEXT_TOKENS
from task_encoders.text.template_proof import load_template, prove
from tests.helpers.datasets import image_bytes
from tests.helpers.tiny_tokenizers import save_with_template, tiny_tokenizer
from tests.world import World

#: FUZZED_SAMPLES=2000 takes a minute.
SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "60"))
PUBLISHED = Path(__file__).parents[2] / "data" / "templates"
IMAGE = image_bytes(56, 56)


CALL = '{"name": "f", "arguments": {"a": "b"}}'
TOOL = '[{"type": "function", "function": {"name": "f", "description": ""}}]'
PLAIN = SourceSample("k", "bmr", (Turn("a", "b"), Turn("c", "d")))
RICH = {
    "tools": replace(PLAIN, tools=TOOL),
    "calls": replace(PLAIN, turns=(Turn("a", "b", calls=(CALL,)),)),
    "thoughts": replace(PLAIN, turns=(Turn("a", "b", thought="c"),)),
    "systems": replace(PLAIN, turns=(Turn("a", "b", before=(("system", "c"),)),), system="d"),
}
WRITTEN: dict[str, set[str]] = {
    "llava_1_5": set(),
    "qwen2_vl": {"systems"},
    "qwen3_vl": {"tools", "calls"},
    "qwen3_5": {"tools", "calls", "thoughts"},
}


@pytest.mark.parametrize("family", WRITTEN)
def test_what_a_template_cannot_write_is_refused(family: str, world: World) -> None:
    encoder = build_sample_encoder(family, str(world.tokenizer(family)))
    for what, sample in RICH.items():
        is_refused = what not in WRITTEN[family]
        with pytest.raises(SampleError, match="not_in_template") if is_refused else nullcontext():
            encoder.measure(sample, [])


@pytest.mark.parametrize(
    "sample",
    [
        *(replace(PLAIN, tools=tools) for tools in ("[", "{}", '["\ufdd0"]')),
        *(replace(PLAIN, turns=(Turn("a", "b", calls=(call,)),)) for call in ("[", "[1]")),
    ],
)
def test_tools_that_are_none(sample: SourceSample) -> None:
    with pytest.raises(SampleError, match="bad_record: tools or calls"):
        build_sample_encoder("qwen3_vl").measure(sample, [])


#: Of each published template, whether thoughts of earlier turns are kept; None: it is refused.
EARLIER = {
    "qwen3_5": {"template": False, "drop": False, "keep": None},
    "qwen3_6": {"template": False, "drop": False, "keep": True},
    "qwen3_8": {"template": True, "drop": False, "keep": True},
    "qwen3_vl": {"template": False, "drop": None, "keep": None},
}


@pytest.mark.parametrize("name", EARLIER)
def test_thoughts_of_earlier_turns(name: str, tmp_path: Path) -> None:
    """They are dropped or kept as transformers does with preserve_thinking, or this is refused."""
    published = PUBLISHED / f"{name}.jinja"
    template = published.read_text() if published.exists() else QWEN3_VL_TEMPLATE
    tokenizer = tiny_tokenizer(QWEN3_TEXT_TOKENS)
    save_with_template(tokenizer, template, tmp_path)
    family = "qwen3_5" if published.exists() else "qwen3_vl"
    given: Any = {"model": family, "processor": str(tmp_path)}
    turns = (Turn("a", "b", thought="first"), Turn("c", "<think>\nlast\n</think>\n\nd"))
    sample = SourceSample("k", "bmr", turns)
    for earlier, kept in EARLIER[name].items():
        if kept is None:
            with pytest.raises(ValueError, match=f"earlier_thoughts={earlier}: the chat template"):
                build_sample_encoder(**given, earlier_thoughts=earlier)
            continue
        encoder = build_sample_encoder(**given, earlier_thoughts=earlier)
        if family == "qwen3_vl":
            continue
        options = {} if earlier == "template" else {"preserve_thinking": earlier == "keep"}
        text = tokenizer.apply_chat_template(to_chat(sample), tokenize=False, **options)
        assert ("first" in text, "last" in text) == (kept, True)
        encoded = pickle.loads(pickle.dumps(encoder)).encode(sample, [])
        assert encoded.tokens.tolist() == tokenizer(text.removesuffix("\n"))["input_ids"]
        assert encoder.measure(sample, []).num_tokens == len(encoded.tokens)
        is_default = earlier == "template" or "preserve_thinking" not in template
        as_is = build_sample_encoder(**given)
        assert (encoder.fingerprint == as_is.fingerprint) == is_default
        assert bool([*encoder.notes(sample)]) == (earlier == "template" and not kept)
        inline = replace(sample, turns=(Turn("a", "<think>first</think>b"), *turns[1:]))
        if (name, earlier) == ("qwen3_8", "drop"):
            with pytest.raises(
                SampleError, match=r"not_in_template: .* name them reasoning_content"
            ):
                encoder.measure(inline, [])
        else:
            ids = encoder.encode(inline, []).tokens
            assert ("first" in tokenizer.decode(ids)) == kept
        if options and not is_default:
            with pytest.raises(ValueError, match="template_options do; remove one of them"):
                build_sample_encoder(**given, earlier_thoughts=earlier, template_options=options)


@pytest.mark.parametrize("family", ["qwen3_5", "glm4v"])
def test_empty_thoughts_may_carry_no_loss(family: str, world: World) -> None:
    given = {"model": family, "processor": str(world.tokenizer(family))}
    trained, masked = (
        build_sample_encoder(**given, empty_thoughts=one) for one in ("train", "mask")
    )
    assert masked.fingerprint == {**trained.fingerprint, "empty_thoughts": "mask"}
    assert trained.fingerprint == build_sample_encoder(**given).fingerprint
    rng = np.random.default_rng(0)
    texts = ("b", "It <think>\n</think>\n is", "c.\n\n<think></think>", " d")
    num_masked = 0
    for number in range(SAMPLES):
        turns = tuple(
            Turn(f"q{number}", str(rng.choice(texts)), thought=[None, "", "t", "<think>"][kind])
            for kind in rng.integers(4, size=rng.integers(1, 4))
        )
        sample = SourceSample("k", "bmr", turns)
        whole, some = trained.encode(sample, []), masked.encode(sample, [])
        assert some.tokens.tolist() == whole.tokens.tolist()
        answers, kept = (
            answers_of(encoder, one) for encoder, one in ((trained, whole), (masked, some))
        )
        # What ms-swift's loss_scale ignore_empty_think trains.
        assert kept == [re.sub(r"^<think>\s*</think>\s*", "", answer) for answer in answers]
        num_masked += kept != answers
        length = masked.measure(sample, [])
        assert length.num_loss_tokens == (some.loss_weights > 0).sum()
    assert num_masked > SAMPLES / 4


def answers_of(encoder: Any, encoded: Any) -> list[str]:
    """The text of each run of trained tokens, without GLM's line break before a thought."""
    edges = np.flatnonzero(np.diff(encoded.loss_weights > 0, prepend=False, append=False))
    runs = (encoded.tokens[begin:end] for begin, end in edges.reshape(-1, 2))
    texts = ["".join(text for text, _ in encoder.tokenizer.spell(run)) for run in runs]
    return [text.removeprefix("\n") if "think" in text[:8] else text for text in texts]


def test_the_template_of_a_checkpoint_is_its_own(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(QWEN3_TEXT_TOKENS)
    save_with_template(tokenizer, QWEN3_VL_TEMPLATE, tmp_path)
    own = build_sample_encoder("qwen3_vl", str(tmp_path))
    written = "{{- '<|im_start|>assistant\\n' + text }}"
    generated = f"{{%- generation %}}{written}{{%- endgeneration %}}"
    save_with_template(tokenizer, QWEN3_VL_TEMPLATE.replace(written, generated), tmp_path)
    template, fingerprint = load_template(str(tmp_path), QWEN3_VL_TEMPLATE, {})
    assert ("generation" in template.jinja.source, fingerprint) == (True, "")

    terse = QWEN3_VL_TEMPLATE.replace("user\\n", "User:\\n")
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": terse}))
    other = build_sample_encoder("qwen3_vl", str(tmp_path))
    changed = {name: other.fingerprint[name] for name in other.fingerprint.keys() - own.fingerprint}
    assert list(changed) == ["chat_template"]
    encoded = other.encode(PLAIN, [])
    assert encoded.tokens.tolist() != own.encode(PLAIN, []).tokens.tolist()
    again = pickle.loads(pickle.dumps(other)).encode(PLAIN, [])
    np.testing.assert_array_equal(again.tokens, encoded.tokens)

    foreign = QWEN3_VL_TEMPLATE.replace("user\\n", "user\\n<|turn|>")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": foreign}))
    with pytest.raises(ValueError, match=r"no special token '<\|turn\|>'"):
        build_sample_encoder("qwen3_vl", str(tmp_path))


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_variables_of_a_template(family: str, tmp_path: Path) -> None:
    """They are what transformers is given as keyword arguments, such as `add_vision_id`, which
    writes "Picture 1: " before a picture; one that is not read is refused."""
    template, name = QWEN2_VL_TEMPLATE, "add_vision_id"
    if family == "qwen3_vl":
        template, header = QWEN3_VL_TEMPLATE, "'<|im_start|>assistant\\n' +"
        closed = "('<think>\n\n</think>\n\n' if not thinks|default(true) else '') +"
        template, name = template.replace(header, f"{header} {closed}"), "thinks"
    tokenizer = tiny_tokenizer(QWEN3_TEXT_TOKENS if family == "qwen3_vl" else ())
    save_with_template(tokenizer, template, tmp_path)
    turns = (Turn("<image> or 1<image>?", "This."), Turn("\n<image>", "That."))
    samples = (
        PLAIN,
        SourceSample("a", "bmr", turns, ("a", "b", "c")),
        SourceSample("b", "vqa", (Turn("What?", "A cat."),), ("a", "b"), "Be brief."),
    )
    lengths = {}
    for options in ({}, {name: True}, {name: False}):
        given: Any = {"family": family, "processor": str(tmp_path), "template_options": options}
        settings = model_options(**given)
        assert model_options(**settings.model_dump(mode="json")) == settings
        encoder: Any = pickle.loads(pickle.dumps(build_sample_encoder(settings)))
        own = lengths.setdefault(str(encoder.fingerprint), [])
        for sample in samples:
            count = len(sample.images)
            text = tokenizer.apply_chat_template(to_chat(sample), tokenize=False, **options)
            encoded = encoder.encode(sample, [IMAGE] * count)
            pads = encoded.tokens == encoder.image_token_id  # of each image one is kept
            tokens = encoded.tokens[~(pads & np.append(False, pads[:-1]))].tolist()
            assert tokens == tokenizer(text.removesuffix("\n"))["input_ids"]
            own.append(encoder.measure(sample, [(56, 56)] * count).num_tokens)
            assert own[-1] == len(encoded.tokens)
    assert len(lengths) == 3
    assert len({*map(tuple, lengths.values())}) == 2  # one value is the default
    for wrong in ("think", "messages", "eos_token"):
        with pytest.raises(ValueError, match=f"template_options {wrong}: .*; it reads {name}"):
            build_sample_encoder(family, str(tmp_path), template_options={wrong: True})
    with pytest.raises(ValueError, match="thinks: the chat template reads no such variable"):
        build_sample_encoder("qwen3_vl", template_options={"thinks": False})
    with pytest.raises(ValueError, match="family llava_1_5 has no template_options"):
        build_sample_encoder("llava_1_5", str(tmp_path), template_options={"thinks": False})


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        # It looks at a text in a way that no mark shows.
        (
            QWEN2_VL_TEMPLATE.replace("{{ content['text'] }}", "{{ content['text']|upper }}"),
            "WHAT IS",
        ),
        (QWEN2_VL_TEMPLATE.replace("message['content'] }}", "message['content'][:5] }}"), "A cat"),
        (QWEN2_VL_TEMPLATE.replace("<|im_start|>{{", "{{"), "its pieces are None"),
        (QWEN3_VL_TEMPLATE.replace("+ text", "+ text|length|string"), "it writes"),
        ("{{ messages[0].content }}{{ strftime_now('%d') }}", "it writes"),
        ("{{ raise_exception('no') }}", "writes no conversation"),
        ("{% if %}", "not valid Jinja"),
    ],
)
def test_a_template_that_cannot_be_cut_is_refused(template: str, shown: str) -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=shown):
        prove(ChatTemplate(JinjaTemplate(template)), tokenizer.apply_chat_template, "a checkpoint")
