"""Runs on targets that keep more than a mirror, or have a gate, that are killed at each step of
apply; and repairs, and releases.

Several pipelines share a driver, so that one kill -9 meets each of them at its own step. Then comes
what comes in production: the ordinary next run.
"""

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.integration.apply.test_target_modes import NAMES, held, source
from tests.oracles.mode_rows import check_mode
from tests.oracles.random_workload import Workload
from tests.soak.driver import Driver
from tests.soak.listener import Action, Listener
from tests.soak.scene import kill_driver, wait_until
from tests.support.pipelines import bare_slot, pipeline_file, written
from tests.support.seeds import chosen_seed, is_long
from waldelta.jobs.consume import consume
from waldelta.jobs.decide import run_decide
from waldelta.jobs.reconcile import run_reconcile
from waldelta.lsn import Lsn
from waldelta.pipeline import Job
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets.quarantined_rows import list_quarantined
from waldelta.stages.sync.sync import sync

KINDS = {"w1": "history", "w2": "soft_delete", "w3": "changelog", "w4": "gate"}
HIGHEST = 79
RULE = (
    f"{{type: expect_column_values_to_be_between, kwargs: {{column: a, max_value: {HIGHEST}}},"
    " gate: quarantine}"
)


class Meeting(Listener):
    """Keeps expected runs at these steps; when all have come, their process is killed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, gates=False)
        self.met = False
        self._expected: Counter[str] = Counter()
        self._dead = threading.Event()

    def expect(self, steps: Mapping[str, int]) -> None:
        """From now on."""
        self.met, self._expected, self._dead = False, Counter(steps), threading.Event()

    def _take(self, step: str) -> Action | None:
        with self._lock:
            self.reached.append(step)
            if not self._expected[step]:
                return None
            self._expected[step] -= 1
            return self._kill if not self._expected.total() else self._wait

    def _kill(self, pid: int) -> None:
        self.met = True  # before the process's end can be seen
        kill_driver(None, pid)
        self._dead.set()

    def _wait(self, _: int) -> None:
        self._dead.wait()


@dataclass
class Scene:
    """Pipelines of one table each, and what their source had after each transaction."""

    runner: object
    database: object
    jobs: dict[str, Job]
    files: dict[str, Path]
    listener: Meeting
    log: Path
    sampled: dict[int, dict[str, list]] = field(default_factory=dict)
    seen: set = field(default_factory=set)
    kills: int = 0

    def kill(self, verb: str, steps: Mapping[str, int], **details) -> None:
        """Begins the verb on all pipelines, and kills it when its runs are at these steps."""
        self.kills += 1
        self.listener.expect(steps)
        driver = Driver(os.environ | self.listener.environment, self.log)
        try:
            driver.wait_until_ready()
            runs = [f"killed {self.kills} {name}" for name in self.files]
            for run_id, file in zip(runs, self.files.values(), strict=True):
                driver.begin(verb, file, run_id, details)
            wait_until(lambda: all(driver.ended(run_id) for run_id in runs))
            ended = [driver.ended(run_id) for run_id in runs]
            assert self.listener.met, (ended, self.log.read_text()[-3000:])
        finally:
            driver.end()

    def run(self) -> None:
        """The ordinary next run of each pipeline."""
        for name, job in self.jobs.items():
            consume(self.runner, replace(job, run_id=f"after {self.kills} {name}"))

    def sample(self) -> None:
        ((lsn,),) = self.database.execute("select pg_current_wal_insert_lsn()::text")
        self.sampled[Lsn.parse(lsn).value] = {
            name: source(self.database.connection, name) for name in self.jobs
        }


@pytest.fixture
def listener(tmp_path) -> Iterator[Meeting]:
    made = Meeting(tmp_path / "socket")
    yield made
    made.close()


def scene(
    runner, database, tmp_path, listener, kinds: Mapping[str, str], suites: Mapping[str, str]
) -> Scene:
    jobs, files = {}, {}
    for name, kind in kinds.items():
        lake, folder = (tmp_path / f"lake_{name}").as_uri(), tmp_path / f"suites_{name}"
        folder.mkdir()
        if name in suites:
            folder.joinpath(f"public.{name}.yml").write_text(f"expectations:\n  - {suites[name]}\n")
        target = {"root": lake}
        if kind not in ("gate", "mirror"):
            target["tables"] = {f"public.{name}": {"mode": kind}}
        quality = {"enabled": False, "suites": str(folder)}
        file = pipeline_file(
            lake, f"s_{database.name}_{name}", [f"public.{name}"], target=target, quality=quality
        )
        files[name] = written(file, tmp_path, f"{name}.yml")
        jobs[name] = bare_slot(database, file)
    return Scene(runner, database, jobs, files, listener, tmp_path / "log")


def rows_of(scene, name):
    """All rows of a mirror."""
    rows = held(scene.jobs[name], name)
    return sorted((tuple(row[n] for n in NAMES) for row in rows), key=repr)


def check(scene, what) -> None:
    """Each target holds what its mode promises after each of the source's transactions."""
    now = {name: source(scene.database.connection, name) for name in scene.jobs}
    for name, mode in KINDS.items():
        if mode != "gate":
            then = {lsn: rows[name] for lsn, rows in scene.sampled.items()}
            check_mode(mode, held(scene.jobs[name], name), NAMES, now[name], then)
    # Whatever was there when a run ended is there still, if only as deleted.
    keys = {(row["id"], row["part"]) for row in held(scene.jobs["w2"], "w2")}
    assert scene.seen <= keys, what
    scene.seen |= keys
    check_gate(scene, now["w4"], what)


