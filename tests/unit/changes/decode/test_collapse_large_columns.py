"""Columns of more bytes than one Arrow array's offsets can count give the same result."""

import pyarrow as pa
import pytest

from tests.support.seeds import chosen_random, rounds
from waldelta.changes.decode.collapse import EventShape
from waldelta.changes.decode.decode import DecodePlan, collapse_events
from waldelta.lake.changelog import Snapshot
from waldelta.pgoutput import Segments
from waldelta.postgres import PgType
from waldelta.types.type_map import target_type

TYPES = tuple(
    target_type(PgType(*of)) for of in ((25, -1, "text"), (25, -1, "text"), (1082, -1, "date"))
)
DATES = [b"2000-01-01", b"infinity", b"-infinity", b"2024-02-29", None]


def plan_of(key):
    shape = EventShape(3, key, () if not key else (1,))
    return DecodePlan(
        shape, ("k", "v", "d"), TYPES, (), (), (None,) * 3, Snapshot(0, 0), Segments(0, 1)
    )


def events_of(rng, plan):
    """Inserts, updates and deletes in record batches of some size, in disorder."""
    rows = []
    for place in range(rng.randrange(1, 60)):
        old, new = (
            [rng.choice([b"a", b"b", b"c"]), rng.randbytes(2).hex().encode(), rng.choice(DATES)]
            for _ in range(2)
        )
        op = rng.choice("IUD")
        identity = [new[i] if op == "U" and plan.shape.key else old[i] for i in plan.shape.identity]
        row = {f"o{k}": None if op == "I" else value for k, value in enumerate(identity)}
        row |= {f"c{i}": None if op == "D" else value for i, value in enumerate(new)}
        row |= {name: op == "U" and rng.random() < 0.5 for name in plan.shape.flags}
        rows.append({"ord": place, "op": ord(op), "lsn": place, "commit_ts": place} | row)
    rng.shuffle(rows)
    batches = [
        pa.RecordBatch.from_pylist(rows[k : k + 7], plan.event_schema)
        for k in range(0, len(rows), 7)
    ]
    return pa.Table.from_batches(batches, plan.event_schema)


@pytest.mark.parametrize("key", [(0,), ()], ids=["with a key", "without"])
def test_the_result_is_the_same(monkeypatch, key):
    """With wide offsets, in pieces, with verbatim values; types are the plan's all the same."""
    rng, plan = chosen_random(), plan_of(key)
    for _ in rounds(50):
        events = events_of(rng, plan)
        expected = collapse_events(events, plan)
        with monkeypatch.context() as limits:
            limits.setattr("waldelta.changes.decode.collapse._MOST_BYTES", 10)
            limits.setattr("waldelta.changes.decode.decode._PIECE_BYTES", 20)
            found = collapse_events(events, plan)
        assert found.schema == plan.net_schema
        assert found.to_pylist() == expected.to_pylist()
