"""The result of a run: what its summary, the Airflow tasks and the ledger read; plain JSON
underneath.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from waldelta.lake.ledger import BatchCut, TargetCut
from waldelta.lake.ledger.records import Run, SlotReading, now
from waldelta.lsn import Lsn
from waldelta.pipeline.job import Job
from waldelta.pipeline.source_load import SourceBill
from waldelta.pipeline.task_errors import describe_error
from waldelta.quantities import counted

if TYPE_CHECKING:
    from waldelta.stages.check.suite import QualityReport
    from waldelta.stages.sync import SyncResult

# What a verb's summary says of each table, by heading; other verbs name the tables alone.
_COLUMNS: dict[str, dict[str, str]] = {
    "consume": {
        "inserted": "inserted",
        "updated": "updated",
        "deleted": "deleted",
        "skipped": "skipped",
        "reread": "reread",
        "quarantined": "quarantined",
        "verbatim": "verbatim",
        "version": "version",
    },
    "replay": {
        "restored": "inserted",
        "corrected": "updated",
        "removed": "deleted",
        "left out": "skipped",
        "reread": "reread",
        "quarantined": "quarantined",
        "version": "version",
    },
    "quarantine": {
        "restored": "inserted",
        "corrected": "updated",
        "removed": "deleted",
        "version": "version",
    },
    "resync": {
        "rows compared": "compared",
        "inserted": "inserted",
        "updated": "updated",
        "deleted": "deleted",
        "unchanged": "unchanged",
        "rows copied": "rows",
        "version": "version",
    },
    "reconcile": {
        "rows compared": "compared",
        "differing": "differing",
        "in flight": "in_flight",
        "lacking": "lacking",
        "restored": "inserted",
        "corrected": "updated",
        "removed": "deleted",
        "version": "version",
    },
    "sync": {"rows copied": "rows", "verbatim": "verbatim", "version": "version"},
}

_SLOTS = ("slot_before", "slot_after")
_OF_ATTEMPT = ("begun", "done")


@dataclass
class StageResult:
    """One stage's outcome; ``error`` as in RunResult."""

    status: str
    seconds: float
    detail: str = ""
    error: dict[str, Any] | None = None


@dataclass
class TableResult:
    """What a run did to one target."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0
    skipped: int = 0
    truncated: bool = False
    version: int | None = None
    rows: int | None = None
    # Rows that came without all of their values: completed from the source, or kept out of the
    # target.
    reread: int = 0
    quarantined: int = 0
    # Rows with a value that its column's type can't hold: it stands in _wd_raw.
    verbatim: int = 0
    # Of a resync that mended it: rows of the snapshot that it was compared with, and those that it
    # held as they are.
    compared: int | None = None
    unchanged: int | None = None
    # Of a reconciliation: rows that aren't the source's, keys that were changed meanwhile, and rows
    # that it is known to lack.
    differing: int | None = None
    in_flight: int | None = None
    lacking: int | None = None

    @property
    def changed(self) -> bool:
        """Whether the run committed anything to the target."""
        return bool(self.inserted or self.updated or self.deleted or self.truncated or self.rows)

    @property
    def passed_by(self) -> bool:
        """Whether it had changes of rows that the target hasn't got."""
        return bool(self.skipped or self.quarantined or self.reread)


