"""Branches of a prefix tree equal their samples alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch.autograd.graph import saved_tensors_hooks

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model.config import ModelConfig
from launch.model.megatron.model import build_model
from launch.model.packed_attention import CAUSAL, KERNELS, use_tree_attention
from launch.model.prefix_trees import row_trees, segment_params
from launch.model.segments import isolate_segments
from launch.model.transformers_model import PackedTransformersModel
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES, build_sample_encoder
from task_encoders.rows.trees import as_tree
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import SourceSample, Turn
from tests.helpers.texts_and_images import random_image
from tests.helpers.tiny_checkpoints import (
    IMAGE,
    VISION_END,
    forward,
    packed_batch,
    random_sample,
    row_samples,
    transformers_model,
)
from tests.helpers.tiny_families import encoder_options, save_tokenizer, tiny_model
from tests.helpers.varlen import CpuVarlen


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


@pytest.mark.parametrize("parents", [[0, -1], [-1, 0, 1], [1, -1], [-1, 0, 3], [-1, -2]])
def test_branches_follow_their_trunk(parents: list[int]) -> None:
    lengths = [2] * len(parents)
    with pytest.raises(ValueError, match="are not trunks that stand before"):
        row_trees(
            params_of(lengths), torch.tensor(parents), torch.zeros(sum(lengths), dtype=torch.bool)
        )


@pytest.mark.parametrize(("backend", "groups"), [("sdpa", 4), ("sdpa", 2), ("torch_varlen", 2)])
def test_gathered_keys_are_gathered_again(
    backend: str, groups: int, varlen: CpuVarlen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not kept for the backward pass, but for copies that torch's own makes of fewer groups."""
    lengths, parents = [64, *[4] * 32], torch.tensor([-1, *[0] * 32])
    padding = torch.zeros(sum(lengths), dtype=torch.bool)
    trees = row_trees(params_of(lengths), parents, padding)
    generator = torch.Generator().manual_seed(0)
    shapes = (sum(lengths), 4, 8), (sum(lengths), groups, 8), (sum(lengths), groups, 8)
    leaves = [torch.randn(*shape, generator=generator).requires_grad_() for shape in shapes]

    def attend(key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        lengths = trees.cu_seqlens_q, trees.cu_seqlens_kv, trees.max_seqlen_q, trees.max_seqlen_kv
        return KERNELS[backend](leaves[0], key, value, lengths, 0.3, CAUSAL)

    kept = list[Any]()

    def recorded(pack: Any, unpack: Any) -> Any:
        return saved_tensors_hooks(lambda saved: kept.append(pack(saved)) or kept[-1], unpack)

    monkeypatch.setattr("launch.model.prefix_trees.saved_tensors_hooks", recorded)
    expected = attend(*(one[trees.keys] for one in leaves[1:]))
    expected.square().sum().backward()
    gradients = [one.grad for one in leaves]
    for one in leaves:
        one.grad = None
    with trees.gather_keys(*leaves[1:]) as gathered:
        found = attend(*gathered)
        copies = {one.untyped_storage().data_ptr() for one in gathered}
    tensors = [one for one in kept if isinstance(one, torch.Tensor)]
    assert not copies & {one.untyped_storage().data_ptr() for one in tensors}
    assert len(tensors) < len(kept) or (backend == "sdpa" and groups < 4)
    assert [call[:3] for call in varlen.calls] == [(4, 2, (-1, 0))] * len(varlen.calls)
    if backend == "torch_varlen":
        assert {one.untyped_storage().nbytes() for one in tensors} == {leaves[0].nbytes}
    kept.clear()
    around = saved_tensors_hooks(lambda saved: saved, lambda saved: saved)
    with around, trees.gather_keys(*leaves[1:]) as gathered:
        assert torch.equal(attend(*gathered), found)
    assert kept == []  # left to the hooks around it
    assert torch.equal(found, expected)
    found.square().sum().backward()
    for one, gradient in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(one.grad, gradient)


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
    return replace(
        base,
        key=f"tail-{seed}",
        tokens=tokens,
        loss_weights=weights,
        position_ids=positions[:, 0].numpy(),
    )


def tree_forward(model: Any, batch: PackedBatch) -> torch.Tensor:
    losses: torch.Tensor = model(batch, segment_params(batch), shift_labels(batch.labels))
    return losses


@pytest.mark.parametrize(
    ("family", "multiple"),
    [
        pytest.param("qwen2_vl", 1, marks=pytest.mark.exhaustive),
        pytest.param("qwen2_5_vl", 8, marks=pytest.mark.exhaustive),
        pytest.param("qwen3_vl", 1, marks=pytest.mark.exhaustive),
        ("qwen3_vl", 8),
    ],
)
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
    segments = [*as_tree(samples, length, 1, 0, {}), *other]
    parents = [-1, *[0] * len(samples), *[-1] * len(other)]
    batch = packed_batch(segments, parents=parents, multiple=multiple)
    found = tree_forward(model, batch)
    found.sum().backward()
    assert len(batch.tokens[0]) < sum(len(one.tokens) for one in [*samples, *other]) or multiple > 1
    torch.testing.assert_close(found[found > 0], losses[losses > 0], atol=1e-5, rtol=1e-5)
    for name, gradient in gradients.items():
        own = dict(model.named_parameters())[name].grad
        assert (own - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    plain = replace(batch, parents=batch.parents[:, :0])
    alone = forward(model, plain, shift_labels(batch.labels))
    assert (alone[found > 0] - losses[losses > 0]).abs().max() > 0.5


#: Families of transformers whose layers are all attention.
ATTENTION = [f for f in FAMILIES if FAMILIES[f].transformers_name and not FAMILIES[f].is_recurrent]


def questions(family: str, folder: Path) -> tuple[Any, list[EncodedSample], int]:
    """A tiny model, questions on one picture, and the tokens that they share."""
    save_tokenizer(family, folder)
    encoder: Any = build_sample_encoder(family, str(folder), **encoder_options(family))
    image = random_image(np.random.default_rng(0), 100, 70)
    samples = []
    for i, question in enumerate(["What is it?", "Name the colour of bar 3.", "Why?"]):
        turn = Turn(question, f"Because {i} is a colour, as anyone can see who looks at it.")
        sample = SourceSample(str(i), "vqa", (turn,), ("0",))
        samples.append(encoder.encode(sample, [image], []))
    is_image = samples[0].tokens == encoder.media_token_ids["image_token_id"]
    model = tiny_model(family, encoder.media_token_ids)
    return model, samples, int(np.flatnonzero(is_image)[-1]) + 1


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "gemma4" else pytest.mark.exhaustive)
        for name in ATTENTION
    ],
)
def test_models_of_transformers(family: str, tmp_path: Path) -> None:
    model, samples, shared = questions(family, tmp_path)
    isolate_segments(model)
    packed = PackedTransformersModel(model, torch.float32).train()
    others = [samples[0], *samples]
    alone = packed_batch([*others, *samples])
    expected = forward(packed, alone, shift_labels(alone.labels))
    expected.sum().backward()
    gradients = {n: p.grad.clone() for n, p in packed.named_parameters() if p.grad is not None}
    packed.zero_grad()
    segments = [*others, *as_tree(samples, shared, 1, 0, {})]
    parents = [-1] * len(others) + [-1] + [len(others)] * len(samples)
    batch = packed_batch(segments, parents=parents)
    with pytest.raises(ValueError, match="needs `use_tree_attention"):
        tree_forward(packed, batch)
    use_tree_attention(model)
    again = forward(packed, alone, shift_labels(alone.labels))  # a row without trees
    torch.testing.assert_close(again, expected, atol=1e-5, rtol=0)
    found = tree_forward(packed, batch)
    found.sum().backward()
    torch.testing.assert_close(found[found > 0], expected[expected > 0], atol=1e-5, rtol=0)
    for name, gradient in gradients.items():
        own = dict(packed.named_parameters())[name].grad
        assert own is not None
        assert (own - gradient).norm() < 1e-4 * gradient.norm() + 1e-7, name
    leaking = forward(
        packed, replace(batch, parents=batch.parents[:, :0]), shift_labels(batch.labels)
    )
    assert (leaking[found > 0] - expected[expected > 0]).abs().max() > 0.5


def test_recurrent_layers_are_refused(tmp_path: Path) -> None:
    model, _, _ = questions("qwen3_5", tmp_path)
    with pytest.raises(ValueError, match="'linear_attention', whose state cannot branch"):
        use_tree_attention(model)
