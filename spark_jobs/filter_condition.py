"""The publication's row filter as a Spark SQL condition, where the translation is certain to mean the same.

Only comparisons of a column with constants, joined by AND, OR and NOT, are taken; every other construct raises
TranslationError with the reason, so that a check is left out and said to be, never wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlglot
from sqlglot import exp

from spark_jobs.identifier import quote
from waldelta.ledger import ColumnState

RAW_COLUMN = "_wd_raw"
# Their PostgreSQL values include some that the Delta type can't hold: NaN, infinity, BC.
UNBOUNDED = frozenset({"decimal", "date", "timestamp", "timestamptz"})

_NUMERIC = frozenset({"int", "decimal", "float"})
_EQUALITY_ONLY = frozenset({"text", "bpchar", "uuid", "bool"})
_COMPARISON: dict[type[exp.Expr], str] = {
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
}  # fmt: skip
_CAST_FAMILY = {
    "SMALLINT": "int", "INT": "int", "BIGINT": "int", "DECIMAL": "decimal", "FLOAT": "float", "DOUBLE": "float",
    "TEXT": "text", "VARCHAR": "text", "BPCHAR": "bpchar", "BOOLEAN": "bool", "DATE": "date",
    "TIMESTAMP": "timestamp", "TIMESTAMPTZ": "timestamptz", "UUID": "uuid",
}  # fmt: skip
_DATE = r"(?:000[1-9]|00[1-9]\d|0[1-9]\d\d|[1-9]\d{3})-\d\d-\d\d"
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,6})?"
_LITERAL_FORM = {
    "int": re.compile(r"-?\d{1,18}"),
    "decimal": re.compile(r"-?\d{1,30}(?:\.\d{1,8})?"),
    "float": re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d{1,3})?"),
    "date": re.compile(_DATE),
    "timestamp": re.compile(rf"{_DATE}(?: {_TIME})?"),
    # Without an offset the value would depend on the session's time zone.
    "timestamptz": re.compile(rf"{_DATE} {_TIME}[+-]\d\d(?::\d\d)?"),
    "uuid": re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
    "bool": re.compile(r"true|false"),
}


class TranslationError(Exception):
    """The filter has a part that can't be translated faithfully; the message says which."""


@dataclass(frozen=True, slots=True)
class FilterCondition:
    """A condition in Spark SQL that is true exactly for the rows the filter admits."""

    sql: str
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Operand:
    sql: str
    family: str
    column: str | None = None
    digits: tuple[int, int] = (19, 0)  # before and after the decimal point


def column_family(column: ColumnState) -> str | None:
    """How values of a column compare; None where PostgreSQL and Spark may differ."""
    name = re.sub(r"\(.*?\)", "", column.type_name).strip()
    families = {
        "smallint": "int", "integer": "int", "bigint": "int", "real": "float", "double precision": "float",
        "text": "text", "character varying": "text", "character": "bpchar", "bpchar": "bpchar", "boolean": "bool",
        "date": "date", "timestamp without time zone": "timestamp", "timestamp with time zone": "timestamptz",
        "uuid": "uuid",
    }  # fmt: skip
    if name == "numeric":
        return "decimal" if column.spark_type.lower().startswith("decimal") else None
    return families.get(name)


def translate_filter(row_filter: str, columns: Sequence[ColumnState], held_columns: Iterable[str]) -> FilterCondition:
    """Translate a row filter as pg_get_expr prints it; raises TranslationError.

    A row whose value stands in ``_wd_raw`` only (NaN, infinity) can't be judged and counts as admitted.

    >>> translate_filter("(origin = 'JFK'::text)", [ColumnState("origin", 25, -1, "text", "string", False)], []).sql
    "(`origin` = 'JFK')"
    """
    if "\\" in row_filter:
        raise TranslationError("a string with a backslash")
    try:
        tree = sqlglot.parse_one(row_filter, dialect="postgres")
    except sqlglot.errors.SqlglotError as err:
        raise TranslationError("an expression that sqlglot can't parse") from err
    translation = _Translation({column.name: column for column in columns})
    sql = translation.condition(tree)
    unbounded = sorted(c for c in translation.used if column_family(translation.columns[c]) in UNBOUNDED)
    if unbounded and RAW_COLUMN not in held_columns:
        raise TranslationError(f"{unbounded[0]} may hold values kept outside the target (metadata_columns is off)")
    for name in unbounded:
        key = _string(name)
        sql = f"({sql} or coalesce(map_contains_key({RAW_COLUMN}, {key}), false))"
    return FilterCondition(sql, tuple(sorted(translation.used)))


