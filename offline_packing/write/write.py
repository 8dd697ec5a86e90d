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
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from offline_packing.errors import DiskFullError, ShareDoneError, StageError
from offline_packing.index.table import Index
from offline_packing.layouts import container
from offline_packing.layouts.container import media_roots, shard_file
from offline_packing.layouts.shards import (
    PlannedShard,
    ShardTask,
    estimate_pack_bytes,
    fragment_file,
)
from offline_packing.runs.artifacts import StoredPlan, check_layout, shards_fingerprint
from offline_packing.runs.manifest import (
    make_manifest,
    read_manifest,
    require_manifest,
    save_manifest,
)
from offline_packing.runs.repair import end_repair, is_repairing, put_back
from offline_packing.runs.run import Run, open_sources
from offline_packing.runs.stage import Stage, Task, bring, is_complete
from offline_packing.runs.tasks import iterate_tasks, plan_shards, run_tasks
from offline_packing.storage.files import hash_bytes, hash_file, is_remote, write_atomically
from offline_packing.storage.receipts import Fingerprint, changed_fields, load_receipt
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.stored_media import MEDIA_ROOTS

logger = logging.getLogger(__name__)

#: After this many failed shards the rest would most likely fail, too.
_MAX_FAILURES: Final = 20


def write(run: Run, samples: Index, plan: StoredPlan) -> Manifest:
    """Write the packed dataset, or find it complete; returns the manifest. Raises StageError as
    `bring`, or if a shard could not be written (a full disk, a changed source)."""
    stage = Write(run, samples, plan)
    stage.follow_media()
    try:
        with run.unpacked_files():
            bring(run, stage)
    except (DiskFullError, ShareDoneError):
        raise
    except StageError:
        put_back(run.workspace)
        raise
    end_repair(run.workspace)
    return require_manifest(run.workspace.root)


class Write(Stage):
    """The shards, one task each, and what describes them all."""

    name = "write"

    def __init__(self, run: Run, samples: Index, plan: StoredPlan) -> None:
        super().__init__(run)
        self.samples, self.plan = samples, plan
        self.files: dict[str, str] = {}

    def inputs(self) -> Fingerprint:
        return shards_fingerprint(self.run, self.plan.hash)

    def check(self, found: Fingerprint, *, repairs: bool, complete: bool) -> None:
        check_layout(self.run, self.plan.hash, found)

    @cached_property
    def shards(self) -> list[PlannedShard]:
        """All shards, as they are planned."""
        return plan_shards(self.run, self.samples, self.plan.packs)

    def tasks(self) -> Sequence[Task]:
        tasks = []
        for shard in self.shards:
            name = shard_file(shard.name)
            tasks.append(Task((name, f"{name}.idx", fragment_file(shard.name)), shard))
        return tasks

    def make(self, tasks: Sequence[Task], folder: Path) -> None:
        """Write shards. Raises StageError if any is still missing at the end."""
        run, packs = self.run, self.plan.packs
        if run.config.output.media == "refer":
            container.check_places(self.samples, open_sources(run.config))
        left: list[PlannedShard] = [task.work for task in tasks]
        own = run.engine.share(left)
        failures: dict[str, str] = {}
        with run.bar("write", packs.num_packs, "pack") as bar:
            bar.update(packs.num_packs - sum(shard.num_packs for shard in left))
            todo = iterate_tasks(run, self.samples, packs, own, folder=folder)
            for name, failure in run_tasks(run, write_shard, todo, bar.update):
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

    def finish(self, folder: Path) -> None:
        """Write the metadata and, last, the manifest."""
        single, output = sum(shard.num_packs == 1 for shard in self.shards), self.run.config.output
        is_most = single > max(len(self.shards) / 2, 1)
        if output.max_shard_bytes and output.packs_per_shard > 1 and is_most:
            logger.warning(  # perhaps megabytes were meant
                "write: %s of %s shards hold one pack: output.max_shard_bytes %s is in bytes; "
                "raise it",
                *(f"{one:,}" for one in (single, len(self.shards), output.max_shard_bytes)),
            )
        recorded = load_receipt(self.run.workspace.packing, self.name)
        config = recorded and recorded.facts.get("config")
        root = self.run.workspace.root
        fragments = [root / fragment_file(shard.name) for shard in self.shards]
        self.files = make_manifest(self.run, self.samples, self.plan, fragments, folder, config)

    def record(self) -> tuple[dict[str, str], dict[str, Any]]:
        return self.files, {"config": require_manifest(self.run.workspace.root).config}

    def follow_media(self) -> None:
        """Write where media are that complete packs refer to, if their sources moved. Raises
        StageError if a source is not where the configuration says."""
        at, receipt = self.run.workspace, load_receipt(self.run.workspace.packing, self.name)
        if receipt is None or (recorded := receipt.files.get(MEDIA_ROOTS)) is None:
            return
        if changed_fields(receipt.inputs, self.inputs()):
            return
        path, manifest = at.root / MEDIA_ROOTS, read_manifest(at.root)
        # The source need not be there for a repair that does not need it.
        if manifest is None or (path.exists() and is_repairing(at)):
            return
        content = media_roots(self.run.config.source)
        if (found := hash_bytes(content)) == recorded:
            return
        write_atomically(path, content)
        paths = ", ".join(source.path for source in self.run.config.source)
        logger.info("write: the packs now refer to media in %s; verify opens them", paths)
        metadata = {**manifest.metadata, MEDIA_ROOTS: found}
        save_manifest(at.root, manifest.model_copy(update={"metadata": metadata}))
        files = {MEDIA_ROOTS: found, at.manifest.name: hash_file(at.manifest)}
        replace(receipt, files={**receipt.files, **files}).save(at.packing, self.name)


def preview_write(run: Run, samples: Index, stored: StoredPlan) -> str:
    """Describe what `write` would write; writes nothing."""
    stage = Write(run, samples, stored)
    plan, shards = stored.packs, stage.shards
    if is_complete(run, stage):
        return f"write: complete ({len(shards):,} shards), nothing to do"
    refers = run.config.output.media == "refer"
    num_bytes = int(estimate_pack_bytes(samples, plan, refers=refers).sum())
    return (
        f"would write {len(plan.sample_ids):,} samples in {plan.num_packs:,} packs, "
        f"{len(shards):,} shards, about {num_bytes:,} bytes to {run.workspace.root}"
    )


def write_shard(task: ShardTask) -> tuple[str, str | None]:
    """Write one shard, and last its fragment; returns its name, and why it could not be written.
    Raises DiskFullError, or StageError where the output is gone: others would fail, too."""
    failed = task.fragment_path.with_suffix(".failed")
    _check_in_place(task)
    try:
        with task.rows_at_hand():
            fragment = container.write_shard(task)
    except DiskFullError:
        raise
    except (StageError, OSError) as error:
        _check_in_place(task)
        write_atomically(failed, str(error).encode())
        return task.shard.name, str(error)
    _check_in_place(task)
    write_atomically(task.fragment_path, fragment.to_bytes())
    failed.unlink(missing_ok=True)
    return task.shard.name, None


def _check_in_place(task: ShardTask) -> None:
    """Check that the output is still there, before a part of another is made in its place."""
    folder = task.fragment_path.parent
    if not is_remote(folder) and not folder.is_dir():  # folders of objects come and go with them
        raise StageError(
            f"output {str(task.folder)!r} was moved or removed while it was written; move it back "
            "and run again, or run again to begin anew"
        )
