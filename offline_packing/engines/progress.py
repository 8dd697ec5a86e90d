"""Progress inside a task, the same on every engine: a task says `advance(3)` when three more of its
records or packs are done, and the caller of `Engine.run` is told, whichever process that was in."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

#: f(n): n further units of work are done.
Advance = Callable[[int], object]
SECONDS_BETWEEN_REPORTS: Final = 1.0

_LISTENER: Final[ContextVar[Advance | None]] = ContextVar("listener", default=None)


def advance(count: int = 1) -> None:
    """To be called by a task; does nothing where nobody listens."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(count)


@contextmanager
def told_to(listener: Advance | None) -> Iterator[None]:
    """Tasks that run in here tell this listener how they advance."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def tell(listener: Advance) -> None:
    """All tasks of this worker process tell this listener how they advance."""
    _LISTENER.set(listener)
