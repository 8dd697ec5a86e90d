"""One rank of a slurm array, or of any launcher that numbers its processes.

Rank r of n has the tasks whose number is r modulo n, on the processes of its own machine. Ranks
neither wait for nor talk to each other. Each leaves markers of its finished tasks in the output
folder; when all ranks are done, running the stage once more completes it (launch/pack_slurm.sh).
"""

import logging
import os
from collections.abc import Mapping
from typing import ClassVar, Final

from offline_packing.engines.local import LocalEngine
from offline_packing.errors import ConfigError

logger = logging.getLogger(__name__)

_OWN: Final = ("PACKING_RANK", "PACKING_WORLD_SIZE")
#: Set in every array task. Of a part that is submitted again, they describe that part.
_ARRAY: Final = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT")
#: Set in the processes of srun. A batch script has SLURM_PROCID=0 and SLURM_NTASKS as well, but
#: is one process whatever these say.
_STEP: Final = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")


class SlurmEngine(LocalEngine):
    """A share of the tasks, on local processes."""

    IS_SHARED: ClassVar[bool] = True

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self.rank, self.world_size = find_rank(os.environ)
        logger.info("rank %d of %d", self.rank, self.world_size)


def find_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Find (rank, number of ranks) of this process: what PACKING_RANK and PACKING_WORLD_SIZE say,
    else its place in a slurm array, among the processes of srun, or in an array of sruns.

    The indices of an array may begin anywhere and have a step: 8, 10, 12 are ranks 0, 1, 2 of 3.
    Raises ConfigError if none of these is set, or they are not a rank and a size.
    """
    if _OWN[0] in environment:
        return _pair(environment, _OWN)
    if _ARRAY[0] in environment:
        rank, world_size = _array_rank(environment)
        process, processes = _pair(environment, _STEP) if _STEP[1] in environment else (0, 1)
        return rank * processes + process, world_size * processes
    if _STEP[1] in environment:
        return _pair(environment, _STEP)
    raise ConfigError(
        "engine.name=slurm needs a rank: start it with launch/pack_slurm.sh or srun, or set "
        "PACKING_RANK and PACKING_WORLD_SIZE"
    )


def _array_rank(environment: Mapping[str, str]) -> tuple[int, int]:
    """Find the place of an array task among the tasks that were submitted with it."""
    first = environment.get("SLURM_ARRAY_TASK_MIN", "0")
    step = environment.get("SLURM_ARRAY_TASK_STEP", "1")
    index, count = (environment.get(name, "") for name in _ARRAY)
    last = environment.get("SLURM_ARRAY_TASK_MAX")
    if all(value.isdecimal() for value in (first, step, index, count)) and int(step) > 0:
        rank, off = divmod(int(index) - int(first), int(step))
        is_regular = last is None or int(last) - int(first) == (int(count) - 1) * int(step)
        if off == 0 and 0 <= rank < int(count) and is_regular:
            return rank, int(count)
    raise ConfigError(
        f"{_ARRAY[0]}={index!r} of {_ARRAY[1]}={count!r} (from {first} to {last}) gives no rank; "
        "submit a range of indices (--array=0-7), or set PACKING_RANK and PACKING_WORLD_SIZE"
    )


def _pair(environment: Mapping[str, str], names: tuple[str, str]) -> tuple[int, int]:
    rank, world_size = (environment.get(name, "") for name in names)
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise ConfigError(
            f"{names[0]}={rank!r} and {names[1]}={world_size!r} are not a rank and the number of "
            "ranks; set PACKING_RANK and PACKING_WORLD_SIZE"
        )
    return int(rank), int(world_size)
