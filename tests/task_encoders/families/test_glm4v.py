"""GLM-V: tokens, labels, grids, times, pixels and positions equal transformers' own, texts are
those of the published template, and what is measured is what is encoded."""

import io
import itertools
import json
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Glm4vProcessor, Glm46VProcessor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.modeling_glm46v import Glm46VModel

from task_encoders.families import build_sample_encoder, family_of_processor
from task_encoders.families.glm4v import GLM_TEMPLATE
from task_encoders.media.video_file import VideoHeader, decode_frames, read_video_header
from task_encoders.samples import IGNORE_INDEX, SampleError, SourceSample, Turn
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import (
    needs_transformers,
    opened,
    own_pairs,
    transformers_function,
    unequal,
)
from tests.helpers.texts_and_images import (
    KINDS,
    TypedTokens,
    messages_and_tools,
    random_conversation,
    random_sample,
    random_text,
)
from tests.helpers.tiny_tokenizers import GLM_CONTROL, save_glm_tokenizer
from tests.helpers.videos import odd_clips

REFERENCES: dict[str, tuple[Any, ...]] = {
    "glm4v": (Glm4vProcessor, Glm4vImageProcessorPil, Glm4vModel, "Glm4vVideoProcessor"),
    "glm46v": (Glm46VProcessor, Glm46VImageProcessorPil, Glm46VModel, "Glm46VVideoProcessor"),
}
LIMITS = {"min_pixels": 4 * 28**2, "max_pixels": 192 * 28**2}
LIMITS |= {"video_min_pixels": 4 * 28**2, "video_max_pixels": 200 * 28**2}
IMAGE = image_bytes(56, 56)


