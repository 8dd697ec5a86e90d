"""Finished packs as single files, in the folder that other packers write and convert to tars.

    raw_packing_data/ps_00000000.img000.jpg     in train/, val/ … if the output has several splits
    raw_packing_data/ps_00000000.json           as in the shard; prompts also under `prompts`
    raw_packing_data/_export/source.json        content_hash of the output; written first
    raw_packing_data/_export/train-000000.json  hashes of the files of a shard: it is finished
    raw_packing_data/_export/manifest.json      hashes of the files of hashes; written last

All are written in `raw_packing_data.partial`, which is renamed at the end: readers never meet a
part of the packs. A killed export goes on after the last finished shard. Converters of other
projects take every `*.json` of the folder for a pack, so ours lie in a folder of their own.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson

from offline_packing.errors import DamagedError, StageError
from offline_packing.layouts import LAYOUTS
from offline_packing.layouts.energon import EnergonLayout
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import progress_bar
from offline_packing.storage.files import (
    hash_bytes,
    hash_file,
    hold_lock,
    local_copy,
    read_json,
    remove_path,
    remove_temporaries,
    seal,
    sync_folder,
    to_json,
    translate_disk_full,
    write_atomically,
)
from offline_packing.storage.tars import scan_tar
from task_encoders.packs.manifest import FileName, Manifest, ShardLine
from task_encoders.packs.pack import parse_json, restore_pack
from task_encoders.packs.pack_format import JSON_PART
from task_encoders.samples import MEDIA_KINDS, SampleError, count_placeholders

_OWN: Final = "_export"
_SOURCE: Final = f"{_OWN}/source.json"
_MANIFEST: Final = f"{_OWN}/manifest.json"
_AGAIN: Final = "remove the folder and export again"


class Exported(NamedTuple):
    """Result of an export, or of checking it."""

    num_packs: int
    num_files: int
    #: whether the folder was complete, and its files were compared with their hashes
    was_complete: bool


def export(output: Path, folder: Path, *, progress: bool = True) -> Exported:
    """Write the packs of a finished output as single files into a new folder, on a local disk. If
    the folder is complete, compare every file in it with its hash.

    Raises:
        StageError: the output is not complete, damaged, without media in its packs or with samples
            that share prefixes; the folder holds something else, or its files have changed since
            the export.
    """
    manifest, folder = _open(output, folder)
    num_packs = sum(manifest.counts.packs.values())
    was_complete = (folder / _MANIFEST).exists()
    with progress_bar("export", num_packs, "pack", shown=progress) as bar:
        if was_complete:
            for line in manifest.shards:
                _check_shard(folder, line)
                bar.update(line.packs)
        else:
            partial = _partial(folder)
            with hold_lock(partial / _OWN / "lock", str(folder)), translate_disk_full(partial):
                remove_temporaries(partial / _OWN)
                write_atomically(partial / _SOURCE, to_json(seal(_source(manifest))))
                for line in manifest.shards:
                    try:
                        _check_shard(partial, line)
                    except DamagedError:  # or not written yet
                        _export_shard(output, manifest, line, partial)
                    bar.update(line.packs)
                _finish(partial, folder, manifest)
    files = (read_json(_hashes_file(folder, line)) for line in manifest.shards)
    return Exported(num_packs, sum(map(len, files)), was_complete)


def preview_export(output: Path, folder: Path) -> str:
    """Describe what `export` would do. Raises StageError as it does."""
    manifest, folder = _open(output, folder)
    packs = f"{sum(manifest.counts.packs.values()):,} packs"
    if (folder / _MANIFEST).exists():
        return f"would check the files of {packs} in {folder}"
    size = sum(line.bytes for line in manifest.shards)
    there = sum(_hashes_file(_partial(folder), line).exists() for line in manifest.shards)
    already = f"; {there:,} of {len(manifest.shards):,} shards are there" if there else ""
    return f"would write {packs}, {size:,} bytes, to {folder}{already}"


def _open(output: Path, folder: Path) -> tuple[Manifest, Path]:
    """The output's manifest, and the absolute folder, which is free or holds this output."""
    manifest, folder = require_manifest(output), folder.absolute()
    if not isinstance(LAYOUTS[manifest.layout], EnergonLayout):
        raise StageError(
            f"the packs of {output} hold no media: its output.layout is {manifest.layout}; pack "
            "with output.layout=energon to export them"
        )
    if manifest.version == 2:
        raise StageError(
            f"the packs of {output} hold samples that share prefixes (pack.share_prefixes), which "
            "readers of single files do not know; pack without to export them"
        )
    for place in (folder, _partial(folder)):
        source = read_json(place / _SOURCE, _AGAIN, form=dict[str, Any])
        if source is None and place.is_dir() and set(place.iterdir()) - {place / _OWN}:
            raise StageError(f"{place} holds files of others; name another folder")
        if source not in (None, _source(manifest)):
            raise StageError(
                f"{place} holds packs of another output than {output} is now; remove the folder "
                "or name another"
            )
    return manifest, folder


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def _source(manifest: Manifest) -> dict[str, Any]:
    return {"content_hash": manifest.content_hash, "task": manifest.task, "version": 1}


