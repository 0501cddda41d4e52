"""The worked examples of PostgreSQL's chapter on row filters, by setup, sync and consume."""

import pytest

from tests.oracles.target_rows import target_rows
from tests.support.pipelines import copied_pipeline, pipeline_on
from waldelta.errors import PreflightFailed

TABLES = """
create table t1(a int, b int, c text, primary key(a, c));
create table t2(d int, e int, f int, primary key(d));
create table t3(g int, h int, i int, primary key(g));
"""
P1 = {"name": "p1", "tables": [{"name": "public.t1", "where": "a > 5 AND c = 'NSW'"}]}
P2 = {"name": "p2", "tables": [{"name": "public.t1"}, {"name": "public.t2", "where": "e = 99"}]}
P3 = {
    "name": "p3",
    "tables": [{"name": "public.t2", "where": "d = 10"}, {"name": "public.t3", "where": "g = 10"}],
}


def test_a_second_publication_without_a_filter_makes_the_first_redundant(runner, database, lake):
    """Filters are ORed; p2 publishes t1 whole."""
    database.execute(TABLES)
    database.execute("insert into t1 values (1, 1, 'QLD'), (6, 6, 'NSW')")
    with pytest.raises(PreflightFailed, match=r"public\.t2.*\be\b"):
        pipeline_on(database, lake, P1, P2).setup()
    assert database.execute("select count(*) from pg_publication") == [(0,)]
    inserts_only = {**P2, "publish": ["insert"]}
    pipeline = copied_pipeline(runner, pipeline_on(database, lake, P1, inserts_only, P3))
    assert target_rows(pipeline.job(), "t1", "a", "c") == [(1, "QLD"), (6, "NSW")]
    database.execute("insert into t1 values (2, 2, 'VIC')")
    database.execute("insert into t2 values (10, 0, 0), (11, 99, 0), (12, 0, 0)")
    database.execute("insert into t3 values (10, 0, 0), (11, 0, 0)")
    pipeline.consume(runner)
    assert target_rows(pipeline.job(), "t1", "a", "c") == [(1, "QLD"), (2, "VIC"), (6, "NSW")]
    assert target_rows(pipeline.job(), "t2", "d") == [(10,), (11,)]
    assert target_rows(pipeline.job(), "t3", "g") == [(10,)]


PARTITIONS = """
create table parent(a int primary key) partition by range(a);
create table child partition of parent default;
"""


@pytest.mark.parametrize(
    "via_root, tables, target, expected",
    [
        pytest.param(True, [{"name": "public.parent", "where": "a < 5"},
                            {"name": "public.child", "where": "a >= 5"}], "parent",
                     [(2,), (3,), (4,)], id="root"),
        pytest.param(False, [{"name": "public.parent"},
                             {"name": "public.child", "where": "a >= 5"}], "child",
                     [(5,), (6,), (7,)], id="leaves",
                     marks=pytest.mark.nightly("leaves instead of the root")),
    ],
)  # fmt: skip
def test_partitions(runner, database, lake, via_root, tables, target, expected):
    """publish_via_partition_root decides whether the root's or the partition's filter counts."""
    database.execute(PARTITIONS)
    publication = {"name": "p4", "publish_via_partition_root": via_root, "tables": tables}
    pipeline = copied_pipeline(runner, pipeline_on(database, lake, publication))
    database.execute("insert into parent values (2), (4), (6)")
    database.execute("insert into child values (3), (5), (7)")
    pipeline.consume(runner)
    assert target_rows(pipeline.job(), target, "a") == expected
    pipeline.sync(runner, [f"public.{target}"], "the copy obeys the same filter")
    assert target_rows(pipeline.job(), target, "a") == expected
    if via_root:
        database.execute("truncate parent; insert into parent values (1), (9)")
        pipeline.consume(runner)
        assert target_rows(pipeline.job(), target, "a") == [(1,)]
