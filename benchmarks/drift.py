"""What mending a changed filter costs, beside a copy of the whole table: few rows enter and as many leave.

Run: python -m benchmarks.drift [rows] [rows that enter, and that leave]
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.measured import Measured
from benchmarks.sync import FILL, ORDERS
from demo.embedded_postgres import EmbeddedPostgres
from spark_jobs.flow import consume
from spark_jobs.session import spark_session
from spark_jobs.sync import sync
from waldelta.connection import connect
from waldelta.job import Job
from waldelta.ledger import SlotMove, now
from waldelta.lsn import Lsn
from waldelta.pipeline_file import PipelineFile
from waldelta.server import read_position

ROUNDS = 2


def run(row_count: int, moving: int) -> list[Measured]:
    """Copy the table and mend it by a run, a few times; the first with a cold JVM, of the others the fastest."""
    measured: dict[str, Measured] = {}
    folder = Path(tempfile.mkdtemp())
    with EmbeddedPostgres(folder / "postgres", settings={"fsync": "off", "wal_level": "logical"}) as server:
        connection = connect(server.conninfo(), "benchmark")
        connection.execute(ORDERS)
        connection.execute(FILL, (row_count + moving,))
        connection.execute("vacuum analyze public.orders")
        filters = [f"id <= {row_count}", f"id > {moving}"]
        connection.execute(f"create publication bench for table public.orders where ({filters[0]})")
        lsn = connection.execute("select lsn::text from pg_create_logical_replication_slot('bench', 'pgoutput')")
        document = {
            "pipeline": "bench",
            "source": {"conn_id": "bench", "slot": "bench", "publications": [{"name": "bench", "manage": False}]},
            "target": {"root": (folder / "lake").as_uri(), "drift": "repair"},
            "quality": {"enabled": False},
        }
        job = Job(PipelineFile.model_validate(document), server.conninfo(), "bench")
        system, created = read_position(connection).system_identifier, lsn.fetchone()[0]
        job.ledger.append(SlotMove(now(), "bench", "created", "bench", system, 1, created, Lsn.parse(created).value))
        spark = spark_session("local[2]", name="bench")
        spark.sparkContext.setLogLevel("ERROR")
        for n in range(ROUNDS + 1):
            began = time.perf_counter()
            sync(spark, job, ["public.orders"])
            copied = time.perf_counter() - began
            connection.execute(f"alter publication bench set table public.orders where ({filters[(n + 1) % 2]})")
            began = time.perf_counter()
            result = consume(spark, replace(job, run_id=f"bench {n}"))
            repaired = time.perf_counter() - began
            label = "cold" if n == 0 else "warm"
            name = f"another filter, {moving:,} rows in and out of {row_count:,}, {label}"
            found = Measured(name, repaired, "a copy", repaired / copied)
            measured[label] = min(measured.get(label, found), found, key=lambda m: m.seconds)
            print(f"{label}: copy {copied:.1f} s, run that repairs {repaired:.1f} s = {repaired / copied:.2f}x;"
                  f" {result.warnings}", flush=True)  # fmt: skip
        spark.stop()
    server.delete()
    return list(measured.values())


if __name__ == "__main__":
    run(*(int(argument) for argument in (sys.argv[1:] or ["2000000", "10000"])))
