"""How much disk is taken by copies of compressed files and large row groups."""

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.index.table import Index
from offline_packing.sources.formats.tables import ParquetSource
from offline_packing.sources.reading.row_reader import WANTED_SHARE

#: Where the last sample of each compressed file ends.
_ENDS: Final = pa.schema(
    [("source_id", pa.int32()), ("container", pa.large_string()), ("end", pa.int64())]
)


def estimate_unpacked_bytes(samples: Index, num_shards: int) -> int:
    """Upper limit of the bytes of all copies while this many shards are written.

    A compressed file is unpacked as far as its last sample. Row groups are only copied where each
    shard uses little of them, as in a plan of many shards without locality.
    """
    ends = _ENDS.empty_table()
    in_rows = 0
    for table in samples.parts("source_id", "json", "media"):
        media = table["media"].combine_chunks()
        owners = table["source_id"].take(pc.list_parent_indices(media))
        for ids, places in (
            (table["source_id"], table["json"].combine_chunks()),
            (owners, media.flatten()),
        ):
            kinds, sizes = places.field("kind"), places.field("size")
            of_row = pc.equal(kinds, ParquetSource.KIND)
            in_rows += pc.sum(sizes.filter(of_row)).as_py() or 0
            packed = pc.starts_with(kinds, "stream")
            columns = [ids, places.field("container"), pc.add(places.field("offset"), sizes)]
            found = pa.table([column.filter(packed) for column in columns], schema=_ENDS)
            ends = pa.concat_tables([ends, found])
        ends = ends.group_by(["source_id", "container"]).aggregate([("end", "max")])
        ends = ends.select(["source_id", "container", "end_max"]).rename_columns(_ENDS.names)
    in_files = pc.sum(ends["end"]).as_py() or 0
    return in_files + (in_rows if num_shards * WANTED_SHARE > 1 else 0)
