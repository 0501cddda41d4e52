"""A filter with types: every node has its PostgreSQL type and its row in the table of
signatures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from waldelta.row_filter._constants import FORMS
from waldelta.row_filter.analyzed_filter import Collation
from waldelta.types import stored_type
from waldelta.types.numeric import Decimal
from waldelta.types.type_map import BUILT_INS

_FILTERABLE = [built_in for built_in in BUILT_INS if built_in.name in FORMS]
# PostgreSQL's short names for the names that it prints.
_SHORT = {built_in.printed: built_in.name for built_in in _FILTERABLE} | {
    "bpchar": "bpchar",
    "numeric": "numeric",
    "interval": "interval",
}

INTEGERS = ("int2", "int4", "int8")
FLOATS = ("float4", "float8")
TEXTS = frozenset({"text", "varchar", "bpchar", "name"})
MOMENTS = frozenset({"date", "timestamp", "timestamptz"})
# The Spark type that holds the values of each type.
SPARK_TYPE_NAMES = {built_in.name: built_in.stored.spark for built_in in _FILTERABLE}
_ELEMENTS = frozenset({"int2", "int4", "int8", "text", "varchar", "bool", "uuid"})


@dataclass(frozen=True, slots=True)
class Type:
    """A PostgreSQL type by its short name.

    ``digits`` of a numeric: how many there can be before and after the decimal point. ``element``
    is the short name of an array's elements. Types that only support tests for NULL are called
    ``opaque``, and keep PostgreSQL's printed name in ``printed``.
    """

    name: str
    digits: tuple[int, int] | None = None
    element: str | None = None
    printed: str = ""

    def __str__(self) -> str:
        return self.printed or (f"{self.element}[]" if self.element else self.name)


BOOL, TEXT, NUMERIC = Type("bool"), Type("text"), Type("numeric")


@dataclass(frozen=True, slots=True)
class Typed:
    """A node. ``key`` is column, constant, or the key in the table of signatures (or of the
    syntax).

    ``value`` is a column's name, a constant's canonical text (None for NULL), or what the key needs
    in addition to arguments. ``collation`` is what is certain about a text's collation,
    ``strength`` its origin: 0 none, 1 a column's, 2 COLLATE.
    """

    key: str
    type: Type
    arguments: tuple[Typed, ...] = ()
    value: str | None = None
    start: int = 0
    collation: Collation | None = None
    strength: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether it is a literal, perhaps NULL."""
        return self.key == "constant"

    @property
    def is_null(self) -> bool:
        """Whether it is the literal NULL."""
        return self.key == "constant" and self.value is None


def short_name(printed: str) -> str | None:
    """Return PostgreSQL's short name of a printed type; None for a type that isn't supported."""
    return _SHORT.get(printed)


def column_type(printed: str, spark_type: str) -> Type:
    """Return the type of a column, from its names in PostgreSQL and Spark.

    >>> column_type("numeric(12,2)", "decimal(12,2)").digits
    (10, 2)
    """
    name, is_array = re.sub(r"\(.*?\)", "", printed).strip(), printed.endswith("[]")
    short, spark_type = _SHORT.get(name.removesuffix("[]").strip()), spark_type.lower()
    opaque = Type("opaque", printed=printed)
    if is_array:
        held = short in _ELEMENTS and spark_type == f"array<{SPARK_TYPE_NAMES[short]}>"
        return Type("array", element=short, printed=printed) if held else opaque
    if short == "numeric":
        kind = stored_type(printed, spark_type)
        # For a numeric without precision any number may be raw, so its order isn't known.
        if not isinstance(kind, Decimal) or "(" not in printed:
            return opaque
        precision, scale = kind.arrow.precision, kind.arrow.scale
        return Type("numeric", (precision - scale, scale), printed=printed)
    if short is None or short == "interval" or spark_type != SPARK_TYPE_NAMES.get(short):
        return opaque
    return Type(short, printed=printed)
