"""Row conditions: expectations that judge each row by itself, as Spark columns that are true for
rows that fail.

They return what Great Expectations returns on Spark (tests compare the two): a null value meets
every expectation except "not null", and so does a condition that evaluates to null. Only for
expectations on nulls, with_raw() makes both consider values stored in ``_wd_raw``. Great
Expectations runs a query per expectation to count failing rows; this module evaluates many in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pyspark.sql import Column
from pyspark.sql import functions as F

from waldelta.metadata_columns import RAW
from waldelta.spark_sql import quote, string

# Great Expectations can't evaluate such a comparison, and reports only that it failed.
NO_TEXT = (
    "Great Expectations doesn't compare a text or boolean with bounds: cast it in the condition of"
    " an expect_target_rows_to_satisfy"
)

# Arguments that any row expectation may have; "mostly" is a share of the judged rows.
_COMMON = frozenset({"mostly"})


@dataclass(frozen=True, slots=True)
class RowCondition:
    """One expectation: ``unexpected`` is true for a failing row, ``judged`` for a row it applies
    to.

    ``columns`` are the columns it reads, None where unknown; ``mostly`` is the share of judged rows
    that must meet it.
    """

    unexpected: Column
    judged: Column
    columns: tuple[str, ...] | None
    mostly: float = 1.0


def row_condition(kind: str, kwargs: Mapping[str, Any]) -> RowCondition | None:
    """Returns the condition of an expectation by its type (or class) and arguments.

    Returns None for an expectation that isn't translated in this module.
    """
    known = _KNOWN.get(snake(kind))
    if known is None:
        return None
    required, optional, build = known
    given = set(kwargs)
    mostly = kwargs.get("mostly", 1.0)
    if not required <= given <= required | optional | _COMMON or not _is_share(mostly):
        return None
    found = build({name: value for name, value in kwargs.items() if name not in _COMMON})
    if found is None:
        return None
    return RowCondition(found.unexpected, found.judged, found.columns, float(mostly))


def _is_share(mostly: Any) -> bool:
    return isinstance(mostly, (int, float)) and not isinstance(mostly, bool) and 0 <= mostly <= 1


def is_met(unexpected: int, judged: int, mostly: float) -> bool:
    """Returns whether enough rows meet the expectation.

    Divides as Great Expectations does, because 0.55 * 100 is more than 55.

    >>> is_met(45, 100, 0.55), is_met(46, 100, 0.55), is_met(0, 0, 1.0)
    (True, False, True)
    """
    return not unexpected or (judged - unexpected) / judged >= mostly


def snake(kind: str) -> str:
    """Returns a class name in snake case: ``ExpectColumnX`` as ``expect_column_x``."""
    if not kind[:1].isupper():
        return kind
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind).lstrip(
        "_"
    )


def is_of_row_alone(kind: str, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an own expectation's result depends only on the row.

    It then doesn't depend on the current date or other tables.
    """
    name = snake(kind)
    is_plain = "row_condition" not in kwargs and not any(
        isinstance(value, Mapping) for value in kwargs.values()
    )
    if name not in _KNOWN or not is_plain:
        return False
    return name != ROWS_SATISFY or is_fixed(str(kwargs.get("condition")))


def value_condition(column: str) -> str:
    """Returns the SQL condition that a row has a value of a column.

    A value that the column's type in the lake can't store is null there, and is stored in
    ``_wd_raw``.
    """
    return (
        f"({quote(column)} is not null or coalesce(map_contains_key({RAW}, {string(column)}),"
        " false))"
    )


def null_condition(column: str) -> str:
    """Returns the SQL condition that a row has no value of a column."""
    return (
        f"({quote(column)} is null and not coalesce(map_contains_key({RAW}, {string(column)}),"
        " false))"
    )


