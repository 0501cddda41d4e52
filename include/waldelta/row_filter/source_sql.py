"""Prints filters that the lake stores, for statements on the source.

Any writer of the lake could have changed such a text. So it is parsed and resolved as for Spark,
and printed from its tree: columns of the table, constants, and PostgreSQL's own functions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from psycopg import sql

from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.errors import FilterNotTranslatable
from waldelta.postgres import PgType
from waldelta.row_filter._signatures import FUNCTION_NAMES
from waldelta.row_filter.analyzed_filter import Collation, RowFilter, enums_of
from waldelta.row_filter.parse import (
    ArrayExpression,
    Call,
    Case,
    Cast,
    Collate,
    Column,
    Literal,
    Node,
    Quantified,
    Test,
    column_names,
    parse_analysed,
    place,
)
from waldelta.row_filter.resolve import ESCAPES, NAMED_COLLATIONS, resolve
from waldelta.row_filter.typed_tree import SHORT_NAMES, column_type
from waldelta.types import column_types

_NAMES = FUNCTION_NAMES | ESCAPES.keys()
_WORDS = frozenset({"AND", "OR", "NOT", "IS DISTINCT FROM"})
_SYNTAX = frozenset({"COALESCE", "NULLIF", "GREATEST", "LEAST"})
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


def source_sql(text: str, types: Mapping[str, PgType]) -> str:
    """Returns an analyzed filter as SQL for the source, printed from its syntax tree.

    ``types`` are those of the table's published columns. The result has the form that PostgreSQL
    prints, so it can be parsed again. Raises FilterNotTranslatable for a text that isn't one
    condition over these columns by functions with a signature.

    >>> types = {"a": PgType(23, -1, "integer"), "t": PgType(25, -1, "text")}
    >>> source_sql("((a > 5) AND (lower(t) <> 'it''s'::text))", types)
    '(("a" > 5) AND ("lower"("t") <> (\\'it\\'\\'s\\')::"text"))'
    """
    enums = enums_of(types)
    enum_names = frozenset(enum.name for enum in enums.values())
    node = parse_analysed(text, enum_names)
    stored = column_types(types, (), DEFAULT_TYPES)
    columns = {name: column_type(kind.name, stored[name]) for name, kind in types.items()}
    # Collations decide what Spark can reproduce. PostgreSQL itself evaluates this text.
    collations = dict.fromkeys(columns, Collation.CODE_POINT)
    names = column_names(node)
    resolve(RowFilter(text, text, names, collations, Collation.CODE_POINT, True, enums), columns)
    return _Printer(text, enum_names).sql(node)


@dataclass(frozen=True, slots=True)
class _Printer:
    """Prints the nodes of a resolved filter; every part has parentheses of its own."""

    text: str
    # By the names that the server has just printed.
    enums: frozenset[str]

    def sql(self, node: Node) -> str:
        """Returns a node as SQL."""
        match node:
            case Column(name):
                text = _quote_name(name)
            case Literal():
                text = self.literal(node)
            case Cast():
                text = self.cast(node)
            case Collate(operand, collation) if collation in NAMED_COLLATIONS:
                text = f"({self.sql(operand)} COLLATE {_quote_name(collation)})"
            case Test(operand, what, negated):
                text = f"({self.sql(operand)} IS {'NOT ' * negated}{what})"
            case Quantified(name, quantifier, operand, array) if _is_operator(name):
                text = f"({self.sql(operand)} {name} {quantifier} ({self.sql(array)}))"
            case ArrayExpression(elements):
                text = f"ARRAY[{self.listed(elements)}]"
            case Case():
                text = self.case(node)
            case Call():
                text = self.call(node)
            case _:
                raise self.refused(node)
        return text

    def refused(self, node: Node) -> FilterNotTranslatable:
        return FilterNotTranslatable(self.text, place(self.text, node.start), f"unexpected {node}")

    def listed(self, nodes: Iterable[Node], separator: str = ", ") -> str:
        return separator.join(map(self.sql, nodes))

    def literal(self, node: Literal) -> str:
        if node.kind == "string" and "\0" not in node.text:
            return sql.Literal(node.text).as_string(None).strip()
        if node.kind in ("true", "false", "null"):
            return node.kind if node.kind != "null" else "NULL"
        if node.kind != "number" or not _NUMBER.fullmatch(node.text):
            raise self.refused(node)
        return node.text

    def cast(self, node: Cast) -> str:
        kind, name = node.type, SHORT_NAMES.get(node.type.name)
        if kind.name in self.enums and not kind.modifiers:
            return f"({self.sql(node.operand)})::{kind.name}{'[]' * kind.is_array}"
        if name is None or (kind.modifiers and name == "interval"):
            raise self.refused(node)
        # SQL's character is one character where no length follows; bpchar has any length.
        modifiers = kind.modifiers or ((1,) if kind.name == "character" else ())
        size = f"({', '.join(f'{number:d}' for number in modifiers)})" if modifiers else ""
        return f"({self.sql(node.operand)})::{_quote_name(name)}{size}{'[]' * kind.is_array}"

    def case(self, node: Case) -> str:
        operand = f" {self.sql(node.operand)}" if node.operand else ""
        whens = " ".join(f"WHEN {self.sql(c)} THEN {self.sql(r)}" for c, r in node.whens)
        return f"CASE{operand} {whens} ELSE {self.sql(node.default)} END"

    def call(self, node: Call) -> str:
        arguments, name = node.arguments, node.name
        if name in _SYNTAX:
            return f"{name}({self.listed(arguments)})"
        if name in _WORDS or _is_operator(name):
            alone = f"({name} {self.sql(arguments[0])})"
            return alone if len(arguments) == 1 else f"({self.listed(arguments, f' {name} ')})"
        if name not in _NAMES:
            raise self.refused(node)
        return f"{_quote_name(name)}({self.listed(arguments)})"


def _is_operator(name: str) -> bool:
    return name in _NAMES and not name[0].isalnum()


def _quote_name(name: str) -> str:
    return sql.Identifier(name).as_string(None)
