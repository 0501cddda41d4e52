"""Targets as others read them: extreme values, on each Delta feature, by each recipe."""

import json
import math
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from urllib.parse import urlsplit

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaProtocolError
from pyspark.sql.functions import to_json

from benchmarks.verify import duckdb_of_delta
from tests.support.fixtures.postgres import new_database
from tests.support.pipelines import pipeline_file
from waldelta.jobs import Pipeline
from waldelta.monitoring.table_list import read_table_details
from waldelta.spark import OnSpark

# What users' own sessions may have, of which no target may show anything.
OTHER_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "INT96",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "LEGACY",
    "spark.sql.parquet.datetimeRebaseModeInRead": "LEGACY",
    "spark.sql.timestampType": "TIMESTAMP_NTZ",
    "spark.sql.session.timeZone": "America/Los_Angeles",
    "spark.sql.caseSensitive": "true",
    "spark.sql.ansi.enabled": "false",
}
FIRST, LAST = datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)  # noqa: DTZ001
MOST = Decimal("9" * 28 + "." + "9" * 10)
LEAST = MOST.copy_negate()
ODD_TEXTS = ["\\0\\x00\\u0000\n\t", "\uffff\U0010ffff\u2400", ""]

# Column, PostgreSQL's type; for three rows, what is inserted and what every reader must return.
VALUES = [
    ("big", "int8", [-(2**63), 2**63 - 1, None], None),
    ("at", "timestamptz", [f"{FIRST}+00", f"{LAST}+00", "infinity"],
     [FIRST.replace(tzinfo=UTC), LAST.replace(tzinfo=UTC), None]),
    ("day", "date", ["0001-01-01", "9999-12-31", "-infinity"],
     [date(1, 1, 1), date(9999, 12, 31), None]),
    ("amount", "numeric(38,10)", [LEAST, MOST, "NaN"], [LEAST, MOST, None]),
    ("exact", "numeric", ["-1E-50", "1E+50", "NaN"],
     ["-0." + "0" * 49 + "1", "1" + "0" * 50, "NaN"]),
    ("ratio", "float8", [-math.inf, 5e-324, 1.7976931348623157e308], None),
    ("single", "float4", [math.inf, -math.inf, 1.5], None),
    ("span", "interval", ["-178000000 years", "178000000 years", "1 mon -1 days"],
     ["-178000000 years", "178000000 years", "1 mon -1 days"]),
    ("note", "text", ODD_TEXTS, None),
    ("bytes", "bytea", [b"\x00", b"\xff\x00\\x", b""], None),
    ("moments", "timestamptz[]", [f'{{"{FIRST}+00",NULL}}', f'{{"{LAST}+00"}}', "{infinity}"],
     [[FIRST.replace(tzinfo=UTC), None], [LAST.replace(tzinfo=UTC)], None]),
    ("amounts", "numeric(38,10)[]", [[LEAST], [MOST, None], []], None),
    ("notes", "text[]", [ODD_TEXTS, [], ["NULL", None]], None),
]  # fmt: skip
RAW = [None, None, {"at": "infinity", "day": "-infinity", "amount": "NaN", "moments": "{infinity}"}]
NAIVE = ("local", "timestamp", [str(FIRST), str(LAST), None], [FIRST, LAST, None])
MAPPED = ("Rollout %", "float8", [0.5, 100, None], None)
DOCUMENT = ("document", "jsonb", ['{"a": 1}', "[]", None], ['{"a":1}', "[]", None])
# The columns that a table has beside those of every table, and options of its target.
TABLES = {
    "plain": ([], {}),
    "mapped": ([MAPPED], {}),
    "marked": ([NAIVE], {"deletion_vectors": True}),
    "all_of_it": (
        [NAIVE, MAPPED, DOCUMENT],
        {"types": {"json": "variant"}, "deletion_vectors": True},
    ),
}
FEATURES = {
    "plain": set(),
    "mapped": {"columnMapping"},
    "marked": {"timestampNtz", "deletionVectors"},
    "all_of_it": {"timestampNtz", "deletionVectors", "columnMapping", "variantType"},
}


EACH = [
    "mapped",
    *(
        pytest.param(name, marks=pytest.mark.nightly("other features than one table's"))
        for name in TABLES
        if name != "mapped"
    ),
]


@pytest.fixture(scope="module", params=EACH)
def name(request):
    """Of a table whose target has these features; nightly, each."""
    return request.param


@pytest.fixture(scope="module")
def pipeline(spark_jvm, postgres, tmp_path_factory, name):
    """Copied, merged by Spark and compacted by a session with other settings."""
    further, options = TABLES[name]
    with pytest.MonkeyPatch.context() as patch, new_database(postgres, patch) as database:
        _create(database, name, [*VALUES, *further])
        lake = (tmp_path_factory.mktemp("readers") / "lake").as_uri()
        target = {"root": lake, "tables": {f"public.{name}": options}}
        file = pipeline_file(lake, f"s_{database.name}", [f"public.{name}"], target=target)
        made, session = Pipeline(file), spark_jvm().newSession()
        for setting, value in OTHER_SETTINGS.items():
            session.conf.set(setting, value)
        made.setup()
        made.sync(session)
        patch.setattr("waldelta.changes.merge.merge.merge_files", lambda *_: None)
        database.execute(f"delete from {name} where id = 9; update {name} set small = 1")
        # Every row is written again, with a value that is a timestamp of Spark's.
        if name == "plain":
            database.execute(f"alter table {name} add added timestamptz default '{LAST}+00'")
            database.execute(f"update {name} set small = 2 where id = 0")
        made.consume(session)
        made.maintain(session)
        assert {each: session.conf.get(each) for each in OTHER_SETTINGS} == OTHER_SETTINGS
        yield made


