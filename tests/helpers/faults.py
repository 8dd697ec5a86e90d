"""Kills at a chosen moment."""

from collections.abc import Callable
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
