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
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from waldelta.arrow import Ints
from waldelta.changes.decode.net_rows import values_as_json
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.stage.net_files import NetFiles
from waldelta.config.expectation_files import (
    OwnExpectation,
    TargetColumns,
    is_condition,
    is_sql,
)
from waldelta.errors import ConfigError, QualityFailed, class_and_text
from waldelta.lake.ledger import ExpectationResult, now
from waldelta.metadata_columns import COMMIT_TS, LSN, METADATA_TYPES, RAW
from waldelta.pipeline import Job
from waldelta.pipeline.targets.quarantined_rows import QUARANTINE, STOP
from waldelta.quantities import counted
from waldelta.row_filter.spark.evaluate import evaluate
from waldelta.spark import Runner
from waldelta.spark_sql import quote
from waldelta.stages.check.gate.gate_files import TableGate
from waldelta.stages.check.great_expectations.own_expectations import (
    Conditions,
    arrow_conditions,
    count_by_arrow,
    count_by_spark,
    is_parse_error,
    judge_each,
    judge_rows,
    unevaluable,
    why_refused,
    why_unevaluable,
)
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import (
    Outcome,
    PlannedExpectation,
    RowCondition,
)
from waldelta.stages.check.suite.kinds import plan_own, row_conditions
from waldelta.stages.check.suite.sql_conditions import columns_of
from waldelta.types import TargetType

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# More rows than this in one range are not a few bad ones: an operator must decide before anything
# is merged.
MOST_SET_ASIDE = 10_000
_CALLED = {"stop": STOP, "quarantine": QUARANTINE}


@dataclass(slots=True)
class Verdict:
    """A gate's expectation with its outcome, and the numbers of the staged rows that fail it.

    ``planned`` is the form that doesn't count a value in ``_wd_raw`` as null.
    """

    item: OwnExpectation
    planned: PlannedExpectation
    outcome: Outcome | None = None
    failing: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def is_met(self) -> bool:
        """Returns whether the expectation was judged and every row meets it."""
        return self.outcome is not None and bool(self.outcome.success)

    @property
    def why(self) -> str | None:
        """Returns why the expectation couldn't be evaluated; None if it was evaluated, or wasn't
        judged.
        """
        if self.outcome is None or self.outcome.success is not None:
            return None
        raised = self.outcome.raised
        return f"can't be evaluated: {raised}" if raised else "can't be evaluated"

    def keep(self, failing_rows: FailingRows, numbers: Sequence[int]) -> None:
        """Store the outcome by the failing rows' count, and the numbers of failing rows."""
        success = failing_rows.are_few(float(self.planned.kwargs.get("mostly", 1)))
        self.outcome = Outcome(self.planned, success, None, failing_rows.rows)
        self.failing = np.array(numbers, np.int64)


def gate_error(gate: TableGate, failed: Sequence[Verdict]) -> QualityFailed:
    """Returns the error of changes that fail expectations with ``gate: stop``."""
    return QualityFailed(
        f"{gate.table}: not merged, since its changes fail expectations with gate:"
        f" stop:\n{list_verdicts(failed)}\nThey wait in the change log, the slot advances,"
        " and the target stays unchanged. Correct the expectation or the data: the"
        " next run checks them again (as many as one apply batch takes:"
        " docs/how-to/decide.md). Or release the landed changes: waldelta"
        f" decide FILE release --tables {gate.table} --reason WHY. decide FILE show, and"
        " the page *waiting for you*, show some of the rows"
    )


def list_verdicts(verdicts: Sequence[Verdict]) -> str:
    """Returns a line for each of these verdicts."""
    lines = []
    for verdict in verdicts:
        rows = verdict.outcome.unexpected_count if verdict.outcome is not None else None
        result = verdict.why or (counted(rows, "row") if rows is not None else "not met")
        lines.append(f"  - {verdict.planned.meaning} ({result}) at {verdict.planned.place}")
    return "\n".join(lines)


def record(job: Job, gate: TableGate, verdicts: Sequence[Verdict]) -> None:
    """Record the verdicts together with the checks' results, where the pages find both."""
    at = now()
    rows = [
        ExpectationResult(
            at,
            job.run_id,
            gate.table,
            v.item.type,
            f"{_CALLED[v.item.gate]}{v.planned.meaning}",
            v.item.severity if v.item.gate == "quarantine" else "critical",
            "own",
            v.outcome.success,
            v.why or v.outcome.observed,
            v.outcome.unexpected_count,
            None,
            examples=[*v.outcome.examples] or None,
        )
        for v in verdicts
        if v.outcome is not None
    ]
    job.ledger.append_all(rows)


