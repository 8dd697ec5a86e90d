"""retry: continue where a run ended; in a complete output, remove what is damaged and run again.

The result is used only if it equals what was there. What cannot be rebuilt is put back: a
damaged file may still be useful.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from offline_packing.errors import DamagedError, StageError
from offline_packing.index.table import IndexInfo
from offline_packing.layouts import LAYOUTS
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan, restore_plan
from offline_packing.runs.artifacts import open_index, open_plan
from offline_packing.runs.losses import check_losses
from offline_packing.runs.manifest import Manifest, finish_layout, read_manifest
from offline_packing.runs.run import Run, Workspace
from offline_packing.runs.tasks import plan_shards
from offline_packing.storage.files import hash_file, read_json, to_json, write_atomically
from offline_packing.verify.damage import (
    Damage,
    expected_started,
    find_metadata_damage,
    find_stage_damage,
)
from offline_packing.verify.shard import VerifyTask, find_damage, verify_tasks
from offline_packing.write.write import write

#: Names of the index's files, below the output, begin with one of these.
_OF_INDEX: Final = ("_packing/index", "_packing/set_aside", "_packing/files")


def retry(run: Run) -> str:
    """Complete an output, or restore it to the bytes that were written, and say what was done. The
    source is needed for the index and for shards only. Raises StageError if something cannot be
    rebuilt, most likely because the source has changed; it is left as it was, and everything else
    is repaired."""
    output = run.config.output.model_copy(update={"overwrite": False})
    run = replace(run, config=run.config.model_copy(update={"output": output}))
    workspace = run.workspace
    workspace.remove_temporaries()
    _put_back(workspace, instead=False)  # left by a killed retry
    try:
        manifest = read_manifest(run.workspace)
    except DamagedError:
        with _set_apart(workspace, [workspace.manifest]):
            _go_on(run)
        return f"wrote {workspace.manifest.name} again; {retry(run)}"
    if manifest is None:
        return f"{len(_go_on(run)['shards']):,} shards are complete"
    return _repair(run, manifest)


def _go_on(run: Run) -> Manifest:
    """The stages that are not complete, and parts of the index that are damaged."""
    damage = _of_index(find_stage_damage(run, None))
    if damage:
        with _set_apart(run.workspace, _index_files(run.workspace, damage)):
            measure(run)
    samples = open_index(run)
    planned = plan(run, samples)
    if not run.workspace.write.exists():
        check_losses(run)
    return write(run, samples, planned)


def _repair(run: Run, manifest: Manifest) -> str:
    """A complete output. Raises StageError, at the end, if something could not be rebuilt."""
    failure: StageError | None = None
    shards: list[str] = []
    with run.unpacked_files():
        damage = find_stage_damage(run, manifest)
        of_index = _of_index(damage)
        try:
            _repair_stages(run, manifest, damage)
        except StageError as error:
            if not of_index:
                raise
            failure = StageError(f"{of_index[0]}, but: {error}; what else could be repaired is")
            damage = [one for one in damage if one not in of_index]
        # Without the index neither plan nor shards can be rebuilt.
        if failure is None or all(one.is_aside for one in of_index):
            if failure is not None:
                _repair_stages(run, manifest, damage)
            shards = _repair_shards(run, manifest)
    files = [one.name for one in damage] + _repair_metadata(run, manifest, bool(shards))
    if failure is not None:
        raise failure
    rest = f"; and {', '.join(files)}" if files else ""
    return (
        f"wrote {len(shards):,} damaged shards again: {', '.join(sorted(shards)) or 'none'}{rest}"
    )


def _of_index(damage: Iterable[Damage]) -> list[Damage]:
    return [one for one in damage if one.name.startswith(_OF_INDEX)]


def _index_files(workspace: Workspace, damage: Iterable[Damage]) -> list[Path]:
    """What is measured again after damage to the index: always index.json and the tables of
    files, and both tables of a damaged part."""
    names = {Path(one.name).name for one in damage}
    parts = [folder / name for folder in (workspace.index, workspace.set_aside) for name in names]
    return [workspace.index_info, *workspace.files.glob("*"), *parts]


def _repair_stages(run: Run, manifest: Manifest, damage: Sequence[Damage]) -> None:
    """Measure and plan again what is damaged. The plan shows whether the index is the same."""
    workspace = run.workspace
    of_index = _of_index(damage)
    others = [workspace.root / one.name for one in damage if one not in of_index]
    with _set_apart(workspace, _index_files(workspace, of_index) if of_index else ()):
        samples = measure(run) if of_index else open_index(run)
        is_same = all(path == workspace.started for path in others) and (
            read_json(workspace.plan_info)["fingerprint"]["index"]
            == hash_file(workspace.index_info)
        )
        if not is_same:
            restore_plan(_as_planned(run, manifest), samples, manifest["plan"])
    if others:
        content = expected_started(run, manifest, read_json(workspace.plan_info)["hash"])
        workspace.write.mkdir(exist_ok=True)
        write_atomically(workspace.started, content)


def _as_planned(run: Run, manifest: Manifest) -> Run:
    """A run with the `pack.sample_order` of the manifest; versions that did not have it wrote
    samples as they were composed."""
    order = {"sample_order": manifest["config"]["pack"].get("sample_order", "composed")}
    config = run.config.model_copy(update={"pack": run.config.pack.model_copy(update=order)})
    return replace(run, config=config)


def _repair_metadata(run: Run, manifest: Manifest, has_new_shards: bool) -> list[str]:
    """Names of the layout's files that were damaged; and of the manifest, where it is wrong about
    them or about versions of libraries. A layout may join new shards with the others."""
    damage = find_metadata_damage(run, manifest)
    now = manifest
    if damage or has_new_shards:
        now = finish_layout(run, manifest)
    index = IndexInfo.load(run.workspace.index_info)
    if index is not None:
        now = {**now, "library_versions": index.versions}
    names = [one.name for one in damage]
    if now != manifest:  # its own bits, or another version of Energon
        write_atomically(run.workspace.manifest, to_json(now))
        names.append(run.workspace.manifest.name)
    return names


def _repair_shards(run: Run, manifest: Manifest) -> list[str]:
    """Names of the shards that had to be written again."""
    samples, packs = open_index(run), open_plan(run).packs
    for left_by_kill in run.workspace.write.glob("*.repair"):
        shutil.rmtree(left_by_kill)
    shards = plan_shards(run, samples, packs)
    tasks = verify_tasks(run, samples, packs, manifest, shards, deep=False)
    numbers = {number for number, damaged in run.engine.run(is_damaged, tasks) if damaged}
    damaged = [shard for shard in shards if shard.number in numbers]
    tasks = verify_tasks(run, samples, packs, manifest, damaged, deep=True)
    return list(run.engine.run(repair_shard, tasks))


def is_damaged(task: VerifyTask) -> tuple[int, bool]:
    """Number of a shard, and whether it or its fragment is missing or damaged."""
    return task.shard.number, bool(find_damage(task))


def repair_shard(task: VerifyTask) -> str:
    """Write a shard again; returns its name. It is first written elsewhere, and its hash, not the
    times of the source's files, decides whether it is the same: a JSONL file may have grown since,
    or the source may have moved. Raises StageError if the source no longer gives the same bytes."""
    shard = task.shard
    scratch = shard.fragment_path.with_suffix(".repair")
    scratch.mkdir()
    try:
        with shard.rows_at_hand():
            fragment = LAYOUTS[shard.layout].write(
                replace(shard, folder=scratch, check_times=False)
            )
        if fragment.xxh3_128 != task.expected["xxh3_128"]:
            raise StageError(
                f"{fragment.name} cannot be restored: the source changed; pack it again "
                "with another output.path"
            )
        for path in sorted(scratch.rglob("*")):
            target = shard.folder / path.relative_to(scratch)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                path.replace(target)
        fragment.as_recorded(task.expected["fragment_xxh3_128"]).save(shard.fragment_path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return fragment.name


@contextmanager
def _set_apart(workspace: Workspace, paths: Iterable[Path]) -> Iterator[None]:
    """Move files away while the block recreates them; if it fails, they come back."""
    for path in filter(Path.exists, paths):
        target = workspace.damaged / path.relative_to(workspace.root)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)
    try:
        yield
    except BaseException:
        _put_back(workspace, instead=True)
        raise
    shutil.rmtree(workspace.damaged, ignore_errors=True)


def _put_back(workspace: Workspace, *, instead: bool) -> None:
    """Files that were set apart, where there are no new ones, or `instead` of these."""
    for path in [one for one in workspace.damaged.rglob("*") if one.is_file()]:
        target = workspace.root / path.relative_to(workspace.damaged)
        if instead or not target.exists():
            path.replace(target)
    shutil.rmtree(workspace.damaged, ignore_errors=True)