@dataclass
class RunResult:
    """A run so far; stages are added as they end, by whatever process ran them."""

    verb: str
    run_id: str
    status: str = "running"
    stages: dict[str, StageResult] = field(default_factory=dict)
    tables: dict[str, TableResult] = field(default_factory=dict)
    changes: int = 0
    start_lsn: str | None = None
    end_lsn: str | None = None
    lag_bytes: int = 0
    landed_as_of: int = 0  # all transactions below this one (xid8) have landed; 0: that isn't known
    report: str | None = None
    failed_expectations: list[str] = field(default_factory=list)
    warned_expectations: list[str] = field(default_factory=list)  # unmet, and told only
    told_applied: bool = False  # whether its apply came to tell what there was to tell
    not_applied: list[str] = field(
        default_factory=list
    )  # targets that stay behind, whatever else the run did to them
    needs_sync: list[str] = field(default_factory=list)  # targets that a sync is to copy again
    never_copied: list[str] = field(
        default_factory=list
    )  # published tables that wait for their initial sync
    unpublished: list[str] = field(
        default_factory=list
    )  # tables of the pipeline file that their publication lacks
    foreign_commits: list[str] = field(
        default_factory=list
    )  # targets that others were found to have written to
    passed: list[str] = field(
        default_factory=list
    )  # targets that the check found nothing critical in
    warnings: list[str] = field(default_factory=list)
    unused_suites: list[str] = field(
        default_factory=list
    )  # files of expectations that fit no table
    slot_critical: list[str] = field(
        default_factory=list
    )  # what was critical of the slot when the run began
    unreadable: str | None = None  # what PostgreSQL can't decode, in front of which all has landed
    source: SourceBill = field(default_factory=SourceBill)  # what the run cost the publisher
    as_of: str | None = (
        None  # all that the source had committed by then is part of what the run lands
    )
    # None of verbs that don't read it, and of runs recorded earlier.
    slot_before: SlotReading | None = None
    slot_after: SlotReading | None = None
    error: dict[str, Any] | None = None
    # Of this attempt alone, so that the JSON, which the next one continues, has neither: when it
    # began, and what it did to each target.
    begun: datetime | None = None
    done: dict[str, TargetCut] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> RunResult:
        """Read what to_json() wrote."""
        document = json.loads(text)
        stages = {name: StageResult(**stage) for name, stage in document.pop("stages").items()}
        tables = {name: TableResult(**table) for name, table in document.pop("tables").items()}
        source = SourceBill(**document.pop("source", {}))  # absent from runs recorded earlier
        slots: dict[str, Any] = {
            name: SlotReading(**seen)
            for name in _SLOTS
            if (seen := document.pop(name, None)) is not None
        }
        return cls(**document, **slots, stages=stages, tables=tables, source=source)

    def to_json(self) -> str:
        """The result as JSON, the shape that Airflow's operator reads."""
        return json.dumps(
            {name: value for name, value in asdict(self).items() if name not in _OF_ATTEMPT}
        )

    def write(self, path: Path) -> None:
        """Write the JSON, atomically and for this user only."""
        draft = path.with_suffix(".tmp")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(self.to_json())
        draft.replace(path)

    def add_check(self, report: QualityReport) -> None:
        """Take over what a check found, and where its report is."""
        self.report = report.location
        self.failed_expectations, self.warned_expectations = (
            list(report.failures),
            list(report.warnings),
        )
        self.unused_suites = list(report.notes)
        self.warnings += [note for note in report.notes if note not in self.warnings]

    @contextmanager
    def stage(self, name: str) -> Iterator[StageResult]:
        """Time a stage and record how it ended; errors pass through."""
        began = time.monotonic()
        stage = self.stages[name] = StageResult("running", 0.0)
        try:
            yield stage
            stage.status = "succeeded"
        except Exception as err:
            stage.status, stage.error = "failed", describe_error(err)
            raise
        finally:
            stage.seconds = round(time.monotonic() - began, 3)

    def add_cut(self, cut: BatchCut) -> None:
        """Add what one step did to the targets."""
        for target in cut.targets:
            self.add_target(replace(target, commit_ts=cut.commit_ts))

    def add_target(self, target: TargetCut) -> None:
        """Add what was done to one target; its version is that of what is added last."""
        if target.touched:
            before = self.done.get(target.table_name)
            self.done[target.table_name] = target if before is None else before + target
        table = self.tables.setdefault(target.table_name, TableResult())
        table.inserted += target.inserted
        table.updated += target.updated
        table.deleted += target.deleted
        table.skipped += target.skipped
        table.truncated = table.truncated or target.truncated
        table.reread += target.reread
        table.quarantined += target.quarantined
        table.verbatim += target.verbatim
        table.version = target.version

    def add_repair(self, cut: TargetCut) -> None:
        """Add the rows that a repair put right."""
        self.add_target(
            TargetCut(
                cut.table_name, cut.generation, cut.version, cut.inserted, cut.updated, cut.deleted
            )
        )

    def add_copy(self, copied: SyncResult) -> None:
        """Take over what a copy, or a comparison by key that wrote the rows that differed, did to
        its target.
        """
        name, diff = str(copied.table), copied.diff
        if diff is None:
            self.tables[name] = TableResult(
                rows=copied.rows, version=copied.version, verbatim=copied.raw_rows or 0
            )
            return
        self.tables.pop(name, None)
        self.add_target(
            TargetCut(
                name, copied.generation, diff.version, diff.inserted, diff.updated, diff.deleted
            )
        )
        self.tables[name].compared, self.tables[name].unchanged = diff.compared, diff.unchanged

    def record(self, job: Job) -> None:
        """Enter what this attempt came to into the ledger; raises LateWriter when one that began
        later has.
        """
        seconds = sum(stage.seconds for stage in self.stages.values())
        before, after = self.slot_before, self.slot_after
        latest = after or before
        job.ledger.append_run(
            Run(
                now(),
                self.run_id,
                self.verb,
                self.status,
                job.run_type,
                job.interval_start,
                job.interval_end,
                _lsn(self.start_lsn),
                _lsn(self.end_lsn),
                self.changes,
                seconds,
                self.to_json(),
                datetime.fromisoformat(self.as_of) if self.as_of is not None else None,
                before.lag_bytes if before is not None else None,
                self.lag_bytes if after is not None else None,
                latest.retained_bytes if latest is not None else None,
                latest.wal_status if latest is not None else None,
                self._applied(),
                self.begun,
                list(self.done.values()),
            )
        )

    def _applied(self) -> bool | None:
        """Whether every target holds all that was landed; None of a run that hasn't come so far, or
        isn't to apply anything.
        """
        stage = self.stages.get("apply")
        if stage is None or (stage.status != "succeeded" and not self.told_applied):
            return None
        return stage.status == "succeeded" and not self.not_applied

    def print_summary(self, console: Console | None = None, stage: str | None = None) -> None:
        """What the run, or its one ``stage``, did to each table, LSN range, lag and seconds, for
        people.
        """
        # A task's log has no width; eighty columns would cut table names.
        console = console or Console(width=None if sys.stdout.isatty() else 120)
        console.print(self._title(stage), style="table.title", soft_wrap=True, markup=False)
        if self.tables:
            console.print(self._table())
        stages = ", ".join(
            f"{name} {done.seconds:.1f} s ({done.status})" for name, done in self.stages.items()
        )
        console.print(f"stages: {stages or 'none'}")
        if self.end_lsn is not None:
            console.print(
                f"WAL {self.start_lsn}..{self.end_lsn}, {counted(self.changes, 'change')}, lag"
                f" {self.lag_bytes:,} bytes"
            )
        if bill := self.source.describe():
            console.print(f"source: {bill}", soft_wrap=True)
        for warning in self.warnings:
            console.print(f"warning: {warning}", soft_wrap=True, markup=False)
        if self.report is not None:
            console.print(f"report: {self.report}", soft_wrap=True)

    def _title(self, stage: str | None) -> str:
        """Of one ``stage`` how that ended: others may follow, so the run's own status isn't the
        news.
        """
        if stage is not None and stage in self.stages:
            return f"{self.verb} {self.run_id}, stage {stage}: {self.stages[stage].status}"
        return f"{self.verb} {self.run_id}: {self.status}"

    def _table(self) -> Table:
        table = Table()
        table.add_column("table")
        columns = _COLUMNS.get(self.verb, {})
        for heading in columns:
            table.add_column(heading, justify="right")
        for name, done in sorted(self.tables.items()):
            numbers = [getattr(done, attribute) for attribute in columns.values()]
            note = f"{name} (truncated)" if done.truncated else name
            table.add_row(note, *("" if number is None else f"{number:,}" for number in numbers))
        return table


class RunFailed(Exception):
    """A run whose result says what failed; the cause is the first stage's error."""

    def __init__(self, result: RunResult) -> None:
        super().__init__((result.error or {}).get("message", "failed"))
        self.result = result


def _lsn(text: str | None) -> int | None:
    return Lsn.parse(text).value if text else None
