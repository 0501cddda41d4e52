"""Bad sources: a named error each, nothing changed; PostgreSQL is the oracle."""

import uuid
from dataclasses import replace

import psycopg
import pytest

from tests.support.fixtures.postgres import new_database
from tests.support.pipelines import beside_superuser, job_for, source_state
from waldelta.config.pipeline_file import Target
from waldelta.errors import PreflightFailed, TargetNotWritable
from waldelta.postgres import connect
from waldelta.postgres.publication_checks import warn_of_refused_writes
from waldelta.postgres.published_tables import read_published_relations, read_published_tables
from waldelta.stages.setup.facts import source_facts
from waldelta.stages.setup.preflight.source import WITHIN_UTF8
from waldelta.stages.setup.setup import apply_setup, plan_setup, teardown

T = {"name": "public.t"}
PLAIN = "create table t (id int primary key, v int)"
NO_KEY = "create table t (id int, v int)"
INDEXED = (
    "create table t (id int primary key, u int not null, v int); create unique index t_u on t (u);"
)
ROOT = (
    "create table t (id int primary key, v int) partition by range (id);"
    "create table t1 partition of t for values from (0) to (10);"
)


@pytest.fixture
def job(database, lake):
    """A run of a pipeline that publishes t."""
    return job_for(database, lake, {"name": "p", "tables": [T]})


def refused(database, conn, job):
    """The problems, after making sure that nothing was changed."""
    before = source_state(database)
    with pytest.raises(PreflightFailed) as caught:
        apply_setup(conn, job)
    assert source_state(database) == before
    return "\n".join(caught.value.problems)


# Tables whose own UPDATE fails once they are published.
BREAKING = [
    (NO_KEY, {}, {}, "no primary key"),
    (f"{PLAIN}; alter table t replica identity nothing", {}, {}, "identity is nothing"),
    ("create table t (id int primary key deferrable, v int)", {}, {}, "key is deferrable"),
    (INDEXED + "alter table t replica identity using index t_u; drop index t_u", {}, {},
     "the index of its replica identity was dropped"),
    (PLAIN, {"where": "v > 0"}, {}, "filter uses v, which the replica identity (id)"),
    (PLAIN, {"where": "v > 0", "columns": ["id", "v"]}, {}, "filter uses v,"),
    (INDEXED + "alter table t replica identity using index t_u", {"where": "id > 0"}, {},
     "filter uses id, which the replica identity (u)"),
    (PLAIN, {"columns": ["v"]}, {}, "column list lacks id"),
    (f"{PLAIN}; alter table t replica identity full", {"columns": ["id", "v"]}, {},
     "can't be combined with REPLICA IDENTITY FULL"),
    (ROOT + "alter table t1 replica identity nothing", {}, {"publish_via_partition_root": True},
     "partition public.t1: it has no primary key"),
    (ROOT, {"where": "v > 0"}, {"publish_via_partition_root": True}, "filter uses v,"),
]  # fmt: skip


def begin_again(database, ddl):
    """Replace everything in the database by these tables."""
    database.execute("drop publication if exists p; drop schema public cascade")
    database.execute(f"create schema public; {ddl}")


@pytest.mark.parametrize(
    "operation",
    ["update", pytest.param("delete", marks=pytest.mark.nightly("the other refused operation"))],
)
def test_publications_that_would_break_the_application(database, conn, lake, operation):
    """Refused with update or delete, accepted without; PostgreSQL agrees about both."""
    for ddl, table, publication, problem in BREAKING:
        begin_again(database, ddl)
        entry = {"name": "p", "tables": [T | table], **publication}
        job = job_for(database, lake, entry | {"publish": ["insert", operation]})
        assert problem in refused(database, conn, job)
        for statement in plan_setup(conn, job).statements:
            database.execute(statement.text())
        with pytest.raises(
            (psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.InvalidColumnReference)
        ):
            database.execute("update t set v = 1" if operation == "update" else "delete from t")
        database.execute("drop publication p")
        harmless = job_for(database, lake, entry | {"publish": ["insert", "truncate"]})
        apply_setup(conn, harmless)
        database.execute("update t set v = 1; delete from t")
        teardown(conn, harmless)


