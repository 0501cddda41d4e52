"""A pipeline at a glance: its lag, the WAL its slot keeps, its tables, and what needs attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import reduce
from itertools import takewhile
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.config import PipelineFile, Source
from waldelta.errors import SlotUnreadable
from waldelta.lake.ledger import (
    COPYING,
    FAILED,
    NEEDS_SYNC,
    REMOVED,
    SYNCED,
    Gap,
    Ledger,
    Reconciliation,
    RowCounts,
    Run,
    TableState,
    last_rows,
)
from waldelta.lake.ledger.check_records import Verdict
from waldelta.monitoring.attention import (
    Attention,
    AttentionLevel,
    on_names,
    shorten,
    worst_first,
)
from waldelta.monitoring.check_results import read_latest_checks
from waldelta.monitoring.decisions import Waiting, read_waiting
from waldelta.monitoring.reconciliation_status import Compared, of_compared, read_compared
from waldelta.monitoring.run_history import (
    LANDING,
    Point,
    Results,
    RunLine,
    complete_upto,
    lag_points,
    latest_run,
    lines_of,
    parse_result,
    read_runs,
    results_of,
    scan_runs,
)
from waldelta.monitoring.table_list import (
    TableLine,
    latest_states,
    read_changed,
    read_copies,
    read_tables,
)
from waldelta.pipeline.lag import Lag
from waldelta.postgres.publication_checks import listed
from waldelta.quantities import counted, duration, size
from waldelta.slot.gaps import open_gaps

# Searched beyond the window shown: the latest run, and a table's latest change, may be days ago.
REACH = timedelta(days=7)
# How many of the last runs a page shows as bars.
_RECENT = 50
# They read this many pipelines at once, because object stores are slow.
OVERVIEW_AT_ONCE = 8
# An older failed nightly run has little meaning today.
_NIGHTLY = timedelta(days=30)
# Results of at most this many runs are searched for one that reached apply; if none did, that
# is reported elsewhere.
_MOST_RESULTS = 5
# Runs that failed the same way in a row are counted up to this number.
_MOST_ALIKE = 50
_OF_STATUS: tuple[tuple[str, AttentionLevel, str, str], ...] = (
    (FAILED, "failed", "failed_copy", "{}: the copy failed"),
    (NEEDS_SYNC, "warning", "needs_copy", "{}: waiting for a new copy"),
    (COPYING, "warning", "copying", "{}: copy in progress, or killed"),
)
_OF_VERDICT: tuple[tuple[Verdict, AttentionLevel, str, str], ...] = (
    ("failed", "failed", "failed_expectations", "{}: critical expectations failed"),
    ("warning", "warning", "warned_expectations", "{}: expectations failed (warning only)"),
    ("unknown", "warning", "unevaluated_expectations", "{}: expectations not evaluated"),
)


@dataclass(frozen=True, slots=True)
class Glance:
    """A pipeline by its ledger; the lake has everything that the source had committed by ``upto``.

    ``runs``, ``lag``, ``operations``, ``copied`` (rows of copies) and ``changed_tables`` cover the
    window; the tables' lines may have older changes. ``recent`` are the last runs that land
    changes, newest first, also those before the window. ``alike`` are the latest of them, as long
    as they failed by the same class of error. ``waiting`` counts what waits for a decision.
    """

    is_set_up: bool
    upto: datetime | None
    runs: tuple[RunLine, ...]
    latest: RunLine | None
    lag: tuple[Point, ...]
    operations: RowCounts
    copied: int
    changed_tables: int
    tables: tuple[TableLine, ...]
    gaps: tuple[Gap, ...]
    compared: Compared
    active: frozenset[str] = frozenset()
    attention: tuple[Attention, ...] = ()
    recent: tuple[RunLine, ...] = ()
    alike: tuple[RunLine, ...] = ()
    waiting: int = 0

    @property
    def landing(self) -> RunLine | None:
        """Returns the latest run that read the slot, and so knows its state."""
        return next((run for run in self.runs if run.wal_status is not None), None) or self.latest

    @property
    def is_retried(self) -> bool:
        """Returns whether an attempt at the latest run failed, and the run isn't over."""
        run = self.latest
        return run is not None and run.status == "failed" and run.run_id in self.active

    @property
    def latest_status(self) -> str | None:
        """Returns the latest run's status; an attempt that failed doesn't end its run."""
        if self.latest is None:
            return None
        return "retrying" if self.is_retried else self.latest.status

    @property
    def verdicts(self) -> dict[str, int]:
        """Returns the number of tables by the verdict of their last check."""
        return Counter(line.check.verdict for line in self.tables if line.check is not None)


