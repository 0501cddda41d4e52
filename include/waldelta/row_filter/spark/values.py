"""Values of a filter in Spark SQL, including raw values that no Delta type can hold.

Such values are NaN and the infinities of numerics, the infinities of dates and timestamps, and
years before 1 or after 9999. They compare by PostgreSQL's order, which this module implements. Of
calls on raw arguments, NaN stays NaN, an infinite date stays infinite, and others fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from waldelta.row_filter._signatures import COMPARISONS
from waldelta.row_filter.typed_tree import MOMENTS, SPARK_TYPE_NAMES, Type, Typed, is_representable
from waldelta.spark_sql import string

OPERATORS = {key: operator for operator, key in COMPARISONS.items()}
# A row that can't be judged fails the statement; the message contains no value.
UNJUDGED = (
    "waldelta: a row filter meets a value that Delta does not hold (NaN, infinity, a year beyond 1"
    " to 9999)"
)
# Greater than the key of any day, including a day's microseconds.
_INFINITE_KEY = "1000000000000000000000000000000BD"


@dataclass(frozen=True, slots=True)
class Sql:
    """An expression's SQL. ``value`` is NULL where ``raw``, PostgreSQL's text, is not.

    ``raises``: its evaluation may fail. ``is_constant``: never NULL unless written so.
    ``in_years``: a date or timestamp within the years 1 to 9999 whenever it isn't raw. ``unheld``:
    the constants, with their positions, that may be in ``raw``.
    """

    value: str
    raw: str | None = None
    raises: bool = False
    is_constant: bool = False
    in_years: bool = True
    unheld: tuple[tuple[str, int], ...] = ()

    @property
    def is_null(self) -> str:
        """Whether it is NULL in PostgreSQL."""
        return (
            f"({self.value} is null)"
            if self.raw is None
            else f"({self.value} is null and {self.raw} is null)"
        )

    def judged(self) -> Sql:
        """Returns the value alone; evaluation fails where the value is raw."""
        if self.raw is None:
            return self
        if self.unheld:
            raise UnheldConstant(self.unheld[0][1])
        value = f"(case when {self.raw} is not null then {fail(UNJUDGED)} else {self.value} end)"
        return replace(self, value=value, raw=None, raises=True)


class UnheldConstant(Exception):
    """A constant that Spark's types can't hold is needed for more than a comparison.

    The argument is its position.
    """

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


def computed(*parts: str) -> str:
    """Returns a condition that is always true, but that Spark must compute, so that the parts can
    fail.

    Spark removes what can't change a result, like the operand of IS NULL when it is never NULL,
    even if it may fail.
    """
    return f"bit_count(hash({', '.join(parts)})) >= 0"


def fail(message: str) -> str:
    """Returns SQL that raises an error."""
    return f"raise_error({string(message)})"


def spark_type(kind: Type) -> str:
    """Returns the Spark type of values of a PostgreSQL type."""
    if kind.name == "numeric":
        whole, scale = kind.digits or (1, 0)
        return f"decimal({whole + scale},{scale})"
    return (
        f"array<{SPARK_TYPE_NAMES[kind.element]}>" if kind.element else SPARK_TYPE_NAMES[kind.name]
    )


def literal(typed: Typed) -> Sql:
    """Returns a constant as SQL."""
    kind, text = typed.type, typed.value
    null = "null" if kind.name == "interval" else f"cast(null as {spark_type(kind)})"
    if text is None:
        return Sql(null, is_constant=True)
    if (kind.name in MOMENTS and not is_representable(text)) or (
        kind.name == "numeric" and text[-1].isalpha()
    ):
        return Sql(null, string(text), is_constant=True, unheld=((text, typed.start),))
    if kind.name == "bool":
        value = "true" if text[0] == "t" else "false"
    elif kind.name == "bytea":
        value = f"X'{text[2:]}'"
    elif kind.name == "int4" and text.isdigit():
        value = text
    elif SPARK_TYPE_NAMES.get(kind.name) == "string" or kind.name == "interval":
        value = string(text)
    else:
        value = f"cast({string(text)} as {spark_type(kind)})"
    return Sql(value, is_constant=True)


def compare(key: str, kinds: Sequence[Type], left: Sql, right: Sql) -> Sql:
    """Returns a comparison by PostgreSQL's order of the type; NULL where a side is NULL."""
    operator, raises = OPERATORS[key], left.raises or right.raises
    if kinds[0].name == "bpchar":
        # Trailing blanks of character(n) don't count.
        left, right = (replace(side, value=f"rtrim({side.value})") for side in (left, right))
    plain = f"({left.value} {operator} {right.value})"
    if left.raw is None and right.raw is None:
        return Sql(plain, raises=raises)
    if kinds[0].name == "numeric":
        # NaN is greater than infinity, infinity than any number; NaN equals NaN.
        keys = f"({_rank(left)} {operator} {_rank(right)})"
    elif left.in_years and right.in_years and None in (left.raw, right.raw):
        return Sql(_outside_years(operator, plain, left, right), raises=raises)
    else:
        keys = f"({_order_key(kinds[0], left)} {operator} {_order_key(kinds[1], right)})"
    are_typed = " and ".join(
        f"{side.raw} is null" for side in (left, right) if side.raw is not None
    )
    return Sql(f"case when {are_typed} then {plain} else {keys} end", raises=raises)


