"""The syntax tree of an analysed filter: what pg_get_expr prints, no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TypeName:
    """A type as printed: ``numeric(5,2)[]`` is name numeric, modifiers (5, 2), an array."""

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
