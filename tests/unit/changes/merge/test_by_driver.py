"""Merging without Spark: rows, duplicates without a key, the commit, what is left to Spark."""

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from tests.support.data.merges import (
    SCHEMA,
    driver_merge,
    held,
    plan,
    rows,
    table,
    table_uri,
    tag,
    write,
)
from tests.support.data.pg_types import ANY_NUMERIC, FLOAT8, INT4, array_of
from waldelta.changes.decode.collapse import EventShape, net_schema
from waldelta.changes.merge import by_driver as module
from waldelta.changes.merge.by_driver import combined_raw, match_duplicates, merge_in_driver
from waldelta.changes.merge.commits import read_commit
from waldelta.changes.stage.stage import Staged
from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.lake import UNFENCED, DeltaTarget, local_path
from waldelta.snapshot.read_table import RAW_TYPE
from waldelta.types.numeric import Number
from waldelta.types.text import Characters
from waldelta.types.type_map import target_type


def test_new_rows_alone_are_added_in_files_of_their_own(job, monkeypatch):
    """Until there are many, then all become one; a checkpoint keeps the watermark."""
    monkeypatch.setattr("waldelta.lake.delta_target.CHECKPOINT_INTERVAL", 3)
    monkeypatch.setattr(module, "_MOST_FILES", 3)
    files = []
    for batch in range(1, 7):
        driver_merge(job, [("I", None, batch, "v", "w")], batch)
        files.append(len(table(job).file_uris()))
    assert files == [1, 2, 3, 1, 2, 3]
    (checkpoint,) = (local_path(table_uri(job)) / "_delta_log").glob("*6.checkpoint.parquet")
    assert checkpoint.stat().st_size
    assert (table(job).transaction_version("app"), len(held(job))) == (6, 6)


def test_a_row_at_a_key_that_the_batch_leaves_empty_goes(job):
    """A repeated batch meets the row that it inserted the first time, and deletes."""
    write(job, rows((1, "a", "A"), (2, "b", "B")))
    done = driver_merge(job, [("I", None, 1, "a", "A"), ("D", 1, None, None, None)])
    assert held(job) == {2: ("b", "B")}
    assert read_commit(job, plan().state, done).deleted == 1


def test_many_rows_are_left_to_spark(job, monkeypatch):
    monkeypatch.setattr("waldelta.lake.driver_limits.MOST_DRIVER_ROWS", 1)
    write(job, rows((1, "a", "A"), (2, "b", "B")))
    assert driver_merge(job, [("I", None, 4, "d", "D")]) is None
    assert table(job).version() == 1


def test_somebody_elses_commit_is_not_overwritten(job, monkeypatch):
    """Whoever was first stands; what is merged here is left to Spark, which merges into that."""
    opened = DeltaTarget.open

    def late(target):
        found = opened(target)
        write(job, rows((5, "theirs", "x")))
        return found

    monkeypatch.setattr(DeltaTarget, "open", late)
    assert driver_merge(job, [("I", None, 4, "d", "D")]) is None
    assert held(job) == {5: ("theirs", "x")}


def test_rows_that_unpack_to_much_are_not_read_at_all(job, tmp_path, monkeypatch):
    """A file of a few kilobytes may hold more than memory has room for: its footer says so."""
    monkeypatch.setattr(module, "MOST_DRIVER_BYTES", 1 << 20)
    large = pa.table({"v": [f"{number}" * (1 << 16) for number in range(10, 90)]})
    write(job, large, schema_mode="overwrite")
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.parquet")) < 1 << 20

    def read(*given):
        raise AssertionError("rows were read")

    monkeypatch.setattr(module, "batches", read)
    assert module.small_rows(job.lake.target("s.t").open()) is None


