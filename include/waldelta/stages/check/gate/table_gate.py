"""A table's gate, the verdicts of its expectations, and the staged rows that they judge.

Arrow judges them in tasks where it certainly finds what Spark would find; Spark judges the rest.

Examples of rows that fail have their keys and the values that the expectation reads. The ledger
stores them with the gate's result. Messages, logs and alerts never show them; pages do to readers
with the permission for row values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import and_
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from waldelta.arrow import Ints
from waldelta.changes.decode.net_rows import values_as_json
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.stage.net_files import NetFiles
from waldelta.config.expectation_files import OwnExpectation, TargetColumns, is_condition, is_sql
from waldelta.errors import ConfigError, QualityFailed, class_and_text
from waldelta.lake.ledger import ExpectationResult, now
from waldelta.metadata_columns import COMMIT_TS, LSN, METADATA_TYPES, RAW
from waldelta.pipeline import Job
from waldelta.quantities import counted
from waldelta.row_filter.spark.evaluate import evaluate
from waldelta.spark import Runner
from waldelta.stages.check.gate.quarantined_rows import QUARANTINE, STOP
from waldelta.stages.check.great_expectations.own_expectations import (
    evaluate_each,
    judge_rows,
    why_refused,
    why_unevaluable,
)
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import PlannedExpectation, RowCondition
from waldelta.stages.check.suite.kinds import kind_of, with_raw
from waldelta.stages.check.suite.row_kinds import count_rows
from waldelta.stages.check.suite.sql_conditions import columns_of
from waldelta.types import TargetType

# More rows than this in one range are not a few bad ones: an operator must decide before anything
# is merged.
MOST_SET_ASIDE = 10_000
_CALLED = {"stop": STOP, "quarantine": QUARANTINE}


@dataclass(frozen=True, slots=True)
class Gated:
    """An expectation that judges before the merge, its place, and its name in its file."""

    item: OwnExpectation
    place: str
    called: str

    @property
    def meaning(self) -> str:
        """Returns the expectation's name in messages."""
        column = self.item.kwargs.get("column") if self.item.notes else None
        return self.called + (f" on {column}" if column else "")


@dataclass(frozen=True, slots=True)
class TableGate:
    """One table's gate; commits that end by ``released`` pass its ``stop``."""

    table: str
    expectations: tuple[Gated, ...] = ()
    problem: ConfigError | None = None
    released: int = 0


@dataclass(slots=True)
class Verdict:
    """The result of an expectation, and how it is judged.

    ``planned`` takes no value in ``_wd_raw`` for null. ``columns`` are those that it reads; None
    where unknown.
    """

    gated: Gated
    planned: PlannedExpectation
    columns: Sequence[str] | None = None
    unexpected: int | None = None
    success: bool | None = None
    why: str | None = None
    observed: str | None = None
    examples: list[str] = field(default_factory=list)

    def keep(self, found: FailingRows) -> None:
        """Keep what was counted."""
        mostly = float(self.planned.kwargs.get("mostly", 1))
        self.unexpected, self.success = found.rows, found.are_few(mostly)


def stopped(gate: TableGate, failed: Sequence[Verdict]) -> QualityFailed:
    """Returns the error of changes that fail expectations with ``gate: stop``."""
    return QualityFailed(
        f"{gate.table}: not merged, since its changes fail expectations with gate:"
        f" stop:\n{listed(failed)}\nThey wait in the change log, the slot advances,"
        " and the target stays unchanged. Correct the expectation or the data: the"
        " next run checks them again (as many as one apply batch takes:"
        " docs/how-to/decide.md). Or release the landed changes: waldelta"
        f" decide FILE release --tables {gate.table} --reason WHY. decide FILE show, and"
        " the page *waiting for you*, show some of the rows"
    )


def listed(verdicts: Sequence[Verdict]) -> str:
    """Returns a line for each of these verdicts."""
    lines = []
    for verdict in verdicts:
        rows = None if verdict.unexpected is None else counted(verdict.unexpected, "row")
        found = verdict.why or rows or "not met"
        lines.append(f"  - {verdict.gated.meaning} ({found}) at {verdict.gated.place}")
    return "\n".join(lines)


def record(job: Job, gate: TableGate, verdicts: Sequence[Verdict]) -> None:
    """Record the verdicts together with the checks' results, where the pages find both."""
    at = now()
    rows = [
        ExpectationResult(
            at,
            job.run_id,
            gate.table,
            v.gated.item.type,
            f"{_CALLED[v.gated.item.gate]}{v.gated.meaning}",
            v.gated.item.severity if v.gated.item.gate == "quarantine" else "critical",
            "own",
            v.success,
            v.why or v.observed,
            v.unexpected,
            None,
            examples=v.examples or None,
        )
        for v in verdicts
        if v.success is not None or v.why
    ]
    job.ledger.append_all(rows)


