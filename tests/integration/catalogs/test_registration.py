"""A catalog follows the targets: create, columns, comments, rename, truncate, drop, adoption."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from moto import mock_aws

from tests.support.catalogs.hive_metastore import hive_metastore, spark_reader
from tests.support.catalogs.unity_server import TOKEN, UnityServer
from tests.support.pipelines import beside_superuser, pipeline_file
from tests.support.seeds import is_on_spark
from tests.support.servers.serving import serving
from waldelta.catalogs.catalog import Catalog, EntryColumn, Registered, Registration
from waldelta.catalogs.register import open_catalog
from waldelta.config.catalog import CatalogSettings
from waldelta.errors import CatalogNameRefused, CatalogTableForeign, PreflightFailed
from waldelta.jobs import Pipeline
from waldelta.lake import local_path
from waldelta.spark import InProcess

CONNECTION = "AIRFLOW_CONN_CATALOG"
PAGE = Path(__file__).parents[3] / "docs/how-to/register-tables.md"
# The page's lines by which a session calls its metastore ``lake``, without its query.
(_CODE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
THREE_PARTS = "\n".join(line for line in _CODE.splitlines() if "sql(" not in line)


class Scene:
    """A pipeline with a catalog, and the catalog as its own client sees it."""

    def __init__(self, database, lake: str, settings: dict, runner) -> None:
        self.database, self.lake, self.runner = database, lake, runner
        self.settings = settings | {"conn_id": "catalog"}

    def pipeline(self, *tables: str, **target) -> Pipeline:
        """The same slot with these tables."""
        target = {"root": self.lake, "catalog": self.settings} | target
        return Pipeline(
            pipeline_file(self.lake, f"s_{self.database.name}", list(tables), target=target)
        )

    @property
    def catalog(self) -> Catalog:
        return open_catalog(self.pipeline("public.t").file.target.catalog)

    def entries(self, *names: str) -> dict[str, Registered]:
        schema = self.settings.get("schema", "{schema}").format(schema="public")
        return self.catalog.tables(schema, names)

    def views(self, *names: str) -> dict[str, Registered]:
        schema = self.settings["schema"].format(schema="public")
        return self.catalog.tables(f"{schema}_cut", names)

    def copy(self, pipeline: Pipeline) -> None:
        pipeline.setup()
        assert not any("catalog" in text for text in pipeline.sync(self.runner).warnings)

    def compare(self, name: str, columns: str) -> None:
        """A reader that knows the catalog's entry alone finds the source's rows."""
        uri = local_path(self.entries(name)[name].location)
        query = f"select {columns} from {name} order by 1"
        rows = QueryBuilder().register(name, DeltaTable(uri)).execute(query).read_all()
        values = [tuple(row.values()) for row in pa.table(rows).to_pylist()]
        assert values == self.database.execute(query)

    def consume(self, pipeline: Pipeline, statements: str = "") -> list[str]:
        """Run after these statements, and return the run's warnings about the catalog."""
        if statements:
            self.database.execute(statements)
        result = pipeline.consume(self.runner)
        return [text for text in result.warnings if "catalog" in text]


@pytest.fixture(scope="module")
def metastore(tmp_path_factory) -> Iterator[int]:
    with hive_metastore(tmp_path_factory.mktemp("hive")) as port:
        yield port


@pytest.fixture
def scene(request, database, lake, runner, monkeypatch) -> Iterator[Scene]:
    kind = request.param
    if kind == "hive":
        port = request.getfixturevalue("metastore")
        monkeypatch.setenv(CONNECTION, f"hive-metastore://127.0.0.1:{port}")
        schema = f"{{schema}}_{database.name}"
        yield Scene(database, lake, {"type": kind, "schema": schema, "cut_views": True}, runner)
    elif kind == "glue":
        monkeypatch.setenv(CONNECTION, "aws://key:secret@/?region_name=eu-central-1")
        with mock_aws():
            yield Scene(database, lake, {"type": kind}, runner)
    else:
        with serving(UnityServer()) as server:
            monkeypatch.setenv(CONNECTION, json.dumps(
                {"conn_type": "databricks", "host": server.url, "password": TOKEN}
            ))  # fmt: skip
            yield Scene(database, lake, {"type": kind, "name": "lake"}, runner)


