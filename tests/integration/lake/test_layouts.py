"""Targets that are partitioned, clustered or laid out by properties: every reader finds the rows.

A layout that changes later in the pipeline file is followed by maintenance.
"""

import random

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake

from benchmarks.verify import duckdb_of_delta
from tests.oracles.compare import differing
from tests.support.pipelines import copied_pipeline, new_pipeline
from tests.support.seeds import chosen_seed, is_on_spark
from waldelta.changes.merge import divide
from waldelta.changes.merge.target_table import replace_target
from waldelta.errors import PreflightFailed
from waldelta.lake import DeltaTarget, Lake, Tag
from waldelta.lake.data_file import CODEC
from waldelta.lake.layout import TableFile
from waldelta.spark import OnSpark
from waldelta.stages.maintain import maintain

pytestmark = [pytest.mark.pg, pytest.mark.spark]

LAYOUTS = {
    "partitions": {"partition_by": ["day", "place"]},
    "files": {
        "file_size": "64kb",
        "statistics": ["id"],
        "properties": {"delta.autoOptimize.optimizeWrite": "true"},
    },
}
CLUSTERED = {"cluster_by": ["day", "id"]}
PLACES = ["a/b", "c d%", "ü", "x" * 250, None]


def changed(database, rng) -> None:
    """A transaction of a few statements; rows leave their partitions."""
    with database.connect() as connection:
        for _ in range(6):
            key, place = rng.randrange(300), rng.choice(PLACES)
            connection.execute(
                "insert into t select i, date '2026-01-01' + i %% 3, %s, 'v' || i"
                " from generate_series(%s::int, %s::int) i on conflict do nothing",
                (place, key, key + 9),
            )
            connection.execute(
                "update t set place = %s, v = v || '~' where id %% 11 = %s", (place, key % 11)
            )
            connection.execute("update t set day = day + 1 where id %% 13 = %s", (key % 13,))
            connection.execute("delete from t where id = %s", (rng.randrange(300),))


def of_readers(pipeline, text: str) -> list[tuple]:
    """The count of rows, the sum of keys and the last text, as two further readers find them."""
    uri, query = pipeline.target_path("public.t"), f"select count(*), sum(id), max({text}) from "
    found = QueryBuilder().register("t", DeltaTable(uri)).execute(f"{query} t").read_all()
    with duckdb_of_delta() as connection:
        in_duckdb = connection.execute(f"{query} delta_scan(?)", [uri]).fetchone()
    return [tuple(found.column(i)[0].as_py() for i in range(3)), in_duckdb]


def laid_out(database, lake, **layout):
    target = {"root": lake, "tables": {"public.t": layout}}
    return new_pipeline(database, lake, ["public.t"], target=target)


def check(runner, database, pipeline, seen, text="v") -> None:
    assert (seen, differing(runner, pipeline.job(), "public.t")) == (seen, {})
    (row,) = database.execute(f'select count(*), sum(id), max({text} collate "C") from t')
    assert (seen, of_readers(pipeline, text)) == (seen, [row, row])


@pytest.fixture
def table(database):
    database.execute("create table t(id int primary key, day date, place text, v text)")
    database.execute(
        "insert into t select i, date '2026-01-01' + i % 4, 'p' || i % 3, 'v' || i"
        " from generate_series(1, 200) i"
    )
    return database


@pytest.mark.parametrize(
    "layout",
    [
        *LAYOUTS,
        pytest.param("clusters", marks=pytest.mark.nightly("Spark creates a clustered table")),
    ],
)
def test_each_layout_has_the_rows_of_the_source(runner, table, lake, layout):
    seed = chosen_seed()
    rng, options = random.Random(seed), {**LAYOUTS, "clusters": CLUSTERED}[layout]
    pipeline = copied_pipeline(runner, laid_out(table, lake, **options))
    check(runner, table, pipeline, (seen := f"WALDELTA_SEED={seed}"))
    for _ in range(3):
        changed(table, rng)
        pipeline.consume(runner)
        check(runner, table, pipeline, seen)
    held = DeltaTable(pipeline.target_path("public.t"))
    assert held.metadata().partition_columns == options.get("partition_by", [])
    written = [one["operation"] for one in held.history() if one["operation"] != "CREATE TABLE"]
    assert {*written} == {"WRITE"}, "no commit is Spark's"
    if "properties" in options:
        wanted = options["properties"] | {"delta.targetFileSize": str(64 << 10)}
        assert wanted.items() <= held.metadata().configuration.items()
    assert pipeline.maintain(runner).status == "succeeded"
    check(runner, table, pipeline, seen)


