"""How long the initial sync of the main job's orders takes, beside COPY … (FORMAT binary) of the same table.

Run: python benchmarks/sync.py [rows]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measured import Measured
from demo.embedded_postgres import EmbeddedPostgres
from spark_jobs.session import spark_session
from spark_jobs.sync import sync
from waldelta.connection import connect
from waldelta.job import Job
from waldelta.ledger import SlotMove, now
from waldelta.pipeline_file import PipelineFile
from waldelta.server import read_position

ORDERS = """
create table public.orders (
    id bigint primary key, customer_id int, status text, amount numeric(12,2), note text, updated_at timestamptz
)
"""
FILL = """
insert into public.orders
select g, g %% 100000, (array['new','paid','sent','done'])[1 + g %% 4], (g %% 100000) / 7.0,
       md5(g::text), '2024-01-01 00:00+00'::timestamptz + g * interval '1 second'
  from generate_series(1, %s) g
"""
ROUNDS = 3


def run(row_count: int) -> list[Measured]:
    """Copy the table a few times; the first with a cold JVM, of the others the fastest."""
    measured: dict[str, Measured] = {}
    folder = Path(tempfile.mkdtemp())
    with EmbeddedPostgres(folder / "postgres", settings={"fsync": "off"}) as server:
        connection = connect(server.conninfo(), "benchmark")
        connection.execute(ORDERS)
        connection.execute(FILL, (row_count,))
        connection.execute("vacuum analyze public.orders")
        connection.execute("create publication bench for table public.orders")
        lsn = connection.execute("select lsn::text from pg_create_logical_replication_slot('bench', 'pgoutput')")
        document = {
            "pipeline": "bench",
            "source": {"conn_id": "bench", "slot": "bench", "publications": [{"name": "bench", "manage": False}]},
            "target": {"root": (folder / "lake").as_uri()},
        }
        job = Job(PipelineFile.model_validate(document), server.conninfo(), "bench")
        system = read_position(connection).system_identifier
        job.ledger.append(SlotMove(now(), "bench", "created", "bench", system, 1, lsn.fetchone()[0], 0))
        spark = spark_session("local[2]", name="bench")
        spark.sparkContext.setLogLevel("ERROR")
        for n in range(ROUNDS + 1):
            copied = copy_seconds(connection)
            began = time.perf_counter()
            (result,) = sync(spark, job, ["public.orders"])
            seconds = time.perf_counter() - began
            label = "cold" if n == 0 else "warm"
            found = Measured(f"initial sync of {row_count:,} rows, {label}", seconds, "COPY binary", seconds / copied)
            measured[label] = min(measured.get(label, found), found, key=lambda m: m.seconds)
            print(f"{label}: COPY binary {copied:.2f} s, sync {seconds:.2f} s = {seconds / copied:.1f}x,"
                  f" {result.rows / seconds:,.0f} rows/s, {result.bytes / 1e6:.0f} MB written", flush=True)  # fmt: skip
        spark.stop()
    server.delete()
    return list(measured.values())


def copy_seconds(connection) -> float:
    began = time.perf_counter()
    with connection.cursor() as cursor, cursor.copy("copy public.orders to stdout (format binary)") as copy:
        for _ in copy:
            pass
    return time.perf_counter() - began


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000)