HARMLESS = [
    (PLAIN, {}),
    (PLAIN, {"where": "id % 2 = 0", "columns": ["id"]}),
    (f"{PLAIN}; alter table t replica identity full", {"where": "v > 0"}),
    (f"{NO_KEY}; alter table t replica identity full", {"where": "v > 0"}),
    (INDEXED + "alter table t replica identity using index t_u",
     {"where": "u > 0", "columns": ["u", "v"]}),
]  # fmt: skip


def test_publications_that_are_accepted_break_nothing(database, conn, lake):
    for ddl, table in HARMLESS:
        begin_again(database, ddl)
        job = job_for(database, lake, {"name": "p", "tables": [T | table]})
        apply_setup(conn, job)
        database.execute("update t set v = 1; delete from t")
        teardown(conn, job)


@pytest.mark.parametrize("kind", ["stored", "virtual"])
def test_identity_full_with_an_unpublished_generated_column(database, conn, kind, job):
    """From 18 on PostgreSQL refuses such UPDATEs; before, generated columns are just not sent."""
    modern = conn.info.server_version >= 180000
    if kind == "virtual" and not modern:
        pytest.skip("virtual generated columns came with 18")
    database.execute(
        f"create table t (id int primary key, v int, g int generated always as (v * 2) {kind});"
        "alter table t replica identity full"
    )
    if modern:
        assert "unpublished generated column g" in refused(database, conn, job)
    else:
        apply_setup(conn, job)
    database.execute("drop publication if exists p; create publication p for table t")
    if modern:
        with pytest.raises(psycopg.Error):
            database.execute("update t set v = 1")
    else:
        database.execute("update t set v = 1")


BAD = [
    (PLAIN, {"tables": [{"name": "public.absent"}]}, "table public.absent: it does not exist"),
    (PLAIN, {"tables": [{"name": "public.absent", "where": "id > 1"}]},
     "public.absent: it does not exist"),
    (PLAIN, {"tables": [T | {"columns": ["id", "nope"]}]},
     "column nope does not exist; it has id, v"),
    (PLAIN, {"tables": [T | {"where": "nope = 1"}]}, 'column "nope" does not exist'),
    (PLAIN, {"tables": [T | {"where": "id ="}]}, "can't be read at line 1, column 4"),
    (PLAIN, {"tables": [T | {"where": "id > 1); drop table t; --"}]}, "can't be read at"),
    (PLAIN, {"tables": [T | {"where": "id > random()"}]},
     "PostgreSQL rejects the filter 'id > random()'"),
    (PLAIN, {"tables": [T | {"where": "id"}]}, "must be type boolean"),
    (PLAIN, {"tables": [T | {"where": "ctid is not null"}]}, "PostgreSQL rejects the filter"),
    ("create view t as select 1 as id", {"tables": [T]}, "it is a view"),
    ("create materialized view t as select 1 as id", {"tables": [T]},
     "it is a materialized view"),
    ("create unlogged table t (id int primary key)", {"tables": [T]}, "it is unlogged"),
    (ROOT, {"tables": [T | {"where": "id > 1"}]},
     "counts only when it is published via its root"),
    (
        ROOT + "alter table t1 replica identity full",
        {"tables": [T], "publish_via_partition_root": True},
        "partition public.t1: its replica identity (id, v) differs from the root's (id)",
    ),
    ('create table t (id int primary key, v int, "V" int)', {"tables": [T]},
     "can't keep column 'V' and column 'v' apart"),
    ("create table t (id int primary key, _wd_LSN int)", {"tables": [T]},
     "column '_wd_lsn' and a column of waldelta's own"),
    ('create table t (id int primary key, "_Row_Dropped_" int)', {"tables": [T]},
     "column '_Row_Dropped_' and a column of Delta's own"),
    (PLAIN, {"all_tables": True}, "accept_future_tables: true"),
    (PLAIN, {"schemas": ["public"]}, "accept_future_tables: true"),
    (NO_KEY, {"all_tables": True, "accept_future_tables": True},
     "table public.t: it has no primary key"),
    (NO_KEY, {"schemas": ["public"], "accept_future_tables": True},
     "table public.t: it has no primary key"),
    (PLAIN, {"schemas": ["nowhere"], "accept_future_tables": True},
     "schema nowhere does not exist"),
    (
        PLAIN,
        {"tables": [T | {"columns": ["id"]}], "schemas": ["public"],
         "accept_future_tables": True},
        "can't be combined with schemas",
    ),
    (PLAIN, {"manage": False}, "does not exist, and with manage: false"),
    (PLAIN + "; create publication p for table t", {"tables": [T]},
     "wasn't made by this pipeline"),
    (
        PLAIN + "; create publication p for table t;"
        "comment on publication p is 'waldelta pipeline other, definition 0123456789ab'",
        {"tables": [T]},
        "was made by pipeline 'other'",
    ),
]  # fmt: skip


