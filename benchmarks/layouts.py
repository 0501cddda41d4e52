"""``python -m benchmarks.layouts``: seconds and bytes of merging changes into targets of one table
that are laid out in different ways, as ratios to the target without a layout.
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

from benchmarks.stack import run_with_rows
from waldelta.config import PipelineFile
from waldelta.jobs import Pipeline
from waldelta.lake import local_path
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres
from waldelta.spark import spark_session

_CONNECTION = "AIRFLOW_CONN_BENCH_SOURCE"
_LAYOUTS: dict[str, dict[str, Any]] = {
    "none": {},
    "partition_by": {"partition_by": ["region"]},
    "cluster_by": {"cluster_by": ["region"]},
}
# The least of so many rounds counts.
_ROUNDS = 2
# A row has a random region; each statement changes a hundredth of the rows.
_CREATE = """
create table t(id bigint primary key, region int, amount bigint);
insert into t select i, hashint8(i) & 15, i % 1000 from generate_series(1, {rows}) i;
"""
_CHANGES = {
    "neighbouring keys": "update t set amount = amount + 1 where id <= {rows} / 100",
    "random keys": "update t set amount = amount + 1 where hashint8(id + 7) & 127 = 1",
    "a region": "update t set amount = amount + 1 where region = 5 and id % 6 = 0",
}


def _measure(server: EmbeddedPostgres, lake: str, rows: int) -> None:
    """Copy a table of this many rows to each layout, maintain it, and merge the changes.

    Each layout has a slot of its own. The layouts take turns, so that another program on the
    machine slows all of them.
    """
    os.environ[_CONNECTION] = server.uri()
    spark, console = spark_session(name="bench"), Console(width=120)
    measured: dict[tuple[str, str], list[tuple[float, int]]] = {}

    def measure(what: str, layout: str, pipeline: Pipeline, work: Callable[..., object]) -> None:
        uri, began = pipeline.target_path("public.t"), time.perf_counter()
        version = DeltaTable(uri).version() if DeltaTable.is_deltatable(uri) else -1
        work(spark)
        done = time.perf_counter() - began, _written(uri, version)
        measured.setdefault((what, layout), []).append(done)
        console.print(f"{what}, {layout}: {done[0]:.1f} s, {done[1] / 1e6:.1f} MB")

    def execute(statement: str) -> None:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute(statement.format(rows=rows).encode())

    execute(_CREATE)
    pipelines = {name: _pipeline(lake, name, options) for name, options in _LAYOUTS.items()}
    for layout, pipeline in pipelines.items():
        pipeline.setup()
        measure("copy", layout, pipeline, pipeline.sync)
        measure("maintenance", layout, pipeline, pipeline.maintain)
    for change, statement in _CHANGES.items():
        for _ in range(_ROUNDS):
            execute(statement)
            for layout, pipeline in pipelines.items():
                measure(change, layout, pipeline, pipeline.consume)
    spark.stop()
    table = Table(title=f"{rows:,} rows, a hundredth changed: ratios to no layout")
    for heading in ("", "layout", "seconds", "ratio", "MB written", "ratio"):
        table.add_column(heading, justify="right")
    least = {of: tuple(map(min, zip(*done, strict=True))) for of, done in measured.items()}
    for (what, layout), (seconds, size) in least.items():
        plain_seconds, plain_size = least[what, "none"]
        ratios = f"{seconds / plain_seconds:.2f}", f"{size / plain_size:.2f}" if plain_size else ""
        shown = what, layout, f"{seconds:.1f}", ratios[0], f"{size / 1e6:.1f}", ratios[1]
        table.add_row(*shown)
    console.print(table)


def _pipeline(lake: str, name: str, options: dict[str, Any]) -> Pipeline:
    publication = {"name": f"{name}_pub", "tables": [{"name": "public.t"}]}
    document = {
        "pipeline": name,
        "source": {"conn_id": "bench_source", "slot": name, "publications": [publication]},
        "target": {"root": f"{lake}/{name}", "tables": {"public.t": options}},
        "quality": {"enabled": False},
    }
    return Pipeline(PipelineFile.model_validate(document))


def _written(uri: str, version: int) -> int:
    """Returns the bytes of the files that commits after a version added."""
    folder = local_path(uri)
    assert folder is not None
    entries = sorted((folder / "_delta_log").glob("*.json"))
    later = [entry for entry in entries if int(entry.stem) > version]
    lines = (json.loads(line) for entry in later for line in entry.read_text().splitlines())
    return sum(line["add"]["size"] for line in lines if "add" in line)


if __name__ == "__main__":
    run_with_rows("benchmarks.layouts", __doc__, 10_000_000, _measure)
