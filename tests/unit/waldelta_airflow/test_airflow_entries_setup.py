"""``waldelta airflow setup`` reads a file or a folder; a database: tests/integration/runtime."""

import pytest
import yaml
from airflow.models.connection import Connection
from airflow.models.pool import Pool

from waldelta.errors import ConfigError
from waldelta_airflow.airflow_entries import set_up_airflow


@pytest.fixture(autouse=True)
def _database(airflow_tables):
    airflow_tables(Pool, Connection)


def run(place, **options):
    return set_up_airflow(place, **{"dry_run": False, "adds_connections": False} | options)


def test_a_folder_is_set_up_whatever_a_file_of_it_is(write_pipeline, pipelines):
    write_pipeline("shop")
    wrong = write_pipeline("wrong", more="shcedule: null")
    document, text = run(None)
    assert [(one["pool"], one["state"]) for one in document["pools"]] == [
        ("waldelta_shop_cdc", "created")
    ]
    assert [one["file"] for one in document["refused"]] == [str(wrong)]
    assert "shcedule: unknown key" in text
    assert [one["state"] for one in run(pipelines)[0]["pools"]] == ["exists"]


def test_people_see_the_commands_of_what_is_missing(write_pipeline):
    """Each once, and none of what there is."""
    write_pipeline("shop")
    text = run(write_pipeline("other"), dry_run=True)[1]
    assert text.count("airflow pools set waldelta_other_cdc 1") == 1
    assert "shop" not in text
    assert "Then set each password in Airflow's UI" in run(None)[1]
    assert "airflow pools set" not in run(None)[1]


TARGETS = [
    ({"root": "s3a://b/lake", "conn_id": "the_lake"}, "aws --conn-login ACCESS_KEY_ID"),
    ({"root": "abfss://c@a.dfs.core.windows.net/l", "conn_id": "the_lake"}, "wasb --conn-login A"),
    ({"root": "gs://b/lake", "conn_id": "the_lake"}, "google_cloud_platform --conn-extra"),
    ({"catalog": {"type": "hive", "conn_id": "the_lake"}}, "hive_metastore --conn-host HOST"),
    ({"catalog": {"type": "glue", "conn_id": "the_lake"}}, "aws --conn-login ACCESS_KEY_ID"),
    ({"catalog": {"type": "unity", "name": "n", "conn_id": "the_lake"}}, "databricks --conn-host"),
]


@pytest.mark.parametrize("target, arguments", TARGETS, ids=str)
def test_the_command_fits_every_store_and_catalog(write_pipeline, pipelines, target, arguments):
    path = write_pipeline("shop")
    document = yaml.safe_load(path.read_text())
    document["target"] |= target
    path.write_text(yaml.safe_dump(document))
    text = run(pipelines, dry_run=True)[1]
    assert f"airflow connections add the_lake --conn-type {arguments}" in text


def test_spark_needs_no_server(write_pipeline, monkeypatch):
    monkeypatch.delenv("AIRFLOW_CONN_WALDELTA_SPARK", raising=False)
    text = run(write_pipeline("shop"), dry_run=True)[1]
    assert "--conn-host 'local[*,4]'` runs Spark where the task runs" in text


def test_a_refused_file_alone_is_an_error(write_pipeline):
    with pytest.raises(ConfigError, match="shcedule"):
        run(write_pipeline("wrong", more="shcedule: null"))
