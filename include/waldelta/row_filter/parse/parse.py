"""Parses what pg_get_expr prints into a syntax tree.

The tokens are sqlglot's. Its parser isn't used: its trees have no positions, and have one node for
operators and functions that PostgreSQL distinguishes. The printed grammar is small, because every
operator has parentheses of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from waldelta.errors import FilterNotTranslatable
from waldelta.row_filter.parse.syntax import place, tokenize

_OPERATOR_CHARACTERS = frozenset("+-*/<>=~!@#%^&|`?")
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
class Column:
    """A column of the table."""

    name: str
    start: int


@dataclass(frozen=True, slots=True)
class Literal:
    """A constant without its cast; ``kind`` is number, string, true, false or null."""

    kind: str
    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Cast:
    """``operand::type``."""

    operand: Node
    type: TypeName
    start: int


@dataclass(frozen=True, slots=True)
class Call:
    """An operator or function; ``name`` as printed, in capitals for AND, OR, NOT, COALESCE, NULLIF,
    GREATEST, LEAST.
    """

    name: str
    arguments: tuple[Node, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Test:
    """``operand IS [NOT] what``; what is NULL, TRUE, FALSE or UNKNOWN."""

    operand: Node
    what: str
    negated: bool
    start: int


@dataclass(frozen=True, slots=True)
class Quantified:
    """``operand operator ANY|ALL (array)``."""

    operator: str
    quantifier: str
    operand: Node
    array: Node
    start: int


@dataclass(frozen=True, slots=True)
class ArrayExpression:
    """``ARRAY[…]``."""

    elements: tuple[Node, ...]
    start: int


@dataclass(frozen=True, slots=True)
class Case:
    """CASE, with or without an operand to compare with."""

    operand: Node | None
    whens: tuple[tuple[Node, Node], ...]
    default: Node
    start: int


@dataclass(frozen=True, slots=True)
class Collate:
    """``operand COLLATE name``."""

    operand: Node
    collation: str
    start: int


Node: TypeAlias = (
    Column | Literal | Cast | Call | Test | Quantified | ArrayExpression | Case | Collate
)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # word, quoted, string, number, operator, mark, end
    text: str
    start: int
    end: int


def parse_analysed(text: str, enums: Collection[str] = ()) -> Node:
    """Return the tree of an analysed filter.

    ``enums`` are the printed names of the types outside pg_catalog that may appear in it. Raises
    FilterNotTranslatable with the position of a part that isn't supported.

    >>> parse_analysed("(a IS NOT NULL)")
    Test(operand=Column(name='a', start=1), what='NULL', negated=True, start=3)
    """
    parser = _Parser(text, enums)
    try:
        node = parser.expression()
    except RecursionError:
        raise parser.refused(0, _TOO_DEEP) from None
    if parser.next.kind != "end":
        raise parser.unexpected()
    if _levels(node) > _MAX_DEPTH:
        raise parser.refused(0, _TOO_DEEP)
    return node


def _levels(node: Node) -> int:
    """Return how deep a tree is, such as one of casts of casts, for which the parser needs no
    recursion.
    """
    level, count = [node], 0
    while level:
        level, count = [child for one in level for child in children(one)], count + 1
    return count


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes below it, in the order of the text."""
    yield node
    for child in children(node):
        yield from walk(child)


def column_names(node: Node) -> tuple[str, ...]:
    """Return the columns that are used, in order of appearance."""
    return tuple(dict.fromkeys(n.name for n in walk(node) if isinstance(n, Column)))


def children(node: Node) -> tuple[Node, ...]:
    """Return the nodes directly below a node."""
    match node:
        case Column() | Literal():
            return ()
        case Cast() | Collate() | Test():
            return (node.operand,)
        case Call():
            return node.arguments
        case Quantified():
            return (node.operand, node.array)
        case ArrayExpression():
            return node.elements
        case Case():
            pairs = [part for when in node.whens for part in when]
            return (*((node.operand,) if node.operand else ()), *pairs, node.default)