EACH = [
    "glue",
    "unity",
    pytest.param("hive", marks=pytest.mark.nightly("its metastore has tests of its own")),
]


NAMES = {"id", "net", "v", "_wd_lsn", "_wd_commit_ts", "_wd_raw"}


@pytest.mark.parametrize("scene", EACH, indirect=True)
def test_a_catalog_follows_the_targets(scene):
    """Each step changes the entry, and nothing else than it; no JVM starts."""
    database = scene.database
    database.execute("""
        create table orders(id int primary key, net numeric(9,2), v text[]);
        comment on table orders is 'what was sold';
        comment on column orders.v is 'the articles';
        insert into orders select g, g, '{a}' from generate_series(1, 5) g
    """)
    pipeline = scene.pipeline("public.orders")
    beside_superuser(str(f) for f in pipeline.check(estimate=False).findings)
    assert scene.entries("orders") == {}
    scene.copy(pipeline)
    first = scene.entries("orders")["orders"]
    assert first.location.split(":")[-1].lstrip("/") == f"{scene.lake[8:]}/public/orders"
    assert set(first.columns) == NAMES
    assert first.properties["waldelta.table"] == "public.orders"
    assert first.properties["waldelta.key"] == "id"
    assert "what was sold" in str(first.entry)
    assert "the articles" in str(first.entry)
    scene.compare("orders", "id, net")
    # Nothing to do: the entry stays as it is.
    assert scene.consume(pipeline, "update orders set v = '{b}'; truncate orders") == []
    assert scene.entries("orders")["orders"] == first
    scene.compare("orders", "id, net")
    if scene.settings["type"] == "glue":
        _set_property(scene)
    scene.consume(pipeline, "comment on column orders.v is 'n3w'; insert into orders values (1)")
    # A property that another program has set stays.
    entry = scene.entries("orders")["orders"]
    assert "n3w" in str(entry.entry)
    assert entry.properties.get("theirs") == ("1" if scene.settings["type"] == "glue" else None)
    changes = "alter table orders add note text; alter table orders rename net to gross;"
    scene.consume(pipeline, f"{changes} insert into orders values (3, 3.5, '{{}}', 'n')")
    assert set(scene.entries("orders")["orders"].columns) == NAMES - {"net"} | {"gross", "note"}
    scene.compare("orders", "id, gross, note")
    follow_names(scene)
    if isinstance(scene.runner, InProcess):
        assert not scene.runner.is_started
    else:
        assert is_on_spark()


def test_a_metastore_takes_names_types_and_changes(metastore, monkeypatch):
    """Also a change of a column's type, which a metastore refuses unless the entry is new."""
    monkeypatch.setenv(CONNECTION, f"hive-metastore://127.0.0.1:{metastore}")
    settings = {"type": "hive", "conn_id": "catalog"}
    catalog = open_catalog(CatalogSettings.model_validate(settings))
    catalog.create_schema("types", {})
    catalog.create_schema("types", {})
    columns = [
        EntryColumn("Net %", "decimal(9,2)", "decimal(9,2)", comment="é" * 5000),
        EntryColumn("at", "array<timestamp_ntz>", {}),
        EntryColumn("document", "variant", "variant"),
    ]
    entry = Registration("types", "select", "file:///lake/t", tuple(columns), "é" * 9000, {})
    catalog.create(entry)
    with pytest.raises(CatalogTableForeign):
        catalog.create(entry)

    def current():
        return catalog.tables("types", ["select", "other"])["select"]

    assert current().columns == ("net %", "at", "document")
    retyped = EntryColumn("at", "int", "integer")
    for changed in ([*reversed(columns)], [retyped], [columns[1], retyped]):
        named = tuple(replace(one, name=f"c{number}") for number, one in enumerate(changed))
        catalog.alter(replace(entry, columns=named), current())
        assert current().columns == tuple(column.name for column in named)
    catalog.drop(current())
    catalog.drop(Registered("types", "select", "", (), {}))
    assert catalog.tables("types", ["select"]) == {}
    with pytest.raises(CatalogNameRefused, match=r"refuses types\.a-b"):
        catalog.create(replace(entry, name="a-b"))


