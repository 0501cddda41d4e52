"""Collapse: tables of cases, large columns, and random batches against a plain simulation."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml

from tests.support.data.events import (
    NUMBERING,
    TYPES,
    apply_one_by_one,
    events_table,
    random_events,
)
from tests.support.seeds import chosen_random, rounds
from waldelta.changes.decode.collapse import (
    ColumnNumbering,
    codes_of,
    collapse,
    common_net_schema,
    event_schema,
)
from waldelta.changes.decode.decode import DecodePlan, collapse_events
from waldelta.lake.changelog import Snapshot
from waldelta.pgoutput.transactions import Segments
from waldelta.postgres import PgType
from waldelta.types.type_map import target_type

CASES = yaml.safe_load((Path(__file__).parents[3] / "cases" / "collapse.yml").read_text())


def net_rows(net: pa.Table) -> list[tuple]:
    return [
        (r["action"], r["b0"], r["c0"], r["c1"], "~" if r["u2"] else r["c2"])
        for r in net.to_pylist()
    ]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_collapse_cases(case):
    """Each case's events become exactly its net changes, in the schema that the merge expects."""
    empty = case.get("base_is_empty", False)
    net = collapse(
        events_table(case["events"]),
        NUMBERING,
        base_is_empty=empty if isinstance(empty, bool) else np.array(empty),
    )
    assert net.schema.equals(common_net_schema(NUMBERING, TYPES))
    by_text = repr
    assert sorted(net_rows(net), key=by_text) == sorted(
        (tuple(row) for row in case["net"]), key=by_text
    )


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_tasks_may_return_events_in_any_order(case):
    """Most of them are in stream order here, as parts of a batch are."""
    events, empty = events_table(case["events"]), case.get("base_is_empty", False)
    moved = np.roll(np.arange(len(events)), 1)
    net = collapse(
        events.take(pa.array(moved)),
        NUMBERING,
        base_is_empty=empty if isinstance(empty, bool) else np.array(empty)[moved],
    )
    assert sorted(net_rows(net), key=repr) == sorted(map(tuple, case["net"]), key=repr)


@pytest.mark.parametrize(
    ("values", "kind", "codes"),
    [
        ([[1, 2], [], [1, None], None, [1, 2], []], pa.list_(pa.int32()), [0, 1, 2, 3, 0, 1]),
        ([["a,b"], ["a", "b"], ["a,b"], [""]], pa.list_(pa.string()), [0, 1, 0, 2]),
        ([[0.0], [-0.0], [float("nan")], [float("nan")]], pa.list_(pa.float64()), [0, 0, 1, 1]),
        ([0.0, None, -0.0], pa.float64(), [0, 1, 0]),
    ],
)
def test_codes_of_keys(values, kind, codes):
    """They are equal where PostgreSQL calls keys equal, also in parts of a column."""
    column = pa.chunked_array([pa.array([values[0]], kind), pa.array(values[1:], kind)])
    assert codes_of([column]).tolist() == codes


def apply_net(target: dict, net: pa.Table) -> dict:
    """What the MERGE does: all matches are made against the target as it was."""
    removed, added = set(), {}
    for action, base, key, value, toast in net_rows(net):
        if action in ("delete", "purge"):
            removed.add(base)
        elif action == "update" and base in target:
            removed.add(base)
            added[key] = (value, target[base][1] if toast == "~" else toast)
        elif action in ("insert", "upsert"):
            removed.add(base)
            assert toast != "~"
            assert key not in added, "two rows with one key"
            added[key] = (value, toast)
    return {key: row for key, row in target.items() if key not in removed} | added


def test_random_batches_equal_a_plain_simulation():
    """Collapse and merge leave what applying every change of a consistent source alone leaves."""
    rng = chosen_random()
    for _ in rounds(400):
        target = {
            key: (f"b{key}", f"bt{key}") for key in rng.sample(range(12), rng.randrange(0, 8))
        }
        events = random_events(rng, target, rng.randrange(1, 25))
        if not events:
            continue
        net = collapse(events_table(events), NUMBERING)
        assert apply_net(target, net) == apply_one_by_one(target, events), (target, events)


