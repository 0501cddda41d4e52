"""Reads a filter as an engineer writes it: its tokens, and the columns and functions that it uses.

Only the text is judged here. The server decides what it means, and whether it is valid
(``resolve_filter``, ``publications.try_publications``). The tokens are sqlglot's, which takes a
fifth of a second to load: most idle checks would spend that for nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from waldelta.errors import ConfigError, FilterNotTranslatable

if TYPE_CHECKING:
    from sqlglot.tokenizer_core import Token

if TYPE_CHECKING:
    from sqlglot import exp
    from sqlglot.errors import ParseError


DIALECT = "postgres"
# What begins at a place: some characters of its line, up to the end of a word.
_NEAR = re.compile(r".{0,20}(?:(?<=\w)\w{1,63})?")


def tokenize(text: str) -> list[Token]:
    """Return the tokens of a filter; raises FilterNotTranslatable where a quote isn't closed."""
    import sqlglot
    from sqlglot.errors import SqlglotError

    try:
        return sqlglot.tokenize(text, read=DIALECT)
    except SqlglotError as err:
        raise FilterNotTranslatable(text, place(text, len(text)), "a quote is not closed") from err


def place(text: str, offset: int) -> str:
    """Return line and column of an offset, and the text that begins at it.

    >>> place("a > 1 and\\n b >>> 2", 11)
    "line 2, column 2 (near 'b >>> 2')"
    """
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    found = _NEAR.match(text, offset)
    near = found.group().rstrip() if found else ""
    return f"line {line}, column {column}" + (f" (near {near!r})" if near else " (its end)")


def parse_row_filter(text: str) -> tuple[str, ...]:
    """Read a filter expression as PostgreSQL does; return its columns, in order of appearance.

    Unquoted names are folded to lower case. Raises ConfigError with the position where it can't be
    read, or where it names a function, type or operator of a schema of users.

    >>> parse_row_filter("Origin = 'JFK' and \\"Dep\\" > 5")
    ('origin', 'Dep')
    """
    import sqlglot  # not by the module: see tokens.py
    from sqlglot import exp
    from sqlglot.errors import ParseError, SqlglotError

    try:
        for token in sqlglot.tokenize(text, read=DIALECT):
            if token.token_type.name == "SEMICOLON":
                raise _refused(
                    text, token.start, "one expression is wanted, not several statements"
                )
        expression: exp.Expr = sqlglot.parse_one(text, read=DIALECT, into=exp.Condition)
    except RecursionError:
        raise _refused(text, 0, "its parts are nested too deeply") from None
    except ParseError as err:
        raise _refused(text, *_place(text, err)) from err
    except SqlglotError as err:
        raise _refused(text, len(text), "a quote or comment is not closed") from err
    if expression.find(exp.Query, exp.Star) is not None:
        raise _refused(
            text,
            0,
            "a filter is one expression over the row's own columns, without subqueries or *",
        )
    _check_own(text)
    # find_all searches breadth first, but a message reads better in the order of the text.
    columns = (
        column.name if column.this.args.get("quoted") else column.name.lower()
        for column in expression.dfs()
        if isinstance(column, exp.Column)
    )
    return tuple(dict.fromkeys(columns))


def _check_own(text: str) -> None:
    """Raise ConfigError for a function, type or operator that isn't PostgreSQL's own.

    While the server parses a filter, it may call functions of such a type's owner: a domain's
    constraint for a value in an array's literal.
    """
    tokens, at = tokenize(text), 0
    kinds = [token.token_type.name for token in tokens]
    while at < len(tokens):
        # The token after a name and its parts.
        end = at + 1
        while kinds[end : end + 1] == ["DOT"]:
            end += 2
        is_called = (
            kinds[end : end + 1] == ["L_PAREN"]
            or kinds[max(at - 1, 0) : at] in (["DCOLON"], ["ALIAS"])
            or kinds[max(at - 2, 0) : at] == ["OPERATOR", "L_PAREN"]
        )
        if end > at + 1 and is_called and tokens[at].text.lower() != "pg_catalog":
            raise _refused(
                text,
                tokens[at].start,
                "only functions, types and operators of PostgreSQL's own are allowed",
            )
        at = end


# Functions that SQL calls without parentheses; none is immutable.
_WITHOUT_PARENTHESES = frozenset(
    {
        "current_catalog",
        "current_date",
        "current_role",
        "current_schema",
        "current_time",
        "current_timestamp",
        "current_user",
        "localtime",
        "localtimestamp",
        "session_user",
        "user",
    }
)
_IN_SQL = {
    "current_date": "now",
    "current_time": "now",
    "current_timestamp": "now",
    "localtime": "now",
    "localtimestamp": "now",
}


def functions_of(text: str) -> list[str]:
    """Return the names that a filter calls as functions, as in pg_proc.

    A keyword before a parenthesis is included.

    >>> functions_of("lower(v) = 'x' and at < current_date")
    ['lower', 'now']
    """
    tokens, found = tokenize(text), []
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        if token.token_type.name in ("STRING", "NUMBER"):
            continue
        is_quoted = text[token.start] == '"'
        name = token.text if is_quoted else token.text.lower()
        if after is not None and after.token_type.name == "L_PAREN":
            found.append(name)
        elif not is_quoted and name in _WITHOUT_PARENTHESES:
            found.append(_IN_SQL.get(name, name))
    return list(dict.fromkeys(found))


def _place(text: str, err: ParseError) -> tuple[int, str]:
    if not err.errors:
        return 0, "it is empty"
    first = err.errors[0]
    before = str(first.get("start_context") or "")
    offset = (
        text.rfind(str(first.get("highlight") or ""), 0)
        if not before
        else text.find(before) + len(before)
    )
    description = str(first.get("description") or "").split(" for <class")[0]
    return max(offset, 0), description[:1].lower() + description[1:]


def _refused(text: str, offset: int, reason: str) -> ConfigError:
    return ConfigError(f"filter {text!r} can't be read at {place(text, offset)}: {reason}")


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