@pytest.mark.parametrize("scene", ["hive"], indirect=True)
def test_rights_that_a_metastore_refuses_delay_only_the_entry(scene, metastore, monkeypatch):
    """Setup names them before anything is made, and each run what it could not do."""
    database = scene.database
    database.execute("""
        create table orders(id int primary key, v text);
        insert into orders select g, 'a' from generate_series(1, 5) g
    """)
    schema = scene.settings["schema"].format(schema="public")
    pipeline = scene.pipeline("public.orders")

    def become(login):
        monkeypatch.setenv(CONNECTION, f"hive-metastore://{login}127.0.0.1:{metastore}")

    def refused(warnings):
        (text,) = (text for text in warnings if "catalog" in text)
        assert text.startswith("public.orders isn't registered in the hive catalog: ")
        assert "user=reader" in text
        return text

    become("reader@")
    with pytest.raises(
        PreflightFailed, match=f"target.catalog: .* refuses {schema}: .*reader"
    ) as err:
        pipeline.setup()
    assert f"refuses {schema}_cut: " in str(err.value)
    assert database.execute("select count(*) from pg_publication") == [(0,)]
    become("")
    pipeline.setup()
    assert scene.entries("waldelta_probe") == {}
    become("reader@")
    refused(pipeline.sync(scene.runner).warnings)
    assert scene.entries("orders") == {}
    rows = DeltaTable(pipeline.target_path("public.orders")).to_pyarrow_table()
    assert rows.num_rows == 5
    become("")
    assert scene.consume(pipeline) == []
    become("reader@")
    changes = "comment on table orders is 'n3w'; insert into orders values (6)"
    assert f"refuses {schema}.orders" in refused(scene.consume(pipeline, changes))
    scene.compare("orders", "id, v")
    become("")
    assert scene.consume(pipeline) == []
    assert "n3w" in str(scene.entries("orders")["orders"].entry)


@pytest.mark.parametrize("scene", ["hive"], indirect=True)
def test_views_of_a_consistent_cut(scene):
    """All views are of one batch, and the view of a removed table goes."""
    scene.database.execute("create table a(id int primary key); create table b(id int primary key)")
    pipeline = scene.pipeline("public.a", "public.b")
    scene.copy(pipeline)
    for number in (1, 2):
        scene.consume(pipeline, f"insert into a values ({number})")
        cut = pipeline.job().ledger.last_cut()
        wanted = {
            of.table_name[-1]: f"{pipeline.job().lake.target(of.table_name).relation}"
            f" VERSION AS OF {of.version}"
            for of in cut.targets
        }
        views = scene.views("a", "b")
        assert views.keys() == wanted.keys() == {"a", "b"}
        assert all(views[name].entry.viewExpandedText.endswith(wanted[name]) for name in wanted)
    scene.copy(scene.pipeline("public.b"))
    scene.consume(scene.pipeline("public.b"))
    assert scene.views("a", "b").keys() == {"b"}


@pytest.mark.parametrize("scene", ["hive"], indirect=True)
def test_a_view_that_the_pipeline_did_not_make_is_named_before_the_copy(scene):
    scene.database.execute("create table a(id int primary key)")
    pipeline, schema = scene.pipeline("public.a"), scene.settings["schema"].format(schema="public")
    scene.catalog.create_schema(f"{schema}_cut", {})
    column = EntryColumn("id", "int", "integer")
    scene.catalog.create(Registration(f"{schema}_cut", "a", "file:///x", (column,), None, {}))
    (text,) = pipeline.check(estimate=False).problems
    assert text.startswith(f"public.a: the catalog has another {schema}_cut.a (waldelta didn't")


