"""A Ray cluster whose nodes share no folder: sources and output lie in object storage."""

from collections.abc import Iterator
from functools import partial
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
from tests.helpers.ray_clusters import kill_node_when, nodes_apart

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray>=2.55'")

#: Folders of what the tasks of a stage write.
STAGES = ("_packing/index", "_packing/write")
NODES = 3


@pytest.fixture
def cluster(object_store: ObjectStore, tmp_path: Path) -> Iterator[Any]:
    """Three nodes, whose tasks know the object storage."""
    with nodes_apart(tmp_path / "nodes", NODES) as cluster:
        yield cluster


def has_begun(store: ObjectStore, stage: str) -> bool:
    """Whether a stage has written anything."""
    return any(not key.startswith("_") for key in store.keys(stage))


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
    begun = (partial(has_begun, object_store, f"{bucket}/ray/{stage}") for stage in STAGES)
    killer = kill_node_when(cluster, *begun)
    with RayEngine(1) as engine:
        pack_all(run_to("ray", engine))
        assert verify(run_to("ray", engine)).ok
    killer.join(timeout=300)
    assert not killer.is_alive(), "no node was killed"
    assert len(cluster.worker_nodes) == NODES - len(STAGES)
    local, ray = (object_store.objects(f"{bucket}/{name}") for name in ("local", "ray"))
    assert len(local) > 20
    assert ray == local