log = logging.getLogger(__name__)

EXAMPLE_ROWS = 5
_UNNAMED = "gate: quarantine can't identify the failing rows by these arguments: use stop"
# Columns of a query besides the target's: which values weren't sent, and a row's file and place.
_OWN = "_wd_row_"
_PLACE = (f"{_OWN}file", f"{_OWN}place")
_METADATA = {LSN: "lsn", COMMIT_TS: "commit_ts", RAW: "raw"}
# One row for each file and expectation (by number): how many rows fail it (null: Arrow isn't
# certain), to how many it applies, and the failing rows' numbers among the rows of all files.
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
    """The columns of the judged rows, in their order. A change may lack the value of a column in
    ``toastable``; its flag is true then.
    """

    types: Mapping[str, TargetType]
    key: Sequence[str]
    has_metadata: bool
    toastable: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: TargetPlan, *, has_metadata: bool) -> JudgedColumns:
        """Returns the columns of a target's staged changes."""
        names, numbering = plan.decode.names, plan.decode.numbering
        types = dict(zip(names, plan.decode.types, strict=True))
        toastable = {names[i]: f"u{i}" for i in numbering.toastable}
        return cls(types, [names[i] for i in numbering.key], has_metadata, toastable)

    @property
    def of_target(self) -> TargetColumns:
        """Returns the target's columns."""
        types = {name: kind.spark for name, kind in self.types.items()}
        metadata = METADATA_TYPES if self.has_metadata else {}
        return TargetColumns(types | metadata, bool(self.key))

    @property
    def staged(self) -> dict[str, str]:
        """Returns what the target stores in each column, in Spark SQL on staged columns: the name
        of one where it is stored as it is staged.
        """
        kinds = enumerate(self.types.items())
        values = {name: kind.stored_sql(f"c{i}") for i, (name, kind) in kinds}
        return values | (_METADATA if self.has_metadata else {})

    def flags_of(self, names: Sequence[str] | None) -> list[str]:
        """Returns the flags of these columns (None: every column) whose values may not be sent."""
        # Spark matches column names case-insensitively.
        read = {name.lower() for name in (self.types if names is None else names)}
        return [f"{_OWN}{flag}" for name, flag in self.toastable.items() if name.lower() in read]

    def examples_of(self, rows: pa.Table, read: Sequence[str] | None) -> list[str]:
        """Returns net changes as JSON: ``key``, and ``values`` of the columns in ``read``.

        ``read`` is None where the columns are unknown, and then all are included.
        """
        flags = {name: rows[flag].to_pylist() for name, flag in self.toastable.items()}
        absent = [[name for name, of in flags.items() if of[n]] for n in range(len(rows))]
        names = {name.lower() for name in (self.types if read is None else read)}
        examples = []
        for values in map(json.loads, values_as_json(rows, [*self.types.items()], absent)):
            key = {name: values[name] for name in self.key if name in values}
            seen = {name: value for name, value in values.items() if name.lower() in names}
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

    def judge(self, verdicts: Sequence[Verdict], most: int | None = None) -> None:
        """Count the rows that fail each expectation, and store the failing rows' numbers in its
        verdict.

        With ``most``, at most so many numbers are stored; an expectation on several rows together
        has none. Raises ConfigError for an expectation that is refused, and QualityFailed for one
        that Spark can't evaluate.
        """
        conditions = self._conditions(verdicts)
        counted_numbers = self._by_arrow(verdicts, conditions, most)
        if remaining := {n: v for n, v in enumerate(verdicts) if n not in counted_numbers}:
            self._by_spark(remaining, {n: c for n, c in conditions.items() if n in remaining}, most)

    def _conditions(self, verdicts: Sequence[Verdict]) -> dict[int, RowCondition]:
        """Returns the conditions of expectations on single rows, which show a row's place."""
        planned = {n: verdict.planned for n, verdict in enumerate(verdicts)}
        return {
            n: replace(of, unsent=self.columns.flags_of(of.columns), example_columns=_PLACE)
            for n, of in row_conditions(planned).items()
        }

    def take_examples(self, verdicts: Sequence[Verdict]) -> None:
        """Give each expectation that isn't met some of the rows that fail it.

        Without examples the result is the same, so an error is only logged.
        """
        conditions = self._conditions(verdicts)
        for n, verdict in enumerate(verdicts):
            if verdict.outcome is not None and not verdict.is_met and len(verdict.failing):
                try:
                    rows = self.files.at(verdict.failing[:EXAMPLE_ROWS])
                    examples = self.columns.examples_of(rows, conditions[n].columns)
                    verdict.outcome = replace(verdict.outcome, examples=tuple(examples))
                except Exception as err:
                    log.warning("rows that fail a gate can't be shown: %s", class_and_text(err))

    def _by_arrow(
        self, verdicts: Sequence[Verdict], conditions: Conditions, most: int | None
    ) -> set[int]:
        """Judge by Arrow, in a task for each file; returns the numbers of which it is certain."""
        staged = (name for name, of in self.columns.staged.items() if of.isidentifier())
        certain = arrow_conditions(conditions, staged)
        judge = partial(_failing, self.files, self.columns, self.where, certain, most)
        of_files = self.runner.run(len(self.files.paths), _FAILING, judge) if certain else []
        by_number = {n: [of for of in of_files if of["expectation"] == n] for n in certain}
        # Where Arrow isn't certain about some rows of a file, Spark judges all files.
        judged = {n: of for n, of in by_number.items() if len(of) == len(self.files.paths)}
        for n, parts in judged.items():
            unexpected, count = (sum(of[k] for of in parts) for k in ("unexpected", "judged"))
            rows = [row for of in parts for row in of["rows"]]
            verdicts[n].keep(FailingRows(unexpected, judged=count), rows)
        return {*judged}

    def _by_spark(
        self, verdicts: Mapping[int, Verdict], conditions: Conditions, most: int | None
    ) -> None:
        spark = self.runner.spark("a gate that only Spark evaluates")
        flags = self.columns.flags_of(None)
        place = ("_metadata.file_name", "_metadata.row_index")
        columns = [f"{column} as {name}" for column, name in zip(place, _PLACE, strict=True)]
        columns += [f"{flag.removeprefix(_OWN)} as {flag}" for flag in flags]
        columns += [f"{value} as {quote(name)}" for name, value in self.columns.staged.items()]
        rows = spark.read.parquet(self.files.folder).where(self.where).selectExpr(*columns)
        counts, errors = count_by_spark(rows, conditions, most)
        whole_verdicts = [verdict for n, verdict in verdicts.items() if n not in conditions]
        self._check_judged(verdicts, errors, whole_verdicts)
        first = np.cumsum([0, *self.files.rows]).tolist()
        begin = {
            path.rpartition("/")[2]: n for path, n in zip(self.files.paths, first, strict=False)
        }
        for n, failing_rows in counts.items():
            places = ([row[name] for name in _PLACE] for row in failing_rows.examples)
            verdicts[n].keep(failing_rows, sorted(begin[file] + row for file, row in places))
        for n, err in errors.items():
            verdicts[n].outcome = unevaluable(verdicts[n].planned, err)
        if errors:
            raise QualityFailed(
                f"{self.table}: not merged, since its gate can't be"
                f" evaluated:\n{list_verdicts([verdicts[n] for n in errors])}\nCorrect the"
                " expectation: the next run uses it"
            ) from next(iter(errors.values()))
        for verdict in whole_verdicts:
            used = self.columns.flags_of(_used_columns([*self.columns.types], verdict.item.kwargs))
            are_sent = " and ".join(f"not {flag}" for flag in used) or "true"
            complete_rows = rows.where(are_sent).drop(*flags, *_PLACE)
            verdict.outcome = _outcome_as_a_whole(self.table, complete_rows, verdict.planned)

    def _check_judged(
        self,
        verdicts: Mapping[int, Verdict],
        errors: Mapping[int, Exception],
        whole_verdicts: Sequence[Verdict],
    ) -> None:
        """Raise ConfigError for what is no condition, and for what can't be judged as a whole."""
        whys = {
            str(verdicts[n].planned.place): [why_unevaluable(err)]
            for n, err in errors.items()
            if is_parse_error(err)
        }
        for verdict in whole_verdicts:
            why = why_refused(verdict.item, self.columns.of_target)
            unnamed = [] if verdict.item.gate == "stop" else [_UNNAMED]
            whys[str(verdict.planned.place)] = why or unnamed
        _check_refused(self.table, whys)


