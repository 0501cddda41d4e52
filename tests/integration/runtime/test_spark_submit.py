"""The job operator with the real spark-submit: its errors, its end, and what executors are sent."""

import json
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

import waldelta
from tests.support.other_python import python_without_ours
from tests.support.waiting import wait_until
from waldelta.config import load_pipeline_file
from waldelta_airflow.launchers.spark_submit import shipped_packages
from waldelta_airflow.operators.job_operator import WaldeltaJobOperator


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


@pytest.mark.spark
def test_the_applications_error_is_the_tasks(land, make_context):
    """The task fails by the job's named error, not by spark-submit's command line."""
    with pytest.raises(AirflowFailException) as failure:
        land.execute(make_context())
    assert str(failure.value).startswith("SlotMissing: slot 'shop_cdc' ")


@pytest.mark.spark
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


# Prints where each of our modules was found.
IMPORTS = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
found = [pair for pair in sys.modules.items() if pair[0].partition(".")[0] == "waldelta"]
print(json.dumps({name: m.__file__ for name, m in found}))
"""


@pytest.mark.nightly("an archive of all modules; test_release has the wheel's")
def test_every_module_is_found_in_the_zip(tmp_path):
    """Whichever a task imports, at once or within a function."""
    archive, names = (shipped_packages(tmp_path), _modules(waldelta))
    assert {
        "waldelta.slot.read.peek",
        "waldelta.pgoutput.messages",
        "waldelta.changes.stage.stage",
    } <= set(names)
    found = subprocess.run(
        [python_without_ours(tmp_path / "python"), "-c", IMPORTS, *names], cwd=tmp_path,
        env={"PYTHONPATH": str(archive)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    files = json.loads(found.stdout)
    assert {name: file for name, file in files.items() if not file.startswith(f"{archive}/")} == {}
    assert set(names) <= files.keys()


def _modules(package) -> list[str]:
    parent = Path(package.__file__).parents[1]
    paths = [
        path.relative_to(parent).with_suffix("")
        for path in sorted((parent / package.__name__).rglob("*.py"))
    ]
    return [
        ".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__"
    ]
