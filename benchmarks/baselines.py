"""The baselines: PostgreSQL's own programs that read the same data and discard it, and a naive
program.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import tenacity

from benchmarks.place import PUBLICATION, RAW_SLOT, Place
from benchmarks.stack import run_quietly
from benchmarks.verify import compare_with_source
from benchmarks.workloads import COPY, NAIVE, PEEK, RECVLOGICAL
from waldelta_airflow.launchers.job_process import end_group


class Baseline:
    """A baseline that is one program."""

    name = ""
    baseline = True

    def __init__(self, place: Place) -> None:
        self.place = place

    def trees(self) -> list[int]:
        return []

    def prepare(self) -> None:
        pass

    def apply(self) -> dict[str, float] | None:
        raise NotImplementedError(f"{self.name} applies nothing")

    def copy(self) -> dict[str, float] | None:
        raise NotImplementedError(f"{self.name} copies nothing")

    def settle(self) -> None:
        """Get ready for the next round; this isn't measured."""

    def verify(self) -> None:
        """Compare nothing, because the data was discarded."""

    def close(self) -> None:
        pass

    def psql(self, statement: str) -> None:
        """Run a statement with psql and discard its result."""
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


class CopyOfPeek(Baseline):
    """Decoding alone: reads everything in the slot through the SQL function."""

    name = PEEK

    def apply(self) -> dict[str, float] | None:
        self.psql(
            f"copy (select * from pg_logical_slot_peek_binary_changes('{RAW_SLOT}', null, null,"
            f" 'proto_version', '1', 'publication_names', '{PUBLICATION}')) to stdout (format"
            " binary)"
        )


class RecvLogical(Baseline):
    """The raw drain: the walsender streams everything in the slot, which is discarded.

    It reads a slot copy, so that the slot stays.
    """

    name = RECVLOGICAL
    SLOT = "bench_recvlogical"

    def apply(self) -> dict[str, float] | None:
        end = self.place.flushed()
        self.place.sql(f"select pg_copy_logical_replication_slot('{RAW_SLOT}', '{self.SLOT}')")
        try:
            run_quietly(
                [
                    str(self.place.server.bin / "pg_recvlogical"),
                    "-d",
                    self.place.conninfo,
                    "-S",
                    self.SLOT,
                    "--start",
                    "-o",
                    "proto_version=1",
                    "-o",
                    f"publication_names={PUBLICATION}",
                    "-f",
                    "/dev/null",
                    "-E",
                    end,
                    "-n",
                ]
            )
        finally:
            self._drop()

    @tenacity.retry(stop=tenacity.stop_after_delay(10), wait=tenacity.wait_fixed(0.02),
                    retry=tenacity.retry_if_exception_type(psycopg.errors.ObjectInUse))  # fmt: skip
    def _drop(self) -> None:
        self.place.sql(f"select pg_drop_replication_slot('{self.SLOT}')")


class CopyTables(Baseline):
    """The raw copy."""

    name = COPY

    def copy(self) -> dict[str, float] | None:
        for table in self.place.source.tables:
            self.psql(f"copy {table} to stdout (format binary)")


class Naive(Baseline):
    """benchmarks.naive in a process that stays alive, so that its JVM is warm, too."""

    name = NAIVE
    SLOT = "bench_naive"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        place.sql(f"select pg_create_logical_replication_slot('{self.SLOT}', 'pgoutput')")
        (self.table,) = place.source.tables
        command = [
            sys.executable,
            "-m",
            "benchmarks.naive",
            place.conninfo,
            self.SLOT,
            PUBLICATION,
            self.table,
            self.target(self.table),
        ]
        environment = {key: value for key, value in os.environ.items() if key != "SPARK_REMOTE"}
        self._log = (place.folder / "naive.log").open("w")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._answer()

    def trees(self) -> list[int]:
        return [self._process.pid]

    def prepare(self) -> None:
        self._ask("copy")

    def apply(self) -> dict[str, float] | None:
        return {"messages": self._ask("apply")}

    def copy(self) -> dict[str, float] | None:
        return {"rows": self._ask("copy")}

    def target(self, table: str) -> str:
        """Returns the folder of its one target."""
        return str(self.place.folder / "naive" / table)

    def verify(self) -> None:
        """Raise RuntimeError where the target differs from the source: a wrong result is no
        baseline.
        """
        compare_with_source(self.name, self.place, {self.table: self.target(self.table)})

    def close(self) -> None:
        children = psutil.Process(self._process.pid).children(recursive=True)
        end_group(self._process.pid, self._process.poll)
        for child in children:
            if child.is_running():
                child.kill()
        self._process.wait()
        self._log.close()
        free = (
            "select pg_terminate_backend(active_pid, 10000) from pg_replication_slots where"
            f" slot_name = '{self.SLOT}'"
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
