"""Fixtures of all tests."""

import gc
import json
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import xxhash

from tests.helpers import quick_imports
from tests.helpers.object_store import ObjectStore, serve_objects

if TYPE_CHECKING:
    from tests.world import World


ROOT = Path(__file__).parents[1]


def _keep_kernels() -> None:
    """Have numba keep compiled kernels in a folder of the user's, named by what the planner's files
    hold: numba itself looks at the file of a kernel, not at those of the kernels that it calls.
    Each is compiled once on a machine, whichever checkout's tests, or what they start, need it."""
    kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "offline-packing-tests")
    digest = xxhash.xxh3_64()
    for path in sorted((ROOT / "offline_packing/planner").rglob("*.py")):
        digest.update(path.read_bytes())
    folder = kept / digest.hexdigest()
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    for left in sorted(kept.iterdir(), key=lambda path: path.stat().st_mtime)[:-10]:
        shutil.rmtree(left, ignore_errors=True)
    os.environ["NUMBA_CACHE_DIR"] = str(folder)
    os.environ["NUMBA_CACHE_LOCATOR_CLASSES"] = "tests.helpers.kernel_cache.ByName"
    os.environ["PYTHONPATH"] = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")


if "NUMBA_CACHE_DIR" not in os.environ:
    _keep_kernels()
#: Megatron compiles some functions when it is imported, which takes 3 s of each process.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
#: Ray gives its workers the lowest priority but four; beside other tests they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_collection_finish() -> None:
    """End quick imports: all is imported."""
    quick_imports.end()


@pytest.fixture(scope="session", autouse=True)
def _patched() -> Iterator[None]:
    """Four things that take time, or memory, in a process of many tests."""
    with pytest.MonkeyPatch.context() as patch:
        # Energon's loaders collect garbage when they start, and thaw at their end what they froze.
        # After imports of torch and transformers that takes 0.2 s, three times a loader.
        patch.setattr(gc, "unfreeze", lambda: None)
        # No test cuts the power; they ask 36,000 times for what they wrote to be on disk.
        patch.setattr(os, "fsync", lambda descriptor: None)
        # Small plans run in Python, those of budgets for seconds, until a process has planned
        # 30,000 samples. Compiled kernels are read from the folder that is kept.
        if module := sys.modules.get("offline_packing.planner.strategies.kernels"):
            patch.setattr(module, "_planned", module._MOST_IN_ALL)
        # Energon makes a watchdog for each pass of a loader in this process, and never ends it: its
        # thread goes on, and holds the dataset. It is imported with the tests, if any need it.
        if module := sys.modules.get("megatron.energon.watchdog"):
            watch = module.Watchdog.watch_iter

            def watch_iter(watchdog: Any, samples: Iterable[Any]) -> Iterator[Any]:
                try:
                    yield from watch(watchdog, samples)
                finally:
                    watchdog.finish()

            patch.setattr(module.Watchdog, "watch_iter", watch_iter)
        yield


@pytest.fixture(scope="module", autouse=True)
def _freeze_what_is_there(_patched: None) -> None:
    """Neither tests nor the workers that they fork collect what was imported or cached before:
    in a fork, collecting copies every page that it looks at."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator["World"]:
    """Sources, outputs and checkpoints that all tests read; see tests/world.py."""
    from tests.world import World

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one for all processes
    made = World(base / "world")
    yield made
    assert made.changed() == [], "tests changed what others read; let them copy it"


@pytest.fixture(scope="module")
def bmr_environment() -> Iterator[None]:
    """The variables of packed dialogues."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OFFLINE_PACKED_DATA", "1")
        environment.setenv("OFFLINE_PACKING_BMR", "1")
        yield


@pytest.fixture(scope="session")
def _object_server() -> Iterator[ObjectStore]:
    with serve_objects() as store:
        yield store


@pytest.fixture
def object_store(
    _object_server: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStore]:
    """An S3 server that does not fail yet, and the environment in which s3:// leads to it."""
    import fsspec.config

    for name, value in _object_server.environment.items():
        monkeypatch.setenv(name, value)
    # In this process fsspec has read its variable already.
    options = json.loads(_object_server.environment["FSSPEC_S3"])
    monkeypatch.setitem(fsspec.config.conf, "s3", options)
    _object_server.set_faults()
    yield _object_server
    _object_server.set_faults()
    if shortcuts := sys.modules.get("multistorageclient.shortcuts"):
        # Every worker that a loader forks later would connect each of them anew.
        vars(shortcuts)["_STORAGE_CLIENT_CACHE"].clear()


@pytest.fixture
def bucket(object_store: ObjectStore) -> str:
    """URL of a new, empty bucket: s3://..."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    object_store.make_bucket(name)
    return f"s3://{name}"
