"""Compare tests/helpers/stand_in_fla.py, with which CPUs test Qwen3.5's recurrent layers, with the
kernels of flash-linear-attention on a GPU, at boundaries inside and beside their chunks of 64
tokens. `python -m tools.gpu_fla`"""

import itertools

import torch
from torch.nn import functional as F

_LENGTHS = ([64, 64], [1, 63, 65, 130, 5, 1], [3000, 5, 1, 900])
_HEADS, _SIZE, _CHANNELS, _TAPS = 4, 128, 256, 4
_LIMIT = 2e-2  # of bfloat16, in which both compute


def differences(found: list[torch.Tensor], expected: list[torch.Tensor]) -> list[float]:
    """Return the relative differences of tensors, in the Euclidean norm."""
    pairs = zip(found, expected, strict=True)
    return [float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs]


def main() -> None:
    if not torch.cuda.is_available():
        print("no CUDA device: stopped before flash-linear-attention's kernels")
        return
    from fla.modules.convolution import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from tests.helpers import stand_in_fla

    torch.manual_seed(0)
    worst = 0.0
    for lengths in _LENGTHS:
        ends = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda")

        def new(*shape: int, tokens: int = sum(lengths)) -> torch.Tensor:
            return torch.randn(1, tokens, *shape, device="cuda", dtype=torch.bfloat16)

        given = [new(_HEADS, _SIZE) for _ in range(3)]
        given += [F.logsigmoid(new(_HEADS).float()), new(_HEADS).sigmoid()]
        outputs = []
        states = torch.randn(len(lengths), _HEADS, _SIZE, _SIZE, device="cuda") / _SIZE
        for kernel in (chunk_gated_delta_rule, stand_in_fla.chunk_gated_delta_rule):
            leaves = [tensor.clone().requires_grad_() for tensor in (*given, states)]
            out, final = kernel(
                *leaves[:-1],
                initial_state=leaves[-1],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
                cu_seqlens=ends,
            )
            torch.manual_seed(1)
            gradients = torch.randn_like(out), torch.randn_like(final)
            outputs.append([out, final, *torch.autograd.grad((out, final), leaves, gradients)])
        rule = differences(*outputs)
        row = new(_CHANNELS)
        weight = torch.randn(_CHANNELS, _TAPS, device="cuda", dtype=torch.bfloat16)
        convolved = [
            kernel(row, weight, activation="silu", cu_seqlens=ends)[0]
            for kernel in (causal_conv1d, stand_in_fla.causal_conv1d)
        ]
        convolution = differences(convolved[:1], convolved[1:])
        said = ", ".join(f"{one:.1e}" for one in rule)
        print(
            f"{lengths}: out, state, q, k, v, g, beta, first {said}; conv {convolution[0]:.1e}",
            flush=True,
        )
        worst = max(worst, *rule, *convolution)
    print(f"largest {worst:.1e}, of {_LIMIT:.0e}")
    raise SystemExit(not worst <= _LIMIT)


if __name__ == "__main__":
    main()
