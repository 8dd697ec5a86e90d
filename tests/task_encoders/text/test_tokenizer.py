"""Tokenizers: ids and answer starts equal transformers' own, checkpoints become tiktoken's, a hub
out of reach says so; and `model.control_tokens`, special tokens that texts spell."""

import functools
import socket
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import numpy as np
import pytest

from offline_packing.runs.artifacts import open_index
from offline_packing.verify.verify import verify
from task_encoders.families import build_sample_encoder
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample, Turn
from task_encoders.settings import PackingSettingsError
from task_encoders.text import tokenizer
from task_encoders.text.qwen_vocabulary import (
    QWEN2_5_TEXT_TOKENS,
    QWEN_PATTERN,
    QWEN_SPECIAL_TOKENS,
    qwen_ranks,
)
from task_encoders.text.tokenizer import (
    TiktokenTokenizer,
    Tokenizer,
    TransformersTokenizer,
    checkpoint_tokenizer,
    load_tokenizer,
)
from tests.helpers.datasets import dialogue, packed_run
from tests.helpers.energon_batches import batches_of
from tests.helpers.formats import of_lines
from tests.helpers.texts_and_images import random_text
from tests.helpers.tiny_families import encoder_options
from tests.world import World, task_encoder


def both(folder: Path) -> tuple[Tokenizer, TransformersTokenizer]:
    """The tokenizer of a folder, and transformers' own."""
    return load_tokenizer(str(folder)), TransformersTokenizer(checkpoint_tokenizer(str(folder)))


class PanicException(BaseException):
    """Raised by extensions in Rust."""


