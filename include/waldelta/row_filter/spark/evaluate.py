"""Evaluates Spark SQL conditions by Arrow, where both certainly mean the same.

A run of few rows then needs no JVM for its row filters and constraints. What isn't certain, such as
the order of NaN, a cast of a column, or a function, is left to Spark: there is no answer then.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from sqlglot import exp
    from sqlglot.errors import SqlglotError

# A value for each row, or a constant: pyarrow's chunked array or scalar.
Datum = Any
# With it in a pattern of LIKE, Arrow and Spark need not agree.
_ESCAPE = "\\"
_COMPARED: dict[str, Callable[[Datum, Datum], Datum]] = {
    "eq": pc.equal,
    "neq": pc.not_equal,
    "lt": pc.less,
    "lte": pc.less_equal,
    "gt": pc.greater,
    "gte": pc.greater_equal,
}
_MOST_DIGITS = 38  # of a decimal
# Decimals with at most this many digits, and below this number, are distinct doubles.
_EXACT_DIGITS, _MOST_EXACT = 15, 1e15
# Of such an expression Java and RE2 find the same texts, in lines without a line's end.
_SAME_REGEX = re.compile(
    r"\^?(?:[\w :;,@#%&=<>~'\"/-]|\[\^?[\w :;,@#%=<>~'\"/.+*-]+\]|\\[dw.\-+*?()\[\]{}|/^$]"
    r"|\((?!\?)|\)|[|.*+?]|\{\d+(?:,\d*)?\})*\$?",
    re.ASCII,
)
_LINE_ENDS = "[\n\r\x85\u2028\u2029]"
# The types of constants, by sqlglot's names. Spark's session has the time zone UTC.
_TYPES = {
    "TINYINT": pa.int8(),
    "SMALLINT": pa.int16(),
    "INT": pa.int32(),
    "BIGINT": pa.int64(),
    "DATE": pa.date32(),
    "TIMESTAMPNTZ": pa.timestamp("us"),
    "TIMESTAMPTZ": pa.timestamp("us", "UTC"),
}


# The conditions of nearly every table. They are read without the parser, whose import is a tenth of
# a small run.
_ALL, _HAS_VALUE = "true", re.compile(r"`((?:[^`]|``)+)` is not null")


class _Uncertain(Exception):
    """Only Spark knows what the condition means."""


@lru_cache(16_384)
def parsed(condition: str) -> exp.Expr | SqlglotError:
    """Returns a condition's tree, or why it has none.

    Several questions are asked of each condition, in each check of its table and of each of its
    batches; a suite may have thousands.
    """
    import sqlglot  # few tables have such a condition

    try:
        return sqlglot.parse_one(condition, read="spark")
    except sqlglot.errors.SqlglotError as err:
        return err


def is_certain(condition: str) -> bool:
    """Returns whether evaluate() knows each part of a condition, whatever the columns' types are.

    >>> is_certain("(`region` in ('EU', 'US') or `a` > 1)"), is_certain("length(a) % 2 = 0")
    (True, False)
    """
    if condition == _ALL or _HAS_VALUE.fullmatch(condition):
        return True
    tree = parsed(condition)
    return not isinstance(tree, Exception) and all(
        node.key in _KNOWN and _has_known_arguments(node) for node in tree.walk()
    )


def evaluate(condition: str, rows: pa.Table) -> pa.ChunkedArray | None:
    """Returns for each row whether a condition is true, false or null; None where Spark must.

    >>> evaluate("a > 1 and b = 'x'", pa.table({"a": [1, 2, None], "b": ["x"] * 3})).to_pylist()
    [False, True, None]
    >>> evaluate("a > 1", pa.table({"a": [1.5]})) is None  # Spark sorts NaN above infinity
    True
    """
    if condition == _ALL:
        return pa.chunked_array([pa.repeat(True, len(rows))])
    if (match := _HAS_VALUE.fullmatch(condition)) is not None:
        name = match[1].replace("``", "`")
        return rows[name].is_valid() if name in rows.column_names else None
    tree = parsed(condition)
    if isinstance(tree, Exception):
        return None
    try:
        result = _Evaluation(rows).value(tree)
    except (_Uncertain, pa.ArrowException, OverflowError):
        return None
    if not pa.types.is_boolean(result.type):
        return None
    if isinstance(result, pa.Scalar):
        result = pa.repeat(result, len(rows))
    return result if isinstance(result, pa.ChunkedArray) else pa.chunked_array([result])


class _Evaluation:
    """The values of a condition's parts on these rows."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def value(self, node: exp.Expr) -> Datum:
        """Returns a part's value: one for each row, or a constant."""
        if not _has_known_arguments(node):
            raise _Uncertain(node.key)
        if node.key in _COMPARED:
            return _compare(node.key, self.value(node.this), self.value(node.expression))
        build = _PARTS.get(node.key)
        if build is None:
            raise _Uncertain(node.key)
        return build(self, node)

    def column(self, node: Any) -> Datum:
        if len(node.parts) > 1 or node.name not in self._rows.column_names:
            raise _Uncertain(node.name)
        return self._rows[node.name]

    def literal(self, node: exp.Expr) -> Datum:
        if node.is_string:
            return pa.scalar(node.name)
        if node.name.isdigit():
            return pa.scalar(int(node.name), pa.int64())
        raise _Uncertain(node.name)

    def constant(self, node: Any) -> Datum:
        """Returns a double, or a text that is cast to another type, which it must fit as it is."""
        text, kind = node.this, _TYPES.get(node.to.this.name)
        if node.to.this.name == "DOUBLE" and not text.is_string:
            return pa.scalar(float(text.name))
        if node.to.this.name == "DECIMAL" and len(node.to.expressions) > 1:
            kind = pa.decimal128(*(int(part.name) for part in node.to.expressions))
        if kind is None or not text.is_string:
            raise _Uncertain(node.key)
        # Arrow also reads hexadecimal numbers, which are no numbers to Spark.
        if pa.types.is_integer(kind) and not text.name.removeprefix("-").isdigit():
            raise _Uncertain(node.key)
        return pa.scalar(text.name).cast(kind)

    def logic(self, node: exp.Expr) -> Datum:
        both = pc.and_kleene if node.key == "and" else pc.or_kleene
        return both(*map(_boolean, (self.value(node.this), self.value(node.expression))))

    def is_what(self, node: exp.Expr) -> Datum:
        value = self.value(node.this)
        if node.expression.key == "null":
            return pc.is_null(value)
        if node.expression.key != "boolean":
            raise _Uncertain(node.key)
        return pc.equal(
            pc.fill_null(_boolean(value), not node.expression.this), node.expression.this
        )

    def among(self, node: exp.Expr) -> Datum:
        if not node.expressions:  # a query
            raise _Uncertain(node.key)
        value, *listed = (self.value(part) for part in (node.this, *node.expressions))
        _check_alike([value, *listed])
        is_constant = all(isinstance(one, pa.Scalar) for one in listed)
        kinds = {one.type for one in (value, *listed)}
        if is_constant and (len(kinds) == 1 or all(map(pa.types.is_integer, kinds))):
            kind = pa.int64() if pa.types.is_integer(value.type) else value.type
            values = pa.array([one.as_py() for one in listed], kind)
            is_member = pc.is_in(value.cast(kind), value_set=values)
            return pc.if_else(pc.is_valid(value), is_member, pa.scalar(None, pa.bool_()))
        return reduce(pc.or_kleene, [_compare("eq", value, one) for one in listed])

    def null_safe_equal(self, node: exp.Expr) -> Datum:
        first, second = self.value(node.this), self.value(node.expression)
        both = pc.and_(pc.is_null(first), pc.is_null(second))
        return pc.or_(both, pc.fill_null(_compare("eq", first, second), False))

    def coalesce(self, node: exp.Expr) -> Datum:
        values = [self.value(part) for part in (node.this, *node.expressions)]
        _check_alike(values)
        return pc.coalesce(*values)

    def case(self, node: exp.Expr) -> Datum:
        operand = node.args.get("this")
        conditions, results = [], []
        for choice in node.args["ifs"]:
            condition = self.value(choice.this)
            if operand is not None:
                condition = _compare("eq", self.value(operand), condition)
            conditions.append(pc.fill_null(_boolean(condition), False))
            results.append(self.value(choice.args["true"]))
        default = node.args.get("default")
        results.append(pa.scalar(None) if default is None else self.value(default))
        _check_alike(results)
        kind = next(one.type for one in results if not pa.types.is_null(one.type))
        value = results[-1].cast(kind)
        for condition, result in reversed(list(zip(conditions, results, strict=False))):
            value = pc.if_else(condition, result.cast(kind), value)
        return value

    def like(self, node: exp.Expr) -> Datum:
        pattern = self.value(node.expression)
        if not isinstance(pattern, pa.Scalar) or _ESCAPE in (pattern.as_py() or _ESCAPE):
            raise _Uncertain(node.key)
        is_match = pc.match_like(self.text(node), pattern.as_py())
        return pc.invert(is_match) if node.args.get("negate") else is_match

    def matches(self, node: exp.Expr) -> Datum:
        texts, pattern = self.text(node), self.value(node.expression)
        is_same = (
            isinstance(pattern, pa.Scalar)
            and _SAME_REGEX.fullmatch(str(pattern))
            and not pc.any(pc.match_substring_regex(texts, _LINE_ENDS)).as_py()
        )
        if not is_same:
            raise _Uncertain(node.key)
        return pc.match_substring_regex(texts, str(pattern))

    def text(self, node: exp.Expr) -> Datum:
        value = self.value(node.this)
        if not pa.types.is_string(value.type):
            raise _Uncertain(node.key)
        return value

    def ends(self, node: exp.Expr) -> Datum:
        end = self.value(node.expression)
        if not isinstance(end, pa.Scalar) or not pa.types.is_string(end.type):
            raise _Uncertain(node.key)
        return pc.ends_with(self.text(node), end.as_py())

    def entry(self, node: exp.Expr) -> Datum:
        """Returns a map's value of a key; null where the map or the key isn't there."""
        (key,) = node.expressions
        return self._lookup(node, key, "first")

    def has_entry(self, node: exp.Expr) -> Datum:
        has_key = pc.is_valid(self._lookup(node, node.args["key"], "all"))
        return pc.if_else(pc.is_valid(self.value(node.this)), has_key, pa.scalar(None, pa.bool_()))

    def _lookup(self, node: exp.Expr, key: exp.Expr, occurrence: str) -> Datum:
        entries = self.value(node.this)
        if not pa.types.is_map(entries.type) or not key.is_string:
            raise _Uncertain(node.key)
        return pc.map_lookup(entries, pa.scalar(key.name), occurrence)


