"""What the ledger says of a target once its copy is complete."""

from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from waldelta.changes.merge.target_table import CopyCommit
from waldelta.config import PipelineFile
from waldelta.lake.ledger import COPYING, SYNCED, ColumnState, StorageState, TableState
from waldelta.lake.ledger.records import AttributeState
from waldelta.lsn import Lsn
from waldelta.pipeline.targets import ReplicatedTarget, TargetSource
from waldelta.postgres import Leaf, PgType, PublishedTable, TableColumn, TableId
from waldelta.stages.sync._write_files import WrittenCopy
from waldelta.stages.sync.copy_table import published_state, synced_state
from waldelta.stages.sync.skipped_copy import SkippedCopy

ID = TableId("public", "t")
BEGUN = TableState(
    datetime(2026, 1, 1, tzinfo=UTC), "r", str(ID), 3, COPYING, reason="asked for",
    incarnation="2026-01-01T00:00:00",
)  # fmt: skip
TABLE = PublishedTable(
    ID, 7, "r", "d",
    (TableColumn("id", 1, PgType(23, -1, "integer"), True),
     TableColumn("n", 3, PgType(1700, -1, "numeric"), False)), ("id",), ("id",), ("id",), "(n > 1)",
    (Leaf(ID, 7, 7, 0, 0),), (7,), frozenset({"update", "insert"}),
)  # fmt: skip
COPIED = WrittenCopy(CopyCommit(3001, 12, 345))
SNAPSHOT = SimpleNamespace(snapshot="700:700:", lsn=Lsn(0x16B374D848))
BEGINS = SkippedCopy("3:3:", Lsn(0x10))
FORMER = replace(
    BEGUN,
    status=SYNCED,
    key_columns=["a"],
    columns=[ColumnState("a", 23, -1, "integer", "int", not_null=True, attnum=1)],
)
PLAIN = ReplicatedTarget(ID, TargetSource(ID, frozenset({7})), TABLE)
ATTRIBUTES = StorageState(attributes=[AttributeState(n, 1, False, 0) for n in (1, 2, 3)])


def pipeline(**entry) -> PipelineFile:
    publication = {"name": "p", "tables": [{"name": "public.t"}]}
    source = {"conn_id": "c", "slot": "s", "publications": [publication]}
    target = {"root": "file:///x", "tables": {"public.t": entry} if entry else {}}
    return PipelineFile.model_validate({"pipeline": "p", "source": source, "target": target})


CASES = [
    ("a mirror's mode isn't told", PLAIN, StorageState(), SNAPSHOT, pipeline(), {"mode": None}),
    ("another mode is", PLAIN, StorageState(), SNAPSHOT, pipeline(mode="history"),
     {"mode": "history"}),
    ("its own name isn't told", PLAIN, StorageState(), SNAPSHOT, pipeline(),
     {"source_table": None, "root_id": None}),
    ("what it gathers is",
     replace(PLAIN, mapping=TargetSource(TableId("public", "parts"), frozenset({7}), root_id=6)),
     StorageState(), SNAPSHOT, pipeline(), {"source_table": "public.parts", "root_id": 6}),
    ("rows were copied", PLAIN, StorageState(), SNAPSHOT, pipeline(), {"copy_skipped": None}),
    ("no row was copied", PLAIN, StorageState(), BEGINS, pipeline(copy=False),
     {"copy_skipped": True,
      "reason": ("replicated without a copy: it gets the changes since 0/10, and lacks all other"
                 " rows"), "key_columns": ["id"]}),
    ("columns of a target that is continued", PLAIN, StorageState(), replace(BEGINS, former=FORMER),
     pipeline(copy=False),
     {"copy_skipped": True, "key_columns": ["a"], "columns": FORMER.columns,
      "reason": ("replicated without a copy: it continues at 0/10, and lacks earlier changes that"
                 " weren't applied")}),
    ("columns not published", PLAIN, ATTRIBUTES, SNAPSHOT, pipeline(),
     {"unpublished": [2], "storage": ATTRIBUTES}),
]  # fmt: skip


def copied_state(target, storage, begins, file) -> TableState:
    state = published_state(BEGUN, target, storage, None, file)
    return synced_state(state, COPIED, begins, file.target.mode_of(str(ID)))


@pytest.mark.parametrize(
    ("target", "storage", "begins", "file", "told"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_what_is_told_of_a_copy(target, storage, begins, file, told):
    """What differs by target; pipeline file, snapshot and catalog each say a part of it."""
    state = copied_state(target, storage, begins, file)
    assert {name: getattr(state, name) for name in told} == told


def test_the_row_goes_on_from_the_one_that_began():
    """Run, generation, life and reason are the copy's; the rest is as the snapshot saw it."""
    state = copied_state(PLAIN, StorageState(), SNAPSHOT, pipeline())
    begun = ("run_id", "table_name", "generation", "reason", "incarnation")
    assert [getattr(state, name) for name in begun] == [getattr(BEGUN, name) for name in begun]
    assert (state.status, state.snapshot, state.snapshot_lsn) == (SYNCED, "700:700:", 0x16B374D848)
    assert (state.rows, state.bytes, state.version) == (12, 345, 3001)
    assert (state.relation_ids, state.key_columns, state.row_filter) == ([7], ["id"], "(n > 1)")
    assert state.publishes == ["insert", "update"]
    assert [(c.name, c.attnum, c.not_null) for c in state.columns] == [
        ("id", 1, True),
        ("n", 3, False),
    ]
