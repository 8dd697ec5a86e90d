"""Kills at a chosen moment."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any


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
