"""write: plan -> packed shards, Energon metadata, manifest.

A task is one output shard: it reads the records and media of its samples from the source, copies
the bytes of the media as they are, and leaves a fragment that says what the shard holds. The
manifest is put together from the fragments and written last.
"""

import logging
from typing import Any

from offline_packing.energon_metadata import check_energon
from offline_packing.errors import StageError
from offline_packing.files import (
    atomic_file,
    read_json,
    remove_temporaries,
    to_json,
    write_atomically,
)
from offline_packing.fingerprint import Fingerprint, changed_fields, check_fingerprint
from offline_packing.index import Index
from offline_packing.manifest import ShardFragment, write_manifest
from offline_packing.pack_plan import PackPlan
from offline_packing.plan_stage import check_plan, open_index
from offline_packing.shard_tasks import (
    Row,
    Shard,
    ShardTask,
    estimate_pack_bytes,
    iterate_tasks,
    plan_shards,
)
from offline_packing.stage import Stage
from offline_packing.tar_shards import TarShardWriter, index_bytes
from task_encoders.pack_format import JSON_PART, PackedSubSample, image_part_names, pack_json
from task_encoders.samples import SampleError

logger = logging.getLogger(__name__)


def open_plan(stage: Stage) -> tuple[Index, PackPlan, dict[str, Any]]:
    """Index, plan and the plan's stage.json. Raises StageError if either is not complete, or the
    plan was made with other settings or of another index."""
    samples = open_index(stage)
    info = read_json(stage.workspace.plan_info)
    if info is None:
        raise StageError(f"no complete plan in {stage.workspace.root}; run plan first")
    check_plan(stage, info)
    return samples, PackPlan.load(stage.workspace.plan), info


def write(stage: Stage) -> dict[str, Any]:
    """Write the packed dataset, or find it complete; returns the manifest.

    Raises:
        StageError: no plan, shards of another plan or layout, or a source that changed.
    """
    workspace = stage.workspace
    samples, plan, info = open_plan(stage)
    _start(stage, layout_fingerprint(stage, info["hash"]))
    manifest = read_json(workspace.manifest)
    if manifest is not None:
        logger.info("write: complete (%d shards), nothing to do", len(manifest["shards"]))
        return dict(manifest)
    check_energon()
    remove_temporaries(workspace.root)
    remove_temporaries(workspace.write)
    shards = plan_shards(stage, samples, plan)
    _run_tasks(stage, samples, plan, shards)
    fragments = [ShardFragment.load(workspace.write / f"{shard.name}.json") for shard in shards]
    return write_manifest(stage, samples.info, info, fragments)


def preview_write(stage: Stage) -> str:
    """What `write` would write; nothing is written."""
    samples, plan, _ = open_plan(stage)
    shards = plan_shards(stage, samples, plan)
    num_bytes = int(estimate_pack_bytes(samples, plan).sum())
    return (
        f"would write {len(plan.sample_ids):,} samples in {plan.num_packs:,} packs, "
        f"{len(shards):,} shards, about {num_bytes:,} bytes to {stage.workspace.root}"
    )


def layout_fingerprint(stage: Stage, plan_hash: str) -> Fingerprint:
    """What the shards depend on beside index and source."""
    output = stage.config.output
    return {
        "plan": plan_hash,
        "output.packs_per_shard": output.packs_per_shard,
        "output.max_shard_bytes": output.max_shard_bytes or 0,
        "output.split": ", ".join(f"{name} {share:g}" for name, share in output.split.items()),
        "output.key_prefix": output.key_prefix,
    }


def check_layout(stage: Stage, found: Fingerprint, fingerprint: Fingerprint) -> None:
    """Raise StageError if the shards are of another plan or layout."""
    check_fingerprint(
        found,
        fingerprint,
        artifact=f"the shards in {stage.workspace.root}",
        remedy="write again with output.overwrite=true, or choose another output.path",
    )


def _start(stage: Stage, fingerprint: Fingerprint) -> None:
    """Refuse to go on with shards of another plan or layout, or remove them."""
    started = stage.workspace.write / "started.json"
    found = read_json(started)
    if found is not None and changed_fields(found, fingerprint):
        if not stage.config.output.overwrite:
            check_layout(stage, found, fingerprint)
        logger.warning("write: written otherwise before; overwriting")
        stage.workspace.discard_shards()
    stage.workspace.write.mkdir(parents=True, exist_ok=True)
    write_atomically(started, to_json(fingerprint))


def _run_tasks(stage: Stage, samples: Index, plan: PackPlan, shards: list[Shard]) -> None:
    folder = stage.workspace.write
    remaining = [shard for shard in shards if not (folder / f"{shard.name}.json").exists()]
    if len(remaining) < len(shards):
        finished = len(shards) - len(remaining)
        logger.info("write: %d of %d shards are there already", finished, len(shards))
    with stage.bar("write", plan.num_packs, "pack") as bar:
        bar.update(plan.num_packs - sum(shard.num_packs for shard in remaining))
        tasks = iterate_tasks(stage, samples, plan, remaining)
        for num_packs in stage.engine.run(write_shard, tasks):
            bar.update(num_packs)


def write_shard(task: ShardTask) -> int:
    """Write one shard, its index, and last its fragment; returns the number of packs."""
    with atomic_file(task.tar_path) as file:
        writer = TarShardWriter(file)
        for key, rows in task.packs():
            writer.add(key, pack_members(task, rows))
        digest = writer.finish()
    write_atomically(task.tar_path.with_suffix(".tar.idx"), index_bytes(writer.entries))
    fragment = ShardFragment(
        name=task.tar_path.name,
        split=task.shard.split,
        num_samples=len(task.rows),
        num_tokens=sum(task.rows["num_tokens"].to_pylist()),
        num_bytes=writer.size,
        xxh3_128=digest,
        packs=writer.entries,
    )
    fragment.save(task.fragment_path)
    return task.shard.num_packs


def pack_members(task: ShardTask, rows: list[Row]) -> list[tuple[str, bytes]]:
    """Names and content of one pack's members: the media in order, then the JSON."""
    images: list[bytes] = []
    subs: list[PackedSubSample] = []
    for row in rows:
        try:
            sample = task.read_sample(row)
        except SampleError as error:
            raise StageError(
                f"sample {row['key']!r} changed since it was measured: {error}; restore it, or "
                "measure again with output.overwrite=true"
            ) from error
        extensions = tuple(image["extension"] for image in row["media"])
        if len(sample.images) != len(extensions):
            raise StageError(
                f"sample {row['key']!r} changed since it was measured: it names "
                f"{len(sample.images)} images, was {len(extensions)}; restore it, or measure again "
                "with output.overwrite=true"
            )
        images += task.read_images(row)
        subs.append(PackedSubSample(sample, extensions, row["num_tokens"]))
    names = image_part_names([extension for sub in subs for extension in sub.extensions])
    return [*zip(names, images, strict=True), (JSON_PART, pack_json(subs, task.task))]