@pytest.mark.nightly("needs a metastore of its own, and then a JVM for the reader")
def test_sparks_own_metastore_has_what_was_registered_in_it(
    database, lake, runner, monkeypatch, tmp_path
):
    """Its database is served while the pipeline runs, and embedded in Spark afterwards."""
    database.execute("create table orders(id int primary key); insert into orders values (1), (2)")
    with hive_metastore(tmp_path) as port:
        monkeypatch.setenv(CONNECTION, f"hive-metastore://127.0.0.1:{port}")
        scene = Scene(database, lake, {"type": "hive"}, runner)
        pipeline = scene.pipeline("public.orders")
        scene.copy(pipeline)
        assert scene.consume(pipeline, "insert into orders values (3)") == []
    with spark_reader(tmp_path, tmp_path, THREE_PARTS) as read:
        for name in ("public.orders", "spark_catalog.public.orders", "lake.public.orders"):
            assert read(f"select id from {name} order by id") == [(1,), (2,), (3,)]


@pytest.mark.nightly("needs a JVM for the reader, beside the metastore's")
@pytest.mark.parametrize("scene", ["hive", "glue"], indirect=True)
def test_spark_reads_by_name_what_the_source_has(scene, metastore, tmp_path):
    """After each change of the source; in its views two tables are of one moment."""
    database = scene.database
    schema = scene.settings.get("schema", f"{{schema}}_{database.name}").format(schema="public")
    database.execute("""
        create table "order"(id int primary key, "Net %" numeric(9,2), v text[]);
        create table items(id int primary key, of int);
        insert into "order" select g, g, '{a}' from generate_series(1, 5) g;
        insert into items select g, g from generate_series(1, 9) g
    """)
    pipeline = scene.pipeline('public."order"', "public.items")
    with spark_reader(metastore, tmp_path, THREE_PARTS) as read:

        def listed():
            if scene.settings["type"] == "glue":
                hand_over(scene, metastore, schema)
            return [row[0] for row in read(f"show tables in {schema}")]

        def compare(columns, name, of_schema=schema):
            assert name in listed()
            in_source = columns.replace("`", '"')
            wanted = database.execute(f'select {in_source} from "{name}" order by 1')
            for catalog in ("", "spark_catalog.", "lake."):
                rows = read(f"select {columns} from {catalog}{of_schema}.`{name}` order by 1")
                assert rows == [tuple(json.loads(json.dumps(row, default=str))) for row in wanted]

        scene.copy(pipeline)
        compare("id, `Net %`", "order")
        compare("id, of", "items")
        scene.consume(pipeline, 'alter table "order" add note text; update "order" set note = id')
        compare("id, `Net %`, note", "order")
        scene.consume(
            pipeline, "alter table items rename of to number; insert into items values (10)"
        )
        compare("id, number", "items")
        scene.consume(pipeline, 'truncate items; insert into "order" values (7)')
        compare("id, number", "items")
        for name in ("order", "items") if scene.settings.get("cut_views") else ():
            compare("id", name, of_schema=f"{schema}_cut")
        database.execute('alter table "order" rename to sales')
        pipeline = scene.pipeline("public.sales", "public.items")
        scene.copy(pipeline)
        scene.consume(pipeline, "insert into sales values (8); insert into items values (1, 1)")
        compare("id, note", "sales")
        assert listed() == ["items", "sales"]
        scene.copy(scene.pipeline("public.items"))
        scene.consume(scene.pipeline("public.items"))
        assert listed() == ["items"]
        scene.copy(pipeline)
        compare("id, note", "sales")