def test_bad_publications(database, conn, lake):
    for ddl, entry, problem in BAD:
        begin_again(database, ddl)
        job = job_for(database, lake, {"name": "p", **entry})
        assert problem in refused(database, conn, job), (ddl, entry)


NO_COLUMN = (
    "create table t (); alter table t replica identity full",
    "create table t (id int); alter table t drop column id; alter table t replica identity full",
    "create table t (g int generated always as (1) stored)",
)


def test_a_table_without_published_columns(database, conn, lake):
    """PostgreSQL replicates it; a Delta table needs a column. Other tables aren't stopped."""
    for ddl in NO_COLUMN:
        begin_again(database, f"{ddl}; create table u (id int primary key)")
        tables = [T, {"name": "public.u"}]
        job = job_for(
            database, lake, {"name": "p", "tables": tables, "publish": ["insert", "truncate"]}
        )
        apply_setup(conn, job)
        warnings = plan_setup(conn, job).warnings
        assert any("table public.t: it publishes no column, and a Delta" in w for w in warnings)
        (table,) = read_published_tables(conn, ["p"])
        (relation,) = read_published_relations(conn, ["p"])
        assert str(table.id) == str(relation.id) == "public.u"
        teardown(conn, job)


def test_a_table_without_columns_whose_deletes_would_fail(database, conn, job):
    database.execute("create table t (); insert into t default values")
    problems = refused(database, conn, job)
    assert "it has no column, and its replica identity isn't FULL" in problems
    database.execute("alter table t replica identity full")
    apply_setup(conn, job)
    database.execute("delete from t")


def test_what_setup_does_not_bring_about_is_a_warning(database, conn, lake):
    """In another's publication, and in its own once the key was dropped."""
    database.execute(
        PLAIN
        + "; create table u (id int primary key, v int); create publication q for table u where (v"
        " > 1); create publication r for table u where (v > 1) with (publish = '')"
    )
    p, q, r = {"name": "p", "tables": [T]}, *({"name": n, "manage": False} for n in "qr")
    job = job_for(database, lake, p, q, r)
    apply_setup(conn, job)
    database.execute("alter table t drop constraint t_pkey")
    plan = plan_setup(conn, job)
    assert plan.problems == ()
    for part in (
        ("public.t: it has no primary key, so its own UPDATEs and DELETEs fail on the source"),
        "public.u: the filter uses v, which",
        "publication 'r' publishes no operation",
    ):
        assert any(part in text for text in plan.warnings)
    # Whatever setup would change of the table brings it about anew.
    changed = job_for(
        database, lake, p | {"tables": [T | {"where": "id > 1"}]}, q, r,
        slot=job.pipeline.source.slot,
    )  # fmt: skip
    assert "public.t: it has no primary key" in refused(database, conn, changed)
    assert "public.u" not in refused(database, conn, changed)


