"""Foreign keys between targets: rows that refer to none are told, as of one cut, and no others."""

from dataclasses import replace
from itertools import product

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.bookkeeping import read_expectation_results, table_at
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.jobs.maintain import run_maintain
from waldelta.jobs.validate import run_validate
from waldelta.lake.ledger import TableState, now
from waldelta.pipeline import target_lock
from waldelta.pipeline.run_result import RunFailed
from waldelta.postgres.server_position import read_oldest_xid
from waldelta.stages.check.constraints.constraints import read_foreign_keys
from waldelta.stages.check.measure.references import (
    CheckedTarget,
    Reference,
    Side,
    rows_to_compare,
    rows_without_parent,
)
from waldelta.stages.sync.sync import sync
from waldelta.types.type_map import key_type, stored_type

pytestmark = pytest.mark.spark

KIND = "expect_target_rows_to_refer_to_rows"
SCHEMA = """
create table city(id int primary key, code char(5) not null unique);
create table person(id int primary key, city bigint references city,
  code text references city(code), boss int references person);
create table trip(id int primary key, a int, b date, unique (a, b));
create table stop(id int primary key, a int, b date, foreign key (a, b) references trip (a,
  b) match full);
insert into city values (1, 'ab'), (2, 'cd');
insert into person values (1, 1, 'ab   ', null), (2, null, null, 1);
insert into trip values (1, 1, '2026-01-01'), (2, 2, 'infinity');
insert into stop values (1, 1, '2026-01-01'), (2, null, null), (9, 2, 'infinity');
"""
TABLES = ["public.city", "public.person", "public.trip", "public.stop"]


def results(lake, run_id):
    """What a run's check found of foreign keys, by table and key."""
    found = [
        r for r in read_expectation_results(lake) if r.run_id == run_id and r.expectation == KIND
    ]
    return {
        (r.table_name, r.meaning.split()[2]): (r.success, r.unexpected_count, r.severity)
        for r in found
    }


def job_of(database, lake, tables=TABLES, **overrides):
    return bare_job(database, lake, tables, quality={"enabled": True}, **overrides)


HELD = (True, 0, "warning")


@pytest.mark.nightly("references in a whole run; unit tests have the rule")
@pytest.mark.usefixtures("compiled")
def test_orphans_are_told_of_once_they_are_there(runner, database, lake):
    """Nulls refer to nothing, char(n) is padded; a row that lost its partner is a warning."""
    database.execute(SCHEMA)
    job = job_of(database, lake)
    sync(runner, job)
    database.execute("insert into city values (3, 'ef'); insert into person values (3, 3, 'ef', 2)")
    database.execute("insert into stop values (3, 1, '2026-01-01'); delete from city where id = 2")
    result = consume(runner, replace(job, run_id="fine"))
    assert set(result.checked.passed) >= {"public.city", "public.person", "public.stop"}
    of_person = {
        ("public.person", f"person_{name}_fkey"): HELD for name in ("city", "code", "boss")
    }
    assert results(lake, "fine") == of_person | {("public.stop", "stop_a_b_fkey"): HELD}
    runner.spark().sql(
        f"delete from delta.`{job.lake.target('public.city').uri}` where id = 1"
    ).collect()
    database.execute("insert into person values (4, 3, null, 4)")
    result = consume(runner, replace(job, run_id="wrong"))
    assert result.status == "succeeded"
    assert "public.person" in result.checked.passed
    assert {told.partition(":")[0] for told in result.checked.warned_expectations} == {
        "public.person"
    }
    assert results(lake, "wrong")["public.person", "person_city_fkey"] == (False, 1, "warning")
    assert results(lake, "wrong")["public.person", "person_boss_fkey"] == HELD
    result = run_validate(runner, replace(job, run_id="all"))
    found = results(lake, "all")
    assert found["public.person", "person_code_fkey"] == (False, 1, "warning")
    assert (found["public.person", "person_boss_fkey"], found["public.stop", "stop_a_b_fkey"]) == (
        HELD,
        HELD,
    )
    result = run_maintain(runner, replace(job, run_id="night"))
    assert (result.status, results(lake, "night")) == ("succeeded", found)
    assert [text.split(" holds")[0] for text in result.warnings if "foreign key" in text] == [
        f"public.person: {KIND}: foreign key person_{name}_fkey" for name in ("city", "code")
    ]
    assert len(result.checked.warned_expectations) == 2
    assert len({r.at for r in read_expectation_results(lake) if r.run_id == "night"}) == 1
    # What hasn't changed since isn't judged again, but for what depends on other targets.
    result = run_maintain(runner, replace(job, run_id="next night"))
    assert results(lake, "next night") == found
    kept = [r for r in read_expectation_results(lake) if r.run_id == "next night"]
    of_others = {"expect_target_to_be_fresh", "expect_target_to_know_all_values"}
    assert {r.expectation for r in kept if r.table_name == "public.trip"} == of_others
    assert {r.expectation for r in kept if r.table_name == "public.person"} == of_others | {KIND}
    assert len(result.checked.warned_expectations) == 2
    shown = [
        r.observed
        for r in read_expectation_results(lake)
        if r.run_id == "all" and r.expectation == KIND
    ]
    assert "1 row has no parent row" in shown


