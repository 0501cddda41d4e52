"""Gate: expectations marked ``stop`` or ``quarantine`` judge a table's net changes before the
merge.

The gate judges the rows that the merge would write, as the target would store them; deletes always
pass. A value that a change didn't send (an unchanged TOASTed value) isn't judged again.
``quarantine`` rows are set aside first (set_aside). ``stop`` then judges the rest without released
changes (waldelta.stages.check.gate.release). No verdict is carried from one attempt to the next:
each attempt judges the range by the current expectation files, and reports what its own commit left
out.

Rows that are read again (a retry, a reconciliation's repair) are judged with the source's current
values: judge_complete_rows() returns which quarantined rows stay there. They bring along what is
waiting for their table: all of it passes, or nothing is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.errors import ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import QUARANTINED_ROWS
from waldelta.changes.decode.net_rows import WRITTEN, as_net, values_as_json
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.stage.stage import Staged
from waldelta.config.expectation_files import (
    TargetColumns,
    assign_suites,
    is_condition,
    is_sql,
    read_each,
)
from waldelta.errors import ConfigError, QualityFailed, WaldeltaError
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import COMMIT_TS, LSN, METADATA_TYPES, RAW
from waldelta.pipeline import Job, named_error
from waldelta.quantities import counted
from waldelta.snapshot import TableCopy
from waldelta.spark import Runner
from waldelta.stages.check.gate._in_process import FewRows, rows_after, written_rows
from waldelta.stages.check.gate.examples import JudgedColumns, failing_examples
from waldelta.stages.check.gate.release import lands_later, released_upto
from waldelta.stages.check.gate.set_aside import JudgedChanges, set_aside
from waldelta.stages.check.gate.table_gate import (
    MOST_SET_ASIDE,
    Gated,
    TableGate,
    Verdict,
    listed,
    reason_of,
    record,
    stopped,
)
from waldelta.stages.check.great_expectations.own_expectations import (
    judge_rows,
    why_refused,
    why_unevaluable,
)
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kind import RowCondition
from waldelta.stages.check.suite.kinds import kind_of, with_raw
from waldelta.stages.check.suite.row_kinds import count_rows
from waldelta.stages.check.suite.sql_conditions import columns_of
from waldelta.target_modes import Feature

log = logging.getLogger(__name__)

_NET = "_wd_net"


def read_gates(job: Job, states: Sequence[TableState]) -> dict[str, TableGate]:
    """Returns by table the gates of these tables, from the current files of own expectations.

    A file that can't be read may contain a gate, so its table has a gate with a problem.
    """
    folder = job.pipeline.quality.suites
    if folder is None:
        return {}
    generations = {state.table_name: state.generation for state in states}
    suites = assign_suites(read_each(Path(folder)), generations)
    gates = {name: TableGate(name, problem=err) for name, err in suites.refused.items()}
    released: dict[tuple[str, int], int] | None = None
    for name, suite in suites.by_table.items():
        items = tuple(
            Gated(item, suite.place(number, job.pipeline.folder), suite.meaning(number))
            for number, item in enumerate(suite.suite.expectations)
            if item.gate != "warn"
        )
        if items:
            released = released_upto(job) if released is None else released
            gates[name] = TableGate(name, items, None, released.get((name, generations[name]), 0))
    return gates


def judge(
    runner: Runner, job: Job, plan: TargetPlan, gate: TableGate, staged: Staged
) -> JudgedChanges:
    """Returns the staged changes that may be merged.

    Raises QualityFailed when none may, and ConfigError for a gate that can't be evaluated.
    """
    if gate.problem is not None:
        raise ConfigError(
            f"{gate.table}: its changes wait, since its gate can't be read: {gate.problem}"
        )
    if not plan.state.kept_as.supports(Feature.GATES):
        raise ConfigError(
            f"{gate.table}: its changes wait, since it has expectations with a gate, which only a"
            " target of mode mirror supports: set gate: warn"
        )
    columns = _columns_of(plan)
    if (found := _judge_in_process(runner, job, plan, gate, columns, staged)) is not None:
        return found
    _ = runner.spark(
        "a gate that only Spark evaluates"
    ).version  # Conditions can be made only once the session has started.
    verdicts = _verdicts(job, gate, columns)
    if not any(staged.counts.get(action) for action in WRITTEN):
        return JudgedChanges(staged)
    frame = _batch_frame(runner, job, plan, staged)
    asides = [v for v in verdicts if v.gated.item.gate == "quarantine"]
    stops = [v for v in verdicts if v.gated.item.gate == "stop"]
    try:
        judged = _set_aside(runner, plan, _ByRow(gate, columns, asides), staged, frame)
        if stops:
            if judged.staged is not staged:
                frame = _batch_frame(runner, job, plan, judged.staged)
            rest = frame.where(lands_later(F.col(f"{_NET}.lsn"), gate.released))
            if failed := _stopped(columns, gate, rest, stops):
                raise stopped(gate, failed)
    finally:
        record(job, gate, verdicts)
    return judged


def _judge_in_process(
    runner: Runner,
    job: Job,
    plan: TargetPlan,
    gate: TableGate,
    columns: JudgedColumns,
    staged: Staged,
) -> JudgedChanges | None:
    """Returns what judge() returns; None where only Spark can judge the changes, or refuse the
    gate.
    """
    has_metadata = job.pipeline.target.metadata_columns
    of_target = _target_columns(columns, has_metadata=has_metadata)
    refused = (why_refused(g.item, of_target, is_built=False) for g in gate.expectations)
    if staged.net is None or job.lake.on_spark or any(refused):
        return None
    verdicts = [Verdict(gated, None) for gated in gate.expectations]
    rows = written_rows(staged.net)
    if not FewRows(gate, columns, verdicts, has_metadata).are_certain(rows):
        return None
    if not len(rows):
        return JudgedChanges(staged)
    asides = [v for v in verdicts if v.gated.item.gate == "quarantine"]
    stops = [v for v in verdicts if v.gated.item.gate == "stop"]
    try:
        by_row = FewRows(gate, columns, asides, has_metadata)
        judged = _set_aside(runner, plan, by_row, staged, rows)
        net = judged.staged.net
        rest = rows_after(rows if net is None else written_rows(net), gate.released)
        by_row = FewRows(gate, columns, stops, has_metadata)
        by_row.count(rest)
        by_row.take_examples(rest)
        if failed := [verdict for verdict in stops if not verdict.success]:
            raise stopped(gate, failed)
    finally:
        record(job, gate, verdicts)
    return judged


@dataclass(frozen=True, slots=True)
class StillFails:
    """A quarantined row that was read again and still fails its gate.

    It has the key as texts, the values as JSON, and the reason.
    """

    key: tuple[str, ...]
    sent: str
    reason: str


def judge_complete_rows(
    job: Job,
    gate: TableGate,
    copy: TableCopy,
    rows: DataFrame,
    landed_end: int,
    opened: Collection[tuple[str, ...]],
) -> list[StillFails]:
    """Returns which of these complete rows stay in quarantine; raises when a gate stops the others.

    ``rows`` have the copy's staged_names(), and ``t<k>``, the texts of the key, for quarantined
    rows. The other rows come from waiting changes up to ``landed_end``. They have no commit
    positions, so a release lets them pass only when nothing has landed since. ``opened`` are the
    keys of open rows: a discarded row that still fails is no new finding.
    """
    if gate.problem is not None:
        raise ConfigError(
            f"{gate.table}: its rows weren't read again, since its gate can't be read:"
            f" {gate.problem}"
        )
    columns = JudgedColumns(
        [name for name, _ in copy.columns],
        [kind for _, kind in copy.columns],
        copy.key_columns,
    )
    verdicts = [
        verdict
        for verdict in _verdicts(job, gate, columns)
        if verdict.gated.item.gate != "stop" or gate.released < landed_end
    ]
    frame = rows.select(F.struct(*map(F.col, rows.columns)).alias(_NET), *_values(job, columns))
    if not verdicts or frame.isEmpty():
        return []
    asides = _ByRow(gate, columns, [v for v in verdicts if v.gated.item.gate == "quarantine"])
    quarantined = F.col(f"{_NET}.t0").isNotNull()
    try:
        failing = asides.count(frame.where(quarantined))
        still = _still_failing(frame.where(quarantined), copy, asides, opened) if failing else []
        kept = [verdict.unexpected or 0 for verdict in asides.verdicts]
        _check_enters(gate, columns, frame.where(~(quarantined & asides.any_fails)), verdicts)
        for verdict, count in zip(asides.verdicts, kept, strict=True):
            verdict.unexpected, verdict.success = (verdict.unexpected or 0) + count, not count
    finally:
        record(job, gate, verdicts)
    return still


def _check_enters(
    gate: TableGate, columns: JudgedColumns, frame: DataFrame, verdicts: list[Verdict]
) -> None:
    """Raise QualityFailed when rows that were read again fail expectations with a gate."""
    if failed := _stopped(columns, gate, frame, verdicts):
        raise QualityFailed(
            f"{gate.table}: its rows weren't read again, since rows that would enter the target"
            f" fail expectations with a gate:\n{listed(failed)}\nFirst let a run apply the"
            " waiting changes: it quarantines rows that fail gate: quarantine. Where gate: stop"
            " stops it, correct the expectation or the data, or release the changes: quarantine"
            f" --release --tables {gate.table} --reason WHY"
        )


def _still_failing(
    frame: DataFrame, copy: TableCopy, asides: _ByRow, opened: Collection[tuple[str, ...]]
) -> list[StillFails]:
    """Returns failing rows with their reasons; the expectations' counts include only open rows."""
    found, of_rows = asides.failing_rows(frame)
    values = values_as_json(found, copy.columns, [()] * len(found))
    texts = zip(*(found[f"t{k}"].to_pylist() for k in range(len(copy.key_columns))), strict=True)
    still = [
        StillFails(key, sent, asides.reason(of_row))
        for key, sent, of_row in zip(texts, values, of_rows, strict=True)
    ]
    for number, verdict in enumerate(asides.verdicts):
        verdict.unexpected = sum(
            number in of_row and row.key in opened
            for row, of_row in zip(still, of_rows, strict=True)
        )
    return still


