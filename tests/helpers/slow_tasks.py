"""Tasks that end only when somebody has heard of their beginning."""

import time
from pathlib import Path

from offline_packing.engines.local import Engine, advance

STEPS = 4


def slow_task(folder: Path) -> int:
    """Four steps, of which the last is taken when the caller has heard of the first."""
    for step in range(STEPS):
        advance()
        deadline = time.monotonic() + 300
        while step == STEPS - 2 and not (folder / "heard").exists():
            assert time.monotonic() < deadline, "nobody heard of the first steps"
            time.sleep(0.02)
    return STEPS


def check_progress(engine: Engine, folder: Path) -> None:
    """Two tasks tell their progress while they are at work, and all of it in the end."""
    told: list[int] = []

    def listen(count: int) -> None:
        told.append(count)
        if sum(told):
            (folder / "heard").touch()

    assert list(engine.run(slow_task, [folder] * 2, listen)) == [STEPS] * 2
    assert sum(told) == 2 * STEPS
    assert sum(count > 0 for count in told) >= 2
