"""Translates a row filter to a Spark SQL condition with PostgreSQL's meaning, or refuses it.

``waldelta.row_filter.resolve`` has found types and signatures. This module turns each node into SQL
with the templates of ``_operators_and_functions``. Raw values in ``_wd_raw`` are included
(``values``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from waldelta.errors import FilterNotTranslatable
from waldelta.metadata_columns import RAW
from waldelta.row_filter.analyzed_filter import RowFilter
from waldelta.row_filter.parse import place
from waldelta.row_filter.resolve import PERIODIC, resolve
from waldelta.row_filter.spark._operators_and_functions import BUILT, FIELDS, TEMPLATES, TRUNCATIONS
from waldelta.row_filter.spark.values import (
    INFINITE,
    OPERATORS,
    RAW_FUNCTIONS,
    UNJUDGED,
    Sql,
    UnheldConstant,
    as_timestamp,
    compare,
    computed,
    fail,
    keep_infinite,
    literal,
    only,
    spark_type,
    stays_in_years,
)
from waldelta.row_filter.typed_tree import FLOATS, MOMENTS, Type, Typed, column_type
from waldelta.spark_sql import quote, string

if TYPE_CHECKING:
    from waldelta.lake.ledger import ColumnState

# Spark takes longer to compile longer conditions than to evaluate them.
_MAX_LENGTH = 100_000


def spark_condition(
    row_filter: RowFilter, columns: Sequence[ColumnState], names: Mapping[str, str] | None = None
) -> str:
    """Returns Spark SQL that is true exactly for rows that the filter admits, and false or NULL for
    others.

    ``columns`` are the table's columns as their target stores them; the filter has their names on
    the source. ``names`` maps a column's name in the target to an SQL expression (default: the
    quoted name), so that a condition can also be built for old rows or prefixed columns.
    ``_wd_raw`` in it is the map of raw values. A mapping without ``_wd_raw`` means that there is no
    such map: columns whose type may need it are then refused.

    A row for which PostgreSQL raises an error raises one in Spark, too, in sessions with
    ``spark.sql.ansi.enabled``. So does a row with a raw value that is needed for more than a
    comparison. Raises FilterNotTranslatable.
    """
    types = {c.name_on_source: column_type(c.type_name, c.stored_as) for c in columns}
    typed = resolve(row_filter, types)
    may_be_raw = {c.name for c in columns if c.stored_as.may_be_raw}
    raw = quote(RAW) if names is None else names.get(RAW)
    stored = {c.name_on_source: c.name for c in columns}
    translation = _Translation(row_filter.analysed, stored, may_be_raw, names or {}, raw)
    return translation.sql(typed).value


class _Translation:
    def __init__(
        self,
        text: str,
        stored: Mapping[str, str],
        may_be_raw: set[str],
        names: Mapping[str, str],
        raw: str | None,
    ) -> None:
        self.text, self.stored, self.may_be_raw = text, stored, may_be_raw
        self.names, self.raw = names, raw
        self.elements = 0

    def sql(self, typed: Typed) -> Sql:
        build = (
            _Translation.comparison
            if typed.key in OPERATORS
            else _STRUCTURE.get(typed.key, _Translation.call)
        )
        try:
            translation = build(self, typed)
        except UnheldConstant as err:
            raise FilterNotTranslatable(
                self.text,
                place(self.text, err.start),
                "a constant that Spark can't hold, in more than a comparison",
            ) from None
        if len(translation.value) + len(translation.raw or "") > _MAX_LENGTH:
            raise self.refused(typed, "an expression that becomes too long")
        return translation

    def refused(self, typed: Typed, reason: str) -> FilterNotTranslatable:
        return FilterNotTranslatable(self.text, place(self.text, typed.start), reason)

    def column(self, typed: Typed) -> Sql:
        name = self.stored.get(typed.value or "", "")
        value = self.names.get(name, quote(name))
        if name not in self.may_be_raw:
            return Sql(value)
        if self.raw is None:
            raise self.refused(
                typed,
                f"column {name!r} may have values that its Delta type can't hold; only _wd_raw has"
                " them, and metadata_columns: false leaves it out",
            )
        return Sql(value, f"try_element_at({self.raw}, {string(name)})")

    def comparison(self, typed: Typed) -> Sql:
        # A raw array is refused: an array is used only when it isn't raw.
        left, right = (
            self.sql(argument).judged() if argument.type.element else self.sql(argument)
            for argument in typed.arguments
        )
        kinds = [argument.type for argument in typed.arguments]
        if {kind.name for kind in kinds} == {"date", "timestamp"}:
            left, right = (
                as_timestamp(side) if k.name == "date" else side
                for side, k in zip((left, right), kinds, strict=True)
            )
            kinds = [Type("timestamp")] * 2
        return _guard_arguments([left, right], compare(typed.key, kinds, left, right))

    def call(self, typed: Typed) -> Sql:
        """Translate a call by its template; raw arguments fail, unless the key has a rule for
        them.
        """
        arguments = [self.sql(argument) for argument in typed.arguments]
        rule = RAW_FUNCTIONS.get(typed.key)
        operands = [a.judged() if rule is None else a for a in arguments]
        template = BUILT[typed.key](typed) if typed.key in BUILT else TEMPLATES[typed.key]
        raises = template.startswith("!") or any(a.raises for a in operands)
        value = template.removeprefix("!").format(
            *(a.value for a in operands), type=spark_type(typed.type)
        )
        result = Sql(f"({value})" if value.startswith("case ") else value, raises=raises)
        result = replace(
            result, in_years=typed.type.name not in MOMENTS or stays_in_years(typed, operands)
        )
        if rule is not None and any(a.raw is not None for a in operands):
            result = rule(typed, operands, result)
        return _guard_arguments(operands, result)

    def logic(self, typed: Typed) -> Sql:
        parts = [self.sql(argument) for argument in typed.arguments]
        raises = any(part.raises for part in parts)
        if typed.key == "not":
            return Sql(f"(not {parts[0].value})", raises=raises)
        return Sql("(" + f" {typed.key} ".join(part.value for part in parts) + ")", raises=raises)

    def test(self, typed: Typed) -> Sql:
        operand = self.sql(typed.arguments[0])
        negated = "not " if typed.value else ""
        if typed.key == "is_null":
            return _after([operand], Sql(f"({negated}{operand.is_null})"))
        word = typed.key.removeprefix("is_")
        return Sql(f"({operand.value} is {negated}{word})", raises=operand.raises)

    def distinct(self, typed: Typed) -> Sql:
        left, right = (self.sql(argument) for argument in typed.arguments)
        equal = self.comparison(replace(typed, key="eq"))
        both = f"({left.is_null} and {right.is_null})"
        return Sql(f"(not ({both} or coalesce({equal.value}, false)))", raises=equal.raises)

    def array(self, typed: Typed) -> Sql:
        elements = [self.sql(element) for element in typed.arguments]
        values = ", ".join(element.value for element in elements)
        return Sql(
            f"cast(array({values}) as {spark_type(typed.type)})",
            raises=any(e.raises for e in elements),
        )

    def listed(self, typed: Typed) -> Sql:
        """Translate ``= ANY (ARRAY[…])`` and the like."""
        operand, *compared = typed.arguments
        if not compared:
            return _after([self.sql(operand)], Sql("false" if typed.key == "any" else "true"))
        # A Spark IN is a hash lookup, which distinguishes 0 and -0.
        value = self.sql(operand)
        plain = operand.type.name not in (*FLOATS, "bpchar") and value.raw is None
        constants = [node.arguments[1] for node in compared if node.arguments]
        is_one_type = len(constants) == len(compared) and all(
            c.is_constant and c.type.name == operand.type.name for c in constants
        )
        membership = (typed.key, typed.value) in (("any", "="), ("all", "<>"))
        listed = (
            [self.sql(constant) for constant in constants]
            if plain and is_one_type and membership
            else []
        )
        if listed and all(constant.raw is None for constant in listed):
            values = ", ".join(constant.value for constant in listed)
            return Sql(
                f"({value.value} {'in' if typed.key == 'any' else 'not in'} ({values}))",
                raises=value.raises,
            )
        parts = [self.sql(node) for node in compared]
        word = " or " if typed.key == "any" else " and "
        return Sql(
            "(" + word.join(part.value for part in parts) + ")",
            raises=any(part.raises for part in parts),
        )

    def of_elements(self, typed: Typed) -> Sql:
        """Translate ``= ANY (column)``."""
        array, compared, operand = typed.arguments
        if self.sql(operand).raises:
            raise self.refused(
                typed, "an array's elements compared with an expression that may fail"
            )
        self.elements += 1
        name = f"e{self.elements}"
        outer, self.names = self.names, {**self.names, f"\0{array.value}": name}
        condition = self.sql(compared)
        self.names = outer
        function = "exists" if typed.key == "any_element" else "forall"
        elements = self.sql(array).judged()
        return Sql(f"{function}({elements.value}, {name} -> {condition.value})", raises=True)

    def case(self, typed: Typed) -> Sql:
        *whens, default = typed.arguments
        conditions = [self.sql(when) for when in whens[0::2]]
        results = [self.result(typed, result) for result in (*whens[1::2], default)]
        return _choose(list(zip(conditions, results, strict=False)), results[-1])

    def result(self, typed: Typed, node: Typed) -> Sql:
        """Returns one of several results, converted to the type of them all."""
        value = self.sql(node)
        if typed.type.name == "numeric" and typed.type.digits != node.type.digits:
            return replace(value, value=f"cast({value.value} as {spark_type(typed.type)})")
        return value

    def coalesce(self, typed: Typed) -> Sql:
        *first, last = (self.result(typed, node) for node in typed.arguments)
        if not any(each.raw is not None for each in (*first, last)):
            values = ", ".join(each.value for each in (*first, last))
            return _join_sql(f"coalesce({values})", [*first, last])
        return _choose(
            [(Sql(f"(not {each.is_null})", raises=each.raises), each) for each in first], last
        )

    def nullif(self, typed: Typed) -> Sql:
        first, second = (self.sql(node) for node in typed.arguments)
        equal = self.comparison(replace(typed, key="eq"))
        raw = (
            None if first.raw is None else f"case when {equal.value} then null else {first.raw} end"
        )
        value = f"(case when {equal.value} then null else {first.value} end)"
        return Sql(
            value, raw, first.raises or second.raises, in_years=first.in_years, unheld=first.unheld
        )

    def extreme(self, typed: Typed) -> Sql:
        """Translate GREATEST and LEAST, which ignore NULLs."""
        results = [self.result(typed, node) for node in typed.arguments]
        if (
            not any(each.raw is not None for each in results)
            and typed.type.name != "bpchar"
            and len(results) > 1
        ):
            return _join_sql(f"{typed.key}({', '.join(each.value for each in results)})", results)
        kinds = [Type(typed.type.name, typed.type.digits)] * 2
        winner, raises = results[0], any(each.raises for each in results)
        for candidate in results[1:]:
            keeps = compare("ge" if typed.key == "greatest" else "le", kinds, winner, candidate)
            condition = Sql(
                f"({candidate.is_null} or coalesce({keeps.value}, false))", raises=keeps.raises
            )
            winner = _choose([(condition, winner)], candidate)
        return replace(winner, raises=raises)

    def field(self, typed: Typed) -> Sql:
        """Translate a field of a date or timestamp; an infinite one has an infinite year and no
        month.
        """
        name, moment = typed.arguments[0].value or "", self.sql(typed.arguments[1])
        kind = "double" if typed.key == "date_part" else spark_type(typed.type)
        field = FIELDS[name].format(moment.value)
        value = f"cast({field} as {kind})"
        if moment.raw is None:
            return Sql(value, raises=moment.raises)
        unheld = only([moment], INFINITE)
        infinite, odd = (
            f"{moment.raw} in ('infinity', '-infinity')",
            f"{moment.raw} is not null then {fail(UNJUDGED)}",
        )
        if typed.key == "extract" and name not in PERIODIC:
            text = f"replace({moment.raw}, 'infinity', 'Infinity')"
            infinities = tuple(
                (text.replace("infinity", "Infinity"), start) for text, start in unheld
            )
            return Sql(
                value,
                f"case when {infinite} then {text} when {odd} end",
                raises=True,
                unheld=infinities,
            )
        outside = "null" if name in PERIODIC else f"cast({moment.raw} as double)"
        return Sql(
            f"(case when {infinite} then {outside} when {odd} else {value} end)", raises=True
        )

    def truncated(self, typed: Typed) -> Sql:
        moment = self.sql(typed.arguments[1])
        value = TRUNCATIONS[typed.arguments[0].value or ""].format(moment.value)
        truncation = Sql(value, raises=moment.raises, in_years=moment.in_years)
        return truncation if moment.raw is None else keep_infinite(typed, [moment], truncation)

    def finite(self, typed: Typed) -> Sql:
        moment = self.sql(typed.arguments[0])
        is_finite = f"case when {moment.value} is not null then true end"
        if moment.raw is None:
            return Sql(is_finite, raises=moment.raises)
        return Sql(
            f"case when {moment.raw} is not null then {moment.raw} not in ('infinity', '-infinity')"
            f" else {is_finite} end",
            raises=moment.raises,
        )


def _after(computed_first: Sequence[Sql], result: Sql) -> Sql:
    """Returns the result after all of these parts that may fail have been computed."""
    parts = [
        part
        for each in computed_first
        if each.raises
        for part in (each.value, each.raw)
        if part is not None
    ]
    if not parts:
        return result
    raw = None if result.raw is None else f"case when {computed(*parts)} then {result.raw} end"
    return replace(
        result,
        value=f"(case when {computed(*parts)} then {result.value} end)",
        raw=raw,
        raises=True,
    )


def _guard_arguments(arguments: Sequence[Sql], result: Sql) -> Sql:
    """Let arguments fail even after one that is NULL: PostgreSQL computes all of them first."""
    nullable = [k for k, argument in enumerate(arguments) if not argument.is_constant]
    return _after(arguments[nullable[0] + 1 :] if nullable else [], result)


def _join_sql(value: str, parts: Sequence[Sql]) -> Sql:
    return Sql(value, raises=any(p.raises for p in parts), in_years=all(p.in_years for p in parts))


def _choose(choices: Sequence[tuple[Sql, Sql]], default: Sql) -> Sql:
    """Build a CASE over values that may be raw."""
    results = [result for _, result in choices] + [default]

    def case(parts: Sequence[str]) -> str:
        whens = " ".join(
            f"when {condition.value} then {part}"
            for (condition, _), part in zip(choices, parts, strict=False)
        )
        return f"(case {whens} else {parts[-1]} end)"

    raw = (
        case([r.raw or "null" for r in results])
        if any(r.raw is not None for r in results)
        else None
    )
    raises = any(part.raises for pair in choices for part in pair) or default.raises
    return Sql(
        case([r.value for r in results]),
        raw,
        raises,
        in_years=all(r.in_years for r in results),
        unheld=tuple(each for r in results for each in r.unheld),
    )


_STRUCTURE: dict[str, Callable[[_Translation, Typed], Sql]] = {
    "constant": lambda _, typed: literal(typed),
    "column": _Translation.column,
    **dict.fromkeys(("and", "or", "not"), _Translation.logic),
    **dict.fromkeys(("is_null", "is_true", "is_false"), _Translation.test),
    "is_distinct": _Translation.distinct,
    "array": _Translation.array,
    **dict.fromkeys(("any", "all"), _Translation.listed),
    **dict.fromkeys(("any_element", "all_element"), _Translation.of_elements),
    "element": lambda self, typed: Sql(self.names[f"\0{typed.value}"]),
    "case": _Translation.case, "coalesce": _Translation.coalesce, "nullif": _Translation.nullif,
    **dict.fromkeys(("greatest", "least"), _Translation.extreme),
    **dict.fromkeys(("extract", "date_part"), _Translation.field),
    "date_trunc": _Translation.truncated, "is_finite": _Translation.finite,
}  # fmt: skip
