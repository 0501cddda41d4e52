"""Kills of everything that brings a target to the rows it should have: at the end, no row differs.

    python -m tests.soak.mend_kills [--kills 200] [--minutes 30] [--s3] [--seed N]
        [--mode history] [--only copy "other filter"] [--results FOLDER]

A round prepares one job: a copy, a copy that continues, a resync, a repair after another filter, a
replay, a retry of quarantined rows, or reconcile --repair. The job is killed (kill -9) where it
passes a fault point, while the source is written to; perhaps the next attempt is killed, too. Then
the job and an ordinary run follow, and the target is compared with the source. A target in a
``--mode`` that keeps more than a mirror is copied again, gets changes, and is emptied by a
TRUNCATE. It is compared with what its source has, and had after some of the transactions, too.

Runs are forked from this process, which has imported what they need and uses none of it. So a kill
costs no start of Python, and no thread of Arrow or delta-rs is lost in a fork.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import adbc_driver_postgresql.dbapi as _adbc  # noqa: F401 - imported before the first fork
import psycopg
from deltalake import DeltaTable

import waldelta.failpoints
from tests.oracles.compare import compare_target
from tests.oracles.mode_rows import check_mode
from tests.soak.lakes import SoakLake, Store, new_store
from tests.soak.results import RESULTS, code, kills_file, write
from tests.soak.scene import wait_until
from tests.support.fixtures.postgres import chosen_version, new_postgres
from waldelta.background import run_concurrently
from waldelta.config import PipelineFile
from waldelta.jobs import Pipeline
from waldelta.jobs import consume as _consume  # noqa: F401
from waldelta.jobs import decide as _decide  # noqa: F401
from waldelta.jobs import reconcile as _reconcile  # noqa: F401
from waldelta.jobs import replay as _replay  # noqa: F401
from waldelta.lake.ledger import now
from waldelta.lsn import Lsn
from waldelta.snapshot import chunks
from waldelta.spark import InProcess, spark_session
from waldelta.stages.repair import replay_runs as _replay_runs  # noqa: F401
from waldelta.stages.setup.setup import apply_setup
from waldelta.stages.sync.sync import sync
from waldelta.target_modes.modes import MODES

T = "public.t"
_BIG = "(select string_agg(md5(({0} + i)::text), '') from generate_series(1, 100) i)"
_FILL = f"""
insert into t select g, g % 4, repeat('x', 20 + g % 300), case when g % 50 = 0 then
  {_BIG.format("g")} end from generate_series(1, 3000) g