@dataclass(frozen=True)
class _ByRow:
    """Expectations of a gate that judge single rows, by the values that were sent."""

    gate: TableGate
    columns: JudgedColumns
    verdicts: Sequence[Verdict]

    @cached_property
    def failing(self) -> list[Column]:
        """Returns of each expectation whether a row fails it."""
        return [
            _is_sent(self.columns, condition.columns)
            & F.coalesce(condition.unexpected, F.lit(False))
            for condition in self._conditions
        ]

    @property
    def any_fails(self) -> Column:
        """Returns whether a row fails any of the expectations."""
        return reduce(lambda one, other: one | other, self.failing, F.lit(False))

    @property
    def _conditions(self) -> list[RowCondition]:
        return [v.condition for v in self.verdicts if v.condition is not None]

    def failing_rows(self, frame: DataFrame) -> tuple[pa.Table, list[list[int]]]:
        """Returns the net changes that fail, and for each the numbers of the expectations."""
        marks = F.array(*(F.when(fails, F.lit(n)) for n, fails in enumerate(self.failing)))
        rows = frame.where(self.any_fails)
        found = rows.select(F.col(f"{_NET}.*"), F.array_compact(marks).alias("failed")).toArrow()
        return found.drop_columns(["failed"]), found["failed"].to_pylist()

    def reason(self, numbers: Sequence[int]) -> str:
        """Returns why a row is in quarantine, by the numbers of the expectations it fails."""
        return reason_of(self.verdicts, numbers)

    def count(self, frame: DataFrame) -> int:
        """Count the rows that fail each expectation, and return how many fail any, by one query.

        Without expectations it asks nothing. Raises QualityFailed for an expectation that Spark
        can't evaluate.
        """
        if not self.verdicts:
            return 0
        pairs = zip(self._conditions, self.failing, strict=True)
        conditions = [replace(condition, unexpected=fails) for condition, fails in pairs]
        together = RowCondition(self.any_fails, self.any_fails, None)
        try:
            *counts, failing = count_rows(frame, [*conditions, together])
        except Exception as err:
            if (named := named_error(err)) is not None:
                raise named from err
            self._find_unevaluable(frame)
            raise QualityFailed(
                f"{self.gate.table}: not merged, since its gate can't be"
                f" evaluated:\n{listed([v for v in self.verdicts if v.why])}\nCorrect the"
                " expectation: the next run uses it"
            ) from err
        for verdict, condition, of in zip(self.verdicts, conditions, counts, strict=True):
            verdict.unexpected, verdict.success = of.rows, of.are_few(condition.mostly)
        return failing.rows

    def take_examples(self, frame: DataFrame) -> None:
        """Give each expectation that isn't met some rows that fail it."""
        for verdict, fails, condition in zip(
            self.verdicts, self.failing, self._conditions, strict=True
        ):
            if not verdict.success:
                verdict.examples = failing_examples(
                    frame, _NET, fails, self.columns, condition.columns
                )

    def _find_unevaluable(self, frame: DataFrame) -> None:
        for verdict, fails in zip(self.verdicts, self.failing, strict=True):
            try:
                frame.agg(F.count(F.when(fails, 1))).first()
            except Exception as err:
                verdict.why = f"can't be evaluated: {why_unevaluable(err)}"


