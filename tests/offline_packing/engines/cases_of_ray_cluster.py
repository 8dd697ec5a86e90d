"""A local Ray cluster gives what local processes give; the death of a worker loses nothing.
test_ray_nodes.py runs these."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from offline_packing.engines.local import advance
from offline_packing.engines.ray_cluster import RayEngine
from offline_packing.errors import ConfigError
from task_encoders.samples import SampleError

# Ray's workers import this module: what takes long is imported where it is used.
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
    advance()
    if number == 1_000:
        raise SampleError("bad_json", "the thousandth")
    return number * number


def die_once(marker: Path) -> int:
    """End this worker, the first time, as if it was killed from outside while it is at work."""
    advance()
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_results_and_failures(engine: RayEngine) -> None:
    told: list[int] = []
    found = sorted(engine.run(square, range(30), told.append))
    assert found == [number * number for number in range(30)]
    assert sum(told) == 30
    assert list(engine.run(square, [])) == []
    with pytest.raises(SampleError, match="bad_json: the thousandth"):
        list(engine.run(square, [1_000]))


def test_killed_worker(engine: RayEngine, tmp_path: Path) -> None:
    """What it had told of its progress does not count."""
    told: list[int] = []
    (found,) = engine.run(die_once, [tmp_path / "died"], told.append)
    assert found != os.getpid()
    assert (tmp_path / "died").exists()
    assert sum(told) == 1


def test_an_option_that_ray_lacks() -> None:
    with (
        RayEngine(1, {"num_cpu": 2}) as engine,
        pytest.raises(ConfigError, match=r"ray_remote_args=\{'num_cpu': 2\}: Invalid option"),
    ):
        list(engine.run(square, [1]))


def test_equal_to_local_processes(engine: RayEngine, tmp_path: Path) -> None:
    from offline_packing.runs.run import Run
    from offline_packing.verify.verify import verify
    from tests.helpers.datasets import captioning_pairs, make_config, pack_all, packed_run

    captions = captioning_pairs(tmp_path / "data")
    local = packed_run(captions, tmp_path / "local")
    run = Run(make_config(captions, tmp_path / "ray"), engine)
    pack_all(run)
    for path in (*local.workspace.root.glob("*.tar*"), local.workspace.manifest):
        assert (run.workspace.root / path.name).read_bytes() == path.read_bytes(), path.name
    result = verify(run, deep=True)
    assert result.ok
    assert result.num_samples == 40
