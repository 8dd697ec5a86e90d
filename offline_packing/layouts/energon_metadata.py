"""Energon's metadata for a folder of pack shards: everything in .nv-meta, without a second pass.

    .nv-meta/dataset.yaml      sample type by task, loader, subflavors
    .nv-meta/sample_loader.py  one import
    .nv-meta/split.yaml        shards of each split, in order
    .nv-meta/.info.json        number of packs in each shard
    .nv-meta/index.sqlite      the place of each pack and each of its parts
    .nv-meta/index.uuid        derived from the content

`energon prepare` writes the same tables; it also shuffles the shards, draws the uuid, and skips a
shard that it cannot read. Energon itself is not needed here, nor is the torch that it brings.
"""

import errno
import importlib.util
import os
import shutil
import sqlite3
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import orjson
import xxhash
import yaml

from offline_packing.errors import StageError
from offline_packing.storage.files import (
    atomic_file,
    hash_bytes,
    hash_file,
    is_remote,
    local_copy,
    remove_temporaries,
    to_json,
    write_atomically,
)
from offline_packing.storage.tars import PackEntry, index_bytes, scan_tar
from task_encoders.packs.manifest import Manifest
from task_encoders.packs.pack import (
    LOST_PROMPTS,
    PackFormatError,
    count_lost_prompts,
    parse_json,
    restore_pack,
)
from task_encoders.packs.pack_format import JSON_PART
from task_encoders.samples import TASKS
from task_encoders.versions import SUPPORTED, require_supported

#: Named in every split.yaml, empty or not: `energon lint` asks for all of them.
_DEFAULT_SPLITS: Final = ("train", "val", "test")

#: Version of Energon whose tables and files these are.
ENERGON_VERSION: Final = "7.4.1"

#: Classes in task_encoders.energon_samples, by task.
_SAMPLE_CLASS: Final = {
    "captioning": "PackedCaptioningSample",
    "vqa": "PackedVQASample",
    "bmr": "PackedMultiMixQASample",
}

_TABLES: Final = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL,
    sample_key TEXT NOT NULL UNIQUE,
    sample_index INTEGER NOT NULL,
    byte_offset INTEGER,
    byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER,
    sample_index INTEGER,
    part_name TEXT,
    content_byte_offset INTEGER,
    content_byte_size INTEGER
);
"""

#: Made last, which is faster.
_INDICES: Final = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full ON sample_parts(
    tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size
);
"""

#: Rows of a database that are in memory at a time.
_ROWS_AT_ONCE: Final = 1 << 14

_NAMESPACE: Final = uuid.uuid5(uuid.NAMESPACE_URL, "offline-packing")

_SAMPLE_LOADER: Final = (
    '"""What Energon reads of a pack."""\n\n'
    "from task_encoders.energon_samples import part_filter, sample_loader\n\n"
    '__all__ = ["part_filter", "sample_loader"]\n'
)


