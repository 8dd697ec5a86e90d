"""Samples that `pack.where` chooses, by fields that `source.keep` kept of their records."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.index.set_aside import AsideSamples
from offline_packing.index.table import Index
from offline_packing.sources.options import kept_value

_FORM: Final = "write [[FIELD, '>=', 3], [FIELD, 'not in', [a, b]]]"


def parse_filters(filters: Any) -> list[list[tuple[str, str, Any]]]:
    """pyarrow's filters as a list of lists of clauses: all of one list must hold. Columns are
    'number FIELD' or 'text FIELD', as their values say. Raises ValueError naming a bad clause."""
    if not _is_list(filters) or not all(map(_is_list, filters)):
        raise ValueError(f"pack.where: {filters!r} is not a list of clauses; {_FORM}")
    any_of = filters if all(_is_list(one) for own in filters for one in own) else [filters]
    return [[_parse_clause(clause) for clause in all_of] for all_of in any_of]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def _parse_clause(clause: Any) -> tuple[str, str, Any]:
    where = f"pack.where: {clause!r}"
    if len(clause) != 3 or not all(isinstance(one, str) for one in clause[:2]):
        raise ValueError(f"{where} is not a clause of field, operator and value; {_FORM}")
    name, op, value = clause
    if _is_list(value) != (op in ("in", "not in")):
        raise ValueError(f"{where}: 'in' and 'not in' take a list, other operators one value")
    given = value if _is_list(value) else [value]
    found = [own for one in given if (own := kept_value(one)) is not None]
    # Large integers, which have both, are less or more by their number and equal by their text.
    by_number = op[:1] in ("<", ">") and not isinstance(value, str)
    kinds = ["number" if by_number or one["text"] is None else "text" for one in found]
    if len(found) < len(given) or len({*kinds}) > 1:
        raise ValueError(f"{where} compares with something else than numbers, or short texts")
    values = [one[kind] for one, kind in zip(found, kinds, strict=True)]
    parsed = f"{kinds[0]} {name}", op, values if _is_list(value) else values[0]
    try:
        pq.filters_to_expression([parsed])
    except ValueError as error:
        raise ValueError(f"{where}: {error} Choose ==, !=, <, >, <=, >=, in, not in") from error
    return parsed


def left_out(samples: Index, filters: Sequence[Any]) -> AsideSamples:
    """The samples that filters do not choose. A clause fails where its field is null."""
    any_of, chosen = parse_filters(filters), pc.scalar(False)
    for all_of in any_of:
        holds = pq.filters_to_expression([all_of])
        for column, *_ in all_of:  # pyarrow's `not in` holds for nulls
            holds &= pc.field(column).is_valid()
        chosen |= holds
    columns = dict.fromkeys(column for all_of in any_of for column, *_ in all_of)
    kinds = [column.split(" ", 1) for column in columns]
    texts = (("not_chosen", "pack.where"), *(("not_chosen", f"no {name}") for _, name in kinds))
    found = [np.empty(0, np.int32)]  # places in texts; -1: chosen
    for part in samples.parts("kept"):
        table, code = pa.table({"row": np.arange(len(part))}), np.zeros(len(part), np.int32)
        for number, (kind, name) in reversed([*enumerate(kinds, start=1)]):
            values = pc.struct_field(pc.map_lookup(part["kept"], name, "first"), kind)
            code[values.is_null().to_numpy()] = number
            table = table.append_column(f"{kind} {name}", values)
        code[table.filter(chosen)["row"].to_numpy()] = -1
        found.append(code)
    codes = np.concatenate(found)
    ids = np.flatnonzero(codes >= 0)
    return AsideSamples(ids, codes[ids], texts)
