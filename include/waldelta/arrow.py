"""Arrow arrays of plain storage, which is what buffers are read from, and names of array types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
# How every moment is kept in the ledger and the change log.
UTC_TIME = pa.timestamp("us", tz="UTC")


def storage(array: pa.Array[Any]) -> pa.Array[Any]:
    """The array itself, or what an extension type keeps its values in."""
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def one_array(column: pa.ChunkedArray[Any]) -> pa.Array[Any]:
    """A column's chunks as one array."""
    combined = column.combine_chunks()
    return pa.concat_arrays(combined.chunks) if isinstance(combined, pa.ChunkedArray) else combined
