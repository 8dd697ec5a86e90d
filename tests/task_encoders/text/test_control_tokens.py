"""`model.control_tokens`: special tokens that texts spell."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offline_packing.errors import ConfigError
from offline_packing.runs.artifacts import open_index
from offline_packing.verify.verify import verify
from task_encoders.families import build_sample_encoder
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.samples import SourceSample, Turn
from task_encoders.settings import PackingSettingsError
from task_encoders.text.tokenizer import checkpoint_tokenizer
from tests.helpers.datasets import dialogue, make_run, pack_all
from tests.helpers.energon_batches import batches_of, encoder_of
from tests.helpers.formats import lines, write_file
from tests.helpers.texts_and_images import random_text
from tests.helpers.tiny_families import encoder_options

BOX = ("<|box_start|>", "<|box_end|>")
SAID = "It is <|box_start|>(10,20),(30,40)<|box_end|> there."


def test_ids_are_those_of_the_tokenizer(folder: Path) -> None:
    """Texts spell two of its special tokens, which are text without the option."""
    if folder.name == "llava_1_5":
        pytest.skip("it has none")
    build = functools.partial(
        build_sample_encoder, folder.name, str(folder), **encoder_options(folder.name)
    )
    usual: Any = build()
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


def test_tokens_of_template_media_and_ends_are_refused(folder: Path) -> None:
    build = functools.partial(
        build_sample_encoder, folder.name, str(folder), **encoder_options(folder.name)
    )
    usual: Any = build()
    media = usual.MEDIA_TOKENS["image_token_id"]
    for token in {usual.PAD_TOKEN, media, *sorted(usual.written_tokens)[:3]}:
        with pytest.raises(ValueError, match=r"model\.control_tokens: .* leave it out"):
            build(control_tokens=(token,))
    with pytest.raises(ValueError, match=r"no special token '<\|none\|>'"):
        build(control_tokens=("<|none|>",))


def run_of(folder: Path, name: str, said: str = SAID, **model: Any) -> Any:
    records = [{"id": f"r{i}", "messages": dialogue("Where?", said)} for i in range(6)]
    write_file(folder / "a.jsonl", lines(records))
    source = {"format": "jsonl", "path": str(folder / "a.jsonl"), "task": "bmr"}
    return make_run(source, folder / name, model=model)


def test_the_warning_is_the_remedy(tmp_path: Path) -> None:
    run = run_of(tmp_path, "text")
    pack_all(run)
    (line,) = [one for one in open_index(run).info.warnings if "trained as text" in one]
    assert line.startswith(
        "texts hold '<|box_end|>', '<|box_start|>' (in about 6 samples, such as r0: "
        "'<|box_start|>(10,20),(30,40)<|box_end|> there."
    )
    assert line.endswith(
        "'), trained as text; where the checkpoint knows them as control tokens: "
        'model.control_tokens: ["<|box_end|>", "<|box_start|>"]'
    )
    again = run_of(tmp_path, "control", control_tokens=["<|box_end|>", "<|box_start|>"])
    pack_all(again)
    assert not [one for one in open_index(again).info.warnings if "as text" in one]
    with pytest.raises(ConfigError, match=r"'<\|im_end\|>' marks media, ends a text"):
        pack_all(run_of(tmp_path, "bad", control_tokens=["<|im_end|>"]))


def test_trainers_need_no_setting(tmp_path: Path) -> None:
    """The manifest says it; another choice is refused, as are two outputs that differ."""
    plain, spelled = run_of(tmp_path, "text"), run_of(tmp_path, "control", control_tokens=BOX)
    for run in (plain, spelled):
        pack_all(run)
        assert verify(run, deep=True).problems == []
    usual = plain.config.model
    encoder = encoder_of(spelled, model=usual)
    (batch,) = batches_of(spelled.workspace.root, encoder)
    (expected,) = batches_of(spelled.workspace.root, encoder_of(spelled))
    assert batch.tokens.tolist() == expected.tokens.tolist()
    assert 151_648 in batch.tokens.flatten().tolist()
    (text,) = batches_of(plain.workspace.root, encoder_of(plain))
    assert 151_648 not in text.tokens.flatten().tolist()
    with pytest.raises(PackingSettingsError, match="control_tokens the default"):
        encoder.check_manifest(plain.workspace.root)
    other = encoder_of(plain)
    other.check_manifest(plain.workspace.root)
    with pytest.raises(PackingSettingsError, match="task encoder has the default"):
        other.check_manifest(spelled.workspace.root)
    fewer = encoder_of(spelled, model=usual.model_copy(update={"control_tokens": BOX[:1]}))
    with pytest.raises(PackingSettingsError, match="measured with control_tokens"):
        fewer.check_manifest(spelled.workspace.root)
