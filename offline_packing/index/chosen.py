"""Choice of samples by `pack.where`: filters of fields that `source.keep` kept of their records."""

from collections.abc import Callable, Mapping, Sequence
from operator import eq, ge, gt, le, lt, ne
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offline_packing.errors import StageError
from offline_packing.index.set_aside import AsideSamples
from offline_packing.index.table import Index
from offline_packing.sources.options import kept_value

_OPERATORS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "in": lambda value, given: value in given,
    "not in": lambda value, given: value not in given,
} | {"==": eq, "=": eq, "!=": ne, "<": lt, ">": gt, "<=": le, ">=": ge}
_FORM: Final = "write [[FIELD, '>=', 3], [FIELD, 'not in', [a, b]]]"


#: The kind of a clause's value, "number" or "text", with its field; its operator; its value.
Clause = tuple[tuple[str, str], str, Any]


def parse_filters(filters: Any) -> list[list[Clause]]:
    """Parse pyarrow's filters to lists of clauses, of which one list must hold. Raises ValueError
    naming a bad clause."""
    if not _is_list(filters) or not all(map(_is_list, filters)):
        raise ValueError(f"pack.where: {filters!r} is not a list of clauses; {_FORM}")
    any_of = filters if all(_is_list(one) for own in filters for one in own) else [filters]
    return [[_parse_clause(clause) for clause in all_of] for all_of in any_of]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0


def _parse_clause(clause: Any) -> Clause:
    where = f"pack.where: {clause!r}"
    if len(clause) != 3 or not all(isinstance(one, str) for one in clause[:2]):
        raise ValueError(f"{where} is not a clause of field, operator and value; {_FORM}")
    name, op, value = clause
    if _is_list(value) != (op in ("in", "not in")):
        raise ValueError(f"{where}: 'in' and 'not in' take a list, other operators one value")
    given = value if _is_list(value) else [value]
    kinds = {"text" if isinstance(one, str) else "number" for one in given}
    if None in map(kept_value, given) or len(kinds) > 1:
        raise ValueError(
            f"{where} compares with something that is neither a number nor a short text"
        )
    if op not in _OPERATORS:
        raise ValueError(f'{where}: "{op}" is not a valid operator; choose {", ".join(_OPERATORS)}')
    return (kinds.pop(), name), op, frozenset(value) if _is_list(value) else value


def left_out(samples: Index, filters: Sequence[Any]) -> AsideSamples:
    """Set aside the samples that filters do not choose. A clause fails where its field has no such
    value. Raises StageError if no sample has a field."""
    any_of = parse_filters(filters)
    columns = dict.fromkeys(column for all_of in any_of for column, *_ in all_of)
    absent = {name for _, name in columns}
    texts = (("not_chosen", "pack.where"), *(("not_chosen", f"no {name}") for _, name in columns))
    found = [np.empty(0, np.int32)]  # indices into texts; -1: chosen
    for part in samples.parts("kept"):
        fields = {name: pc.map_lookup(part["kept"], name, "first") for _, name in columns}
        absent -= {name for name, field in fields.items() if field.null_count < len(field)}
        values = {(kind, name): _values(fields[name], kind) for kind, name in columns}
        code = np.zeros(len(part), np.int32)
        for number, own in reversed([*enumerate(values.values(), start=1)]):
            code[[one is None for one in own]] = number
        for all_of in any_of:
            chosen: Sequence[int] = range(len(part))
            for column, op, given in all_of:
                own, holds = values[column], _OPERATORS[op]
                chosen = [i for i in chosen if own[i] is not None and holds(own[i], given)]
            code[chosen] = -1
        found.append(code)
    codes = np.concatenate(found)
    if absent and len(codes):
        raise StageError(f"no record has {min(absent)!r}, which pack.where names; correct the name")
    ids = np.flatnonzero(codes >= 0)
    return AsideSamples(ids, codes[ids], texts)


def _values(field: pa.ChunkedArray, kind: str) -> list[Any]:
    """Return each sample's number, exact, or text in a field, or None."""
    number, text = (pc.struct_field(field, one) for one in ("number", "text"))
    is_integer = pc.match_substring_regex(text, "^[+-]?[0-9]+$").fill_null(False)
    if kind == "text":
        return pc.if_else(pc.and_(is_integer, number.is_null()), None, text).to_pylist()
    values = number.to_pylist()
    for row in np.flatnonzero(is_integer.to_numpy()).tolist():
        values[row] = int(text[row].as_py())
    return values
