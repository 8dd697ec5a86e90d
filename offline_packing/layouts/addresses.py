"""The addresses under which Energon reads a source's media in place.

A file of its own is in a folder that Energon reads as a file system; a member of a tar needs a
folder that `energon prepare` has listed; remote storage is named by msc://. Nothing else has one.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from offline_packing.errors import ChangedError, StageError
from offline_packing.index.measured import modification_time
from offline_packing.layouts.energon_metadata import check_energon
from offline_packing.sources import Locator, Source, SourceOptions
from offline_packing.sources.options import MediaOptions
from offline_packing.sources.roots.roots import MediaRoot, Root, open_root

if TYPE_CHECKING:
    from megatron.energon.cache.file_store import WebdatasetFileStore

#: Index in a folder of tars that Energon has listed.
_PREPARED: Final = ".nv-meta/index.sqlite"
#: Energon's name of a folder whose files it reads by their paths.
_FILES: Final = "filesystem"


def media_roots(sources: Sequence[SourceOptions]) -> Iterator[tuple[str, str]]:
    """Folders, or URLs, by the names that packs have for them: of the media that are files of their
    own, and of the tars that hold others. Raises StageError if a source is not there."""
    for i, source in enumerate(sources):
        folder = source.image_root if isinstance(source, MediaOptions) else None
        yield f"files{i}", _address(open_root(folder or source.path)[0])
        yield f"tars{i}", _address(open_root(source.path)[0])


def aux_datasets(sources: Sequence[SourceOptions]) -> dict[str, str]:
    """The same as Energon's auxiliary datasets, without tars that it cannot read."""
    found = {}
    for name, address in media_roots(sources):
        if name.startswith("files"):
            found[name] = f"{_FILES}{'+' if '://' in address else '://'}{address}"
        elif _is_prepared(open_root(address)[0]):
            found[name] = address
    return found


def address_of(aux_dataset: str) -> str:
    """The folder, or URL, of an auxiliary dataset."""
    return aux_dataset.removeprefix(f"{_FILES}://").removeprefix(f"{_FILES}+")


def _address(root: Root) -> str:
    return (root.folder if isinstance(root, MediaRoot) else root.path("")).rstrip("/") or "/"


def _is_prepared(root: Root) -> bool:
    address = _address(root)
    if "://" in address and not address.startswith("msc://"):
        return False
    try:
        return root.entry(_PREPARED)[1] > 0
    except OSError:
        return False


def check_address(source: Source, kind: str) -> None:
    """Raise StageError if Energon has no address for media of a source at this kind of locator."""
    address = _address(source.media if kind == "file" else source.root)
    if "://" in address and not address.startswith("msc://"):
        remedy = "name it as msc://PROFILE/PATH (multi-storage-client)"
    elif kind == "file":
        return
    elif kind == "bytes" and _is_prepared(source.root):
        check_energon()  # its index tells where members are
        return
    elif kind == "bytes":
        remedy = f"run energon prepare {source.path}"
    else:
        remedy = "copy them: output.layout=energon"
    raise StageError(
        f"output.layout references: Energon has no address for the media of {source.path!r} "
        f"({source.options.format}: {kind}); {remedy}"
    )


def locate(source_id: int, source: Source, at: Locator) -> list[str | int]:
    """Address of a medium in a line. Raises StageError if its file has another size, or the tar was
    prepared when it was another."""
    root = source.media_root(at)
    time = time_of_medium(root, at)
    if at.kind != "file":
        _check_prepared(root, at)
        return [f"tars{source_id}", at.container, at.size, time, at.column]
    return [f"files{source_id}", at.container, at.size, time]


def time_of_medium(root: Root, at: Locator) -> int:
    """Modification time in ns of the file that a medium lies in; 0 of a remote one. Raises
    ChangedError if it is gone, or is the medium alone and has another size than when measured."""
    time = modification_time(root, at.container)
    if isinstance(root, MediaRoot):
        is_whole = at.kind == "file"
        if not time or (is_whole and root.entry(at.container)[1] != at.size):
            raise ChangedError(root.path(at.container))
    return time


def _check_prepared(root: Root, at: Locator) -> None:
    """Raise StageError if Energon would not read a member of a tar as it was measured."""
    from megatron.energon.flavors.webdataset.config import split_name_re

    store, match = _open_tars(_address(root)), split_name_re.match(at.column)
    try:
        assert match is not None, at.column  # a member's name, as it was measured
        found = store.sqlite_reader.get_sample_part(*match.groups())
        place = (found.raw_byte_offset, found.raw_byte_size)
        if (store.tar_filenames[found.tar_file_id], *place) != (at.container, at.offset, at.size):
            raise KeyError("the member lies elsewhere")
    except KeyError as error:
        raise StageError(
            f"{root.path(_PREPARED)} does not describe {at.column!r} of {at.container} as measured "
            f"({error.args[0]}); run energon prepare there, and measure again with "
            "output.overwrite=true"
        ) from error


@functools.lru_cache(maxsize=8)
def _open_tars(address: str) -> "WebdatasetFileStore":
    from megatron.energon.cache.file_store import WebdatasetFileStore
    from megatron.energon.epathlib import EPath

    return WebdatasetFileStore(EPath(address))
