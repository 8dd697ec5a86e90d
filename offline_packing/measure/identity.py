"""Identity of samples: records that share an id, and samples that other outputs already hold.

A record's own `id` (JSON, JSONL, tables) says where it came from, not which sample it is:
LLaVA-Instruct gives several conversations of an image one `id`. Of the samples that share one, the
first keeps it, and every other one whose content differs gets a key that follows from its content
alone, so that keys do not depend on the number that share an id, on parts or on workers:

    {"id": "33471", ...: "What is it?"}     33471
    {"id": "33471", ...: "Which colour?"}   33471@5d0c0a1be0a6a2f7
    {"id": "33471", ...: "What is it?"}     33471, and is set aside as a duplicate

`source.skip` leaves out samples that other outputs hold, whatever their model, before they are read
or tokenized. What these left out on purpose is new: samples that were not drawn or not chosen, or
trained before, and overlong ones where packs are longer now. A sample is known by its key, and
where records share an id by its content. A key as the source gives it has no prefix; a prefix
depends on how many sources a configuration has:

    out/packed, of one source          000017           the same sample: both are '000017' of
    out/more, of data and others       data/000017      the folder 'data'

No key is a Python object for longer than a batch: see storage/key_set.py.
"""

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from offline_packing.errors import DamagedError, StageError
from offline_packing.index.measured import asked_of, texts_of
from offline_packing.index.records import RECORD_COLUMNS, own_keys, places_of_equal, records_of
from offline_packing.index.set_aside import read_set_aside
from offline_packing.index.table import Index, IndexInfo, repeated_key
from offline_packing.runs.manifest import read_manifest
from offline_packing.runs.run import Run, Workspace
from offline_packing.runs.set_aside import DELIBERATE, aside_while_measuring, aside_while_planning
from offline_packing.sources import Embedded, Source, SourceOptions, SourcePart, SourceRecord
from offline_packing.sources.options import APART, place_of
from offline_packing.storage.files import hash_bytes, hash_file
from offline_packing.storage.key_set import Hashes, KeySet, hash_keys, sort_hashes
from offline_packing.storage.receipts import receipt_path
from task_encoders.records.record import to_sample
from task_encoders.samples import SampleError, SourceSample
from task_encoders.storage.paths import REMEDY, path_of

logger = logging.getLogger(__name__)


def repeated_rows(samples: Index) -> list[npt.NDArray[np.int64]]:
    """Return, for each part of an index, its rows that share an id with an earlier record and
    differ from it: `Index.part` gives them keys of their own. The first one keeps its id."""
    contents, hashes = samples.array("content_hash"), samples.array("key_hash")
    renamed = np.zeros(len(hashes), bool)
    if contents.any():
        several = places_of_equal(hashes)
        firsts = several[first_of_equal(hashes[several])]
        renamed[several] = contents[several] != contents[firsts]
    if count := np.count_nonzero(renamed):
        logger.info("measure: %s samples have an earlier one's id: now ID@CONTENT", f"{count:,}")
    ends = np.cumsum(samples.info.part_rows)[:-1]
    return [np.flatnonzero(some) for some in np.split(renamed, ends)]


