"""The slot: as a run or an idle check last read it, for pages, which never ask the source; and as
the server has it now, for alerts, which are sent while no run reads it, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from waldelta.errors import WaldeltaError
from waldelta.lake.ledger import now
from waldelta.monitoring.attention import SLOT_WORDS, Attention, shortened
from waldelta.monitoring.overview import Glance
from waldelta.monitoring.run_history import LANDING
from waldelta.pipeline import Job
from waldelta.slot import read_slot, slot_warnings

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
    return LastSlot("ok", word, "", run.retained_bytes, read_at)


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
            f"the source doesn't answer: {kind}: {shortened(str(err))}",
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
