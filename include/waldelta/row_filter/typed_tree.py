"""A filter with types: every node has its PostgreSQL type and its row in the table of signatures.
Constants, as PostgreSQL prints them, are checked before they become Spark literals.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from waldelta.row_filter.analyzed_filter import Collation
from waldelta.types import TargetType
from waldelta.types.numeric import Decimal
from waldelta.types.type_map import BUILT_INS

_NUMBER = r"-?\d+"
_DATE = r"(\d{4,7})-(\d\d)-(\d\d)"
_TIME = r"\d\d:\d\d:\d\d(?:\.\d{1,6})?"
_INFINITE = r"-?infinity"
_ANY = r"(?s:.*)"
# By the type's name in pg_type. A type without a form is opaque to filters.
FORMS: dict[str, re.Pattern[str]] = {
    name: re.compile(form)
    for name, form in {
        "int2": _NUMBER, "int4": _NUMBER, "int8": _NUMBER,
        "numeric": r"-?\d+(\.\d+)?|NaN|-?Infinity",
        "float4": r"-?\d+(\.\d+)?(e[+-]\d+)?|NaN|-?Infinity",
        "float8": r"-?\d+(\.\d+)?(e[+-]\d+)?|NaN|-?Infinity",
        "text": _ANY, "varchar": _ANY, "bpchar": _ANY, "name": _ANY,
        "bool": r"true|false|t|f",
        "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
        "bytea": r"\\x([0-9a-f]{2})*",
        "date": rf"{_DATE}( BC)?|{_INFINITE}",
        "timestamp": rf"{_DATE} {_TIME}( BC)?|{_INFINITE}",
        "timestamptz": rf"{_DATE} {_TIME}\+00( BC)?|{_INFINITE}",
    }.items()
}  # fmt: skip
_INTERVAL = re.compile(
    r"(?:(-?\d+) years? ?)?(?:(-?\d+) mons? ?)?(?:(-?\d+) days?"
    r" ?)?(?:(-)?(\d+):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?"
)
_LARGEST_INTERVAL_MONTHS = 12 * 5000
_YEAR_DIGITS = 4  # digits
_FILTERABLE = [built_in for built_in in BUILT_INS if built_in.name in FORMS]
# PostgreSQL's short names for the names that it prints.
SHORT_NAMES = {built_in.printed: built_in.name for built_in in _FILTERABLE} | {
    "bpchar": "bpchar",
    "numeric": "numeric",
    "interval": "interval",
}

INTEGERS = ("int2", "int4", "int8")
FLOATS = ("float4", "float8")
TEXTS = frozenset({"text", "varchar", "bpchar", "name"})
MOMENTS = frozenset({"date", "timestamp", "timestamptz"})
# The Spark type that holds the values of each type.
SPARK_TYPE_NAMES = {built_in.name: built_in.stored.spark for built_in in _FILTERABLE} | {
    "enum": "string"
}
_ELEMENTS = frozenset({"int2", "int4", "int8", "text", "varchar", "bool", "uuid"})


@dataclass(frozen=True, slots=True)
class Type:
    """A PostgreSQL type by its short name.

    ``digits`` of a numeric: how many there can be before and after the decimal point. ``element``
    is the short name of an array's elements. Enums are called ``enum``, types that only support
    tests for NULL ``opaque``; both keep PostgreSQL's printed name in ``printed``.
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


def column_type(printed: str, stored: TargetType) -> Type:
    """Returns the type of a column, from its name in PostgreSQL and its type in the lake.

    >>> from waldelta.types import stored_type
    >>> column_type("numeric(12,2)", stored_type("decimal(12,2)")).digits
    (10, 2)
    """
    name, is_array = re.sub(r"\(.*?\)", "", printed).strip(), printed.endswith("[]")
    # Nothing compares with what a mask stores.
    short = SHORT_NAMES.get(name.removesuffix("[]").strip()) if stored.keeps_value else None
    opaque = Type("opaque", printed=printed)
    if is_array:
        is_comparable = short in _ELEMENTS and stored.spark == f"array<{SPARK_TYPE_NAMES[short]}>"
        return Type("array", element=short, printed=printed) if is_comparable else opaque
    if short == "numeric":
        # For a numeric without precision any number may be raw, so its order isn't known.
        if not isinstance(stored, Decimal) or "(" not in printed:
            return opaque
        precision, scale = stored.arrow.precision, stored.arrow.scale
        return Type("numeric", (precision - scale, scale), printed=printed)
    if short is None or short == "interval" or stored.spark != SPARK_TYPE_NAMES.get(short):
        return opaque
    return Type(short, printed=printed)


def is_representable(text: str) -> bool:
    """Returns whether a date or timestamp is in the years 1 to 9999, which Spark's types cover.

    >>> is_representable("0044-03-15 BC"), is_representable("9999-12-31")
    (False, True)
    """
    return "infinity" not in text and not text.endswith("BC") and text.index("-") == _YEAR_DIGITS


def numeric_digits(text: str) -> tuple[int, int]:
    """Returns the number of digits before and after the decimal point.

    >>> numeric_digits("-12.50")
    (2, 2)
    """
    whole, _, fraction = text.lstrip("-").partition(".")
    return (len(whole.lstrip("0")) or 1, len(fraction))


def interval_parts(text: str) -> tuple[int, int, int] | None:
    """Returns months, days and microseconds of an interval in IntervalStyle postgres.

    None for an interval that isn't certain.

    >>> interval_parts("1 year 2 mons -3 days +04:05:06.5".replace("+", ""))
    (14, -3, 14706500000)
    """
    match = _INTERVAL.fullmatch(text.replace("+", ""))
    if match is None or not text:
        return None
    years, months, days, sign, hours, minutes, seconds, fraction = match.groups()
    total = 12 * int(years or 0) + int(months or 0)
    microseconds = ((int(hours or 0) * 60 + int(minutes or 0)) * 60 + int(seconds or 0)) * 1_000_000
    microseconds += int((fraction or "").ljust(6, "0"))
    microseconds = -microseconds if sign else microseconds
    # These limits keep the result within both calendars.
    if (
        abs(total) > _LARGEST_INTERVAL_MONTHS
        or abs(int(days or 0)) > 10**6
        or abs(microseconds) > 10**15
    ):
        return None
    return total, int(days or 0), microseconds


def array_elements(text: str) -> list[str | None] | None:
    """Returns the elements of a one-dimensional array with lower bound 1; None for any other.

    >>> array_elements('{1,NULL,"a,\\\\"b"}')
    ['1', None, 'a,"b']
    """
    if not re.fullmatch(r"\{.*\}", text, re.DOTALL) or text.startswith("{{"):
        return None
    elements: list[str | None] = []
    for quoted, plain, _ in re.findall(
        r'(?:"((?:[^"\\]|\\.)*)"|([^",]+))(,|$)', text[1:-1], re.DOTALL
    ):
        if plain:
            elements.append(None if plain == "NULL" else plain)
        else:
            elements.append(re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
    return elements