def _has_known_arguments(node: exp.Expr) -> bool:
    """Returns whether no argument changes what a part means, as NOT does that of LIKE."""
    set_ones = {name for name, value in node.args.items() if value not in (None, [], False)}
    if node.key == "trim":
        return set_ones == {"this", "position"} and node.args["position"] == "TRAILING"
    return set_ones <= _ARGUMENTS | _MORE_ARGUMENTS.get(node.key, set())


def _boolean(value: Datum) -> Datum:
    if pa.types.is_null(value.type):
        return value.cast(pa.bool_())
    if not pa.types.is_boolean(value.type):
        raise _Uncertain(str(value.type))
    return value


def _family(kind: pa.DataType) -> object:
    """Returns what values of a type can be compared with, by both in the same way."""
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_decimal(kind):
        return "decimal"
    if any(test(kind) for test in (pa.types.is_string, pa.types.is_boolean, pa.types.is_date32)):
        return kind
    if pa.types.is_timestamp(kind):
        return kind
    raise _Uncertain(str(kind))


def _check_alike(values: list[Datum]) -> None:
    kinds = [value.type for value in values if not pa.types.is_null(value.type)]
    if len({_family(kind) for kind in kinds}) != 1:
        raise _Uncertain("several types")
    # Spark rounds decimals to a common type, which has fewer places than one of them needs.
    decimals = [kind for kind in kinds if pa.types.is_decimal(kind)]
    whole = max((kind.precision - kind.scale for kind in decimals), default=0)
    if whole + max((kind.scale for kind in decimals), default=0) > _MOST_DIGITS:
        raise _Uncertain("a common type with fewer decimal places")


