"""A target's own filter (target.tables.<table>.where) works as a publication's would."""

import re
from dataclasses import replace

import pytest

from tests.oracles.compare import differing
from tests.oracles.target_rows import source_rows, target_rows
from tests.support.pipelines import bare_slot, pipeline_file, pipeline_on
from waldelta.errors import ApplyError, PreflightFailed, SchemaChanged
from waldelta.jobs.consume import consume
from waldelta.lake import Lake
from waldelta.lake.ledger import Decisions
from waldelta.lake.ledger.decisions import COMPLETED
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets import filter_of
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.spark

BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 100) i)"
WHERE = "a > 5 and c = 'NSW'"
COLUMNS = "a int, b int, c text, big text, n numeric(10,2)"
IDENTITIES = {
    "by_default": f"create table by_default({COLUMNS}, primary key (a, c))",
    "by_index": (
        f"""
        create table by_index({COLUMNS}, primary key (b)); alter table by_index alter a set not
          null, alter c set not null;
        create unique index by_index_i on by_index(a, c,
          b); alter table by_index replica identity using index by_index_i"""
    ),
    "by_full": (
        f"create table by_full({COLUMNS}, primary key (b)); alter table by_full replica identity"
        " full"
    ),
    "without_key": (
        f"create table without_key({COLUMNS}); alter table without_key replica identity full"
    ),
    "by_root": (
        f"""
        create table by_root({COLUMNS}, primary key (a, c)) partition by range (a);
        create table by_root_1 partition of by_root for values from (minvalue) to (7);
        create table by_root_2 partition of by_root default;
        alter table by_root_1 alter big set storage external;
        alter table by_root_2 alter big set storage external"""
    ),
}


def made(database, lake, tables, wheres, publication=""):
    """Tables by their DDL, each with its target's filter, published via partition roots."""
    for name, ddl in tables.items():
        database.execute(ddl)
        database.execute(f"alter table {name} alter big set storage external")
    own = {f"public.{name}": {"where": where} for name, where in wheres.items()}
    document = pipeline_file(
        lake,
        f"s_{database.name}",
        [f"public.{name}" for name in tables],
        target={"root": lake, "tables": own},
    )
    job, pub = bare_slot(database, document), f"s_{database.name}_pub"
    listed = ", ".join(f"table {name} {publication}" for name in tables)
    database.execute(
        f"drop publication {pub}; create publication {pub} for {listed} with"
        " (publish_via_partition_root = true)"
    )
    return job


def one(database, lake, name, where=WHERE, publication=""):
    return made(database, lake, {name: IDENTITIES[name]}, {name: where}, publication)


STATEMENTS = [
    (f"insert into t values (2, 102, 'NSW', {BIG}, null), (3, 103, 'QLD', null, 1), (6, 106,"
     f" 'NSW', {BIG}, 1.5), (9, 109, 'NSW', 'x', 'NaN')"),
    "update t set b = 999 where a = 6",  # matches before and after
    "update t set a = 555 where a = 2",  # enters: the row comes whole
    "update t set c = 'VIC' where a = 9",  # leaves
    "update t set n = 7 where c = 'QLD'",  # never matched
    ("insert into t values (7, 107, 'NSW'); update t set a = 1 where a = 7; update t set a = 8"
     " where a = 1"),
    "update t set a = 5 where a = 6; update t set a = 6, n = 2 where a = 5",  # leaves and returns
    ("delete from t where c = 'QLD'; delete from t where a = 8; insert into t values (8, 108,"
     " 'NSW')"),
    ("begin; savepoint s; insert into t values (70, 170, 'NSW'); rollback to s; insert into t"
     " values (71, 171, 'NSW'); commit"),
    ("insert into t select g, g + 1000, case g % 3 when 0 then 'NSW' else 'NT' end from"
     " generate_series(100, 160) g"),
    "update t set c = case c when 'NSW' then 'NT' else 'NSW' end where a between 100 and 160",
    f"update t set a = 40 where a = 4 and big = {BIG}",
]  # fmt: skip
# Where the filter's columns may be NULL: then the filter is NULL, and excludes the row.
NULLABLE = ("by_full", "without_key")
NULLS = [
    "insert into t values (null, 201, 'NSW'), (9, 202, null), (10, 203, 'NSW')",
    "update t set a = null where b = 203",  # leaves
    "update t set a = 11 where b = 201",  # enters
]
AND_THEN = [
    "insert into t values (32, 5000, 'NSW')",
    "truncate t",
    "insert into t values (30, 1, 'NSW'), (31, 2, 'VIC')",
]


def of(table, statement):
    """The statement for another table."""
    return re.sub(r"\b(into|update|from|truncate) t\b", rf"\1 {table}", statement)


