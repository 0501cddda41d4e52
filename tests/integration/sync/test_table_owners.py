"""A table's owner writes functions that PostgreSQL calls as whoever plans a query of the table."""

from contextlib import contextmanager

import psycopg
import pyarrow as pa
import pytest
from deltalake import write_deltalake
from psycopg import sql

from tests.support.pipelines import pipeline_file
from tests.support.servers.called_functions import SAY_CALLED, calls
from tests.support.servers.roles import connect_as, new_role
from waldelta.cli.command_line import main
from waldelta.errors import ConfigError, SnapshotLost
from waldelta.jobs import Pipeline
from waldelta.lake import Lake
from waldelta.postgres import TableId, connect
from waldelta.postgres.published_tables import read_published_tables
from waldelta.row_filter import refused_filter, resolve_filter
from waldelta.snapshot.chunks import plan_chunks
from waldelta.snapshot.exported_snapshot import SnapshotHolder
from waldelta.snapshot.read_table import plan_copy, read_chunks
from waldelta.snapshot.source_columns import is_one_of, key_columns
from waldelta.stages.repair._repair_rows import estimate_rows

# An immutable function of the owner. It says as which role it was called.
TABLES = f"""
create schema app authorization {{owner}};
set role {{owner}};
create function app.seen(int) returns int immutable language plpgsql as $$
begin
    {SAY_CALLED}
    return $1;
end $$;
create table app.t (id int primary key, n int);
insert into app.t select n, n from generate_series(1, 1000) n;
"""
PLANNED = {
    "index predicate": "create index i on app.t (id) where app.seen(1) = 1",
    "index expression": "create index i on app.t ((app.seen(1)))",
    "extended statistics": "create statistics app.s on (app.seen(1) + id) from app.t",
    "partition key": (
        "drop table app.t; create table app.t (id int, n int) partition by range ((id +"
        " app.seen(1))); create table app.t_1 partition of app.t default; insert into app.t"
        " values (1, 1)"
    ),
}


@contextmanager
def table_owner(database):
    """A role with a table and a function; the test's connection is that role's."""
    with new_role(database, "app") as role:
        database.execute(TABLES.format(owner=role))
        yield role


@pytest.fixture
def owner(database):
    with table_owner(database) as role:
        yield role


@pytest.fixture
def any_owner(any_database):
    with table_owner(any_database) as role:
        yield role


@pytest.mark.parametrize("where", PLANNED)
def test_a_superuser_plans_no_query_of_the_table(
    database, owner, lake, monkeypatch, tmp_path, where
):
    """By check, init and repair; whoever plans one calls the function."""
    for statement in PLANNED[where].split("; "):
        database.execute(statement)
    database.execute("analyze app.t")
    database.execute("reset role")
    with calls(database) as seen, database.connect() as session:
        session.execute("explain select from app.t where id > 5 and n > 5")
        session.commit()
    assert set(seen) == {"postgres"}, "PostgreSQL doesn't call it: this test shows nothing"
    slot = f"s_{database.name}"
    monkeypatch.chdir(tmp_path)
    with calls(database) as seen:
        publication = {"name": "p", "tables": [{"name": "app.t", "where": "id > 5"}]}
        publication["publish"] = ["insert"]
        source = {"conn_id": "test_source", "slot": slot, "publications": [publication]}
        target = {"root": lake, "tables": {"app.t": {"where": "n > 5"}}}
        plan = Pipeline(pipeline_file(lake, slot, source=source, target=target)).check()
        assert main(["init", "test_source", "--yes", "--output", "p.yml"]) == 0
        write_deltalake(f"{lake}/app/t", pa.table({"id": range(1000)}))
        rows = [sql.SQL("select from app.t where id > {}").format(least) for least in (0, 990)]
        with database.connect() as session:
            assert estimate_rows(session, Lake(lake).target("app.t"), rows) == [1000, 0]
    assert seen == []
    assert any("role postgres is a superuser" in text for text in plan.warnings)
    assert any("uses app.seen(integer) of role" in text for text in plan.warnings)


