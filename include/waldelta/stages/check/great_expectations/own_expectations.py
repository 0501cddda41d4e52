"""Own expectations that can't be evaluated: unknown columns, SQL that doesn't parse, and values
that a column's type can't be compared with; and the evaluation of expectations on some rows.

Gates, checks and preflight refuse such expectations with the same words, and count failing rows by
the same functions. Great Expectations is imported only when it is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from waldelta.config.expectation_files import OwnExpectation, TargetColumns, is_sql
from waldelta.errors import ConfigError, class_and_text
from waldelta.pipeline import named_error
from waldelta.stages.check.great_expectations.lazy_import import import_great_expectations
from waldelta.stages.check.measure.failing_rows import MOST_EXAMPLES, FailingRows
from waldelta.stages.check.suite.expectation import (
    Outcome,
    PlannedExpectation,
    QueryRows,
    RowCondition,
)
from waldelta.stages.check.suite.kinds import KINDS, SuitePlan, TargetKind, kind_of
from waldelta.stages.check.suite.row_kinds import (
    RowKind,
    column_name,
    is_of_column,
    number_of,
)
from waldelta.stages.check.suite.sql_conditions import unresolved_columns, why_not_parsed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

T = TypeVar("T")
Numbered = Mapping[int, PlannedExpectation]
Conditions = Mapping[int, RowCondition]
Counts = dict[int, FailingRows]

# The most expectations that one query evaluates, and the number of failing ones after which the
# search for others stops.
MOST_PER_QUERY, MOST_ERRORS = 500, 20
_TOO_MANY = ConfigError(
    f"it is evaluated with others, and {MOST_ERRORS} expectations of the file can't be: correct"
    " those first"
)
# Arguments that name columns the target must have; a list names several.
_COLUMN_ARGUMENTS = ("column", "column_A", "column_B", "column_list", "columns")
# An expectation of this kind asks whether the column is there.
_ASKS_FOR_COLUMN = "expect_column_to_exist"
NUMBERS = ("tinyint", "smallint", "int", "bigint", "float", "double", "decimal")
_MOMENTS = ("date", "timestamp")
_BETWEEN = "expect_column_values_to_be_between"
# Spark would compare values of these types as texts, or cast them to the bound's type as long as
# all of them can be cast.
_NO_TEXT = (
    "Great Expectations doesn't compare a text or boolean with bounds: cast it in the condition of"
    " an expect_target_rows_to_satisfy"
)
# Spark's condition of an error that code it has compiled raises as Java's own.
_JAVA = {"java.util.regex.PatternSyntaxException": "INVALID_PARAMETER_VALUE.PATTERN"}


def why_refused(
    item: OwnExpectation, columns: TargetColumns, *, is_built: bool = True
) -> list[str]:
    """Returns why an own expectation can't be evaluated on a target with these columns.

    ``is_built``: Great Expectations, whose import takes seconds, judges its name and arguments
    first. It also says what is wrong with the arguments of our own kinds.
    """
    kind = kind_of(item.type)
    if kind.is_internal:
        return [f"{item.type}: waldelta plans it by itself, with what it reads: remove it"]
    misfits = kind.misfits(item.kwargs) if kind.is_ours else []
    if (is_built or misfits) and (why := why_not_built(item.type, item.kwargs)) is not None:
        return [why]
    if misfits:
        return [f"{item.type}: of another type than expected: kwargs.{', kwargs.'.join(misfits)}"]
    return [
        *_of_columns(item, columns),
        *_of_sql(item, columns),
        *_of_values(item, columns),
        *_of_gate(item, columns),
    ]


def why_unevaluable(err: Exception) -> str:
    """Returns why Spark can't evaluate an expectation, without a row's values.

    Spark's analysis sees only names, types and the expectation's own text; a message of a later
    error may contain values, so only its condition is returned.
    """
    from pyspark.errors import AnalysisException

    if isinstance(err, (AnalysisException, ConfigError)):
        return str(err).strip().partition("\n")[0]
    return _condition_of(err) or type(err).__name__


def is_parse_error(err: Exception) -> bool:
    """Returns whether Spark can't parse an expectation's text."""
    from pyspark.errors import ParseException

    return isinstance(err, ParseException)


def unevaluable(planned: PlannedExpectation, err: Exception) -> Outcome:
    """Returns the outcome of an expectation that can't be evaluated."""
    log.warning("%s can't be evaluated: %s", planned.meaning, class_and_text(err))
    return Outcome(planned, None, None, None, raised=why_unevaluable(err))


def _condition_of(err: Exception) -> str | None:
    """Returns the error condition in Spark's terms.

    Python names only some of Java's errors. Of the others Spark's own may be a cause, as when a
    task failed.
    """
    cause: Any = getattr(err, "java_exception", None)
    if cause is None:
        return getattr(err, "getCondition", lambda: None)()
    while cause is not None:
        if (condition := _JAVA.get(cause.getClass().getName())) is not None:
            return condition
        with suppress(Exception):  # Only errors of Spark have a condition.
            if condition := cause.getCondition():
                return str(condition)
        cause = cause.getCause()
    return None


