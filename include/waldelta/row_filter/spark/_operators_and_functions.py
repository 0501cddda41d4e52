"""Spark SQL templates for PostgreSQL's operators and functions, by the signature's key.

``{0}``, ``{1}`` … are the arguments, ``{type}`` the Spark type of the result. A leading ``!`` means
that the evaluation can fail, as it then does in PostgreSQL. All of it is evaluated by Spark's
Catalyst; nothing runs in Python.
"""

from __future__ import annotations

import re
import string as letters
from collections.abc import Callable
from functools import partial

from waldelta.row_filter._patterns import like_parts, like_regex
from waldelta.row_filter.spark.values import fail
from waldelta.row_filter.typed_tree import Typed, interval_parts
from waldelta.spark_sql import string

_MOST_ANY = 2
# This many days keep any date of the years 1 to 9999 within both calendars.
_FEW_DAYS = 1_000_000
_INFINITE = "cast('Infinity' as double)"
_FAIL_ZERO = fail("waldelta: division by zero")
_FAIL_RANGE = fail("waldelta: value out of range")
_FAIL_ROOT = fail("waldelta: square root of a negative number")
# From this number on, every double is whole.
_WHOLE = "4503599627370496D"
_OVERFLOWN = f"abs({{r}}) = {_INFINITE}"
_BOTH_FINITE = f"abs({{0}}) <> {_INFINITE} and abs({{1}}) <> {_INFINITE}"
# PostgreSQL's calendar of dates, in days since 1970: 4713 BC to 5874897.
_FIRST_DAY, _LAST_DAY = -2440588, 2145042905


def _check_result(result: str, wrong: str) -> str:
    return f"!case when {wrong.replace('{r}', result)} then {_FAIL_RANGE} else {result} end"


_FLOAT = {
    word: f"(cast({{0}} as {{type}}) {sign} cast({{1}} as {{type}}))"
    for word, sign in (("add", "+"), ("subtract", "-"), ("multiply", "*"))
}
_QUOTIENT = "cast(cast({0} as double) / cast({1} as double) as {type})"
_NARROW = "cast({0} as float)"
_VALID_DATE = f"not between {_FIRST_DAY} and {_LAST_DAY}"
_MADE_DATE = (
    f"make_date(case when {{0}} > 0 then {{0}} when {{0}} = 0 then {_FAIL_RANGE} else {{0}} + 1"
    " end, {1}, {2})"
)
_YEAR = "case when {f} > 0 then {f} else {f} - 1 end"

