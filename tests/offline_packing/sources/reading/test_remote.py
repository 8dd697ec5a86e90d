"""Records and media of remote sources are read ahead, in few requests; and an HTTP server that
counts them and their bytes."""

import io
import re
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from offline_packing.errors import ChangedError, StageError
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan
from offline_packing.runs.run import Run
from offline_packing.sources import Locator
from offline_packing.sources.reading import locators
from offline_packing.sources.reading.locators import read_ahead, read_locator
from offline_packing.sources.roots import roots
from offline_packing.sources.roots.roots import FileRange, RemoteRoot, neighbors
from offline_packing.verify.verify import verify
from task_encoders.storage.remote_paths import RemotePath
from tests.helpers import accounting, formats
from tests.helpers.datasets import (
    dialogue,
    image_bytes,
    make_run,
    pack_all,
    plan_index,
    write_planned,
)
from tests.helpers.object_store import ObjectStore

MIB = 1 << 20


class CountedStorage(MemoryFileSystem):
    """Notes what is asked for."""

    store: dict[str, Any] = {}  # noqa: RUF012 - as in fsspec

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.asked: list[tuple[str, int, int]] = []

    def cat_file(self, path: str, start: int = 0, end: int = 0, **options: Any) -> bytes:
        self.asked.append((path.rpartition("/")[2], start, end))
        data: bytes = super().cat_file(path, start, end, **options)
        return data


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedStorage]:
    found = CountedStorage(skip_instance_cache=True)
    monkeypatch.setattr(RemotePath, "fs", found)
    yield found
    CountedStorage.store.clear()


@pytest.fixture
def root(storage: CountedStorage) -> RemoteRoot:
    return RemoteRoot(RemotePath("memory://data"))


def test_neighbors_of_files() -> None:
    large = [FileRange("a.tar", i * 9 * MIB, 9 * MIB, False) for i in range(3)]
    files = [FileRange(name, 0, 10, True) for name in ("a.jpg", "b.jpg")]
    assert neighbors([*large, *files]) == [[one] for one in sorted([*large, *files])]
    inner, outer = FileRange("a", 5, 10, False), FileRange("a", 0, 100, False)
    beside = FileRange("a", 100, 10, False)
    assert neighbors([outer, inner, beside, inner]) == [[outer, inner, beside]]


