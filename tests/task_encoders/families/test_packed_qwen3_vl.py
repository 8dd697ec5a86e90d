"""A packed row through transformers' Qwen3-VL gives what its sub-samples give alone."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from task_encoders.concatenate import concatenate
from task_encoders.families import build_sample_encoder
from task_encoders.model_inputs import to_transformers_kwargs
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import SourceSample, Turn
from tests.helpers.texts_and_images import random_image
from tests.helpers.videos import make_video

IMAGE_PAD, VIDEO_PAD = 151_655, 151_656
TOKENS = {"image_token_id": IMAGE_PAD, "video_token_id": VIDEO_PAD}
TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}


def tiny_model() -> Any:
    """Weights N(0, 0.08²): with the usual ones a model hardly looks at its context."""
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=TEXT, vision_config=VISION, **TOKENS)
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.empty_like(parameter).normal_(0, 0.08, generator=generator)
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.data.copy_(noise + 1 if is_norm else noise)
    return model.eval()


def samples() -> list[EncodedSample]:
    rng = np.random.default_rng(0)
    encoder = build_sample_encoder(
        "qwen3_vl",
        min_pixels=4096,
        max_pixels=32 * 1024,
        video_min_pixels=4096,
        video_max_pixels=64 * 1024,
    )
    encoded = []
    for i, (num_images, clips) in enumerate(((1, 0), (0, 0), (0, 1), (2, 0))):
        images = [random_image(rng, 100, 70) for _ in range(num_images)]
        sample = SourceSample(
            str(i),
            "vqa",
            (Turn(f"What is number {i}?", "It is a bar of some colour."),),
            tuple(map(str, range(num_images))),
            videos=("v",) * clips,
        )
        encoded.append(encoder.encode(sample, images, [make_video(12, 4)] * clips))
    return encoded


def as_batch(encoded: list[EncodedSample], **options: Any) -> Any:
    row = concatenate(encoded, pad_token_id=0, **options)
    return SimpleNamespace(
        tokens=row.tokens[None],
        labels=row.labels[None],
        position_ids=row.position_ids[:, None],
        cu_lengths=row.cu_lengths[None],
        imgs=row.pixel_values,
        image_grid_thw=row.image_grid_thw,
        pixel_values_videos=row.pixel_values_videos,
        video_grid_thw=row.video_grid_thw,
    )


@torch.no_grad()
def logits(model: Any, kwargs: dict[str, Any]) -> Any:
    return model(**{name: value for name, value in kwargs.items() if name != "labels"}).logits[0]


def test_packed_equals_alone() -> None:
    model, encoded = tiny_model(), samples()
    packed = logits(model, to_transformers_kwargs(as_batch(encoded)))
    start = 0
    for sample in encoded:
        alone = to_transformers_kwargs(as_batch([sample]))
        del alone["position_ids"]  # the model finds them itself
        tokens = alone["input_ids"]
        alone["mm_token_type_ids"] = (tokens == IMAGE_PAD).int() + 2 * (tokens == VIDEO_PAD).int()
        expected = logits(model, alone)
        found = packed[start : start + len(expected)]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        start += len(expected)
    assert start == len(packed)
    control = logits(model, to_transformers_kwargs(as_batch(encoded, cross_sample_attention=True)))
    assert (control - packed).abs().max() > 0.1
