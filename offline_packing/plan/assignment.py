"""Which sample stands where in which pack, as a table."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from offline_packing.index.rows import name_copies
from offline_packing.index.table import table_writer
from offline_packing.planner.pack_plan import PackPlan


def write_assignment(samples: pa.Table, plan: PackPlan, path: Path) -> None:
    """Write a Parquet file with a row per use of a sample, in the order of the packs: the columns
    of `samples`, among them key and at the end num_tokens, and before the last pack and position in
    the pack. Rows at the end, without a pack, are samples set aside."""
    samples = samples.combine_chunks()
    is_aside = np.ones(len(samples), bool)
    is_aside[plan.sample_ids] = False
    aside = np.flatnonzero(is_aside)
    sizes = np.diff(plan.pack_offsets)
    places = {
        "pack": np.repeat(np.arange(plan.num_packs), sizes),
        "position": np.arange(len(plan.sample_ids)) - np.repeat(plan.pack_offsets[:-1], sizes),
    }
    rows = samples.take(pa.array(np.concatenate([plan.sample_ids, aside])))
    if (copies := plan.copy_numbers()) is not None:
        rows = name_copies(rows, np.append(copies, np.zeros(len(aside), copies.dtype)))
    none = pa.nulls(len(aside), pa.int64())
    for name, values in places.items():
        column = pa.chunked_array([pa.array(values, pa.int64()), none])
        rows = rows.add_column(len(rows.column_names) - 1, name, column)
    path.parent.mkdir(parents=True, exist_ok=True)
    with table_writer(path, rows.schema) as write:
        write(rows)
