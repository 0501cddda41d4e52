"""What implementers of logical replication get wrong, point by point, held against PostgreSQL's own
subscription.

Point of the list, and besides this file:

1. UPDATE becomes INSERT or DELETE whatever is published: test_row_filters_page.py
2. filters are ORed per operation, the copy's over all: test_catalog.py; chapter's examples:
   test_row_filter_chapter.py
3. TRUNCATE of roots and leaves; it needs no replica identity: test_preflight.py (harmless
   publications)
4. the root's filter and list alone: test_preflight_random.py (which entry counts),
   test_row_filter_chapter.py
5. ALTER PUBLICATION at its position: test_drift.py (what a run says of it)
6. rows not held are skipped and counted: test_apply.py, test_copies.py
7. ATTACH and DETACH: test_drift.py
8. duplicates without a key: test_copies.py
9. unchanged TOAST: test_apply.py, test_complete_rows.py
10. moves, deletes and re-inserts in one transaction: unit/changes/decode/test_collapse.py,
    test_random_workload.py
11. keys equal but written differently: test_values.py
12. output-function text, arrays with lower bounds: test_values.py, test_wire_format.py
13. rewrites and generated columns: test_schema_changes.py, test_catalog.py (15's catalogs)
14. rolled back ALTER in a streamed transaction: test_protocol.py
15. decoded isn't visible (absent synchronous standby): test_snapshot.py (copies wait),
    test_complete_rows.py (rows read again wait)
16. commit order: unit/pgoutput/test_transactions.py
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
from deltalake import DeltaTable

from tests.oracles.scenario import Both, Scenario, running
from tests.support.fixtures.postgres import new_database
from tests.support.fixtures.spark import new_runner

BIG = "(select string_agg(md5({0}::text || i), '') from generate_series(1, 100) i)"
PLAIN = "create table t(id int primary key, v text);"
KEYED = "create table t(id int, a int, v text, primary key (id, a));"
PARTS = """
create table t(id int primary key, v text) partition by range (id);
create table t_1 partition of t for values from (0) to (10);
create table t_2 partition of t for values from (10) to (20);
"""
NESTED = """
create table t(id int, v text, a int, primary key (id, a)) partition by range (id);
create table t_1 partition of t for values from (0) to (10) partition by range (a);
create table t_11(v text, gone int, a int not null, id int not null);
alter table t_11 drop column gone;
alter table t_1 attach partition t_11 default;
create table t_2 partition of t default;
"""
GENERATED = (
    "create table {}(id int primary key, v text, g int generated always as (id * 2) stored);"
)
LEAVES = {"t_1": "id, v", "t_2": "id, v"}


@dataclass(frozen=True)
class Point:
    """A point of the list in a schema of its own, beside all others over one slot; ``publications``
    are named within it.

    ``steps`` have a sync point behind each. ``ids`` are those that the first target holds at the
    sync points, the copy first; None where equal to the subscriber's is all that counts.
    """

    tables: str
    publications: str
    before: str
    steps: Sequence[Sequence[str]]
    ids: Sequence[set[int] | None] = ()
    targets: Mapping[str, str] = field(default_factory=lambda: {"t": "id, v"})
    subscriber_tables: str | None = None


def steps(text: str) -> list[list[str]]:
    """A statement a line; an empty line is a sync point."""
    return [[line.strip() for line in part.strip().splitlines()] for part in text.split("\n\n")]


def becomes_redundant(second: str) -> Point:
    """No filter, FOR TABLES IN SCHEMA, FOR ALL TABLES."""
    return Point(
        KEYED,
        f"create publication p for table t where (a > 5); create publication q {second} with"
        " (publish = 'insert, truncate')",
        "insert into t values (1, 1), (2, 6)",
        [
            [
                "insert into t values (3, 1), (4, 7)",
                "update t set v = 'x'",
                "update t set a = 8 where id = 1",
                "delete from t where id = 3",
                "update t set a = 2 where id = 2",
            ],
            ["truncate t", "insert into t values (3, 1)"],
        ],
        [{1, 2}, None, {3}],
    )


# Point 11: 1.0 and 1.000, 0 and -0; a DELETE names the key as it was last written.
KEYS = {
    "t": ("numeric", "1.0", "1.000", "2.50"),
    "u": ("float8", "0", "-0", "'NaN'"),
    "v": ("numeric(10,2)", "1.0", "1.00", "3"),
}


def of_each_kind(statement: str) -> list[str]:
    """The statement for each of the tables whose keys are equal in several writings."""
    return [
        statement.format(t=table, kind=kind, first=first, second=second, third=third)
        for table, (kind, first, second, third) in KEYS.items()
    ]


POINTS = {
    # Point 1: the transformation doesn't ask which operations are published.
    "an_update_arrives_as_insert_or_delete": Point(
        KEYED,
        "create publication p for table t where (a > 5) with (publish = 'update')",
        "insert into t values (1, 1), (2, 6), (3, 7)",
        steps("""
            update t set a = 10 where id = 1
            update t set a = 1 where id = 2
            update t set v = 'x' where id = 3
            insert into t values (4, 8)
            delete from t where id = 3
        """),
        [{2, 3}, {1, 3}],
    ),
    # Point 2: the copy takes what any publication lets through, whatever it publishes.
    "filters_are_ored_per_operation": Point(
        KEYED,
        "create publication p for table t where (a > 5) with (publish = 'insert');"
        "create publication q for table t where (a < 3) with (publish = 'update, delete')",
        "insert into t values (1, 1), (2, 4), (3, 6)",
        steps("""
            insert into t values (4, 1), (5, 4), (6, 6)
            update t set v = 'x'
            update t set a = 2 where id = 2
            update t set a = 9 where id = 1
            delete from t where id in (3, 6)
        """),
        [{1, 3}, None],
    ),
    "redundant_by_a_table": becomes_redundant("for table t"),
    "redundant_by_its_schema": becomes_redundant("for tables in schema redundant_by_its_schema"),
    # Point 3: only a TRUNCATE of the root or above is published through the root.
    "a_truncated_leaf": Point(
        PARTS,
        "create publication p for table t with (publish_via_partition_root = true)",
        "insert into t values (1), (11)",
        [["truncate t_1", "insert into t values (2)"], ["truncate t", "insert into t values (3)"]],
        [{1, 11}, {1, 2, 11}, {3}],
    ),
    # The other way round: every leaf that is published is emptied, and a leaf alone too.
    "a_truncated_root": Point(
        PARTS,
        "create publication p for table t",
        "insert into t values (1), (11)",
        [["truncate t_1", "insert into t values (12)"], ["truncate t", "insert into t values (3)"]],
        [{1}, set(), {3}],
        LEAVES,
    ),
    # Point 4: on the row in the root's column order, nested partitions having another.
    "the_roots_filter_alone": Point(
        NESTED,
        "create publication p for table t (id, a) where (a > 5), table t_2 (id, a) where (a <= 5)"
        " with (publish_via_partition_root = true)",
        "insert into t select g, 'v', g % 10 from generate_series(1, 30) g",
        steps("""
            insert into t select g, 'v', g % 10 from generate_series(31, 50) g
            update t set a = a + 2 where id < 9
            update t set id = id + 100 where id in (6, 7)
            delete from t_11 where id = 8
        """),
        (),
        {"t": "id, a"},
    ),
    # Once by a publication through the root and once by itself; it comes once, by the root's.
    "a_partition_published_twice": Point(
        PARTS,
        "create publication p for table t where (id <> 5) with (publish_via_partition_root = true);"
        "create publication q for table t_1",
        "insert into t values (1), (5), (11)",
        steps("""
            insert into t values (2), (6), (12)
            update t set v = 'x'
            delete from t where id = 1
            delete from t where id = 5
            update t set id = 5 where id = 6
            update t set id = 15 where id = 2
        """),
    ),
    # Points 5 and 6: rows that the old filter let in stay; updates and deletes of rows that aren't
    # there are skipped.
    "altered_publications": Point(
        PLAIN,
        "create publication p for table t where (id < 10)",
        "insert into t select g from generate_series(1, 20) g",
        steps("""
            insert into t values (-1), (30)
            alter publication p set table t where (id > 5)
            insert into t values (-2), (31)
            update t set v = 'x'
            delete from t where id in (1, 7, 15)
            update t set id = id + 100 where id in (16, 2, 8)

            alter publication p set (publish = 'insert')
            delete from t
            insert into t values (50)
        """),
        [
            set(range(1, 10)),
            {-1, 1, 2, 3, 4, 5, 6, 9, 31, 102, 108},
            {-1, 1, 2, 3, 4, 5, 6, 9, 31, 50, 102, 108},
        ],
    ),
    # Point 7: nothing is sent for old rows, nothing is removed; from then on a new leaf streams.
    "attached_and_detached": Point(
        PARTS,
        "create publication p for table t with (publish_via_partition_root = true)",
        "insert into t values (1), (11)",
        steps("""
            create table t_3(id int primary key, v text)
            insert into t_3 values (21)
            alter table t attach partition t_3 for values from (20) to (30)
            insert into t values (22)
            update t set v = 'x'

            alter table t detach partition t_1
            insert into t_1 values (2)
            delete from t_1
            insert into t values (23)
        """),
        [{1, 11}, {1, 11, 22}, {1, 11, 22, 23}],
        subscriber_tables=PLAIN,
    ),
    # Point 8: one DELETE removes one copy, and nulls match.
    "equal_rows_without_a_key": Point(
        "create table t(id int, v text); alter table t replica identity full;",
        "create publication p for table t where (id is distinct from 3)",
        "insert into t values (1, 'a'), (1, 'a'), (1, null), (1, null), (3, 'a')",
        steps("""
            delete from t where ctid = (select min(ctid) from t where v = 'a' and id = 1)
            update t set v = 'b' where ctid = (select min(ctid) from t where v is null)
            insert into t values (1, 'a')
            update t set id = 3 where v = 'b'
            update t set id = null where id = 3
        """),
    ),
    # Point 9: through key changes, and when it was set and left alone in one transaction.
    "unchanged_toast": Point(
        "create table t(id int primary key, v text, big text); alter table t alter big set storage"
        " external;",
        "create publication p for table t",
        f"insert into t values (1, 'a', {BIG.format(1)}), (2, 'b', {BIG.format(2)})",
        [
            [
                "update t set id = 10 where id = 1",
                "update t set v = 'c'",
                (
                    f"begin; update t set big = {BIG.format(3)} where id = 2; update t set v = 'd'"
                    " where id = 2; update t set id = 20 where id = 2; commit"
                ),
            ]
        ],
        [{1, 2}, {10, 20}],
        {"t": "id, v, big"},
    ),
    # Point 10: applied in order; a row that crosses leaves is a DELETE here and an INSERT there.
    "moved_and_reinserted_at_once": Point(
        PARTS,
        "create publication p for table t",
        "insert into t select g, 'v' || g from generate_series(1, 15) g",
        [
            [
                (
                    "begin; update t set id = 19 where id = 1; update t set id = 1 where id = 2;"
                    " update t set id = 2 where id = 19; commit"
                ),
                (
                    "begin; delete from t where id = 3; insert into t values (3, 'new'); update t"
                    " set id = 18 where id = 3; insert into t values (3, 'newer'); delete from t"
                    " where id = 18; commit"
                ),
                "update t set id = id + 10 where id = 7 or id = 8",
            ]
        ],
        [set(range(1, 10)), {1, 2, 3, 4, 5, 6, 9}],
        LEAVES,
    ),
    "keys_written_differently": Point(
        ";".join(of_each_kind("create table {t}(id {kind} primary key, v text)")),
        "create publication p for table t, u, v",
        ";".join(of_each_kind("insert into {t} values ({first}, 'a'), ({third}, 'b')")),
        [
            [
                *of_each_kind("update {t} set id = {second}, v = 'c' where id = {first}"),
                *of_each_kind("update {t} set v = 'd' where id = {third}"),
            ],
            of_each_kind(
                "begin; delete from {t} where id = {first}; insert into {t} values ({first}, 'e');"
                " commit"
            ),
            of_each_kind("delete from {t}"),
        ],
        (),
        dict.fromkeys(KEYS, "v"),
    ),
    # Point 13: VACUUM FULL and CLUSTER; generated columns are published from 18 on, by choice.
    "rewrites_and_generated_columns": Point(
        GENERATED.format("t") + GENERATED.format("u"),
        "create publication p for table t; create publication q for table u with"
        " (publish_generated_columns = stored)",
        "insert into t values (1, 'a'), (2, 'b'); insert into u values (1, 'a')",
        steps("""
            vacuum full t
            insert into t values (3, 'c')
            cluster t using t_pkey
            delete from t where id = 1
            insert into u values (5, 'b')
            update u set id = 7 where id = 1
        """),
        [{1, 2}, {2, 3}],
        {"t": "id, v", "u": "id, v, g"},
        GENERATED.format("t") + "create table u(id int primary key, v text, g int)",
    ),
}


def columns_of(names: str) -> tuple[str, ...]:
    return tuple(names.split(", "))


def named_within(point: str, text: str) -> str:
    """The text with the point's own names of publications."""
    return re.sub(r"\b(create|alter) publication (\w)\b", rf"\1 publication {point}_\2", text)