def _hashes_file(folder: Path, line: ShardLine) -> Path:
    return folder / _OWN / f"{Path(line.name).stem}.json"


def _export_shard(output: Path, manifest: Manifest, line: ShardLine, partial: Path) -> None:
    target = partial / line.split if len(manifest.counts.packs) > 1 else partial
    target.mkdir(exist_ok=True)
    hashes = {}
    with local_copy(output / line.name) as tar:
        if not tar.is_file() or hash_file(tar) != line.xxh3_128:
            raise DamagedError(
                f"{output / line.name} is missing, or not what was written; offline-packing verify "
                "names the remedy"
            )
        for name, data in _files(tar):
            remove_path(target / name)  # also a link, which may lead out of the folder
            (target / name).write_bytes(data)
            hashes[str((target / name).relative_to(partial))] = hash_bytes(data)
    os.sync()  # once: a sync per small file would take most of the time
    write_atomically(_hashes_file(partial, line), to_json(seal(hashes)))


def _files(tar: Path) -> Iterator[tuple[str, bytes]]:
    """Names and content of the files of a shard's packs."""
    with tar.open("rb") as file:
        for entry in scan_tar(tar):
            if "/" in entry.key:
                raise StageError(f"{tar}: pack {entry.key!r} is in a folder; export packs of ours")
            for part in entry.parts:
                file.seek(part.offset)
                data = file.read(part.size)
                if part.name == JSON_PART:
                    try:
                        record = {**parse_json(data, entry.key)}
                        _refuse_documents(record, entry.key)
                    except (AttributeError, LookupError, TypeError, ValueError) as error:
                        raise StageError(f"{tar}: pack {entry.key!r}: {error}") from error
                    # Upstream's converter reads `prompts`, its page prints `prompt`.
                    prompts = record.get("prompt", record.get("prompts"))
                    data = orjson.dumps(record | {"prompt": prompts, "prompts": prompts})
                yield f"{entry.key}.{part.name}", data


def _refuse_documents(record: dict[str, Any], key: str) -> None:
    """Raise StageError where a caption of a pack has pictures in its text, or goes on in another:
    readers of single files put all pictures in front, and an end token behind."""
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


def _finish(partial: Path, folder: Path, manifest: Manifest) -> None:
    hashes = {line.name: hash_file(_hashes_file(partial, line)) for line in manifest.shards}
    write_atomically(partial / _MANIFEST, to_json(seal({"shards": hashes})))
    partial.rename(folder)
    sync_folder(folder.parent)


def _check_shard(folder: Path, line: ShardLine) -> None:
    """Raise DamagedError if a file is missing, or not as it was written."""
    path = _hashes_file(folder, line)
    hashes = read_json(path, _AGAIN, form=dict[FileName, str])
    made = read_json(folder / _MANIFEST, _AGAIN, form=dict[str, dict[str, str]])  # if complete
    recorded = (made or {}).get("shards", {}).get(line.name)
    if hashes is None or recorded not in (None, hash_file(path)):
        raise DamagedError(f"{path} is missing or damaged; {_AGAIN}")
    wrong = [
        name
        for name, expected in hashes.items()
        if not (folder / name).is_file() or hash_file(folder / name) != expected
    ]
    if wrong:
        raise DamagedError(
            f"{len(wrong):,} files of {line.name} in {folder} are missing or damaged, such as "
            f"{wrong[0]}; {_AGAIN}"
        )
