"""dbt reads what ``dbt-sources`` writes: its tests pass on the targets, and fail on bad rows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deltalake import DeltaTable

from tests.support.pipelines import bare_job
from waldelta.errors import StateError
from waldelta.jobs.dbt_sources import dbt_sources
from waldelta.stages.sync.sync import sync

ROOT = Path(__file__).parents[3]
# dbt's own requirements exclude Airflow's, so it has an environment of its own.
REQUIREMENTS = ("dbt-core==1.11.16", "dbt-duckdb==1.11.1", "deltalake==1.6.6", "pyarrow==26.0.1")
PROJECT = """
name: lake
version: "1.0"
profile: lake
model-paths: [models]
"""
PROFILES = """
lake:
  target: dev
  outputs:
    dev:
      type: duckdb
      path: lake.duckdb
      plugins:
        - module: delta
"""
OWN = """
expectations:
  - type: expect_column_values_to_be_in_set
    kwargs: {column: status, value_set: [open, closed]}
  - type: expect_column_values_to_not_be_null
    kwargs: {column: note}
    severity: warning
  - type: expect_column_values_to_not_be_null
    kwargs: {column: amount, mostly: 0.5}
"""
EXPECTED = """
version: 2
sources:
- name: {pipeline}
  schema: public
  description: Replicated from PostgreSQL by pipeline {pipeline}.
  config:
    loaded_at_field: _wd_commit_ts
    freshness:
      warn_after: {{count: 60, period: minute}}
  tables:
  - name: customers
    config:
      meta: {{plugin: delta, delta_table_path: {root}/public/customers}}
    columns:
    - {{name: id, data_type: int, data_tests: [not_null, unique]}}
  - name: orders
    description: "One row for each order: it's \\"the\\" table"
    config:
      meta: {{plugin: delta, delta_table_path: {root}/public/orders}}
    columns:
    - {{name: id, data_type: bigint, data_tests: [not_null, unique]}}
    - name: status
      description: open or closed
      data_type: string
      data_tests:
      - accepted_values:
          arguments:
            values: [open, closed]
    - name: note
      data_type: string
      data_tests:
      - not_null:
          config: {{severity: warn}}
    - {{name: amount, data_type: "decimal(8,2)"}}
"""


@pytest.fixture
def job(runner, database, lake, tmp_path):
    """Two copied tables, one with comments and own expectations."""
    database.execute(
        "create table orders(id bigint primary key, status text, note text, amount numeric(8,2));"
        " comment on table orders is 'One row for each order: it''s \"the\" table';"
        " comment on column orders.status is 'open or closed';"
        " create table customers(id int primary key);"
        " insert into orders values (1, 'open', 'a', 1.5), (2, 'closed', 'b', null)"
    )
    (suites := tmp_path / "suites").mkdir()
    (suites / "orders.yml").write_text(OWN)
    tables = ["public.orders", "public.customers"]
    quality, target = {"suites": str(suites)}, {"root": lake, "change_data_feed": True}
    job = bare_job(database, lake, tables, quality=quality, target=target)
    with pytest.raises(StateError, match="run sync"):
        dbt_sources(job)
    sync(runner, job)
    return job


def test_tables_columns_comments_and_tests_are_described(job):
    """An expectation on a part of the rows has no test in dbt."""
    names = {"pipeline": job.pipeline.pipeline, "root": job.pipeline.target.root}
    assert yaml.safe_load(dbt_sources(job)) == yaml.safe_load(EXPECTED.format(**names))


def test_the_page_shows_how_to_read(job):
    """Each Python example of docs/how-to/read-the-lake.md gives the rows, or those it filters."""
    names = {"root": job.pipeline.target.root}
    page = (ROOT / "docs/how-to/read-the-lake.md").read_text()
    counts = []
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(code.replace("> 10", "> 1"), names)
        counts.append(len(names["changes" if "changes" in names else "orders"]))
    assert counts == [1, 2, 1, 2]
    assert names["changes"]["_change_type"].to_list() == ["insert", "insert"]


@pytest.fixture(scope="session")
def dbt():
    """The program, in an environment that is made once."""
    folder = ROOT / ".cache/dbt"
    program = folder / "bin" / "dbt"
    if not program.exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "-q", *REQUIREMENTS], check=True)
    return program


@pytest.mark.nightly("installs dbt-core and dbt-duckdb in an environment of their own")
def test_dbt_runs_them(job, dbt, tmp_path):
    """The generated tests pass; a row that breaks one is found."""
    project = tmp_path / "project"
    (project / "models").mkdir(parents=True)
    for name, text in {
        "dbt_project.yml": PROJECT,
        "profiles.yml": PROFILES,
        "models/sources.yml": dbt_sources(job),
        "models/open_orders.sql": (
            f"select * from {{{{ source('{job.pipeline.pipeline}', 'orders') }}}}"
            " where status = 'open'"
        ),
    }.items():
        (project / name).write_text(text)

    def build() -> str:
        done = subprocess.run(
            [dbt, "--no-use-colors", "build"], cwd=project,
            env=os.environ | {"DBT_SEND_ANONYMOUS_USAGE_STATS": "false"}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        return done.stdout

    assert "PASS=7 WARN=0 ERROR=0 SKIP=0" in build()
    uri = job.lake.target("public.orders").uri.removeprefix("file://")
    DeltaTable(uri).update({"status": "'lost'", "note": "null"}, predicate="id = 2")
    told = build()
    assert "WARN=1 ERROR=1" in told
    assert "source_accepted_values" in told
