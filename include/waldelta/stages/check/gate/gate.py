"""Gate: expectations marked ``stop`` or ``quarantine`` judge a table's net changes before the
merge.

The gate judges the rows that the merge would write, as the target would store them; deletes always
pass. A value that a change didn't send (an unchanged TOASTed value) isn't judged again.
``quarantine`` rows are set aside first (set_aside). ``stop`` then judges the rest without released
changes (waldelta.stages.check.gate.release). No verdict is carried from one attempt to the next:
each attempt judges the range by the current expectation files, and reports what its own commit left
out.

The target then agrees with what is certain about the source. Of rows that are set aside, a new one
isn't written, and a row with its key is deleted, because the source replaced it. An update isn't
applied, and the target keeps the earlier row (it is *outdated*). If the update moved the key, the
old row is deleted, because the source no longer has it.

Rows that are read again (a retry, a reconciliation's repair) are judged with the source's current
values: judge_complete_rows() returns which quarantined rows stay there. They bring along what is
waiting for their table: all of it passes, or nothing is changed.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import ParseException
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.arrow import Bools, one_array
from waldelta.changes.decode.collapse import (
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
    QUARANTINED_ROWS,
    RAW_ROWS,
    codes_of_both,
)
from waldelta.changes.decode.net_rows import (
    WRITTEN,
    as_net,
    keys_of,
    move_keys,
    purges,
    sent,
    unsent,
    values_as_json,
)
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
from waldelta.lake import write_parquet
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.decisions import FAILS
from waldelta.metadata_columns import METADATA_TYPES
from waldelta.pipeline import Job, named_error
from waldelta.quantities import counted
from waldelta.snapshot import TableCopy
from waldelta.spark import Runner
from waldelta.spark_sql import parquet
from waldelta.stages.check.gate.release import released_upto
from waldelta.stages.check.gate.table_gate import (
    MOST_SET_ASIDE,
    NET,
    ArrowRows,
    Gated,
    JudgedColumns,
    SparkRows,
    TableGate,
    Verdict,
    listed,
    record,
    stopped,
    take_examples,
)
from waldelta.stages.check.great_expectations.own_expectations import (
    judge_rows,
    why_refused,
    why_unevaluable,
)
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kinds import kind_of, with_raw
from waldelta.stages.check.suite.sql_conditions import columns_of
from waldelta.target_modes import Feature


@dataclass(frozen=True, slots=True)
class AsideRow:
    """A row that was set aside, for the quarantine table; ``reason`` names the failed
    expectations.
    """

    key: str
    columns: list[str]
    sent: str
    lsn: int | None
    commit_ts: object
    reason: str
    outdated: bool


@dataclass(frozen=True, slots=True)
class JudgedChanges:
    """The changes to merge after the gate, and the rows that were set aside."""

    staged: Staged
    aside: tuple[AsideRow, ...] = ()


def set_aside(
    runner: Runner, plan: TargetPlan, staged: Staged, rows: pa.Table, reasons: list[str]
) -> JudgedChanges:
    """Take these rows out of ``staged``; they are net changes that would write a row.

    ``reasons`` has one entry per row.
    """
    moved = move_keys(rows, plan)
    of_action = np.array(rows["action"].to_pylist(), dtype=object)
    gone = purges(rows.filter(pa.array((of_action == ACTION_UPSERT) | moved)), plan)
    counts = Counter(staged.counts)
    counts.subtract(Counter(of_action.tolist()))
    counts[ACTION_PURGE] += len(gone)
    counts[QUARANTINED_ROWS] += len(rows)
    counts[RAW_ROWS] -= int(one_array(rows["raw"]).is_valid().sum().as_py() or 0)
    left = {name: count for name, count in counts.items() if count}
    absent = unsent(rows, plan)
    told = zip(
        keys_of(rows, plan, "c"),
        absent,
        sent(rows, plan, absent),
        rows["lsn"].to_pylist(),
        rows["commit_ts"].to_pylist(),
        reasons,
        ((of_action == ACTION_UPDATE) & ~moved).tolist(),
        strict=True,
    )
    rest = _in_driver if staged.net is not None else _by_spark
    return JudgedChanges(
        replace(rest(runner, plan, staged, rows, gone), counts=left),
        tuple(AsideRow(*row) for row in told),
    )


def _in_driver(
    _: Runner, plan: TargetPlan, staged: Staged, rows: pa.Table, gone: pa.Table
) -> Staged:
    net = staged.net
    assert net is not None  # noqa: S101 - the caller selects this function only with net
    rest = pa.concat_tables([net.filter(pa.array(~_same(net, rows, plan))), gone])
    folder = f"{staged.folder}-let"
    write_parquet(folder, rest)
    return replace(staged, folder=folder, source=parquet(folder), net=rest)


def _same(net: pa.Table, rows: pa.Table, plan: TargetPlan) -> Bools:
    """Returns which net changes would write one of these rows."""
    key = [f"c{i}" for i in plan.decode.shape.key]
    of_net, of_rows = codes_of_both([net[name] for name in key], [rows[name] for name in key])
    written: Bools = np.asarray(pc.is_in(net["action"], value_set=pa.array(WRITTEN)))
    return np.isin(of_net, of_rows) & written


def _by_spark(
    runner: Runner, plan: TargetPlan, staged: Staged, rows: pa.Table, gone: pa.Table
) -> Staged:
    key, names = plan.decode.shape.key, ", ".join(plan.decode.net_schema.names)
    folder = f"{staged.folder}-let"
    write_parquet(f"{folder}-aside", rows.select([f"c{i}" for i in key]))
    write_parquet(f"{folder}-gone", gone)
    same = " and ".join(f"s.c{i} <=> a.c{i}" for i in key)
    written = ", ".join(f"'{action}'" for action in WRITTEN)
    listed = ", ".join(f"s.{name}" for name in plan.decode.net_schema.names)
    # The SQL contains only numbered columns and waldelta's own folders, no names from the source.
    rest = runner.spark().sql(
        f"select {listed} from {staged.source} as s"  # noqa: S608
        f" left anti join {parquet(f'{folder}-aside')} as a"
        f" on s.action in ({written}) and {same}"
        f" union all select {names} from {parquet(f'{folder}-gone')}"
    )
    rest.write.mode("overwrite").parquet(folder)
    return replace(staged, folder=folder, source=parquet(folder), net=None)


log = logging.getLogger(__name__)


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
    verdicts, read = _prepare(runner, job, plan, gate, staged)
    if not any(staged.counts.get(action) for action in WRITTEN):
        return JudgedChanges(staged)
    asides = [v for v in verdicts if v.gated.item.gate == "quarantine"]
    stops = [v for v in verdicts if v.gated.item.gate == "stop"]
    try:
        judged = _set_aside(runner, plan, gate, read(staged), asides, staged)
        rest = read(judged.staged).landed_after(gate.released) if stops else None
        if rest is not None and (failed := _stopped(gate, rest, stops)):
            raise stopped(gate, failed)
    finally:
        record(job, gate, verdicts)
    return judged


def _prepare(
    runner: Runner, job: Job, plan: TargetPlan, gate: TableGate, staged: Staged
) -> tuple[list[Verdict], Callable[[Staged], ArrowRows | SparkRows]]:
    """Returns verdicts without a result, and how the rows that the merge would write are read.

    Raises ConfigError for a refused gate.
    """
    columns = JudgedColumns.of(plan, has_metadata=job.pipeline.target.metadata_columns)
    of_target, verdicts = _target_columns(columns), _verdicts(gate, columns)

    def in_memory(changes: Staged) -> ArrowRows:
        return ArrowRows.of(changes.net, columns)

    refused = any(why_refused(v.gated.item, of_target, is_built=False) for v in verdicts)
    is_small = staged.net is not None and not job.lake.on_spark and not refused
    if is_small and in_memory(staged).are_certain(verdicts):
        return verdicts, in_memory
    # Conditions can be made only once the session has started.
    _ = runner.spark("a gate that only Spark evaluates").version
    _add_conditions(gate, verdicts, of_target)
    return verdicts, partial(_staged_rows, runner, plan, gate, columns)


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
    names, kinds = zip(*copy.columns, strict=True)
    columns = JudgedColumns(names, kinds, copy.key_columns, job.pipeline.target.metadata_columns)
    verdicts = _verdicts(gate, columns)
    _add_conditions(gate, verdicts, _target_columns(columns))
    verdicts = [v for v in verdicts if v.gated.item.gate != "stop" or gate.released < landed_end]
    given = SparkRows.of(rows, rows.columns, columns, gate.table)
    if not verdicts or given.frame.isEmpty():
        return []
    asides = [v for v in verdicts if v.gated.item.gate == "quarantine"]
    is_quarantined = F.col(f"{NET}.t0").isNotNull()
    quarantined = given.where(is_quarantined)
    enters = given.where(~(is_quarantined & given.fails_any(asides)))
    try:
        failing = quarantined.count(asides)
        still = _still_failing(quarantined, copy, asides, opened) if failing else []
        kept = [verdict.unexpected or 0 for verdict in asides]
        _check_enters(gate, enters, verdicts)
        for verdict, count in zip(asides, kept, strict=True):
            verdict.unexpected, verdict.success = (verdict.unexpected or 0) + count, not count
    finally:
        record(job, gate, verdicts)
    return still


def _check_enters(gate: TableGate, rows: SparkRows, verdicts: list[Verdict]) -> None:
    """Raise QualityFailed when rows that were read again fail expectations with a gate."""
    if failed := _stopped(gate, rows, verdicts):
        raise QualityFailed(
            f"{gate.table}: its rows weren't read again, since rows that would enter the target"
            f" fail expectations with a gate:\n{listed(failed)}\nFirst let a run apply the"
            " waiting changes: it quarantines rows that fail gate: quarantine. Where gate: stop"
            " stops it, correct the expectation or the data, or release the changes: waldelta"
            f" quarantine FILE --release --tables {gate.table} --reason WHY"
        )


def _still_failing(
    rows: SparkRows, copy: TableCopy, asides: list[Verdict], opened: Collection[tuple[str, ...]]
) -> list[StillFails]:
    """Returns failing rows with their reasons; the expectations' counts include only open rows."""
    found, of_rows = rows.failing(asides)
    values = values_as_json(found, copy.columns, [()] * len(found))
    texts = zip(*(found[f"t{k}"].to_pylist() for k in range(len(copy.key_columns))), strict=True)
    still = [
        StillFails(key, sent, _reason(asides, of_row))
        for key, sent, of_row in zip(texts, values, of_rows, strict=True)
    ]
    for number, verdict in enumerate(asides):
        verdict.unexpected = sum(
            number in of_row and row.key in opened
            for row, of_row in zip(still, of_rows, strict=True)
        )
    return still


