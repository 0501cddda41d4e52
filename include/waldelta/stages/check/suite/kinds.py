"""The kinds of expectations on a target as a whole, the registry of all kinds, and the plan of the
suite that a target must meet.

To add a kind, add its entry in ``row_kinds``, or its class here and in ``KINDS``. A plan is derived
from a target's ledger record, plus own expectations. It names Great Expectations' types and
arguments; ``waldelta.stages.check.check`` runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.config.expectation_files import OwnSuiteFile
from waldelta.errors import ConfigError
from waldelta.lake.ledger import ALL_VALUES_KNOWN, TableState
from waldelta.lake.ledger.check_records import (
    IS_FRESH,
    REFERENCES_HOLD,
    VALUES_KNOWN,
    recorded_unknown,
)
from waldelta.metadata_columns import PREFIX, RAW
from waldelta.spark_sql import quote, simple_type
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.measure.profile import Before, find_departures, profiled_columns
from waldelta.stages.check.measure.references import count_rows_without_parent
from waldelta.stages.check.suite._row_rules import ROWS_SATISFY
from waldelta.stages.check.suite.expectation import (
    Argument,
    DependsOn,
    ExpectationKind,
    JudgedRows,
    OtherKind,
    Outcome,
    PlannedExpectation,
    RowCondition,
    SourceRules,
    TargetFacts,
    TargetRows,
)
from waldelta.stages.check.suite.row_kinds import ROW_EXPECTATION_KINDS, are_common, column_name
from waldelta.stages.check.suite.sql_conditions import listed
from waldelta.target_modes import TargetMode

_MEANING = Argument(str, "what is expected, in words")
# The arguments of kinds that count rows by something else than columns.
_COUNTED = {
    "columns": Argument(list[str], "columns that identify the measured counts"),
    "meaning": _MEANING,
}


class TargetKind(ExpectationKind):
    """Base class of the kinds in this module, each of which judges one expectation by itself."""

    def outcomes(
        self, planned: Sequence[PlannedExpectation], rows: JudgedRows
    ) -> Sequence[Outcome] | None:
        """Returns each outcome; an error of one is no other's."""
        return [self.outcome_of(each, rows) for each in planned]

    def outcome_of(self, planned: PlannedExpectation, rows: JudgedRows) -> Outcome:
        """Returns the outcome of one expectation."""
        raise NotImplementedError


def _outcome(planned: PlannedExpectation, departures: Sequence[str], observed: str) -> Outcome:
    """Returns the outcome of an expectation that fails with any departure, without rows."""
    observed = "; ".join(departures) or observed
    return Outcome(
        planned, not departures, observed[:200], None, details={"observed_value": observed}
    )


class ColumnsMatch(TargetKind):
    """The target has the given columns with the given Spark types, and otherwise only ``_wd_``
    columns.
    """

    type = "expect_target_columns_to_match"
    arguments: ClassVar[Mapping[str, Argument]] = {
        "columns": Argument(dict[str, str], "Spark type by column")
    }

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields that the target has the recorded columns."""
        columns = {column.name: column.spark_type for column in facts.state.columns}
        meaning = "columns and types match the ones recorded"
        yield PlannedExpectation(self.type, {"columns": columns}, "critical", "catalog", meaning)

    def outcome_of(self, planned: PlannedExpectation, rows: JudgedRows) -> Outcome:
        """Returns the outcome: it fails if the target's columns or types differ from the recorded
        ones.
        """
        differences = column_differences(planned.kwargs["columns"], rows.types)
        return _outcome(planned, differences, "as recorded")

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns a sentence with all columns."""
        listed = ", ".join(f"{name} {type_name}" for name, type_name in kwargs["columns"].items())
        return "columns and types match the ones recorded: $listed", {"listed": listed}


class KeyUnique(TargetKind):
    """No two rows of the target have equal values in all of these columns."""

    type = "expect_target_key_to_be_unique"
    arguments: ClassVar[Mapping[str, Argument]] = {
        "columns": Argument(list[str], "the key's columns")
    }
    one, more = "row shares its key", "rows share their key"

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields that the key is unique, if the table has one."""
        key = list(facts.state.key_columns)
        if not key:
            facts.omitted.append("unique key: the table has none, so duplicate rows are allowed")
            return
        meaning = f"key ({', '.join(key)}) is unique"
        yield PlannedExpectation(self.type, {"columns": key}, "critical", "catalog", meaning)

    def outcome_of(self, planned: PlannedExpectation, rows: JudgedRows) -> Outcome:
        """Returns the outcome by the rows that share their key."""
        columns, are_met = planned.kwargs["columns"], planned.origin != "own"
        return self.outcome(planned, rows.duplicate_keys(columns, are_met=are_met))

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns a sentence with the key's columns."""
        return "key ($listed) is unique", {"listed": ", ".join(kwargs["columns"])}