"""
_TABLE = f"""
create table t (id int, part int, v text, big text, primary key (id, part));
alter table t alter big set storage external;
{_FILL};
analyze t
"""
_NAMES = ("id", "part", "v", "big")
_FILTERS = ("part < 3", "part < 2", "part > 0", "part <> 1")
_MOST_KILLS = 5
_OURS = "application_name like 'waldelta%' and datname = 'postgres'"

Work = Callable[[], list[str]]


def _runner() -> InProcess:
    """Returns what runs in this process, and starts a JVM where it needs Spark."""
    return InProcess(lambda: spark_session(name="mend"))


class Scene:
    """A server with one table, and a pipeline whose runs are killed."""

    def __init__(self, conninfo: str, lake: SoakLake, seed: int, mode: str) -> None:
        self.conninfo, self.lake, self.random = conninfo, lake, random.Random(seed)
        self.connection, self.mode = psycopg.connect(conninfo, autocommit=True), mode
        published = {"name": T} | ({"where": _FILTERS[0]} if mode == "mirror" else {})
        publication = {"name": "mend", "tables": [published]}
        self.pipeline = Pipeline(
            PipelineFile.model_validate(
                {
                    "pipeline": "mend",
                    "source": {"conn_id": "mend", "slot": "mend", "publications": [publication]},
                    "target": {"root": lake.root, "tables": {T: {"mode": mode}}},
                    "quality": {"enabled": False},
                }
            )
        )
        self._ids = itertools.count(10_000)
        self.replayed: tuple[Any, Any] | None = None
        self._then: dict[int, list[tuple]] = {}

    def setup(self) -> None:
        """Make publication and slot, without the JVM by which a setup tries a store."""
        job = self.pipeline.job()
        with job.source.connect("setup") as connection:
            apply_setup(connection, job)

    def execute(self, statement: str) -> None:
        """Run SQL on the source."""
        self.connection.execute(statement.encode())

    def write(self, count: int = 20) -> None:
        """Commit random changes: rows come, go, change, and move to another key."""
        dice = self.random
        for _ in range(count):
            some = dice.randrange(1, 3000)
            statements = (
                f"insert into t values ({next(self._ids)}, {some % 4}, 'new', null)",
                f"insert into t values ({some}, {some % 4}, 'back') on conflict do nothing",
                f"update t set v = repeat('y', {some % 400}) where id / 6 = {some // 6}",
                f"update t set id = {next(self._ids)}, part = (part + 1) % 4 where id = {some}",
                f"update t set id = {next(self._ids)} where id = {some} and part = {some % 4}",
                f"delete from t where id between {some} and {some + 1}",
            )
            with suppress(psycopg.errors.UniqueViolation):
                self.execute(dice.choice(statements))

    def rows(self) -> tuple[int, list[tuple]]:
        """Returns the source's position and its rows, while nothing else writes to it."""
        # A forked run mustn't use its parent's connection.
        with psycopg.connect(self.conninfo) as connection:
            ((lsn,),) = connection.execute("select pg_current_wal_insert_lsn()::text").fetchall()
            rows = connection.execute(f"select {', '.join(_NAMES)} from t".encode()).fetchall()
        return Lsn.parse(lsn).value, sorted(rows, key=repr)

    def sample(self) -> None:
        """Note what the source has."""
        lsn, rows = self.rows()
        self._then[lsn] = rows

    def truncate(self) -> None:
        """Empty the table among other changes, and fill it again."""
        self.write()
        self.execute("begin; delete from t where id < 5; truncate t; " + _FILL + "; commit")
        self.write()

    @contextmanager
    def written_to(self) -> Iterator[None]:
        """A block during which the source is written to."""

        def work(ended: threading.Event) -> None:
            while not ended.wait(0.1):
                self.write(2)

        with run_concurrently(work, "writer"):
            yield

    def settle(self) -> None:
        """Wait until the server has ended the sessions of a killed run."""
        query = f"select 1 from pg_stat_activity where {_OURS}".encode()
        wait_until(lambda: not self.connection.execute(query).fetchall())

    def damage(self) -> None:
        """Change, remove and invent rows of the target; runs as a process of its own."""
        table, some = self._table(), self.random.randrange(2000)
        table.update(updates={"v": "'damaged'"}, predicate=f"id between {some} and {some + 20}")
        table.delete(f"id between {some + 30} and {some + 40}")

    def damage_replayed(self) -> None:
        """Damage rows that the latest run brought."""
        self._table().update(updates={"v": "'damaged'"}, predicate="id < 100 and part < 2")

    def _table(self) -> DeltaTable:
        """Returns the target as another program opens it, from the store itself."""
        lake = self.pipeline.job().lake
        return DeltaTable(lake.target(T).uri, storage_options=lake.storage_options)

    def differences(self) -> list[str]:
        """Returns what is wrong with target and change log, after an ordinary run."""
        job = self.pipeline.job()
        if self.mode != "mirror":
            rows = self._table().to_pyarrow_table().to_pylist()
            check_mode(self.mode, rows, _NAMES, self.rows()[1], self._then)
            return self.lake.landed_twice()
        found = compare_target(_runner(), self.conninfo, job.pipeline, job.read_states()[T])
        missing = [f"{found.missing} rows lost, {found.extra} too many: {found.keys}"]
        return missing * bool(found.rows) + self.lake.landed_twice()


