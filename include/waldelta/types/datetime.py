"""Dates and timestamps; BC, the infinities and years above 9999 stay text."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import sql

from waldelta.pgoutput.byte_readers import ArrowArray
from waldelta.types.base import Representable, Selected, TargetType, cast_or_raw, printed

# Spark's calendar, as half-open bounds.
_FIRST, _BEYOND = "0001-01-01", "10000-01-01"
_UNHELD = "infinity|BC$|^[0-9]{5}"


@dataclass(frozen=True)
class Moment(TargetType):
    """date, timestamp or timestamptz; ``name`` is PostgreSQL's."""

    name: str

    def read(self, text: ArrowArray) -> Representable:
        """Read with Arrow's parser, which accepts exactly the ISO forms with a four-digit year."""
        return cast_or_raw(text, self.arrow, _UNHELD)

    def copy_expressions(self, column: sql.Composable) -> Selected:
        """Return the value itself within Spark's calendar, its text outside."""
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
