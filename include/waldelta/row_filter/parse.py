"""Parses filters: as an engineer writes them, and as PostgreSQL prints them analysed.

sqlglot reads the text as written; the server decides what it means (``resolve_filter``,
``publications.try_publications``). It takes a fifth of a second to load, which most idle checks
don't need. What pg_get_expr prints becomes a syntax tree of its own: sqlglot's have no positions,
and one node for operators and functions that PostgreSQL distinguishes. Its grammar is small,
because every operator has parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from waldelta.errors import ConfigError, FilterNotTranslatable

if TYPE_CHECKING:
    from sqlglot import exp
    from sqlglot.errors import ParseError
    from sqlglot.tokenizer_core import Token

DIALECT = "postgres"
# What begins at a place: some characters of its line, up to the end of a word.
_NEAR = re.compile(r".{0,20}(?:(?<=\w)\w{1,63})?")


def tokenize(text: str) -> list[Token]:
    """Returns the tokens of a filter; raises FilterNotTranslatable where a quote isn't closed."""
    import sqlglot
    from sqlglot.errors import SqlglotError

    try:
        return sqlglot.tokenize(text, read=DIALECT)
    except SqlglotError as err:
        raise FilterNotTranslatable(text, place(text, len(text)), "a quote is not closed") from err


def place(text: str, offset: int) -> str:
    """Returns line and column of an offset, and the text that begins at it.

    >>> place("a > 1 and\\n b >>> 2", 11)
    "line 2, column 2 (near 'b >>> 2')"
    """
    line = text.count("\n", 0, offset) + 1
    column = offset - (text.rfind("\n", 0, offset) + 1) + 1
    match = _NEAR.match(text, offset)
    near = match.group().rstrip() if match else ""
    return f"line {line}, column {column}" + (f" (near {near!r})" if near else " (its end)")


def parse_row_filter(text: str) -> tuple[str, ...]:
    """Read a filter expression as PostgreSQL does; return its columns, in order of appearance.

    Unquoted names are folded to lower case. Raises ConfigError with the position where it can't be
    read, or where it names a function, type or operator of a schema of users.

    >>> parse_row_filter("Origin = 'JFK' and \\"Dep\\" > 5")
    ('origin', 'Dep')
    """
    import sqlglot
    from sqlglot import exp
    from sqlglot.errors import ParseError, SqlglotError

    try:
        for token in sqlglot.tokenize(text, read=DIALECT):
            if token.token_type.name == "SEMICOLON":
                raise _refusal(
                    text, token.start, "one expression is wanted, not several statements"
                )
        expression: exp.Expr = sqlglot.parse_one(text, read=DIALECT, into=exp.Condition)
    except RecursionError:
        raise _refusal(text, 0, "its parts are nested too deeply") from None
    except ParseError as err:
        raise _refusal(text, *_place(text, err)) from err
    except SqlglotError as err:
        raise _refusal(text, len(text), "a quote or comment is not closed") from err
    if expression.find(exp.Query, exp.Star) is not None:
        detail = "a filter is one expression over the row's own columns, without subqueries or *"
        raise _refusal(text, 0, detail)
    _check_own(text)
    # find_all searches breadth first, but a message reads better in the order of the text.
    columns = (
        column.name if column.this.args.get("quoted") else column.name.lower()
        for column in expression.dfs()
        if isinstance(column, exp.Column)
    )
    return tuple(dict.fromkeys(columns))


