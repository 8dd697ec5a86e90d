"""Damage to what the stages left behind: each file against the hash recorded when it was written.

    _packing/index.json         hashes of index parts, set-aside parts and tables of files
    _packing/plan/stage.json    hashes of the plan's files, and of index.json
    manifest.json               hashes of shards, fragments and Energon's metadata; what stage.json
                                says; its own content

A bit that flips in a recorded hash shows as well: a problem names the file and what records it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from offline_packing.config.packing import OutputConfig
from offline_packing.errors import StageError
from offline_packing.index.table import IndexInfo
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.runs.artifacts import PLAN_FILES, layout_fingerprint
from offline_packing.runs.manifest import Manifest, hash_plan
from offline_packing.runs.run import Run
from offline_packing.storage.files import hash_bytes, hash_file, read_json, to_json

#: Damage to these does not prevent comparing the shards with the plan.
_FOR_PEOPLE: Final = ("set_aside.parquet", "summary.txt")


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is missing, or is not what was written."""

    #: relative to the output
    name: str
    text: str
    #: whether the shards can still be compared with the plan
    is_aside: bool = False

    def __str__(self) -> str:
        return f"{self.name} {self.text}; retry rebuilds it"


@dataclass(frozen=True, slots=True)
class FileCheck:
    """The task of comparing one file with its hash."""

    number: int
    root: Path
    path: Path
    expected: str
    #: the file that records the hash
    recorded_in: Path
    is_aside: bool = False


def check_file(task: FileCheck) -> Damage | None:
    """What is wrong with a file, if anything is."""
    name, recorded_in = (str(p.relative_to(task.root)) for p in (task.path, task.recorded_in))
    try:
        found = hash_metadata(task.path)
    except FileNotFoundError:
        return Damage(name, "is missing", task.is_aside)
    except (OSError, StageError) as error:
        return Damage(name, f"cannot be read: {error}", task.is_aside)
    if found != task.expected:
        text = f"differs from what was written: {recorded_in} records another hash"
        return Damage(name, text, task.is_aside)
    return None


def find_metadata_damage(run: Run, manifest: Manifest) -> list[Damage]:
    """Damage to the layout's metadata on all shards; somebody may have edited it."""
    root = run.workspace.root
    checks = (
        FileCheck(i, root, root / name, expected, run.workspace.manifest, is_aside=True)
        for i, (name, expected) in enumerate(manifest["metadata"].items())
    )
    return _run(run, list(checks))


def find_stage_damage(run: Run, manifest: Manifest | None) -> list[Damage]:
    """Damage to index and plan, and to what says which layout the shards were written in; the
    shards' fragments are checked with the shards. Without a manifest, only to the index,
    if it is complete."""
    plan_info, damage = (None, []) if manifest is None else _read_plan_info(run, manifest)
    index_info, index_damage = _read_index_info(run, plan_info)
    damage += index_damage
    if manifest is not None and plan_info is not None:
        damage += _started_damage(run, manifest, plan_info)
    checks: list[FileCheck] = []
    if index_info is not None:
        checks += _index_checks(run, index_info)
    if plan_info is not None:
        checks += _plan_checks(run, plan_info)
    numbered = [replace(check, number=i) for i, check in enumerate(checks)]
    return damage + _run(run, numbered)


def expected_started(run: Run, manifest: Manifest, plan_hash: str) -> bytes:
    """The content of write/started.json, by the configuration that the manifest holds."""
    output = {**manifest["config"]["output"], "path": run.config.output.path}
    return to_json(layout_fingerprint(OutputConfig(**output), plan_hash))


def _run(run: Run, checks: Sequence[FileCheck]) -> list[Damage]:
    own = run.engine.share(checks)
    found = [damage for damage in run.engine.run(check_file, own) if damage is not None]
    return sorted(found, key=lambda damage: damage.name)


def _read_plan_info(run: Run, manifest: Manifest) -> tuple[Mapping[str, Any] | None, list[Damage]]:
    """The plan's stage.json; None if it cannot be relied on."""
    path = run.workspace.plan_info
    name = str(path.relative_to(run.workspace.root))
    try:
        info = read_json(path)
        if info is None:
            return None, [Damage(name, "is missing")]
        is_whole = sorted(info["files"]) == sorted(PLAN_FILES) and path.read_bytes() == to_json(
            info
        )
        if is_whole and hash_plan(info) == manifest["plan"]:
            return info, []
    except (StageError, LookupError, TypeError):
        pass  # a damaged file can have any form
    return None, [Damage(name, "is not what was written")]


def _read_index_info(
    run: Run, plan_info: Mapping[str, Any] | None
) -> tuple[IndexInfo | None, list[Damage]]:
    """index.json; None if it cannot be relied on."""
    workspace = run.workspace
    name = str(workspace.index_info.relative_to(workspace.root))
    try:
        info = IndexInfo.load(workspace.index_info)
    except StageError as error:
        return None, [Damage(name, f"cannot be used: {error}")]
    if info is None:
        return None, [Damage(name, "is missing")]
    if plan_info is not None:
        found = hash_file(workspace.index_info)
        if found != plan_info["fingerprint"]["index"]:
            recorded_in = workspace.plan_info.relative_to(workspace.root)
            text = f"differs from what was written: {recorded_in} records another hash"
            return None, [Damage(name, text)]
    return info, []


def _started_damage(run: Run, manifest: Manifest, plan_info: Mapping[str, Any]) -> list[Damage]:
    root, path = run.workspace.root, run.workspace.started
    expected = hash_bytes(expected_started(run, manifest, plan_info["hash"]))
    check = FileCheck(0, root, path, expected, run.workspace.manifest)
    damage = check_file(check)
    return [] if damage is None else [damage]


def _index_checks(run: Run, info: IndexInfo) -> Iterator[FileCheck]:
    workspace = run.workspace
    for folder, hashes in info.hashes.items():
        for name, expected in hashes.items():
            yield FileCheck(
                0,
                workspace.root,
                workspace.packing / folder / name,
                expected,
                workspace.index_info,
                is_aside=folder != workspace.index.name,
            )


def _plan_checks(run: Run, info: Mapping[str, Any]) -> Iterator[FileCheck]:
    workspace = run.workspace
    for name, expected in info["files"].items():
        yield FileCheck(
            0,
            workspace.root,
            workspace.plan / name,
            expected,
            workspace.plan_info,
            is_aside=name in _FOR_PEOPLE,
        )
