"""Branches of a prefix tree equal their samples alone."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig
from launch.model.megatron_model import build_model
from launch.model.packed_attention import PackedCoreAttention, varlen_attention
from launch.model.prefix_trees import RowTrees, row_trees
from task_encoders.energon_samples import PackedBatch
from task_encoders.model_inputs import to_packed_seq_params
from task_encoders.sample_encoder import EncodedSample
from tests.helpers.tiny_checkpoints import (
    IMAGE,
    forward,
    packed_batch,
    random_sample,
    row_samples,
    transformers_model,
    VISION_END,
)


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)


def params_of(lengths: Sequence[int]) -> PackedSeqParams:
    ends, longest = boundaries(lengths), max(lengths)
    return PackedSeqParams(
        qkv_format="sbhd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def test_the_example_of_the_module() -> None:
    trees = row_trees(
        params_of([4, 2, 3]), torch.tensor([-1, 0, 0]), torch.zeros(9, dtype=torch.bool)
    )
    assert trees.cu_seqlens_q.tolist() == [0, 4, 6, 9]
    assert trees.cu_seqlens_kv.tolist() == [0, 4, 10, 17]
    assert trees.keys.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 6, 7, 8]
    assert (trees.max_seqlen_q, trees.max_seqlen_kv) == (4, 7)


def test_keys_leave_out_a_trunks_padding() -> None:
    padding = torch.tensor([False, False, True, False, True])
    trees = row_trees(params_of([3, 2]), torch.tensor([-1, 0]), padding)
    assert trees.keys.tolist() == [0, 1, 2, 0, 1, 3, 4]


@pytest.mark.parametrize("parents", [[0, -1], [-1, 0, 1], [1, -1]])
def test_branches_follow_their_trunk(parents: list[int]) -> None:
    lengths = [2] * len(parents)
    with pytest.raises(ValueError, match="are not trunks that stand before"):
        row_trees(
            params_of(lengths), torch.tensor(parents), torch.zeros(sum(lengths), dtype=torch.bool)
        )


@pytest.mark.parametrize("groups", [4, 2])
def test_gathered_keys_are_not_kept_for_backward(groups: int) -> None:
    lengths, parents = [64, *[4] * 32], torch.tensor([-1, *[0] * 32])
    padding = torch.zeros(sum(lengths), dtype=torch.bool)
    trees = row_trees(params_of(lengths), parents, padding)
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(lengths), 4, 8), (sum(lengths), groups, 8), (sum(lengths), groups, 8)
    leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]

    def attend(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return varlen_attention(
            leaves[0],
            key,
            value,
            cu_seqlens=trees.cu_seqlens_q,
            max_seqlen=trees.max_seqlen_q,
            cu_seqlens_kv=trees.cu_seqlens_kv,
            max_seqlen_kv=trees.max_seqlen_kv,
            scale=0.3,
            causal=True,
            backend="sdpa",
        )

    kept: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    expected = attend(*(one[trees.keys] for one in leaves[1:]))
    expected.square().sum().backward()
    gradients = [one.grad for one in leaves]
    for one in leaves:
        one.grad = None
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        with trees.gather_keys(*leaves[1:]) as gathered:
            found = attend(*gathered)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    for one, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(one.grad, gradient)
    print(sum(kept.values()), gathered[0].nbytes, leaves[1].nbytes)


def with_tail(
    reference: Any, base: EncodedSample, length: int, tail: int, seed: int, first: bool = False
) -> EncodedSample:
    """A sample that begins with the first `length` tokens of `base`, and its only medium."""
    rng = np.random.default_rng(seed)
    tokens = np.concatenate([base.tokens[:length], rng.integers(3, 1000, tail)])
    weights = np.zeros(len(tokens), np.float32)
    weights[length + (0 if first else 1) :] = 1
    text = torch.from_numpy(tokens)[None]
    positions, _ = reference.model.get_rope_index(
        text,
        mm_token_type_ids=(text == IMAGE).int(),
        image_grid_thw=torch.from_numpy(base.image_grid_thw).long(),
        video_grid_thw=None,
    )
    return dataclasses.replace(
        base,
        key=f"tail-{seed}",
        tokens=tokens,
        loss_weights=weights,
        position_ids=positions[:, 0].numpy(),
    )


def cut(sample: EncodedSample, begin: int, end: int | None, *, media: bool) -> EncodedSample:
    images = slice(None) if media else slice(0)
    return dataclasses.replace(
        sample,
        tokens=sample.tokens[begin:end],
        loss_weights=sample.loss_weights[begin:end],
        position_ids=sample.position_ids[:, begin:end],
        image_grid_thw=sample.image_grid_thw[images],
        image_pixels=sample.image_pixels[images],
    )


def tree_forward(model: Any, batch: PackedBatch, parents: torch.Tensor) -> torch.Tensor:
    params = row_trees(to_packed_seq_params(batch), parents, batch.attn_mask)
    return model(
        batch.tokens,
        batch.position_ids,
        params,
        batch.imgs,
        batch.image_grid_thw,
        shift_labels(batch.labels),
        batch.pixel_values_videos,
        batch.video_grid_thw,
    )


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("multiple", [1, 8])
def test_branches_equal_their_samples_alone(family: str, multiple: int, tmp_path: Any) -> None:
    initialize_parallel(1)
    reference = transformers_model(family, tied=True)
    reference.save_pretrained(tmp_path)
    model = build_model(
        ModelConfig(family=family, checkpoint=tmp_path), device=torch.device("cpu")
    ).train()
    base = random_sample(reference, 12, [(4, 6)], 1)
    length = int((base.tokens == VISION_END).argmax()) + 1
    samples = [
        with_tail(reference, base, length, tail, seed) for seed, tail in enumerate([7, 3, 11, 2])
    ]
    other = row_samples(reference, "mixed")
    model.zero_grad()
    losses = forward(
        model,
        packed_batch([*samples, *other]),
        shift_labels(packed_batch([*samples, *other]).labels),
    )
    losses.sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    trunk = cut(samples[0], 0, length, media=True)
    branches = [cut(one, length, None, media=False) for one in samples]
    batch = packed_batch([trunk, *branches, *other], multiple=multiple)
    parents = torch.tensor([-1, *[0] * len(branches), *[-1] * len(other)])
    found = tree_forward(model, batch, parents)
    found.sum().backward()
    assert len(batch.tokens[0]) < sum(len(one.tokens) for one in [*samples, *other]) or multiple > 1
    torch.testing.assert_close(found[found > 0], losses[losses > 0], atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        own = dict(model.named_parameters())[name].grad
        assert (own - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    alone = forward(model, batch, shift_labels(batch.labels))
    assert (alone[found > 0] - losses[losses > 0]).abs().max() > 0.5


FAMILIES_ = [
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "llava_onevision_1_5",
    "llava_1_5",
    "glm4v",
    "glm46v",
    "mistral3",
    "internvl3",
    "gemma4",
    "gemma4_unified",
]


@pytest.mark.parametrize("family", FAMILIES_)
def test_models_of_transformers(family: str, tmp_path: Any) -> None:
    from launch.model.packed_attention import TREE_ATTENTION, register_attention
    from launch.model.segments import isolate_segments
    from task_encoders.families import build_sample_encoder
    from task_encoders.model_inputs import to_transformers_kwargs
    from task_encoders.samples import SourceSample, Turn
    from tests.helpers.texts_and_images import random_image
    from tests.helpers.tiny_families import encoder_options, save_tokenizer, tiny_model

    save_tokenizer(family, tmp_path)
    encoder: Any = build_sample_encoder(family, str(tmp_path), **encoder_options(family))
    image = random_image(np.random.default_rng(0), 100, 70)
    samples = []
    for i, question in enumerate(
        [
            "What is it?",
            "Name the colour of bar 3.",
            "Why?",
            "Which one is the largest of all of them?",
        ]
    ):
        sample = SourceSample(str(i), "vqa", (Turn(question, f"Because {i} is a colour."),), ("0",))
        samples.append(encoder.encode(sample, [image], []))
    model = tiny_model(family, encoder.media_token_ids)
    isolate_segments(model)
    expected = to_transformers_kwargs(packed_batch(samples))
    logits = model(**expected).logits[0]
    image_token = encoder.media_token_ids["image_token_id"]
    length = int(np.flatnonzero(samples[0].tokens == image_token)[-1]) + 1
    trunk = cut(samples[0], 0, length, media=True)
    branches = [cut(one, length, None, media=False) for one in samples]
    batch = packed_batch([trunk, *branches])
    register_attention()
    model.set_attn_implementation({"text_config": TREE_ATTENTION})
    parents = torch.tensor([-1, *[0] * len(branches)])
    kwargs = to_transformers_kwargs(batch)
    if len(batch.position_ids) == 1:
        kwargs["position_ids"] = batch.position_ids[0]
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"):
        kwargs.pop(name)
    kwargs["row_trees"] = row_trees(to_packed_seq_params(batch), parents, batch.attn_mask)
    if family.startswith("gemma4"):
        is_image = batch.tokens[0] == image_token
        begins = is_image & ~torch.nn.functional.pad(is_image, (1, -1))
        kwargs["row_trees"].blocks = torch.where(is_image, begins.cumsum(0) - 1, -1)
    found = model(**kwargs).logits[0]
    begin, at = 0, length
    for sample, branch in zip(samples, branches):
        end, size = begin + len(sample.tokens), len(branch.tokens)
        torch.testing.assert_close(
            found[at : at + size], logits[end - size : end], atol=1e-5, rtol=0
        )
        begin, at = end, at + size
