"""The verdict on an output, kept so that `run` need not read a finished output again.

_packing/verify.json    a receipt: what the verdict depends on, when the whole output was found
                        without problems, whether `deep`, and the counts of that check

A verdict depends on the files that `verify` reads, on the configuration with accepted mismatches,
on the generation, and on the versions of this package and of libraries. A file counts by its size,
times of modification and change, and inode; an object by size and ETag. Where the source is read
(deep, or packs that refer to media), the files that samples lie in count likewise. A file of a
remote source, or an object without an ETag, is not known without being read: where it counts, all
is read again. A deep verdict stands for a shallow one, not the reverse.

The file holds times, so that outputs with equal bytes may differ in it. It is written after a
check, but its stamps are taken before: a file that changes during the check voids it. A kill leaves
the earlier verdict, with its own stamps.
"""

import logging
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from offline_packing.errors import DamagedError, DiskFullError, StageError
from offline_packing.runs.artifacts import config_fingerprint, library_versions, open_index
from offline_packing.runs.manifest import require_manifest, stored_config
from offline_packing.runs.run import Run, open_sources
from offline_packing.sources.roots.roots import MediaRoot
from offline_packing.storage.files import hash_bytes, remove_path, to_json
from offline_packing.storage.receipts import (
    STAGES,
    Receipt,
    Setting,
    copy_path,
    load_receipt,
    receipt_path,
)
from offline_packing.verify.shard import VerifyResult
from offline_packing.verify.verify import Drawn, verify
from task_encoders.packs.stored_media import MEDIA_ROOTS
from task_encoders.storage.paths import as_remote
from task_encoders.storage.remote_requests import RemoteError

logger = logging.getLogger(__name__)

#: Files that say how the records of some formats are read; "" is the source's path itself.
_DESCRIPTIONS: Final = ("", "/dataset_info.json", "/.nv-meta/dataset.yaml", "/.nv-meta/split.yaml")

#: Values that change with a file: size, modification and change time (ns), inode; of an object,
#: size and ETag.
Stamp = tuple[int | str, ...]
#: A file's name and stamp; None: it is not known.
_Stamps = Iterator[tuple[str, Stamp | None]]


@dataclass(frozen=True)
class Verdict:
    """A check of the whole output that found no problem."""

    time: datetime
    deep: bool
    result: VerifyResult

    def __str__(self) -> str:
        return (
            f"verify: complete on {self.time:%Y-%m-%d %H:%M} UTC{' (deep)' if self.deep else ''}, "
            "nothing changed since; `offline-packing verify` reads all again"
        )


@dataclass(frozen=True)
class _VerdictReceipt(Receipt):
    facts: Verdict  # type: ignore[assignment]


def known_verdict(run: Run, *, deep: bool) -> Verdict | None:
    """Return the recorded verdict, if it is as deep as asked for and still holds; no shard is
    read."""
    try:
        stored = load_receipt(run.workspace.packing, "verify", _VerdictReceipt)
    except DamagedError:
        return None
    if stored is None or (deep and not stored.facts.deep):
        return None
    for name, value in _depends_on(run, deep).items():
        if value is None or value != stored.inputs.get(name):
            return None
    verdict: Verdict = stored.facts
    return verdict


def check(
    run: Run, *, deep: bool = False, hash_only: bool = False, drawn: Drawn | None = None
) -> VerifyResult:
    """Run `verify`, and record its verdict if one process checked the whole output and found no
    problem. Remove the recorded verdict if there was a problem. A deep verdict that holds is not
    replaced by a shallow one. Raises as `verify`."""
    is_whole = not (hash_only or drawn or run.engine.IS_SHARED)
    depends_on = _depends_on(run, deep) if is_whole else {}
    try:
        result = verify(run, deep=deep, hash_only=hash_only, drawn=drawn)
    except StageError:
        _keep(run, None)
        raise
    if not result.ok:
        _keep(run, None)
    elif is_whole and (deep or not (known := known_verdict(run, deep=False)) or not known.deep):
        counts = {one.name: getattr(result, one.name) for one in fields(result) if one.compare}
        time = datetime.now(UTC).isoformat(timespec="seconds")
        inputs: dict[str, Setting] = {k: v for k, v in depends_on.items() if v is not None}
        _keep(run, Receipt(inputs, {}, {"time": time, "deep": deep, "result": counts}))
    return result