def test_maintenance_that_is_killed_continues(runner, table, lake, monkeypatch):
    """Readers see the former partitions; the next maintenance reads only files that are new."""

    def kill(point):
        if point == "maintain.divided":
            raise KeyboardInterrupt

    copied_pipeline(runner, laid_out(table, lake))
    pipeline = laid_out(table, lake, partition_by=["day"])
    uri, opened, open_file = pipeline.target_path("public.t"), [], TableFile.open
    with monkeypatch.context() as patch:
        patch.setattr(divide, "fault_point", kill)
        with pytest.raises(KeyboardInterrupt):
            pipeline.maintain(runner)
    assert not DeltaTable(uri).metadata().partition_columns
    former = set(DeltaTable(uri).file_uris())
    table.execute("insert into t select i, '2026-01-09', 'p', 'v' from generate_series(900, 990) i")
    pipeline.consume(runner)
    check(runner, table, pipeline, "killed")
    (new,) = {*DeltaTable(uri).file_uris()} - former
    monkeypatch.setattr(
        TableFile, "open", lambda file, *where: opened.append(file.path) or open_file(file, *where)
    )
    pipeline.maintain(runner)
    assert DeltaTable(uri).metadata().partition_columns == ["day"]
    # Spark's tasks open files in processes of their own.
    assert {*opened} == (set() if is_on_spark() else {new.rpartition("/")[2]})
    check(runner, table, pipeline, "again")
    changed(table, random.Random(1))
    pipeline.consume(runner)
    check(runner, table, pipeline, "later")


def test_a_division_that_is_killed_behind_its_commit_keeps_its_files(
    runner, table, lake, monkeypatch
):
    """Its records are still there when the pipeline file has other columns."""

    def kill(_):
        raise KeyboardInterrupt

    copied_pipeline(runner, laid_out(table, lake))
    pipeline = laid_out(table, lake, partition_by=["day"])
    with monkeypatch.context() as patch:
        patch.setattr(divide, "remove_folder", kill)
        with pytest.raises(KeyboardInterrupt):
            pipeline.maintain(runner)
    check(runner, table, pipeline, "killed")
    pipeline = laid_out(table, lake, partition_by=["place"])
    assert pipeline.maintain(runner).status == "succeeded"
    check(runner, table, pipeline, "again")


@pytest.mark.nightly("Spark sorts the rows, in each of two maintenances")
@pytest.mark.parametrize("key", ["z_order", "cluster_by"])
def test_maintenance_sorts_rows_once_enough_are_new(runner, table, lake, monkeypatch, key):
    """So that a value is in few files, which have as many rows as others."""
    table.execute(
        "insert into t select i, '2026-01-01', 'p' || i * 7919 % 1000, md5(i::text) from"
        " generate_series(1000, 40000) i"
    )
    pipeline = copied_pipeline(runner, laid_out(table, lake, file_size="128kb", **{key: ["place"]}))
    uri = pipeline.target_path("public.t")

    def files():
        return pa.table(DeltaTable(uri).get_add_actions(flatten=True)).to_pylist()

    def sorts_after(statement, pipeline=pipeline):
        """The columns of sorts by a maintenance, and the share of bytes that it wrote again."""
        table.execute(statement)
        pipeline.consume(runner)
        before = DeltaTable(uri).version()
        former = {one["path"] for one in files()}
        pipeline.maintain(runner)
        check(runner, table, pipeline, statement)
        done = [one for one in DeltaTable(uri).history() if one["version"] > before]
        sizes = {one["path"]: one["size_bytes"] for one in files()}
        new = sum(size for path, size in sizes.items() if path not in former)
        assert {path.split(".")[-2] for path in sizes} == {CODEC}
        orders = [order for order in map(maintain._order_of, done) if order]
        return orders, new / sum(sizes.values())

    assert sorts_after("select 1") == ([["place"]], 1.0)
    wide = [one for one in files() if one["min.place"] <= "p500" <= one["max.place"]]
    assert len(wide) < len(files()) / 3, "rows are sorted by place"
    assert sorts_after("select 2") == ([], 0.0)
    orders, share = sorts_after("insert into t values (50000, '2026-01-01', 'p1', 'new')")
    assert (orders, share < 0.2) == ([], True), "few rows are new"
    # Random keys make all files new, and few rows.
    with monkeypatch.context() as patch:
        patch.setattr("waldelta.changes.merge.file_merge.read_small", lambda *_: None)
        for one in range(3):
            table.execute(f"update t set v = 'n' where id % 100 = {one}")
            table.execute(f"insert into t values (5000{one + 1}, '2026-01-01', 'p1', 'new')")
            pipeline.consume(runner)
        orders, share = sorts_after("select 3")
    assert (orders, share < 0.2) == ([], True), "the files keep their order"
    assert sorts_after("update t set v = 'new' where id % 2 = 0") == ([["place"]], 1.0)
    other = laid_out(table, lake, file_size="128kb", **{key: ["v", "place"]})
    assert sorts_after("select 4", other) == ([["v", "place"]], 1.0)