def _rank(side: Sql) -> str:
    finite = f"case when {side.value} is not null then 0 end"
    if side.raw is None:
        return finite
    return (
        f"case {side.raw} when 'NaN' then 2 when 'Infinity' then 1 when '-Infinity' then -1 else"
        f" {finite} end"
    )


def _outside_years(operator: str, plain: str, left: Sql, right: Sql) -> str:
    """Compare when one side is within the years 1 to 9999.

    The other side, where it is raw, is then before or after all of them.
    """
    raw = left if left.raw is not None else right
    typed_side = right if left.raw is not None else left
    early = f"({raw.raw} = '-infinity' or endswith({raw.raw}, 'BC'))"
    one, two = ("-1", "1") if raw is left else ("1", "-1")
    outside = f"(case when {early} then {one} else {two} end {operator} 0)"
    if not typed_side.is_constant:
        outside = f"case when {typed_side.value} is not null then {outside} end"
    return f"case when {raw.raw} is null then {plain} else {outside} end"


def _order_key(kind: Type, side: Sql) -> str:
    """Returns a number that grows with the date or timestamp, raw or not."""
    typed_key = _key_of_value(kind, side.value)
    if side.raw is None:
        return typed_key
    raw = f"regexp_replace({side.raw}, '[+]00| BC', '')"
    parts = [f"cast(nullif(regexp_extract({raw}, '{form}', 1), '') as bigint)" for form in _PARTS]
    year = f"case when endswith({side.raw}, 'BC') then 1 - {parts[0]} else {parts[0]} end"
    fraction = f"cast(rpad(regexp_extract({raw}, '[.]([0-9]+)', 1), 6, '0') as bigint)"
    verbatim = _key(year, *parts[1:3], *(f"coalesce({part}, 0)" for part in parts[3:]), fraction)
    return (
        f"case when {side.value} is not null then {typed_key} when {side.raw} = 'infinity' then"
        f" {_INFINITE_KEY} when {side.raw} = '-infinity' then - {_INFINITE_KEY} when {side.raw} is"
        f" not null then {verbatim} end"
    )


_PARTS = (
    "^([0-9]+)-",
    "^[0-9]+-([0-9]+)",
    "^[0-9]+-[0-9]+-([0-9]+)",
    " ([0-9]+):",
    ":([0-9]+):",
    ":[0-9]+:([0-9]+)",
)


def _key_of_value(kind: Type, value: str) -> str:
    if kind.name == "date":
        return _key(f"year({value})", f"month({value})", f"day({value})", "0", "0", "0", "0")
    fields = [f"{name}({value})" for name in ("year", "month", "day", "hour", "minute", "second")]
    # Spark has no date_part('microsecond').
    return _key(*fields, f"cast((extract(second from {value}) % 1) * 1000000 as bigint)")


