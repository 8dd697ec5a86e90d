"""transformers' GLM-V processors, templates and positions, to compare the encoders with."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Glm4vProcessor, Glm46VProcessor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.glm46v.modeling_glm46v import Glm46VModel

from task_encoders.families import build_sample_encoder
from task_encoders.families.glm4v import GLM_TEMPLATE
from task_encoders.media.video_file import VideoHeader, read_video_header
from task_encoders.packs.tokenized import IGNORE_INDEX
from task_encoders.samples import SourceSample
from task_encoders.text.pieces import to_chat
from tests.helpers.datasets import image_bytes
from tests.helpers.encoder_contract import own_pairs, unequal
from tests.helpers.glm_tokenizer import CONTROL, save_glm_tokenizer
from tests.helpers.media_references import opened
from tests.helpers.transformers_sources import needs_transformers

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
        special = "|".join(map(re.escape, CONTROL))
        self.special = re.compile(f"({special})")
        self.ids = {token: self.tokenizer.convert_tokens_to_ids(token) for token in CONTROL}

    def arguments(self, sample: SourceSample) -> tuple[Any, Any]:
        """Messages and tools; the template takes calls with objects."""
        messages = to_chat(sample)
        for message in messages:
            for call in message.get("tool_calls", ()):
                if isinstance(call["function"]["arguments"], str):
                    call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return messages, json.loads(sample.tools) if sample.tools else None

    def text(self, sample: SourceSample, template: str = GLM_TEMPLATE) -> str:
        """The conversation as the template writes it, with what control tokens spell in texts
        between noncharacters, and the token that ends its last answer."""
        messages, tools = self.arguments(sample)
        plain = json.dumps([messages, tools], ensure_ascii=False)
        messages, tools = json.loads(
            self.special.sub(lambda m: f"\ue000{CONTROL.index(m[0])}\ue001", plain)
        )
        text = self.processor.apply_chat_template(
            messages, tools=tools, tokenize=False, chat_template=template
        )
        return str(text) + ("<|observation|>" if sample.turns[-1].calls else "<|user|>")

    def arrays(
        self, sample: SourceSample, folder: Path, videos: list[VideoHeader]
    ) -> tuple[list[int], Any]:
        """Ids, and image grids and pixel values of transformers; videos by their metadata."""
        images = [opened((folder / name).read_bytes()) for name in sample.images]
        pixels = self.processor.image_processor(images, return_tensors="np") if images else None
        grids = iter(() if pixels is None else pixels["image_grid_thw"])
        clips = iter(videos)
        ids: list[int] = []
        for i, part in enumerate(self.special.split(self.text(sample))):
            if part == "<|image|>":
                ids += [self.ids[part]] * (int(np.prod(next(grids))) // 4)
            elif part == "<|video|>":
                ids += self.tokenizer(self.video_text(next(clips)))["input_ids"]
            elif i % 2:
                ids.append(self.ids[part])
            elif part:
                part = re.sub("\ue000(\\d+)\ue001", lambda m: CONTROL[int(m[1])], part)
                ids += self.tokenizer(part, split_special_tokens=True)["input_ids"]
        return ids, pixels

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
