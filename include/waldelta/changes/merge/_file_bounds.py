"""Finds the files of a table that may have rows of some keys, by the bounds in its log.

A file without bounds, or with bounds that can't be compared exactly, may have any row. This doesn't
depend on the file's writer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools
from waldelta.types.bounds import shared_order


def may_hold(files: pa.Table, names: Sequence[str], keys: Sequence[pa.ChunkedArray]) -> Bools:
    """Return which files (``TargetVersion.files``) may have a row with one of these keys.

    ``keys`` has the values of the columns ``names``.
    """
    found = np.ones(len(files), np.bool_)
    for name, column in zip(names, keys, strict=True):
        least, most = (files.schema.get_field_index(f"{side}.{name}") for side in ("min", "max"))
        if least >= 0 and most >= 0:
            found &= _span_any(files.column(least), files.column(most), column.drop_null())
    return found


def _span_any(least: pa.ChunkedArray, most: pa.ChunkedArray, values: pa.ChunkedArray) -> Bools:
    """Return which ranges include one of the values; a range without an end may include any."""
    if (order := shared_order(least.type, values.type)) is None:
        return np.ones(len(least), np.bool_)
    values, least, most = (column.cast(order.kind) for column in (values, least, most))
    most = order.upper_ends(most)
    columns = (values, least, most)
    ranks = np.asarray(
        pc.rank(
            pa.chunked_array([c for column in columns for c in column.chunks], order.kind),
            tiebreaker="dense",
        )
    )
    of_values, of_least, of_most = np.split(ranks, np.cumsum([len(values), len(least)]))
    of_values = np.sort(of_values)
    spans = np.searchsorted(of_values, of_least) < np.searchsorted(of_values, of_most, side="right")
    return np.asarray(spans | np.asarray(least.is_null()) | np.asarray(most.is_null()))
