"""Catalogs name what they refuse: names, connections, rights, entries of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import polars as pl
import pyarrow as pa
import pytest
from botocore import loaders
from deltalake import write_deltalake
from moto import mock_aws
from moto.core import set_initial_no_auth_action_count
from pydantic import ValidationError

from tests.support.catalogs.unity_server import TOKEN, UnityServer
from tests.support.pipelines import job_of, whole_database
from tests.support.servers.serving import serving
from waldelta.catalogs import register
from waldelta.catalogs.catalog import NameRule, is_same_location, is_within
from waldelta.catalogs.glue import GlueCatalog
from waldelta.catalogs.hive import hive_type
from waldelta.catalogs.register import (
    check_rights,
    judge_catalog,
    open_catalog,
    register_targets,
)
from waldelta.config.catalog import CatalogSettings
from waldelta.errors import (
    CatalogNameRefused,
    CatalogRefused,
    CatalogUnreachable,
    ConfigError,
    PreflightFailed,
)
from waldelta.lake.ledger import SYNCED, ColumnState, TableState, now
from waldelta.pipeline import RunResult
from waldelta.spark.settings import driver_settings

CONNECTION = "AIRFLOW_CONN_CATALOG"
ORDERS = pa.table({"id": pa.array([1, 2], pa.int64()), "v": ["a", "b"]})
COLUMNS = [
    ColumnState("id", 20, -1, "bigint", "bigint", not_null=True, attnum=1),
    ColumnState("v", 25, -1, "text", "string", not_null=False, attnum=2),
]
COMMENTS = {("public.orders", None): "what was sold", ("public.orders", "v"): "it's said"}


@pytest.fixture(autouse=True, scope="module")
def _services_are_read_once() -> Iterator[None]:
    """Each session of boto3 would read its services' descriptions again, for most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loaders, "create_loader", cache(loaders.create_loader))
        yield


@pytest.mark.parametrize(
    "settings, text",
    [
        ({"type": "hive"}, "type hive needs conn_id"),
        ({"type": "unity", "conn_id": "c"}, "type unity needs name"),
        ({"type": "glue", "cut_views": True}, "cut_views needs type hive"),
        ({"type": "glue", "schema": "a.b"}, "schema has letters, digits"),
        ({"type": "glue", "schema": "{table}"}, "schema has letters, digits"),
        ({"type": "glue", "schema": "information_schema"}, "the catalog's own schema"),
        ({"type": "iceberg"}, "'hive', 'glue' or 'unity'"),
    ],
    ids=str,
)
def test_settings_that_are_refused(settings, text):
    with pytest.raises(ValidationError, match=text):
        CatalogSettings.model_validate(settings)


HIVE = {"type": "hive", "conn_id": "catalog"}
UNITY = {"type": "unity", "name": "lake", "conn_id": "catalog"}


@pytest.mark.parametrize(
    "settings, connection, text",
    [
        (HIVE, "", "connection 'catalog' is not known here: set AIRFLOW_CONN_CATALOG"),
        (HIVE, "aws://key:s3cret@/", "type 'aws', which doesn't open a catalog of type hive"),
        (HIVE, "hive-metastore://h:1/?auth_mechanism=GSSAPI", "asks for SASL or TLS"),
        (HIVE, "hive-metastore://:1", "has no host"),
        ({"type": "glue", "conn_id": "catalog"}, "postgres://h/d", "of type aws"),
        (UNITY, "hive-metastore://h", "of type databricks or http"),
        (UNITY, "databricks://:s3cret@", "has no host"),
        (UNITY, '{"conn_type": "http", "host": "file:///etc"}', "isn't http or https"),
    ],
    ids=str,
)
def test_connections_that_are_refused(settings, connection, text):
    """The message never has a secret."""
    with pytest.raises(ConfigError, match=text) as err:
        open_catalog(CatalogSettings.model_validate(settings), {CONNECTION: connection})
    assert "s3cret" not in str(err.value)


@pytest.mark.parametrize(
    "name, stored",
    [
        ("orders", "orders"),
        ("Orders", "orders"),
        ("select", "select"),
        ("x" * 128, "x" * 128),
        ("x" * 129, "longer than 128"),
        ("x" * 200, "longer than 128"),
        ("order items", "other characters"),
        ("größe", "other characters"),
        ("a.b", "other characters"),
        ("", "other characters"),
    ],
)
def test_names(name, stored):
    rule = NameRule("the Hive metastore", 128)
    if " " not in stored:
        assert rule.check(name) == stored
        return
    with pytest.raises(CatalogNameRefused, match=f"can't have the name .*{stored}"):
        rule.check(name)