@dataclass(frozen=True, slots=True)
class AirflowRuns:
    """What only Airflow knows of the runs that land changes.

    ``idle_checked_at`` is when one last found nothing to do. ``active`` are the ids of runs that
    haven't ended: an attempt that failed is retried, or its run's check follows.
    """

    idle_checked_at: datetime | None = None
    active: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Scope:
    """What a glance covers: the window of the last ``hours``, the latest run and tables' latest
    changes searched back to ``reach``.

    For one ``table`` it has no other tables, no rows of the window, and no failures of maintenance.
    """

    hours: int = 24
    reach: timedelta = REACH
    table: str | None = None


LAST_DAY = Scope()
# What the overview of all pipelines and the alerts show: it is enough for a daily pipeline.
OVERVIEW = Scope(reach=timedelta(days=2))


def read_glance(
    pipeline: PipelineFile,
    ledger: Ledger,
    now: datetime,
    scope: Scope = LAST_DAY,
    airflow: AirflowRuns = AirflowRuns(),
) -> Glance:
    """Returns a pipeline by its ledger; raises the store's errors."""
    table, reach = scope.table, scope.reach
    idle_checked_at, since = airflow.idle_checked_at, now - timedelta(hours=scope.hours)
    history = scan_runs(ledger, start := min(since, now - reach))
    runs, states = _lines(ledger, history, since), latest_states(ledger)
    landing = [run for run in runs if run.verb in LANDING]
    recent = read_changed(ledger, since) if table is None else {}
    changed = recent if recent and start == since else read_changed(ledger, start, table)
    names = [s.table_name for s in states if s.status != REMOVED and table in (None, s.table_name)]
    checks = read_latest_checks(ledger, now - reach, names, table)
    tables = read_tables(ledger, runs, changed, checks, idle_checked_at)
    results, waiting = results_of(ledger), read_waiting(pipeline, ledger, _behind(tables))
    glance = Glance(
        is_set_up=bool(states or runs or read_runs(ledger)),
        upto=complete_upto(landing, idle_checked_at),
        runs=tuple(run for run in runs if run.at >= since),
        latest=landing[0] if landing else None,
        lag=() if table is not None else tuple(lag_points(history, since)),
        operations=reduce(RowCounts.plus, (of.operations for of in recent.values()), RowCounts()),
        copied=sum(copy.rows for copy in read_copies(ledger) if copy.at >= since),
        changed_tables=len(recent),
        tables=tuple(
            line if pipeline.quality.enabled else _without_old_check(line)
            for line in tables
            if table in (None, line.table_name)
        ),
        gaps=tuple(open_gaps(ledger.gaps(pipeline.source.slot))),
        compared=read_compared(ledger, names),
        active=airflow.active,
        recent=tuple(landing[:_RECENT]),
        alike=tuple(_runs_with_same_failure(ledger, landing)),
        waiting=waiting.count + sum(line.in_quarantine for line in tables),
    )
    items = [*_attention(pipeline, waiting, results, glance, now, idle_checked_at)]
    items += _of_runs(results, landing, states, pipeline.source)
    items += _failed_otherwise(ledger, results, now) if table is None else ()
    return replace(glance, attention=worst_first(items))


