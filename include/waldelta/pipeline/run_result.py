"""A run's result, in the form that its summary, the Airflow tasks and the ledger read; plain JSON
underneath.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waldelta.config.parse_text import parse_json
from waldelta.lake.ledger import BatchCut, RowCounts, Run, SlotReading, TargetCut, now
from waldelta.lake.ledger.records import row_of, values_of
from waldelta.lsn import Lsn
from waldelta.pipeline.job import Job
from waldelta.pipeline.source import SourceLoad
from waldelta.pipeline.task_errors import describe_error

if TYPE_CHECKING:
    from waldelta.stages.check.suite.expectation import QualityReport, TableVerdict
    from waldelta.stages.land.drain import Drained
    from waldelta.stages.sync.copy_table import SyncResult

# What an error that keeps a target behind means, where that isn't a failure.
_STATES = {
    "QualityFailed": "stopped",
    "ConsentNeeded": "waiting",
    "LockHeld": "in use by another run",
}
# The parts of a result whose fields are keys of its JSON next to the others.
_PARTS = ("landed", "targets", "checked", "reported")


@dataclass
class StageResult:
    """The outcome of one stage; ``error`` as in RunResult.

    ``runner``: "Spark: " and why, where a session worked for it; "this process" otherwise.
    """

    status: str
    seconds: float
    detail: str = ""
    error: dict[str, Any] | None = None
    runner: str = ""


@dataclass(frozen=True)
class TableResult(RowCounts):
    """What a run did to one target."""

    truncated: bool = False
    version: int | None = None
    rows: int | None = None
    # Of a resync that repaired the table: rows of the snapshot that were compared, and rows that
    # already matched.
    compared: int | None = None
    unchanged: int | None = None
    # Of a reconciliation: rows that differ from the source, keys that changed during the
    # comparison, and rows in quarantine.
    differing: int | None = None
    in_flight: int | None = None
    lacking: int | None = None

    @property
    def changed(self) -> bool:
        """Whether the run committed anything to the target."""
        return super().changed or bool(self.rows)

    @property
    def passed_by(self) -> bool:
        """Whether the target lacks, or got separately, rows that the run had changes of."""
        return bool(self.skipped or self.quarantined or self.completed)


@dataclass
class LandedChanges:
    """What the run read from the slot, and the slot's state before it read.

    ``slot_before`` is None for commands that don't read the slot, and in results of an earlier
    waldelta.
    """

    changes: int = 0
    start_lsn: str | None = None
    end_lsn: str | None = None
    landed_as_of: int = 0  # All transactions below this one (xid8) have landed; 0: not known.
    # Everything that the source had committed by then is part of what the run lands.
    as_of: str | None = None
    # The message that PostgreSQL can't decode; everything before it has landed.
    unreadable: str | None = None
    slot_before: SlotReading | None = None
    slot_critical: list[str] = field(default_factory=list)  # Critical findings about the slot.

    def read_upto(self, confirmed: Lsn) -> Lsn:
        """Returns the position up to which the slot was read, of which it may have ``confirmed``
        less.
        """
        return max(confirmed, Lsn.parse(self.end_lsn)) if self.end_lsn else confirmed


@dataclass
class TargetFindings:
    """Targets that the run's apply stage, or a copy, found or left in a certain state, by name."""

    # Whether the apply stage has reported the targets' states; if not, the lists below may be
    # incomplete.
    is_apply_reported: bool = False
    # Targets that lack landed changes after the run.
    not_applied: list[str] = field(default_factory=list)
    # The errors of targets in not_applied that failed, as describe_error() returns them.
    table_errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    needs_sync: list[str] = field(default_factory=list)  # Targets that a sync must copy again.
    # Published tables that wait for their initial sync.
    never_copied: list[str] = field(default_factory=list)
    # Tables of the pipeline file that their publication lacks.
    unpublished: list[str] = field(default_factory=list)
    # Tables that match a pattern and that their publication lacks.
    new_tables: list[str] = field(default_factory=list)
    external_commits: list[str] = field(default_factory=list)  # Targets with external commits.

    def leave_behind(
        self, failures: Mapping[str, BaseException], others: Iterable[str] = ()
    ) -> None:
        """Record the targets that stay behind: because of an error, or otherwise."""
        self.not_applied = sorted({*failures, *others})
        self.keep_errors(failures)

    def keep_errors(self, failures: Mapping[str, BaseException]) -> None:
        """Record which error kept the run from its work on a target."""
        self.table_errors = {name: describe_error(err) for name, err in failures.items()}

    def states(self) -> dict[str, str]:
        """Returns, by target that isn't up to date, the reason in a few words."""
        errors = {
            name: _STATES.get(error["class"]) or f"failed: {error['class']}"
            for name, error in self.table_errors.items()
        }
        return (
            dict.fromkeys(self.never_copied, "not copied")
            | dict.fromkeys(self.not_applied, "behind")
            | dict.fromkeys(self.needs_sync, "waits for a sync")
            | errors
        )


