"""Airflow in tests: a throw-away AIRFLOW_HOME, set before anything imports airflow, and pipeline files to parse."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if "AIRFLOW_HOME" not in os.environ:
    os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="waldelta-airflow-")
    atexit.register(shutil.rmtree, os.environ["AIRFLOW_HOME"], ignore_errors=True)
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "false")
os.environ.setdefault("AIRFLOW__CORE__UNIT_TEST_MODE", "false")

PIPELINE = """\
pipeline: {name}
source:
  conn_id: {name}_source
  slot: {name}_cdc
  publications:
    - name: {name}_pub
      tables:
        - {{name: public.flights, where: "origin = 'JFK'"}}
        - {{name: public.planes, columns: [tailnum, year]}}
target:
  root: {root}
{more}
"""

WritePipeline = Callable[..., Path]


@pytest.fixture
def pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of pipeline files that the DAG factory reads."""
    folder = tmp_path / "pipelines"
    folder.mkdir()
    monkeypatch.setenv("WALDELTA_PIPELINES", str(folder))
    return folder


@pytest.fixture
def write_pipeline(pipelines: Path, lake: str) -> WritePipeline:
    """Writes a small pipeline file; ``more`` is appended to it."""

    def write(name: str, more: str = "", text: str = PIPELINE) -> Path:
        path = pipelines / f"{name}.yml"
        path.write_text(text.format(name=name, root=f"{lake}/{name}", more=more))
        return path

    return write


class Events(dict):
    """Stands for Airflow's accessor of outlet events."""

    def __missing__(self, alias: Any) -> Any:
        self[alias] = SimpleNamespace(added=[])
        self[alias].add = lambda asset, extra: self[alias].added.append((asset, extra))
        return self[alias]


@pytest.fixture
def make_context():
    """A task's context, as far as the operators look at it."""

    def make(
        *, run_type: str = "scheduled", try_number: int = 1, max_tries: int = 0, xcoms: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        start = datetime(2026, 1, 1, tzinfo=UTC)
        run = SimpleNamespace(
            run_id=f"{run_type}__2026-01-01",
            run_type=run_type,
            data_interval_start=start,
            data_interval_end=start.replace(minute=5),
        )
        ti = SimpleNamespace(
            dag_id="shop_cdc",
            try_number=try_number,
            max_tries=max_tries,
            xcom_pull=lambda *, task_ids: (xcoms or {}).get(task_ids),
        )
        return {"dag_run": run, "ti": ti, "outlet_events": Events()}

    return make