class KeptRowsHold(ExpectationKind):
    """The rows that a target keeps besides its live rows are consistent."""

    type = "expect_kept_rows_to_hold"
    is_internal = True
    arguments: ClassVar[Mapping[str, Argument]] = _COUNTED

    def outcomes(
        self, planned: Sequence[PlannedExpectation], rows: JudgedRows
    ) -> Sequence[Outcome] | None:
        """Returns how many rows break each invariant of the target's mode, in one query."""
        target = _target_rows(rows).target
        found = find_broken_rows(
            target.kept(_target_rows(rows).runner), target.state.kept_as, target.state.key_columns
        )
        return [self.outcome(each, found[each.kwargs["columns"][-1]]) for each in planned]

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields what the rows of a target must meet that keeps more than live rows."""
        for rule in facts.state.kept_as.rules(facts.state.key_columns):
            kwargs = {"columns": [KEPT_ROWS, rule.label], "meaning": rule.meaning}
            yield PlannedExpectation(self.type, kwargs, rule.severity, "pipeline", rule.title)


class ReferencesHold(TargetKind):
    """Each row's foreign key has its row in the referenced target; both targets are read at one
    consistent cut.
    """

    type = REFERENCES_HOLD
    scope = "other data"
    is_internal = True
    one, more = "row has no parent row", "rows have no parent row"
    arguments: ClassVar[Mapping[str, Argument]] = _COUNTED

    def outcome_of(self, planned: PlannedExpectation, rows: JudgedRows) -> Outcome:
        """Returns the outcome by the rows that have no parent row."""
        target, key = _target_rows(rows), tuple(planned.kwargs["columns"])
        (reference,) = (each for each in target.references if each.lookup_key == key)
        return self.outcome(planned, count_rows_without_parent(target.runner, reference))

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields that each foreign key holds, as a warning."""
        # A warning: triggers that enforce a key can be disabled on the source, and the key remains
        # "validated".
        for reference in facts.rules.references:
            kwargs = {"columns": list(reference.lookup_key), "meaning": reference.meaning}
            yield PlannedExpectation(self.type, kwargs, "warning", "catalog", reference.meaning)


class KnownBefore(TargetKind):
    """Base class of the kinds whose result the run determined before, without reading the rows."""

    scope = "other data"
    is_internal = True
    arguments: ClassVar[Mapping[str, Argument]] = {
        "meaning": _MEANING,
        "is_met": Argument(bool, "whether it is"),
        "observed": Argument(str, "what was found"),
    }

    def outcome_of(self, planned: PlannedExpectation, rows: JudgedRows) -> Outcome:  # noqa: ARG002
        """Returns the outcome that the arguments contain."""
        observed, is_met = planned.kwargs["observed"], bool(planned.kwargs["is_met"])
        return Outcome(planned, is_met, observed, None, details={"observed_value": observed})


