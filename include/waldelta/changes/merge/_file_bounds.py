"""Finds the files of a table that may have rows of some keys, by the bounds in its log.

A file without bounds, or with bounds that can't be compared exactly, may have any row. This doesn't
depend on the file's writer. Truncated texts still are bounds (Delta ends the greatest one in a
character beyond all others). Timestamps are whole milliseconds. delta-rs converts decimals to
doubles.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools
from waldelta.lake.file_statistics import DOUBLE_DIGITS

# Characters beyond 16 bits: delta-rs (arrow-json) reads an escaped one, which older files of ours
# have, as a lesser character.
_MISREAD = "[\U00010000-\U0010ffff]"
_WITHIN_A_MILLISECOND = pa.scalar(999, pa.duration("us"))


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
    if (kind := _ordered(least.type, values.type)) is None:
        return np.ones(len(least), np.bool_)
    values, least, most = (column.cast(kind) for column in (values, least, most))
    if pa.types.is_timestamp(kind):
        most = pc.add(most, _WITHIN_A_MILLISECOND)
    elif pa.types.is_large_string(kind):
        most = pc.if_else(pc.match_substring_regex(most, _MISREAD), None, most)
    columns = (values, least, most)
    ranks = np.asarray(
        pc.rank(
            pa.chunked_array([c for column in columns for c in column.chunks], kind),
            tiebreaker="dense",
        )
    )
    of_values, of_least, of_most = np.split(ranks, np.cumsum([len(values), len(least)]))
    of_values = np.sort(of_values)
    spans = np.searchsorted(of_values, of_least) < np.searchsorted(of_values, of_most, side="right")
    return np.asarray(spans | np.asarray(least.is_null()) | np.asarray(most.is_null()))


def _ordered(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Return the type in which values of both types have one order.

    None where it might not be the order of the bounds.
    """
    both = (first, second)
    if all(map(pa.types.is_integer, both)):
        return pa.int64()
    if all(pa.types.is_string(kind) or pa.types.is_large_string(kind) for kind in both):
        return pa.large_string()
    if all(pa.types.is_decimal(kind) and kind.precision <= DOUBLE_DIGITS for kind in both):
        return pa.decimal128(2 * DOUBLE_DIGITS, max(kind.scale for kind in both))
    is_moment = all(pa.types.is_timestamp(kind) and kind.unit == "us" for kind in both)
    is_moment = is_moment and bool(first.tz) == bool(second.tz)
    return second if is_moment or all(map(pa.types.is_date32, both)) else None
