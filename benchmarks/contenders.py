"""Those who take part: each catches up with a backlog, or copies the tables, in the way it has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil
import psycopg
import tenacity
import yaml

from benchmarks.sources import Source
from benchmarks.stack import Stack, database, run_quietly
from benchmarks.workloads import (
    COPY,
    FRESH,
    NAIVE,
    NATIVE,
    PEEK,
    RECVLOGICAL,
    TASKS,
    WARM,
    Variant,
)
from waldelta_airflow.child_process import ChildProcess, end_group
from waldelta_airflow.forked_job import ForkedJob

PUBLICATION, RAW_SLOT = "bench", "bench_raw"
WAIT_S = 3600
STAGES = ("land", "apply", "check,report")

Notes = dict[str, float]


class Place:
    """One workload's database on the source, and a folder for lakes and pipeline files."""

    def __init__(self, stack: Stack, source: Source, name: str, conninfo: str) -> None:
        self.stack, self.source, self.name, self.conninfo = stack, source, name, conninfo
        self.folder = stack.folder / name
        self.folder.mkdir()
        self.server = stack.source

    def sql(self, statement: str) -> list[tuple]:
        """Run statements on the source."""
        return self.stack.sql(statement, self.name)

    def publish(self, name: str = PUBLICATION, where: str | None = None) -> None:
        """Create a publication of all tables."""
        condition = f" where ({where})" if where else ""
        tables = ", ".join(f"{table}{condition}" for table in self.source.tables)
        self.sql(
            f"create publication {name} for table {tables} with (publish_via_partition_root = {self.source.via_root})"
        )

    def flushed(self) -> str:
        """How far the server's WAL goes."""
        return self.sql("select pg_current_wal_flush_lsn()::text")[0][0]


class Contender(Protocol):
    """Somebody who takes part."""

    name: str
    baseline: bool

    def trees(self) -> list[int]:
        """Process ids of standing processes that work for it."""

    def prepare(self) -> None:
        """Start from the tables as they are."""

    def apply(self) -> Notes | None:
        """Catch up with the slot; what the result notes of it."""

    def copy(self) -> Notes | None:
        """Copy the tables, again if need be."""

    def close(self) -> None:
        """Leave no slot behind."""


class _Client:
    """A baseline that is one program."""

    name = ""
    baseline = True

    def __init__(self, place: Place) -> None:
        self.place = place

    def trees(self) -> list[int]:
        return []

    def prepare(self) -> None:
        pass

    def apply(self) -> Notes | None:
        raise NotImplementedError(f"{self.name} applies nothing")

    def copy(self) -> Notes | None:
        raise NotImplementedError(f"{self.name} copies nothing")

    def close(self) -> None:
        pass

    def psql(self, statement: str) -> None:
        """Have psql take a statement's answer to nowhere."""
        run_quietly(
            [
                str(self.place.server.bin / "psql"),
                "-d",
                self.place.conninfo,
                "-X",
                "-q",
                "-o",
                "/dev/null",
                "-c",
                statement,
            ]
        )


class CopyOfPeek(_Client):
    """Decoding alone: all that the slot has, read through the SQL function."""

    name = PEEK

    def apply(self) -> Notes | None:
        self.psql(
            f"copy (select * from pg_logical_slot_peek_binary_changes('{RAW_SLOT}', null, null, 'proto_version', '1', "
            f"'publication_names', '{PUBLICATION}')) to stdout (format binary)"
        )


class RecvLogical(_Client):
    """The raw drain: the walsender streams all that the slot has to nowhere; a copy of the slot, so that it stays."""

    name = RECVLOGICAL
    SLOT = "bench_recvlogical"

    def apply(self) -> Notes | None:
        end = self.place.flushed()
        self.place.sql(f"select pg_copy_logical_replication_slot('{RAW_SLOT}', '{self.SLOT}')")
        try:
            run_quietly(
                [str(self.place.server.bin / "pg_recvlogical"), "-d", self.place.conninfo, "-S", self.SLOT, "--start",
                 "-o", "proto_version=1", "-o", f"publication_names={PUBLICATION}", "-f", "/dev/null", "-E", end, "-n"]
            )  # fmt: skip
        finally:
            self._drop()

    @tenacity.retry(stop=tenacity.stop_after_delay(10), wait=tenacity.wait_fixed(0.02),
                    retry=tenacity.retry_if_exception_type(psycopg.errors.ObjectInUse))  # fmt: skip
    def _drop(self) -> None:
        self.place.sql(f"select pg_drop_replication_slot('{self.SLOT}')")


