"""Says once that the planner compiles, so that the first run is not taken for a hang."""

import logging
from functools import cache
from pathlib import Path

from offline_packing.planner.strategies import histogram

logger = logging.getLogger(__name__)


@cache
def announce_compilation() -> None:
    """Log, once per process, that the kernels are not in numba's cache yet, and where it is.

    numba writes an index file per compiled function; one that is older than the source is stale.
    """
    folder = Path(histogram.count_lengths.stats.cache_path)
    compiled = [file.stat().st_mtime for file in folder.glob("histogram.count_lengths-*.nbi")]
    source = Path(histogram.__file__).stat().st_mtime
    if not compiled or max(compiled) < source:
        logger.info(
            "compiling the planner; this takes 10 to 30 seconds the first time, then it is read "
            "from %s",
            folder,
        )
