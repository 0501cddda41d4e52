"""The kinds of expectations on a target as a whole, the registry of all kinds, and the plan of the
suite that a target must meet.

To add a kind, add its entry in ``row_kinds``, or in ``KINDS`` here. A plan is derived
from a target's ledger record, plus own expectations. It names Great Expectations' types and
arguments; ``waldelta.stages.check.check`` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from waldelta.config.expectation_files import OwnExpectation, OwnSuiteFile, Severity
from waldelta.lake.ledger import ALL_VALUES_KNOWN, TableState
from waldelta.lake.ledger.check_records import (
    IS_FRESH,
    REFERENCES_HOLD,
    VALUES_KNOWN,
    describe_unknown,
)
from waldelta.metadata_columns import PREFIX, RAW
from waldelta.spark_sql import simple_type
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.measure.profile import ProfileBounds, find_departures, profiled_columns
from waldelta.stages.check.measure.references import count_rows_without_parent
from waldelta.stages.check.suite.expectation import (
    Argument,
    DependsOn,
    ExpectationKind,
    JudgedRows,
    Origin,
    OtherKind,
    Outcome,
    PlannedExpectation,
    RowCondition,
    SourceRules,
    TargetFacts,
    TargetRows,
    Words,
)
from waldelta.stages.check.suite.row_kinds import ROW_EXPECTATION_KINDS, ROWS_SATISFY, column_name
from waldelta.stages.check.suite.sql_conditions import listed

# What is expected of a target: arguments, severity, origin and meaning.
Rule = tuple[dict[str, Any], Severity, Origin, str]
# The rows that don't meet an expectation, or whether it is met and what was observed.
Finding = FailingRows | tuple[bool, str]


@dataclass(frozen=True, eq=False)
class TargetKind(ExpectationKind):
    """A kind that judges a target as a whole: ``rules`` yields what is expected, and ``judge``
    returns the finding of each expectation of the kind.

    ``judge`` gets a target's rows; of a kind that isn't internal also those of a query.
    """

    rules: Callable[[TargetFacts], Iterable[Rule]]
    judge: Callable[[Sequence[PlannedExpectation], Any], Iterable[Finding]]
    is_internal: bool = field(default=True, kw_only=True)

    def plan(self, facts: TargetFacts) -> Iterable[PlannedExpectation]:
        """Yields what the rules yield."""
        return (PlannedExpectation(self.type, *rule) for rule in self.rules(facts))

    def is_judged(self, kwargs: Mapping[str, Any]) -> bool:
        """Returns whether there are bounds, where the kind has them: enough runs have measured."""
        return bool(kwargs.get("bounds", True))

    def outcomes(self, planned: Sequence[PlannedExpectation], rows: JudgedRows) -> list[Outcome]:
        """Returns the outcome of each expectation."""
        return [
            self.outcome(each, finding)
            if isinstance(finding, FailingRows)
            else observed(each, *finding)
            for each, finding in zip(planned, self.judge(planned, rows), strict=True)
        ]


def observed(planned: PlannedExpectation, is_met: bool, text: str) -> Outcome:
    """Returns the outcome of an expectation that isn't judged by counts of rows."""
    return Outcome(planned, is_met, text[:200], None, details={"observed_value": text})


def _recorded_columns(facts: TargetFacts) -> Iterator[Rule]:
    columns = {column.name: column.spark_type for column in facts.state.columns}
    yield {"columns": columns}, "critical", "catalog", "columns and types match the ones recorded"


def _differences(planned: Sequence[PlannedExpectation], rows: JudgedRows) -> Iterator[Finding]:
    for each in planned:
        differences = column_differences(each.kwargs["columns"], rows.types)
        yield not differences, "; ".join(differences) or "as recorded"


def _key(facts: TargetFacts) -> Iterator[Rule]:
    if key := list(facts.state.key_columns):
        yield {"columns": key}, "critical", "catalog", f"key ({', '.join(key)}) is unique"
    else:
        facts.omitted.append("unique key: the table has none, so duplicate rows are allowed")