@pytest.mark.parametrize(
    "kind, stored",
    [
        ("bigint", "bigint"),
        ("decimal(12,2)", "decimal(12,2)"),
        ("timestamp_ntz", "timestamp"),
        ("array<timestamp_ntz>", "array<timestamp>"),
        ("variant", "struct<metadata:binary,value:binary>"),
        ("struct<variant:int,at:timestamp_ntz>", "struct<variant:int,at:timestamp>"),
    ],
)
def test_types_that_hive_lacks(kind, stored):
    assert hive_type(kind) == stored


@pytest.mark.parametrize(
    "first, second, is_same",
    [
        ("file:///lake/t", "file:/lake/t/", True),
        ("s3a://b/t", "s3://b/t", True),
        ("s3a://b/t", "s3a://b/u", False),
        ("s3a://b/t", "s3a://c/t", False),
    ],
)
def test_locations(first, second, is_same):
    assert is_same_location(first, second) is is_same
    assert is_within(f"{second}/x", first) is is_same
    assert not is_within(f"{second.rstrip('/')}x/x", first)


class Scene:
    """A lake with a target, its ledger, and a catalog."""

    def __init__(self, lake, settings, monkeypatch):
        target = {"root": lake, "catalog": settings}
        self.job = job_of(whole_database(lake, target=target))
        self.comments = dict(COMMENTS)
        monkeypatch.setattr(register, "_comments", lambda *_: self.comments)
        write_deltalake(self.job.lake.target("public.orders").uri, ORDERS)
        self.state = self.record("public.orders")

    def record(self, name, **changes):
        state = TableState(
            now(), "run", name, 1, SYNCED, relation_ids=[hash(name) % 2**31],
            key_columns=["id"], columns=COLUMNS,
        )  # fmt: skip
        state = replace(state, **changes)
        self.job.ledger.append(state)
        return state

    @property
    def catalog(self):
        return open_catalog(self.job.pipeline.target.catalog)

    def entries(self, *names):
        return self.catalog.tables("public", names)

    def run(self, verb="consume"):
        result = RunResult(verb, "run")
        register_targets(self.job, result)
        return result.warnings


@pytest.fixture
def glue(lake, monkeypatch):
    monkeypatch.setenv(CONNECTION, "aws://key:secret@/?region_name=eu-central-1")
    with mock_aws():
        yield Scene(lake, {"type": "glue", "conn_id": "catalog"}, monkeypatch)


@pytest.fixture
def server():
    with serving(UnityServer()) as server:
        yield server


@pytest.fixture
def unity(lake, monkeypatch, server):
    connection = {"conn_type": "databricks", "host": server.url, "password": TOKEN}
    monkeypatch.setenv(CONNECTION, json.dumps(connection))
    return Scene(lake, UNITY, monkeypatch)


def test_an_entry_of_glue_is_as_its_crawler_makes_it(glue):
    """Athena and Trino need provider, type and location."""
    assert glue.run() == []
    entry = glue.entries("orders")["orders"].entry
    assert entry["TableType"] == "EXTERNAL_TABLE"
    assert entry["Description"] == "what was sold"
    storage, uri = entry["StorageDescriptor"], glue.job.lake.target("public.orders").uri
    assert storage["Location"] == uri == storage["SerdeInfo"]["Parameters"]["path"]
    assert storage["Columns"] == [
        {"Name": "id", "Type": "bigint"},
        {"Name": "v", "Type": "string", "Comment": "it's said"},
    ]
    expected = {
        "spark.sql.sources.provider": "delta",
        "table_type": "DELTA",
        "waldelta.pipeline": "shop",
        "waldelta.mode": "mirror",
    }
    assert expected.items() <= entry["Parameters"].items()


@pytest.mark.parametrize("scene", ["glue", "unity"])
def test_an_entry_of_others_is_left_alone(scene, request):
    """It is named by runs and by check; the other targets are registered."""
    scene = request.getfixturevalue(scene)
    other = job_of(scene.job.pipeline.model_copy(update={"pipeline": "other"}))
    assert scene.run() == []
    mine = scene.entries("orders")
    write_deltalake(scene.job.lake.target("public.items").uri, ORDERS)
    scene.record("public.items")
    result = RunResult("consume", "run")
    register_targets(other, result)
    (text,) = result.warnings
    assert "the catalog has another public.orders (pipeline shop made it, at" in text
    assert scene.entries("orders") == mine
    assert scene.entries("items")["items"].properties["waldelta.pipeline"] == "other"
    (found,) = judge_catalog(other, {"public.orders": []})
    assert found.severity == "problem"
    assert "public.orders: the catalog has another" in found.text


def test_an_entry_follows_mode_key_and_columns(glue):
    """By the ledger; the columns are those of Delta's log."""
    assert glue.run() == []
    changed = replace(
        glue.state, at=now(), mode="history", key_columns=["id", "v"], columns=COLUMNS[:1]
    )
    glue.job.ledger.append(changed)
    assert glue.run() == []
    entry = glue.entries("orders")["orders"]
    assert entry.properties["waldelta.mode"] == "history"
    assert entry.properties["waldelta.key"] == "id,v"
    assert entry.columns == ("id", "v")


