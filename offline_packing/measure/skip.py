"""source.skip: leaves out what other outputs already hold, before it is read or tokenized.

A sample is known by its key, whatever model the other output was packed for. A key as the source
gives it has no prefix; a prefix depends on how many sources a configuration has:

    out/packed, of one source          000017           the same sample: both are '000017' of
    out/more, of data and others       data/000017      the folder 'data'

Of records that share an id the content decides (repeated_ids.py). No key is a Python object for
longer than a batch: see storage/key_set.py.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.errors import StageError
from offline_packing.index.set_aside import read_set_aside
from offline_packing.index.table import Index, IndexInfo, part_name
from offline_packing.measure.repeated_ids import hash_content, repeated_key
from offline_packing.runs.run import Run
from offline_packing.runs.workspace import Workspace
from offline_packing.sources import Source, SourceOptions, SourcePart, SourceRecord
from offline_packing.sources.records import to_sample
from offline_packing.storage.files import hash_bytes, hash_file, read_json
from offline_packing.storage.key_set import Hashes, KeySet, hash_keys, sort_hashes
from task_encoders.samples import SampleError

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE: Final = 1 << 17
#: content_hash where a key is an identity.
_NO_CONTENT: Final = pa.scalar(0, pa.uint64())
#: Characters that repeated_key adds: '@' and 16 hexadecimal digits.
_CONTENT_SUFFIX: Final = len(repeated_key("", 0))


def skip_fingerprint(config: SourceOptions) -> str:
    """Changes when the samples of a skipped output change.

    Raises:
        StageError: one of them is not there, or is not complete.
    """
    indices = (index for path in config.skip for index in _indices(path))
    return hash_bytes("".join(hash_file(folder / "index.json") for folder, _ in indices).encode())


def set_known_keys(run: Run, sources: Sequence[Source], folder: Path) -> None:
    """Tell each source which keys to leave out, by a file in a folder; one that is there already
    is used. Raises StageError as `skip_fingerprint`."""
    for i, (config, source) in enumerate(zip(run.config.source, sources, strict=True)):
        if not config.skip:
            continue
        path = folder / f"source-{i:05d}-{skip_fingerprint(config)}.npy"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            KeySet.save(path, _collect(config, source.key_prefix))
        source.known = KeySet(path)


@dataclass
class NewRecords:
    """The records of a part that no output of source.skip holds. After iteration it knows how
    many others there were."""

    source: Source
    part: SourcePart
    num_skipped: int = 0

    def __iter__(self) -> Iterator[SourceRecord]:
        for record in self.source.records(self.part):
            if record.known:
                self.num_skipped += record.known
            elif is_known(self.source, record):
                self.num_skipped += 1
            else:
                yield record


def count_new(source: Source, samples_per_part: int) -> tuple[int, int]:
    """Records of a source that are new, and records that are left out."""
    parts = [NewRecords(source, part) for part in source.scan(samples_per_part).parts]
    return sum(sum(1 for _ in part) for part in parts), sum(part.num_skipped for part in parts)


def is_known(source: Source, record: SourceRecord) -> bool:
    """Whether an output of source.skip packed a record, or set it aside."""
    if source.is_known(record.key):
        return True
    if source.known is None or not record.own_id or isinstance(record.content, SampleError):
        return False
    try:
        sample = to_sample(record.content, record.key, source.task, record.paired_media)
    except SampleError:
        return False
    media = map(record.embedded.get, (*sample.images, *sample.videos))
    return source.is_known(repeated_key(record.key, hash_content(sample, media)))


def _indices(path: str) -> Iterator[tuple[Path, list[dict[str, Any]]]]:
    """(folder of an index, the sources of its configuration); several where an earlier version
    appended data."""
    workspace = Workspace(Path(path))
    manifest = read_json(workspace.manifest)
    if manifest is None:
        raise StageError(
            f"source.skip: {path} is not a complete output, it has no manifest.json; finish it "
            "first, or take it out"
        )
    yield workspace.packing, manifest["config"]["source"]
    for i, appended in enumerate(manifest["appended"], start=1):
        yield workspace.packing / f"append-{i:04d}", appended["config"]["source"]


def _collect(config: SourceOptions, prefix: str) -> Hashes:
    """Hashes of the keys, without prefix, of a source's samples in the outputs that it skips."""
    packed: list[Hashes] = []
    shared: list[Hashes] = []
    aside: list[Hashes] = []
    for path in config.skip:
        for folder, sources in _indices(path):
            info = IndexInfo.load(folder / "index.json")
            if info is None:
                raise StageError(f"source.skip: {folder / 'index.json'} is missing; restore it")
            prefixes = _prefixes(config, prefix, path, sources, info)
            for keys, contents in _index_keys(Index(folder / "index", info), prefixes):
                is_own = pc.not_equal(contents, _NO_CONTENT)
                texts = contents.filter(is_own).to_pylist()
                bases = list(map(_base, keys.filter(is_own).to_pylist(), texts))
                packed.append(hash_keys(keys.filter(pc.invert(is_own)).to_pylist()))
                packed.append(hash_keys(map(repeated_key, bases, texts)))
                shared.append(hash_keys(bases))
            tables = (folder / "set_aside" / part_name(i) for i in range(len(info.part_rows)))
            for keys in _aside_keys(tables, sources, prefixes):
                aside.append(hash_keys(keys.to_pylist()))
    # If records share an id, one that was set aside says nothing about the others.
    lost, known = sort_hashes(aside), sort_hashes(shared)
    return sort_hashes([*packed, lost[~np.isin(lost, known, assume_unique=True)]])


