"""Tables without a key: each change concerns exactly one of several equal rows."""

import math
import random
from collections import Counter

import pytest
from psycopg import sql

from tests.oracles.native_subscriber import native_subscriber, wait_until_caught_up
from tests.oracles.target_rows import read_target
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.pipeline import TableResult
from waldelta.stages.apply.apply import apply
from waldelta.stages.land.drain import drain
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.usefixtures("compiled")

DDL = """
create table t(a text, b int, n numeric, m numeric(10,2), f float8, fs float4[], j jsonb,
  w timestamptz, y bytea, big text);
alter table t alter big set storage external;
alter table t replica identity full;
"""
COLUMNS = ("a", "b", "n", "m", "f", "fs", "j", "w", "y", "big")


@pytest.fixture(
    autouse=True,
    params=[
        "merged file by file",
        pytest.param("merged by Spark", marks=pytest.mark.nightly("merged by a statement")),
    ],
)
def _merged(request: pytest.FixtureRequest) -> None:
    """Spark merges targets with features that Arrow lacks; both must do the same."""
    if request.param == "merged by Spark":
        request.getfixturevalue("merged_by_spark")


@pytest.fixture
def job(database, lake):
    database.execute(DDL)
    return bare_job(database, lake)


def source_rows(connection) -> Counter:
    """Rows as PostgreSQL's text."""
    connection.execute("set timezone = 'UTC'")
    columns = sql.SQL(", ").join(
        sql.SQL("case when {0} is not null then pg_catalog.concat({0}) end").format(
            sql.Identifier(c)
        )
        for c in COLUMNS
    )
    return Counter(connection.execute(sql.SQL("select {} from t").format(columns)).fetchall())


def target_rows(job) -> Counter:
    """The target's rows, each value as PostgreSQL prints it."""
    rows = read_target(job.lake.target("public.t").uri, *COLUMNS, "_wd_raw")
    return Counter(tuple(_text(row, name) for name in COLUMNS) for row in rows)


def _text(row, name):
    value = (row["_wd_raw"] or {}).get(name, row[name])
    if isinstance(value, bytes | bytearray):
        return "\\x" + bytes(value).hex()
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, list):
        return "{" + ",".join("NULL" if v is None else _float(v) for v in value) + "}"
    if hasattr(value, "isoformat"):
        return f"{value.isoformat(sep=' ')}+00"
    return None if value is None else str(value)


def _float(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(value).removesuffix(".0")


def run(runner, job) -> tuple[int, int, int, int]:
    """Consume; returns the rows inserted, updated, deleted and skipped, as the run tells them."""
    told = consume(runner, job).tables.get("public.t", TableResult())
    return told.inserted, told.updated, told.deleted, told.skipped


def test_missing_rows_are_skipped_and_counted(runner, database, job):
    """The commit says so to a later run, too. 60 columns don't double Spark's planning each."""
    wide = ", ".join(f"add column c{n} int default {n}" for n in range(50))
    database.execute(f"alter table t {wide}")
    database.execute("insert into t(a, b) values ('x', 1), ('x', 1), ('y', 2)")
    sync(runner, job)
    runner.spark().sql(f"delete from delta.`{job.lake.target('public.t').uri}` where a = 'y'")
    database.execute(
        "update t set b = 3 where a = 'y'; delete from t; insert into t(a) values ('new')"
    )
    assert run(runner, job) == (1, 0, 2, 1)
    assert target_rows(job) == source_rows(database.connection)


def test_a_change_without_its_whole_old_row_copies_again(runner, database, job):
    """Another replica identity sends less than finds the row: the table is copied with a key."""
    database.execute("insert into t(a, b) values ('x', 1)")
    sync(runner, job)
    database.execute("alter table t alter b set not null; create unique index i on t(b)")
    database.execute("alter table t replica identity using index i; delete from t")
    drain(runner, job)
    applied = apply(runner, job)
    assert (applied.failures, list(applied.outdated)) == ({}, ["public.t"])
    database.execute(
        "insert into t(a, b) values ('y', 2), ('z', 3); update t set a = 'w' where b = 2"
    )
    (warning,) = consume(runner, job).warnings
    assert warning.startswith("public.t: an update or delete of a table without a key")
    database.execute("delete from t where b = 3")
    assert consume(runner, job).warnings == []
    assert job.read_states()["public.t"].key_columns == ["b"]
    assert target_rows(job) == source_rows(database.connection)


BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 100) i)"
VALUES = {
    "a": ["null", "'x'", "'y'"],
    "b": ["null", "1"],
    "n": ["null", "1.0", "1.00", "'NaN'"],
    "m": ["null", "2.50", "'NaN'"],
    "f": ["null", "0", "'-0'", "'NaN'"],
    "fs": ["null", "'{NaN,-0,NULL}'", "'{1.5}'"],
    "j": ["null", """'{"k": 1}'"""],
    "w": ["null", "'2020-01-01'", "'infinity'"],
    "y": ["null", "'\\x00ff'"],
    "big": ["null", "'short'", BIG],
}


