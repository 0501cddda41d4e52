"""Stopped tables: tables whose changes an expectation with ``gate: stop`` holds back, since when,
and how many changes wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any

import pyarrow.compute as pc

from waldelta.config import PipelineFile
from waldelta.decision_kinds import TABLE, actions_of
from waldelta.errors import SlotMissing, StateError
from waldelta.lake import TableError
from waldelta.lake.changelog import BatchNumbers, ChangeLog, Snapshot
from waldelta.lake.changelog.row_messages import of_batches
from waldelta.lake.ledger import Decision, ExpectationResult, Ledger, TableState
from waldelta.monitoring.check_results import FAILING_COLUMNS, FailedExpectation
from waldelta.monitoring.run_history import LANDING, RunLine, latest_run, read_result, read_runs
from waldelta.monitoring.table_list import copied_at
from waldelta.pgoutput.message_kinds import ROW_KINDS
from waldelta.pipeline import Job, SourceConnections
from waldelta.pipeline.targets import Watermarks
from waldelta.pipeline.targets.quarantined_rows import (
    QUARANTINE,
    STOP,
    chosen_states,
    judged_by_gates,
    landed_upto,
    valid_releases,
)
from waldelta.quantities import counted

# How far back a run is searched that reached its apply stage.
_REACH = timedelta(days=7)
# The most messages of all tables that are counted, because a page must not read more.
_MOST_MESSAGES = 20_000_000


@dataclass(frozen=True, slots=True)
class Stopped:
    """A table that its gate stopped.

    ``waiting`` counts its changes in the change log, None if they are too many to count.
    ``released``: the next run merges those that had landed, by this decision.
    """

    table_name: str
    unmet: tuple[FailedExpectation, ...]
    waiting: int | None
    released: Decision | None = None

    @property
    def since(self) -> datetime:
        """Returns when the first of the expectations stopped it."""
        return min(one.since for one in self.unmet)

    @property
    def may_pass(self) -> bool:
        """Returns whether a release lets its changes pass; it doesn't for ``gate: quarantine``."""
        return self.released is None and all(one.may_pass for one in self.unmet)

    def describe(self) -> str:
        """Returns what stops it, how many changes wait, and the decision on them."""
        what = "; ".join(one.meaning for one in self.unmet)
        count = self.waiting
        waits = "changes wait" if count is None else counted(count, "change waits", "changes wait")
        if self.released is not None:
            waits += f"; released by {self.released.by}, for the next run to apply"
        return f"({what}), {waits}"

    def as_json(self) -> list[dict[str, Any]]:
        """Returns each expectation that stops the table, with examples, ready for JSON."""
        return [
            {
                "table": self.table_name,
                "status": "released" if self.released else "stopped",
                "reason": f"{one.meaning}: {one.finding}",
                "since": one.since.isoformat(),
                "waiting": self.waiting,
                "may_pass": self.may_pass,
                "actions": list(actions_of(TABLE, "stopped")) if self.may_pass else [],
                "applied": False if self.released else None,
                "examples": list(one.examples),
            }
            for one in self.unmet
        ]


def read_stopped(
    pipeline: PipelineFile, ledger: Ledger, behind: Collection[str] | None = None
) -> list[Stopped]:
    """Returns the tables that the latest run left behind because their gate stopped them, by
    name; reads nothing where none is known to be ``behind``.
    """
    if behind is not None and not behind:
        return []
    run, tables = _latest_applied(ledger)
    if run is None or not tables:
        return []
    if not (unmet := dict(_unmet(ledger, run.run_id, judged_by_gates(tables)))):
        return []
    job = Job(pipeline, SourceConnections(pipeline.source), run.run_id, lake=ledger.lake)
    try:
        watermarks = Watermarks(job, job.read_identity())
    except (
        SlotMissing,
        StateError,
    ):  # The slot was torn down, or dropped by a killed resync: no gate judges any more.
        return []
    identity, log = watermarks.identity, watermarks.change_log
    upto, last = landed_upto(job, identity), log.last_batch() or 0
    releases = {of: row for of, row in valid_releases(job).items() if row.upto_lsn >= upto}
    stopped = []
    for name, state in sorted(job.read_states().items()):
        if name not in unmet:
            continue
        waiting = None
        try:
            after = watermarks.of(state)
            if sum(log.sizes(after, last).values()) <= _MOST_MESSAGES:
                waiting = _count(log, BatchNumbers(after, last), state)
        except (StateError, TableError):
            pass  # Changes that can't be counted can be released anyway.
        released = releases.get((name, state.generation))
        stopped.append(Stopped(name, tuple(unmet[name]), waiting, released))
    return stopped


