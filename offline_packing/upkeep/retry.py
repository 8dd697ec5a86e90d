"""retry: continue where a run ended; in a complete output, remove what is damaged and run again.

The result is used only if it equals what was there. What cannot be rebuilt is put back: a
damaged file may still be useful.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from offline_packing.errors import DamagedError, StageError
from offline_packing.index.info import IndexInfo
from offline_packing.index.pack_table import pack_table
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.shard_tasks import ShardTask
from offline_packing.layouts.shards import ShardFragment
from offline_packing.measure.measure import measure
from offline_packing.plan.plan import plan, restore_plan
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import check_layout, open_index, open_plan
from offline_packing.runs.manifest import (
    columns_match,
    finish_layout,
    read_manifest,
    save_manifest,
    with_columns,
)
from offline_packing.runs.run import Run
from offline_packing.runs.set_aside import check_set_aside
from offline_packing.runs.tasks import done, iterate_tasks, plan_shards, run_tasks
from offline_packing.storage.files import (
    hash_file,
    move_file,
    read_json,
    seal,
    to_json,
    write_atomically,
)
from offline_packing.storage.paths import remove_folder, scratch_folder
from offline_packing.upkeep.set_apart import put_back, set_apart
from offline_packing.verify.damage import (
    Damage,
    expected_started,
    find_metadata_damage,
    find_stage_damage,
)
from offline_packing.verify.shard import VerifyTask, find_damage, verify_tasks
from offline_packing.write.write import write
from task_encoders.families import model_cost
from task_encoders.packs.manifest import Manifest

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
    put_back(workspace)
    try:
        manifest = read_manifest(workspace.root)
    except DamagedError:
        manifest = None
    if manifest is not None:
        return _repair(run, manifest)
    with set_apart(workspace, [workspace.manifest]):
        return _go_on(run)


def _go_on(run: Run) -> str:
    """Without a manifest: list the incomplete stages, and damage to the others.
    Shards are written again where they or their fragment are damaged; all, where nothing says any
    more with which plan and settings they were written."""
    workspace = run.workspace
    damage = find_stage_damage(run, None)
    started = _read_whole(workspace.started).get("plan")
    unproved = [workspace.started, *workspace.write.rglob("*-??????.json")]
    with set_apart(workspace, () if started else unproved):
        _repair_stages(run, damage, started)
        samples = open_index(run)
        planned = plan(run, samples)
        broken: list[Path] = []
        if started:
            check_layout(run, planned.hash)
            broken = _broken_fragments(run, samples, planned.packs)
        elif not workspace.write.exists():
            check_set_aside(run)
        with set_apart(workspace, broken, keeps_new=True):
            shards = write(run, samples, planned).shards
    files = [one.name for one in damage] + [one.stem for one in broken]
    return f"{len(shards):,} shards are complete" + (f"; and {', '.join(files)}" if files else "")


def _read_whole(path: Path) -> Mapping[str, Any]:
    """One of our JSON files; empty where it is lost or damaged."""
    try:
        return read_json(path) or {}
    except DamagedError:
        return {}


def _broken_fragments(run: Run, samples: Index, packs: PackPlan) -> list[Path]:
    """The fragments that are damaged, or whose shards are."""
    shards = plan_shards(run, samples, packs)
    written = done(shards, lambda shard: run.workspace.fragment(shard.name))
    tasks = iterate_tasks(run, samples, packs, written, with_sources=False)
    return [path for path in run.engine.run(find_broken_fragment, tasks) if path is not None]


def find_broken_fragment(task: ShardTask) -> Path | None:
    """The fragment of a shard, if it is damaged, or the shard is not the one that it describes."""
    try:
        fragment = ShardFragment.load(task.fragment_path)
        is_whole = fragment.num_samples == len(task.samples) and not (
            LAYOUTS[task.layout].find_damage(task, fragment.xxh3_128)
        )
    except StageError:
        is_whole = False
    return None if is_whole else task.fragment_path


def _repair(run: Run, manifest: Manifest) -> str:
    """Repair a complete output. Raises StageError, at the end, if something cannot be rebuilt."""
    failure: StageError | None = None
    shards: list[str] = []
    with run.unpacked_files():
        damage = find_stage_damage(run, manifest)
        of_index = _of_index(damage)
        try:
            _repair_made(run, manifest, damage)
        except StageError as error:
            if not of_index:
                raise
            failure = StageError(f"{of_index[0]}, but: {error}; what else could be repaired is")
            damage = [one for one in damage if one not in of_index]
        # Without the index neither plan nor shards can be rebuilt.
        is_usable = failure is None or all(one.is_aside for one in of_index)
        if is_usable:
            if failure is not None:
                _repair_made(run, manifest, damage)
            shards = _repair_shards(run, manifest)
    files = [one.name for one in damage] + _repair_metadata(
        run, manifest, bool(shards), has_index=is_usable
    )
    if failure is not None:
        raise failure
    rest = f"; and {', '.join(files)}" if files else ""
    return (
        f"wrote {len(shards):,} damaged shards again: {', '.join(sorted(shards)) or 'none'}{rest}"
    )


def _of_index(damage: Iterable[Damage]) -> list[Damage]:
    return [one for one in damage if one.name.startswith(_OF_INDEX)]


def _repair_made(run: Run, manifest: Manifest, damage: Sequence[Damage]) -> None:
    """Repair the inputs of the shards, and the files that record them."""
    workspace = run.workspace
    _repair_stages(run, damage, manifest.plan)
    if len(damage) > len(_of_index(damage)):
        content = expected_started(run, manifest, read_json(workspace.plan_info))
        workspace.write.mkdir(exist_ok=True)
        write_atomically(workspace.started, to_json(seal(content)))


def _repair_stages(run: Run, damage: Sequence[Damage], expected: str | None) -> None:
    """Measure and plan again what is damaged. The plan, of which `restore_plan` expects something,
    shows whether the index is the same."""
    workspace = run.workspace
    of_index = _of_index(damage)
    others = {workspace.root / one.name for one in damage if one not in of_index}
    found = {} if workspace.plan_info in others else read_json(workspace.plan_info) or {}
    recorded = found.get("fingerprint", {}).get("index")
    with ExitStack() as stack:
        samples = _measure_again(run, stack, of_index, recorded) if of_index else open_index(run)
        is_another = recorded not in (None, hash_file(workspace.index_info))
        if is_another or others - {workspace.started}:
            restore_plan(run, samples, expected)


def _measure_again(
    run: Run, stack: ExitStack, damage: Sequence[Damage], recorded: str | None
) -> Index:
    """Measure what is damaged; everything, where nothing says any more which parts are. An index
    without index.json, from which nothing was made, is only unfinished. Files come back if the
    stack ends with an error. `recorded`: the hash of index.json, if that is known."""
    workspace = run.workspace
    folders = (workspace.index, workspace.set_aside)
    names = {Path(one.name).name for one in damage}
    is_lost = workspace.index_info.name in names
    was_used = workspace.plan.exists() or workspace.write.exists()
    begins = is_lost and was_used and recorded is None
    begins |= workspace.index_started.exists() and not _read_whole(workspace.index_started)

    def begin(*, everything: bool) -> None:
        files = [workspace.index_info, *workspace.files.glob("*")]
        if everything:
            files += [path for folder in folders for path in folder.glob("*")]
        else:
            files += [folder / name for folder in folders for name in names]
        stack.enter_context(set_apart(workspace, files))

    begin(everything=begins)
    samples = measure(run)
    if is_lost and not begins and recorded not in (None, hash_file(workspace.index_info)):
        begin(everything=True)
        samples = measure(run)
    return samples


def _repair_metadata(
    run: Run, manifest: Manifest, has_new_shards: bool, *, has_index: bool
) -> list[str]:
    """Names of the layout's files that were damaged; and of the manifest, where it is wrong about
    them, or about versions of libraries or, if there is a usable index, the content of packs. A
    layout may join new shards with the others."""
    damage = find_metadata_damage(run, manifest)
    now = manifest
    if damage or has_new_shards:
        now = finish_layout(run, manifest)
    index = IndexInfo.load(run.workspace.index_info)
    if index is not None:
        now = now.model_copy(update={"library_versions": index.versions})
    if has_index:
        samples, packs = open_index(run), open_plan(run).packs
        table = pack_table(samples, packs, model_cost(run.config.model))
        if not columns_match(now, table):
            now = with_columns(now, table)
    names = [one.name for one in damage]
    if now != manifest:  # its own bits, or another version of Energon
        save_manifest(run, now)
        names.append(run.workspace.manifest.name)
    return names


def _repair_shards(run: Run, manifest: Manifest) -> list[str]:
    """Names of the shards that had to be written again."""
    samples, packs = open_index(run), open_plan(run).packs
    for left_by_kill in run.workspace.write.rglob("*.repair"):
        remove_folder(left_by_kill)
    shards = plan_shards(run, samples, packs)
    tasks = verify_tasks(run, samples, packs, manifest, shards, with_samples=False)
    numbers = {number for number, damaged in run.engine.run(is_damaged, tasks) if damaged}
    damaged = [shard for shard in shards if shard.number in numbers]
    tasks = verify_tasks(run, samples, packs, manifest, damaged, deep=True)
    return list(run_tasks(run, repair_shard, tasks))


def is_damaged(task: VerifyTask) -> tuple[int, bool]:
    """Number of a shard, and whether it or its fragment is missing or damaged."""
    return task.shard.number, bool(find_damage(task))


def repair_shard(task: VerifyTask) -> str:
    """Write a shard again; returns its name. It is first written elsewhere, and its hash, not the
    times of the source's files, decides whether it is the same: a JSONL file may have grown since,
    or the source may have moved. Raises StageError if the source no longer gives the same bytes."""
    shard = task.shard
    name = shard.fragment_path.with_suffix(".repair").name
    scratch = scratch_folder(shard.fragment_path.parent) / name
    scratch.mkdir(parents=True)
    try:
        with shard.rows_at_hand():
            fragment = LAYOUTS[shard.layout].write(
                replace(shard, folder=scratch, check_times=False)
            )
        if fragment.xxh3_128 != task.expected.xxh3_128:
            raise StageError(
                f"{fragment.name} cannot be restored: the source changed; pack it again "
                "with another output.path"
            )
        for path in sorted(scratch.rglob("*")):
            target = shard.folder / path.relative_to(scratch)
            if path.is_dir():
                target.mkdir(exist_ok=True)
            else:
                move_file(path, target)
        fragment.save(shard.fragment_path)
    finally:
        remove_folder(scratch)
    return fragment.name