TEMPLATES: dict[str, str] = {
    "same": "{0}",
    "numeric_same": "{0}",
    "text_to_varchar": "{0}",
    "text_to_bpchar": "{0}",
    "widen": "cast({0} as {type})",
    # Integers: Spark's ANSI arithmetic fails on overflow as PostgreSQL's does.
    "int_add": "!(cast({0} as {type}) + cast({1} as {type}))",
    "int_subtract": "!(cast({0} as {type}) - cast({1} as {type}))",
    "int_multiply": "!(cast({0} as {type}) * cast({1} as {type}))",
    "int_divide": "!cast(cast({0} as bigint) div cast({1} as bigint) as {type})",
    "int_modulo": "!({0} % {1})",
    "int_negative": "!(- {0})",
    "int_abs": "!abs({0})",
    "int_narrow": "!cast({0} as {type})",
    "bit_not": "(~ {0})",
    "bit_and": "({0} & {1})",
    "bit_or": "({0} | {1})",
    "bit_xor": "({0} ^ {1})",
    "bool_to_int": "cast({0} as int)",
    "int_to_bool": "({0} <> 0)",
    # Numerics: the digits of each result are known, so every cast is exact.
    "int_to_numeric": "cast({0} as {type})",
    "numeric_limit": "!cast({0} as {type})",
    "numeric_add": "cast({0} + {1} as {type})",
    "numeric_subtract": "cast({0} - {1} as {type})",
    "numeric_multiply": "cast({0} * {1} as {type})",
    "numeric_modulo": "!cast({0} % {1} as {type})",
    "numeric_negative": "(- {0})",
    "numeric_abs": "abs({0})",
    "numeric_ceil": "cast(ceil({0}) as {type})",
    "numeric_floor": "cast(floor({0}) as {type})",
    "numeric_sign": "cast(sign({0}) as {type})",
    "numeric_to_int": "!cast(round({0}, 0) as {type})",
    "numeric_to_float": "cast({0} as {type})",
    # Floats: PostgreSQL fails where IEEE overflows, underflows or divides by zero.
    "float_add": _check_result(_FLOAT["add"], f"{_OVERFLOWN} and {_BOTH_FINITE}"),
    "float_subtract": _check_result(_FLOAT["subtract"], f"{_OVERFLOWN} and {_BOTH_FINITE}"),
    "float_multiply": _check_result(
        _FLOAT["multiply"],
        f"({_OVERFLOWN} and {_BOTH_FINITE}) or ({{r}} = 0 and {{0}} <> 0 and {{1}} <> 0)",
    ),
    "float_divide": (
        "!case when {1} = 0 then case when isnan({0}) then {0} when {0} is not null then "
        + _FAIL_ZERO
        + " end else "
        + _check_result(
            _QUOTIENT,
            f"({_OVERFLOWN} and abs({{0}}) <> {_INFINITE}) or ({{r}} = 0 and {{0}} <> 0 and"
            f" abs({{1}}) <> {_INFINITE})",
        )[1:]
        + " end"
    ),
    "float_negative": "(- {0})",
    "float_abs": "abs({0})",
    "float_ceil": (
        f"case when abs({{0}}) < {_WHOLE} then cast(ceil({{0}}) as double) else {{0}} end"
    ),
    "float_floor": (
        f"case when abs({{0}}) < {_WHOLE} then cast(floor({{0}}) as double) else {{0}} end"
    ),
    "float_trunc": (
        f"case when abs({{0}}) < {_WHOLE} then cast(cast({{0}} as bigint) as double) else {{0}} end"
    ),
    "float_round": "rint({0})",
    "float_sign": "case when isnan({0}) then 0D else cast(sign({0}) as double) end",
    "float_sqrt": f"!case when {{0}} < 0 then {_FAIL_ROOT} else sqrt({{0}}) end",
    "float_narrow": _check_result(
        _NARROW, f"({_OVERFLOWN} and abs({{0}}) <> {_INFINITE}) or ({{r}} = 0 and {{0}} <> 0)"
    ),
    # Spark treats 2^63 as the largest bigint.
    "float_to_int": (
        f"!case when {{0}} >= 9223372036854775808D then {_FAIL_RANGE} else cast(rint({{0}}) as"
        " {type}) end"
    ),
    # Texts, counted in code points by both.
    "char_length": "char_length({0})",
    "bpchar_length": "char_length(rtrim({0}))",
    "bpchar_to_text": "rtrim({0})",
    "octet_length": "octet_length({0})",
    "lower": f"translate({{0}}, '{letters.ascii_uppercase}', '{letters.ascii_lowercase}')",
    "upper": f"translate({{0}}, '{letters.ascii_lowercase}', '{letters.ascii_uppercase}')",
    "strpos": "instr({0}, {1})",
    "replace": "replace({0}, {1}, {2})",
    "translate": "translate({0}, {1}, {2})",
    "starts_with": "startswith({0}, {1})",
    "concat": "concat({0}, {1})",
    "md5": "md5(cast({0} as binary))",
    "reverse": "reverse({0})",
    "ascii": "ascii({0})",
    # Dates and timestamps.
    "date_difference": "datediff({0}, {1})",
    "date_to_timestamp": "cast({0} as timestamp_ntz)",
    "timestamp_to_date": "cast({0} as date)",
    "make_date": (
        f"!case when unix_date({_MADE_DATE}) {_VALID_DATE} then {_FAIL_RANGE} else {_MADE_DATE} end"
    ),
    # Arrays: the elements searched for aren't NULL, since a NULL is never found.
    "array_length": "nullif(array_size({0}), 0)",
    "cardinality": "array_size({0})",
    "array_contains": (
        "case when {0} is not null"
        " then forall({1}, e -> e is not null and coalesce(array_contains({0}, e), false)) end"
    ),
    "array_contained": (
        "case when {1} is not null"
        " then forall({0}, e -> e is not null and coalesce(array_contains({1}, e), false)) end"
    ),
    "array_overlaps": (
        "case when {1} is not null"
        " then exists({0}, e -> e is not null and coalesce(array_contains({1}, e), false)) end"
    ),
    "array_eq": "({0} = {1})",
    "array_ne": "({0} <> {1})",
}

