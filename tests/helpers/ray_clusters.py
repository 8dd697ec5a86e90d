"""Processes of a Ray cluster that a test started.

Run as a module, this is a driver whose tasks do not end: Ray ends the process of a driver some time
after its head is lost, so that no test can be one.

    RAY_ADDRESS=... python -m tests.helpers.ray_clusters FOLDER
"""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from offline_packing.engines.ray_cluster import RayEngine
from offline_packing.errors import StageError


def kill_processes(name: str) -> None:
    """Kill the processes that this one started, or their children, whose command has a name. Waits
    for one: Ray starts them when it can."""
    while not (found := _find_processes(name)):
        time.sleep(0.1)
    for pid in found:
        with suppress(ProcessLookupError):  # some end with the one before
            os.kill(pid, signal.SIGKILL)


def _find_processes(name: str) -> list[int]:
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    )
    lines = [line.split(None, 2) for line in listed.stdout.splitlines()[1:]]
    ours = {os.getpid()}
    for _ in range(4):
        ours |= {int(pid) for pid, parent, _ in lines if int(parent) in ours}
    ours.remove(os.getpid())  # pytest -k may name it, too
    return [int(pid) for pid, _, command in lines if int(pid) in ours and name in command]


@contextmanager
def nodes_apart(folder: Path, count: int) -> Iterator[Any]:
    """Start a cluster that drivers find while the block runs: `count` nodes of one CPU, each with a
    scratch folder of its own under `folder`, beside a head without any."""
    from ray.cluster_utils import Cluster

    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    with patch.dict(os.environ, settings):
        head = {"num_cpus": 0, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            folder.mkdir()
            for _ in range(count):
                with patch.dict(os.environ, {"TMPDIR": tempfile.mkdtemp(dir=folder)}):
                    cluster.add_node(num_cpus=1)
            with patch.dict(os.environ, {"RAY_ADDRESS": cluster.address}):
                yield cluster
        finally:
            cluster.shutdown()


def kill_node_when(cluster: Any, *moments: Callable[[], bool]) -> threading.Thread:
    """Kill a node as soon as each of some moments has come, one after another."""

    def watch() -> None:
        for has_come in moments:
            while not has_come():
                time.sleep(0.1)
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


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
