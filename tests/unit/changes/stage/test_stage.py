"""How many tasks stage a range, and what is counted of the rows that they staged or found gone."""

from types import SimpleNamespace

import pyarrow as pa
import pytest

from waldelta.changes.decode.collapse import RAW_ROWS, EventShape
from waldelta.changes.stage.stage import (
    ROWS_PER_COLLAPSE,
    _counts,
    _read_events,
    _staged,
    buckets_for,
)
from waldelta.errors import StagedLost
from waldelta.lake import Lake
from waldelta.lake.changelog.row_messages import Volume
from waldelta.snapshot.read_table import RAW_TYPE


@pytest.mark.parametrize(
    ("moves", "may_move", "tasks"), [(False, False, 3), (True, False, 1), (False, True, 1)]
)
def test_one_task_collapses_rows_that_change_their_key(moves, may_move, tasks):
    """A chain of moves has events at several keys; with REPLICA IDENTITY FULL nobody can tell."""
    volume = Volume(3 * ROWS_PER_COLLAPSE, moves, 0)
    assert buckets_for(SimpleNamespace(volume=volume, may_move=may_move)) == tasks


def test_new_rows_that_lack_a_value_are_to_be_completed():
    """Updates keep the target's value."""
    plan = SimpleNamespace(shape=EventShape(4, (0,), (1, 3)))

    def counted(*rows):
        columns = {
            "action": pa.array([action for action, *_ in rows], pa.string()),
            "u1": pa.array([lacks for _, lacks, _ in rows]),
            "u3": pa.array([False for _ in rows]),
            "raw": pa.array([raw for *_, raw in rows], RAW_TYPE),
        }
        return _staged("file:///net", _counts(pa.table(columns), plan).to_pylist())

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
