"""What implementers of logical replication get wrong, point by point, held against PostgreSQL's own subscription.

Point of the list, and besides this file:

1. UPDATE becomes INSERT or DELETE whatever is published: test_row_filters_page.py
2. filters are ORed per operation, the copy's over all: test_catalog.py; chapter's examples: test_row_filter_chapter.py
3. TRUNCATE of roots and leaves; it needs no replica identity: test_preflight.py (harmless publications)
4. the root's filter and list alone: test_preflight_random.py (which entry counts), test_row_filter_chapter.py
5. ALTER PUBLICATION at its position: test_drift.py (what a run says of it)
6. rows not held are skipped and counted: test_apply.py, test_copies.py
7. ATTACH and DETACH: test_drift.py
8. duplicates without a key: test_copies.py
9. unchanged TOAST: test_apply.py, test_reread.py
10. moves, deletes and re-inserts in one transaction: unit/spark_jobs/test_collapse.py, test_random_workload.py
11. keys equal but written differently: test_values.py
12. output-function text, arrays with lower bounds: test_values.py, test_wire_format.py
13. rewrites and generated columns: test_schema_changes.py, test_catalog.py (15's catalogs)
14. rolled back ALTER in a streamed transaction: test_protocol.py
15. decoded isn't visible (absent synchronous standby): test_snapshot.py, test_reread.py
16. commit order: unit/test_transactions.py
"""

from __future__ import annotations

import pytest

from tests.scenario import Scenario, running

pytestmark = [pytest.mark.pg, pytest.mark.spark]

BIG = "(select string_agg(md5({0}::text || i), '') from generate_series(1, 100) i)"
KEYED = "create table t(id int, a int, v text, primary key (id, a));"
PARTS = """
create table t(id int primary key, v text) partition by range (id);
create table t_1 partition of t for values from (0) to (10);
create table t_2 partition of t for values from (10) to (20);
"""


@pytest.fixture
def start(spark, database, postgres, lake):
    """Run a scenario: its tables, publications and rows as SQL, by default with the target t."""

    def run(tables, publications, before="", targets=None, **more):
        names = tuple(part.split()[2] for part in publications.split(";") if part.strip())
        targets = targets or {"public.t": ("id", "v")}
        return running(
            spark, database, postgres, lake,
            Scenario(tables=tables, publications=names, create_publications=publications, before=before, targets=targets, **more),
        )  # fmt: skip

    return run


def test_an_update_arrives_as_insert_or_delete_that_are_not_published(start):
    """Point 1: the transformation doesn't ask which operations are published."""
    publication = "create publication p for table t where (a > 5) with (publish = 'update')"
    with start(KEYED, publication, "insert into t values (1, 1), (2, 6), (3, 7)") as both:
        both.step("update t set a = 10 where id = 1", "update t set a = 1 where id = 2", "update t set v = 'x' where id = 3",
                  "insert into t values (4, 8)", "delete from t where id = 3")  # fmt: skip
        assert sorted(row[0] for row in both.ours("public.t", ("id",))) == [1, 3]


def test_filters_are_ored_per_operation_and_all_of_them_for_the_copy(start):
    """Point 2: the copy takes what any publication lets through, whatever it publishes."""
    publications = """
        create publication p for table t where (a > 5) with (publish = 'insert');
        create publication q for table t where (a < 3) with (publish = 'update, delete')"""
    with start(KEYED, publications, "insert into t values (1, 1), (2, 4), (3, 6)") as both:
        assert sorted(row[0] for row in both.ours("public.t", ("id",))) == [1, 3]
        both.step("insert into t values (4, 1), (5, 4), (6, 6)", "update t set v = 'x'", "update t set a = 2 where id = 2",
                  "update t set a = 9 where id = 1", "delete from t where id in (3, 6)")  # fmt: skip


