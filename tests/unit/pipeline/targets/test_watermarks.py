"""Up to which batch a copy of a target has its changes, by its own Delta log and the newest cut."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from tests.support.pipelines import job_of, pipeline_file
from waldelta.errors import LateWriter, StateError
from waldelta.lake import UNFENCED, Lake
from waldelta.lake.ledger import BatchCut, SlotMove, StorageState, TableState, TargetCut, now
from waldelta.pipeline import SlotIdentity
from waldelta.pipeline.targets import (
    TargetFence,
    Watermarks,
    apply_app_id,
    check_same_copy,
    record_state,
)

LIFE = SlotMove(now(), "r", "created", "s", "1", 1, "0/1", 1)
STATE = TableState(now(), "r", "public.t", 1, "synced")


def _gone(log: Path) -> None:
    for file in [*log.iterdir()]:
        file.unlink()


def _garbled(log: Path) -> None:
    (log / f"{1:020}.json").write_text('{"add": {"pa')


def _not_text(log: Path) -> None:
    (log / f"{1:020}.json").write_bytes(bytes(range(256)))


def _missing(log: Path) -> None:
    (log / f"{0:020}.json").unlink()


def _of_the_future(log: Path) -> None:
    protocol = {
        "minReaderVersion": 3,
        "minWriterVersion": 7,
        "readerFeatures": ["nobody's"],
        "writerFeatures": ["nobody's"],
    }
    (log / f"{2:020}.json").write_text(json.dumps({"protocol": protocol}) + "\n")


@pytest.fixture
def job(lake):
    """A job of the slot incarnation LIFE."""
    made = job_of(pipeline_file(lake, "s"))
    made.ledger.append(LIFE)
    return made


def test_a_watermark_belongs_to_one_copy(job):
    """A new copy starts at its own snapshot, whatever was applied to the one before."""
    copies = [STATE, replace(STATE, generation=2)]
    identity = SlotIdentity("s", "1", 1, "0/1")
    properties = CommitProperties(app_transactions=[Transaction(apply_app_id(identity, STATE), 5)])
    uri = job.lake.target(STATE.table_name).uri
    write_deltalake(uri, pa.table({"a": [1]}), commit_properties=properties)
    watermarks = Watermarks(job, identity)
    assert [watermarks.of(state) for state in copies] == [5, 0]
    cut = BatchCut(now(), "r", 7, 100, None, [TargetCut(STATE.table_name, 1, 0)])
    job.ledger.append_cut(cut, None)
    watermarks = Watermarks(job, identity)
    assert [watermarks.of(state) for state in copies] == [7, 0]
    with pytest.raises(LateWriter, match=r"public\.t: another run applied changes"):
        TargetFence(UNFENCED, watermarks, STATE, 6).verify()
    assert TargetFence(UNFENCED, watermarks, STATE, 7).verify() == 7


@pytest.mark.parametrize(
    ("changed", "is_same"),
    [
        ({}, True),
        ({"rows": 9}, True),
        ({"generation": 2}, False),
        ({"status": "needs_sync"}, False),
        (None, False),
    ],
)
def test_changes_are_applied_to_the_copy_they_were_selected_for(job, changed, is_same):
    """The ledger may know more of the copy by then."""
    selected = replace(STATE, incarnation="0/1")
    latest = None
    if changed is not None:
        latest = job.ledger.append_state(replace(selected, **changed), None)
    if is_same:
        assert check_same_copy(job, selected) == latest
        return
    with pytest.raises(LateWriter, match=r"public\.t: another run synced it during this run"):
        check_same_copy(job, selected)


def test_a_state_is_changed_under_its_lock_as_it_is_by_then(job, monkeypatch):
    """A row that only renews StorageState.as_of is equal to the row before, and is written too."""
    locks = []

    @contextmanager
    def lock(_, table):
        locks.append(table)
        yield
        locks.append("released")

    monkeypatch.setattr("waldelta.pipeline.targets.watermarks.target_lock", lock)
    selected = replace(STATE, incarnation="0/1")
    stored = replace(selected, rows=9, storage=StorageState(as_of=5))
    latest = job.ledger.append_state(stored, None)
    append = type(job.ledger).append_state

    def append_locked(*given):
        assert locks[-1] == STATE.table_name
        return append(*given)

    monkeypatch.setattr(type(job.ledger), "append_state", append_locked)
    assert record_state(job, selected, lambda row: row) == latest
    assert len(job.read_all_states()) == 1

    def renewed(row):
        assert locks[-1] == STATE.table_name
        return replace(row, storage=StorageState(as_of=6))

    written = record_state(job, selected, renewed)
    assert written == job.read_state(STATE.table_name)
    assert (written.rows, written.storage.as_of, written.run_id) == (9, 6, job.run_id)
    assert len(job.read_all_states()) == 2
    with pytest.raises(LateWriter, match="another run synced it"):
        record_state(job, replace(selected, generation=2), renewed)


@pytest.mark.parametrize("damage", [_gone, _garbled, _not_text, _missing, _of_the_future])
def test_a_damaged_target_is_named(job, damage):
    """Else checks would fail for all tables until somebody had repaired this one."""
    uri = job.lake.target(STATE.table_name).uri
    for value in (1, 2):
        write_deltalake(uri, pa.table({"a": [value]}), mode="append")
    watermarks = Watermarks(job, SlotIdentity("s", "1", 1, "0/1"))
    assert watermarks.of(STATE) == 0
    damage(Path(uri.removeprefix("file://")) / "_delta_log")
    next_run = replace(job, lake=Lake(job.lake.root))
    watermarks = Watermarks(next_run, SlotIdentity("s", "1", 1, "0/1"))
    with pytest.raises(
        StateError, match=r"public\.t: .*its target.* run the initial sync for it again"
    ):
        watermarks.of(STATE)
