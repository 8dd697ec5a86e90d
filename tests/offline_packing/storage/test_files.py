"""Files that are complete or absent, local copies, scratch folders, and copies of what cannot be
read at any place: made once, kept while needed, then removed."""

import errno
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offline_packing.errors import DiskFullError, StageError
from offline_packing.measure.measure import measure
from offline_packing.runs.manifest import require_manifest
from offline_packing.sources.reading import rows as row_reader
from offline_packing.sources.reading.rows import RowFile
from offline_packing.storage.files import (
    atomic_file,
    read_each,
    read_range,
    temporary_folder,
    write_atomically,
)
from offline_packing.storage.streams import unpacked_copy
from offline_packing.verify.verify import verify
from task_encoders.storage.paths import path_of
from tests.helpers import formats
from tests.helpers.datasets import (
    image_bytes,
    make_run,
    pack_all,
    packed_run,
    plan_index,
    write_planned,
)
from tests.helpers.faults import KilledError, killing
from tests.helpers.outputs import repair
from tests.world import Source, World


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")

    def interrupted() -> None:
        with atomic_file(path) as file:
            file.write(b"new, but only half of")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_read_range(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert read_range(path, 2, 3, whole=False) == b"234"
    assert read_range(path, 0, 10, whole=True) == b"0123456789"
    for size, whole in ((9, True), (11, True), (11, False)):
        with pytest.raises(StageError, match="changed since it was measured: it has 10 bytes"):
            read_range(path, 0, size, whole=whole)
    with pytest.raises(StageError, match="cannot be read: No such file"):
        read_range(tmp_path / "b", 0, 1, whole=False)


NAMES = [str(number) for number in range(40)]


def test_objects_are_read_at_the_same_time(tmp_path: Path) -> None:
    """In order, and no more than 16 ahead of their use."""
    folder = path_of(f"memory://{tmp_path.name}")
    for name in NAMES:
        write_atomically(folder / name, name.encode())
    meet, begun = threading.Barrier(16), []

    def read(name: str) -> bytes:
        begun.append(name)
        if len(begun) <= 16:
            meet.wait(60)
        return bytes((folder / name).read_bytes())

    found = read_each(folder, read, NAMES)
    assert next(found) == b"0"
    assert len(begun) <= 17
    assert [b"0", *found] == [name.encode() for name in NAMES]


def test_a_missing_object_is_an_error(tmp_path: Path) -> None:
    folder = path_of(f"memory://{tmp_path.name}")
    write_atomically(folder / "0", b"0")
    found = read_each(folder, lambda name: (folder / name).read_bytes(), NAMES)
    assert next(found) == b"0"
    with pytest.raises(FileNotFoundError):
        next(found)


def test_temporary_folders_of_others_vanish_while_one_is_made() -> None:
    """Threads and processes share the folder they lie in, and each removes its own."""

    def use(number: int) -> None:
        for _ in range(200):
            with temporary_folder() as folder:
                (folder / str(number)).touch()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4))) == [None] * 4


NUM_ROWS = 200


def table_of(num_rows: int, first: int = 0) -> pa.Table:
    """Rows whose images all differ: noise after the end of a picture."""
    noise = np.random.default_rng(first)
    images = [
        image_bytes(28 * (2 + i % 4), 56) + noise.bytes(3000) + b"\xff\xd9" for i in range(num_rows)
    ]
    ids = [f"{first + i:05d}" for i in range(num_rows)]
    return pa.table({"id": ids, "image": images, "caption": [f"Picture {i}." for i in ids]})


def rows_in_groups(root: Path, size: int) -> Source:
    path = root / "a.parquet"
    pq.write_table(table_of(NUM_ROWS), path, row_group_size=size, data_page_size=4096)
    return {"format": "parquet", "path": str(root), "task": "captioning"}


def huge_group(root: Path) -> Source:
    root.mkdir()
    return rows_in_groups(root, NUM_ROWS)


def small_groups(root: Path) -> Source:
    """The same rows."""
    root.mkdir()
    return rows_in_groups(root, 7)


OUTPUT = {"packs_per_shard": 1, "key_prefix": ""}