@pytest.mark.parametrize(
    "tables",
    [
        ("by_index", "by_full"),
        pytest.param(
            ("by_default", "without_key", "by_root"),
            marks=pytest.mark.nightly("the same statements on further identities"),
        ),
    ],
    ids=" ".join,
)
def test_it_holds_the_rows_that_match(runner, database, lake, decoded_by_tasks, tables):
    """Copied through the filter; then all kinds of UPDATE in one batch; then a TRUNCATE."""
    identities = {table: IDENTITIES[table] for table in tables}
    job = made(database, lake, identities, dict.fromkeys(tables, WHERE))
    first = (
        f"insert into t values (20, 1, 'NSW', {BIG}), (4, 2, 'NSW', {BIG}), (21, 3, 'VIC', ''),"
        " (22, 4, 'NSW', 'x')"
    )
    for table in tables:
        database.execute(of(table, first))
    assert [copied.rows for copied in sync(runner, job)] == [2] * len(tables)
    names = ("a", "b", "c", "big")
    for number, statements in enumerate([STATEMENTS, AND_THEN]):
        for table in tables:
            nulls = NULLS if number == 0 and table in NULLABLE else []
            for statement in [*statements, *nulls]:
                database.execute(of(table, statement))
        consume(runner, replace(job, run_id=f"run {number}"))
        for table in tables:
            expected = source_rows(database, table, *names, where=WHERE)
            assert target_rows(job, table, *names) == expected, (table, statements)
        if number == 0:
            assert differing(runner, job) == {}


def test_several_tasks_route_and_collapse(runner, database, lake, monkeypatch):
    """Each bucket gets what its events are for the target."""
    monkeypatch.setattr("waldelta.lake.changelog.batch_range.MOST_DRIVER_ROWS", 0)
    monkeypatch.setattr("waldelta.changes.stage.stage.ROWS_PER_COLLAPSE", 100)
    monkeypatch.setattr("waldelta.spark.runner.ROWS_PER_TASK", 150)
    job = one(database, lake, "by_default", "a % 3 = 0")
    sync(runner, job)
    database.execute(
        "insert into by_default(a, b, c) select g, g % 10, 'x' from generate_series(1, 300) g"
    )
    database.execute("update by_default set b = 10 - b where a % 4 = 0")
    database.execute("delete from by_default where a % 7 = 0")
    consume(runner, job)
    expected = source_rows(database, "by_default", "a", "b", "c", where="a % 3 = 0")
    assert target_rows(job, "by_default", "a", "b", "c") == expected
    assert expected


def test_the_chapters_table(runner, database, lake):
    """Two rows enter, three leave, one stays; NULL counts as false."""
    job = one(database, lake, "by_full")
    updates = [
        ("5, 'NSW'", "6, 'VIC'"),
        ("5, 'NSW'", "6, 'NSW'"),
        ("null, 'NSW'", "6, 'NSW'"),
        ("6, 'NSW'", "6, 'VIC'"),
        ("6, 'NSW'", "6, null"),
        ("7, 'NSW'", "null, 'NSW'"),
        ("6, 'NSW'", "7, 'NSW'"),
        ("null, null", "null, 'x'"),
    ]
    for number, (old, _) in enumerate(updates):
        database.execute(f"insert into by_full(b, a, c) values ({number}, {old})")
    sync(runner, job)
    for number, (_, new) in enumerate(updates):
        database.execute(f"update by_full set (a, c) = ({new}) where b = {number}")
    done = consume(runner, job).tables["public.by_full"]
    assert (done.inserted, done.deleted, done.updated, done.skipped) == (2, 3, 1, 0)
    assert target_rows(job, "by_full", "b") == [(1,), (2,), (6,)]


def test_an_entering_row_without_its_large_value_is_read_again(
    runner, database, lake, decoded_by_tasks
):
    """The old row is known by its key only; the quarantine records the value's source."""
    job = one(database, lake, "by_default")
    database.execute(f"insert into by_default values (1, 1, 'NSW', {BIG})")
    sync(runner, job)
    database.execute("update by_default set a = 10")
    done = consume(runner, job).tables["public.by_default"]
    assert (done.inserted, done.completed) == (1, 1)
    assert [row.status for row in Decisions(Lake(lake)).rows("public.by_default", 1)] == [COMPLETED]
    expected = source_rows(database, "by_default", "a", "big")
    assert target_rows(job, "by_default", "a", "big") == expected


def test_beside_the_publications_filter(runner, database, lake):
    """Both must let a row through; the target's own sees no row that the publication drops."""
    job = one(database, lake, "by_default", "10 / (a - 5) > 0", "where (a <> 5)")
    database.execute("insert into by_default values (5, 1, 'x'), (6, 2, 'x'), (4, 3, 'x')")
    sync(runner, job)
    database.execute(
        "insert into by_default values (5, 4, 'y'), (7, 5, 'y'); update by_default set a = 5, c ="
        " 'z' where a = 6"
    )
    consume(runner, job)
    assert target_rows(job, "by_default", "a", "b") == [(7, 5)]


