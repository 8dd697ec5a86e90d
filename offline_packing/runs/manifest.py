"""The manifest of an output, see task_encoders.packs.manifest: made, written last, and read by the
stages, which take it only as it was written.

The same input, configuration and seed give the same manifest on any number of workers. It is put
together from one fragment per shard, kept in _packing/write/.
"""

import base64
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from offline_packing.config.packing import PackingConfig
from offline_packing.config.sections import OutputConfig
from offline_packing.errors import DamagedError, StageError
from offline_packing.index.records import record_counts
from offline_packing.index.rows import pack_table
from offline_packing.index.table import Index
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.container import describe, media_roots
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.layouts.shards import ShardFragment
from offline_packing.runs.artifacts import (
    StoredPlan,
    generation_of,
    key_prefix,
    layout_fingerprint,
    shards_fingerprint,
)
from offline_packing.runs.repair import accept, is_repairing
from offline_packing.runs.run import Fingerprint, Run
from offline_packing.storage.files import hash_bytes, read_each, seal, to_json, write_atomically
from task_encoders.families import model_cost
from task_encoders.packs import manifest as stored
from task_encoders.packs.manifest import Counts, Manifest, ManifestError, PackColumns, ShardLine
from task_encoders.packs.stored_media import MEDIA_ROOTS
from task_encoders.samples import TASKS
from task_encoders.storage.paths import REMEDY

logger = logging.getLogger(__name__)

#: Fields that `content_hash` does not cover.
_APART: Final[Mapping[str, Any]] = {
    **dict.fromkeys(("content_hash", "library_versions", "metadata"), True),
    "shards": {"__all__": {"media", "flops"}},  # follow from plan and index
}


def read_manifest(root: Path) -> Manifest | None:
    """The manifest of an output that is complete; or None. Raises DamagedError if it is not as it
    was written."""
    path = root / stored.NAME
    try:
        manifest = stored.read_manifest(root)
        if manifest is None:
            return None
        if not (
            manifest.layout in LAYOUTS
            and manifest.task in TASKS
            and OutputConfig(**manifest.config["output"], path=".").key_prefix is not None
            and all(isinstance(one["path"], str) for one in manifest.config["source"])
            and manifest.content_hash == _hash(manifest)
            and path.read_bytes() == _to_bytes(manifest)
        ):
            raise ManifestError(f"{path} is damaged")
    except (LookupError, TypeError, ValueError) as error:
        raise DamagedError(f"{path} is not what was written; {REMEDY}") from error
    return manifest


def require_manifest(root: Path) -> Manifest:
    """The manifest. Raises StageError if the output is not complete."""
    manifest = read_manifest(root)
    if manifest is None:
        raise StageError(f"no manifest in {root}; run write first")
    return manifest


def save_manifest(run: Run, manifest: Manifest) -> Manifest:
    """Write a manifest, which makes an output complete; returns it."""
    write_atomically(run.workspace.manifest, _to_bytes(manifest))
    return manifest


def _to_bytes(manifest: Manifest) -> bytes:
    return to_json(seal(manifest.model_dump()))


def _hash(manifest: Manifest) -> str:
    """Hash of everything that does not depend on versions of libraries."""
    return hash_bytes(to_json(manifest.model_dump(exclude=dict(_APART))))


def write_manifest(
    run: Run, samples: Index, plan: StoredPlan, fragments: Sequence[Path]
) -> Manifest:
    """Write the layout's metadata and then the manifest, which makes the dataset complete. The
    fragments are in order."""
    manifest = finish_layout(run, build_manifest(run, samples, plan, fragments))
    table = pack_table(samples, plan.packs, model_cost(run.config.model))
    return save_manifest(run, with_columns(manifest, table))


def with_columns(manifest: Manifest, table: PackColumns) -> Manifest:
    """The manifest with the media and operations of a plan's packs."""
    flops = np.stack([table.tower, table.language], axis=1).astype("<f4")
    shards, first = [], 0
    for shard in manifest.shards:
        own = slice(first, first := first + shard.packs)
        media = (table.media[own] + ord("0")).astype(np.uint8).tobytes().decode()
        text = base64.b64encode(flops[own].tobytes()).decode()
        shards.append(shard.model_copy(update={"media": media, "flops": text}))
    return manifest.model_copy(update={"shards": tuple(shards)})


def finish_layout(run: Run, manifest: Manifest) -> Manifest:
    """Write the layout's metadata on a manifest's shards; returns it with these files' hashes."""
    workspace = run.workspace
    fragments = [workspace.fragment(shard.name) for shard in manifest.shards]
    describe(workspace.root, manifest, fragments)
    names = list(LAYOUTS[manifest.layout].METADATA)
    if run.config.output.media == "refer":
        write_atomically(workspace.root / MEDIA_ROOTS, media_roots(run.config.source))
        names.append(MEDIA_ROOTS)
    hashes = {name: hash_metadata(workspace.root / name) for name in names}
    return manifest.model_copy(update={"metadata": hashes})