def asks_for_nulls(kind: str, kwargs: Mapping[str, Any], raw: Iterable[str]) -> str | None:
    """Returns the column in ``raw`` for which an expectation judges nulls, or None.

    Values of the columns in ``raw`` may be stored in ``_wd_raw``.
    """
    if snake(kind) not in _OF_NULLS:
        return None
    name = _name(kwargs.get("column"))
    # Spark matches column names case-insensitively, but not keys of a map.
    return next((column for column in raw if column.lower() == name.lower()), None)


def with_raw(
    kind: str, kwargs: Mapping[str, Any], raw: Iterable[str], meaning: str
) -> tuple[str, dict[str, Any]]:
    """Returns an expectation's type and arguments that don't take a value in ``_wd_raw`` for null.

    They are unchanged where that makes no difference, and where an argument is known only to Great
    Expectations.

    >>> options = {"column": "d", "mostly": 0.5}
    >>> with_raw("expect_column_values_to_be_null", options, ["d"], "no d")[1]["condition"]
    "(`d` is null and not coalesce(map_contains_key(_wd_raw, 'd'), false))"
    """
    column = asks_for_nulls(kind, kwargs, raw)
    if (
        column is None
        or not set(kwargs) <= _ONE | _COMMON
        or not _is_share(kwargs.get("mostly", 1.0))
    ):
        return kind, dict(kwargs)
    rest = {name: value for name, value in kwargs.items() if name in _COMMON}
    return ROWS_SATISFY, {"condition": _OF_NULLS[snake(kind)](column), "meaning": meaning, **rest}


def _name(column: Any) -> str:
    """Returns a column's name; Great Expectations puts a name with a dot in backticks."""
    text = str(column)
    return text[1:-1] if "." in text and text.startswith("`") and text.endswith("`") else text


def _column(name: str) -> Column:
    return F.col(quote(name))


def _of_values(
    condition: Callable[[Column, dict[str, Any]], Column | None],
) -> Callable[..., RowCondition | None]:
    """Builds a condition on one column's values that aren't null."""

    def build(kwargs: dict[str, Any]) -> RowCondition | None:
        column = _column(name := _name(kwargs["column"]))
        expected = condition(column, kwargs)
        return (
            expected
            if expected is None
            else RowCondition(column.isNotNull() & ~expected, column.isNotNull(), (name,))
        )

    return build


def _not_null(kwargs: dict[str, Any]) -> RowCondition:
    column = _column(name := _name(kwargs["column"]))
    return RowCondition(column.isNull(), F.lit(True), (name,))


def _null(kwargs: dict[str, Any]) -> RowCondition:
    column = _column(name := _name(kwargs["column"]))
    return RowCondition(column.isNotNull(), F.lit(True), (name,))


def _between(value: Column, kwargs: dict[str, Any]) -> Column | None:
    low, high = (_number(kwargs.get(name)) for name in ("min_value", "max_value"))
    if any(isinstance(bound, Mapping) for bound in (low, high)):
        return None
    parts = []
    if low is not None:
        parts.append(value > F.lit(low) if kwargs.get("strict_min") else value >= F.lit(low))
    if high is not None:
        parts.append(value < F.lit(high) if kwargs.get("strict_max") else value <= F.lit(high))
    if not parts:
        return None
    between = parts[0] if len(parts) == 1 else parts[0] & parts[1]
    # Otherwise Spark would compare as texts, or cast the texts to the bound's type while all can be
    # cast.
    is_text = F.typeof(value).rlike("^(string|boolean)")
    return F.when(is_text, F.raise_error(F.lit(NO_TEXT)).cast("boolean")).otherwise(between)


def _number(bound: Any) -> Any:
    """Returns a bound as Great Expectations takes it: a float for a number or its text."""
    try:
        return bound if bound is None else float(bound)
    except (TypeError, ValueError):
        return bound


def _in_set(value: Column, kwargs: dict[str, Any]) -> Column | None:
    values = kwargs["value_set"]
    return value.isin(list(values)) if isinstance(values, (list, tuple, set)) and values else None