def after_idle_check(glance: Glance, idle_checked_at: datetime | None) -> Glance:
    """Returns a glance that was read without the last idle check, with it; tables stay as read."""
    latest = glance.latest
    if idle_checked_at is None or (latest is not None and not latest.applied):
        return glance
    upto = max(filter(None, (glance.upto, idle_checked_at)))
    if latest is None or idle_checked_at <= latest.at:
        return replace(glance, upto=upto)
    # What the slot was at the start of the latest run has a page, that run's.
    lasting = tuple(item for item in glance.attention if item.kind != "slot" or not item.page)
    return replace(glance, upto=upto, attention=lasting)


def _runs_with_same_failure(ledger: Ledger, landing: Sequence[RunLine]) -> Iterator[RunLine]:
    """Yields the latest runs, newest first, as long as they failed by the same class of error."""
    failed = list(takewhile(lambda run: run.status == "failed", landing[:_MOST_ALIKE]))
    if not failed:
        return
    of_runs = pc.field("run_id").isin([run.run_id for run in failed])
    rows = ledger.table(Run).scan(("at", "verb", "run_id", "result"), failed[-1].at, of_runs)
    causes = {
        (row["verb"], row["run_id"]): (parse_result(row["result"]).get("error") or {}).get("class")
        for row in last_rows(rows, ["verb", "run_id"]).to_pylist()
    }
    first = causes.get((failed[0].verb, failed[0].run_id))
    yield from takewhile(lambda run: causes.get((run.verb, run.run_id)) == first, failed)


def _lines(ledger: Ledger, history: pa.Table, since: datetime) -> list[RunLine]:
    """Returns the runs of the window and the last that landed changes; all if none of these was
    applied, because the latest that was is searched.
    """
    is_shown = pc.greater_equal(history["at"], since)
    landing = pc.is_in(history["verb"], value_set=pa.array(LANDING))
    numbers = np.flatnonzero(landing.to_numpy())[:_RECENT]
    runs = lines_of(history.slice(0, max(pc.sum(is_shown).as_py() or 0, *(numbers[-1:] + 1), 0)))
    if not any(run.verb in LANDING and run.applied and run.as_of for run in runs):
        runs = lines_of(history)
    if any(run.verb in LANDING for run in runs):
        return runs
    # Nothing has changed for long, so the last run's findings are still valid.
    return runs + [run for verb in LANDING if (run := latest_run(ledger, verb)) is not None]


def _attention(
    pipeline: PipelineFile,
    waiting: Waiting,
    results: Results,
    glance: Glance,
    now: datetime,
    idle_checked_at: datetime | None,
) -> Iterator[Attention]:
    """Yields what is wrong, then what may become wrong."""
    tables, latest = glance.tables, glance.latest
    if latest is not None:
        yield from _silent(latest, now)
    yield from _of_gaps(glance.gaps)
    severity: AttentionLevel = "failed"
    when = "" if latest is None or latest.applied else " before all changes were applied"
    kind, text = "failed_run", f"the latest run failed{when}"
    if glance.is_retried:
        severity = "warning"
        kind, text = "failed_attempt", "the latest run goes on; an attempt at it failed"
    # The open gap already explains such a run's failure.
    yield from _of_failed(results, latest, kind, text, severity, {gap.cause for gap in glance.gaps})
    stopped = {gate.table_name for gate in waiting.of("gate", "released")}
    late = [name for name in _behind(tables) if name not in stopped]
    yield from _of_tables(tables, late, severity)
    if latest is not None:
        yield from _of_slot(pipeline, results, latest, idle_checked_at)
    if pipeline.quality.enabled and not (
        glance.active
        or any(
            run.status == "running" and not Lag.since(run.at, now).is_silent for run in glance.runs
        )
    ):
        # A run checks its own changes, so such a table waits for the next run or maintenance.
        yield from on_names(
            "warning",
            "unchecked",
            [line.table_name for line in tables if _is_unchecked(line)],
            "{}: not checked since the last change",
            "expectations",
        )
    yield from waiting.attention(tables)
    yield from of_compared(glance.compared)


