"""One rank of a slurm array, or of any launcher that numbers its processes.

Rank r of n runs the tasks whose number is r modulo n, on the processes of its own machine. Ranks
neither wait for nor talk to each other: each leaves the markers of its finished tasks in the output
folder, and the stage is completed by running it once more when all are done; see
launch/pack_slurm.sh.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Final

from offline_packing.engines.base import Result, Task
from offline_packing.engines.local import LocalEngine
from offline_packing.errors import ConfigError, ShareDoneError

logger = logging.getLogger(__name__)

#: Where rank and number of ranks are looked for, in this order.
_VARIABLES: Final = (
    ("PACKING_RANK", "PACKING_WORLD_SIZE"),
    ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)


class SlurmEngine(LocalEngine):
    """A share of the tasks, on local processes."""

    IS_SHARED: ClassVar[bool] = True

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.rank, self.world_size = find_rank(os.environ)
        logger.info("rank %d of %d", self.rank, self.world_size)

    def owns(self, task: Any) -> bool:
        return int(task.number) % self.world_size == self.rank

    def run(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """The results of this rank's tasks.

        Raises:
            ShareDoneError: they are done, and there are tasks of other ranks.
        """
        left = 0

        def own_tasks() -> Iterator[Task]:
            nonlocal left
            for task in tasks:
                if self.owns(task):
                    yield task
                else:
                    left += 1

        yield from super().run(function, own_tasks())
        if left:
            raise ShareDoneError(
                f"rank {self.rank} of {self.world_size} has done its share; {left} tasks are left "
                "to other ranks; run again when all are done"
            )


def find_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """(rank, number of ranks) of this process, from the first pair of variables that is set.

    Raises:
        ConfigError: neither is set, or they are no rank and size.
    """
    for names in _VARIABLES:
        if names[0] in environment:
            rank, world_size = (environment.get(name, "") for name in names)
            if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
                raise ConfigError(
                    f"{names[0]}={rank!r} and {names[1]}={world_size!r} are no rank and number of "
                    "ranks; number an array from 0, or set PACKING_RANK and PACKING_WORLD_SIZE"
                )
            return int(rank), int(world_size)
    raise ConfigError(
        "engine.name=slurm needs a rank: start it with launch/pack_slurm.sh, or set PACKING_RANK "
        "and PACKING_WORLD_SIZE"
    )