def first_of_equal(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return (num_rows,) the first row with the same hash: [7, 9, 7, 9] -> [0, 1, 0, 1]."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return np.asarray(first[inverse])


def skip_fingerprint(config: SourceOptions, longest: int) -> str:
    """Return a hash that changes when a skipped output changes, or when another `longest` sample of
    the packs makes samples of it new. Raises StageError if an output is not complete."""
    parts = []
    for path in config.outputs_skipped:
        workspace, info, _, new = _complete_output(path, longest)
        tables = aside_while_planning(workspace) if new else []
        parts += [info.hash, *map(hash_file, tables), *sorted(new)]
    return hash_bytes("".join(parts).encode())


def set_known_keys(run: Run, sources: Sequence[Source], folder: Path) -> None:
    """Tell each source which keys to skip, in a file of a folder; an existing file is used. Raises
    StageError as `skip_fingerprint`."""
    longest = run.config.pack.longest_sample
    for i, (config, source) in enumerate(zip(run.config.source, sources, strict=True)):
        if config.outputs_skipped:
            path = folder / f"source-{i:05d}-{skip_fingerprint(config, longest)}.npy"
            source.known = KeySet(path)
            if not path.exists():
                folder.mkdir(parents=True, exist_ok=True)
                source.known.save(_collect(config, source.key_prefix, longest))


@dataclass
class NewRecords:
    """A part's records that no output of source.skip holds, each with its number in the part; then
    the number of the others."""

    source: Source
    part: SourcePart
    num_skipped: int = 0

    def __iter__(self) -> Iterator[tuple[int, SourceRecord]]:
        num_new = 0
        for record in self.source.records(self.part):
            num_known = record.known or int(is_known(self.source, record))
            self.num_skipped += num_known
            if not num_known:
                yield self.num_skipped + num_new, record
                num_new += 1


def is_known(source: Source, record: SourceRecord) -> bool:
    """Tell whether an output of source.skip packed a record, or set it aside."""
    if source.is_known(record.key):
        return True
    if source.known is None or not record.own_id or isinstance(record.content, SampleError):
        return False
    try:
        paired, is_file = record.paired_media, source.files_at(record.locator)
        sample = to_sample(record.content, record.key, source.task, paired, is_file)
    except SampleError:
        return False
    media = map(record.embedded.get, (*sample.images, *sample.videos))
    return source.is_known(repeated_key(record.key, hash_content(sample, media)))


def _complete_output(
    path: str, longest: int
) -> tuple[Workspace, IndexInfo, Sequence[Mapping[str, Any]], set[str]]:
    """Open a skipped output. Return its workspace, its index, the sources of its configuration, and
    the reasons for which it set samples aside that are new all the same."""
    workspace = Workspace(path_of(path))
    manifest, info = read_manifest(workspace.root), IndexInfo.load(workspace.packing)
    if manifest is None or info is None:
        lacks = workspace.manifest
        if manifest is not None:
            lacks = receipt_path(workspace.packing, "measure")
        raise StageError(
            f"source.skip: {path} is not a complete output, it has no {lacks.name}; finish it "
            "first, or take it out"
        )
    packed = manifest.seq_length // manifest.pad_multiple * manifest.pad_multiple
    new = {*DELIBERATE, *(("overlong",) if longest > packed else ())}
    new &= manifest.counts.set_aside.keys()
    if new and not aside_while_planning(workspace):
        raise DamagedError(f"source.skip: {path} has lost the table of its plan; {REMEDY}")
    return workspace, info, manifest.config["source"], new


def _collect(config: SourceOptions, prefix: str, longest: int) -> Hashes:
    """Hash the keys, without prefix, of a source's samples in the outputs that it skips."""
    packed: list[Hashes] = []
    shared: list[Hashes] = []
    aside: list[Hashes] = []
    for path in config.outputs_skipped:
        workspace, info, sources, new = _complete_output(path, longest)
        prefixes = _prefixes(config, prefix, workspace, sources, info)
        left_out = read_set_aside(aside_while_planning(workspace), new) if new else ()
        again = sort_hashes([hash_keys(table["key"].to_pylist()) for table in left_out])
        for samples in Index(workspace.index, info).parts(*RECORD_COLUMNS):
            part, is_known = records_of(samples), np.ones(len(samples), bool)
            if new:
                is_known = ~np.isin(hash_keys(samples["key"].to_pylist()), again)
            part = part.append_column("is_known", pa.array(is_known))
            for keys, rows in own_keys(part, "source_id", prefixes.items()):
                names: Sequence[str] = keys.to_pylist()
                if any(contents := rows["content_hash"].to_pylist()):
                    both = list(map(by_content, names, contents))
                    shared.append(hash_keys(base for base, key in both if base != key))
                    names = [key for _, key in both]
                packed.append(hash_keys(itertools.compress(names, rows["is_known"].to_pylist())))
        paths = [(sources[i]["path"], own) for i, own in prefixes.items()]
        for table in read_set_aside(aside_while_measuring(workspace, info)):
            is_new = pc.is_in(table["reason"], pa.array(sorted(new), pa.string()))
            old = table.filter(pc.invert(is_new))
            aside += [hash_keys(keys.to_pylist()) for keys, _ in own_keys(old, "source", paths)]
    # If records share an id, a record that was set aside tells nothing about the others.
    lost, known = sort_hashes(aside), sort_hashes(shared)
    return sort_hashes([*packed, lost[~np.isin(lost, known, assume_unique=True)]])


def by_content(key: str, content: int) -> tuple[str, str]:
    """Return the key of a row without its content, which it may name, and with it. Without a
    content, the key alone is an identity."""
    suffix = repeated_key("", content) if content else ""
    base = key.removesuffix(suffix)
    return base, base + suffix


def _prefixes(
    config: SourceOptions,
    prefix: str,
    workspace: Workspace,
    sources: Sequence[Mapping[str, Any]],
    info: IndexInfo,
) -> dict[int, str]:
    """Find the sources of an output whose samples may be this source's. Return the prefix of their
    keys by their numbers."""
    theirs = {i: str(info.fingerprint[f"source.{i}.key_prefix"]) for i in range(len(sources))}
    place = place_of(config.model_dump())
    same = {i: own for i, own in theirs.items() if place_of(sources[i]) == place}
    if not same:
        same = {i: own for i, own in theirs.items() if own == prefix}
        if not same and config.index is not None:  # skip is of all sources of that index
            logger.warning("source.skip: %s holds no samples of %s", workspace.root, config.path)
            return {}
        same = same or (theirs if len(theirs) == 1 else {})
        if not same:
            names = ", ".join(sorted(own.rstrip("/") for own in theirs.values()))
            raise StageError(
                f"source.skip: {workspace.root} was packed from other folders than {config.path}, "
                f"which it calls {names}, so that none of its samples would be left out; set "
                "source.name to one of these, or take it out"
            )
        logger.warning(
            "source.skip: %s was packed from other folders than %s; samples with the same key are "
            "taken to be the same",
            workspace.root,
            config.path,
        )
        return same
    # Sources of one place, read in several ways, are told apart by their names.
    options = {i: {k: v for k, v in sources[i].items() if k not in APART} for i in same}
    named = [options[i] for i, own in same.items() if own == prefix]
    return {i: own for i, own in same.items() if not named or options[i] in named}


def hash_content(sample: SourceSample, media: Iterable[Embedded | None]) -> int:
    """Hash (xxh3_64) what a sample trains: its texts, and its media by their options and names, or
    by their bytes if these are in the record itself."""
    names = (sample.images, sample.videos)
    turns = [{"prompt": t.prompt, "answer": t.answer, **t.details} for t in sample.turns]
    tools = [sample.tools] if sample.tools else []
    own = [turns, *names, sample.system, *tools, *asked_of(sample)]
    digest = xxhash.xxh3_64(orjson.dumps(own))
    for medium in media:
        if medium is not None and medium.data is not None:
            digest.update(xxhash.xxh3_128_digest(medium.data))
    return digest.intdigest()


def digest_sample(sample: SourceSample, media: Iterable[bytes]) -> bytes:
    """Hash (xxh3_128) a sample's texts, and its media by their options and all their bytes."""
    digest = xxhash.xxh3_128(orjson.dumps(texts_of(sample)))
    for data in media:
        digest.update(xxhash.xxh3_128_digest(data))
    return digest.digest()


def hash_group(source: Source, content: Mapping[str, Any]) -> int:
    """Hash (xxh3_64) the field that `source.fields.group` names; 0: the record lacks it."""
    if "group" not in source.fields.named or content.get("group") is None:
        return 0
    return (
        xxhash.xxh3_64_intdigest(orjson.dumps(content["group"], option=orjson.OPT_SORT_KEYS)) or 1
    )
