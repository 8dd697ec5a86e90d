"""Samples of another output's index, see `source.format: index`: its rows are copied under this
run's numbers and keys, and nothing is measured."""

from collections import Counter
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from offline_packing.config.packing import PackingConfig
from offline_packing.engines.local import advance
from offline_packing.errors import DamagedError
from offline_packing.index import table as index
from offline_packing.measure.identity import by_content
from offline_packing.runs.artifacts import config_fingerprint
from offline_packing.runs.run import Workspace
from offline_packing.sources import Scan, Source, SourcePart
from offline_packing.storage.files import hash_file, kept_copy
from offline_packing.storage.receipts import Fingerprint, check_inputs
from task_encoders.settings import explain_hash
from task_encoders.storage.paths import REMEDY, path_of


class IndexPart(NamedTuple):
    """A part of another output's index: the items of a SourcePart."""

    #: its index and set-aside tables, and the rows whose ids repeat if it has any, with their
    #: recorded hashes
    tables: tuple[tuple[Path, str], ...]
    #: of its keys
    key_prefix: str
    #: xor of `prefix_media`, which may hold no more than a place in a source of that index
    salt: int


def scan_index(config: PackingConfig, source_id: int) -> Scan:
    """List the parts of a source's index that hold its samples. Raises StageError if the index is
    not complete, or if measuring with these settings would give other rows."""
    output = str(config.source[source_id].index)
    workspace, info = Workspace(path_of(output).resolve()), index.load_info(output)
    prefixes = [str(info.fingerprint[f"source.{i}.key_prefix"]) for i in range(len(info.sources))]
    prefix = config.key_prefixes()[source_id]
    number = prefixes.index(prefix) if prefix in prefixes else 0
    apart = (".listing", ".skip", *([".key_prefix"] if len(prefixes) == 1 else []))

    def of_rows(fields: Fingerprint, place: int) -> dict[str, str | int]:
        return {
            name.replace(f"source.{place}.", f"source.{source_id}."): value
            for name, value in fields.items()
            if name.startswith(f"source.{place}.") or not name.startswith("source.")
            if not name.endswith(apart)
        }

    found = of_rows(info.fingerprint, number)
    wanted = of_rows(config_fingerprint(config), source_id)
    if "index.layout" not in wanted:  # what it holds does no harm
        found.pop("index.layout", None)
    remedy = "give the settings that it was measured with, or name its data, not its index"
    explain = partial(explain_hash, workspace.root, config.model)
    artifact = f"the index of {output}"
    check_inputs(found, wanted, artifact=artifact, remedy=remedy, explain=explain)
    info_hash, first = info.hash, sum(info.source_parts[:number])
    is_alone = all(one.index == output for one in config.source)
    salt, parts = 0 if is_alone else int(info_hash[:16], 16), []
    for name in map(index.part_name, range(first, first + info.source_parts[number])):
        repeated = (workspace.repeated / name).with_suffix(".npy")
        paths = (workspace.index / name, workspace.set_aside / name, repeated)
        hashes = [info.files.get(workspace.name_of(path)) for path in paths]
        tables = tuple((path, one) for path, one in zip(paths, hashes, strict=True) if one)
        parts.append(SourcePart(IndexPart(tables, prefixes[number], salt), None))
    return Scan(tuple(parts), info_hash)


def copy_part(part: IndexPart, source: Source, source_id: int, target: tuple[Path, Path]) -> None:
    """Write the two tables of a part without the records that source.skip names, as `measure_part`
    does. Raises DamagedError if the part is not as it was measured."""
    paths = [kept_copy(*table) for table in part.tables]
    for copy, (path, recorded) in zip(paths, part.tables, strict=True):
        if not copy.exists() or hash_file(copy) != recorded:
            raise DamagedError(f"{path} is not as it was measured; {REMEDY}")
    own, other, begin = source.key_prefix, part.key_prefix, 0
    repeated = np.load(paths[2]) if len(paths) > 2 else np.empty(0, np.int64)
    notes: dict[str, str] = {}
    num_skipped, split, last = 0, Counter[str](), (0, 0, 0)
    with (
        index.open_table(paths[0]) as measured,
        index.open_table(paths[1]) as aside,
        index.table_writer(target[0], index.INDEX_SCHEMA) as write_measured,
        index.table_writer(target[1], index.SET_ASIDE_SCHEMA, notes) as write_aside,
    ):
        for number in range(measured.num_row_groups):
            table, rows = measured.read_row_group(number), []
            renamed = repeated[(begin <= repeated) & (repeated < begin + len(table))] - begin
            begin += len(table)
            if len(renamed):
                table = index.rename(table, renamed)
            for row in table.to_pylist():
                advance()
                cut, content = row["part"], row["content_hash"]
                key = (cut or row)["key"].removeprefix(other)
                place = row["key_hash"], row["sample_hash"], cut and cut["first"]
                # Parts of a record are in order; parts of a copy of it begin again.
                begins = int(not cut or place[:2] != last[:2] or place[2] <= last[2])
                last = place
                if any(map(source.is_known, by_content(key, content))):
                    num_skipped += begins
                    continue
                for one in filter(None, (row, cut)):
                    one["key"] = own + one["key"].removeprefix(other)
                if cut:
                    split.update(conversations=begins, samples=1)
                row["key_hash"], row["source_id"] = index.key_hash(source_id, own + key), source_id
                if row["prefix_hash"]:
                    row["prefix_media"] ^= part.salt
                rows.append(row)
            write_measured(pa.Table.from_pylist(rows, index.INDEX_SCHEMA))
        rows = []
        for row in aside.read().to_pylist():
            advance()
            key = row["key"].removeprefix(other)
            num_skipped += (is_known := source.is_known(key))
            if not is_known:
                rows.append({**row, "key": own + key, "source": index.escape(source.path)})
        write_aside(pa.Table.from_pylist(rows, index.SET_ASIDE_SCHEMA))
        # Where records are left out, the other notes say what may be among the rest.
        notes |= {name.decode(): note.decode() for name, note in aside.metadata.metadata.items()}
        notes |= {"num_skipped": str(num_skipped), "split": orjson.dumps(split).decode()}
        del notes["ARROW:schema"]
