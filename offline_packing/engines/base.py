"""What every engine offers: run one function over many tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class Engine(ABC):
    """Runs tasks that depend on nothing but their arguments. Used as a context manager."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    @abstractmethod
    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Results in any order. Function, tasks and results can be pickled; tasks are drawn only
        as they are needed, so that all of them need not fit in memory.

        The first exception that a task raises is raised here; tasks not yet begun are dropped.
        """

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
