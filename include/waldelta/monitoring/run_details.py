"""One run: its stages, its changes to each table, and what it left for an operator. Of many runs:
what each did, in the unit of its verb.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow.compute as pc

from waldelta.lake.ledger import (
    COPYING,
    SYNCED,
    Decision,
    Ledger,
    Run,
    SlotReading,
    TableState,
    last_rows,
    of_run,
)
from waldelta.lake.ledger.records import row_of
from waldelta.monitoring.check_results import (
    Check,
    FailedExpectation,
    read_checks,
    read_failed_in_run,
)
from waldelta.monitoring.decisions import read_of_run
from waldelta.monitoring.run_history import LANDING, RunLine, parse_result, read_result, read_runs
from waldelta.monitoring.stopped_tables import unmet_in_run
from waldelta.monitoring.table_list import copied_rows, latest_states, read_operations
from waldelta.pipeline import SourceLoad, StageResult, TableResult
from waldelta.quantities import counted

# A verb and the id of a run.
RunKey = tuple[str, str]

_MOST_ROWS = 200
_COPYING = ("sync", "resync")
_CORRECTING = ("replay", "decide")
_WRITTEN = ("inserted", "updated", "deleted")


@dataclass(frozen=True, kw_only=True)
class TableChange(TableResult):
    """The run's changes to a table; ``schema`` describes changes of its columns, or of its copy."""

    table_name: str
    compared: int = 0
    differing: int = 0
    in_flight: int = 0
    is_behind: bool = False
    schema: tuple[str, ...] = ()
    check: Check | None = None

    @property
    def is_changed(self) -> bool:
        """Returns whether the run did anything to the table but check it."""
        counted = self.compared or self.differing or self.in_flight or self.rows
        return bool(self.touched or counted or self.schema or self.is_behind)


@dataclass(frozen=True, slots=True)
class RunDetails:
    """A run as its page shows it.

    ``work`` is what it did, in words. It and ``tables`` add up all attempts at the run; the rest is
    of the latest one, and ``is_retried`` whether an earlier one failed. ``failed`` are the
    expectations that its check found not met, ``unmet`` by table those of the gates that stopped
    it. ``quarantined`` are the first rows that came without values, ``quarantined_count`` is their
    number. ``result`` is RunResult as the ledger has it: a page shows its other fields from there.
    """

    line: RunLine
    work: str
    is_retried: bool
    stages: Mapping[str, StageResult]
    tables: tuple[TableChange, ...]
    unmet: Mapping[str, Sequence[FailedExpectation]]
    failed: tuple[FailedExpectation, ...]
    quarantined: tuple[Decision, ...]
    quarantined_count: int
    error: Mapping[str, Any]
    source: str
    slot_before: SlotReading | None
    slot_after: SlotReading | None
    result: Mapping[str, Any]


def read_run(ledger: Ledger, verb: str, run_id: str) -> RunDetails | None:
    """Returns a run by its id, or None when the ledger doesn't have it (any more)."""
    lines = [line for line in read_runs(ledger, run_id=run_id) if line.verb == verb]
    if not lines:
        return None
    line = lines[0]
    result = read_result(ledger, verb, run_id, line.at) or {}
    lacking, count = read_of_run(ledger, run_id, _MOST_ROWS)
    # Without a new attempt, a run stays failed.
    states = ledger.table(Run).scan(("status",), None, of_run(run_id, verb))["status"].to_pylist()
    return RunDetails(
        line=line,
        work=read_work(ledger, [line]).get((verb, run_id), ""),
        is_retried=line.status != "failed" and "failed" in states,
        stages={
            name: row_of(StageResult, stage) for name, stage in (result.get("stages") or {}).items()
        },
        tables=_tables(ledger, line, result),
        unmet=unmet_in_run(ledger, run_id, result.get("not_applied") or ()),
        failed=tuple(read_failed_in_run(ledger, run_id)),
        quarantined=tuple(lacking),
        quarantined_count=count,
        error=result.get("error") or {},
        source=row_of(SourceLoad, result.get("source") or {}).describe(),
        result=result,
        slot_before=_slot(result.get("slot_before")),
        slot_after=_slot(result.get("slot_after")),
    )


def _tables(ledger: Ledger, line: RunLine, result: dict[str, Any]) -> tuple[TableChange, ...]:
    """Returns what all attempts at the run did to each table; an attempt's result has only its
    own.
    """
    events = _table_events(ledger, line.run_id)
    behind = set(result.get("not_applied") or ())
    checks = {check.table_name: check for check in read_checks(ledger, None, line.run_id)}
    tables = _of_attempts(ledger, line, result.get("tables") or {})
    changes = [
        replace(
            row_of(TableChange, tables.get(name, {}) | {"table_name": name}),
            is_behind=name in behind,
            schema=tuple(events.get(name, ())),
            check=checks.get(name),
        )
        for name in {*tables, *events, *behind, *checks}
    ]
    return tuple(
        sorted(changes, key=lambda one: (not one.is_behind, not one.is_changed, one.table_name))
    )


