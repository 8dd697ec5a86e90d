"""Tar shards: readable by everyone, the same bytes every time, and no damage goes unseen."""

import io
import struct
import tarfile
from pathlib import Path

import pytest
import xxhash

from offline_packing.errors import StageError
from offline_packing.storage.tars import (
    PackEntry,
    TarShardWriter,
    index_bytes,
    member_size,
    read_pack,
    scan_tar,
    tar_size,
)

PACKS = [
    ("ps_00000000", [("img000.jpg", b"a" * 700), ("img001.png", b""), ("json", b"{}")]),
    ("ps_00000001", [("json", b"x" * 512)]),
    ("ps_00000002", [("img000.jpg", b"b" * 513), ("json", b"[]")]),
]


def write_tar(path: Path) -> tuple[list[PackEntry], str]:
    with open(path, "wb") as file:
        writer = TarShardWriter(file)
        for key, members in PACKS:
            writer.add(key, members)
        digest = writer.finish()
    assert writer.size == path.stat().st_size
    return writer.entries, digest


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    path = tmp_path / "train-000000.tar"
    write_tar(path)
    return path


def test_tarfile_writes_the_same(tar: Path, tmp_path: Path) -> None:
    path = tmp_path / "reference.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as reference:
        for key, pack in PACKS:
            for name, data in pack:
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size, info.mode = len(data), 0o644
                reference.addfile(info, io.BytesIO(data))
    assert tar.read_bytes() == path.read_bytes()


def test_entries_and_index(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    entries, digest = write_tar(path)
    assert list(scan_tar(path)) == entries
    data = path.read_bytes()
    assert xxhash.xxh3_128_hexdigest(data) == digest
    for entry, (_, pack) in zip(entries, PACKS, strict=True):
        assert entry.size == sum(member_size(len(content)) for _, content in pack)
        for part, (name, content) in zip(entry.parts, pack, strict=True):
            assert (part.name, data[part.offset :][: part.size]) == (name, content)
    offsets = struct.unpack("<4Q", index_bytes(entries))
    assert offsets == (0, entries[0].size, entries[2].offset, entries[2].offset + entries[2].size)
    assert tar_size(offsets[-1]) == len(data)


def test_cut_anywhere_is_found(tar: Path, tmp_path: Path) -> None:
    data = tar.read_bytes()
    end = tar_size(0)
    content = sum(entry.size for entry in scan_tar(tar))
    assert len(data) >= end
    cut = tmp_path / "cut.tar"
    for size in [0, 1, 512, 700, 1024, *(entry.offset for entry in scan_tar(tar)), content]:
        cut.write_bytes(data[:size])
        with pytest.raises(StageError, match=r"cut\.tar (is cut off|cannot be read)"):
            list(scan_tar(cut))


def test_one_pack(tmp_path: Path) -> None:
    path, index = tmp_path / "a.tar", tmp_path / "a.tar.idx"
    entries, _ = write_tar(path)
    index.write_bytes(index_bytes(entries))
    for key, members in PACKS:
        entry, data = read_pack(path, key)
        found = [(part.name, data[part.offset :][: part.size]) for part in entry.parts]
        assert (entry.key, found) == (key, members)
    for absent in ("ps_00000003", "b_ps_00000001", "ps_x", "ps"):
        with pytest.raises(StageError, match=r"a\.tar (cannot be read|holds no pack)"):
            read_pack(path, absent)
    for damaged in (b"", index.read_bytes()[:16], bytes(32), b"\xff" * 32):
        index.write_bytes(damaged)
        with pytest.raises(StageError, match=r"a\.tar cannot be read"):
            read_pack(path, "ps_00000001")
    index.write_bytes(index_bytes(entries[1:]))
    with pytest.raises(StageError, match="holds no pack 'ps_00000001'"):
        read_pack(path, "ps_00000001")


def test_what_is_no_pack(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as opened:
        link = tarfile.TarInfo("ps_0.img0.jpg")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        opened.addfile(link)
    with pytest.raises(StageError, match=r"member 'ps_0\.img0\.jpg' is no file KEY\.PART"):
        list(scan_tar(path))
    path.write_bytes(b"not a tar")
    with pytest.raises(StageError, match="cannot be read"):
        list(scan_tar(path))
