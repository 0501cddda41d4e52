"""The process around the verbs: its exit code and its last words, whatever native threads do at its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import yaml

from tests.pipelines import bare_slot, pipeline_file

# What is left to the interpreter's end would go wrong.
ABORTS_AT_EXIT = (
    "import atexit, os, sys; atexit.register(os.abort)\n"
    "from spark_jobs import command_line\n"
    "{before}\n"
    "command_line.run_and_exit()"
)

ENDINGS = {
    "a named error": (["status", "/nowhere.yml"], "", 1, "ConfigError: pipeline file /nowhere.yml can't be read"),
    "wrong usage": (["dance"], "", 2, "invalid choice: 'dance'"),
    "success": (["status", "x"], "command_line.main = lambda: print('said', end='') or 0", 0, ""),
    "SIGTERM": (["status", "x"], "command_line.main = lambda: command_line._leave(15, None)", 143, ""),
    "a defect": (["status", "x"], "command_line.main = lambda: 1 / 0", 1, "ZeroDivisionError"),
}


def run(command, **environment):
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=os.environ | environment
    )


@pytest.mark.parametrize("arguments, before, code, told", ENDINGS.values(), ids=ENDINGS)
def test_the_exit_code_is_that_of_the_verb(arguments, before, code, told):
    done = run([sys.executable, "-c", ABORTS_AT_EXIT.format(before=before), *arguments])
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Aborted" not in done.stderr
    assert done.stdout == ("said" if code == 0 else "")


@pytest.mark.pg
def test_status_of_a_pipeline(database, lake, tmp_path):
    """All of the answer is out before the process ends."""
    database.execute("create table t(id int primary key)")
    job = bare_slot(database, pipeline_file(lake, f"s_{database.name}"))
    path = tmp_path / "pipeline.yml"
    path.write_text(yaml.safe_dump(job.pipeline.model_dump(mode="json", exclude_none=True)))
    done = run([sys.executable, "-m", "spark_jobs", "status", str(path)], AIRFLOW_CONN_TEST_SOURCE=database.uri)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["slot"]["name"] == job.pipeline.source.slot
    assert answer["slot"]["lag_bytes"] >= 0
