"""What pipelines lack in Airflow's database, with the command that adds it."""

import shlex

import pytest
from airflow.models.connection import Connection
from airflow.models.pool import Pool
from sqlalchemy import insert
from sqlalchemy.orm import Session

from waldelta.config import load_pipeline_file
from waldelta_airflow.airflow_entries import as_json, describe_missing, read_connections, read_pools


@pytest.fixture
def session(monkeypatch, airflow_tables):
    """Airflow's tables of pools and connections, empty; no variable of a test has a connection."""
    for name in ("SHOP_SOURCE", "WALDELTA_SPARK"):
        monkeypatch.delenv(f"AIRFLOW_CONN_{name}", raising=False)
    with Session(airflow_tables(Pool, Connection)) as session:
        yield session


@pytest.fixture
def shop(write_pipeline):
    return load_pipeline_file(write_pipeline("shop"))


def add_connection(session, conn_id):
    told = {"conn_id": conn_id, "conn_type": "postgres", "is_encrypted": False}
    session.execute(insert(Connection).values(**told, is_extra_encrypted=False))


def test_what_is_missing_is_named_with_its_command(session, shop):
    pools, connections = read_pools(session, [shop]), read_connections(session, [shop])
    assert [(one.pool, one.state) for one in pools] == [("waldelta_shop_cdc", "missing")]
    expected = [("shop_source", "source", "missing"), ("waldelta_spark", "Spark", "missing")]
    assert [(one.connection, one.use, one.state) for one in connections] == expected
    expected = ["airflow", "pools", "set", "waldelta_shop_cdc", "1", "runs on slot shop_cdc"]
    assert shlex.split(as_json(pools[0])["command"]) == expected
    command = as_json(connections[0])["command"]
    assert command.startswith(
        "airflow connections add shop_source --conn-type postgres --conn-host"
    )
    assert "password" not in command
    found = describe_missing(pools, connections)["shop"]
    (pool, source, spark) = [one.text for one in found]
    assert pool.startswith(
        "Airflow has no pool waldelta_shop_cdc, so tasks that use the slot never"
    )
    assert "airflow pools set waldelta_shop_cdc 1" in pool
    assert (source.count("shop_source"), spark.count("waldelta_spark")) == (1, 1)


def test_what_is_there_is_not_reported(session, shop, monkeypatch):
    """A connection may also be in the environment, as JSON or as a URI."""
    session.execute(insert(Pool).values(pool=shop.pool, slots=1, include_deferred=False))
    add_connection(session, "shop_source")
    monkeypatch.setenv("AIRFLOW_CONN_WALDELTA_SPARK", '{"conn_type": "spark_connect"}')
    pools, connections = read_pools(session, [shop]), read_connections(session, [shop])
    states = [one.state for one in (*pools, *connections)]
    assert states == ["exists", "exists", "in the environment"]
    assert describe_missing(pools, connections) == {}
    assert "command" not in as_json(connections[1])


@pytest.mark.parametrize(
    "root, conn_type",
    [
        ("s3a://bucket/x", "aws"),
        ("abfss://c@a.dfs.core.windows.net/x", "wasb"),
        ("gs://bucket/x", "google_cloud_platform"),
    ],
)
def test_the_lakes_connection_is_needed_too(session, write_pipeline, root, conn_type):
    path = write_pipeline("shop")
    text = path.read_text()
    kept = text[: text.index("  root:")]
    path.write_text(f"{kept}  root: {root}\n  conn_id: lake_store\n")
    *_, lake = read_connections(session, [load_pipeline_file(path)])
    assert (lake.connection, lake.use, lake.conn_type) == ("lake_store", "lake", conn_type)


def test_pipelines_may_share_a_connection(session, write_pipeline, shop):
    other = load_pipeline_file(write_pipeline("other"))
    found = read_connections(session, [shop, other])
    expected = ["shop", "other"]
    assert [one.pipeline for one in found if one.connection == "waldelta_spark"] == expected