def test_all_problems_at_once(database, conn, lake):
    database.execute(NO_KEY + "; create table u (id int primary key, v int)")
    job = job_for(
        database,
        lake,
        {
            "name": "p",
            "tables": [T, {"name": "public.u", "where": "v > 1"}, {"name": "public.gone"}],
        },
        {"name": "q", "manage": False},
    )
    problems = refused(database, conn, job)
    for part in (
        "public.t: it has no",
        "public.u: the filter uses v",
        "public.gone: it does not",
        "'q' does not exist",
    ):
        assert part in problems


def test_different_column_lists_of_one_table(database, conn, lake):
    database.execute(PLAIN)
    p, q = {"name": "p", "tables": [T]}, {"name": "q", "tables": [T | {"columns": ["id"]}]}
    job = job_for(database, lake, p, q)
    assert "'p' and 'q' give public.t different column lists" in refused(database, conn, job)
    q = {"name": "q", "tables": [T | {"columns": ["v", "id"]}]}
    apply_setup(conn, job_for(database, lake, p, q))


# --- slots


def test_slot_of_another_plugin_or_kind(database, conn, job):
    database.execute(PLAIN)
    slot = job.pipeline.source.slot
    for create, problem in (
        ("select pg_create_physical_replication_slot(%s)", "is a physical slot"),
        ("select pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", "two_phase on"),
        ("select pg_create_logical_replication_slot(%s, 'pgoutput', true)", "temporary slot"),
    ):
        database.execute(create, (slot,))
        assert problem in refused(database, conn, job)
        database.execute("select pg_drop_replication_slot(%s)", (slot,))


def test_slot_of_another_database(database, conn, postgres, job):
    database.execute(PLAIN)
    slot = job.pipeline.source.slot
    with psycopg.connect(postgres.conninfo(), autocommit=True) as other:
        other.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
        try:
            assert "belongs to database 'postgres'" in refused(database, conn, job)
        finally:
            other.execute("select pg_drop_replication_slot(%s)", (slot,))


# --- roles


@pytest.fixture
def role(database):
    name = "r_" + database.name
    database.execute(f"create role {name} login password 'p'")
    yield name, database.server.conninfo(database.name, name, "p")
    database.execute(f"drop owned by {name} cascade; drop role {name}")


def test_missing_privileges(database, lake, role):
    """Each has its grant, but for what only the tables' owner, a superuser, can do."""
    name, conninfo = role
    database.execute(PLAIN)
    with connect(conninfo, "test") as conn:
        problems = refused(database, conn, job_for(conninfo, lake, {"name": "p", "tables": [T]}))
        for part in (
            f"alter role {name} replication",
            "publication 'p' must be created",
            "doesn't own public.t",
            f"grant select on public.t to {name}",
        ):
            assert part in problems
        assert "grant create on database" not in problems
        database.execute(f"grant select (id) on t to {name}")
        assert f"grant select (v) on public.t to {name}" in refused(
            database, conn, job_for(conninfo, lake, {"name": "p", "tables": [T]})
        )
        whole = {"name": "p", "all_tables": True, "accept_future_tables": True}
        assert "only a superuser may publish all tables" in refused(
            database, conn, job_for(conninfo, lake, whole)
        )


def test_grants_on_columns_of_a_partitioned_table(database, lake, role):
    """Copies tell its partitions apart by tableoid, which the columns' grants don't include."""
    name, conninfo = role
    database.execute(
        "create table t (id int primary key, v int) partition by range (id);"
        " create table t1 partition of t for values from (0) to (10);"
        " insert into t values (1, 1); create publication p for table t"
        " with (publish_via_partition_root);"
        f" grant select (id, v) on t to {name}; alter role {name} replication"
    )
    job = job_for(conninfo, lake, {"name": "p", "manage": False})
    with connect(conninfo, "test") as conn:
        assert f"grant select (tableoid) on public.t to {name}" in refused(database, conn, job)
        database.execute(f"grant select (tableoid) on public.t to {name}")
        apply_setup(conn, job)


