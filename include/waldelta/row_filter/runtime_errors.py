"""Finds parts of a filter that can raise an error for some row.

PostgreSQL can't decode such a row, so it blocks the slot for every table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import psycopg

from waldelta.errors import FilterNotTranslatable
from waldelta.postgres import Connection
from waldelta.row_filter.parse import (
    ArrayExpression,
    Call,
    Cast,
    Column,
    Literal,
    Node,
    Quantified,
    TypeName,
    parse_analysed,
    walk,
)

_DIVISIONS = frozenset({"/", "%", "div", "mod"})
_ARITHMETIC = frozenset({"+", "-", "*", "^", "<<", "abs", "round", "ceil", "floor"})
# LIKE and regular expressions interpret their pattern for each row.
_PATTERNS = frozenset({"~~", "!~~", "~~*", "!~~*", "~", "!~", "~*", "!~*"})
_LIKE = frozenset({"~~", "!~~", "~~*", "!~~*"})
_UNKNOWN = "a part that can't be analysed"
# Operators and functions that raise for no argument.
_SAFE = {"IS DISTINCT FROM"}.union(
    """
    = <> < <= > >= || @> <@ && ? ?| ?& -> ->> #> #>> ^@ AND OR NOT COALESCE NULLIF GREATEST
    LEAST lower upper initcap length char_length octet_length btrim ltrim rtrim strpos
    starts_with left right reverse replace md5 concat concat_ws sign cardinality array_length
    jsonb_typeof isfinite num_nulls num_nonnulls text
    """.split()  # noqa: SIM905 - read more easily
)
_TEXTS = frozenset({"text", "character varying", "character", "bpchar", "varchar", "name"})
# Each type can hold every value of the type before it.
_WIDER = ("smallint", "integer", "bigint", "numeric")
_FLOATS = frozenset({"real", "double precision"})
_AT_MIDNIGHT = ("date", "timestamp without time zone")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A constant pattern of LIKE, or a regular expression; for an array of patterns, the array's
    text.
    """

    text: str
    is_like: bool
    is_array: bool = False


def refused_patterns(conn: Connection, filters: Iterable[str]) -> frozenset[Pattern]:
    """Returns the constant patterns that PostgreSQL accepts in a filter, but refuses for each
    row.
    """
    patterns = {pattern for text in filters for pattern in _patterns(text)}
    return frozenset(pattern for pattern in patterns if _is_refused(conn, pattern))


def _is_refused(conn: Connection, pattern: Pattern) -> bool:
    query = _ENDS_WITH_ESCAPE if pattern.is_like else _IS_READ
    value = pattern.text if pattern.is_array else [pattern.text]
    try:
        with conn.transaction():
            return conn.execute(query.encode(), (value,)).fetchone() == (True,)
    except psycopg.errors.InvalidRegularExpression:
        return True


# With an odd number of backslashes, the last one escapes nothing.
_ENDS_WITH_ESCAPE = r"""
select bool_or(length(substring(p from '\\*$')) %% 2 = 1) from unnest(%s::text[]) as p
"""
# Counting evaluates each match; PostgreSQL would skip one whose result doesn't matter.
_IS_READ = "select count('' ~ p) < 0 from unnest(%s::text[]) as p"


def _patterns(text: str) -> Iterator[Pattern]:
    try:
        tree = parse_analysed(text)
    except FilterNotTranslatable:
        return
    for node in walk(tree):
        match node:
            case Call(name, (_, pattern)) if name in _PATTERNS:
                yield from _constants(name, pattern)
            case Quantified(name, _, _, array) if name in _PATTERNS:
                yield from _constants(name, array)


def _constants(operator: str, node: Node, *, is_array: bool = False) -> Iterator[Pattern]:
    match node:
        case Literal("string", text):
            yield Pattern(text, operator in _LIKE, is_array)
        case Cast(operand, kind):
            yield from _constants(operator, operand, is_array=is_array or kind.is_array)
        case ArrayExpression(elements):
            for element in elements:
                yield from _constants(operator, element)


