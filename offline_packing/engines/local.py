"""Interface of every engine: run one function over many tasks, and report progress; and the
engine on the processes of this machine.

A task says `advance(3)` when three more of its records or packs are done, and the caller of
`Engine.run` is told, whichever process that was in.
"""

import ctypes
import functools
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from itertools import chain, islice
from multiprocessing import resource_tracker
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeVar, cast

from offline_packing.errors import StageError
from offline_packing.storage.memory import machine_memory
from task_encoders.threads import ENDING, MAX_HOLD, finish, held_signals, result_of

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import Synchronized

Task = TypeVar("Task")
Result = TypeVar("Result")

#: f(n) is told that n further units of work are done.
Advance = Callable[[int], object]
SECONDS_BETWEEN_REPORTS: Final = 1.0

#: Tasks handed out per worker: one at work, one waiting.
TASKS_PER_WORKER = 2
#: A task may take at least this: one sample costs up to 1 GiB, and libraries reserve stacks.
_LEAST_TASK_BYTES: Final = 4 << 30
#: Spawned, not forked: the parent has threads (progress bar, arrow) that a fork breaks.
_SPAWN: Final = multiprocessing.get_context("spawn")

_LISTENER: Final[ContextVar[Advance | None]] = ContextVar("listener", default=None)


def advance(count: int = 1) -> None:
    """Report progress of a task, if there is a listener."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(count)


@contextmanager
def told_to(listener: Advance | None) -> Iterator[None]:
    """Send the progress of tasks that run in this block to a listener."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


class Engine(AbstractContextManager["Engine"]):
    """Runs tasks that depend on nothing but their arguments. Used as a context manager."""

    #: whether several engines work on one output at the same time, each on its share of the tasks
    IS_SHARED: ClassVar[bool] = False
    #: of this engine among them
    rank, world_size = 0, 1

    def __init__(self, workers: int) -> None:
        self.workers = workers

    @abstractmethod
    def run(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        listener: Advance | None = None,
    ) -> Iterator[Result]:
        """Yield results in any order. Function, tasks and results can be pickled; tasks are drawn
        only as they are needed, so that all of them need not fit in memory.

        The listener is called about once a second with how far tasks advanced.

        The first exception that a task raises is raised here; tasks not yet begun are dropped.
        """

    def share(self, tasks: Iterable[Any]) -> list[Any]:
        """Return the tasks that this engine runs, by their `number`."""
        return [task for task in tasks if task.number % self.world_size == self.rank]

    def close(self) -> None:
        """Release the engine's workers."""

    def __exit__(self, *error: object) -> None:
        self.close()


class LocalEngine(Engine):
    """A process pool, started with the first tasks and kept for later stages. A lone task runs here
    unless there is a pool: a process would start for longer than most of them take. 0 workers: no
    pool.

    The memory of a worker is bounded (RLIMIT_DATA: what files map does not count) by its share of
    the machine's, so that a task that takes more raises MemoryError, and the machine goes on. The
    calling process is not bounded.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._pool: ProcessPoolExecutor | None = None
        self._advanced: Synchronized[int] | None = None
        self._reported = 0

    def run(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        listener: Advance | None = None,
    ) -> Iterator[Result]:
        remaining = iter(tasks)
        first = list(islice(remaining, 2))
        remaining = chain(first, remaining)
        if self.workers == 0 or (self._pool is None and len(first) < 2):
            for task in remaining:
                with told_to(listener):
                    result = function(task)
                yield result
            return
        pending: set[Future[Result]] = set()
        try:
            while True:
                room = TASKS_PER_WORKER * self.workers - len(pending)
                pending |= {self._submit(function, task) for task in islice(remaining, room)}
                if not pending:
                    return
                with held_signals():
                    done, pending = wait(pending, SECONDS_BETWEEN_REPORTS, FIRST_COMPLETED)
                if listener is not None and self._advanced is not None:
                    # Without the lock, which a killed worker may hold.
                    before, self._reported = self._reported, self._advanced.get_obj().value
                    listener(self._reported - before)
                for future in done:
                    yield result_of(future)
        except BrokenProcessPool as error:
            self.close()
            raise StageError(
                "a worker process died, perhaps for lack of memory; "
                "run again with fewer engine.workers"
            ) from error
        except Exception:
            finish(pending)  # nothing of this is at work when the next tasks are
            raise

    def close(self) -> None:
        if self._pool is None:
            return
        with held_signals():
            manager: threading.Thread | None = cast(Any, self._pool)._executor_manager_thread
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        while manager is not None and manager.is_alive():  # tasks at work end first
            with held_signals():
                manager.join(MAX_HOLD)

    def __exit__(self, *error: object) -> None:
        if self._pool is not None and not isinstance(error[1], Exception | None):
            # A signal: tasks at work are not waited for, they leave nothing half-written.
            for worker in [*cast(Any, self._pool)._processes.values()]:
                worker.kill()
        self.close()

    def _submit(self, function: Callable[[Task], Result], task: Task) -> "Future[Result]":
        with held_signals():
            return self._executor().submit(_run_task, function, task)

    def _executor(self) -> ProcessPoolExecutor:
        if self._pool is None:
            _start_quiet_tracker()
            self._advanced, self._reported = _SPAWN.Value(ctypes.c_int64, 0), 0
            task_bytes = max(_LEAST_TASK_BYTES, machine_memory() // self.workers)
            self._pool = ProcessPoolExecutor(
                self.workers,
                _SPAWN,
                initializer=_start_worker,
                initargs=(self._advanced, task_bytes),
            )
        return self._pool


def _run_task(function: Callable[[Task], Result], task: Task) -> Result:
    """Run a task. An error that cannot be sent to the parent is replaced by one that can."""
    try:
        return function(task)
    except MemoryError as error:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        raise StageError(
            f"a task takes more memory than its share of {limit:,} bytes ({error or 'MemoryError'})"
            "; run again with fewer engine.workers"
        ) from error
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - whatever pickling raises
            raise StageError(f"{type(error).__name__}: {error}") from error
        raise


def _start_quiet_tracker() -> None:
    """Start multiprocessing's resource tracker, which removes the semaphores of a killed parent; so
    that it prints no warning about them, and survives a closed terminal as it does Ctrl-C."""
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")  # which it inherits
    try:
        with held_signals():
            resource_tracker.ensure_running()
    finally:
        sys.warnoptions.pop()


def _start_worker(advanced: "Synchronized[int]", task_bytes: int) -> None:
    """Leave Ctrl-C and a closed terminal to the parent, which then ends its workers; no worker
    outlives a killed parent, or takes more memory than this."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = task_bytes if hard == resource.RLIM_INFINITY else min(task_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    warnings.filterwarnings("ignore", module=r"PIL\.")  # as the command line does
    _LISTENER.set(functools.partial(_add, advanced))


def _add(advanced: "Synchronized[int]", count: int) -> None:
    with advanced.get_lock():
        advanced.value += count


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