def evaluate_each(
    evaluate: Callable[[Sequence[int]], Mapping[int, T]], numbers: Sequence[int]
) -> tuple[dict[int, T], dict[int, Exception]]:
    """Returns what ``evaluate`` returns of expectations, and the errors of those that fail.

    Usually none fails, and a group takes a query instead of one for each. A group that fails is
    halved, which costs no other group a second query, until MOST_ERRORS have failed alone. Raises
    an error of ours, and what ends the session.
    """
    results: dict[int, T] = {}
    errors: dict[int, Exception] = {}
    waiting = groups_of(numbers)[::-1]
    while waiting:
        group = waiting.pop()
        try:
            results |= evaluate(group)
        except Exception as err:
            if (task_error := named_error(err)) is not None:
                raise task_error from err
            if len(group) == 1:
                errors[group[0]] = err
            elif len(errors) >= MOST_ERRORS:
                errors |= dict.fromkeys(group, _TOO_MANY)
            else:
                middle = len(group) // 2
                waiting += [group[middle:], group[:middle]]
    return results, errors


def judge_each(
    judge: Callable[[list[PlannedExpectation]], Sequence[Outcome]], planned: Numbered
) -> tuple[dict[int, Outcome], dict[int, Exception]]:
    """Returns the outcomes of expectations by their numbers, as evaluate_each() does."""

    def judge_numbers(numbers: Sequence[int]) -> dict[int, Outcome]:
        return dict(zip(numbers, judge([planned[n] for n in numbers]), strict=True))

    return evaluate_each(judge_numbers, [*planned])


def groups_of(numbers: Sequence[int]) -> list[Sequence[int]]:
    """Returns expectations in groups: a query for more takes longer to plan than several."""
    return [numbers[n : n + MOST_PER_QUERY] for n in range(0, len(numbers), MOST_PER_QUERY)]


def arrow_conditions(conditions: Conditions, names: Iterable[str]) -> dict[int, RowCondition]:
    """Returns the conditions that Arrow may judge on rows of these columns. Of some values it may
    not be certain even so: count_by_arrow() leaves these conditions out.
    """
    read, there = {n: c.read_by_arrow for n, c in conditions.items()}, {*names}
    return {n: conditions[n] for n, of in read.items() if of is not None and {*of} <= there}


def count_by_arrow(
    batches: Iterable[pa.Table],
    conditions: Conditions,
    most: int | None = MOST_EXAMPLES,
) -> Counts:
    """Returns the failing rows of each condition that Arrow evaluates with certainty, with at most
    so many examples (None: all).
    """
    counts: Counts = dict.fromkeys(conditions, FailingRows(judged=0, total=0))
    for rows in batches:
        for number, failing_rows in list(counts.items()):
            masks = conditions[number].failing(rows)
            if masks is None:
                # Arrow isn't certain about some of the rows, so Spark evaluates this expectation.
                del counts[number]
                continue
            columns = [
                name for name in conditions[number].example_columns if name in rows.column_names
            ]
            counts[number] = failing_rows.plus(*masks, rows.select(columns), most)
    return counts


def count_by_spark(
    frame: DataFrame, conditions: Conditions, most: int | None = MOST_EXAMPLES
) -> tuple[Counts, dict[int, Exception]]:
    """Returns the rows that fail each condition, and why others can't be evaluated."""
    from waldelta.stages.check.suite.spark_conditions import count_rows

    read_all = cache(frame.count)

    def count(numbers: Sequence[int]) -> Counts:
        try:
            return count_rows(frame, {n: conditions[n] for n in numbers}, most)
        except Exception:
            if len(numbers) > 1:
                read_all()  # Raises if the rows can't be read: that is no expectation's error.
            raise

    return evaluate_each(count, sorted(conditions))


def _of_columns(item: OwnExpectation, columns: TargetColumns) -> Iterator[str]:
    if kind_of(item.type).type == _ASKS_FOR_COLUMN:
        return
    for argument in _COLUMN_ARGUMENTS:
        names = item.kwargs.get(argument)
        for name in names if isinstance(names, list) else [names]:
            if isinstance(name, str) and columns.type_of(column_name(name)) is None:
                yield f"kwargs.{argument}: {_absent(column_name(name), columns)}"


def _absent(name: str, columns: TargetColumns) -> str:
    if name.lower() in {column.lower() for column in columns.unpublished}:
        return f"column {name} isn't published, so the target lacks it"
    near = get_close_matches(name.lower(), by_lower := {c.lower(): c for c in columns.types}, 1)
    hint = f"did you mean {by_lower[near[0]]}?" if near else f"it has {', '.join(columns.types)}"
    return f"the target has no column {name}: {hint}"


