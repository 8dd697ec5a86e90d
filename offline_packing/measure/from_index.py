"""Samples that another output's index holds already, see `source.format: index`: rows of its parts
are copied under this run's numbers and keys, and nothing is measured.

What a row holds depends on the model, the source's options and, where conversations are cut, on the
length of packs. All of them must be as that index was measured with.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.config.packing import PackingConfig
from offline_packing.engines.local import advance
from offline_packing.errors import DamagedError
from offline_packing.index import table as index
from offline_packing.index.records import RECORD_COLUMNS, begins_record, records_of
from offline_packing.measure.identity import repeated_key
from offline_packing.runs.artifacts import Fingerprint, check_fingerprint, config_fingerprint
from offline_packing.runs.run import Workspace
from offline_packing.sources import Scan, Source, SourcePart
from offline_packing.storage.files import hash_file, kept_copy
from task_encoders.storage.paths import REMEDY, path_of

#: Notes of a part that are copied, even where source.skip leaves out some of its samples: they warn
#: of what may be among the others.
_KEPT: Final = ("num_weighted", "num_part_hashed", "diagnosis")
_KEYS_AT_ONCE: Final = 1 << 17


@dataclass(frozen=True, slots=True)
class IndexPart:
    """A part of another output's index: the items of a SourcePart."""

    #: its index and set-aside tables, and their recorded hashes
    paths: tuple[Path, Path]
    hashes: tuple[str, str]
    #: put before every key there
    key_prefix: str
    #: xor of its `prefix_media`, which hold no more than a place in a source of that index
    salt: int


def scan_index(config: PackingConfig, source_id: int) -> Scan:
    """The parts of a source that the index named by its `index` holds. Raises StageError if there
    is no such index, or rows measured with these settings would differ from its rows."""
    output = str(config.source[source_id].index)
    workspace, info = Workspace(path_of(output)), index.load_index(output).info
    prefixes = [info.fingerprint[f"source.{i}.key_prefix"] for i in range(len(info.sources))]
    own = config.key_prefixes()[source_id]
    number = prefixes.index(own) if own in prefixes else 0
    apart = {"listing", "skip", "skip.listing"} | ({"key_prefix"} if len(prefixes) == 1 else set())

    def of_rows(fields: Fingerprint, place: int) -> Mapping[str, str | int]:
        own = f"source.{place}."
        kept = {k: v for k, v in fields.items() if not k.startswith("source.")}
        named = {k.removeprefix(own): v for k, v in fields.items() if k.startswith(own)}
        return kept | {f"source.{source_id}.{k}": v for k, v in named.items() if k not in apart}

    wanted, found = (
        of_rows(config_fingerprint(config), source_id),
        of_rows(info.fingerprint, number),
    )
    check_fingerprint(
        # Traits that this layout does not need may be there.
        {k: v for k, v in found.items() if k != "index.traits" or k in wanted},
        wanted,
        artifact=f"the index of {output}",
        remedy="give the settings that it was measured with, or measure again: name its source in "
        "place of format index",
    )
    info_hash = hash_file(workspace.index_info)
    is_alone = all(one.index == output for one in config.source)
    first = sum(info.source_parts[:number])
    names = map(index.part_name, range(first, first + info.source_parts[number]))
    parts = [
        IndexPart(
            paths=(workspace.index / name, workspace.set_aside / name),
            hashes=(info.hashes["index"][name], info.hashes["set_aside"][name]),
            key_prefix=str(prefixes[number]),
            salt=0 if is_alone else int(info_hash[:16], 16),
        )
        for name in names
    ]
    return Scan(tuple(SourcePart(part, None) for part in parts), info_hash)


