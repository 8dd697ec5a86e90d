"""Metrics: trackers, the log of a resumed run, a step's line, operations and the time left."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import MetricsConfig
from launch.loop.metrics import Eta, MetricsLog, format_line, read_metrics, row_flops
from task_encoders.families import FAMILIES
from task_encoders.packs.tokenized import IGNORE_INDEX
from tests.helpers.packed_runs import make_config, make_trainer, step_lines

pytestmark = pytest.mark.usefixtures("bmr_environment")

#: what users compare runs by
SHOWN = ("loss", "tokens_per_second", "fill", "samples_seen")


@pytest.mark.parametrize(
    ("module", "options"),
    [
        ("torch.utils.tensorboard", {"tensorboard": True}),
        ("wandb", {"wandb": "packs"}),
        ("swanlab", {"swanlab": "packs"}),
    ],
)
def test_trackers_are_optional(
    module: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    MetricsLog(tmp_path, MetricsConfig(), iteration=0)
    with pytest.raises(ValueError, match=r"needs the \w+ package: pip install"):
        MetricsLog(tmp_path, MetricsConfig(**options), iteration=0)


def test_samples_seen_go_on_in_a_resumed_run(tmp_path: Path) -> None:
    for first, last in ((0, 3), (2, 4)):
        log = MetricsLog(tmp_path, MetricsConfig(), iteration=first)
        for step in range(first, last):
            log.write(step + 1, {"sub_samples": 5})
        log.write(last, {"validation_loss": 1.0})
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "sub_samples" in line]
    assert [line["samples_seen"] for line in lines] == [5, 10, 15, 20]


def test_tensorboard_has_every_step_once(folder: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = {"tensorboard": True}
    trainer, _, _ = make_trainer(
        make_config(folder, tmp_path, train={"iterations": 4}, metrics=metrics)
    )
    assert trainer.run()
    steps = step_lines(tmp_path)
    log = MetricsLog(tmp_path, MetricsConfig(**metrics), iteration=2)  # resumed after step 2
    for line in steps[2:]:
        log.write(line["iteration"], {name: line[name] for name in (*SHOWN, "sub_samples")})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in SHOWN:
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({line["iteration"]: line[name] for line in steps})
    assert list(shown) == [1, 2, 3, 4]


@pytest.mark.exhaustive
def test_weights_and_biases_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    metrics = {"wandb": "my-packs"}
    trainer, _, _ = make_trainer(
        make_config(folder, tmp_path, train={"iterations": 2}, metrics=metrics)
    )
    assert trainer.run()
    wandb.teardown()  # as at the end of a process: it writes the file
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = path.read_bytes()
    for name in ("my-packs", *SHOWN):
        assert name.encode() in content
    for line in step_lines(tmp_path):
        assert repr(line["loss"]).encode() in content


#: A process of its own: SwanLab's protobuf is older than that of SentencePiece.
_LOG = """
import sys
from pathlib import Path
from launch.config import MetricsConfig
from launch.loop.metrics import MetricsLog

log = MetricsLog(Path(sys.argv[1]), MetricsConfig(swanlab="my-packs"), iteration=0)
for step in (1, 2):
    log.write(step, {"loss": 1 / step, "tokens_per_second": 9.0, "fill": 0.99, "sub_samples": 5})
log.close()
"""


@pytest.mark.exhaustive
def test_swanlab_without_a_network(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
    subprocess.run([*install, "swanlab==0.10.3"], check=True)
    path = os.pathsep.join([str(packages), str(Path(__file__).parents[4])])
    subprocess.run(
        [sys.executable, "-c", _LOG, str(tmp_path)],
        check=True,
        env={**os.environ, "PYTHONPATH": path, "SWANLAB_MODE": "offline"},
    )
    (kept,) = tmp_path.glob("swanlog/run-*/run-*.swanlab")
    for name in ("my-packs", *SHOWN):
        assert name.encode() in kept.read_bytes()


def test_operations_are_those_of_real_tokens_labels_and_pictures() -> None:
    cost = FAMILIES["qwen2_5_vl"].cost
    labels = torch.full((1, 12), IGNORE_INDEX)
    labels[0, [1, 5, 6]] = 7
    padding = torch.zeros(1, 12, dtype=torch.bool)
    padding[0, [3, 8, 9, 10, 11]] = True
    row: Any = types.SimpleNamespace(
        cu_lengths=torch.tensor([[0, 4, 9, 12]], dtype=torch.int32),  # 3 and 4 tokens, then none
        parents=torch.empty(1, 0, dtype=torch.int32),
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
    row.parents = torch.tensor([[-1, 0, -1]], dtype=torch.int32)
    _, language, planned = row_flops(cost, row).tolist()
    assert planned == pytest.approx(cost.language_flops(3 + 4))  # and attention across
    assert language == pytest.approx(cost.language_flops(3 + 4, 1 + 2))


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
