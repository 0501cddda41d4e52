"""Results of calls on raw arguments: NaN stays NaN, an infinite date stays infinite, others
fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from waldelta.row_filter.spark.values import Sql, UnheldConstant, fail, spark_type
from waldelta.row_filter.typed_tree import Typed

_FAIL_NAN = fail("waldelta: cannot convert NaN or infinity")


def stays_in_years(typed: Typed, arguments: Sequence[Sql]) -> bool:
    """Return whether a call returns dates of the years 1 to 9999 when its argument is one."""
    return typed.key in ("timestamp_to_date", "date_to_timestamp", "same") and arguments[0].in_years


def as_timestamp(date: Sql) -> Sql:
    """Return a date at midnight, including raw ones."""
    raw = (
        None
        if date.raw is None
        else f"regexp_replace({date.raw}, '^([0-9]+-[0-9]+-[0-9]+)', '$1 00:00:00')"
    )
    return replace(date, value=f"cast({date.value} as timestamp_ntz)", raw=raw)


def _keep_raw(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    return replace(result, raw=arguments[0].raw, unheld=arguments[0].unheld)


def _to_timestamp(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    return replace(result, raw=as_timestamp(arguments[0]).raw, unheld=arguments[0].unheld)


def _to_date(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    raw = f"regexp_replace({arguments[0].raw}, ' [0-9:.]+', '')"
    return replace(result, raw=raw, unheld=arguments[0].unheld)


def only(values: Sequence[Sql], kept: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return the constants that no type holds, when they are among those that are kept.

    Raises UnheldConstant for any other.
    """
    found = tuple(each for value in values for each in value.unheld)
    for text, start in found:
        if text not in kept:
            raise UnheldConstant(start)
    return found


INFINITE = ("infinity", "-infinity")


def keep_infinite(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    """Keep an infinite date infinite whatever is added; another raw one can't be judged."""
    moment = next(a for a in arguments if a.raw is not None)
    others = [a for a in arguments if a is not moment]
    known = "".join(f" and not {a.is_null}" for a in others)
    infinite = f"{moment.raw} in ('infinity', '-infinity')"
    unjudged = Sql("null", moment.raw).judged().value
    raw = f"case when {infinite}{known} then {moment.raw} when not ({infinite}) then {unjudged} end"
    return replace(result, raw=raw, raises=True, unheld=only([moment], INFINITE))


def _nan(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    """Return NaN for NaN with anything but NULL; an infinity can't be judged."""
    known = " and ".join(f"not {a.is_null}" for a in arguments)
    raws = [a.raw for a in arguments if a.raw is not None]
    is_nan = " or ".join(f"coalesce({raw} = 'NaN', false)" for raw in raws)
    is_raw = " or ".join(f"{raw} is not null" for raw in raws)
    unjudged = fail("waldelta: arithmetic on an infinite number")
    raw = (
        f"case when {known} then case when {is_nan} then 'NaN' when {is_raw} then {unjudged}"
        " end end"
    )
    return replace(result, raw=raw, raises=True, unheld=only(arguments, ("NaN",)))


def _nan_fails(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    value = f"(case when {arguments[0].raw} is not null then {_FAIL_NAN} else {result.value} end)"
    return replace(result, value=value, raises=True)


def _nan_to_float(typed: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    return replace(
        result,
        value=f"coalesce({result.value}, cast({arguments[0].raw} as {spark_type(typed.type)}))",
    )


RawRule = Callable[[Typed, Sequence[Sql], Sql], Sql]
# How each key treats raw values; for all other keys a row with one fails.
RAW_FUNCTIONS: dict[str, RawRule] = {
    "same": _keep_raw,
    "numeric_same": _keep_raw,
    "date_to_timestamp": _to_timestamp,
    "timestamp_to_date": _to_date,
    "numeric_to_int": _nan_fails,
    "numeric_to_float": _nan_to_float,
    **dict.fromkeys(
        (
            "date_add",
            "date_subtract",
            "int_add_date",
            "add_interval",
            "subtract_interval",
            "date_add_interval",
            "date_subtract_interval",
        ),
        keep_infinite,
    ),
    **dict.fromkeys(
        (
            f"numeric_{word}"
            for word in (
                "add",
                "subtract",
                "multiply",
                "modulo",
                "negative",
                "abs",
                "ceil",
                "floor",
                "round",
                "trunc",
                "sign",
                "limit",
            )
        ),
        _nan,
    ),
}
