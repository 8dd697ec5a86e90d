"""The kernels of a GPU against attention in float32, forward and backward, segment by segment."""

import itertools

import pytest
import torch

from launch.model.packed_attention import KERNELS, select_backend, varlen_attention

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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_kernels_agree_with_float32(
    lengths: list[int], heads: tuple[int, int, int], causal: bool, cuda: torch.device
) -> None:
    query_heads, groups, size = heads
    total = sum(lengths)
    generator = torch.Generator(cuda).manual_seed(0)
    shapes = [(total, query_heads, size), (total, groups, size), (total, groups, size)]
    rounded = [torch.randn(*s, device=cuda, generator=generator).bfloat16() for s in shapes]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=cuda)
    gradient = torch.randn(total, query_heads, size, device=cuda, generator=generator)

    def attend(tensors: list[torch.Tensor], backend: str) -> list[torch.Tensor]:
        out = varlen_attention(
            *tensors,
            cu_seqlens=cu_seqlens,
            max_seqlen=max(lengths),
            scale=size**-0.5,
            causal=causal,
            backend=backend,
        )
        return [out.detach(), *torch.autograd.grad(out, tensors, gradient.to(out.dtype))]

    expected = attend([t.float().requires_grad_() for t in rounded], "sdpa")
    kernels = available()
    assert "torch_varlen" in kernels or "flash_attn" in kernels
    for backend in kernels:
        found = attend([t.clone().requires_grad_() for t in rounded], backend)
        for name, ours, theirs in zip("oqkv", found, expected, strict=True):
            assert relative_error(ours, theirs) < 1e-2, (backend, name)


def test_changing_one_segment_changes_no_other(cuda: torch.device) -> None:
    lengths = LENGTHS["many"]
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=cuda)
    query, key, value = (
        torch.randn(sum(lengths), 12, 128, device=cuda, dtype=torch.bfloat16) for _ in range(3)
    )

    def attend(backend: str) -> torch.Tensor:
        return varlen_attention(
            query,
            key,
            value,
            cu_seqlens=cu_seqlens,
            max_seqlen=max(lengths),
            scale=0.1,
            causal=True,
            backend=backend,
        )

    for backend in available():
        before = attend(backend).clone()
        changed = slice(int(cu_seqlens[3]), int(cu_seqlens[4]))
        kept = key[changed].clone()
        key[changed] += 1
        after = attend(backend)
        key[changed] = kept
        differs = (before != after).flatten(1).any(dim=1)
        assert differs[changed].any()
        differs[changed] = False
        assert not differs.any()
