"""Bounds of a column in Delta's statistics of a file: which types have some, how they are written,
and how others' are read.

Delta's protocol, "Per-file Statistics": readers skip a file whose bounds exclude the values that
they search. A column without bounds never causes a skip. So columns that a reader might compare
differently have no bounds. These are floats (NaN), and decimals other than whole numbers with at
most as many digits as a double stores exactly (delta-rs reads them as doubles). Long texts are cut
as Spark cuts them. Other writers' bounds are read, too, so more types are read than written.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.pgoutput.commit_time import UNIX_EPOCH

_LONGEST_TEXT = 32
# A double stores this many digits exactly.
_DOUBLE_DIGITS = 15
_LAST_ASCII, _LAST = "\x7f", "\U0010ffff"
# Characters beyond 16 bits: delta-rs (arrow-json) reads an escaped one, which older files of ours
# have, as a lesser character.
_MISREAD = "[\U00010000-\U0010ffff]"
# Years that every reader's calendar has: 0001 to 9999.
_LEAST_DAY, _MOST_DAY = -719_162, 2_932_896
_DAY_MICROSECONDS = 86_400_000_000
_WITHIN_A_MILLISECOND = pa.scalar(999, pa.duration("us"))


@dataclass(frozen=True, slots=True)
class Order:
    """The order of an Arrow type's values, in which bounds are written and read; of integers here.

    Bounds in memory, ``least`` and ``most``, are integers or texts.
    """

    kind: Any

    def comparable(self, column: Any) -> Any:
        """Return the column as integers or texts; None where it gets no bounds."""
        return column

    def has_bounds(self, _least: Any, _most: Any, /) -> bool:
        """Return whether all readers understand these bounds."""
        return True

    def least_text(self, least: Any) -> Any:
        """Return the least value as it is written."""
        return least

    def most_text(self, most: Any) -> Any:
        """Return the greatest value as it is written, or one beyond it."""
        return most

    def shared(self, _other: Order, /) -> Order | None:
        """Return the order that bounds and values of this and of the other type have in common."""
        return Order(pa.int64())

    def upper_ends(self, most: pa.ChunkedArray) -> pa.ChunkedArray:
        """Return the greatest values that files with these upper bounds may have; null for any."""
        return most


class _Texts(Order):
    """By code points. Cut texts still are bounds: the greatest ends in a character beyond all
    others.
    """

    def has_bounds(self, _least: Any, most: Any, /) -> bool:
        return bool(most[_LONGEST_TEXT : _LONGEST_TEXT + 1] != _LAST)

    def least_text(self, least: Any) -> Any:
        return least[:_LONGEST_TEXT]

    def most_text(self, most: Any) -> Any:
        cut = most[_LONGEST_TEXT : _LONGEST_TEXT + 1]
        return most[:_LONGEST_TEXT] + (cut and (_LAST_ASCII if cut < _LAST_ASCII else _LAST))

    def shared(self, _other: Order, /) -> Order | None:
        return _Texts(pa.large_string())

    def upper_ends(self, most: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.if_else(pc.match_substring_regex(most, _MISREAD), None, most)


class _Decimals(Order):
    """Of few digits, since delta-rs converts bounds to doubles."""

    def comparable(self, column: Any) -> Any:
        return column.cast(pa.int64()) if self.kind.scale == 0 else None

    def shared(self, other: Order, /) -> Order | None:
        scale = max(self.kind.scale, other.kind.scale)
        return _Decimals(pa.decimal128(2 * _DOUBLE_DIGITS, scale))


class _Days(Order):
    def comparable(self, column: Any) -> Any:
        return column.cast(pa.int32())

    def has_bounds(self, least: Any, most: Any, /) -> bool:
        return bool(least >= _LEAST_DAY and most <= _MOST_DAY)

    def least_text(self, least: Any) -> Any:
        return (UNIX_EPOCH + timedelta(days=least)).date().isoformat()

    def most_text(self, most: Any) -> Any:
        return self.least_text(most)

    def shared(self, other: Order, /) -> Order | None:
        return other


class _Moments(Order):
    """Written in whole milliseconds, with a zone or without."""

    def comparable(self, column: Any) -> Any:
        return column.cast(pa.int64())

    def has_bounds(self, least: Any, most: Any, /) -> bool:
        first, last = least // _DAY_MICROSECONDS, most // _DAY_MICROSECONDS
        return bool(first >= _LEAST_DAY and last < _MOST_DAY)

    def least_text(self, least: Any) -> Any:
        moment = UNIX_EPOCH + timedelta(microseconds=least - least % 1000)
        text = moment.replace(tzinfo=None).isoformat(timespec="milliseconds")
        return f"{text}Z" if self.kind.tz else text

    def most_text(self, most: Any) -> Any:
        # This rounds up: some readers don't add a millisecond, and would skip values within the
        # last one.
        return self.least_text(most + -most % 1000)

    def shared(self, other: Order, /) -> Order | None:
        return other if bool(self.kind.tz) == bool(other.kind.tz) else None

    def upper_ends(self, most: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.add(most, _WITHIN_A_MILLISECOND)


def order_of(kind: pa.DataType) -> Order | None:
    """Return the order of a type's values; None where readers might have another."""
    is_type = pa.types
    if is_type.is_integer(kind):
        return Order(kind)
    if is_type.is_string(kind) or is_type.is_large_string(kind):
        return _Texts(kind)
    if is_type.is_decimal(kind) and kind.precision <= _DOUBLE_DIGITS:
        return _Decimals(kind)
    if is_type.is_date32(kind):
        return _Days(kind)
    return _Moments(kind) if is_type.is_timestamp(kind) and kind.unit == "us" else None


def shared_order(bounds: pa.DataType, values: pa.DataType) -> Order | None:
    """Return the order in which bounds of one type and values of another are compared.

    None where it might not be the order of the bounds.
    """
    first, second = order_of(bounds), order_of(values)
    if first is None or second is None or type(first) is not type(second):
        return None
    return first.shared(second)