def random_statement(rng: random.Random) -> str:
    """An insert of some copies, or a change of one or of all equal rows."""
    column = rng.choice(COLUMNS)
    value = rng.choice(VALUES[column])
    some = f"ctid = any(array(select ctid from t order by random() limit {rng.randrange(1, 4)}))"
    kind = rng.choice("iiuuuddk")
    if kind == "i":
        chosen = ", ".join(rng.choice(VALUES[name]) for name in COLUMNS)
        return f"insert into t select {chosen} from generate_series(1, {rng.randrange(1, 4)})"
    if kind == "u":
        return f"update t set {column} = {value} where {some}"
    if kind == "k":
        return f"update t set b = b where {some}"
    return f"delete from t where {some}"


def equal_rows(rows: Counter) -> Counter:
    """With one spelling for what PostgreSQL holds equal: its subscriber may keep the other one."""
    spelled: Counter = Counter()
    for row, copies in rows.items():
        values = dict(zip(COLUMNS, row, strict=True))
        values |= {"n": "1" if values["n"] in ("1.0", "1.00") else values["n"]}
        values |= {name: values[name] and values[name].replace("-0", "0") for name in ("f", "fs")}
        spelled[tuple(values.values())] += copies
    return spelled


@pytest.mark.soak("random changes against a native subscriber")
def test_random_changes_of_copies(runner, database, postgres, job):
    """Duplicates, nulls and TOASTed values, compared with PostgreSQL's own subscriber, too."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    sync(runner, job)
    publication = f"s_{database.name}_pub"
    with native_subscriber(postgres, database, [publication], lambda c: c.execute(DDL)) as (
        subscriber,
        slot,
    ):
        for _ in range(3):
            for _ in range(40):
                database.execute(random_statement(rng))
            run(runner, job)
            expected = source_rows(database.connection)
            assert target_rows(job) == expected, seed
        wait_until_caught_up(database, slot)
        assert equal_rows(source_rows(subscriber)) == equal_rows(expected), seed


def test_a_column_of_another_writer_keeps_its_values(runner, database, job):
    """In rows that change, too; new ones have none."""
    database.execute("insert into t(a, b) values ('x', 1), ('x', 2)")
    sync(runner, job)
    target = job.lake.target("public.t")
    runner.spark().sql(f"alter table {target.relation} add columns (note string)")
    runner.spark().sql(f"update {target.relation} set note = concat('of ', b)")
    database.execute("update t set b = 3 where b = 2; insert into t(a) values ('z')")
    assert run(runner, job) == (1, 1, 0, 0)
    rows = read_target(target.uri, "b", "note")
    assert Counter((row["b"], row["note"]) for row in rows) == Counter(
        [(1, "of 1"), (3, "of 2"), (None, None)]
    )
