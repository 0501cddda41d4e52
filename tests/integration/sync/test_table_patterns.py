"""Patterns of tables: setup writes out what they stand for; runs adopt or report new ones."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.oracles.compare import differing
from tests.support.pipelines import copied_pipeline, job_for, pipeline_on
from tests.support.servers.roles import OWNS, READS, role_on
from waldelta.config import PipelineFile, Publication
from waldelta.config.pipeline_file import TargetTable
from waldelta.errors import PreflightFailed
from waldelta.jobs import Pipeline
from waldelta.jobs.consume import consume
from waldelta.jobs.sync import run_sync
from waldelta.lake.ledger import TableState, now
from waldelta.postgres import connect
from waldelta.postgres.publication_checks import matched_tables
from waldelta.postgres.publication_membership import Membership, to_texts
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup import _adoption
from waldelta.stages.setup.facts.publications import read_publications
from waldelta.stages.setup.new_tables import NewTables, adopt_or_report
from waldelta.stages.setup.setup import apply_setup, plan_setup

SALES = """
create schema sales;
create table sales.orders (id int primary key, region text);
create table sales.items (id int primary key);
create table sales.tmp_1 (id int);
create table sales."Odd.name" (id int primary key);
create table sales.days (day int primary key) partition by range (day);
create table sales.days_1 partition of sales.days for values from (1) to (2);
create unlogged table sales.fast (id int primary key);
create view sales.seen as select 1 as id;
create materialized view sales.kept as select 1 as id;
create table public.other (id int primary key)
"""
EVERY = {"name": "sales.*", "exclude": ["sales.tmp_*"]}


def published(conn, name="p"):
    return [str(table.id) for table in read_publications(conn, [name])[name].tables]


def shop_job(database, lake, *tables, new="report", conninfo=None, name="p", **publication):
    entry = {"name": name, "tables": list(tables), "new_tables": new} | publication
    slot = f"s_{database.name}"
    return job_for(conninfo or database.conninfo, lake, entry, slot=slot)


def with_publications(job, *publications):
    """The job of a pipeline file with these publications."""
    source = job.pipeline.source.model_copy(update={"publications": publications})
    return replace(job, pipeline=job.pipeline.model_copy(update={"source": source}))


@pytest.mark.parametrize(
    "via_root", [True, pytest.param(False, marks=pytest.mark.nightly("leaves instead of roots"))]
)
def test_setup_writes_out_what_a_pattern_stands_for(any_database, any_conn, lake, via_root):
    """Ordinary tables and partition roots, by name; a second setup changes nothing."""
    any_database.execute(SALES)
    tables = EVERY, {"name": "sales.items", "where": "id > 0", "columns": ["id"]}
    job = shop_job(any_database, lake, *tables, publish_via_partition_root=via_root)
    plan = apply_setup(any_conn, job)
    assert "tables in schema" not in plan.as_sql()
    expected = ['sales."Odd.name"', "sales.days", "sales.items", "sales.orders"]
    assert published(any_conn) == expected
    state = read_publications(any_conn, ["p"])["p"]
    filters = {str(table.id): table.row_filter for table in state.tables if table.row_filter}
    assert filters == {"sales.items": "(id > 0)"}
    assert plan_setup(any_conn, job).is_empty
    any_database.execute("create table sales.late (id int primary key)")
    assert [
        str(table.id) for table in matched_tables(any_conn, job.pipeline.source, is_new=True)
    ] == ["sales.late"]
    apply_setup(any_conn, job)
    assert published(any_conn) == sorted([*expected, "sales.late"])
    assert matched_tables(any_conn, job.pipeline.source, is_new=True) == []


def test_a_pattern_needs_no_superuser(database, conn, lake):
    with role_on(conn, READS, OWNS.format(database=database.name)) as role:
        info = make_conninfo(database.conninfo, user=role, password="p")
        with connect(info, "test") as own:
            own.execute("create table app.t (id int primary key)")
            apply_setup(own, shop_job(database, lake, {"name": "app.*"}, conninfo=info))
            assert published(own) == ["app.t"]


def test_findings_name_the_table(database, conn, lake):
    """A filter is judged for each table; patterns that disagree, and those without a table."""
    database.execute(SALES)
    tables = [
        {"name": "sales.*", "where": "id > 0", "exclude": ["sales.days", "sales.tmp_*"]},
        {"name": "sales.ord*", "where": "region = 'x'"},
        {"name": "sales.day*", "where": "id > 0"},
        {"name": "sales.absent_*"},
    ]
    job = shop_job(database, lake, *tables, publish_via_partition_root=True)
    plan = plan_setup(conn, job)
    with pytest.raises(PreflightFailed):
        apply_setup(conn, job)
    (differing,) = [text for text in plan.problems if "differ in where" in text]
    assert "table sales.orders: the patterns sales.*, sales.ord* match it" in differing
    (rejected,) = [text for text in plan.problems if "rejects" in text]
    assert "filter 'id > 0' of sales.days: column \"id\" does not exist" in rejected
    assert [text for text in plan.warnings if "sales.absent_* stands for no table" in text]


def test_a_renamed_schema_unpublishes_nothing(database, shop):
    job, conn = shop
    database.execute("alter schema sales rename to shop")
    (text,) = plan_setup(conn, job).problems
    assert "schema sales of pattern sales.* does not exist" in text
    with pytest.raises(PreflightFailed):
        apply_setup(conn, job)
    assert "shop.orders" in published(conn)


def test_patterns_that_agree_are_one_entry(database, conn, lake):
    database.execute(SALES)
    job = shop_job(database, lake, {"name": "sales.ord*"}, {"name": "sales.*s", "exclude": []})
    found = matched_tables(conn, job.pipeline.source)
    assert [(str(t.id), t.patterns, t.problem) for t in found] == [
        ("sales.days", "sales.*s", None),
        ("sales.items", "sales.*s", None),
        ("sales.orders", "sales.ord*, sales.*s", None),
    ]
    apply_setup(conn, job)
    assert published(conn) == ["sales.days", "sales.items", "sales.orders"]


@pytest.fixture
def shop(database, lake):
    """A slot and a publication by a pattern that adopts."""
    database.execute(SALES)
    job = shop_job(database, lake, {**EVERY, "exclude": ["sales.tmp_*", "sales.x*"]}, new="adopt")
    with connect(database.conninfo, "test") as conn:
        apply_setup(conn, job)
        yield job, conn


def test_an_idle_check_adopts_what_setup_would_publish(database, shop, caplog):
    """A table that would refuse its own statements stays out, and the application works on."""
    job, conn = shop
    before = published(conn)
    database.execute(
        "create table sales.late (id int primary key); create table sales.keyless (id int);"
        "create table sales.excluded_not (id int primary key); create table sales.x1 (id int);"
        "insert into sales.keyless values (1)"
    )
    seen = check_idle(job)
    assert seen.has_work
    assert "sales.late" in seen.reason
    assert published(conn) == sorted([*before, "sales.excluded_not", "sales.late"])
    assert "added to the publication: sales.excluded_not, sales.late" in caplog.text
    assert "sales.keyless matches sales.*: it isn't adopted" in caplog.text
    assert "it has no primary key" in caplog.text
    assert "alter publication" not in caplog.text
    database.execute("update sales.keyless set id = 2")
    again = adopt_or_report(conn, job)
    assert (again.adopted, again.reported) == ((), ("sales.keyless",))
    database.execute("alter table sales.keyless add primary key (id)")
    assert adopt_or_report(conn, job) == NewTables(
        ("sales.keyless",), (), ("new tables were added to the publication: sales.keyless",)
    )
    assert plan_setup(conn, job).is_empty


def test_a_filter_that_does_not_fit_a_new_table(database, conn, lake):
    database.execute("create schema s; create table s.a (id int primary key)")
    job = shop_job(database, lake, {"name": "s.*", "where": "id > 0"}, new="adopt")
    apply_setup(conn, job)
    database.execute(
        "create table s.b (id int primary key); create table s.c (key int primary key);"
        "create table s.d (id int, key int primary key)"
    )
    found = adopt_or_report(conn, job)
    assert (found.adopted, found.reported) == (("s.b",), ("s.c", "s.d"))
    _, of_c, of_d = found.warnings
    assert 's.c: column "id" does not exist' in of_c
    assert "the filter uses id, which the replica identity (key) doesn't cover" in of_d
    (added,) = [t for t in read_publications(conn, ["p"])["p"].tables if t.id.name == "b"]
    assert added.row_filter == "(id > 0)"


def test_nothing_is_adopted_before_setup(database, shop):
    """A pattern that was just written may match a whole schema."""
    job, conn = shop
    database.execute("create table sales.x1 (id int primary key)")
    (entry,) = job.pipeline.source.publications
    wider = entry.model_copy(update={"tables": Publication(name="p", tables=[EVERY]).tables})
    changed = with_publications(job, wider)
    found = adopt_or_report(conn, changed)
    assert (found.adopted, found.reported) == ((), ("sales.x1",))
    assert "run setup" in found.warnings[0]
    apply_setup(conn, changed)
    assert adopt_or_report(conn, changed) == NewTables()


def test_an_adopted_table_never_stops_the_slot(database, conn, lake):
    """A DBA's publication has it with other columns, which pgoutput can't decode."""
    database.execute("create schema s; create table s.a (id int primary key)")
    database.execute("create publication theirs for table s.a")
    job = shop_job(database, lake, {"name": "s.*"}, new="adopt")
    theirs = Publication(name="theirs", manage=False)
    job = with_publications(job, *job.pipeline.source.publications, theirs)
    apply_setup(conn, job)
    database.execute(
        "create table s.b (id int primary key, v int);alter publication theirs add table s.b (id)"
    )
    found = adopt_or_report(conn, job)
    assert (found.reported, published(conn)) == (("s.b",), ["s.a"])
    assert "different column lists, which pgoutput can't decode" in found.warnings[0]


def test_a_table_that_a_dba_removed_stays_out(database, shop):
    """Also in the middle of the night, when it fills the slot. Created again, it is a new one."""
    job, conn = shop
    ((oid,),) = conn.execute("select 'sales.items'::regclass::oid").fetchall()
    copied = TableState(now(), "r", "sales.items", 1, "synced", relation_ids=[oid])
    job.ledger.append(replace(copied, incarnation=job.read_identity().incarnation))
    database.execute("alter publication p drop table only sales.items")
    found = adopt_or_report(conn, job)
    assert (found.adopted, found.reported) == ((), ("sales.items",))
    assert "it was published before, and was removed from the publication:" in found.warnings[0]
    entry = Membership(oid, 1, frozenset({"table 7 730"}))
    job.ledger.append(replace(job.read_state("sales.items"), entries=to_texts([entry])))
    (warning,) = adopt_or_report(conn, job).warnings
    assert "it was published before, and was detached from a published table:" in warning
    database.execute("drop table sales.items; create table sales.items (id int primary key)")
    assert adopt_or_report(conn, job).adopted == ("sales.items",)


@pytest.mark.parametrize(
    ("entry", "table", "why"),
    [
        (
            {"from": "s.a", "where": "id > 0"},
            "create table s.b (id int primary key)",
            "target s.b has rows of another table",
        ),
        (
            {"from": "s.a", "where": "id > 0"},
            """create table s.d (id int primary key) partition by range (id);
            create table s.b partition of s.d default""",
            "target s.b has rows of another table",
        ),
        (
            {"mode": "history"},
            "create table s.b (id int); alter table s.b replica identity full",
            "mode history needs a primary key",
        ),
        ({"where": "v > 0"}, "create table s.b (id int primary key)", 'column "v" does not exist'),
    ],
)
def test_a_new_table_fits_its_target(database, conn, lake, entry, table, why):
    """Setup would refuse it from then on, also for all other tables."""
    database.execute("create schema s; create table s.a (id int primary key)")
    job = shop_job(database, lake, {"name": "s.*"}, new="adopt")
    apply_setup(conn, job)
    own = {"s.b": TargetTable.model_validate(entry)}
    target = job.pipeline.target.model_copy(update={"tables": own})
    job = replace(job, pipeline=job.pipeline.model_copy(update={"target": target}))
    database.execute(table)
    found = adopt_or_report(conn, job)
    assert (found.adopted, published(conn)) == ((), ["s.a"])
    assert why in found.warnings[0]


@pytest.mark.parametrize(
    "statement",
    [
        "lock table sales.late in share row exclusive mode",
        "create index on sales.late (id)",
        "alter table sales.late add column v int",
        "lock table sales.late in access exclusive mode",
    ],
)
def test_a_locked_table_is_left_to_the_next_run(database, shop, statement):
    """A migration may keep its table locked for hours; landing doesn't wait for it."""
    job, conn = shop
    database.execute(
        "create table sales.late (id int primary key); create table sales.other (id int primary"
        " key)"
    )
    conn.execute("set statement_timeout = '10s'")
    with psycopg.connect(database.conninfo) as other:
        other.execute(statement)
        found = adopt_or_report(conn, job)
        assert (found.adopted, found.reported) == (("sales.other",), ("sales.late",))
        assert "another session locks it: the next run tries again" in found.warnings[1]
    assert adopt_or_report(conn, job).adopted == ("sales.late",)


