"""Collapse of tables without a key: cases, and random batches against a plain multiset."""

import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from tests.support.seeds import chosen_random, rounds
from waldelta.changes.decode.collapse import ColumnNumbering, collapse, event_schema

NUMBERING = ColumnNumbering(column_count=2, key=())
TYPES = [pa.binary(), pa.binary()]
A, B, C, N = (b"a", b"1"), (b"b", b"1"), (b"c", None), (None, None)


def events_table(events) -> pa.Table:
    rows = [
        {
            "ord": place,
            "op": ord(op),
            "o0": old and old[0],
            "o1": old and old[1],
            "c0": new and new[0],
            "c1": new and new[1],
            "lsn": place,
            "commit_ts": None,
        }
        for place, (op, old, new) in enumerate(events)
    ]
    return pa.Table.from_pylist(rows, schema=event_schema(NUMBERING, TYPES))


def net_rows(events, **options) -> list[tuple]:
    """Action, old row, new row; the old one only where the action has one."""
    has = {
        "insert": (False, True),
        "update": (True, True),
        "delete": (True, False),
        "skip": (False, False),
    }
    found = []
    for row in collapse(events_table(events), NUMBERING, **options).sort_by("place").to_pylist():
        base, final = (row["b0"], row["b1"]), (row["c0"], row["c1"])
        with_base, with_final = has[row["action"]]
        found.append((row["action"], base if with_base else None, final if with_final else None))
    return found


@pytest.mark.parametrize(
    ("events", "net"),
    [
        pytest.param([("I", None, A), ("I", None, A)], [("insert", None, A)] * 2,
                     id="equal rows are rows of their own"),
        pytest.param([("I", None, A), ("D", A, None)], [],
                     id="a row inserted and deleted leaves no trace"),
        pytest.param([("D", A, None), ("I", None, A)], [("delete", A, None), ("insert", None, A)],
                     id="a delete before the insert takes one of the target's"),
        pytest.param([("I", None, A), ("D", A, None), ("D", A, None)], [("delete", A, None)],
                     id="the second delete takes one of the target's"),
        pytest.param([("U", A, B), ("U", B, C)], [("update", A, C)],
                     id="updates of one row are one update"),
        pytest.param([("U", A, A)], [("update", A, A)], id="an update to an equal row"),
        pytest.param([("I", None, A), ("U", A, A), ("U", A, B)], [("insert", None, B)],
                     id="an inserted row is updated twice"),
        pytest.param([("U", A, B), ("D", B, None), ("D", B, None)],
                     [("delete", A, None), ("delete", B, None)],
                     id="a delete takes the row that the update left, the next the target's"),
        pytest.param([("I", None, N), ("D", N, None), ("D", (b"", None), None)],
                     [("delete", (b"", None), None)],
                     id="nulls are equal, and not equal to the empty text"),
    ],
)  # fmt: skip
def test_cases(events, net):
    """Each case's events become exactly its net changes."""
    assert net_rows(events) == net


def test_after_a_truncate_only_new_rows_count():
    """Changes of rows that were truncated are skipped."""
    events = [("U", A, B), ("I", None, A), ("D", C, None)]
    expected = [("skip", None, None), ("insert", None, A), ("skip", None, None)]
    assert net_rows(events, base_is_empty=True) == expected
    of_one_leaf = np.array([True, True, False])
    expected = [("skip", None, None), ("insert", None, A), ("delete", C, None)]
    assert net_rows(events, base_is_empty=of_one_leaf) == expected


def apply_one_by_one(target: Counter, events) -> Counter:
    """What PostgreSQL's subscriber does: one copy per event, missing rows skipped."""
    rows = Counter(target)
    for op, old, new in events:
        if op != "I":
            if not rows[old]:
                continue
            rows[old] -= 1
        if op != "D":
            rows[new] += 1
    return +rows


def apply_net(target: Counter, net: list[tuple]) -> Counter:
    """What the rewrite does: copies are taken from the target as it was, in their order."""
    taken, added = Counter(), Counter()
    for action, base, final in net:
        if action == "insert":
            added[final] += 1
        elif action in ("update", "delete") and taken[base] < target[base]:
            taken[base] += 1
            if action == "update":
                added[final] += 1
    return +(Counter(target) - taken + added)


def random_events(rng: random.Random, target: Counter, count: int, *, of_missing: bool) -> list:
    rows, values = Counter(target), [A, B, C, N]
    events = []
    for _ in range(count):
        old, new = rng.choice(values), rng.choice(values)
        op = rng.choice("IUUDD")
        if op != "I" and not rows[old] and not (of_missing and op == "D"):
            continue
        event = (op, None if op == "I" else old, None if op == "D" else new)
        rows = apply_one_by_one(rows, [event])
        events.append(event)
    return events


@pytest.mark.parametrize("of_missing", [False, True], ids=["consistent", "deletes of missing rows"])
def test_random_batches_equal_a_plain_simulation(of_missing):
    """Collapse and rewrite leave what applying every change alone leaves."""
    rng = chosen_random()
    for _ in rounds(600):
        target = Counter({row: rng.randrange(3) for row in [A, B, C, N]})
        events = random_events(rng, target, rng.randrange(1, 30), of_missing=of_missing)
        if events:
            assert apply_net(target, net_rows(events)) == apply_one_by_one(target, events), (
                target,
                events,
            )
