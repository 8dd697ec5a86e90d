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
from offline_packing.layouts.container import describe, files_of, media_roots
from offline_packing.layouts.energon_metadata import hash_metadata
from offline_packing.layouts.shards import ShardFragment
from offline_packing.runs.artifacts import StoredPlan, generation_of, key_prefix, shards_fingerprint
from offline_packing.runs.run import PlanReceipt, Run
from offline_packing.storage.files import (
    hash_bytes,
    hash_file,
    read_each,
    seal,
    to_json,
    write_atomically,
)
from task_encoders.families import model_cost
from task_encoders.packs import manifest as stored
from task_encoders.packs.manifest import Counts, Manifest, ManifestError, ShardLine
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
    """Read the manifest of an output; None: the output is not complete. Raises DamagedError if it
    is not as it was written."""
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
    """Read the manifest of a complete output. Raises StageError if the output is not complete."""
    manifest = read_manifest(root)
    if manifest is None:
        raise StageError(f"no manifest in {root}; run write first")
    return manifest


def save_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest of an output, which makes it complete."""
    write_atomically(root / stored.NAME, _to_bytes(manifest))


def _to_bytes(manifest: Manifest) -> bytes:
    return to_json(seal(manifest.model_dump()))


def _hash(manifest: Manifest) -> str:
    """Hash of everything that does not depend on versions of libraries."""
    return hash_bytes(to_json(manifest.model_dump(exclude=dict(_APART))))


def make_manifest(
    run: Run,
    samples: Index,
    plan: StoredPlan,
    fragments: Sequence[Path],
    folder: Path,
    recorded: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Write the layout's metadata, and then the manifest, which makes the dataset complete, below
    a folder in place of the output; returns the hashes of all its files, by their names. The
    fragments are in order; `recorded` is the configuration of files that are made again: sources
    may have moved since."""
    files: dict[str, str] = {}
    lines = []
    table, first = pack_table(samples, plan.packs, model_cost(run.config.model)), 0
    media = (table.media + ord("0")).astype(np.uint8)
    flops = np.stack([table.tower, table.language], axis=1).astype("<f4")
    for fragment in read_each(run.workspace.root, ShardFragment.load, fragments):
        files |= files_of(fragment)
        own = slice(first, first := first + len(fragment.packs))
        line = ShardLine(
            name=fragment.name,
            split=fragment.split,
            packs=len(fragment.packs),
            samples=fragment.num_samples,
            tokens=fragment.num_tokens,
            bytes=fragment.num_bytes,
            xxh3_128=fragment.xxh3_128,
            fragment_xxh3_128=fragment.content_hash,
            media=media[own].tobytes().decode(),
            flops=base64.b64encode(flops[own].tobytes()).decode(),
        )
        lines.append(line)
    config, index, planned = run.config, samples.info, plan.receipt.facts
    splits = config.output.split
    manifest = Manifest(
        version=1 if config.pack.share_prefixes is None else 2,
        task=config.task,
        layout=config.output.layout,
        seq_length=config.pack.seq_length,
        pad_multiple=config.pack.padding,
        counts=Counts(
            samples=index.num_samples + index.num_set_aside + planned.copies,
            packed=sum(line.samples for line in lines),
            set_aside=Counter(index.set_aside) + Counter(planned.set_aside),
            tokens=sum(line.tokens for line in lines),
            packs={name: sum(one.packs for one in lines if one.split == name) for name in splits},
            records=record_counts(samples, plan.packs.sample_ids),
            media_hashed_in_part=index.num_part_hashed,
        ),
        generation=generation_of(shards_fingerprint(run, planned.hash)),
        loss_weights="fractional" if index.num_weighted else None,
        shards=tuple(lines),
        fingerprint=index.fingerprint,
        config=dict(recorded or stored_config(config, key_prefix(run, planned.hash))),
        plan=hash_plan(plan.receipt),
        content_hash="",
        library_versions=index.versions,
        metadata={},
    )
    manifest = manifest.model_copy(update={"content_hash": _hash(manifest)})
    folder.mkdir(parents=True, exist_ok=True)
    names = describe(folder, manifest, fragments)
    if config.output.media == "refer":
        there = run.workspace.root / MEDIA_ROOTS
        # Sources need not be there where other files are made again.
        is_kept = folder != run.workspace.root and there.exists()
        content = there.read_bytes() if is_kept else media_roots(config.source)
        write_atomically(folder / MEDIA_ROOTS, content)
        names.append(MEDIA_ROOTS)
    hashes = {name: hash_metadata(folder / name) for name in names}
    save_manifest(folder, manifest.model_copy(update={"metadata": hashes}))
    return {**files, **hashes, stored.NAME: hash_file(folder / stored.NAME)}


def hash_plan(receipt: PlanReceipt) -> str:
    """Hash a plan's receipt without times of the source's files and versions of libraries."""
    fingerprint = {name: value for name, value in receipt.inputs.items() if name != "index"}
    facts = receipt.facts
    named = {"fingerprint": fingerprint, "hash": facts.hash, "set_aside": facts.set_aside}
    return hash_bytes(to_json(named))


def stored_config(config: PackingConfig, key_prefix: str | None = None) -> dict[str, Any]:
    """Return the configuration of an output's content, without its place and without what ran the
    tasks."""
    excluded: dict[str, Any] = {
        "engine": True,
        "report": True,
        "output": {"path", "overwrite"},
        "pack": {"max_set_aside"},
        # It decides whether there is an output, not its content.
        "source": {"__all__": {"text_only"}},
    }
    content = config.model_dump(mode="json", exclude=excluded)
    content["output"]["key_prefix"] = key_prefix
    return content
