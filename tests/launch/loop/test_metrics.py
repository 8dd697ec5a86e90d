"""metrics.jsonl and the trackers' own packages, offline."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.config import MetricsConfig
from launch.loop.metrics import MetricsLog, read_metrics
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