def raising_parts(
    text: str,
    types: Mapping[str, str],
    refused: Collection[Pattern] = (),
    *,
    is_analysed: bool = True,
) -> list[str]:
    """Returns the kinds of operations of a filter that can raise, in the order of the text.

    ``types`` are the columns' types, ``refused`` the constant patterns that PostgreSQL refuses. A
    filter that PostgreSQL has analysed, but that can't be read here, may raise. Of a filter as
    written in the pipeline file (not ``is_analysed``) nothing is known then.

    >>> raising_parts("(((10 / n) > 0) AND ((v)::integer < 5))", {"n": "integer", "v": "text"})
    ['division', 'a cast to integer']
    >>> types = {"n": "integer", "v": "character varying(3)"}
    >>> raising_parts("(((n / 2) > 0) AND ((v)::text ~~ 'L%'::text))", types)
    []
    """
    try:
        tree = parse_analysed(text)
    except FilterNotTranslatable:
        return [_UNKNOWN] if is_analysed else []
    parts = (part for node in walk(tree) for part in _raising(node, types, refused))
    return list(dict.fromkeys(parts))


def _raising(node: Node, types: Mapping[str, str], refused: Collection[Pattern]) -> Iterator[str]:
    match node:
        case Cast(operand, kind) if not _is_constant(operand) and not _is_safe_cast(
            operand, kind, types
        ):
            yield f"a cast to {kind.name}"
        case Call(name, (_, divisor)) if name in _DIVISIONS:
            # A quotient of floating point numbers can be too large or too small for one.
            if _is_float(node, types) or not _is_other_than_zero(divisor):
                yield "division"
        case Call(name) if name in _ARITHMETIC:
            if not all(map(_is_constant, node.arguments)):
                yield "overflow"
        case Call(name, (_, pattern)) if name in _PATTERNS:
            yield from _of_pattern(name, pattern, refused)
        case Call(name, arguments) if name not in _SAFE:
            if name != "timezone" or not _is_constant(arguments[0]):
                yield name
        case Quantified(operator, _, _, array) if operator in _PATTERNS:
            yield from _of_pattern(operator, array, refused)


def _of_pattern(operator: str, pattern: Node, refused: Collection[Pattern]) -> Iterator[str]:
    if not _is_constant(pattern):
        yield "a pattern that isn't a constant"
    elif any(constant in refused for constant in _constants(operator, pattern)):
        yield "a pattern that PostgreSQL refuses"


def _is_constant(node: Node) -> bool:
    """Returns whether PostgreSQL has already evaluated the node."""
    match node:
        case Literal():
            return True
        case Cast(operand, _):
            return _is_constant(operand)
        case ArrayExpression(elements):
            return all(map(_is_constant, elements))
    return False


def _is_safe_cast(operand: Node, kind: TypeName, types: Mapping[str, str]) -> bool:
    if kind.name in _TEXTS:
        return True
    if kind.name == "numeric" and kind.modifiers:  # The precision may be too small.
        return False
    operand_type = _type_of(operand, types)
    if operand_type in _WIDER and kind.name in _WIDER:
        return _WIDER.index(operand_type) <= _WIDER.index(kind.name)
    is_wider = kind.name in _FLOATS and operand_type in (*_WIDER[:3], "real")
    return operand_type == kind.name or is_wider or (operand_type, kind.name) == _AT_MIDNIGHT


def _type_of(node: Node, types: Mapping[str, str]) -> str:
    if isinstance(node, Column):
        return types.get(node.name, "").partition("(")[0]
    return node.type.name if isinstance(node, Cast) else ""


def _is_float(node: Node, types: Mapping[str, str]) -> bool:
    """Returns whether a part of a calculation is a floating point number; then its result is one,
    too.
    """
    if isinstance(node, Call):
        return any(_is_float(argument, types) for argument in node.arguments)
    return _type_of(node, types) in _FLOATS


def _is_other_than_zero(divisor: Node) -> bool:
    """Returns whether a divisor is a constant that isn't zero, or that is null in place of zero.

    -1 doesn't count, because the least integer can't be divided by it.
    """
    while isinstance(divisor, Cast):
        divisor = divisor.operand
    match divisor:
        case Literal("number" | "string", text):
            try:
                return float(text) not in (0.0, -1.0)
            except ValueError:
                return False
        case Call("NULLIF", (_, operand)):
            while isinstance(operand, Cast):
                operand = operand.operand
            return isinstance(operand, Literal) and operand.text in ("0", "0.0")
    return False