def _failing(
    files: NetFiles,
    columns: JudgedColumns,
    where: str,
    judged: Mapping[int, RowCondition],
    most: int | None,
    number: int,
) -> pa.Table:
    """Returns which rows of a file fail these conditions, by Arrow (_FAILING)."""
    staged = columns.staged
    read = {name: staged[name] for of in judged.values() for name in of.read_by_arrow or ()}
    read |= {flag: flag.removeprefix(_OWN) for of in judged.values() for flag in of.unsent}
    conditions = {"action", "lsn", "t0"} & {*files.schema.names}

    def batches() -> Iterator[pa.Table]:
        begin = sum(files.rows[:number])
        for part in files.columns_of(number, sorted(conditions.union(read.values()))):
            places = pa.array(range(begin, begin + len(part)), pa.int64())
            begin += len(part)
            rows = pa.table({name: part[of] for name, of in read.items()} | {_PLACE[1]: places})
            yield rows.filter(evaluate(where, part))

    rows = [
        {
            "expectation": n,
            "unexpected": of.rows,
            "judged": of.judged,
            "rows": [row[_PLACE[1]] for row in of.examples],
        }
        for n, of in count_by_arrow(batches(), judged, most).items()
    ]
    return pa.Table.from_pylist(rows, _FAILING)