def test_a_run_without_changes_reads_one_entry(glue, monkeypatch):
    """The last one stands for all; maintenance finds what another program removed."""
    for name in ("public.a", "public.b"):
        write_deltalake(glue.job.lake.target(name).uri, ORDERS)
        glue.record(name)
    asked, tables = [], GlueCatalog.tables
    monkeypatch.setattr(
        GlueCatalog, "tables", lambda self, *of: asked.append([*of[1]]) or tables(self, *of)
    )
    assert glue.run() == []
    asked.clear()
    assert glue.run() == []
    assert asked == [["orders"]]
    glue.catalog.drop(glue.entries("a")["a"])
    assert glue.run() == []
    assert glue.entries("a") == {}
    assert glue.run("maintain") == []
    assert glue.entries("a", "b", "orders").keys() == {"a", "b", "orders"}
    asked.clear()
    assert glue.run() == []
    assert asked == [["orders"]]


def test_a_schema_by_template(lake, monkeypatch):
    """It is created, and marked as the pipeline's."""
    settings = {"type": "glue", "conn_id": "catalog", "schema": "Raw_{schema}"}
    monkeypatch.setenv(CONNECTION, "aws://key:secret@/?region_name=eu-central-1")
    with mock_aws():
        scene = Scene(lake, settings, monkeypatch)
        assert scene.run() == []
        assert scene.catalog.tables("raw_public", ["orders"]).keys() == {"orders"}
        database = scene.catalog._client.get_database(Name="raw_public")["Database"]
        assert database["Parameters"] == {"waldelta.pipeline": "shop"}


@pytest.mark.parametrize("verb, is_compared", [("validate", False), ("maintain", True)])
def test_runs_that_compare(glue, verb, is_compared):
    """A run that only reads registers nothing."""
    glue.run(verb)
    assert bool(glue.entries("orders")) is is_compared


def test_an_entry_of_another_lake_is_left_alone(glue):
    """Two environments may have pipelines of one name, and one catalog."""
    assert glue.run() == []
    other = glue.entries("orders")["orders"]
    entry = {name: other.entry[name] for name in ("Name", "Parameters", "StorageDescriptor")}
    entry["StorageDescriptor"]["Location"] = "s3://other/public/orders"
    glue.catalog._client.update_table(DatabaseName="public", TableInput=entry)
    (text,) = glue.run()
    assert "at s3://other/public/orders)" in text
    glue.job.ledger.append(replace(glue.state, at=now(), status="removed"))
    assert glue.run() == []
    assert glue.entries("orders")["orders"].location == "s3://other/public/orders"


def test_names_that_the_catalog_cannot_distinguish(glue):
    for name in ('public."Orders"', 'public."order items"'):
        write_deltalake(glue.job.lake.target(name).uri, ORDERS)
        glue.record(name)
    texts = glue.run()
    assert len(texts) == 2
    assert "can't distinguish its name from that of" in " ".join(texts)
    assert "can't have the name 'order items'" in " ".join(texts)
    assert glue.entries("orders").keys() == {"orders"}
    assert {found.severity for found in judge_catalog(glue.job, {})} == {"problem"}


def test_check_compares_catalog_and_lake(glue):
    (found,) = judge_catalog(glue.job, {"public.orders": ["id"], "public.planned": ["id"]})
    assert found.text.startswith("public.orders isn't in the catalog as public.orders")
    assert glue.run() == []
    assert judge_catalog(glue.job, {"public.orders": ["id", "v"]}) == []
    more = ORDERS.append_column("w", pa.array([1, 2]))
    uri = glue.job.lake.target("public.orders").uri
    write_deltalake(uri, more, mode="overwrite", schema_mode="overwrite")
    (found,) = judge_catalog(glue.job, {})
    assert "has other columns than the target (w)" in found.text


@pytest.mark.parametrize(
    "schema, target, columns, severity, text",
    [
        ("{schema}", 'public."Order"', ["id"], "warning", "a word in public.order: readers"),
        ("{schema}", 'public."Order"', ["Select"], "warning", "public.order, public.order.Select"),
        ("left", "public.t", [], "warning", "a word in left.t: readers"),
        ("{schema}", "public.t", ["table", "date", "user"], "warning", "in public.t.table: reader"),
        ("{schema}", "sys.t", [], "problem", "sys.t: sys is the catalog's own schema"),
        ("{schema}", f"public.{'x' * 256}", [], "problem", "it is longer than 255 bytes"),
    ],
)
def test_check_names_what_readers_must_quote(
    lake, monkeypatch, schema, target, columns, severity, text
):
    monkeypatch.setenv(CONNECTION, "aws://key:secret@/?region_name=eu-central-1")
    settings = {"type": "glue", "conn_id": "catalog", "schema": schema}
    job = job_of(whole_database(lake, target={"root": lake, "catalog": settings}))
    with mock_aws():
        (found,) = judge_catalog(job, {target: columns})
    assert (found.severity, text in found.text) == (severity, True)


