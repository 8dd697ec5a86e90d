"""write: plan -> packed shards, metadata, manifest.

A task is one output shard: it reads the records and media of its samples from the source, copies
the bytes of the media unchanged, and leaves a fragment that describes the shard. The
manifest is put together from the fragments and written last.

A shard that cannot be written does not stop the others: the reason is kept with the fragments,
and the stage fails when the others are done.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.errors import ChangedError, DiskFullError, ShareDoneError, StageError
from offline_packing.index.table import Index
from offline_packing.layouts import container
from offline_packing.layouts.container import shard_file
from offline_packing.layouts.shards import (
    PlannedShard,
    ShardFragment,
    ShardTask,
    read_planned,
)
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.artifacts import (
    StoredPlan,
    changed_fields,
    check_layout,
    shards_fingerprint,
)
from offline_packing.runs.manifest import (
    read_manifest,
    recorded_layout,
    restore_metadata,
    write_manifest,
)
from offline_packing.runs.repair import end_repair, put_back, set_apart
from offline_packing.runs.run import Run, Workspace
from offline_packing.runs.tasks import (
    check_all_done,
    check_media,
    estimate_bytes,
    iterate_tasks,
    lost_shards,
    plan_shards,
    run_tasks,
)
from offline_packing.sources.formats.tables import ParquetSource
from offline_packing.sources.reading.rows import WANTED_SHARE
from offline_packing.storage.files import (
    hash_file,
    is_remote,
    move_file,
    remove_folder,
    seal,
    to_json,
    write_atomically,
)
from task_encoders.packs.manifest import Manifest

logger = logging.getLogger(__name__)

#: After this many failed shards the rest would most likely fail, too.
_MAX_FAILURES: Final = 20


def write(run: Run, samples: Index, plan: StoredPlan) -> Manifest:
    """Write the packed dataset, or find it complete; returns the manifest. Raises StageError if
    there are shards of another plan or layout, or a shard could not be written (a full disk, a
    changed source); ShareDoneError if only shards of other ranks are left."""
    workspace = run.workspace
    manifest = _start(run, plan)
    try:
        with run.unpacked_files():
            manifest = _write(run, samples, plan, manifest)
    except (DiskFullError, ShareDoneError):
        raise
    except StageError:
        put_back(workspace)
        raise
    end_repair(workspace)
    return manifest


def _write(run: Run, samples: Index, plan: StoredPlan, manifest: Manifest | None) -> Manifest:
    workspace = run.workspace
    if manifest is not None:
        lines = ((str(Path(line.name).with_suffix("")), line.split) for line in manifest.shards)
        files = (workspace.root / name for name in manifest.metadata)
        is_complete = not lost_shards(run, lines) and all(path.exists() for path in files)
        if is_complete:
            logger.info("write: complete (%d shards), nothing to do", len(manifest.shards))
            return restore_metadata(run, manifest)
        if run.engine.IS_SHARED:
            raise StageError(f"files of {workspace.root} are missing; write with engine.name=local")
    shards = plan_shards(run, samples, plan.packs)
    _warn_of_small_shards(run, shards)
    _run_tasks(run, samples, plan.packs, shards, manifest)
    workspace.remove_temporaries()  # of this and earlier runs, and of workers that died
    if manifest is not None:
        return restore_metadata(run, manifest)
    fragments = [workspace.fragment(shard.name) for shard in shards]
    return write_manifest(run, samples, plan, fragments)


def _warn_of_small_shards(run: Run, shards: Sequence[PlannedShard]) -> None:
    """Warn of `max_shard_bytes` below most packs, as of bytes that were meant to be megabytes."""
    single = sum(shard.num_packs == 1 for shard in shards)
    output = run.config.output
    if output.max_shard_bytes and output.packs_per_shard > 1 and single > max(len(shards) / 2, 1):
        logger.warning(
            "write: %s of %s shards hold one pack: output.max_shard_bytes %s is in bytes; raise it",
            f"{single:,}",
            f"{len(shards):,}",
            f"{output.max_shard_bytes:,}",
        )


def preview_write(run: Run, samples: Index, stored: StoredPlan) -> str:
    """Describe what `write` would write; writes nothing."""
    plan, manifest = stored.packs, read_manifest(run.workspace.root)
    if manifest is not None:
        written_as = run.workspace.read_started() or {}
        if not changed_fields(written_as, shards_fingerprint(run, stored.hash)):
            return f"write: complete ({len(manifest.shards):,} shards), nothing to do"
        if not run.config.output.overwrite:
            check_layout(run, stored.hash)
    shards = plan_shards(run, samples, plan)
    num_bytes = int(estimate_bytes(run, samples, plan).sum())
    unpacked = _estimate_unpacked_bytes(samples, len(shards))
    meanwhile = (
        f"; meanwhile up to {unpacked:,} bytes of unpacked files in {run.workspace.unpacked}"
        if unpacked
        else ""
    )
    return (
        f"would write {len(plan.sample_ids):,} samples in {plan.num_packs:,} packs, "
        f"{len(shards):,} shards, about {num_bytes:,} bytes to {run.workspace.root}{meanwhile}"
    )


def _estimate_unpacked_bytes(samples: Index, num_shards: int) -> int:
    """Upper limit of the bytes of all copies while this many shards are written.

    A compressed file is unpacked as far as its last sample. Row groups are only copied where each
    shard uses little of them, as in a plan of many shards without locality.
    """
    in_rows = 0
    ends = []  # of the last sample of each compressed file, in each part
    file = ["source_id", "container"]
    for table in samples.parts("source_id", "json", "media"):
        records, media = table["json"].combine_chunks(), table["media"].combine_chunks()
        names = ("kind", "container", "offset", "size")
        kinds, containers, offsets, sizes = (
            pa.concat_arrays([records.field(name), media.flatten().field(name)]) for name in names
        )
        rows = np.concatenate([np.arange(len(table)), pc.list_parent_indices(media).to_numpy()])
        owners = table["source_id"].take(pa.array(rows)).combine_chunks()
        in_rows += pc.sum(sizes.filter(pc.equal(kinds, ParquetSource.KIND))).as_py() or 0
        found = pa.table([owners, containers, pc.add(offsets, sizes)], [*file, "end"])
        found = found.filter(pc.starts_with(kinds, "stream"))
        ends.append(found.group_by(file).aggregate([("end", "max")]))
    last = pa.concat_tables(ends).group_by(file).aggregate([("end_max", "max")])
    in_files = pc.sum(last["end_max_max"]).as_py() or 0
    return in_files + (in_rows if num_shards * WANTED_SHARE > 1 else 0)


def _start(run: Run, plan: StoredPlan) -> Manifest | None:
    """Refuse shards of another plan or layout, or remove them; returns the manifest of the shards
    that stay, if they are complete."""
    started, manifest = run.workspace.started, read_manifest(run.workspace.root)
    found = run.workspace.read_started()
    if found is None and manifest is not None:
        found = recorded_layout(run, manifest, plan.hash)
    elif found is None:  # nothing says how shards were written
        set_apart(run.workspace, run.workspace.write.rglob("*-??????.json"))
    fingerprint = shards_fingerprint(run, plan.hash)
    if found is not None and changed_fields(found, fingerprint):
        if not run.config.output.overwrite:
            check_layout(run, plan.hash, found)
        logger.warning("write: overwriting what was written with other settings")
        run.discard_shards()
        manifest = None
    run.workspace.write.mkdir(parents=True, exist_ok=True)
    content = to_json(seal(fingerprint))
    if not started.exists() or started.read_bytes() != content:  # else its time would change
        write_atomically(started, content)
    return manifest


def _run_tasks(
    run: Run,
    samples: Index,
    plan: PackPlan,
    shards: Sequence[PlannedShard],
    manifest: Manifest | None,
) -> None:
    """Write the missing shards. What is recorded of a shard, in the manifest or its fragment, it
    has to become again. Raises StageError if any is still missing at the end."""

    def marker(shard: PlannedShard) -> Path:
        return run.workspace.fragment(shard.name)

    lost = lost_shards(run, ((shard.name, shard.split) for shard in shards))
    left = [shard for shard in shards if shard.name in lost]
    if left:
        check_media(run, samples)
        if len(left) < len(shards):
            there = len(shards) - len(left)
            logger.info("write: %d of %d tasks are done already", there, len(shards))
    for folder in {marker(shard).parent for shard in left}:
        folder.mkdir(exist_ok=True)
    own = run.engine.share(left)
    recorded = {line.name: line.xxh3_128 for line in manifest.shards} if manifest else {}
    if manifest is None:
        fragments = map(ShardFragment.load, filter(Path.exists, map(marker, own)))
        recorded = {fragment.name: fragment.xxh3_128 for fragment in fragments}
    failures: dict[str, str] = {}
    with run.bar("write", plan.num_packs, "pack") as bar:
        bar.update(plan.num_packs - sum(shard.num_packs for shard in left))
        tasks = (
            replace(task, recorded=recorded.get(shard_file(task.shard.name)))
            for task in iterate_tasks(run, samples, plan, own)
        )
        for name, failure in run_tasks(run, write_shard, tasks, bar.update):
            if failure is not None:
                logger.error("write: %s failed: %s", name, failure)
                failures[name] = failure
            if len(failures) == _MAX_FAILURES:
                break
    if failures:
        name = min(failures)
        stopped = " and the others were not tried" if len(failures) == _MAX_FAILURES else ""
        raise StageError(
            f"{len(failures)} of {len(own)} shards could not be written{stopped}; "
            f"{name}: {failures[name]}"
        )
    check_all_done(run, "write", shards, marker)


def write_shard(task: ShardTask) -> tuple[str, str | None]:
    """Write one shard, and last its fragment; returns its name, and why it could not be written.
    Raises DiskFullError, or StageError where the output is gone: others would fail, too."""
    failed = task.fragment_path.with_suffix(".failed")
    _check_in_place(task)
    try:
        with task.rows_at_hand():
            fragment = container.write_shard(task) if not task.recorded else _rewrite(task)
    except DiskFullError:
        raise
    except (StageError, OSError) as error:
        _check_in_place(task)
        write_atomically(failed, str(error).encode())
        return task.shard.name, str(error)
    _check_in_place(task)
    fragment.save(task.fragment_path)
    failed.unlink(missing_ok=True)
    return task.shard.name, None


def _rewrite(task: ShardTask) -> ShardFragment:
    """Write a shard beside the output, and move its missing or damaged files into the output. The
    shard's hash, not the times of source files, decides whether it is the same: the source may have
    grown, or moved. Raises ChangedError if the bytes differ."""
    folder = task.unpack_folder.with_name("again") / task.shard.name
    remove_folder(folder)  # left by a killed run
    folder.mkdir(parents=True)
    fragment = container.write_shard(replace(task, folder=folder, check_times=False))
    if fragment.xxh3_128 != task.recorded:
        changed = {name for one in read_planned(task.samples) for name in task.changed_files(one)}
        names = sorted(changed) or sorted({source.path for source in task.sources})
        raise ChangedError(", ".join(names[:3]), "it gives another shard than was recorded")
    for path in sorted(folder.rglob("*")):
        target = task.folder / str(path.relative_to(folder))
        if path.is_dir():
            target.mkdir(exist_ok=True)
        elif not target.exists() or hash_file(target) != hash_file(path):
            set_apart(Workspace(task.folder), [target])
            move_file(path, target)
    remove_folder(folder)
    return fragment


def _check_in_place(task: ShardTask) -> None:
    """Check that the output is still there, before a part of another is made in its place."""
    folder = task.fragment_path.parent
    if not is_remote(folder) and not folder.is_dir():  # folders of objects come and go with them
        raise StageError(
            f"output {str(task.folder)!r} was moved or removed while it was written; move it back "
            "and run again, or run again to begin anew"
        )
