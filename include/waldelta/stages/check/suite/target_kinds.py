"""Kinds of expectations on a target as a whole, which Great Expectations lacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import codes_of
from waldelta.lake.ledger import ALL_VALUES_KNOWN
from waldelta.lake.ledger.check_records import (
    IS_FRESH,
    REFERENCES_HOLD,
    VALUES_KNOWN,
    recorded_unknown,
)
from waldelta.quantities import counted
from waldelta.spark import Runner
from waldelta.spark_sql import quote
from waldelta.stages.check.measure.columns import column_differences
from waldelta.stages.check.measure.duplicate_keys import (
    DuplicateKeys,
    IntegerKey,
    find_duplicate_keys,
)
from waldelta.stages.check.measure.profile import profiled_columns
from waldelta.stages.check.measure.references import Reference, count_rows_without_parent
from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation
from waldelta.stages.check.suite.kind import Argument, ExpectationKind, Judgement
from waldelta.stages.check.suite.profile_drift import find_departures
from waldelta.stages.check.suite.target_facts import CheckedTarget, TargetFacts
from waldelta.target_modes import TargetMode

# Result entry: the observed value without the rows' values that ``observed_value`` shows in the
# report.
WITHOUT_VALUES = "observed_without_values"
# Result entry: the target's measured profile.
PROFILE = "profile"

_MEANING = Argument(str, "what is expected, in words")


class TargetKind(ExpectationKind):
    """Base class of the kinds in this module: the run measures them, or knows the result before.

    ``if_met`` is what it observes when the expectation is met.
    """

    if_met: ClassVar[str]

    def is_measured_early(self, planned: PlannedExpectation) -> bool:
        """Returns whether the run planned it and doesn't know yet that it isn't met."""
        # Only what the run itself planned is measured.
        return planned.origin != "own" and bool(planned.kwargs.get("is_met", True))

    def columns_read(self, planned: PlannedExpectation) -> Sequence[str] | None:
        """Returns no columns where the run has the result without them."""
        return () if self.is_measured_early(planned) else None

    def is_met_by(self, rows: pa.Table, planned: PlannedExpectation) -> bool:  # noqa: ARG002
        """Returns True, since ``columns_read`` says whether the run has another result."""
        return True

    def outcome(self, planned: PlannedExpectation, unmet: int = 0) -> Outcome:
        """Returns the outcome without a number of rows."""
        return Outcome(planned, not unmet, self.if_met, None)


class ColumnsMatch(TargetKind):
    """The target has the given columns with the given Spark types, and otherwise only ``_wd_``
    columns.
    """

    type = "expect_target_columns_to_match"
    if_met = "as recorded"
    arguments: ClassVar[Mapping[str, Argument]] = {
        "columns": Argument(dict[str, str], "Spark type by column")
    }
    metrics: ClassVar[tuple[str, ...]] = ("table.column_types",)

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields that the target has the recorded columns."""
        columns = {column.name: column.spark_type for column in facts.state.columns}
        meaning = "columns and types match the ones recorded"
        yield PlannedExpectation(self.type, {"columns": columns}, "critical", "catalog", meaning)

    def fits(self, columns: Mapping[str, str], kwargs: Mapping[str, Any]) -> bool:
        """Returns whether these columns are the recorded ones."""
        return not column_differences(kwargs["columns"], columns)

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns a sentence with all columns."""
        listed = ", ".join(f"{name} {type_name}" for name, type_name in kwargs["columns"].items())
        return "columns and types match the ones recorded: $listed", {"listed": listed}

    def judge(self, kwargs: Mapping[str, Any], metrics: Mapping[str, Any]) -> Judgement:
        """Returns how the columns of the frame differ."""
        held = {c["name"]: c["type"].simpleString() for c in metrics["table.column_types"]}
        differences = column_differences(kwargs["columns"], held)
        return not differences, {"observed_value": "; ".join(differences) or self.if_met}


class CountedKind(TargetKind):
    """Base class of the kinds for which Spark counts rows in the background, by ``columns``."""

    arguments: ClassVar[Mapping[str, Argument]] = {
        "columns": Argument(list[str], "columns that identify the measured counts"),
        "meaning": _MEANING,
    }
    metrics: ClassVar[tuple[str, ...]] = ("target_rows.duplicate_keys", "table.row_count")
    # What one row does, and what several rows do, that don't meet the expectation.
    one, more = "row fails", "rows fail"

    def start_counts(
        self,
        *,
        background: ThreadPoolExecutor,
        runner: Runner,
        target: CheckedTarget,
        references: Sequence[Reference],
        met: int | None,
    ) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
        """Have Spark count rows that don't meet expectations of this kind, in the background.

        Returns the counts by the argument ``columns`` of the planned expectations. ``met`` is a
        version whose rows are known to meet the suite.
        """
        raise NotImplementedError

    def outcome(self, planned: PlannedExpectation, unmet: int = 0) -> Outcome:
        """Returns the outcome with the counted rows."""
        return Outcome(planned, not unmet, counted(unmet, self.one, self.more), unmet)

    def judge(self, kwargs: Mapping[str, Any], metrics: Mapping[str, Any]) -> Judgement:  # noqa: ARG002
        """Returns the counted rows, with examples where there are some."""
        found: DuplicateKeys = metrics["target_rows.duplicate_keys"]
        observed = counted(found.rows, self.one, self.more)
        keys = "; ".join(f"({key})" for key in found.examples)
        details = {
            "observed_value": f"{observed}, such as {keys}" if keys else observed,
            WITHOUT_VALUES: observed,
            "unexpected_count": found.rows,
        }
        if "table.row_count" in metrics:
            details["element_count"] = metrics["table.row_count"]
        return not found.rows, details


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

    def start_counts(
        self,
        *,
        background: ThreadPoolExecutor,
        runner: Runner,
        target: CheckedTarget,
        met: int | None,
        **_: Any,
    ) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
        """Have rows counted that share their key.

        Of a mirror, only keys of rows written since ``met`` are compared.
        """
        columns, keeps_rows = tuple(target.state.key_columns), target.state.kept_as.keeps_rows
        is_single, since = len(columns) == 1, None if keeps_rows else met

        def count() -> DuplicateKeys:
            key = (
                IntegerKey.open(target.table, target.version, columns[0])
                if is_single or since is not None
                else None
            )
            if key is None:
                return find_duplicate_keys(target.frame(runner), columns)
            if since is not None:
                key = key.written_since(since)
            if is_single and not keeps_rows and key.is_unique():
                return DuplicateKeys(0)
            rows = key.rows_in_question(target.frame(runner))
            return find_duplicate_keys(rows, columns, dense=is_single and key.is_dense)

        return {columns: background.submit(count)} if columns else {}

    def columns_read(self, planned: PlannedExpectation) -> Sequence[str] | None:
        """Returns the key's columns."""
        return list(planned.kwargs["columns"])

    def is_met_by(self, rows: pa.Table, planned: PlannedExpectation) -> bool:
        """Returns whether all keys differ; nulls count as equal."""
        codes = codes_of([rows[name] for name in planned.kwargs["columns"]])
        return len(np.unique(codes)) == len(codes)

    def words(self, kwargs: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Returns a sentence with the key's columns."""
        return "key ($listed) is unique", {"listed": ", ".join(kwargs["columns"])}


class KeptRowsHold(CountedKind):
    """The rows that a target keeps besides its live rows are consistent."""

    type = "expect_kept_rows_to_hold"
    metrics: ClassVar[tuple[str, ...]] = ("target_rows.duplicate_keys",)

    def start_counts(
        self,
        *,
        background: ThreadPoolExecutor,
        runner: Runner,
        target: CheckedTarget,
        **_: Any,
    ) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
        """Have rows counted that break an invariant of the target's mode."""
        mode, key = target.state.kept_as, target.state.key_columns
        if not (rules := mode.rules(key)):
            return {}
        # The tasks that wait for this one are behind it in the queue.
        found = background.submit(lambda: find_broken_rows(target.kept(runner), mode, key))
        return {
            (KEPT_ROWS, rule.label): background.submit(
                lambda label: found.result()[label], rule.label
            )
            for rule in rules
        }

    def is_measured_early(self, planned: PlannedExpectation) -> bool:  # noqa: ARG002
        """Returns False: the quick check is of mirrors, which keep live rows only."""
        return False

    def plan(self, facts: TargetFacts) -> Iterator[PlannedExpectation]:
        """Yields what the rows of a target must meet that keeps more than live rows."""
        for rule in facts.state.kept_as.rules(facts.state.key_columns):
            kwargs = {"columns": [KEPT_ROWS, rule.label], "meaning": rule.meaning}
            yield PlannedExpectation(self.type, kwargs, rule.severity, "pipeline", rule.title)


class ReferencesHold(CountedKind):
    """Every row of a target with a foreign key has its parent row, in both targets at one cut."""

    type = REFERENCES_HOLD
    scope = "other data"
    one, more = "row has no parent row", "rows have no parent row"

    def start_counts(
        self,
        *,
        background: ThreadPoolExecutor,
        runner: Runner,
        references: Sequence[Reference],
        **_: Any,
    ) -> dict[tuple[str, ...], Future[DuplicateKeys]]:
        """Have rows counted that have no parent row."""
        return {
            reference.lookup_key: background.submit(count_rows_without_parent, runner, reference)
            for reference in references
        }

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
    arguments: ClassVar[Mapping[str, Argument]] = {
        "meaning": _MEANING,
        "is_met": Argument(bool, "whether it is"),
        "observed": Argument(str, "what was found"),
    }
    metrics: ClassVar[tuple[str, ...]] = ("table.row_count",)

    def outcome(self, planned: PlannedExpectation, unmet: int = 0) -> Outcome:  # noqa: ARG002
        """Returns the outcome that the arguments contain."""
        return Outcome(planned, bool(planned.kwargs["is_met"]), planned.kwargs["observed"], None)

    def judge(self, kwargs: Mapping[str, Any], metrics: Mapping[str, Any]) -> Judgement:  # noqa: ARG002
        """Returns the result that the arguments contain."""
        return kwargs["is_met"], {"observed_value": kwargs["observed"]}


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
    if_met = "as before"
    scope = "earlier runs"
    needs_profile = True
    arguments: ClassVar[Mapping[str, Argument]] = {
        "columns": Argument(
            list[list[Any]], "what is measured: names, and whether they are numbers"
        ),
        "bounds": Argument(dict[str, Any], "from and to where each statistic is as before"),
        "part": Argument(str, "rows or columns"),
        "meaning": _MEANING,
    }
    metrics: ClassVar[tuple[str, ...]] = ("target_rows.profile",)

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

    def judge(self, kwargs: Mapping[str, Any], metrics: Mapping[str, Any]) -> Judgement:
        """Returns where the profile departs from the bounds, and the profile itself."""
        rows, columns = measured = metrics[self.metrics[0]]
        found = find_departures(measured, kwargs["part"], kwargs["bounds"])
        details = {
            "observed_value": "; ".join(found) or counted(rows, "row"),
            "element_count": rows,
        }
        if kwargs["part"] == "rows":
            details[PROFILE] = [rows, *(asdict(column) for column in columns)]
        return not found, details


# Takes the place of column names as the key of the prefetched result.
KEPT_ROWS = "_wd_kept_rows"


def find_broken_rows(
    frame: DataFrame, mode: TargetMode, key: Sequence[str]
) -> dict[str, DuplicateKeys]:
    """Returns how many rows of a target break each invariant of its mode, by its label."""
    # Windows must be computed before their results can be counted.
    names, rules = ", ".join(map(quote, key)), mode.rules(key)
    columns = [f"{rule.broken.format(key=names)} as broken{n}" for n, rule in enumerate(rules)]
    counts = [F.count_if(f"broken{n}") for n in range(len(rules))]
    (row,) = mode.judged_rows(frame, key).selectExpr(*columns).agg(*counts).collect()
    return {rule.label: DuplicateKeys(count) for rule, count in zip(rules, row, strict=True)}
