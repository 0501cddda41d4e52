"""Drift of filters, column lists and partitions: the next run notices, and mends or tells."""

import pytest

from tests.oracles.target_rows import read_target
from tests.support.pipelines import pipeline_on
from waldelta.config import PipelineFile
from waldelta.jobs import Pipeline
from waldelta.pipeline.job import load_job
from waldelta.stages.land.idle_check import check_idle

DDL = (
    "create table t(id int, a int, v text, primary key (id, a)); insert into t select g, g, 'v'"
    " from generate_series(1, 10) g"
)


def pipeline(
    database, lake, *, entry=None, manage=True, quality=False, publications=("p",), **target
) -> Pipeline:
    tables = {"tables": [{"name": "public.t", **(entry or {})}]} if manage else {}
    entries = [{"name": name, "manage": manage, **tables} for name in publications]
    target |= {"root": lake}
    return pipeline_on(database, lake, *entries, target=target, quality={"enabled": quality})


def started(runner, database, lake, **options) -> Pipeline:
    made = pipeline(database, lake, **options)
    made.setup()
    made.sync(runner)
    return made


def ids(made):
    return sorted(row[0] for row in read_target(made.target_path("public.t"), "id"))


WHERE = {"tables": {"public.t": {"where": "a > 5"}}}


@pytest.mark.nightly("a page's figure after a changed filter")
def test_report_keeps_the_filter_of_the_copy(runner, database, lake):
    """drift: report routes on by the copy's filter and tells so in every run; a sync mends it."""
    database.execute(DDL)
    started(runner, database, lake, **WHERE)
    changed = pipeline(database, lake, drift="report", tables={"public.t": {"where": "a > 8"}})
    database.execute("insert into t values (7, 70), (3, 3) on conflict do nothing")
    for run in ("one", "two"):
        (told,) = changed.consume(runner, run).warnings
        assert "waldelta sync FILE --tables public.t" in told
        assert ids(changed) == [6, 7, 7, 8, 9, 10]
    changed.sync(runner, ["public.t"])
    assert changed.consume(runner, "three").warnings == []
    assert ids(changed) == [7, 9, 10]


def test_a_changed_filter_of_our_publication_is_mended(runner, database, lake):
    """Rows that the new filter lets in come, those it keeps out go; the stream says neither.

    A small table needs no JVM for that.
    """
    database.execute(DDL)
    started(runner, database, lake, entry={"where": "a > 5"})
    changed = pipeline(database, lake, entry={"where": "a > 7 or a < 3"})
    changed.setup()
    started_before = runner.is_started
    changed.consume(runner, "one")
    assert runner.is_started == started_before
    assert ids(changed) == [1, 2, 8, 9, 10]
    assert changed.consume(runner, "two").warnings == []


@pytest.mark.nightly("a DBA's publication, beside one of ours")
def test_a_dbas_publication_is_told(runner, database, lake):
    """As PostgreSQL's subscriber: old rows stay, new ones come. The check knows both filters."""
    database.execute(DDL)
    database.execute("create publication p for table t where (a > 5)")
    made = started(runner, database, lake, manage=False, quality=True)
    database.execute("alter publication p set table t where (a < 3)")
    database.execute("insert into t values (1, 2), (20, 20); delete from t where id = 10")
    for run in ("one", "two"):
        (told,) = made.consume(runner, run).warnings
        assert "filter is (a < 3), but its copy was made with (a > 5)" in told
    assert ids(made) == [1, 6, 7, 8, 9, 10]
    made.validate(runner)
    mending = pipeline(database, lake, manage=False, drift="repair")
    mending.consume(runner, "three")
    assert ids(mending) == [1, 1, 2]
    assert mending.consume(runner, "four").warnings == []


AWAY = """
create table away(id int primary key); create table two(like away including all); create table
  toggled(like away including all);
insert into away select generate_series(1, 10); insert into two table away; insert into toggled
  table away;
create publication p for table away, two where (id > 8);
create publication q for table two where (id < 3); create publication r for table toggled
"""


@pytest.mark.soak("many publications in many runs")
def test_what_publishes_tables_changes_in_many_ways(runner, database, lake):
    """What was changed while rules of a while held was sent to nobody: it is told, or mended by a
    copy. Where only a filter changed, also in one of several publications, the rows that enter and
    leave are enough.
    """
    database.execute(AWAY)
    made = started(runner, database, lake, manage=False, publications=["p", "q", "r"])

    def held(name):
        return sorted(row[0] for row in read_target(made.target_path(f"public.{name}")))

    database.execute(
        "alter publication p drop table away; alter publication r set (publish = 'insert')"
    )
    database.execute("delete from away where id = 3; delete from toggled where id = 3")
    database.execute("create table u (id int primary key); alter publication p add table u")
    database.execute("alter publication p add table away where (id < 6)")
    warnings = [
        text
        for text in made.consume(runner, "one").warnings
        if "removed from a publication" in text or "but at its copy it published" in text
    ]
    told = [text.split(" drifted")[0] for text in warnings]
    assert told == ["public.away", "public.toggled"]
    assert held("away") == held("toggled") == [*range(1, 11)]
    mending = pipeline(database, lake, manage=False, publications=["p", "q", "r"], drift="repair")
    # Restored only now: what wasn't sent meanwhile is still missing.
    database.execute("alter publication r set (publish = 'insert, update, delete, truncate')")
    database.execute(
        "alter publication q set table two where (id < 5); delete from two where id in (2, 3)"
    )
    result = mending.consume(runner, "two")
    assert [t.split(":")[0] for t in result.warnings if "it was copied again" in t] == told
    assert (held("away"), held("toggled")) == ([1, 2, 4, 5], [1, 2, *range(4, 11)])
    assert held("two") == [1, 4, 9, 10]
    database.execute(
        "alter publication p set table away where (id < 6), two where (id > 8)"
    )  # nothing new
    assert check_idle(load_job(mending.file, "three")).reason == "no changes"