USES = {
    "create index i on app.t (id) where app.seen(id) = 1": "index app.i uses app.seen(integer)",
    "create index i on app.t ((app.seen(id)))": "index app.i uses app.seen(integer)",
    "create statistics app.s on (app.seen(id)), id from app.t": (
        "statistics app.s uses app.seen(integer)"
    ),
    "alter table app.t add constraint c check (app.seen(id) > 0)": (
        "constraint c uses app.seen(integer)"
    ),
    "create domain app.d as int check (app.seen(value) > 0); alter table app.t add v app.d[]": (
        "domain app.d uses app.seen(integer)"
    ),
    "alter table app.t add v int generated always as (app.seen(id)) stored": (
        "generated column v uses app.seen(integer)"
    ),
    "create policy p on app.t using (app.seen(id) > 0)": "policy p uses app.seen(integer)",
    (
        "create function app.less(int, text) returns bool immutable language sql as 'select true';"
        " create operator app.<<< (function = app.less, leftarg = int, rightarg = text);"
        " create index i on app.t (id) where id operator(app.<<<) 'x'"
    ): "index app.i uses app.less(integer,text)",
}


def test_check_lists_the_functions_of_a_tables_owner(database, owner, lake, monkeypatch):
    """Each as the role that reads meets it; PostgreSQL's own and the reader's aren't listed."""
    slot = f"s_{database.name}"
    database.execute("reset role")
    with new_role(database, "reader") as reader:
        database.execute(f"set role {owner}")
        database.execute(
            f"grant usage on schema app to {reader}; grant select on app.t to {reader}"
        )
        connect_as(monkeypatch, database, reader)
        pipeline = Pipeline(pipeline_file(lake, slot, ["app.t"]))
        database.execute("create index plain on app.t (lower(n::text)) where abs(id) > 1")
        assert not [text for text in pipeline.check().warnings if "uses" in text]
        for statements, told in USES.items():
            database.execute("begin")
            for statement in statements.split("; "):
                database.execute(statement)
            database.execute("commit")
            (found,) = [text for text in pipeline.check().warnings if " uses " in text]
            assert f"table app.t: {told} of role {owner}: PostgreSQL calls" in found
            assert f"as role {reader} when" in found
            database.execute("drop index if exists app.i; drop statistics if exists app.s")
            database.execute(
                "drop policy if exists p on app.t; drop domain if exists app.d cascade"
            )
            database.execute("alter table app.t drop constraint if exists c")
            database.execute("alter table app.t drop column if exists v")


KEYS = {
    "create table app.k (id app.d primary key); insert into app.k values (1)": ("1", True),
    "create table app.k (id app.d[] primary key); insert into app.k values ('{1}')": ("{1}", False),
    ("create type app.c as (v app.d); create table app.k (id app.c primary key);"
     " insert into app.k values (row(1))"): ("(1)", False),
    ("create type app.r as range (subtype = app.d); create table app.k (id app.r primary key);"
     " insert into app.k values ('[1,2)')"): ("[1,2)", False),
}  # fmt: skip


@pytest.mark.parametrize("statements", KEYS)
def test_no_domain_is_checked_when_rows_are_read_by_their_keys(any_database, any_owner, statements):
    """An index finds the rows, where a cast to a base type is possible."""
    database, (text, by_index) = any_database, KEYS[statements]
    database.execute("create domain app.d as int check (app.seen(value) > 0)")
    for statement in statements.split("; "):
        database.execute(statement)
    database.execute("reset role")
    database.execute("create publication p for table app.k")
    with connect(database.conninfo, "test") as conn:
        (table,) = read_published_tables(conn, ["p"])
        (column,) = table.columns
        with calls(database) as seen:
            conn.execute(f"select '{text}'::text::{column.type.name}")
        assert seen, "PostgreSQL doesn't check the domain: this test shows nothing"
        condition = is_one_of(key_columns(table, ["id"]), [pa.array([text, text])])
        query = sql.SQL("select from app.k where {}").format(condition)
        conn.execute("set enable_seqscan = off")
        with calls(database) as seen:
            assert conn.execute(query).rowcount == 1
            plan = "\n".join(line for (line,) in conn.execute(sql.SQL("explain ") + query))
        assert (seen, "Index" in plan and "Index Cond" in plan) == ([], by_index)


FILTERS = (
    "app.seen(1) = 1", "id operator(app.<<<) 1", "1::app.d > id", "app.seen(id) > id",
    "'{1}'::app.d[] is not null", "row(1)::app.c is not null", "'(1)'::app.c is not null",
    "array['1']::app.d[] is not null", "cast('{1}' as app.d[]) is not null", "app.d '1' > id",
)  # fmt: skip