class Reference:
    """A family's encoder, and transformers' processor and positions."""

    def __init__(self, family: str, folder: Path) -> None:
        processor_class, image_processor, self.model, self.videos = REFERENCES[family]
        self.family = family
        self.tokenizer = save_glm_tokenizer(folder)
        self.encoder: Any = build_sample_encoder(family, str(folder), resize="pil", **LIMITS)

        class ImagesAndText(processor_class):  # type: ignore[misc]
            @classmethod
            def get_attributes(cls) -> list[str]:
                return ["image_processor", "tokenizer"]

        size = {"shortest_edge": LIMITS["min_pixels"], "longest_edge": LIMITS["max_pixels"]}
        self.processor: Any = ImagesAndText(
            image_processor(size=size), self.tokenizer, chat_template=GLM_TEMPLATE
        )
        self.processor.video_processor = SimpleNamespace(merge_size=2)
        self.typed = TypedTokens(self.tokenizer, GLM_CONTROL)
        self.ids = {token: self.tokenizer.convert_tokens_to_ids(token) for token in GLM_CONTROL}

    def arguments(self, sample: SourceSample) -> tuple[Any, Any]:
        return messages_and_tools(sample, as_objects=True)

    def text(self, sample: SourceSample, template: str = GLM_TEMPLATE) -> str:
        """The conversation as the template writes it, and the token that ends its last answer."""
        text = self.typed.write(*self.arguments(sample), template)
        return f"{text}{'<|observation|>' if sample.turns[-1].calls else '<|user|>'}"

    def arrays(
        self, sample: SourceSample, folder: Path, videos: list[VideoHeader]
    ) -> tuple[list[int], Any]:
        """Ids, and image grids and pixel values of transformers; videos by their metadata."""
        images = [opened((folder / name).read_bytes()) for name in sample.images]
        pixels = self.processor.image_processor(images, return_tensors="np") if images else None
        grids = iter(() if pixels is None else pixels["image_grid_thw"])
        clips = iter(videos)

        def media(name: str) -> list[int]:
            if name == "<|image|>":
                return [self.ids[name]] * (int(np.prod(next(grids))) // 4)
            if name == "<|video|>":
                return list(self.tokenizer(self.video_text(next(clips)))["input_ids"])
            return []

        return self.typed.ids(self.text(sample), media), pixels

    def video_text(self, header: VideoHeader) -> str:
        """As the processor writes it in the place of <|video|>."""
        needs_transformers("5.10", "has no replace_video_token in its processor")
        sampled = self.encoder.sample_video(header)
        frames = [*sampled.frames, *sampled.frames[len(sampled.frames) // 2 * 2 :]]
        metadata = SimpleNamespace(
            fps=header.fps, timestamps=[frame / header.fps for frame in frames]
        )
        inputs = {"video_grid_thw": torch.tensor([sampled.grid]), "video_metadata": [metadata]}
        return str(self.processor.replace_video_token(inputs, video_idx=0))

    def positions(self, encoded: Any, images: Any, videos: list[VideoHeader]) -> Any:
        """Positions of an encoded sample by get_rope_index."""
        vision = SimpleNamespace(spatial_merge_size=2)
        model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
        model.get_vision_position_ids = self.model.get_vision_position_ids.__get__(model)
        types = self.processor.create_mm_token_type_ids([encoded.tokens])
        grids = [self.encoder.sample_video(header).grid for header in videos]
        positions, _ = self.model.get_rope_index(
            model,
            torch.from_numpy(encoded.tokens)[None],
            torch.tensor(types),
            image_grid_thw=None if images is None else torch.tensor(images["image_grid_thw"]),
            video_grid_thw=torch.tensor(grids) if grids else None,
        )
        return positions[:, 0].numpy()


def labels_of(reference: Reference, tokens: list[int], trained: list[bool]) -> list[int]:
    """Answers, after <|assistant|>, with the next message's first token, as TRL marks them."""
    ends = {reference.ids[f"<|{role}|>"] for role in ("user", "observation", "system")}
    labels, turn, is_answer = [], -1, False
    for token in tokens:
        labels.append(token if is_answer and trained[turn] else IGNORE_INDEX)
        is_answer = (is_answer or token == reference.ids["<|assistant|>"]) and token not in ends
        turn += token == reference.ids["<|assistant|>"]
    return labels


def differences(
    reference: Reference,
    sample: SourceSample,
    folder: Path,
    images: list[bytes],
    videos: list[bytes],
) -> list[str]:
    """Names of what differs from transformers in an encoded sample, or in what is measured or
    stored of it. Raises SampleError where it cannot be encoded."""
    encoder = reference.encoder
    headers = [read_video_header(io.BytesIO(data)) for data in videos]
    encoded = encoder.encode(sample, images, videos)
    tokens, theirs = reference.arrays(sample, folder, headers)
    labels = labels_of(reference, tokens, [turn.weight > 0 for turn in sample.turns])
    pairs = {
        "tokens": (encoded.tokens, tokens),
        "labels": (encoded.labels, labels),
        "positions": (encoded.position_ids, reference.positions(encoded, theirs, headers)),
        "videos": (len(encoded.video_grid_thw), 0),
        **own_pairs(encoder, sample, images, videos, encoded),
    }
    if images and not videos:
        for name in ("image_grid_thw", "pixel_values"):
            pairs[name] = (getattr(encoded, name), theirs[name])
    return unequal(pairs)


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
        special = tuple(GLM_CONTROL) if index % 3 == 0 else ()
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


def test_fuzzed_images(reference: Reference, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    for index in range(min(SAMPLES, 400)):
        sample, files = random_sample(rng, KINDS[index % len(KINDS)], index, tmp_path)
        assert differences(reference, sample, tmp_path, files, []) == []


def test_images_and_videos_in_one_conversation(reference: Reference, tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    for index in range(min(SAMPLES, 400) // 4):
        text = random_text(rng, 5)
        media = rng.permutation(["<image>", "<video>", "<video>"][: 1 + index % 3]).tolist()
        prompt = text + "".join(f"{medium}{random_text(rng, 3)}" for medium in media)
        chosen = rng.integers(0, len(odd_clips()), media.count("<video>"))
        clips = [odd_clips()[i] for i in chosen]
        images = [IMAGE] * media.count("<image>")
        names = tuple(f"{i}.jpg" for i in range(len(images)))
        (tmp_path / "0.jpg").write_bytes(IMAGE)
        turns = (Turn(prompt, "Yes.", thought="So."),)
        sample = SourceSample("v", "bmr", turns, names, videos=tuple("ab"[: len(clips)]))
        assert differences(reference, sample, tmp_path, images, clips) == []
        encoded = reference.encoder.encode(sample, images, clips)
        alone = [reference.encoder.encode(_of("image"), [data]).pixel_values for data in images]
        clip_rows = [reference.encoder.encode(_of("video"), [], [c]).pixel_values for c in clips]
        rows = {"<image>": iter(alone), "<video>": iter(clip_rows)}
        expected = np.concatenate([next(rows[medium]) for medium in media])
        np.testing.assert_array_equal(encoded.pixel_values, expected)


def _of(kind: str) -> SourceSample:
    return SourceSample("m", "bmr", (Turn("a", "b"),), **{f"{kind}s": ("c",)})


@pytest.mark.parametrize("clip", range(4))
def test_pictures_of_a_video_hold_what_transformers_cuts(reference: Reference, clip: int) -> None:
    """The steps of its torch backend, one after another."""
    torch_encoder: Any = build_sample_encoder(
        reference.family, reference.encoder.options.processor, resize="torch", **LIMITS
    )
    data = odd_clips()[clip]
    header = read_video_header(io.BytesIO(data))
    sampled = torch_encoder.sample_video(header)
    frames = [np.array(f) for f in decode_frames(data, header, sampled.frames, 10**6)]
    pixels = torch.from_numpy(np.stack(frames)).permute(0, 3, 1, 2)
    size = (sampled.grid[1] * 14, sampled.grid[2] * 14)
    resized = torch.nn.functional.interpolate(pixels, size, mode="bicubic", antialias=True)
    vision = torch_encoder.vision
    mean, std = (torch.tensor(x) * (1.0 / (1 / 255)) for x in (vision.mean, vision.std))
    values = (resized.float() - mean[:, None, None]) / std[:, None, None]
    patchify = transformers_function(reference.family, "patchify", reference.videos)
    expected, *grid = patchify(None, values[None], 14, 2, 2)
    encoded = torch_encoder.encode(_of("video"), [], [data])
    assert tuple(grid) == sampled.grid
    np.testing.assert_array_equal(encoded.pixel_values, expected[0].numpy())
