"""The wheel in an environment without this repository, as another team installs it."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.other_python import build_distributions, install_wheel, make_team
from waldelta.spark.settings import JARS_VARIABLE, jars_folder

pytestmark = pytest.mark.nightly("installs the wheel into another environment")

PIPELINE = """\
pipeline: shop
source:
  conn_id: shop_source
  slot: wheel_cdc
  publications: [{{name: wheel_pub, tables: [{{name: public.orders}}]}}]
target: {{root: {root}}}
"""
# Prints what Airflow shows: plugins, their import errors, DAGs, their import errors.
AIRFLOW = """
import json, sys
from airflow import plugins_manager
from airflow.dag_processing.dagbag import DagBag
import waldelta, waldelta_airflow
plugins, errors = plugins_manager._get_plugins()
bag = DagBag(dag_folder=sys.argv[1], bundle_path=sys.argv[1], safe_mode=True)
print(json.dumps({
    "plugins": [str(one.source).partition(":")[0] for one in plugins if one.name == "waldelta"],
    "plugin errors": errors,
    "dags": sorted(bag.dags),
    "dag errors": bag.import_errors,
    "files": [waldelta.__file__, waldelta_airflow.__file__],
}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The interpreter of the environment."""
    folder = tmp_path_factory.mktemp("wheel")
    _, wheel = build_distributions(folder / "dist")
    return install_wheel(wheel, folder / "venv")


@pytest.fixture
def team(tmp_path, database, lake) -> tuple[Path, dict[str, str]]:
    """A team's folder with its DAG file and its pipeline, and the environment of its processes."""
    return tmp_path, make_team(tmp_path, PIPELINE.format(root=lake)) | {
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(tmp_path / "plugins"),
        "AIRFLOW_CONN_SHOP_SOURCE": database.uri,
        JARS_VARIABLE: str(jars_folder()),
    }


def run(team, *command: object) -> str:
    folder, environment = team
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_airflow_has_the_plugin_once_and_the_dags_by_one_line(python, team):
    folder, _ = team
    found = json.loads(run(team, python, "-c", AIRFLOW, folder / "dags").splitlines()[-1])
    files = found.pop("files")
    assert [Path(file).is_relative_to(python.parents[1]) for file in files] == [True, True], files
    (plugin,) = found.pop("plugins")
    assert plugin.startswith("waldelta==")
    kinds = ("cdc", "decide", "initial_sync", "maintenance", "reconcile", "resync", "setup")
    assert found == {
        "plugin errors": {},
        "dags": [f"shop_{kind}" for kind in kinds],
        "dag errors": {},
    }


@pytest.fixture
def orders(database):
    database.execute("create table orders (id int primary key, amount int)")
    database.execute("insert into orders values (1, 10), (2, 20)")


def test_the_command_sets_up_a_pipeline(python, team, orders):
    """It finds by itself whatever needs no Spark."""
    command, file = python.with_name("waldelta"), team[0] / "pipelines" / "shop.yml"
    assert run(team, command, "--help").startswith("usage: waldelta ")
    said = run(team, command, "setup", file)
    (finding,) = (line for line in said.splitlines() if line.startswith("  - "))
    assert "role postgres is a superuser" in finding
    assert "create_logical_replication_slot('wheel_cdc'" in said
    assert "public.orders" in run(team, command, "status", file)
    run(team, command, "teardown", file)
