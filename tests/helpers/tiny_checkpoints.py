"""Small models of Qwen's VL families with random weights, and samples to feed them."""

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from launch.model.config import tiny_config, transformers_class
from task_encoders.concatenate import concatenate
from task_encoders.energon_samples import PackedBatch, PackedRowSample, batch_rows
from task_encoders.media.patches import Normalisation
from task_encoders.model_inputs import to_packed_seq_params, token_types
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import IGNORE_INDEX

VOCAB_SIZE = 1024
#: ordinary tokens are below
VISION_START, VISION_END, IMAGE, VIDEO = 1012, 1013, 1015, 1016
#: Bytes as values around 0.
NORMALISATION = Normalisation(np.tile(np.linspace(-2, 2, 256, dtype=np.float32), (3, 1)), repeats=2)
SPECIAL = {
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
}
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
#: By family: the width that its tower ends in, and patches of the size that `random_sample` draws.
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": 128},
    "qwen2_5_vl": {"out_hidden_size": 128},
    "qwen3_vl": {"out_hidden_size": 128, "patch_size": 14, "num_position_embeddings": 64},
}


def transformers_model(family: str, *, tied: bool) -> Any:
    """A model whose every weight counts."""
    config = tiny_config(family, TEXT, VISION[family], **SPECIAL, tie_word_embeddings=tied)
    return randomise(transformers_class(family)(config))