def _behind(tables: Iterable[TableLine]) -> list[str]:
    return [line.table_name for line in tables if line.status == "behind"]


def _of_gaps(gaps: Sequence[Gap]) -> Iterator[Attention]:
    for gap in gaps:
        yield Attention(
            "failed",
            "data_gap",
            f"the slot lost changes: {gap.cause}: {gap.remedy}"
            if gap.cause != SlotUnreadable.__name__
            else f"the slot can't be decoded past a transaction: {gap.cause}: {gap.remedy}",
            ("run", "any", gap.run_id),
            cause=gap.cause,
        )


def _of_tables(
    tables: Sequence[TableLine], late: Sequence[str], severity_of_late: AttentionLevel
) -> Iterator[Attention]:
    """Yields attention by the tables' status and last check; ``late`` are those that are behind."""
    yield from on_names(
        severity_of_late, "behind", late, "{}: not up to date; changes wait", anchor="tables"
    )
    for status, severity, kind, what in _OF_STATUS:
        names = [line.table_name for line in tables if line.status == status]
        yield from on_names(severity, kind, names, what, anchor="tables")
    for verdict, severity, kind, what in _OF_VERDICT:
        names = [line.table_name for line in tables if line.check and line.check.verdict == verdict]
        yield from on_names(severity, kind, names, what, "expectations")


def _silent(latest: RunLine, now: datetime) -> Iterator[Attention]:
    """Yields attention for a run without recent events: a run that was killed records no end."""
    if latest.status == "running" and Lag.since(latest.at, now).is_silent:
        yield Attention(
            "warning",
            "silent_run",
            f"no update from the latest run for {duration((now - latest.at).total_seconds())}: it"
            " was killed, or a stage takes long",
            ("run", latest.verb, latest.run_id),
        )


def _is_unchecked(line: TableLine) -> bool:
    """Compares versions, because a check that began before may be recorded later.

    Versions of another copy can't be compared.
    """
    changed, checked = line.changed, line.check.version if line.check is not None else None
    if changed is None or changed.version is None or changed.generation != line.generation:
        return False
    return line.status in (SYNCED, "behind") and (checked is None or checked < changed.version)


def _without_old_check(line: TableLine) -> TableLine:
    """Returns a table without results that nothing renews, because checks are switched off.

    These are results for an older version, and those of gates that a complete target has passed or
    that are gone.
    """
    is_of_gates = line.check is not None and line.check.version is None
    is_old = line.status == SYNCED and (is_of_gates or _is_unchecked(line))
    return replace(line, check=None) if is_old else line


def _failed_otherwise(ledger: Ledger, results: Results, now: datetime) -> Iterator[Attention]:
    """Yields failures of nightly runs; of reconciliations only those that reached no table."""
    since = now - _NIGHTLY
    compared = ledger.table(Reconciliation).scan(("run_id",), since)["run_id"].to_pylist()
    run = latest_run(ledger, "maintain", since)
    yield from _of_failed(results, run, "failed_maintenance", "the latest maintenance failed")
    run = latest_run(ledger, "reconcile", since)
    if run is not None and run.run_id not in compared:
        yield from _of_failed(
            results, run, "failed_reconciliation", "the latest reconciliation failed"
        )


def _of_failed(
    results: Results,
    run: RunLine | None,
    kind: str,
    text: str,
    severity: AttentionLevel = "warning",
    explained: Collection[str] = (),
) -> Iterator[Attention]:
    """Yields attention for a failed run, unless its error's class is explained elsewhere."""
    if run is None or run.status != "failed":
        return
    error = results(run).get("error") or {}
    cause = error.get("class")
    if cause not in explained:
        message = shorten(str(error.get("message") or ""))
        why = f": {cause}: {message}" if message else ""
        page = ("run", run.verb, run.run_id)
        yield Attention(severity, kind, text + why, page, cause=cause or "")


