"""Gives every part of an analysed filter its type and its row in the table of signatures, or
refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from waldelta.row_filter import _numeric as numeric
from waldelta.row_filter._datetime_fields import check_moment
from waldelta.row_filter._operands import Operands
from waldelta.row_filter._patterns import PatternRefused, java_regex, like_parts, similar_to_regex
from waldelta.row_filter._signatures import COMPARISONS, FUNCTION_NAMES, SIGNATURES, Signature
from waldelta.row_filter.analyzed_filter import Collation, RowFilter
from waldelta.row_filter.parse import parse_analysed
from waldelta.row_filter.parse.tree import (
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
)
from waldelta.row_filter.typed_tree import (
    BOOL,
    NUMERIC,
    Type,
    Typed,
)
from waldelta.types.numeric import MAX_PRECISION

_LOGIC = {"AND": "and", "OR": "or", "NOT": "not"}
ESCAPES = {"like_escape": "like", "similar_to_escape": "similar", "similar_escape": "similar"}
_ORDERED = frozenset({Collation.CODE_POINT, Collation.BINARY_ORDER})
# COLLATE with these is certain in a UTF-8 database.
NAMED_COLLATIONS = {
    "C": Collation.CODE_POINT, "POSIX": Collation.CODE_POINT, "ucs_basic": Collation.BINARY_ORDER,
    "pg_c_utf8": Collation.BINARY_ORDER,
}  # fmt: skip


def resolve(row_filter: RowFilter, columns: Mapping[str, Type]) -> Typed:
    """Return the typed filter.

    Raises FilterNotTranslatable with the position of a part that has no certain translation.
    """
    resolver = _Resolver(row_filter, columns)
    node = parse_analysed(row_filter.analysed)
    typed = resolver.node(node)
    if typed.type.name != "bool":
        raise resolver.refused(node, f"a {typed.type}, where a boolean is wanted")
    return typed


class _Resolver(Operands):
    """Resolves calls, conditions and patterns; the base class resolves columns, constants, casts
    and arrays.
    """

    def node(self, node: Node) -> Typed:
        """Return the typed form of any node."""
        return _BY_SYNTAX[type(node)](self, node)

    def test(self, node: Test) -> Typed:
        operand = self.node(node.operand)
        key = "is_null" if node.what in ("NULL", "UNKNOWN") else f"is_{node.what.lower()}"
        if node.what != "NULL":
            self.need_boolean(node, operand)
        return Typed(key, BOOL, (operand,), "not" if node.negated else "", node.start)

    def need_boolean(self, node: Node, *typed: Typed) -> None:
        for each in typed:
            if each.type.name != "bool":
                raise self.refused(node, f"a {each.type}, where a boolean is wanted")

    def collate(self, node: Collate) -> Typed:
        operand = self.node(node.operand)
        collation = NAMED_COLLATIONS.get(node.collation)
        if collation is None or not self.filter.is_utf8:
            raise self.refused(
                node, f"the collation {node.collation}, which Spark can't reproduce exactly"
            )
        return replace(operand, collation=collation, strength=2)

    def call(self, node: Call) -> Typed:
        if node.name in ("COALESCE", "GREATEST", "LEAST", "NULLIF"):
            return self.lazy(node)
        arguments = [self.node(argument) for argument in node.arguments]
        if node.name in _LOGIC:
            self.need_boolean(node, *arguments)
            return Typed(_LOGIC[node.name], BOOL, tuple(arguments), None, node.start)
        if node.name == "IS DISTINCT FROM":
            compared = self.found(node, "=", arguments)
            return replace(compared, key="is_distinct", type=BOOL)
        if node.name in ESCAPES:
            return self.escaped(node, arguments)
        return self.found(node, node.name, arguments)

    def found(self, node: Node, name: str, arguments: list[Typed]) -> Typed:
        names = tuple("array" if a.type.element else a.type.name for a in arguments)
        if (signature := SIGNATURES.get((name, names))) is None:
            # A varchar is a text wherever PostgreSQL prints no cast.
            names = tuple("text" if n == "varchar" else n for n in names)
            signature = SIGNATURES.get((name, names))
        if signature is None:
            kinds = ", ".join(str(a.type) for a in arguments)
            what = (
                f"{name} of {kinds}"
                if name in FUNCTION_NAMES
                else f"{name}, which isn't among the functions"
            )
            raise self.refused(node, f"{what} that can be translated")
        collation, strength = self.merged(node, arguments)
        self.demands(node, signature, arguments, collation)
        typed = Typed(signature.key, Type(signature.result), tuple(arguments), None, node.start)
        if signature.result == "text":
            typed = replace(
                typed, collation=collation or self.filter.default_collation, strength=strength
            )
        return self.special(node, typed, collation)

    def demands(
        self, node: Node, signature: Signature, arguments: list[Typed], collation: Collation | None
    ) -> None:
        if collation is Collation.NONDETERMINISTIC:
            raise self.refused(node, "a text of a nondeterministic collation")
        if "o" in signature.flags and collation not in _ORDERED:
            raise self.refused(
                node,
                'the order of texts, which depends on the collation (add COLLATE "C" if that is'
                " meant)",
            )
        if "c" in signature.flags and collation is not Collation.CODE_POINT:
            raise self.refused(
                node,
                'upper and lower case, which depend on the collation (add COLLATE "C" if that is'
                " meant)",
            )
        if "u" in signature.flags and not self.filter.is_utf8:
            raise self.refused(node, "bytes of a text, which depend on the server's encoding")
        first = signature.constants_from
        if first is not None and not all(
            a.is_constant or a.key == "pattern" for a in arguments[first:]
        ):
            raise self.refused(
                arguments[first],
                "something that changes from row to row, where only a constant is translated",
            )

    def special(self, node: Node, typed: Typed, collation: Collation | None) -> Typed:
        """Handle what a signature's row can't express: digits, patterns, fields of dates, array
        elements.
        """
        if any(a.is_null for a in typed.arguments):
            # Strict: PostgreSQL folds such a call into NULL without looking at its other arguments.
            return self.constant(node, typed.type, None)
        if typed.key in _PATTERN_KEYS:
            return self.pattern(node, typed, collation)
        if (
            typed.arguments[0].type.element
            and len(typed.arguments) == 2
            and typed.arguments[1].type.element
        ):
            self.same_elements(node, typed)
        if reason := check_moment(typed):
            raise self.refused(node, reason)
        if typed.type.name == "numeric" or typed.arguments[0].type.name == "numeric":
            try:
                return numeric.with_digits(typed)
            except numeric.TooManyDigits as err:
                raise self.refused(node, str(err)) from None
        if typed.key == "array_length" and typed.arguments[1].value != "1":
            raise self.refused(node, "array_length of another dimension than the first")
        return typed

    def same_elements(self, node: Node, typed: Typed) -> None:
        one, two = (
            {"varchar": "text"}.get(a.type.element or "", a.type.element) for a in typed.arguments
        )
        if one != two or one not in ("int2", "int4", "int8", "text", "bool", "uuid"):
            raise self.refused(node, f"arrays of {one} and {two}")

    def escaped(self, node: Call, arguments: list[Typed]) -> Typed:
        """Return the pattern of like_escape() or similar_to_escape() of constants."""
        if not all(a.is_constant and a.value is not None for a in arguments):
            raise self.refused(node, "a pattern that isn't a constant")
        texts = [a.value or "" for a in arguments]
        if len(texts) > 1 and len(texts[1]) > 1:
            raise self.refused(node, "an escape of more than one character")
        escape = texts[1] if len(texts) > 1 else "\\"
        pattern = replace(arguments[0], key="pattern", strength=0)
        return replace(pattern, arguments=(replace(pattern, key=ESCAPES[node.name], value=escape),))

    def pattern(self, node: Node, typed: Typed, collation: Collation | None) -> Typed:
        subject, pattern = typed.arguments
        text, escape = pattern.value or "", pattern.arguments[0] if pattern.arguments else None
        is_like = typed.key.endswith("like")
        if escape is not None and is_like != (escape.key == "like"):
            raise self.refused(node, "an escape of LIKE in SIMILAR TO, or the reverse")
        try:
            if is_like:
                mark = escape.value or "" if escape else "\\"
                like_parts(text, mark)
                value = (  # The Spark SQL reads this form: any character may be the escape mark.
                    f"{len(mark)}{mark}{text}"
                )
            else:
                regex = similar_to_regex(text, escape.value or "") if escape else text
                value = java_regex(regex, certain_case=collation is Collation.CODE_POINT)
        except PatternRefused as err:
            raise self.refused(node, f"a pattern with {err}") from None
        return replace(typed, arguments=(subject,), value=value)

    def lazy(self, node: Call) -> Typed:
        arguments = [self.node(argument) for argument in node.arguments]
        if node.name == "NULLIF":
            compared = self.found(node, "=", arguments)
            if compared.is_null:
                return arguments[0]
            return replace(
                arguments[0],
                key="nullif",
                arguments=compared.arguments,
                value=None,
                start=node.start,
            )
        if node.name != "COALESCE":
            self.found(node, "<", arguments[:2])  # The arguments need an order.
        return self.alike(node, node.name.lower(), arguments, arguments)

    def alike(self, node: Node, key: str, results: list[Typed], arguments: list[Typed]) -> Typed:
        """Return an expression whose results, all of one type, determine its type."""
        names = {r.type.name for r in results}
        if len(names) != 1 or any(r.type.element or r.type.name == "opaque" for r in results):
            raise self.refused(
                node, f"results of types {', '.join(sorted(str(r.type) for r in results))}"
            )
        kind = results[0].type
        if kind.name == "numeric":
            kind = replace(NUMERIC, digits=numeric.common([r.type for r in results]))
            if sum(kind.digits or ()) > MAX_PRECISION:
                raise self.refused(
                    node, f"numbers that need more than {MAX_PRECISION} digits together"
                )
        collation, strength = self.merged(node, results)
        return Typed(
            key,
            Type(kind.name, kind.digits),
            tuple(arguments),
            None,
            node.start,
            collation,
            strength,
        )

    def case(self, node: Case) -> Typed:
        operand = self.node(node.operand) if node.operand else None
        results, arguments = [], []
        for condition, result in node.whens:
            when = self.node(condition)
            if operand is not None:
                if when.type.name != operand.type.name:
                    # PostgreSQL prints no cast of the operand in this case.
                    raise self.refused(condition, f"CASE of {operand.type} with {when.type}")
                when = self.found(condition, "=", [operand, when])
            self.need_boolean(condition, when)
            results.append(self.node(result))
            arguments += [when, results[-1]]
        results.append(self.node(node.default))
        return self.alike(node, "case", results, [*arguments, results[-1]])

    def quantified(self, node: Quantified) -> Typed:
        operand, array = self.node(node.operand), self.node(node.array)
        if array.type.element is None:
            raise self.refused(node.array, "a list that isn't an array")
        if array.is_null:
            return self.constant(node, BOOL, None)
        if array.key != "array":
            return self.any_of_column(node, operand, array)
        if any(not (e.is_constant or e.key == "column") for e in array.arguments):
            # PostgreSQL computes all elements first, and may fail where Spark stops early.
            raise self.refused(node.array, "a list that contains more than constants and columns")
        compared = [
            self.found(node, node.operator, [operand, element]) for element in array.arguments
        ]
        self.need_boolean(node, *compared)
        if operand.is_null and compared:
            return self.constant(node, BOOL, None)
        key = node.quantifier.lower()
        return Typed(key, BOOL, (operand, *compared), node.operator, node.start)

    def any_of_column(self, node: Quantified, operand: Typed, array: Typed) -> Typed:
        element = replace(array, key="element", type=Type(array.type.element or ""), arguments=())
        compared = self.found(node, node.operator, [operand, element])
        if compared.is_null or node.operator not in COMPARISONS:
            raise self.refused(node, f"{node.operator} {node.quantifier} of a column")
        return Typed(
            f"{node.quantifier.lower()}_element", BOOL, (array, compared, operand), None, node.start
        )


_PATTERN_KEYS = frozenset(
    f"{no}{i}{kind}" for no in ("", "not_") for i in ("", "i") for kind in ("like", "regex")
)

_BY_SYNTAX: dict[type, Callable[[_Resolver, Any], Typed]] = {
    Column: _Resolver.column,
    Literal: _Resolver.literal,
    Cast: _Resolver.cast,
    Test: _Resolver.test,
    Quantified: _Resolver.quantified,
    ArrayExpression: lambda self, node: self.array(
        node, [self.node(element) for element in node.elements]
    ),
    Case: _Resolver.case,
    Collate: _Resolver.collate,
    Call: _Resolver.call,
}
