"""Random kills under load: runs are killed at random moments, over and over, and at the end nothing
is lost or doubled.

    python -m tests.soak.random_kills [--results FOLDER] --kills 200 [--connect | --s3]
        [--minutes 30] [--seed N]

A writer commits until the round has 200 transactions a pipeline. Each run is killed (kill -9 of its
Python, of its JVM, of both; or of a Connect client, whose server goes on with what it was told) at
a random moment of its work; after a few kills, and perhaps an immediate stop of PostgreSQL, an
ordinary run follows, and the targets are compared. Local runs are several at once in one driver,
each on a pipeline of its own (tests.soak.driver), and die with it. Of pipelines that stream, a
transaction is open most of the time, with a savepoint rolled back. Transactions larger than
logical_decoding_work_mem (64 kB) release savepoints, roll others back, and are rolled back as a
whole more often than not. With ``--s3`` the lake is in an S3 server behind a proxy, which delays
each request and refuses some; a PUT may arrive after its client was killed, and the server may be
killed, too. WALDELTA_POSTGRES_VERSION chooses the server: 15, 16 or 18.
"""

import argparse
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.oracles.random_workload import KINDS
from tests.soak.driver import Driver, said
from tests.soak.lakes import Store, new_store
from tests.soak.results import RESULTS, code, kills_file, write
from tests.soak.scene import (
    PLAIN,
    STEP_CHANGES,
    Scene,
    kill_driver,
    kill_jvm,
    kill_process,
    new_scene,
    new_scenes,
)
from tests.support.fixtures.postgres import chosen_version
from waldelta.errors import WaldeltaError
from waldelta.lake.ledger import now
from waldelta.pipeline.run_result import RunFailed

log = logging.getLogger(__name__)

KILLS = {"driver": kill_driver, "python": kill_process, "jvm": kill_jvm}
CLIENT = {"client": kill_process}  # of a Spark Connect server, which lives on
KILLS_BETWEEN_COMPARISONS = 4
LANES = 4
STREAMING = ("off", "on", "parallel", "off")  # of the lanes; "parallel" is new in PostgreSQL 16
# Of the last one a run has many steps, of which the first are applied while the others land.
SMALL = (None, None, None, STEP_CHANGES)
_AT_FIRST_S = 10.0
_BETWEEN_TRANSACTIONS_S = 0.25
_ALTERED_AFTER = 100
_OPEN_FOR = 10
# Of a round. On a busy machine the backlog would grow with each round, and with it the time until
# the next kill.
_MOST_TRANSACTIONS = 200


class Load:
    """Commits random transactions until it is told to pause."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.transactions, self._last = scene, 0, 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write, beside whatever else happens."""
        self._ended.clear()
        self._last = self.transactions + _MOST_TRANSACTIONS
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Write no more; returns when the last transaction has ended."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
            self.scene.end_open()

    def _write(self) -> None:
        while self.transactions < self._last and not self._ended.wait(_BETWEEN_TRANSACTIONS_S):
            self.scene.write(1)
            self.transactions += 1
            if self.scene.streaming != "off" and self.transactions % _OPEN_FOR == 0:
                self.scene.leave_open()
            if self.transactions % _ALTERED_AFTER == 0:
                self.scene.alter(*KINDS)


def kill_one(scene: Scene, ready: Any, longest_s: float) -> str | None:
    """Kills a client at a random time; returns its last step, or None when it was over."""
    moment = scene.random.uniform(0, longest_s)
    scene.listener.reached.clear()
    scene.release(ready)
    _wait(moment, lambda: ready.poll() is not None)
    if ready.poll() is not None:
        return None
    kill_process(scene, ready.pid)
    ready.wait()
    return scene.listener.reached[-1] if scene.listener.reached else "start"


def kill_all(scenes: Sequence[Scene], driver: Driver, how: str, longest_s: float) -> int:
    """Kills a driver's runs at a random time; returns how many weren't over."""
    driver.wait_until_ready()
    scenes[0].listener.reached.clear()
    runs = []
    for scene in scenes:
        scene.runs += 1
        runs.append(f"{scene.name}_{scene.runs}")
        driver.begin("consume", scene.files[PLAIN], runs[-1], {})
    _wait(scenes[0].random.uniform(0, longest_s), lambda: all(driver.ended(run) for run in runs))
    alive = sum(driver.ended(run) is None for run in runs)
    KILLS[how](scenes[0], driver.process.pid)
    _wait(60, lambda: all(driver.ended(run) for run in runs))
    driver.end()
    return alive


def _wait(longest_s: float, is_over: Callable[[], bool]) -> None:
    began = time.monotonic()
    while time.monotonic() - began < longest_s and not is_over():
        time.sleep(0.005)


