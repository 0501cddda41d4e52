"""Merging without Spark: what a target holds afterwards, what its commit says, and what is left to
Spark.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.seeds import chosen_random
from tests.unit.changes.decode.test_collapse import (
    SHAPE,
    apply_one_by_one,
    events_table,
    random_events,
)
from waldelta.changes.decode.collapse import EventShape, collapse
from waldelta.changes.merge import CommitTag, read_commit
from waldelta.changes.merge import by_driver as module
from waldelta.changes.merge.by_driver import merge_in_driver
from waldelta.errors import LockHeld
from waldelta.lake import DeltaTarget, Lake
from waldelta.lake.fence import UNFENCED
from waldelta.lake.ledger import TableState
from waldelta.lake.storage import local_path
from waldelta.snapshot.read_table import RAW_TYPE

NAMES = ("Id", "the `v`", "it's.big")
SCHEMA = pa.schema(
    [
        pa.field("Id", pa.int64(), nullable=False),
        ("the `v`", pa.string()),
        ("it's.big", pa.string()),
        ("gone", pa.float64()),
        ("_wd_lsn", pa.int64()),
        ("_wd_commit_ts", pa.timestamp("us", "UTC")),
        ("_wd_raw", RAW_TYPE),
    ]
)


@pytest.fixture
def job(tmp_path):
    """A job, as far as the merge asks, whose target s.t is empty."""
    target = SimpleNamespace(root=tmp_path.as_uri(), metadata_columns=True)
    made = SimpleNamespace(pipeline=SimpleNamespace(target=target), lake=Lake(target.root))
    write(made, SCHEMA.empty_table())
    return made


def write(job, rows, **options) -> None:
    write_deltalake(f"{job.pipeline.target.root}/s/t", rows, mode="overwrite", **options)


def table(job) -> DeltaTable:
    return DeltaTable(f"{job.pipeline.target.root}/s/t")


def rows(*held) -> pa.Table:
    """Rows of (id, v, big)."""
    return pa.Table.from_pylist(
        [dict(zip(SCHEMA.names, [*row, 0.5, -1], strict=False)) for row in held], SCHEMA
    )


def net_of(events, raw=None) -> pa.Table:
    net = collapse(events_table(events), SHAPE)
    return net.append_column(pa.field("raw", RAW_TYPE), pa.array([raw] * len(net), RAW_TYPE))


def plan(*, truncated=False, leaves=(), shape: EventShape = SHAPE):
    state = TableState(None, "r", "s.t", 1, "synced")
    decode = SimpleNamespace(shape=shape, names=NAMES, gathers=bool(leaves))
    return SimpleNamespace(
        truncated=truncated,
        is_truncated=truncated and not leaves,
        truncated_leaves=leaves,
        decode=decode,
        state=state,
    )


def tag(batch=1) -> CommitTag:
    return CommitTag("app", batch, "run")


def merged(job, events, batch=1, **options) -> CommitTag | None:
    net = net_of(events)
    staged = {item["values"]: item["counts"] for item in net["action"].value_counts().to_pylist()}
    return merge_in_driver(job, plan(**options), net, replace(tag(batch), counts=staged), UNFENCED)


def held(job) -> dict:
    found = table(job).to_pyarrow_table().to_pylist()
    return {row["Id"]: (row["the `v`"], row["it's.big"]) for row in found}


def check_random_batches(job, before, arrange, merge, batches) -> None:
    """Batch after batch the target holds what applying every change alone leaves; ``arrange``
    writes the rows from before.
    """
    rng = chosen_random()
    expected, last = before, 0
    arrange((key, *values) for key, values in expected.items())
    for batch in range(1, batches + 1):
        if events := random_events(rng, expected, rng.randrange(1, 25)):
            last = batch
            assert merge(job, events, batch) is not None
            expected = apply_one_by_one(expected, events)
            assert held(job) == expected, (batch, events)
            assert len(table(job).to_pyarrow_table()) == len(expected)
    assert table(job).transaction_version("app") == last


SIX_ROWS = {key: (f"b{key}", f"bt{key}") for key in range(6)}


def test_random_batches_equal_a_plain_simulation(job):
    check_random_batches(job, SIX_ROWS, lambda before: write(job, rows(*before)), merged, 40)


def test_what_the_commit_tells(job):
    """Rows by operation; columns that the source lacks, and where rows come from, stay or are
    written as by Spark's MERGE.
    """
    write(job, rows((1, "a", "A"), (2, "b", "B"), (3, "c", "C")))
    events = [
        ("U", 1, 1, "a2", "~"),
        ("U", 2, 9, "b2", "B2"),
        ("D", 3, None, None, None),
        ("I", None, 4, "d", "D"),
        ("U", 7, 7, "lacking", "x"),
        ("D", 8, None, None, None),
    ]
    done = merged(job, events)
    cut = read_commit(job, plan().state, done)
    assert (cut.inserted, cut.updated, cut.deleted, cut.skipped, cut.version) == (1, 2, 1, 2, 2)
    found = {row["Id"]: row for row in table(job).to_pyarrow_table().to_pylist()}
    assert held(job) == {1: ("a2", "A"), 9: ("b2", "B2"), 4: ("d", "D")}
    assert [(found[key]["gone"], found[key]["_wd_lsn"]) for key in (1, 9, 4)] == [
        (0.5, 0),
        (0.5, 1),
        (None, 3),
    ]
    assert merged(job, events) is not None, "a repeated batch"
    assert table(job).version() == 2
    assert read_commit(job, plan().state, tag()) == cut


def test_new_rows_alone_are_added_in_files_of_their_own(job, monkeypatch):
    """Until there are many; then all are written anew as one. Every so often there is a checkpoint,
    which keeps the watermark.
    """
    monkeypatch.setattr("waldelta.lake.delta_target.CHECKPOINT_INTERVAL", 3)
    monkeypatch.setattr(module, "_MOST_FILES", 3)
    files = []
    for batch in range(1, 7):
        merged(job, [("I", None, batch, "v", "w")], batch)
        files.append(len(table(job).file_uris()))
    assert files == [1, 2, 3, 1, 2, 3]
    (checkpoint,) = (local_path(table_uri(job)) / "_delta_log").glob("*6.checkpoint.parquet")
    assert checkpoint.stat().st_size
    assert (table(job).transaction_version("app"), len(held(job))) == (6, 6)


def table_uri(job) -> str:
    return f"{job.pipeline.target.root}/s/t"


def test_a_truncate_leaves_the_new_rows_alone(job):
    """However large the target was before."""
    write(job, rows((1, "a", "A"), (2, "b", "B")))
    done = merged(job, [("I", None, 2, "new", "N")], truncated=True)
    assert held(job) == {2: ("new", "N")}
    assert read_commit(job, plan().state, replace(done, truncated=True)).inserted == 1


def test_a_row_at_a_key_that_the_batch_leaves_empty_goes(job):
    """A repeated batch meets the row that it inserted the first time, and deletes."""
    write(job, rows((1, "a", "A"), (2, "b", "B")))
    done = merged(job, [("I", None, 1, "a", "A"), ("D", 1, None, None, None)])
    assert held(job) == {2: ("b", "B")}
    assert read_commit(job, plan().state, done).deleted == 1


def test_new_rows_without_a_key(job):
    """They are added beside those that are equal."""
    write(job, rows((1, "a", "A")))
    assert merged(job, [("I", None, 1, "a", "A")], shape=EventShape(3, ())) is not None
    assert table(job).to_pyarrow_table()["Id"].to_pylist() == [1, 1]


def test_nothing_to_change_still_is_a_commit(job):
    """It is the target's watermark."""
    assert merged(job, [("D", 8, None, None, None)]) is not None
    assert (table(job).version(), table(job).transaction_version("app")) == (1, 1)


