"""Which foreign keys are judged between targets, why others aren't, what is found."""

from dataclasses import replace
from datetime import UTC, date, datetime

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.support.bookkeeping import table_at
from waldelta.lake.ledger import BatchCut, ColumnState, TableState, TargetCut
from waldelta.stages.check.constraints.constraints import ForeignKey, KeyColumn
from waldelta.stages.check.measure.references import (
    FOREIGN_KEY,
    ChangedTarget,
    CheckedTarget,
    Reference,
    ReferenceFacts,
    Side,
    plan_references,
    restrict_to_changes,
    rows_to_compare,
    rows_without_parent,
)

AT = datetime(2026, 1, 1, tzinfo=UTC)
EVERY = ["insert", "update", "delete", "truncate"]
CHILD, PARENT = "public.c", "public.p"


def state(table, oid, *columns, **changes):
    held = [
        ColumnState(name, base, -1, kind, spark, False, k + 1)
        for k, (name, base, kind, spark) in enumerate(columns)
    ]
    return replace(
        TableState(
            AT, "r", table, 1, "synced", relation_ids=[oid], columns=held, publishes=EVERY,
            snapshot_lsn=50,
        ),
        **changes,
    )  # fmt: skip


INT = (23, "integer", "int")
KEY = ForeignKey("fk", 11, CHILD, 10, PARENT, (KeyColumn(2, "p", 23),), (KeyColumn(1, "id", 23),))


def lake(child=None, parent=None, cut=None, changed=None, **known):
    """A referring and a referenced target, changed in these ways, and what else is known."""
    c = state(CHILD, 11, ("id", *INT), ("p", *INT), **child or {})
    p = state(PARENT, 10, ("id", *INT), **parent or {})
    cuts = [TargetCut(CHILD, 1, 4), TargetCut(PARENT, 1, 7)]
    newest = (
        BatchCut(AT, "r", 3, 100, None, cuts)
        if cut is None
        else replace(BatchCut(AT, "r", 3, 100, None, cuts), **cut)
    )
    targets = {CHILD: table_at("c"), PARENT: table_at("p")}
    return ReferenceFacts(
        {CHILD: c, PARENT: p},
        targets,
        newest,
        changed or {CHILD: ChangedTarget(4, lost_rows=False)},
        **known,
    )


APART = "the two targets are at different positions"
REASONS = [
    ("a filter of the referenced table's publication", lake(parent={"row_filter": "(id > 1)"}), KEY,
     "no target holds all rows of public.p (public.p doesn't: its publication has a row filter)"),
    ("one that it had before", lake(parent={"later_filters": ["(id > 1)", "true"]}), KEY,
     "no target holds all rows of public.p (public.p doesn't: its publication has a row filter)"),
    ("the referenced target's own filter", lake(parent={"target_filter": "{}"}), KEY,
     "no target holds all rows of public.p (public.p doesn't: the target has a filter)"),
    ("a partition of it alone", lake(parent={"relation_ids": [12]}),
     replace(KEY, leaves=frozenset({12, 13})),
     "no target holds all rows of public.p (public.p doesn't: it holds one partition only)"),
    ("some of its partitions gathered", lake(parent={"relation_ids": [12], "root_id": 10}),
     replace(KEY, leaves=frozenset({12, 13})),
     "no target holds all rows of public.p (public.p doesn't: not all partitions are published)"),
    ("rows stay that an earlier filter let in", lake(child={"later_filters": ["true"]}), KEY,
     ("the row filter of public.c has changed since its copy, so the target may keep rows"
      " that no longer pass it")),
    ("deletes that aren't published", lake(child={"publishes": ["insert", "update", "truncate"]}),
     KEY, "the publications of public.c don't publish every delete"),
    ("a changelog without a key", lake(child={"mode": "changelog"}), KEY,
     "public.c keeps deleted rows, and has no key to find them by"),
    ("partitions that came or went", lake(parent={"unrepaired_leaves": [5]}), KEY,
     "partitions of public.p were added or removed since its copy"),
    ("no cut yet", replace(lake(), cut=None), KEY,
     f"{APART}: no batch has been applied to all targets yet"),
    ("a copy since", lake(child={"generation": 2}), KEY,
     f"{APART}: public.c was copied, or read again, since the last batch"),
    ("a copy ahead of the batch", lake(parent={"snapshot_lsn": 101}), KEY,
     f"{APART}: public.p was copied, or read again, since the last batch"),
    ("a batch that not all have", lake(changed={CHILD: ChangedTarget(5)}), KEY,
     f"{APART}: public.c has a batch that other targets lack"),
    ("a cut left behind", lake(beyond_cut=[PARENT]), KEY,
     f"{APART}: public.p has a batch that other targets lack"),
    ("rows read from the source", lake(read_again=[CHILD]), KEY,
     f"{APART}: rows of public.c were read from the source"),
    ("rows in quarantine", lake(lacking=[PARENT]), KEY,
     "public.p lacks rows that are, or were, in quarantine"),
    ("a column that isn't published", lake(), replace(KEY, referring=(KeyColumn(3, "q", 23),)),
     "public.c has no column q"),
    ("a name that is another column's by now", lake(),
     replace(KEY, referring=(KeyColumn(9, "p", 23),)), "public.c has no column p"),
    ("an operator of an extension", lake(), replace(KEY, obstacle="it compares by strangers"),
     "it compares by strangers"),
    ("values that may look different",
     lake(child={"columns": [ColumnState("p", 1700, -1, "numeric", "string", False, 2)]},
          parent={"columns": [ColumnState("id", 1700, -1, "numeric", "string", False, 1)]}),
     replace(KEY, referring=(KeyColumn(2, "p", 1700),), referenced=(KeyColumn(1, "id", 1700),)),
     "equal values may look different in the lake: p and id"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "key", "reason"), [c[1:] for c in REASONS], ids=[c[0] for c in REASONS]
)
def test_what_could_be_a_false_alarm_is_not_judged(known, key, reason):
    """A row without its partner is only told of where the partner must be there."""
    planned = [*plan_references([key], known)]
    assert planned == [(CHILD, f"foreign key fk: not checked, because {reason}")]