class AllValuesKnown(KnownBefore):
    """The target lacks no row for want of a value that wasn't sent.

    An UPDATE doesn't send TOASTed values that it didn't change.
    """

    type = ALL_VALUES_KNOWN

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields that no row of the target lacks a value."""
        rows = facts.rules.unknown_rows
        # A changelog has the rows anyway, and records which values they lack.
        if rows is not None and facts.state.kept_as.completes_rows:
            observed = recorded_unknown(rows)
            kwargs = {"meaning": VALUES_KNOWN, "is_met": not rows, "observed": observed}
            yield PlannedExpectation(self.type, kwargs, "warning", "pipeline", VALUES_KNOWN)


class IsFresh(KnownBefore):
    """The target's lag behind the source is within its limit."""

    type = IS_FRESH

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields that the lag is within each limit."""
        for limit in facts.rules.freshness:
            kwargs = {"meaning": limit.meaning, "is_met": limit.is_met, "observed": limit.observed}
            yield PlannedExpectation(self.type, kwargs, limit.severity, "pipeline", limit.meaning)


class AsBefore(TargetKind):
    """Row count or column distributions are within the bounds of earlier runs.

    Without bounds the expectation only measures.
    """

    type = "expect_target_to_be_as_before"
    scope = "earlier runs"
    needs_profile = True
    is_internal = True
    arguments: ClassVar[Mapping[str, Argument]] = {
        "columns": Argument(
            list[list[Any]], "what is measured: names, and whether they are numbers"
        ),
        "bounds": Argument(dict[str, Any], "from and to where each statistic is as before"),
        "part": Argument(str, "rows or columns"),
        "meaning": _MEANING,
    }

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields the expectations also without bounds, so that a full check measures."""
        if facts.before is None:
            return
        columns = [list(column) for column in profiled_columns(facts.state)]
        for part, meaning, bounds in (
            ("rows", "the number of rows is as in earlier runs", {"rows": facts.before.rows}),
            ("columns", "columns are distributed as in earlier runs", dict(facts.before.columns)),
        ):
            kwargs = {
                "part": part,
                "meaning": meaning,
                "columns": columns,
                "bounds": bounds if any(bounds.values()) else {},
            }
            yield PlannedExpectation(self.type, kwargs, "warning", "pipeline", meaning)

    def is_judged(self, kwargs: Mapping[str, Any]) -> bool:
        """Returns whether enough runs have measured the target."""
        return bool(kwargs["bounds"])

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns the meaning, and whether it is judged."""
        note = "" if self.is_judged(kwargs) else " (not judged until enough runs have measured it)"
        return "$meaning$note", {"meaning": kwargs["meaning"], "note": note}

    def outcome_of(self, planned: PlannedExpectation, rows: JudgedRows) -> Outcome:
        """Returns where the profile departs from the bounds."""
        if (measured := _target_rows(rows).measured) is None:
            raise TypeError("the rows weren't measured")
        found = find_departures(measured, planned.kwargs["part"], planned.kwargs["bounds"])
        return _outcome(planned, found, "as before")


# Takes the place of column names in the arguments.
KEPT_ROWS = "_wd_kept_rows"


def _target_rows(rows: JudgedRows) -> TargetRows:
    """Returns the rows as a target's; raises TypeError for others, which the run doesn't plan."""
    if not isinstance(rows, TargetRows):
        raise TypeError("only the rows of a target can be judged")
    return rows


def find_broken_rows(
    frame: DataFrame, mode: TargetMode, key: Sequence[str]
) -> dict[str, FailingRows]:
    """Returns how many rows of a target break each invariant of its mode, by its label."""
    # Windows must be computed before their results can be counted.
    names, rules = ", ".join(map(quote, key)), mode.rules(key)
    columns = [f"{rule.broken.format(key=names)} as broken{n}" for n, rule in enumerate(rules)]
    counts = [F.count_if(f"broken{n}") for n in range(len(rules))]
    (row,) = mode.judged_rows(frame, key).selectExpr(*columns).agg(*counts).collect()
    return {rule.label: FailingRows(count) for rule, count in zip(rules, row, strict=True)}


def column_differences(recorded: Mapping[str, str], held: Mapping[str, str]) -> list[str]:
    """Returns each column that is missing, of another type, or not recorded.

    Names are written as Great Expectations lists them.
    """
    expected = {listed(name): simple_type(type_name) for name, type_name in recorded.items()}
    missing = [f"{name} is missing" for name in expected if name not in held]
    changed = [
        f"{n} is {held[n]}, not {t}" for n, t in expected.items() if n in held and held[n] != t
    ]
    added = [f"{n} isn't recorded" for n in held if n not in expected and not n.startswith(PREFIX)]
    return missing + changed + added


# By type. A suite lists its expectations in this order, of which ``PassedSuite`` has a digest.
KINDS: dict[str, ExpectationKind] = {
    kind.type: kind
    for kind in (
        ColumnsMatch(),
        KeyUnique(),
        KeptRowsHold(),
        *ROW_EXPECTATION_KINDS,
        ReferencesHold(),
        AllValuesKnown(),
        IsFresh(),
        AsBefore(),
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
    return KINDS.get(name) or OtherKind(name)


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
    of_nulls, column = kind_of(type_name).of_nulls, asks_for_nulls(type_name, kwargs, raw)
    rest = {name: value for name, value in kwargs.items() if name != "column"}
    if of_nulls is None or column is None or not are_common(rest):
        return type_name, dict(kwargs)
    return ROWS_SATISFY, {"condition": of_nulls(column), "meaning": meaning, **rest}


@dataclass(frozen=True, slots=True)
class SuitePlan:
    """A target's expectations, the rules that could not be planned, and the error for refused own
    ones.
    """

    table: str
    expectations: tuple[PlannedExpectation, ...]
    omitted: tuple[str, ...] = ()
    refused: ConfigError | None = None


def plan_suite(
    state: TableState,
    held_columns: Sequence[str],
    own: OwnSuiteFile | None = None,
    sure: SourceRules | None = None,
    before: Before | None = None,
) -> SuitePlan:
    """Plan the suite of one target.

    ``held_columns`` are the columns its Delta table has now, which show whether ``_wd_raw`` exists.
    ``sure`` are the source's guarantees, ``before`` earlier measurements (None: not judged).
    """
    sure = sure or SourceRules()
    facts = TargetFacts(state, held_columns, sure, before, list(sure.omitted))
    planned = [one for kind in KINDS.values() for one in kind.plan(facts)]
    planned += _own(facts, own)
    return SuitePlan(state.table_name, tuple(planned), tuple(facts.omitted))


def _own(facts: TargetFacts, own: OwnSuiteFile | None) -> Iterator[PlannedExpectation]:
    if own is None:
        return
    types = {c.name: c.stored_as for c in facts.state.columns}
    raw = [name for name, kind in types.items() if kind.may_be_raw and RAW in facts.columns]
    # Expectations with a gate are included, because the gate never judged rows of a copy or
    # released rows.
    for number, item in enumerate(own.suite.expectations):
        meaning = own.meaning(number)
        kind, kwargs = with_raw(item.type, item.kwargs, raw, meaning)
        if kind == item.type and (column := asks_for_nulls(kind, kwargs, raw)) is not None:
            told = (
                f"values of {column} that only {RAW} has count as null: use no argument but mostly"
            )
            facts.omitted.append(f"{meaning}: {told}")
        yield PlannedExpectation(
            kind,
            kwargs,
            item.severity,
            "own",
            meaning,
            own.place(number),
            is_gate=item.gate != "warn",
        )
