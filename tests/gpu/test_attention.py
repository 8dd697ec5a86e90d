"""The kernels of a GPU against attention in float32, forward and backward, segment by segment."""

import itertools

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from launch.model.packed_attention import CAUSAL, KERNELS, select_backend
from launch.model.prefix_trees import row_trees

LENGTHS = {
    "one": [1024],
    "many": [7, 1, 130, 512, 64, 1, 310],
    "hundreds": [5 + i % 40 for i in range(300)],
}
#: Query heads, key-value heads, head size: decoder and vision tower of 2B, decoder of 7B.
HEADS = [(12, 2, 128), (16, 16, 80), (28, 4, 128)]


def available() -> list[str]:
    """The backends of this machine that `varlen_attention` has."""
    found = []
    for name in KERNELS:
        try:
            select_backend(torch.device("cuda"), torch.bfloat16, name)
        except ValueError:
            continue
        found.append(name)
    return found


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of the whole tensor, in the Euclidean norm."""
    return float((found.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shared", [(), (0, 1000, 1, 333)], ids=["", "trees"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_kernels_agree_with_float32(
    lengths: list[int],
    heads: tuple[int, int, int],
    causal: bool,
    shared: tuple[int, ...],
    cuda: torch.device,
) -> None:
    """Also where queries are the last tokens of keys, by `shared` earlier ones in turn."""
    query_heads, groups, size = heads
    earlier = itertools.cycle(shared or (0,))
    seen = [length + more for length, more in zip(lengths, earlier, strict=False)]
    generator = torch.Generator(cuda).manual_seed(0)
    shapes = [(sum(lengths), query_heads, size), *[(sum(seen), groups, size)] * 2]
    rounded = [torch.randn(*s, device=cuda, generator=generator).bfloat16() for s in shapes]
    cu_seqlens, cu_seqlens_kv = (
        torch.tensor([0, *itertools.accumulate(one)], dtype=torch.int32, device=cuda)
        for one in (lengths, seen)
    )
    gradient = torch.randn(*shapes[0], device=cuda, generator=generator)

    def attend(tensors: list[torch.Tensor], backend: str) -> list[torch.Tensor]:
        given = cu_seqlens, cu_seqlens_kv, max(lengths), max(seen)
        out = KERNELS[backend](*tensors, given, size**-0.5, CAUSAL if causal else (-1, -1))
        return [out.detach(), *torch.autograd.grad(out, tensors, gradient.to(out.dtype))]

    expected = attend([t.float().requires_grad_() for t in rounded], "sdpa")
    kernels = available()
    assert "torch_varlen" in kernels or "flash_attn" in kernels
    for backend in kernels:
        found = attend([t.clone().requires_grad_() for t in rounded], backend)
        for name, ours, theirs in zip("oqkv", found, expected, strict=True):
            assert relative_error(ours, theirs) < 1e-2, (backend, name)


def test_branches_equal_their_samples_alone(cuda: torch.device) -> None:
    """Forward and backward through keys that are gathered twice, at a window, too."""
    lengths, parents = [700, 40, 300, 1, 90, 64, 7], [-1, 0, 0, 0, -1, 4, 4]
    total, size = sum(lengths), 128
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=cuda)
    longest = max(lengths)
    layout = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    padding = torch.zeros(total, dtype=torch.bool, device=cuda)
    trees = row_trees(layout, torch.tensor(parents, device=cuda), padding)
    generator = torch.Generator(cuda).manual_seed(0)
    rounded = [
        torch.randn(total, heads, size, device=cuda, generator=generator).bfloat16()
        for heads in (12, 2, 2)
    ]
    gradient = torch.randn(total, 12, size, device=cuda, generator=generator)
    for window in (CAUSAL, (100, 0)):
        exact = [one.float().requires_grad_() for one in rounded]
        outputs = []
        for own, parent in enumerate(parents):
            places = torch.arange(int(ends[own]), int(ends[own + 1]), device=cuda)
            if parent >= 0:
                first, last = ends[parent : parent + 2].tolist()
                places = torch.cat([torch.arange(first, last, device=cuda), places])
            boundaries = torch.tensor([0, len(places)], dtype=torch.int32, device=cuda)
            counts = boundaries, boundaries, len(places), len(places)
            alone = KERNELS["sdpa"](*(one[places] for one in exact), counts, 0.09, window)
            outputs.append(alone[-lengths[own] :])
        out = torch.cat(outputs)
        expected = [out.detach(), *torch.autograd.grad(out, exact, gradient)]
        counts = trees.cu_seqlens_q, trees.cu_seqlens_kv, trees.max_seqlen_q, trees.max_seqlen_kv
        for backend in available():
            query, key, value = leaves = [one.clone().requires_grad_() for one in rounded]
            with trees.gather_keys(key, value) as gathered:
                out = KERNELS[backend](query, *gathered, counts, 0.09, window)
            found = [out.detach(), *torch.autograd.grad(out, leaves, gradient.bfloat16())]
            for name, ours, theirs in zip("oqkv", found, expected, strict=True):
                assert relative_error(ours, theirs) < 1e-2, (backend, window, name)
