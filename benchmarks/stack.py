"""The servers of a measurement: the source, the native subscriber's server, a warm Spark Connect
server with a fork server.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Self

import psutil
import psycopg

from benchmarks.resources import Usage, watched
from benchmarks.results import Round
from demo.stack.spark_connect_server import SparkConnectServer
from tests.soak.lakes import Store, new_store
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres, free_port
from waldelta_airflow.launchers.job_process import end_group

# Vacuum runs when the benchmark starts it; all other settings are defaults.
SOURCE = {"autovacuum": "off", "max_slot_wal_keep_size": "-1"}
# An enabled subscription starts at once, and reports soon what it has applied.
SUBSCRIBER = {"wal_retrieve_retry_interval": "100ms", "wal_writer_delay": "10ms"}
START_TIMEOUT_S = 120

log = logging.getLogger(__name__)


def run_with_rows(
    module: str,
    description: str | None,
    rows: int,
    measure: Callable[[EmbeddedPostgres, str, int], None],
) -> None:
    """Run a module's measurement on a server and a lake of its own, with ``--rows`` of rows."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("--rows", type=int, default=rows)
    number: int = parser.parse_args().rows
    with tempfile.TemporaryDirectory(prefix="waldelta-bench-") as folder:
        server = EmbeddedPostgres(Path(tempfile.mkdtemp(prefix="waldelta-postgres-")), version=18)
        try:
            server.start()
            measure(server, Path(folder).as_uri(), number)
        finally:
            server.delete()


class Stack:
    """Servers in a temporary folder; each but the source starts when it is first needed.

    A given ``source`` is running already, and isn't stopped.
    """

    def __init__(self, source: EmbeddedPostgres | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="waldelta-bench-"))
        self._own = source is None
        self.source = source or EmbeddedPostgres(self.folder / "source", settings=SOURCE)
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        self._closing.callback(shutil.rmtree, self.folder, ignore_errors=True)
        if self._own:
            self._closing.callback(self.source.delete)
            try:
                self.source.start()
            except BaseException:
                self._closing.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    @cached_property
    def subscriber(self) -> EmbeddedPostgres:
        """The server of the native subscriber."""
        server = EmbeddedPostgres(self.folder / "subscriber", settings=SUBSCRIBER)
        self._closing.callback(server.delete)
        return server.start()

    @cached_property
    def spark(self) -> WarmSpark:
        """The Connect server and the fork server."""
        return self._started("spark", {})

    @cached_property
    def spark_with_store(self) -> WarmSpark:
        """The same for lakes in the S3 server."""
        return self._started("spark_with_store", self.store.lake("").environment)

    def _started(self, name: str, store: Mapping[str, str]) -> WarmSpark:
        spark = WarmSpark(self.folder / name, store)
        self._closing.callback(spark.stop)
        spark.start()
        return spark

    @cached_property
    def store(self) -> Store:
        """An S3 server, and a proxy by which each request takes 30 ms longer."""
        return self._closing.enter_context(new_store(seed=0, fail_share=0))

    def sql(self, statement: str, dbname: str = "postgres") -> list[tuple]:
        """Run statements on the source; returns the rows, if any."""
        with psycopg.connect(self.source.conninfo(dbname), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    def measure(
        self, action: Callable[[], dict[str, float] | None], trees: Callable[[], list[int]]
    ) -> Round:
        """Time an action and watch the source, the subscriber if there is one, and these process
        trees.
        """
        servers = {"source": postmaster(self.source)}
        if "subscriber" in self.__dict__:
            servers["subscriber"] = postmaster(self.subscriber)
        with watched(servers, trees(), self.source.port) as usage:
            began = time.perf_counter()
            notes = action() or {}
            seconds = time.perf_counter() - began
        return _round(seconds, usage, notes)


class WarmSpark:
    """Spark as in production: a long-lived Connect server, and a fork server with the jobs' imports
    loaded.
    """

    def __init__(self, folder: Path, store: Mapping[str, str]) -> None:
        folder.mkdir(parents=True)
        self._server = SparkConnectServer(
            folder, free_port(), store=store, token="bench", log=folder / "spark.log"
        )
        self.jobs = folder / "jobs.sock"
        self._trees: list[int] = []

    @property
    def remote(self) -> str:
        """SPARK_REMOTE for a client."""
        return self._server.remote

    @property
    def trees(self) -> list[int]:
        """The process ids of both servers."""
        return list(self._trees)

    def start(self) -> None:
        self._trees.append(self._server.start(os.environ).pid)
        command = [sys.executable, "-m", "waldelta.cli.fork_server", str(self.jobs)]
        self._trees.append(
            subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True).pid
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not (self._server.is_listening() and self.jobs.exists()):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the Spark Connect server did not start in {START_TIMEOUT_S} s: see"
                    f" {self._server.log}"
                )
            time.sleep(0.2)

    def stop(self) -> None:
        for pid in self._trees:
            process = psutil.Process(pid)
            children = process.children(recursive=True)
            end_group(pid, process.is_running)
            for child in children:
                if child.is_running():
                    child.kill()


def postmaster(server: EmbeddedPostgres) -> int:
    """Returns the process id of a running server."""
    return int((server.data / "postmaster.pid").read_text().split()[0])


def run_quietly(command: list[str]) -> None:
    """Run a client to its end; raises RuntimeError with its message when it fails."""
    done = subprocess.run(
        command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stderr.strip()}")


@contextmanager
def database(server: EmbeddedPostgres, name: str) -> Iterator[str]:
    """Create a database for the block, and drop it afterwards; yields its connection string."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        connection.execute(f"create database {name}".encode())
    try:
        yield server.conninfo(name)
    finally:
        with psycopg.connect(server.conninfo(), autocommit=True) as connection:
            connection.execute(f"drop database {name} with (force)".encode())


def _round(seconds: float, usage: Usage, notes: dict[str, float]) -> Round:
    rounded = (
        {key: round(value, 3) for key, value in part.items()}
        for part in (usage.cpu_s, usage.peak_mb, notes)
    )
    return Round(seconds, *rounded)