def in_schemas(texts: Mapping[str, str], create: str = "") -> str:
    """SQL of all points, each in its schema."""
    return ";".join(
        create.format(name) + f"set search_path = {name};" + named_within(name, text)
        for name, text in texts.items()
    )


def all_together() -> Scenario:
    """Tables, publications and rows of all points, over one slot."""
    made = in_schemas({name: point.publications for name, point in POINTS.items()})
    create = "create schema {};"
    return Scenario(
        tables=in_schemas({name: point.tables for name, point in POINTS.items()}, create),
        subscriber_tables=in_schemas(
            {n: p.subscriber_tables or p.tables for n, p in POINTS.items()}, create
        ),
        publications=tuple(re.findall(r"create publication (\w+)", made)),
        create_publications=made,
        before=in_schemas({name: point.before for name, point in POINTS.items()}),
        targets={
            f"{name}.{table}": columns_of(names)
            for name, point in POINTS.items()
            for table, names in point.targets.items()
        },
    )


def step_of_all(number: int) -> Iterator[str]:
    """What the points that have so many steps write before this sync point."""
    for name, point in POINTS.items():
        if number < len(point.steps):
            yield f"set search_path = {name}"
            yield from (named_within(name, statement) for statement in point.steps[number])


@dataclass(frozen=True)
class Seen:
    """Tables of pipeline and subscriber at a sync point, and the targets' columns."""

    ours: Mapping[str, list[tuple]]
    theirs: Mapping[str, list[tuple]]

    @classmethod
    def by(cls, both: Both) -> Seen:
        targets = both.scenario.targets.items()
        return cls(
            {t: both.ours(t, names) for t, names in targets},
            {t: both.theirs(t, names) for t, names in targets},
        )