@pytest.mark.nightly("two targets at different positions; unit tests have the rule")
def test_a_target_that_lost_rows_and_one_that_is_ahead(runner, database, lake):
    """The check names the rows that refer to lost ones, and why it compares no target ahead."""
    database.execute(SCHEMA)
    job = job_of(database, lake)
    sync(runner, job)
    person = DeltaTable(job.lake.target("public.person").uri)
    rows = person.to_pyarrow_table().filter(pc.field("id") == 1)
    orphan = {"id": 6, "city": 2, "code": "cd"}
    for name, value in orphan.items():
        column = pa.array([value], rows.schema.field(name).type)
        rows = rows.set_column(rows.schema.get_field_index(name), rows.schema.field(name), column)
    write_deltalake(person, rows, mode="append")
    database.execute("delete from city where id = 2")
    consume(runner, replace(job, run_id="lost"))
    assert results(lake, "lost") == {
        ("public.city", f"person_{name}_fkey"): (False, 1, "warning") for name in ("city", "code")
    }
    database.execute(
        "insert into person values (4, null, null, 1); insert into trip values (3, 3, '2026-01-01')"
    )
    with target_lock(job, "public.trip"), pytest.raises(RunFailed, match=r"public\.trip"):
        consume(runner, replace(job, run_id="kept away"))
    run_validate(runner, replace(job, run_id="behind"))
    assert results(lake, "behind") == {("public.stop", "stop_a_b_fkey"): HELD}
    (told,) = {
        text
        for row in read_expectation_results(lake)
        if (row.run_id, row.table_name) == ("behind", "public.person")
        for text in row.not_checked or ()
        if "person_boss_fkey" in text
    }
    assert told.endswith("public.person has a batch that other targets lack")


@pytest.mark.soak("references between partitions")
def test_partitioned_tables(runner, database, lake):
    """From root to root; the catalogs' rows for each partition are no keys of their own."""
    database.execute("""
        create table p(id int primary key) partition by range (id);
        create table p1 partition of p for values from (0) to (10);
        create table p2 partition of p for values from (10) to (20);
        create table c(id int primary key, p int references p) partition by range (id);
        create table c1 partition of c for values from (0) to (10);
        create table c2 partition of c for values from (10) to (20);
        insert into p values (1), (11); insert into c values (1, 11), (12, 1);
    """)
    job = job_of(database, lake, ["public.p", "public.c"])
    name = job.pipeline.source.publications[0].name
    database.execute(f"alter publication {name} set (publish_via_partition_root = true)")
    sync(runner, job)
    database.execute("insert into p values (2); insert into c values (2, 2), (13, 11)")
    consume(runner, replace(job, run_id="fine"))
    assert results(lake, "fine") == {("public.c", "c_p_fkey"): HELD}
    runner.spark().sql(
        f"delete from delta.`{job.lake.target('public.p').uri}` where id = 11"
    ).collect()
    database.execute("insert into c values (3, 1)")
    consume(runner, replace(job, run_id="wrong"))
    assert results(lake, "wrong") == {("public.c", "c_p_fkey"): (False, 2, "warning")}


