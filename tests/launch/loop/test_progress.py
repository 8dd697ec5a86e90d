"""FLOPs of a step, the time that is left, and the line in the log."""

import types
from typing import Any

import pytest
import torch

from launch.loop.metrics import StepTotals
from launch.loop.progress import Eta, StepFlops, format_line


def totals(**counts: Any) -> StepTotals:
    names = ("loss", "denominator", "loss_tokens", "tokens", "samples", "packs", "squares")
    others = ("patches", "imbalance", "data_seconds", "stop")
    return StepTotals(**(dict.fromkeys((*names, *others), 0) | counts))


def test_flops_are_six_per_weight_and_token_and_attention_inside_segments() -> None:
    hidden, inner, vocab, layers = 1024, 4096, 5000, 3
    text = types.SimpleNamespace(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_hidden_layers=layers,
        vocab_size=vocab,
    )
    model = types.SimpleNamespace(
        hf_config=types.SimpleNamespace(text_config=text), visual=torch.nn.Linear(10, 7)
    )
    flops = StepFlops(model)
    weights = layers * (4 * hidden**2 + 3 * hidden * inner) + hidden * vocab
    assert flops.of(totals(tokens=100)) == 6 * weights * 100
    # Scores and values: 2 · 2 · l² · width forward, thrice that with backward, half of it causal.
    assert flops.of(totals(squares=100.0**2)) == layers * 3 * 4 * 100**2 * hidden / 2
    assert flops.of(totals(patches=8)) == 6 * 77 * 8


def test_the_time_left_is_that_of_the_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 50.0, 52.0, 56.0])  # the first step warms up
    monkeypatch.setattr("launch.loop.progress.time.perf_counter", lambda: next(clock))
    eta = Eta(10, 20)
    assert eta.seconds(11) is None
    assert eta.seconds(12) == 2 * 8
    assert eta.seconds(13) == 3 * 7


def test_a_line_says_what_there_is() -> None:
    names = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second")
    metrics = dict.fromkeys((*names, "fill", "data_wait", "memory_gib"), 0.5)
    assert format_line(3, 9, metrics, None).startswith("step 3/9: loss 0.5000, lr 5.00e-01, ")
    assert format_line(3, 9, metrics | {"mfu": 0.412}, 3_725.2).endswith("MFU 41.2%, ETA 1:02:05")
