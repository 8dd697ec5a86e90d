"""The memory of this machine."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Final

#: Folder and limit file of control groups, by their controllers: version 2, then version 1.
_LIMITS: Final = {
    "": ("/sys/fs/cgroup", "memory.max"),
    "memory": ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
}


@functools.cache
def machine_memory() -> int:
    """Return the bytes of this machine's memory, or fewer of its container or job."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with contextlib.suppress(OSError):  # no control groups: none of them has a limit
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if controllers not in _LIMITS:
                continue
            folder, name = _LIMITS[controllers]
            for group in (Path(own), *Path(own).parents):
                with contextlib.suppress(OSError):  # a container does not see outer groups
                    text = Path(folder + str(group), name).read_text().strip()
                    sizes += [int(text)] if text.isdecimal() else []  # "max": no limit
    return min(sizes)