def _of_attempts(
    ledger: Ledger, line: RunLine, tables: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Returns the tables of a run's latest result, with the numbers of its earlier attempts."""
    copied = read_copied_rows(ledger, [line]).get((line.verb, line.run_id), {})
    totals = {name: {"rows": rows} for name, rows in copied.items()} | tables
    for name, counts in read_operations(ledger, line.verb, line.run_id).items():
        totals[name] = totals.get(name, {}) | asdict(counts) | {"truncated": bool(counts.truncated)}
    return totals


def _table_events(ledger: Ledger, run_id: str) -> dict[str, dict[str, None]]:
    """Returns what the run recorded for its tables, once: changed columns, copies, removals."""
    columns = ("at", "table_name", "status", "reason")
    rows = ledger.table(TableState).scan(columns, None, pc.field("run_id") == run_id)
    events: dict[str, dict[str, None]] = {}
    for row in rows.to_pylist():
        status, reason = row["status"], row["reason"]
        is_plain = reason and status == SYNCED
        event = reason if is_plain else ": ".join(filter(None, (status, reason)))
        events.setdefault(row["table_name"], {})[event] = None
    return events


def _slot(reading: dict[str, Any] | None) -> SlotReading | None:
    return row_of(SlotReading, reading) if reading else None


def read_copied_rows(ledger: Ledger, lines: Sequence[RunLine]) -> dict[RunKey, dict[str, int]]:
    """Returns by verb and id of each run that copies tables: the rows of each table it copied, in
    all attempts.
    """
    verbs = {line.run_id: line.verb for line in lines if line.verb in _COPYING}
    if not verbs:
        return {}
    where = pc.field("run_id").isin(sorted(verbs)) & (pc.field("status") == SYNCED)
    states = ledger.table(TableState).scan(("run_id", "table_name", "rows"), None, where)
    rows_by_run: dict[RunKey, dict[str, int]] = {}
    for row in last_rows(states, ["run_id", "table_name"]).to_pylist():
        run_id = row["run_id"]
        rows_by_run.setdefault((verbs[run_id], run_id), {})[row["table_name"]] = row["rows"]
    return rows_by_run


def read_work(ledger: Ledger, lines: Sequence[RunLine]) -> dict[RunKey, str]:
    """Returns in words what each run did; only results of runs that landed nothing are read."""
    work = {
        (line.verb, line.run_id): counted(line.changes, "change")
        for line in lines
        if line.verb in LANDING
    }
    other_lines = [line for line in lines if line.verb not in LANDING]
    if not other_lines:
        return work
    copied = read_copied_rows(ledger, other_lines)
    where = pc.field("run_id").isin(sorted({line.run_id for line in other_lines}))
    rows = ledger.table(Run).scan(
        ("at", "verb", "run_id", "result"), min(line.at for line in other_lines), where
    )
    for row in last_rows(rows, ["verb", "run_id"]).to_pylist():
        key = (row["verb"], row["run_id"])
        if key not in work:
            tables = parse_result(row["result"]).get("tables") or {}
            work[key] = _rows_in_words(row["verb"], tables, copied.get(key, {}))
    return work


def _rows_in_words(
    verb: str, tables: Mapping[str, Mapping[str, Any]], copied: Mapping[str, int]
) -> str:
    if compared := sum(int(counts.get("compared") or 0) for counts in tables.values()):
        return f"{counted(compared, 'row')} compared"
    if verb in _COPYING:
        latest = {
            name: int(counts["rows"]) for name, counts in tables.items() if counts.get("rows")
        }
        return f"{counted(sum({**copied, **latest}.values()), 'row')} copied"
    if verb in _CORRECTING:
        written = sum(int(counts.get(name) or 0) for counts in tables.values() for name in _WRITTEN)
        return f"{counted(written, 'row')} corrected"
    return ""


@dataclass(frozen=True, slots=True)
class CopyProgress:
    """A copy under way: ``rows`` of the tables that are ``done``, the tables in work, and the rows
    of all, which are known if each of them was copied before. ``missing`` are tables of the
    pipeline file that have never been copied, and ``new`` those in work that weren't before.
    """

    done: int
    copying: tuple[str, ...]
    rows: int
    expected: int | None
    rows_per_second: float | None
    missing: tuple[str, ...] = ()
    new: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Returns the number of tables that are copied, in work, or still missing."""
        return self.done + len(self.copying) + len(self.missing)

    @property
    def remaining_seconds(self) -> float | None:
        """Returns the seconds that the rest takes at this speed."""
        if self.expected is None or not self.rows_per_second:
            return None
        return max(0, self.expected - self.rows) / self.rows_per_second


def read_progress(
    ledger: Ledger, run_id: str, seconds: float, listed: Collection[str] = ()
) -> CopyProgress | None:
    """Returns how far a run is that copies tables, after this time; None before its first table.

    ``listed`` are the tables that the pipeline file names.
    """
    columns = ("at", "table_name", "status", "rows")
    states = ledger.table(TableState).scan(columns, None, pc.field("run_id") == run_id)
    latest = last_rows(states, ["table_name"]).to_pylist()
    if not latest:
        return None
    synced = [state for state in latest if state["status"] == SYNCED]
    copying = tuple(sorted(s["table_name"] for s in latest if s["status"] == COPYING))
    rows, earlier_rows = sum(state["rows"] or 0 for state in synced), copied_rows(ledger, copying)
    new = tuple(table for table in copying if table not in earlier_rows)
    expected = None if new else rows + sum(earlier_rows.values())
    speed = rows / seconds if rows and seconds > 0 else None
    missing = sorted(set(listed) - {state.table_name for state in latest_states(ledger)})
    return CopyProgress(len(synced), copying, rows, expected, speed, tuple(missing), new)
