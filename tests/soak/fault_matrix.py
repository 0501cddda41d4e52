"""Every fault at every step: the run it meets dies, the ordinary next one puts everything right.

    python -m tests.soak.fault_matrix RESULTS.json [--steps land,consume] [--faults driver,server] [--minutes N] [--seed N]

Cells go into the results as they are done, and aren't tried again; docs/faults.md is written from them (tests.soak.page).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import psycopg
from pyspark.sql import SparkSession

import spark_jobs.maintain
from spark_jobs.result import RunFailed
from tests.soak.scene import OLD_AGE, Fault, Scene, family, kill_driver, kill_jvm, kill_process, new_scene, wait_until
from waldelta.errors import WaldeltaError
from waldelta.ledger import now

Prepare = Callable[[Scene], None]
_FILE_BYTES = 1500  # a disk that is full in the middle of a file


def _changes(scene: Scene) -> None:
    scene.write()


def _columns(scene: Scene) -> None:
    scene.alter("add default")


def _rewritten(scene: Scene) -> None:
    scene.alter("add volatile")


def _unpublished(scene: Scene) -> None:
    for _ in range(3):
        scene.connection.execute(b"select pg_logical_emit_message(false, 'x', repeat('x', 8000000))")
        scene.connection.execute(b"select pg_switch_wal()")


def _slot_dropped(scene: Scene) -> None:
    scene.write(4)
    scene.connection.execute(
        b"select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = current_database()"
    )
    scene.write(4)


@dataclass(frozen=True)
class Step:
    """A moment of a run: its fault point, the verb that passes it, and what is written to the source before."""

    point: str
    verb: str = "consume"
    prepare: Prepare = _changes
    group: str = ""
    checked: bool = False

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"{self.group}: {self.point}" if self.group else self.point


_SYNC = ("sync.begun", "sync.planned", "sync.reading", "sync.committed", "sync.recorded")
STEPS: tuple[Step, ...] = (
    *(Step(point) for point in (
        "run.begun", "land.reading", "land.committed", "consume.landed", "consume.intended", "consume.copied",
        "consume.got", "consume.moved",
    )),
    Step("idle.intended", prepare=_unpublished),
    *(Step(point) for point in (
        "apply.staged", "apply.merging", "apply.merged", "apply.applied", "apply.cutting", "apply.cut",
    )),
    *(Step(point, prepare=_columns) for point in ("reshape.begun", "reshape.committed", "reshape.recorded")),
    *(Step(point, prepare=_rewritten, group="recopy") for point in _SYNC),
    *(Step(point, checked=True) for point in ("check.begun", "check.ended")),
    Step("run.ended"),
    *(Step(point, "sync", group="sync") for point in _SYNC),
    *(Step(point, "resync", _slot_dropped, "resync") for point in (
        "resync.recorded", "setup.publications", "resync.compared", *_SYNC,
    )),
    *(Step(point, "maintain") for point in (
        "maintain.compacted", "maintain.forgetting", "maintain.forgotten", "maintain.pruned",
    )),
)  # fmt: skip


def _full_disk(_: Scene, pid: int) -> None:
    """No file of the run may grow any more: the same error in the same places as a full disk, without one."""
    for process in family(pid):
        if process.name() == "java" or process.pid == pid:
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_FILE_BYTES, resource.RLIM_INFINITY))


def _disk_is_free(pid: int) -> None:
    for process in family(pid):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def _stall(scene: Scene, _: int) -> None:
    """No byte for a while, then all goes on."""
    scene.network.stall()
    time.sleep(1.5)
    scene.network.heal()


@dataclass(frozen=True)
class Kind:
    """A fault; ``own_process``: it takes the run's process with it; ``only_at``: steps where it means anything."""

    fault: Fault
    own_process: bool = False
    only_at: tuple[str, ...] = ()


