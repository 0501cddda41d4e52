"""Kinds of expectations on a target as a whole, which Great Expectations lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.lake.ledger import ALL_VALUES_KNOWN
from waldelta.lake.ledger.check_records import (
    IS_FRESH,
    REFERENCES_HOLD,
    VALUES_KNOWN,
    recorded_unknown,
)
from waldelta.metadata_columns import PREFIX
from waldelta.quantities import counted
from waldelta.spark_sql import quote, simple_type
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.measure.profile import find_departures, profiled_columns
from waldelta.stages.check.measure.references import count_rows_without_parent
from waldelta.stages.check.suite.expectation import (
    Argument,
    ExpectationKind,
    Outcome,
    PlannedExpectation,
)
from waldelta.stages.check.suite.sql_conditions import listed
from waldelta.stages.check.suite.target_facts import JudgedRows, TargetFacts, TargetRows
from waldelta.target_modes import TargetMode

_MEANING = Argument(str, "what is expected, in words")


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
        """Returns how the target's columns differ from the recorded ones."""
        differences = column_differences(planned.kwargs["columns"], rows.types)
        return _outcome(planned, differences, "as recorded")

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns a sentence with all columns."""
        listed = ", ".join(f"{name} {type_name}" for name, type_name in kwargs["columns"].items())
        return "columns and types match the ones recorded: $listed", {"listed": listed}


class CountedKind(TargetKind):
    """Base class of the kinds that count rows, by the argument ``columns``."""

    arguments: ClassVar[Mapping[str, Argument]] = {
        "columns": Argument(list[str], "columns that identify the measured counts"),
        "meaning": _MEANING,
    }
    # What one row does, and what several rows do, that don't meet the expectation.
    one, more = "row fails", "rows fail"

    def count(self, planned: PlannedExpectation, rows: JudgedRows) -> FailingRows:
        """Counts the rows that don't meet an expectation of this kind."""
        raise NotImplementedError

    def outcome_of(self, planned: PlannedExpectation, rows: JudgedRows) -> Outcome:
        """Returns the outcome with the counted rows."""
        return self.outcome(planned, self.count(planned, rows))

    def outcome(self, planned: PlannedExpectation, found: FailingRows) -> Outcome:
        """Returns the outcome with the counted rows; the page shows examples of them."""
        observed = counted(found.rows, self.one, self.more)
        keys = "; ".join(f"({key})" for key in found.examples)
        details = {
            "observed_value": f"{observed}, such as {keys}" if keys else observed,
            "unexpected_count": found.rows,
        }
        if found.total is not None:
            details["element_count"] = found.total
        return Outcome(planned, not found.rows, observed, found.rows, details=details)


class KeyUnique(CountedKind):
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

    def count(self, planned: PlannedExpectation, rows: JudgedRows) -> FailingRows:
        """Counts the rows that share their key."""
        columns = planned.kwargs["columns"]
        return rows.duplicate_keys(columns, are_met=planned.origin != "own")

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns a sentence with the key's columns."""
        return "key ($listed) is unique", {"listed": ", ".join(kwargs["columns"])}


class KeptRowsHold(CountedKind):
    """The rows that a target keeps besides its live rows are consistent."""

    type = "expect_kept_rows_to_hold"
    is_internal = True

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


class ReferencesHold(CountedKind):
    """Every row of a target with a foreign key has its parent row, in both targets at one cut."""

    type = REFERENCES_HOLD
    scope = "other data"
    is_internal = True
    one, more = "row has no parent row", "rows have no parent row"

    def count(self, planned: PlannedExpectation, rows: JudgedRows) -> FailingRows:
        """Counts the rows that have no parent row."""
        target, key = _target_rows(rows), tuple(planned.kwargs["columns"])
        (reference,) = (each for each in target.references if each.lookup_key == key)
        return count_rows_without_parent(target.runner, reference)

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