log = logging.getLogger(__name__)

EXAMPLE_ROWS = 5
# Columns of a query besides the target's: which values weren't sent, and a row's file and place.
_OWN = "_wd_row_"
_PLACE = (f"{_OWN}file", f"{_OWN}place")
# Of an expectation, by its number: how many rows of a file fail it (null: Arrow isn't certain), how
# many it applies to, and the numbers of the former among the rows of all files.
_FAILING = pa.schema(
    [
        ("expectation", pa.int64()),
        ("unexpected", pa.int64()),
        ("judged", pa.int64()),
        ("rows", pa.list_(pa.int64())),
    ]
)


@dataclass(frozen=True, slots=True)
class JudgedColumns:
    """The columns of the judged rows; a change may lack the values of ``toastable`` ones (by
    index).
    """

    names: Sequence[str]
    types: Sequence[TargetType]
    key: Sequence[str]
    has_metadata: bool
    toastable: Sequence[int] = ()

    @classmethod
    def of(cls, plan: TargetPlan, *, has_metadata: bool) -> JudgedColumns:
        """Returns the columns of a target's staged changes."""
        decode = plan.decode
        key = [decode.names[i] for i in decode.shape.key]
        return cls(decode.names, decode.types, key, has_metadata, decode.shape.toastable)

    @property
    def of_target(self) -> TargetColumns:
        """Returns the target's columns."""
        types = {name: kind.spark for name, kind in zip(self.names, self.types, strict=True)}
        metadata = METADATA_TYPES if self.has_metadata else {}
        return TargetColumns(types | metadata, bool(self.key))

    @property
    def raw(self) -> list[str]:
        """Returns the columns of which values may be in ``_wd_raw``."""
        kinds = zip(self.names, self.types, strict=True)
        return [name for name, kind in kinds if self.has_metadata and kind.may_be_raw]

    @property
    def as_staged(self) -> dict[str, str]:
        """Returns the columns that the target stores as they are staged, and their staged names."""
        kinds = enumerate(zip(self.names, self.types, strict=True))
        stored = {name: f"c{i}" for i, (name, kind) in kinds if kind.stored_sql(name) == name}
        return stored | self._metadata

    @property
    def values(self) -> list[Column]:
        """Returns staged columns as the target stores them."""
        kinds = enumerate(zip(self.names, self.types, strict=True))
        values = [F.expr(kind.stored_sql(f"c{i}")).alias(name) for i, (name, kind) in kinds]
        return values + [F.col(staged).alias(name) for name, staged in self._metadata.items()]

    @property
    def _metadata(self) -> dict[str, str]:
        return {LSN: "lsn", COMMIT_TS: "commit_ts", RAW: "raw"} if self.has_metadata else {}

    def flags_of(self, names: Sequence[str] | None) -> list[str]:
        """Returns the flags of these columns (None: every column) whose values may not be sent."""
        # Spark matches column names case-insensitively.
        read = None if names is None else {name.lower() for name in names}
        return [f"u{i}" for i in self.toastable if read is None or self.names[i].lower() in read]

    def examples_of(self, rows: pa.Table, read: Sequence[str] | None) -> list[str]:
        """Returns net changes as JSON: ``key``, and ``values`` of the columns in ``read``.

        ``read`` is None where the columns are unknown, and then all are included.
        """
        flags = {self.names[i]: rows[f"u{i}"].to_pylist() for i in self.toastable}
        absent = [[name for name, of in flags.items() if of[n]] for n in range(len(rows))]
        kinds = list(zip(self.names, self.types, strict=True))
        wanted = {name.lower() for name in (self.names if read is None else read)}
        examples = []
        for values in map(json.loads, values_as_json(rows, kinds, absent)):
            key = {name: values[name] for name in self.key if name in values}
            seen = {name: value for name, value in values.items() if name.lower() in wanted}
            examples.append(json.dumps({"key": key, "values": seen}))
        return examples


