"""What of a filter can raise for some row: such a row stops the slot of every table, since
PostgreSQL can't decode it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from waldelta.errors import FilterNotTranslatable
from waldelta.row_filter.parse import parse_analysed, walk
from waldelta.row_filter.parse.tree import (
    ArrayExpression,
    Call,
    Cast,
    Column,
    Literal,
    Node,
    Quantified,
    TypeName,
)

_DIVISIONS = frozenset({"/", "%", "div", "mod"})
_ARITHMETIC = frozenset({"+", "-", "*", "^", "<<", "abs", "round", "ceil", "floor"})
# LIKE, and regular expressions, read their pattern for each row.
_PATTERNS = frozenset({"~~", "!~~", "~~*", "!~~*", "~", "!~", "~*", "!~*"})
_SAFE_OPERATORS = frozenset(
    {
        "=",
        "<>",
        "<",
        "<=",
        ">",
        ">=",
        "||",
        "@>",
        "<@",
        "&&",
        "?",
        "?|",
        "?&",
        "->",
        "->>",
        "#>",
        "#>>",
        "^@",
    }
)
_SAFE_FUNCTIONS = frozenset(
    {
        "AND",
        "OR",
        "NOT",
        "COALESCE",
        "NULLIF",
        "GREATEST",
        "LEAST",
        "IS DISTINCT FROM",
        "lower",
        "upper",
        "initcap",
        "length",
        "char_length",
        "octet_length",
        "btrim",
        "ltrim",
        "rtrim",
        "strpos",
        "starts_with",
        "left",
        "right",
        "reverse",
        "replace",
        "md5",
        "concat",
        "concat_ws",
        "sign",
        "cardinality",
        "array_length",
        "jsonb_typeof",
        "isfinite",
        "num_nulls",
        "num_nonnulls",
        "text",
    }
)
_TEXTS = frozenset({"text", "character varying", "character", "bpchar", "varchar", "name"})
# What holds every value of the type before it.
_WIDER = ("smallint", "integer", "bigint", "numeric")
_FLOATS = frozenset({"real", "double precision"})


def raising_parts(text: str, types: Mapping[str, str]) -> list[str]:
    """The kinds of operations of an analysed filter that can raise, in the order of the text;
    ``types`` are the columns'.

    Of a filter that can't be read here nothing is known, and nothing is said.

    >>> raising_parts("(((10 / n) > 0) AND ((v)::integer < 5))", {"n": "integer", "v": "text"})
    ['division', 'a cast to integer']
    >>> types = {"n": "integer", "v": "character varying(3)"}
    >>> raising_parts("(((n / 2) > 0) AND ((v)::text ~~ 'L%'::text))", types)
    []
    """
    try:
        tree = parse_analysed(text)
    except FilterNotTranslatable:
        return []
    return list(dict.fromkeys(part for node in walk(tree) for part in _raising(node, types)))


def _raising(node: Node, types: Mapping[str, str]) -> Iterator[str]:
    match node:
        case Cast(operand, kind) if not _is_constant(operand) and not _is_safe_cast(
            operand, kind, types
        ):
            yield f"a cast to {kind.name}"
        case Call(name, (_, divisor)) if name in _DIVISIONS:
            if not _is_other_than_zero(divisor):
                yield "division"
        case Call(name) if name in _ARITHMETIC:
            if not all(map(_is_constant, node.arguments)):
                yield "overflow"
        case Call(name, (_, pattern)) if name in _PATTERNS:
            if not _is_constant(pattern):
                yield "a pattern that isn't a constant"
        case Call(name) if not _is_safe_call(node):
            yield name
        case Quantified(operator, _, _, array) if operator in _PATTERNS and not _is_constant(array):
            yield "a pattern that isn't a constant"


def _is_safe_call(call: Call) -> bool:
    if call.name == "timezone":
        return _is_constant(call.arguments[0])
    return call.name in _SAFE_OPERATORS or call.name in _SAFE_FUNCTIONS


def _is_constant(node: Node) -> bool:
    """PostgreSQL has evaluated it by now."""
    match node:
        case Literal():
            return True
        case Cast(operand, _):
            return _is_constant(operand)
        case ArrayExpression(elements):
            return all(map(_is_constant, elements))
        case _:
            return False


def _is_safe_cast(operand: Node, kind: TypeName, types: Mapping[str, str]) -> bool:
    wanted = kind.name
    if wanted in _TEXTS:
        return True
    if wanted == "numeric" and kind.modifiers:  # of so many digits
        return False
    found = _type_of(operand, types)
    if found == wanted:
        return True
    if found in _WIDER and wanted in _WIDER:
        return _WIDER.index(found) <= _WIDER.index(wanted)
    return (wanted in _FLOATS and found in (*_WIDER[:3], "real")) or (found, wanted) == (
        "date",
        "timestamp without time zone",
    )


def _type_of(node: Node, types: Mapping[str, str]) -> str:
    if isinstance(node, Column):
        return types.get(node.name, "").partition("(")[0]
    return node.type.name if isinstance(node, Cast) else ""


def _is_other_than_zero(divisor: Node) -> bool:
    """A constant that isn't zero, nor -1, by which the least integer can't be divided; or null in
    zero's place.
    """
    while isinstance(divisor, Cast):
        divisor = divisor.operand
    match divisor:
        case Literal("number" | "string", text):
            try:
                return float(text) not in (0.0, -1.0)
            except ValueError:
                return False
        case Call("NULLIF", (_, other)):
            return _is_zero(other)
        case _:
            return False


def _is_zero(node: Node) -> bool:
    while isinstance(node, Cast):
        node = node.operand
    return isinstance(node, Literal) and node.text in ("0", "0.0")
