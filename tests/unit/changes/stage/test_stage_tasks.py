"""Which task a row belongs to: the same for equal keys, whatever process, chunk or slice they stand
in. And what is counted of the rows that tasks have staged, or found to be gone.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from waldelta.changes.stage._buckets import buckets_of
from waldelta.changes.stage.stage_tasks import (
    STAGED_ROWS_PER_TASK,
    _read_events,
    added_up,
    count,
    tasks_of,
)
from waldelta.errors import StagedLost
from waldelta.lake import Lake
from waldelta.lake.changelog.row_messages import Volume
from waldelta.snapshot.read_table import RAW_TYPE


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


@pytest.mark.parametrize(
    ("moves", "may_move", "tasks"), [(False, False, 3), (True, False, 1), (False, True, 1)]
)
def test_one_task_collapses_rows_that_change_their_key(moves, may_move, tasks):
    """A chain of moves has its events at several keys. With REPLICA IDENTITY FULL no envelope says
    whether there are any.
    """
    volume = Volume(3 * STAGED_ROWS_PER_TASK, moves, 0)
    assert tasks_of(SimpleNamespace(volume=volume, may_move=may_move)) == tasks


def test_new_rows_that_lack_a_value_are_to_be_completed():
    """Updates keep the target's value."""
    plan = SimpleNamespace(shape=SimpleNamespace(flags=["u1", "u3"]))

    def counted(*rows):
        columns = {
            "action": pa.array([action for action, *_ in rows], pa.string()),
            "u1": pa.array([lacks for _, lacks, _ in rows]),
            "u3": pa.array([False for _ in rows]),
            "raw": pa.array([raw for *_, raw in rows], RAW_TYPE),
        }
        return added_up(count(pa.table(columns), plan).to_pylist())

    whole = counted(
        ("update", True, None), ("insert", False, None), ("update", False, [("a", "x")])
    )
    assert (whole.by_action, whole.raw_rows, whole.incomplete) == (
        {"update": 2, "insert": 1},
        1,
        False,
    )
    for action in ("insert", "upsert"):
        assert counted(("delete", False, None), (action, True, None)).incomplete


def test_staged_events_are_all_there_or_lost(tmp_path):
    """Another run may remove the folder at any time."""
    events = pa.table({"a": [1, 2, 3]})
    with pa.ipc.new_stream(tmp_path / "part", events.schema) as sink:
        sink.write_table(events)
    files = Lake(tmp_path.as_uri()).files(tmp_path.as_uri())
    assert pa.Table.from_batches(_read_events(files, {"part": 3})) == events
    for written in ({"part": 4}, {"part": 2}, {"part": 3, "gone": 1}):
        with pytest.raises(StagedLost, match="run again"):
            _read_events(files, written)
