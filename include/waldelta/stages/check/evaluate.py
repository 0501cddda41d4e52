"""Judges one target: plans its suite, measures its profile, and evaluates each expectation once,
where it costs least. What forces all rows to be read is listed in ``met_before``.

What is expected of single rows is counted together: by Arrow in this process, or by Spark in one
aggregate where the rows are many, or where only Spark certainly knows what a condition means. Rows
that an earlier check found to meet the suite, and that haven't changed since, aren't read again.
The other kinds count for themselves, in the background. Great Expectations evaluates the kinds that
are its own, and arguments that only it takes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds

from waldelta.changes.stage.net_files import small_rows
from waldelta.errors import (
    ConfigError,
    JavaMissing,
    SparkUnreachable,
)
from waldelta.lake import READ_FAILURES, TargetVersion, by_row_group, row_count
from waldelta.lake.driver_limits import MOST_DRIVER_ROWS
from waldelta.lake.ledger.check_records import REFERENCES_HOLD, describe_admission
from waldelta.metadata_columns import LSN
from waldelta.pipeline.targets.quarantined_rows import PositionRange, decision_on, undecided
from waldelta.quantities import counted
from waldelta.row_filter.spark.evaluate import evaluate
from waldelta.spark import Runner
from waldelta.stages.check.check_run import (
    CheckRun,
    are_met,
    changed_since,
    is_unchanged_since_full_check,
    keep_other_data,
    met_at,
    needs_full_check,
    suite_of,
    verdict_of_error,
)
from waldelta.stages.check.great_expectations.own_expectations import (
    Conditions,
    Counts,
    Numbered,
    arrow_conditions,
    count_by_arrow,
    count_by_spark,
    groups_of,
    judge_each,
    judge_rows,
    unevaluable,
    why_not_built,
)
from waldelta.stages.check.measure.failing_rows import (
    examples_of,
    leave_to_spark,
)
from waldelta.stages.check.measure.references import CheckedTarget, Reference
from waldelta.stages.check.suite.expectation import (
    Outcome,
    TableVerdict,
    TargetRows,
    unchecked,
)
from waldelta.stages.check.suite.kinds import (
    SuitePlan,
    TargetKind,
    depends_on,
    kind_of,
    observed,
    row_conditions,
)
from waldelta.stages.check.suite.sql_conditions import listed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)

# A merge rewrites whole files, of whose rows few have changed. This process reads up to so many.
_MOST_ROWS = 50 * MOST_DRIVER_ROWS
_ROWS_AT_ONCE = 1 << 16
# So many expectations of a target have examples of rows that fail them.
_MOST_EXEMPLIFIED = 20


@dataclass
class SuiteEvaluation:
    """The outcomes of a suite by the number of the expectation, and what wasn't judged.

    ``omitted`` says which gates aren't judged on which rows, ``refused`` which own expectations
    Great Expectations refuses, by their place.
    """

    run: CheckRun
    rows: TargetRows
    plan: SuitePlan
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    omitted: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    exemplified: int = 0

    @cached_property
    def conditions(self) -> Conditions:
        """The conditions of expectations on single rows; examples have the rows' keys."""
        key, planned = self.rows.target.state.key_columns, dict(enumerate(self.plan.expectations))
        return {
            number: replace(of, example_columns=[*dict.fromkeys((*key, *(of.columns or ())))])
            for number, of in row_conditions(planned).items()
        }

    def evaluate(self) -> tuple[Outcome, ...]:
        """Returns the outcomes of the expectations that are judged, in the plan's order, and one of
        all own expectations that are refused.

        Raises what reading the target raises, and what starting a session raises where only Spark
        reads it. The outcome of an expectation that can't be evaluated by itself says why.
        """
        judged = {
            number: planned
            for number, planned in enumerate(self.plan.expectations)
            if kind_of(planned.type).is_judged(planned.kwargs)
        }
        other_numbers = sorted(judged.keys() - self.conditions.keys())
        waiting = []
        for kind, numbers in groupby(other_numbers, lambda number: kind_of(judged[number].type)):
            if not isinstance(kind, TargetKind):
                continue
            of_kind = {n: judged[n] for n in numbers}
            if self.rows.in_memory is None:
                waiting.append(self.run.background.submit(self._of_kind, kind, of_kind))
            else:  # They are judged sooner than another thread begins.
                self._of_kind(kind, of_kind)
        self._count_rows({n: c for n, c in self.conditions.items() if n in judged})
        for future in waiting:
            future.result()
        if remaining := {n: p for n, p in judged.items() if n not in self.outcomes}:
            self._by_great_expectations(remaining)
        # Operators may have accepted or released rows that fail a gate.
        if LSN in self.rows.types and (of := self.run.decided.get(self.plan.table)):
            self._judge_gates_again(of)
        outcomes = [self.outcomes[number] for number in sorted(self.outcomes)]
        if texts := dict.fromkeys((*self.plan.refused, *self.refused)):
            outcomes.append(unchecked(ConfigError("\n".join(texts))))
        return tuple(outcomes)

    def _of_kind(self, kind: TargetKind, planned: Numbered) -> None:
        outcomes, errors = judge_each(lambda of: kind.outcomes(of, self.rows), planned)
        self.outcomes |= outcomes | {n: unevaluable(planned[n], err) for n, err in errors.items()}

    def _count_rows(self, conditions: Conditions) -> None:
        """Count the rows that fail expectations of single rows.

        After changes only rows that may have changed are counted, where all others are known to
        meet the expectation. If one of those fails, all rows are counted: a report says of how
        many.
        """
        planned = self.plan.expectations
        changes = {
            n: condition
            for n, condition in conditions.items()
            if planned[n].kwargs.get("mostly", 1) == 1 and depends_on(planned[n]) == "row"
        }
        met = self.rows.met
        if met is not None and changes:
            counts = self._by_arrow(changes, met)
            if (remaining := _without(changes, counts)) and LSN in self.rows.types:
                # changed_since() reads the log entry of each commit after that version.
                since = changed_since(self.run.history, self.rows.target, self.plan)
                if since is not None:
                    counts |= self._by_spark(
                        remaining, lambda frame: frame.where(f"{LSN} >= {since}")
                    )
            self._keep({n: count for n, count in counts.items() if not count.rows})
            conditions = _without(conditions, self.outcomes)
        self._keep(self._count_where(conditions))

    def _count_where(self, conditions: Conditions, where: str | None = None) -> Counts:
        """Returns the counts among all rows, or those that meet a condition in Spark SQL."""
        counts = self._by_arrow(conditions, None, where)
        return counts | self._by_spark(
            _without(conditions, counts),
            lambda frame: frame if where is None else frame.where(where),
        )

    def _by_arrow(
        self, conditions: Conditions, met: int | None, where: str | None = None
    ) -> Counts:
        """Returns the counts of those that Arrow evaluates on the rows that were written since a
        version, or on all.
        """
        table = self.rows.table
        if not conditions or table is None or table.place.lake.on_spark:
            return {}
        with leave_to_spark(f"counts the failing rows of {self.plan.table}"):
            if (dataset := written_since(table, met)) is not None:
                target = self.rows.target
                if target.state.target_mode.keeps_rows:
                    read = partial(target.read_live, table)
                    return count_rows(target.live_columns(table), read, conditions, where)
                return count_written(dataset, conditions, where)
        return {}

    def _by_spark(self, conditions: Conditions, among: Callable[[DataFrame], DataFrame]) -> Counts:
        """Returns the counts of those that Spark evaluates; keeps why one can't be evaluated."""
        if not conditions:
            return {}
        counts, errors = count_by_spark(among(self.rows.frame()), conditions)
        self.outcomes |= {
            n: unevaluable(self.plan.expectations[n], err) for n, err in errors.items()
        }
        return counts

    def _keep(self, counts: Counts) -> None:
        """Keep the outcomes, and of those that fail first some of the rows that fail them."""
        key = self.rows.target.state.key_columns
        for number, failing in sorted(counts.items()):
            planned = self.plan.expectations[number]
            outcome = kind_of(planned.type).outcome(planned, failing)
            if not outcome.success and self.exemplified < _MOST_EXEMPLIFIED:
                self.exemplified += 1
                outcome = replace(outcome, examples=tuple(examples_of(failing.examples, key)))
            self.outcomes[number] = outcome

    def _by_great_expectations(self, planned: Numbered) -> None:
        whys = {n: why_not_built(each.type, each.kwargs) for n, each in planned.items()}
        if listed := [
            f"  - {planned[n].place or planned[n].type}: {w}" for n, w in whys.items() if w
        ]:
            self.refused.append("expectations are refused:\n" + "\n".join(listed))
        for group in groups_of([number for number in planned if not whys[number]]):
            expectations = [planned[number] for number in group]
            outcomes = judge_rows(self.plan.table, expectations, self.rows.frame())
            self.outcomes |= dict(zip(group, outcomes, strict=True))

    def _judge_gates_again(self, positions: Collection[PositionRange]) -> None:
        """Judge the failed gates again, without the rows that operators accepted or released."""
        where, decision = undecided(positions), decision_on(positions)
        missed = {
            number: outcome.planned
            for number, outcome in self.outcomes.items()
            if outcome.planned.is_gate and outcome.success is False
        }
        conditions = {n: c for n, c in self.conditions.items() if n in missed}
        counts = self._count_where(conditions, where)
        met = {
            n for n, of in counts.items() if kind_of(missed[n].type).outcome(missed[n], of).success
        }
        if other_gates := _without(missed, conditions):
            rows = self.rows.frame().where(where)
            if rows.isEmpty():  # No aggregate can be computed of no rows.
                met |= other_gates.keys()
            else:
                new_outcomes = judge_rows(self.plan.table, [*other_gates.values()], rows)
                met |= {
                    n
                    for n, outcome in zip(other_gates, new_outcomes, strict=True)
                    if outcome.success
                }
        for number in sorted(met):
            planned, text = (
                missed[number],
                describe_admission(decision, self.outcomes[number].unexpected_count),
            )
            self.omitted.append(
                f"{planned.meaning}: not judged on rows that an operator {decision}"
            )
            self.outcomes[number] = observed(planned, True, text)