def test_an_adoption_is_short(database, shop, monkeypatch):
    """Other tables' changes wait in the slot meanwhile. Late tables have one warning together."""
    job, conn = shop
    for number in range(7):
        database.execute(f"create table sales.n{number} (id int primary key)")
    with monkeypatch.context() as patch:
        patch.setattr(_adoption, "ADOPTION_BUDGET_S", -1.0)
        found = adopt_or_report(conn, job)
    assert (len(found.adopted), len(found.reported)) == (0, 7)
    (text,) = found.warnings
    assert "sales.n4 and 2 more match sales.*: -1 s were spent on other new tables" in text
    assert len(adopt_or_report(conn, job).adopted) == 7


def test_a_role_that_does_not_own_the_table_reports_it(database, conn, lake):
    """With the SQL that its owner runs; what the owner did is no finding any more."""
    with role_on(conn, READS, OWNS.format(database=database.name)) as role:
        info = make_conninfo(database.conninfo, user=role, password="p")
        job = shop_job(database, lake, {"name": "app.*"}, new="adopt", conninfo=info)
        with connect(info, "test") as own:
            own.execute("create table app.mine (id int primary key)")
            apply_setup(own, job)
            database.execute("create table app.theirs (id int primary key)")
            (text,) = adopt_or_report(own, job).warnings
            grant = f"grant select on app.theirs to {role};"
            assert grant in text
            database.execute(grant)
            found = adopt_or_report(own, job)
            assert (found.adopted, found.reported) == ((), ("app.theirs",))
            (text,) = found.warnings
            assert "the role doesn't own app.theirs (postgres does)" in text
            statement = text.rpartition("run: ")[2]
            assert statement == 'alter publication "p" add table only "app"."theirs";'
            database.execute(statement)
            assert adopt_or_report(own, job) == NewTables()


