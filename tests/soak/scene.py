"""One server, one lake, one pipeline, run after run, for faults and random kills."""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import psycopg
import yaml
from deltalake.exceptions import DeltaProtocolError

from demo.stack.processes import stop
from demo.stack.spark_connect_server import SparkConnectServer
from tests.oracles.change_feed import compare_change_feed, ranges_of_columns
from tests.oracles.random_workload import Workload
from tests.soak.lakes import SoakLake, Store
from tests.soak.listener import Listener
from tests.soak.network import Network
from tests.support.fixtures.postgres import chosen_version, new_postgres
from waldelta.errors import WaldeltaError
from waldelta.jobs import Pipeline
from waldelta.lake import MESSAGES, DeltaTarget, bookkeeping_uri
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres, free_port

KEYED = ["w1", "w2"]
COPIES = "copies"
MESSAGE_PREFIX = "soak"
FILTERS = ("part < 4", "part < 3")
LAYOUTS = {
    "public.w1": {"partition_by": ["part"]},
    "public.w2": {"cluster_by": ["part", "id"]},
}
TIMEOUT_S = 240.0
# Pipeline files: as they are, with checks, and with few changes in a step, so runs have several.
PLAIN, CHECKED, IN_STEPS = "plain", "checked", "in_steps"
STEP_CHANGES = 60
LARGE_SHARE = 0.06
_FIRST_FRESH = 100_000  # beyond the keys of random rows
MOST_COLUMNS = 6
KEEPS_SLOTS = 17  # on standbys, from this version of PostgreSQL on
Rows = Counter[tuple[Any, ...]]
_QUICK = """
spark.sql.codegen.wholeStage false
spark.sql.codegen.factoryMode NO_CODEGEN
spark.sql.adaptive.enabled false
"""


