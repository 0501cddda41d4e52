"""How a range is split into tasks and buckets, and what is counted of the rows they staged."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from tests.support import pgoutput_encoder as enc
from tests.support.data.messages import aborted, chunk, commit, decided, plain, prepared, written
from tests.support.seeds import chosen_seed
from waldelta.changes.decode.collapse import RAW_ROWS, ColumnNumbering
from waldelta.changes.stage import stage
from waldelta.changes.stage.stage import (
    ROWS_PER_COLLAPSE,
    Staged,
    _counts,
    _read_events,
    buckets_for,
    buckets_of,
)
from waldelta.errors import StagedLost
from waldelta.lake import Lake
from waldelta.lake.changelog import BatchNumbers, BatchRanges, Snapshot
from waldelta.lake.changelog import batch_range as stretch
from waldelta.lake.changelog.row_messages import Volume, row_messages
from waldelta.snapshot.read_table import RAW_TYPE
from waldelta.spark import InProcess


@pytest.mark.parametrize(
    ("moves", "may_move", "tasks"), [(False, False, 3), (True, False, 1), (False, True, 1)]
)
def test_one_task_collapses_rows_that_change_their_key(moves, may_move, tasks):
    """A chain of moves has events at several keys; with REPLICA IDENTITY FULL nobody can tell."""
    volume = Volume(3 * ROWS_PER_COLLAPSE, moves, 0)
    assert buckets_for(SimpleNamespace(volume=volume, may_move=may_move)) == tasks


def test_new_rows_that_lack_a_value_are_to_be_completed():
    """Updates keep the target's value."""
    plan = SimpleNamespace(numbering=ColumnNumbering(4, (0,), (1, 3)))

    def counted(*rows):
        columns = {
            "action": pa.array([action for action, *_ in rows], pa.string()),
            "u1": pa.array([lacks for _, lacks, _ in rows]),
            "u3": pa.array([False for _ in rows]),
            "raw": pa.array([raw for *_, raw in rows], RAW_TYPE),
        }
        return Staged.of("file:///net", _counts(pa.table(columns), plan).to_pylist())

    whole = counted(
        ("update", True, None), ("insert", False, None), ("update", False, [("a", "x")])
    )
    assert (whole.counts, whole.incomplete) == ({"update": 2, "insert": 1, RAW_ROWS: 1}, False)
    for action in ("insert", "upsert"):
        assert counted(("delete", False, None), (action, True, None)).incomplete


def test_staged_events_are_all_there_or_lost(tmp_path):
    """Another run may remove the folder at any time."""
    events = pa.table({"a": [1, 2, 3]})
    with pa.ipc.new_stream(tmp_path / "part", events.schema) as sink:
        sink.write_table(events)
    files = Lake(tmp_path.as_uri()).files(tmp_path.as_uri())
    assert pa.Table.from_batches(_read_events(files, "part", 3)) == events
    for name, rows in (("part", 4), ("part", 2), ("gone", 1)):
        with pytest.raises(StagedLost, match="run again"):
            _read_events(files, name, rows)


def column(*values: str | None) -> pa.ChunkedArray:
    return pa.chunked_array(
        [[None if value is None else value.encode() for value in values]], pa.binary()
    )


def test_equal_keys_share_a_bucket_and_others_are_spread():
    """None of five buckets of numbers is much larger than the others."""
    keys = column(*(str(n) for n in range(100_000)))
    found = buckets_of([keys], 5)
    assert np.bincount(found).tolist() == pytest.approx([20_000] * 5, rel=0.03)
    assert np.array_equal(buckets_of([keys.slice(70_001)], 5), found[70_001:])
    again = pa.chunked_array([keys.slice(70_001), keys.slice(0, 70_001)])
    assert np.array_equal(buckets_of([again], 5), np.concatenate([found[70_001:], found[:70_001]]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param(["ab", "c"], ["a", "bc"], id="columns"),
        pytest.param(["ab"], ["ba"], id="places"),
        pytest.param(["a"], ["a\0"], id="lengths"),
    ],
)
def test_keys_that_are_alike_differ(one, other):
    """As far as 64 bits go: with many buckets they fall into different ones."""
    many = 1 << 40
    assert buckets_of([column(v) for v in one], many) != buckets_of(
        [column(v) for v in other], many
    )


def test_it_is_the_same_in_every_process():
    """What one task wrote, another reads."""
    keys = [column("7", None, "", "x" * 5000), column("a", "b", None, "ß")]
    assert buckets_of(keys, 1000).tolist() == [703, 904, 0, 730]


def test_without_rows():
    assert buckets_of([column()], 3).tolist() == []


TABLES = list(range(16400, 16412))


def insert(oid, key, xid=None):
    return enc.insert(oid, [str(key), "x"], xid=xid)


def mixed_batches(rng, transactions=40):
    """Every table has rows of plain, streamed and prepared transactions, some rolled back."""
    batches, keys = [], iter(range(1_000_000))
    for _ in range(3):
        messages = []
        for xid in range(7, 7 + transactions):
            streamed = rng.random() < 0.3
            rows = [
                insert(rng.choice(TABLES), next(keys), xid if streamed else None)
                for _ in range(rng.randrange(1, 30))
            ]
            if streamed:
                messages += chunk(xid, *rows) + (
                    commit(xid) if rng.random() < 0.7 else aborted(xid, xid)
                )
            elif rng.random() < 0.2:
                messages += prepared(xid, *rows, gid=f"g{xid}") + decided(xid, gid=f"g{xid}")
            else:
                messages += plain(xid, *rows)
        batches.append(messages)
    return batches