def test_a_locked_table_whose_filter_cannot_be_tried(database, conn, lake):
    """The role may not create publications any more, so PostgreSQL analyses the filter alone."""
    with role_on(conn, READS, OWNS.format(database=database.name)) as role:
        info = make_conninfo(database.conninfo, user=role, password="p")
        entry = {"name": "app.*", "where": "id > 0"}
        job = shop_job(database, lake, entry, new="adopt", conninfo=info)
        with connect(info, "test") as own, psycopg.connect(database.conninfo) as other:
            own.execute("create table app.mine (id int primary key)")
            apply_setup(own, job)
            own.execute("create table app.late (id int primary key)")
            database.execute(f"revoke create on database {database.name} from {role}")
            own.execute("set statement_timeout = '10s'")
            other.execute("lock table app.late in access exclusive mode")
            assert "another session locks it" in adopt_or_report(own, job).warnings[0]
            other.rollback()
            assert adopt_or_report(own, job).adopted == ("app.late",)


@pytest.mark.parametrize("new", ["report", "adopt"])
def test_one_query_without_new_tables(database, conn, lake, new, monkeypatch):
    """And none without patterns."""
    database.execute(SALES)
    job = shop_job(database, lake, EVERY, new=new)
    apply_setup(conn, job)
    without = shop_job(database, lake, {"name": "sales.orders"})
    asked = []
    run = type(conn.cursor()).execute

    def execute(cursor, query, *args, **kwargs):
        asked.append(query)
        return run(cursor, query, *args, **kwargs)

    monkeypatch.setattr(type(conn.cursor()), "execute", execute)
    assert adopt_or_report(conn, job) == NewTables()
    assert len(asked) == 1
    assert adopt_or_report(conn, without) == NewTables()
    assert len(asked) == 1


