"""Arrow columns from records' values and back, over whole buffers instead of element by element.

A column's Arrow type decides its Python form: ``list<int32>`` is a numpy array, ``list<struct>`` a
sequence of tuples, ``map`` a dict, everything else what Arrow itself gives. None is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from infra.contracts.errors import SchemaMismatch

_NUMBERS = {
    pa.bool_(): np.dtype(bool),
    pa.int32(): np.dtype(np.int32),
    pa.float32(): np.dtype(np.float32),
    pa.float64(): np.dtype(np.float64),
}


def build_column(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return ``values`` as one Arrow array of exactly the type ``kind``.

    Raises:
        SchemaMismatch: a value does not fit; names the column.
    """
    try:
        return _build(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as e:
        raise SchemaMismatch(f"column '{name}' cannot be stored as {kind}: {e}") from e


def read_column(array: pa.Array) -> list[Any]:
    """Return the Python form of every value; numpy arrays are read-only views of the column."""
    kind = array.type
    if pa.types.is_struct(kind):
        return list(zip(*map(read_column, array.flatten()), strict=True))
    if pa.types.is_map(kind):
        entries = list(zip(read_column(array.keys), read_column(array.items), strict=True))
        return _sliced(array, entries, dict)
    if not pa.types.is_list(kind):
        return array.to_pylist()
    if kind.value_type in _NUMBERS:
        values = array.values.to_numpy(zero_copy_only=False)
        values.flags.writeable = False
        return _sliced(array, values, lambda part: part)
    return _sliced(array, read_column(array.values), tuple)


def _sliced(array: pa.Array, values: Any, form: Any) -> list[Any]:
    ends = array.offsets.to_numpy().tolist()
    parts = [form(values[a:b]) for a, b in pairwise(ends)]
    if array.null_count:
        valid = array.is_valid().to_numpy(zero_copy_only=False).tolist()
        return [part if ok else None for part, ok in zip(parts, valid, strict=True)]
    return parts


def _build(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_struct(kind):
        columns = zip(*values, strict=True) if values else ((),) * kind.num_fields
        fields = list(kind)
        children = [_build(list(c), f.type) for c, f in zip(columns, fields, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields)
    if pa.types.is_map(kind):
        rows = [value or {} for value in values]
        keys = _build([key for row in rows for key in row], kind.key_type)
        items = _build([item for row in rows for item in row.values()], kind.item_type)
        return pa.MapArray.from_arrays(_offsets(values), keys, items, type=kind)
    if not pa.types.is_list(kind):
        return pa.array(values, kind)
    if kind.value_type in _NUMBERS:
        inner = _numbers(values, kind.value_type)
    else:
        inner = _build(
            list(chain.from_iterable(v for v in values if v is not None)), kind.value_type
        )
    return pa.ListArray.from_arrays(_offsets(values), inner, type=kind)


def _numbers(values: Sequence[np.ndarray | None], kind: pa.DataType) -> pa.Array:
    dtype = _NUMBERS[kind]
    arrays = [value for value in values if value is not None]
    for value in arrays:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            shape = getattr(value, "shape", type(value).__name__)
            raise TypeError(f"expected {dtype}[T], got {getattr(value, 'dtype', '')}{shape}")
    return pa.array(np.concatenate(arrays) if arrays else np.empty(0, dtype), kind)


def _offsets(values: Sequence[Any]) -> pa.Array:
    """Offsets of a list column; a null offset makes a null list."""
    lengths = [0 if value is None else len(value) for value in values]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    absent = [value is None for value in values]
    if any(absent):
        return pa.array(offsets, mask=np.array([*absent, False]))
    return pa.array(offsets)


def column_bytes(array: pa.Array) -> list[bytes]:
    """The content of a column as byte strings: equal values give equal bytes, whatever the layout.

    For content digests. What lies under nulls or in padding does not count. The array must not be a
    slice (``combine_chunks`` gives one that is not).
    """
    kind = array.type
    parts = [len(array).to_bytes(8, "little"), array.null_count.to_bytes(8, "little")]
    if array.null_count:
        parts.append(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    if pa.types.is_struct(kind):
        return parts + [part for child in array.flatten() for part in column_bytes(child)]
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        inner = [array.keys, array.items] if pa.types.is_map(kind) else [array.values]
        parts.append(np.diff(array.offsets.to_numpy()).tobytes())
        return parts + [part for child in inner for part in column_bytes(child)]
    if pa.types.is_string(kind):
        texts = [text or "" for text in array.to_pylist()]
        parts.append(np.array(list(map(len, texts)), np.int32).tobytes())
        return [*parts, "".join(texts).encode()]
    if array.null_count:
        array = pc.fill_null(array, False if pa.types.is_boolean(kind) else 0)
    return [*parts, array.to_numpy(zero_copy_only=False).tobytes()]
