"""Processes of a Ray cluster that a test started.

Run as a module, this is a driver whose tasks do not end: Ray ends the process of a driver some time
after its head is lost, so that no test can be one.

    RAY_ADDRESS=... python -m tests.helpers.ray_clusters FOLDER
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from offline_packing.engines.ray_cluster import RayEngine
from offline_packing.errors import StageError


def kill_processes(name: str) -> None:
    """Kill the processes that this one started, or their children, whose command has a name. Waits
    for one: Ray starts them when it can."""
    while not (found := _find_processes(name)):
        time.sleep(0.1)
    for pid in found:
        os.kill(pid, signal.SIGKILL)


def _find_processes(name: str) -> list[int]:
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    ours = {os.getpid()}
    for _ in range(4):
        ours |= {int(pid) for pid, parent, _ in lines if int(parent) in ours}
    return [int(pid) for pid, _, command in lines if int(pid) in ours and name in command]


def linger(folder: Path) -> None:
    """Leave a file, and go on for longer than any test waits."""
    (folder / "begun").touch()
    time.sleep(600)


def main() -> None:
    folder = Path(sys.argv[1])
    try:
        with RayEngine(1) as engine:
            list(engine.run(linger, [folder] * 4, lambda count: None))
    except StageError as error:
        sys.exit(f"StageError: {error}")


if __name__ == "__main__":
    main()
