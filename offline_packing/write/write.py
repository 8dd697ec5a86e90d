"""write: plan -> packed shards, metadata, manifest.

A task is one output shard: it reads the records and media of its samples from the source, copies
the bytes of the media as they are, and leaves a fragment that says what the shard holds. The
manifest is put together from the fragments and written last.

A shard that cannot be written does not stop the others: why is kept beside the fragments, and the
stage fails when the others are done.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from offline_packing.config.packing import OutputConfig
from offline_packing.errors import DiskFullError, ShareDoneError, StageError
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.fragments import ShardFragments
from offline_packing.layouts.shard_layout import Shard, estimate_pack_bytes, plan_shards
from offline_packing.layouts.shard_tasks import ShardTask, iterate_tasks
from offline_packing.plan.plan import check_plan, load_packs, open_index
from offline_packing.planner.pack_plan import PackPlan
from offline_packing.runs.manifest import Manifest, read_manifest, write_manifest
from offline_packing.runs.run import Run
from offline_packing.storage.files import read_json, to_json, write_atomically
from offline_packing.storage.fingerprint import Fingerprint, changed_fields, check_fingerprint
from offline_packing.write.unpacking import estimate_unpacked_bytes

logger = logging.getLogger(__name__)

#: So many failed shards say that the next would fail as well.
_MAX_FAILURES: Final = 20


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What became of one shard."""

    name: str
    num_packs: int
    #: why it could not be written
    failure: str | None = None


def open_plan(run: Run) -> tuple[Index, PackPlan, dict[str, Any]]:
    """Index, plan and the plan's stage.json. Raises StageError if either is not complete or is
    damaged, or the plan was made with other settings or of another index."""
    samples = open_index(run)
    info = read_json(run.workspace.plan_info)
    if info is None:
        raise StageError(f"no complete plan in {run.workspace.root}; run plan first")
    check_plan(run, info)
    return samples, load_packs(run, info), info


def write(run: Run) -> Manifest:
    """Write the packed dataset, or find it complete; returns the manifest.

    Raises:
        StageError: no plan, shards of another plan or layout, a full disk, or shards that could
            not be written, perhaps because the source changed.
        ShareDoneError: this rank's shards are written, those of others are not.
    """
    workspace = run.workspace
    samples, plan, info = open_plan(run)
    _start(run, layout_fingerprint(run.config.output, info["hash"]))
    with run.unpacked_files():
        manifest = read_manifest(run)
        if manifest is not None:
            logger.info("write: complete (%d shards), nothing to do", len(manifest["shards"]))
            return manifest
        LAYOUTS[run.config.output.layout].check_ready()
        shards = plan_shards(run.config.output, samples, plan)
        _run_tasks(run, samples, plan, shards)
        workspace.remove_temporaries()  # of this and earlier runs, and of workers that died
        fragments = ShardFragments([workspace.fragment(shard.name) for shard in shards])
        return write_manifest(run, samples.info, info, fragments)


def preview_write(run: Run) -> str:
    """What `write` would write; nothing is written."""
    samples, plan, _ = open_plan(run)
    shards = plan_shards(run.config.output, samples, plan)
    num_bytes = int(estimate_pack_bytes(samples, plan).sum())
    unpacked = estimate_unpacked_bytes(samples, len(shards))
    meanwhile = (
        f"; meanwhile up to {unpacked:,} bytes of unpacked files in {run.workspace.unpacked}"
        if unpacked
        else ""
    )
    return (
        f"would write {len(plan.sample_ids):,} samples in {plan.num_packs:,} packs, "
        f"{len(shards):,} shards, about {num_bytes:,} bytes to {run.workspace.root}{meanwhile}"
    )


def layout_fingerprint(output: OutputConfig, plan_hash: str) -> Fingerprint:
    """What the shards depend on beside index and source."""
    return {
        "plan": plan_hash,
        "output.layout": output.layout,
        "output.packs_per_shard": output.packs_per_shard,
        "output.max_shard_bytes": output.max_shard_bytes or 0,
        "output.split": ", ".join(f"{name} {share:g}" for name, share in output.split.items()),
        "output.key_prefix": output.key_prefix,
    }


def check_layout(run: Run, found: Fingerprint, fingerprint: Fingerprint) -> None:
    """Raise StageError if the shards are of another plan or layout."""
    check_fingerprint(
        found,
        fingerprint,
        artifact=f"the shards in {run.workspace.root}",
        remedy="write again with output.overwrite=true, or choose another output.path",
    )


def _start(run: Run, fingerprint: Fingerprint) -> None:
    """Refuse to go on with shards of another plan or layout, or remove them."""
    started = run.workspace.started
    found = read_json(started)
    if found is not None and changed_fields(found, fingerprint):
        if not run.config.output.overwrite:
            check_layout(run, found, fingerprint)
        logger.warning("write: written otherwise before; overwriting")
        run.workspace.discard_shards()
    run.workspace.write.mkdir(parents=True, exist_ok=True)
    write_atomically(started, to_json(fingerprint))


def _run_tasks(run: Run, samples: Index, plan: PackPlan, shards: list[Shard]) -> None:
    """Write the shards that are not there yet. Raises StageError where any is not in the end."""
    remaining = unfinished(run, shards)
    if len(remaining) < len(shards):
        finished = len(shards) - len(remaining)
        logger.info("write: %d of %d shards are there already", finished, len(shards))
    own = [shard for shard in remaining if run.engine.owns(shard)]
    failures: dict[str, str] = {}
    with run.bar("write", plan.num_packs, "pack") as bar:
        bar.update(plan.num_packs - sum(shard.num_packs for shard in remaining))
        for result in run.engine.run(write_shard, iterate_tasks(run, samples, plan, own)):
            bar.update(result.num_packs)
            if result.failure is not None:
                logger.error("write: %s failed: %s", result.name, result.failure)
                failures[result.name] = result.failure
            if len(failures) == _MAX_FAILURES:
                break
    if failures:
        name = min(failures)
        stopped = " and the others were not tried" if len(failures) == _MAX_FAILURES else ""
        raise StageError(
            f"{len(failures)} of {len(own)} shards could not be written{stopped}; "
            f"{name}: {failures[name]}"
        )
    if run.engine.IS_SHARED:
        left = len(unfinished(run, shards))
        raise ShareDoneError(
            f"this rank's shards are written, {left} are left to other ranks; when none is, run "
            "write with engine.name=local to complete the dataset"
        )


def unfinished(run: Run, shards: list[Shard]) -> list[Shard]:
    """The shards that are not written yet."""
    return [s for s in shards if not run.workspace.fragment(s.name).exists()]


def failure_path(fragment_path: Path) -> Path:
    """Where it is kept why a shard could not be written."""
    return fragment_path.with_suffix(".failed")


def write_shard(task: ShardTask) -> WriteResult:
    """Write one shard, and last its fragment.

    Raises:
        DiskFullError: no other shard could be written either.
    """
    failed = failure_path(task.fragment_path)
    try:
        with task.rows_at_hand():
            fragment = LAYOUTS[task.layout].write(task)
    except DiskFullError:
        raise
    except (StageError, OSError) as error:
        write_atomically(failed, str(error).encode())
        return WriteResult(task.shard.name, task.shard.num_packs, str(error))
    fragment.save(task.fragment_path)
    failed.unlink(missing_ok=True)
    return WriteResult(task.shard.name, task.shard.num_packs)