def _prefixes(
    config: SourceOptions,
    prefix: str,
    path: str,
    sources: Sequence[dict[str, Any]],
    info: IndexInfo,
) -> dict[int, str]:
    """Sources of an output whose samples may be this source's -> the prefix of their keys."""
    theirs = {i: str(info.fingerprint[f"source.{i}.key_prefix"]) for i in range(len(sources))}
    same = {
        i: theirs[i] for i, one in enumerate(sources) if _place(one) == _place(config.model_dump())
    }
    if not same:
        logger.warning(
            "source.skip: %s was packed from other folders than %s; samples with the same key are "
            "taken to be the same",
            path,
            config.path,
        )
        return dict.fromkeys(theirs, prefix)
    return {i: own for i, own in same.items() if own == prefix} or same


def _place(source: dict[str, Any]) -> tuple[object, ...]:
    path = str(source["path"])
    path = path if "://" in path else str(Path(path).resolve())
    return (
        source["format"],
        path.rstrip("/"),
        source.get("split") or "train",
        source.get("dataset"),
    )


def _index_keys(
    samples: Index, prefixes: dict[int, str]
) -> Iterator[tuple[pa.ChunkedArray, pa.ChunkedArray]]:
    """(keys without prefix, content_hash) of the rows of some sources."""
    for part in samples.parts("key", "content_hash", "source_id"):
        for batch in part.to_batches(max_chunksize=_KEYS_AT_ONCE):
            for source_id, prefix in prefixes.items():
                own = pc.and_(
                    pc.equal(batch["source_id"], source_id),
                    pc.starts_with(batch["key"], pattern=prefix),
                )
                rows = batch.filter(own)
                yield _without(prefix, rows["key"]), rows["content_hash"]


def _aside_keys(
    tables: Iterator[Path], sources: Sequence[dict[str, Any]], prefixes: dict[int, str]
) -> Iterator[pa.ChunkedArray]:
    """Keys, without prefix, of what was set aside while measuring some sources."""
    for table in read_set_aside(tables):
        for source_id, prefix in prefixes.items():
            own = pc.and_(
                pc.equal(table["source"], sources[source_id]["path"]),
                pc.starts_with(table["key"], pattern=prefix),
            )
            yield _without(prefix, table["key"].filter(own))


def _without(prefix: str, keys: Any) -> Any:
    return pc.utf8_slice_codeunits(keys, len(prefix)) if prefix else keys


def _base(key: str, content: int) -> str:
    """The id of a record, from a key that may also name its content."""
    return key[:-_CONTENT_SUFFIX] if key == repeated_key(key[:-_CONTENT_SUFFIX], content) else key