def test_duplicate_rows_of_merged_partitions(job):
    """One of the equal rows changes; a truncated leaf's go; own columns keep their values."""
    schema = pa.schema([("v", pa.string()), ("_wd_relid", pa.int64()), *list(SCHEMA)[3:]])
    held = [("a", 1), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    target = [{"v": v, "_wd_relid": leaf, "gone": 0.5, "_wd_lsn": -1} for v, leaf in held]
    write(job, pa.Table.from_pylist(target, schema), schema_mode="overwrite")
    shape = EventShape(2, ())
    found = [
        {"action": "update", "b0": "a", "b1": 1, "c0": "A", "c1": 1, "lsn": 9, "place": 2},
        {"action": "delete", "b0": "b", "b1": 1, "lsn": 9, "place": 3},
        {"action": "delete", "b0": "b", "b1": 1, "lsn": 9, "place": 4},
        {"action": "insert", "c0": "new", "c1": 2, "lsn": 9, "place": 5},
    ]
    types = [pa.string(), pa.int64()]
    net = net_schema(shape, types).append(pa.field("place", pa.int64()))
    for name in ("base_raw", "raw"):
        net = net.append(pa.field(name, RAW_TYPE))
    leaf = plan(truncated=True, leaves=(2,), shape=shape)
    kinds = (Characters(), Number("bigint", pa.int64(), "int8"))
    leaf.decode.names = ("v", "_wd_relid")
    leaf.decode.columns = list(zip(leaf.decode.names, kinds, strict=True))
    counts = {"update": 1, "delete": 2, "insert": 1}
    changes = Staged("", "", counts, net=pa.Table.from_pylist(found, net))
    done = merge_in_driver(job, leaf, changes, replace(tag(), counts=counts), UNFENCED)
    rows = table(job).to_pyarrow_table().select(["v", "_wd_relid", "gone", "_wd_lsn"]).to_pylist()
    expected = [("A", 1, 0.5, 9), ("a", 1, 0.5, -1), ("new", 2, None, 9)]
    assert sorted(tuple(row.values()) for row in rows) == expected
    cut = read_commit(job, leaf.state, done)
    assert (cut.inserted, cut.updated, cut.deleted, cut.skipped) == (1, 1, 1, 1)


KINDS = [target_type(t, DEFAULT_TYPES) for t in (ANY_NUMERIC, FLOAT8, array_of(FLOAT8), INT4)]
COLUMNS = [(f"column {i}", kind) for i, kind in enumerate(KINDS)]


def row(numeric=None, number=None, numbers=None, whole=None):
    return (numeric, number, numbers, whole)


def matched(rows, changes, columns=COLUMNS, *, metadata=True) -> list[int]:
    """``rows`` are (values, raw), ``changes`` are (action, values, raw, place)."""
    names = [name for name, _ in columns]
    held = {
        name: pa.array([values[i] for values, _ in rows], columns[i][1].arrow)
        for i, name in enumerate(names)
    }
    net = {"action": pa.array([change[0] for change in changes], pa.string())}
    net |= {
        f"b{i}": pa.array([change[1][i] for change in changes], kind.arrow)
        for i, (_, kind) in enumerate(columns)
    }
    net["place"] = pa.array([change[3] for change in changes], pa.int64())
    if metadata:
        held["_wd_raw"] = pa.array([raw for _, raw in rows], RAW_TYPE)
        net["base_raw"] = pa.array([change[2] for change in changes], RAW_TYPE)
    return match_duplicates(pa.table(held), pa.table(net), columns, metadata=metadata).tolist()


NAN = float("nan")


@pytest.mark.parametrize(
    ("rows", "changes", "expected"),
    [
        pytest.param([row("x"), row("x")], [row("x")], [0, -1], id="one of two"),
        pytest.param([row(), row(whole=0)], [row()], [0, -1], id="null is equal, and no 0"),
        pytest.param([row("1.00"), row("1.0")], [row("1.0")], [-1, 0], id="written alike first"),
        pytest.param([row("1.00")], [row("1.0")], [0], id="equal, if none is written alike"),
        pytest.param([row("1.00"), row("1.0")], [row("1.0"), row("1.0")], [1, 0], id="both"),
        pytest.param([row("10"), row("100")], [row("100")], [-1, 0], id="zeros that count"),
        pytest.param([row(None, 0.0), row(None, -0.0)], [row(None, -0.0)], [-1, 0], id="-0"),
        pytest.param([row(None, NAN)], [row(None, NAN)], [0], id="NaN"),
        pytest.param(
            [row(numbers=[0.0, None]), row(numbers=[0.0]), row(numbers=None), row(numbers=[])],
            [row(numbers=[-0.0, None]), row(numbers=[])],
            [0, -1, -1, 1],
            id="arrays",
        ),
    ],
)
def test_which_row_is_taken(rows, changes, expected):
    given = [("delete", values, None, place) for place, values in enumerate(changes)]
    assert matched([(values, None) for values in rows], given) == expected


def test_raw_values_are_compared_in_any_order():
    rows = [(row(), {"a": "1", "b": "2"}), (row(), {}), (row(), {"a": "1"})]
    changes = [
        ("delete", row(), {"b": "2", "a": "1"}, 0),
        ("insert", row(), {"a": "1"}, 1),
        ("update", row(), None, 2),
    ]
    assert matched(rows, changes) == [0, 2, -1]


def test_the_earlier_change_takes_the_only_row():
    changes = [("delete", row("x"), None, 7), ("update", row("x"), None, 3)]
    assert matched([(row("x"), None)], changes) == [1]


def test_rows_without_columns_are_equal():
    changes = [("delete", (), None, 0)]
    assert matched([((), None), ((), None)], changes, []) == [0, -1]


def test_a_target_without_metadata_columns():
    changes = [("delete", row("1.0"), None, 0)]
    assert matched([(row("1.00"), None), (row(), None)], changes, metadata=False) == [0, -1]


VALUES = [[None, "1.0", "1.00", "10"], [None, 0.0, -0.0], [None, [0.0], [-0.0], []], [None, 1]]
RAWS = [None, {}, {"a": "1"}]


def equal_to(values, raw):
    numeric, number, numbers, whole = values
    shortest = numeric.rstrip("0").rstrip(".") if numeric and "." in numeric else numeric
    return (shortest, number, tuple(numbers) if numbers is not None else None, whole, bool(raw))


def written_as(values, raw):
    return repr((values, bool(raw)))


def test_random_changes_take_what_a_plain_simulation_takes():
    """One row for each change while there is one, preferring rows that are written alike."""
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)

    def some(most):
        return [
            (tuple(rng.choice(of) for of in VALUES), rng.choice(RAWS))
            for _ in range(rng.randrange(most))
        ]

    for _ in range(200):
        rows, olds = some(60), some(30)
        changes = [
            (rng.choice(["update", "delete", "insert"]), *old, place)
            for place, old in enumerate(olds)
        ]
        rng.shuffle(changes)
        taken = matched(rows, changes)
        removals = sorted((c for c in changes if c[0] != "insert"), key=lambda change: change[3])
        left = [equal_to(*held) for held in rows]
        expected = []
        for change in removals:
            if (equal := equal_to(*change[1:3])) in left:
                left.remove(equal)
                expected.append(change)
        assert sorted(changes[i][3] for i in taken if i >= 0) == [c[3] for c in expected], seed
        for i, old in zip(taken, rows, strict=True):
            assert i < 0 or equal_to(*old) == equal_to(*changes[i][1:3]), seed
        texts = {written_as(*old) for old in rows}
        for text in texts:
            of = [i for i, held in zip(taken, rows, strict=True) if written_as(*held) == text]
            sought = sum(written_as(*c[1:3]) == text for c in removals)
            assert sum(i >= 0 for i in of) >= min(sought, len(of)), seed


def test_raw_values_of_columns_that_keep_theirs():
    old = pa.array([[("a", "1"), ("b", "2")], [("b", "3")], None, [("a", "4")]], RAW_TYPE)
    sent = pa.array([[("b", "9")], None, None, None], RAW_TYPE)
    keeps = {"a": np.array([True, True, True, False])}
    assert combined_raw(old, sent, keeps).to_pylist() == [
        [("a", "1"), ("b", "9")],
        None,
        None,
        None,
    ]
