"""The slot as the server has it now: for alerts, which are sent while no run reads it, too."""

from __future__ import annotations

from collections.abc import Iterator

from waldelta.errors import WaldeltaError
from waldelta.lake.ledger.records import now
from waldelta.monitoring.attention import Attention, shortened
from waldelta.pipeline import Job
from waldelta.slot import read_slot
from waldelta.slot.health import slot_warnings


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
    for found in slot_warnings(slot, job.pipeline.slot_limits, job.ledger.last_move(), now()):
        text = found.text
        yield Attention("failed" if found.severity == "critical" else "warning", "slot", text)