@pytest.mark.parametrize("small_group", [0, 1 << 30], ids=["copies", "decoded"])
def test_huge_row_groups_give_the_packs_of_small_ones(
    world: World, tmp_path: Path, small_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that decodes a group for itself and one that reads a copy write the same bytes; a
    copy is made once for all shards."""
    small = require_manifest(world.packed(small_groups, output=OUTPUT))
    decoded: list[range] = []
    batches = RowFile.batches

    def counted(self: RowFile, groups: range, columns: Any) -> Any:
        decoded.append(groups)
        return batches(self, groups, columns)

    run = make_run(world.source(huge_group), tmp_path / "huge", output=OUTPUT)
    measure(run)
    plan_index(run)
    monkeypatch.setattr(row_reader, "SMALL_GROUP", small_group)
    monkeypatch.setattr(row_reader, "WANTED_SHARE", 2.0)
    monkeypatch.setattr(RowFile, "batches", counted)
    huge = write_planned(run)
    assert len(huge.shards) > 5
    assert len(decoded) == (len(huge.shards) if small_group else 1)
    hashes = [[shard.xxh3_128 for shard in one.shards] for one in (huge, small)]
    assert hashes[0] == hashes[1]
    assert not run.workspace.unpacked.exists()
    result = verify(run, deep=True)
    assert result.ok
    assert result.num_images == NUM_ROWS
    assert not run.workspace.unpacked.exists()


def compressed_source(folder: Path, name: str = "jsonl_gz", count: int = 12) -> dict[str, Any]:
    return {**formats.WRITERS[name](folder, formats.draw_samples(count)), "task": "bmr"}


@pytest.mark.parametrize("name", ["jsonl_gz", "webdataset_gz"])
def test_unpacked_files_go_when_the_shards_are_complete(tmp_path: Path, name: str) -> None:
    source = compressed_source(tmp_path / "data", name)
    run = packed_run(source, tmp_path / "out")
    manifest = require_manifest(run.workspace.root)
    assert not run.workspace.unpacked.exists()
    # A kill between the manifest and the removal: the next run removes them.
    run.workspace.unpacked.mkdir()
    (run.workspace.unpacked / "left.unpacked").write_bytes(b"x")
    assert write_planned(run) == manifest
    assert not run.workspace.unpacked.exists()
    assert verify(run, deep=True).ok
    assert not run.workspace.unpacked.exists()
    shard = run.workspace.root / manifest.shards[0].name
    data = shard.read_bytes()
    shard.unlink()
    assert manifest.shards[0].name in repair(run)
    assert shard.read_bytes() == data
    assert not run.workspace.unpacked.exists()


def test_unpacked_files_stay_for_the_shards_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that fails leaves them."""
    run = make_run(compressed_source(tmp_path / "data"), tmp_path / "out")
    measure(run)
    plan_index(run)
    with monkeypatch.context() as patch:
        killed = killing(pack_all, 0)
        patch.setattr("offline_packing.write.write.write_manifest", killed)
        with pytest.raises(KilledError):
            write_planned(run)
    assert len([*run.workspace.unpacked.glob("*.unpacked")]) == 1
    write_planned(run)
    assert not run.workspace.unpacked.exists()


def slow_copy(folder: Path, content: bytes, started: Path, pause: float) -> None:
    def make(target: Any) -> None:
        target.write(content[: len(content) // 2])
        target.flush()
        with started.open("ab") as log:
            log.write(b"x")
        time.sleep(pause)
        target.write(content[len(content) // 2 :])

    unpacked_copy("name", "the file", folder, make)


def test_copies_are_made_by_one_and_survive_a_kill(tmp_path: Path) -> None:
    """The first process is killed half-way; of the next four only one makes the copy."""
    folder, started, content = tmp_path / "unpacked", tmp_path / "started", os.urandom(1 << 16)
    context = multiprocessing.get_context("fork")
    first, *others = (
        context.Process(target=slow_copy, args=(folder, content, started, pause))
        for pause in (600.0, *[0.5] * 4)
    )
    first.start()
    while not (started.exists() and started.read_bytes()):
        assert first.is_alive()
        time.sleep(0.01)
    first.kill()
    first.join()
    assert not list(folder.glob("*.unpacked"))
    for process in others:
        process.start()
    for process in others:
        process.join()
        assert process.exitcode == 0
    (copy,) = folder.glob("*.unpacked")
    assert copy.read_bytes() == content
    assert started.read_bytes() == b"xx"
    assert not list(folder.glob("*.tmp"))


def test_no_room_to_unpack(tmp_path: Path) -> None:
    def full(_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DiskFullError, match=r"no room to unpack a\.gz to .* bytes are free"):
        unpacked_copy("name", "a.gz", tmp_path / "unpacked", full)
    left = {path.suffix for path in (tmp_path / "unpacked").iterdir()}
    assert not left & {".unpacked", ".tmp"}
