"""What a target's own filter costs: the same backlog applied with and without ``where``, by two pipelines on one source.

``python -m benchmarks.route``. The filters let every row through, so that both targets get the same work; beside the
default identity with a filter on the key, FULL with one on three columns, where every update brings its old row.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psycopg

from benchmarks.main_job import BACKLOG, FILL, ORDERS
from benchmarks.measured import Measured
from demo.embedded_postgres import EmbeddedPostgres
from spark_jobs.pipeline import Pipeline
from spark_jobs.session import spark_session
from waldelta.pipeline_file import PipelineFile

IDENTITIES = {
    "default": "id > 0 and id < 1000000000",
    "full": "amount >= 0 and status <> 'nothing' and customer_id between 0 and 1000000",
}


@dataclass(frozen=True)
class Size:
    """Rows before, changes of a round, rounds; the first one warms the JVM up and isn't counted."""

    rows: int
    changes: int
    rounds: int


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.route", description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--changes", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3, help="the first one warms the JVM up and isn't counted")
    options = parser.parse_args()
    for row in run(options.rows, options.changes, options.rounds):
        print(f"{row.name}: {row.seconds:.2f} s, {row.ratio:.2f} of {row.baseline}")


def run(rows: int, changes: int, rounds: int = 3) -> list[Measured]:
    """Apply the same changes with and without a filter, under either identity; the fastest of the warm rounds."""
    size = Size(rows, changes, rounds)
    folder = Path(tempfile.mkdtemp(prefix="waldelta-bench-"))
    server = EmbeddedPostgres(folder / "postgres").start()
    os.environ["AIRFLOW_CONN_BENCH"] = server.uri()
    spark = spark_session("local[2]", name="benchmark")
    try:
        return [_measure(spark, server, folder / identity, case, size) for identity, case in IDENTITIES.items()]
    finally:
        spark.stop()
        server.delete()
        shutil.rmtree(folder, ignore_errors=True)


def _measure(spark, server: EmbeddedPostgres, folder: Path, where: str, size: Size) -> Measured:
    identity = folder.name
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute("drop table if exists orders cascade; drop publication if exists orders_pub")
        connection.execute(ORDERS)
        connection.execute(f"alter table orders replica identity {identity}".encode())
        connection.execute(FILL.format(rows=size.rows).encode())
        connection.execute("create publication orders_pub for table orders")
        made = {name: _pipeline(folder, f"{name}_{identity}", own) for name, own in (("plain", None), ("where", where))}
        for pipeline in made.values():
            pipeline.setup()
            pipeline.sync(spark)
        best: dict[str, float] = {}
        for number in range(size.rounds):
            among = size.rows
            connection.execute(BACKLOG.format(transactions=size.changes // 100 - 1, first=1, among=among).encode())
            # In turn, so that neither always finds what the other has warmed up.
            for name in sorted(made, reverse=bool(number % 2)):
                stages = made[name].consume(spark, f"{name}-{time.time_ns()}").stages
                seconds = stages["land"].seconds + stages["apply"].seconds
                print(f"{identity} {name} round {number}: land {stages['land'].seconds:.2f} apply {stages['apply'].seconds:.2f}",
                      flush=True)  # fmt: skip
                if number:
                    best[name] = min(best.get(name, seconds), seconds)
        for pipeline in made.values():
            pipeline.teardown()
    name = f"{size.changes:,} changes of a table with identity {identity}, a where evaluated in Spark"
    return Measured(name, best["where"], f"without ({best['plain']:.2f} s)", best["where"] / best["plain"])


def _pipeline(folder: Path, name: str, where: str | None) -> Pipeline:
    source = {"conn_id": "bench", "slot": name, "publications": [{"name": "orders_pub", "manage": False}]}
    target = {"root": (folder / name).as_uri(), "tables": {"public.orders": {"where": where}}}
    document = {"pipeline": name, "source": source, "target": target, "quality": {"enabled": False}}
    return Pipeline(PipelineFile.model_validate(document))


if __name__ == "__main__":
    main()