@pytest.mark.parametrize("second", ["for table t", "for all tables", "for tables in schema public"])
def test_filters_become_redundant(start, second):
    """Point 2 of the chapter's list: no filter, FOR ALL TABLES, FOR TABLES IN SCHEMA; but for its own operations only."""
    publications = f"""
        create publication p for table t where (a > 5);
        create publication q {second} with (publish = 'insert, truncate')"""
    with start(KEYED, publications, "insert into t values (1, 1), (2, 6)") as both:
        assert len(both.ours("public.t", ("id",))) == 2
        both.step("insert into t values (3, 1), (4, 7)", "update t set v = 'x'", "update t set a = 8 where id = 1",
                  "delete from t where id = 3", "update t set a = 2 where id = 2")  # fmt: skip
        both.step("truncate t", "insert into t values (3, 1)")


def test_a_truncated_leaf_is_not_published_through_the_root(start):
    """Point 3: only a TRUNCATE of the root or above is."""
    publication = "create publication p for table t with (publish_via_partition_root = true)"
    with start(PARTS, publication, "insert into t values (1), (11)") as both:
        both.step("truncate t_1", "insert into t values (2)")
        assert sorted(row[0] for row in both.ours("public.t", ("id",))) == [1, 2, 11]
        both.step("truncate t", "insert into t values (3)")
        assert sorted(row[0] for row in both.ours("public.t", ("id",))) == [3]


def test_a_truncated_root_is_published_by_its_leaves(start):
    """Point 3, the other way round: every leaf that is published is emptied, and a leaf alone too."""
    publication = "create publication p for table t"
    targets = {"public.t_1": ("id", "v"), "public.t_2": ("id", "v")}
    with start(PARTS, publication, "insert into t values (1), (11)", targets) as both:
        both.step("truncate t_1", "insert into t values (12)")
        both.step("truncate t", "insert into t values (3)")


def test_through_the_root_only_its_filter_and_columns_count(start):
    """Point 4: on the row in the root's column order, with nested partitions whose columns stand in another."""
    tables = """
        create table t(id int, v text, a int, primary key (id, a)) partition by range (id);
        create table t_1 partition of t for values from (0) to (10) partition by range (a);
        create table t_11(v text, gone int, a int not null, id int not null);
        alter table t_11 drop column gone;
        alter table t_1 attach partition t_11 default;
        create table t_2 partition of t default;
    """
    publication = """create publication p for table t (id, a) where (a > 5), table t_2 (id, a) where (a <= 5)
        with (publish_via_partition_root = true)"""
    before = "insert into t select g, 'v', g % 10 from generate_series(1, 30) g"
    with start(tables, publication, before, {"public.t": ("id", "a")}) as both:
        both.step("insert into t select g, 'v', g % 10 from generate_series(31, 50) g", "update t set a = a + 2 where id < 9",
                  "update t set id = id + 100 where id in (6, 7)", "delete from t_11 where id = 8")  # fmt: skip
        assert {name for name, _ in both.spark.read.format("delta").load(both.pipeline.target_path("public.t")).dtypes} == {
            "id", "a", "_wd_lsn", "_wd_commit_ts", "_wd_raw"
        }  # fmt: skip


def test_a_partition_published_twice_is_part_of_the_root(start):
    """Point 4: once by a publication through the root and once by itself; it comes once, by the root's filter."""
    publications = """
        create publication p for table t where (id <> 5) with (publish_via_partition_root = true);
        create publication q for table t_1"""
    with start(PARTS, publications, "insert into t values (1), (5), (11)") as both:
        both.step("insert into t values (2), (6), (12)", "update t set v = 'x'", "delete from t where id = 1",
                  "delete from t where id = 5", "update t set id = 5 where id = 6", "update t set id = 15 where id = 2")  # fmt: skip


