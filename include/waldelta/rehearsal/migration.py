"""The statements of migration files, each with its place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sqlglot.dialects.postgres import Postgres
from sqlglot.errors import TokenError
from sqlglot.tokenizer_core import Token, TokenType

from waldelta.errors import ConfigError

_COPY = re.compile(r"copy\b.*\b(?:from\s+stdin|to\s+stdout)\b", re.IGNORECASE | re.DOTALL)
_PARENTHESES = {TokenType.L_PAREN: 1, TokenType.R_PAREN: -1}


@dataclass(frozen=True, slots=True)
class SqlCommand:
    """One SQL statement of a file, without comments before it and without its semicolon."""

    text: str
    file: str
    line: int

    @property
    def place(self) -> str:
        """The file and the line, as editors and compilers write them."""
        return f"{self.file}:{self.line}"


def read_migrations(paths: Sequence[Path]) -> list[SqlCommand]:
    """Returns the statements of the files, in the order of the files.

    Raises ConfigError as read_sql() and statements() do, and for a file without a statement.
    """
    commands: list[SqlCommand] = []
    for path in paths:
        part = statements(read_sql(path), str(path))
        if not part:
            raise ConfigError(f"{path} has no SQL statement")
        commands += part
    return commands


def read_sql(path: Path) -> str:
    """Returns the text of a file; raises ConfigError where it can't be read, or isn't UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as err:
        head = path.read_bytes()[: err.start]
        raise ConfigError(
            f"{path}:{head.count(10) + 1}: the file isn't UTF-8: save it in UTF-8"
        ) from None
    except OSError as err:
        raise ConfigError(f"{path} can't be read: {err.strerror}") from None


def statements(text: str, file: str) -> list[SqlCommand]:
    """Returns the statements of SQL as a client sends it to PostgreSQL.

    Raises ConfigError for a string or comment without an end, a command of psql, and a COPY whose
    rows psql reads or prints.
    """
    try:
        tokens = Postgres.Tokenizer().tokenize(text)
    except TokenError:
        raise ConfigError(
            f"{file}:{_open_line(text)}: a quote, comment or dollar quote that begins here has no"
            " end"
        ) from None
    commands = [
        SqlCommand(
            text[first.start : len(text) if end is None else end.start].strip(), file, first.line
        )
        for first, end in _spans(tokens)
    ]
    for command in commands:
        if _COPY.match(command.text):
            raise ConfigError(
                f"{command.place}: the rows of COPY FROM stdin and COPY TO stdout pass through"
                " psql: write INSERTs, and of a dump pass the schema alone (pg_dump --schema-only)"
            )
    for token in tokens:
        if text[token.start] == "\\":
            line = text[token.start :].split("\n", 1)[0].strip()
            raise ConfigError(
                f"{file}:{token.line}: {line} is a command of psql, not SQL: leave it out, and"
                " pass files that it includes as files of their own"
            )
    return commands


def _open_line(text: str) -> int:
    """Returns the line where the quote or comment begins that has no end: the lines before it are
    whole.
    """
    lines = text.splitlines(keepends=True)
    for number in range(len(lines) - 1, 0, -1):
        with suppress(TokenError):
            Postgres.Tokenizer().tokenize("".join(lines[:number]))
            return number + 1
    return 1


def _spans(tokens: Sequence[Token]) -> Iterator[tuple[Token, Token | None]]:
    """Yields each statement's first token, and its semicolon, None at the end of the file.

    Semicolons in parentheses and in a function's body of standard SQL (BEGIN ATOMIC) end no
    statement.
    """
    first: Token | None = None
    depth = parentheses = 0
    for token, follower in pairwise([*tokens, None]):
        if token is None:
            continue
        word = token.text.lower()
        if follower is not None and word == "begin" and follower.text.lower() == "atomic":
            depth = 1
        elif depth and token.token_type in (TokenType.CASE, TokenType.END):
            depth += 1 if token.token_type is TokenType.CASE else -1
        parentheses += _PARENTHESES.get(token.token_type, 0)
        if token.token_type is TokenType.SEMICOLON and not depth and parentheses <= 0:
            if first is not None:
                yield first, token
            first, parentheses = None, 0
        elif first is None:
            first = token
    if first is not None:
        yield first, None