FIELDS: dict[str, str] = {
    "year": _YEAR.replace("{f}", "year({0})"),
    "isoyear": _YEAR.replace("{f}", "extract(yearofweek from {0})"),
    "month": "month({0})", "day": "day({0})", "hour": "hour({0})", "minute": "minute({0})",
    "second": "extract(second from {0})",
    "dow": "(dayofweek({0}) - 1)", "isodow": "(weekday({0}) + 1)", "doy": "dayofyear({0})",
    "quarter": "quarter({0})", "week": "weekofyear({0})",
    "epoch": "(cast(unix_date({0}) as bigint) * 86400)",
}  # fmt: skip

_OF_DAY = "year({0}), month({0}), day({0})"
TRUNCATIONS: dict[str, str] = {
    **{
        unit: f"cast(trunc(cast({{0}} as date), '{unit}') as timestamp_ntz)"
        for unit in ("year", "quarter", "month", "week")
    },
    "day": "cast(cast({0} as date) as timestamp_ntz)",
    "hour": f"make_timestamp_ntz({_OF_DAY}, hour({{0}}), 0, 0)",
    "minute": f"make_timestamp_ntz({_OF_DAY}, hour({{0}}), minute({{0}}), 0)",
    "second": f"make_timestamp_ntz({_OF_DAY}, hour({{0}}), minute({{0}}), second({{0}}))",
}


def _number(typed: Typed, k: int) -> int:
    return int(typed.arguments[k].value or 0)


def _substring(typed: Typed) -> str:
    start = _number(typed, 1)
    if len(typed.arguments) == 2:
        return f"substring({{0}}, {max(start, 1)})"
    length = _number(typed, 2)
    if length < 0:
        return f"!case when {{0}} is not null then {_FAIL_RANGE} end"
    # Characters from start on; positions before the first character count, but have none.
    return (
        f"substring({{0}}, {max(start, 1)},"
        f" {max(min(start + length, 2**31 - 1) - max(start, 1), 0)})"
    )


def _left_text(typed: Typed) -> str:
    n = _number(typed, 1)
    return f"left({{0}}, {n})" if n >= 0 else f"left({{0}}, greatest(char_length({{0}}) - {-n}, 0))"


def _right(typed: Typed) -> str:
    n = _number(typed, 1)
    return f"right({{0}}, {n})" if n >= 0 else f"substring({{0}}, {min(1 - n, 2**31 - 1)})"


def _pad(typed: Typed) -> str:
    fill = "{2}" if len(typed.arguments) > 2 else "' '"
    return f"{typed.key}({{0}}, {max(_number(typed, 1), 0)}, {fill})"


def _split_part(typed: Typed) -> str:
    n = _number(typed, 2)
    if n == 0:
        return f"!case when {{0}} is not null then {_FAIL_RANGE} end"
    if typed.arguments[1].value == "":
        return "{0}" if n in (1, -1) else "case when {0} is not null then '' end"
    return f"split_part({{0}}, {{1}}, {n})"


def _trim(side: str, typed: Typed) -> str:
    return f"trim({side} {'{1}' if len(typed.arguments) > 1 else repr(' ')} from {{0}})"


def _round_sql(typed: Typed) -> str:
    places = _number(typed, 1) if len(typed.arguments) > 1 else 0
    # More decimal places than the value has change nothing.
    places = min(places, (typed.arguments[0].type.digits or (0, 0))[1])
    if typed.key == "numeric_round":
        return f"cast(round({{0}}, {places}) as {{type}})"
    unit = string("0." + "0" * (places - 1) + "1") if places else "'1'"
    return f"cast({{0}} - {{0}} % cast({unit} as decimal({places + 1},{places})) as {{type}})"


