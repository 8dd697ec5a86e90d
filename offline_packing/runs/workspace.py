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
from pathlib import Path

from offline_packing.errors import StageError
from offline_packing.storage.files import hold_lock, remove_temporaries


class Workspace:
    """Paths below one output folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        #: present when the packed dataset is complete
        self.manifest = root / "manifest.json"
        #: Energon's metadata
        self.nv_meta = root / ".nv-meta"
        #: everything that training does not read
        self.packing = root / "_packing"
        #: folder of the index parts
        self.index = self.packing / "index"
        #: what the parts of an unfinished index were made with. Readers of Parquet folders skip
        #: names that begin with an underscore
        self.index_started = self.index / "_started.json"
        #: how much there is to measure; present while measuring
        self.measure_total = self.index / "_total.json"
        #: folder of the parts of the set-aside table
        self.set_aside = self.packing / "set_aside"
        #: folder of the tables of the source files that were measured
        self.files = self.packing / "files"
        #: present when the index is complete
        self.index_info = self.packing / "index.json"
        #: folder of the keys that source.skip leaves out, while samples are measured
        self.skip = self.packing / "skip"
        #: folder of what `retry` is rebuilding
        self.damaged = self.packing / "damaged"
        self.plan = self.packing / "plan"
        #: present when the plan is complete
        self.plan_info = self.plan / "stage.json"
        #: folder of one fragment per finished shard
        self.write = self.packing / "write"
        #: what the shards depend on beside index and source; there when the first is written
        self.started = self.write / "started.json"
        self.report = self.packing / "report"
        #: folder of copies of what has no random access: compressed files, and large row groups.
        #: Present while packs are written or compared with their source
        self.unpacked = self.packing / "unpacked"

    def fragment(self, shard_name: str) -> Path:
        """The fragment of a shard, by its name with or without `.tar`."""
        return self.write / f"{shard_name.removesuffix('.tar')}.json"

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
