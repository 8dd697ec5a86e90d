"""Progress of a stage: a bar in a terminal, a line a minute in a log."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, TextIO

from tqdm import tqdm

_SECONDS_BETWEEN_LINES: Final = 60
#: measure: 120,000 of 600,000 samples, 20%, 03:10 left
_LINE: Final = "{desc}: {n:,} of {total:,} {unit}s, {percentage:.0f}%, {remaining} left"
#: if the total is unknown
_OPEN_LINE: Final = "{desc}: {n:,} {unit}s in {elapsed}"


class _Lines:
    """A stream that gives every state of a bar its own line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        line = text.strip()
        if line:
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        self._stream.flush()


def _logging_above_the_bar() -> AbstractContextManager[None]:
    from tqdm.contrib.logging import logging_redirect_tqdm  # imports asyncio: 30 ms

    return logging_redirect_tqdm()


@contextmanager
def progress_bar(name: str, total: int | None, unit: str, *, shown: bool) -> Iterator["tqdm[None]"]:
    """A bar of `total` units; None: unknown. Log lines appear above it."""
    is_terminal = sys.stderr.isatty()
    lines = {
        "file": _Lines(sys.stderr),
        "bar_format": _LINE if total else _OPEN_LINE,
        "mininterval": _SECONDS_BETWEEN_LINES,
        "maxinterval": _SECONDS_BETWEEN_LINES,
        "delay": _SECONDS_BETWEEN_LINES,
    }
    with (
        tqdm(
            total=total or None,
            desc=name,
            unit=unit,
            disable=not shown,
            **({} if is_terminal else lines),
        ) as bar,
        _logging_above_the_bar() if shown and is_terminal else nullcontext(),
    ):
        yield bar