def _keep(run: Run, receipt: Receipt | None) -> None:
    """Write the verdict, or remove it. An output that may only be read can be checked as well."""
    packing = run.workspace.packing
    try:
        if receipt is None:
            for path in (receipt_path(packing, "verify"), copy_path(packing, "verify")):
                remove_path(path)
        else:
            receipt.save(packing, "verify")
    except (DiskFullError, OSError, RemoteError) as error:
        logger.warning("verify: the verdict in %s is left as it is: %s", packing, error)


def _depends_on(run: Run, deep: bool) -> Mapping[str, str | None]:
    """Return everything that a verdict depends on, by name; None: it is not known."""
    config = {
        "config": stored_config(run.config, run.config.output.key_prefix),
        "fingerprint": config_fingerprint(run.config),
        "accepted": sorted(run.accept_mismatch),
    }
    found: dict[str, str | None] = {"config": hash_bytes(to_json(config))}
    found |= {f"versions.{name}": version for name, version in library_versions().items()}
    try:
        manifest = require_manifest(run.workspace.root)
        found |= {"generation": manifest.generation, "content": manifest.content_hash}
        found["files"] = _hash(_output_stamps(run))
        if deep or MEDIA_ROOTS in manifest.metadata:
            found["source"] = _hash(_source_stamps(run))
    except (OSError, StageError):  # `verify` names the fault
        found["files"] = None
    return found


def file_stamp(path: str | Path) -> Stamp | None:
    """Return the stamp of a local file; None: there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    times = found.st_mtime_ns, found.st_ctime_ns
    return (found.st_size, *times, found.st_ino) if stat.S_ISREG(found.st_mode) else None


def file_stamps(folder: Path) -> dict[str, Stamp | None]:
    """Return the stamps of the files in a folder, by name; those of objects come from one listing.
    None: the storage gives no ETag. A folder that does not exist is empty."""
    if remote := as_remote(folder):
        return {name: (size, tag) if tag else None for name, size, tag in remote.tags()}
    names = os.listdir(folder) if folder.is_dir() else ()
    return {name: stamp for name in names if (stamp := file_stamp(f"{folder}/{name}")) is not None}


def _hash(stamps: _Stamps) -> str | None:
    digest = xxhash.xxh3_128()
    for line in stamps:
        if line[1] is None:
            return None
        digest.update(repr(line).encode())
    return digest.hexdigest()


def _output_stamps(run: Run) -> _Stamps:
    """Yield the files that `verify` reads, relative to the output. Each folder is listed once;
    other files in it do not count."""
    at, names = run.workspace, set[str]()
    for stage in STAGES[:-1]:
        receipt = load_receipt(at.packing, stage)
        own = (receipt_path(at.packing, stage), copy_path(at.packing, stage))
        names |= {*map(at.name_of, own), *(receipt.files if receipt else ())}
    for folder in sorted({name.rpartition("/")[0] for name in names}):
        for name, stamp in sorted(file_stamps(at.root / folder if folder else at.root).items()):
            if (path := f"{folder}/{name}".lstrip("/")) in names:
                yield path, stamp


def _source_stamps(run: Run) -> _Stamps:
    """Yield the stamps of the files that hold samples of the index, and of those that describe
    their records."""
    sources = open_sources(run.config)
    for source in sources:
        if not (isinstance(source.root, MediaRoot) and isinstance(source.media, MediaRoot)):
            yield source.path, None
            return
        for name in _DESCRIPTIONS:
            yield name, file_stamp(source.path + name) or ()
    for table in open_index(run).parts("source_id", "json", "media"):
        for i, source in enumerate(sources):
            rows = table.filter(pc.equal(table["source_id"], i))
            records, media = rows["json"].combine_chunks(), rows["media"].combine_chunks().flatten()
            places = [records.field("container"), media.field("container")]
            roots = dict.fromkeys((source.root, source.media))  # it may be in either
            for name in pc.unique(pa.concat_arrays(places)).to_pylist():
                stamps = [file_stamp(root.path(name)) or () for root in roots]
                yield f"{i} {name}", sum(stamps, ()) or None