class CopyTables(_Client):
    """The raw copy."""

    name = COPY

    def copy(self) -> Notes | None:
        for table in self.place.source.tables:
            self.psql(f"copy {table} to stdout (format binary)")


class Subscriber(_Client):
    """PostgreSQL's own subscription, in a server of its own."""

    name = NATIVE

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._scope = database(place.stack.subscriber, place.name)
        self._conninfo = self._scope.__enter__()
        self._subscribed = False
        self._run(place.source.create)

    def prepare(self) -> None:
        """Subscribe, copy, and pause."""
        self.copy()
        self._pause()

    def copy(self) -> Notes | None:
        if self._subscribed:
            self._run(f"drop subscription {self.place.name}; truncate {', '.join(self.place.source.tables)}")
        # The slot is named after the workload; one cluster to another, so creating it waits for nobody.
        self._run(f"create subscription {self.place.name} connection '{self.place.conninfo}' publication {PUBLICATION}")
        self._subscribed = True
        self._wait("select not exists (select from pg_subscription_rel where srsubstate <> 'r')", self._run)

    def apply(self) -> Notes | None:
        end = self.place.sql("select pg_current_wal_lsn()::text")[0][0]
        self._run(f"alter subscription {self.place.name} enable")
        confirmed = (
            f"select confirmed_flush_lsn >= '{end}' from pg_replication_slots where slot_name = '{self.place.name}'"
        )
        self._wait(confirmed, self.place.sql)
        self._pause()

    def close(self) -> None:
        if self._subscribed:
            self._run(f"drop subscription {self.place.name}")
        self._scope.__exit__(None, None, None)

    def _pause(self) -> None:
        self._run(f"alter subscription {self.place.name} disable")
        self._wait(f"select not active from pg_replication_slots where slot_name = '{self.place.name}'", self.place.sql)

    def _run(self, statements: str) -> list[tuple]:
        rows: list[tuple] = []
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            # One by one: dropping a subscription can't be part of an implicit transaction.
            for statement in [statements] if "$$" in statements else statements.split(";"):
                cursor = connection.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def _wait(self, query: str, run) -> None:
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda done: not done),
            stop=tenacity.stop_after_delay(WAIT_S),
            wait=tenacity.wait_fixed(0.02),
        )
        retry(lambda: run(query)[0][0])


class Naive(_Client):
    """benchmarks.naive in a process that stays, so that its JVM is warm too."""

    name = NAIVE
    SLOT = "bench_naive"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        place.sql(f"select pg_create_logical_replication_slot('{self.SLOT}', 'pgoutput')")
        (table,) = place.source.tables
        command = [
            sys.executable,
            "-m",
            "benchmarks.naive",
            place.conninfo,
            self.SLOT,
            PUBLICATION,
            table,
            str(place.folder / "naive"),
        ]
        environment = {key: value for key, value in os.environ.items() if key != "SPARK_REMOTE"}
        self._log = (place.folder / "naive.log").open("w")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                                         env=environment, start_new_session=True)  # fmt: skip
        self._answer()

    def trees(self) -> list[int]:
        return [self._process.pid]

    def prepare(self) -> None:
        self._ask("copy")

    def apply(self) -> Notes | None:
        return {"messages": self._ask("apply")}

    def copy(self) -> Notes | None:
        return {"rows": self._ask("copy")}

    def close(self) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        end_group(self._process.pid, self._process.poll)
        for child in children:
            if child.is_running():
                child.kill()
        self._process.wait()
        self._log.close()
        free = (
            f"select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where slot_name = '{self.SLOT}'"
        )
        self.place.sql(free)
        self.place.sql(f"select pg_drop_replication_slot('{self.SLOT}')")

    def _ask(self, what: str) -> int:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._process.stdout is not None
        word, _, count = self._process.stdout.readline().partition(" ")
        if word not in ("ready", "done"):
            raise RuntimeError(f"the naive way failed:\n{Path(self._log.name).read_text()[-2000:]}")
        return int(count)


