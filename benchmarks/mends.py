"""``python -m benchmarks.mends``: what bringing a target to its source's rows costs, beside the
work that it replaces.

A resync beside one COPY of the table, a killed copy's next attempt beside a whole copy, a backfill
beside its run's own apply, and the repair of two rows. Each is a process of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import yaml
from deltalake import DeltaTable
from rich.console import Console
from rich.table import Table

from benchmarks.resources import watched
from benchmarks.sources import ORDERS
from benchmarks.stack import postmaster, run_with_rows
from waldelta.config import PipelineFile
from waldelta.jobs import Pipeline
from waldelta.lake.ledger import now
from waldelta.lake.staging_leftovers import copy_folder, read_records
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres

_CONNECTION = "AIRFLOW_CONN_BENCH_SOURCE"
# The share of a copy's rows that are staged when it is killed.
_KILLED_AT = 0.8
_FEW, _CHANGES = "public.few", 100_000
_FEW_ROWS = 250_000


class _Mends:
    """A server with a large and a small table, and the seconds of what was done so far."""

    def __init__(self, server: EmbeddedPostgres, lake: str, rows: int, folder: Path) -> None:
        self.server, self.rows, self.file = server, rows, folder / "bench.yml"
        publication = {"name": "bench_pub", "tables": [{"name": "public.orders"}, {"name": _FEW}]}
        document = {
            "pipeline": "bench",
            "source": {"conn_id": "bench_source", "slot": "bench", "publications": [publication]},
            "target": {"root": lake},
            "quality": {"enabled": False},
        }
        self.file.write_text(yaml.safe_dump(document))
        self.pipeline = Pipeline(PipelineFile.model_validate(document))
        self.seconds: dict[str, tuple[float, float]] = {}

    def execute(self, *statements: str) -> None:
        """Run SQL on the source."""
        with psycopg.connect(self.server.conninfo(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def timed(self, name: str, action: Callable[[], Any]) -> None:
        """Note the wall and CPU seconds of all processes that the action needs."""
        with watched({"source": postmaster(self.server)}, [os.getpid()], self.server.port) as usage:
            began = time.perf_counter()
            action()
            seconds = time.perf_counter() - began
        self.seconds[name] = seconds, sum(usage.cpu_s.values())
        print(f"{name}: {seconds:.1f} s, {usage.cpu_s}", flush=True)

    def start(self, verb: str, *options: str) -> subprocess.Popen[str]:
        """Begin a verb as a process of its own, which prints its result."""
        command = [sys.executable, "-m", "waldelta", verb, str(self.file), "--json", *options]
        return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True)

    def run(self, verb: str, *options: str) -> dict[str, Any]:
        """Returns the result of a verb; raises RuntimeError when it fails."""
        process = self.start(verb, *options)
        output, _ = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{verb} failed: {output}")
        result: dict[str, Any] = json.loads(output)
        return result

    def copy_to_client(self) -> None:
        """Read the large table as one COPY does."""
        with (
            psycopg.connect(self.server.conninfo()) as connection,
            connection.cursor() as cursor,
            cursor.copy("copy orders to stdout (format binary)") as rows,
        ):
            for _ in rows:
                pass

    def kill_copy(self) -> None:
        """Begin to copy the large table, and kill the copy when most rows are staged."""
        process, lake = self.start("sync", "--tables", "public.orders"), self.pipeline.job().lake
        folder, staged = copy_folder(lake, "public.orders"), 0
        while staged < _KILLED_AT * self.rows and process.poll() is None:
            time.sleep(0.05)
            entries = read_records(lake, folder)
            staged = sum(file["rows"] for entry in entries for file in entry["files"])
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"killed with {staged:,} of {self.rows:,} rows staged", flush=True)

    def damage(self, table: str, predicate: str) -> None:
        """Change rows of a target, as another program does."""
        target = DeltaTable(self.pipeline.target_path(table))
        target.update(updates={"note": "'damaged'"}, predicate=predicate)

    def ratio(self, one: str, other: str) -> tuple[str, ...]:
        """Returns a row of the table: the two in wall and CPU seconds, and their ratios."""
        pairs = zip(self.seconds[one], self.seconds[other], strict=True)
        return one, other, *(f"{a:.1f} ÷ {b:.1f} = {a / b:.2f}" for a, b in pairs)


def _measure(server: EmbeddedPostgres, lake: str, rows: int) -> None:
    os.environ[_CONNECTION] = server.uri()
    with tempfile.TemporaryDirectory(prefix="waldelta-bench-") as folder:
        mends = _Mends(server, lake, rows, Path(folder))
        few = ORDERS.fill.replace("into orders", "into few").format(rows=_FEW_ROWS)
        create = ORDERS.create.replace("table orders", "table few")
        mends.execute(create, few, *ORDERS.statements(rows))
        mends.run("setup")
        mends.run("sync", "--tables", _FEW)
        mends.timed("copy", lambda: mends.run("sync", "--tables", "public.orders"))
        mends.timed("COPY", mends.copy_to_client)
        mends.damage("public.orders", f"id % {rows // 100} = 7")
        mends.timed(
            "resync, 100 rows differ", lambda: mends.run("resync", "--tables", "public.orders")
        )
        mends.kill_copy()
        mends.timed("killed copy again", lambda: mends.run("sync", "--tables", "public.orders"))
        mends.damage(_FEW, "id in (7, 70007)")
        mends.timed(
            "reconcile --repair", lambda: mends.run("reconcile", "--tables", _FEW, "--repair")
        )
        began = now()
        mends.execute(f"update orders set status = 'changed' where id <= {_CHANGES}")
        mends.run("consume", "--stage", "land")
        mends.timed("apply", lambda: mends.run("consume", "--stage", "apply"))
        interval = ["--interval-start", began.isoformat(), "--interval-end", now().isoformat()]
        mends.timed("backfill", lambda: mends.run("replay", "--stage", "apply", *interval))
    table = Table("", "beside", "seconds", "CPU seconds", title=f"{rows:,} rows of six columns")
    table.add_row(*mends.ratio("resync, 100 rows differ", "COPY"))
    table.add_row(*mends.ratio("killed copy again", "copy"))
    table.add_row(*mends.ratio("backfill", "apply"))
    Console(width=120).print(table)


if __name__ == "__main__":
    run_with_rows("benchmarks.mends", __doc__, 2_000_000, _measure)
