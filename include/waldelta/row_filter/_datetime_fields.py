"""Fields and units of dates and timestamps that mean the same in Spark."""

from __future__ import annotations

from waldelta.row_filter.typed_tree import Typed

# An infinite date has no value (NULL) for the periodic fields, and an infinite one for the
# monotonic ones.
PERIODIC = frozenset(
    {"month", "day", "hour", "minute", "second", "dow", "isodow", "doy", "quarter", "week"}
)
MONOTONIC = frozenset({"year", "isoyear", "epoch"})
_TIMES = frozenset({"hour", "minute", "second"})
DATETIME_UNITS = frozenset({"year", "quarter", "month", "week", "day", "hour", "minute", "second"})
# This many days keep any date of the years 1 to 9999 within both calendars.
FEW_DAYS = 1_000_000


def check_moment(typed: Typed) -> str | None:
    """Return why a call on dates can't be translated; None if it can."""
    if typed.key in ("extract", "date_part"):
        field, kind = typed.arguments[0].value, typed.arguments[1].type.name
        if field not in PERIODIC | MONOTONIC or (kind == "date" and field in _TIMES):
            return f"{field!r} of a {kind}"
        if field == "epoch" and kind != "date":
            return "the epoch of a timestamp"
    if typed.key == "date_trunc" and typed.arguments[0].value not in DATETIME_UNITS:
        return f"date_trunc to {typed.arguments[0].value!r}"
    if typed.key in ("extract", "date_part", "date_trunc") and not typed.arguments[0].is_constant:
        return "a date field whose name isn't a constant"
    return None
