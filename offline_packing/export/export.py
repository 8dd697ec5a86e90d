"""Exports of finished packs, for readers of other forms than ours: raw_packs.py and nemo.py.

    OTHER/_export/source.json         content_hash of the output, and the form; written first
    OTHER/_export/train-000000.json   hashes of the files of a shard: its task is done
    OTHER/_export/manifest.json       hashes of the files that the export consists of; written last

A folder is written as `OTHER.partial`, which is renamed at the end: readers never meet a part of
the packs. A killed export goes on: files of finished shards are compared with their hashes, the
others are written again.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NamedTuple

from offline_packing.engines.local import Engine, LocalEngine, advance
from offline_packing.errors import DamagedError, StageError
from offline_packing.export import nemo, raw_packs
from offline_packing.export.exported import OWN, PIECES, ShardExport
from offline_packing.runs.manifest import require_manifest
from offline_packing.runs.run import progress_bar
from offline_packing.storage.files import (
    hash_file,
    hold_lock,
    is_remote,
    local_copy,
    read_json,
    remove_folder,
    remove_temporaries,
    seal,
    sync_folder,
    to_json,
    translate_disk_full,
    write_atomically,
)
from task_encoders.packs.manifest import FileName, Manifest

_SOURCE: Final = f"{OWN}/source.json"
_MANIFEST: Final = f"{OWN}/manifest.json"
_AGAIN: Final = "remove the folder and export again"


#: Modules of the forms of exported packs. Each has
#: refuse(manifest): why packs of an output have no such form; "": they have it
#: write(task, tar): writes the files of a shard, and returns their hashes by name in the folder
#: finish(folder, tasks): completes the export, and returns the files that make it up
FORMS: Final[Mapping[str, ModuleType]] = {"raw": raw_packs, "nemo": nemo}


class Exported(NamedTuple):
    """Result of an export, or of checking it."""

    num_packs: int
    num_files: int
    #: whether the folder was complete, and its files were compared with their hashes
    was_complete: bool


def export(
    output: Path,
    folder: Path,
    to: str = "raw",
    engine: Engine | None = None,
    *,
    progress: bool = True,
) -> Exported:
    """Write the packs of a finished output in another form into a new folder, or at a URL. If it is
    complete, compare every file with its hash.

    Args:
        to: a name in FORMS.
        engine: runs a task per shard; None: this process.

    Raises:
        StageError: the output is not complete, damaged, or has packs without such a form; the
            folder holds something else, or its files have changed since the export.
    """
    engine = engine or LocalEngine(0)
    if engine.IS_SHARED:
        raise StageError("ranks cannot share an export; set engine.name to local or ray")
    manifest, folder, place = _open(output, folder, to)
    num_packs = sum(manifest.counts.packs.values())
    made = read_json(folder / _MANIFEST, _AGAIN, form=dict[str, dict[FileName, str]])
    if made is not None:
        if "files" not in made:
            raise DamagedError(f"{folder / _MANIFEST} is damaged; {_AGAIN}")
        files = made["files"]
        with progress_bar("check", len(files), "file", shown=progress) as bar:
            num_files = sum(engine.run(partial(_check_file, folder), files.items(), bar.update))
        _remove_pieces(folder, files)
        return Exported(num_packs, num_files, was_complete=True)
    tasks = _tasks(output, place, manifest)
    with hold_lock(place / OWN / "lock", str(folder)), translate_disk_full(place):
        (place / PIECES).mkdir(parents=True, exist_ok=True)
        for left in (place, place / OWN, place / PIECES):
            remove_temporaries(left)
        write_atomically(place / _SOURCE, to_json(seal(_source(manifest, to))))
        with progress_bar("export", num_packs, "pack", shown=progress) as bar:
            num_files = sum(engine.run(partial(_export_shard, to), tasks, bar.update))
        files = {name: hash_file(place / name) for name in FORMS[to].finish(place, tasks)}
        write_atomically(place / _MANIFEST, to_json(seal({"files": files})))
        if place != folder:
            place.rename(folder)
            sync_folder(folder.parent)
    _remove_pieces(folder, files)
    return Exported(num_packs, num_files, was_complete=False)


def _remove_pieces(folder: Path, files: Mapping[str, str]) -> None:
    """Remove what was joined into the files of a complete export, and what marked it as done."""
    if (folder / PIECES).is_dir():
        remove_folder(folder / PIECES)
        for path in (folder / OWN).glob("*-??????.json"):
            if f"{OWN}/{path.name}" not in files:
                path.unlink()


def preview_export(output: Path, folder: Path, to: str = "raw") -> str:
    """Describe what `export` would do. Raises StageError as it does."""
    manifest, folder, place = _open(output, folder, to)
    packs = f"{sum(manifest.counts.packs.values()):,} packs"
    if (folder / _MANIFEST).exists():
        return f"would check the files of {packs} in {folder}"
    tasks = _tasks(output, place, manifest)
    there = sum(task.done.exists() for task in tasks)
    already = f"; {there:,} of {len(tasks):,} shards are there" if there else ""
    size = sum(line.bytes for line in manifest.shards)
    return f"would write {packs}, {size:,} bytes of shards, to {folder}{already}"


def _open(output: Path, folder: Path, to: str) -> tuple[Manifest, Path, Path]:
    """Return the output's manifest; the absolute folder, which is free or holds this export; and
    the folder in which it is made."""
    manifest, folder = require_manifest(output), folder.absolute()
    place = folder if is_remote(folder) else folder.with_name(f"{folder.name}.partial")
    if why := FORMS[to].refuse(manifest):
        raise StageError(f"the packs of {output} cannot be exported to {to}: {why}")
    for at in (folder, place):
        source = read_json(at / _SOURCE, _AGAIN, form=dict[str, Any])
        if source is None and at.is_dir() and set(at.iterdir()) - {at / OWN}:
            raise StageError(f"{at} holds files of something else; choose another folder")
        if source not in (None, _source(manifest, to)):
            raise StageError(
                f"{at} holds an export of other packs than {output} has, or in another form; "
                "remove the folder, or choose another"
            )
    return manifest, folder, place


def _source(manifest: Manifest, to: str) -> dict[str, Any]:
    return {"content_hash": manifest.content_hash, "form": to, "version": 2}


def _tasks(output: Path, folder: Path, manifest: Manifest) -> list[ShardExport]:
    own = output.absolute(), folder, manifest.model_copy(update={"shards": ()})
    return [ShardExport(*own, line) for line in manifest.shards]


def _export_shard(to: str, task: ShardExport) -> int:
    """Export a shard, unless that is done; returns the number of its files. Raises DamagedError if
    the shard is not what was written."""
    try:
        hashes = _read_done(task.folder, task.done)
    except DamagedError:  # or not there yet
        path = task.output / task.line.name
        with local_copy(path) as tar:
            if not _is_whole(tar, task.line.xxh3_128):
                why = "is missing, or not what was written; offline-packing verify names the remedy"
                raise DamagedError(f"{path} {why}") from None
            hashes = FORMS[to].write(task, tar)
        write_atomically(task.done, to_json(seal(dict(hashes))))
    advance(task.line.packs)
    return len(hashes)


def _read_done(folder: Path, done: Path) -> Mapping[str, str]:
    """Return the hashes of a finished shard's files. Raises DamagedError if one is missing, or not
    as it was written."""
    hashes = read_json(done, _AGAIN, form=dict[FileName, str])
    if hashes is None:
        raise DamagedError(f"{done} is missing; {_AGAIN}")
    wrong = [name for name, one in hashes.items() if not _is_whole(folder / name, one)]
    if wrong:
        raise DamagedError(
            f"{len(wrong):,} files of {done.stem} in {folder} are missing or damaged, such as "
            f"{wrong[0]}; {_AGAIN}"
        )
    return hashes


def _is_whole(path: Path, expected: str) -> bool:
    return path.is_file() and hash_file(path) == expected


def _check_file(folder: Path, file: tuple[str, str]) -> int:
    """Compare a file of a complete export with its hash, and the files that it names as a shard's;
    return their number. Raises DamagedError."""
    (name, expected), count = file, 1
    path = folder / name
    if not _is_whole(path, expected):
        raise DamagedError(f"{path} is missing or damaged; {_AGAIN}")
    if path.parent == folder / OWN:
        count = len(_read_done(folder, path))
    advance(1)
    return count
