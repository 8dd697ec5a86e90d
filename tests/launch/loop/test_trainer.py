"""The training loop over real packs: what it counts, how it ends, what its errors say, and its
metrics."""

import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.config import LaunchConfig, MetricsConfig
from launch.data.packed_data import read_packed_data
from launch.loop import setup
from launch.loop.metrics import Eta, MetricsLog, format_line, read_metrics, row_flops
from launch.loop.parallel import initialize_parallel
from launch.loop.setup import build_stages, run
from launch.loop.trainer import StepError
from launch.train import failing_in_one_line
from offline_packing.errors import StageError
from task_encoders.families import FAMILIES
from task_encoders.packs.manifest import read_manifest
from task_encoders.samples import IGNORE_INDEX
from tests.helpers.packed_runs import (
    SEQ_LENGTH,
    losses,
    make_config,
    make_trainer,
    step_lines,
    trained,
)

pytestmark = pytest.mark.usefixtures("bmr_environment")


def test_one_pass_trains_on_every_pack_once_and_ends(folder: Path, tmp_path: Path) -> None:
    manifest = read_manifest(folder)
    packs, samples, tokens = (manifest.total(name) for name in ("packs", "samples", "tokens"))
    assert packs % 5  # so that the last step has fewer packs than the others
    sections = {"train": {"iterations": 1000}, "batch": {"global_batch_packs": 5}}
    keys = trained(make_config(folder, tmp_path, data={"repeat": False}, **sections)).keys
    assert len(keys) == len(set(keys)) == packs
    lines = step_lines(tmp_path)
    assert len(lines) == -(-packs // 5)
    assert [line["packs"] for line in lines] == [5] * (packs // 5) + [packs % 5]
    assert sum(line["sub_samples"] for line in lines) == samples
    assert sum(line["tokens"] for line in lines) == tokens
    for line in lines:
        assert line["fill"] == line["tokens"] / (line["packs"] * SEQ_LENGTH)
        assert 0 <= line["data_wait"] < 1


def test_the_seed_of_a_run_decides_its_order(folder: Path, tmp_path: Path) -> None:
    orders = []
    for seed in (0, 0, 7):
        data: dict[str, Any] = {"order": "balanced", "repeat": False}
        config = make_config(folder, tmp_path, data=data, train={"seed": seed})
        (stage,), _ = build_stages(config, [read_packed_data(folder)], initialize_parallel())
        orders.append([row.__key__ for row in iter(stage.train.next, None)])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_micro_batches_do_not_change_a_step(folder: Path, tmp_path: Path) -> None:
    runs = {}
    for size in (1, 4):
        sections: dict[str, Any] = {
            "data": {"micro_batch_size": size},
            "batch": {"global_batch_packs": 4},
            "train": {"iterations": 3, "normalization": "sample"},
        }
        run = trained(make_config(folder, tmp_path / str(size), **sections))
        runs[size] = losses(tmp_path / str(size)), run.keys
    assert runs[1][1] == runs[4][1]
    assert runs[4][0] == pytest.approx(runs[1][0], abs=1e-5)


class Interfering(torch.nn.Module):
    """A model that does something in its n-th forward."""

    def __init__(self, model: Any, at: int, action: Callable[[Any], Any]) -> None:
        super().__init__()
        self.model, self.at, self.action, self.calls = model, at, action, 0
        self.cost = model.cost

    def forward(self, *inputs: Any) -> torch.Tensor:
        self.calls += 1
        losses = self.model(*inputs)
        return self.action(losses) if self.calls == self.at else losses


def interfered(config: LaunchConfig, at: int, action: Callable[[Any], Any]) -> tuple[Any, Any]:
    """The error of a run, and the packs that it read."""
    trainer, recorded, model = make_trainer(config)
    trainer.model = Interfering(model, at, action)
    with pytest.raises(StepError) as failed:
        trainer.run()
    return failed.value, recorded.keys


def fail(losses: Any) -> Any:
    raise ValueError("samples do not fit")


@pytest.mark.parametrize(
    ("action", "said", "named"),
    [
        (fail, "samples do not fit", slice(4, 5)),
        (lambda losses: losses * float("nan"), "norm is nan", slice(3, 6)),
    ],
)
def test_a_failing_step_names_its_packs(
    action: Any, said: str, named: slice, folder: Path, tmp_path: Path
) -> None:
    error, keys = interfered(make_config(folder, tmp_path), at=5, action=action)
    assert all(text in str(error) for text in (said, *keys[named]))
    assert len(losses(tmp_path)) == 1
    assert not (tmp_path / "checkpoints").exists()


def test_a_second_run_is_refused_while_the_first_lives(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader's process that outlives the first does not hold its lock."""
    config = make_config(folder, tmp_path)
    here, there = multiprocessing.Pipe()

    def train(*arguments: Any, **options: Any) -> None:
        if loader := os.fork():
            there.send(loader)
        time.sleep(60)

    monkeypatch.setattr(setup, "initialize_parallel", train)
    first = multiprocessing.get_context("fork").Process(target=run, args=(config,))
    first.start()
    loader = here.recv()
    with pytest.raises(StageError, match=f"^another run is working on {tmp_path}; wait"):
        run(config)
    first.kill()
    first.join()
    monkeypatch.delattr(setup, "initialize_parallel")
    with pytest.raises(NameError):  # it has the lock
        run(config)
    os.kill(loader, signal.SIGKILL)


def test_a_loader_that_dies_during_a_step_is_named_instead_of_the_packs(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = set(multiprocessing.active_children())

    def kill(losses: Any) -> Any:
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        time.sleep(20)  # torch raises here, as soon as it hears of it
        return losses

    config = make_config(folder, tmp_path, data={"num_workers": 1})
    error, _ = interfered(config, at=2, action=kill)
    with pytest.raises(SystemExit), failing_in_one_line(debug=False):
        raise error
    said = capsys.readouterr().err
    assert "\nerror: a process that loads packs died: DataLoader worker (pid " in f"\n{said}"
    assert "Killed; lower data.num_workers if memory ran out, and run again to continue" in said


def test_a_step_without_any_label_changes_nothing(folder: Path, tmp_path: Path) -> None:
    config = make_config(folder, tmp_path, train={"iterations": 1}, optimizer={"weight_decay": 0.0})
    trainer, recorded, model = make_trainer(config)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    give = recorded.next

    def give_without_labels() -> Any:
        row = give()
        assert row is not None
        row.labels.fill_(-100)
        return row

    recorded.next = give_without_labels  # type: ignore[method-assign]
    assert trainer.run()
    assert losses(tmp_path) == [0.0]
    assert step_lines(tmp_path)[0]["grad_norm"] == 0
    assert all(map(torch.equal, model.parameters(), before))


def test_samples_can_be_let_attend_to_each_other(folder: Path, tmp_path: Path) -> None:
    first = {}
    for crossing in (False, True):
        output = tmp_path / str(crossing)
        data = {"cross_sample_attention": crossing}
        trained(make_config(folder, output, data=data, train={"iterations": 1}))
        first[crossing] = step_lines(output)[0]
    assert first[True]["loss"] != first[False]["loss"]
    assert first[True]["tokens"] == first[False]["tokens"]


#: what users compare runs by
SHOWN = ("loss", "tokens", "fill", "sub_samples")


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


def test_logs_have_every_step_once(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step and the last have a line for people. A resumed run drops the steps that it
    will do again, and a line that a kill cut off."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = {"tensorboard": True}
    sections: dict[str, Any] = {"train": {"iterations": 4}, "metrics": metrics}
    sections["validation"] = {"every": 100}
    with caplog.at_level(logging.INFO, "launch"):
        trained(make_config(folder, tmp_path, **sections))
    steps = step_lines(tmp_path)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]
    first, last, validated = lines  # a run shorter than validation.every is validated once
    assert first.startswith("step 1/4: ")
    assert last.startswith(f"step 4/4: loss {steps[3]['loss']:.4f}")
    assert validated.startswith("step 4: validation loss ")
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"iteration": 5, "lo')
    log = MetricsLog(tmp_path, MetricsConfig(**metrics), iteration=2)
    for line in steps[2:]:
        log.write(line["iteration"], {name: line[name] for name in SHOWN})
    log.close()
    assert [line["iteration"] for line in read_metrics(path)] == [1, 2, 3, 4]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for name in SHOWN:
        shown = {event.step: event.value for event in events.Scalars(name)}
        assert shown == pytest.approx({line["iteration"]: line[name] for line in steps})
    assert list(shown) == [1, 2, 3, 4]


#: A process of its own: SwanLab's protobuf is older than that of SentencePiece, and W&B writes its
#: file at the end.
_LOG = """
import sys
from pathlib import Path
from launch.config import MetricsConfig
from launch.loop.metrics import MetricsLog

log = MetricsLog(Path(sys.argv[1]), MetricsConfig(**{sys.argv[2]: "my-packs"}), iteration=0)
for step in (1, 2):
    log.write(step, {"loss": 1 / step, "tokens": 9.0, "fill": 0.99, "sub_samples": 5})
log.close()
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("tracker", "file"),
    [
        ("wandb", "wandb/offline-run-*/run-*.wandb"),
        ("swanlab==0.10.3", "swanlog/run-*/run-*.swanlab"),
    ],
)
def test_trackers_without_a_network(tracker: str, file: str, tmp_path: Path) -> None:
    name, _, version = tracker.partition("==")
    packages = tmp_path / "packages"
    if version:
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
        subprocess.run([*install, tracker], check=True)
    path = os.pathsep.join([str(packages), str(Path(__file__).parents[3])])
    own = {"PYTHONPATH": path, "SWANLAB_MODE": "offline", "WANDB_MODE": "offline"}
    arguments = [sys.executable, "-c", _LOG, str(tmp_path), name]
    subprocess.run(arguments, check=True, env={**os.environ, **own})
    (kept,) = tmp_path.glob(file)
    for text in ("my-packs", *SHOWN):
        assert text.encode() in kept.read_bytes()


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
    language = cost.language_flops(3, 1) + cost.language_flops(4, 2)
    tower = sum(map(cost.tower_flops, (48, 4, 16, 16, 16)))
    assert float(row_flops(cost, row)) == pytest.approx(tower + language, rel=1e-12)
    row.image_grid_thw = row.video_grid_thw = torch.empty(0, 3, dtype=torch.int32)
    assert float(row_flops(cost, row)) == language
    row.parents = torch.tensor([[-1, 0, -1]], dtype=torch.int32)  # and attention across
    assert float(row_flops(cost, row)) == pytest.approx(cost.language_flops(3 + 4, 1 + 2))


def test_the_time_left_is_that_of_the_steps_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([50.0, 52.0, 56.0])  # the first step warms up
    monkeypatch.setattr("launch.loop.metrics.time.perf_counter", lambda: next(clock))
    eta = Eta()
    assert eta.seconds(11, 20) is None
    assert eta.seconds(12, 20) == 2 * 8
    assert eta.seconds(13, 20) == 3 * 7


def test_a_line_says_what_there_is() -> None:
    names = ("loss", "learning_rate", "grad_norm", "tokens", "sub_samples", "step_seconds")
    metrics = dict.fromkeys((*names, "fill", "data_wait", "memory_gib"), 0.5)
    line = format_line(3, 9, metrics | {"tokens": 4_000}, None)
    assert line.startswith(
        "step 3/9: loss 0.5000, lr 5.00e-01, grad norm 0.5, 8,000 tokens/s, 1.0 "
    )
    assert format_line(3, 9, metrics | {"mfu": 0.412}, 3_725.2).endswith("MFU 41.2%, ETA 1:02:05")