def _check_own(text: str) -> None:
    """Raise ConfigError for a function, type or operator that isn't PostgreSQL's own: parsing a
    domain's value in an array's literal calls functions of the domain's owner.
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
            detail = "only functions, types and operators of PostgreSQL's own are allowed"
            raise _refusal(text, tokens[at].start, detail)
        at = end


# Functions that SQL calls without parentheses; none is immutable.
_AS_NOW = frozenset(
    {"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"}
)
_WITHOUT_PARENTHESES = _AS_NOW | {
    "current_catalog", "current_role", "current_schema", "current_user", "session_user", "user",
}  # fmt: skip


def functions_of(text: str) -> list[str]:
    """Returns the names that a filter calls as functions, and keywords before a parenthesis.

    >>> functions_of("lower(v) = 'x' and at < current_date")
    ['lower', 'now']
    """
    tokens, names = tokenize(text), []
    for token, after in zip(tokens, [*tokens[1:], None], strict=True):
        is_quoted = text[token.start] == '"'
        name = token.text if is_quoted else token.text.lower()
        if token.token_type.name in ("STRING", "NUMBER"):
            continue
        if after is not None and after.token_type.name == "L_PAREN":
            names.append(name)
        elif not is_quoted and name in _WITHOUT_PARENTHESES:
            names.append("now" if name in _AS_NOW else name)
    return list(dict.fromkeys(names))


def _place(text: str, err: ParseError) -> tuple[int, str]:
    if not err.errors:
        return 0, "it is empty"
    first = err.errors[0]
    context = str(first.get("start_context") or "")
    offset = (
        text.rfind(str(first.get("highlight") or ""), 0)
        if not context
        else text.find(context) + len(context)
    )
    description = str(first.get("description") or "").split(" for <class")[0]
    return max(offset, 0), description[:1].lower() + description[1:]


def _refusal(text: str, offset: int, reason: str) -> ConfigError:
    return ConfigError(f"filter {text!r} can't be read at {place(text, offset)}: {reason}")


def of_column(expression: str, column: str) -> str:
    """Returns the constraint, as the catalogs print it, with the column in place of VALUE.

    >>> of_column("((VALUE)::text <> 'VALUE'::text)", "a b")
    '(("a b")::text <> \\'VALUE\\'::text)'
    """
    quoted = '"' + column.replace('"', '""') + '"'
    return _TOKENS.sub(lambda token: quoted if token[0] == "VALUE" else token[0], expression)


# --- what PostgreSQL prints
# Words that continue a type's name after its first word.
_TYPE_WORDS = frozenset({"varying", "precision", "without", "with", "time", "zone"})
_LAZY = frozenset({"COALESCE", "NULLIF", "GREATEST", "LEAST"})
_MAX_DEPTH = 100
_NOT_OWN = "is not one of PostgreSQL's own"
_TOO_DEEP = f"more than {_MAX_DEPTH} levels of parts in each other"


@dataclass(frozen=True, slots=True)
class TypeName:
    """A type as printed: ``numeric(5,2)[]`` is name numeric, modifiers (5, 2), an array.

    The name of an enum has its schema, and quotes where PostgreSQL prints them.
    """

    name: str
    modifiers: tuple[int, ...] = ()
    is_array: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """A part of a filter. Two are equal that differ only in their place, ``start``."""

    start: int = field(kw_only=True, compare=False)


@dataclass(frozen=True, slots=True)
class Column(Node):
    """A column of the table."""

    name: str


@dataclass(frozen=True, slots=True)
class Literal(Node):
    """A constant without its cast; ``kind`` is number, string, true, false or null."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Cast(Node):
    """``operand::type``."""

    operand: Node
    type: TypeName


@dataclass(frozen=True, slots=True)
class Call(Node):
    """An operator or function; ``name`` as printed, in capitals for AND, OR, NOT, COALESCE, NULLIF,
    GREATEST, LEAST.
    """

    name: str
    arguments: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Test(Node):
    """``operand IS [NOT] what``; what is NULL, TRUE, FALSE or UNKNOWN."""

    operand: Node
    what: str
    negated: bool


@dataclass(frozen=True, slots=True)
class Quantified(Node):
    """``operand operator ANY|ALL (array)``."""

    operator: str
    quantifier: str
    operand: Node
    array: Node