@dataclass(frozen=True)
class StagedRows:
    """Staged rows to judge: those in ``files`` that meet a condition in Spark SQL, of which Arrow
    is certain.
    """

    runner: Runner
    files: NetFiles
    columns: JudgedColumns
    table: str
    where: str = "true"

    def judge(self, verdicts: Sequence[Verdict], most: int | None = None) -> list[Ints]:
        """Count the rows that fail each expectation; returns their numbers, all or some of them.

        With ``most`` some are enough: so many, where there are. There are none of an expectation on
        several rows. Raises ConfigError for an expectation that is refused, and QualityFailed for
        one that Spark can't evaluate.
        """
        numbers = self._by_arrow(verdicts, most)
        if left := {n: verdict for n, verdict in enumerate(verdicts) if n not in numbers}:
            numbers |= self._by_spark(left, most)
        return [numbers.get(n, np.zeros(0, np.int64)) for n in range(len(verdicts))]

    def take_examples(self, verdicts: Sequence[Verdict], numbers: Sequence[Ints]) -> None:
        """Give each expectation that isn't met some of the rows that fail it.

        Without examples the result is the same, so an error is only logged.
        """
        for verdict, failing in zip(verdicts, numbers, strict=True):
            if not verdict.success and len(failing):
                try:
                    some = self.files.at(failing[:EXAMPLE_ROWS])
                    verdict.examples = self.columns.examples_of(some, verdict.columns)
                except Exception as err:
                    log.warning("rows that fail a gate can't be shown: %s", class_and_text(err))

    def _by_arrow(self, verdicts: Sequence[Verdict], most: int | None) -> dict[int, Ints]:
        certain = {}
        for n, verdict in enumerate(verdicts):
            verdict.columns = kind_of(verdict.planned.type).columns_read(verdict.planned)
            if verdict.columns is not None and {*verdict.columns} <= self.columns.as_staged.keys():
                certain[n] = verdict.planned, verdict.columns
        if not certain:
            return {}
        judge = partial(_failing, self.files, self.columns, self.where, certain, most)
        of_files = self.runner.run(len(self.files.paths), _FAILING, judge)
        numbers = {}
        for n in certain:
            found = [of for of in of_files if of["expectation"] == n]
            if all(of["unexpected"] is not None for of in found):
                unexpected, judged = (sum(of[k] for of in found) for k in ("unexpected", "judged"))
                verdicts[n].keep(FailingRows(unexpected, judged=judged))
                numbers[n] = np.array([row for of in found for row in of["rows"]], np.int64)
        return numbers

    def _by_spark(self, verdicts: Mapping[int, Verdict], most: int | None) -> dict[int, Ints]:
        spark = self.runner.spark("a gate that only Spark evaluates")
        _ = spark.version  # Conditions can be made only once the session has started.
        conditions = _conditions(self.table, verdicts, self.columns.of_target)
        flags = [f"u{i}" for i in self.columns.toastable]
        place = [F.col("_metadata.file_name"), F.col("_metadata.row_index")]
        own = [column.alias(name) for column, name in zip(place, _PLACE, strict=True)]
        own += [F.col(flag).alias(f"{_OWN}{flag}") for flag in flags]
        rows = spark.read.parquet(self.files.folder).where(self.where)
        rows = rows.select(*own, *self.columns.values)
        fails = {}
        for n, condition in conditions.items():
            verdicts[n].columns = condition.columns
            unexpected = F.coalesce(condition.unexpected, F.lit(False))
            unexpected &= self._is_sent(condition.columns)
            fails[n] = replace(condition, unexpected=unexpected, columns=_PLACE)

        def count(these: Sequence[int]) -> dict[int, FailingRows]:
            return count_rows(rows, {n: fails[n] for n in these}, most)

        counts, errors = evaluate_each(count, [*fails]) if fails else ({}, {})
        first = np.cumsum([0, *self.files.rows]).tolist()
        begin = {
            path.rpartition("/")[2]: n for path, n in zip(self.files.paths, first, strict=False)
        }
        numbers = {}
        for n, found in counts.items():
            verdicts[n].keep(found)
            places = sorted(begin[file] + row for file, row in found.examples)
            numbers[n] = np.array(places, np.int64)
        for n, err in errors.items():
            verdicts[n].why = f"can't be evaluated: {why_unevaluable(err)}"
        if errors:
            raise QualityFailed(
                f"{self.table}: not merged, since its gate can't be"
                f" evaluated:\n{listed([verdicts[n] for n in errors])}\nCorrect the"
                " expectation: the next run uses it"
            ) from next(iter(errors.values()))
        for verdict in (verdict for n, verdict in verdicts.items() if n not in conditions):
            used = _used_columns(self.columns.names, verdict.gated.item.kwargs)
            sent = rows.where(self._is_sent(used)).drop(*(f"{_OWN}{flag}" for flag in flags))
            _judge_as_a_whole(self.table, sent.drop(*_PLACE), verdict)
        return numbers

    def _is_sent(self, names: Sequence[str] | None) -> Column:
        """Returns whether a change sent all columns of these names (None: every column)."""
        flags = (~F.col(f"{_OWN}{flag}") for flag in self.columns.flags_of(names))
        return reduce(and_, flags, F.lit(True))