def _kept_rows(facts: TargetFacts) -> Iterator[Rule]:
    for rule in facts.state.target_mode.rules(facts.state.key_columns):
        kwargs = {"columns": [KEPT_ROWS, rule.label], "meaning": rule.meaning}
        yield kwargs, rule.severity, "pipeline", rule.title


def _broken_rows(planned: Sequence[PlannedExpectation], rows: TargetRows) -> list[Finding]:
    """Returns how many rows break each invariant of the target's mode, in one query."""
    broken = rows.broken_rows()
    return [broken[each.kwargs["columns"][-1]] for each in planned]


def _references(facts: TargetFacts) -> Iterator[Rule]:
    # A warning: triggers that enforce a key can be disabled on the source, and the key remains
    # "validated".
    for reference in facts.rules.references:
        kwargs = {"columns": list(reference.lookup_key), "meaning": reference.meaning}
        yield kwargs, "warning", "catalog", reference.meaning


def _rows_without_parent(planned: Sequence[PlannedExpectation], rows: TargetRows) -> list[Finding]:
    references = {reference.lookup_key: reference for reference in rows.references}
    keys = (tuple(each.kwargs["columns"]) for each in planned)
    return [count_rows_without_parent(rows.runner, references[key]) for key in keys]


def _unknown_values(facts: TargetFacts) -> Iterator[Rule]:
    rows = facts.rules.unknown_rows
    # A changelog has the rows anyway, and records which values they lack.
    if rows is not None and facts.state.target_mode.completes_rows:
        kwargs = {"meaning": VALUES_KNOWN, "is_met": not rows, "observed": describe_unknown(rows)}
        yield kwargs, "warning", "pipeline", VALUES_KNOWN


def _freshness(facts: TargetFacts) -> Iterator[Rule]:
    for limit in facts.rules.freshness:
        kwargs = {"meaning": limit.meaning, "is_met": limit.is_met, "observed": limit.observed}
        yield kwargs, limit.severity, "pipeline", limit.meaning


def _known_before(planned: Sequence[PlannedExpectation], _: JudgedRows) -> list[Finding]:
    """Returns what the run determined before, without reading the rows."""
    return [(bool(each.kwargs["is_met"]), each.kwargs["observed"]) for each in planned]


def _profile(facts: TargetFacts) -> Iterator[Rule]:
    """Yields the expectations also without bounds, so that a full check measures."""
    if facts.bounds is None:
        return
    columns = [list(column) for column in profiled_columns(facts.state)]
    for part, meaning, bounds in (
        ("rows", "the number of rows is as in earlier runs", {"rows": facts.bounds.rows}),
        ("columns", "columns are distributed as in earlier runs", dict(facts.bounds.columns)),
    ):
        kwargs = {
            "part": part,
            "meaning": meaning,
            "columns": columns,
            "bounds": bounds if any(bounds.values()) else {},
        }
        yield kwargs, "warning", "pipeline", meaning


def _departures(planned: Sequence[PlannedExpectation], rows: TargetRows) -> Iterator[Finding]:
    if rows.measured is None:
        raise TypeError("the rows weren't measured")
    for each in planned:
        departures = find_departures(rows.measured, each.kwargs["part"], each.kwargs["bounds"])
        yield not departures, "; ".join(departures) or "as before"


def _profile_words(kwargs: Mapping[str, Any]) -> Words:
    note = "" if kwargs["bounds"] else " (not judged until enough runs have measured it)"
    return "$meaning$note", {"meaning": kwargs["meaning"], "note": note}


def _columns_words(kwargs: Mapping[str, Any]) -> Words:
    columns = ", ".join(f"{name} {type_name}" for name, type_name in kwargs["columns"].items())
    return "columns and types match the ones recorded: $listed", {"listed": columns}


# Takes the place of column names in the arguments.
KEPT_ROWS = "_wd_kept_rows"