def test_a_panic_of_the_tokenizer_is_the_texts_fault(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, slow = both(world.tokenizer("qwen2_vl"))
    fast = TiktokenTokenizer(qwen_ranks(), QWEN_PATTERN, {}, nfc=True)
    monkeypatch.setattr(tokenizer, "check_runs", lambda text: None)
    with pytest.raises(
        SampleError, match=r"unexpected_error: the tokenizer panics: .*StackOverflow"
    ):
        fast.encode("a" + " " * 1_000_000 + "x")

    for one, encoder, method in (
        (fast, "_encoding", "encode_ordinary"),
        (slow, "_backend", "encode"),
    ):
        for error, told in ((PanicException("no room"), SampleError), (KeyboardInterrupt(), None)):
            fake = Mock(**{f"{method}.side_effect": error})
            monkeypatch.setattr(one, encoder, fake)
            for encode in (one.encode, lambda text, one=one: one.encode_answer(text, "b")):
                with pytest.raises(told or type(error), match="panics: no room" if told else None):
                    encode("a")


def test_qwen2_5_has_eight_more_tokens_which_text_spells(world: World) -> None:
    encoder = build_sample_encoder("qwen2_5_vl")
    for expected, token in enumerate(QWEN_SPECIAL_TOKENS, 151_643):
        assert encoder.tokenizer.special_id(token) == expected
    for i, token in enumerate(QWEN2_5_TEXT_TOKENS):
        assert encoder.tokenizer.special_id(token) == 151_657 + i
        assert encoder.tokenizer.encode(f"a{token}b") == [64, 151_657 + i, 65]
        assert list(encoder.tokenizer.spell([151_657 + i])) == [(token, True)]
    with pytest.raises(ValueError, match="tool_call"):
        build_sample_encoder("qwen2_vl").tokenizer.special_id("<tool_call>")
    fast, slow = both(world.tokenizer("qwen2_5_vl"))
    assert isinstance(fast, TiktokenTokenizer)
    assert fast.fingerprint == slow.fingerprint  # as artifacts of such checkpoints have it
    rng = np.random.default_rng(0)
    joints = (*QWEN2_5_TEXT_TOKENS, "<tool_call", "\u0301", "<|im_end|>", "\n")
    for number in range(200):
        text = random_text(rng, 30, chinese=number % 2 == 0)
        cut = "".join(
            word + joints[rng.integers(len(joints))] for word in (text[:20], text[20:60], "x")
        )
        assert fast.encode(cut) == slow.encode(cut)
        assert fast.encode_answer("assistant\n", cut) == slow.encode_answer("assistant\n", cut)


def test_ids_are_spelled_as_text_and_control_tokens(world: World) -> None:
    fast, slow = both(world.tokenizer("qwen2_vl"))
    text = "Grüße <|im_end|>, 世界 🙂"  # written, not meant
    start, end = fast.special_id("<|im_start|>"), fast.special_id("<|im_end|>")
    ids = [start, *fast.encode(text), end, end, *fast.encode("\n")]
    ends = [("<|im_end|>", True)] * 2
    expected = [("<|im_start|>", True), (text, False), *ends, ("\n", False)]
    assert list(fast.spell(ids)) == list(slow.spell(ids)) == expected
    parts = fast.encode("𓀀")  # several tokens, none of them a character
    assert len(parts) > 1
    assert list(fast.spell(parts)) == [("𓀀", False)]
    assert list(fast.spell(parts[:1])) == [("\ufffd", False)]


def test_a_tokenizer_without_a_tiktoken_form_is_used_as_it_is(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "hello": 1, "world": 2, "assistant": 3}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.enable_truncation(2)  # as saved where texts were cut and padded
    backend.enable_padding(length=5, pad_token="<unk>")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert isinstance(loaded, TransformersTokenizer)
    assert loaded.encode_answer("assistant\n", "hello world") == ([3, 1, 2], 1)


def test_a_missing_vocabulary_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install -e '\.\[builtin\]'"):
        qwen_ranks.__wrapped__()


NAME = "nobody/nothing"


def test_a_hub_out_of_reach_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked twice: transformers itself would wait 40 s."""
    monkeypatch.setattr(time, "sleep", slept := Mock())
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socket.socket() as port:  # nobody listens there, and it stays taken
        port.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{port.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        with pytest.raises(ValueError, match=f"the hub {endpoint} is out of reach") as told:
            build_sample_encoder("qwen2_5_vl", NAME)
    assert f"'{NAME}' is not a folder here" in str(told.value)
    assert not slept.called


def test_offline_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(socket, "getaddrinfo", asked := Mock(side_effect=OSError))
    with pytest.raises(ValueError, match="is not a folder here, and not on the hub or out of rea"):
        build_sample_encoder("qwen2_5_vl", NAME)
    assert not asked.called


BOX = ("<|box_start|>", "<|box_end|>")
SAID = "It is <|box_start|>(10,20),(30,40)<|box_end|> there."


def test_control_tokens_of_a_family(folder: Path) -> None:
    """Spell two special tokens, which are text without the option; refuse those of template, media
    and ends."""
    build = functools.partial(
        build_sample_encoder, folder.name, str(folder), **encoder_options(folder.name)
    )
    usual: Any = build()
    media = usual.MEDIA_TOKENS["image_token_id"]
    assert {usual.PAD_TOKEN, media} <= usual.written_tokens
    for token, said in (
        (media, r"model\.control_tokens: .* leave it out"),
        ("<|none|>", r"no special token '<\|none\|>'"),
    ):
        with pytest.raises(ValueError, match=said):
            build(control_tokens=(token,))
    if folder.name == "llava_1_5":  # it has no others
        return
    free = [one for one in usual.tokenizer.control_tokens if one not in usual.written_tokens]
    spelled = tuple(one for one in free if one.isascii() and one not in ("<image>", "<video>"))[:2]
    assert spelled
    encoder: Any = build(control_tokens=spelled)
    theirs = checkpoint_tokenizer(str(folder))
    rng = np.random.default_rng(0)
    for _ in range(40):
        parts = [random_text(rng, 2), *rng.choice([*spelled, "", " "], 4), random_text(rng, 2)]
        rng.shuffle(parts)
        text = "".join(parts)
        assert encoder.tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)
        if any(one in text for one in spelled):
            assert usual.tokenizer.encode(text) != encoder.tokenizer.encode(text)
    sample = SourceSample("s", "vqa", (Turn("Where?", f"a {spelled[0]} b"),))
    encoded = encoder.encode(sample, [])
    place = encoded.tokens.tolist().index(theirs.convert_tokens_to_ids(spelled[0]))
    assert encoded.labels[place] != IGNORE_INDEX
    measured = encoder.measure(sample, [])
    assert measured.num_tokens == len(encoded.tokens)
    expected = {**usual.fingerprint, "control_tokens": " ".join(sorted(spelled))}
    assert encoder.fingerprint == expected
    assert "control_tokens" not in usual.fingerprint


def test_trainers_need_no_setting(world: World, tmp_path: Path) -> None:
    """Take the option, which a warning names, from the manifest; refuse another choice, and two
    outputs that differ."""
    records = [{"id": f"r{i}", "messages": dialogue("Where?", SAID)} for i in range(6)]
    source = of_lines(tmp_path / "a.jsonl", records)
    model = {"processor": str(world.tokenizer("qwen2_vl"))}
    plain = packed_run(source, tmp_path / "text", model=model)
    spelled = packed_run(source, tmp_path / "control", model={**model, "control_tokens": BOX})
    for run in (plain, spelled):
        assert verify(run, deep=True).problems == []
    warned = [
        [one for one in open_index(run).info.warnings if "trained as text" in one]
        for run in (plain, spelled)
    ]
    assert [len(own) for own in warned] == [1, 0]
    assert warned[0][0].endswith('model.control_tokens: ["<|box_end|>", "<|box_start|>"]')
    usual = plain.config.model
    encoder, other = task_encoder(spelled, model=usual), task_encoder(plain)
    rows = [
        batches_of(run.workspace.root, own)[0].tokens[0].tolist()
        for run, own in ((spelled, encoder), (spelled, task_encoder(spelled)), (plain, other))
    ]
    assert rows[0] == rows[1]
    box = checkpoint_tokenizer(model["processor"]).convert_tokens_to_ids(BOX[0])
    assert [box in row for row in rows] == [True, True, False]
    fewer = task_encoder(spelled, model=usual.model_copy(update={"control_tokens": BOX[:1]}))
    for own, run, said in (
        (encoder, plain, "control_tokens the default"),
        (other, spelled, "task encoder has the default"),
        (fewer, spelled, "measured with control_tokens"),
    ):
        with pytest.raises(PackingSettingsError, match=said):
            own.check_manifest(run.workspace.root)