@pytest.mark.nightly("Spark sorts the rows, and alters a clustered target")
@pytest.mark.parametrize(
    ("former", "layout", "statistics"),
    [
        ({"statistics": ["id"]}, {"z_order": ["place"]}, "id,place"),
        ({"statistics": ["id"]}, {"cluster_by": ["place"]}, "id,place"),
        ({"statistics": ["id", "day"]}, {"partition_by": ["day"]}, "id"),
        ({"cluster_by": ["place"]}, {"cluster_by": [], "statistics": ["id"]}, "id"),
    ],
    ids=str,
)
def test_a_layout_needs_other_statistics_than_the_target_has(
    runner, table, lake, former, layout, statistics
):
    """Delta sorts by no column that has none, and lists none that divides rows."""
    table.execute(
        "insert into t select i, '2026-01-01', 'p' || i * 7919 % 1000, md5(i::text) from"
        " generate_series(1000, 40000) i"
    )
    copied_pipeline(runner, laid_out(table, lake, file_size="128kb", **former))
    pipeline = laid_out(table, lake, file_size="128kb", **layout)
    assert pipeline.maintain(runner).status == "succeeded"
    check(runner, table, pipeline, layout)
    properties = DeltaTable(pipeline.target_path("public.t")).metadata().configuration
    assert properties["delta.dataSkippingStatsColumns"] == statistics


@pytest.mark.nightly("Spark writes the rows with other columns, as the driver does")
def test_spark_replaces_rows_by_some_of_another_layout(spark_jvm, lake):
    """Other partitions, and columns with statistics that are gone."""
    target, runner = DeltaTarget(Lake(lake), f"{lake}/t"), OnSpark(spark_jvm())
    rows = pa.table({"id": [1], "p": ["a"], "v": ["b"]})
    configuration = {"delta.dataSkippingStatsColumns": "id,v"}
    write_deltalake(target.uri, rows, partition_by=["p"], configuration=configuration)
    for number, (columns, partition_by, listed) in enumerate([
        ("1L id, 'a' p, 'b' v", ["v"], "id"), ("1L id, 'a' p, 'b' v", [], "id"),
        ("'a' p, 'b' w, 1 x", ["p", "w"], ""), ("'a' p, 'b' w, 1 x", None, ""),
    ]):  # fmt: skip
        frame = runner.spark().sql(f"select {columns}")
        replace_target(runner, target, frame, Tag.of("test", number, {}), partition_by)
        metadata = target.open().table.metadata()
        assert metadata.configuration["delta.dataSkippingStatsColumns"] == listed
        wanted = ["p", "w"] if partition_by is None else partition_by
        assert (metadata.partition_columns, target.open().dataset().count_rows()) == (wanted, 1)


@pytest.mark.usefixtures("on_spark")
@pytest.mark.nightly("Spark writes the rows with other columns, as the driver does")
def test_columns_with_statistics_keep_them_under_another_name(runner, table, lake):
    layout = {"partition_by": ["day"], "statistics": ["id", "v", "day"]}
    pipeline = copied_pipeline(runner, laid_out(table, lake, **layout))
    table.execute("alter table t rename v to w; insert into t values (999, 'today', 'p', 'w')")
    pipeline.consume(runner)
    check(runner, table, pipeline, "renamed", text="w")
    metadata = DeltaTable(pipeline.target_path("public.t")).metadata()
    assert metadata.partition_columns == ["day"]
    assert metadata.configuration["delta.dataSkippingStatsColumns"] == "id,w"


def test_maintenance_follows_other_partitions(runner, table, lake):
    """In one commit, after which changes are merged as before."""
    copied_pipeline(runner, laid_out(table, lake))
    for columns in (["day"], ["place", "day"], []):
        pipeline = laid_out(table, lake, partition_by=columns)
        before = DeltaTable(pipeline.target_path("public.t")).version()
        assert pipeline.maintain(runner).status == "succeeded"
        held = DeltaTable(pipeline.target_path("public.t"))
        assert (held.metadata().partition_columns, held.version() > before) == (columns, True)
        check(runner, table, pipeline, columns)
        changed(table, random.Random(len(columns)))
        pipeline.consume(runner)
        check(runner, table, pipeline, columns)