def _partitioned(job):
    root = job.pipeline.target.root
    job.pipeline.target.root, job.lake = f"{root}/other", Lake(f"{root}/other")
    write_deltalake(f"{root}/other/s/t", SCHEMA.empty_table(), partition_by=["the `v`"])


UNKNOWN = {
    "a truncated leaf": (lambda job: None, {"truncated": True, "leaves": (7,)}),
    "copies of equal rows": (
        lambda job: None,
        {"shape": EventShape(3, ()), "event": ("D", 4, None, None, None)},
    ),
    "too many rows": (lambda job: write(job, rows((1, "a", "A"), (2, "b", "B"))), {}),
    "another feature": (lambda job: table(job).alter.add_constraint({"c": '"Id" > 0'}), {}),
    "append only": (
        lambda job: table(job).alter.set_table_properties({"delta.appendOnly": "true"}),
        {},
    ),
    "partitioned": (_partitioned, {}),
    "without our columns": (
        lambda job: write(job, SCHEMA.empty_table().select(NAMES), schema_mode="overwrite"),
        {},
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_left_to_spark(job, case, monkeypatch):
    """It is told before anything is written."""
    monkeypatch.setattr("waldelta.lake.driver_limits.MOST_DRIVER_ROWS", 1)
    arrange, options = UNKNOWN[case][0], dict(UNKNOWN[case][1])
    arrange(job)
    before = table(job).version()
    event = options.pop("event", ("I", None, 4, "d", "D"))
    assert merged(job, [event], **options) is None
    assert table(job).version() == before


def test_a_row_that_keeps_some_verbatim_values_is_left_to_spark(job):
    """Unchanged values keep their entries in _wd_raw beside those that came now; other rows' are
    simply replaced.
    """
    with_raw = rows((1, "a", "A")).set_column(
        6, SCHEMA.field("_wd_raw"), pa.array([[("it's.big", "x")]], RAW_TYPE)
    )
    write(job, with_raw)
    assert merge_in_driver(job, plan(), net_of([("U", 1, 1, "b", "~")]), tag(), UNFENCED) is None
    assert (
        merge_in_driver(
            job, plan(), net_of([("U", 1, 1, "b", "B")], [("the `v`", "y")]), tag(), UNFENCED
        )
        is not None
    )
    assert table(job).to_pyarrow_table()["_wd_raw"].to_pylist() == [[("the `v`", "y")]]


def test_whoever_may_not_write_any_more_does_not(job):
    """Asked when the target was read."""

    def taken() -> None:
        raise LockHeld("by another run")

    with pytest.raises(LockHeld):
        merge_in_driver(
            job, plan(), net_of([("I", None, 4, "d", "D")]), tag(), SimpleNamespace(verify=taken)
        )
    assert held(job) == {}


def test_somebody_elses_commit_is_not_overwritten(job, monkeypatch):
    """Whoever was first stands; what is merged here is left to Spark, which merges into that."""
    opened = DeltaTarget.open

    def late(target):
        found = opened(target)
        write(job, rows((5, "theirs", "x")))
        return found

    monkeypatch.setattr(DeltaTarget, "open", late)
    assert merged(job, [("I", None, 4, "d", "D")]) is None
    assert held(job) == {5: ("theirs", "x")}


def test_rows_that_unpack_to_much_are_not_read_at_all(tmp_path, monkeypatch):
    """A file of a few kilobytes may hold more than memory has room for: its footer says so."""
    monkeypatch.setattr(module, "MOST_DRIVER_BYTES", 1 << 20)
    large = pa.table({"v": [f"{number}" * (1 << 16) for number in range(10, 90)]})
    write_deltalake(tmp_path / "t", large)
    dataset = DeltaTable(tmp_path / "t").to_pyarrow_dataset()
    assert sum(file.stat().st_size for file in tmp_path.rglob("*.parquet")) < 1 << 20

    def read(*given):
        raise AssertionError("rows were read")

    monkeypatch.setattr(module, "batches", read)
    assert module.read_within(dataset, dataset.schema) is None
