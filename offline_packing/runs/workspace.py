"""Where the artifacts of one output are. The output folder itself is what a trainer is given.

OUT/train-000000.tar, .tar.idx, .nv-meta/, manifest.json    the packed dataset
OUT/_packing/index/, set_aside/, files/, index.json         measure
OUT/_packing/plan/                                          plan
OUT/_packing/write/                                         write: one fragment per shard
OUT/_packing/report/                                        report: for people, and as JSON
OUT/_packing/unpacked/                                      while packs are written or compared
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offline_packing.errors import StageError
from offline_packing.storage.files import hold_lock, remove_temporaries


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
    def index_started(self) -> Path:
        """What the parts of an unfinished index were made with. Readers of Parquet folders skip
        names that begin with an underscore."""
        return self.index / "_started.json"

    @property
    def measure_total(self) -> Path:
        """How much there is to measure; present while measuring."""
        return self.index / "_total.json"

    @property
    def set_aside(self) -> Path:
        """Folder of the parts of the set-aside table."""
        return self.packing / "set_aside"

    @property
    def files(self) -> Path:
        """Folder of the tables of the source files that were measured."""
        return self.packing / "files"

    @property
    def index_info(self) -> Path:
        """Present when the index is complete."""
        return self.packing / "index.json"

    @property
    def skip(self) -> Path:
        """Folder of the keys that source.skip leaves out, while samples are measured."""
        return self.packing / "skip"

    @property
    def damaged(self) -> Path:
        """Folder of what `retry` is rebuilding."""
        return self.packing / "damaged"

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
    def started(self) -> Path:
        """What the shards depend on beside index and source; there when the first is written."""
        return self.write / "started.json"

    def fragment(self, shard_name: str) -> Path:
        """The fragment of a shard, by its name with or without `.tar`."""
        return self.write / f"{shard_name.removesuffix('.tar')}.json"

    @property
    def report(self) -> Path:
        """Folder of the report."""
        return self.packing / "report"

    @property
    def nv_meta(self) -> Path:
        """Energon's metadata."""
        return self.root / ".nv-meta"

    @property
    def manifest(self) -> Path:
        """Present when the packed dataset is complete."""
        return self.root / "manifest.json"

    @property
    def unpacked(self) -> Path:
        """Folder of copies of what has no random access: compressed files, and large row
        groups. Present while packs are written or compared with their source."""
        return self.packing / "unpacked"

    @contextmanager
    def lock(self, *, shared: bool = False) -> Iterator[None]:
        """Keep other runs away from this output; with `shared`, only those that do not share it.

        Raises:
            StageError: another run holds it, or the folder holds something that is not ours.
        """
        if self.root.exists() and not self.packing.exists() and any(self.root.iterdir()):
            raise StageError(
                f"output.path {str(self.root)!r} is not empty and does not hold an earlier run; "
                "choose another folder"
            )
        with hold_lock(self.packing / "lock", f"output {str(self.root)!r}", shared=shared):
            yield

    def remove_temporaries(self) -> None:
        """Remove incomplete files of killed runs."""
        stages = (self.index, self.set_aside, self.files, self.plan, self.write, self.report)
        for folder in (self.root, self.nv_meta, self.packing, *stages):
            remove_temporaries(folder)

    def remove_unpacked(self) -> None:
        """Remove what was unpacked, if the packed dataset is complete: otherwise a run that
        resumes would have to unpack it again."""
        if self.manifest.exists():
            shutil.rmtree(self.unpacked, ignore_errors=True)