def check_gate(scene, now, what) -> None:
    """Rows that pass are the source's; each of the others is in quarantine."""
    job = scene.jobs["w4"]
    rows = held(job, "w4")
    target = {(row["id"], row["part"]): tuple(row[n] for n in NAMES) for row in rows}
    assert len(target) == len(rows), what
    there = {row[:2]: row for row in now}
    fails = {key for key, row in there.items() if row[2] is not None and row[2] > HIGHEST}
    assert {k: v for k, v in target.items() if k not in fails} == {
        k: v for k, v in there.items() if k not in fails
    }, what
    assert all(row[2] is None or row[2] <= HIGHEST for row in target.values()), what
    told = Counter(
        (int(row["key"]["id"]), int(row["key"]["part"])) for row in list_quarantined(job)
    )
    assert (what, set(told), set(told.values()) - {1}) == (what, fails, set())


# Behind the commit always, where most could come twice; all of them in a soak.
POINTS = (
    ["apply.staged", "apply.merging", "apply.merged", "apply.applied", "apply.cut"]
    if is_long()
    else ["apply.merged"]
)


@pytest.mark.soak("every step of each mode")
def test_every_kind_of_target_after_a_kill(runner, database, tmp_path, listener):
    """No state twice, none lost, and nothing past a gate."""
    seed = chosen_seed()
    workload = Workload(database.connection, seed, list(KINDS))
    made = scene(runner, database, tmp_path, listener, KINDS, {"w4": RULE})
    for job in made.jobs.values():
        sync(runner, job)
    for number, point in enumerate(POINTS):
        for _ in range(12):
            workload.transaction()
            made.sample()
        for name in made.jobs:
            database.execute(f"insert into {name} values ({5000 + number}, 0, {number}, 'sure')")
        made.sample()
        made.kill("consume", {point: len(KINDS)})
        if not number % 2:  # what comes meanwhile is of the next run too
            workload.transaction()
            made.sample()
        made.run()
        check(made, (f"WALDELTA_SEED={seed}", point))
    accepts = replace(made.jobs["w4"], run_id="accept")
    run_decide(runner, accepts, "accept", tables=["public.w4"], reason="known", by="ann")
    assert rows_of(made, "w4") == source(database.connection, "w4")


