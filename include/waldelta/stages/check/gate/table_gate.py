"""A table's gate, the verdicts of its expectations, and the rows that they judge one by one: net
changes in memory by Arrow, or a query's rows by Spark.

Examples of rows that fail have their keys and the values that the expectation reads. The ledger
stores them with the gate's result. Messages, logs and alerts never show them; pages do to readers
with the permission for row values.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import and_, or_

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from waldelta.changes.decode.net_rows import WRITTEN, values_as_json
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.config.expectation_files import OwnExpectation
from waldelta.errors import ConfigError, QualityFailed, class_and_text
from waldelta.lake.ledger import ExpectationResult, now
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.pipeline import Job
from waldelta.quantities import counted
from waldelta.stages.check.gate.quarantined_rows import QUARANTINE, STOP
from waldelta.stages.check.gate.release import lands_later
from waldelta.stages.check.great_expectations.own_expectations import evaluate_each, why_unevaluable
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import Masks, PlannedExpectation, RowCondition
from waldelta.stages.check.suite.kinds import kind_of
from waldelta.stages.check.suite.row_kinds import count_rows
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

    ``planned`` takes no value in ``_wd_raw`` for null. ``condition`` is that on single rows by
    Spark, None where there is none, or where Arrow judges.
    """

    gated: Gated
    planned: PlannedExpectation
    condition: RowCondition | None = None
    unexpected: int | None = None
    success: bool | None = None
    why: str | None = None
    observed: str | None = None
    examples: list[str] = field(default_factory=list)

    @property
    def columns(self) -> Sequence[str] | None:
        """Returns the columns that a condition on single rows reads; None where unknown."""
        if self.condition is not None:
            return self.condition.columns
        return kind_of(self.planned.type).columns_read(self.planned)

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
        " docs/how-to/release-a-gate.md). Or release the landed changes: waldelta"
        f" quarantine FILE --release --tables {gate.table} --reason WHY. The command quarantine,"
        " and the page quarantine, show some of the rows"
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
# The struct of a query's staged columns.
NET = "_wd_net"


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
    def raw(self) -> list[str]:
        """Returns the columns of which values may be in ``_wd_raw``."""
        kinds = zip(self.names, self.types, strict=True)
        return [name for name, kind in kinds if self.has_metadata and kind.may_be_raw]

    @property
    def values(self) -> list[Column]:
        """Returns staged columns as the target stores them."""
        kinds = enumerate(zip(self.names, self.types, strict=True))
        values = [F.expr(kind.stored_sql(f"c{i}")).alias(name) for i, (name, kind) in kinds]
        staged = {"lsn": LSN, "commit_ts": COMMIT_TS, "raw": RAW} if self.has_metadata else {}
        return values + [F.col(name).alias(stored) for name, stored in staged.items()]

    def is_sent(self, names: Sequence[str] | None) -> Column:
        """Returns whether a change sent all columns of these names (None: every column)."""
        # Spark matches column names case-insensitively.
        read = None if names is None else {name.lower() for name in names}
        flags = [
            ~F.col(f"{NET}.u{i}")
            for i in self.toastable
            if read is None or self.names[i].lower() in read
        ]
        return reduce(and_, flags, F.lit(True))

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
class ArrowRows:
    """Net changes in memory that write a row, of which Arrow finds what Spark would find."""

    net: pa.Table
    columns: JudgedColumns

    @classmethod
    def of(cls, net: pa.Table, columns: JudgedColumns) -> ArrowRows:
        """Returns the net changes that write a row."""
        return cls(net.filter(pc.is_in(net["action"], value_set=pa.array(WRITTEN))), columns)

    def landed_after(self, released: int) -> ArrowRows:
        """Returns the changes of commits that weren't released."""
        return replace(self, net=self.net.filter(lands_later(pc.field("lsn"), released)))

    def count(self, verdicts: Sequence[Verdict]) -> int:
        """Count the rows that fail each expectation, and return how many fail any."""
        masks = self._sure(verdicts)
        for verdict, both in zip(verdicts, masks, strict=True):
            unexpected, judged = (pc.sum(mask).as_py() or 0 for mask in both)
            verdict.keep(FailingRows(unexpected, judged=judged))
        fails = reduce(pc.or_, [unexpected for unexpected, _ in masks], pa.scalar(False))
        return (pc.sum(fails).as_py() or 0) if masks else 0

    def failing(
        self, verdicts: Sequence[Verdict], most: int | None = None
    ) -> tuple[pa.Table, list[list[int]]]:
        """Returns the net changes that fail, and for each the numbers of the expectations."""
        masks = [unexpected for unexpected, _ in self._sure(verdicts)]
        of_rows = zip(*(mask.to_pylist() for mask in masks), strict=True)
        numbers = [[n for n, fails in enumerate(of_row) if fails] for of_row in of_rows]
        return self.net.filter(reduce(pc.or_, masks)).slice(0, most), [n for n in numbers if n]

    def are_certain(self, verdicts: Sequence[Verdict]) -> bool:
        """Returns whether Arrow finds for all expectations what Spark would find."""
        return None not in map(self._masks, verdicts)

    def _sure(self, verdicts: Sequence[Verdict]) -> list[Masks]:
        # Fewer rows than those of are_certain() can't be less certain.
        return [masks for masks in map(self._masks, verdicts) if masks is not None]

    def _masks(self, verdict: Verdict) -> Masks | None:
        kind, read = kind_of(verdict.planned.type), verdict.columns
        if read is None or not {*read} <= {*self._stored.column_names}:
            return None
        if (masks := kind.failing(self._stored, verdict.planned)) is None:
            return None
        unexpected, judged = masks
        for i in self.columns.toastable:
            if self.columns.names[i] in read:
                sent = pc.invert(pc.fill_null(self.net[f"u{i}"], True))
                unexpected = pc.and_(unexpected, sent)
        return unexpected, judged

    @cached_property
    def _stored(self) -> pa.Table:
        """Returns the columns that the target stores as they are staged."""
        kinds = enumerate(zip(self.columns.names, self.columns.types, strict=True))
        stored = {
            name: self.net[f"c{i}"] for i, (name, kind) in kinds if kind.stored_sql(name) == name
        }
        if self.columns.has_metadata:
            stored |= {LSN: self.net["lsn"], COMMIT_TS: self.net["commit_ts"], RAW: self.net["raw"]}
        return pa.table(stored)