def _of_sql(item: OwnExpectation, columns: TargetColumns) -> Iterator[str]:
    for argument in ("condition", "row_condition"):
        text = item.kwargs.get(argument)
        if not isinstance(text, str) or not is_sql(argument, item.kwargs):
            continue
        if (why := why_not_parsed(text)) is not None:
            yield f"kwargs.{argument} is no condition in Spark SQL: {why}"
            continue
        for name in unresolved_columns(text, columns.types):
            yield f"kwargs.{argument}: {_absent(name, columns)}"


def _of_values(item: OwnExpectation, columns: TargetColumns) -> Iterator[str]:
    """Yields values that Spark can't compare with the column, whatever its rows are."""
    kind, kwargs = kind_of(item.type), item.kwargs
    if not is_of_column(kind):
        return
    type_name = columns.type_of(column_name(kwargs.get("column"))) or ""
    bounds = kwargs.keys() & {"min_value", "max_value"}
    if kind.type == _BETWEEN and bounds and type_name.startswith(("string", "boolean")):
        yield f"column {kwargs['column']} is {type_name} in the target: {_NO_TEXT}"
        return
    compared = {name: kwargs[name] for name in sorted(bounds)} if kind.type == _BETWEEN else {}
    if isinstance(values := kwargs.get("value_set"), (list, tuple, set)):
        compared |= {f"value_set[{number}]": value for number, value in enumerate(values)}
    for argument, value in compared.items():
        if (expected := _misfit(value, type_name)) is not None:
            yield (
                f"kwargs.{argument} is {value!r}, and column {kwargs['column']} is {type_name}:"
                f" write {expected}"
            )


def _misfit(value: Any, type_name: str) -> str | None:
    """Returns what to write instead of a value for a column of a Spark type; None where it fits.

    >>> _misfit("x", "int"), _misfit("5", "int"), _misfit(True, "string")
    ('a number', None, 'a text in quotes')
    """
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    is_numeric = is_number or (isinstance(value, str) and isinstance(number_of(value), float))
    if value is None or isinstance(value, Mapping):
        return None
    # The values that fit a column, by its type, and what to write instead of others.
    values = (
        (NUMBERS, is_numeric, "a number"),
        (_MOMENTS, not is_number and not isinstance(value, bool), "a date or time"),
        ("string", not isinstance(value, (int, float)), "a text in quotes"),
        ("boolean", isinstance(value, bool), "true or false"),
    )
    return next((text for of, fits, text in values if type_name.startswith(of) and not fits), None)


def _of_gate(item: OwnExpectation, columns: TargetColumns) -> Iterator[str]:
    """Yields why ``gate: quarantine`` can't find the failing rows."""
    if item.gate != "quarantine":
        return
    kind = kind_of(item.type)
    if not columns.has_key:
        yield "gate: quarantine needs a key, and the table has none: use stop"
    if not isinstance(kind, RowKind):
        row_types = ", ".join(sorted(k.type for k in KINDS.values() if k.scope == "row"))
        yield (
            "gate: quarantine needs an expectation that identifies the failing rows: one of"
            f" {row_types}; {item.type} can be stop or warn"
        )
    elif unknown := sorted(item.kwargs.keys() - kind.arguments.keys()):
        yield (
            "gate: quarantine needs an expectation that identifies the failing rows, with its"
            f" basic arguments only: remove {', '.join(unknown)}, or use stop"
        )
    elif isinstance(mostly := item.kwargs.get("mostly", 1), (int, float)) and mostly < 1:
        yield "gate: quarantine checks each row: remove mostly, or use stop"


def why_not_built(type_name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Returns why Great Expectations refuses an expectation's name or arguments, or None."""
    import_great_expectations({type_name})
    from waldelta.stages.check.great_expectations import run_suite

    return run_suite.why_not_built(type_name, kwargs)


def judge_rows(table: str, planned: Sequence[PlannedExpectation], rows: DataFrame) -> list[Outcome]:
    """Returns the outcomes of expectations on these rows, in their order.

    Our own kinds judge theirs, Great Expectations all others. Raises ConfigError for a name or an
    argument that it refuses.
    """
    outcomes, numbers = {}, []
    for number, each in enumerate(planned):
        if isinstance(kind := kind_of(each.type), TargetKind):
            (outcomes[number],) = kind.outcomes([each], QueryRows(rows))
        else:
            numbers.append(number)
    if numbers:
        import_great_expectations({planned[number].type for number in numbers})
        from waldelta.stages.check.great_expectations.run_suite import judge_frame

        plan = SuitePlan(table, tuple(planned[number] for number in numbers))
        outcomes |= dict(zip(numbers, judge_frame(f"rows of {table}", plan, rows), strict=True))
    return [outcomes[number] for number in range(len(planned))]