@pytest.mark.soak("several moments of a kill")
def test_a_repair_after_a_kill(runner, database, tmp_path, listener):
    """Each target is whole, or as it was, and then repaired."""
    names = ["r1", "r2", "r3"]
    for name in names:
        database.execute(
            f"create table {name} (id int, part int, a int, b text, big text, primary key (id,"
            " part))"
        )
        database.execute(f"insert into {name} select g, 0, g, 'x' from generate_series(1, 50) g")
    made = scene(runner, database, tmp_path, listener, dict.fromkeys(names, "mirror"), {})
    for name, job in made.jobs.items():
        sync(runner, job)
        DeltaTable(f"{job.pipeline.target.root}/public/{name}").delete("id < 5")
        database.execute(
            f"update {name} set a = 0 where id in (3, 7); delete from {name} where id in (4, 8)"
        )
    made.kill(
        "reconcile", {"repair.begun": 1, "repair.merged": 1, "repair.recorded": 1}, repair=True
    )
    for name in names:
        database.execute(
            f"update {name} set a = -1 where id in (2, 9); insert into {name} values (60, 0, 1,"
            " 'y')"
        )
    made.run()
    whole = [name for name in names if rows_of(made, name) == source(database.connection, name)]
    assert len(whole) == 2, whole
    (left,) = set(names) - set(whole)
    with pytest.raises(RunFailed, match="1 target doesn't match the source"):
        run_reconcile(runner, replace(made.jobs[left], run_id="look"))
    for name, job in made.jobs.items():
        run_reconcile(runner, replace(job, run_id="mend"), repair=True)
        run_reconcile(runner, replace(job, run_id="compare"))
        assert rows_of(made, name) == source(database.connection, name)


RELEASE = """
import os, signal, sys
from waldelta.jobs.pipeline import Pipeline
from waldelta.lake.ledger.table import LedgerTable

when, file = sys.argv[1:]
extend = LedgerTable.extend

def killed(self, *given, **named):
    if when == "behind":
        extend(self, *given, **named)
    os.kill(os.getpid(), signal.SIGKILL)

LedgerTable.extend = killed
Pipeline.load(file).decide(
    None, "release", tables=["public.s1", "public.s2"], reason="known", by="ann"
)
"""


@pytest.mark.parametrize(
    "when", ["before", pytest.param("behind", marks=pytest.mark.nightly("a kill at another step"))]
)
def test_a_release_after_a_kill(runner, database, tmp_path, when):
    """All its tables are released, or none; the next run says which."""
    tables, stop = ["public.s1", "public.s2"], RULE.replace("quarantine", "stop")
    for table in tables:
        database.execute(f"create table {table} (id int primary key, a int)")
        tmp_path.joinpath(f"{table}.yml").write_text(f"expectations:\n  - {stop}\n")
    lake = (tmp_path / "lake").as_uri()
    file = pipeline_file(
        lake, f"s_{database.name}", tables, quality={"enabled": False, "suites": str(tmp_path)}
    )
    job = bare_slot(database, file)
    sync(runner, job)
    (tmp_path / "pipeline").mkdir()
    path = written(file, tmp_path / "pipeline")
    for table in tables:
        database.execute(f"insert into {table} values (1, 99), (2, 2)")
    with pytest.raises(RunFailed):
        consume(runner, replace(job, run_id="first"))
    killed = subprocess.run(
        [sys.executable, "-c", RELEASE, when, str(path)], env=os.environ, check=False
    )
    assert killed.returncode == -signal.SIGKILL

    def rows():
        return [
            len(DeltaTable(f"{lake}/public/{table[7:]}").to_pyarrow_table()) for table in tables
        ]

    if when == "before":
        with pytest.raises(RunFailed) as failed:
            consume(runner, replace(job, run_id="second"))
        assert failed.value.result.targets.not_applied == tables
        assert rows() == [0, 0]
        assert [told.table_name for told in _release(job, tables)] == tables
    else:
        _release(job, tables)
    consume(runner, replace(job, run_id="third"))
    consume(runner, replace(job, run_id="fourth"))
    assert rows() == [2, 2]


def _release(job, tables):
    from waldelta.pipeline.targets.quarantined_rows import release_tables

    return release_tables(job, tables, by="ann")
