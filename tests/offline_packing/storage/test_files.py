"""Files that are complete or absent, local copies, scratch folders, and copies of what cannot be
read at any place; tars: shards as they are written, and the members of any."""

import errno
import io
import multiprocessing
import os
import tarfile
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

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
from offline_packing.storage.streams import DamagedStreamError, unpacked_copy
from offline_packing.storage.tars import (
    TarReader,
    TarShardWriter,
    index_bytes,
    member_size,
    read_pack_entry,
    scan_tar,
    tar_size,
)
from offline_packing.verify.verify import verify
from task_encoders.storage.paths import path_of
from tests.helpers.datasets import image_bytes, make_run, pack_all, plan_index, write_planned
from tests.helpers.faults import KilledError, killing
from tests.helpers.formats import tar_bytes
from tests.helpers.outputs import repair
from tests.world import Source, World


def test_interrupted_write_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_atomically(path, b"old")

    with suppress(KeyboardInterrupt), atomic_file(path) as file:
        file.write(b"new, but only half of")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_read_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, path = os.pread, tmp_path / "a"
    # Linux reads no more than 2 GiB at a time.
    monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 4), at))
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
    (folder / "1").unlink()
    found = read_each(folder, read, NAMES)
    assert next(found) == b"0"
    with pytest.raises(FileNotFoundError):
        next(found)


def test_temporary_folders_of_others_vanish_while_one_is_made() -> None:
    """Threads and processes share the folder they lie in, and each removes its own."""

    def use(number: int) -> None:
        for _ in range(50):
            with temporary_folder() as folder:
                (folder / str(number)).touch()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(use, range(4))) == [None] * 4


NUM_ROWS = 160


def huge_group(root: Path, size: int = NUM_ROWS) -> Source:
    """Rows whose images all differ: noise after the end of a picture."""
    root.mkdir()
    noise, ids = np.random.default_rng(0), [f"{i:05d}" for i in range(NUM_ROWS)]
    sizes = [28 * (2 + i % 4) for i in range(NUM_ROWS)]
    images = [image_bytes(width, 56) + noise.bytes(3000) + b"\xff\xd9" for width in sizes]
    rows = pa.table({"id": ids, "image": images, "caption": [f"Picture {i}." for i in ids]})
    pq.write_table(rows, root / "a.parquet", row_group_size=size, data_page_size=4096)
    return {"format": "parquet", "path": str(root), "task": "captioning"}


def small_groups(root: Path) -> Source:
    return huge_group(root, 7)


OUTPUT = {"packs_per_shard": 1, "key_prefix": ""}