def test_a_filter_stays_as_the_copy_had_it(runner, database, lake):
    """Another type of its column makes a new copy; a rename or drop stops the table."""
    job = one(database, lake, "by_full", "a > 5")
    sync(runner, job)
    assert filter_of(job.read_states()["public.by_full"]).analysed == "(a > 5)"
    database.execute(
        "insert into by_full values (6, 1), (5, 2); alter table by_full alter a type bigint"
    )
    database.execute("insert into by_full values (7, 3)")
    assert any("copied again" in text for text in consume(runner, job).warnings)
    assert target_rows(job, "by_full", "a") == [(6,), (7,)]
    database.execute("alter table by_full rename a to aa; insert into by_full values (8, 4)")
    with pytest.raises(RunFailed) as caught:
        consume(runner, replace(job, run_id="second"))
    assert isinstance(caught.value.__cause__, SchemaChanged)
    assert "correct the filter" in str(caught.value.__cause__)


def test_an_identity_that_no_longer_tells(runner, database, lake, decoded_by_tasks):
    """An UPDATE whose old row can't be judged stops the table; no row is guessed."""
    job = one(database, lake, "by_full")
    sync(runner, job)
    database.execute(
        "insert into by_full values (6, 1, 'NSW'); alter table by_full replica identity default"
    )
    database.execute("insert into by_full values (7, 2, 'NSW'); delete from by_full where b = 2")
    consume(runner, job)
    assert target_rows(job, "by_full", "b") == [(1,)]
    database.execute("update by_full set a = 1")
    with pytest.raises(RunFailed) as caught:
        consume(runner, replace(job, run_id="second"))
    assert isinstance(caught.value.__cause__, ApplyError)
    assert "replica identity full" in str(caught.value.__cause__)


# --- setup

DDL = """
create table t(id int primary key, a int, c text, j json, g numeric);
create table plain(id int primary key);
create table p(id int primary key, a int) partition by range (id);
create table p_1 partition of p default;
"""
REFUSED = {
    "not an expression": ("public.t", "id >", {}, r"where.*filter"),
    "no such column": ("public.t", "nope > 1", {}, r"nope.*does not exist"),
    "not translatable": ("public.t", "id > 0 and j::text = 'x'", {},
                         r"can't be evaluated in Spark: at"),
    "numeric without limits": ("public.t", "g > 0", {}, r"can't be evaluated in Spark: at"),
    "outside the identity": ("public.t", "a > 5", {},
                             r"uses a, which the replica identity \(id\) doesn't cover.*full"),
    "not in the column list": ("public.t", "id > 5 and c = 'x'", {"columns": ["id", "a"]},
                               r"c, which isn't published"),
    "no such table": ("public.nope", "id > 5", {}, r"public\.nope does not exist"),
    "not published": ("public.plain", "id > 5", {}, r"no publication of this pipeline publishes"),
    "a root whose leaves are targets": ("public.p", "id > 5", {}, r"publishes its partitions"),
    "a leaf of a published root": ("public.p_1", "id > 5", {"via": True},
                                   r"published as those of public\.p"),
    "no name of a table": ("t", "id > 5", {}, r"schema\.table"),
}  # fmt: skip
ALLOWED = {
    "the key": ("public.t", "id > 5 and id < 100", {}),
    "another column, but no updates": ("public.t", "a > 5", {"publish": ["insert", "delete"]}),
    "a root": ("public.p", "id > 5", {"via": True}),
    "a leaf": ("public.p_1", "id > 5", {}),
}


def pipeline_with(database, lake, table, where, options):
    publication = {
        "name": "p",
        "tables": [{"name": "public.t",
                    **({"columns": options["columns"]} if "columns" in options else {})},
                   {"name": "public.p"}],
        "publish_via_partition_root": options.get("via", False),
        "publish": options.get("publish", ["insert", "update", "delete", "truncate"]),
    }  # fmt: skip
    target = {"root": lake, "tables": {table: {"where": where}}}
    return pipeline_on(database, lake, publication, target=target)


def test_setup_refuses_by_name(database, lake):
    """With the place and the remedy, before anything is changed."""
    database.execute(DDL)
    for case, (table, where, options, message) in REFUSED.items():
        with pytest.raises(PreflightFailed) as refused:
            pipeline_with(database, lake, table, where, options).setup()
        assert re.search(message, str(refused.value)), (case, str(refused.value))
    assert database.execute("select count(*) from pg_publication") == [(0,)]


def test_setup_allows(database, lake):
    """What the stream can tell."""
    database.execute(DDL)
    for case, given in ALLOWED.items():
        assert not pipeline_with(database, lake, *given).check().problems, case
