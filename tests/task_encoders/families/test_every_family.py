"""Every family: documents, of which the whole text is tokenized at once with its media written as
control tokens, as the family's processor does it; answers that are cut; and blank images."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.families.base.spans import tokens_and_weights
from task_encoders.model_inputs import media_kwargs, segment_kwargs
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample, Turn, split_at_media
from task_encoders.text.tokenizer import checkpoint_tokenizer
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import own_pairs, unequal
from tests.helpers.texts_and_images import random_documents, random_image
from tests.helpers.tiny_families import STILL, encoder_of, tiny_model

#: What is before and after a caption.
AROUND = {
    "llava_1_5": (["<s>"], "\n"),
    "mistral3": (["<s>"], "</s>"),
    **dict.fromkeys(("gemma4", "gemma4_unified"), (["<bos>"], "<eos>")),
    **dict.fromkeys(("glm4v", "glm46v"), (["[gMASK]", "<sop>"], "<|endoftext|>")),
}
#: Pairs of a family whose pixels have a row per image.
ROWS_ARE_IMAGES = {"llava_1_5": {"patches", "patches of the grids"}}
#: Families of stills; and InternVL, which tokenizes the label of a video with the text before it.
NO_CLIPS = (*STILL, "internvl3")
SAMPLES = 300 if os.environ.get("FUZZED_SAMPLES") else 12


def spelled(encoder: Any, sample: SourceSample, media: dict[str, list[Sequence[int]]]) -> list[int]:
    """Ids of the whole text, tokenized at once, with its `media` as control tokens."""
    tokenizer = checkpoint_tokenizer(str(encoder.options.processor))
    start, end = AROUND.get(encoder.options.family, ([], "<|im_end|>"))
    text = sample.turns[0].answer + end
    for kind, names in (("<video>", sample.videos), ("<image>", sample.images)):
        if kind not in text:
            text = kind * len(names) + text
    parts = split_at_media(sample, text)
    marks = {kind: iter(own) for kind, own in media.items()}
    for i in range(1, len(parts), 2):
        own = list(next(marks[parts[i]]))
        parts[i] = tokenizer.decode(own, spaces_between_special_tokens=False)
    return list(tokenizer("".join([*start, *parts]), add_special_tokens=False)["input_ids"])


def media_ids(encoder: Any, files: list[bytes], clips: list[bytes]) -> dict[str, list[Any]]:
    """Tokens of each image and each video."""
    images = [encoder.encode_image(encoder.decode_image(data))[1] for data in files]
    videos = [encoder.encode_video(data)[1] for data in clips]
    return {
        kind: [tokens_and_weights([*encoder.medium_spans(one)])[0].tolist() for one in media]
        for kind, media in (("<image>", images), ("<video>", videos))
    }


def test_documents(folder: Path) -> None:
    """Media carry no loss and all text does; what is measured and stored is what is encoded."""
    family = folder.name
    encoder = encoder_of(folder)
    placed = 0
    for sample, files, clips in random_documents(SAMPLES, takes_videos=family not in NO_CLIPS):
        encoded = encoder.encode(sample, files, clips)
        media = media_ids(encoder, files, clips)
        ids = spelled(encoder, sample, media)
        assert encoded.tokens.tolist() == ids, sample
        before = {one[0] for some in media.values() for one in some}
        of_media = sum(len(one) for some in media.values() for one in some)
        num_starts = len(AROUND.get(family, ([], ""))[0])
        untrained = of_media + (num_starts or encoded.tokens[0] not in before)
        assert (encoded.labels != IGNORE_INDEX).sum() == len(ids) - untrained
        unlike = unequal(own_pairs(encoder, sample, files, clips, encoded))
        assert set(unlike) <= ROWS_ARE_IMAGES.get(family, set())
        placed += "<image>" in sample.turns[0].answer[1:]
    assert placed > SAMPLES // 4


def test_which_texts_carry_loss(folder: Path) -> None:
    """`loss_on: after_media`: of a document what follows its first picture, of a conversation the
    answers from the first turn with one on; everything where there is none. `last`: one answer."""
    usual = encoder_of(folder)
    encoder, last = (encoder_of(folder, loss_on=name) for name in ("after_media", "last"))
    image = random_image(np.random.default_rng(0), 60, 60)
    document = SourceSample(
        "d", "captioning", (Turn("", "Two words.<image>And <image>."),), ("a", "b")
    )
    encoded, whole = (one.encode(document, [image, image]) for one in (encoder, usual))
    first = encoded.tokens.tolist().index(encoder.media_token_ids["image_token_id"])
    assert encoded.tokens.tolist() == whole.tokens.tolist()
    assert not encoded.loss_weights[:first].any()
    assert whole.loss_weights[:first].any()
    assert (encoded.loss_weights[first:] == whole.loss_weights[first:]).all()
    turns = tuple(Turn(prompt, f"Answer {i}.") for i, prompt in enumerate(("Hm?", "<image>?", "!")))
    spoken = SourceSample("c", "bmr", turns, ("a",))
    for one, first_turn, name in ((encoder, 1, "after_media"), (last, 2, "last")):
        trained = tuple(replace(t, weight=float(i >= first_turn)) for i, t in enumerate(turns))
        found = one.encode(spoken, [image])
        expected = usual.encode(replace(spoken, turns=trained), [image])
        assert found.loss_weights.tolist() == expected.loss_weights.tolist()
        assert found.tokens.tolist() == usual.encode(spoken, [image]).tokens.tolist()
        assert one.fingerprint == {**usual.fingerprint, "loss_on": name}
    with pytest.raises(SampleError, match="none of the answers"):
        last.measure(replace(spoken, turns=(*turns[:2], replace(turns[2], weight=0.0))), [(60, 60)])
    plain = replace(document, turns=(Turn("", "No picture."),), images=())
    weights = [one.encode(plain, []).loss_weights.tolist() for one in (encoder, usual)]
    assert weights[0] == weights[1]


TURNS = (Turn("<image>What is it?", "A circle."), Turn("And its colour?", "It is red, as I said."))


def test_no_end_token_follows_a_truncated_answer(folder: Path) -> None:
    encoder = encoder_of(folder)
    whole = SourceSample("a", "bmr", TURNS, ("a.jpg",), "Be kind.")
    ids = encoder.encode(whole, [image_bytes()]).tokens.tolist()
    sample = replace(whole, turns=(TURNS[0], replace(TURNS[1], truncated=True)))
    encoded = encoder.encode(sample, [image_bytes()])
    assert encoder.measure(sample, [(56, 56)]).num_tokens == len(encoded.tokens)
    assert encoded.tokens.tolist() == ids[: len(encoded.tokens)]
    assert len(encoded.tokens) < len(ids)
    assert encoded.loss_weights[-1] == 1


def test_only_the_last_answer_can_be_truncated() -> None:
    encoder = build_sample_encoder()
    first = replace(TURNS[0], prompt="What?", truncated=True)
    for turns in (
        (first, TURNS[1]),
        (TURNS[1], replace(first, weight=0.0)),
        (replace(first, calls=('{"name": "look", "arguments": {}}',)),),
    ):
        with pytest.raises(SampleError, match="truncated; only the last one can be"):
            encoder.measure(SourceSample("a", "bmr", turns), [])


@torch.no_grad()
def test_the_model_takes_a_blank_image(folder: Path) -> None:
    """Its forward compares the features of images with their tokens."""
    family = FAMILIES[folder.name]
    if not family.transformers_name:
        pytest.skip("it has no model in transformers")
    encoder = encoder_of(folder)
    model = tiny_model(folder.name, encoder.media_token_ids).eval()
    blank = family.build.blank_image(model.config)
    layout = family.build.IMAGE_LAYOUT
    media = media_kwargs(torch.zeros(blank.shape), torch.tensor([blank.grid]), layout=layout)
    image = encoder.media_token_ids["image_token_id"]

    def logits(num_tokens: int) -> torch.Tensor:
        tokens = torch.tensor([[*[image] * num_tokens, 5]])
        positions = torch.arange(tokens.shape[1]).expand(encoder.POSITION_ROWS, 1, -1)
        ends = torch.tensor([0, tokens.shape[1]])
        positions = segment_kwargs(positions, ends)["position_ids"]
        return model(tokens, position_ids=positions, use_cache=False, **media).logits

    assert logits(blank.num_tokens).isfinite().all()
    with pytest.raises(ValueError, match=r"[Ii]mage"):
        logits(blank.num_tokens + 1)
