"""Tables whose own UPDATEs and DELETEs PostgreSQL refuses since something changed under their publication."""

from __future__ import annotations

import psycopg
import pytest

from tests.integration.test_preflight import PLAIN
from tests.integration.test_setup import job_for
from waldelta.connection import connect
from waldelta.idle import look
from waldelta.refused_statements import refused_statements
from waldelta.setup import apply_setup

pytestmark = pytest.mark.pg


def test_tables_that_lose_their_key_later(any_database, lake, caplog):
    """Or never had one, under FOR ALL TABLES: their own statements fail, and each look says so."""
    any_database.execute(
        f"{PLAIN}; create table r (id int primary key) partition by range (id); create table r1 partition of r default"
    )
    slot = f"s_{any_database.name}"
    with connect(any_database.conninfo, "test") as conn:
        job = job_for(
            any_database.conninfo, lake, {"name": "p", "all_tables": True, "accept_future_tables": True}, slot=slot
        )
        apply_setup(conn, job)
        assert refused_statements(conn, ["p"]) == []
        any_database.execute(
            "create table later (id int); create unique index u on t (v) nulls not distinct; alter table t alter v set not null;"
            "alter table t replica identity using index u; drop index u; create table named (id int primary key deferrable);"
            "alter table r replica identity full; alter table r1 replica identity nothing"
        )
        look(job)
        said = caplog.text
    for table in ("later", "t", "named", "r1"):
        assert f"public.{table} (p)" in said
        any_database.execute(f"insert into {table} values (1)" if table != "t" else "insert into t values (1, 1)")
        with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState):
            any_database.execute(f"delete from {table}")
    assert "public.r (p)" not in said


SHRUNKEN = {
    "t1": "create table {0} (id int primary key, v int); alter table {0} replica identity full",
    "t2": "create table {0} (id int primary key, v int)",
    "t3": "create table {0} (id int primary key, v int)",
    "t4": "create table {0} (id int primary key, v int not null unique, w int not null unique); alter table {0} replica identity using index {0}_v_key",
    "t5": "create table {0} (id int primary key, v int); alter table {0} replica identity full",
}  # fmt: skip


def test_identities_that_shrink_later(any_database):
    """Whether a filter and a column list still lie within them: PostgreSQL's own answer to an UPDATE is the judge."""
    for name, ddl in SHRUNKEN.items():
        any_database.execute(ddl.format(name))
    any_database.execute(
        "create table r (id int primary key, v int) partition by range (id);"
        "create table r0 (v int, id int primary key); alter table r attach partition r0 for values from (0) to (10);"
        "create table r1 partition of r default; alter table r0 replica identity full; alter table r1 replica identity full;"
        "create publication p for table t1 where (v > 1), t2 (id), t3 (id) where (id > 1), t4 (id, v), t5 where (v > 1), r where (v > 1)"
        " with (publish_via_partition_root);"
        "create publication leaves for table r1 (id, v) where (id > 1) with (publish = 'insert');"
        "create publication q for table r where (id > 1), r1 where (v = 3) with (publish_via_partition_root)"
    )
    leaves = [*SHRUNKEN, "r0", "r1"]

    def refused_by_postgres():
        found = set()
        for leaf in leaves:
            try:
                any_database.execute(f"update {leaf} set id = id")
            except psycopg.errors.InvalidColumnReference:
                found.add(leaf)
        return found

    def told(conn):
        text = " ".join(refused_statements(conn, ["p", "leaves", "q"]))
        return {leaf for leaf in leaves if f"public.{leaf} (" in text}

    with connect(any_database.conninfo, "test") as conn:
        assert told(conn) == refused_by_postgres() == set()
        any_database.execute(
            "alter table t1 replica identity default; alter table t2 replica identity full;"
            "alter table t4 replica identity using index t4_w_key; alter table r0 replica identity default"
        )
        assert told(conn) == refused_by_postgres() == {"t1", "t2", "t4", "r0"}