def test_altered_publications_count_from_their_position_on(start):
    """Points 5 and 6: rows that the old filter let in stay; updates and deletes of rows that aren't there are skipped."""
    publication = "create publication p for table t where (id < 10)"
    with start("create table t(id int primary key, v text);", publication,
               "insert into t select g from generate_series(1, 20) g") as both:  # fmt: skip
        both.step("insert into t values (-1), (30)", "alter publication p set table t where (id > 5)",
                  "insert into t values (-2), (31)", "update t set v = 'x'", "delete from t where id in (1, 7, 15)",
                  "update t set id = id + 100 where id in (16, 2, 8)")  # fmt: skip
        held = {row[0] for row in both.ours("public.t", ("id",))}
        assert {-1, 3, 31, 108} <= held
        assert not held & {7, 15, 16, -2, 30}
        both.step("alter publication p set (publish = 'insert')", "delete from t", "insert into t values (50)")


def test_attached_and_detached_partitions(start):
    """Point 7: nothing is sent for rows that are there, nothing is removed; from then on a new leaf streams."""
    publication = "create publication p for table t with (publish_via_partition_root = true)"
    plain = "create table t(id int primary key, v text)"
    with start(PARTS, publication, "insert into t values (1), (11)", subscriber_tables=plain) as both:
        both.step("create table t_3(id int primary key, v text)", "insert into t_3 values (21)",
                  "alter table t attach partition t_3 for values from (20) to (30)", "insert into t values (22)",
                  "update t set v = 'x'")  # fmt: skip
        assert sorted(row[0] for row in both.ours("public.t", ("id",))) == [1, 11, 22]
        both.step("alter table t detach partition t_1", "insert into t_1 values (2)", "delete from t_1",
                  "insert into t values (23)")  # fmt: skip
        assert sorted(row[0] for row in both.ours("public.t", ("id",))) == [1, 11, 22, 23]


def test_equal_rows_without_a_key(start):
    """Point 8: one DELETE removes one copy, and nulls match."""
    tables = "create table t(id int, v text); alter table t replica identity full;"
    with start(tables, "create publication p for table t where (id is distinct from 3)",
               "insert into t values (1, 'a'), (1, 'a'), (1, null), (1, null), (3, 'a')") as both:  # fmt: skip
        both.step("delete from t where ctid = (select min(ctid) from t where v = 'a' and id = 1)",
                  "update t set v = 'b' where ctid = (select min(ctid) from t where v is null)",
                  "insert into t values (1, 'a')", "update t set id = 3 where v = 'b'",
                  "update t set id = null where id = 3")  # fmt: skip


def test_unchanged_toast_survives(start):
    """Point 9: through key changes, and when it was set and left alone in one transaction."""
    tables = "create table t(id int primary key, v text, big text); alter table t alter big set storage external;"
    before = f"insert into t values (1, 'a', {BIG.format(1)}), (2, 'b', {BIG.format(2)})"
    with start(tables, "create publication p for table t", before, {"public.t": ("id", "v", "big")}) as both:
        both.step("update t set id = 10 where id = 1", "update t set v = 'c'",
                  f"begin; update t set big = {BIG.format(3)} where id = 2; update t set v = 'd' where id = 2; "
                  "update t set id = 20 where id = 2; commit")  # fmt: skip


def test_moved_deleted_and_reinserted_in_one_transaction(start):
    """Point 10: applied in order; a row that crosses leaves is a DELETE in one table and an INSERT in another."""
    publication = "create publication p for table t"
    targets = {"public.t_1": ("id", "v"), "public.t_2": ("id", "v")}
    before = "insert into t select g, 'v' || g from generate_series(1, 15) g"
    with start(PARTS, publication, before, targets) as both:
        both.step("begin; update t set id = 19 where id = 1; update t set id = 1 where id = 2; update t set id = 2 where id = 19; commit",
                  "begin; delete from t where id = 3; insert into t values (3, 'new'); update t set id = 18 where id = 3; "
                  "insert into t values (3, 'newer'); delete from t where id = 18; commit",
                  "update t set id = id + 10 where id = 7 or id = 8")  # fmt: skip


KEYS = {
    "t": ("numeric", "1.0", "1.000", "2.50"),
    "u": ("float8", "0", "-0", "'NaN'"),
    "v": ("numeric(10,2)", "1.0", "1.00", "3"),
}


