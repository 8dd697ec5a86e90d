"""Stopping a run without losing a step."""

import signal
from types import FrameType
from typing import Any, Final

SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether SIGTERM or Ctrl-C arrived. Use as a context manager around the work to stop."""

    def __init__(self) -> None:
        #: the signal; 0: none
        self.received = 0

    def __enter__(self) -> "StopRequest":
        self._previous: dict[int, Any] = {s: signal.signal(s, self._on_signal) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.received = number