def _add_days(sign: int, date: int, typed: Typed) -> str:
    day, days = f"{{{date}}}", typed.arguments[1 - date]
    if (
        days.is_constant
        and abs(int(days.value or 0)) <= _FEW_DAYS
        and typed.arguments[date].key in ("column", "constant")
    ):
        return f"date_add({day}, {sign * int(days.value or 0)})"
    sum_ = f"(cast(unix_date({day}) as bigint) {'+' if sign > 0 else '-'} {{{1 - date}}})"
    return (
        f"!case when {sum_} {_VALID_DATE} then {_FAIL_RANGE} else"
        f" date_from_unix_date(cast({sum_} as int)) end"
    )


def _add_interval(sign: int, typed: Typed) -> str:
    months, days, microseconds = (
        sign * part for part in interval_parts(typed.arguments[1].value or "") or (0, 0, 0)
    )
    whole, fraction = divmod(abs(microseconds), 10**6)
    seconds = f"{'-' if microseconds < 0 else ''}{whole}.{fraction:06d}"
    interval = f"make_interval(0, {months}, 0, {days}, 0, 0, cast('{seconds}' as decimal(18,6)))"
    return f"(cast({{0}} as timestamp_ntz) + {interval})"


def _like(typed: Typed) -> str:
    packed = typed.value or "0"
    behind = 1 + int(packed[0])
    subject, parts = "{0}", like_parts(packed[behind:], packed[1:behind])
    if "i" in typed.key.removeprefix("not_").removesuffix("like"):
        lower = str.maketrans(letters.ascii_uppercase, letters.ascii_lowercase)
        subject = TEMPLATES["lower"]
        parts = [(kind, part.translate(lower)) for kind, part in parts]
    negation = "not " if typed.key.startswith("not_") else ""
    # Spark makes a regular expression of it, whose time has the number of % as its exponent.
    if sum(kind == "any" for kind, _ in parts) > _MOST_ANY:
        return f"({subject} {negation}rlike {_escape_braces(string(like_regex(parts)))})"
    text = "".join(
        re.sub(r"([\\%_])", r"\\\1", part) if kind == "text" else part for kind, part in parts
    )
    return f"({subject} {negation}like {_escape_braces(string(text))})"


def _regex(typed: Typed) -> str:
    options = "(?i)" if "i" in typed.key.removeprefix("not_").removesuffix("regex") else ""
    return (
        f"({{0}} {'not ' if typed.key.startswith('not_') else ''}rlike"
        f" {_escape_braces(string(options + (typed.value or '')))})"
    )


def _escape_braces(text: str) -> str:
    """Escape literal text for a template."""
    return text.replace("{", "{{").replace("}", "}}")


# Templates that depend on constants among the arguments.
BUILT: dict[str, Callable[[Typed], str]] = {
    "substring": _substring,
    "left": _left_text,
    "right": _right,
    "lpad": _pad,
    "rpad": _pad,
    "split_part": _split_part,
    "btrim": partial(_trim, "both"),
    "ltrim": partial(_trim, "leading"),
    "rtrim": partial(_trim, "trailing"),
    "repeat": lambda typed: f"repeat({{0}}, {max(_number(typed, 1), 0)})",
    "numeric_round": _round_sql,
    "numeric_trunc": _round_sql,
    "date_add": partial(_add_days, 1, 0),
    "date_subtract": partial(_add_days, -1, 0),
    "int_add_date": partial(_add_days, 1, 1),
    "add_interval": partial(_add_interval, 1),
    "subtract_interval": partial(_add_interval, -1),
    "date_add_interval": partial(_add_interval, 1),
    "date_subtract_interval": partial(_add_interval, -1),
    "varchar_limit": lambda typed: f"substring({{0}}, 1, {typed.value})",
    "bpchar_limit": lambda typed: f"rpad({{0}}, {typed.value}, ' ')",
    **dict.fromkeys(("like", "not_like", "ilike", "not_ilike"), _like),
    **dict.fromkeys(("regex", "not_regex", "iregex", "not_iregex"), _regex),
}
