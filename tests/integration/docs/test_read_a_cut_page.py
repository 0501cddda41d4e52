"""The DAG of docs/how-to/read-a-cut.md waits for a cut of three tables and reads it by name."""

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from airflow.dag_processing.dagbag import DagBag

from tests.support.pipelines import copied_pipeline, new_pipeline

PAGE = Path(__file__).parents[3] / "docs/how-to/read-a-cut.md"
TABLES = ["public.customers", "public.orders", "public.lines"]


@pytest.fixture
def pipeline(runner, database, lake):
    database.execute("""
        create table customers(id int primary key, name text);
        create table orders(id int primary key, customer int);
        create table lines(id int primary key, "order" int, price numeric(8, 2));
        insert into customers values (1, 'Ada'), (2, 'Ben');
        insert into orders values (10, 1), (20, 2);
        insert into lines values (100, 10, 1.50), (200, 20, 2.50)
    """)
    return copied_pipeline(runner, new_pipeline(database, lake, TABLES))


@pytest.fixture
def dag(pipeline, tmp_path):
    """The page's DAG for this pipeline, as Airflow parses it."""
    (file := tmp_path / "shop.yml").write_text(yaml.safe_dump(pipeline.file.model_dump(
        mode="json", exclude_unset=True
    )))  # fmt: skip
    *_, code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder := tmp_path / "dags").mkdir()
    code = code.replace("/opt/pipelines/shop.yml", str(file)).replace("interval=60", "interval=1")
    (folder / "revenue.py").write_text(code.replace("s3a://lake/shop", pipeline.file.target.root))
    bag = DagBag(dag_folder=str(folder), bundle_path=folder, safe_mode=True)
    assert bag.import_errors == {}
    return bag.dags["revenue"]


CHANGES = """
    begin;
    update customers set name = 'Eve' where id = 1;
    insert into lines values (300, 20, 3.00);
    commit
"""


@pytest.mark.usefixtures("dag")
@pytest.mark.nightly("Airflow's own processes, with a database of their own")
def test_airflow_runs_the_dag(runner, database, pipeline, tmp_path):
    """Its sensor is rescheduled until a run has published a cut."""
    environment = os.environ | {
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{tmp_path}/airflow.db",
    }
    airflow = [sys.executable, "-m", "airflow"]
    subprocess.run([*airflow, "db", "migrate"], env=environment, check=True, capture_output=True)
    database.execute(CHANGES)
    test = subprocess.Popen(
        [*airflow, "dags", "test", "revenue"], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert any("Rescheduling task" in line for line in test.stdout)
    pipeline.consume(runner)
    (result,) = (line for line in test.stdout if "Returned value was: [" in line)
    assert "[('Ben', 5.5), ('Eve', 1.5)]" in result
    assert test.wait() == 0


def test_the_dag_waits_for_a_cut_and_reads_three_tables(runner, database, pipeline, dag):
    cut, report = (dag.get_task(name).python_callable for name in ("cut", "report"))
    assert not cut().is_done, "no run has published a cut"
    database.execute(CHANGES)
    pipeline.consume(runner)
    assets = {
        asset.name.partition("/")[2]: asset for asset in dag.timetable.asset_condition.objects
    }
    assert {table: asset.uri for table, asset in assets.items()} == {
        table: pipeline.target_path(table) for table in TABLES
    }
    version = pipeline.job().lake.target("public.lines").version

    def event(number):
        events = [SimpleNamespace(extra={"version": number})]
        # Airflow's mapping has an empty list for any other asset.
        return defaultdict(list, {assets["public.lines"]: events})

    assert not cut(event(version + 1)).is_done, "the cut lacks an announced change"
    waited = cut(event(version))
    assert waited.is_done
    database.execute("update customers set name = 'Zoe'; delete from lines")
    pipeline.consume(runner)
    assert report(waited.xcom_value) == [("Ben", 5.5), ("Eve", 1.5)]
    assert report(cut().xcom_value) == []
