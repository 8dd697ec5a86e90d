"""A local Ray cluster gives what local processes give; the death of a worker, or of the counter of
progress, loses nothing. test_ray_cluster.py runs these."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offline_packing.engines.local import advance
from offline_packing.engines.ray_cluster import RayEngine
from offline_packing.errors import ConfigError
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from task_encoders.samples import SampleError
from tests.helpers.datasets import make_config, pack_all, packed_run
from tests.helpers.faults import check_progress
from tests.helpers.ray_clusters import kill_processes

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.55'")


@pytest.fixture(scope="module")
def engine() -> Iterator[RayEngine]:
    """One cluster for all tests: a start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        engine = RayEngine(1, {"num_cpus": 0.5, "memory": 1_000_000})  # two tasks at a time
        yield engine
        engine.close()


def square(number: int) -> int:
    if number == 1_000:
        raise SampleError("bad_json", "the thousandth")
    return number * number


def die_once(marker: Path) -> int:
    """A worker that is killed from outside while it is at work, the first time."""
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_results_and_failures(engine: RayEngine) -> None:
    assert sorted(engine.run(square, range(30))) == [number * number for number in range(30)]
    assert list(engine.run(square, [])) == []
    with pytest.raises(SampleError, match="bad_json: the thousandth"):
        list(engine.run(square, [1_000]))


def test_killed_worker(engine: RayEngine, tmp_path: Path) -> None:
    markers = [tmp_path / str(i) for i in range(3)]
    found = list(engine.run(die_once, markers))
    assert len(found) == 3
    assert all(marker.exists() for marker in markers)


def step(number: int) -> int:
    for _ in range(4):
        time.sleep(0.2)
        advance()
    return number


def test_killed_counter(engine: RayEngine) -> None:
    """Progress goes on, and ends where it should."""
    told: list[int] = []

    def listen(count: int) -> None:
        if not told:
            kill_processes("ray::_Counter")
        told.append(count)

    assert sorted(engine.run(step, range(8), listen)) == list(range(8))
    assert sum(told) == 4 * 8


def test_progress_is_told_before_the_task_ends(engine: RayEngine, tmp_path: Path) -> None:
    check_progress(engine, tmp_path)


def test_an_option_that_ray_lacks() -> None:
    with (
        RayEngine(1, {"num_cpu": 2}) as engine,
        pytest.raises(ConfigError, match=r"ray_remote_args=\{'num_cpu': 2\}: Invalid option"),
    ):
        list(engine.run(square, [1]))


def test_equal_to_local_processes(engine: RayEngine, captions: Path, tmp_path: Path) -> None:
    local = packed_run(captions, tmp_path / "local")
    run = Run(make_config(captions, tmp_path / "ray"), engine)
    pack_all(run)
    for path in (*local.workspace.root.glob("*.tar*"), local.workspace.manifest):
        assert (run.workspace.root / path.name).read_bytes() == path.read_bytes(), path.name
    result = verify(run, deep=True)
    assert result.ok
    assert result.num_samples == 40
