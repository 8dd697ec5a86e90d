"""Nodes of a Ray cluster die while tasks run on them, with sources and output in object storage; a
lost cluster is named."""

import re
import subprocess
import sys
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from offline_packing.engines import Engine
from offline_packing.engines.local import LocalEngine
from offline_packing.engines.ray_cluster import RayEngine
from offline_packing.runs.run import Run
from offline_packing.verify.verify import verify
from tests.helpers.datasets import make_config, pack_all, vqa_pairs
from tests.helpers.object_store import ObjectStore
from tests.helpers.ray_clusters import kill_node_when, kill_processes, nodes_apart

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")

CASES = Path(__file__).with_name("cases_of_ray_cluster.py")
GAVE_UP = ("The current node timed out during startup", "Failed to get the system config from rayl")


def test_ray_cluster() -> None:
    """The cases in a process of their own, and again where Ray gave up.

    On a busy machine a raylet may not answer for 30 s after its start, and `ray.init` fails, or for
    the 20 s of a gRPC connection of the driver (SIGSTOP shows it), and Ray ends its process with no
    error to catch: a worker of pytest would die with it. No setting of Ray gives more time.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    for _ in range(5):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not any(line in done.stdout + done.stderr for line in GAVE_UP):
            break
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["gcs_server", "raylet/raylet"])
@pytest.mark.exhaustive
def test_a_cluster_that_is_lost(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.helpers.ray_clusters", str(tmp_path)]
    with (
        nodes_apart(tmp_path / "nodes", 1),
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as driver,
    ):
        deadline = time.monotonic() + 120
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline, "no task began"
            time.sleep(0.1)
        kill_processes(name)
        _, errors = driver.communicate(timeout=180)
    said = [line for line in errors.splitlines() if line.startswith("StageError: ")]
    assert len(said) == 1, errors
    assert re.match(r"StageError: the Ray cluster is lost: .*run again", said[0])
    assert driver.returncode == 1


#: Folders of what the tasks of a stage write.
STAGES = ("_packing/index", "_packing/write")
NODES = 3


def has_begun(store: ObjectStore, stage: str) -> bool:
    """Whether a stage has written anything."""
    return any(not key.startswith("_") for key in store.keys(stage))


@pytest.mark.exhaustive
def test_nodes_without_a_common_folder(
    object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    vqa_pairs(tmp_path / "data", 240)
    object_store.put_folder(tmp_path / "data", f"{bucket}/data")
    source = {"format": "pairs", "path": f"{bucket}/data", "task": "vqa"}
    sections: dict[str, Any] = {"engine": {"workers": 0, "samples_per_part": 20}}

    def run_to(name: str, engine: Engine) -> Run:
        output = {"path": f"{bucket}/{name}", "packs_per_shard": 4}
        return Run(make_config(source, Path(), output=output, **sections), engine)

    pack_all(run_to("local", LocalEngine(0)))
    begun = (partial(has_begun, object_store, f"{bucket}/ray/{stage}") for stage in STAGES)
    with nodes_apart(tmp_path / "nodes", NODES) as nodes:
        killer = kill_node_when(nodes, *begun)
        with RayEngine(1) as engine:
            pack_all(run_to("ray", engine))
            assert verify(run_to("ray", engine)).ok
        killer.join(timeout=300)
        assert not killer.is_alive(), "no node was killed"
        assert len(nodes.worker_nodes) == NODES - len(STAGES)
    local, ray = (object_store.objects(f"{bucket}/{name}") for name in ("local", "ray"))
    assert len(local) > 20
    assert ray == local