@pytest.mark.parametrize("small_group", [0, 1 << 30], ids=["copies", "decoded"])
def test_huge_row_groups_give_the_packs_of_small_ones(
    world: World, tmp_path: Path, small_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard that decodes a group for itself and one that reads a copy write the same bytes; a
    copy is made once for all shards."""
    small = require_manifest(world.packed(small_groups, output=OUTPUT))
    decoded: list[int] = []
    batches = RowFile.batches

    def counted(self: RowFile, group: int, columns: Any) -> Any:
        decoded.append(group)
        return batches(self, group, columns)

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


def test_unpacked_files_stay_until_the_shards_are_complete(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(world.source("webdataset_gz"), tmp_path / "out")
    with monkeypatch.context() as patch:
        patch.setattr("offline_packing.write.write.make_manifest", killing(pack_all, 0))
        with pytest.raises(KilledError):
            pack_all(run)
    assert len([*run.workspace.unpacked.glob("*.unpacked")]) == 2
    manifest = write_planned(run)
    assert not run.workspace.unpacked.exists()
    # A kill between the manifest and the removal: the next run removes them.
    run.workspace.unpacked.mkdir()
    (run.workspace.unpacked / "left.unpacked").write_bytes(b"x")
    assert write_planned(run) == manifest
    assert not run.workspace.unpacked.exists()
    assert verify(run, deep=True).ok
    assert not run.workspace.unpacked.exists()
    (run.workspace.root / manifest.shards[0].name).unlink()
    assert manifest.shards[0].name in repair(run)
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


PARTS = st.dictionaries(
    st.sampled_from(["img000.jpg", "img001.png", "json"]), st.binary(max_size=1100), min_size=1
)


@settings(max_examples=20, deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4), st.integers(0))
def test_shards(packs: list[dict[str, bytes]], cut: int) -> None:
    """tarfile writes the same; packs are found by the headers, and each by its key; a shard that
    was cut anywhere before its end marker is refused."""
    keys = [f"ps_{number:08d}" for number in range(len(packs))]
    with tempfile.TemporaryDirectory() as folder:
        path, reference = Path(folder, "a.tar"), Path(folder, "b.tar")
        with path.open("wb") as file:
            writer = TarShardWriter(file)
            for key, parts in zip(keys, packs, strict=True):
                writer.add(key, [*parts.items()])
            digest = writer.finish()
        with tarfile.open(reference, "w", format=tarfile.USTAR_FORMAT) as tar:
            for key, parts in zip(keys, packs, strict=True):
                for name, content in parts.items():
                    info = tarfile.TarInfo(f"{key}.{name}")
                    info.size, info.mode = len(content), 0o644
                    tar.addfile(info, io.BytesIO(content))
        data, entries = path.read_bytes(), writer.entries
        assert data == reference.read_bytes()
        assert xxhash.xxh3_128_hexdigest(data) == digest
        assert list(scan_tar(path)) == entries
        index = path.with_suffix(".tar.idx")
        index.write_bytes(index_bytes(entries))
        *starts, end = np.frombuffer(index.read_bytes(), "<u8").tolist()
        assert tar_size(end) == writer.size == len(data)
        for entry, start, key, parts in zip(entries, starts, keys, packs, strict=True):
            assert (entry.key, entry.offset) == (key, start)
            assert entry.size == sum(member_size(len(content)) for content in parts.values())
            found, own = read_pack_entry(path, key)
            read = {part.name: own[part.offset :][: part.size] for part in found.parts}
            assert (found.key, read) == (key, parts)
        for size in (cut % (end + 1), end):
            path.write_bytes(data[:size])
            with pytest.raises(StageError, match=r"a\.tar cannot be read"):
                list(scan_tar(path))


def test_packs_that_are_not_found(tmp_path: Path) -> None:
    path, index = tmp_path / "a.tar", tmp_path / "a.tar.idx"
    with path.open("wb") as file:
        writer = TarShardWriter(file)
        for number in range(3):
            writer.add(f"ps_{number:08d}", [("json", b"x" * 512)])
        writer.finish()
    index.write_bytes(index_bytes(writer.entries))
    for absent in ("ps_00000003", "b_ps_00000001", "ps_x", "ps"):
        with pytest.raises(StageError, match=r"a\.tar (cannot be read|holds no pack)"):
            read_pack_entry(path, absent)
    for damaged in (b"", index.read_bytes()[:16], bytes(32), b"\xff" * 32):
        index.write_bytes(damaged)
        with pytest.raises(StageError, match=r"a\.tar cannot be read"):
            read_pack_entry(path, "ps_00000001")
    index.write_bytes(index_bytes(writer.entries[1:]))
    with pytest.raises(StageError, match="holds no pack 'ps_00000001'"):
        read_pack_entry(path, "ps_00000001")


def test_what_is_no_pack(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as opened:
        link = tarfile.TarInfo("ps_0.img0.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        opened.addfile(link)
    with pytest.raises(StageError, match=r"member 'ps_0\.img0\.jpg' is not a file KEY\.PART"):
        list(scan_tar(path))
    path.write_bytes(b"not a tar")
    with pytest.raises(StageError, match="cannot be read"):
        list(scan_tar(path))


names = st.text("ab/.é_", min_size=1, max_size=12).map(lambda text: f"x{text}y")
long_names = st.integers(90, 300).map(lambda count: "d/" * (count // 2) + "name.jpg")


class Stream(io.BytesIO):
    """A file that cannot seek."""

    def seekable(self) -> bool:
        return False

    def seek(self, *_: int) -> int:
        raise io.UnsupportedOperation("seek")


@settings(max_examples=30, deadline=None)
@given(
    members=st.lists(st.tuples(names | long_names, st.binary(max_size=1200)), max_size=8),
    tar_format=st.sampled_from([tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    links=st.booleans(),
)
def test_members_are_those_of_tarfile(
    members: list[tuple[str, bytes]], tar_format: int, links: bool
) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tar_format) as tar:
        for i, (name, data) in enumerate(members):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            if links and i % 3 == 1:
                info.type, info.size, info.linkname = tarfile.SYMTYPE, 0, "/etc/passwd"
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # ustar has no room for the name
                continue
    content = buffer.getvalue()
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        expected = [(m.name, m.offset_data, m.size, m.isreg()) for m in tar]
    for file in (io.BytesIO(content), Stream(content)):
        found = list(TarReader(file))
        shown = [(m.name, m.offset, m.size, m.is_file) for m in found]
        assert shown == expected
    reader = TarReader(Stream(content))
    data = [reader.read(member) for member in reader]
    assert data == [content[m.offset : m.offset + m.size] for m in found]
    assert reader.member_complete


def test_size_in_base_256() -> None:
    info = tarfile.TarInfo("large.bin")
    info.size = 9 << 30  # beyond eleven octal digits
    reader = iter(TarReader(io.BytesIO(info.tobuf(tarfile.GNU_FORMAT))))
    assert next(reader).size == 9 << 30
    with pytest.raises(ValueError, match="the tar ends within a member"):
        next(reader)


def _tar(*names: str) -> bytes:
    return tar_bytes((name, b"abc") for name in names)


@pytest.mark.parametrize("kind", [io.BytesIO, Stream])
def test_joined_tars_are_read_to_their_end(kind: type[io.BytesIO]) -> None:
    content = _tar("a", "b") + bytes(3 << 20) + _tar("c")
    reader = TarReader(kind(content))
    found = [(member.name, reader.read(member)) for member in reader]
    assert found == [("a", b"abc"), ("b", b"abc"), ("c", b"abc")]
    offsets = [member.header_offset for member in TarReader(io.BytesIO(content))]
    assert [content[at : at + 1] for at in offsets] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("junk", [b"x" * 512, b"x" * 100])
def test_what_follows_the_end_marker_is_not_lost_in_silence(junk: bytes) -> None:
    with pytest.raises(DamagedStreamError):
        list(TarReader(io.BytesIO(_tar("a") + junk)))
