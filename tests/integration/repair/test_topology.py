"""What the catalogs say of partitions: which targets it is about, and that nobody waits."""

from dataclasses import replace

import pytest

from waldelta.config import PipelineFile
from waldelta.config.pipeline_file import TargetTable
from waldelta.lake.ledger import TableState, now
from waldelta.pipeline.drift import read_catalog_state, with_leaves
from waldelta.pipeline.drift.drift import find_drift
from waldelta.pipeline.drift.record_drift import read_own_tables, reduce_to_leaves
from waldelta.pipeline.drift.unsent_changes import to_record
from waldelta.pipeline.targets import column_states
from waldelta.pipeline.targets.target_sources import read_target_sources, read_targets, to_text
from waldelta.postgres import connect
from waldelta.postgres.publication_checks import warn_of_refused_writes
from waldelta.postgres.publication_membership import to_texts
from waldelta.row_filter import RowFilter

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
    "a partition is truncated":
     (["truncate r_1"],
      {"r_1": "public.r_1 was probably truncated", "r": "public.r_1 was probably truncated"}),
    "one of a partition's own":
     (["truncate r_2b"],
      {"r_2": "public.r_2b was probably truncated", "r": "public.r_2b was probably truncated"}),
    "one that no target takes": (["truncate r_3"], {"r": "public.r_3 was probably truncated"}),
    "one goes": (["alter table r detach partition r_3"], {"r": "1 partition left the table"}),
    "one of a partition's own goes":
     (["alter table r_2 detach partition r_2a"],
      {"r_2": "1 partition left the table", "r": "1 partition left the table"}),
    "one comes": (["alter table r attach partition other for values from (40) to (50)"],
                  {"r": "other was added"}),
    "it goes and comes": (["alter table r detach partition r_1",
                           "alter table r attach partition r_1 for values from (0) to (10)"],
                          {"r_1": "public.r_1 was detached and attached again",
                           "r": "public.r_1 was detached and attached again"}),
    "one is made": (["create table r_4 partition of r for values from (50) to (60)"], {}),
    "one with partitions of its own comes":
     (["create table m(id int primary key) partition by range (id)",
       "create table m_1 partition of m for values from (60) to (70)", "insert into m values (61)",
       "alter table r attach partition m for values from (60) to (90)"],
      {"r": "partition public.m_1 was added"}),
    "one comes, and partitions of its own are made then":
     (["create table m(id int primary key) partition by range (id)",
       "alter table r attach partition m for values from (60) to (90)",
       "create table m_1 partition of m for values from (60) to (70)"], {}),
    "one is made with partitions of its own":
     (["begin", "create table m(id int primary key) partition by range (id)",
       "alter table r attach partition m for values from (60) to (90)",
       "create table m_1 partition of m for values from (60) to (70)", "commit"], {}),
    "one is detached for good, and another takes its place":
     (["alter table r_2 detach partition r_2a",
       "create table r_2c partition of r_2 for values from (10) to (20)"],
      {"r_2": "1 partition left the table", "r": "1 partition left the table"}),
}  # fmt: skip


@pytest.fixture
def file(database, lake):
    database.execute(DDL)
    source = {
        "conn_id": "test_source",
        "slot": "s",
        "publications": [{"name": "p", "manage": False}],
    }
    return PipelineFile.model_validate(
        {"pipeline": "s", "source": source, "target": {"root": lake, "tables": SPLIT}}
    )


def copied(conn, file):
    """What the ledger says after a copy of each target."""
    found = []
    for target in read_targets(conn, file):
        table, where = target.table, target.mapping.where
        state = TableState(
            now(),
            "r",
            str(target.id),
            1,
            "synced",
            relation_ids=list(table.relation_ids),
            publishes=sorted(table.publishes),
            columns=column_states(
                table.columns, table.key_columns, file.target.types_of(str(target.id))
            ),
            target_filter=to_text(RowFilter(where, where, ("id",)) if where else None),
            entries=to_texts(table.entries),
            key_columns=list(table.key_columns),
            root_id=target.mapping.root_id,
        )
        present = read_catalog_state(conn, [state])[state.table_name]
        kept = reduce_to_leaves(state, present, target.mapping)[1]
        found.append(replace(state, storage=kept.storage))
    return found


