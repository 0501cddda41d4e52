"""Settle: what a TRUNCATE of one gathered leaf makes of the events before it."""

from __future__ import annotations

from types import SimpleNamespace

from tests.unit.changes.decode.test_collapse import SHAPE, events_table, net_rows
from waldelta.stages.repair.replay._derive_states import final_states, with_ends

LEAF = "7"


def test_events_before_a_truncate_leave_no_row_at_any_key_they_touch():
    """Whatever leaf a row was put in there by others; events behind it, and other leaves', stay
    what they are.
    """
    events = events_table(
        [
            ("U", 1, 2, LEAF, "t"),
            ("I", None, 3, LEAF, "t"),
            ("D", 4, None, LEAF, None),
            ("I", None, 5, LEAF, "after"),
        ]
    )
    plan = SimpleNamespace(relid=1, shape=SHAPE, routing=None, truncated_at={int(LEAF): 2})
    states = net_rows(final_states(with_ends(events, plan), SHAPE))
    purged = [("purge", key, None, None, None) for key in (1, 2, 3, 4)]
    assert sorted(states, key=repr) == [*purged, ("upsert", 5, 5, LEAF, "after")]
    other = SimpleNamespace(relid=1, shape=SHAPE, routing=None, truncated_at={8: 2})
    assert with_ends(events, other) is events