def _key(*fields: str) -> str:
    year, month, day, hour, minute, second, fraction = fields
    days = f"((cast({year} as decimal(10,0)) * 16 + {month}) * 32 + {day})"
    return (
        f"cast(({days} * 86400 + {hour} * 3600 + {minute} * 60 + {second}) * 1000000 + {fraction}"
        " as decimal(38,0))"
    )


def stays_in_years(typed: Typed, arguments: Sequence[Sql]) -> bool:
    """Returns whether a call returns dates of the years 1 to 9999 when its argument is one."""
    return typed.key in ("timestamp_to_date", "date_to_timestamp", "same") and arguments[0].in_years


def as_timestamp(date: Sql) -> Sql:
    """Returns a date at midnight, including raw ones."""
    raw = (
        None
        if date.raw is None
        else f"regexp_replace({date.raw}, '^([0-9]+-[0-9]+-[0-9]+)', '$1 00:00:00')"
    )
    return replace(date, value=f"cast({date.value} as timestamp_ntz)", raw=raw)


def _with_raw(raw: Callable[[Sql], str | None]) -> RawRule:
    """Returns the rule that keeps the only argument's raw value, in the result's form."""
    return lambda _, arguments, result: replace(
        result, raw=raw(arguments[0]), unheld=arguments[0].unheld
    )


def only(values: Sequence[Sql], texts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Returns the constants that no type holds, when they are among those that are kept.

    Raises UnheldConstant for any other.
    """
    constants = tuple(each for value in values for each in value.unheld)
    for text, start in constants:
        if text not in texts:
            raise UnheldConstant(start)
    return constants


INFINITE = ("infinity", "-infinity")


def keep_infinite(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    """Keep an infinite date infinite whatever is added; another raw one can't be judged."""
    moment = next(a for a in arguments if a.raw is not None)
    operands = [a for a in arguments if a is not moment]
    checks = "".join(f" and not {a.is_null}" for a in operands)
    infinite = f"{moment.raw} in ('infinity', '-infinity')"
    unjudged = Sql("null", moment.raw).judged().value
    raw = (
        f"case when {infinite}{checks} then {moment.raw} when not ({infinite}) then {unjudged} end"
    )
    return replace(result, raw=raw, raises=True, unheld=only([moment], INFINITE))


def _nan(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    """Returns NaN for NaN with anything but NULL; an infinity can't be judged."""
    checks = " and ".join(f"not {a.is_null}" for a in arguments)
    raws = [a.raw for a in arguments if a.raw is not None]
    is_nan = " or ".join(f"coalesce({raw} = 'NaN', false)" for raw in raws)
    is_raw = " or ".join(f"{raw} is not null" for raw in raws)
    unjudged = fail("waldelta: arithmetic on an infinite number")
    raw = (
        f"case when {checks} then case when {is_nan} then 'NaN' when {is_raw} then {unjudged}"
        " end end"
    )
    return replace(result, raw=raw, raises=True, unheld=only(arguments, ("NaN",)))


def _nan_fails(_: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    failure = fail("waldelta: cannot convert NaN or infinity")
    value = f"(case when {arguments[0].raw} is not null then {failure} else {result.value} end)"
    return replace(result, value=value, raises=True)


def _nan_to_float(typed: Typed, arguments: Sequence[Sql], result: Sql) -> Sql:
    return replace(
        result,
        value=f"coalesce({result.value}, cast({arguments[0].raw} as {spark_type(typed.type)}))",
    )


RawRule = Callable[[Typed, Sequence[Sql], Sql], Sql]
# How each key treats raw values; for all other keys a row with one fails.
RAW_FUNCTIONS: dict[str, RawRule] = {
    **dict.fromkeys(("same", "numeric_same"), _with_raw(lambda value: value.raw)),
    "date_to_timestamp": _with_raw(lambda date: as_timestamp(date).raw),
    "timestamp_to_date": _with_raw(lambda at: f"regexp_replace({at.raw}, ' [0-9:.]+', '')"),
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
