"""Samples that `pack.where` chooses, by fields that `source.keep` kept of their records."""

import operator
from collections.abc import Sequence
from functools import reduce
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offline_packing.index.set_aside import AsideSamples
from offline_packing.index.table import Index
from offline_packing.sources.options import kept_value

_FORM: Final = "write [[FIELD, '>=', 3], [FIELD, 'not in', [a, b]]]"

#: A field, and whether its numbers or its texts are compared.
Column = tuple[str, str]


def parse_filters(filters: Any) -> list[list[tuple[Column, str, Any]]]:
    """pyarrow's filters as lists of clauses, one of which must hold as a whole: clauses that must
    all hold, or a list of such lists. Raises ValueError naming the clause that is wrong."""
    if not _is_list(filters) or not all(map(_is_list, filters)):
        raise ValueError(f"{filters!r} is not a list of clauses; {_FORM}")
    any_of = filters if all(_is_list(one) for own in filters for one in own) else [filters]
    return [[_parse_clause(clause) for clause in all_of] for all_of in any_of]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def _parse_clause(clause: Any) -> tuple[Column, str, Any]:
    if len(clause) != 3 or not all(isinstance(one, str) for one in clause[:2]):
        raise ValueError(f"{clause!r} is not a clause of field, operator and value; {_FORM}")
    name, op, value = clause
    if _is_list(value) != (op in ("in", "not in")):
        raise ValueError(f"{clause!r}: 'in' and 'not in' take a list, other operators one value")
    found = [kept_value(one) for one in (value if _is_list(value) else [value])]
    kinds = {"text" if one is None or one["text"] is not None else "number" for one in found}
    if None in found or len(kinds) > 1:
        raise ValueError(f"{clause!r} compares with something else than numbers, or short texts")
    (kind,) = kinds
    values = [one[kind] for one in found if one is not None]
    parsed = (name, kind), op, values if _is_list(value) else values[0]
    try:
        pq.filters_to_expression([(name, *parsed[1:])])
    except ValueError as error:
        known = "==, !=, <, >, <=, >=, in, not in"
        raise ValueError(f"{clause!r}: {error}; choose one of {known}") from error
    return parsed


def left_out(samples: Index, filters: Sequence[Any]) -> AsideSamples:
    """The samples that filters do not choose. A clause fails where the field is null."""
    any_of = parse_filters(filters)
    columns = list(dict.fromkeys(column for all_of in any_of for column, *_ in all_of))
    named = {column: " ".join(column) for column in columns}
    # pyarrow's `not in` holds of nulls.
    expression = reduce(
        operator.or_,
        [
            reduce(
                operator.and_,
                [pc.field(named[column]).is_valid() for column, *_ in all_of],
                pq.filters_to_expression([(named[column], *rest) for column, *rest in all_of]),
            )
            for all_of in any_of
        ],
    )
    texts = (("not_chosen", "pack.where"), *(("not_chosen", f"no {name}") for name, _ in columns))
    ids, codes = [np.empty(0, np.int64)], [np.empty(0, np.int32)]
    start = 0
    for part in samples.parts("kept"):
        values = {
            text: pc.struct_field(pc.map_lookup(part["kept"], name, "first"), kind)
            for (name, kind), text in named.items()
        }
        table = pa.table({**values, "row": np.arange(len(part))})
        own = np.zeros(len(part), np.int32)
        for code, text in reversed([*enumerate(named.values(), start=1)]):
            own[table[text].is_null().to_numpy()] = code
        is_left = np.ones(len(part), bool)
        is_left[table.filter(expression)["row"].to_numpy()] = False
        ids.append(start + np.flatnonzero(is_left))
        codes.append(own[is_left])
        start += len(part)
    return AsideSamples(np.concatenate(ids), np.concatenate(codes), texts)
