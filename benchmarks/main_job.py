"""The main job on ``orders``: sync, a backlog, a small scheduled run and an idle one, beside what the parts allow.

Baselines of the same run on the same data: pg_recvlogical to nowhere, COPY of a peek, COPY of the table. Spark is a
Connect server of its own, warm as in production, with a fork server beside it; the fresh runs start a JVM each.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event

import psutil
import psycopg
import yaml

from benchmarks.measured import Measured
from demo.embedded_postgres import EmbeddedPostgres, free_port
from demo.stack.spark_connect_server import SparkConnectServer
from waldelta.beside import beside
from waldelta_airflow.child_process import ChildProcess
from waldelta_airflow.forked_job import ForkedJob

ORDERS = """
create table orders(
    id bigint primary key, customer_id int, status text, amount numeric(12,2), note text, updated_at timestamptz
)
"""
FILL = """
insert into orders
select g, g % 1000, 'new', (g % 10000) / 100.0, 'note ' || g, now() from generate_series(1, {rows}) g
"""
# Half inserts, 40% updates, 10% deletes, in transactions of 100 changes. The rows updated lie all over the table, the worst
# case for files that are written anew as a whole, or among the newest ones, as in most applications.
BACKLOG = """
do $$
declare base bigint := (select max(id) from orders);
begin
    for i in 0..{transactions} loop
        insert into orders select base + i * 50 + g, g, 'new', g / 7.0, 'note ' || g, now() from generate_series(1, 50) g;
        update orders set status = 'paid', amount = amount + 1 where id in
            (select {first} + ((i * 40 + g) * 7919::bigint) % {among} from generate_series(1, 40) g);
        delete from orders where id between base + i * 50 + 1 and base + i * 50 + 10;
        commit;
    end loop;
