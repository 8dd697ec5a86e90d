"""Damage to an output: each file against the hash that the receipt of its stage recorded; of shards
that are not complete, against their fragments.

A bit that flips in a recorded hash shows as well, since each receipt has a copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offline_packing.errors import DamagedError, StageError
from offline_packing.layouts.container import files_of
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.layouts.shards import ShardFragment
from offline_packing.runs.run import Run, Workspace
from offline_packing.storage.files import read_json
from offline_packing.storage.receipts import (
    STAGES,
    Receipt,
    Started,
    copy_path,
    receipt_path,
    started_path,
)

#: Beginnings of names of files without which the shards can still be compared with the plan.
ASIDE: Final = (
    "_packing/set_aside/",
    "_packing/files/",
    "_packing/plan/set_aside.parquet",
    "_packing/plan/summary.txt",
    ".nv-meta/",
)
_OF_SHARDS: Final = (".tar", ".tar.idx")


#: Faults of files that are missing, or not as they were written, by their names relative to the
#: output: 'is missing'.
Damage = dict[str, str]


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The task of comparing one file with its hash."""

    root: Path
    #: relative to the output, as is the file that records the hash
    name: str
    expected: str
    recorded_in: str
    number: int = 0


def check_file(task: FileCheck) -> Damage:
    """Return the damage to one file; nothing if it is whole."""
    try:
        if hash_metadata(task.root / task.name) == task.expected:
            return {}
        text = f"is not what was written: its hash differs from that in {task.recorded_in}"
    except FileNotFoundError:
        text = "is missing"
    except (OSError, StageError) as error:
        text = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return {task.name: text}


def find_damage(run: Run, stages: Sequence[str] = STAGES, *, shards: bool = True) -> Damage:
    """Return the damage to the stages of an output, complete or not, by name; perhaps without the
    files of shards, which take long to read."""
    at, found = run.workspace, Damage()
    checks: list[FileCheck] = []
    is_used = at.manifest.exists()  # whether something was made from the stage
    for stage in reversed(stages):
        path, copy = receipt_path(at.packing, stage), copy_path(at.packing, stage)
        receipt = _read(at, path, found, Receipt)
        copied = _read(at, copy, found, Receipt)
        started = _read(at, started_path(at.packing, stage), found, Started)
        if receipt and copied and receipt != copied:
            # Nothing says which of them is right.
            text = "is not what was written: receipt and copy differ"
            found |= {at.name_of(one): text for one in (path, copy)}
        if stage != "verify" and (is_used or receipt or copied):
            lost = [one for one in (path, copy) if not one.exists()]
            found |= {at.name_of(one): "is missing" for one in lost if not started}
        recorded = dict((copied or receipt or Receipt({}, {}, {})).files)
        if stage == "write" and started and not (receipt or copied):
            for fragment in sorted(at.write.rglob("*-??????.json")):
                try:
                    recorded |= files_of(ShardFragment.load(fragment))
                except StageError:
                    found[at.name_of(fragment)] = "is not what was written"
        is_used = is_used or bool(receipt or copied or started)
        for name, expected in recorded.items():
            if shards or not (name.endswith(_OF_SHARDS) or name.startswith("_packing/write/")):
                checks.append(FileCheck(at.root, name, expected, at.name_of(path), len(checks)))
    own = run.engine.share(checks)
    with run.bar("verify", len(own), "file") as bar:
        for one in run.engine.run(check_file, own):
            bar.update(1)
            found |= one
    return dict(sorted(found.items()))


def _read(at: Workspace, path: Path, found: Damage, form: Any) -> Any:
    """Return a receipt; None: it is not there, or damaged and added to `found`."""
    try:
        return read_json(path, form=form)
    except DamagedError:
        found[at.name_of(path)] = "is not what was written"
        return None