def _without(numbered: Mapping[int, Any], omitted: Mapping[int, Any]) -> dict[int, Any]:
    return {number: each for number, each in numbered.items() if number not in omitted}


def written_since(table: TargetVersion, met: int | None) -> ds.Dataset | None:
    """Returns the rows of files that a version lacks (None: all rows); None where Spark reads
    them.

    Raises what delta-rs and Arrow raise.
    """
    if not table.is_writable or table.has_deletion_vectors:
        return None
    new = table.files if met is None else table.files_since(met)
    rows = row_count(new)
    if rows is None or rows > _MOST_ROWS:
        return None
    dataset = table.dataset()
    if met is None:
        return dataset
    paths = {unquote(path) for path in new["path"].to_pylist()}
    parts = [part for part in dataset.get_fragments() if part.path in paths]
    if len(parts) != len(paths):
        return None
    return ds.FileSystemDataset(parts, dataset.schema, dataset.format, dataset.filesystem)


def count_written(dataset: ds.Dataset, conditions: Conditions, where: str | None = None) -> Counts:
    """Returns the failing rows of a dataset as count_rows() does."""

    def read(columns: Sequence[str]) -> Iterator[pa.Table]:
        scanner = by_row_group(dataset).scanner(
            columns, batch_size=_ROWS_AT_ONCE, batch_readahead=2, fragment_readahead=1
        )
        return (pa.Table.from_batches([batch]) for batch in scanner.to_batches())

    return count_rows(dataset.schema.names, read, conditions, where)


