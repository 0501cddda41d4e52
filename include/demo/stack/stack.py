"""Starts, finds and stops the parts of the embedded stack, in the order of their dependencies.

The stack's folder has its state for the next command. PostgreSQL holds Airflow's metadata and one
database per source, each with its own role.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

import psutil
import psycopg
from psycopg import sql

from demo.airflow_client import AirflowClient
from demo.stack.airflow_entries import Report, create_pools, set_connection
from demo.stack.airflow_processes import USER, AirflowProcesses, StackSecrets, write_private
from demo.stack.processes import (
    MARK,
    Part,
    StackError,
    end,
    ended_by_signals,
    marked,
    start,
    stop,
    undisturbed,
    wait_until,
)
from demo.stack.spark_connect_server import SparkConnectServer
from waldelta.config.airflow_connection import variable_of
from waldelta.config.stores import STORES
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres, free_port
from waldelta.spark.connect_server import HOST
from waldelta_airflow.settings import FORK_SERVER_VARIABLE

if TYPE_CHECKING:
    from demo.stack.object_store import DemoStore

REPOSITORY = Path(__file__).resolve().parents[3]
SPARK_CONN_ID = "waldelta_spark"
START_TIMEOUT_S = 180
_LONGEST_SOCKET_PATH = 100  # Linux has room for 107 bytes, macOS for 103.
# Prefixes of variables in the caller's shell that would override the stack's own files, or mix with
# the credentials of its store.
_OWN = ("AIRFLOW_", "SPARK_", "PYSPARK_", "WALDELTA_", "PG")
_FOREIGN_PREFIXES = (*_OWN, *(store.variables for store in STORES.values()))
_DATA = ("postgres", "airflow", "spark", "lake", "store", "logs")


@dataclass
class Stack:
    """Everything the demo needs, below ``folder``.

    ``sources`` has each source's database by Airflow conn_id. ``report`` gets a line whenever a
    part is ready. All processes but PostgreSQL's get the variables of ``environment``. ``store``
    is whether the lake is in an S3 server of the stack; by default, whether an earlier start's was.
    """

    folder: Path = REPOSITORY / ".waldelta"
    dags: Path = REPOSITORY / "dags"
    plugins: Path = REPOSITORY / "plugins"
    pipelines: Path = REPOSITORY / "include/pipelines"
    sources: Mapping[str, str] = field(default_factory=lambda: {"flights_source": "flights"})
    spark_memory: str = "3g"
    triggerer: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    store: bool | None = None
    report: Report = lambda _: None

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        self.postgres = EmbeddedPostgres(self.folder / "postgres")
        self.logs = self.folder / "logs"
        if self.store is None:
            self.store = (self.folder / "store").is_dir()
        self._state = StackState(0, 0, 0)
        self._airflow_environment: dict[str, str] = {}
        self._leave = ExitStack()

    # Attributes for clients of a running stack

    @property
    def url(self) -> str:
        """The address of Airflow's UI and API."""
        return self.airflow.url

    @property
    def user(self) -> str:
        return USER

    @property
    def password(self) -> str:
        """The password of ``user`` in Airflow."""
        return self.secrets.admin_password

    @cached_property
    def secrets(self) -> StackSecrets:
        return StackSecrets.load(self.folder / "secrets.json")

    @property
    def lake(self) -> str:
        """The URI below which pipelines have their lakes."""
        store = self.object_store
        return (self.folder / "lake").as_uri() if store is None else store.root

    @property
    def object_store(self) -> DemoStore | None:
        """The S3 server with the lake, if the stack has one."""
        if not self.store:
            return None
        # It loads a client of S3, which a lake in a folder doesn't need.
        from demo.stack.object_store import DemoStore

        return DemoStore(
            self.folder / "store",
            self._state.store_port,
            self.secrets.store,
            self.logs / "s3-server.log",
        )

    @property
    def spark(self) -> SparkConnectServer:
        store = self.object_store
        return SparkConnectServer(
            self.folder / "spark",
            self._state.spark_port,
            self.spark_memory,
            store={} if store is None else store.spark_environment,
            token=self.secrets.spark_token,
            log=self.logs / "spark-connect.log",
        )

    @property
    def airflow(self) -> AirflowProcesses:
        database = (f"postgresql+psycopg2://{AIRFLOW}:{self.secrets.airflow_database}"
                    f"@127.0.0.1:{self.postgres.port}/{AIRFLOW}")  # fmt: skip
        return AirflowProcesses(
            self.folder / "airflow",
            self.logs,
            self._state.airflow_port,
            database,
            self.secrets,
            self.dags,
            self.plugins,
            triggerer=self.triggerer,
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """The processes that this stack has started, except PostgreSQL."""
        return self._state.parts

    def client(self) -> AirflowClient:
        """Returns a client of Airflow's REST API, logged in as ``user``."""
        return AirflowClient(self.url, self.user, self.password)

    def source_conninfo(self, conn_id: str) -> str:
        """Returns libpq's connection string of a source, for the pipelines' role, which owns the
        database.
        """
        return self.postgres.conninfo(self.sources[conn_id], SOURCE_ROLE, self.secrets.source)

    def source_uri(self, conn_id: str) -> str:
        """Returns the same as Airflow's URI."""
        return self.postgres.uri(self.sources[conn_id], SOURCE_ROLE, self.secrets.source)

    def psql(self, conn_id: str) -> tuple[str, dict[str, str]]:
        """Returns the psql program, and libpq's variables for a source; no argument contains the
        password.
        """
        variables = {
            "PGHOST": "127.0.0.1",
            "PGPORT": str(self.postgres.port),
            "PGDATABASE": self.sources[conn_id],
            "PGUSER": SOURCE_ROLE,
            "PGPASSWORD": self.secrets.source,
        }
        return str(self.postgres.bin / "psql"), variables

    def job_environment(self) -> dict[str, str]:
        """Returns the variables for a job started by hand: sources, Spark, pipelines and lake.

        They contain secrets.
        """
        sources = {variable_of(conn_id): self.source_uri(conn_id) for conn_id in self.sources}
        store = self.object_store
        opened = {} if store is None else store.variables
        return sources | opened | {"SPARK_REMOTE": self.spark.remote} | self.places()

    def places(self) -> dict[str, str]:
        """Returns the variables by which pipeline files and DAGs find this stack's lake and
        pipelines.
        """
        store = self.object_store
        pipelines = self.pipelines if store is None else store.pipelines
        return {"WALDELTA_LAKE": self.lake, "WALDELTA_PIPELINES": str(pipelines)}

    # Starting and stopping

    def start(self) -> bool:
        """Start everything and wait until it is healthy; False when this stack is running already.

        When a part fails, or a signal comes, everything that was started is stopped again.
        """
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._locked():
            if self.is_running():
                return False
            try:
                self._sweep()
                self._start_parts()
            except BaseException:
                self._stop_parts()
                raise
        return True

    def stop(self) -> bool:
        """Stop everything, whichever process has started it; False when nothing was running."""
        if not self.folder.exists():
            return False
        with undisturbed(), self._locked():
            self.is_running()
            found = self._postgres_is_alive() or bool(marked(self.folder))
            self._stop_parts()
        return found

    def is_running(self) -> bool:
        """Returns whether all parts of this folder's stack are alive.

        Afterwards ``url``, ``spark`` and so on are correct.
        """
        if (state := StackState.read(self._state_file, self.parts)) is None:
            return False
        self._state = state
        self.postgres.port = state.postgres_port
        return (
            state.complete
            and all(part.alive for part in state.parts if part.needed)
            and self._postgres_is_alive()
        )

    def reset(self) -> None:
        """Delete the stack's data, lake included; it must not be running."""
        if self.is_running():
            raise StackError(f"the stack in {self.folder} is running: stop it first (make down)")
        self._sweep()
        for name in _DATA:
            shutil.rmtree(self.folder / name, ignore_errors=True)
        (self.folder / "secrets.json").unlink(missing_ok=True)
        self.__dict__.pop("secrets", None)

    def add_source(self, conn_id: str, database: str) -> None:
        """Add a source database to the running stack, with its Airflow connection."""
        self.sources = {**self.sources, conn_id: database}
        prepare_sources(self.postgres, [database])
        with self.client() as client:
            self._enter_source(client, conn_id)

    def create_pools(self) -> None:
        """Create the pool of every pipeline file's slot; repeat it after adding a file."""
        places = self.places()
        with self.client() as client:
            create_pools(client, self.report, Path(places["WALDELTA_PIPELINES"]), places)

    def kill_scheduler(self) -> None:
        """Kill the scheduler of a stack started by this process, its workers and their tasks.

        Nothing is reported to Airflow.
        """
        killed = [part for part in self.parts if _is_scheduler(part)]
        stop(killed, grace_s=0)
        self._state = replace(
            self._state, parts=tuple(part for part in self.parts if part not in killed)
        )
        self._state.write(self._state_file)

    def start_scheduler(self) -> None:
        """Start another scheduler after that, and wait until it works."""
        asked = datetime.now(UTC)
        self._remember(self.airflow.start_scheduler(self._airflow_environment))
        wait_until(lambda: self.airflow.is_healthy(asked), "Airflow", START_TIMEOUT_S, self.parts)

    def __enter__(self) -> Self:
        with ExitStack() as unwind:
            if threading.current_thread() is threading.main_thread():
                unwind.enter_context(ended_by_signals())
            if self.start():
                unwind.callback(self.stop)
            self._leave = unwind.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        err: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leave.close()

    # Internals

    def _start_parts(self) -> None:
        clock = time.monotonic()
        store_port = free_port() if self.store else 0
        self._state = StackState(free_port(), free_port(), free_port(), store_port)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_PREFIXES)}
        base = inherited | self.places() | dict(self.environment) | {MARK: str(self.folder)}
        if (store := self.object_store) is not None:
            store.copy_pipelines(self.pipelines)
            self._remember(store.begin(base))
        spark_part = self.spark.start(
            base
        )  # It is the slowest to start, and needs none of the others.
        self._remember(spark_part)
        base |= self._start_fork_server(base)
        self.postgres.port = self._state.postgres_port
        try:
            self.postgres.start()
        except RuntimeError as err:
            raise StackError(f"PostgreSQL did not start: {err}") from err
        prepare(self.postgres, self.secrets.airflow_database, self.secrets.source)
        prepare_sources(self.postgres, self.sources.values())
        self.report(
            f"PostgreSQL {self.postgres.version} on 127.0.0.1:{self.postgres.port} {_since(clock)}"
        )
        self._airflow_environment = environment = self.airflow.environment(base)
        self.airflow.configure()
        self.airflow.migrate(environment)
        self.report(f"Airflow's metadata database {_since(clock)}")
        self._remember(*self.airflow.start(environment))
        wait_until(self.spark.is_listening, "the Spark Connect server", START_TIMEOUT_S, self.parts)
        self.report(f"Spark Connect server on 127.0.0.1:{self.spark.port} {_since(clock)}")
        if store is not None:
            wait_until(store.is_up, "the S3 server", START_TIMEOUT_S, self.parts)
            self.report(f"S3 server on {store.endpoint} {_since(clock)}")
        wait_until(self.airflow.answers, "Airflow's API server", START_TIMEOUT_S, self.parts)
        self.start_scheduler()
        self._enter_everything()
        self._state = replace(self._state, complete=True)
        self._remember()
        self.report(f"Airflow on {self.url} {_since(clock)}")

    def _start_fork_server(self, base: Mapping[str, str]) -> dict[str, str]:
        """Start the fork server; returns the variable by which tasks find it.

        It isn't started where its socket's path would be too long; then jobs run without it.
        """
        path = self.folder / "jobs.sock"
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            return {}
        command = [sys.executable, "-P", "-m", "waldelta.cli.fork_server", str(path)]
        part = start(
            "fork server",
            command,
            folder=self.folder,
            log=self.logs / "fork-server.log",
            environment=base,
        )
        self._remember(replace(part, needed=False))
        return {FORK_SERVER_VARIABLE: str(path)}

    def _enter_everything(self) -> None:
        spark = self.spark
        with self.client() as client:
            for conn_id in self.sources:
                self._enter_source(client, conn_id)
            set_connection(
                client,
                self.report,
                SPARK_CONN_ID,
                conn_type="spark_connect",
                host=HOST,
                port=spark.port,
                password=spark.token,
            )
            if (store := self.object_store) is not None:
                set_connection(client, self.report, store.conn_id, **store.connection)
        self.create_pools()

    def _enter_source(self, client: AirflowClient, conn_id: str) -> None:
        set_connection(
            client,
            self.report,
            conn_id,
            conn_type="postgres",
            host="127.0.0.1",
            port=self.postgres.port,
            login=SOURCE_ROLE,
            password=self.secrets.source,
            schema=self.sources[conn_id],
        )

    def _stop_parts(self) -> None:
        with undisturbed():
            # The scheduler is stopped first, so that it ends its tasks while they can still report
            # to the API server.
            stop(filter(_is_scheduler, self.parts), grace_s=8)
            stop(self.parts, grace_s=8)
            self._sweep()
            self._state = replace(self._state, parts=(), complete=False)
            self._state_file.unlink(missing_ok=True)

    def _sweep(self) -> None:
        end(marked(self.folder), grace_s=3)
        self.postgres.stop()

    @property
    def _state_file(self) -> Path:
        return self.folder / "stack.json"

    def _remember(self, *parts: Part) -> None:
        self._state = replace(self._state, parts=(*self.parts, *parts))
        self._state.write(self._state_file)

    def _postgres_is_alive(self) -> bool:
        with suppress(OSError, ValueError):
            return bool(
                psutil.pid_exists(
                    int((self.postgres.data / "postmaster.pid").read_text().splitlines()[0])
                )
            )
        return False

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A user who could open the file could keep every command waiting.
        lock = os.open(self.folder / "stack.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.fchmod(lock, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def _is_scheduler(part: Part) -> bool:
    return "scheduler" in part.name


def _since(clock: float) -> str:
    return f"after {time.monotonic() - clock:.1f} s"


@dataclass(frozen=True)
class StackState:
    """One start of a stack; ``complete`` once everything was found healthy."""

    postgres_port: int
    spark_port: int
    airflow_port: int
    store_port: int = 0
    parts: tuple[Part, ...] = ()
    complete: bool = False

    def write(self, path: Path) -> None:
        parts = [
            {
                "name": p.name,
                "pid": p.pid,
                "created": p.created,
                "log": str(p.log),
                "needed": p.needed,
            }
            for p in self.parts
        ]
        write_private(path, json.dumps(self.__dict__ | {"parts": parts}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path, own: Sequence[Part] = ()) -> Self | None:
        """Returns the state in this file, None when there is none.

        Parts in ``own`` keep their handle, so that it can reap them.
        """
        try:
            document = json.loads(path.read_text())
            known = {part.pid: part for part in own}
            parts = tuple(
                known.get(p["pid"])
                or Part(p["name"], p["pid"], p["created"], Path(p["log"]), needed=p["needed"])
                for p in document.pop("parts")
            )
            return cls(**document, parts=parts)
        except (OSError, ValueError, KeyError, TypeError):
            return None


AIRFLOW = "airflow"  # The name of database and role.
SOURCE_ROLE = "waldelta"


def prepare(server: EmbeddedPostgres, airflow_password: str, source_password: str) -> None:
    """Create the two roles and Airflow's database unless they exist.

    The pipelines' role has only what the preflight requires: LOGIN, REPLICATION and the ownership
    of its databases.
    """
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        _set_role(connection, AIRFLOW, airflow_password, "login")
        _set_role(connection, SOURCE_ROLE, source_password, "login replication")
        _create_databases(connection, [AIRFLOW], AIRFLOW)


def prepare_sources(server: EmbeddedPostgres, databases: Iterable[str]) -> None:
    """Create the source databases, owned by the pipelines' role, unless they exist."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        _create_databases(connection, databases, SOURCE_ROLE)


def _set_role(connection: psycopg.Connection, name: str, password: str, attributes: str) -> None:
    role = connection.execute("select 1 from pg_roles where rolname = %s", (name,)).fetchone()
    verb = "alter" if role else "create"
    # Hashed by the client, so that the password itself is in no statement that the server might
    # log.
    verifier = connection.pgconn.encrypt_password(
        password.encode(), name.encode(), b"scram-sha-256"
    ).decode()
    statement = sql.SQL(f"{verb} role {{}} {attributes} password {{}}")
    connection.execute(statement.format(sql.Identifier(name), sql.Literal(verifier)))


def _create_databases(connection: psycopg.Connection, names: Iterable[str], owner: str) -> None:
    existing = {name for (name,) in connection.execute("select datname from pg_database")}
    for name in sorted(set(names) - existing):
        statement = sql.SQL("create database {} owner {}").format(
            sql.Identifier(name), sql.Identifier(owner)
        )
        connection.execute(statement)
