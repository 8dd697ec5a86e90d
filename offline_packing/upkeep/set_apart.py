"""Files of an output that are moved away while they are made again.

_packing/damaged/    they, in the same folders
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from offline_packing.runs.run import Workspace
from offline_packing.storage.paths import remove_folder


@contextmanager
def set_apart(
    workspace: Workspace, paths: Iterable[Path], *, keeps_new: bool = False
) -> Iterator[None]:
    """Move files away while the block makes them again; if it fails, they come back, and what was
    not there goes. With `keeps_new` only those come back that were not made again."""
    apart = {path: workspace.damaged / path.relative_to(workspace.root) for path in paths}
    for path, target in apart.items():
        if path.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    try:
        yield
    except BaseException:
        for path, target in apart.items():
            if keeps_new and path.exists():
                continue
            path.unlink(missing_ok=True)
            if target.exists():
                target.replace(path)
        raise
    finally:
        for target in apart.values():
            target.unlink(missing_ok=True)
        if not any(path.is_file() for path in workspace.damaged.rglob("*")):
            remove_folder(workspace.damaged)


def put_back(workspace: Workspace) -> None:
    """Restore files that a killed retry had set apart, where there are no new ones."""
    for path in [one for one in workspace.damaged.rglob("*") if one.is_file()]:
        target = workspace.root / path.relative_to(workspace.damaged)
        if not target.exists():
            path.replace(target)
    remove_folder(workspace.damaged)