def test_a_filter_calls_no_users_function_before_it_is_refused(any_database, any_owner):
    """Whoever writes a pipeline file has rights in the lake, and none on the source."""
    database = any_database
    database.execute(
        "create function app.less(int, int) returns bool immutable language plpgsql as $$ begin"
        " return app.seen($1) < $2; end $$;"
        " create operator app.<<< (function = app.less, leftarg = int, rightarg = int);"
        " create domain app.d as int check (app.seen(value) > 0); create type app.c as (v app.d)"
    )
    database.execute("reset role")
    table, called = TableId("app", "t"), 0
    with connect(database.conninfo, "test") as conn:
        for text in FILTERS:
            with calls(database) as seen:
                conn.execute(f"explain select from app.t where ({text})".encode())
            called += bool(seen)
            with calls(database) as seen:
                for analysed_by in (resolve_filter, refused_filter):
                    with pytest.raises(ConfigError):
                        analysed_by(conn, table, text)
            assert seen == [], text
    assert called, "PostgreSQL calls none of them: this test shows nothing"


def test_no_view_is_read_in_a_tables_place(any_database, any_owner):
    """Its functions would be called as the reader, whatever was locked before."""
    database = any_database
    database.execute("reset role; create publication p for table app.t")
    with SnapshotHolder(database.conninfo, "test") as holder:
        (table,) = read_published_tables(holder.connection, ["p"])
        files = holder.relfilenodes([leaf.oid for leaf in table.stored_leaves])
        copy = plan_copy(table, holder.snapshot_id, files, None)
        (chunk,) = plan_chunks(table.stored_leaves, 1 << 20)
        database.execute(f"set role {any_owner}; alter table app.t rename to u")
        database.execute("create view app.t as select id, app.seen(n) as n from app.u; reset role")
        with calls(database) as seen, database.connect() as session:
            session.execute("select n from only app.t limit 1")
            session.commit()
        assert seen, "PostgreSQL doesn't call it: this test shows nothing"
        with calls(database) as seen, pytest.raises(SnapshotLost, match="was altered, renamed or"):
            list(read_chunks(database.conninfo, copy, [chunk], "test"))
        assert seen == []


def test_a_table_with_a_foreign_partition_is_copied(any_database):
    """Sessions refuse to read views, and no other relation that isn't the server's own."""
    database = any_database
    database.execute(
        "create table t (id int) partition by range (id); create table t1 partition of"
        " t for values from (0) to (10); create foreign data wrapper w; create server s foreign"
        " data wrapper w; create foreign table t2 partition of t for values from (10) to (20)"
        " server s; insert into t values (1)"
    )
    database.execute("create publication p for table t with (publish_via_partition_root)")
    with SnapshotHolder(database.conninfo, "test") as holder:
        (table,) = read_published_tables(holder.connection, ["p"])
        files = holder.relfilenodes([leaf.oid for leaf in table.stored_leaves])
        copy = plan_copy(table, holder.snapshot_id, files, None)
        chunks = plan_chunks(table.stored_leaves, 1 << 20)
        batches = list(read_chunks(database.conninfo, copy, chunks, "test"))
        assert [batch["id"].to_pylist() for batch in batches] == [[1]]
        with pytest.raises(psycopg.Error, match='foreign-data wrapper "w" has no handler'):
            holder.connection.execute("select from only public.t2")


def test_setup_runs_event_triggers_that_read_views(database, owner, lake):
    """Only reading is restricted: a trigger of the server's own may read what it needs."""
    database.execute("reset role")
    database.execute("create table audit (tag text); create view audited as select * from audit")
    database.execute(
        "create function note() returns event_trigger language plpgsql as $$ begin insert into"
        " public.audit select tg_tag from (select count(*) from public.audited) as n; end $$;"
        " create event trigger note on ddl_command_end execute function note()"
    )
    slot = f"s_{database.name}"
    target = {"root": lake, "tables": {"app.t": {"where": "n > 5"}}}
    database.execute("alter table app.t replica identity full")
    pipeline = Pipeline(pipeline_file(lake, slot, ["app.t"], target=target))
    assert pipeline.check().problems == ()
    pipeline.setup()
    assert ("CREATE PUBLICATION",) in database.execute("select tag from audit")