def look(conn, file, states):
    """What a run tells of each target, and the states that it records."""
    feeds = read_target_sources(conn, file)
    states = [with_leaves(state, feeds) for state in states]
    states, present = read_own_tables(conn, states, feeds)
    targets = {str(t.id): t for t in read_targets(conn, file, feeds, sizes=False)}
    found, recorded = {}, []
    for state in states:
        target, now_there = targets[state.table_name], present[state.table_name]
        drift = find_drift(file, state, now_there, target)
        found[state.table_name.removeprefix("public.")] = "; ".join(drift.reasons)
        known = replace(drift.state, storage=state.storage)
        recorded.append(to_record(known, now_there.storage, ()) or known)
    return {name: text for name, text in found.items() if text}, recorded


def told(conn, file, states):
    return look(conn, file, states)[0]


def test_only_the_target_whose_rows_a_partition_holds_is_told(database, conn, file):
    """Of targets that a root is split into, not all siblings."""
    for name, (statements, expected) in CASES.items():
        states = copied(conn, file)
        for statement in statements:
            database.execute(statement)
        found = told(conn, file, states)
        assert found.keys() == expected.keys(), (name, found)
        assert all(text in found[target] for target, text in expected.items()), (name, found)
        database.execute(
            f"drop publication p; drop table r; drop table if exists r_2a, r_3, other; {DDL}"
        )


GATHERED = {"public.r": TargetTable(partition_root=True)}

# How a gathered leaf is published, what takes it out and what puts it back in.
MADE_BEHIND_ITS_ENTRY = """
drop table r_2b; create schema s; create publication p for table r_1, r_2a, tables in schema s;
create table s.r_2b partition of r_2 for values from (20) to (30)
"""
LEFT = {
    "by its name": ("create publication p for table r_1, r_2a, r_2b",
                    "alter publication p drop table r_2b", "alter publication p add table r_2b"),
    "by its schema": (MADE_BEHIND_ITS_ENTRY, "alter table s.r_2b set schema public",
                      "alter table r_2b set schema s"),
    "by its root": ("create publication p for table r", "alter table r_2 detach partition r_2b",
                    "alter table r_2 attach partition r_2b for values from (20) to (30)"),
}  # fmt: skip


@pytest.mark.parametrize("publication, leaves, returns", LEFT.values(), ids=LEFT)
def test_a_gathered_leaf_that_leaves_its_publication_and_returns(
    database, conn, file, publication, leaves, returns
):
    """Each is told once; what the target recorded is what a snapshot of the source shows then."""
    file = file.model_copy(update={"target": file.target.model_copy(update={"tables": GATHERED})})
    database.execute(f"drop publication p; {publication}")
    (state,) = copied(conn, file)
    found = []
    for statement in ["select", leaves, "select", returns, "select"]:
        database.execute(statement)
        told_now, (state,) = look(conn, file, [state])
        found.append(told_now.get("r", ""))
        (target,) = [t for t in read_targets(conn, file) if str(t.id) == "public.r"]
        assert {file.oid for file in state.storage.files} == {
            leaf.oid for leaf in target.table.leaves
        }
    assert found[:3] == ["", "1 partition left the table; their rows stay in the target", ""]
    assert "r_2b was added; PostgreSQL did not send the rows that it already had" in found[3]
    assert found[4] == ""


def test_a_leaf_that_stayed_on_record_when_it_left_comes_anew(database, conn, file):
    """Its leaving was told, but its file stayed on record, so nothing told when it was back."""
    file = file.model_copy(update={"target": file.target.model_copy(update={"tables": GATHERED})})
    database.execute("drop publication p; create publication p for table r_1, r_2a")
    (state,) = copied(conn, file)
    database.execute("alter publication p add table r_2b")
    feed = read_target_sources(conn, file)["public.r"]
    whole = read_catalog_state(conn, [replace(state, relation_ids=sorted(feed.relation_ids))])[
        "public.r"
    ].storage
    assert "r_2b was added" in told(conn, file, [replace(state, storage=whole)])["r"]


def test_a_partition_that_somebody_has_locked_is_not_waited_for(database, file):
    """A look asks the catalogs alone, however long an ALTER or a TRUNCATE of a partition takes."""
    whole = file.model_copy(update={"target": file.target.model_copy(update={"tables": {}})})
    with connect(database.conninfo, "test") as conn, database.connect() as other:
        states = copied(conn, whole)
        other.execute("lock table r_1, r_2a in access exclusive mode")
        conn.execute("set statement_timeout = '2s'")
        assert told(conn, whole, states) == {}
        assert warn_of_refused_writes(conn, ["p"]) == []
