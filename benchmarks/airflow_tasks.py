"""``python -m benchmarks.airflow_tasks``: measures the tasks of a small run in real Airflow.

It uses its own stack: scheduler, API server, a Connect server, a fork server. Each task's seconds
are those that Airflow reports, from start to success. They include its supervisor, its task runner
and the parse of the DAG's file, but not the scheduler's time before that.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.sources import MIXED, ORDERS
from demo.airflow_client import DagRun
from demo.stack import Stack

_TIMEOUT_S = 600
_PIPELINE = """\
pipeline: bench
source:
  conn_id: bench_source
  slot: bench
  publications: [{name: bench_pub, tables: [{name: public.orders}]}]
target: {root: "${WALDELTA_LAKE}"}
schedule: null
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Copy a table, then change it round by round, with a run after each."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.airflow_tasks", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="waldelta-tasks-") as folder:
        pipelines = Path(folder, "pipelines")
        pipelines.mkdir()
        (pipelines / "bench.yml").write_text(_PIPELINE)
        stack = Stack(
            Path(folder, "stack"),
            pipelines=pipelines,
            sources={"bench_source": "bench"},
            report=_tell,
        )
        with stack:
            rounds = _measure(stack, asked.rows, asked.changes, asked.rounds)
    table = Table(
        title=f"{asked.changes:,} changes into {asked.rows:,} rows, seconds of each task in Airflow"
    )
    for heading in ("task", "median", "least", "most"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for task in rounds[0]:
        seconds = [one[task] for one in rounds]
        table.add_row(task, *(f"{read(seconds):.1f}" for read in (statistics.median, min, max)))
    Console().print(table)


def _measure(stack: Stack, rows: int, changes: int, rounds: int) -> list[dict[str, float]]:
    found = []
    with (
        stack.client() as airflow,
        psycopg.connect(stack.source_conninfo("bench_source"), autocommit=True) as source,
    ):
        for statement in ORDERS.statements(rows):
            source.execute(statement.encode())
        setup, sync, cdc = (f"bench_{kind}" for kind in ("setup", "initial_sync", "cdc"))
        airflow.wait_for_dags((setup, sync, cdc))
        for dag_id in (setup, sync):
            airflow.unpause(dag_id)
            _tell(str(_seconds(airflow.run_to_end(dag_id, timeout_s=_TIMEOUT_S))))
        airflow.unpause(cdc)
        backlog = MIXED.format(changes=changes, transactions=changes // 100 - 1, newest="")
        for _ in range(1 + rounds):
            source.execute(backlog.encode())
            found.append(_seconds(airflow.run_to_end(cdc, timeout_s=_TIMEOUT_S)))
            _tell(str(found[-1]))
    return found[1:]


def _seconds(run: DagRun) -> dict[str, float]:
    return {
        task.task_id: task.seconds
        for task in run.tasks
        if task.state == "success" and task.seconds is not None
    }


def _tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