_TASKS = ("land.reading", "sync.reading")
FAULTS: dict[str, Kind] = {
    "driver": Kind(kill_driver, own_process=True),
    "python": Kind(kill_process, own_process=True),
    "jvm": Kind(kill_jvm, own_process=True),
    "worker": Kind(kill_process, only_at=_TASKS),
    "backend": Kind(lambda scene, _: scene.end_backends()),
    "server": Kind(lambda scene, _: scene.restart_server()),
    "disk": Kind(_full_disk),
    "network": Kind(lambda scene, _: scene.network.cut()),
    "mid-message": Kind(lambda scene, _: scene.network.cut_after(1000), only_at=_TASKS),
    "zombie": Kind(lambda scene, _: None),  # see Matrix._zombie
    "stall": Kind(_stall, only_at=(*_TASKS, "consume.copied", "apply.staged")),
}


@dataclass
class Cell:
    """What came of one fault at one step; ``seconds`` are the next run's, ``problems`` empty when all is well."""

    step: str
    fault: str
    ended: str
    seconds: float
    problems: list[str]


def cells(steps: Sequence[str], faults: Sequence[str]) -> list[tuple[Step, str]]:
    """The cells of the matrix that are asked for: steps by the beginning of their names, faults by name; none for all."""
    chosen = [step for step in STEPS if not steps or any(step.name.startswith(asked) for asked in steps)]
    return [
        (step, fault)
        for fault in faults or FAULTS
        for step in chosen
        if not FAULTS[fault].only_at or step.point in FAULTS[fault].only_at
    ]