def test_row_level_security(database, lake, role):
    """A policy would hide rows from the copy, silently."""
    name, conninfo = role
    database.execute(
        PLAIN + "; alter table t enable row level security; create publication p for table t"
    )
    database.execute(f"grant select on t to {name}; alter role {name} replication")
    with connect(conninfo, "test") as conn:
        job = job_for(conninfo, lake, {"name": "p", "manage": False})
        assert f"alter role {name} bypassrls" in refused(database, conn, job)
        database.execute(f"alter role {name} bypassrls")
        apply_setup(conn, job)


# --- servers


def test_server_not_fit(new_server, lake):
    """A server as it comes, without room for slots."""
    poor_server = new_server(
        wal_level="replica",
        max_replication_slots="1",
        max_slot_wal_keep_size="-1",
        temp_file_limit="1GB",
        idle_in_transaction_session_timeout="60s",
    ).start()
    with connect(poor_server.conninfo(), "test") as conn:
        conn.execute("create table if not exists public.t (id int primary key)")
        job = job_for(
            poor_server.conninfo(), lake, {"name": "p", "tables": [T | {"where": "id > 1"}]}
        )
        with pytest.raises(PreflightFailed) as caught:
            apply_setup(conn, job)
        problems, warnings = (
            "\n".join(caught.value.problems),
            "\n".join(plan_setup(conn, job).warnings),
        )
        assert "wal_level is 'replica': alter system set wal_level = 'logical'" in problems
        assert "replication slots: 0 of 1 are used" in problems
        assert "max_replication_slots = 3" in problems
        assert "max_slot_wal_keep_size is -1" in warnings
        assert "max_slot_wal_keep_size = '50000MB'" in warnings
        assert "temp_file_limit is 1 GB" in warnings
        assert "idle_in_transaction_session_timeout is 60000 ms" in warnings
        assert conn.execute("select count(*) from pg_publication").fetchone() == (0,)
        assert conn.execute("select count(*) from pg_replication_slots").fetchone() == (0,)


def test_standby(new_server, lake):
    """Copies need the primary's snapshots."""
    server = new_server()
    server.start()
    with connect(server.conninfo(), "test") as conn:
        conn.execute("create table public.t (id int primary key)")
    server.stop()
    (server.data / "standby.signal").touch()
    server.start()
    with connect(server.conninfo(), "test") as conn:
        job = job_for(server.conninfo(), lake, {"name": "p", "tables": [T | {"where": "id > 1"}]})
        with pytest.raises(
            PreflightFailed, match="the server is a standby: point the connection at the primary"
        ):
            apply_setup(conn, job)


def test_pooler(database, conn, lake, monkeypatch):
    """A pooler makes up the backend's pid."""
    database.execute(PLAIN)
    real = source_facts.read_server
    monkeypatch.setattr(
        source_facts, "read_server", lambda server: replace(real(server), behind_pooler=True)
    )
    assert "connection pooler" in refused(
        database, conn, job_for(database, lake, {"name": "p", "tables": [T]})
    )


def test_settings_lost_on_the_way(database, job):
    """A connection without the pinned settings, as after a pooler that drops startup options."""
    database.execute(PLAIN)
    assert "settings didn't reach the server" in refused(database, database.connection, job)


def test_target_not_writable(database, conn, tmp_path):
    database.execute(PLAIN)
    (tmp_path / "file").write_text("in the way")
    job = job_for(database, (tmp_path / "file" / "lake").as_uri(), {"name": "p", "tables": [T]})
    before = source_state(database)
    with pytest.raises(TargetNotWritable, match=r"check target\.root"):
        apply_setup(conn, job)
    assert source_state(database) == before