def hand_over(scene, metastore, schema):
    """Give a metastore the entries that Glue has, by the same fields, as Glue's client does."""
    environment = {CONNECTION: f"hive-metastore://127.0.0.1:{metastore}"}
    settings = CatalogSettings.model_validate({"type": "hive", "conn_id": "catalog"})
    hive = open_catalog(settings, environment)
    hive.create_schema(schema, {})
    for name in hive._client.get_all_tables(schema):
        hive._client.drop_table(schema, name, False)
    for entry in scene.catalog._client.get_tables(DatabaseName="public")["TableList"]:
        storage = entry["StorageDescriptor"]
        table = hive._entry(Registration(schema, entry["Name"], "", (), None, {}), {})
        table.parameters = entry["Parameters"]
        table.sd.location = storage["Location"]
        table.sd.serdeInfo.parameters = storage["SerdeInfo"]["Parameters"]
        table.sd.cols = [
            hive._kinds.FieldSchema(column["Name"], column["Type"], column.get("Comment"))
            for column in storage["Columns"]
        ]
        hive._client.create_table(table)


def follow_names(scene):
    """The entry of a renamed or dropped table goes, and returns when the table is adopted again."""
    scene.database.execute("alter table orders rename to sales")
    scene.copy(scene.pipeline("public.sales"))
    scene.consume(scene.pipeline("public.sales"), "insert into sales values (2)")
    assert scene.entries("orders", "sales").keys() == {"sales"}
    scene.compare("sales", "id, gross, note")
    scene.database.execute("create table other(id int primary key)")
    scene.copy(scene.pipeline("public.other"))
    scene.consume(scene.pipeline("public.other"))
    assert scene.entries("sales", "other").keys() == {"other"}
    scene.copy(scene.pipeline("public.other", "public.sales"))
    assert scene.entries("sales", "other").keys() == {"other", "sales"}
    scene.compare("sales", "id, gross, note")


def _set_property(scene, name="theirs", value="1"):
    client = scene.catalog._client
    table = client.get_table(DatabaseName="public", Name="orders")["Table"]
    kept = ("Name", "TableType", "Parameters", "StorageDescriptor", "PartitionKeys")
    changed = {name: table[name] for name in kept}
    changed["Parameters"] |= {name: value}
    client.update_table(DatabaseName="public", TableInput=changed)


@pytest.mark.parametrize("scene", ["glue"], indirect=True)
def test_a_lost_slot_is_recreated_whatever_the_catalog_has(scene):
    """Setup refuses an entry that isn't the pipeline's; data doesn't wait for it."""
    scene.database.execute("create table orders(id int primary key)")
    pipeline = scene.pipeline("public.orders")
    scene.copy(pipeline)
    _set_property(scene, "waldelta.pipeline", "other")
    with pytest.raises(PreflightFailed, match=r"the catalog has another public\.orders"):
        pipeline.setup()
    scene.database.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots"
        " where database = current_database()"
    )
    scene.database.execute("insert into orders values (1)")
    result = pipeline.resync(scene.runner)
    assert any("the catalog has another public.orders" in text for text in result.warnings)
    assert scene.consume(pipeline, "insert into orders values (2)")
    scene.compare("orders", "id")


@pytest.mark.parametrize("scene", ["glue"], indirect=True)
def test_a_catalog_has_targets_by_their_names_in_the_lake(scene):
    """A target that is moved leaves its old name; columns have the comments of the source's."""
    scene.database.execute("""
        create table orders(id int primary key, v text);
        comment on column orders.v is 'the articles';
    """)
    own = {"columns": {"v": "articles"}}
    scene.copy(scene.pipeline("public.orders", tables={"public.orders": own}))
    assert "the articles" in str(scene.entries("orders")["orders"].entry)
    moved = scene.pipeline("public.orders", names="sales_{table}", tables={"public.orders": own})
    scene.consume(moved, "insert into orders values (1, 'a')")
    found = scene.entries("orders", "sales_orders")
    assert list(found) == ["sales_orders"]
    assert found["sales_orders"].location.endswith("/public/sales_orders")
    assert "articles" in found["sales_orders"].columns
