"""Identifies the slot that a change log's messages came from: its name, and its incarnation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from waldelta.errors import SlotMissing, StateError
from waldelta.lake.ledger import SlotMove, TableState


@dataclass(frozen=True, slots=True)
class SlotIdentity:
    """A slot, its server and its incarnation; stored with every move of the slot.

    The incarnation began at the position ``begins_at``, at the time ``since``. Its batches come
    after batch ``floor``: changes from another server or timeline are never applied again.
    """

    slot: str
    system_identifier: str
    timeline: int
    incarnation: str
    begins_at: int = field(default=0, compare=False)
    floor: int = field(default=0, compare=False)
    since: datetime = field(default=datetime.min.replace(tzinfo=UTC), compare=False)

    @property
    def app_id(self) -> str:
        """Delta's txnAppId of everything that this slot lands; a recreated slot is another
        writer.
        """
        return f"waldelta:{self.system_identifier}:{self.slot}:{self.incarnation}"

    def states_of(self, rows: Sequence[TableState]) -> list[TableState]:
        """Return those of the ledger's states that belong to this incarnation.

        Earlier versions wrote rows without the incarnation; only the clock can place them.
        """
        return [
            state
            for state in rows
            if state.incarnation == self.incarnation
            or (state.incarnation is None and state.at >= self.since)
        ]


def identity_of(slot: str, moves: list[SlotMove]) -> SlotIdentity:
    """Return the slot's current incarnation, on the timeline to which it was followed last."""
    life = incarnation_of(slot, moves)
    followed = [
        m.timeline
        for m in moves
        if (m.slot, m.incarnation, m.event) == (slot, life.incarnation, "promoted")
    ]
    return SlotIdentity(
        slot,
        life.system_identifier,
        max([life.timeline, *followed]),
        life.incarnation,
        life.lsn,
        life.batch or 0,
        life.at,
    )


def incarnation_of(slot: str, moves: list[SlotMove]) -> SlotMove:
    """Return the slot's latest creation or adoption that no drop follows.

    Raises SlotMissing when there is none.
    """
    last = {m.slot: m.event for m in moves if m.event in ("created", "adopted", "dropped")}
    if strangers := sorted(
        other for other, event in last.items() if other != slot and event != "dropped"
    ):
        raise StateError(
            f"slot {strangers[0]!r} already replicates into this lake, and two slots in one lake"
            " would apply changes twice: give each pipeline its own target.root, or run teardown"
            " for the other one first"
        )
    lives = [m for m in moves if m.slot == slot and m.event in ("created", "adopted", "dropped")]
    if not lives:
        raise SlotMissing(f"slot {slot!r} was never set up for this lake: run setup, then sync")
    if (last_life := lives[-1]).event == "dropped":
        raise SlotMissing(
            f"slot {slot!r} was torn down at {last_life.at:%Y-%m-%d %H:%M:%S} UTC by run"
            f" {last_life.run_id}, and the lake stays as it was then: to go on, run setup, then"
            " resync, which writes only the rows that differ; if that run was a resync that was"
            " killed, run resync again"
        )
    return lives[-1]