JUDGED = [
    ("of the same copy and cut", lake(), KEY, CHILD),
    ("the referring one filtered", lake(child={"row_filter": "(id > 1)", "target_filter": "{}"}),
     KEY, CHILD),
    ("all partitions gathered", lake(parent={"relation_ids": [12, 13], "root_id": 10}),
     replace(KEY, leaves=frozenset({12, 13})), CHILD),
    ("a referenced target that lost rows", lake(changed={PARENT: ChangedTarget(7, lost_rows=True)}),
     KEY, PARENT),
    ("a referenced target that only won rows",
     lake(changed={PARENT: ChangedTarget(7, lost_rows=False)}), KEY, None),
    ("a table that nothing is taken of", lake(), replace(KEY, referenced_id=99), None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "key", "told_of"), [c[1:] for c in JUDGED], ids=[c[0] for c in JUDGED]
)
def test_what_is_judged(known, key, told_of):
    """Both at the cut's versions; the target tells that the run has changed."""
    planned = dict(plan_references([key], known))
    assert [*planned] == ([told_of] if told_of else [])
    for reference in planned.values():
        assert tuple(side.target.version for side in reference.sides) == (4, 7)
        assert reference.lookup_key == (FOREIGN_KEY, CHILD, "fk")


@pytest.mark.parametrize(
    ("lost", "since"),
    [(False, 60), (True, None)],
    ids=["rows were only added", "rows of the other one may have gone"],
)
def test_touched_rows_suffice(lost, since):
    """While the target that is referred to has lost nothing."""
    known = lake(changed={CHILD: ChangedTarget(4, lost_rows=False), PARENT: ChangedTarget(7, lost)})
    ((_, reference),) = plan_references([KEY], known)
    assert restrict_to_changes(reference, 60, known).since == since


D = date(2026, 1, 1)
ROWS = [
    ("all found", [(1, "a ", D), (1, "a", D)], ("same", "padded", "same"), False, 0),
    ("nulls refer to nothing", [(None, "a", D), (3, None, None)], ("same", "padded", "same"), False,
     0),
    ("null in part breaks a whole key", [(None, "a", D), (None, None, None)],
     ("same", "padded", "same"), True, 1),
    ("one that isn't there, twice", [(1, "b", D), (1, "b", D), (2, "b", D)],
     ("same", "padded", "same"), False, 2),
    ("no rows", [], ("integer", "padded", "same"), False, 0),
    ("other integers", [(2, "b", D)], ("integer", "padded", "same"), False, 0),
    ("numbers are Spark's", [(1, "a", D)], ("number", "padded", "same"), False, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "comparisons", "whole", "orphans"), [c[1:] for c in ROWS], ids=[c[0] for c in ROWS]
)
def test_orphans_of_small_targets(tmp_path, rows, comparisons, whole, orphans):
    """Without Spark, as PostgreSQL counts them."""
    small, wide = pa.schema([("x", pa.int32()), ("y", pa.string()), ("z", pa.date32())]), pa.int64()
    there = pa.Table.from_pylist([{"x": 1, "y": "a   ", "z": D}, {"x": 2, "y": "b", "z": D}], small)
    if comparisons[0] == "integer":
        there = there.set_column(0, "x", there["x"].cast(wide))
    write_deltalake(str(tmp_path / "p"), there)
    own = pa.Table.from_pylist([dict(zip(small.names, row, strict=True)) for row in rows], small)
    write_deltalake(str(tmp_path / "c"), own)
    targets = [CheckedTarget(state(name, 1), 0, table_at(str(tmp_path / name))) for name in "cp"]
    sides = [Side(target, ("x", "y", "z")) for target in targets]
    reference = Reference("fk", *sides, comparisons, "c", whole=whole)
    versions = rows_to_compare(reference)
    found = rows_without_parent(reference, *versions) if versions else None
    assert (found.rows if found else None) == orphans
    assert found is None or bool(found.examples) == bool(found.rows)


def test_targets_that_are_not_small(tmp_path, monkeypatch):
    """Are Spark's."""
    write_deltalake(str(tmp_path), pa.table({"x": [1, 2]}))
    module = "waldelta.stages.check.measure.failing_rows"
    monkeypatch.setattr(f"{module}._MOST_COMPARED_ROWS", 1)
    side = Side(CheckedTarget(state("t", 1), 0, table_at(str(tmp_path))), ("x",))
    assert rows_to_compare(Reference("fk", side, side, ("same",), "t")) is None
