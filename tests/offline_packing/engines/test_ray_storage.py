"""A Ray cluster whose nodes share no folder: sources and output lie in object storage."""

import threading
import time
from collections.abc import Iterator
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

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.55'")

#: What lies in the output once a stage has begun.
STAGES = ("_packing/index/part-", "_packing/write/")
NODES = 3


@pytest.fixture
def cluster(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """A cluster of nodes of one CPU, each with a scratch folder of its own."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    try:
        for number in range(NODES):
            (tmp_path / f"node{number}").mkdir()
            monkeypatch.setenv("TMPDIR", str(tmp_path / f"node{number}"))
            cluster.add_node(num_cpus=1)
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()


def kill_in_each_stage(cluster: Any, store: ObjectStore, output: str) -> threading.Thread:
    """Kill a node as soon as a stage's first object is there."""

    def watch() -> None:
        for begun in STAGES:
            while not any(key.startswith(begun) for key in store.keys(output)):
                time.sleep(0.1)
            cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.exhaustive
def test_nodes_without_a_common_folder(
    cluster: Any, object_store: ObjectStore, bucket: str, tmp_path: Path
) -> None:
    vqa_pairs(tmp_path / "data", 240)
    object_store.put_folder(tmp_path / "data", f"{bucket}/data")
    source = {"format": "pairs", "path": f"{bucket}/data", "task": "vqa"}
    sections: dict[str, Any] = {"engine": {"workers": 0, "samples_per_part": 20}}

    def run_to(name: str, engine: Engine) -> Run:
        output = {"path": f"{bucket}/{name}", "packs_per_shard": 4}
        return Run(make_config(source, Path(), output=output, **sections), engine)

    pack_all(run_to("local", LocalEngine(0)))
    killer = kill_in_each_stage(cluster, object_store, f"{bucket}/ray")
    with RayEngine(1) as engine:
        pack_all(run_to("ray", engine))
        assert verify(run_to("ray", engine)).ok
    killer.join(timeout=60)
    assert len(cluster.worker_nodes) == NODES - len(STAGES)
    local, ray = (object_store.objects(f"{bucket}/{name}") for name in ("local", "ray"))
    assert len(local) > 20
    assert ray == local