def _with_double(values: Datum, bound: Datum) -> tuple[Datum, Datum]:
    """Returns numbers and a constant that Arrow compares as Spark does, which rounds both to
    doubles.

    Spark sorts NaN above infinity, and two long decimals may round to one double.
    """
    kind = values.type
    if pa.types.is_decimal(kind) and kind.precision <= _EXACT_DIGITS:
        exact = Decimal(repr(bound.as_py()))
        if len(exact.as_tuple().digits) <= _EXACT_DIGITS and abs(exact) < _MOST_EXACT:
            return values, pa.scalar(exact)
    if pa.types.is_integer(kind) or (
        pa.types.is_floating(kind) and not pc.any(pc.is_nan(values)).as_py()
    ):
        return pc.cast(values, pa.float64(), safe=False), bound
    raise _Uncertain(str(kind))


def _compare(key: str, first: Datum, second: Datum) -> Datum:
    if isinstance(second, pa.Scalar) and pa.types.is_float64(second.type):
        return _COMPARED[key](*_with_double(first, second))
    _check_alike([first, second])
    if pa.types.is_null(first.type):
        first = first.cast(second.type)
    if pa.types.is_null(second.type):
        second = second.cast(first.type)
    return _COMPARED[key](first, second)


_PARTS: dict[str, Callable[[_Evaluation, Any], Datum]] = {
    "paren": lambda self, node: self.value(node.this),
    "column": _Evaluation.column,
    "literal": _Evaluation.literal,
    "boolean": lambda _, node: pa.scalar(node.this),
    "null": lambda *_: pa.scalar(None),
    "neg": lambda self, node: pc.negate_checked(self.value(node.this)),
    **dict.fromkeys(("cast", "trycast"), _Evaluation.constant),
    "bracket": _Evaluation.entry,
    "mapcontainskey": _Evaluation.has_entry,
    "endswith": _Evaluation.ends,
    "and": _Evaluation.logic,
    "or": _Evaluation.logic,
    "not": lambda self, node: pc.invert(_boolean(self.value(node.this))),
    "is": _Evaluation.is_what,
    "in": _Evaluation.among,
    "nullsafeeq": _Evaluation.null_safe_equal,
    "coalesce": _Evaluation.coalesce,
    "case": _Evaluation.case,
    "like": _Evaluation.like,
    "regexplike": _Evaluation.matches,
    # rtrim() of spaces alone, without which char(n) is compared.
    "trim": lambda self, node: pc.utf8_rtrim(self.text(node), " "),
    "length": lambda self, node: pc.utf8_length(self.text(node)),
}
_KNOWN = {*_PARTS, *_COMPARED, "identifier", "if", "datatype", "dataparam", "datatypeparam"}
_ARGUMENTS = {"this", "expression", "expressions"}
_MORE_ARGUMENTS = {
    "literal": {"is_string"},
    "identifier": {"quoted"},
    "column": {"table"},
    "cast": {"to"},
    "trycast": {"to", "safe"},
    # A key that a map lacks has no value, with either.
    "bracket": {"offset", "safe"},
    "mapcontainskey": {"key"},
    "case": {"ifs", "default"},
    "if": {"true"},
    "like": {"negate"},
    "trim": {"position"},
}
