"""Records and media of remote sources are read ahead, in few requests."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from offline_packing.errors import ChangedError, StageError
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.run import Run
from offline_packing.sources import Locator
from offline_packing.sources.reading.locators import read_ahead, read_locator
from offline_packing.sources.roots.roots import FileRange, RemoteRoot, neighbors
from offline_packing.verify.verify import verify
from tests.helpers import formats
from tests.helpers.datasets import dialogue, image_bytes, make_run, pack_all, write_planned
from tests.helpers.object_store import ObjectStore

MIB = 1 << 20


class CountedStorage(MemoryFileSystem):
    """Notes what is asked for."""

    store: dict[str, Any] = {}  # noqa: RUF012 - as in fsspec

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[str, int, int]] = []
        self.failures = 0

    def cat_file(self, path: str, start: int = 0, end: int = 0, **options: Any) -> bytes:
        self.asked.append((path.rpartition("/")[2], start, end))
        if len(self.asked) <= self.failures:
            raise TimeoutError
        data: bytes = super().cat_file(path, start, end, **options)
        return data


@pytest.fixture
def root() -> Iterator[RemoteRoot]:
    storage = CountedStorage(skip_instance_cache=True)
    yield RemoteRoot(storage, "/data")
    CountedStorage.store.clear()


def put(root: RemoteRoot, name: str, data: bytes) -> None:
    root._filesystem.pipe_file(f"/data/{name}", data)


def lines(count: int, size: int, gap: int = 0) -> list[FileRange]:
    return [FileRange("a.jsonl", i * (size + gap), size, False) for i in range(count)]


@pytest.mark.parametrize(
    ("size", "gap", "in_groups"),
    [(1000, 1000, [100]), (1000, MIB // 4, [16] * 6 + [4]), (1000, MIB // 2, [1] * 100)],
)
def test_neighbors(size: int, gap: int, in_groups: list[int]) -> None:
    ranges = lines(100, size, gap)
    found = neighbors([ranges[i] for i in np.random.default_rng(0).permutation(100)])
    assert [len(group) for group in found] == in_groups
    assert [one for group in found for one in group] == ranges


def test_neighbors_of_files() -> None:
    large = [FileRange("a.tar", i * 9 * MIB, 9 * MIB, False) for i in range(3)]
    files = [FileRange(name, 0, 10, True) for name in ("a.jpg", "b.jpg")]
    assert neighbors([*large, *files]) == [[one] for one in sorted([*large, *files])]
    inner, outer = FileRange("a", 5, 10, False), FileRange("a", 0, 100, False)
    beside = FileRange("a", 100, 10, False)
    assert neighbors([outer, inner, beside, inner]) == [[outer, inner, beside]]


def test_ranges_are_held_while_their_items_are_used(root: RemoteRoot) -> None:
    size = 10 * MIB
    data = np.random.default_rng(0).bytes(8 * size)
    put(root, "a.tar", data)
    places = [Locator("bytes", "a.tar", i * size, size) for i in range(8)]
    asked = root._filesystem.asked
    found = []
    for number, place in enumerate(read_ahead(places, lambda at: [(root, at)])):
        assert len(asked) == min(8, number // 4 * 4 + 4)  # 32 MiB at a time
        found.append(read_locator(root, place))
    assert b"".join(found) == data
    assert len(asked) == 8
    assert not root._held


def test_changed_and_missing_files(root: RemoteRoot) -> None:
    """What is not as it was measured is an error of that record alone, as without reading ahead."""
    whole = Locator("file", "whole", 0, 10)
    places = {
        "whole": whole,
        "grown": Locator("file", "grown", 0, 10),
        "short": Locator("file", "short", 0, 10),
        "missing": Locator("file", "missing", 0, 10),
        "kept": Locator("bytes", "cut", 0, 10),
        "cut": Locator("bytes", "cut", 90, 20),
    }
    sizes = {"whole": 10, "grown": 11, "short": 9, "cut": 100}
    for name, size in sizes.items():
        put(root, name, bytes(range(size)))
    read = {}
    for name, place in read_ahead(places.items(), lambda item: [(root, item[1])]):
        try:
            read[name] = type(read_locator(root, place))
        except StageError as error:
            read[name] = type(error)
    assert read == {
        "whole": bytes,
        "grown": ChangedError,
        "short": ChangedError,
        "missing": StageError,
        "kept": bytes,
        "cut": ChangedError,
    }


def records(folder: Path, count: int) -> None:
    """Lines of JSON, every fourth of which names a picture."""
    found = []
    for i in range(count):
        shown = {"images": [f"{i}.jpg"]} if i % 4 == 0 else {}
        question = "<image>What is it?" if shown else "What?"
        messages = dialogue(question, "Red. " * (1 + i % 50))
        found.append({"id": f"sample-{i}", "messages": messages, **shown})
        if shown:
            formats.write_file(folder / f"{i}.jpg", image_bytes(56 + 28 * (i % 5), 56))
    formats.write_file(folder / "a.jsonl", formats.lines(found))


@pytest.mark.parametrize("failing", [0.0, pytest.param(0.1, marks=pytest.mark.exhaustive)])
def test_few_requests_write_a_shard(
    tmp_path: Path, object_store: ObjectStore, bucket: str, failing: float
) -> None:
    count = 400
    records(tmp_path / "data", count)
    object_store.put_folder(tmp_path / "data", f"{bucket}/data")

    def run_to(path: str, name: str) -> Run:
        source = {"format": "jsonl", "path": path, "task": "bmr"}
        output = {"path": str(tmp_path / name), "packs_per_shard": 1000}
        return make_run(source, Path(), output=output)

    pack_all(run_to(str(tmp_path / "data"), "here"))
    run = run_to(f"{bucket}/data", "there")
    plan(run, measure(run))
    for stage in (write_planned, partial(verify, deep=True)):
        object_store.fail(failing)
        stage(run)
        requests = object_store.counts()["GET"]
        assert count // 4 < requests < count // 4 * (1.5 if failing else 1.1)
    ours = (tmp_path / name / "train-000000.tar" for name in ("here", "there"))
    assert len({path.read_bytes() for path in ours}) == 1
