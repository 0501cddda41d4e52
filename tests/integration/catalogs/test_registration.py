"""A catalog follows the targets: create, columns, comments, rename, truncate, drop, adoption."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from moto import mock_aws

from tests.support.catalogs.hive_metastore import hive_metastore
from tests.support.catalogs.unity_server import TOKEN, UnityServer
from tests.support.pipelines import beside_superuser, pipeline_file
from tests.support.servers.serving import serving
from waldelta.catalogs.catalog import Catalog, Registered
from waldelta.catalogs.connect import open_catalog
from waldelta.jobs import Pipeline
from waldelta.spark import InProcess

CONNECTION = "AIRFLOW_CONN_CATALOG"


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

    def copy(self, pipeline: Pipeline) -> None:
        pipeline.setup()
        assert not any("catalog" in text for text in pipeline.sync(self.runner).warnings)

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
        yield Scene(database, lake, {"type": kind, "schema": f"{{schema}}_{database.name}"}, runner)
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


EACH = ["glue", "unity", "hive"]


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
    # Nothing to do: the entry stays as it is.
    assert scene.consume(pipeline, "update orders set v = '{b}'; truncate orders") == []
    assert scene.entries("orders")["orders"] == first
    if scene.settings["type"] == "glue":
        _set_property(scene)
    scene.consume(pipeline, "comment on column orders.v is 'n3w'; insert into orders values (1)")
    # A property that another program has set stays.
    entry = scene.entries("orders")["orders"]
    assert "n3w" in str(entry.entry)
    assert entry.properties.get("theirs") == ("1" if scene.settings["type"] == "glue" else None)
    follow_names(scene)
    assert isinstance(scene.runner, InProcess)
    assert not scene.runner.is_started


def follow_names(scene):
    """The entry of a renamed or dropped table goes; adopted anew it returns."""
    scene.database.execute("alter table orders rename to sales")
    scene.copy(scene.pipeline("public.sales"))
    assert scene.entries("orders", "sales").keys() == {"sales"}
    scene.database.execute("create table other(id int primary key)")
    scene.copy(scene.pipeline("public.other"))
    scene.consume(scene.pipeline("public.other"))
    assert scene.entries("sales", "other").keys() == {"other"}
    scene.copy(scene.pipeline("public.other", "public.sales"))
    assert scene.entries("sales", "other").keys() == {"other", "sales"}


def _set_property(scene):
    client = scene.catalog._client
    table = client.get_table(DatabaseName="public", Name="orders")["Table"]
    kept = ("Name", "TableType", "Parameters", "StorageDescriptor", "PartitionKeys")
    changed = {name: table[name] for name in kept}
    changed["Parameters"] |= {"theirs": "1"}
    client.update_table(DatabaseName="public", TableInput=changed)
