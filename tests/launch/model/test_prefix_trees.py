"""Branches of a prefix tree equal their samples alone."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3_5Config, Qwen3NextConfig

from launch.loop.loss import shift_labels
from launch.loop.parallel import initialize_parallel
from launch.model import segments
from launch.model.config import ModelConfig
from launch.model.megatron.model import build_model
from launch.model.packed_attention import CAUSAL, KERNELS
from launch.model.prefix_trees import RowTrees, row_trees, segment_params
from launch.model.segments import check_layers, isolate_segments, use_tree_attention
from launch.model.transformers_model import PackedTransformersModel
from task_encoders.energon_samples import PackedBatch
from task_encoders.families import FAMILIES
from task_encoders.rows.trees import as_tree
from task_encoders.sample_encoder import EncodedSample
from task_encoders.samples import SourceSample, Turn
from tests.helpers import stand_in_fla
from tests.helpers.texts_and_images import random_image
from tests.helpers.tiny_checkpoints import (
    NORMALISATION,
    forward,
    gradients_of,
    packed_batch,
    params_of,
)
from tests.helpers.tiny_families import encoder_of, tiny_model
from tests.helpers.varlen import CpuVarlen
from tests.world import World


def trees_of(
    lengths: Sequence[int], parents: Sequence[int], padded: Sequence[int] = ()
) -> RowTrees:
    """Return the trees of a row with padding at these places."""
    padding = torch.zeros(sum(lengths), dtype=torch.bool)
    padding[list(padded)] = True
    return row_trees(params_of(lengths, qkv_format="sbhd"), torch.tensor(parents), padding)


@pytest.mark.parametrize(("backend", "groups"), [("sdpa", 4), ("sdpa", 2), ("torch_varlen", 2)])
def test_gathered_keys_are_gathered_again(
    backend: str, groups: int, varlen: CpuVarlen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not kept for the backward pass, but for copies that torch's own makes of fewer groups."""
    lengths = [64, *[4] * 32]
    trees = trees_of(lengths, [-1, *[0] * 32])
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


def tree_forward(model: Any, batch: PackedBatch) -> torch.Tensor:
    losses: torch.Tensor = model(batch, segment_params(batch), shift_labels(batch.labels))
    return losses


#: Families that transformers has.
IN_TRANSFORMERS = [name for name in FAMILIES if FAMILIES[name].transformers_name]


def questions(world: World, family: str) -> tuple[Any, list[EncodedSample], int]:
    """Make a tiny model, questions on one picture, and count the tokens that they share."""
    encoder = encoder_of(world.tokenizer(family))
    image = random_image(np.random.default_rng(0), 100, 70)
    samples = []
    for i, question in enumerate(["What is it?", "Name the colour of bar 3.", "Why?"]):
        turn = Turn(question, f"Because {i} is a colour, as anyone can see who looks at it.")
        sample = SourceSample(str(i), "vqa", (turn,), ("0",))
        samples.append(encoder.encode(sample, [image], []))
    is_image = samples[0].tokens == encoder.media_token_ids["image_token_id"]
    model = tiny_model(family, encoder.media_token_ids)
    return model, samples, int(np.flatnonzero(is_image)[-1]) + 1


#: Kinds of models, families, and multiples that samples and trees are padded to.
CASES = [("transformers", name, 1) for name in IN_TRANSFORMERS]
CASES += [("megatron", name, n) for name in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl") for n in (1, 8)]
OFTEN = {CASES[-1], *(("transformers", name, 1) for name in ("gemma4", "qwen3_5"))}


@pytest.mark.parametrize(
    ("kind", "family", "multiple"),
    [pytest.param(*one, marks=[] if one in OFTEN else pytest.mark.exhaustive) for one in CASES],
)
def test_branches_equal_their_samples_alone(
    kind: str, family: str, multiple: int, world: World, tmp_path: Path
) -> None:
    """Losses and gradients, in a row of a tree among whole samples."""
    own, samples, shared = questions(world, family)
    is_megatron, is_recurrent = kind == "megatron", FAMILIES[family].is_recurrent
    if is_megatron:
        own.save_pretrained(tmp_path / "model")
        config = ModelConfig(family=family, checkpoint=tmp_path / "model")
        model: Any = build_model(config, device=initialize_parallel(1)).train()
    else:
        isolate_segments(own)
        model = PackedTransformersModel(own, torch.float32).train()
    others = [samples[0], *samples]
    alone = packed_batch([*others, *samples])
    expected = forward(model, alone, shift_labels(alone.labels))
    expected.sum().backward()
    gradients = gradients_of(model)
    segments = [*others, *as_tree(samples, shared, 1, 0, {})]
    parents = [-1] * len(others) + [-1] + [len(others)] * len(samples)
    batch = packed_batch(segments, parents=parents, multiple=multiple)
    with pytest.raises(ValueError, match="cannot be split over context parallel ranks"):
        segment_params(batch, SimpleNamespace(size=lambda: 2))
    if not is_megatron:
        with pytest.raises(ValueError, match="needs `use_tree_attention"):
            tree_forward(model, batch)
        use_tree_attention(own)
        again = forward(model, alone, shift_labels(alone.labels))  # a row without trees
        torch.testing.assert_close(again, expected, atol=1e-5, rtol=0)
    found = tree_forward(model, batch)
    found.sum().backward()
    losses = found[found > 0], expected[expected > 0]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5 * (is_recurrent or is_megatron))
    limit = 2e-4 if is_recurrent else 1e-4
    own_gradients = gradients_of(model)
    for name, gradient in gradients.items():
        assert (own_gradients[name] - gradient).norm() < limit * gradient.norm() + 1e-7, name
    plain = replace(batch, parents=batch.parents[:, :0])
    leaking = forward(model, plain, shift_labels(batch.labels))
    assert (leaking[found > 0] - expected[expected > 0]).abs().max() > 0.5