def _columns_of(plan: TargetPlan) -> JudgedColumns:
    decode = plan.decode
    key = [decode.names[i] for i in decode.shape.key]
    return JudgedColumns(decode.names, decode.types, key, decode.shape.toastable)


def _verdicts(job: Job, gate: TableGate, columns: JudgedColumns) -> list[Verdict]:
    """Returns a verdict without a result for each expectation; raises ConfigError for a refused
    gate.
    """
    kinds = zip(columns.names, columns.types, strict=True)
    raw = [name for name, kind in kinds if job.pipeline.target.metadata_columns and kind.may_be_raw]
    of_target = _target_columns(columns, has_metadata=job.pipeline.target.metadata_columns)
    verdicts, problems = [], []
    for gated in gate.expectations:
        condition, whys = _condition(gated, of_target, raw)
        verdicts.append(Verdict(gated, condition))
        problems += [f"{gated.place}: {why}" for why in whys]
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise ConfigError(f"{gate.table}: its changes wait, since its gate is refused:\n{listed}")
    return verdicts


def _target_columns(columns: JudgedColumns, *, has_metadata: bool) -> TargetColumns:
    types = {name: kind.spark for name, kind in zip(columns.names, columns.types, strict=True)}
    return TargetColumns(types | (METADATA_TYPES if has_metadata else {}), bool(columns.key))