@dataclass(frozen=True, slots=True)
class ArrayExpression(Node):
    """``ARRAY[…]``."""

    elements: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Case(Node):
    """CASE, with or without an operand to compare with."""

    operand: Node | None
    whens: tuple[tuple[Node, Node], ...]
    default: Node


@dataclass(frozen=True, slots=True)
class Collate(Node):
    """``operand COLLATE name``."""

    operand: Node
    collation: str


def parse_analysed(
    text: str, enums: Collection[str] = (), names: Mapping[str, str] = MappingProxyType({})
) -> Node:
    """Returns the tree of an analysed filter.

    ``enums`` are the printed names of the types outside pg_catalog that may appear in it. ``names``
    are the names of columns in the tree, where these differ. Raises FilterNotTranslatable with the
    position of a part that isn't supported.

    >>> parse_analysed("(a IS NOT NULL)")
    Test(start=3, operand=Column(start=1, name='a'), what='NULL', negated=True)
    """
    parser = _Parser(text, enums, names)
    try:
        node = parser.expression()
    except RecursionError:
        raise parser.refused(0, _TOO_DEEP) from None
    if parser.next.kind != "end":
        raise parser.unexpected()
    # The parser needs no recursion for casts of casts.
    level, depth = [node], 0
    while level:
        level, depth = [child for parent in level for child in children(parent)], depth + 1
    if depth > _MAX_DEPTH:
        raise parser.refused(0, _TOO_DEEP)
    return node


def walk(node: Node) -> Iterator[Node]:
    """Yields a node and all nodes below it, in the order of the text."""
    yield node
    for child in children(node):
        yield from walk(child)


def column_names(node: Node) -> tuple[str, ...]:
    """Returns the columns that are used, in order of appearance."""
    return tuple(dict.fromkeys(n.name for n in walk(node) if isinstance(n, Column)))


def children(node: Node) -> list[Node]:
    """Returns the nodes directly below a node."""
    return list(_nodes(tuple(getattr(node, part.name) for part in fields(node))))


def _nodes(value: Any) -> Iterator[Node]:
    if isinstance(value, Node):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _nodes(part)


