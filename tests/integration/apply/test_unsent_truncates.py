"""Whether a partition of a published root was truncated, by its file and its rows."""

from dataclasses import replace

import pytest

from waldelta.lake.ledger import TableState, now
from waldelta.pipeline.drift import read_catalog_state
from waldelta.pipeline.drift.unsent_changes import replaced_files, with_truncated
from waldelta.postgres.server_position import read_oldest_xid

DDL = """
create table t(id int primary key, v text) partition by range (id);
create table t_1 partition of t for values from (0) to (10);
create table t_2 partition of t for values from (10) to (20);
insert into t values (1, 'v'), (11, 'v');
"""


@pytest.fixture
def known(database, conn):
    """Makes the tables anew; the state of t, and the oid of its first partition."""

    def make():
        database.execute(f"drop table if exists t; {DDL}")
        ((oid, leaf),) = conn.execute(
            "select 'public.t'::regclass::oid::bigint, 'public.t_1'::regclass::oid::bigint"
        ).fetchall()
        publishes = ["insert", "truncate"]
        bare = TableState(
            now(), "r", "public.t", 1, "synced", relation_ids=[oid], publishes=publishes
        )
        return replace(bare, storage=read_catalog_state(conn, [bare])["public.t"].storage), leaf

    return make


def judged(conn, state, landed_as_of=None):
    present = read_catalog_state(conn, [state])
    found = with_truncated(conn, [state], present, landed_as_of)["public.t"]
    return found.truncated, replaced_files(state, found.storage)


# What is done, whether it looks like a TRUNCATE, whether a file is left that nothing explains.
TOLD = {
    "truncated": (["truncate t_1"], True, True),
    "truncated and filled": (["truncate t_1", "insert into t values (2, 'new')"], True, True),
    "unlogged for a while": (["alter table t_1 set unlogged", "alter table t_1 set logged"], True,
                             True),
    "written anew": (["vacuum full t_1"], False, True),
    "clustered after more rows": (["insert into t values (3, 'x')", "cluster t_1 using t_1_pkey"],
                                  False, True),
    "altered": (["alter table t alter v type text using v || 'x'"], False, False),
    "a column with values": (["alter table t add n float8 default random()"], False, False),
    "nothing": ([], False, False),
}  # fmt: skip


def test_by_its_file_and_its_rows(database, conn, known):
    for case, (statements, told, renewed) in TOLD.items():
        state, leaf = known()
        for statement in statements:
            database.execute(statement)
        assert judged(conn, state)[0] == ({leaf} if told else frozenset()), case
        assert (leaf in judged(conn, state)[1]) is renewed, case
        database.execute("vacuum freeze t_1")  # frozen rows keep what they were written by
        assert (leaf in judged(conn, state)[0]) is told, case


# What is done, and whether something else than a TRUNCATE of the whole table emptied it.
ALONE = {
    "the root": (["truncate t; insert into t values (2, 'new')"], False),
    "the root, in a savepoint": (["begin; savepoint a; truncate t; release a; commit"], False),
    "the root, then the partition": (["truncate t", "insert into t values (2, 'new')",
                                      "truncate t_1"], True),
    "the partition, then the root": (["truncate t_1", "insert into t values (2, 'new')",
                                      "truncate t"], False),
    "the root, then written anew": (["truncate t", "insert into t values (2, 'new')",
                                     "vacuum full t_1"], False),
}  # fmt: skip


def test_emptied_once_more(database, conn, known):
    """A TRUNCATE of the root is sent; what happens to a partition after it is not."""
    for case, (statements, alone) in ALONE.items():
        state, leaf = known()
        for statement in statements:
            database.execute(statement)
        found = with_truncated(conn, [state], read_catalog_state(conn, [state]))["public.t"]
        assert leaf in found.truncated, case
        assert found.truncated_alone == ({leaf} if alone else frozenset()), case


def test_only_what_had_ended_when_all_was_landed(database, conn, known):
    """A TRUNCATE of the root that hasn't landed looks the same: a later run decides."""
    state, leaf = known()
    before = read_oldest_xid(conn)
    database.execute("truncate t_1")
    assert judged(conn, state, before) == judged(conn, state, 0) == (frozenset(), [])
    assert judged(conn, state, read_oldest_xid(conn)) == ({leaf}, [leaf])


def test_what_may_not_be_read_is_not_told(database, conn, known):
    """A partition without a grant keeps its old file on record, and no run fails."""
    state, _ = known()
    database.execute("truncate t_1")
    database.execute(
        "drop role if exists reader_of_t; create role reader_of_t; grant select on t to reader_of_t"
    )
    conn.execute("set role reader_of_t")
    assert judged(conn, state) == (frozenset(), [])
    conn.execute("reset role")
    database.execute("revoke all on t from reader_of_t; drop role reader_of_t")