@pytest.mark.nightly("Spark clusters the target that maintenance has divided by no column")
def test_a_partitioned_target_becomes_clustered_and_stays_so(runner, table, lake):
    copied_pipeline(runner, laid_out(table, lake, partition_by=["day"]))
    pipeline = laid_out(table, lake, cluster_by=["place"])
    result = pipeline.maintain(runner)
    assert (result.status, [text for text in result.warnings if "layout" in text]) == (
        "succeeded", []
    )  # fmt: skip
    held = pipeline.job().lake.target("public.t").open()
    assert (held.layout.partition_by, held.is_clustered) == ((), True)
    changed(table, random.Random(1))
    pipeline.consume(runner)
    check(runner, table, pipeline, "clustered")
    pipeline = laid_out(table, lake, partition_by=["day"])
    for warnings in (pipeline.check().warnings, pipeline.maintain(runner).warnings):
        (text,) = (text for text in warnings if "layout" in text)
        assert "a clustered target can't have partitions" in text
    check(runner, table, pipeline, "still clustered")


@pytest.mark.nightly("Spark makes a target with deletion vectors")
def test_a_target_that_only_spark_writes_keeps_its_partitions(runner, table, lake):
    copied_pipeline(runner, laid_out(table, lake, deletion_vectors=True))
    pipeline = laid_out(table, lake, deletion_vectors=True, partition_by=["day"])
    for warnings in (pipeline.check().warnings, pipeline.maintain(runner).warnings):
        (text,) = (text for text in warnings if "layout" in text)
        assert "public.t keeps its layout: only Spark writes it" in text


@pytest.mark.parametrize(
    "layout, text",
    [
        ({"partition_by": ["absent"]}, "column 'absent' doesn't exist"),
        ({"statistics": ["absent"]}, "column 'absent' doesn't exist"),
        ({"partition_by": ["r"]}, "column 'r' is double in the lake"),
        ({"partition_by": ["f"]}, r"column 'f' is decimal\(9,2\) in the lake"),
        ({"partition_by": ["at"]}, "column 'at' is timestamp in the lake"),
        ({"z_order": ["absent"]}, "column 'absent' doesn't exist"),
        ({"cluster_by": ["b"]}, "column 'b' is binary in the lake"),
        ({"statistics": ["id", "b"]}, "column 'b' is binary in the lake, which has no statistics"),
        ({"statistics": ["id", "flag"]}, "column 'flag' is boolean in the lake"),
        ({"statistics": ["id", "tags"]}, "column 'tags' is array<string> in the lake"),
        ({"properties": {"delta.appendOnly": "true"}}, "property delta.appendOnly can't be set"),
        ({"properties": {"delta.dataSkippingNumIndexedCols": "1"}}, "set: write statistics"),
        ({"partition_by": ["place"], "mode": "history"}, "an empty text of place as null"),
    ],
    ids=str,
)
def test_a_layout_that_a_target_cannot_have_is_refused(table, lake, layout, text):
    """Before anything is made."""
    table.execute(
        "alter table t add r double precision, add b bytea, add f numeric(9,2), add at timestamptz,"
        " add flag boolean, add tags text[], replica identity full"
    )
    with pytest.raises(PreflightFailed, match=text):
        laid_out(table, lake, **layout).setup()


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ({"partition_by": ["day", "id"]}, "about 100,200 partitions of 1 row each"),
        ({"partition_by": ["id"], "file_size": "64kb"}, "about 100,200 partitions of 1 row each"),
        ({"partition_by": ["place"]}, "column 'place' has nulls, whose rows get a partition"),
        ({"partition_by": ["until"]}, "column 'until' has values that the lake can't hold"),
        ({"partition_by": ["number"]}, "column 'number' has values that the lake can't hold"),
        ({"cluster_by": ["r"]}, "column 'r' is double in the lake: where it has NaN"),
        ({"z_order": ["r"]}, "column 'r' is double in the lake: where it has NaN"),
    ],
    ids=str,
)
def test_columns_that_make_a_poor_layout_are_a_warning(table, lake, layout, text):
    table.execute("alter table t add until date, add number numeric(9), add r double precision")
    unknown = laid_out(table, lake, **layout).check()
    is_unknown = any("isn't known: run ANALYZE" in text for text in unknown.warnings)
    assert is_unknown == ("partition_by" in layout)
    table.execute(
        "insert into t select i, '2026-01-01', null, null, '2026-01-01'::date + i % 10, i % 10, 0"
        " from generate_series(1001, 101000) i;"
        " update t set until = 'infinity', number = 'NaN', r = 'NaN' where id % 100 = 0"
    )
    table.execute("analyze t")
    plan = laid_out(table, lake, **layout).check()
    assert any(text in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    "layout",
    [{"z_order": ["r"]}, {"cluster_by": ["r"]},
     {"partition_by": ["flag"], "statistics": ["id", "flag"]}],
    ids=str,
)  # fmt: skip
def test_columns_that_fit_a_layout_are_no_finding(table, lake, layout):
    table.execute(
        "alter table t add r double precision default 1.5, add flag boolean default true; analyze t"
    )
    plan = laid_out(table, lake, **layout).check()
    assert not [finding for finding in plan.findings if "column" in str(finding)]
