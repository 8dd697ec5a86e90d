"""Where the artifacts of one output lie. The output folder itself is what a trainer is given.

OUT/train-000000.tar, .tar.idx, .nv-meta/, manifest.json    the packed dataset
OUT/_packing/index/, set_aside/, index.json                 measure
OUT/_packing/plan/                                          plan
OUT/_packing/write/                                         write: one fragment per shard
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offline_packing.errors import StageError
from offline_packing.files import exclusive

_SHARD: Final = re.compile(r"[A-Za-z0-9_]+-\d{6}\.tar(\.idx)?")


@dataclass(frozen=True)
class Workspace:
    """Paths below one output folder."""

    root: Path

    @property
    def packing(self) -> Path:
        """Everything that training does not read."""
        return self.root / "_packing"

    @property
    def index(self) -> Path:
        """Folder of the index parts."""
        return self.packing / "index"

    @property
    def set_aside(self) -> Path:
        """Folder of the parts of the set-aside table."""
        return self.packing / "set_aside"

    @property
    def index_info(self) -> Path:
        """Present when the index is complete."""
        return self.packing / "index.json"

    @property
    def plan(self) -> Path:
        """Folder of the plan."""
        return self.packing / "plan"

    @property
    def plan_info(self) -> Path:
        """Present when the plan is complete."""
        return self.plan / "stage.json"

    @property
    def write(self) -> Path:
        """Folder of one fragment per finished shard."""
        return self.packing / "write"

    @property
    def nv_meta(self) -> Path:
        """Energon's metadata."""
        return self.root / ".nv-meta"

    @property
    def manifest(self) -> Path:
        """Present when the packed dataset is complete."""
        return self.root / "manifest.json"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs away from this output.

        Raises:
            StageError: another run holds it, or the folder holds something that is not ours.
        """
        if self.root.exists() and not self.packing.exists() and any(self.root.iterdir()):
            raise StageError(
                f"output.path {str(self.root)!r} is not empty and holds no earlier run; "
                "choose another folder"
            )
        with exclusive(self.packing / "lock", f"output {str(self.root)!r}"):
            yield

    def discard_index(self) -> None:
        """Remove the index and all that was made from it."""
        self.discard_plan()
        self.index_info.unlink(missing_ok=True)
        shutil.rmtree(self.index, ignore_errors=True)
        shutil.rmtree(self.set_aside, ignore_errors=True)

    def discard_plan(self) -> None:
        """Remove the plan and all that was made from it."""
        self.discard_shards()
        shutil.rmtree(self.plan, ignore_errors=True)

    def discard_shards(self) -> None:
        """Remove the packed dataset; the manifest, which says that it is complete, goes first."""
        self.manifest.unlink(missing_ok=True)
        if not self.write.exists():
            return
        for path in self.root.iterdir():
            if _SHARD.fullmatch(path.name):
                path.unlink()
        shutil.rmtree(self.nv_meta, ignore_errors=True)
        shutil.rmtree(self.write)