def restore_metadata(run: Run, manifest: Manifest) -> Manifest:
    """Write lost files of the layout again, and the places of media if sources moved. Raises
    StageError if the former come out differently, or a source is not where the configuration
    says."""
    workspace = run.workspace
    lost = {name for name in manifest.metadata if not (workspace.root / name).exists()}
    if recorded := {workspace.root / one: manifest.metadata[one] for one in lost - {MEDIA_ROOTS}}:
        workspace.again.mkdir(parents=True, exist_ok=True)
        describe(
            workspace.again, manifest, [workspace.fragment(one.name) for one in manifest.shards]
        )
        accept(workspace, recorded, lambda: "this version of offline-packing writes others")
    # The source need not be there for a repair that does not need it.
    is_needed = MEDIA_ROOTS in lost or not is_repairing(workspace)
    if MEDIA_ROOTS not in manifest.metadata or not is_needed:
        return manifest
    content = media_roots(run.config.source)
    is_same = hash_bytes(content) == manifest.metadata[MEDIA_ROOTS]
    if not is_same or MEDIA_ROOTS in lost:
        write_atomically(workspace.root / MEDIA_ROOTS, content)
    if is_same:
        return manifest
    paths = ", ".join(source.path for source in run.config.source)
    logger.info("write: the packs now refer to media in %s; verify opens them", paths)
    hashes = {**manifest.metadata, MEDIA_ROOTS: hash_bytes(content)}
    return save_manifest(run, manifest.model_copy(update={"metadata": hashes}))


def build_manifest(
    run: Run, samples: Index, stored: StoredPlan, fragments: Sequence[Path]
) -> Manifest:
    """The manifest without `metadata`, which `finish_layout` adds."""
    index, plan = samples.info, stored.info
    loaded = read_each(run.workspace.root, ShardFragment.load, fragments)
    shards = tuple(map(shard_line, loaded))
    packs = {
        split: sum(shard.packs for shard in shards if shard.split == split)
        for split in run.config.output.split
    }
    manifest = Manifest(
        version=1 if run.config.pack.share_prefixes is None else 2,
        task=run.config.task,
        layout=run.config.output.layout,
        seq_length=run.config.pack.seq_length,
        pad_multiple=run.config.pack.padding,
        counts=Counts(
            samples=index.num_samples + index.num_set_aside + plan.get("copies", 0),
            packed=sum(shard.samples for shard in shards),
            set_aside=Counter(index.set_aside) + Counter(plan["set_aside"]),
            tokens=sum(shard.tokens for shard in shards),
            packs=packs,
            records=record_counts(samples, stored.packs.sample_ids),
            media_hashed_in_part=index.num_part_hashed,
        ),
        generation=generation_of(shards_fingerprint(run, plan["hash"])),
        loss_weights="fractional" if index.num_weighted else None,
        shards=shards,
        fingerprint=index.fingerprint,
        config=stored_config(run.config, key_prefix(run, plan["hash"])),
        plan=hash_plan(plan),
        content_hash="",
        library_versions=index.versions,
        metadata={},
    )
    return manifest.model_copy(update={"content_hash": _hash(manifest)})


def recorded_layout(run: Run, manifest: Manifest, plan_hash: str) -> Fingerprint:
    """Content of write/started.json, from the configuration in the manifest."""
    output = {**manifest.config["output"], "path": run.config.output.path}
    if output.get("split") == run.config.output.split:  # in this order; a manifest's is sorted
        output["split"] = run.config.output.split
    return layout_fingerprint(OutputConfig(**output), plan_hash)


def hash_plan(info: Mapping[str, Any]) -> str:
    """Hash of a plan's stage.json without times of the source's files and versions of libraries."""
    fingerprint = {name: value for name, value in info["fingerprint"].items() if name != "index"}
    named = {"fingerprint": fingerprint, "hash": info["hash"], "set_aside": info["set_aside"]}
    return hash_bytes(to_json(named))


def shard_line(fragment: ShardFragment) -> ShardLine:
    """Return the manifest's line of a shard, without columns of its packs."""
    return ShardLine(
        name=fragment.name,
        split=fragment.split,
        packs=fragment.num_packs,
        samples=fragment.num_samples,
        tokens=fragment.num_tokens,
        bytes=fragment.num_bytes,
        xxh3_128=fragment.xxh3_128,
        fragment_xxh3_128=fragment.content_hash,
    )


def stored_config(config: PackingConfig, key_prefix: str | None = None) -> dict[str, Any]:
    """Configuration of an output's content: not its place, nor what ran the tasks."""
    excluded: dict[str, Any] = {
        "engine": True,
        "report": True,
        "output": {"path", "overwrite"},
        "pack": {"max_set_aside"},
    }
    content = config.model_dump(mode="json", exclude=excluded)
    content["output"]["key_prefix"] = key_prefix
    for source in content["source"]:
        source.pop("text_only", None)  # decides whether there is an output, not its content
    return content
