"""GLM-V's texts: tokens and labels equal transformers' own and those of the published template, and
what is measured is what is encoded."""

import itertools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_encoders.families import build_sample_encoder, family_of_processor
from task_encoders.families.glm4v import GLM_TEMPLATE
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.samples import SampleError, SourceSample, Turn
from tests.helpers.conversations import random_conversation
from tests.helpers.glm_reference import IMAGE, REFERENCES, Reference, differences
from tests.helpers.glm_tokenizer import CONTROL, save_glm_tokenizer

#: FUZZED_SAMPLES=20000 takes some minutes.
SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "60"))
PUBLISHED = Path(__file__).parents[2] / "data" / "templates"


@pytest.fixture(scope="module", params=REFERENCES)
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


def test_fuzzed_conversations(reference: Reference, tmp_path: Path) -> None:
    """Thoughts, tools, calls and their results, control tokens typed by a user."""
    rng = np.random.default_rng(11)
    refused: Counter[str] = Counter()
    found: Counter[str] = Counter()
    for index in range(min(2 * SAMPLES, 4000)):
        special = tuple(CONTROL) if index % 3 == 0 else ()
        sample = random_conversation(rng, index, special=special)
        for name in sample.images:
            (tmp_path / name).write_bytes(IMAGE)
        try:
            wrong = differences(reference, sample, tmp_path, [IMAGE] * len(sample.images), [])
        except SampleError as error:
            refused[error.reason] += 1
            continue
        assert wrong == []
        found["tools"] += bool(sample.tools)
        found["thoughts"] += any(turn.thought for turn in sample.turns)
        found["images"] += len(sample.images) > 1
    assert sum(refused.values()) < 0.02 * SAMPLES, refused
    assert min(found.values()) > 0.02 * SAMPLES


def test_text_is_that_of_the_published_template(reference: Reference) -> None:
    """TRL has GLM-4.5's, which takes no media, and a form of it with marks of what is trained."""
    published, marked = (
        (PUBLISHED / f"glm4moe{kind}.jinja").read_text() for kind in ("", "_training")
    )
    rng = np.random.default_rng(12)
    compared = with_tools = 0
    for index in range(min(2 * SAMPLES, 4000)):
        sample = random_conversation(rng, index)
        pairs = itertools.pairwise(sample.turns)
        if sample.images or any(bool(a.calls) != (b.role == "tool") for a, b in pairs):
            continue  # TRL's form takes it that results follow calls, and nothing else does
        text, expected = reference.text(sample), reference.text(sample, published)
        assert text == expected
        messages, tools = reference.arguments(sample)
        found = reference.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=marked,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        encoded = reference.encoder.encode(sample, [])
        assert encoded.tokens.tolist() == found["input_ids"]
        if all(turn.weight for turn in sample.turns):
            mask = np.array(found["assistant_masks"], bool)
            np.testing.assert_array_equal(encoded.labels != IGNORE_INDEX, mask)
        compared += 1
        with_tools += bool(sample.tools)
    assert compared > 0.4 * SAMPLES
    assert with_tools > 0.1 * SAMPLES


def test_captions_have_no_template(reference: Reference) -> None:
    sample = SourceSample("c", "captioning", (Turn("", "A cat."),), ("a",))
    encoded = reference.encoder.encode(sample, [IMAGE])
    pads = "<|image|>" * (encoded.image_grid_thw.prod() // 4)
    text = f"[gMASK]<sop><|begin_of_image|>{pads}<|end_of_image|>A cat.<|endoftext|>"
    assert encoded.tokens.tolist() == reference.tokenizer(text)["input_ids"]
    labelled = encoded.labels[encoded.labels != IGNORE_INDEX].tolist()
    assert labelled == reference.tokenizer("A cat.<|endoftext|>")["input_ids"]


@pytest.mark.parametrize("model_type", ["glm4v", "glm4v_moe"])
def test_checkpoints_of_one_model_type_are_told_apart(model_type: str, tmp_path: Path) -> None:
    """GLM-4.5V's and GLM-4.6V's models are of one class, their processors are not."""
    for family, (processor, *_) in REFERENCES.items():
        folder = tmp_path / family
        save_glm_tokenizer(folder, kind=processor.__name__)
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert family_of_processor(str(folder)) == family
        assert build_sample_encoder(family, str(folder)).fingerprint["family"] == family
        other = next(name for name in REFERENCES if name != family)
        with pytest.raises(ValueError, match=f"is of family {family}, not {other}"):
            build_sample_encoder(other, str(folder))


def test_it_needs_a_checkpoint() -> None:
    for family in REFERENCES:
        with pytest.raises(ValueError, match=f"{family} has no built-in vocabulary"):
            build_sample_encoder(family)


def test_media_in_tool_results_that_the_template_shows_as_python_does(tmp_path: Path) -> None:
    """GLM-4.5V's template writes tool results that are not text as lists of parts."""
    literal = GLM_TEMPLATE.replace("response>\\n' + text +", "response>\\n' ~ message.content ~")
    save_glm_tokenizer(tmp_path, literal)
    encoder: Any = build_sample_encoder("glm4v", str(tmp_path))
    call = '{"name": "f", "arguments": {"a": "b"}}'
    for result in ("3", "<image>3"):
        turns = (Turn("a", "", calls=(call,)), Turn(result, "b", role="tool"))
        sample = SourceSample("t", "bmr", turns, ("i",) * result.count("<image>"))
        if sample.images:
            with pytest.raises(SampleError, match="not_in_template"):
                encoder.measure(sample, [(56, 56)])
        else:
            assert encoder.measure(sample, []).num_tokens > 20
