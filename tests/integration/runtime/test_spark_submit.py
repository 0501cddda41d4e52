"""The job operator with the real spark-submit and the application's own error."""

import json
import threading

import psutil
import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from tests.support.waiting import wait_until
from waldelta.config import load_pipeline_file
from waldelta_airflow.operators.job_operator import WaldeltaJobOperator

pytestmark = pytest.mark.spark


@pytest.fixture
def land(write_pipeline, database, monkeypatch):
    """The task that submits the application, against a database without a slot."""
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", database.uri)
    monkeypatch.setenv(
        "AIRFLOW_CONN_WALDELTA_SPARK", json.dumps({"conn_type": "spark", "host": "local[2]"})
    )
    monkeypatch.setenv("WALDELTA_DRIVER_MEMORY", "1g")
    path = write_pipeline("shop")
    return WaldeltaJobOperator(
        task_id="land", pipeline_path=path, pipeline=load_pipeline_file(path), verb="consume",
        stage="land", first=True,
    )  # fmt: skip


def test_the_applications_error_is_the_tasks(land, make_context):
    """The task fails by the job's named error, not by spark-submit's command line."""
    with pytest.raises(AirflowFailException) as failure:
        land.execute(make_context())
    assert str(failure.value).startswith("SlotMissing: slot 'shop_cdc' ")


@pytest.mark.soak("a second application by spark-submit")
def test_kill_ends_the_jvm_and_its_driver(land, make_context, monkeypatch):
    """Nothing of the application is left when the task was killed while the JVM was starting."""
    monkeypatch.setenv("WALDELTA_RUNNER", "spark")

    def run() -> None:
        with pytest.raises(AirflowException):
            land.execute(make_context())

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(
        lambda: any("org.apache.spark.deploy.SparkSubmit" in " ".join(p) for p in arguments())
    )
    land.on_kill()
    thread.join(timeout=20)
    assert not thread.is_alive()
    wait_until(lambda: not any(land.pipeline_path in p for p in arguments()))


def arguments() -> list[list[str]]:
    own = psutil.Process().children(recursive=True)
    found = []
    for process in own:
        try:
            found.append(process.cmdline())
        except psutil.Error:
            continue
    return found
