"""Judges the few changes that this process has staged by Arrow, where it finds what Spark finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.changes.decode.net_rows import WRITTEN
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.stages.check.gate.examples import EXAMPLE_ROWS, JudgedColumns, examples_of
from waldelta.stages.check.gate.release import lands_later
from waldelta.stages.check.gate.table_gate import TableGate, Verdict, reason_of
from waldelta.stages.check.measure.failing_rows import FailingRows
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kinds import kind_of, with_raw


def written_rows(net: pa.Table) -> pa.Table:
    """Returns the net changes that write a row."""
    return net.filter(pc.is_in(net["action"], value_set=pa.array(WRITTEN)))


def rows_after(rows: pa.Table, released: int) -> pa.Table:
    """Returns the changes of commits that weren't released."""
    positions = rows["lsn"].to_pylist()
    later = [lsn is not None and bool(lands_later(lsn, released)) for lsn in positions]
    return rows.filter(pa.array(later, pa.bool_()))


@dataclass(frozen=True, slots=True)
class _Failing:
    """Which rows fail an expectation, and which it applies to, by the columns that it reads."""

    unexpected: pa.ChunkedArray
    judged: pa.ChunkedArray
    columns: Sequence[str]
    mostly: float


@dataclass(frozen=True, slots=True)
class FewRows:
    """Expectations of a gate on net changes in memory, by the values that were sent."""

    gate: TableGate
    columns: JudgedColumns
    verdicts: Sequence[Verdict]
    has_metadata: bool

    def are_certain(self, rows: pa.Table) -> bool:
        """Returns whether Arrow finds for all expectations what Spark would find."""
        return None not in self._failing(rows)

    def count(self, rows: pa.Table) -> int:
        """Count the rows that fail each expectation, and return how many fail any."""
        found = self._sure(rows)
        for verdict, failing in zip(self.verdicts, found, strict=True):
            unexpected, judged = (
                pc.sum(mask).as_py() or 0 for mask in (failing.unexpected, failing.judged)
            )
            verdict.unexpected = unexpected
            verdict.success = FailingRows(unexpected, judged=judged).are_few(failing.mostly)
        masks = [failing.unexpected for failing in found]
        return (pc.sum(reduce(pc.or_, masks)).as_py() or 0) if masks else 0

    def failing_rows(self, rows: pa.Table) -> tuple[pa.Table, list[list[int]]]:
        """Returns the net changes that fail, and for each the numbers of the expectations."""
        masks = [failing.unexpected for failing in self._sure(rows)]
        found = rows.filter(reduce(pc.or_, masks))
        of_rows = zip(*(mask.to_pylist() for mask in masks), strict=True)
        numbers = [[n for n, fails in enumerate(of_row) if fails] for of_row in of_rows]
        return found, [of_row for of_row in numbers if of_row]

    def take_examples(self, rows: pa.Table) -> None:
        """Give each expectation that isn't met some rows that fail it."""
        for verdict, failing in zip(self.verdicts, self._sure(rows), strict=True):
            if not verdict.success:
                some = rows.filter(failing.unexpected).slice(0, EXAMPLE_ROWS)
                verdict.examples = examples_of(some, self.columns, failing.columns)

    def reason(self, numbers: Sequence[int]) -> str:
        """Returns why a row is in quarantine, by the numbers of the expectations it fails."""
        return reason_of(self.verdicts, numbers)

    def _sure(self, rows: pa.Table) -> list[_Failing]:
        # Fewer rows than those of are_certain() can't be less certain.
        return [failing for failing in self._failing(rows) if failing is not None]

    def _failing(self, rows: pa.Table) -> list[_Failing | None]:
        kinds = list(zip(self.columns.names, self.columns.types, strict=True))
        raw = [name for name, kind in kinds if self.has_metadata and kind.may_be_raw]
        # Values that the target stores as they are staged.
        values = {
            name: rows[f"c{i}"]
            for i, (name, kind) in enumerate(kinds)
            if kind.stored_sql(name) == name
        }
        if self.has_metadata:
            values |= {LSN: rows["lsn"], COMMIT_TS: rows["commit_ts"], RAW: rows["raw"]}
        table, found = pa.table(values), []
        for verdict in self.verdicts:
            gated, item = verdict.gated, verdict.gated.item
            name, kwargs = with_raw(item.type, item.kwargs, raw, gated.called)
            kind, planned = kind_of(name), PlannedExpectation(name, kwargs, "critical", "own", "")
            read = kind.columns_read(planned)
            is_read = read is not None and set(read) <= {*table.column_names}
            masks = kind.failing(table, planned) if is_read else None
            mostly = float(kwargs.get("mostly", 1))
            failing = None if masks is None else _Failing(*masks, read or (), mostly)
            found.append(failing and self._where_sent(failing, rows))
        return found

    def _where_sent(self, failing: _Failing, rows: pa.Table) -> _Failing:
        for i in self.columns.toastable:
            if self.columns.names[i] in failing.columns:
                sent = pc.invert(pc.fill_null(rows[f"u{i}"], True))
                failing = replace(failing, unexpected=pc.and_(failing.unexpected, sent))
        return failing