def test_partitions_that_are_never_published(database, conn, lake):
    """Foreign and unlogged ones need no replica identity."""
    database.execute(
        "create table t (id int, v int) partition by range (id);create table t1 partition of t for"
        " values from (0) to (10); alter table t1 add primary key (id);create unlogged table t2"
        " partition of t for values from (10) to (20);create foreign data wrapper w; create server"
        " s foreign data wrapper w;create foreign table t3 partition of t for values from (20) to"
        " (30) server s;insert into t values (1, 1), (11, 1)"
    )
    plan = apply_setup(conn, job_for(database, lake, {"name": "p", "tables": [T]}))
    assert "public.t2, public.t3 (foreign or unlogged) are never published" in "\n".join(
        plan.warnings
    )
    database.execute("update t set v = 2 where id < 20; delete from t where id < 20")
    assert warn_of_refused_writes(conn, ["p"]) == []
    database.execute("alter table t1 drop constraint t1_pkey")
    assert "public.t1 (p)" in warn_of_refused_writes(conn, ["p"])[0]


def test_warnings(database, conn, lake):
    database.execute(
        PLAIN + "; alter table t replica identity full; create unlogged table fast (id int);"
        "create table g (id int primary key, d int generated always as (id) stored);"
        "create table parent (id int primary key); create table child () inherits (parent);"
        "create table k (a int); alter table k replica identity full"
    )
    tables = [T, {"name": "public.g"}, {"name": "public.parent"}, {"name": "public.k"}]
    publications = (
        {"name": "p", "tables": tables},
        {"name": "q", "schemas": ["public"], "publish": ["insert"]},
    )
    warnings = "\n".join(plan_setup(conn, job_for(database, lake, *publications)).warnings)
    assert "public.t: REPLICA IDENTITY FULL writes the whole old row" in warnings
    assert (
        "public.k: it has no primary key, so a run that brings UPDATEs or DELETEs of it rewrites"
        in warnings
    )
    assert "public.t: it has no primary key" not in warnings
    assert "generated column d isn't published" in warnings
    assert "inheritance children aren't published" in warnings
    assert "1 relation of schema public can't be published" in warnings
    assert "public.fast" in warnings


def test_values_that_would_be_lost(database, conn, lake, job):
    """Without metadata columns there is no place for what a type can't hold."""
    database.execute(
        "create table t (id int primary key, n numeric(5,2), d date, k timestamp, v text, m"
        " numeric, a date[])"
    )
    target = Target(
        root=lake, metadata_columns=False, tables={"public.t": {"types": {"text": ["d"]}}}
    )
    assert not [w for w in plan_setup(conn, job).warnings if "are lost" in w]
    job = replace(job, pipeline=job.pipeline.model_copy(update={"target": target}))
    (told,) = beside_superuser(plan_setup(conn, job).warnings)
    assert "are lost: n, k, a;" in told


def test_own_expectations_that_cannot_be(database, conn, lake, tmp_path):
    """A gate that can't be would keep its table's changes waiting from the first run on."""
    database.execute(
        "; ".join(f"create table {name} (id int primary key)" for name in ("t", "h", "ok", "twice"))
    )
    stop = (
        "expectations: [{type: expect_column_values_to_not_be_null, kwargs: {column: id}, gate:"
        " stop}]"
    )
    for name, text in [
        ("t.yml", stop.replace("stop", "halt")),
        ("h.yml", stop),
        ("public.ok.yml", stop),
        ("typo.yml", stop),
        ("twice.yml", stop),
        ("public.twice.yml", stop),
    ]:
        (tmp_path / name).write_text(text)
    tables = [{"name": f"public.{name}"} for name in ("t", "h", "ok", "twice")]
    job = job_for(database, lake, {"name": "p", "tables": tables})
    target = Target(root=lake, tables={"public.h": {"mode": "history"}})
    quality = job.pipeline.quality.model_copy(update={"suites": str(tmp_path)})
    job = replace(
        job, pipeline=job.pipeline.model_copy(update={"target": target, "quality": quality})
    )
    problems = refused(database, conn, job).splitlines()
    said = [
        "h.yml:1: expectations[0]: gate: stop",
        "expectations of public.t: ",
        "expectations of public.twice: ",
    ]
    assert [text for line in problems for text in said if text in line] == [
        said[1],
        said[2],
        said[0],
    ]
    warnings = plan_setup(conn, job).warnings
    assert [w for w in warnings if "unused expectations" in w] == [
        f"unused expectations: {tmp_path / 'typo.yml'} fits no table of this pipeline"
    ]
    # A lost slot is made anew all the same.
    assert not [p for p in plan_setup(conn, job, renew=True).problems if "expectations" in p]


