"""Constants as PostgreSQL prints them, checked before they become Spark literals."""

from __future__ import annotations

import re

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


def is_representable(text: str) -> bool:
    """Return whether a date or timestamp is in the years 1 to 9999, which Spark's types cover.

    >>> is_representable("0044-03-15 BC"), is_representable("9999-12-31")
    (False, True)
    """
    return "infinity" not in text and not text.endswith("BC") and text.index("-") == _YEAR_DIGITS


def numeric_digits(text: str) -> tuple[int, int]:
    """Return the number of digits before and after the decimal point.

    >>> numeric_digits("-12.50")
    (2, 2)
    """
    whole, _, fraction = text.lstrip("-").partition(".")
    return (len(whole.lstrip("0")) or 1, len(fraction))


def interval_parts(text: str) -> tuple[int, int, int] | None:
    """Return months, days and microseconds of an interval in IntervalStyle postgres.

    None for an interval that isn't certain.

    >>> interval_parts("1 year 2 mons -3 days +04:05:06.5".replace("+", ""))
    (14, -3, 14706500000)
    """
    found = _INTERVAL.fullmatch(text.replace("+", ""))
    if found is None or not text:
        return None
    years, months, days, sign, hours, minutes, seconds, fraction = found.groups()
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
    """Return the elements of a one-dimensional array with lower bound 1; None for any other.

    >>> array_elements('{1,NULL,"a,\\\\"b"}')
    ['1', None, 'a,"b']
    """
    if not re.fullmatch(r"\{.*\}", text, re.DOTALL) or text.startswith("{{"):
        return None
    found: list[str | None] = []
    for quoted, plain, _ in re.findall(
        r'(?:"((?:[^"\\]|\\.)*)"|([^",]+))(,|$)', text[1:-1], re.DOTALL
    ):
        if plain:
            found.append(None if plain == "NULL" else plain)
        else:
            found.append(re.sub(r"\\(.)", r"\1", quoted, flags=re.DOTALL))
    return found
