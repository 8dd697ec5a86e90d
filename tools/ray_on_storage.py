"""Pack from and to object storage on a Ray cluster whose nodes share no folder and die on the way.

    python -m tools.ray_on_storage [--samples 100_000] [--nodes 3] [--folder FOLDER]

Generated dialogues, half of them about one of 1,000 black pictures, lie in tars on a server of
moto. They are packed by local processes to a folder, and by a cluster of nodes of one CPU to the
server; in each stage that has tasks a node is killed while it works on one, and another takes its
place afterwards. What was written must be the same. Printed are, of each stage, processor and wall
seconds, the peaks of the driver's memory and of a local worker's, and on Ray the requests of all.
"""

import argparse
import io
import os
import re
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from tests.helpers.object_store import ObjectStore, serve_objects
from tests.helpers.ray_clusters import add_node, nodes_apart
from tools.benchmarks.scale_test import PICTURES, black_pictures, descendants, run_stage

_SAMPLES_PER_TAR = 1000
_BUCKET = "data"
#: Seconds for which a node has worked on a task when it is killed.
_SECONDS_AT_WORK = 0.3
_PART_BYTES = 8 << 20


def tars(num_samples: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of each tar."""
    rng = np.random.default_rng(0)
    shown = [*black_pictures(rng)]
    words = np.array(["red", "dog", "tall", "hill", "old", "car", "sea"])
    for first in range(0, num_samples, _SAMPLES_PER_TAR):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as tar:
            for number in range(first, min(num_samples, first + _SAMPLES_PER_TAR)):
                length = int(np.clip(rng.lognormal(3.6, 0.8), 4, 600))
                answer = " ".join(rng.choice(words, length))
                question = "<image>\nSay what it is." if number % 2 else "Say something."
                turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
                members = {"json": orjson.dumps({"conversations": turns})}
                if number % 2:
                    members["jpg"] = shown[number % PICTURES]
                for part, data in members.items():
                    member = tarfile.TarInfo(f"{number:08d}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
        yield f"records-{first:08d}.tar", buffer.getvalue()


def configuration(output: str, engine: str, workers: int) -> bytes:
    """A run of the tars to an output."""
    source = {"format": "webdataset", "path": f"s3://{_BUCKET}/source", "task": "bmr"}
    return orjson.dumps(
        {
            "source": [source],
            "model": {"family": "qwen2_vl", "processor": "builtin"},
            "output": {"path": output, "packs_per_shard": 200},
            "engine": {"name": engine, "workers": workers},
        }
    )


def run_locally(folder: Path) -> None:
    """All stages on local processes."""
    config = folder / "local.yaml"
    config.write_bytes(configuration(str(folder / "local"), "local", 2))
    for stage in ("measure", "plan", "write", "verify"):
        run_stage(f"local {stage}", stage, str(config))


def run_on_ray(folder: Path, store: ObjectStore, num_nodes: int) -> None:
    """The same on a cluster, whose nodes die."""
    config = folder / "ray.yaml"
    config.write_bytes(configuration(f"s3://{_BUCKET}/ray", "ray", 0))
    with nodes_apart(folder / "nodes", num_nodes) as cluster:
        for stage in ("measure", "plan", "write", "verify"):
            store.set_faults()
            with dying_node(cluster, stage):
                run_stage(f"ray {stage}", stage, str(config))
            for _ in range(num_nodes - len(cluster.worker_nodes)):
                add_node(cluster, folder / "nodes")
            counts = {name: count for name, count in store.counts().items() if count}
            print(f"{'':<20}{counts}", flush=True)


@contextmanager
def dying_node(cluster: Any, stage: str) -> Iterator[None]:
    """While the block runs, kill the first node that works on a task; plan has no tasks. Raises
    SystemExit if there was none to kill."""
    ended = threading.Event()
    killed: list[float] = []

    def watch() -> None:
        start = time.perf_counter()
        while not ended.wait(0.05):
            for node in list(cluster.worker_nodes):
                if works(node) and not ended.wait(_SECONDS_AT_WORK) and works(node):
                    cluster.remove_node(node, allow_graceful=False)
                    killed.append(time.perf_counter() - start)
                    return

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if stage != "plan":
        if not killed:
            raise SystemExit(f"{stage}: it ended before a node could be killed")
        print(f"{'':<20}a node was killed after {killed[0]:.1f} s", flush=True)


def works(node: Any) -> bool:
    """Whether a worker of a node has a task, after whose function it is named; agents and actors
    are named after classes."""
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in descendants(raylet):
        with suppress(OSError):
            if re.match(rb"ray::[a-z]", Path(f"/proc/{pid}/cmdline").read_bytes()):
                return True
    return False


def compare(local: Path, store: ObjectStore, url: str) -> tuple[int, int]:
    """Number and bytes of the objects. Raises SystemExit if they are not the files of a folder."""
    names = [str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()]
    names = sorted(name for name in names if name != "_packing/lock")
    if (found := store.keys(url)) != names:
        raise SystemExit(f"only one has {sorted(set(names) ^ set(found))[:5]}")
    num_bytes = 0
    for name in names:
        data = (local / name).read_bytes()
        if store.read(f"{url}/{name}") != data:
            raise SystemExit(f"{name} differs")
        num_bytes += len(data)
    return len(names), num_bytes


def main() -> None:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="where to work")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as name,
        serve_objects(_PART_BYTES) as store,
    ):
        folder = Path(name)
        os.environ.update(store.environment)
        store.make_bucket(_BUCKET)
        for tar, data in tars(arguments.samples):
            store.client.put_object(Bucket=_BUCKET, Key=f"source/{tar}", Body=data)
        run_locally(folder)
        run_on_ray(folder, store, arguments.nodes)
        count, num_bytes = compare(folder / "local", store, f"s3://{_BUCKET}/ray")
        left = store.unfinished_uploads(_BUCKET)
        if left:
            raise SystemExit(f"unfinished uploads: {left}")
        print(f"{count:,} objects, {num_bytes:,} bytes, are those of local processes")


if __name__ == "__main__":
    main()
