"""Reading ahead of whoever reads what lies at locators, one after another: remote roots hold it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.roots.remote import FileRange, RemoteRoot, Root

#: Bytes that are held at a time, unless one item needs more.
_MAX_BYTES: Final = 32 << 20

Item = TypeVar("Item")


def read_ahead(
    items: Iterable[Item], places: Callable[[Item], Iterable[tuple[Root, Locator]]]
) -> Iterator[Item]:
    """The same items. While one is used, remote roots hold the bytes at its `places`; as many items
    as they can hold are taken at a time."""
    window: list[Item] = []
    wanted: dict[RemoteRoot, list[FileRange]] = {}
    num_bytes = 0
    for item in items:
        own = [
            (root, found)
            for root, at in places(item)
            if isinstance(root, RemoteRoot) and (found := _file_range(at)) is not None
        ]
        size = sum(found.size for _, found in own)
        if window and num_bytes + size > _MAX_BYTES:
            yield from _held(window, wanted)
            window, wanted, num_bytes = [], {}, 0
        window.append(item)
        for root, found in own:
            wanted.setdefault(root, []).append(found)
        num_bytes += size
    yield from _held(window, wanted)


def _held(
    items: Sequence[Item], wanted: Mapping[RemoteRoot, Sequence[FileRange]]
) -> Iterator[Item]:
    """The same items, for which roots hold ranges until all of them were used."""
    try:
        for root, ranges in wanted.items():
            root.read_ahead(ranges)
        yield from items
    finally:
        for root in wanted:
            root.read_ahead(())


def _file_range(at: Locator) -> FileRange | None:
    """The bytes of a file that `read_locator` reads; None: it reads no such range."""
    if at.kind in ("file", "bytes"):
        return FileRange(at.container, at.offset, at.size, at.kind == "file")
    if at.kind == "sub_sample":
        return FileRange(at.container, at.offset, int(at.column.rpartition(".")[2]), False)
    return None