def test_which_keys_are_read(database):
    """Validated ones of transactions that have landed; what can't be judged says why."""
    database.execute(
        "create domain town as int; create table a(id town primary key, x int, unique (x))"
    )
    database.execute(
        "create table b(id int primary key, a town constraint one references a, x int)"
    )
    database.execute("alter table b add constraint two foreign key (x) references a (x) not valid")
    landed = read_oldest_xid(database.connection)
    database.execute("create table c(id int primary key constraint late references a)")
    (oid,) = database.execute("select 'a'::regclass::oid::bigint")[0]
    first = read_foreign_keys(database.connection, [oid], landed)
    assert [(key.name, key.table_name, key.referenced_name) for key in first] == [
        ("one", "public.b", "public.a")
    ]
    assert [(c.attnum, c.name, c.base_oid) for c in first[0].referring] == [(2, "a", 23)]
    later = read_foreign_keys(database.connection, [oid], read_oldest_xid(database.connection))
    assert [key.name for key in later] == ["one", "late"]


TEXTS = ("char(3)", "text", "varchar(9)", "name", "padded")
# Blanks, and white that isn't: of char(n) only blanks are padding.
SPELT = ("a", "a ", "a\t", "a\u00a0", "a\u3000 ")


def ask_postgresql(database):
    """Whether each text may refer to each other: the comparison, both as sent, the answer."""
    database.execute("create domain padded as char(4)")
    database.connection.prepare_threshold = None  # one statement has several types
    told = []
    for own, there in product(TEXTS, TEXTS):
        if (own, there) in (("name", "char(3)"), ("name", "padded")):  # no key can be between these
            continue
        database.execute(
            f"create table p(k {there} primary key); create table c(k {own} constraint fk"
            " references p)"
        )
        (oid,) = database.execute("select 'c'::regclass::oid::bigint")[0]
        (key,) = read_foreign_keys(database.connection, [oid], read_oldest_xid(database.connection))
        sides = key.referring[0], key.referenced[0]
        left, right = (key_type(side.base_oid, stored_type("string")) for side in sides)
        comparison = left.compared_with(right)
        for held, sent in product(SPELT, SPELT):
            database.execute(f"truncate p, c; insert into p values ('{held}')")
            try:
                database.execute(f"insert into c values ('{sent}')")
                is_found = True
            except psycopg.errors.ForeignKeyViolation:
                is_found = False
            texts = database.execute(f"select cast('{sent}' as {own}), k from p")[0]
            told.append((comparison, *texts, is_found))
        database.execute("drop table c, p")
    return told


@pytest.mark.soak("every pair of text types")
def test_texts_refer_as_postgresql_says(runner, database, tmp_path):
    """Whether blanks at the end count goes by which side is char(n), for Spark and DataFusion."""
    told = ask_postgresql(database)
    assert {(comparison, is_found) for comparison, *_, is_found in told} == set(
        product(("same", "padded", "own padded"), (True, False))
    )
    for comparison, is_found in product(("same", "padded", "own padded"), (True, False)):
        pairs = [
            (sent, held)
            for kind, sent, held, found in told
            if (kind, found) == (comparison, is_found)
        ]
        sides = []
        for place, name in enumerate("cp"):
            uri = str(tmp_path / f"{comparison} {is_found} {name}")
            texts = pa.array([pair[place] for pair in pairs], pa.string())
            write_deltalake(uri, pa.table({"i": list(range(len(pairs))), "k": texts}))
            state = TableState(now(), "sync", name, 1, "synced")
            sides.append(Side(CheckedTarget(state, 0, table_at(uri)), ("i", "k")))
        reference = Reference("fk", *sides, ("same", comparison), "c")
        expected = 0 if is_found else len(pairs)
        found = [
            rows_without_parent(reference, *rows_to_compare(reference)),
            rows_without_parent(reference, *(side.target.frame(runner) for side in sides)),
        ]
        assert [each.rows for each in found] == [expected] * 2, comparison