class Jobs:
    """What is killed: for each name, what is done before (in this process), and the job."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.run = scene, fork
        self.all: dict[str, tuple[Callable[[], None], Callable[[], Any]]] = {
            "copy": (scene.write, self._copy),
            "copy that continues": (lambda: self._begun(self._copy), self._copy),
            "resync": (self._damaged, self._resync),
            "resync that continues": (lambda: self._begun(self._resync), self._resync),
            "other filter": (self._refilter, self.consume),
            "replay": (self._changed, self._replay),
            "retry": (self._quarantined, self._retry),
            "reconcile": (self._damaged, self._reconcile),
            "external commits": (self._written, self._reconcile),
        }
        if scene.mode != "mirror":
            self.all = {
                "changes": (scene.write, self.consume),
                "truncate": (scene.truncate, self.consume),
                "copy": (lambda: self._unlanded(scene.write), self._copy),
                "copy of other rows": (lambda: self._unlanded(scene.truncate), self._copy),
            }

    def consume(self) -> None:
        """An ordinary run."""
        self.scene.pipeline.consume(_runner())

    def _copy(self) -> None:
        sync(_runner(), self.scene.pipeline.job(), [T])

    def _resync(self) -> None:
        sync(_runner(), self.scene.pipeline.job(), [T], by_diff=True)

    def _replay(self) -> None:
        began, end = self.scene.replayed or (now(), now())
        self.scene.pipeline.replay(_runner(), began, end)

    def _retry(self) -> None:
        if self.scene.pipeline.waiting():
            self.scene.pipeline.decide(_runner(), "retry")

    def _reconcile(self) -> None:
        self.scene.pipeline.reconcile(_runner(), repair=True)

    def _begun(self, job: Callable[[], Any]) -> None:
        self.scene.write()
        points = self.run(job, kill_at=("sync.staged", self.scene.random.randrange(1, 6)))
        _check(points.problems)
        self.scene.settle()
        self.scene.write(40)

    def _unlanded(self, write: Callable[[], None]) -> None:
        self._ordinary(self.consume)
        self.scene.sample()
        write()

    def _damaged(self) -> None:
        self._ordinary(self.consume)
        self._ordinary(self.scene.damage)
        self.scene.write()

    def _written(self) -> None:
        self._damaged()
        self._ordinary(self.consume)

    def _changed(self) -> None:
        self._ordinary(self.consume)
        began = now()
        self.scene.execute("update t set v = 'run' || id where id < 100")
        self.scene.write()
        self._ordinary(self.consume)
        self.scene.replayed = began, now()
        self._ordinary(self.scene.damage_replayed)

    def _refilter(self) -> None:
        self.scene.write()
        where = self.scene.random.choice(_FILTERS)
        self.scene.execute(f"alter publication mend set table t where ({where})")

    def _quarantined(self) -> None:
        """Rows that moved into the filter without a large value, which the source then hid."""
        self.scene.execute("alter publication mend set table t where (part < 3)")
        self._ordinary(self.consume)
        first = next(self.scene._ids)
        for number in range(3):
            key = first + 1_000_000 + number
            self.scene.execute(f"insert into t values ({key}, 3, 'q', {_BIG.format(key)})")
        self._ordinary(self.consume)
        self.scene.execute(f"update t set part = 0 where id >= {first + 1_000_000} and part = 3")
        self._ordinary(lambda: self.scene.pipeline.consume(_runner(), stage="land"))
        self.scene.execute("alter table t rename column big to hidden")
        points = self.run(lambda: self.scene.pipeline.consume(_runner(), stage="apply"))
        self.scene.execute("alter table t rename column hidden to big")
        _check(points.problems)

    def _ordinary(self, job: Callable[[], Any]) -> None:
        _check(self.run(job).problems)


class ForkedRun:
    """The fault points that a run passed, whether it was killed, and what it said was wrong."""

    def __init__(self, lines: list[str], *, was_killed: bool) -> None:
        self.points = [line[1:] for line in lines if line.startswith(".")]
        self.problems = [line[1:] for line in lines if line.startswith("!")]
        self.was_killed = was_killed


def fork(job: Callable[[], Any], kill_at: tuple[str, int] | None = None) -> ForkedRun:
    """Run a job in a process of its own, which is killed at the given point, if it comes there.

    ``kill_at``: a fault point ("" for any), and how often it is passed.
    """
    read, sink = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        _work(job, kill_at, sink)
    os.close(sink)
    with os.fdopen(read) as source:
        lines = source.read().splitlines()
    _, status = os.waitpid(pid, 0)
    return ForkedRun(lines, was_killed=os.WIFSIGNALED(status))


def _work(job: Callable[[], Any], kill_at: tuple[str, int] | None, sink: int) -> None:
    passed: Counter[str] = Counter()

    def point(name: str) -> None:
        passed.update((name, ""))
        os.write(sink, f".{name}\n".encode())
        if kill_at in ((name, passed[name]), ("", passed[""])):
            os.kill(os.getpid(), signal.SIGKILL)

    original = waldelta.failpoints.fault_point
    for module in list(sys.modules.values()):
        if getattr(module, "fault_point", None) is original:
            module.fault_point = point  # type: ignore[attr-defined]
    try:
        found = job()
        for problem in found if isinstance(found, list) else ():
            os.write(sink, f"!{problem}\n".encode())
    except BaseException as err:
        traceback.print_exc()
        first = str(err.__cause__ or err).splitlines()[:1]
        os.write(sink, f"!{type(err.__cause__ or err).__name__}: {first}\n".encode())
    os._exit(0)


def _check(problems: list[str]) -> None:
    if problems:
        raise AssertionError("; ".join(problems))


class Kills:
    """Rounds of kills, and their number by job and point."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.jobs = scene, Jobs(scene)
        self.where: Counter[str] = Counter()
        self.comparisons = 0
        self.problems: list[str] = []
        self._code = code()
        self._points: dict[str, Counter[str]] = {}

    def round(self, name: str) -> None:
        """Kill a job, perhaps several times; raises AssertionError for a difference."""
        prepare, job = self.jobs.all[name]
        prepare()
        for _ in range(self.scene.random.randrange(1, _MOST_KILLS + 1)):
            with self.scene.written_to():
                run = fork(job, self._moment(name))
            if not run.was_killed:
                _check(run.problems)
                break
            self.where[f"{name}: {run.points[-1]}"] += 1
            self.scene.settle()
            if job == self.jobs.consume:  # A copy keeps nothing of what it doesn't see.
                self.scene.sample()
            self.scene.write(5)
        run = fork(job)
        _check(run.problems)
        # A run that nothing kills passes all points, of which later rounds choose.
        points = self._points.setdefault(name, Counter())
        points |= Counter(run.points)
        _check(fork(self.jobs.consume).problems)
        _check(fork(self.scene.differences).problems)
        self.comparisons += 1

    def _moment(self, name: str) -> tuple[str, int]:
        """Returns a point that the job has passed before, and how often; at first, any point."""
        if (points := self._points.get(name)) is None:
            return "", self.scene.random.randrange(1, _MOST_KILLS + 1)
        point = self.scene.random.choice(sorted(points))
        return point, self.scene.random.randrange(1, points[point] + 1)

    @property
    def record(self) -> dict[str, Any]:
        """What came of it so far."""
        return {
            "at": f"{now():%Y-%m-%d}",
            "code": self._code,
            "postgres": chosen_version(),
            "kills": self.where.total(),
            "jobs": len({name.partition(":")[0] for name in self.where}),
            "comparisons": self.comparisons,
            "problems": self.problems,
            "where": dict(sorted(self.where.items())),
        }