class Soak:
    """Rounds of a few kills, an ordinary run and a comparison."""

    def __init__(self, scenes: Sequence[Scene], store: Store | None = None) -> None:
        self.store, self.scenes, self.loads = store, scenes, [Load(scene) for scene in scenes]
        self.random = scenes[0].random
        self.kills: Counter[str] = Counter()
        self.where: Counter[str] = Counter()
        self.said: dict[str, Any] = {
            "seed": scenes[0].seed,
            "at": f"{now():%Y-%m-%d}",
            "code": code(),
            "postgres": chosen_version(),
            "lake": "folder" if store is None else "S3",
            "problems": [],
            "comparisons": 0,
            "runs": 0,
            "recovery": [],
            "undisturbed": [],
        }
        # As long as a run's work takes here and now; a kill comes at any moment of it.
        self._longest_s = _AT_FIRST_S
        self._ready: Driver | None = None

    def round(self) -> None:
        """Kills runs while the source is written to; then ordinary runs follow."""
        for load in self.loads:
            load.start()
        for number in range(KILLS_BETWEEN_COMPARISONS):
            if self.scenes[0].remote:
                self._kill_client()
            else:
                self._kill_driver(last=number == KILLS_BETWEEN_COMPARISONS - 1)
        for load in self.loads:
            load.pause()
        if self.random.random() < 0.3:
            self.scenes[0].restart_server()
            for scene in self.scenes[1:]:
                scene.reconnect()
            self.kills["server"] += 1
        seconds = [self._recover(scene) for scene in self.scenes]
        # Those of one driver share the cores; waiting for a store they do at the same time.
        share = sum if self.store is None else max
        self._longest_s = share(seconds) or _AT_FIRST_S
        self.said |= {
            "kills": dict(self.kills),
            "where": dict(self.where),
            "transactions": sum(x.transactions for x in self.loads),
            "versions of feeds": sum(scene.compared_versions for scene in self.scenes),
        }

    def close(self) -> None:
        """End what still runs."""
        for load in self.loads:
            load.pause()
        if self._ready is not None:
            self._ready.end()

    def _kill_client(self) -> None:
        scene = self.scenes[0]
        # A run has its session's lock from the start, so the next one can't wait beside it.
        if (step := kill_one(scene, scene.start("consume"), self._longest_s)) is not None:
            self.kills["client"] += 1
            self.said["runs"] += 1
            self.where[step] += 1

    def _kill_driver(self, *, last: bool) -> None:
        driver = self._ready or Driver.let_go(self.scenes[0])
        self._ready = None if last else Driver.let_go(self.scenes[0])
        how = self.random.choice(list(KILLS))
        with self._disturbed():
            killed = kill_all(self.scenes, driver, how, self._longest_s)
        if killed:
            self.kills[how] += 1
            self.said["runs"] += killed
            reached = self.scenes[0].listener.reached
            self.where[reached[-1] if reached else "start"] += 1

    @contextmanager
    def _disturbed(self) -> Iterator[None]:
        if self.store is None:
            yield
            return
        with self.store.disturbed(self.random, self._longest_s):
            yield
        self.said["store"] = dict(self.store.faults)

    def _recover(self, scene: Scene) -> float:
        """An ordinary run, the comparison, and a run with as much to do."""
        scene.settle()
        waiting, before = scene.transactions - scene.applied, len(self.said["problems"])
        seconds = self._run(scene)
        if len(self.said["problems"]) > before:
            # The target may even lack columns; the run's own error says why.
            return seconds
        self.said["problems"] += scene.differences()
        self.said["comparisons"] += 1
        self.said["recovery"].append(round(seconds, 1))
        if len(self.said["problems"]) == before and self.said["comparisons"] % 2:
            scene.write(waiting)
            for _ in range(waiting // _ALTERED_AFTER):
                scene.alter(*KINDS)
            self.said["undisturbed"].append(round(self._run(scene), 1))
        return seconds

    def _run(self, scene: Scene) -> float:
        seconds = 0.0
        try:
            seconds = scene.run("consume")
        except (RunFailed, WaldeltaError) as err:
            log.exception("run of %s", scene.name)
            self.said["problems"].append(said(err))
        scene.applied = scene.transactions
        return seconds


@contextmanager
def _soak(seed: int, where: str) -> Iterator[Soak]:
    with ExitStack() as ending:
        store = ending.enter_context(new_store(seed)) if where == "s3" else None
        scenes = ending.enter_context(_scenes(seed, where, store))
        soak = Soak(scenes, store)
        ending.callback(soak.close)
        yield soak


@contextmanager
def _scenes(seed: int, where: str, store: Store | None) -> Iterator[list[Scene]]:
    if where == "connect":
        with new_scene(seed, connect=True, max_changes=SMALL[seed % len(SMALL)]) as scene:
            yield [scene]
    else:
        streaming = (
            STREAMING
            if chosen_version() >= 16
            else [kind.replace("parallel", "on") for kind in STREAMING]
        )
        with new_scenes(seed, LANES, streaming, SMALL, store) as scenes:
            yield scenes


def main() -> None:
    """Kill until there were enough, and write down what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--kills", type=int, default=200)
    where = parser.add_mutually_exclusive_group()
    for option, text in (
        ("connect", "clients of a Spark Connect server that lives on"),
        ("s3", "runs whose lake is in an S3 server"),
    ):
        where.add_argument(
            f"--{option}", dest="where", action="store_const", const=option, default="local",
            help=text,
        )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    with _soak(options.seed, options.where) as soak:
        while (
            soak.said["runs"] < options.kills
            and time.monotonic() < deadline
            and not soak.said["problems"]
        ):
            soak.round()
            write(kills_file(options.results, options.seed, options.where), soak.said)
            print(soak.said, flush=True)
    if soak.said["problems"]:
        raise SystemExit(f"seed {options.seed}: {soak.said['problems']}")


if __name__ == "__main__":
    main()