def _reason(verdicts: Sequence[Verdict], numbers: Sequence[int]) -> str:
    """Returns why a row is in quarantine, by the numbers of the expectations it fails."""
    gated = [verdicts[n].gated for n in numbers]
    return FAILS + "; ".join(f"{one.meaning} ({one.place})" for one in gated)


def _verdicts(gate: TableGate, columns: JudgedColumns) -> list[Verdict]:
    """Returns a verdict without a result for each expectation."""
    verdicts = []
    for gated in gate.expectations:
        item = gated.item
        kind, kwargs = with_raw(item.type, item.kwargs, columns.raw, gated.called)
        planned = PlannedExpectation(kind, kwargs, item.severity, "own", gated.called, gated.place)
        verdicts.append(Verdict(gated, planned))
    return verdicts


def _add_conditions(gate: TableGate, verdicts: Sequence[Verdict], columns: TargetColumns) -> None:
    """Give each expectation its condition on single rows by Spark, if it has one.

    Raises ConfigError for a refused gate.
    """
    problems = [
        f"  - {verdict.gated.place}: {why}"
        for verdict in verdicts
        for why in _whys_refused(verdict, columns)
    ]
    if problems:
        listed = "\n".join(problems)
        raise ConfigError(f"{gate.table}: its changes wait, since its gate is refused:\n{listed}")