def _condition(
    gated: Gated, columns: TargetColumns, raw: Sequence[str]
) -> tuple[RowCondition | None, list[str]]:
    """Returns an expectation's condition on single rows, if it has one, and why it is refused."""
    item = gated.item
    if why_refused(item, columns, is_built=False):
        return None, why_refused(item, columns)
    kind, kwargs = with_raw(item.type, item.kwargs, raw, gated.called)
    try:
        condition = kind_of(kind).row_condition(kwargs)
    except ParseException as err:
        return None, [why_unevaluable(err)]
    whys = [] if condition is not None else why_refused(item, columns)
    if condition is None and not whys and item.gate == "quarantine":
        whys = ["gate: quarantine can't identify the failing rows by these arguments: use stop"]
    return condition, whys


def _batch_frame(runner: Runner, job: Job, plan: TargetPlan, staged: Staged) -> DataFrame:
    """Returns the rows the merge would write, with the target's columns and each change as a
    struct.
    """
    written = ", ".join(f"'{action}'" for action in WRITTEN)
    # The SQL contains only waldelta's own actions and folder.
    rows = runner.spark().sql(f"select * from {staged.source} where action in ({written})")  # noqa: S608
    net = F.struct(*(F.col(name) for name in plan.decode.net_schema.names)).alias(_NET)
    return rows.select(net, *_values(job, _columns_of(plan)))


def _values(job: Job, columns: JudgedColumns) -> list[Column]:
    """Returns staged columns as the target stores them."""
    values = [
        F.expr(kind.stored_sql(f"c{i}")).alias(name)
        for i, (name, kind) in enumerate(zip(columns.names, columns.types, strict=True))
    ]
    if job.pipeline.target.metadata_columns:
        values += [
            F.col("lsn").alias(LSN),
            F.col("commit_ts").alias(COMMIT_TS),
            F.col("raw").alias(RAW),
        ]
    return values


