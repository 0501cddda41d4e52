"""How far a slot stays moved whatever becomes of its server."""

from datetime import timedelta

import pytest

from tests.unit.lake.ledger.test_ledger import NOON
from waldelta.lake.ledger import SlotMove
from waldelta.lsn import Lsn
from waldelta.slot.recovery import MOVING, written_down


def move(minutes: int, lsn: int, event: str = "intent") -> SlotMove:
    """One of so many minutes before the last checkpoint began."""
    return SlotMove(NOON - timedelta(minutes=minutes), "r", event, "s", "1", 1, "0/1", lsn)


CREATED = move(9000, 1, "created")


@pytest.mark.parametrize(
    ("moves", "confirmed", "saved"),
    [
        pytest.param([], 0, 0, id="nothing is known"),
        pytest.param([CREATED], 1, 1, id="as it was made"),
        pytest.param([CREATED, move(61, 50)], 50, 50, id="moved before"),
        pytest.param([CREATED, move(59, 50)], 50, 1, id="it may have been about to move"),
        pytest.param([CREATED, move(300, 50), move(-5, 70)], 70, 50, id="moved since, further"),
        pytest.param([CREATED, move(300, 50)], 49, 0, id="it went back"),
        pytest.param([CREATED, move(300, 50), move(-5, 50)], 50, 0, id="it had gone back"),
        pytest.param([CREATED, move(300, 50), move(120, 40)], 50, 50, id="the furthest counts"),
    ],
)
def test_what_a_checkpoint_has_written_down(moves, confirmed, saved):
    assert written_down(moves, Lsn(confirmed), NOON) == Lsn(saved)
    assert timedelta(hours=1) == MOVING
