"""What every engine offers: run one function over many tasks, and hear how far they are.

A task says `advance(3)` when three more of its records or packs are done, and the caller of
`Engine.run` is told, whichever process that was in.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import ClassVar, Final, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

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


class Engine(ABC):
    """Runs tasks that depend on nothing but their arguments. Used as a context manager."""

    #: whether several engines work on one output at the same time, each on its share of the tasks
    IS_SHARED: ClassVar[bool] = False

    def __init__(self, workers: int) -> None:
        self.workers = workers

    @abstractmethod
    def run(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        listener: Advance | None = None,
    ) -> Iterator[Result]:
        """Results in any order. Function, tasks and results can be pickled; tasks are drawn only
        as they are needed, so that all of them need not fit in memory.

        The listener is called about once a second with how far tasks advanced.

        The first exception that a task raises is raised here; tasks not yet begun are dropped.
        """

    def share(self, tasks: Iterable[Task]) -> list[Task]:
        """The tasks that are this engine's to run, by their `number`; all, but where IS_SHARED."""
        return list(tasks)

    def close(self) -> None:  # noqa: B027 - an engine without resources has nothing to close
        """Release what the engine holds."""

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