def _whys_refused(verdict: Verdict, columns: TargetColumns) -> list[str]:
    item = verdict.gated.item
    if why_refused(item, columns, is_built=False):
        return why_refused(item, columns)
    try:
        verdict.condition = kind_of(verdict.planned.type).row_condition(verdict.planned.kwargs)
    except ParseException as err:
        return [why_unevaluable(err)]
    whys = [] if verdict.condition is not None else why_refused(item, columns)
    if verdict.condition is None and not whys and item.gate == "quarantine":
        return ["gate: quarantine can't identify the failing rows by these arguments: use stop"]
    return whys


def _target_columns(columns: JudgedColumns) -> TargetColumns:
    types = {name: kind.spark for name, kind in zip(columns.names, columns.types, strict=True)}
    return TargetColumns(
        types | (METADATA_TYPES if columns.has_metadata else {}), bool(columns.key)
    )


def _staged_rows(
    runner: Runner, plan: TargetPlan, gate: TableGate, columns: JudgedColumns, staged: Staged
) -> SparkRows:
    """Returns the rows the merge would write."""
    written = ", ".join(f"'{action}'" for action in WRITTEN)
    # The SQL contains only waldelta's own actions and folder.
    rows = runner.spark().sql(f"select * from {staged.source} where action in ({written})")  # noqa: S608
    return SparkRows.of(rows, plan.decode.net_schema.names, columns, gate.table)