def _create(database, name, columns):
    listed = "".join(f', "{column}" {kind}' for column, kind, *_ in columns)
    database.execute(f"create table {name}(id int primary key, small int2{listed})")
    marks = ", ".join(["%s"] * (len(columns) + 2))
    for row in range(3):
        values = [given[row] for _, _, given, _ in columns]
        database.execute(f"insert into {name} values ({marks})", [row, 0, *values])
    database.execute(f"insert into {name} (id) values (9)")


def expected(name):
    columns = [*VALUES, *TABLES[name][0]]
    return {
        "id": [0, 1, 2],
        **{column: returned or given for column, _, given, returned in columns},
        "_wd_raw": RAW,
    }


def plainly(value):
    """A value as every reader returns it: a map as a dict, a time in UTC, a list as a list."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC)
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return dict(value)
    return [plainly(one) for one in value] if isinstance(value, list) else value


def by_name(name, rows):
    rows = sorted(rows, key=lambda row: row["id"])
    return {column: [plainly(row[column]) for row in rows] for column in expected(name)}


def rows_in_spark(recipe, runner):
    frame = eval(recipe, {"spark": runner.spark()})
    if "document" in frame.columns:
        frame = frame.withColumn("document", to_json("document"))
    return frame.toArrow().to_pylist()


def rows_in_duckdb(recipe, _):
    """Without its first line, which installs the extension from DuckDB's server."""
    with duckdb_of_delta() as connection:
        connection.execute("set timezone = 'UTC'")
        found = connection.execute(recipe.partition("\n")[2])
        names = [column[0] for column in found.description]
        rows = [dict(zip(names, row, strict=True)) for row in found.fetchall()]
    for row in rows:
        if row.get("document") is not None:
            row["document"] = json.dumps(row["document"], separators=(",", ":"))
    return rows


def rows_in_delta_rs(recipe, _):
    names = {}
    exec(recipe, names)
    return names["rows"].to_pylist()


READERS = {"Spark": rows_in_spark, "DuckDB": rows_in_duckdb, "Python (delta-rs)": rows_in_delta_rs}


def test_each_recipe_returns_the_rows_of_each_table(runner, pipeline, name):
    details = read_table_details(pipeline.job().ledger, f"public.{name}")
    has_variants = DOCUMENT in TABLES[name][0]
    assert [*details.recipes] == [*READERS][: 2 if has_variants else 3]
    for reader, recipe in details.recipes.items():
        assert by_name(name, READERS[reader](recipe, runner)) == expected(name), reader


def test_a_target_requires_no_feature_that_it_does_not_need(pipeline, name):
    protocol = DeltaTable(pipeline.target_path(f"public.{name}")).protocol()
    required = {*(protocol.reader_features or ())}
    # Of tables before Delta named its features.
    required |= {"columnMapping"} if protocol.min_reader_version == 2 else set()
    assert required == FEATURES[name]


def test_arrow_reads_a_target_that_requires_no_feature_and_polars_refuses_others(pipeline, name):
    """Of columns with mapped names, to_pyarrow_table() would make nulls."""
    uri = pipeline.target_path(f"public.{name}")
    if "columnMapping" in FEATURES[name]:
        with pytest.raises(DeltaProtocolError):
            pl.scan_delta(uri).collect()
    else:
        ids = pl.scan_delta(uri).select("id").collect()["id"]
        assert sorted(ids) == expected(name)["id"]
    if "deletionVectors" in FEATURES[name]:
        with pytest.raises(DeltaProtocolError):
            DeltaTable(uri).to_pyarrow_dataset()
    if not FEATURES[name]:
        assert by_name(name, DeltaTable(uri).to_pyarrow_table().to_pylist()) == expected(name)


def test_no_file_has_a_time_that_readers_take_for_nanoseconds(pipeline, name):
    """Parquet's INT96 is nanoseconds since the end of a day: 9999 is read as 1816."""
    files = list(Path(urlsplit(pipeline.target_path(f"public.{name}")).path).rglob("*.parquet"))
    kinds = [
        (column.path, column.physical_type)
        for file in files
        for column in pq.ParquetFile(file).schema
    ]
    assert kinds
    assert [path for path, kind in kinds if kind == "INT96"] == []


@pytest.mark.nightly("Spark writes the file, and is one of its readers")
def test_a_filter_by_a_column_with_nan(spark_jvm, tmp_path):
    """The page names the readers that find wrong rows by Spark's bounds."""
    spark, uri = OnSpark(spark_jvm()).spark(), f"{tmp_path}/t"
    values = "select id, if(id = 0, double('NaN'), double(id)) f from range(0, 10, 1, 1)"
    spark.sql(f"create table delta.`{uri}` using delta as {values}")
    query, table = "select count(*) from {} where f < 5", DeltaTable(uri)
    right = [
        spark.sql(query.format(f"delta.`{uri}`")).collect()[0][0],
        pl.scan_delta(uri).filter(pl.col("f") < 5).collect().height,
        pa.table(QueryBuilder().register("t", table).execute(query.format("t")).read_all())[0][
            0
        ].as_py(),
    ]
    with duckdb_of_delta() as connection:
        right.append(connection.execute(query.format(f"delta_scan('{uri}')")).fetchone()[0])
        connection.register("rows", table.to_pyarrow_dataset())
        wrong = [connection.execute(query.format("rows")).fetchone()[0]]
    wrong.append(len(table.to_pandas(filters=[("f", "<", 5.0)])))
    assert right == [4, 4, 4, 4]
    assert wrong == [10, 10], "deltalake is mended: tell it on the page"