def test_keys_that_are_equal_but_written_differently(start):
    """Point 11: 1.0 and 1.000, 0 and -0; a DELETE names the key as it was last written."""

    def each(statement):
        return [
            statement.format(t=table, kind=kind, first=first, second=second, third=third)
            for table, (kind, first, second, third) in KEYS.items()
        ]

    tables = ";".join(each("create table {t}(id {kind} primary key, v text)"))
    before = ";".join(each("insert into {t} values ({first}, 'a'), ({third}, 'b')"))
    targets = {f"public.{table}": ("v",) for table in KEYS}
    with start(tables, "create publication p for table t, u, v", before, targets) as both:
        both.step(
            *each("update {t} set id = {second}, v = 'c' where id = {first}"),
            *each("update {t} set v = 'd' where id = {third}"),
        )
        both.step(*each("begin; delete from {t} where id = {first}; insert into {t} values ({first}, 'e'); commit"))
        both.step(*each("delete from {t}"))


def test_values_come_as_their_output_functions_print_them(start):
    """Point 12: booleans, padded char(n), bytea; in either format."""
    tables = "create table t(id int primary key, c char(5), b boolean, y bytea, v varchar(3));"
    with start(tables, "create publication p for table t", "insert into t values (1, 'a', true, '\\x00ff', 'x ')",
               {"public.t": ("id", "c", "b", "y", "v")}, options={"binary": True}) as both:  # fmt: skip
        both.step(
            "insert into t values (2, 'b ', false, '', ' ')",
            "insert into t values (3)",
            "update t set c = 'cc', b = not b where id = 1",
        )


def test_rewrites_and_generated_columns_send_nothing(start):
    """Point 13: VACUUM FULL and CLUSTER; generated columns aren't published by default, from 18 on by choice."""
    table = "create table {}(id int primary key, v text, g int generated always as (id * 2) stored);"
    publications = (
        "create publication p for table t; create publication q for table u with (publish_generated_columns = stored)"
    )
    with start(table.format("t") + table.format("u"), publications, "insert into t values (1, 'a'), (2, 'b'); insert into u values (1, 'a')",
               {"public.t": ("id", "v"), "public.u": ("id", "v", "g")},
               subscriber_tables=table.format("t") + "create table u(id int primary key, v text, g int)") as both:  # fmt: skip
        both.step(
            "vacuum full t", "insert into t values (3, 'c')", "cluster t using t_pkey", "delete from t where id = 1",
            "insert into u values (5, 'b')", "update u set id = 7 where id = 1",
        )  # fmt: skip
        assert "g" not in both.spark.read.format("delta").load(both.pipeline.target_path("public.t")).columns


def test_a_rolled_back_alter_in_a_streamed_transaction(start, database):
    """Point 14: the relation changes back in mid-transaction; and points 15 and 16: commits count, in their order."""
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    tables = "create table t(id int primary key, v text);"
    with start(tables, "create publication p for table t", "insert into t values (0, 'a')",
               options={"streaming": "on"}) as both:  # fmt: skip
        many = "insert into t(id, v) select g, repeat('x', 100) from generate_series({}, {}) g"
        both.step(f"begin; {many.format(1, 1000)}; savepoint s; alter table t add column w int default 7; "
                  f"{many.format(1001, 2000)}; rollback to s; {many.format(2001, 3000)}; commit")  # fmt: skip


def test_commits_count_in_their_order(start, database):
    """Point 16: a transaction that began first and committed last comes last."""
    tables = "create table t(id int primary key, v text);"
    with start(tables, "create publication p for table t", "insert into t values (1, 'a')") as both:
        with database.connect() as early:
            early.execute("insert into t values (2, 'early')")
            database.execute("insert into t values (3, 'late'); update t set v = 'b' where id = 1")
            early.execute("delete from t where id = 3; update t set v = 'c' where id = 1")
        both.step()
        assert both.ours("public.t", ("id", "v")) == [(1, "c"), (2, "early")]