@dataclass(frozen=True)
class SparkRows:
    """Rows of a query, with the target's columns and each change as the struct NET."""

    frame: DataFrame
    columns: JudgedColumns
    table: str

    @classmethod
    def of(
        cls, staged: DataFrame, net: Sequence[str], columns: JudgedColumns, table: str
    ) -> SparkRows:
        """Returns staged rows, of which ``net`` are the columns of a change."""
        change = F.struct(*map(F.col, net)).alias(NET)
        return cls(staged.select(change, *columns.values), columns, table)

    def landed_after(self, released: int) -> SparkRows:
        """Returns the changes of commits that weren't released."""
        return self.where(lands_later(F.col(f"{NET}.lsn"), released))

    def where(self, condition: Column) -> SparkRows:
        """Returns the rows that meet a condition."""
        return replace(self, frame=self.frame.where(condition))

    def count(self, verdicts: Sequence[Verdict]) -> int:
        """Count the rows that fail each expectation, and return how many fail any, by one query.

        Without expectations it asks nothing. Raises QualityFailed for an expectation that Spark
        can't evaluate.
        """
        if not verdicts:
            return 0
        conditions = [
            *(
                replace(_condition(verdict), unexpected=fails)
                for verdict, fails in zip(verdicts, self._fails(verdicts), strict=True)
            ),
            RowCondition(self.fails_any(verdicts), None, None),
        ]

        def count(numbers: Sequence[int]) -> dict[int, FailingRows]:
            found = count_rows(self.frame, [conditions[n] for n in numbers])
            return dict(zip(numbers, found, strict=True))

        counts, errors = evaluate_each(count, range(len(conditions)))
        for number, verdict in enumerate(verdicts):
            if number in counts:
                verdict.keep(counts[number])
            else:
                verdict.why = f"can't be evaluated: {why_unevaluable(errors[number])}"
        if errors:
            raise QualityFailed(
                f"{self.table}: not merged, since its gate can't be"
                f" evaluated:\n{listed([v for v in verdicts if v.why])}\nCorrect the"
                " expectation: the next run uses it"
            ) from next(iter(errors.values()))
        return counts[len(verdicts)].rows

    def failing(
        self, verdicts: Sequence[Verdict], most: int | None = None
    ) -> tuple[pa.Table, list[list[int]]]:
        """Returns the net changes that fail, and for each the numbers of the expectations."""
        marks = [F.when(fails, F.lit(n)) for n, fails in enumerate(self._fails(verdicts))]
        rows = self.frame.where(self.fails_any(verdicts))
        rows = rows if most is None else rows.limit(most)
        failed = F.array_compact(F.array(*marks)).alias("failed")
        found = rows.select(F.col(f"{NET}.*"), failed).toArrow()
        return found.drop_columns(["failed"]), found["failed"].to_pylist()

    def fails_any(self, verdicts: Sequence[Verdict]) -> Column:
        """Returns whether a row fails any of the expectations."""
        return reduce(or_, self._fails(verdicts), F.lit(False))

    def _fails(self, verdicts: Sequence[Verdict]) -> list[Column]:
        """Returns of each expectation whether a row fails it, by the values that were sent."""
        return [
            self.columns.is_sent(one.columns) & F.coalesce(one.unexpected, F.lit(False))
            for one in map(_condition, verdicts)
        ]


def _condition(verdict: Verdict) -> RowCondition:
    if verdict.condition is None:
        raise TypeError(f"{verdict.planned.type} doesn't judge single rows")
    return verdict.condition


def take_examples(rows: ArrowRows | SparkRows, verdicts: Sequence[Verdict]) -> None:
    """Give each expectation that isn't met some rows that fail it.

    Without examples the result is the same, so an error is only logged.
    """
    for verdict in verdicts:
        if not verdict.success:
            try:
                some, _ = rows.failing([verdict], EXAMPLE_ROWS)
                verdict.examples = rows.columns.examples_of(some, verdict.columns)
            except Exception as err:
                log.warning("rows that fail a gate can't be shown: %s", class_and_text(err))
