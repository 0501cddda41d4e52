"""What the processes of Airflow load: no PySpark, nothing heavy, and everything once. What a small
run loads.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pipelines import new_pipeline, written

ROOT = Path(__file__).parents[3]
# What Airflow's processes import.
AIRFLOW_LOADS = (
    "waldelta_airflow",
    "waldelta_airflow.plugin",
    "waldelta_airflow.dags.factory",
    "waldelta_airflow.alerts.sending",
    "waldelta_airflow.operators.job_operator",
    # A run without changes is this alone.
    "waldelta.stages.land.idle_check",
    "waldelta.stages.repair.replay.interval",
)


def test_airflow_loads_no_pyspark_and_no_module_under_two_names():
    """Airflow parses DAGs every few seconds, serves pages and looks for changes: none pays for what
    only a job needs. An editable install makes no `include.waldelta` beside `waldelta`.
    """
    program = (
        "import importlib, sys\n"
        "for name in sys.argv[2:]:\n"
        "    importlib.import_module(name)\n"
        "    if heavy := sorted({'pyspark', 'great_expectations', 'sqlglot'} & set(sys.modules)):\n"
        "        sys.exit(f'{name} loads {heavy}')\n"
        "import waldelta.jobs.pipeline\n"
        "files = [getattr(m, '__file__', None) or '' for m in list(sys.modules.values())]\n"
        "ours = [f for f in files if f.startswith(sys.argv[1]) and '.venv' not in f]\n"
        "assert len(ours) == len(set(ours)), sorted(f for f in ours if ours.count(f) > 1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT), *AIRFLOW_LOADS],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


POINT = "[airflow.plugins]\nwaldelta = waldelta_airflow.plugin:WaldeltaPlugin\n"
# Hides this project's own installation, if it has one, from both modules that Airflow may use.
HIDDEN = """
import importlib.metadata, sys
modules = [importlib.metadata]
if sys.version_info < (3, 12):
    import importlib_metadata
    modules.append(importlib_metadata)
for module in modules:
    def shown(found=module.distributions, **of):
        for one in found(**of):
            if one.metadata["Name"] != "waldelta" or str(one._path).startswith({installed!r}):
                yield one
    module.distributions = shown
"""
# Prints what the plugin loads, its source, and what Airflow's page of import errors shows.
PROGRAM = """
from airflow import plugins_manager
from airflow.sdk import plugins_manager as of_tasks
before = set(sys.modules)
import waldelta_airflow.plugin
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(loaded & {"fastapi", "starlette", "pyarrow", "pyspark", "deltalake"} or "nothing heavy")
for manager in (plugins_manager, of_tasks):
    plugins, errors = manager._get_plugins()
    print([str(one.source) for one in plugins if one.name == "waldelta"], errors)
"""


@pytest.mark.parametrize(
    "has_point",
    [
        pytest.param(True, id="entry point"),
        pytest.param(
            False, id="file", marks=pytest.mark.nightly("the file by which the demo loads it")
        ),
    ],
)
def test_the_plugin_is_registered_once(tmp_path, has_point):
    """Without an import error, in the processes of Airflow and in those of its tasks; with the
    repository's plugins folder in both cases. Every task loads it, so FastAPI comes with the first
    request only.
    """
    installed = tmp_path / "first"
    (metadata := installed / "waldelta-1.0.dist-info").mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: waldelta\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(POINT if has_point else "")
    hidden = HIDDEN.format(installed=str(installed))
    environment = {
        **os.environ,
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", hidden + PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    source = (
        "waldelta==1.0: EntryPoint(name='waldelta', value='waldelta_airflow.plugin:WaldeltaPlugin',"
        " group='airflow.plugins')"
        if has_point
        else "$PLUGINS_FOLDER/waldelta_plugin.py"
    )
    assert done.stdout.splitlines()[-3:] == ["nothing heavy", *[f"{[source]} {{}}"] * 2]


# First what the DAG processor has imported anyway. Prints how many DAGs there are, what was read
# how often, and what else was reached or imported.
PARSE = """
import sys, airflow.sdk, airflow.timetables.interval, pydantic, yaml
import airflow.models.dag, airflow.models.dagrun, airflow.serialization.serialized_objects
from collections import Counter
seen = Counter()

def note(event, arguments):
    if event == "open" and str(arguments[0]).endswith(".yml"):
        seen[arguments[0]] += 1
    if event == "socket.connect":
        seen[arguments] += 1

sys.addaudithook(note)
import runpy
names = runpy.run_path(sys.argv[1])
dags = [d for d in names.values() if isinstance(d, airflow.sdk.DAG)]
heavy = {m.partition(".")[0] for m in sys.modules} & set(sys.argv[2].split(","))
print(len(dags), len(seen), max(seen.values()), ",".join(sorted(heavy)) or "none")
"""


def test_parsing_fifty_pipelines_reads_each_once_and_imports_nothing_heavy(write_pipeline):
    """Without Spark, Arrow, Delta or a driver of PostgreSQL, and without any connection."""
    for number in range(50):
        write_pipeline(f"p{number:02}")
    heavy = (
        "pyspark,pyarrow,deltalake,delta,great_expectations,numpy,pandas,psycopg,psycopg2,"
        "adbc_driver_postgresql"
    )
    file = str(ROOT / "dags" / "waldelta_pipelines.py")
    program = [sys.executable, "-c", PARSE, file, heavy]
    run = subprocess.run(program, capture_output=True, text=True, check=True)
    assert run.stdout.split()[-4:] == ["350", "50", "1", "none"]


# Runs a verb, and prints which of these modules that loaded.
VERB = """
import os, sys
leave, unused = os._exit, sys.argv.pop(1).split(",")

def report(code):
    print("loaded:", *{*unused} & {*sys.modules}, flush=True)
    leave(code)

os._exit = report
from waldelta.__main__ import main
main()
"""
UNUSED = "pyspark,great_expectations,jinja2,pandas,polars,sqlglot"


def test_a_small_run_loads_only_what_it_uses(database, lake, tmp_path):
    """A copy of five tables, a run without changes, and one of a hundred, each with its check."""
    tables = [f"public.t{number}" for number in range(5)]
    for table in tables:
        database.execute(f"create table {table} (id int primary key, name text not null)")
        database.execute(f"insert into {table} select n, 'a' from generate_series(1, 9) n")
    pipeline = new_pipeline(database, lake, tables, quality={"enabled": True})
    path = written(pipeline.file, tmp_path)
    pipeline.setup()

    def loads(verb: str) -> str:
        command = [sys.executable, "-c", VERB, UNUSED, verb, str(path)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return run.stdout.splitlines()[-1]

    assert [loads("sync"), loads("consume")] == ["loaded:"] * 2
    for table in tables:
        database.execute(f"update {table} set name = 'b'")
        database.execute(f"insert into {table} select n, 'a' from generate_series(10, 20) n")
    assert loads("consume") == "loaded:"