def column_differences(recorded: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Returns each column that is missing, of another type, or not recorded.

    Names are written as Great Expectations lists them.
    """
    expected = {listed(name): simple_type(type_name) for name, type_name in recorded.items()}
    missing = [f"{name} is missing" for name in expected if name not in actual]
    changed = [
        f"{n} is {actual[n]}, not {t}"
        for n, t in expected.items()
        if n in actual and actual[n] != t
    ]
    added = [
        f"{n} isn't recorded" for n in actual if n not in expected and not n.startswith(PREFIX)
    ]
    return missing + changed + added


_MEANING = Argument(str, "what is expected, in words")
# The arguments of kinds that count rows by something else than columns.
_COUNTED = {
    "columns": Argument(list[str], "columns that identify the measured counts"),
    "meaning": _MEANING,
}
_KNOWN_BEFORE = {
    "meaning": _MEANING,
    "is_met": Argument(bool, "whether it is"),
    "observed": Argument(str, "what was found"),
}
_PROFILE = {
    "columns": Argument(list[list[Any]], "what is measured: names, and whether they are numbers"),
    "bounds": Argument(dict[str, Any], "from and to where each statistic is as before"),
    "part": Argument(str, "rows or columns"),
    "meaning": _MEANING,
}
# By type. A suite lists its expectations in this order, of which ``PassedSuite`` has a digest.
KINDS: dict[str, ExpectationKind] = {
    kind.type: kind
    for kind in (
        TargetKind(
            "expect_target_columns_to_match",
            _recorded_columns,
            _differences,
            summary="The target has the given columns with the given Spark types, and otherwise"
            " only ``_wd_`` columns.",
            arguments={"columns": Argument(dict[str, str], "Spark type by column")},
            is_internal=False,
            words=_columns_words,
        ),
        TargetKind(
            "expect_target_key_to_be_unique",
            _key,
            lambda planned, rows: [
                rows.duplicate_keys(each.kwargs["columns"], are_met=each.origin != "own")
                for each in planned
            ],
            summary="No two rows of the target have equal values in all of these columns.",
            arguments={"columns": Argument(list[str], "the key's columns")},
            is_internal=False,
            one="row shares its key",
            several="rows share their key",
            words=lambda kwargs: (
                "key ($listed) is unique",
                {"listed": ", ".join(kwargs["columns"])},
            ),
        ),
        TargetKind(
            "expect_kept_rows_to_hold",
            _kept_rows,
            _broken_rows,
            summary="The rows that a target keeps besides its live rows are consistent.",
            arguments=_COUNTED,
        ),
        *ROW_EXPECTATION_KINDS,
        TargetKind(
            REFERENCES_HOLD,
            _references,
            _rows_without_parent,
            summary="Each row's foreign key has its row in the referenced target; both targets are"
            " read at one consistent cut.",
            arguments=_COUNTED,
            scope="other data",
            one="row has no parent row",
            several="rows have no parent row",
        ),
        TargetKind(
            ALL_VALUES_KNOWN,
            _unknown_values,
            _known_before,
            summary="The target lacks no row for want of a value that wasn't sent: an UPDATE"
            " doesn't send TOASTed values that it didn't change.",
            arguments=_KNOWN_BEFORE,
            scope="other data",
        ),
        TargetKind(
            IS_FRESH,
            _freshness,
            _known_before,
            summary="The target's lag behind the source is within its limit.",
            arguments=_KNOWN_BEFORE,
            scope="other data",
        ),
        TargetKind(
            "expect_target_to_be_as_before",
            _profile,
            _departures,
            summary="Row count or column distributions are within the bounds of earlier runs."
            " Without bounds the expectation only measures.",
            arguments=_PROFILE,
            scope="earlier runs",
            needs_profile=True,
            words=_profile_words,
        ),
    )
}


def kind_of(type_name: str) -> ExpectationKind:
    """Returns the kind of an expectation by its type or class.

    Kinds that aren't in the registry are Great Expectations' own.

    >>> kind_of("ExpectColumnMaxToBeBetween").type
    'expect_column_max_to_be_between'
    """
    name = type_name
    if name[:1].isupper():
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
    return KINDS.get(name) or OtherKind(name, is_ours=False)


def row_conditions(planned: Mapping[int, PlannedExpectation]) -> dict[int, RowCondition]:
    """Returns by number the conditions of expectations that judge single rows."""
    conditions = {n: kind_of(each.type).row_condition(each) for n, each in planned.items()}
    return {n: condition for n, condition in conditions.items() if condition is not None}


def depends_on(planned: PlannedExpectation) -> DependsOn:
    """Returns what an expectation's result depends on, so which rows a run has to read for it."""
    return kind_of(planned.type).depends_on(planned)


def asks_for_nulls(type_name: str, kwargs: Mapping[str, Any], raw: Iterable[str]) -> str | None:
    """Returns the column in ``raw`` for which an expectation judges nulls, or None.

    Values of the columns in ``raw`` may be stored in ``_wd_raw``.
    """
    # Spark matches column names case-insensitively, but not keys of a map.
    name = column_name(kwargs.get("column")).lower()
    return next((c for c in raw if kind_of(type_name).of_nulls and c.lower() == name), None)


def with_raw(
    type_name: str, kwargs: Mapping[str, Any], raw: Iterable[str], meaning: str
) -> tuple[str, dict[str, Any]]:
    """Returns an expectation's type and arguments that don't take a value in ``_wd_raw`` for null.

    They are unchanged where that makes no difference, and where an argument is known only to Great
    Expectations.

    >>> options = {"column": "d", "mostly": 0.5}
    >>> with_raw("expect_column_values_to_be_null", options, ["d"], "no d")[1]["condition"]
    "(`d` is null and not coalesce(map_contains_key(_wd_raw, 'd'), false))"
    """
    kind, column = kind_of(type_name), asks_for_nulls(type_name, kwargs, raw)
    if kind.of_nulls is None or column is None or kind.misfits(kwargs):
        return type_name, dict(kwargs)
    other_arguments = {name: value for name, value in kwargs.items() if name != "column"}
    return ROWS_SATISFY, {"condition": kind.of_nulls(column), "meaning": meaning, **other_arguments}


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """A target's expectations, the rules that can't be planned, and why own ones are refused."""

    table: str
    expectations: tuple[PlannedExpectation, ...]
    omitted: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def plan_suite(
    state: TableState,
    held_columns: Sequence[str],
    own_suite: OwnSuiteFile | None = None,
    sure: SourceRules | None = None,
    bounds: ProfileBounds | None = None,
) -> SuitePlan:
    """Plan the suite of one target.

    ``held_columns`` are the columns its Delta table has now, which show whether ``_wd_raw`` exists.
    ``sure`` are the source's guarantees, ``bounds`` earlier measurements (None: not judged).
    """
    sure = sure or SourceRules()
    facts = TargetFacts(state, held_columns, sure, bounds, list(sure.omitted))
    planned = [one for kind in KINDS.values() for one in kind.plan(facts)]
    planned += _plan_own(facts, own_suite)
    return SuitePlan(state.table_name, tuple(planned), tuple(facts.omitted))


def _plan_own(facts: TargetFacts, own_suite: OwnSuiteFile | None) -> Iterator[PlannedExpectation]:
    if own_suite is None:
        return
    types = {c.name: c.stored_as for c in facts.state.columns}
    raw = [name for name, kind in types.items() if kind.may_be_raw and RAW in facts.columns]
    # Expectations with a gate are included, because the gate never judged rows of a copy or
    # released rows.
    for item, planned in plan_own(own_suite, raw):
        if planned.type == item.type and (column := asks_for_nulls(item.type, item.kwargs, raw)):
            note = (
                f"values of {column} that only {RAW} has count as null: use no argument but mostly"
            )
            facts.omitted.append(f"{planned.meaning}: {note}")
        yield planned


def plan_own(
    file: OwnSuiteFile, raw: Sequence[str] = (), folder: Path | None = None
) -> Iterator[tuple[OwnExpectation, PlannedExpectation]]:
    """Yields a table's own expectations, each with its form that doesn't take a value in
    ``_wd_raw``, where those of the columns in ``raw`` may be, for null.

    Places are relative to ``folder``.
    """
    for number, item in enumerate(file.suite.expectations):
        meaning = file.meaning(number)
        yield (
            item,
            PlannedExpectation(
                *with_raw(item.type, item.kwargs, raw, meaning),
                item.severity,
                "own",
                meaning,
                file.place(number, folder),
                is_gate=item.gate != "warn",
            ),
        )
