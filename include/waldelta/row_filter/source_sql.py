"""Prints filters that the lake stores, for statements on the source.

Any writer of the lake could have changed such a text. So it is parsed and resolved as for Spark,
and printed from its tree: columns of the table, constants, and PostgreSQL's own functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from psycopg import sql

from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.errors import FilterNotTranslatable
from waldelta.postgres import PgType
from waldelta.row_filter._signatures import FUNCTION_NAMES
from waldelta.row_filter.analyzed_filter import Collation, RowFilter
from waldelta.row_filter.parse.parse import (
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
    TypeName,
    column_names,
    parse_analysed,
)
from waldelta.row_filter.parse.syntax import place
from waldelta.row_filter.resolve import ESCAPES, NAMED_COLLATIONS, resolve
from waldelta.row_filter.typed_tree import column_type, short_name
from waldelta.types import column_types

_NAMES = FUNCTION_NAMES | ESCAPES.keys()
_LOGIC = frozenset({"AND", "OR"})
_SYNTAX = frozenset({"COALESCE", "NULLIF", "GREATEST", "LEAST"})
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


def source_sql(text: str, types: Mapping[str, PgType]) -> str:
    """Return an analyzed filter as SQL for the source, printed from its syntax tree.

    ``types`` are those of the table's published columns. The result has the form that PostgreSQL
    prints, so it can be parsed again. Raises FilterNotTranslatable for a text that isn't one
    condition over these columns by functions with a signature.

    >>> types = {"a": PgType(23, -1, "integer"), "t": PgType(25, -1, "text")}
    >>> source_sql("((a > 5) AND (lower(t) <> 'it''s'::text))", types)
    '(("a" > 5) AND ("lower"("t") <> (\\'it\\'\\'s\\')::"text"))'
    """
    node = parse_analysed(text)
    stored = column_types(types, (), DEFAULT_TYPES)
    columns = {name: column_type(kind.name, stored[name].spark) for name, kind in types.items()}
    # Collations decide what Spark can reproduce. PostgreSQL itself evaluates this text.
    known = dict.fromkeys(columns, Collation.CODE_POINT)
    names = column_names(node)
    resolve(RowFilter(text, text, names, known, Collation.CODE_POINT, is_utf8=True), columns)
    return _Printer(text).sql(node)


class _Printer:
    """Prints the nodes of a resolved filter; every part has parentheses of its own."""

    def __init__(self, text: str) -> None:
        self._text = text

    def sql(self, node: Node) -> str:
        """Return a node as SQL."""
        return _PRINTED[type(node)](self, node)

    def refused(self, node: Node | TypeName, start: int) -> FilterNotTranslatable:
        return FilterNotTranslatable(self._text, place(self._text, start), f"unexpected {node}")

    def listed(self, nodes: Iterable[Node], separator: str = ", ") -> str:
        return separator.join(map(self.sql, nodes))

    def column(self, node: Column) -> str:
        return _quoted(node.name)

    def literal(self, node: Literal) -> str:
        if node.kind == "string" and "\0" not in node.text:
            return _string(node.text)
        if node.kind == "number" and _NUMBER.fullmatch(node.text):
            return node.text
        if node.kind in ("true", "false", "null"):
            return node.kind if node.kind != "null" else "NULL"
        raise self.refused(node, node.start)

    def cast(self, node: Cast) -> str:
        kind, name = node.type, short_name(node.type.name)
        if name is None or (kind.modifiers and name == "interval"):
            raise self.refused(node, node.start)
        # SQL's character is one character where no length follows; bpchar has any length.
        modifiers = kind.modifiers or ((1,) if kind.name == "character" else ())
        size = f"({', '.join(f'{number:d}' for number in modifiers)})" if modifiers else ""
        return f"({self.sql(node.operand)})::{_quoted(name)}{size}{'[]' * kind.is_array}"

    def collate(self, node: Collate) -> str:
        if node.collation not in NAMED_COLLATIONS:
            raise self.refused(node, node.start)
        return f"({self.sql(node.operand)} COLLATE {_quoted(node.collation)})"

    def test(self, node: Test) -> str:
        return f"({self.sql(node.operand)} IS {'NOT ' * node.negated}{node.what})"

    def quantified(self, node: Quantified) -> str:
        operator = self.operator(node, node.operator)
        return f"({self.sql(node.operand)} {operator} {node.quantifier} ({self.sql(node.array)}))"

    def operator(self, node: Node, name: str) -> str:
        if name not in _NAMES or name[0].isalnum():
            raise self.refused(node, node.start)
        return name

    def array(self, node: ArrayExpression) -> str:
        return f"ARRAY[{self.listed(node.elements)}]"

    def case(self, node: Case) -> str:
        operand = f" {self.sql(node.operand)}" if node.operand else ""
        whens = " ".join(f"WHEN {self.sql(c)} THEN {self.sql(r)}" for c, r in node.whens)
        return f"CASE{operand} {whens} ELSE {self.sql(node.default)} END"

    def call(self, node: Call) -> str:
        arguments, name = node.arguments, node.name
        if name in _LOGIC:
            return f"({self.listed(arguments, f' {name} ')})"
        if name == "NOT":
            return f"(NOT {self.sql(arguments[0])})"
        if name == "IS DISTINCT FROM":
            return f"({self.listed(arguments, ' IS DISTINCT FROM ')})"
        if name in _SYNTAX:
            return f"{name}({self.listed(arguments)})"
        if name not in _NAMES:
            raise self.refused(node, node.start)
        if name[0].isalnum():
            return f"{_quoted(name)}({self.listed(arguments)})"
        parts = [self.sql(argument) for argument in arguments]
        return f"({name} {parts[0]})" if len(parts) == 1 else f"({f' {name} '.join(parts)})"


def _quoted(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def _string(text: str) -> str:
    return sql.Literal(text).as_string(None).strip()


_PRINTED: dict[type, Callable[[_Printer, Any], str]] = {
    Column: _Printer.column,
    Literal: _Printer.literal,
    Cast: _Printer.cast,
    Collate: _Printer.collate,
    Test: _Printer.test,
    Quantified: _Printer.quantified,
    ArrayExpression: _Printer.array,
    Case: _Printer.case,
    Call: _Printer.call,
}
