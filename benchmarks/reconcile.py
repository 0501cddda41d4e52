"""``python -m benchmarks.reconcile``: wall and CPU seconds of reconciling one large table, equal
and with differences.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import Any

import psycopg
from deltalake import DeltaTable
from rich.console import Console
from rich.table import Table

from benchmarks.resources import ROLES, watched
from benchmarks.sources import ORDERS
from benchmarks.stack import postmaster, run_with_rows
from waldelta.config import PipelineFile
from waldelta.jobs import Pipeline
from waldelta.pipeline.run_result import RunFailed
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres
from waldelta.spark import spark_session

_CONNECTION = "AIRFLOW_CONN_BENCH_SOURCE"


def _measure(server: EmbeddedPostgres, lake: str, rows: int) -> None:
    """Copy a table of this many rows, compare it, add differences, compare and repair it."""
    os.environ[_CONNECTION] = server.uri()
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        for statement in ORDERS.statements(rows):
            connection.execute(statement.encode())
    publication = {"name": "bench_pub", "tables": [{"name": "public.orders"}]}
    document = {
        "pipeline": "bench",
        "source": {"conn_id": "bench_source", "slot": "bench", "publications": [publication]},
        "target": {"root": lake},
        "quality": {"enabled": False},
    }
    pipeline, spark = Pipeline(PipelineFile.model_validate(document)), spark_session(name="bench")
    pipeline.setup()
    table = Table(title=f"{rows:,} rows of six columns")
    for heading in ("", "seconds", *(f"CPU: {role}" for role in ROLES), "PostgreSQL's query"):
        table.add_column(heading, justify="right")

    def timed(name: str, action: Callable[[], Any]) -> None:
        with watched({"source": postmaster(server)}, [os.getpid()], server.port) as usage:
            began = time.perf_counter()
            action()
            seconds = time.perf_counter() - began
        told = pipeline.job().ledger.last_run()
        result = json.loads(told.result) if told is not None else {}
        detail = result.get("stages", {}).get("reconcile", {}).get("detail", "")
        table.add_row(
            name, f"{seconds:.1f}", *(f"{usage.cpu_s.get(role, 0):.1f}" for role in ROLES), detail
        )

    timed("copy", lambda: pipeline.sync(spark))
    timed("first", lambda: pipeline.reconcile(spark, run_id="first"))
    timed("equal", lambda: pipeline.reconcile(spark, run_id="equal"))
    held = DeltaTable(pipeline.target_path("public.orders"))
    held.delete(f"id % {rows // 100} = 7")
    held.update(updates={"note": "'planted'"}, predicate=f"id % {rows // 100} = 9")
    timed(
        "200 rows differ", lambda: _failing(lambda: pipeline.reconcile(spark, run_id="different"))
    )
    timed("and are repaired", lambda: pipeline.reconcile(spark, run_id="repair", repair=True))
    timed("equal again", lambda: pipeline.reconcile(spark, run_id="again"))
    spark.stop()
    Console(width=200).print(table)


def _failing(action: Callable[[], Any]) -> None:
    try:
        action()
    except RunFailed:
        return
    raise AssertionError("planted differences weren't found")


if __name__ == "__main__":
    run_with_rows("benchmarks.reconcile", __doc__, 2_000_000, _measure)