class Matrix:
    """Runs cells one after the other on one scene; the process of the next one starts while this one works."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self._ready: tuple[tuple[str, bool], subprocess.Popen[bytes]] | None = None

    def run(self, wanted: Sequence[tuple[Step, str]]) -> Iterator[Cell]:
        """One cell after the other."""
        try:
            for number, (step, fault) in enumerate(wanted):
                yield self._cell(step, fault, wanted[number + 1] if number + 1 < len(wanted) else None)
        finally:
            if self._ready is not None:
                kill_driver(self.scene, self._ready[1].pid)

    def _cell(self, step: Step, name: str, following: tuple[Step, str] | None) -> Cell:
        scene, kind = self.scene, FAULTS[name]
        step.prepare(scene)
        if name == "zombie":
            return self._zombie(step)
        # The points of the later targets and chunks count too.
        after = scene.random.randint(0, 1) if step.point.startswith("apply.") and "cut" not in step.point else 0
        done = scene.listener.arm(step.point, lambda pid: kind.fault(scene, _owner(pid, kind)), after)
        try:
            ended = self._in_process(step) if kind.own_process else self._here(step)
        finally:
            scene.network.heal()
            _disk_is_free(os.getpid())
        if following is not None and FAULTS[following[1]].own_process:
            self._start(following[0])
        if not done.is_set():
            ended = f"not reached; {ended}"
        scene.settle()
        scene.write(2)
        began = time.monotonic()
        problems = self._next_runs(step)
        seconds = time.monotonic() - began
        return Cell(step.name, name, ended, round(seconds, 1), problems + scene.differences())

    def _zombie(self, step: Step) -> Cell:
        """A run that is stopped long enough to lose its connections, while the next one does its work; then it wakes up."""
        scene, stopped, wakes, ended = self.scene, threading.Event(), threading.Event(), []

        def stop(_: int) -> None:
            stopped.set()
            wakes.wait()

        scene.listener.arm(step.point, stop)
        others = scene.spark.newSession()
        run = threading.Thread(target=lambda: ended.append(self._here(step, others)))
        run.start()
        wait_until(lambda: stopped.is_set() or not run.is_alive())
        scene.end_backends()
        began = time.monotonic()
        scene.write(2)
        problems = self._next_runs(step) + [f"while it sleeps: {found}" for found in scene.differences()]
        seconds = time.monotonic() - began
        wakes.set()
        run.join()
        problems += [f"when it has woken up: {found}" for found in scene.differences()] + scene.stale_cut()
        scene.settle()
        scene.write(2)
        problems += self._next_runs(step) + scene.differences()
        what = ended[0] if stopped.is_set() else f"not reached; {ended[0]}"
        return Cell(step.name, "zombie", what, round(seconds, 1), problems)

    def _next_runs(self, step: Step) -> list[str]:
        # Maintenance comes around by itself; a resync was asked for, and is asked for again.
        verbs = [step.verb, "consume"] if step.verb in ("maintain", "resync") else ["consume"]
        problems = []
        for verb in verbs:
            try:
                with _older():
                    self.scene.run(verb, checked=step.checked)
            except (RunFailed, WaldeltaError) as err:
                problems.append(f"next {verb}: {_said(err)}")
        return problems

    def _here(self, step: Step, spark: SparkSession | None = None) -> str:
        try:
            with _older():
                names = {"tables": ["public.w1", "public.copies"]} if step.verb == "sync" else {}
                self.scene.run(step.verb, spark, checked=step.checked, **names)
        except (RunFailed, WaldeltaError, psycopg.Error, OSError) as err:
            return _said(err)
        return "succeeded"

    def _start(self, step: Step) -> None:
        wanted = (step.verb, step.checked)
        names = ["--tables", "public.w1,public.copies"] if step.verb == "sync" else []
        self._ready = (wanted, self.scene.start(step.verb, *names, checked=step.checked))

    def _in_process(self, step: Step) -> str:
        if self._ready is None or self._ready[0] != (step.verb, step.checked):
            self._start(step)
        assert self._ready is not None
        process, self._ready = self._ready[1], None
        self.scene.release(process)
        wait_until(lambda: process.poll() is not None)
        return f"exit {process.returncode}" if process.returncode >= 0 else f"killed by signal {-process.returncode}"


def _owner(pid: int, kind: Kind) -> int:
    """The process of the run, where a step is told by one of its workers; the worker itself, where that is to die."""
    if kind.only_at or not kind.own_process:
        return pid if kind.fault is kill_process else os.getpid()
    process = psutil.Process(pid)
    while "spark_jobs" not in process.cmdline():
        process = process.parent()
    return process.pid


@contextmanager
def _older() -> Iterator[None]:
    """Maintenance as it will be in weeks: batches expire, rows of the ledger are pruned."""
    before = spark_jobs.maintain.now
    spark_jobs.maintain.now = lambda: now() + OLD_AGE
    try:
        yield
    finally:
        spark_jobs.maintain.now = before


def _said(err: BaseException) -> str:
    cause = err.__cause__ if isinstance(err, RunFailed) and err.__cause__ is not None else err
    return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"[:300]


def main() -> None:
    """Run the matrix, or a part of it, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--steps", type=lambda text: text.split(","), default=[])
    parser.add_argument("--faults", type=lambda text: text.split(","), default=[])
    parser.add_argument("--minutes", type=float, default=0, help="as many cells, in random order, as this time allows")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    kept = json.loads(options.results.read_text()) if options.results.exists() else {}
    wanted = [c for c in cells(options.steps, options.faults) if f"{c[0].name} | {c[1]}" not in kept]
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    if options.minutes:
        random.Random(options.seed).shuffle(wanted)
    with new_scene(options.seed) as scene:
        for cell in Matrix(scene).run(wanted):
            print(cell, flush=True)
            kept[f"{cell.step} | {cell.fault}"] = asdict(cell) | {"seed": options.seed, "at": f"{now():%Y-%m-%d}"}
            options.results.write_text(json.dumps(kept, indent=1))
            if time.monotonic() > deadline:
                break
    if bad := [key for key, cell in kept.items() if cell["problems"]]:
        raise SystemExit(f"{len(bad)} cells aren't well: {bad}")


if __name__ == "__main__":
    main()
