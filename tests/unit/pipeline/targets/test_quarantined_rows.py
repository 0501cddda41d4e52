"""Which rows of a target an operator let in although they fail its gates."""

import pytest

from tests.support.bookkeeping import minutes, release_of
from waldelta.lake import Lake
from waldelta.lake.ledger import ACCEPTED, DISCARDED, Decision, Ledger, TableState
from waldelta.pipeline.targets.quarantined_rows import read_decided


def release(generation, after, upto, table="public.t"):
    return release_of(minutes(1), "r", table, generation, ("1", 1), upto, "ann", "why", after)


def row(generation, lsn, status=ACCEPTED):
    return Decision(minutes(1), "r", status, "public.t", generation, 1, '{"id": "1"}', lsn=lsn)


CASES = [
    ("a release", [release(2, 5, 9)], [(5, 9)]),
    ("of another table", [release(2, 5, 9, "public.u")], None),
    ("an accepted row", [row(2, 7)], [(7, 8)]),
    ("accepted by an earlier version", [row(2, None)], None),
    ("a discarded row, which the target lacks", [row(2, 7, DISCARDED)], None),
    (
        # The new copy may come from another server, whose positions begin anew.
        "decisions on an earlier copy",
        [release(1, 5, 9), row(1, 7)],
        None,
    ),
    ("several", [release(2, 5, 9), release(2, 9, 11), row(2, 7)], [(5, 9), (7, 8), (9, 11)]),
]


@pytest.mark.parametrize("rows, positions", [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_decided_rows_of_the_current_copy_have_these_positions(lake, rows, positions):
    ledger = Ledger(Lake(lake))
    for each in rows:
        ledger.append(each)
    state = TableState(minutes(0), "s", "public.t", 2, "synced")
    assert read_decided(ledger, [state]).get("public.t") == positions
