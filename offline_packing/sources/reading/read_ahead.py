"""Reading ahead of whoever reads what lies at locators, one after another: remote roots hold it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

from offline_packing.sources.reading.locators import Locator
from offline_packing.sources.roots.remote import FileRange, RemoteRoot, Root

#: Bytes and places of the items that are taken at a time, beside those of the last one. The more
#: they are, the closer to each other they lie.
_MAX_BYTES: Final = 32 << 20
_MAX_PLACES: Final = 1 << 13

Item = TypeVar("Item")


def read_ahead(
    items: Iterable[Item], places: Callable[[Item], Iterable[tuple[Root, Locator]]]
) -> Iterator[Item]:
    """The same items. While one is used, remote roots hold the bytes at its `places`."""
    window: list[Item] = []
    wanted: dict[RemoteRoot, list[FileRange]] = {}
    num_bytes = num_places = 0
    for item in items:
        window.append(item)
        for root, at in places(item):
            num_places += 1
            found = _file_range(at)
            if isinstance(root, RemoteRoot) and found is not None:
                wanted.setdefault(root, []).append(found)
                num_bytes += found.size
        if num_bytes >= _MAX_BYTES or num_places >= _MAX_PLACES:
            yield from _held(window, wanted)
            window, wanted, num_bytes, num_places = [], {}, 0, 0
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
