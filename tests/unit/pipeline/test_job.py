"""What the ledger says of a slot's current incarnation, and which states belong to it."""

from datetime import UTC, datetime, timedelta

import pytest

from waldelta.errors import SlotMissing
from waldelta.lake.ledger import SlotMove, TableState
from waldelta.pipeline.job import identity_of

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def move(hours, event, incarnation, lsn, batch=None):
    at = NOON + timedelta(hours=hours)
    return SlotMove(at, "r", event, "s", "1", 1, incarnation, lsn, batch)


MOVES = [
    move(0, "created", "0/1", 1),
    move(1, "intent", "0/1", 9, 7),
    move(2, "dropped", "0/1", 9),
    move(3, "created", "0/A", 10, 8),
]


def test_an_incarnation_begins_where_its_slot_was_created():
    identity = identity_of("s", MOVES)
    expected = ("0/A", 10, 8, NOON + timedelta(hours=3))
    assert (identity.incarnation, identity.begins_at, identity.floor, identity.since) == expected
    assert identity_of("s", MOVES[:1]).floor == 0


def test_states_belong_to_their_incarnation():
    """Rows of earlier versions don't name theirs, and are placed by the time."""
    rows = [
        TableState(NOON + timedelta(hours=hours), "r", name, 1, "synced", incarnation=incarnation)
        for name, hours, incarnation in (
            ("earlier", 4, "0/1"),
            ("own", 2, "0/A"),
            ("unnamed", 3, None),
            ("unnamed earlier", 2, None),
        )
    ]
    found = identity_of("s", MOVES).states_of(rows)
    assert [row.table_name for row in found] == ["own", "unnamed"]


MISSING = {
    "never set up": ([], "slot 's' was never set up for this lake: run setup, then sync"),
    "torn down": (
        MOVES[:3],
        "slot 's' was torn down at 2026-01-01 14:00:00 UTC by run r, .* run setup, then resync",
    ),
}


@pytest.mark.parametrize("moves, message", MISSING.values(), ids=MISSING)
def test_a_pipeline_without_a_slot_says_how_to_go_on(moves, message):
    with pytest.raises(SlotMissing, match=message):
        identity_of("s", moves)
