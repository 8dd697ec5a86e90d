"""Operations of a row, the time that is left, and the line in the log."""

import types
from typing import Any

import pytest
import torch

from launch.loop.metrics import Eta, format_line, row_flops
from task_encoders.families import FAMILIES
from task_encoders.packs.tokenized import IGNORE_INDEX


def test_operations_are_those_of_real_tokens_labels_and_pictures() -> None:
    cost = FAMILIES["qwen2_5_vl"].cost
    labels = torch.full((1, 12), IGNORE_INDEX)
    labels[0, [1, 5, 6]] = 7
    padding = torch.zeros(1, 12, dtype=torch.bool)
    padding[0, [3, 8, 9, 10, 11]] = True
    row: Any = types.SimpleNamespace(
        cu_lengths=torch.tensor([[0, 4, 9, 12]], dtype=torch.int32),  # 3 and 4 tokens, then none
        attn_mask=padding,
        labels=labels,
        image_grid_thw=torch.tensor([[1, 8, 6], [1, 2, 2]], dtype=torch.int32),
        video_grid_thw=torch.tensor([[3, 4, 4]], dtype=torch.int32),
    )
    tower, language, planned = row_flops(cost, row).tolist()
    assert planned == cost.language_flops(3) + cost.language_flops(4)
    assert language == cost.language_flops(3, 1) + cost.language_flops(4, 2)
    pictures = (48, 4, 16, 16, 16)
    assert tower == pytest.approx(sum(map(cost.tower_flops, pictures)))
    row.image_grid_thw = row.video_grid_thw = torch.empty(0, 3, dtype=torch.int32)
    assert row_flops(cost, row).tolist() == [0, language, planned]


def test_the_time_left_is_that_of_the_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 50.0, 52.0, 56.0])  # the first step warms up
    monkeypatch.setattr("launch.loop.metrics.time.perf_counter", lambda: next(clock))
    eta = Eta(10, 20)
    assert eta.seconds(11) is None
    assert eta.seconds(12) == 2 * 8
    assert eta.seconds(13) == 3 * 7


def test_a_line_says_what_there_is() -> None:
    names = ("loss", "learning_rate", "grad_norm", "tokens_per_second", "samples_per_second")
    metrics = dict.fromkeys((*names, "fill", "data_wait", "memory_gib"), 0.5)
    assert format_line(3, 9, metrics, None).startswith("step 3/9: loss 0.5000, lr 5.00e-01, ")
    assert format_line(3, 9, metrics | {"mfu": 0.412}, 3_725.2).endswith("MFU 41.2%, ETA 1:02:05")
    idle = {"idle_share": 0.01, "two_phase_idle_share": 0.05}
    idle |= {"tower_idle_share": 0.2, "language_idle_share": 0.004}
    line = format_line(
        3, 9, metrics | idle | {"tower_0": 0.4, "tower_1": 0.6, "tower_idle": 0.1}, 1
    )
    assert "idle 1.0% (waiting after the tower too 5.0%: tower 20.0%, language 0.4%)" in line
    assert "tower 40%/60% (idle 10%)" in line