def _failing(
    files: NetFiles,
    columns: JudgedColumns,
    where: str,
    judged: Mapping[int, tuple[PlannedExpectation, Sequence[str]]],
    most: int | None,
    number: int,
) -> pa.Table:
    """Returns which rows of a file fail these expectations, by Arrow (_FAILING)."""
    staged, begin = columns.as_staged, sum(files.rows[:number])
    flags = {n: columns.flags_of(names) for n, (_, names) in judged.items()}
    read = {staged[name] for _, names in judged.values() for name in names}
    needed = {"action", "lsn", "t0", *(flag for of in flags.values() for flag in of)}
    found: dict[int, FailingRows | None] = dict.fromkeys(judged, FailingRows(judged=0))
    for part in files.columns_of(number, sorted(read | needed & {*files.schema.names})):
        if (applies := evaluate(where, part)) is None:
            raise TypeError(f"Arrow isn't certain of {where}")
        chosen = np.flatnonzero(pc.fill_null(applies, False))
        rows, places, begin = part.take(pa.array(chosen)), chosen + begin, begin + len(part)
        values = {name: rows[of] for name, of in staged.items() if of in read}
        values = pa.table(values | {_PLACE[1]: places})
        for n, (planned, _) in judged.items() if len(rows) else ():
            masks, of = kind_of(planned.type).failing(values, planned), found[n]
            if masks is None or of is None:
                found[n] = None
                continue
            fails, applied = masks
            for flag in flags[n]:
                fails = pc.and_(fails, pc.invert(pc.fill_null(rows[flag], True)))
            found[n] = of.plus(fails, applied, values.select(_PLACE[1:]), most)
    return pa.Table.from_pylist(
        [
            {"expectation": n, "unexpected": of.rows, "judged": of.judged, "rows": of.examples}
            if of is not None
            else {"expectation": n}
            for n, of in found.items()
        ],
        _FAILING,
    )


def read_verdicts(gate: TableGate, columns: JudgedColumns) -> list[Verdict]:
    """Returns a verdict without a result for each expectation of a gate.

    Raises ConfigError for one that is refused by its names, arguments and columns.
    """
    verdicts = []
    for gated in gate.expectations:
        item = gated.item
        kind, kwargs = with_raw(item.type, item.kwargs, columns.raw, gated.called)
        planned = PlannedExpectation(kind, kwargs, item.severity, "own", gated.called, gated.place)
        verdicts.append(Verdict(gated, planned))
    of_target = columns.of_target
    _check_refused(
        gate.table,
        {
            verdict.gated.place: why_refused(verdict.gated.item, of_target)
            for verdict in verdicts
            if why_refused(verdict.gated.item, of_target, is_built=False)
        },
    )
    return verdicts


def _check_refused(table: str, whys: Mapping[str, Sequence[str]]) -> None:
    if problems := [f"  - {place}: {why}" for place, of in whys.items() for why in of]:
        listed = "\n".join(problems)
        raise ConfigError(f"{table}: its changes wait, since its gate is refused:\n{listed}")


def _conditions(
    table: str, verdicts: Mapping[int, Verdict], columns: TargetColumns
) -> dict[int, RowCondition]:
    """Returns the conditions on single rows by Spark; raises ConfigError for a refused gate."""
    conditions, whys = {}, {}
    for n, verdict in verdicts.items():
        item = verdict.gated.item
        try:
            condition = kind_of(verdict.planned.type).row_condition(verdict.planned.kwargs)
        except ParseException as err:
            whys[verdict.gated.place] = [why_unevaluable(err)]
            continue
        if condition is not None:
            conditions[n] = condition
            continue
        found = why_refused(item, columns)
        if not found and item.gate == "quarantine":
            found = [
                "gate: quarantine can't identify the failing rows by these arguments: use stop"
            ]
        whys[verdict.gated.place] = found
    _check_refused(table, whys)
    return conditions


def _judge_as_a_whole(table: str, rows: DataFrame, verdict: Verdict) -> None:
    """Have an expectation on several rows judged, by Great Expectations unless it is ours."""
    if rows.isEmpty():
        # All rows were released or sent partly, so no aggregate can be computed.
        verdict.success, verdict.observed = True, "no rows to judge"
        return
    outcomes, errors = evaluate_each(
        lambda _: dict(enumerate(judge_rows(table, [verdict.planned], rows))), [0]
    )
    if errors:
        verdict.why = f"can't be evaluated: {why_unevaluable(errors[0])}"
        return
    found = outcomes[0]
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