class _Parser:
    """Recursive descent over the tokens; ``at`` is the next one."""

    def __init__(self, text: str, enums: Collection[str]) -> None:
        self.text, self.enums = text, enums
        self.tokens = _tokens(text)
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
        """Return whether these words and marks come next; quoted names and strings are never
        words.
        """
        ahead = self.tokens[self.at : self.at + len(texts)]
        return len(ahead) == len(texts) and all(
            token.kind in ("word", "mark", "operator") and token.text == text
            for token, text in zip(ahead, texts, strict=True)
        )

    def skip(self, *texts: str) -> bool:
        if found := self.is_next(*texts):
            self.at += len(texts)
        return found

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
        return parts[0] if len(parts) == 1 else Call(word, tuple(parts), start)

    def negation(self) -> Node:
        start = self.next.start
        if self.skip("NOT"):
            return Call("NOT", (self.negation(),), start)
        return self.predicate()

    def predicate(self) -> Node:
        left, start = self.operand(), self.next.start
        if self.skip("COLLATE"):
            return Collate(left, self.name(), start)
        if self.skip("AT", "TIME", "ZONE"):
            return Call("timezone", (self.operand(), left), start)
        if self.skip("IS"):
            return self.test(left, start)
        if self.next.kind != "operator":
            return left
        operator = self.take().text
        for quantifier in ("ANY", "ALL"):
            if self.skip(quantifier):
                return Quantified(operator, quantifier, left, self.parenthesised(), start)
        return Call(operator, (left, self.operand()), start)

    def test(self, tested: Node, start: int) -> Node:
        negated = self.skip("NOT")
        if self.skip("DISTINCT", "FROM"):
            distinct = Call("IS DISTINCT FROM", (tested, self.operand()), start)
            return Call("NOT", (distinct,), start) if negated else distinct
        if self.next.text not in ("NULL", "TRUE", "FALSE", "UNKNOWN"):
            raise self.refused(self.next.start, f"IS {self.next.text} isn't supported")
        return Test(tested, self.take().text, negated, start)

    def operand(self) -> Node:
        if self.next.kind == "operator":
            token = self.take()
            return Call(token.text, (self.operand(),), token.start)
        node = self.primary()
        while self.is_next("::"):
            start = self.take().start
            node = Cast(node, self.type_name(), start)
        return node

    def primary(self) -> Node:
        token = self.next
        if token.kind in ("string", "number"):
            return Literal(token.kind, self.take().text, token.start)
        if self.is_next("("):
            return self.parenthesised()
        if token.kind in ("word", "quoted") and self.tokens[self.at + 1].text == ".":
            raise self.refused(token.start, f"the function {self.printed_name()}, which {_NOT_OWN}")
        if token.kind == "quoted" and self.tokens[self.at + 1].text != "(":
            return Column(self.take().text, token.start)
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
            return Literal(token.text.lower(), token.text, token.start)
        if token.kind == "word" and token.text == "CASE":
            return self.case(token.start)
        if token.kind == "word" and token.text == "ARRAY" and self.is_next("["):
            return ArrayExpression(self.listed("[", "]"), token.start)
        if not self.is_next("("):
            if token.text != token.text.lower():
                self.at -= 1
                raise self.unexpected()
            return Column(token.text, token.start)
        if token.kind == "word" and (special := _SYNTAX.get(token.text)) is not None:
            self.expect("(")
            node = special(self, token.start)
            self.expect(")")
            return node
        if token.kind == "word" and token.text.isupper() and token.text not in _LAZY:
            raise self.refused(token.start, f"{token.text} isn't supported")
        return Call(token.text, self.listed("(", ")"), token.start)

    def listed(self, opening: str, closing: str) -> tuple[Node, ...]:
        self.expect(opening)
        found: list[Node] = []
        while not self.skip(closing):
            if found:
                self.expect(",")
            found.append(self.expression())
        return tuple(found)

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
        return Case(operand, tuple(whens), default, start)

    def substring(self, start: int) -> Node:
        parts = [self.expression()]
        parts += [self.expression() for word in ("FROM", "FOR") if self.skip(word)]
        return Call("substring", tuple(parts), start)

    def position(self, start: int) -> Node:
        wanted = self.parenthesised()
        self.expect("IN")
        return Call("strpos", (self.parenthesised(), wanted), start)

    def extract(self, start: int) -> Node:
        field = self.take()
        self.expect("FROM")
        return Call(
            "extract",
            (Literal("string", field.text.lower(), field.start), self.expression()),
            start,
        )

    def trim(self, start: int) -> Node:
        name = next(
            (
                n
                for w, n in (("BOTH", "btrim"), ("LEADING", "ltrim"), ("TRAILING", "rtrim"))
                if self.skip(w)
            ),
            None,
        )
        if name is None:
            raise self.unexpected()
        characters = () if self.is_next("FROM") else (self.expression(),)
        self.expect("FROM")
        return Call(name, (self.expression(), *characters), start)

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
        words = [name]
        modifiers: tuple[int, ...] = ()
        while True:
            if self.next.kind == "word" and self.next.text in _TYPE_WORDS:
                words.append(self.take().text)
            elif self.is_next("(") and not modifiers:
                modifiers = self.modifiers()
            else:
                break
        is_array = False
        while self.skip("[", "]"):
            is_array = True
        return TypeName(" ".join(words), modifiers, is_array)

    def modifiers(self) -> tuple[int, ...]:
        numbers = []
        for node in self.listed("(", ")"):
            if not isinstance(node, Literal) or not node.text.isdigit():
                raise self.refused(node.start, "a type modifier that isn't a number")
            numbers.append(int(node.text))
        return tuple(numbers)


_SYNTAX: dict[str, Callable[[_Parser, int], Node]] = {
    "SUBSTRING": _Parser.substring,
    "POSITION": _Parser.position,
    "EXTRACT": _Parser.extract,
    "TRIM": _Parser.trim,
}


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for token in tokenize(text):
        source = text[token.start : token.end + 1]
        new = _Token(_kind(source, token.token_type.name), token.text, token.start, token.end + 1)
        if new.kind in ("operator", "mark", "word"):
            new = _Token(new.kind, source, new.start, new.end)
        last = tokens[-1] if tokens else None
        # PostgreSQL's operators are any sequence of these characters, however sqlglot splits them.
        if last and last.kind == new.kind == "operator" and last.end == new.start:
            tokens[-1] = _Token("operator", last.text + new.text, last.start, new.end)
        else:
            tokens.append(new)
    return [*_split_marks(tokens), _Token("end", "", len(text), len(text))]


def _split_marks(tokens: list[_Token]) -> Iterator[_Token]:
    for token in tokens:
        if token.kind == "mark" and token.text not in ("::", "(", ")"):
            yield from (
                _Token("mark", c, token.start + k, token.start + k + 1)
                for k, c in enumerate(token.text)
            )
        else:
            yield token


def _kind(source: str, sqlglot_type: str) -> str:
    if sqlglot_type == "STRING" and source.startswith("'"):
        return "string"
    if sqlglot_type == "NUMBER" and source[:1].isdigit():
        return "number"
    if source.startswith('"'):
        return "quoted"
    if set(source) <= _OPERATOR_CHARACTERS:
        return "operator"
    return "word" if source[:1].isalpha() or source[:1] == "_" else "mark"
