"""Dates and timestamps; BC, the infinities and years above 9999 stay text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.types.base import (
    Marks,
    Representable,
    Selected,
    TargetType,
    bytea_text,
    cast_or_raw,
    integers,
    printed,
)

# Spark's calendar, as half-open bounds.
_FIRST, _BEYOND = "0001-01-01", "10000-01-01"
# PostgreSQL's epoch is 2000, Arrow's 1970.
_DAYS, _MICROSECONDS = 10_957, 946_684_800_000_000
# In a timestamp that Arrow has printed: zeros at the end of the fraction, and the zone.
_FRACTION = r"\.?0+(Z?)$"
_UNHELD = "infinity|BC$|^[0-9]{5}"


@dataclass(frozen=True)
class Moment(TargetType):
    """date, timestamp or timestamptz; ``name`` is PostgreSQL's."""

    is_fixed_size: ClassVar[bool] = True
    has_one_form: ClassVar[bool] = True
    prints_alike: ClassVar[bool] = True

    name: str

    def read(self, text: ArrowArray) -> Representable:
        """Read with Arrow's parser, which accepts exactly the ISO forms with a four-digit year."""
        return cast_or_raw(text, self.arrow, _UNHELD)

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Returns the value itself within Spark's calendar, its text outside."""
        zone = "+00" if self.name == "timestamptz" else ""
        parts = {
            "value": sql.SQL("{}::pg_catalog.{}").format(column, sql.Identifier(self.name)),
            "first": sql.Literal(_FIRST + (f" 00:00:00{zone}" if self.name != "date" else "")),
            "beyond": sql.Literal(_BEYOND + (f" 00:00:00{zone}" if self.name != "date" else "")),
            "name": sql.Identifier(self.name),
            "text": printed(column),
        }
        inside = sql.SQL(
            "{value} >= {first}::pg_catalog.{name} and {value} < {beyond}::pg_catalog.{name}"
        ).format(**parts)
        value = sql.SQL("case when {inside} then {value} end").format(inside=inside, **parts)
        raw = sql.SQL("case when not ({inside}) then {text} end").format(inside=inside, **parts)
        return value, raw

    def pg_text(self, values: ArrowArray) -> ArrowArray:
        """Returns the ISO form without zeros at the end of the fraction."""
        texts = super().pg_text(values)
        if self.name == "date":
            return texts
        texts = pc.replace_substring_regex(texts, _FRACTION, r"\1")
        return pc.replace_substring(texts, "Z", "+00")

    def checksum_parts(self, column: sql.Composable, _: Marks, /) -> Selected:
        """Returns the bytes of the binary format, which is faster than printing."""
        outside = self.copy_expressions(column)[1]
        bits = sql.SQL("pg_catalog.{}({}::pg_catalog.{})::text").format(
            sql.Identifier(f"{self.name}_send"), column, sql.Identifier(self.name)
        )
        return bits, sql.SQL("({}) is not null").format(outside)

    def checksum_text(self, values: ArrowArray, _: Marks, /) -> ArrowArray:
        """Returns the bytes of the binary format."""
        whole, epoch = (pa.int32(), _DAYS) if self.name == "date" else (pa.int64(), _MICROSECONDS)
        numbers = integers(values.cast(self.arrow).view(whole)) - epoch
        return bytea_text(numbers.astype(f">i{whole.bit_width // 8}"), values)
