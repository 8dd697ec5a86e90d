"""Tars: shards as they are written, and the members of any."""

import io
import struct
import tarfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.errors import StageError
from offline_packing.storage.streams import DamagedStreamError
from offline_packing.storage.tars import (
    PackEntry,
    TarReader,
    TarShardWriter,
    index_bytes,
    member_size,
    read_pack,
    scan_tar,
    tar_size,
)
from tests.helpers.formats import tar_bytes

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
    header = info.tobuf(tarfile.GNU_FORMAT)
    (member,) = _members_before_damage(header)
    assert member.size == 9 << 30


def _members_before_damage(content: bytes) -> list[object]:
    found: list[object] = []
    reader = iter(TarReader(io.BytesIO(content)))
    with pytest.raises(ValueError, match="the tar ends within a member"):
        found.extend(reader)
    return found


def _tar(*names: str) -> bytes:
    return tar_bytes((name, b"abc") for name in names)


@pytest.mark.parametrize("kind", [io.BytesIO, Stream])
def test_joined_tars_are_read_to_their_end(kind: type[io.BytesIO]) -> None:
    content = _tar("a", "b") + _tar("c")
    reader = TarReader(kind(content))
    found = [(member.name, reader.read(member)) for member in reader]
    assert found == [("a", b"abc"), ("b", b"abc"), ("c", b"abc")]
    offsets = [member.header_offset for member in TarReader(io.BytesIO(content))]
    assert [content[at : at + 1] for at in offsets] == [b"a", b"b", b"c"]


def test_zeros_after_a_tar_are_read_in_large_pieces() -> None:
    """A tar that is joined after the zeros is found."""
    content = _tar("a") + bytes(20 << 20) + _tar("b") + bytes(5 << 20)
    file = CountingReads(content)
    assert [member.name for member in TarReader(file)] == ["a", "b"]
    assert file.reads < 60


class CountingReads(io.BytesIO):
    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        return super().read(size)


@pytest.mark.parametrize("junk", [b"x" * 512, b"x" * 100])
def test_what_follows_the_end_marker_is_not_lost_in_silence(junk: bytes) -> None:
    with pytest.raises(DamagedStreamError):
        list(TarReader(io.BytesIO(_tar("a") + junk)))