@pytest.fixture
def split_here(monkeypatch):
    monkeypatch.setattr("waldelta.spark.runner.LOCAL_TASKS", 1000)
    monkeypatch.setattr("waldelta.spark.runner.ROWS_PER_TASK", 300)  # several files
    monkeypatch.setattr(stage, "ROWS_PER_GROUP", 20)
    monkeypatch.setattr(stage, "GROUP_ROWS", 50)


@pytest.mark.usefixtures("split_here")
def test_each_table_has_its_rows_in_the_order_of_the_log(tmp_path):
    """Read here, or piece by piece as tasks do, which get what reads them as a copy."""
    rng = random.Random(chosen_seed())
    log = written(tmp_path, *mixed_batches(rng))
    stream = log.stream(0, 3)
    made = stage.split(
        InProcess(pytest.fail), log, stream, (tmp_path / "staging" / "messages").as_uri()
    )
    assert len(made.paths) > 1
    for ids in ([oid] for oid in TABLES[::3]):
        expected = log.rows(stream, 1 << 30, ids)
        found = made.rows(stream, 1 << 30, ids)
        assert found.to_pylist() == expected.to_pylist()
        assert len(found)
        assert made.unseen(stream, ids, Snapshot(0, 0)) == log.unseen(stream, ids, Snapshot(0, 0))
        chosen = row_messages(stream.segments, ids, Snapshot(0, 0))
        pieces, copied = made.pieces(chosen), pickle.loads(pickle.dumps(made))
        by_tasks = [
            row
            for part in copied.read(pieces, chosen, ["batch", "seq"])
            for row in part.to_pylist()
        ]
        of_log = log.read(log.pieces(chosen), chosen, ["batch", "seq"])
        assert by_tasks == [row for part in of_log for row in part.to_pylist()]
        # Of the rows that it shares row groups with, few.
        assert sum(piece.rows for piece in pieces) < 3 * len(found) + 40 * len(made.paths)
    assert made.rows(stream, 1 << 30, [1]).to_pylist() == []


@pytest.mark.parametrize(
    ("ids", "most", "cuts"),
    [
        ([], 100, []),
        ([1] * 5, 100, [(0, 5)]),
        ([1] * 25 + [2] * 25, 100, [(0, 25), (25, 50)]),
        ([1] * 5 + [2] * 5 + [3] * 15, 100, [(0, 25)]),  # few ones share a group
        ([1] * 25 + [2] * 5, 100, [(0, 25), (25, 30)]),
        ([1] * 50, 20, [(0, 20), (20, 40), (40, 50)]),
        ([1] * 3, 1, [(0, 1), (1, 2), (2, 3)]),  # values of megabytes
    ],
)
def test_row_groups(monkeypatch, ids, most, cuts):
    monkeypatch.setattr(stage, "ROWS_PER_GROUP", 20)
    assert list(stage._cuts(np.array(ids, np.int64), most)) == cuts


@pytest.mark.parametrize(
    ("batches", "worth_it"),
    [
        ([[insert(oid, 1) for oid in TABLES]], True),
        ([[insert(oid, 1)] for oid in TABLES], False),  # a batch of each
        ([[insert(oid, 1) for oid in TABLES[: stage.SPLIT_FROM_TABLES - 1]]], False),
        (
            [[insert(1, 1), insert(99_999, 1)]],
            False,
        ),  # tables that nobody waits for, around all that do
    ],
    ids=["mixed", "one after the other", "few", "others'"],
)
def test_whether_it_is_worth_it(tmp_path, batches, worth_it):
    log = written(tmp_path, *(plain(7, *messages) for messages in batches))
    waiting = {oid for oid in TABLES if any(insert(oid, 1) in messages for messages in batches)}
    assert stage.should_split(log, log.stream(0, len(batches)), waiting) is worth_it


@pytest.mark.usefixtures("split_here")
def test_a_table_of_few_messages_is_read_here_whatever_others_have(tmp_path, monkeypatch):
    monkeypatch.setattr(stretch, "MOST_DRIVER_ROWS", 60)
    few, many = TABLES[0], TABLES[1]
    rows = [insert(few, key) for key in range(9)] + [
        insert(oid, key) for key in range(100) for oid in TABLES[1:]
    ]
    log, job = written(tmp_path, plain(7, *rows), plain(8, insert(few, 9))), lake_job(tmp_path)
    with stage.splitting(InProcess(pytest.fail), job, log, lambda _: TABLES) as split_up:
        found = BatchRanges(log, log.sizes(0, 2), split_up).of(BatchNumbers(0, 1))
        state_of = {
            oid: SimpleNamespace(relation_ids=[oid], snapshot="0:0:") for oid in (few, many)
        }
        assert len(found.rows_of(state_of[few])) == 9
        assert found.rows_of(state_of[many]) is None
        assert found.volume(state_of[few]).rows == 9
        assert found.volume(state_of[many]).rows == 100
        assert found.volume(state_of[many]).bytes < found._bytes / 2
        assert staged(tmp_path) == 1
    assert staged(tmp_path) == 0


def lake_job(folder):
    return SimpleNamespace(
        pipeline=SimpleNamespace(target=SimpleNamespace(root=folder.as_uri())),
        run_id="r",
        lake=Lake(folder.as_uri()),
    )


def staged(folder):
    return len(list((folder / "_waldelta" / "staging").glob("*")))
