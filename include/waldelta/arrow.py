"""Arrow arrays with plain storage, whose buffers can be read, and names of array types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
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