def count_rows(
    names: Sequence[str],
    read: Callable[[Sequence[str]], Iterator[pa.Table]],
    conditions: Conditions,
    where: str | None = None,
) -> Counts:
    """Returns the failing rows of each condition of which Arrow is certain, among those that meet a
    condition in Spark SQL, if given.

    ``read`` returns some of the columns ``names``. Raises what it and Arrow raise.
    """
    if not (certain := arrow_conditions(conditions, names)):
        return {}
    columns = {LSN} if where else set()
    columns |= {
        name for c in certain.values() for name in (*(c.read_by_arrow or ()), *c.example_columns)
    }
    columns &= {*names}
    tables = read(sorted(columns) or names[:1])
    if where is not None:
        tables = (rows.filter(evaluate(where, rows)) for rows in tables)
    return count_by_arrow(tables, certain)


# After few changes a foreign key is judged only when both of its targets together have at most this
# many rows.
_MOST_ROWS_REFERRED = 1_000_000
# A suite of more own expectations than this may judge so many rows, added up.
_MANY_EXPECTATIONS, _MOST_JUDGED = 1_000, 10_000_000_000
_NOT_MEASURED = "drift: not judged, since this check can't measure the target"


def judge_target(run: CheckRun, runner: Runner, target: CheckedTarget) -> TableVerdict:
    """Returns the verdict on a target, which is failed where it can't be judged at all.

    Raises SparkUnreachable or JavaMissing where only Spark can judge it: that is no fault of the
    target.
    """
    started = time.monotonic()
    try:
        verdict = _judge(run, runner, target)
    except (SparkUnreachable, JavaMissing):
        raise
    except Exception as err:
        return verdict_of_error(target.state.table_name, target.version, err)
    return replace(verdict, seconds=time.monotonic() - started)


