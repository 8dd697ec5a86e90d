"""Members of tars, equal to what Python's tarfile finds, from seekable files and from streams."""

import io
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offline_packing.storage.streams import DamagedStreamError
from offline_packing.storage.tars import TarReader

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
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    return buffer.getvalue()


@pytest.mark.parametrize("kind", [io.BytesIO, Stream])
def test_joined_tars_are_read_to_their_end(kind: type[io.BytesIO]) -> None:
    content = _tar("a", "b") + _tar("c")
    reader = TarReader(kind(content))
    found = [(member.name, reader.read(member)) for member in reader]
    assert found == [("a", b"abc"), ("b", b"abc"), ("c", b"abc")]
    offsets = [member.header_offset for member in TarReader(io.BytesIO(content))]
    assert [content[at : at + 1] for at in offsets] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("junk", [b"x" * 512, b"x" * 100])
def test_what_follows_the_end_marker_is_not_lost_in_silence(junk: bytes) -> None:
    with pytest.raises(DamagedStreamError):
        list(TarReader(io.BytesIO(_tar("a") + junk)))