end $$
"""


# Spark's daemon of Python workers, or ours (spark_jobs.python_daemon), and what they fork.
_WORKERS = re.compile(r"-m (pyspark\.daemon|spark_jobs\.python_daemon)")
PEEK = (
    "copy (select * from pg_logical_slot_peek_binary_changes('orders', null, null, 'proto_version', '1', "
    "'publication_names', 'orders_pub')) to stdout (format binary)"
)


class Bench:
    """A server, a lake and a pipeline file in a folder that goes away."""

    def __init__(self, folder: Path, rows: int, changes: int) -> None:
        self.folder, self.rows, self.changes = folder, rows, changes
        self.server = EmbeddedPostgres(folder / "postgres")
        self.connect = SparkConnectServer(folder / "spark", free_port(), "bench", folder / "spark.log")
        self.file = folder / "orders.yml"
        self.jobs = folder / "jobs.sock"
        self.measured: list[Measured] = []

    def __enter__(self) -> Bench:
        self.server.start()
        self.connect.folder.mkdir(parents=True)
        self.part = self.connect.start(os.environ)
        publication = {"name": "orders_pub", "tables": [{"name": "public.orders"}]}
        document = {
            "pipeline": "orders",
            "source": {"conn_id": "bench", "slot": "orders", "publications": [publication]},
            "target": {"root": (self.folder / "lake").as_uri()},
        }
        self.document: dict = document
        self.file.write_text(yaml.safe_dump(document))
        os.environ["AIRFLOW_CONN_BENCH"] = self.server.uri()
        self.sql(ORDERS)
        self.sql(FILL.format(rows=self.rows))
        self.sql("vacuum analyze orders")
        command = [sys.executable, "-m", "spark_jobs.fork_server", str(self.jobs)]
        self.fork_server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        while not (self.connect.is_listening() and self.jobs.exists()):
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self.fork_server.terminate()
        for process in [*psutil.Process(self.part.pid).children(recursive=True), psutil.Process(self.part.pid)]:
            process.kill()
        self.server.delete()

    def use_deletion_vectors(self) -> None:
        """From now on; maintenance follows the pipeline file's choice."""
        self.document["target"]["deletion_vectors"] = True
        self.file.write_text(yaml.safe_dump(self.document))
        self.job("maintain")

    def sql(self, statement: str) -> None:
        with psycopg.connect(self.server.conninfo(), autocommit=True) as connection:
            connection.execute(statement)

    def job(self, *arguments: str, warm: bool = True) -> dict:
        """Run the job's command line as an Airflow task of the embedded stack does; its result."""
        result = self.folder / "result.json"
        given = [*arguments, str(self.file), "--result", str(result)]
        if warm:
            job = ForkedJob.ask(str(self.jobs), given, {**os.environ, "SPARK_REMOTE": self.connect.remote})
        else:
            job = ChildProcess([sys.executable, "-m", "spark_jobs", *given], os.environ)
        if job is None or job.run():
            raise SystemExit(f"{' '.join(given)} failed")
        return json.loads(result.read_text()) if result.exists() else {}

    def backlog(self, changes: int, *, recent: bool = False) -> None:
        """Write to the table; ``recent``: updates of the newest of the first rows alone."""
        among = self.rows // 20 if recent else self.rows
        self.sql(BACKLOG.format(transactions=changes // 100 - 1, first=self.rows - among + 1, among=among))

    def one_transaction(self, rows: int) -> None:
        """Insert so many rows at once."""
        (last,) = psycopg.connect(self.server.conninfo()).execute("select max(id) from orders").fetchone()
        self.sql(
            f"insert into orders select {last} + g, g, 'new', g / 7.0, 'note ' || g, now() from generate_series(1, {rows}) g"
        )

    def measure(self, name: str, action: Callable[[], dict], baseline: Measured | None = None) -> Measured:
        """Time an action; ``baseline`` is what its seconds are divided by."""
        began = time.perf_counter()
        notes = action()
        row = Measured(name, time.perf_counter() - began, notes=notes)
        if baseline is not None:
            row.baseline, row.ratio = baseline.name, row.seconds / baseline.seconds
        self.measured.append(row)
        print(
            f"{row.name}: {row.seconds:.2f} s" + (f" = {row.ratio:.1f}x {row.baseline}" if row.ratio else ""),
            flush=True,
        )
        return row


def run(rows: int = 2_000_000, changes: int = 1_000_000, small: int = 10_000, huge: int = 5_000_000) -> list[Measured]:
    """Measure the main job; takes some minutes."""
    folder = Path(tempfile.mkdtemp(prefix="waldelta-bench-"))
    try:
        with Bench(folder, rows, changes) as bench:
            bench.job("setup")
            copied = bench.measure(
                "COPY orders (FORMAT binary)", lambda: _drain_copy(bench, "copy orders to stdout (format binary)")
            )
            bench.measure("initial sync, first on a fresh server", lambda: _stages(bench.job("sync")), copied)
            bench.measure("initial sync, warm", lambda: _stages(bench.job("sync", "--tables", "public.orders")), copied)
            for label in ("backlog, server's first", "backlog, warm"):
                bench.backlog(changes)
                raw = bench.measure(f"pg_recvlogical ({label})", lambda: _recvlogical(bench))
                bench.measure(f"COPY of a peek ({label})", lambda: _drain_copy(bench, PEEK), raw)
                bench.measure(f"consume {label}", lambda: _with_reader_memory(bench, lambda: bench.job("consume")), raw)
            for label, recent in (("first", False), ("scattered", False), ("recent rows", True)):
                bench.backlog(small, recent=recent)
                bench.measure(f"{small:,} changes, as tasks on the warm server ({label})", lambda: _tasks(bench))
            bench.use_deletion_vectors()
            for label in ("first with deletion vectors", "scattered, deletion vectors"):
                bench.backlog(small)
                bench.measure(f"{small:,} changes, as tasks on the warm server ({label})", lambda: _tasks(bench))
            bench.backlog(small)
            bench.measure(f"{small:,} changes, fresh JVM", lambda: _stages(bench.job("consume", warm=False)))
            bench.measure("idle look, new process", lambda: _idle(bench))
            bench.one_transaction(huge)
            bench.measure(
                f"one transaction of {huge:,} inserts", lambda: _with_reader_memory(bench, lambda: bench.job("consume"))
            )
            bench.measure("idle look behind that transaction", lambda: _idle(bench))
            for _ in range(2):
                bench.sql("select pg_log_standby_snapshot()")  # as the server's background writer does by itself
            bench.measure("idle look that lets go of its WAL", lambda: _idle(bench))
            bench.measure("idle look after that", lambda: _idle(bench))
            return bench.measured
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tasks(bench: Bench) -> dict:
    """Land, apply and check, each in a process of its own as Airflow's tasks are."""
    seconds = {}
    run_id = f"tasks-{time.time_ns()}"
    for stage in ("land", "apply", "check,report"):
        began = time.perf_counter()
        bench.job("consume", "--run-id", run_id, "--stage", stage)
        seconds[stage] = round(time.perf_counter() - began, 2)
    return seconds


def _stages(result: dict) -> dict:
    return {name: stage["seconds"] for name, stage in result.get("stages", {}).items()}


def _idle(bench: Bench) -> dict:
    program = (
        "import sys; from waldelta.pipeline_file import load_pipeline_file; from waldelta.job import load_job; "
        "from waldelta.idle import look; assert not look(load_job(load_pipeline_file(sys.argv[1]))).has_work"
    )
    subprocess.run([sys.executable, "-c", program, str(bench.file)], check=True)
    return {}


def _drain_copy(bench: Bench, statement: str) -> dict:
    with (
        psycopg.connect(bench.server.conninfo()) as connection,
        connection.cursor() as cursor,
        cursor.copy(statement) as copy,
    ):
        return {"bytes": sum(len(block) for block in copy)}


def _recvlogical(bench: Bench) -> dict:
    """Stream the backlog to nowhere, from a copy of the slot so that ours stays where it is."""
    with psycopg.connect(bench.server.conninfo(), autocommit=True) as connection:
        connection.execute("select pg_copy_logical_replication_slot('orders', 'orders_bench')")
        (end,) = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
    command = [str(bench.server.bin / "pg_recvlogical"), "-d", bench.server.conninfo(), "-S", "orders_bench", "--start",
               "-o", "proto_version=1", "-o", "publication_names=orders_pub", "-f", "/dev/null", "-E", end, "-n"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    bench.sql("select pg_drop_replication_slot('orders_bench')")
    return {}


def _with_reader_memory(bench: Bench, action: Callable[[], dict]) -> dict:
    with _peak_memory(bench.server.port) as peak:
        result = action()
    return (
        _stages(result)
        | {f"{who}_peak_mb": round(mb) for who, mb in peak.items()}
        | {"changes": result.get("changes", 0)}
    )


@contextmanager
def _peak_memory(port: int) -> Iterator[dict[str, float]]:
    """The largest resident sets of Spark's Python workers while the block runs: of the one that reads the slot, and of others."""
    peak = {"slot_reader": 0.0, "python_worker": 0.0}
    readers: set[int] = set()

    def watch(done: Event) -> None:
        while not done.wait(0.05):
            for process in psutil.process_iter(["cmdline"]):
                with suppress(psutil.Error):
                    if not _WORKERS.search(" ".join(process.info["cmdline"] or ())):
                        continue
                    if any(c.raddr and c.raddr.port == port for c in process.net_connections("tcp")):
                        readers.add(process.pid)
                    who = "slot_reader" if process.pid in readers else "python_worker"
                    peak[who] = max(peak[who], process.memory_info().rss / 1e6)

    with beside(watch, "peak memory"):
        yield peak
