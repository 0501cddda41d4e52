"""A domain's constraint as a condition on a column of that domain."""

from __future__ import annotations

from waldelta.row_filter.parse.tokens import tokenize


def of_column(expression: str, column: str) -> str:
    """Return the constraint, as the catalogs print it, with the column in place of VALUE.

    Raises FilterNotTranslatable.

    >>> of_column("((VALUE)::text <> 'VALUE'::text)", "a b")
    '(("a b")::text <> \\'VALUE\\'::text)'
    """
    quoted = '"' + column.replace('"', '""') + '"'
    parts, done = [], 0
    for token in tokenize(expression):
        if expression[token.start : token.end + 1] == "VALUE":
            parts += [expression[done : token.start], quoted]
            done = token.end + 1
    return "".join([*parts, expression[done:]])
