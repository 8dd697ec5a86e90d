"""Repair of an output: `verify --discard` moves damaged files away, and the stages make missing
files again. A file must get the recorded hash; otherwise the old one comes back.

_packing/damaged/              the damaged files, in the same folders
_packing/damaged/found.json    damaged and lost files; while it is there, the stages ask neither
                               for the listing of a source nor for its times
_packing/again/                files made again, until their hashes are compared
"""

from collections.abc import Iterable, Mapping
from typing import Final

from offline_packing.errors import StageError
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.runs.run import Workspace
from offline_packing.storage.files import (
    is_remote,
    remove_folder,
    remove_path,
    to_json,
    write_atomically,
)

_FOUND: Final = "found.json"


def is_repairing(workspace: Workspace) -> bool:
    """Tell whether `verify --discard` found damaged files that are not all made again."""
    return (workspace.damaged / _FOUND).exists()


def start_repair(workspace: Workspace, found: Mapping[str, str]) -> None:
    """Move damaged files away, given by their names, relative to the output, and their faults."""
    workspace.damaged.mkdir(parents=True, exist_ok=True)
    write_atomically(workspace.damaged / _FOUND, to_json(found))
    set_apart(workspace, found)


def end_repair(workspace: Workspace) -> None:
    """Remove damaged files, which are there again, and what killed repairs left half-written."""
    if is_repairing(workspace):
        workspace.remove_temporaries()
    for folder in (workspace.again, workspace.damaged):
        if folder.exists():
            remove_folder(folder)


def set_apart(workspace: Workspace, names: Iterable[str]) -> None:
    """Move files away, and folders in their places, if they are there. Raises StageError where a
    link leads out of the output: what it leads to is not the output's."""
    is_local, own = not is_remote(workspace.root), (workspace.root, workspace.packing)
    for name in names:
        path = workspace.root / name
        if path.exists():
            at = path.parent.resolve() if is_local else path.parent
            if is_local and not {*(one.resolve() for one in own)} & {at, *at.parents}:
                raise StageError(f"{path.parent} is a link out of the output, to {at}; remove it")
            target = workspace.damaged / name
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_path(target)
            path.replace(target)


def put_back(workspace: Workspace, names: Iterable[str] | None = None) -> None:
    """Move files back, these or all, if there are no new ones."""
    if names is None:
        apart = [path for path in workspace.damaged.rglob("*") if path.is_file()]
        names = (str(path.relative_to(workspace.damaged)) for path in apart)
    for name in names:
        path, old = workspace.root / name, workspace.damaged / name
        if name != _FOUND and old.exists() and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            old.replace(path)


def accept(workspace: Workspace, recorded: dict[str, str]) -> None:
    """Move files that were made again to their places, in this order, if they have their recorded
    hash, and take them from `recorded`."""
    for name, expected in list(recorded.items()):
        made, path = workspace.again / name, workspace.root / name
        if made.exists() and hash_metadata(made) == expected:
            path.parent.mkdir(parents=True, exist_ok=True)
            set_apart(workspace, [name])
            made.replace(path)
            del recorded[name]


def refused(workspace: Workspace, names: Iterable[str], why: object) -> StageError:
    """Return the error of files that cannot be made again as they were; the old ones come back."""
    names = list(names)
    remove_folder(workspace.again)
    put_back(workspace, names)
    return StageError(
        f"{', '.join(names[:3])} cannot be made again as recorded: {why}; restore that, or pack "
        "again with output.overwrite=true or another output.path"
    )
