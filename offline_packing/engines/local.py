"""Tasks on the processes of this machine."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice

from offline_packing.engines.base import Engine, Result, Task
from offline_packing.errors import StageError

#: Tasks handed out per worker: one at work, one waiting.
_TASKS_PER_WORKER = 2


class LocalEngine(Engine):
    """A process pool, started with the first task and kept for later stages. 0 workers: no pool."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._pool: ProcessPoolExecutor | None = None

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        if self.workers == 0:
            yield from map(function, tasks)
            return
        remaining = iter(tasks)
        pending: set[Future[Result]] = set()
        try:
            while True:
                room = _TASKS_PER_WORKER * self.workers - len(pending)
                pending |= {
                    self._executor().submit(function, task) for task in islice(remaining, room)
                }
                if not pending:
                    return
                done, pending = wait(pending, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        except BrokenProcessPool as error:
            self.close()
            raise StageError(
                "a worker process died, perhaps for lack of memory; "
                "run again with fewer engine.workers"
            ) from error
        finally:
            for future in pending:
                future.cancel()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _executor(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Spawned, not forked: the parent has threads (progress bar, arrow) that a fork breaks.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.workers, context, initializer=_start_worker)
        return self._pool


def _start_worker() -> None:
    """Ctrl-C ends a worker without a traceback, and no worker outlives a killed parent."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