class Waldelta:
    """Ours: one pipeline; ``warm`` as one job, ``tasks`` as a job for each stage, ``fresh`` with a JVM of its own."""

    baseline = False

    def __init__(self, place: Place, how: str, variant: Variant, number: int) -> None:
        self.place, self.how = place, how
        self.name = f"{how}, {variant.name}" if variant.name else how
        self.slot = f"bench_{how}_{number}"
        self.file = place.folder / f"{self.slot}.yml"
        self.result = place.folder / f"{self.slot}.json"
        publication = PUBLICATION
        if variant.publication_filter:
            publication = f"{PUBLICATION}_{number}"
            place.publish(publication, variant.publication_filter)
        self._write_file(publication, variant)

    def _write_file(self, publication: str, variant: Variant) -> None:
        source = {"conn_id": "bench", "slot": self.slot, "publications": [{"name": publication, "manage": False}]}
        document = variant.document | {
            "pipeline": self.slot,
            "source": source | {"options": variant.options},
            "target": {"root": (self.place.folder / f"lake_{self.slot}").as_uri()} | variant.target,
        }
        self.file.write_text(yaml.safe_dump(document))

    def trees(self) -> list[int]:
        return [] if self.how == FRESH else self.place.stack.spark.trees

    def prepare(self) -> None:
        self.job("setup")
        self.job("sync")

    def copy(self) -> Notes | None:
        return _seconds_of_stages(self.job("sync", "--tables", *self.place.source.tables))

    def apply(self) -> Notes | None:
        before = self._temporary_mb()
        notes = self._tasks() if self.how == TASKS else self._consume()
        return notes | {"temporary_mb": self._temporary_mb() - before}

    def close(self) -> None:
        self.job("teardown")

    def _consume(self) -> Notes:
        began = time.perf_counter()
        result = self.job("consume")
        notes = _seconds_of_stages(result)
        if self.how == FRESH:
            after = sum(notes.get(stage, 0.0) for stage in ("check", "report"))
            notes["applied"] = time.perf_counter() - began - after
        return notes | {"changes": result.get("changes", 0)}

    def _tasks(self) -> Notes:
        """A job for each stage, as Airflow runs them."""
        run_id, notes = f"tasks-{time.time_ns()}", {}
        for stage in STAGES:
            began = time.perf_counter()
            self.job("consume", "--run-id", run_id, "--stage", stage)
            notes[stage] = time.perf_counter() - began
        return notes | {"applied": notes["land"] + notes["apply"]}

    def job(self, *arguments: str) -> dict:
        """Run the command line; its result. Raises RuntimeError when it fails."""
        given = [*arguments, str(self.file), "--result", str(self.result)]
        self.result.unlink(missing_ok=True)
        environment = self.environment()
        fresh = self.how == FRESH or arguments[0] in ("setup", "teardown")
        job: ForkedJob | ChildProcess | None
        if fresh:
            job = ChildProcess([sys.executable, "-m", "spark_jobs", *given], environment)
        else:
            spark = self.place.stack.spark
            job = ForkedJob.ask(str(spark.jobs), given, environment | {"SPARK_REMOTE": spark.remote})
        if job is None or job.run():
            raise RuntimeError(f"{' '.join(given)} failed: its output is in the log")
        return json.loads(self.result.read_text()) if self.result.exists() else {}

    def environment(self) -> dict[str, str]:
        """What a job's process is given."""
        return {**os.environ, "AIRFLOW_CONN_BENCH": self.place.server.uri(self.place.name)}

    def _temporary_mb(self) -> float:
        return float(
            self.place.sql("select temp_bytes / 1e6 from pg_stat_database where datname = current_database()")[0][0]
        )


BASELINES = {PEEK: CopyOfPeek, RECVLOGICAL: RecvLogical, COPY: CopyTables, NATIVE: Subscriber, NAIVE: Naive}


def make(name: str, place: Place, variants: tuple[Variant, ...]) -> list[Contender]:
    """The contenders of one name: of ours one for each variant."""
    if name in BASELINES:
        return [BASELINES[name](place)]
    assert name in (WARM, TASKS, FRESH)
    return [Waldelta(place, name, variant, number) for number, variant in enumerate(variants)]


@contextmanager
def place(stack: Stack, source: Source, name: str, rows: int) -> Iterator[Place]:
    """A database with the source's tables, filled and published."""
    database_name = name.replace("-", "_")
    with database(stack.source, database_name) as conninfo:
        made = Place(stack, source, database_name, conninfo)
        made.sql(source.create)
        made.sql(source.fill.format(rows=rows))
        made.sql("vacuum analyze")
        made.publish()
        made.sql(f"select pg_create_logical_replication_slot('{RAW_SLOT}', 'pgoutput')")
        try:
            yield made
        finally:
            made.sql(f"select pg_drop_replication_slot('{RAW_SLOT}')")


def _seconds_of_stages(result: dict) -> Notes:
    return {name: stage["seconds"] for name, stage in result.get("stages", {}).items()}
