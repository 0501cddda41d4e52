"""Columns, and conditions in Spark SQL: which columns they name, what they depend on, and whether a
row has a value. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

from waldelta.metadata_columns import RAW
from waldelta.row_filter.spark.evaluate import parsed
from waldelta.spark_sql import quote, string


def listed(name: str) -> str:
    """Returns a column's name as Great Expectations lists it: in backticks if it has a dot.

    Backticks within the name stay.
    """
    return name if "." not in name or (name.startswith("`") and name.endswith("`")) else f"`{name}`"


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
    from sqlglot import exp

    if isinstance(tree := parsed(condition), Exception):
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


def why_not_parsed(condition: str) -> str | None:
    """Returns why a text is no condition; None where it is one, as far as a parser without Spark
    can say.

    >>> why_not_parsed("a > 1"), why_not_parsed("a bigger")
    (None, 'only one expression is allowed')
    >>> why_not_parsed("case when a then 1")
    'Expected END after CASE (column 18)'
    """
    from sqlglot import exp
    from sqlglot.errors import ParseError

    tree = parsed(condition)
    if isinstance(tree, ParseError):
        first = tree.errors[0] if tree.errors else {}
        reason = str(first.get("description", "it doesn't parse")).partition(" for <class")[0]
        return f"{reason} (column {first.get('col', 1)})"
    if isinstance(tree, Exception):
        return "a quote isn't closed"
    # A name behind an expression would be its alias.
    return "only one expression is allowed" if isinstance(tree, exp.Alias) else None


def unresolved_columns(condition: str, columns: Collection[str]) -> list[str]:
    """Returns the columns that a Spark SQL condition names and a target with ``columns`` lacks.

    A condition with a query may name other tables' columns, so Spark alone can judge it.

    >>> unresolved_columns("amout > 1 and attrs.color is null", ["amount", "Attrs"])
    ['amout']
    >>> unresolved_columns("exists(items, x -> x > 1) and `a b` > localtimestamp", ["items"])
    ['a b']
    """
    from sqlglot import exp

    tree = parsed(condition)
    if isinstance(tree, Exception) or tree.find(exp.Query) is not None:
        return []
    there = {name.lower() for name in columns} | _MOMENTS
    return list(
        dict.fromkeys(
            column.parts[0].name
            for column in tree.find_all(exp.Column)
            if column.parts[0].name and there.isdisjoint(p.name.lower() for p in column.parts)
        )
    )


@lru_cache(16_384)  # A plan is asked several times what its result depends on.
def is_fixed(condition: str) -> bool:
    """Returns whether a Spark SQL condition is known to depend only on the row's values.

    >>> is_fixed("a > 1 and lower(b) like 'x%'")
    True
    >>> is_fixed("a > current_date()"), is_fixed("a > localtimestamp")
    (False, False)
    >>> is_fixed("a > date 'today'"), is_fixed("a in (select b from t)")
    (False, False)
    """
    from sqlglot import exp

    if isinstance(tree := parsed(condition), Exception):
        return False
    nodes = list(tree.walk())
    # Some functions without parentheses parse as columns; and words such as 'today' in a date
    # literal mean the query's date, which changes.
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
