"""Kills at a chosen moment, and tasks that end only when somebody has heard of their beginning."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from offline_packing.engines.local import Engine, advance


class KilledError(Exception):
    """Stands for a kill between two tasks."""


def killing(function: Callable[..., Any], after: int) -> Callable[..., Any]:
    """The function, which raises KilledError when it was called `after` times."""
    calls = []

    def run(*arguments: Any) -> Any:
        if len(calls) == after:
            raise KilledError
        calls.append(arguments)
        return function(*arguments)

    return run


def kill_worker(loader: Any, rows: Iterator[Any]) -> None:
    """Kill the first process of a torch loader, and read on. Torch's handler raises when a child
    ends: amid a put it would leave the lock of a queue taken, for which the queue's end waits."""
    pid = loader._iterator._workers[0].pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    list(rows)


STEPS = 4


def slow_task(folder: Path) -> int:
    """Four steps, of which the last is taken when the caller has heard of the first."""
    for step in range(STEPS):
        advance()
        deadline = time.monotonic() + 300
        while step == STEPS - 2 and not (folder / "heard").exists():
            assert time.monotonic() < deadline, "nobody heard of the first steps"
            time.sleep(0.02)
    return STEPS


def check_progress(engine: Engine, folder: Path) -> None:
    """Two tasks tell their progress while they are at work, and all of it in the end."""
    told: list[int] = []

    def listen(count: int) -> None:
        told.append(count)
        if sum(told):
            (folder / "heard").touch()

    assert list(engine.run(slow_task, [folder] * 2, listen)) == [STEPS] * 2
    assert sum(told) == 2 * STEPS
    assert sum(count > 0 for count in told) >= 2