@pytest.mark.parametrize(
    "status, error, severity",
    [(503, CatalogUnreachable, "warning"), (403, CatalogRefused, "problem")],
)
def test_a_catalog_that_fails_delays_nothing(unity, server, status, error, severity):
    """The run only warns, and the next one registers."""
    server.status = status
    with pytest.raises(error):
        unity.entries("orders")
    (text,) = unity.run()
    assert text.startswith("tables aren't registered until a run reaches the unity catalog: Unity")
    assert TOKEN not in text
    (found,) = judge_catalog(unity.job, {})
    assert found.severity == severity
    server.status = 0
    assert unity.run() == []
    assert unity.entries("orders").keys() == {"orders"}


def test_a_catalog_that_is_away(unity, server):
    server.server_close()
    (text,) = unity.run()
    assert "can't be reached" in text


@pytest.mark.parametrize("failing", ["post", "delete"])
def test_setup_tries_what_runs_will_do(unity, server, failing):
    """What the catalog refuses is named before anything is made; one that is away is no error."""
    server.status, server.failing = 403, (failing,)
    with pytest.raises(PreflightFailed, match=rf"target\.catalog: .* {failing.upper()} .*: 403 X"):
        check_rights(unity.job, ["public.orders"])
    server.status = 503
    check_rights(unity.job, ["public.orders"])
    server.status = 0
    check_rights(unity.job, ["public.orders"])
    assert (server.entries, [*server.schemas]) == ({}, ["lake.public"])


def test_a_metastore_that_is_away(lake, monkeypatch):
    scene = Scene(lake, HIVE, monkeypatch)
    monkeypatch.setenv(CONNECTION, "hive-metastore://127.0.0.1:1")
    (text,) = scene.run()
    assert "the Hive metastore at 127.0.0.1:1 can't be reached" in text


def test_a_session_keeps_the_users_catalog():
    """Spark's own default is the catalog in memory."""
    assert not any("catalogImplementation" in name for name in driver_settings({}))


def test_a_wrong_token_and_a_missing_catalog(unity, monkeypatch):
    settings = unity.job.pipeline.target.catalog
    other = settings.model_copy(update={"name": "nowhere"})
    with pytest.raises(CatalogRefused, match="404 CATALOG_NOT_FOUND nowhere"):
        open_catalog(other).create_schema("public", {})
    monkeypatch.setenv(CONNECTION, f"databricks://:wrong@{unity.catalog._server[7:]}/http")
    with pytest.raises(CatalogRefused, match="401 UNAUTHENTICATED") as err:
        unity.entries("orders")
    assert "wrong" not in str(err.value)


def test_polars_reads_by_name_what_unity_catalog_was_sent(unity, server):
    """Its own client finds the entry, and so the rows."""
    assert unity.run() == []
    catalog = pl.Catalog(server.url, bearer_token=TOKEN, require_https=False)
    found = catalog.get_table_info("lake", "public", "orders")
    assert found.comment == "what was sold"
    assert [column.name for column in found.columns] == ["id", "v"]
    rows = pl.scan_delta(found.storage_location).collect()
    assert rows["v"].to_list() == ["a", "b"]


def test_a_changed_comment_renews_an_entry(unity, server):
    """Unity Catalog can't change one; the properties that others set stay."""
    assert unity.run() == []
    server.entries["lake.public.orders"]["properties"]["theirs"] = "1"
    unity.comments = {("public.orders", None): "anew"}
    assert unity.run() == []
    entry = server.entries["lake.public.orders"]
    assert entry["comment"] == "anew"
    assert entry["properties"]["theirs"] == "1"


def test_glue_that_refuses_the_key_delays_nothing(glue):
    """moto authenticates each call, and knows no key."""
    (text,) = set_initial_no_auth_action_count(0)(glue.run)()
    assert "Glue refuses" in text
    assert "secret" not in text
    assert glue.run() == []


def test_glue_that_is_away(lake, monkeypatch):
    scene = Scene(lake, {"type": "glue", "conn_id": "catalog"}, monkeypatch)
    url = "aws://key:secret@/?region_name=eu-central-1&endpoint_url=http%3A%2F%2F127.0.0.1%3A1"
    monkeypatch.setenv(CONNECTION, url)
    (text,) = scene.run()
    assert "Glue can't be reached" in text
