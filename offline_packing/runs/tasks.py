"""Which tasks of a stage are done, and which of the others this process is to run.

A task is done when its marker exists: the file that it writes last. An engine that shares tasks
with other ranks runs its share of the remaining ones and ends; a run that has the output to itself
completes the stage.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from offline_packing.errors import ShareDoneError
from offline_packing.runs.run import Run

logger = logging.getLogger(__name__)

Task = TypeVar("Task")


def unfinished(stage: str, tasks: Sequence[Task], marker: Callable[[Task], Path]) -> list[Task]:
    """The tasks that are not done, in order; `Engine.share` assigns them to ranks."""
    left = _left(tasks, marker)
    if left and len(left) < len(tasks):
        num_done = len(tasks) - len(left)
        logger.info("%s: %d of %d tasks are done already", stage, num_done, len(tasks))
    return left


def check_all_done(
    run: Run, stage: str, tasks: Sequence[Task], marker: Callable[[Task], Path]
) -> None:
    """Leave completing the stage to a separate run if ranks share it.

    Raises:
        ShareDoneError: this rank's tasks are done.
    """
    if run.engine.IS_SHARED:
        left = len(_left(tasks, marker))
        raise ShareDoneError(
            f"this rank's share of {stage} is done, {left} of {len(tasks)} tasks are left to other "
            f"ranks; after them, run {stage} with engine.name=local to complete it"
        )


def _left(tasks: Sequence[Task], marker: Callable[[Task], Path]) -> list[Task]:
    return [task for task in tasks if not marker(task).exists()]