@torch.no_grad()
def randomise(model: Any) -> Any:
    """The model with weights N(0, 0.08²): with transformers' own initialisation a model hardly
    looks at its context, and a broken boundary would go unnoticed."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        noise = torch.empty_like(parameter).normal_(0, 0.08, generator=generator)
        is_norm = parameter.ndim == 1 and name.endswith("weight")
        parameter.copy_(noise + 1 if is_norm else noise)
    return model.eval()


def write_checkpoint(folder: Path, family: str, *, tied: bool, **options: Any) -> Path:
    """`transformers_model` as transformers saves it; options are those of save_pretrained."""
    transformers_model(family, tied=tied).save_pretrained(folder, **options)
    return folder


def random_sample(
    reference: Any, num_text: int, grids: Sequence[tuple[int, ...]], seed: int
) -> EncodedSample:
    """Text, then media of these grids (see ROWS) with a little text, then text.

    The first quarter of the text has no labels, nor have media. Positions are transformers'.
    """
    rng = np.random.default_rng(seed)
    half = num_text // 2
    start, end = np.array([VISION_START]), np.array([VISION_END])
    pieces = [rng.integers(3, 1000, half)]
    by_step = reference.config.model_type == "qwen3_vl"
    for grid in grids:
        steps = grid[0] if len(grid) == 3 and by_step else 1
        pads = np.full(math.prod(grid) // 4 // steps, IMAGE if len(grid) == 2 else VIDEO)
        for _ in range(steps):
            pieces += [start, pads, end, rng.integers(3, 1000, 3)]
    tokens = np.concatenate([*pieces, rng.integers(3, 1000, num_text - half)]).astype(np.int64)
    labels = np.where(tokens < 1000, tokens, IGNORE_INDEX)
    labels[: max(1, num_text // 4)] = IGNORE_INDEX
    images = np.array([(1, *g) for g in grids if len(g) == 2], dtype=np.int32).reshape(-1, 3)
    videos = np.array([g for g in grids if len(g) == 3], dtype=np.int32).reshape(-1, 3)
    positions, _ = reference.model.get_rope_index(
        torch.from_numpy(tokens)[None],
        mm_token_type_ids=token_types(torch.from_numpy(tokens)[None], SPECIAL),
        image_grid_thw=torch.from_numpy(images).long(),
        video_grid_thw=torch.from_numpy(videos).long(),
    )

    def patches(grid_thw: np.ndarray, size: int) -> np.ndarray:
        return rng.integers(0, 256, (int(grid_thw.prod(1).sum()), size), dtype=np.uint8)

    return EncodedSample(
        key=f"sample-{seed}",
        tokens=tokens,
        loss_weights=(labels != IGNORE_INDEX).astype(np.float32),
        position_ids=positions[:, 0].numpy(),
        image_pixels=patches(images, 588),
        image_grid_thw=images,
        video_pixels=patches(videos, 1176),
        video_grid_thw=videos,
        normalisation=NORMALISATION,
    )


#: Content of a row: (text tokens, media) per sub-sample; an image's grid is (h, w), a video's
#: (t, h, w).
ROWS: dict[str, list[tuple[int, list[tuple[int, ...]]]]] = {
    "one_image": [(12, [(4, 6)]), (7, [(8, 4)]), (15, [(6, 10)])],
    "several_images": [(9, [(8, 4), (2, 2)]), (20, [(4, 4), (2, 6), (4, 2)])],
    "no_image": [(20, []), (1, []), (33, [])],
    "mixed": [(12, [(4, 6)]), (20, []), (9, [(8, 4), (2, 2)]), (1, []), (15, [(6, 10)])],
    "videos": [(12, [(3, 4, 6)]), (9, [(1, 8, 4), (5, 2, 2)]), (15, [])],
    "images_and_videos": [
        (12, [(2, 4, 6), (4, 6), (3, 2, 2)]),
        (20, []),
        (9, [(8, 4), (6, 4, 4), (2, 2)]),
        (15, [(6, 10)]),
    ],
}


def row_samples(reference: Any, name: str) -> list[EncodedSample]:
    """The sub-samples of a row in ROWS."""
    return [
        random_sample(reference, num_text, grids, i)
        for i, (num_text, grids) in enumerate(ROWS[name], 1)
    ]


def packed_batch(samples: Sequence[EncodedSample], **options: Any) -> PackedBatch:
    """Samples as one batch, the way every pack goes; options are those of concatenate."""
    row = concatenate(samples, pad_token_id=0, **options)
    sample = PackedRowSample(
        __key__="pack",
        __restore_key__=(),
        __subflavors__=None,
        row=row,
        sub_sample_keys=[sample.key for sample in samples],
        dropped=[],
    )
    return batch_rows([sample])


def forward(
    model: Any, batch: PackedBatch, labels: torch.Tensor | None, group: Any = None
) -> torch.Tensor:
    """Losses of a `PackedMegatronModel`, or its logits without labels; of this rank's tokens, if a
    group shares the row."""
    result: torch.Tensor = model(batch, to_packed_seq_params(batch, group), labels)
    return result


def params_of(lengths: Sequence[int], **fields: Any) -> Any:
    """Return the segments of a row without padding."""
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(lengths))
    return PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_kv=ends, **(longest | fields))


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    """Take the gradients of a model, which has none afterwards."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def unpacked_inputs(sample: EncodedSample) -> dict[str, Any]:
    """A sample alone, as anyone would give it to transformers, which finds its positions."""
    tokens = torch.from_numpy(sample.tokens)[None]
    inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
    for pixels, grids in (
        ("pixel_values", "image_grid_thw"),
        ("pixel_values_videos", "video_grid_thw"),
    ):
        if len(getattr(sample, grids)):
            inputs[pixels] = torch.from_numpy(getattr(sample, pixels))
            inputs[grids] = torch.from_numpy(getattr(sample, grids)).long()
            inputs["mm_token_type_ids"] = token_types(tokens, SPECIAL)
    return inputs


def gathered_gradients(model: Any) -> dict[str, torch.Tensor]:
    """Return gradients of a PackedMegatronModel as transformers has them, on tensor parallel rank
    0; they take the place of its weights."""
    from launch.model.megatron.weights import gather_weights

    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gathered = gather_weights(model, model.hf_config)
    return {name: tensor for name, tensor in gathered if tensor is not None}


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor of a checkpoint folder."""
    from launch.model.megatron.weights import weight_files

    return {name: t for file in weight_files(folder) for name, t in load_file(file).items()}


def assert_same_tensors(folder: Path, other: Path, at_least: int = 60) -> None:
    """Two checkpoints hold the same bits under the same names."""
    ours, theirs = all_tensors(folder), all_tensors(other)
    assert set(ours) == set(theirs)
    assert len(ours) > at_least
    for name, tensor in theirs.items():
        assert tensor.dtype == ours[name].dtype
        assert torch.equal(tensor, ours[name]), name