def _of_slot(
    pipeline: PipelineFile, results: Results, latest: RunLine, idle_checked_at: datetime | None
) -> Iterator[Attention]:
    """Yields how the slot was at the end of the latest run, or, if it was fine, at its begin.

    What was critical when the run began may be again before the next one, and the run's end alone
    doesn't show that. A later idle check found the slot fine, or would have reported it.
    """
    limits, retained = pipeline.slot_limits, latest.retained_bytes or 0
    is_lost = latest.wal_status not in (None, "reserved", "extended")
    is_critical = retained > limits.critical_mb << 20
    if is_lost:
        yield Attention(
            "failed", "slot", f"slot {pipeline.source.slot}: its wal_status is {latest.wal_status}"
        )
    if is_critical or retained > limits.warn_mb << 20:
        name = "critical_mb" if is_critical else "warn_mb"
        yield Attention(
            "failed" if is_critical else "warning",
            "slot",
            f"the slot keeps {size(retained)} of WAL (limit slot_limits.{name}:"
            f" {size(getattr(limits, name) << 20)})",
        )
    is_fine_since = idle_checked_at is not None and idle_checked_at > latest.at
    if not (is_lost or is_critical or is_fine_since):
        page = ("run", latest.verb, latest.run_id)
        for warning in results(latest).get("slot_critical") or ():
            yield Attention("failed", "slot", f"at the start of the latest run: {warning}", page)


def _of_runs(
    results: Results, landing: Sequence[RunLine], states: Sequence[TableState], source: Source
) -> Iterator[Attention]:
    """Yields attention from the targets' states and the latest results.

    ``landing`` are the runs that land changes, newest first.
    """
    yield from on_names(
        "warning",
        "drift",
        sorted(s.table_name for s in states if s.status != REMOVED and recorded_drift(s)),
        "{}: drifted from its source: no run has repaired it",
        "reconciliation",
    )
    run, result = _newest_at_apply(results, landing)
    touched = {
        state.table_name
        for state in states
        if run is not None and state.at > run.at - timedelta(seconds=run.seconds)
    }

    def untouched(key: str) -> list[str]:
        return [name for name in result.get(key) or () if name not in touched]

    yield from _of_unpublished(states, source, untouched("unpublished"))
    yield from on_names(
        "warning",
        "never_copied",
        untouched("never_copied"),
        "{}: published, but never copied: run the initial sync",
    )
    yield from on_names(
        "warning",
        "new_tables",
        untouched("new_tables"),
        "{}: matches a pattern, but isn't published: run setup",
    )
    if run is not None:
        unused = [str(name).partition("\n")[0] for name in result.get("unused_suites") or ()]
        page = ("run", run.verb, run.run_id)
        yield from on_names(
            "warning", "unused_expectations", unused, "expectation files without a table: {}", *page
        )


def recorded_drift(state: TableState) -> list[str]:
    """Returns drift that was reported and not repaired; runs compare with the current catalogs."""
    drift = []
    if leaves := len(state.unrepaired_leaves):
        drift.append(f"{counted(leaves, 'partition')} added, removed or truncated")
    if filters := state.later_filters:
        drift.append(f"published by other rules since its copy, at last by {filters[-1]}")
    return drift


def _of_unpublished(
    states: Sequence[TableState], source: Source, reported: Sequence[str]
) -> Iterator[Attention]:
    """Yields tables that the file lists and that are not published.

    An idle check may have found them without a following run, or a run has reported them.
    """
    table_names = {str(table) for _, table in listed(source)}
    removed = {s.table_name for s in states if s.status == REMOVED and s.table_name in table_names}
    yield from on_names(
        "failed",
        "unpublished",
        sorted(removed.union(reported)),
        "{}: in the pipeline file, but not published: its changes are not replicated",
    )


def _newest_at_apply(
    results: Results, runs: Sequence[RunLine]
) -> tuple[RunLine | None, dict[str, Any]]:
    """Returns the newest run that reached the apply stage, and its result."""
    for run in [run for run in runs if run.status != "running"][:_MOST_RESULTS]:
        if "apply" in ((result := results(run)).get("stages") or {}):
            return run, result
    return None, {}