def _set_aside(
    runner: Runner, plan: TargetPlan, asides: _ByRow | FewRows, staged: Staged, frame: Any
) -> JudgedChanges:
    """Take out failing rows: of a frame by _ByRow, of net changes in memory by FewRows."""
    count = asides.count(frame)
    if not count:
        return JudgedChanges(staged)
    table = asides.gate.table
    if count > MOST_SET_ASIDE:
        asides.take_examples(frame)
        raise QualityFailed(
            f"{table}: not merged: {count:,} of its changed rows fail expectations with gate:"
            f" quarantine, and a run quarantines at most {MOST_SET_ASIDE:,} at"
            f" once:\n{listed(asides.verdicts)}\nIts changes wait in the change log: correct the"
            " expectation, which the next run uses, or make it warn until they are merged"
        )
    found, of_rows = asides.failing_rows(frame)
    reasons = [asides.reason(of_row) for of_row in of_rows]
    judged = set_aside(runner, plan, staged, as_net(found, plan), reasons)
    log.warning(
        "table=%s gate: quarantined %s, %d in all",
        table,
        counted(len(judged.aside), "row"),
        judged.staged.counts.get(QUARANTINED_ROWS, 0),
    )
    return judged


def _stopped(
    columns: JudgedColumns, gate: TableGate, frame: DataFrame, verdicts: list[Verdict]
) -> list[Verdict]:
    """Returns the expectations that the rows don't meet."""
    by_row = _ByRow(gate, columns, [v for v in verdicts if v.condition is not None])
    by_row.count(frame)
    by_row.take_examples(frame)
    if others := [verdict for verdict in verdicts if verdict.condition is None]:
        for _number, verdict in enumerate(others):
            used = _used_columns(columns.names, verdict.gated.item.kwargs)
            rows = frame.where(_is_sent(columns, used)).drop(_NET)
            _judge_as_a_whole(gate.table, rows, verdict)
    return [verdict for verdict in verdicts if not verdict.success]


def _is_sent(columns: JudgedColumns, names: Sequence[str] | None) -> Column:
    """Returns whether a change sent all columns of these names (None: every column)."""
    # Spark matches column names case-insensitively.
    asked = None if names is None else {name.lower() for name in names}
    flags = [
        F.col(f"{_NET}.u{i}")
        for i in columns.toastable
        if asked is None or columns.names[i].lower() in asked
    ]
    return reduce(lambda one, other: one & ~other, flags, F.lit(True))


def _judge_as_a_whole(table: str, rows: DataFrame, verdict: Verdict) -> None:
    """Have Great Expectations evaluate an expectation on several rows."""
    gated, item = verdict.gated, verdict.gated.item
    planned = PlannedExpectation(
        item.type, dict(item.kwargs), item.severity, "own", gated.called, gated.place
    )
    if rows.isEmpty():
        # All rows were released or sent partly, so no aggregate can be computed.
        verdict.success, verdict.observed = True, "no rows to judge"
        return
    try:
        (found,) = judge_rows(table, [planned], rows)
    except WaldeltaError:
        raise
    except Exception as err:
        if (named := named_error(err)) is not None:
            raise named from err
        verdict.why = f"can't be evaluated ({why_unevaluable(err)})"
        return
    verdict.success, verdict.observed = found.success, found.observed
    verdict.unexpected, verdict.examples = found.unexpected_count, list(found.examples)
    if found.success is None:
        verdict.why = "can't be evaluated"


def _used_columns(names: Sequence[str], kwargs: Mapping[str, Any]) -> list[str] | None:
    """Returns the columns that an expectation may read, by its arguments; None if it may read all.

    A text equal to a column's name counts as that column, even where it is a value. A column too
    many only skips rows whose value was checked when PostgreSQL sent it; a column too few takes an
    unchanged TOASTed value, which PostgreSQL doesn't send, for null. Only arguments that may be
    conditions are parsed: nearly any text parses as a condition, and a text that doesn't parse
    counts as all columns, which skips the row.
    """
    asked: set[str] = set()
    for argument, text in _texts(kwargs):
        asked.add(text.lower())
        if not is_condition(argument):
            continue
        named = columns_of(text) if is_sql(argument, kwargs) else None
        if named is None:
            return None
        asked.update(name.lower() for name in named)
    return [name for name in names if {name.lower(), f"`{name.lower()}`"} & asked] or None


def _texts(given: Any, argument: str = "") -> Iterator[tuple[str, str]]:
    """Yields every text in an expectation's arguments, at any depth, with its argument's name."""
    if isinstance(given, str):
        yield argument, given
    elif isinstance(given, Mapping):
        for name, value in given.items():
            yield from _texts(value, str(name))
    elif isinstance(given, (list, tuple, set)):
        for value in given:
            yield from _texts(value, argument)
