"""Collects Delta's statistics of a data file part by part while the file is written.

Delta's protocol, "Per-file Statistics": readers skip a file whose bounds exclude the values that
they search. A column without bounds never causes a skip. So columns that a reader might compare
differently have no bounds. These are floats (NaN), and decimals other than whole numbers with at
most as many digits as a double stores exactly (delta-rs reads them as doubles). Long texts are cut
as Spark cuts them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.commit_time import UNIX_EPOCH

# The number of columns with bounds that is Spark's default.
MOST_COLUMNS = 32
_LONGEST_TEXT = 32
# A double stores this many digits exactly.
DOUBLE_DIGITS = 15
_LAST_ASCII, _LAST = "\x7f", "\U0010ffff"
# Years that every reader's calendar has: 0001 to 9999.
_LEAST_DAY, _MOST_DAY = -719_162, 2_932_896
_DAY_MICROSECONDS = 86_400_000_000


class FileStatistics:
    """The number of rows; for some columns also the nulls, and the least and greatest values."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.rows = 0
        self._nulls = dict.fromkeys(columns, 0)
        self._least: dict[str, Any] = {}
        self._most: dict[str, Any] = {}
        self._types: dict[str, pa.DataType] = {}

    def add(self, part: pa.RecordBatch | pa.Table) -> None:
        """Count the rows of a part."""
        self.rows += len(part)
        for name in self._nulls:
            column = part[name]
            self._nulls[name] += column.null_count
            if (counted := _comparable(column)) is not None:
                self._types[name] = column.type
                self._widen(name, pc.min_max(counted).as_py())

    def _widen(self, name: str, bounds: dict[str, Any]) -> None:
        least, most = bounds["min"], bounds["max"]
        if least is not None:
            self._least[name] = min(least, self._least.get(name, least))
            self._most[name] = max(most, self._most.get(name, most))

    def text(self) -> str:
        """Return the statistics as the text in an ``add`` action."""
        told = [
            name
            for name in self._least
            if _has_bounds(self._types[name], self._least[name], self._most[name])
        ]
        statistics = {
            "numRecords": self.rows,
            "minValues": {name: _least_text(self._types[name], self._least[name]) for name in told},
            "maxValues": {name: _most_text(self._types[name], self._most[name]) for name in told},
            "nullCount": self._nulls,
        }
        # delta-rs (arrow-json) loses half of an escaped character beyond 16 bits, and then skips
        # files that contain the value it searches.
        return json.dumps(statistics, ensure_ascii=False)


def bounded_columns(schema: pa.Schema) -> list[str]:
    """Return the columns that get statistics: of Spark's first ones, those with single values."""
    return [
        field.name for field in list(schema)[:MOST_COLUMNS] if not pa.types.is_nested(field.type)
    ]


def _comparable(column: Any) -> Any:
    """Return the column as integers or texts, whose bounds can be compared; None for other
    types.
    """
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_string(kind):
        return column
    if pa.types.is_decimal(kind) and kind.scale == 0 and kind.precision <= DOUBLE_DIGITS:
        return column.cast(pa.int64())
    if pa.types.is_date32(kind):
        return column.cast(pa.int32())
    if pa.types.is_timestamp(kind) and kind.unit == "us":
        return column.cast(pa.int64())
    return None


def _has_bounds(kind: pa.DataType, least: Any, most: Any) -> bool:
    if pa.types.is_string(kind):
        return bool(most[_LONGEST_TEXT : _LONGEST_TEXT + 1] != _LAST)
    if pa.types.is_date(kind):
        return bool(least >= _LEAST_DAY and most <= _MOST_DAY)
    if pa.types.is_timestamp(kind):
        return bool(
            least // _DAY_MICROSECONDS >= _LEAST_DAY and most // _DAY_MICROSECONDS < _MOST_DAY
        )
    return True


def _least_text(kind: pa.DataType, value: Any) -> Any:
    if pa.types.is_string(kind):
        return value[:_LONGEST_TEXT]
    return _as_text(kind, value - value % 1000 if pa.types.is_timestamp(kind) else value)


def _most_text(kind: pa.DataType, value: Any) -> Any:
    if pa.types.is_string(kind):
        cut = value[_LONGEST_TEXT : _LONGEST_TEXT + 1]
        return value[:_LONGEST_TEXT] + (cut and (_LAST_ASCII if cut < _LAST_ASCII else _LAST))
    # Delta's timestamps have whole milliseconds, so this rounds up: some readers don't add a
    # millisecond, and would skip values within the last one.
    return _as_text(kind, value + -value % 1000 if pa.types.is_timestamp(kind) else value)


def _as_text(kind: pa.DataType, value: Any) -> Any:
    if pa.types.is_date(kind):
        return (UNIX_EPOCH + timedelta(days=value)).date().isoformat()
    if pa.types.is_timestamp(kind):
        text = (
            (UNIX_EPOCH + timedelta(microseconds=value))
            .replace(tzinfo=None)
            .isoformat(timespec="milliseconds")
        )
        return f"{text}Z" if kind.tz else text
    return value