def test_a_database_without_an_encoding(postgres, lake):
    """SQL_ASCII takes any bytes, which PostgreSQL can't convert."""
    name = f"ascii_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        admin.execute(f"create database {name} encoding 'SQL_ASCII' locale 'C' template template0")
        try:
            with connect(postgres.conninfo(name), "test") as conn:
                conn.execute("create table public.t (id int primary key, v text)")
                conn.execute("insert into public.t values (1, e'\\xff')")
                with pytest.raises(psycopg.errors.CharacterNotInRepertoire):
                    conn.execute("select v from public.t")
                job = job_for(postgres.conninfo(name), lake, {"name": "p", "tables": [T]})
                with pytest.raises(
                    PreflightFailed, match=f"database {name} is in SQL_ASCII.* encoding 'UTF8'"
                ):
                    apply_setup(conn, job)
                assert conn.execute("select count(*) from pg_publication").fetchone() == (0,)
        finally:
            admin.execute(f"drop database {name} with (force)")


def test_encodings_with_bytes_that_utf_8_lacks(postgres, monkeypatch, lake):
    """Preflight warns of all but those with a character for each byte."""

    def converts(conn, encoding, byte):
        try:
            return conn.execute(
                "select convert(%s::bytea, %s, 'UTF8')", (bytes([byte]), encoding)
            ).fetchone()
        except psycopg.errors.UntranslatableCharacter:
            return None

    of_one_byte = """
        select pg_encoding_to_char(n) from generate_series(0, 34) as n
        where pg_encoding_max_length(n) = 1 and pg_encoding_to_char(n) <> 'SQL_ASCII'
    """
    with new_database(
        postgres, monkeypatch, "encoding 'WIN1252' locale 'C' template template0"
    ) as database:
        for (encoding,) in database.execute(of_one_byte):
            complete = all(
                converts(database.connection, encoding, byte) for byte in range(0x80, 0x100)
            )
            assert complete is (encoding in WITHIN_UTF8), encoding
        database.execute("create table t (id int primary key, v text)")
        job = job_for(database, lake, {"name": "p", "tables": [T]})
        with connect(database.conninfo, "test") as conn:
            assert any(
                "is in WIN1252, which stores bytes" in text
                for text in plan_setup(conn, job).warnings
            )


FILTERS = {
    "v ~ 'a('": "can raise (a pattern that PostgreSQL refuses)",
    "v ~ any ('{b,a(}')": "can raise (a pattern that PostgreSQL refuses)",
    "v like 'a\\'": "can raise (a pattern that PostgreSQL refuses)",
    r"v not like all ('{b,a\\}')": "can raise (a pattern that PostgreSQL refuses)",
    "overlay(v placing 'z' from id) <> 'q'": "can raise (a part that can't be analysed)",
    "f / 2 >= 0": "can raise (division)",
    "v ~ '^a.*b$' or v like 'a\\\\' or v ilike any ('{a%,b}') or id / 2 > 3": None,
    "random() > 0.5": None,
}


def test_filters_that_raise_for_some_row(database, conn, lake):
    """A warning each, but for those that PostgreSQL rejects at once."""
    database.execute(
        "create table t (id int primary key, v text, f float8); alter table t replica identity full"
    )
    for where, told in FILTERS.items():
        job = job_for(database, lake, {"name": "p", "tables": [T | {"where": where}]})
        warned = [text for text in plan_setup(conn, job).warnings if "can raise" in text]
        assert len(warned) == (told is not None), (where, warned)
        assert all(told in text for text in warned), (where, warned)