def check_energon() -> None:
    """Raise StageError if Energon, which reads packs, is not installed, or in a version that is not
    supported."""
    if not (importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.energon")):
        raise StageError(
            "megatron-energon, which reads this, is not installed; pip install "
            f"'megatron-energon{SUPPORTED['megatron-energon']}' "
            "(in a clone: pip install -e '.[train]')"
        )
    require_supported("megatron-energon")


def write_energon_metadata(
    folder: Path,
    task: str,
    splits: Mapping[str, Sequence[str]],
    packs: Iterable[tuple[str, Sequence[PackEntry]]],
    *,
    content_hash: str,
    generation: str = "",
    instead: Mapping[str, bytes] = MappingProxyType({}),
) -> list[str]:
    """Write .nv-meta into the folder with the shards and their .tar.idx; return the names of its
    files, relative to the folder. `splits` holds the file names of the shards of each split,
    `packs` the name and packs of each shard, in order, drawn once; `content_hash` changes when any
    shard does; `generation` is the packs' own, if they have one. `instead` holds files for other
    readers by name, in place of these or besides them."""
    meta = folder / ".nv-meta"
    meta.mkdir(exist_ok=True)
    remove_temporaries(meta)  # a database that a killed run left may be large
    parts = {name: list(splits.get(name, ())) for name in (*_DEFAULT_SPLITS, *splits)}
    counts = _write_sqlite(meta / "index.sqlite", packs)
    # Energon gives these to every sample, and readers compare them with each pack.
    subflavors = {"offline_packing": task, "generation": generation}
    dataset = {
        "sample_type": {
            "__module__": "task_encoders.energon_samples",
            "__class__": _SAMPLE_CLASS[task],
        },
        "part_filter": "sample_loader.py:part_filter",
        "sample_loader": "sample_loader.py:sample_loader",
        "subflavors": {name: one for name, one in subflavors.items() if one},
    }
    contents = {
        "sample_loader.py": _SAMPLE_LOADER.encode(),
        "dataset.yaml": yaml_bytes(dataset),
        "split.yaml": yaml_bytes({"split_parts": parts, "exclude": []}),
        "index.uuid": str(uuid.uuid5(_NAMESPACE, content_hash)).encode(),
        ".info.json": to_json({"energon_version": ENERGON_VERSION, "shard_counts": counts}),
        **instead,
    }
    for name, content in contents.items():
        write_atomically(meta / name, content)
    return [f".nv-meta/{name}" for name in ("index.sqlite", *contents)]


def metadata_of_5_0(dataset: Mapping[str, Any], manifest: Manifest) -> dict[str, bytes]:
    """Return another dataset.yaml, and the file that Energon 5.0 reads instead of .info.json."""
    counts = {shard.name: shard.packs for shard in manifest.shards}
    contents = {"dataset.yaml": dataset, ".info.yaml": {"shard_counts": counts}}
    return {name: yaml_bytes(content) for name, content in contents.items()}


def yaml_bytes(content: Mapping[str, Any]) -> bytes:
    """Write YAML in the order of the content."""
    return yaml.safe_dump(content, sort_keys=False).encode()


def hash_metadata(path: Path) -> str:
    """Hash a file by xxh3_128; of a database its tables and rows, since SQLite decides the bytes.
    Raises StageError if the database is damaged."""
    if path.suffix != ".sqlite":
        return hash_file(path)
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    try:
        with (
            local_copy(path) as copy,
            closing(sqlite3.connect(f"{copy.resolve().as_uri()}?mode=ro", uri=True)) as database,
        ):
            return _hash_rows(database)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise StageError(f"{path} is damaged: {error}") from error


def _hash_rows(database: sqlite3.Connection) -> str:
    (verdict,) = database.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise sqlite3.DatabaseError(verdict)
    named = database.execute("SELECT type, name, sql FROM sqlite_master ORDER BY type, name")
    entries = named.fetchall()
    digest = xxhash.xxh3_128(orjson.dumps(entries))
    for table in (name for kind, name, _ in entries if kind == "table"):
        rows = database.execute(f'SELECT * FROM "{table}" ORDER BY rowid')
        while some := rows.fetchmany(_ROWS_AT_ONCE):
            digest.update(orjson.dumps(some))
    return digest.hexdigest()


def _write_sqlite(path: Path, packs: Iterable[tuple[str, Sequence[PackEntry]]]) -> dict[str, int]:
    """Write the tables of `energon prepare`; return the number of packs in each shard."""
    counts: dict[str, int] = {}
    with _new_database(path) as database:
        # Whoever kills this leaves a temporary file; there is nothing to roll back.
        database.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;")
        database.executescript(_TABLES)
        for shard, (name, entries) in enumerate(packs):
            counts[name] = len(entries)
            samples = ((shard, e.key, i, e.offset, e.size) for i, e in enumerate(entries))
            parts = (
                (shard, i, part.name, part.offset, part.size)
                for i, entry in enumerate(entries)
                for part in entry.parts
            )
            database.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", samples)
            database.executemany("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", parts)
        database.executescript(_INDICES)
        database.commit()
    return counts


@contextmanager
def _new_database(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a new database, which gets its name only if the block succeeds, as `atomic_file`."""
    with atomic_file(path) as file, tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / path.name if is_remote(path) else Path(file.name)
        try:
            with closing(sqlite3.connect(made)) as database:
                yield database
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
            raise
        if is_remote(path):
            with made.open("rb") as content:
                shutil.copyfileobj(content, file)


def index_pack_folder(path: Path, task: str | None = None) -> int:
    """Give a folder of pack tars, written by others, the metadata it needs; returns the packs.

    All tars become the split train. The packs' own `meta.task` decides the task; `task` is needed
    for packs without it, and must agree. Raises StageError if there are no tars, a damaged one, a
    pack without JSON, a repeated key, or no task.
    """
    tars = sorted(path.glob("*.tar"))
    if not tars:
        raise StageError(f"{path} holds no *.tar; name the folder of the shards")
    packs: dict[str, list[PackEntry]] = {}
    seen: dict[str, str] = {}
    lost = Counter[str]()
    for tar in tars:
        packs[tar.name] = list(scan_tar(tar))
        if not packs[tar.name]:
            raise StageError(f"{tar} holds no pack; remove it")
        for entry in packs[tar.name]:
            if entry.key in seen:
                raise StageError(f"key {entry.key!r} is in {seen[entry.key]} and in {tar.name}")
            seen[entry.key] = tar.name
        task = _checked_task(tar, packs[tar.name], task, lost)
    if task == "vqa" and lost["prompts"]:
        problem = LOST_PROMPTS.format(f"{lost['prompts']:,}", f"{lost['all']:,}")
        raise StageError(f"{path}: {problem}")
    if task is None:
        raise StageError(f"{path}: the packs do not name their task; pass --task {'|'.join(TASKS)}")
    for tar in tars:
        write_atomically(tar.with_suffix(".tar.idx"), index_bytes(packs[tar.name]))
    hashes = hash_bytes(to_json({tar.name: hash_file(tar) for tar in tars}))
    write_energon_metadata(path, task, {"train": list(packs)}, packs.items(), content_hash=hashes)
    return len(seen)


def _checked_task(
    tar: Path, entries: Sequence[PackEntry], task: str | None, lost: Counter[str]
) -> str | None:
    """Check that every pack can be restored. Return the task that they name, which must be the
    given one. Add sub-samples without prompts to `lost`, and `all`."""
    with tar.open("rb") as file:
        for entry in entries:
            part = next((part for part in entry.parts if part.name == JSON_PART), None)
            if part is None:
                raise StageError(f"{tar}: {entry.key!r} has no {JSON_PART}; it is not a pack")
            file.seek(part.offset)
            try:
                record = parse_json(file.read(part.size), entry.key)
                restored = restore_pack(record, entry.key, task)
                found = restored.task
                lost.update(prompts=count_lost_prompts(record), all=len(restored.keys))
            except PackFormatError as error:
                raise StageError(f"{tar}: {error}") from error
            if found is not None and found != (task := task or found):
                raise StageError(f"{tar}: {entry.key!r} is a {found} pack, not {task}")
    return task
