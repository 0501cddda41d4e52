"""Tables whose own UPDATEs and DELETEs PostgreSQL refuses after a later change."""

import psycopg
import pytest

from tests.support.pipelines import job_for
from waldelta.postgres.publication_checks import warn_of_refused_writes
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup.setup import apply_setup


def test_tables_that_lose_their_key_later(any_database, any_conn, lake, caplog):
    """Or never had one, under FOR ALL TABLES: their own statements fail, and each look says so."""
    any_database.execute(
        "create table t (id int primary key, v int);"
        " create table r (id int primary key) partition by range (id); create table r1"
        " partition of r default"
    )
    slot = f"s_{any_database.name}"
    job = job_for(
        any_database,
        lake,
        {"name": "p", "all_tables": True, "accept_future_tables": True},
        slot=slot,
    )
    apply_setup(any_conn, job)
    assert warn_of_refused_writes(any_conn, ["p"]) == []
    any_database.execute(
        "create table later (id int); create unique index u on t (v) nulls not distinct; alter"
        " table t alter v set not null;alter table t replica identity using index u; drop index"
        " u; create table named (id int primary key deferrable);alter table r replica identity"
        " full; alter table r1 replica identity nothing"
    )
    check_idle(job)
    said = caplog.text
    for table in ("later", "t", "named", "r1"):
        assert f"public.{table} (p)" in said
        any_database.execute(
            f"insert into {table} values (1)" if table != "t" else "insert into t values (1, 1)"
        )
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            any_database.execute(f"delete from {table}")
    assert "public.r (p)" not in said


def refused_by_postgres(database, statement, tables):
    """The tables whose statement fails because of the publications."""
    found = set()
    for table in tables:
        try:
            database.execute(statement.format(table))
        except psycopg.errors.InvalidColumnReference:
            found.add(table)
    return found


SHRUNKEN = {
    "t1": "create table {0} (id int primary key, v int); alter table {0} replica identity full",
    "t2": "create table {0} (id int primary key, v int)",
    "t3": "create table {0} (id int primary key, v int)",
    "t4": (
        "create table {0} (id int primary key, v int not null unique, w int not null unique); alter"
        " table {0} replica identity using index {0}_v_key"
    ),
    "t5": "create table {0} (id int primary key, v int); alter table {0} replica identity full",
}


def test_identities_that_shrink_later(any_database, any_conn):
    """PostgreSQL's own answer to an UPDATE judges filters and column lists."""
    for name, ddl in SHRUNKEN.items():
        any_database.execute(ddl.format(name))
    any_database.execute(
        "create table r (id int primary key, v int) partition by range (id);create table r0 (v int,"
        " id int primary key); alter table r attach partition r0 for values from (0) to (10);create"
        " table r1 partition of r default; alter table r0 replica identity full; alter table r1"
        " replica identity full;create publication p for table t1 where (v > 1), t2 (id), t3 (id)"
        " where (id > 1), t4 (id, v), t5 where (v > 1), r where (v > 1) with"
        " (publish_via_partition_root);create publication leaves for table r1 (id, v) where (id >"
        " 1) with (publish = 'insert');create publication q for table r where (id > 1), r1 where (v"
        " = 3) with (publish_via_partition_root)"
    )
    leaves = [*SHRUNKEN, "r0", "r1"]

    def judged(conn):
        text = " ".join(warn_of_refused_writes(conn, ["p", "leaves", "q"]))
        told = {leaf for leaf in leaves if f"public.{leaf} (" in text}
        assert told == refused_by_postgres(any_database, "update {} set id = id", leaves)
        return told

    assert judged(any_conn) == set()
    any_database.execute(
        "alter table t1 replica identity default; alter table t2 replica identity full;alter"
        " table t4 replica identity using index t4_w_key; alter table r0 replica identity"
        " default"
    )
    assert judged(any_conn) == {"t1", "t2", "t4", "r0"}


_GENERATED = "create table {0} (id int primary key, g int generated always as (id * 2)"
GENERATED = {
    "g1": f"{_GENERATED} stored)",
    "g2": f"{_GENERATED} stored)",
    "g3": f"{_GENERATED} virtual)",
    "g4": f"{_GENERATED} stored not null unique)",
    "g5": f"{_GENERATED} stored not null unique)",
    "g6": f"{_GENERATED} stored)",
    "g7": "create table {0} (id int primary key)",
    "gs.g8": f"{_GENERATED} virtual)",
    "g9": f"{_GENERATED} stored) partition by range (id);create table g9_1 partition of g9 default",
}


def test_generated_columns_that_enter_an_identity_later(any_database, any_conn):
    """From 18 on an identity may hold no unpublished generated column."""
    is_18 = any_database.connection.info.server_version >= 180000
    any_database.execute("create schema gs")
    for name, ddl in GENERATED.items():
        any_database.execute(
            ddl.format(name) if is_18 else ddl.format(name).replace("virtual", "stored")
        )
    stored = " with (publish_generated_columns = stored)" if is_18 else ""
    any_database.execute(
        "create publication p for table g1, g4, g7; create publication schema for tables in schema"
        f" gs;create publication stored for table g2, g3{stored};create publication inserts for"
        " table g6 with (publish = 'insert');create publication root for table g9 with"
        " (publish_via_partition_root)"
        + ("; create publication listed for table g5 (id, g)" if is_18 else "")
    )
    leaves = ["g1", "g2", "g3", "g4", "g5", "g6", "g7", "gs.g8", "g9_1"]
    publications = ["p", "schema", "stored", "listed", "inserts", "root"]

    def judged(conn):
        text = " ".join(
            line for name in publications for line in warn_of_refused_writes(conn, [name])
        )
        names = {leaf if "." in leaf else f"public.{leaf}": leaf for leaf in leaves}
        told = {leaf for name, leaf in names.items() if f"{name} (" in text}
        assert told == refused_by_postgres(any_database, "delete from {} where id = 0", leaves)
        return told

    assert judged(any_conn) == set()
    full = "".join(
        f"alter table {leaf} replica identity full;" for leaf in leaves if leaf not in ("g4", "g5")
    )
    any_database.execute(
        f"{full} alter table g4 replica identity using index g4_g_key; alter table g5 replica"
        " identity using index g5_g_key;alter table g7 add g int generated always as (id * 2)"
        " stored"
    )
    expected = {"g1", "g3", "g4", "g7", "gs.g8", "g9_1"} if is_18 else set()
    assert judged(any_conn) == expected