class _Translation:
    def __init__(self, columns: dict[str, ColumnState]) -> None:
        self.columns = columns
        self.used: set[str] = set()

    def condition(self, node: exp.Expr) -> str:
        node = node.unnest()
        if isinstance(node, exp.And | exp.Or):
            word = "and" if isinstance(node, exp.And) else "or"
            return f"({self.condition(node.left)} {word} {self.condition(node.right)})"
        if isinstance(node, exp.Not):
            return f"(not {self.condition(node.this)})"
        if type(node) in _COMPARISON:
            return self._comparison(node)
        if isinstance(node, exp.NullSafeEQ | exp.NullSafeNEQ):
            left, right = self._pair(node.left, node.right, "=")
            return f"({left} <=> {right})" if isinstance(node, exp.NullSafeEQ) else f"(not ({left} <=> {right}))"
        return self._predicate(node)

    def _predicate(self, node: exp.Expr) -> str:
        if isinstance(node, exp.Is):
            return self._is(node)
        if isinstance(node, exp.In):
            return self._any(node.this, self._list(node), "=")
        if isinstance(node, exp.Between):
            _only(node, "this", "low", "high")
            low, high = (self._pair(node.this, node.args[k], op) for k, op in (("low", ">="), ("high", "<=")))
            return f"({low[0]} >= {low[1]} and {high[0]} <= {high[1]})"
        if isinstance(node, exp.Boolean):
            return "true" if node.this else "false"
        operand = self._operand(node)
        if operand.family != "bool" or operand.column is None:
            raise _refused(node)
        return operand.sql

    def _is(self, node: exp.Is) -> str:
        _only(node, "this", "expression", "negate")
        word = "is not" if node.args.get("negate") else "is"
        if isinstance(node.expression, exp.Null):
            inner = node.this.unnest()
            # Spark and PostgreSQL agree on "is null" for columns of any type, known or not.
            operand = self._column(inner) if isinstance(inner, exp.Column) else None
            sql = operand.sql if operand else self.condition(inner)
            return f"({sql} {word} null)"
        if isinstance(node.expression, exp.Boolean):
            return f"({self.condition(node.this)} {word} {'true' if node.expression.this else 'false'})"
        raise _refused(node)

    def _comparison(self, node: exp.Expr) -> str:
        operator = _COMPARISON[type(node)]
        right = node.args["expression"].unnest()
        if isinstance(right, exp.Any) and operator == "=":
            return self._any(node.this, _array(right.this), "=")
        if isinstance(right, exp.Anonymous) and right.name.upper() == "ALL" and operator == "<>":
            return self._any(node.this, _array(right.expressions[0]), "<>")
        left, value = self._pair(node.this, right, operator)
        return f"({left} {operator} {value})"

    def _any(self, left: exp.Expr, values: list[exp.Expr], operator: str) -> str:
        if not values:
            raise TranslationError("an empty list")
        pairs = [self._pair(left, value, operator) for value in values]
        word = "in" if operator == "=" else "not in"
        return f"({pairs[0][0]} {word} ({', '.join(value for _, value in pairs)}))"

    @staticmethod
    def _list(node: exp.In) -> list[exp.Expr]:
        _only(node, "this", "expressions")
        return list(node.expressions)

    def _pair(self, left: exp.Expr, right: exp.Expr, operator: str) -> tuple[str, str]:
        """Both sides, made comparable; at least one side is a column."""
        one, two = self._operand(left), self._operand(right)
        if one.column is None and two.column is None:
            raise TranslationError("a comparison of two constants")
        one, two = _resolve(one, two), _resolve(two, one)
        if not _comparable(one.family, two.family):
            raise TranslationError(f"a comparison of {one.family} with {two.family}")
        if operator not in ("=", "<>") and _EQUALITY_ONLY & {one.family, two.family}:
            raise TranslationError(f"an order of {one.family} values, which depends on the collation")
        if "float" in (one.family, two.family):
            one, two = _as_double(one), _as_double(two)
        elif sum(max(one.digits[i], two.digits[i]) for i in (0, 1)) > 38:
            raise TranslationError("a comparison that needs more than 38 decimal digits")
        return one.sql, two.sql

    def _operand(self, node: exp.Expr) -> _Operand:
        node = node.unnest()
        if isinstance(node, exp.Column):
            return self._column(node, comparable=True)
        if isinstance(node, exp.Cast):
            return self._cast(node)
        if isinstance(node, exp.Boolean):
            return _Operand("true" if node.this else "false", "bool")
        if isinstance(node, exp.Neg) and isinstance(node.this.unnest(), exp.Literal):
            return self._operand(exp.Literal.number(f"-{node.this.unnest().this}"))
        if isinstance(node, exp.Literal):
            if node.is_string:
                return _Operand(node.this, "unknown")
            family = "int" if _LITERAL_FORM["int"].fullmatch(node.this) else "decimal"
            return _literal(node.this, family)
        raise _refused(node)

    def _cast(self, node: exp.Cast) -> _Operand:
        if node.to.expressions or (family := _CAST_FAMILY.get(node.to.this.name)) is None:
            raise TranslationError(f"a cast to {node.to.sql('postgres')}")
        inner = self._operand(node.this)
        if inner.column is not None:
            if family == "text" and inner.family in ("text", "bpchar"):
                # Where character(n) becomes text PostgreSQL drops the padding; rtrim has been applied already.
                return _Operand(inner.sql, "text", inner.column)
            if family == inner.family and family not in ("int", "float"):
                return inner
            if family == "float" and inner.family in ("int", "float"):
                return _Operand(f"cast({inner.sql} as double)", "float", inner.column)
            raise TranslationError(f"a cast of column {inner.column}")
        if inner.family == "unknown" or (inner.family in _NUMERIC and family in _NUMERIC):
            return _literal(inner.sql, family)
        if inner.family == family or {inner.family, family} <= {"text", "bpchar"}:
            return inner
        raise TranslationError(f"a cast of a constant to {family}")

    def _column(self, node: exp.Expr, *, comparable: bool = False) -> _Operand:
        name = node.name if node.this.args.get("quoted") else node.name.lower()
        if node.args.get("table") is not None or name not in self.columns:
            raise TranslationError(f"{node.sql('postgres')}, which is no column of the target")
        family = column_family(self.columns[name])
        if family is None and comparable:
            raise TranslationError(f"a comparison of type {self.columns[name].type_name}")
        self.used.add(name)
        sql = quote(name)
        # Trailing blanks of character(n) don't count when it is compared.
        sql = f"rtrim({sql})" if comparable and family == "bpchar" else sql
        return _Operand(sql, family or "other", name, _column_digits(self.columns[name]))