def _set_aside(
    runner: Runner,
    plan: TargetPlan,
    gate: TableGate,
    rows: ArrowRows | SparkRows,
    asides: Sequence[Verdict],
    staged: Staged,
) -> JudgedChanges:
    """Take out the rows that fail."""
    count = rows.count(asides)
    if not count:
        return JudgedChanges(staged)
    if count > MOST_SET_ASIDE:
        take_examples(rows, asides)
        raise QualityFailed(
            f"{gate.table}: not merged: {count:,} of its changed rows fail expectations with gate:"
            f" quarantine, and a run quarantines at most {MOST_SET_ASIDE:,} at"
            f" once:\n{listed(asides)}\nIts changes wait in the change log: correct the"
            " expectation, which the next run uses, or make it warn until they are merged"
        )
    found, of_rows = rows.failing(asides)
    reasons = [_reason(asides, of_row) for of_row in of_rows]
    judged = set_aside(runner, plan, staged, as_net(found, plan), reasons)
    log.warning(
        "table=%s gate: quarantined %s, %d in all",
        gate.table,
        counted(len(judged.aside), "row"),
        judged.staged.counts.get(QUARANTINED_ROWS, 0),
    )
    return judged


def _stopped(
    gate: TableGate, rows: ArrowRows | SparkRows, verdicts: Sequence[Verdict]
) -> list[Verdict]:
    """Returns the expectations that the rows don't meet."""
    if isinstance(rows, SparkRows):
        by_row = [verdict for verdict in verdicts if verdict.condition is not None]
    else:
        by_row = list(verdicts)
    rows.count(by_row)
    take_examples(rows, by_row)
    for verdict in verdicts:
        if isinstance(rows, SparkRows) and verdict.condition is None:
            used = _used_columns(rows.columns.names, verdict.gated.item.kwargs)
            sent = rows.frame.where(rows.columns.is_sent(used)).drop(NET)
            _judge_as_a_whole(gate.table, sent, verdict)
    return [verdict for verdict in verdicts if not verdict.success]


def _judge_as_a_whole(table: str, rows: DataFrame, verdict: Verdict) -> None:
    """Have an expectation on several rows judged, by Great Expectations unless it is ours."""
    if rows.isEmpty():
        # All rows were released or sent partly, so no aggregate can be computed.
        verdict.success, verdict.observed = True, "no rows to judge"
        return
    try:
        (found,) = judge_rows(table, [verdict.planned], rows)
    except WaldeltaError:
        raise
    except Exception as err:
        if (named := named_error(err)) is not None:
            raise named from err
        verdict.why = f"can't be evaluated: {why_unevaluable(err)}"
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