def _not_in_set(value: Column, kwargs: dict[str, Any]) -> Column | None:
    found = _in_set(value, kwargs)
    return found if found is None else ~found


def _regex(value: Column, kwargs: dict[str, Any]) -> Column | None:
    return value.rlike(kwargs["regex"]) if isinstance(kwargs["regex"], str) else None


def _not_regex(value: Column, kwargs: dict[str, Any]) -> Column | None:
    found = _regex(value, kwargs)
    return found if found is None else ~found


def _length(value: Column, kwargs: dict[str, Any]) -> Column | None:
    return _between(F.length(value), kwargs)


def _length_equals(value: Column, kwargs: dict[str, Any]) -> Column | None:
    return F.length(value) == F.lit(kwargs["value"]) if isinstance(kwargs["value"], int) else None


def _pair(
    condition: Callable[[Column, Column, dict[str, Any]], Column],
) -> Callable[..., RowCondition | None]:
    """Builds a condition on two columns' values; rows where both are null aren't judged."""

    def build(kwargs: dict[str, Any]) -> RowCondition | None:
        names = _name(kwargs["column_A"]), _name(kwargs["column_B"])
        left, right = (_column(name) for name in names)
        judged = left.isNotNull() | right.isNotNull()
        return RowCondition(judged & ~condition(left, right, kwargs), judged, names)

    return build


def _greater(left: Column, right: Column, kwargs: dict[str, Any]) -> Column:
    return (left >= right) | left.eqNullSafe(right) if kwargs.get("or_equal") else left > right


def _satisfy(kwargs: dict[str, Any]) -> RowCondition | None:
    text = kwargs["condition"]
    # A null condition admits no row.
    return RowCondition(~F.coalesce(F.expr(text), F.lit(False)), F.lit(True), columns_of(text))


def columns_of(condition: str) -> tuple[str, ...] | None:
    """Returns the columns that a Spark SQL condition names; None when unknown.

    >>> columns_of("a > 1 and `b c` is not null")
    ('a', 'b c')
    >>> columns_of("attrs.color is not null")
    ('attrs', 'color')
    >>> columns_of("hash(*) > 0"), columns_of("struct(t.*) is null")
    (None, None)
    >>> columns_of("identifier('a') > 1"), columns_of("select a from t")
    (None, None)
    >>> columns_of("exists (select * from o where o.b = a)")
    ('a', 'b', 'o')
    """
    import sqlglot  # few tables have such a condition
    from sqlglot import exp

    try:
        tree = sqlglot.parse_one(condition, read="spark")
    except sqlglot.errors.SqlglotError:
        return None
    # A star stands for all columns of the row, except in a subquery's select list. A query may join
    # by columns that it doesn't name.
    stars = [
        star.parent_select if isinstance(star.parent, exp.Select) else None
        for star in tree.find_all(exp.Star)
    ]
    by_text = any(call.name.lower() == "identifier" for call in tree.find_all(exp.Anonymous))
    if None in stars or by_text or isinstance(tree, exp.Query):
        return None
    # The field of a struct, or the key of a map, parses as a table's column: which part is the
    # column is unknown.
    return tuple(
        sorted({part.name for column in tree.find_all(exp.Column) for part in column.parts})
    )


def is_fixed(condition: str) -> bool:
    """Returns whether a Spark SQL condition is known to depend only on the row's values.

    >>> is_fixed("a > 1 and lower(b) like 'x%'")
    True
    >>> is_fixed("a > current_date()"), is_fixed("a > localtimestamp")
    (False, False)
    >>> is_fixed("a > date 'today'"), is_fixed("a in (select b from t)")
    (False, False)
    """
    import sqlglot
    from sqlglot import exp

    try:
        nodes = list(sqlglot.parse_one(condition, read="spark").walk())
    except sqlglot.errors.SqlglotError:
        return False
    # Some functions without parentheses parse as columns, and words such as 'today' in a date
    # literal mean the query's date.
    moments = {
        node.name.lower()
        for node in nodes
        if isinstance(node, exp.Identifier) or (node.key == "literal" and node.is_string)
    }
    return {node.key for node in nodes} <= _FIXED and not moments & _MOMENTS


