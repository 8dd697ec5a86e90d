"""Finished packs as single files, in the folder that other packers write and convert to tars.

raw_packing_data/ps_00000000.img000.jpg     in train/, val/ … if the output has several splits
raw_packing_data/ps_00000000.json           as in the shard; prompts also under `prompts`
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from offline_packing.errors import StageError
from offline_packing.export.exported import ShardExport
from offline_packing.layouts.container import read_packs
from offline_packing.storage.files import hash_bytes, is_remote, remove_path
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import Pack, parse_json, restore_pack
from task_encoders.packs.pack_format import JSON_PART
from task_encoders.samples import MEDIA_KINDS, SampleError, count_placeholders


def refuse(manifest: Manifest) -> str:
    """Return why an output's packs are not exported; "": they are."""
    if manifest.version == 1:
        return ""
    return (
        "they hold samples that share prefixes (pack.share_prefixes), which readers of single "
        "files do not know; pack without"
    )


def write(task: ShardExport, tar: Path) -> Mapping[str, str]:
    """Write the files of a shard's packs; returns their hashes by name."""
    target, hashes = task.folder, {}
    if len(task.manifest.counts.packs) > 1:
        target /= task.line.split
        target.mkdir(exist_ok=True)
    for pack in read_packs(task.output, tar):
        if "/" in pack.key:
            raise StageError(
                f"{tar} was not written by offline-packing, as {pack.key!r} is in a folder; "
                "export packs that it wrote"
            )
        for part, data in [*pack.media.items(), (JSON_PART, _record(tar, pack))]:
            path = target / f"{pack.key}.{part}"
            remove_path(path)  # also a link, which may lead out of the folder
            path.write_bytes(data)
            hashes[str(path.relative_to(task.folder))] = hash_bytes(data)
    if not is_remote(task.folder):
        os.sync()  # once: a sync per small file would take most of the time
    return hashes


def finish(folder: Path, tasks: Sequence[ShardExport]) -> list[str]:
    """Return the files that name those of each shard."""
    return [str(task.done.relative_to(folder)) for task in tasks]


def _record(tar: Path, pack: Pack) -> bytes:
    """Return a pack's JSON. Raises StageError if it cannot be used, or as `_refuse_documents`."""
    try:
        record = {**parse_json(pack.record, pack.key)}
        _refuse_documents(record, pack.key)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StageError(f"{tar}: pack {pack.key!r}: {error}") from error
    record["meta"] = {name: one for name, one in record["meta"].items() if name != "media"}
    # Upstream's converter reads `prompts`, its page prints `prompt`.
    prompts = record.get("prompt", record.get("prompts"))
    return orjson.dumps(record | {"prompt": prompts, "prompts": prompts})


def _refuse_documents(record: dict[str, Any], key: str) -> None:
    """Raise StageError where a caption of a pack has pictures in its text, or goes on in another:
    readers of single files put all pictures in front, and an end token behind. They know no options
    of media, either."""
    if "options" in record["meta"]:
        raise StageError(
            f"pack {key} holds options of single images or videos (fps, video_start, ...), which "
            "readers of single files do not know; pack samples without them to export them"
        )
    if record["meta"]["task"] != "captioning":
        return
    for sample in restore_pack(record, key).sub_samples:
        if isinstance(sample, SampleError):
            raise sample  # packed, so it was fit
        shown = sum(count_placeholders(sample.turns, mark, sample.task) for mark in MEDIA_KINDS)
        if (sample.media and shown) or sample.turns[0].truncated:
            raise StageError(
                f"pack {key} holds a document, or a part of one, {sample.key!r}, which readers of "
                "single files do not know; pack captions alone to export them"
            )
