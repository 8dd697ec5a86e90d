"""Documents of every family: what is encoded is the whole text, tokenized at once with its media
written as control tokens, as the family's processor does it."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.samples import SourceSample, Turn, split_at_media
from task_encoders.text.tokenizer import checkpoint_tokenizer
from tests.helpers.encoder_contract import own_pairs, unequal
from tests.helpers.texts_and_images import random_documents, random_image
from tests.helpers.tiny_families import STILL, encoder_options, save_tokenizer

#: Control tokens in front of a caption.
NUM_STARTS = {
    **dict.fromkeys(("llava_1_5", "mistral3", "gemma4", "gemma4_unified"), 1),
    **dict.fromkeys(("glm4v", "glm46v"), 2),
}
#: Pairs of a family whose pixels have a row per image.
ROWS_ARE_IMAGES = {"llava_1_5": {"patches", "patches of the grids"}}
#: Families of stills; and InternVL, which tokenizes the label of a video with the text before it.
NO_CLIPS = (*STILL, "internvl3")
SAMPLES = 300 if os.environ.get("FUZZED_SAMPLES") else 12


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizers") / request.param
    save_tokenizer(request.param, folder)
    return folder


def spelled(encoder: Any, sample: SourceSample, media: dict[str, list[Sequence[int]]]) -> list[int]:
    """Ids of the whole text, tokenized at once, with its `media` as control tokens."""
    tokenizer = checkpoint_tokenizer(str(encoder.options.processor))
    is_llava = encoder.options.family == "llava_1_5"
    text = sample.turns[0].answer + "\n" * is_llava
    for kind, names in (("<video>", sample.videos), ("<image>", sample.images)):
        if kind not in text:
            text = kind * len(names) + text
    parts = split_at_media(sample, text)
    marks = {kind: iter(own) for kind, own in media.items()}
    for i in range(1, len(parts), 2):
        own = list(next(marks[parts[i]]))
        parts[i] = tokenizer.decode(own, spaces_between_special_tokens=False)
    start = "<s>" if is_llava else "".join(one.token for one in encoder.CAPTION_START)
    end = "" if is_llava else encoder.CAPTION_END.token
    ids: list[int] = tokenizer("".join([start, *parts, end]), add_special_tokens=False)["input_ids"]
    return ids


def media_ids(encoder: Any, files: list[bytes], clips: list[bytes]) -> dict[str, list[Any]]:
    """Tokens of each image and each video."""
    found: dict[str, list[Any]] = {"<image>": [], "<video>": []}
    images = [encoder.encode_image(encoder.decode_image(data))[1] for data in files]
    videos = [encoder.encode_video(data)[1] for data in clips]
    for kind, media in (("<image>", images), ("<video>", videos)):
        for medium in media:
            spans = encoder.medium_spans(medium)
            ids = [
                token
                for span in spans
                for token in (
                    list(span.ids) * span.num_tokens if len(span.ids) == 1 else list(span.ids)
                )
            ]
            found[kind].append(ids)
    return found


def test_documents(folder: Path) -> None:
    """Media carry no loss and all text does; what is measured and stored is what is encoded."""
    family = folder.name
    encoder: Any = build_sample_encoder(family, str(folder), **encoder_options(family))
    placed = 0
    for sample, files, clips in random_documents(SAMPLES, takes_videos=family not in NO_CLIPS):
        encoded = encoder.encode(sample, files, clips)
        media = media_ids(encoder, files, clips)
        ids = spelled(encoder, sample, media)
        assert encoded.tokens.tolist() == ids, sample
        before = {one[0] for some in media.values() for one in some}
        of_media = sum(len(one) for some in media.values() for one in some)
        untrained = of_media + NUM_STARTS.get(family, 0)
        untrained += not NUM_STARTS.get(family) and encoded.tokens[0] not in before
        assert (encoded.labels != IGNORE_INDEX).sum() == len(ids) - untrained
        unlike = unequal(own_pairs(encoder, sample, files, clips, encoded))
        assert set(unlike) <= ROWS_ARE_IMAGES.get(family, set())
        placed += "<image>" in sample.turns[0].answer[1:]
    assert placed > SAMPLES // 4


def test_loss_after_media(folder: Path) -> None:
    """`loss_on: after_media`: of a document what follows its first picture, of a conversation the
    answers from the first turn with one on; everything where there is none."""
    family = folder.name
    options = {**encoder_options(family), "loss_on": "after_media"}
    encoder: Any = build_sample_encoder(family, str(folder), **options)
    usual: Any = build_sample_encoder(family, str(folder), **encoder_options(family))
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
    found = encoder.encode(spoken, [image])
    untrained = (replace(turns[0], weight=0.0), *turns[1:])
    expected = usual.encode(replace(spoken, turns=untrained), [image])
    assert found.loss_weights.tolist() == expected.loss_weights.tolist()
    plain = replace(document, turns=(Turn("", "No picture."),), images=())
    weights = [one.encode(plain, []).loss_weights.tolist() for one in (encoder, usual)]
    assert weights[0] == weights[1]
    assert encoder.fingerprint["loss_on"] == "after_media"
