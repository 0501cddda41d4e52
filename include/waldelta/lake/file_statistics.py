"""Delta's statistics of a data file, gathered part by part while it is written.

Delta's protocol, "Per-file Statistics": readers skip a file whose bounds exclude what they look
for; a column without bounds is never skipped by. So what a reader might compare in another way has
none: floats (NaN), and decimals but whole ones of as many digits as doubles have (delta-rs reads
them so). Long texts are cut as Spark cuts them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.commit_time import UNIX_EPOCH

# As many columns as Spark keeps bounds of, unless a table says otherwise.
MOST_COLUMNS = 32
_LONGEST_TEXT = 32
# So many digits a double holds as they are.
DOUBLE_DIGITS = 15
_LAST_ASCII, _LAST = "\x7f", "\U0010ffff"
# Years that every reader's calendar has: 0001 and 9999.
_LEAST_DAY, _MOST_DAY = -719_162, 2_932_896
_DAY_MICROSECONDS = 86_400_000_000


class FileStatistics:
    """The number of rows, and of some columns nulls, least and greatest values."""

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
        """As an ``add`` action has them."""
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
        # Of an escaped character beyond 16 bits delta-rs (arrow-json) loses one, and then skips
        # what it looks for.
        return json.dumps(statistics, ensure_ascii=False)


def bounded_columns(schema: pa.Schema) -> list[str]:
    """The columns that statistics are kept of: of Spark's first ones those that hold single
    values.
    """
    return [
        field.name for field in list(schema)[:MOST_COLUMNS] if not pa.types.is_nested(field.type)
    ]


def _comparable(column: Any) -> Any:
    """The column as integers or texts, whose bounds can be told; None for another."""
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
    # Delta's timestamps here are whole milliseconds; readers that don't add one would skip what
    # lies within the last.
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
