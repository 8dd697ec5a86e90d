"""Signals whose handlers raise leave no worker half-started, and no lock acquired for ever."""

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from offline_packing.cli.main import EndedBySignal, signals_raise
from offline_packing.engines.local import LocalEngine
from offline_packing.storage.files import read_each
from task_encoders.storage.paths import path_of
from task_encoders.threads import held_signals


@pytest.fixture
def handlers() -> Iterator[None]:
    """Those of this process come back; after a signal they would stay as they are."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_signal_to_another_thread_waits_for_a_worker_to_start() -> None:
    """Only one thread blocks it: another one takes it, and the handler runs in the main thread."""
    steps, begun = [], threading.Event()

    def take() -> None:
        begun.wait()
        signal.raise_signal(signal.SIGTERM)

    def hold() -> None:
        other = threading.Thread(target=take)
        other.start()
        with held_signals():
            begun.set()
            other.join()
            steps.append("worker started")
        steps.append("signal lost")

    with pytest.raises(EndedBySignal), signals_raise():
        hold()
    assert steps == ["worker started"]


def run_tasks() -> None:
    with LocalEngine(2) as engine:
        list(engine.run(time.sleep, [0.02] * 8, lambda count: None))


def read_objects() -> None:
    list(read_each(path_of("memory://objects"), time.sleep, [0.02] * 20))


def signal_in(function: str) -> None:
    """Send SIGTERM at the moment at which a lock is acquired in a function of this thread."""

    def look(frame: FrameType | None, event: str, called: Any) -> None:
        if event != "c_return" or called.__name__ not in ("acquire", "__enter__"):
            return
        if not isinstance(called.__self__, _thread.LockType | _thread.RLock):
            return
        while frame is not None and frame.f_code.co_qualname != function:
            frame = frame.f_back
        if frame is not None:
            sys.setprofile(None)
            os.write(1, b"signal\n")
            os.kill(os.getpid(), signal.SIGTERM)

    sys.setprofile(look)


@pytest.mark.parametrize(
    ("work", "function"),
    [("run_tasks", "_AcquireFutures.__enter__"), ("read_objects", "Future.result")],
)
def test_no_lock_stays_acquired(work: str, function: str) -> None:
    """Between the acquiring of a lock and the block that releases it, an exception would leave it
    acquired; then a pool that waits for it, and all who wait for the pool, would wait for ever."""
    program = f"""
from offline_packing.cli.main import EndedBySignal, signals_raise
from tests.task_encoders.test_threads import {work}, signal_in
try:
    with signals_raise():
        signal_in({function!r})
        {work}()
except EndedBySignal:
    print("ended")
"""
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.split() == ["signal", "ended"]
    assert run.stderr == ""
