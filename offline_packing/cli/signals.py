"""Signals that end a run, as an exception: locks, worker processes and half-written files are
cleaned up on its way out."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class EndedBySignal(BaseException):
    """A signal asked the process to end. Not an Exception: only cleanup code may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number

    def __str__(self) -> str:
        if self.number == signal.SIGINT:
            return "interrupted"
        return f"ended by {signal.Signals(self.number).name}"


@contextmanager
def signals_raise() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise EndedBySignal in here. One that the process was started to
    ignore (nohup) stays ignored. In the main thread only."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    changed = {number: was for number, was in before.items() if was != signal.SIG_IGN}
    for number in changed:
        signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, was in changed.items():
            signal.signal(number, was)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise EndedBySignal(number)
