"""What a target's filter has judged comes back to the events that it is about."""

import pyarrow as pa

from waldelta.changes.decode.collapse import DELETE, INSERT, UPDATE
from waldelta.changes.decode.route import routed


def test_events_get_their_own_operations_in_any_order():
    """By versions of the relation. An event without an operation doesn't concern the target."""
    events = pa.table(
        {
            "ord": [30, 10, 20],
            "op": pa.array([INSERT, UPDATE, INSERT], pa.int32()),
            "c0": ["x", "y", "z"],
        }
    )
    judged = pa.table({"ord": [10, 30, 20], "op": pa.array([DELETE, INSERT, None], pa.int32())})
    expected = [{"ord": 30, "op": INSERT, "c0": "x"}, {"ord": 10, "op": DELETE, "c0": "y"}]
    assert routed(events, judged).to_pylist() == expected
