"""Memory that this machine has."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Final

#: Folder of control groups, and the file of a limit, by their controllers: of version 2, and of 1.
_LIMITS: Final = {
    "": ("/sys/fs/cgroup", "memory.max"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}


@functools.cache
def machine_memory() -> int:
    """Bytes of this machine's memory, or of its container's or job's where they have less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):  # no control groups: none of them has a limit
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers in _LIMITS:
                sizes += _limits(own, *_LIMITS[controllers])
    return min(sizes)


def _limits(own: str, folder: str, name: str) -> list[int]:
    """Limits of a control group and of the groups around it."""
    found = []
    for group in (Path(own), *Path(own).parents):
        with contextlib.suppress(OSError):  # a container does not see those around it
            text = Path(folder + str(group), name).read_text().strip()
            found += [int(text)] if text.isdecimal() else []  # "max": no limit
    return found
