"""Damage to the artifacts of the stages: each file against the hash recorded when it was written.

    _packing/index.json         hashes of index parts, set-aside parts and tables of files
    _packing/plan/stage.json    hashes of the plan's files, and of index.json
    manifest.json               hashes of shards, fragments and Energon's metadata; the content of
                                stage.json and its own

A bit that flips in a recorded hash shows as well: a problem names the file and what records it.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from offline_packing.errors import StageError
from offline_packing.index.table import IndexInfo
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.runs.artifacts import plan_files
from offline_packing.runs.manifest import hash_plan, recorded_layout
from offline_packing.runs.run import Fingerprint, Run, Workspace
from offline_packing.storage.files import hash_file, read_json, seal, to_json
from task_encoders.packs.manifest import Manifest
from task_encoders.storage.paths import REMEDY

#: Damage to these does not prevent comparing the shards with the plan.
_FOR_PEOPLE: Final = ("set_aside.parquet", "summary.txt")


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is missing, or not as it was written."""

    #: relative to the output
    name: str
    text: str
    #: whether the shards can still be compared with the plan
    is_aside: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.text}; {REMEDY}"


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The task of comparing one file with its hash."""

    root: Path
    path: Path
    expected: str
    #: the file that records the hash
    recorded_in: Path
    is_aside: bool = False
    number: int = 0


def check_file(task: FileCheck) -> Damage | None:
    """Damage to one file."""
    try:
        if hash_metadata(task.path) == task.expected:
            return None
        recorded_in = task.recorded_in.relative_to(task.root)
        text = f"differs from what was written: {recorded_in} records another hash"
    except FileNotFoundError:
        text = "is missing"
    except (OSError, StageError) as error:
        text = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    return Damage(str(task.path.relative_to(task.root)), text, task.is_aside)


def find_metadata_damage(run: Run, manifest: Manifest) -> list[Damage]:
    """Damage to the layout's metadata on all shards; somebody may have edited it."""
    root, recorded_in = run.workspace.root, run.workspace.manifest
    checks = [
        FileCheck(root, root / name, expected, recorded_in, is_aside=name.startswith(".nv-meta/"))
        for name, expected in manifest.metadata.items()
    ]
    return _run(run, checks)


def find_stage_damage(run: Run, manifest: Manifest | None) -> list[Damage]:
    """Damage to index and plan, and to the record of the shards' layout; the shards' fragments are
    checked with the shards. Without a manifest, only to index and plan."""
    at = run.workspace
    plan, plan_damage = _read_plan_info(run, manifest)
    index, index_damage = _read_index_info(run, plan)
    checks: list[FileCheck] = []
    if index is not None:
        for folder, hashes in index.hashes.items():
            for name, expected in hashes.items():
                path, is_aside = at.packing / folder / name, folder != at.index.name
                checks.append(FileCheck(at.root, path, expected, at.index_info, is_aside))
    if plan is not None:
        for name, expected in plan["files"].items():
            is_aside = name in _FOR_PEOPLE
            checks.append(FileCheck(at.root, at.plan / name, expected, at.plan_info, is_aside))
    started_damage = _started_damage(run, manifest, None if plan is None else plan["hash"])
    infos = {at.plan_info: plan_damage, at.index_info: index_damage, at.started: started_damage}
    found = [Damage(str(path.relative_to(at.root)), text) for path, text in infos.items() if text]
    if index is None and not index_damage:
        found += _unfinished_damage(at)
    return found + _run(run, checks)


def _unfinished_damage(at: Workspace) -> list[Damage]:
    """Return the parts of an unfinished index as damage, if nothing says what made them."""
    paths = [*at.index.glob("*.parquet"), *at.set_aside.glob("*.parquet"), at.index_started]
    with suppress(StageError):
        if read_json(at.index_started, form=Fingerprint) or len(paths) == 1:
            return []
    text = f"cannot be used, since {at.index_started.name} is not what was written"
    return [Damage(str(path.relative_to(at.root)), text) for path in paths]


def _started_damage(run: Run, manifest: Manifest | None, plan_hash: str | None) -> str:
    """The fault of write/started.json. Without shards, it may be missing."""
    path = run.workspace.started
    try:
        found = run.workspace.read_started()
    except StageError:
        return "is not what was written"
    if found is None:
        fragments = run.workspace.write.rglob("*-??????.json")
        return "is missing" if manifest or any(fragments) else ""
    if manifest is None or plan_hash is None:
        return ""
    is_whole = path.read_bytes() == to_json(seal(recorded_layout(run, manifest, plan_hash)))
    return "" if is_whole else "is not what was written"


def _run(run: Run, checks: Sequence[FileCheck]) -> list[Damage]:
    own = run.engine.share(replace(check, number=i) for i, check in enumerate(checks))
    found = [damage for damage in run.engine.run(check_file, own) if damage is not None]
    return sorted(found, key=lambda damage: damage.name)


def _read_plan_info(run: Run, manifest: Manifest | None) -> tuple[Mapping[str, Any] | None, str]:
    """The plan's stage.json, or its fault. It may be missing if nothing was made from it."""
    path = run.workspace.plan_info
    with suppress(StageError):
        info = run.workspace.read_plan()
        if info is None:
            return None, "is missing" if manifest or run.workspace.write.exists() else ""
        is_whole = sorted(info["files"]) == sorted(plan_files(run.config))
        is_whole = is_whole and path.read_bytes() == to_json(seal(info))
        if is_whole and (manifest is None or hash_plan(info) == manifest.plan):
            return info, ""
    return None, "is not what was written"


def _read_index_info(run: Run, plan: Mapping[str, Any] | None) -> tuple[IndexInfo | None, str]:
    """index.json, or its fault by the plan's stage.json, if that is whole."""
    path = run.workspace.index_info
    try:
        info = IndexInfo.load(path)
    except StageError as error:
        return None, f"cannot be used: {error}"
    if info is None:
        is_used = run.workspace.plan_info.exists() or run.workspace.started.exists()
        return None, "is missing" if is_used else ""
    if plan is not None and hash_file(path) != plan["fingerprint"].get("index"):
        recorded_in = run.workspace.plan_info.relative_to(run.workspace.root)
        return None, f"differs from what was written: {recorded_in} records another hash"
    return info, ""