# Node kinds of a parsed condition that return the same for the same values. Any other node may not.
_FIXED = frozenset(
    [
        "abs",
        "add",
        "and",
        "between",
        "boolean",
        "bracket",
        "case",
        "cast",
        "ceil",
        "coalesce",
        "column",
        "concat",
        "datatype",
        "div",
        "dot",
        "eq",
        "floor",
        "greatest",
        "gt",
        "gte",
        "identifier",
        "if",
        "in",
        "intdiv",
        "is",
        "least",
        "length",
        "like",
        "literal",
        "lower",
        "lt",
        "lte",
        "mapcontainskey",
        "mod",
        "mul",
        "neg",
        "neq",
        "not",
        "null",
        "nullsafeeq",
        "nullsafeneq",
        "or",
        "paren",
        "regexplike",
        "round",
        "sub",
        "substring",
        "trim",
        "trycast",
        "upper",
    ]
)
_MOMENTS = frozenset(
    [
        "current_date",
        "current_timestamp",
        "localtimestamp",
        "current_user",
        "session_user",
        "user",
        "now",
        "today",
        "tomorrow",
        "yesterday",
    ]
)
ROWS_SATISFY = "expect_target_rows_to_satisfy"
LENGTHS_BETWEEN = "expect_column_value_lengths_to_be_between"
LENGTHS_EQUAL = "expect_column_value_lengths_to_equal"
MATCH_REGEX = "expect_column_values_to_match_regex"
_OF_NULLS: dict[str, Callable[[str], str]] = {
    "expect_column_values_to_not_be_null": value_condition,
    "expect_column_values_to_be_null": null_condition,
}
_BOUNDS = frozenset({"min_value", "max_value", "strict_min", "strict_max"})
_ONE, _NONE = frozenset({"column"}), frozenset[str]()
_Known = tuple[frozenset[str], frozenset[str], Callable[[dict[str, Any]], RowCondition | None]]
_KNOWN: dict[str, _Known] = {
    "expect_column_values_to_not_be_null": (_ONE, _NONE, _not_null),
    "expect_column_values_to_be_null": (_ONE, _NONE, _null),
    "expect_column_values_to_be_between": (_ONE, _BOUNDS, _of_values(_between)),
    "expect_column_values_to_be_in_set": (_ONE | {"value_set"}, _NONE, _of_values(_in_set)),
    "expect_column_values_to_not_be_in_set": (_ONE | {"value_set"}, _NONE, _of_values(_not_in_set)),
    "expect_column_values_to_match_regex": (_ONE | {"regex"}, _NONE, _of_values(_regex)),
    "expect_column_values_to_not_match_regex": (_ONE | {"regex"}, _NONE, _of_values(_not_regex)),
    "expect_column_value_lengths_to_be_between": (_ONE, _BOUNDS, _of_values(_length)),
    "expect_column_value_lengths_to_equal": (_ONE | {"value"}, _NONE, _of_values(_length_equals)),
    "expect_column_pair_values_to_be_equal": (
        frozenset({"column_A", "column_B"}),
        _NONE,
        _pair(lambda left, right, _: left.eqNullSafe(right)),
    ),
    "expect_column_pair_values_a_to_be_greater_than_b": (
        frozenset({"column_A", "column_B"}),
        frozenset({"or_equal"}),
        _pair(_greater),
    ),
    ROWS_SATISFY: (frozenset({"condition"}), frozenset({"meaning"}), _satisfy),
}
ROW_EXPECTATIONS = tuple(sorted(_KNOWN))
