"""Status: slot, lag, targets and the last run, without Spark."""

from __future__ import annotations

from typing import Any

from waldelta.errors import SlotMissing
from waldelta.job import Job
from waldelta.quarantine import Quarantine
from waldelta.server import read_position
from waldelta.slot import backlog_warning, read_slot
from waldelta.watermark import last_cut


def read_status(job: Job) -> dict[str, Any]:
    """What an engineer asks first; JSON-ready. Raises the errors of an unreachable source."""
    slot_name = job.pipeline.source.slot
    with job.connect("status") as connection:
        server = read_position(connection)
        slot = read_slot(connection, slot_name)
    states = job.table_states()
    quarantine = Quarantine(job.pipeline.target.root, job.storage_options)
    lacking = quarantine.open_counts({name: state.generation for name, state in states.items()})
    cut = last_cut(job)
    run = job.ledger.last_run()
    return {
        "pipeline": job.pipeline.pipeline,
        "slot": _slot(job, slot, server),
        "targets": {
            name: {
                "status": state.status, "generation": state.generation, "rows_copied": state.rows, "reason": state.reason,
                "quarantined": lacking.get(name, 0),
            }
            for name, state in sorted(states.items())
        },
        "last_cut": None if cut is None else {"batch": cut.batch, "at": cut.at.isoformat(), "end_lsn": cut.end_lsn},
        "last_run": None if run is None else {
            "run_id": run.run_id, "verb": run.verb, "status": run.status, "at": run.at.isoformat(),
        },
    }  # fmt: skip


def _slot(job: Job, slot: Any, server: Any) -> dict[str, Any]:
    if slot is None:
        raise SlotMissing(f"slot {job.pipeline.source.slot!r} does not exist: run setup first")
    return {
        "name": slot.name,
        "active": slot.active,
        "wal_status": slot.wal_status,
        "confirmed_flush_lsn": str(slot.confirmed_flush_lsn),
        "lag_bytes": max(0, server.flush_lsn - slot.confirmed_flush_lsn),
        "retained_bytes": slot.retained_bytes,
        "warning": backlog_warning(slot, job.pipeline.slot_limits),
    }