@pytest.fixture(scope="module")
def sync_points(spark_jvm, postgres, tmp_path_factory):
    """What was seen at each sync point, the copy first; and the targets' statuses at the end."""
    with pytest.MonkeyPatch.context() as patch, new_database(postgres, patch) as database:
        lake = (tmp_path_factory.mktemp("points") / "lake").as_uri()
        runner = new_runner(spark_jvm, patch)
        with running(runner, database, postgres, lake, all_together(), compare=False) as both:
            seen = [Seen.by(both)]
            for number in range(max(len(point.steps) for point in POINTS.values())):
                both.write(step_of_all(number))
                both.catch_up()
                seen.append(Seen.by(both))
            schemas = {
                table: DeltaTable(both.pipeline.target_path(table)).schema()
                for table in both.scenario.targets
            }
            yield (
                seen,
                {
                    table: {column.name for column in schema.fields}
                    for table, schema in schemas.items()
                },
            )


@pytest.mark.parametrize("name", POINTS)
def test_the_point(sync_points, name):
    """Every target of the point equals the subscriber's table at every sync point."""
    seen, point = sync_points[0], POINTS[name]
    for number, at in enumerate(seen):
        for table in point.targets:
            qualified = f"{name}.{table}"
            assert at.ours[qualified] == at.theirs[qualified], (number, table)
    first = f"{name}.{next(iter(point.targets))}"
    assert any(at.ours[first] for at in seen)
    for number, ids in enumerate(point.ids):
        if ids is not None:
            assert {row[0] for row in seen[number].ours[first]} == ids, number


