"""Status: slot, lag, targets and the last run, without Spark.

The slot: as a run or an idle check last read it, for pages, which never ask the source; and as the
server has it now, for alerts, which are sent while no run reads it, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from waldelta.config import PipelineFile
from waldelta.config.parse_text import parse_json
from waldelta.errors import StateError, WaldeltaError
from waldelta.lake.ledger import Decisions, Gap, Ledger, SlotReading, now
from waldelta.lake.ledger.records import row_of
from waldelta.lsn import Lsn
from waldelta.monitoring.attention import SLOT_WORDS, Attention, shorten
from waldelta.monitoring.decisions import read_waiting
from waldelta.monitoring.overview import Glance, recorded_drift
from waldelta.monitoring.run_history import LANDING, RunLine, read_result
from waldelta.monitoring.stopped_tables import read_failures
from waldelta.monitoring.table_list import copied_rows, limits_of
from waldelta.pipeline import Job
from waldelta.pipeline.targets import (
    TableLifecycle,
    read_lifecycles,
    read_published,
    target_generations,
)
from waldelta.pipeline.targets.consistent_cuts import readable_cut
from waldelta.postgres import ServerPosition
from waldelta.postgres.publication_checks import find_unpublished, matched_tables, read_unreadable
from waldelta.slot.gaps import open_gaps
from waldelta.slot.health import Forecast, SlotWarning, forecast, forecast_at, slot_warnings
from waldelta.slot.slot import SlotState, read_slot
from waldelta.slot.standby import slot_position, standby_warnings

# After this time without a run or an idle check, the slot may be in another state.
_KNOWN_FOR = timedelta(hours=1)
_HEALTHY = SLOT_WORDS["reserved"]


@dataclass(frozen=True, slots=True)
class LastSlot:
    """``word`` is the slot's state now, as far as it is known; ``was`` is the state at the last
    reading where it isn't known any more. ``at`` is when it was read.
    """

    mark: Literal["ok", "warning", "failed", "unknown"]
    word: str
    was: str = ""
    retained_bytes: int | None = None
    at: datetime | None = None


def last_slot(
    glance: Glance, at: datetime, idle_checked_at: datetime | None, failed: str | None
) -> LastSlot:
    """Returns the slot's state by the latest run or idle check that read it.

    ``failed`` is the id of the latest ended DAG run, if it failed: without a result in the ledger
    it couldn't read the slot, as while PostgreSQL is down.
    """
    if glance.gaps:
        return LastSlot("failed", glance.gaps[-1].cause, at=glance.gaps[-1].at)
    run = glance.landing
    if run is None or run.wal_status is None:
        return LastSlot("unknown", "not recorded")
    read_at = max(filter(None, (run.at, idle_checked_at)))
    word = SLOT_WORDS.get(run.wal_status, run.wal_status)
    if word != _HEALTHY:
        is_lost = run.wal_status == "lost"
        return LastSlot("failed" if is_lost else "warning", word, "", run.retained_bytes, read_at)
    attempts = [one for one in glance.runs if one.verb in LANDING and one.at > read_at]
    is_unread = any(one.status == "failed" and one.wal_status is None for one in attempts)
    is_unread |= failed is not None and failed not in {one.run_id for one in glance.runs}
    if is_unread or at - read_at > _KNOWN_FOR:
        word = "not readable" if is_unread else "not read lately"
        return LastSlot("unknown", word, _HEALTHY, run.retained_bytes, read_at)
    # The worst comes first.
    if warned := next((item for item in glance.attention if item.kind == "slot"), None):
        return LastSlot(warned.severity, "at risk", "", run.retained_bytes, read_at)
    return LastSlot("ok", word, "", run.retained_bytes, read_at)


def slot_forecast(pipeline: PipelineFile, ledger: Ledger, glance: Glance) -> Forecast | None:
    """Returns when the slot reaches its limit if no run moves it, by what runs recorded.

    The rate is how fast the source wrote WAL in the window. None without a limit or a reading.
    """
    run = glance.landing
    result = read_result(ledger, run.verb, run.run_id, run.at) if run is not None else None
    reading = (result or {}).get("slot_after") or (result or {}).get("slot_before")
    if not reading:
        return None
    return forecast_at(
        row_of(SlotReading, reading), pipeline.slot_limits, wal_per_hour(glance.runs)
    )


def wal_per_hour(runs: Sequence[RunLine]) -> float | None:
    """Returns the WAL that the source wrote in an hour, by the positions of runs, newest first."""
    ends = [(run.at, run.end_lsn) for run in runs if run.end_lsn is not None]
    if len(ends) < 2 or ends[0][0] == ends[-1][0]:
        return None
    hours = (ends[0][0] - ends[-1][0]) / timedelta(hours=1)
    return max(0, ends[0][1] - ends[-1][1]) / hours


def of_live_slot(job: Job) -> Iterator[Attention]:
    """Yields attention for a slot that is missing, lost or keeps too much WAL, or for a source that
    doesn't answer.
    """
    name = job.pipeline.source.slot
    try:
        with job.source.connect_slot("alerts") as connection:
            slot = read_slot(connection, name)
    except WaldeltaError as err:
        kind = type(err).__name__
        yield Attention(
            "failed",
            "source",
            f"the source doesn't answer: {kind}: {shorten(str(err))}",
            cause=kind,
        )
        return
    if slot is None:
        yield Attention("failed", "slot", f"slot {name!r} doesn't exist: run _resync")
        return
    if slot.wal_status == "lost":
        yield Attention("failed", "slot", f"slot {name!r} lost required WAL: run _resync")
        return
    for notice in slot_warnings(slot, job.pipeline.slot_limits, job.ledger.last_move(), now()):
        yield Attention(
            "failed" if notice.severity == "critical" else "warning", "slot", notice.text
        )


def read_status(job: Job) -> dict[str, Any]:
    """Slot, data gaps, targets, last cut and last run, as values for JSON.

    Raises SourceUnreachable and the other errors of a source that cannot be read.
    """
    slot_name = job.pipeline.source.slot
    with job.source.connect("status") as connection:
        with job.source.connect_slot("status", connection) as slot_connection:
            server = slot_position(slot_connection, job, connection)
            slot = read_slot(slot_connection, slot_name)
            elsewhere = standby_warnings(connection, slot_connection, job, server)
        published = read_published(connection, job)
        listed_in_vain = find_unpublished(connection, job.pipeline.source)
        new = matched_tables(connection, job.pipeline.source, is_new=True)
        unreadable = read_unreadable(connection, job.pipeline.source)
    all_lifecycles = read_lifecycles(job, published)
    lacking, discarded = Decisions(job.lake).missing_counts(target_generations(job.ledger))
    failures = read_failures(job.ledger)  # Tables that their gates stop are among them.
    waiting = read_waiting(job.pipeline, job.ledger, failures).as_listed()
    gates = {one["table"]: one["status"] for one in waiting if "may_pass" in one}
    copied = copied_rows(job.ledger, [s.table_name for s in all_lifecycles])
    run = job.ledger.last_run()
    return {
        "pipeline": job.pipeline.pipeline,
        "slot": _slot(job, slot, server, elsewhere),
        "gaps": [_gap(gap) for gap in open_gaps(job.ledger.gaps(slot_name))],
        "unpublished": list(listed_in_vain.tables),
        "absent_publications": list(listed_in_vain.warnings()) if listed_in_vain.absent else [],
        "new_tables": sorted({str(table.id) for table in new}),
        "unreadable_partitions": unreadable,
        "waiting": waiting,
        "targets": {
            s.table_name: _target(s, lacking.get(s.table_name, 0), discarded.get(s.table_name, 0))
            | {"rows_copied": copied.get(s.table_name, 0 if s.state is None else s.state.rows)}
            | {"stopped": gates.get(s.table_name)}
            | {"error": None if s.table_name in gates else failures.get(s.table_name)}
            for s in all_lifecycles
        },
        "last_cut": _newest_cut(job),
        "last_run": None if run is None else {
            "run_id": run.run_id, "verb": run.verb, "status": run.status, "at": run.at.isoformat(),
            "source": parse_json(run.result or "{}").get("source"),
        },
    }  # fmt: skip


def _target(lifecycle: TableLifecycle, quarantined: int, discarded: int) -> dict[str, Any]:
    """``action`` is what the table needs next and ``reason`` why; ``status`` is the ledger's, None
    before the first copy. ``limits`` are why it doesn't hold all rows and columns of its source.
    """
    state = lifecycle.state
    return {
        "action": str(lifecycle.action),
        "status": state.status if state is not None else None,
        "mode": str(state.target_mode) if state is not None else None,
        "copy_skipped": state is not None and bool(state.copy_skipped),
        "generation": state.generation if state is not None else 0,
        "reason": lifecycle.why or (state.reason if state is not None else None),
        "limits": (list(limits_of(state, quarantined, discarded)) if state is not None else []),
        "quarantined": quarantined,
        "drift": recorded_drift(state) if state is not None else [],
    }


def _newest_cut(job: Job) -> dict[str, Any] | None:
    """Returns the newest readable cut; if none is readable any more, ``problem`` says so."""
    try:
        cut = readable_cut(job)
    except StateError as err:
        return {"problem": str(err)}
    return (
        None
        if cut is None
        else {"batch": cut.batch, "at": cut.at.isoformat(), "end_lsn": cut.end_lsn}
    )


def _gap(gap: Gap) -> dict[str, Any]:
    return {
        "since": gap.at.isoformat(),
        "run_id": gap.run_id,
        "from_lsn": str(Lsn(gap.from_lsn)),
        "to_lsn": str(Lsn(gap.to_lsn)) if gap.to_lsn is not None else None,
        "cause": gap.cause,
        "detail": gap.detail,
        "remedy": gap.remedy,
    }


def _slot(
    job: Job, slot: SlotState | None, server: ServerPosition, elsewhere: list[SlotWarning]
) -> dict[str, Any]:
    if slot is None:
        return {
            "name": job.pipeline.source.slot,
            "wal_status": "missing",
            "warnings": list(map(str, elsewhere)),
        }
    limits, move, at = job.pipeline.slot_limits, job.ledger.last_move(), now()
    return {
        "name": slot.name,
        "active": slot.active,
        "wal_status": slot.wal_status,
        "invalidation_reason": slot.invalidation_reason,
        "confirmed_flush_lsn": str(slot.confirmed_flush_lsn),
        "lag_bytes": server.lag_of(slot.confirmed_flush_lsn),
        "replay_lag_bytes": server.replay_lag,
        "retained_bytes": slot.retained_bytes,
        "safe_wal_size": slot.safe_wal_size,
        "failover": slot.failover,
        "standbys_away": list(slot.standbys_away),
        "inactive_since": slot.inactive_since.isoformat() if slot.inactive_since else None,
        "spilled_bytes": slot.spilled_bytes,
        "catalog_xmin_age": slot.catalog_xmin_age,
        "forecast": asdict(ahead) if (ahead := forecast(slot, limits, move, at)) else None,
        "warnings": [
            str(warning) for warning in [*slot_warnings(slot, limits, move, at), *elsewhere]
        ],
    }