class Scene:
    """A pipeline over two tables with a key, one of them filtered, and one without."""

    def __init__(
        self,
        server: EmbeddedPostgres,
        folder: Path,
        seed: int,
        remote: str | None = None,
        *,
        listener: Listener | None = None,
        number: int = 0,
        streaming: str = "off",
        max_changes: int | None = None,
        store: Store | None = None,
    ) -> None:
        """``number`` tells several scenes of one server apart, which share a ``listener``. The
        lake is in ``store``, or in the scene's folder.

        Of few ``max_changes`` a run has many steps, of which the first are applied while the others
        land.
        """
        self.server, self.folder, self.seed, self.remote = server, folder, seed, remote
        self.streaming = streaming
        self._open: psycopg.Connection[tuple[Any, ...]] | None = None
        self.random = random.Random(seed)
        self.network = Network("127.0.0.1", server.port)
        self.listener = listener or new_listener()
        self.name = f"soak_{os.getpid()}_{number}"
        folder.mkdir(exist_ok=True)
        self.runs = 0
        self.transactions = self.applied = 0
        self._fresh = _FIRST_FRESH
        self._ending = ExitStack()
        self._copies_too = True
        self.log = folder / "runs.log"
        self.emitted: Counter[str] = Counter()
        # The last version of each target whose change data feed was compared.
        self._shown: dict[str, int] = {}
        self.compared_versions = 0
        # What a verb is called with, besides the run's id: kept for asking the same again.
        self.details: dict[str, dict[str, Any]] = {}
        self._execute("postgres", f"create database {self.name}")
        self._execute(
            "postgres", f"alter database {self.name} set logical_decoding_work_mem = '64kB'"
        )
        self.connection = psycopg.connect(server.conninfo(self.name), autocommit=True)
        self.workload = Workload(self.connection, seed, KEYED)
        self.workload.large_share = LARGE_SHARE
        self.connection.execute(f"create table {COPIES} (n int, t text)".encode())
        self.connection.execute(f"alter table {COPIES} replica identity full".encode())
        uri = server.uri(self.name).replace(f":{server.port}/", f":{self.network.port}/")
        lake = (folder / "lake").as_uri()
        self.store = store
        self.lake = SoakLake(lake) if store is None else store.lake(self.name)
        self.root = self.lake.root
        self.environment = (
            {f"AIRFLOW_CONN_{self.name.upper()}": uri}
            | self.listener.environment
            | quick(folder)
            | self.lake.environment
        )
        self.files = {
            PLAIN: self._write_pipeline(PLAIN, max_changes=max_changes),
            CHECKED: self._write_pipeline(CHECKED, checked=True, max_changes=max_changes),
            IN_STEPS: self._write_pipeline(IN_STEPS, max_changes=STEP_CHANGES),
        }
        self._spark: Any = None
        os.environ.update(self.environment)

    @property
    def spark(self) -> Any:
        """A session in this process; its workers know of the listener."""
        if self._spark is None:
            from waldelta.spark import spark_session

            self._spark = spark_session("local[2,4]", name="soak")
            self._spark.sparkContext.setLogLevel("OFF")
            # Each unpacks a library at first. A JVM whose disk was full then can't use it any more.
            self._spark._jvm.org.xerial.snappy.Snappy.getNativeLibraryVersion()
            self._spark._jvm.com.github.luben.zstd.util.Native.load()
        return self._spark

    def use(self, spark: Any) -> None:
        """Run in somebody else's session; its workers tell nothing."""
        self._spark = spark

    def set_up(self) -> None:
        """Publication, slot, rows, and a first copy of them."""
        self.write(30)
        Pipeline.load(self.files[PLAIN]).setup()
        self.run("sync")

    def at_end(self, callback: Callable[[], Any]) -> None:
        """What is to be done once nobody needs the scene any more."""
        self._ending.callback(callback)

    def close(self) -> None:
        """Give everything back but the server."""
        self._ending.close()
        for name in self.environment:
            os.environ.pop(name, None)
        self.connection.close()
        self.network.close()
        self.listener.close()

    def focus(self, count: int | None = None) -> None:
        """Writes to so many of the tables only, until told otherwise; None for all."""
        names = [*KEYED, COPIES] if count is None else self.random.sample([*KEYED, COPIES], count)
        self.workload.chosen = [table for table in self.workload.tables if table.name in names]
        self._copies_too = COPIES in names

    def write(self, transactions: int = 12) -> None:
        """Random transactions on the keyed tables, and on the one without a key."""
        self.transactions += transactions
        for _ in range(transactions if self.workload.chosen else 0):
            self.workload.transaction()
        for number in range(max(1, transactions // 4) if self._copies_too else 0):
            self._write_copies(at_least_one_row=number == 0)

    def break_off(self, step: str) -> None:
        """A run that ends at that step, its connections gone."""
        done = self.listener.arm(step, lambda _: self.end_backends())
        with suppress(Exception):
            self.run("consume")
        assert done.is_set()
        self.settle()

    def leave_open(self) -> None:
        """A streamed transaction that stays open, with a savepoint rolled back."""
        self.end_open()
        self._open = psycopg.connect(self.server.conninfo(self.name))
        self._open.execute(_MANY)
        with self._open.transaction(force_rollback=True):
            self._open.execute(_MANY)

    def end_open(self) -> None:
        """Commit the transaction that was left open, with a few of its rows."""
        if self._open is not None:
            with self._open as ending:
                ending.execute(_MOST_OF_MANY)
            self._open = None

    def emit(self) -> None:
        """Logical messages: of a transaction, of one that is rolled back, and of none."""
        number = len(self.emitted)
        for transactional, kept in ((True, True), (True, False), (False, True)):
            content = f"{number} {transactional} {self.random.random()}"
            with self.connection.transaction(force_rollback=not kept):
                self.connection.execute(
                    "select pg_logical_emit_message(%s, %s, %s)",
                    (transactional, MESSAGE_PREFIX, content),
                )
            self.emitted[content] += kept

    def rows(self, table: str, values: str, count: int = 3) -> list[int]:
        """Rows that nothing else is written to, by an expression of ``i``; returns their keys."""
        self._fresh += count
        low, high = self._fresh - count + 1, self._fresh
        self.connection.execute(
            f"insert into {table} (id, part, big) select i, {values} from generate_series({low},"
            f" {high}) i".encode()
        )
        return list(range(low, high + 1))

    def lead_to(self, server: EmbeddedPostgres) -> None:
        """The source is another server from now on."""
        self.connection.close()
        self.network.cut()
        self.server = server
        self.network.lead_to(server.port)
        self.network.heal()
        self.reconnect()

    def alter(self, *kinds: str) -> None:
        """An ALTER TABLE of one of these kinds between changes."""
        if not self.workload.chosen:
            self.workload.chosen = [self.random.choice(self.workload.tables)]
        self.write(4)
        self.workload.kinds = kinds
        self.workload.alter()
        self.write(4)
        for table in self.workload.chosen:  # whatever was rolled back, emptied or filtered out
            self.rows(table.name, "1, 'small'")

    def refilter(self) -> None:
        """Another filter for the table that has one, between changes of it: the next run repairs
        its target.

        A table that is truncated meanwhile would be copied instead.
        """
        self.workload.chosen = [table for table in self.workload.tables if table.name == KEYED[0]]
        self.workload.truncates = False
        self.write(4)
        (now,) = self.connection.execute(_FILTER).fetchone() or ("",)
        (other,) = (text for text in FILTERS if text not in now)
        others = ", ".join([*KEYED[1:], COPIES])
        self.connection.execute(
            f"alter publication {self.name}_pub set table {KEYED[0]} where ({other}),"
            f" {others}".encode()
        )
        self.write(4)
        self.workload.truncates = True

    def is_wide(self) -> bool:
        """Whether enough columns have been added to the tables that are written to."""
        return any(len(table.columns) > MOST_COLUMNS for table in self.workload.chosen)

    def run(self, verb: str, spark: Any = None, *, file: str = PLAIN, **details: Any) -> float:
        """A verb in this process, or through the Connect server; raises, or returns its seconds."""
        self.runs += 1
        if self.remote is not None:
            process = self.start(verb, file=file)
            self.release(process)
            began = time.monotonic()
            if process.wait(TIMEOUT_S):
                raise WaldeltaError(f"{verb} failed: {self.log.read_text().splitlines()[-1]}")
            return time.monotonic() - began
        began, pipeline = time.monotonic(), Pipeline.load(self.files[file])
        getattr(pipeline, verb)(
            spark or self.spark, run_id=f"run_{self.runs}", **self.details.get(verb, {}) | details
        )
        return time.monotonic() - began

    def start(
        self, verb: str, *arguments: str, file: str = PLAIN, **environment: str
    ) -> subprocess.Popen[bytes]:
        """The verb as a process with a JVM of its own, held where its work begins."""
        log = self.log.open("ab")
        if self.remote is not None:
            environment["SPARK_REMOTE"] = self.remote
        action = filter(None, [self.details.get(verb, {}).get("action")])
        file_path = str(self.files[file])
        command = [sys.executable, "-m", "spark_jobs", verb, file_path, *action, *arguments]
        process = subprocess.Popen(
            command,
            env=os.environ | self.environment | {"WALDELTA_MASTER": "local[2,4]"} | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.listener.hold(process.pid)
        return process

    def release(self, process: subprocess.Popen[bytes]) -> None:
        """Let a started process begin its work."""
        there, go_on = self.listener.hold(process.pid)
        wait_until(lambda: there.is_set() or process.poll() is not None)
        go_on.set()

    def end_backends(self) -> None:
        """pg_terminate_backend of all that is ours on the source."""
        self._execute(self.name, f"select pg_terminate_backend(pid, 5000) {_OURS}")

    def restart_server(self) -> None:
        """An immediate stop, as a crash: the slot goes back to where it was written down last."""
        self.connection.close()
        self.server.stop("immediate")
        self.server.start()
        self.reconnect()

    def reconnect(self) -> None:
        """After an immediate stop of the server, which ended our own connection too."""
        self.connection.close()
        self.connection = self.workload.connection = psycopg.connect(
            self.server.conninfo(self.name), autocommit=True
        )

    def settle(self) -> None:
        """All as before the fault, and the dead run's backends gone."""
        self.network.heal()
        wait_until(lambda: not self._execute(self.name, f"select 1 {_OURS}"))

    def differences(self) -> list[str]:
        """Rows that a target lacks or has too often, and changes that landed twice."""
        found = []
        for table in [*(t.name for t in self.workload.tables), COPIES]:
            names = self._columns(table)
            held = self._held(table, names)
            in_target: Rows = Counter(tuple(row[name] for name in names) for row in held)
            (where,) = (
                (self.connection.execute(_FILTER).fetchone() or ())
                if table == KEYED[0]
                else ("true",)
            )
            query = f"select {', '.join(names)} from {table} where {where}"
            in_source: Rows = Counter(self.connection.execute(query.encode()).fetchall())
            if lost := (in_source - in_target).total():
                found.append(f"{table}: {lost} rows lost")
            if doubled := (in_target - in_source).total():
                found.append(f"{table}: {doubled} rows too many")
            if self.seed % 2 == 1 and self.store is None:
                target = self.target(table)
                for first, last, replaced in ranges_of_columns(target, self._shown.get(table, 0)):
                    shown = compare_change_feed(target.uri, first, replaced, last=last)
                    found += [f"{table}: its change data feed: {one}" for one in shown]
                    self.compared_versions += last - first + 1
                    self._shown[table] = last
        return found + self._lost_layouts() + self.lake.landed_twice() + self._messages()

    def _lost_layouts(self) -> list[str]:
        """Targets without the partitions or the clustering of the pipeline file."""
        found = []
        for name, layout in self._layouts.items():
            table = self.lake.table(self.target(name.removeprefix("public.")).uri)
            partitions = table.metadata().partition_columns
            is_clustered = "clustering" in (table.protocol().writer_features or ())
            if (partitions, is_clustered) != (
                layout.get("partition_by", []),
                "cluster_by" in layout,
            ):
                found.append(f"{name}: divided by {partitions}, {is_clustered=}, not by {layout}")
        return found

    def stale_cut(self) -> list[str]:
        """Whether the cut that readers take as the newest is an older one."""
        cuts = Pipeline.load(self.files[PLAIN]).job().ledger.batches()
        newest = max(cut.batch for cut in cuts)
        return [f"the newest cut is of batch {cuts[-1].batch}, not {newest}"] * (
            cuts[-1].batch < newest
        )

    def target(self, table: str) -> DeltaTarget:
        """The table's target, where the ledger says that it is."""
        job = Pipeline.load(self.files[PLAIN]).job()
        job.read_states()
        return job.lake.target(f"public.{table}")

    def _held(self, table: str, names: list[str]) -> list[dict[str, Any]]:
        uri = self.target(table).uri
        try:
            return self.lake.table(uri).to_pyarrow_table(columns=names).to_pylist()
        except DeltaProtocolError:  # it has had deletion vectors
            return self.spark.read.format("delta").load(uri).select(names).toArrow().to_pylist()

    def _messages(self) -> list[str]:
        if not self.emitted.total():
            return []
        messages = self.lake.table(bookkeeping_uri(self.root, MESSAGES))
        contents = messages.to_pyarrow_table(columns=["prefix", "content"])
        held = Counter(
            row["content"].decode()
            for row in contents.to_pylist()
            if row["prefix"] == MESSAGE_PREFIX
        )
        lost, doubled = (self.emitted - held).total(), (held - self.emitted).total()
        return [f"{lost} messages lost"] * bool(lost) + [f"{doubled} messages too many"] * bool(
            doubled
        )

    def _columns(self, table: str) -> list[str]:
        named = {t.name: ["id", "part", "big", *t.columns] for t in self.workload.tables}
        return named.get(table, ["n", "t"])

    def _write_copies(self, *, at_least_one_row: bool = False) -> None:
        low, text = self.random.randint(1, 20), self.random.choice(["a", "b", None])
        inserts = [
            f"insert into {COPIES} select g, %(t)s from generate_series({low}, {low + 4}) g",
            f"insert into {COPIES} select {low}, %(t)s from generate_series(1, 3)",
        ]
        others = [
            f"update {COPIES} set t = %(t)s where n = {low}",
            (
                f"delete from {COPIES} where ctid in (select ctid from {COPIES} where n <= {low}"
                " limit 2)"
            ),
        ]
        statement = self.random.choice(inserts if at_least_one_row else inserts + others)
        self.connection.execute(statement.encode(), {"t": text})

    @property
    def _layouts(self) -> dict[str, dict[str, list[str]]]:
        return LAYOUTS if self.seed % 4 in (1, 2) else {}

    def _write_pipeline(
        self, name: str, *, checked: bool = False, max_changes: int | None = None
    ) -> Path:
        tables: list[dict[str, str]] = [{"name": f"public.{name}"} for name in [*KEYED, COPIES]]
        tables[0]["where"] = FILTERS[0]
        document = {
            "pipeline": self.name,
            "source": {"conn_id": self.name, "slot": self.name,
                       "options": {"messages": True, "streaming": self.streaming},
                       "publications": [{"name": f"{self.name}_pub", "tables": tables}],
                       **({"failover": True} if self.server.version >= KEEPS_SLOTS else {})},
            # Of half of the scenes, so that commits without the files of a feed stay tried, too;
            # so with layouts, of half of either.
            "target": {"root": self.root, "change_data_feed": self.seed % 2 == 1,
                       "tables": self._layouts},
            "quality": {"enabled": checked},
            **({"batch": {"max_changes": max_changes}} if max_changes is not None else {}),
        }  # fmt: skip
        path = self.folder / f"{name}.yml"
        path.write_text(yaml.safe_dump(document))
        return path

    def _execute(self, database: str, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.server.conninfo(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []


@contextmanager
def new_scenes(
    seed: int,
    count: int,
    streaming: Sequence[str] = ("off",),
    max_changes: Sequence[int | None] = (None,),
    store: Store | None = None,
) -> Iterator[list[Scene]]:
    """A server of its own, and pipelines set up on databases of it; they share a session, a
    listener and their faults.

    They have the options ``streaming`` and ``max_changes`` in turn.
    """
    with tempfile.TemporaryDirectory(prefix="waldelta-soak-") as name, ExitStack() as ending:
        server, listener = ending.enter_context(_server()), new_listener()
        scenes: list[Scene] = []
        for number in range(count):
            scene = Scene(
                server, Path(name, str(number)), seed + number, listener=listener, number=number,
                streaming=streaming[number % len(streaming)],
                max_changes=max_changes[number % len(max_changes)], store=store,
            )  # fmt: skip
            ending.callback(scene.close)
            if scenes:
                scene.use(scenes[0].spark.newSession())
            scenes.append(scene)
            scene.set_up()
        yield scenes


@contextmanager
def new_scene(
    seed: int, *, connect: bool = False, max_changes: int | None = None
) -> Iterator[Scene]:
    """A server of its own and a pipeline, with ``connect`` a Spark Connect server too."""
    with tempfile.TemporaryDirectory(prefix="waldelta-soak-") as name, ExitStack() as ending:
        folder = Path(name)
        remote = ending.enter_context(_spark_connect(folder)) if connect else None
        scene = Scene(
            ending.enter_context(_server()), folder, seed, remote, max_changes=max_changes
        )
        ending.callback(scene.close)
        scene.set_up()
        yield scene


def new_listener() -> Listener:
    """A listener on a socket of its own."""
    return Listener(Path(tempfile.mkdtemp(prefix="waldelta-fault-")) / "socket")


def quick(folder: Path) -> dict[str, str]:
    """The environment of sessions that don't generate code, nor plan anew."""
    (file := folder / "quick.conf").write_text(_QUICK)
    # Not SPARK_CONF_DIR: it would be in the class path, and so not the archive's classes.
    return {"PYSPARK_SUBMIT_ARGS": f"--properties-file {file} pyspark-shell"}


@contextmanager
def _server() -> Iterator[EmbeddedPostgres]:
    server = new_postgres(chosen_version(), {"fsync": "off"})
    try:
        yield server.start()
    finally:
        server.delete()


@contextmanager
def _spark_connect(folder: Path) -> Iterator[str]:
    server = SparkConnectServer(
        folder, free_port(), "2g", token="soak-token", log=folder / "spark.log"
    )
    part = server.start(os.environ)
    try:
        wait_until(server.is_listening)
        yield server.remote
    finally:
        stop([part], grace_s=5)


_FILTER = f"select rowfilter from pg_publication_tables where tablename = '{KEYED[0]}'".encode()
_OURS = (
    "from pg_stat_activity where application_name like 'waldelta%' and datname = current_database()"
    " and pid <> pg_backend_pid()"
)
# Beyond the numbers of random rows; more than logical_decoding_work_mem holds.
_MANY = (
    f"insert into {COPIES} select 1000 + g, repeat('x', 300) from generate_series(1, 400) g"
).encode()
_MOST_OF_MANY = f"delete from {COPIES} where n > 1000 and n % 100 <> 0".encode()
Fault = Callable[[Scene, int], None]


def family(pid: int) -> list[psutil.Process]:
    """A process and all that it started."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def kill_driver(_: Scene, pid: int) -> None:
    """kill -9 of a run's Python process and its JVM, at one moment: stopped first, then killed."""
    processes = family(pid)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def kill_process(_: Scene, pid: int) -> None:
    """kill -9 of one process: a run's Python, or a task's worker."""
    os.kill(pid, signal.SIGKILL)


def kill_jvm(_: Scene, pid: int) -> None:
    """kill -9 of a run's JVM alone."""
    for process in family(pid):
        with suppress(psutil.NoSuchProcess):
            if process.name() == "java":
                process.kill()


def wait_until(condition: Callable[[], Any], timeout_s: float = TIMEOUT_S) -> None:
    """Look until it holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("nothing happened in time")
        time.sleep(0.02)


OLD_AGE = timedelta(days=40)
