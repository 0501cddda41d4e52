"""A pipeline at a glance: how far behind it is, what its slot holds back, its tables, and what
deserves attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from waldelta.config import PipelineFile
from waldelta.errors import SlotUnreadable
from waldelta.lake.ledger import Reconciliation
from waldelta.lake.ledger.records import COPYING, FAILED, NEEDS_SYNC, REMOVED, SYNCED, Gap
from waldelta.monitoring._run_findings import of_runs
from waldelta.monitoring._run_results import Results, results_of
from waldelta.monitoring.attention import Attention, names, shortened, worst_first
from waldelta.monitoring.check_results import read_latest_checks
from waldelta.monitoring.lake_tables import Bookkeeping
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

# Beyond the window that is shown: the latest run, and the latest change of a table, may lie days
# back.
REACH = timedelta(days=7)
# A nightly run that failed longer ago says little of today.
_NIGHTLY = timedelta(days=30)
# Most stages take minutes.
_SILENT = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Glance:
    """A pipeline as its ledger tells it. ``upto``: the lake holds all that the source had committed
    by then.

    ``runs``, ``lag``, ``operations`` and ``changed_tables`` are the window's, what the tables'
    lines say of changes may be of more.
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
        """The latest run that read the slot, and so knows of it."""
        return next((run for run in self.runs if run.wal_status is not None), None) or self.latest

    @property
    def verdicts(self) -> dict[str, int]:
        """How many tables' last checks ended how."""
        counts: dict[str, int] = {}
        for line in self.tables:
            if line.check is not None:
                counts[line.check.verdict] = counts.get(line.check.verdict, 0) + 1
        return counts


def read_glance(
    pipeline: PipelineFile,
    lake: Bookkeeping,
    now: datetime,
    hours: int,
    idle_checked_at: datetime | None = None,
    reach: timedelta = REACH,
) -> Glance:
    """A pipeline over the last ``hours``; ``idle_checked_at`` is when a run last found nothing to
    do. Raises what the store raises.

    For the latest run, and tables' latest changes, it looks back as far as ``reach``.
    """
    since = now - timedelta(hours=hours)
    start = min(since, now - reach)
    runs = read_runs(lake, start)
    if not any(
        run.verb in LANDING for run in runs
    ):  # nothing has changed for long: what the last one found still holds
        runs += [run for verb in LANDING if (run := latest_run(lake, verb)) is not None]
    landing = [run for run in runs if run.verb in LANDING]
    shown = [point for point in lag_points(runs) if point.at >= since]
    recent = read_changed(lake, since)
    latest_changes = recent if start == since else read_changed(lake, start)
    states = latest_states(lake)
    fed = [state.table_name for state in states if state.status != REMOVED]
    tables = read_tables(
        lake,
        runs,
        latest_changes,
        read_latest_checks(lake, now - reach, fed),
        idle_checked_at,
        states,
    )
    compared = read_compared(lake, fed)
    results = results_of(lake)
    gaps = open_gaps(lake.ledger.gaps(pipeline.source.slot))
    latest = landing[0] if landing else None
    stopped = (
        read_stopped(pipeline, lake) if any(line.status == "behind" for line in tables) else []
    )
    attention = [
        *_silent(latest, now),
        *of_stopped(stopped),
        *_attention(pipeline, results, (latest, idle_checked_at), tables, stopped, gaps),
        *(_unchecked(tables) if pipeline.quality.enabled and not _is_under_way(runs, now) else ()),
        *of_compared(compared),
        *of_runs(results, landing, states, compared, pipeline.source),
        *_failed_otherwise(lake, results, now),
        *_unread(lake, pipeline),
    ]
    upto = brought_up_to(landing)
    if idle_checked_at is not None and (not landing or landing[0].applied):
        upto = max(filter(None, (upto, idle_checked_at)))
    return Glance(
        is_set_up=bool(tables or runs or read_runs(lake)),
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
    """A run that was killed records no end."""
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
    """What is wrong first, then what may become so; ``newest`` are the latest run and the latest
    that found nothing to do.
    """
    latest, idle_checked_at = newest
    for gap in gaps:
        page = ("run", "any", gap.run_id)
        what = (
            "lost changes"
            if gap.cause != SlotUnreadable.__name__
            else "gives nothing behind what can't be decoded"
        )
        yield Attention("failed", f"the slot {what}: {gap.cause}: {gap.remedy}", page)
    # The open gap says what such a run failed by.
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
        yield Attention(
            "failed", f"{names(behind)}: not up to date; their changes wait", anchor="tables"
        )
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


def _unread(lake: Bookkeeping, pipeline: PipelineFile) -> Iterator[Attention]:
    """Messages that can't be read: those that stop what is behind them, and what tables lack of
    skipped ones.
    """
    messages = open_messages(lake.ledger, pipeline.source.slot)
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
    """Runs check what they changed themselves: what is known of these is of before, until a run or
    maintenance looks at them.
    """
    if found := [line.table_name for line in tables if _is_unchecked(line)]:
        yield Attention(
            "warning", f"{names(found)}: not checked since the last change", ("expectations",)
        )


def _is_unchecked(line: TableLine) -> bool:
    """By versions: a check that was begun before may be entered later. Those of another copy tell
    nothing.
    """
    changed, checked = line.changed, line.check.version if line.check is not None else None
    if changed is None or changed.version is None or changed.generation != line.generation:
        return False
    return line.status in (SYNCED, "behind") and (checked is None or checked < changed.version)


def _is_under_way(runs: Iterable[RunLine], now: datetime) -> bool:
    """Whether a run may yet check what it changed; one that was killed, or whose check ran out of
    time, records no end.
    """
    return any(run.status == "running" and now - run.at < _SILENT for run in runs)


def _failed_otherwise(lake: Bookkeeping, results: Results, now: datetime) -> Iterator[Attention]:
    """What nightly runs failed by; of reconciliations, those that didn't come as far as any
    table.
    """
    since = now - _NIGHTLY
    told = set(lake.scan(Reconciliation, ("run_id",), since)["run_id"].unique().to_pylist())
    if (run := latest_run(lake, "maintain", since)) is not None and run.status == "failed":
        yield Attention(
            "warning",
            f"the latest maintenance failed{_why(results, run)}",
            ("run", run.verb, run.run_id),
        )
    run = latest_run(lake, "reconcile", since)
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
            "failed", f"the slot keeps {size(held)} of WAL (critical_mb {limits.critical_mb:,})"
        )
    elif held > limits.warn_mb << 20:
        yield Attention(
            "warning", f"the slot keeps {size(held)} of WAL (warn_mb {limits.warn_mb:,})"
        )


def _slot_began(
    results: Results, latest: RunLine, idle_checked_at: datetime | None
) -> Iterator[Attention]:
    """What was critical when the run began, and may be so again before the next one; its end alone
    tells nothing of that.

    A later look that found nothing to do has found the slot as it should be, or would have told.
    """
    if idle_checked_at is not None and idle_checked_at > latest.at:
        return
    for told in results(latest).get("slot_critical") or ():
        yield Attention(
            "failed", f"at the start of the latest run: {told}", ("run", latest.verb, latest.run_id)
        )
