"""Index tables without a source."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from offline_packing.index import table as index
from offline_packing.index.table import INDEX_SCHEMA, Index, IndexInfo


def make_index(folder: Path, part_rows: list[int]) -> Index:
    """Rows whose key, tokens, locator and number of media follow from their number."""
    numbers = iter(range(sum(part_rows)))
    return write_index(folder, [[row_of(next(numbers)) for _ in range(n)] for n in part_rows])


def write_index(folder: Path, parts: list[list[dict[str, object]]], **info: Any) -> Index:
    """An index of these rows, of which some columns may lack."""
    for number, rows in enumerate(parts):
        with index.table_writer(folder / index.part_name(number), INDEX_SCHEMA) as write:
            write(pa.Table.from_pylist(rows, schema=INDEX_SCHEMA))
    return Index(folder, IndexInfo({}, {}, list(map(len, parts)), {}, **info))


def row_of(i: int) -> dict[str, object]:
    """Row `i` of such an index."""
    locator = {"kind": "bytes", "container": f"c{i % 3}", "offset": i, "size": 1, "column": ""}
    media = [{**locator, "extension": "jpg"}] * (i % 3)
    return {"key": f"k{i}", "source_id": 0, "num_tokens": i, "json": locator, "media": media}