def test_ranges_are_held_while_their_items_are_used(
    storage: CountedStorage, root: RemoteRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locators, "_MAX_BYTES", 32 << 10)
    monkeypatch.setattr(roots, "_MAX_REQUEST", 4 << 10)
    size = 10 << 10
    data = np.random.default_rng(0).bytes(8 * size)
    storage.pipe_file("/data/a.tar", data)
    places = [Locator("bytes", "a.tar", i * size, size) for i in range(8)]
    asked = storage.asked
    found = []
    for number, place in enumerate(read_ahead(places, lambda at: [(root, at)])):
        assert len(asked) == min(8, number // 4 * 4 + 4)  # 32 KiB at a time
        found.append(read_locator(root, place))
    assert b"".join(found) == data
    assert len(asked) == 8
    assert not root._held


def test_changed_and_missing_files(storage: CountedStorage, root: RemoteRoot) -> None:
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
        storage.pipe_file(f"/data/{name}", bytes(range(size)))
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


@pytest.mark.parametrize("failing", [0.0, pytest.param(0.1, marks=pytest.mark.exhaustive)])
def test_few_requests_write_a_shard(
    tmp_path: Path, object_store: ObjectStore, bucket: str, failing: float
) -> None:
    count, records, folder = 80, [], tmp_path / "data"
    for i in range(count):
        images = [f"{i}.jpg"] * (i % 4 == 0)
        for name in images:
            formats.write_file(folder / name, image_bytes(56 + 28 * (i % 5), 56))
        messages = dialogue("What?", "Red. " * (1 + i % 50))
        records.append({"id": f"sample-{i}", "messages": messages, "images": images})
    formats.write_file(folder / "a.jsonl", formats.lines(records))
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
        assert count // 4 < requests < count // 4 * (1.5 if failing else 1) + 10
    ours = (tmp_path / name / "train-000000.tar" for name in ("here", "there"))
    assert len({path.read_bytes() for path in ours}) == 1


pytest.importorskip("aiohttp")  # what fsspec reads HTTP with

NUM_SAMPLES = 12


class _Server(ThreadingHTTPServer):
    """Serves a folder's files, by ranges, and counts."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.requests = 0
        self.bytes_sent = 0
        self.tells_sizes = True
        self.lock = threading.Lock()

    def count(self) -> tuple[int, int]:
        """(requests, bytes) since the last call."""
        with self.lock:
            found = self.requests, self.bytes_sent
            self.requests = self.bytes_sent = 0
        return found


class _Handler(SimpleHTTPRequestHandler):
    """Serves ranges of files as well."""

    server: _Server

    def send_head(self) -> Any:
        with self.server.lock:
            self.server.requests += 1
        path = Path(self.translate_path(self.path))
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if found is None or not path.is_file():
            return super().send_head()
        whole = path.read_bytes()
        begin, end = int(found[1]), min(int(found[2]) + 1, len(whole))
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(whole)}")
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        return io.BytesIO(whole[begin:end])

    def send_header(self, keyword: str, value: str) -> None:
        if self.server.tells_sizes or keyword != "Content-Length":
            super().send_header(keyword, value)

    def copyfile(self, source: Any, outputfile: Any) -> None:
        data = source.read()
        with self.server.lock:
            self.server.bytes_sent += len(data)
        outputfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_Server]:
    """A server of tmp_path/data."""
    (tmp_path / "data").mkdir()
    with _Server(tmp_path / "data") as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()


@pytest.mark.parametrize(
    # requests per sample, beside those for listing; and bytes read per byte of a picture: of files
    # of their own the headers, and tars from front to back, as a request costs more than they do
    ("name", "requests_each", "bytes_each"),
    [("pairs", (4, 2), (0.25, 1.05)), ("webdataset", (0, 0), (1.05, 1.3))],
)
def test_requests_and_bytes(
    tmp_path: Path,
    server: _Server,
    name: str,
    requests_each: tuple[int, int],
    bytes_each: tuple[float, float],
) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (400, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer := io.BytesIO(), "JPEG", quality=95)
    image = buffer.getvalue()  # 190 kB, much more than its header
    messages = formats.draw_samples(1)[0][1]
    samples = [(f"{i:04d}", messages, [image]) for i in range(NUM_SAMPLES)]
    written = formats.WRITERS[name](tmp_path / "data", samples)
    url = f"http://127.0.0.1:{server.server_port}/"
    written["path"] = written["path"].replace(str(tmp_path / "data"), url)
    run = make_run({**written, "task": "bmr"}, tmp_path / "out")
    info = measure(run).info
    assert info.num_samples == NUM_SAMPLES
    requests, num_bytes = server.count()
    listing = 2 * NUM_SAMPLES if name == "pairs" else 2  # this server lists no sizes
    total = NUM_SAMPLES * len(image)
    assert requests <= listing + requests_each[0] * NUM_SAMPLES + 10
    assert num_bytes < bytes_each[0] * total
    plan_index(run)
    write_planned(run)
    requests, num_bytes = server.count()
    assert requests <= requests_each[1] * NUM_SAMPLES + 10
    assert total < num_bytes < bytes_each[1] * total


SAMPLES = formats.draw_samples(3) + [
    (f"v{key}", *rest) for key, *rest in formats.draw_video_samples(2, single=True)
]


@pytest.mark.parametrize(
    "name", ["pairs", "jsonl", "jsonl_gz", "json_array", "webdataset", "webdataset_gz", "parquet"]
)
def test_formats_on_a_server_that_lists_no_sizes(
    tmp_path: Path, server: _Server, name: str
) -> None:
    """Rows are those of a source here."""
    written = formats.WRITERS[name](tmp_path / "data", SAMPLES)
    url = f"http://127.0.0.1:{server.server_port}"
    whole = written["path"].replace(str(tmp_path / "data"), url)
    sources = [
        accounting.open_one({**written, "path": at}, tmp_path)
        for at in dict.fromkeys((written["path"], whole, url))  # a folder, or a file and its folder
    ]
    assert [outcome for _, outcome, _ in accounting.account(sources[-1])] == ["ok"] * len(SAMPLES)
    found = [accounting.measured_rows(one) for one in sources]
    for row in (row for rows in found for row in rows):  # only what lies here has a time
        del row["stamp"]
    assert all(rows == found[0] for rows in found)


def test_a_server_that_tells_no_size_is_refused(tmp_path: Path, server: _Server) -> None:
    server.tells_sizes = False
    formats.write_file(tmp_path / "data/a.jsonl", formats.lines([{"question": "?"}]))
    for name in ("", "a.jsonl"):
        path = f"http://127.0.0.1:{server.server_port}/{name}"
        with pytest.raises(StageError, match=r"a\.jsonl: its server does not report the size"):
            measure(make_run({"format": "jsonl", "path": path, "task": "vqa"}, tmp_path / "out"))