def renewed(pipeline, new):
    """The same pipeline with another policy for new tables."""
    document = pipeline.file.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["source"]["publications"][0]["new_tables"] = new
    return Pipeline(PipelineFile.model_validate(document))


@contextmanager
def writing(database):
    """The application: it inserts, updates and deletes rows of sales.b all the time."""
    ended = threading.Event()

    def write():
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            for number in itertools.count(101):
                connection.execute("insert into sales.b values (%s, 'new')", (number,))
                connection.execute("update sales.b set v = v || '!' where id = %s", (number - 50,))
                connection.execute("delete from sales.b where id = %s", (number - 90,))
                if ended.wait(0.01):
                    return

    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(write)
        try:
            yield
        finally:
            ended.set()
        written.result()


def test_a_new_table_is_complete_two_runs_later(runner, database, lake):
    """While the application writes; nothing is lost or doubled."""
    database.execute("create schema sales; create table sales.a (id int primary key, v text)")
    database.execute("insert into sales.a values (1, 'a')")
    pipeline = pipeline_on(
        database, lake, {"name": "p", "tables": [{"name": "sales.*"}], "new_tables": "adopt"}
    )
    copied_pipeline(runner, pipeline)
    pipeline.consume(runner)

    database.execute("create table sales.b (id int primary key, v text)")
    database.execute("insert into sales.b select i, 'before' from generate_series(1, 100) i")
    with writing(database):
        first = consume(runner, replace(pipeline.job(), hand_over=True))
        assert first.targets.needs_sync == ["sales.b"]
        assert (first.targets.never_copied, first.targets.not_applied) == ([], [])
        assert any("added to the publication: sales.b" in text for text in first.warnings)
        due = run_sync(runner, pipeline.job(), first.targets.needs_sync, only_waiting=True)
        assert list(due.tables) == ["sales.b"]
    second = pipeline.consume(runner)
    assert second.targets.needs_sync == []
    assert not check_idle(pipeline.job()).has_work
    assert differing(runner, pipeline.job()) == {}
    assert not [text for text in second.warnings if "sales.a" in text]

    reporting = renewed(pipeline, "report")
    database.execute("create table sales.c (id int primary key); insert into sales.c values (1)")
    database.execute("insert into sales.a values (3, 'c')")
    third = reporting.consume(runner)
    assert third.targets.new_tables == ["sales.c"]
    (text,) = [text for text in third.warnings if "sales.c" in text]
    assert "tables match a pattern of the pipeline file, but aren't published: sales.c" in text
    assert reporting.status()["new_tables"] == ["sales.c"]
    reporting.setup()
    assert list(reporting.sync(runner).tables) == ["sales.c"]
    assert reporting.status()["new_tables"] == []
    database.execute("insert into sales.c values (2)")
    reporting.consume(runner)
    assert differing(runner, reporting.job()) == {}

    # Where no sync follows the run, the run itself copies what it adopted.
    database.execute("create table sales.d (id int primary key); insert into sales.d values (1)")
    fourth = pipeline.consume(runner)
    assert (fourth.tables["sales.d"].rows, fourth.targets.never_copied) == (1, [])
    assert differing(runner, pipeline.job()) == {}