def copy_part(
    part: IndexPart, source: Source, source_id: int, index_path: Path, set_aside_path: Path
) -> None:
    """Write the two tables of a part, but the records that source.skip leaves out. The index part
    comes last and marks completion. Raises DamagedError if they are not as they were measured."""
    here, aside_here = map(_intact, part.paths, part.hashes)
    notes: dict[str, str] = {}
    with (
        index.open_table(here) as rows,
        index.open_table(aside_here) as aside,
        index.table_writer(index_path, index.INDEX_SCHEMA) as write_measured,
        index.table_writer(set_aside_path, index.SET_ASIDE_SCHEMA, notes) as write_aside,
    ):
        columns = rows.read([*RECORD_COLUMNS, "key_hash", "sample_hash"])
        known, begins = _known(part, source, records_of(columns)), begins_record(columns)
        is_cut = columns["part"].is_valid().to_numpy() & ~known
        num_read = 0
        for number in range(rows.num_row_groups):
            table = rows.read_row_group(number).cast(index.INDEX_SCHEMA)
            is_new = ~known[num_read : (num_read := num_read + len(table))]
            write_measured(_as_own(table.filter(pa.array(is_new)), part, source, source_id))
            advance(len(table))
        table = aside.read().cast(index.SET_ASIDE_SCHEMA)
        advance(len(table))
        known_aside = _known(part, source, table)
        table = table.filter(pa.array(~known_aside))
        own = {
            "key": _with_prefix(table["key"], part, source),
            "source": pa.array([index.escape(source.path)] * len(table), pa.string()),
        }
        write_aside(_replaced(table, own))
        held = aside.metadata.metadata or {}
        notes |= {name: held[name.encode()].decode() for name in _KEPT if name.encode() in held}
        if count := int((begins & known).sum() + known_aside.sum()):
            notes["num_skipped"] = str(count)
        if is_cut.any():
            split = {"conversations": int((begins & is_cut).sum()), "samples": int(is_cut.sum())}
            notes["split"] = orjson.dumps(split).decode()


def _intact(path: Path, recorded: str) -> Path:
    """A file of another output; of an object, a copy that this process keeps."""
    try:
        copy = kept_copy(path, recorded)
        if hash_file(copy) == recorded:
            return copy
    except FileNotFoundError:
        pass
    raise DamagedError(f"{path} is not as it was measured; {REMEDY}")


def _known(part: IndexPart, source: Source, rows: pa.Table) -> npt.NDArray[np.bool_]:
    """(num_rows,) as `is_known` of the record of each row, which has its key and, if it is
    measured, its content_hash."""
    found = [np.zeros(len(rows) if source.known is None else 0, bool)]
    for batch in [] if source.known is None else rows.to_batches(max_chunksize=_KEYS_AT_ONCE):
        assert source.known is not None
        keys = [key.removeprefix(part.key_prefix) for key in batch["key"].to_pylist()]
        contents = [0] * len(keys)
        if "content_hash" in batch.schema.names:
            contents = batch["content_hash"].to_pylist()
        pairs = list(zip(keys, contents, strict=True))
        ids = [key.removesuffix(repeated_key("", content)) for key, content in pairs]
        named = [
            repeated_key(own, content) if content else own
            for own, (_, content) in zip(ids, pairs, strict=True)
        ]
        found.append(source.known.find(ids) | source.known.find(named))
    return np.concatenate(found)


def _with_prefix(keys: pa.ChunkedArray | pa.Array, part: IndexPart, source: Source) -> pa.Array:
    """Keys with this run's prefix in place of the other output's."""
    own = pc.utf8_slice_codeunits(keys, len(part.key_prefix))
    prefix, between = (pa.scalar(text, pa.large_string()) for text in (source.key_prefix, ""))
    return pc.binary_join_element_wise(prefix, own, between)


def _as_own(table: pa.Table, part: IndexPart, source: Source, source_id: int) -> pa.Table:
    """Rows of the index with what depends on the run's sources."""
    keys, cut = _with_prefix(table["key"], part, source), table["part"].combine_chunks()
    records = _with_prefix(cut.field("key"), part, source)
    children = [records if field.name == "key" else cut.field(field.name) for field in cut.type]
    hashes = [index.key_hash(source_id, key) for key in pc.coalesce(records, keys).to_pylist()]
    has_prefix = table["prefix_hash"].to_numpy() != 0
    media = table["prefix_media"].to_numpy()
    own = {
        "key": keys,
        "key_hash": pa.array(hashes, pa.uint64()),
        "source_id": pa.array(np.full(len(table), source_id, np.int32)),
        "prefix_media": pa.array(np.where(has_prefix, media ^ np.uint64(part.salt), media)),
        "part": pa.StructArray.from_arrays(children, fields=list(cut.type), mask=cut.is_null()),
    }
    return _replaced(table, own)


def _replaced(table: pa.Table, columns: Mapping[str, pa.Array]) -> pa.Table:
    return pa.table([columns.get(name, table[name]) for name in table.schema.names], table.schema)