def _resolve(operand: _Operand, other: _Operand) -> _Operand:
    """A bare string constant takes the other side's type, as in PostgreSQL."""
    return _literal(operand.sql, other.family) if operand.family == "unknown" else operand


def _literal(text: str, family: str) -> _Operand:
    form = _LITERAL_FORM.get(family)
    if form is not None and not form.fullmatch(text):
        raise TranslationError(f"a constant of type {family} in an unusual form")
    if family in ("text", "uuid"):
        return _Operand(_string(text), family)
    if family == "bpchar":
        return _Operand(_string(text.rstrip(" ")), family)
    if family in ("date", "timestamp", "timestamptz"):
        type_name = {"date": "date", "timestamp": "timestamp_ntz", "timestamptz": "timestamp_ltz"}[family]
        return _Operand(f"{type_name} '{text}'", family)
    if family == "float":
        return _Operand(f"cast('{text}' as double)", family)
    if family not in _LITERAL_FORM:
        raise TranslationError(f"a constant of type {family}")
    whole, _, fraction = text.lstrip("-").partition(".")
    return _Operand(text, family, digits=(len(whole), len(fraction)))


def _column_digits(column: ColumnState) -> tuple[int, int]:
    if found := re.fullmatch(r"decimal\((\d+),\s*(\d+)\)", column.spark_type.lower()):
        precision, scale = int(found[1]), int(found[2])
        return precision - scale, scale
    return 19, 0


def _as_double(operand: _Operand) -> _Operand:
    if operand.family == "float" and operand.column is None:
        return operand
    if operand.family == "decimal" and operand.column is not None:
        raise TranslationError("a comparison of numeric with floating point")
    return _Operand(f"cast({operand.sql} as double)", "float", operand.column)


def _comparable(one: str, two: str) -> bool:
    return one == two or {one, two} <= _NUMERIC


def _array(node: exp.Expr) -> list[exp.Expr]:
    """The elements of ARRAY[...], with or without a cast of the whole, which is applied to each."""
    node = node.unnest()
    if isinstance(node, exp.Cast) and node.to.is_type(exp.DataType.Type.ARRAY) and len(node.to.expressions) == 1:
        return [exp.Cast(this=element, to=node.to.expressions[0].copy()) for element in _array(node.this)]
    if isinstance(node, exp.Array):
        return list(node.expressions)
    raise _refused(node)


def _only(node: exp.Expr, *names: str) -> None:
    """Refuse a node with arguments that this module doesn't know (symmetric, subqueries, ...)."""
    if unknown := [k for k, v in node.args.items() if v and k not in names]:
        raise TranslationError(f"{node.key} with {unknown[0]}")


def _string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _refused(node: exp.Expr) -> TranslationError:
    return TranslationError(f"the expression {node.sql('postgres')}")
