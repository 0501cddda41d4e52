"""How far a slot stays moved whatever becomes of its server: PostgreSQL writes a slot's position
down with its checkpoints.

Stopped without one, the server has the slot where it was written down last, and a run compares once
more what the slot holds again with what has landed (waldelta.slot.recovery). A server that nobody
writes to makes no checkpoint for days.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import psycopg

from waldelta.lake.ledger.records import SlotMove, now
from waldelta.lsn import Lsn
from waldelta.pipeline import Job

# From an intent to the end of what it announces: counting a large batch takes minutes.
MOVING = timedelta(hours=1)

# Of a checkpoint that has ended, when it began: what was moved before is written down. Ages, since
# clocks differ.
_WRITTEN_DOWN = """
select slot.confirmed_flush_lsn::text,
       (select extract(epoch from clock_timestamp() - checkpoint_time)::float
         from pg_control_checkpoint())
from pg_replication_slots as slot
where slot.slot_name = %s
"""


def durable_position(job: Job) -> Lsn:
    """The position behind which the slot of this pipeline never goes back; 0 when that can't be
    told now.
    """
    slot = job.pipeline.source.slot
    with job.connect_slot("maintain") as connection:
        row = _read(connection, slot)
    if row is None or row[0] is None:
        return Lsn(0)
    incarnation = job.slot_identity().incarnation
    moves = [
        move
        for move in job.ledger.slot_moves()
        if (move.slot, move.incarnation) == (slot, incarnation)
    ]
    return written_down(moves, Lsn.parse(row[0]), now() - timedelta(seconds=row[1]))


def _read(connection: psycopg.Connection[tuple[Any, ...]], slot: str) -> tuple[Any, ...] | None:
    return connection.execute(_WRITTEN_DOWN, (slot,)).fetchone()


def written_down(moves: Sequence[SlotMove], confirmed: Lsn, checkpoint: datetime) -> Lsn:
    """How far a slot at ``confirmed`` had been moved when the last ``checkpoint`` began; 0 where it
    may have gone back meanwhile.
    """
    before = [move.lsn for move in moves if move.at < checkpoint - MOVING]
    since = [
        move.lsn for move in moves if move.at >= checkpoint - MOVING and move.event == "intent"
    ]
    furthest = max(before, default=0)
    # Moved once more to where it had been, it had gone back, perhaps before the checkpoint.
    if confirmed.value < furthest or any(lsn <= furthest for lsn in since):
        return Lsn(0)
    return Lsn(furthest)
