"""A task tells how far it is while it is at work, on every engine."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offline_packing.engines import ENGINES
from offline_packing.engines.base import Engine, advance

STEPS = 4


def slow_task(folder: Path) -> int:
    """Four steps, of which the last is taken when the caller has heard of the first."""
    for step in range(STEPS):
        advance()
        deadline = time.monotonic() + 60
        while step == STEPS - 2 and not (folder / "heard").exists():
            assert time.monotonic() < deadline, "nobody heard of the first steps"
            time.sleep(0.02)
    return STEPS


@pytest.fixture(params=["local", "ray"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with ENGINES[request.param](1) as engine:
        yield engine


def test_progress_is_told_before_the_task_ends(engine: Engine, tmp_path: Path) -> None:
    told: list[int] = []

    def listen(count: int) -> None:
        told.append(count)
        if sum(told):
            (tmp_path / "heard").touch()

    assert list(engine.run(slow_task, [tmp_path], listen)) == [STEPS]
    assert sum(told) == STEPS
    assert sum(count > 0 for count in told) >= 2


def test_nobody_needs_to_listen(tmp_path: Path) -> None:
    (tmp_path / "heard").touch()
    with ENGINES["local"](0) as engine:
        assert list(engine.run(slow_task, [tmp_path])) == [STEPS]
        told: list[int] = []
        assert list(engine.run(slow_task, [tmp_path] * 2, told.append)) == [STEPS] * 2
    assert told == [1] * 2 * STEPS