@dataclass(frozen=True)
class CheckFindings:
    """What the run's check found, and the location of its report."""

    report: str | None = None
    failed_expectations: list[str] = field(default_factory=list)
    # Expectations that weren't met and only raise a warning.
    warned_expectations: list[str] = field(default_factory=list)
    # Targets in which the check found nothing critical.
    passed: list[str] = field(default_factory=list)
    # Of these, the targets that the run didn't change: their expectations were edited since they
    # failed.
    corrected: list[str] = field(default_factory=list)
    # Files of expectations that fit no table.
    unused_suites: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ReportedLag:
    """How far the lake lagged behind when the run ended, and the slot at that time."""

    lag_bytes: int = 0
    slot_after: SlotReading | None = None


@dataclass
class RunAttempt:
    """One attempt at a run: when it began, what it did to each target, and the results of its
    check.

    The result's JSON doesn't contain it, because the next attempt continues from that JSON.
    """

    started_at: datetime | None = None
    done: dict[str, TargetCut] = field(default_factory=dict)
    verdicts: tuple[TableVerdict, ...] = ()


@dataclass
class RunResult:
    """The result of a run so far; each process that runs a stage adds that stage's outcome."""

    verb: str
    run_id: str
    status: str = "running"
    stages: dict[str, StageResult] = field(default_factory=dict)
    tables: dict[str, TableResult] = field(default_factory=dict)
    landed: LandedChanges = field(default_factory=LandedChanges)
    targets: TargetFindings = field(default_factory=TargetFindings)
    checked: CheckFindings = CheckFindings()
    reported: ReportedLag = ReportedLag()
    warnings: list[str] = field(default_factory=list)
    source: SourceLoad = field(default_factory=SourceLoad)  # What the run cost the publisher.
    # Requests of the job's process to the object store, up to this result.
    store_requests: int = 0
    error: dict[str, Any] | None = None
    attempt: RunAttempt = field(default_factory=RunAttempt)

    @classmethod
    def from_json(cls, text: str) -> RunResult:
        """Read what to_json() wrote; keys that an earlier version lacks have their defaults."""
        document = parse_json(text)
        for name, kind in (("stages", StageResult), ("tables", TableResult)):
            document[name] = {key: kind(**values) for key, values in document[name].items()}
        return row_of(cls, document | dict.fromkeys(_PARTS, document))

    def document(self) -> dict[str, Any]:
        """Returns the content of the result's JSON, in the shape that Airflow's operator reads."""
        document = values_of(self)
        del document["attempt"]
        for name in _PARTS:
            document |= document.pop(name)
        return document

    def to_json(self) -> str:
        """Returns the document as JSON."""
        return json.dumps(self.document())

    def write(self, path: Path) -> None:
        """Write the JSON atomically, readable by this user only.

        A pipe or a device is written to as it is: a file in its place would break /dev/null.
        """
        if path.exists() and not path.is_file():
            path.write_text(self.to_json())
            return
        draft = path.with_suffix(".tmp")
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(self.to_json())
        draft.replace(path)

    def warn(self, texts: Iterable[str]) -> None:
        """Add the warnings that the result doesn't contain yet."""
        self.warnings += [text for text in texts if text not in self.warnings]

    def add_check(
        self, report: QualityReport, passed: Sequence[str] = (), corrected: Sequence[str] = ()
    ) -> None:
        """Add the findings of a check, the targets that passed, and the location of its report."""
        self.checked = CheckFindings(
            report.location,
            list(report.failures),
            list(report.warnings),
            list(passed),
            list(corrected),
            list(report.notes),
        )
        self.warn(report.notes)
        self.attempt.verdicts = report.tables

    @contextmanager
    def stage(self, name: str) -> Iterator[StageResult]:
        """Time a stage and record how it ended; exceptions pass through."""
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
            # A stage that waited for another run began again, and repeats its warnings.
            self.warnings = list(dict.fromkeys(self.warnings))

    def add_cut(self, cut: BatchCut) -> None:
        """Add what one apply batch did to the targets."""
        for target in cut.targets:
            self.add_target(replace(target, commit_ts=cut.commit_ts))

    def add_target(self, target: TargetCut) -> None:
        """Add what was done to one target; the target's version is that of the last addition."""
        if target.touched:
            done = self.attempt.done
            earlier = done.get(target.table_name)
            done[target.table_name] = target if earlier is None else earlier + target
        table = self.tables.get(target.table_name, TableResult())
        self.tables[target.table_name] = replace(table.plus(target), version=target.version)

    def add_drained(self, drained: Drained) -> None:
        """Add what was landed, and what that cost the source."""
        self.landed.changes += drained.changes
        self.source.add(drained.load)

    def add_repair(self, cut: TargetCut) -> None:
        """Add the rows that a repair corrected."""
        self.add_target(
            TargetCut(
                cut.table_name, cut.generation, cut.version, cut.inserted, cut.updated, cut.deleted
            )
        )

    def add_copy(self, copied: SyncResult) -> None:
        """Add what a copy did to its target, and what it cost the source.

        The copy may be a comparison by key that wrote only the rows that differed.
        """
        self.source.add(copied.load)
        name, copy = copied.table_name, copied.copy
        if (diff := copy.diff) is None:
            self.tables[name] = TableResult(
                rows=copied.rows, version=copied.version, raw_rows=copy.raw_rows or 0
            )
            return
        self.tables.pop(name, None)
        self.add_repair(diff.cut)
        self.tables[name] = replace(
            self.tables[name], compared=diff.compared, unchanged=diff.unchanged
        )

    def record(self, job: Job) -> None:
        """Record the result of this attempt in the ledger.

        Raises LateWriter when an attempt that began later has recorded its result.
        """
        seconds = sum(stage.seconds for stage in self.stages.values())
        landed, reported = self.landed, self.reported
        slot_before, after = landed.slot_before, reported.slot_after
        latest = after or slot_before
        job.ledger.append_run(
            Run(
                now(),
                self.run_id,
                verb=self.verb,
                status=self.status,
                run_type=job.run_type,
                interval_start=job.interval_start,
                interval_end=job.interval_end,
                start_lsn=_lsn(landed.start_lsn),
                end_lsn=_lsn(landed.end_lsn),
                changes=landed.changes,
                seconds=seconds,
                result=self.to_json(),
                as_of=datetime.fromisoformat(landed.as_of) if landed.as_of is not None else None,
                lag_before_bytes=slot_before.lag_bytes if slot_before is not None else None,
                lag_bytes=reported.lag_bytes if after is not None else None,
                retained_bytes=latest.retained_bytes if latest is not None else None,
                wal_status=latest.wal_status if latest is not None else None,
                applied=self._has_applied_all(),
                started_at=self.attempt.started_at,
                targets=list(self.attempt.done.values()),
                **{
                    f"{name}_seconds": stage.seconds
                    for name, stage in self.stages.items()
                    if name in ("land", "apply", "check")
                },
            )
        )

    def _has_applied_all(self) -> bool | None:
        """Whether every target holds everything that has landed; None for a run that hasn't applied
        yet, or never applies.
        """
        stage = self.stages.get("apply")
        if stage is None or (stage.status != "succeeded" and not self.targets.is_apply_reported):
            return None
        return stage.status == "succeeded" and not self.targets.not_applied

    def expectations(self) -> list[dict[str, Any]]:
        """Returns what this attempt's check found, one entry for each expectation."""
        return [
            {
                "table": verdict.table,
                "expectation": outcome.name,
                "severity": outcome.planned.severity,
                "result": outcome.verdict,
            }
            for verdict in self.attempt.verdicts
            for outcome in verdict.outcomes
        ]


class RunFailed(Exception):
    """A run that failed; its result says what failed, and the cause is the first stage's error."""

    def __init__(self, result: RunResult) -> None:
        super().__init__((result.error or {}).get("message", "failed"))
        self.result = result


def _lsn(text: str | None) -> int | None:
    return Lsn.parse(text).value if text else None
