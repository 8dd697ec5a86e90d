"""Use threads safely in a process whose signal handlers raise exceptions.

Such an exception may come between the acquiring of a lock and the `with` block that releases it, as
in `threading.Condition.__enter__`, or between two locks of `concurrent.futures.wait`. The lock then
stays acquired, and another thread, which somebody waits for, waits for it forever. So signals wait
while this process waits for a thread, for a second at most.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final, ParamSpec, TypeVar

#: Signals that end a process, and that handlers raise exceptions for.
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Seconds for which signals are held at most while something is waited for.
MAX_HOLD: Final = 1.0

Item = TypeVar("Item")
Result = TypeVar("Result")
Given = ParamSpec("Given")


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold back signals until the block ends. A process started inside inherits that they are
    blocked: a worker takes none before it can end without the traceback of a half-done import, nor
    while its pool is starting others, which would break the pool. Here they are blocked in one
    thread: another one takes them, and Python still calls the handler in the main one, which must
    neither leave a half-started worker nor a lock that nobody releases."""
    came: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {one: signal.getsignal(one) for one in ENDING if is_main}
    handlers = {one: handler for one, handler in handlers.items() if callable(handler)}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        for one in handlers:
            signal.signal(one, lambda number, frame: came.append(number))
        yield
    finally:
        for one, handler in handlers.items():
            signal.signal(one, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number in came:
            signal.raise_signal(number)


def submit(
    pool: ThreadPoolExecutor,
    function: Callable[Given, Result],
    *args: Given.args,
    **kwargs: Given.kwargs,
) -> "Future[Result]":
    """Call `pool.submit(function, …)`, which may start a thread and wait for it."""
    with held_signals():
        return pool.submit(function, *args, **kwargs)


def result_of(future: "Future[Result]") -> Result:
    """Wait for `future.result()`."""
    finish([future])
    with held_signals():
        return future.result()


def finish(futures: Collection["Future[Result]"]) -> None:
    """Wait until all are done."""
    while futures:
        with held_signals():
            futures = wait(futures, MAX_HOLD).not_done


def map_in(
    pool: ThreadPoolExecutor, function: Callable[..., Result], *iterables: Iterable[Any]
) -> Iterator[Result]:
    """Call `pool.map(function, *iterables)`."""
    begun = [submit(pool, function, *each) for each in zip(*iterables, strict=False)]
    return map(result_of, begun)


def in_threads(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    num_threads: int,
    ahead: int | None = None,
) -> Iterator[Result]:
    """Run `map(function, items)` on threads, in order. At most `ahead` items (None: all) are begun
    before the first of them is used. What is at work is waited for if one raises, or the iterator
    is closed."""
    rest = iter(items)
    pool = ThreadPoolExecutor(num_threads)
    begun: deque[Future[Result]] = deque()
    try:
        begun.extend(submit(pool, function, item) for item in islice(rest, ahead))
        while begun:
            result = result_of(begun.popleft())
            begun.extend(submit(pool, function, item) for item in islice(rest, 1))
            yield result
    finally:
        with held_signals():
            at_work = [one for one in begun if not one.cancel()]
            pool.shutdown(wait=False)
        finish(at_work)
