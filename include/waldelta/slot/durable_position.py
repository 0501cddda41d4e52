"""Finds the durable slot position: PostgreSQL writes a slot's position to disk with its
checkpoints.

After a stop without a checkpoint, the server has the slot at the last written position. A run then
compares again what the slot holds with what has landed (waldelta.slot.recovery). An idle server
makes no checkpoint for days.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from waldelta.lake.ledger.records import SlotMove, now
from waldelta.lsn import Lsn
from waldelta.pipeline import Job

# The longest time from an intent to the end of its move: counting a large batch takes minutes.
MOVING = timedelta(hours=1)

# When the last finished checkpoint began: moves before that are on disk. It is read as an age,
# since clocks differ.
_WRITTEN_DOWN = """
select slot.confirmed_flush_lsn::text,
       (select extract(epoch from clock_timestamp() - checkpoint_time)::float
         from pg_control_checkpoint())
from pg_replication_slots as slot
where slot.slot_name = %s
"""


def durable_position(job: Job) -> Lsn:
    """Return the position before which this pipeline's slot never goes back; 0 when not known
    now.
    """
    slot = job.pipeline.source.slot
    with job.source.connect_slot("maintain") as connection:
        row = connection.execute(_WRITTEN_DOWN, (slot,)).fetchone()
    if row is None or row[0] is None:
        return Lsn(0)
    incarnation = job.read_identity().incarnation
    moves = [
        move
        for move in job.ledger.slot_moves()
        if (move.slot, move.incarnation) == (slot, incarnation)
    ]
    return written_down(moves, Lsn.parse(row[0]), now() - timedelta(seconds=row[1]))


def written_down(moves: Sequence[SlotMove], confirmed: Lsn, checkpoint: datetime) -> Lsn:
    """Return how far a slot at ``confirmed`` had been moved when the last ``checkpoint`` began.

    Returns 0 where it may have gone back since.
    """
    before = [move.lsn for move in moves if move.at < checkpoint - MOVING]
    since = [
        move.lsn for move in moves if move.at >= checkpoint - MOVING and move.event == "intent"
    ]
    furthest = max(before, default=0)
    # A repeated move to an earlier position shows that the slot had gone back, perhaps before the
    # checkpoint.
    if confirmed.value < furthest or any(lsn <= furthest for lsn in since):
        return Lsn(0)
    return Lsn(furthest)