#: Tokens of trunks and branches: within and beyond the window of the convolution (3 tokens before
#: each), and chunks of the delta rule (64).
TRUNKS, BRANCHES = (1, 2, 3, 64, 130), (1, 5, 65)


@pytest.fixture(scope="module")
def recurrent(world: World) -> PackedTransformersModel:
    """A model of 3 recurrent layers and one of attention."""
    model, _, _ = questions(world, "qwen3_5")
    plain = PackedTransformersModel(model, torch.float32)
    assert isolate_segments(model) == 3
    use_tree_attention(model)
    return plain


def text(length: int, seed: int, vocabulary: int) -> EncodedSample:
    """A sample of random tokens, none with loss."""
    tokens = np.random.default_rng(seed).integers(3, vocabulary, length)
    return EncodedSample(
        key=str(seed),
        tokens=tokens.astype(np.int64),
        loss_weights=np.zeros(length, np.float32),
        position_ids=np.tile(np.arange(length), (3, 1)),
        image_pixels=np.empty((0, 588), np.uint8),
        image_grid_thw=np.empty((0, 3), np.int32),
        video_pixels=np.empty((0, 1176), np.uint8),
        video_grid_thw=np.empty((0, 3), np.int32),
        normalisation=NORMALISATION,
    )


def recurrent_samples(changed: int | None = None) -> list[list[EncodedSample]]:
    """Return samples of each trunk, the first tokens of which are alike. `changed`: its branch
    differs."""
    found = []
    for number, trunk in enumerate(TRUNKS):
        whole = text(trunk + max(BRANCHES), number, 500)
        own = []
        for place, length in enumerate(BRANCHES):
            seed = 100 + len(BRANCHES) * number + place
            tail = text(length, seed + 1000 * (seed - 100 == changed), 500).tokens
            tokens = np.concatenate([whole.tokens[:trunk], tail])
            own.append(replace(text(len(tokens), seed, 500), tokens=tokens))
        found.append(own)
    return found


def recurrent_row(
    model: PackedTransformersModel, changed: int | None = None, **changes: Any
) -> list[torch.Tensor]:
    """Return the logits of each branch, in a row of all trees between samples alone."""
    samples = recurrent_samples(changed)
    segments, parents = [samples[0][1]], [-1]
    for trunk, own in zip(TRUNKS, samples, strict=True):
        parents += [-1, *[len(segments)] * len(own)]
        segments += as_tree(own, trunk, 0, 0, {})
    batch = packed_batch([*segments, samples[0][1]], parents=[*parents, -1])
    trees = replace(segment_params(batch), **changes)
    parts = model(batch, trees)[0].split([len(one.tokens) for one in segments] + [6])
    return [part for part, parent in zip(parts, [*parents, -1], strict=True) if parent >= 0]


def objective(branches: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(one * one.sin()).mean() for one in branches]).sum()


def has_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention's functions in plain torch, as if on a GPU."""
    for name in stand_in_fla.MODULES:
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    stand_in_fla.install()
    monkeypatch.setattr(segments, "_has_fla", lambda device: True)


def test_recurrent_branches_equal_their_samples_alone(
    recurrent: PackedTransformersModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and gradients, by torch's functions and by kernels; and another branch changes those
    of no other."""
    expected = []
    for trunk, own in zip(TRUNKS, recurrent_samples(), strict=True):
        batches = map(packed_batch, ([one] for one in own))
        expected += [recurrent(one, segment_params(one))[0, trunk:] for one in batches]
    recurrent.zero_grad()
    objective(expected).backward()
    gradients = gradients_of(recurrent)
    assert sum("linear_attn" in name for name in gradients) == 3 * 9
    for kernels in ("torch", "fla"):
        if kernels == "fla":
            has_stand_in(monkeypatch)
        found = recurrent_row(recurrent)
        assert len(found) == len(TRUNKS) * len(BRANCHES)
        for own, alone in zip(found, expected, strict=True):
            assert (own - alone).norm() <= 2e-4 * alone.norm()
        objective(found).backward()
        own_gradients = gradients_of(recurrent)
        for name, gradient in gradients.items():
            difference = (own_gradients[name] - gradient).norm()
            assert difference <= 2e-4 * gradient.norm(), (kernels, name)
        with torch.no_grad():
            whole = recurrent_row(recurrent)
            for changed in (0, 5, 14):
                again = recurrent_row(recurrent, changed)
                alike = [torch.equal(*pair) for pair in zip(whole, again, strict=True)]
                assert [n for n, same in enumerate(alike) if not same] == [changed]


@torch.no_grad()
def test_recurrent_trunks_of_other_branches_are_refused(recurrent: PackedTransformersModel) -> None:
    size, parents = 1 + len(BRANCHES), [-1]
    for tree in range(len(TRUNKS)):
        parents += [-1, *[1 + size * max(tree - 1, 0)] * len(BRANCHES)]
    with pytest.raises(ValueError, match="a trunk has padding, which would change the state"):
        recurrent_row(recurrent, parents=[*parents, -1])


def test_layers_that_cannot_branch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Qwen3_5Config()
    check_layers(config)
    for installed in ("5.20.2", "5.25.0"):
        monkeypatch.setattr(segments, "version", lambda _, own=installed: own)
        with pytest.raises(ValueError, match=rf"transformers {installed} take no states of trunks"):
            check_layers(config)
    other = Qwen3NextConfig(layer_types=["linear_attention"] * 4, num_hidden_layers=4)
    with pytest.raises(ValueError, match="'linear_attention', whose state cannot branch"):
        check_layers(other)
