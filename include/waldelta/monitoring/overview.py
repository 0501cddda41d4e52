"""A pipeline at a glance: its lag, the WAL its slot keeps, its tables, and what needs attention."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from waldelta.config import PipelineFile
from waldelta.errors import SlotUnreadable
from waldelta.lake.ledger import Ledger, Reconciliation
from waldelta.lake.ledger.records import COPYING, FAILED, NEEDS_SYNC, REMOVED, SYNCED, Gap
from waldelta.monitoring._run_findings import of_runs
from waldelta.monitoring._run_results import Results, results_of
from waldelta.monitoring.attention import Attention, names, shortened, worst_first
from waldelta.monitoring.check_results import read_latest_checks
from waldelta.monitoring.reconciliation_status import Compared, of_compared, read_compared
from waldelta.monitoring.run_history import (
    LANDING,
    LagPoint,
    RunLine,
    brought_up_to,
    lag_points,
    latest_run,
    read_runs,
)
from waldelta.monitoring.stopped_tables import Stopped, of_stopped, read_stopped
from waldelta.monitoring.table_list import (
    Operations,
    TableLine,
    latest_states,
    read_changed,
    read_tables,
    total,
)
from waldelta.pipeline.targets.unreadable_messages import ANY_TABLE, open_messages
from waldelta.quantities import counted, size
from waldelta.slot.gaps import open_gaps
from waldelta.slot.health import duration

# Searched beyond the window shown: the latest run, and a table's latest change, may be days ago.
REACH = timedelta(days=7)
# An older failed nightly run has little meaning today.
_NIGHTLY = timedelta(days=30)
# Most stages take minutes.
_SILENT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Glance:
    """A pipeline by its ledger; the lake has everything that the source had committed by ``upto``.

    ``runs``, ``lag``, ``operations`` and ``changed_tables`` cover the window; the tables' lines may
    have older changes.
    """

    is_set_up: bool
    upto: datetime | None
    runs: tuple[RunLine, ...]
    latest: RunLine | None
    lag: tuple[LagPoint, ...]
    operations: Operations
    changed_tables: int
    tables: tuple[TableLine, ...]
    gaps: tuple[Gap, ...]
    compared: Compared
    attention: tuple[Attention, ...]

    @property
    def landing(self) -> RunLine | None:
        """Returns the latest run that read the slot, and so knows its state."""
        return next((run for run in self.runs if run.wal_status is not None), None) or self.latest

    @property
    def verdicts(self) -> dict[str, int]:
        """Returns the number of tables by the verdict of their last check."""
        counts: dict[str, int] = {}
        for line in self.tables:
            if line.check is not None:
                counts[line.check.verdict] = counts.get(line.check.verdict, 0) + 1
        return counts


def read_glance(
    pipeline: PipelineFile,
    ledger: Ledger,
    now: datetime,
    hours: int,
    idle_checked_at: datetime | None = None,
    reach: timedelta = REACH,
) -> Glance:
    """Returns a pipeline over the last ``hours``; raises the store's errors.

    ``idle_checked_at`` is when a run last found nothing to do. The latest run and tables' latest
    changes are searched back to ``reach``.
    """
    since = now - timedelta(hours=hours)
    start = min(since, now - reach)
    runs = read_runs(ledger, start)
    if not any(
        run.verb in LANDING for run in runs
    ):  # Nothing has changed for long, so the last run's findings are still valid.
        runs += [run for verb in LANDING if (run := latest_run(ledger, verb)) is not None]
    landing = [run for run in runs if run.verb in LANDING]
    shown = [point for point in lag_points(runs) if point.at >= since]
    recent = read_changed(ledger, since)
    latest_changes = recent if start == since else read_changed(ledger, start)
    states = latest_states(ledger)
    fed = [state.table_name for state in states if state.status != REMOVED]
    tables = read_tables(
        ledger,
        runs,
        latest_changes,
        read_latest_checks(ledger, now - reach, fed),
        idle_checked_at,
        states,
    )
    compared = read_compared(ledger, fed)
    results = results_of(ledger)
    gaps = open_gaps(ledger.gaps(pipeline.source.slot))
    latest = landing[0] if landing else None
    stopped = (
        read_stopped(pipeline, ledger) if any(line.status == "behind" for line in tables) else []
    )
    attention = [
        *_silent(latest, now),
        *of_stopped(stopped),
        *_attention(pipeline, results, (latest, idle_checked_at), tables, stopped, gaps),
        *(_unchecked(tables) if pipeline.quality.enabled and not _is_under_way(runs, now) else ()),
        *of_compared(compared),
        *of_runs(results, landing, states, compared, pipeline.source),
        *_failed_otherwise(ledger, results, now),
        *_unread(ledger, pipeline),
    ]
    upto = brought_up_to(landing)
    if idle_checked_at is not None and (not landing or landing[0].applied):
        upto = max(filter(None, (upto, idle_checked_at)))
    return Glance(
        is_set_up=bool(tables or runs or read_runs(ledger)),
        upto=upto,
        runs=tuple(run for run in runs if run.at >= since),
        latest=latest,
        lag=tuple(shown),
        operations=total(recent.values()),
        changed_tables=len(recent),
        tables=tuple(tables),
        gaps=tuple(gaps),
        compared=compared,
        attention=worst_first(attention),
    )


def _silent(latest: RunLine | None, now: datetime) -> list[Attention]:
    """Returns attention for a run without recent events: a run that was killed records no end."""
    if latest is None or latest.status != "running" or now - latest.at < _SILENT:
        return []
    hours = duration((now - latest.at) / timedelta(hours=1))
    told = "it was killed, or a stage takes long"
    page = ("run", latest.verb, latest.run_id)
    return [Attention("warning", f"no update from the latest run for {hours}: {told}", page)]


def _attention(
    pipeline: PipelineFile,
    results: Results,
    newest: tuple[RunLine | None, datetime | None],
    tables: list[TableLine],
    stopped: Sequence[Stopped],
    gaps: list[Gap],
) -> Iterator[Attention]:
    """Yields what is wrong, then what may become wrong.

    ``newest`` are the latest run, and the latest time a run found nothing to do.
    """
    latest, idle_checked_at = newest
    for gap in gaps:
        page = ("run", "any", gap.run_id)
        what = (
            "lost changes"
            if gap.cause != SlotUnreadable.__name__
            else "can't be decoded past a transaction"
        )
        yield Attention("failed", f"the slot {what}: {gap.cause}: {gap.remedy}", page)
    # The open gap already explains such a run's failure.
    lost = {gap.cause for gap in gaps}
    if (
        latest is not None
        and latest.status == "failed"
        and _error_class(results, latest) not in lost
    ):
        when = "" if latest.applied else " before all changes were applied"
        page = ("run", latest.verb, latest.run_id)
        yield Attention("failed", f"the latest run failed{when}{_why(results, latest)}", page)
    held = {one.table_name for one in stopped}
    if behind := [
        line.table_name
        for line in tables
        if line.status == "behind" and line.table_name not in held
    ]:
        yield Attention("failed", f"{names(behind)}: not up to date; changes wait", anchor="tables")
    if failed := [line.table_name for line in tables if line.status == FAILED]:
        yield Attention("failed", f"{names(failed)}: the copy failed", anchor="tables")
    if waiting := [line.table_name for line in tables if line.status == NEEDS_SYNC]:
        yield Attention("warning", f"{names(waiting)}: waiting for a new copy", anchor="tables")
    if copying := [line.table_name for line in tables if line.status == COPYING]:
        yield Attention(
            "warning", f"{names(copying)}: copy in progress, or killed", anchor="tables"
        )
    yield from _of_checks(tables)
    of_slot = list(_slot_attention(pipeline, latest))
    yield from of_slot
    if latest is not None and not any(item.severity == "failed" for item in of_slot):
        yield from _slot_began(results, latest, idle_checked_at)
    if lacking := sum(line.in_quarantine for line in tables):
        yield Attention("warning", f"{counted(lacking, 'row')} in quarantine", ("quarantine",))


def _unread(ledger: Ledger, pipeline: PipelineFile) -> Iterator[Attention]:
    """Yields attention for unreadable messages that block others, and for skipped ones."""
    messages = open_messages(ledger, pipeline.source.slot)
    if waiting := [message.row.id for message in messages if not message.is_skipped]:
        yield Attention("failed", f"unreadable messages: {names(waiting)}", ("quarantine",))
    skipped = [message for message in messages if message.is_skipped]
    if tables := sorted({table for message in skipped for table in message.tables}):
        lacking = "any table" if ANY_TABLE in tables else names(tables)
        yield Attention(
            "warning", f"{lacking} may miss changes of skipped messages", ("quarantine",)
        )


def _of_checks(tables: list[TableLine]) -> Iterator[Attention]:
    if failed := [
        line.table_name for line in tables if line.check is not None and line.check.failed
    ]:
        yield Attention(
            "failed", f"{names(failed)}: critical expectations failed", ("expectations",)
        )
    if warned := [
        line.table_name
        for line in tables
        if line.check is not None and line.check.verdict == "warning"
    ]:
        yield Attention(
            "warning", f"{names(warned)}: expectations failed (warning only)", ("expectations",)
        )
    if unknown := [
        line.table_name
        for line in tables
        if line.check is not None and line.check.verdict == "unknown"
    ]:
        yield Attention(
            "warning", f"{names(unknown)}: expectations not evaluated", ("expectations",)
        )


def _unchecked(tables: list[TableLine]) -> Iterator[Attention]:
    """Yields attention for tables without a check since their last change.

    A run checks its own changes, so such a table waits for the next run or maintenance.
    """
    if found := [line.table_name for line in tables if _is_unchecked(line)]:
        yield Attention(
            "warning", f"{names(found)}: not checked since the last change", ("expectations",)
        )


def _is_unchecked(line: TableLine) -> bool:
    """Compares versions, because a check that began before may be recorded later.

    Versions of another copy can't be compared.
    """
    changed, checked = line.changed, line.check.version if line.check is not None else None
    if changed is None or changed.version is None or changed.generation != line.generation:
        return False
    return line.status in (SYNCED, "behind") and (checked is None or checked < changed.version)


def _is_under_way(runs: Iterable[RunLine], now: datetime) -> bool:
    """Returns whether a run may still check what it changed.

    A run that was killed, or whose check timed out, records no end.
    """
    return any(run.status == "running" and now - run.at < _SILENT for run in runs)


def _failed_otherwise(ledger: Ledger, results: Results, now: datetime) -> Iterator[Attention]:
    """Yields failures of nightly runs; of reconciliations only those that reached no table."""
    since = now - _NIGHTLY
    told = set(ledger.table(Reconciliation).scan(("run_id",), since)["run_id"].unique().to_pylist())
    if (run := latest_run(ledger, "maintain", since)) is not None and run.status == "failed":
        yield Attention(
            "warning",
            f"the latest maintenance failed{_why(results, run)}",
            ("run", run.verb, run.run_id),
        )
    run = latest_run(ledger, "reconcile", since)
    if run is not None and run.status == "failed" and run.run_id not in told:
        yield Attention(
            "warning",
            f"the latest reconciliation failed{_why(results, run)}",
            ("run", run.verb, run.run_id),
        )


def _error_class(results: Results, run: RunLine) -> str | None:
    return (results(run).get("error") or {}).get("class")


def _why(results: Results, run: RunLine) -> str:
    error = results(run).get("error") or {}
    message = shortened(str(error.get("message") or ""))
    return f": {error.get('class')}: {message}" if message else ""


def _slot_attention(pipeline: PipelineFile, latest: RunLine | None) -> Iterator[Attention]:
    if latest is None:
        return
    if latest.wal_status not in (None, "reserved", "extended"):
        yield Attention(
            "failed", f"slot {pipeline.source.slot}: its wal_status is {latest.wal_status}"
        )
    limits, held = pipeline.slot_limits, latest.retained_bytes or 0
    if held > limits.critical_mb << 20:
        yield Attention(
            "failed",
            f"the slot keeps {size(held)} of WAL (limit slot_limits.critical_mb:"
            f" {limits.critical_mb:,} MB)",
        )
    elif held > limits.warn_mb << 20:
        yield Attention(
            "warning",
            f"the slot keeps {size(held)} of WAL (limit slot_limits.warn_mb:"
            f" {limits.warn_mb:,} MB)",
        )


def _slot_began(
    results: Results, latest: RunLine, idle_checked_at: datetime | None
) -> Iterator[Attention]:
    """Yields what was critical when the run began, and may be again before the next one.

    The run's end alone doesn't show that. A later idle check found the slot fine, or would have
    reported it.
    """
    if idle_checked_at is not None and idle_checked_at > latest.at:
        return
    for told in results(latest).get("slot_critical") or ():
        yield Attention(
            "failed", f"at the start of the latest run: {told}", ("run", latest.verb, latest.run_id)
        )
