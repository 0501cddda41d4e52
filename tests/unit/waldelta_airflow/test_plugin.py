"""Airflow loads the plugin once: by an installation's entry point, or by the repository's file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.airflow

PLUGINS = Path(__file__).parents[3] / "plugins"
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
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(PLUGINS),
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