@contextmanager
def _scene(seed: int, store: Store | None, mode: str) -> Iterator[Scene]:
    with tempfile.TemporaryDirectory(prefix="waldelta-mend-") as folder:
        server = new_postgres(chosen_version(), {"fsync": "off", "autovacuum": "off"})
        try:
            server.start()
            lake = SoakLake(f"file://{folder}") if store is None else store.lake("mend")
            os.environ.update({"AIRFLOW_CONN_MEND": server.uri(), **lake.environment})
            scene = Scene(server.conninfo(), lake, seed, mode)
            for statement in _TABLE.split(";"):
                scene.execute(statement)
            _check(fork(scene.setup).problems)
            _check(fork(lambda: scene.pipeline.sync(_runner())).problems)
            yield scene
        finally:
            server.delete()


def main() -> None:
    """Kill until there were enough, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--s3", action="store_true", help="the lake is in an S3 server")
    parser.add_argument("--mode", choices=[str(mode) for mode in MODES], default="mirror")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--only", nargs="+", help="jobs; by default all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    chunks.LEAST_BYTES_PER_TASK = 1 << 16
    gc.freeze()  # Forks share these objects' pages.
    deadline = time.monotonic() + 60 * options.minutes
    with ExitStack() as ending:
        store = ending.enter_context(new_store(options.seed)) if options.s3 else None
        kills = Kills(ending.enter_context(_scene(options.seed, store, options.mode)))
        names = [name for name in kills.jobs.all if name in (options.only or kills.jobs.all)]
        where = "s3" if options.s3 else "local"
        kind = "mends" if options.mode == "mirror" else f"mends_{options.mode}"
        file = kills_file(options.results, options.seed, where, kind)
        for name in itertools.cycle(names):
            if kills.where.total() >= options.kills or time.monotonic() > deadline:
                break
            try:
                kills.round(name)
            except AssertionError as err:
                kills.problems.append(f"{name}: {err}")
            write(file, {"seed": options.seed, "lake": where, "mode": options.mode} | kills.record)
            print(f"{name}: {kills.record}", flush=True)
            if kills.problems:
                raise SystemExit(f"seed {options.seed}: {kills.problems}")


if __name__ == "__main__":
    main()
