"""Types of the columns of tables: which hold images, and the bytes of their values."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc


def unread_type(kind: pa.DataType) -> bool:
    """Whether values of a type may share memory in ways that are not counted: views of lists,
    run-end encoded values and unions."""
    types = pa.types
    views = (types.is_list_view, types.is_large_list_view, types.is_run_end_encoded, types.is_union)
    inner = [kind.field(i).type for i in range(kind.num_fields)]
    if types.is_dictionary(kind):
        inner.append(kind.value_type)
    return any(is_one(kind) for is_one in views) or any(map(unread_type, inner))


def holds_bytes(kind: pa.DataType) -> bool:
    """Whether a column can hold images: binary of any kind, {bytes, path}, or lists of these."""
    types = pa.types
    if types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    value_type = getattr(kind, "value_type", None)  # of dictionaries and of lists of any kind
    if value_type is not None:
        return holds_bytes(value_type)
    is_bytes = (types.is_binary, types.is_large_binary, types.is_binary_view)
    return any(one(kind) for one in (*is_bytes, types.is_fixed_size_binary))


def holds_pictures(kind: pa.DataType) -> bool:
    """Whether a column holds {bytes, path}, or lists of it, which can be no text."""
    value_type = getattr(kind, "value_type", None)
    if value_type is not None:
        return holds_pictures(value_type)
    return pa.types.is_struct(kind) and holds_bytes(kind)


def as_plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same values without dictionaries, of which an Arrow file has one for all batches, and
    without views, of which Arrow cannot take single rows."""
    schema = _plain_schema(batch.schema)
    return batch if schema == batch.schema else batch.cast(schema)


def _plain_schema(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_type(_plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """A type of the same values, without dictionaries and views in it."""
    types = pa.types
    if types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        value = kind.value_field.with_type(_plain_type(kind.value_type))
        if types.is_large_list(kind):
            return pa.large_list(value)
        return pa.list_(value, kind.list_size if types.is_fixed_size_list(kind) else -1)
    if types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    return kind


def value_bytes(batch: pa.RecordBatch) -> int:
    """Bytes of a batch's values; those that share memory, as of a dictionary, each for itself."""
    if batch.schema == _plain_schema(batch.schema):
        return int(batch.nbytes)
    return sum(map(_array_bytes, batch.columns))


def _array_bytes(array: pa.Array) -> int:
    kind = array.type
    if pa.types.is_dictionary(kind):
        used = array.indices.drop_null().to_numpy(zero_copy_only=False)
        return int(_each_bytes(array.dictionary)[used].sum()) + int(array.indices.nbytes)
    if pa.types.is_nested(kind):
        inner = array.flatten()
        inner = inner if isinstance(inner, list) else [inner]
        return 8 * len(array) + sum(map(_array_bytes, inner))
    return int(_each_bytes(array).sum()) if _is_view(kind) else int(array.nbytes)


def _each_bytes(array: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of each value; where they are no texts or bytes, at most."""
    if _is_view(array.type):  # 16 bytes each, of which the first four are the length
        views = np.frombuffer(array.buffers()[1], "<i4")[4 * array.offset :: 4]
        return np.where(array.is_valid(), views[: len(array)], 0).astype(np.int64)
    try:
        return np.asarray(pc.fill_null(pc.binary_length(array), 0), dtype=np.int64)
    except pa.ArrowNotImplementedError:
        return np.full(len(array), array.nbytes)


def _is_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_binary_view(kind) or pa.types.is_string_view(kind))
