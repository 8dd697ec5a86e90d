"""Local processes: every task once, the first failure, no hang when a worker dies, and the progress
that tasks tell; and the engine of a configuration."""

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from offline_packing.engines import local
from offline_packing.engines.local import LocalEngine, advance
from offline_packing.errors import StageError
from task_encoders.samples import SampleError

# Workers import this module: what takes long is imported where it is used.


def square(number: int) -> int:
    return number * number


def fail(number: int) -> int:
    if number == 3:
        raise SampleError("bad_json", "third")
    return number


class TwoPartsError(Exception):
    """Pickled, it lacks what it is made of."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail_in_two_parts(number: int) -> int:
    raise TwoPartsError("sample", "a/17")


def die(number: int) -> int:
    os._exit(1)


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine(2) as engine:
        yield engine


def test_results(engine: LocalEngine) -> None:
    expected = [number * number for number in range(20)]
    assert sorted(engine.run(square, range(20))) == expected
    assert list(LocalEngine(0).run(square, range(20))) == expected
    assert list(engine.run(square, [])) == []


def process_of(task: int) -> int:
    return os.getpid()


def test_a_lone_task_starts_no_process() -> None:
    """Unless workers are there already."""
    with LocalEngine(2) as engine:
        assert list(engine.run(process_of, [1])) == [os.getpid()]
        assert os.getpid() not in engine.run(process_of, [1, 2])
        assert list(engine.run(process_of, [1])) != [os.getpid()]


def test_errors_that_cannot_be_pickled_are_told(engine: LocalEngine) -> None:
    with pytest.raises(StageError, match=r"TwoPartsError: sample a/17"):
        list(engine.run(fail_in_two_parts, [1, 1]))
    assert list(engine.run(square, [2])) == [4]


def test_tasks_are_drawn_as_needed(engine: LocalEngine) -> None:
    drawn: list[int] = []

    def tasks() -> Iterator[int]:
        for number in range(100):
            drawn.append(number)
            yield number

    results = engine.run(square, tasks())
    next(results)
    assert len(drawn) <= 8
    assert len(list(results)) == 99


def test_first_failure_is_raised(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool alone cancels tasks: a worker that a signal ended at this moment would also end the
    pool's thread, with the traceback of an InvalidStateError (Python 3.11)."""
    cancelled_in: list[threading.Thread] = []
    monkeypatch.setattr(
        Future, "cancel", lambda _: cancelled_in.append(threading.current_thread()) is not None
    )
    for one in (engine, LocalEngine(0)):
        with pytest.raises(SampleError, match="bad_json: third"):
            list(one.run(fail, range(100)))
    assert threading.main_thread() not in cancelled_in


def test_dead_worker() -> None:
    with LocalEngine(1) as engine:
        with pytest.raises(StageError, match="a worker process died"):
            list(engine.run(die, range(3)))
        assert list(engine.run(square, [3])) == [9]  # a fresh pool


def allocate(num_bytes: int) -> int:
    return len(bytes(num_bytes))


def test_a_task_above_its_share_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends, and its worker goes on; the calling process has no bound."""
    monkeypatch.setattr(local, "_LEAST_TASK_BYTES", 1 << 30)
    monkeypatch.setattr(local, "machine_memory", lambda: 0)
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with LocalEngine(1) as engine:
        assert sorted(engine.run(allocate, [1, 2])) == [1, 2]  # in any order
        with pytest.raises(StageError, match=r"more memory than its share of 1,073,741,824 bytes"):
            list(engine.run(allocate, [1 << 30]))
        assert list(engine.run(allocate, [3])) == [3]
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    assert list(LocalEngine(0).run(allocate, [1 << 30])) == [1 << 30]


def test_ray_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offline_packing.runs.run import build_engine
    from tests.helpers.datasets import make_config

    monkeypatch.setitem(sys.modules, "ray", None)
    config = make_config(tmp_path / "data", tmp_path / "out", engine={"name": "ray"})
    needed = r"pip install 'ray>=2.55' \(in a clone: pip install -e '\.\[ray\]'\)"
    with build_engine(config.engine) as engine, pytest.raises(StageError, match=needed):
        next(engine.run(abs, [-1]))


def slow_task(folder: Path) -> None:
    """Take a step, and another when the caller has heard of the first."""
    advance()
    deadline = time.monotonic() + 300
    while not (folder / "heard").exists():
        assert time.monotonic() < deadline, "nobody heard of the first step"
        time.sleep(0.02)
    advance()


def test_progress_is_told_before_the_task_ends(engine: LocalEngine, tmp_path: Path) -> None:
    told: list[int] = []

    def listen(count: int) -> None:
        told.append(count)
        if sum(told):
            (tmp_path / "heard").touch()

    assert list(engine.run(slow_task, [tmp_path] * 2, listen)) == [None] * 2
    assert sum(told) == 4