# The groups are kinds of tokens. Operators are any sequence of these characters. A string has no
# escapes, since pg_get_expr prints it for standard_conforming_strings, and there are no comments.
_TOKENS = re.compile(
    r"""(?P<string>'(?:[^']|'')*')
    | (?P<quoted>"(?:[^"]|"")+")
    | (?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)
    | (?P<word>[^\W\d][\w$]*)
    | (?P<operator>[-+*/<>=~!@#%^&|`?]+)
    | (?P<mark>::|\S)""",
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    start: int
    end: int


def _tokens(text: str) -> Iterator[_Token]:
    for match in _TOKENS.finditer(text):
        kind, printed = str(match.lastgroup), match[0]
        if printed in ("'", '"'):
            raise FilterNotTranslatable(text, place(text, len(text)), "a quote is not closed")
        if kind in ("string", "quoted"):
            printed = printed[1:-1].replace(printed[0] * 2, printed[0])
        yield _Token(kind, printed, match.start(), match.end())
    yield _Token("end", "", len(text), len(text))


class _Parser:
    """Recursive descent over the tokens; ``at`` is the next one."""

    def __init__(self, text: str, enums: Collection[str], names: Mapping[str, str]) -> None:
        self.text, self.enums, self.names = text, enums, names
        self.tokens = list(_tokens(text))
        self.at = self.depth = 0

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def unexpected(self) -> FilterNotTranslatable:
        start = self.next.start
        if self.skip("OPERATOR", "("):
            name = self.text[self.next.start : self.text.find(")", start)]
            return self.refused(start, f"the operator {name}, which {_NOT_OWN}")
        return self.refused(
            self.next.start, f"{self.next.text or 'the end'!r} isn't supported here"
        )

    def refused(self, start: int, reason: str) -> FilterNotTranslatable:
        return FilterNotTranslatable(self.text, place(self.text, start), reason)

    def take(self) -> _Token:
        self.at += 1
        return self.tokens[self.at - 1]

    def is_next(self, *texts: str) -> bool:
        """Whether these words and marks come next, of which no quoted name or string is one."""
        ahead = self.tokens[self.at : self.at + len(texts)]
        return len(ahead) == len(texts) and all(
            token.kind in ("word", "mark", "operator") and token.text == text
            for token, text in zip(ahead, texts, strict=True)
        )

    def skip(self, *texts: str) -> bool:
        is_next = self.is_next(*texts)
        self.at += len(texts) * is_next
        return is_next

    def expect(self, *texts: str) -> None:
        for text in texts:
            if not self.skip(text):
                raise self.unexpected()

    def expression(self) -> Node:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise self.refused(self.next.start, _TOO_DEEP)
        node = self.logic("OR", lambda: self.logic("AND", self.negation))
        self.depth -= 1
        return node

    def logic(self, word: str, part: Callable[[], Node]) -> Node:
        parts, start = [part()], self.next.start
        while self.skip(word):
            parts.append(part())
        return parts[0] if len(parts) == 1 else Call(word, tuple(parts), start=start)

    def negation(self) -> Node:
        start = self.next.start
        if self.skip("NOT"):
            return Call("NOT", (self.negation(),), start=start)
        return self.predicate()

    def predicate(self) -> Node:
        left, start = self.operand(), self.next.start
        if self.skip("COLLATE"):
            return Collate(left, self.name(), start=start)
        if self.skip("AT", "TIME", "ZONE"):
            return Call("timezone", (self.operand(), left), start=start)
        if self.skip("IS"):
            return self.test(left, start)
        if self.next.kind != "operator":
            return left
        operator = self.take().text
        for quantifier in ("ANY", "ALL"):
            if self.skip(quantifier):
                return Quantified(operator, quantifier, left, self.parenthesised(), start=start)
        return Call(operator, (left, self.operand()), start=start)

    def test(self, tested: Node, start: int) -> Node:
        negated = self.skip("NOT")
        if self.skip("DISTINCT", "FROM"):
            distinct = Call("IS DISTINCT FROM", (tested, self.operand()), start=start)
            return Call("NOT", (distinct,), start=start) if negated else distinct
        if self.next.text not in ("NULL", "TRUE", "FALSE", "UNKNOWN"):
            raise self.refused(self.next.start, f"IS {self.next.text} isn't supported")
        return Test(tested, self.take().text, negated, start=start)

    def operand(self) -> Node:
        if self.next.kind == "operator":
            token = self.take()
            return Call(token.text, (self.operand(),), start=token.start)
        node = self.primary()
        while self.is_next("::"):
            start = self.take().start
            node = Cast(node, self.type_name(), start=start)
        return node

    def primary(self) -> Node:
        token = self.next
        if token.kind in ("string", "number"):
            return Literal(token.kind, self.take().text, start=token.start)
        if self.is_next("("):
            return self.parenthesised()
        if token.kind in ("word", "quoted") and self.tokens[self.at + 1].text == ".":
            raise self.refused(token.start, f"the function {self.printed_name()}, which {_NOT_OWN}")
        if token.kind == "quoted" and self.tokens[self.at + 1].text != "(":
            return self.column(self.take())
        if token.kind in ("word", "quoted"):
            return self.word()
        raise self.unexpected()

    def parenthesised(self) -> Node:
        self.expect("(")
        node = self.expression()
        self.expect(")")
        return node

    def word(self) -> Node:
        token = self.take()
        if token.kind == "word" and token.text in ("true", "false", "NULL"):
            return Literal(token.text.lower(), token.text, start=token.start)
        if token.kind == "word" and token.text == "CASE":
            return self.case(token.start)
        if token.kind == "word" and token.text == "ARRAY" and self.is_next("["):
            return ArrayExpression(self.listed("[", "]"), start=token.start)
        if not self.is_next("("):
            if token.text != token.text.lower():
                self.at -= 1
                raise self.unexpected()
            return self.column(token)
        if token.kind == "word" and (special := _SYNTAX.get(token.text)) is not None:
            self.expect("(")
            node = special(self, token.start)
            self.expect(")")
            return node
        if token.kind == "word" and token.text.isupper() and token.text not in _LAZY:
            raise self.refused(token.start, f"{token.text} isn't supported")
        return Call(token.text, self.listed("(", ")"), start=token.start)

    def column(self, token: _Token) -> Column:
        return Column(self.names.get(token.text, token.text), start=token.start)

    def listed(self, opening: str, closing: str) -> tuple[Node, ...]:
        self.expect(opening)
        parts: list[Node] = []
        while not self.skip(closing):
            if parts:
                self.expect(",")
            parts.append(self.expression())
        return tuple(parts)

    def case(self, start: int) -> Node:
        operand = None if self.is_next("WHEN") else self.expression()
        whens = []
        while self.skip("WHEN"):
            condition = self.expression()
            self.expect("THEN")
            whens.append((condition, self.expression()))
        self.expect("ELSE")
        default = self.expression()
        self.expect("END")
        return Case(operand, tuple(whens), default, start=start)

    def substring(self, start: int) -> Node:
        parts = [self.expression()]
        parts += [self.expression() for word in ("FROM", "FOR") if self.skip(word)]
        return Call("substring", tuple(parts), start=start)

    def position(self, start: int) -> Node:
        part = self.parenthesised()
        self.expect("IN")
        return Call("strpos", (self.parenthesised(), part), start=start)

    def extract(self, start: int) -> Node:
        token = self.take()
        self.expect("FROM")
        name = Literal("string", token.text.lower(), start=token.start)
        return Call("extract", (name, self.expression()), start=start)

    def trim(self, start: int) -> Node:
        name = _TRIMS.get(self.next.text)
        if name is None:
            raise self.unexpected()
        self.take()
        characters = () if self.is_next("FROM") else (self.expression(),)
        self.expect("FROM")
        return Call(name, (self.expression(), *characters), start=start)

    def name(self) -> str:
        token = self.take()
        if token.kind not in ("word", "quoted"):
            self.at -= 1
            raise self.unexpected()
        return token.text

    def printed_name(self) -> str:
        """Take a name that may have a schema; return it as PostgreSQL prints it."""
        start = self.next.start
        self.name()
        while self.skip("."):
            self.name()
        return self.text[start : self.tokens[self.at - 1].end]

    def type_name(self) -> TypeName:
        start = self.next.start
        # A temporary table with the name of a type makes PostgreSQL print the type's schema.
        name = self.printed_name().removeprefix("pg_catalog.")
        if "." in name and name not in self.enums:
            raise self.refused(
                start,
                f"the type {name}, which is neither one of PostgreSQL's own nor a column's enum",
            )
        modifiers: tuple[int, ...] = ()
        while (is_word := any(map(self.is_next, _TYPE_WORDS))) or self.is_next("("):
            if is_word:
                name += f" {self.take().text}"
            else:
                modifiers = self.modifiers()
        return TypeName(name, modifiers, is_array=self.skip("[", "]"))

    def modifiers(self) -> tuple[int, ...]:
        numbers = []
        for node in self.listed("(", ")"):
            if not isinstance(node, Literal) or not node.text.isdigit():
                raise self.refused(node.start, "a type modifier that isn't a number")
            numbers.append(int(node.text))
        return tuple(numbers)


_TRIMS = {"BOTH": "btrim", "LEADING": "ltrim", "TRAILING": "rtrim"}
_SYNTAX: dict[str, Callable[[_Parser, int], Node]] = {
    "SUBSTRING": _Parser.substring,
    "POSITION": _Parser.position,
    "EXTRACT": _Parser.extract,
    "TRIM": _Parser.trim,
}
