"""Which tasks of a stage are done, and which of the others are this process's to run.

A task is done when its marker is there: the file that it writes last. An engine that shares tasks
with other ranks runs its share of what is left and ends; the stage is completed by a run that has
the output to itself.
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
    """The tasks that are not done, in order; `Engine.share` says which of them are whose."""
    left = _left(tasks, marker)
    if left and len(left) < len(tasks):
        num_done = len(tasks) - len(left)
        logger.info("%s: %d of %d tasks are done already", stage, num_done, len(tasks))
    return left


def check_all_done(
    run: Run, stage: str, tasks: Sequence[Task], marker: Callable[[Task], Path]
) -> None:
    """Leave the stage to a run of its own where ranks share it.

    Raises:
        ShareDoneError: this rank's tasks are done.
    """
    if run.engine.IS_SHARED:
        left = len(_left(tasks, marker))
        raise ShareDoneError(
            f"this rank's share of {stage} is done, {left} of {len(tasks)} tasks are left to other "
            f"ranks; when none is, run {stage} with engine.name=local to complete it"
        )


def _left(tasks: Sequence[Task], marker: Callable[[Task], Path]) -> list[Task]:
    return [task for task in tasks if not marker(task).exists()]