def test_a_publication_that_setup_makes_another(runner, database, lake):
    """In one transaction, so the table was published all the time: nothing is told or copied."""
    database.execute(DDL)
    made = started(runner, database, lake)
    document = made.file.model_dump(exclude_unset=True)
    document["source"]["publications"] = [
        {"name": "p", "schemas": ["public"], "accept_future_tables": True}
    ]
    changed = Pipeline(PipelineFile.model_validate(document))
    changed.setup()
    result = changed.consume(runner, "one")
    assert (result.warnings, result.targets.needs_sync) == ([], [])


@pytest.mark.soak("a second change of a column list")
def test_a_column_that_enters_a_column_list(runner, database, lake):
    """Its values for old rows aren't sent: a new copy brings them, before any change."""
    database.execute(DDL)
    started(runner, database, lake, entry={"columns": ["id", "a"]})
    changed = pipeline(database, lake, entry={"columns": ["id", "a", "v"]})
    changed.setup()
    changed.consume(runner, "one")
    frame = runner.spark().read.format("delta").load(changed.target_path("public.t"))
    assert {row[0] for row in frame.select("v").collect()} == {"v"}
    # A column that is added is no drift: the first change that has it brings it. Nor is one that
    # leaves, until it returns.
    database.execute("alter table t add column n int; alter publication p set table t (id, a, n)")
    database.execute("update t set v = 'w' where id = 1")
    assert changed.consume(runner, "two").warnings == []
    database.execute(
        "alter publication p set table t (id, a, v, n); update t set v = 'x' where id = 2"
    )
    told = changed.consume(runner, "three").warnings
    assert any(
        "column v was added to its column list: it was copied again" in text for text in told
    )
    frame = runner.spark().read.format("delta").load(changed.target_path("public.t"))
    assert {row[0] for row in frame.where("id < 4").select("v").collect()} == {"v", "w", "x"}


PARTS = """
create table t(id int primary key, v text) partition by range (id);
create table t_1 partition of t for values from (0) to (10);
create table t_3 partition of t for values from (20) to (30);
create table t_4 partition of t for values from (30) to (50) partition by range (id);
create table t_4a partition of t_4 for values from (30) to (40);
create table t_5 partition of t for values from (50) to (60);
insert into t values (1, 'v'), (21, 'v'), (22, 'v'), (31, 'v'), (32, 'v'), (51, 'v');
create table t_2(id int primary key, v text);
insert into t_2 values (11, 'v');
create publication p for table t with (publish_via_partition_root = true);
"""


@pytest.mark.soak("many partitions in many runs")
def test_partitions_that_change_under_a_published_root(runner, database, lake):
    """Nothing of it is sent. What came, went, was truncated or away is told once, and mended."""
    database.execute(PARTS)
    made = started(runner, database, lake, manage=False, drift="repair")

    def run(name, *told, expected):
        warnings = made.consume(runner, name).warnings
        assert all(any(text in warning for warning in warnings) for text in told), warnings
        assert ids(made) == expected
        return warnings

    database.execute(
        "alter table t attach partition t_2 for values from (10) to (20); insert into t values (12)"
    )
    others = [21, 22, 31, 32, 51]
    added = "1 row added, 0 removed, 1 that"
    run("attach", "partition public.t_2 was added", added, expected=[1, 11, 12, *others])
    database.execute("alter table t detach partition t_1")
    removed = "0 rows added, 1 removed, 0 that"
    run("detach", "1 partition left the table", removed, expected=[11, 12, *others])
    database.execute(
        "truncate t_3; insert into t values (23); alter table t detach partition t_4; delete from"
        " t_4 where id = 31; insert into t_4 values (33); alter table t attach partition t_4 for"
        " values from (30) to (50)"
    )
    database.execute("vacuum full t_5")
    warnings = run(
        "truncate", "public.t_3 was probably truncated",
        "public.t_4a was detached and attached again", "1 row added, 3 removed, 1 that",
        expected=[11, 12, 23, 32, 33, 51],
    )  # fmt: skip
    assert not any("t_5" in warning for warning in warnings)
    assert made.consume(runner, "again").warnings == []
    # Of the whole table, it is sent; while a transaction is open, nobody knows that all landed.
    with database.connect() as other:
        other.execute("select pg_current_xact_id()")
        database.execute("truncate t; insert into t values (24)")
        assert made.consume(runner, "all").warnings == []
        assert not check_idle(made.job()).has_work
    assert made.consume(runner, "later").warnings == []
    assert ids(made) == [24]
