"""Local processes: every task once, the first failure, no hang when a worker dies."""

import os
from collections.abc import Iterator

import pytest

from offline_packing.engines.local import LocalEngine
from offline_packing.errors import StageError
from task_encoders.samples import SampleError


def square(number: int) -> int:
    return number * number


def fail(number: int) -> int:
    if number == 3:
        raise SampleError("bad_json", "third")
    return number


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


@pytest.mark.parametrize("workers", [0, 2])
def test_first_failure_is_raised(workers: int) -> None:
    with LocalEngine(workers) as engine, pytest.raises(SampleError, match="bad_json: third"):
        list(engine.run(fail, range(100)))


def test_dead_worker() -> None:
    with LocalEngine(1) as engine:
        with pytest.raises(StageError, match="a worker process died"):
            list(engine.run(die, range(3)))
        assert list(engine.run(square, [3])) == [9]  # a fresh pool
