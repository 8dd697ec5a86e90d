"""Mistral 3: sizes, pixels, ids and labels equal those of transformers' Pixtral processor and of
the published chat templates."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.pixtral import image_processing_pil_pixtral as pixtral

from task_encoders.families import build_sample_encoder
from task_encoders.families.mistral3 import MISTRAL, MISTRAL_TEMPLATE
from task_encoders.samples import SourceSample
from task_encoders.text.chat_templates import ChatTemplate, JinjaTemplate
from task_encoders.text.template_proof import write
from task_encoders.text.tokenizer import checkpoint_tokenizer
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import by_both, unequal
from tests.helpers.texts_and_images import (
    TypedTokens,
    encoded_conversations,
    messages_and_tools,
    random_conversation,
    random_image,
    random_side,
)
from tests.helpers.tiny_families import needs_family
from tests.helpers.tiny_tokenizers import TEKKEN_SPECIAL, save_tekken
from tests.world import World

SAMPLES = int(os.environ.get("FUZZED_SAMPLES", "75"))
PUBLISHED = Path(__file__).parents[2] / "data" / "templates"
IMAGE, BREAK, END = 10, 12, 13
PIXEL = image_bytes(28, 28)


@pytest.fixture
def folder(world: World) -> Path:
    return world.tokenizer("mistral3")


def expanded(height: int, width: int) -> list[int]:
    """PixtralProcessor.replace_image_token, of a resized image."""
    row = [IMAGE] * (width // 28) + [BREAK]
    return [*(row * (height // 28))[:-1], END]


def test_pixels_are_transformers_own(folder: Path) -> None:
    """Padding included; also sizes, tokens and positions, of samples of three images each."""
    encoder = build_sample_encoder("mistral3", str(folder), longest_edge=200, resize="pil")
    processor = pixtral.PixtralImageProcessorPil(size={"longest_edge": 200}, patch_size=28)
    rng = np.random.default_rng(1)
    sides = [(random_side(rng), random_side(rng)) for _ in range(40)] + [(1, 3), (300, 5)]
    files = [random_image(rng, *size) for size in sides]
    for encoded, ours, theirs in by_both(encoder, processor, files, 3):
        ids = encoded.tokens.tolist()
        of_images = [one for size in theirs["image_sizes"].tolist() for one in expanded(*size)]
        pairs = {
            "pixels": (ours["pixel_values"], theirs["pixel_values"]),
            "sizes": (ours["image_sizes"], theirs["image_sizes"]),
            "tokens": ([one for one in ids if one in (IMAGE, BREAK, END)], of_images),
            "positions": (encoded.position_ids, [range(len(ids))]),
        }
        assert unequal(pairs) == []


class Reference:
    """A published template with the small vocabulary."""

    def __init__(self, template: str, folder: Path) -> None:
        save_tekken(folder, template)
        self.tokenizer = checkpoint_tokenizer(str(folder))
        self.template = template
        self.typed = TypedTokens(self.tokenizer, TEKKEN_SPECIAL)
        self.encoder: Any = build_sample_encoder("mistral3", str(folder))

    def ids(self, sample: SourceSample) -> list[int] | None:
        """As transformers writes it; None where the template refuses the conversation."""
        text = self.typed.write(*messages_and_tools(sample), self.template)
        return None if text is None else self.typed.ids(text)

    def labels(self, sample: SourceSample) -> list[int]:
        begin, end = "{%- elif message['role'] == 'assistant' %}", "{{- eos_token }}"
        assert self.template.count(begin) == self.template.count(end) == 1
        marked = self.template.replace(begin, f"{begin}{{%- generation %}}")
        marked = marked.replace(end, f"{end}{{%- endgeneration %}}")
        return self.typed.labels(sample, *messages_and_tools(sample), marked)


@pytest.fixture(scope="module", params=["mistral_v13", "mistral_v15"])
def reference(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    needs_family("mistral3")
    template = (PUBLISHED / f"{request.param}.jinja").read_text("utf-8")
    return Reference(template, tmp_path_factory.mktemp(request.param))


def one_per_image(encoded: Any) -> tuple[list[int], list[int]]:
    """Ids and labels with [IMG] alone in the place of an image of one token."""
    kept = encoded.tokens != END
    return encoded.tokens[kept].tolist(), encoded.labels[kept].tolist()


def test_conversations_equal_the_published_template(reference: Reference) -> None:
    counts: Counter[str] = Counter()
    for sample, expected, encoded, typed in encoded_conversations(
        reference, SAMPLES, PIXEL, counts, seed=3, special=tuple(TEKKEN_SPECIAL)
    ):
        tokens, labels = one_per_image(encoded)
        assert tokens == expected
        if not typed:
            assert labels == reference.labels(sample)
            counts["labels"] += 1
    assert counts["refused plain"] == 0
    assert counts["written"] + counts["not_in_template"] == SAMPLES
    assert counts["written"] > 0.5 * SAMPLES
    assert min(counts["labels"], counts["tools"], counts["images"]) > 0.1 * SAMPLES


def test_the_familys_template_writes_what_version_13_does() -> None:
    published = (PUBLISHED / "mistral_v13.jinja").read_text("utf-8")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    ours, theirs = (
        ChatTemplate(JinjaTemplate(one, tokens), MISTRAL) for one in (MISTRAL_TEMPLATE, published)
    )
    rng = np.random.default_rng(4)
    written = 0
    for index in range(2 * SAMPLES):
        sample = random_conversation(rng, index)
        assert write(ours, sample) == write(theirs, sample)
        written += write(ours, sample) is not None
    assert written > SAMPLES
