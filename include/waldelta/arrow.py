"""Columns as one Arrow array of plain storage, which is what buffers are read from."""

from __future__ import annotations

from typing import Any

import pyarrow as pa


def storage(array: pa.Array[Any]) -> pa.Array[Any]:
    """The array itself, or what an extension type keeps its values in."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def one_array(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    """A column's chunks as one array."""
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined
