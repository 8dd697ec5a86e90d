"""Attention stays inside segments, whatever their lengths."""

import itertools
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from launch.model.megatron.attention import PackedCoreAttention
from launch.model.packed_attention import (
    CAUSAL,
    KERNELS,
    _sdpa,
    is_importable,
    register_attention,
    select_backend,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


def random_tensors(*shapes: tuple[int, ...], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    *,
    causal: bool,
    scale: float,
) -> torch.Tensor:
    """The slow oracle: the whole matrix of scores, with everything outside segments masked."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = segment[:, None] == segment[None]
    if causal:
        allowed = allowed.tril()
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def boundaries(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    groups=st.sampled_from([1, 2, 4]),
    causal=st.booleans(),
    seed=st.integers(0, 100),
)
def test_segments_equal_a_masked_matrix(
    lengths: list[int], groups: int, causal: bool, seed: int
) -> None:
    total = sum(lengths)
    shapes = (total, 4, 8), (total, groups, 8), (total, groups, 8)
    query, key, value = random_tensors(*shapes, seed=seed)
    given = (boundaries(lengths),) * 2 + (max(lengths),) * 2
    found = KERNELS["sdpa"](query, key, value, given, 0.3, CAUSAL if causal else (-1, -1))
    expected = masked_attention(query, key, value, lengths, causal=causal, scale=0.3)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_windows_and_blocks_are_at_places_in_a_segment() -> None:
    """The last 2 of 4 keys are queries: each sees itself and the key before it, and its block."""
    query, key, value = random_tensors((2, 1, 8), (4, 1, 8), (4, 1, 8))
    lengths = boundaries([2]), boundaries([4]), 2, 4

    def masked(seen: list[list[bool]]) -> torch.Tensor:
        scores = torch.einsum("qhd,khd->hqk", query, key) * 0.3
        weights = scores.masked_fill(~torch.tensor(seen), -torch.inf).softmax(dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, value)

    found = KERNELS["sdpa"](query, key, value, lengths, 0.3, (1, 0))
    expected = masked([[False, True, True, False], [False, False, True, True]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    numbers = torch.tensor([5, 5, 5, 5])  # one image: the first query sees the key after it
    found = _sdpa(query, key, value, lengths, 0.3, (1, 0), (numbers[2:], numbers))
    expected = masked([[False, True, True, True], [False, False, True, True]])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def core_attention(backend: str = "sdpa", **config: Any) -> PackedCoreAttention:
    values = {"context_parallel_size": 1, "attention_dropout": 0.0, "kv_channels": 8, **config}
    return PackedCoreAttention(types.SimpleNamespace(**values), 1, None, "self", backend=backend)


def test_what_it_lacks_is_refused() -> None:
    rows = random_tensors((4, 1, 2, 8), (4, 1, 2, 8), (4, 1, 2, 8))
    with pytest.raises(ValueError, match="needs packed_seq_params"):
        core_attention()(*rows, None)
    for config in ({"context_parallel_size": 2}, {"attention_dropout": 0.1}):
        with pytest.raises(ValueError, match="has no dropout, and its context parallelism"):
            core_attention(**config)
    for backend in ("torch_varlen", "fastest"):
        with pytest.raises(ValueError, match=f"'{backend}' cannot be used"):
            select_backend(CPU, torch.float32, backend)


def test_backend_is_the_best_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr("launch.model.packed_attention.is_importable", installed.__contains__)
    assert select_backend(CPU, torch.bfloat16) == "sdpa"
    assert select_backend(CUDA, torch.float32) == "sdpa"
    assert select_backend(CUDA, torch.bfloat16) == "torch_varlen"
    installed.add("flash_attn")
    assert select_backend(CUDA, torch.bfloat16) == "flash_attn"
    installed.add("flash_attn_interface")
    for capability, backend in (((9, 0), "flash_attn_3"), ((8, 0), "flash_attn")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert select_backend(CUDA, torch.bfloat16) == backend
    assert select_backend(CUDA, torch.bfloat16, "torch_varlen") == "torch_varlen"
    assert select_backend(CPU, torch.bfloat16) == "sdpa"


def test_a_package_that_fails_to_load_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "flash_attn.py").write_text("raise ImportError('undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    is_importable.cache_clear()
    assert select_backend(CUDA, torch.bfloat16) == "torch_varlen"
    is_importable.cache_clear()


def test_the_vision_tower_gets_the_whole_row_with_its_boundaries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Qwen2VLVisionConfig(depth=2, embed_dim=32, hidden_size=16, num_heads=2)
    tower = Qwen2VisionTransformerPretrainedModel._from_config(config, attn_implementation="sdpa")
    grids = torch.tensor([[1, 4, 6], [1, 2, 2], [1, 8, 4]])
    patches = random_tensors((24 + 4 + 32, 3 * 2 * 14 * 14))[0]
    expected = tower(patches, grid_thw=grids).pooler_output
    calls = []

    def counted(*args: Any) -> torch.Tensor:
        calls.append(args[3][0].tolist())
        return sdpa(*args)

    sdpa = KERNELS["sdpa"]
    monkeypatch.setattr("launch.model.packed_attention.KERNELS", {"sdpa": counted})
    tower.config._attn_implementation = register_attention()
    found = tower(patches, grid_thw=grids).pooler_output
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert calls == [[0, 24, 28, 60]] * config.depth