def test_random_batches_with_rows_that_never_arrived():
    """Changes of rows that the batch shows to be missing are nothing to rows that are there."""
    rng = chosen_random()
    for _ in rounds(400):
        events: list = []
        held: dict = {}
        for number in range(rng.randrange(1, 25)):
            op, old, new = rng.choice("IUUMD"), rng.randrange(6), rng.randrange(6)
            event = {
                "I": ("I", None, new, f"i{number}", f"t{number}"),
                "D": ("D", old, None, None, None),
            }.get(
                op,
                (
                    "U",
                    old,
                    new if op == "M" else old,
                    f"u{number}",
                    rng.choice(["~", f"t{number}"]),
                ),
            )
            # A row that is in the way would stop the subscriber.
            if (
                event[0] != "D"
                and event[2] in held
                and event[1] != event[2]
                and (op == "I" or old in held)
            ):
                continue
            held = apply_one_by_one(held, [event])
            events.append(event)
        if events:
            net = collapse(events_table(events), NUMBERING, base_is_empty=True)
            assert apply_net({}, net) == held, events


def test_a_second_application_changes_nothing():
    """Net changes without moves can be merged twice, as after a crash before the watermark."""
    events = [("I", None, 1, "a", "x"), ("U", 2, 2, "b", "~"), ("D", 3, None, None, None)]
    net = collapse(events_table(events), NUMBERING)
    once = apply_net({2: ("o", "t"), 3: ("o", "t")}, net)
    assert apply_net(once, net) == once


@pytest.mark.parametrize(
    "kind, values",
    [
        (pa.float64(), [0.0, -0.0]),
        (pa.float64(), [float("nan"), float("nan")]),
        (pa.string(), ["a", "a"]),
        (pa.binary(), [b"\x00", b"\x00"]),
    ],
)
def test_keys_that_postgresql_holds_equal_are_one_key(kind, values):
    """-0 equals 0 and NaN equals NaN, so both events belong to one row."""
    numbering = ColumnNumbering(column_count=1, key=(0,))
    rows = [
        {"ord": 0, "op": ord("I"), "o0": None, "c0": values[0], "lsn": 0, "commit_ts": None},
        {"ord": 1, "op": ord("D"), "o0": values[1], "c0": None, "lsn": 1, "commit_ts": None},
    ]
    net = collapse(pa.Table.from_pylist(rows, schema=event_schema(numbering, [kind])), numbering)
    assert net["action"].to_pylist() == ["purge"]


def test_keys_of_several_columns():
    """Keys are equal only when all of their columns are."""
    numbering = ColumnNumbering(column_count=3, key=(0, 1))
    types = [pa.int64(), pa.string(), pa.string()]
    rows = [
        {"ord": 0, "op": ord("U"), "o0": 1, "o1": "a", "c0": 1, "c1": "a", "c2": "x"},
        {"ord": 1, "op": ord("U"), "o0": 1, "o1": "b", "c0": 1, "c1": "b", "c2": "y"},
        {"ord": 2, "op": ord("U"), "o0": 1, "o1": "a", "c0": 1, "c1": "a", "c2": "z"},
        {"ord": 3, "op": ord("U"), "o0": 2, "o1": "a", "c0": 2, "c1": "a", "c2": "w"},
    ]
    table = pa.Table.from_pylist(
        [{**r, "lsn": 0, "commit_ts": None} for r in rows], schema=event_schema(numbering, types)
    )
    assert sorted(collapse(table, numbering)["c2"].to_pylist()) == ["w", "y", "z"]


LARGE_TYPES = tuple(
    target_type(PgType(*of)) for of in ((25, -1, "text"), (25, -1, "text"), (1082, -1, "date"))
)
DATES = [b"2000-01-01", b"infinity", b"-infinity", b"2024-02-29", None]


def plan_of(key):
    numbering = ColumnNumbering(3, key, () if not key else (1,))
    return DecodePlan(
        numbering, ("k", "v", "d"), LARGE_TYPES, (), (), (None,) * 3, Snapshot(0, 0), Segments(0, 1)
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
        identity = [
            new[i] if op == "U" and plan.numbering.key else old[i] for i in plan.numbering.identity
        ]
        row = {f"o{k}": None if op == "I" else value for k, value in enumerate(identity)}
        row |= {f"c{i}": None if op == "D" else value for i, value in enumerate(new)}
        row |= {name: op == "U" and rng.random() < 0.5 for name in plan.numbering.flags}
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