def test_columns_that_are_not_published_are_not_there(sync_points):
    """Point 4: the root's list alone counts; point 13: generated columns."""
    own = {"_wd_lsn", "_wd_commit_ts", "_wd_raw"}
    columns = sync_points[1]
    assert columns["the_roots_filter_alone.t"] == {"id", "a"} | own
    assert columns["rewrites_and_generated_columns.t"] == {"id", "v"} | own


@pytest.fixture
def start(runner, database, postgres, lake):
    """Run a scenario of its own with the target t."""

    def run(tables, publications, before="", targets=None, **more):
        names = tuple(re.findall(r"create publication (\w+)", publications))
        targets = targets or {"public.t": ("id", "v")}
        return running(
            runner,
            database,
            postgres,
            lake,
            Scenario(
                tables=tables,
                publications=names,
                create_publications=publications,
                before=before,
                targets=targets,
                **more,
            ),
        )

    return run


def test_filters_become_redundant_for_all_tables(start):
    """Point 2, last of the chapter's list."""
    point = becomes_redundant("for all tables")
    with start(point.tables, point.publications, point.before) as both:
        assert len(both.ours("public.t", ("id",))) == 2
        for statements in point.steps:
            both.step(*statements)


@pytest.mark.nightly("a further point of the protocol's page")
def test_a_rolled_back_alter_in_a_streamed_transaction(start, database):
    """Point 14: what other savepoints wrote counts."""
    database.execute(f"alter database {database.name} set logical_decoding_work_mem = '64kB'")
    tables = "create table t(id int primary key, v text);"
    with start(tables, "create publication p for table t", "insert into t values (0, 'a')",
               options={"streaming": "on"}) as both:  # fmt: skip
        many = "insert into t(id, v) select g, repeat('x', 100) from generate_series({}, {}) g"
        both.step(
            f"begin; {many.format(1, 1000)}; savepoint s; alter table t add column w int default 7;"
            f" {many.format(1001, 2000)}; rollback to s; {many.format(2001, 3000)}; commit"
        )


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
