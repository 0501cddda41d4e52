"""Values of partition columns as every reader finds them, and those that no partition can have."""

from collections import Counter
from datetime import date
from decimal import Decimal

import polars as pl
import pytest
from deltalake import DeltaTable

from benchmarks.verify import duckdb_of_delta
from tests.oracles.compare import differing
from tests.support.pipelines import copied_pipeline, new_pipeline

pytestmark = [pytest.mark.pg, pytest.mark.spark]

# By type: PostgreSQL's texts of values, with null.
VALUES = {
    "text": [
        "a/b", "c d%", "=", ":", "%2F", "null", " ", "\n\t", ".", "..", "é😀", "'", '"', "\\",
        "x" * 5000, "day=1/place=2", "__HIVE_DEFAULT_PARTITION__", None,
    ],
    "bigint": [str(-(2**63)), "0", str(2**63 - 1), None],
    "boolean": ["true", "false", None],
    "numeric(20,0)": ["-5", "0", "12345678901234567890", "NaN"],
    "date": ["0001-01-01", "9999-12-31", "0044-03-15 BC", "infinity", "10000-01-01", None],
}  # fmt: skip
# What the lake can't hold is null there, and PostgreSQL's text in _wd_raw.
RAW = {"NaN", "0044-03-15 BC", "infinity", "10000-01-01"}
READ = {
    "text": str,
    "bigint": int,
    "boolean": "true".__eq__,
    "numeric(20,0)": Decimal,
    "date": date.fromisoformat,
}


@pytest.mark.parametrize("kind", VALUES)
def test_every_reader_finds_a_partitions_rows(runner, database, lake, kind):
    """After the copy and after changes; by the value, too."""
    database.execute(f"create table t(id int primary key, p {kind}, v int)")

    def insert(first):
        rows = [(number, value) for number, value in enumerate(VALUES[kind], first)]
        database.execute(
            f"insert into t select i, p::{kind}, 0 from unnest(%s::int[], %s::text[]) r(i, p)",
            tuple(map(list, zip(*rows, strict=True))),
        )

    insert(0)
    layout = {"root": lake, "tables": {"public.t": {"partition_by": ["p"]}}}
    pipeline = copied_pipeline(runner, new_pipeline(database, lake, ["public.t"], target=layout))
    insert(100)
    database.execute("update t set v = 1 where id % 2 = 0; delete from t where id % 7 = 3")
    pipeline.consume(runner)
    assert differing(runner, pipeline.job(), "public.t") == {}
    uri, wanted = pipeline.target_path("public.t"), Counter()
    assert DeltaTable(uri).metadata().partition_columns == ["p"]
    for value, count in database.execute("select p::text, count(*)::int from t group by p"):
        wanted[None if value is None or value in RAW else READ[kind](value)] += count
    with duckdb_of_delta() as duckdb:
        query = "select p, count(*) from delta_scan(?) group by p"
        assert Counter(dict(duckdb.execute(query, [uri]).fetchall())) == wanted
        for value in wanted.keys() - {None}:
            one = duckdb.execute("select count(*) from delta_scan(?) where p = ?", [uri, value])
            assert (value, one.fetchone()) == (value, (wanted[value],))
    # Polars alone reads values from the names of folders.
    for value in [value for value in wanted if len(str(value)) > 200]:
        del wanted[value]
    wanted[None] += wanted.pop("__HIVE_DEFAULT_PARTITION__", 0)
    frame = pl.scan_delta(uri)
    found = dict(frame.group_by("p").len().collect().iter_rows())
    assert Counter({v: found[v] for v in found if len(str(v)) < 100}) == wanted
    for value in wanted.keys() - {None}:
        assert frame.filter(pl.col("p") == value).collect().height == wanted[value], value


def test_an_empty_text_ends_the_partitions_and_no_row_waits(runner, database, lake):
    """In a copy, a run, and maintenance, which keeps the target as it is and says why."""
    database.execute("create table t(id int primary key, p text)")
    database.execute("insert into t select i, 'p' || i % 3 from generate_series(1, 9) i")

    def pipeline(*columns):
        layout = {"root": lake, "tables": {"public.t": {"partition_by": list(columns)}}}
        return new_pipeline(database, lake, ["public.t"], target=layout)

    def columns():
        return DeltaTable(divided.target_path("public.t")).metadata().partition_columns

    divided = copied_pipeline(runner, pipeline("p"))
    assert columns() == ["p"]
    database.execute("insert into t values (10, ''), (11, null)")
    assert divided.consume(runner).status == "succeeded"
    assert (columns(), differing(runner, divided.job(), "public.t")) == ([], {})
    kept = [text for text in divided.maintain(runner).warnings if "keeps its layout" in text]
    assert len(kept) == 1
    assert "p has an empty text" in kept[0]
    database.execute("delete from t where p = ''")
    divided.consume(runner)
    divided.maintain(runner)
    assert (columns(), differing(runner, divided.job(), "public.t")) == (["p"], {})
    database.execute("update t set p = '' where id = 1")
    divided.sync(runner, ["public.t"])
    assert (columns(), differing(runner, divided.job(), "public.t")) == ([], {})


@pytest.mark.parametrize("columns", [{}, {"place": "site"}], ids=["its name", "a name of its own"])
def test_a_partition_column_that_the_source_renames(runner, database, lake, columns):
    """Partitions follow it, and maintenance says that the pipeline file doesn't."""
    database.execute("create table t(id int primary key, place int)")
    database.execute("insert into t select i, i % 3 from generate_series(1, 9) i")
    name = columns.get("place", "place")
    layout = {"partition_by": [name], "columns": columns}
    target = {"root": lake, "tables": {"public.t": layout}}
    pipeline = copied_pipeline(runner, new_pipeline(database, lake, ["public.t"], target=target))

    def divided_by():
        return DeltaTable(pipeline.target_path("public.t")).metadata().partition_columns

    assert divided_by() == [name]
    database.execute("alter table t rename place to location; insert into t values (10, 5)")
    pipeline.consume(runner)
    assert (divided_by(), differing(runner, pipeline.job(), "public.t")) == (["location"], {})
    (warning,) = [text for text in pipeline.maintain(runner).warnings if "its layout" in text]
    assert f"the pipeline file names {name}, which the target doesn't have" in warning
    assert divided_by() == ["location"]


def test_a_partition_column_that_the_source_replaces(runner, database, lake):
    """By one of the same name, whose value for existing rows no partition can have."""
    database.execute("create table t(id int primary key, p text)")
    database.execute("insert into t select i, 'p' || i % 3 from generate_series(1, 9) i")
    layout = {"root": lake, "tables": {"public.t": {"partition_by": ["p"]}}}
    pipeline = copied_pipeline(runner, new_pipeline(database, lake, ["public.t"], target=layout))
    database.execute(
        "alter table t drop column p; alter table t add column p text default '';"
        " insert into t values (10, 'q')"
    )
    assert pipeline.consume(runner).status == "succeeded"
    assert DeltaTable(pipeline.target_path("public.t")).metadata().partition_columns == []
    assert differing(runner, pipeline.job(), "public.t") == {}
