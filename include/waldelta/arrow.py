"""What Arrow's arrays, tables and record batches lack: plain storage, replaced columns, limited
sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# The type of every time in the ledger and the change log.
UTC_TIME = pa.timestamp("us", tz="UTC")


def storage(array: pa.Array[Any]) -> pa.Array[Any]:
    """Returns the array itself, or the storage of an extension type."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def one_array(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    """Returns a column's chunks as one array."""
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined


def later(times: pa.ChunkedArray[Any], others: pa.ChunkedArray[Any]) -> pa.ChunkedArray[Any]:
    """Returns the later time of each pair, and the other one where one is null."""
    numbers = pc.max_element_wise(times.cast(pa.int64()), others.cast(pa.int64()))
    return numbers.cast(times.type)


Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def with_column(rows: Rows, name: str, values: pa.Array[Any] | pa.ChunkedArray[Any]) -> Rows:
    """Returns these rows with other values, and their type, in one column."""
    return rows.set_column(rows.schema.get_field_index(name), name, values)


def group_batches(
    parts: Iterable[pa.RecordBatch], most_bytes: int, most_rows: int | None = None
) -> Iterator[pa.Table]:
    """Yields record batches as tables, each complete once it has this many bytes or rows."""
    parts_so_far: list[pa.RecordBatch] = []
    rows = size = 0
    for part in parts:
        parts_so_far.append(part)
        rows, size = rows + len(part), size + part.nbytes
        if size >= most_bytes or (most_rows is not None and rows >= most_rows):
            yield pa.Table.from_batches(parts_so_far)
            parts_so_far, rows, size = [], 0, 0
    if rows:
        yield pa.Table.from_batches(parts_so_far)


def table_of(
    parts: Iterable[pa.RecordBatch], schema: pa.Schema, most_bytes: int
) -> pa.Table | None:
    """Returns record batches as one table; None when they take more than ``most_bytes``."""
    parts_so_far: list[pa.RecordBatch] = []
    size = 0
    for part in parts:
        size += part.nbytes
        if size > most_bytes:
            return None
        parts_so_far.append(part)
    return pa.Table.from_batches(parts_so_far, schema)