def read_failures(ledger: Ledger) -> dict[str, dict[str, Any]]:
    """Returns by table the error that kept the latest run from applying its changes; each has
    ``class``, ``message``, ``run_id`` and ``at``.
    """
    run, tables = _latest_applied(ledger)
    if run is None or not tables:
        return {}
    result = read_result(ledger, run.verb, run.run_id, run.at) or {}
    of_run = {"run_id": run.run_id, "at": run.at.isoformat()}
    return {
        name: {"class": error["class"], "message": error["message"], **of_run}
        for name, error in (result.get("table_errors") or {}).items()
        if name in tables
    }


def check_stopped(job: Job, tables: Collection[str]) -> None:
    """Raise StateError where no gate that a release lets changes pass stops one of these tables.

    A table that has been released already may be released again.
    """
    chosen_states(job, tables)
    stopped = {one.table_name: one for one in read_stopped(job.pipeline, job.ledger)}
    if unstopped := sorted(set(tables) - stopped.keys()):
        raise StateError(
            f"{', '.join(unstopped)}: no gate stops it, so there is nothing to release: status"
            " shows which tables are stopped"
        )
    selection = [stopped[name] for name in sorted(set(tables))]
    if quarantined := [one.table_name for one in selection if not (one.may_pass or one.released)]:
        raise StateError(
            f"{', '.join(quarantined)}: an expectation with gate: quarantine stops it, which no"
            " release lets pass: correct the expectation or the data, then run consume"
        )


def _latest_applied(ledger: Ledger) -> tuple[RunLine | None, list[str]]:
    """Returns the newest run that reached apply, and the tables it couldn't bring up to date.

    A table that was copied as a whole since then isn't one of them: its copy has all rows.
    """
    latest = [run for verb in LANDING if (run := latest_run(ledger, verb)) is not None]
    if not latest or (latest[0].applied and latest[0].status != "running"):
        return None, []
    runs = [run for run in read_runs(ledger, latest[0].at - _REACH) if run.verb in LANDING]
    run = next((run for run in runs if run.came_to_apply and run.status != "running"), None)
    if run is None:
        return None, []
    result = read_result(ledger, run.verb, run.run_id, run.at) or {}
    tables = [str(name) for name in result.get("not_applied") or ()]
    copied = copied_at(ledger, tables)
    return run, [name for name in tables if name not in copied or copied[name] < run.at]


def unmet_in_run(
    ledger: Ledger, run_id: str, tables: Collection[str]
) -> dict[str, list[FailedExpectation]]:
    """Returns by table the gate expectations that stopped these tables in a run."""
    of_run = judged_by_gates(tables) & (pc.field("run_id") == run_id)
    return dict(_unmet(ledger, run_id, of_run)) if tables else {}


def _unmet(
    ledger: Ledger, run_id: str, where: pc.Expression
) -> Iterator[tuple[str, list[FailedExpectation]]]:
    """Yields by table the gate expectations not met in this run, and since when without a break.

    ``chosen`` selects the results that decide.
    """
    columns = ("at", "run_id", "table_name", "success", *FAILING_COLUMNS)
    results = ledger.table(ExpectationResult).scan(columns, None, where)
    rows_by_table: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in results.to_pylist():
        if str(row["meaning"]).startswith((STOP, QUARANTINE)):
            rows_by_table.setdefault(row["table_name"], {}).setdefault(row["meaning"], []).append(
                row
            )
    for name, by_meaning in rows_by_table.items():
        # The run found it unmet, and the latest result since then agrees: a retry or a repair may
        # have judged it since.
        unmet = [
            _unmet_since(rows)
            for rows in by_meaning.values()
            if not rows[-1]["success"] and any(row["run_id"] == run_id for row in rows)
        ]
        # Rows that are set aside stop no table. If nothing else does, they were too many, or
        # couldn't be judged.
        if unmet := [one for one in unmet if one.may_pass] or unmet:
            yield name, unmet


def _unmet_since(rows: Sequence[dict[str, Any]]) -> FailedExpectation:
    *_, first = takewhile(lambda row: not row["success"], reversed(rows))
    meaning = str(rows[-1]["meaning"])
    return replace(
        FailedExpectation.of(rows[-1], first["at"]),
        meaning=meaning.removeprefix(STOP).removeprefix(QUARANTINE),
        may_pass=meaning.startswith(STOP),
    )


def _count(log: ChangeLog, batches: BatchNumbers, state: TableState) -> int:
    """Returns the number of row messages in a range that the table's copy doesn't contain."""
    where = (
        of_batches(*batches)
        & pc.field("kind").isin(ROW_KINDS)
        & pc.field("relation_id").isin(state.relation_ids)
    )
    snapshot = Snapshot.parse(state.snapshot) if state.snapshot else None
    count = 0
    for part in log.scan(where, ["xid8"]):
        count += part.num_rows
        if snapshot is not None:
            count -= int(snapshot.sees(part["xid8"].to_numpy(zero_copy_only=False)).sum())
    return count