def read_verdicts(
    gate: TableGate, columns: JudgedColumns, folder: Path | None
) -> tuple[list[Verdict], list[Verdict]]:
    """Returns a verdict without an outcome for each expectation of a gate: those that quarantine
    rows, and those that stop the table. Places are relative to ``folder``.

    Raises ConfigError for one that is refused by its names, arguments and columns.
    """
    of_target, whys, verdicts, suite = columns.of_target, {}, [], gate.suite
    # Values of these columns may be in ``_wd_raw``.
    raw = [n for n, kind in columns.types.items() if columns.has_metadata and kind.may_be_raw]
    for item, planned in plan_own(suite, raw, folder) if suite is not None else ():
        if item.gate != "warn":
            whys[str(planned.place)] = why_refused(item, of_target, is_built=False)
            column = item.kwargs.get("column") if item.notes else None
            called = planned.meaning + (f" on {column}" if column else "")
            verdicts.append(Verdict(item, replace(planned, meaning=called)))
    _check_refused(gate.table, whys)
    asides, stops = ([v for v in verdicts if v.item.gate == of] for of in ("quarantine", "stop"))
    return asides, stops


def _check_refused(table: str, whys: Mapping[str, Sequence[str]]) -> None:
    if problems := [f"  - {place}: {why}" for place, of in whys.items() for why in of]:
        listed = "\n".join(problems)
        raise ConfigError(f"{table}: its changes wait, since its gate is refused:\n{listed}")


def _outcome_as_a_whole(table: str, rows: DataFrame, planned: PlannedExpectation) -> Outcome:
    """Returns the outcome of an expectation on several rows, without values of what raised."""
    if rows.isEmpty():
        # All rows were released or sent partly, so no aggregate can be computed.
        return Outcome(planned, True, "no rows to judge", None)
    outcomes, errors = judge_each(lambda of: judge_rows(table, of, rows), {0: planned})
    return unevaluable(planned, errors[0]) if errors else replace(outcomes[0], raised=None)


def _used_columns(names: Sequence[str], kwargs: Mapping[str, Any]) -> list[str] | None:
    """Returns the columns that an expectation may read, by its arguments; None if it may read all.

    A text equal to a column's name counts as that column, even where it is a value. A column too
    many only skips rows whose value was checked when PostgreSQL sent it; a column too few takes an
    unchanged TOASTed value, which PostgreSQL doesn't send, for null. Only arguments that may be
    conditions are parsed: nearly any text parses as a condition, and a text that doesn't parse
    counts as all columns, which skips the row.
    """
    texts: set[str] = set()
    for argument, text in _texts(kwargs):
        texts.add(text.lower())
        if not is_condition(argument):
            continue
        columns = columns_of(text) if is_sql(argument, kwargs) else None
        if columns is None:
            return None
        texts.update(name.lower() for name in columns)
    return [name for name in names if {name.lower(), f"`{name.lower()}`"} & texts] or None


def _texts(value: Any, argument: str = "") -> Iterator[tuple[str, str]]:
    """Yields every text in an expectation's arguments, at any depth, with its argument's name."""
    if isinstance(value, str):
        yield argument, value
    of_argument = value if isinstance(value, (list, tuple, set)) else ()
    parts = value.items() if isinstance(value, Mapping) else zip(repeat(argument), of_argument)
    for name, part in parts:
        yield from _texts(part, str(name))