def _judge(run: CheckRun, runner: Runner, target: CheckedTarget) -> TableVerdict:
    table = None
    with leave_to_spark(f"reads {target.state.table_name}"):
        table = target.open()
    if table is None:
        types = dict(target.frame(runner).dtypes)
    else:
        types = {name: table.spark_types[name] for name in target.live_columns(table)}
    plan = _drop_costly_expectations(run.suite_of(target, types), table)
    suite = suite_of(plan)
    columns = {listed(name): kind for name, kind in types.items()}
    rows = TargetRows(target, runner, columns, run.rules[plan.table].references, table)
    if run.outcome.is_upkeep and is_unchanged_since_full_check(run.history, target, plan):
        unchanged = SuiteEvaluation(run, rows, keep_other_data(plan))
        return TableVerdict(plan.table, target.version, unchanged.evaluate(), plan.omitted)
    in_memory = None
    if table is not None and not target.state.target_mode.keeps_rows:
        with leave_to_spark(f"reads the rows of {plan.table}"):
            in_memory = small_rows(table)
    rows = replace(rows, met=met_before(run, target, plan, table), in_memory=in_memory)
    if rows.met is not None and plan.table not in run.outcome.paged:
        plan = _affordable(plan, rows.references)
    rows, plan = _with_profile(rows, plan)
    judged = SuiteEvaluation(run, rows, plan)
    outcomes = judged.evaluate()
    return TableVerdict(
        plan.table,
        target.version,
        outcomes,
        (*plan.omitted, *judged.omitted),
        measured=rows.measured,
        suite=suite if are_met(outcomes) else None,
        whole=rows.met is None,
        measured_only=tuple(
            p for p in plan.expectations if not kind_of(p.type).is_judged(p.kwargs)
        ),
    )


def met_before(
    run: CheckRun, target: CheckedTarget, plan: SuitePlan, table: TargetVersion | None
) -> int | None:
    """Returns the version whose rows are known to meet the suite: only rows written since are read.

    Returns None where all rows are read, however many the run has changed:

    - in the first maintenance after each time of ``quality.full_check``, and by ``validate``;
    - where a target that the run didn't write is checked, as after its expectations were edited;
    - where no version is known to meet the suite: after a copy, after an expectation failed, and
      with another suite;
    - where a mode keeps more than live rows;
    - of a small target: it costs no more, and finds what external writers changed.

    Kinds that judge several rows together, or depend on more than rows, always read what they need.
    """
    state, outcome = target.state, run.outcome
    if outcome.is_upkeep:
        is_full = needs_full_check(run, target)
    else:
        is_full = state.table_name not in outcome.written
    if is_full or state.target_mode.keeps_rows or (table is not None and table.is_small):
        return None
    return met_at(run.history, target, plan)


def _drop_costly_expectations(plan: SuitePlan, table: TargetVersion | None) -> SuitePlan:
    """Returns the plan without own expectations, and with an error, where they'd take hours."""
    own_expectations = [p for p in plan.expectations if p.origin == "own"]
    rows = None if table is None else row_count(table.files)
    if (
        len(own_expectations) <= _MANY_EXPECTATIONS
        or rows is None
        or len(own_expectations) * rows <= _MOST_JUDGED
    ):
        return plan
    most = max(_MANY_EXPECTATIONS, _MOST_JUDGED // rows)
    error = (
        f"{plan.table}: its {len(own_expectations):,} own expectations aren't judged on"
        f" {counted(rows, 'row')}, since that would take hours: write at most"
        f" {most:,}, such as one condition for several columns"
    )
    expectations = tuple(p for p in plan.expectations if p.origin != "own")
    return replace(plan, expectations=expectations, refused=(*plan.refused, error))


def _affordable(plan: SuitePlan, references: Sequence[Reference]) -> SuitePlan:
    """Returns the plan without the foreign keys that are too expensive to judge after changes.

    A check of all rows judges the omitted ones.
    """
    large = {
        reference.lookup_key: (
            f"foreign key {reference.name}: left to the next full check, since its targets are"
            " large"
        )
        for reference in references
        if (rows := _rows_of(reference)) is None or rows > _MOST_ROWS_REFERRED
    }
    expectations = [
        p
        for p in plan.expectations
        if p.type != REFERENCES_HOLD or tuple(p.kwargs["columns"]) not in large
    ]
    return replace(plan, expectations=tuple(expectations), omitted=(*plan.omitted, *large.values()))


def _rows_of(reference: Reference) -> int | None:
    """Returns the number of rows of both targets; None where it is unknown."""
    try:
        counts = [row_count(side.target.open().files) for side in reference.sides]
    except (*READ_FAILURES, KeyError):
        return None
    return None if None in counts else sum(count for count in counts if count is not None)


def _with_profile(rows: TargetRows, plan: SuitePlan) -> tuple[TargetRows, SuitePlan]:
    """Returns the rows with their profile; where it can't be measured, the plan without what is
    expected of it.
    """
    about = [p for p in plan.expectations if kind_of(p.type).needs_profile]
    measured = rows.measure(about[0].kwargs["columns"]) if about else None
    if measured is not None or not about:
        return replace(rows, measured=measured), plan
    omitted = [_NOT_MEASURED] if any(kind_of(p.type).is_judged(p.kwargs) for p in about) else []
    expectations = tuple(p for p in plan.expectations if p not in about)
    return rows, replace(plan, expectations=expectations, omitted=(*plan.omitted, *omitted))
