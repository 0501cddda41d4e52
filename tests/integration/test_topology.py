"""What a look at the catalogs says of partitions: of which targets it tells, and that it waits for nobody."""

from __future__ import annotations

from dataclasses import replace

import pytest

from waldelta.connection import connect
from waldelta.drift import find_drift
from waldelta.emptied import with_emptied
from waldelta.leaves import of_partition
from waldelta.ledger import TableState, now
from waldelta.membership import to_texts
from waldelta.pipeline_file import PipelineFile
from waldelta.present import read_present
from waldelta.refused_statements import refused_statements
from waldelta.row_filter import RowFilter
from waldelta.target_filter import column_states, to_text
from waldelta.targets import read_feeds, read_targets

pytestmark = pytest.mark.pg

DDL = """
create table r(id int primary key) partition by range (id);
create table r_1 partition of r for values from (0) to (10);
create table r_2 partition of r for values from (10) to (30) partition by range (id);
create table r_2a partition of r_2 for values from (10) to (20);
create table r_2b partition of r_2 for values from (20) to (30);
create table r_3 partition of r default;
insert into r values (1), (11), (21), (31);
create table other(id int primary key); insert into other values (41);
create publication p for table r with (publish_via_partition_root = true)
"""
SPLIT = {"public.r_1": {"from": "public.r"}, "public.r_2": {"from": "public.r"}, "public.r": {}}

# What is done, and which targets are told what.
CASES = {
    "nothing": ([], {}),
    "a partition is truncated": (["truncate r_1"], {"r_1": "public.r_1 was truncated", "r": "public.r_1 was truncated"}),
    "one of a partition's own": (["truncate r_2b"], {"r_2": "public.r_2b was truncated", "r": "public.r_2b was truncated"}),
    "one that no target takes": (["truncate r_3"], {"r": "public.r_3 was truncated"}),
    "one goes": (["alter table r detach partition r_3"], {"r": "1 partition went"}),
    "one of a partition's own goes": (["alter table r_2 detach partition r_2a"], {"r_2": "1 partition went", "r": "1 partition went"}),
    "one comes": (["alter table r attach partition other for values from (40) to (50)"], {"r": "other came"}),
    "it goes and comes": (
        ["alter table r detach partition r_1", "alter table r attach partition r_1 for values from (0) to (10)"],
        {"r_1": "public.r_1 was detached and attached again", "r": "public.r_1 was detached and attached again"},
    ),
    "one is made": (["create table r_4 partition of r for values from (50) to (60)"], {}),
    "one is detached for good, and another takes its place": (
        ["alter table r_2 detach partition r_2a", "create table r_2c partition of r_2 for values from (10) to (20)"],
        {"r_2": "1 partition went", "r": "1 partition went"},
    ),
}  # fmt: skip


@pytest.fixture
def file(database, lake):
    database.execute(DDL)
    source = {"conn_id": "test_source", "slot": "s", "publications": [{"name": "p", "manage": False}]}
    return PipelineFile.model_validate({"pipeline": "s", "source": source, "target": {"root": lake, "tables": SPLIT}})


def copied(conn, file, *, whole_root=False):
    """What the ledger says after a copy of each target; ``whole_root``: as earlier versions recorded it."""
    found = []
    for target in read_targets(conn, file):
        table, where = target.table, target.feed.where
        state = TableState(
            now(), "r", str(target.id), 1, "synced", relation_ids=list(table.relation_ids), publishes=sorted(table.publishes),
            columns=column_states(table.columns, table.key_columns, file.target.types_of(str(target.id))),
            target_filter=to_text(RowFilter(where, where, ("id",)) if where else None), entries=to_texts(table.entries),
        )  # fmt: skip
        present = read_present(conn, [state])[state.table_name]
        kept = present if whole_root else of_partition(state, present, target.feed)[1]
        found.append(replace(state, storage=kept.storage))
    return found


def told(conn, file, states):
    feeds, there = read_feeds(conn, file), read_present(conn, states)
    narrowed = [of_partition(state, there[state.table_name], feeds[state.table_name]) for state in states]
    targets = {str(t.id): t for t in read_targets(conn, file, feeds, sizes=False)}
    present = with_emptied(conn, [state for state, _ in narrowed], {s.table_name: p for s, p in narrowed})
    found = {}
    for state, _ in narrowed:
        target = targets[state.table_name]
        if drift := find_drift(file, state, target.table, present[state.table_name], target.feed):
            found[state.table_name.removeprefix("public.")] = "; ".join(drift.reasons)
    return {name: text for name, text in found.items() if text}


@pytest.mark.parametrize("whole_root", [False, True], ids=["", "recorded by an earlier version"])
def test_only_the_target_whose_rows_a_partition_holds_is_told(database, file, whole_root):
    """Of targets that a root is split into, not all siblings."""
    with connect(database.conninfo, "test") as conn:
        for name, (statements, expected) in CASES.items():
            if whole_root and any("detach" in statement for statement in statements):
                continue  # whose it was, such a record doesn't say
            states = copied(conn, file, whole_root=whole_root)
            for statement in statements:
                database.execute(statement)
            found = told(conn, file, states)
            assert found.keys() == expected.keys(), (name, found)
            assert all(text in found[target] for target, text in expected.items()), (name, found)
            database.execute(f"drop publication p; drop table r; drop table if exists r_2a, r_3, other; {DDL}")


def test_a_partition_that_somebody_has_locked_is_not_waited_for(database, file):
    """A look asks the catalogs alone, however long an ALTER or a TRUNCATE of a partition takes."""
    whole = file.model_copy(update={"target": file.target.model_copy(update={"tables": {}})})
    with connect(database.conninfo, "test") as conn, database.connect() as other:
        states = copied(conn, whole)
        other.execute("lock table r_1, r_2a in access exclusive mode")
        conn.execute("set statement_timeout = '2s'")
        assert told(conn, whole, states) == {}
        assert refused_statements(conn, ["p"]) == []
