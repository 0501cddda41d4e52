"""Every fault at every step: the run it meets dies, the ordinary next one puts everything right.

    python -m tests.soak.fault_matrix [--results FOLDER] [--steps land,consume]
        [--faults driver,server] [--minutes N] [--seed N] [--s3]

Cells go into the results as they are done, and aren't tried again with the same code;
docs/explanation/guarantees.md is written from them (tests.soak.page). Several pipelines take
turns, so that one driver's death can meet each of them at its own step.

With ``--s3`` the lake is in an S3 server behind a proxy, which delays each request and refuses
some; the server may be killed, and a PUT may arrive after its client was killed.
"""

import argparse
import math
import os
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from tests.soak.driver import Driver, grow_old, merge_either_way, said
from tests.soak.lakes import new_store
from tests.soak.results import MATRIX, MATRIX_ON_S3, RESULTS, code, matrix, write
from tests.soak.scene import IN_STEPS, Scene, new_scenes, wait_until
from tests.soak.steps import FAULTS, STEPS, Kind, Step, cells, disk_is_free
from tests.soak.within import Within
from tests.support.servers.store_proxy import Hold
from waldelta.failpoints import SOCKET
from waldelta.lake.ledger import now

LANES = 4
_ATTEMPTS = 3
_LAST_STEPS = 4


@dataclass
class Cell:
    """What came of one fault at one step; ``problems`` is empty when all is well."""

    step: str
    fault: str
    ended: str
    seconds: float
    problems: list[str]

    @property
    def key(self) -> str:
        """Its name among the results."""
        return f"{self.step} | {self.fault}"

    @property
    def was_reached(self) -> bool:
        """Whether the run was at that step at all."""
        return not self.ended.startswith("not reached")


def units(wanted: Sequence[tuple[Step, str]], lanes: int) -> Iterator[list[tuple[Step, str]]]:
    """Cells in an order that meets every step and every fault early."""
    chosen = {fault for _, fault in wanted}
    numbers = {fault: k for k, fault in enumerate(fault for fault in FAULTS if fault in chosen)}
    places = {step.name: k for k, step in enumerate(STEPS)}

    def place(cell: tuple[Step, str]) -> tuple[int, int]:
        step, fault = places[cell[0].name], cell[1]
        # In diagonals; a fault that has few steps would be met late in them.
        return step % 2 if FAULTS[fault].only_at else (numbers[fault] - step) % len(numbers), step

    left = sorted(wanted, key=place)
    while left:
        fault = left[0][1]
        unit = [c for c in left if c[1] == fault][: lanes if FAULTS[fault].own_process else 1]
        left = [c for c in left if c not in unit]
        # A transaction that isn't over yet keeps the server's other slots from being made.
        yield sorted(unit, key=lambda c: c[0].point.startswith("setup."))


class Matrix:
    """Runs cells on scenes that take turns: while the next run mends what a fault left on one,
    another meets its own.

    Next runs are another process's, as in life, which tells no fault points; the process that is to
    die next starts meanwhile.
    """

    def __init__(self, scenes: Sequence[Scene], *, alone: bool = False) -> None:
        """``alone``: the next runs are this process's, too."""
        self.scenes, self._alone = scenes, alone
        self._turn = 0
        self._ready: Driver | None = None
        self._recovering: dict[str, Future[Cell]] = {}
        self._done: list[Cell] = []
        grow_old()

    def run(self, wanted: Sequence[tuple[Step, str]]) -> Iterator[Cell]:
        """Cells as they are done; one whose run wasn't at its step is tried again."""
        planned, attempts = deque(units(wanted, len(self.scenes))), Counter[str]()
        environment = {k: v for k, v in os.environ.items() if k != SOCKET}
        self._next = None if self._alone else Driver(environment, self.scenes[0].log)
        try:
            with ThreadPoolExecutor(len(self.scenes)) as self._pool:
                while planned or self._recovering:
                    if planned:
                        unit = planned.popleft()
                        self._meet(
                            unit, another=any(FAULTS[later[0][1]].own_process for later in planned)
                        )
                    for cell in self._recovered(all_of_them=not planned):
                        attempts[cell.key] += 1
                        if cell.was_reached or cell.problems or attempts[cell.key] == _ATTEMPTS:
                            yield cell
                            continue
                        planned.append(
                            [(next(step for step in STEPS if step.name == cell.step), cell.fault)]
                        )
        finally:
            for driver in (self._ready, self._next):
                if driver is not None:
                    driver.end()

    def _meet(self, unit: Sequence[tuple[Step, str]], *, another: bool) -> None:
        """Let runs meet the fault, and have what it left mended in the background."""
        fault = unit[0][1]
        lanes = [self._next_scene() for _ in unit]
        if FAULTS[fault].of_all:
            wait(self._recovering.values())
        elif FAULTS[fault].own_process:
            self._volley(unit, lanes, another=another)
            return
        ((step, _),), (scene,) = unit, lanes
        if fault == "zombie":
            ended: Future[Cell] = Future()
            ended.set_result(self._zombie(scene, step))
            self._recovering[scene.name] = ended
        else:
            self._cell(scene, step, fault)

    def _next_scene(self) -> Scene:
        """One that isn't being mended any more."""
        self._turn += 1
        scene = self.scenes[self._turn % len(self.scenes)]
        if scene.name in self._recovering:
            wait([self._recovering[scene.name]])
            self._done.append(self._recovering.pop(scene.name).result())
        return scene

    @staticmethod
    def _tables(scene: Scene) -> int:
        return scene.random.choice([1, 1, 1, 2, 3])

    def _prepare(self, scene: Scene, step: Step) -> int:
        """Writes to the source; returns how often the step is passed before the fault."""
        is_between = step.point.startswith("apply.") and "cut" not in step.point
        is_behind_one = step.file == IN_STEPS and step.point.startswith(("land.", "consume."))
        after = scene.random.randint(0, 1) if is_between else int(is_behind_one)
        scene.focus(2 if after else self._tables(scene))
        scene.listener.disarm()
        step.prepare(scene)
        return after

    def _cell(self, scene: Scene, step: Step, name: str) -> None:
        kind, after = FAULTS[name], self._prepare(scene, step)
        within = (
            Within(scene, step.within, lambda: kind.fault(scene, os.getpid()))
            if step.within
            else None
        )
        if within is not None:
            scene.listener.arm(step.point, within.begin, after)
            done = within.met
        else:
            done = scene.listener.arm(
                step.point, lambda pid: kind.fault(scene, _victim(pid, kind)), after
            )
        try:
            ended = self._here(scene, step)
        finally:
            if within is not None:
                within.end()
            scene.network.heal()
            disk_is_free(os.getpid())
        for other in self.scenes if name == "server" else ():
            other.reconnect()
        self._recover(scene, step, name, ended, reached=done.is_set())

    def _volley(
        self, unit: Sequence[tuple[Step, str]], lanes: Sequence[Scene], *, another: bool
    ) -> None:
        """Runs of one driver, each held at its step; then it dies."""
        fault = unit[0][1]
        driver, self._ready = self._ready or Driver.let_go(self.scenes[0]), None
        driver.wait_until_ready()
        go_on, reached, runs = threading.Event(), [], []
        watches = []
        for (step, _), scene in zip(unit, lanes, strict=True):
            after = self._prepare(scene, step)
            there = threading.Event()

            def stay(_: int = 0, there: threading.Event = there) -> None:
                there.set()
                go_on.wait()

            if step.within:
                watches.append(Within(scene, step.within, stay))
            scene.listener.arm(step.point, watches[-1].begin if step.within else stay, after)
            scene.runs += 1
            runs.append(f"{scene.name}_{scene.runs}")
            driver.begin(step.verb, scene.files[step.file], runs[-1], _volley_details(scene, step))
            wait_until(lambda there=there, run=runs[-1]: there.is_set() or driver.ended(run))
            reached.append(there.is_set())
        with ExitStack() as late:
            if FAULTS[fault].is_late:
                held = [late.enter_context(_late_put(scene)) for scene in lanes]
                go_on.set()
                wait_until(
                    lambda: all(
                        one.has_held or driver.ended(run)
                        for one, run in zip(held, runs, strict=True)
                    )
                )
                reached = [one.has_held for one in held]
            FAULTS[fault].fault(lanes[0], driver.process.pid)
        go_on.set()
        wait_until(lambda: all(driver.ended(run) for run in runs))
        for watch in watches:
            watch.end()
        ends = [driver.ended(run) or "" for run in runs]
        driver.end()
        if another:
            self._ready = Driver.let_go(self.scenes[0])
        for (step, _), scene, ended, was_there in zip(unit, lanes, ends, reached, strict=True):
            self._recover(scene, step, fault, ended, reached=was_there)

    def _recover(self, scene: Scene, step: Step, name: str, ended: str, *, reached: bool) -> None:
        what = ended if reached else _missed(scene, ended)
        self._recovering[scene.name] = self._pool.submit(self._mended, scene, step, name, what)

    def _mended(self, scene: Scene, step: Step, name: str, ended: str) -> Cell:
        """What the ordinary next run makes of it."""
        scene.settle()
        scene.write(2)
        began = time.monotonic()
        problems = self._next_runs(scene, step, has_failed=not FAULTS[name].own_process)
        seconds = time.monotonic() - began
        return Cell(step.name, name, ended, round(seconds, 1), problems + scene.differences())

    def _recovered(self, *, all_of_them: bool) -> list[Cell]:
        """The cells that are done by now."""
        if all_of_them:
            wait(self._recovering.values())
        for name in [name for name, cell in self._recovering.items() if cell.done()]:
            self._done.append(self._recovering.pop(name).result())
        done, self._done = self._done, []
        return done

    def _zombie(self, scene: Scene, step: Step) -> Cell:
        """A run that is stopped while the next one does its work; then it wakes up."""
        after = self._prepare(scene, step)
        stopped, wakes, ended = threading.Event(), threading.Event(), []

        def stop(_: int) -> None:
            stopped.set()
            wakes.wait()

        scene.listener.arm(step.point, stop, after)
        others = scene.spark.newSession()
        run = threading.Thread(target=lambda: ended.append(self._here(scene, step, others)))
        run.start()
        wait_until(lambda: stopped.is_set() or not run.is_alive())
        missed = "" if stopped.is_set() else _missed(scene, ended[0])
        scene.end_backends()
        began = time.monotonic()
        scene.write(2)
        problems = self._next_runs(scene, step) + [
            f"while it sleeps: {found}" for found in scene.differences()
        ]
        seconds = time.monotonic() - began
        wakes.set()
        run.join()
        problems += [
            f"when it has woken up: {found}" for found in scene.differences()
        ] + scene.stale_cut()
        scene.settle()
        scene.write(2)
        problems += self._next_runs(scene, step) + scene.differences()
        what = ended[0] if stopped.is_set() else missed
        return Cell(step.name, "zombie", what, round(seconds, 1), problems)

    def _next_runs(self, scene: Scene, step: Step, *, has_failed: bool = False) -> list[str]:
        # Maintenance comes around by itself; what was asked for is asked for again.
        verbs = {
            "consume": ["consume"],
            "sync": ["consume"],
            "decide": ["consume", step.verb],
        }.get(step.verb, [step.verb, "consume"])
        # A first copy that failed is tried again by Airflow: runs take up only what had begun.
        if step.group == "first" and has_failed:
            verbs = ["sync", *verbs]
        ends = [(verb, self._next_run(scene, verb, step.file)) for verb in verbs]
        return [f"next {verb}: {ended}" for verb, ended in ends if ended != "succeeded"]

    def _next_run(self, scene: Scene, verb: str, file: str) -> str | None:
        if self._next is None:
            return self._here(scene, Step("", verb, file=file))
        scene.runs += 1
        run = f"{scene.name}_{scene.runs}"
        self._next.wait_until_ready()
        self._next.begin(verb, scene.files[file], run, scene.details.get(verb, {}))
        wait_until(lambda: self._next is None or self._next.ended(run))
        return self._next.ended(run)

    def _here(self, scene: Scene, step: Step, spark: SparkSession | None = None) -> str:
        try:
            names = {"tables": ["public.w1", "public.copies"]} if step.verb == "sync" else {}
            scene.run(step.verb, spark, file=step.file, **names)
        except Exception as err:  # of any kind: it is what the fault is for
            return said(err)
        return "succeeded"


def _late_put(scene: Scene) -> AbstractContextManager[Hold]:
    """Keep the next object that a run sends: a data file, or a commit to a table."""
    assert scene.store is not None
    kind = scene.random.choice(("", ".*/_delta_log/"))
    return scene.store.late_put(scene.random, f"/{scene.name}/{kind}")


def _missed(scene: Scene, ended: str) -> str:
    """What became of a run that wasn't at the step, and which way it went instead."""
    return (
        f"not reached, but {', '.join(scene.listener.reached[-_LAST_STEPS:]) or 'nothing'}; {ended}"
    )


def _volley_details(scene: Scene, step: Step) -> dict[str, Any]:
    """One table, so that a run that is held isn't mistaken for the next one."""
    return (
        {"tables": ["public.copies"]} if step.verb == "sync" else scene.details.get(step.verb, {})
    )


def _victim(pid: int, kind: Kind) -> int:
    """The worker that told of the step, where that is to die; else the run's process."""
    return pid if kind.of_worker else os.getpid()


def main() -> None:
    """Run the matrix, or a part of it, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--steps", type=lambda text: text.split(","), default=[])
    parser.add_argument("--faults", type=lambda text: text.split(","), default=[])
    parser.add_argument(
        "--minutes",
        type=float,
        default=0,
        help="as many cells as this time allows; the next call goes on",
    )
    parser.add_argument("--lanes", type=int, default=LANES, help="pipelines that take turns")
    parser.add_argument("--s3", action="store_true", help="the lake is in an S3 server")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    if not options.s3 and any(FAULTS[fault].of_store for fault in options.faults):
        parser.error("these faults need --s3")
    print(f"seed {options.seed}", flush=True)
    file = options.results / (MATRIX_ON_S3 if options.s3 else MATRIX)
    kept = matrix(file)
    # Those that were never tried come first.
    stamp = {"seed": options.seed, "at": f"{now():%Y-%m-%d}", "code": code()}
    asked = cells(options.steps, options.faults, in_store=options.s3)
    wanted = [c for c in asked if not _is_done(kept.get(_key(c)))]
    tried = [c for c in wanted if _key(c) in kept]
    deadline = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    merge_either_way()
    with ExitStack() as ending:
        store = ending.enter_context(new_store(options.seed)) if options.s3 else None
        lanes = min(options.lanes, max(1, len(wanted)))
        scenes = ending.enter_context(new_scenes(options.seed, lanes, store=store))
        tried_on = Matrix(scenes)
        began = time.monotonic()
        for cell in chain(
            tried_on.run([c for c in wanted if _key(c) not in kept]), tried_on.run(tried)
        ):
            print(f"{time.monotonic() - began:.1f} s {cell}", flush=True)
            began = time.monotonic()
            kept[cell.key] = asdict(cell) | stamp
            write(file, kept)
            if began > deadline:
                break
    if bad := [key for key, cell in kept.items() if cell["problems"]]:
        raise SystemExit(f"{len(bad)} cells aren't well: {bad}")


def _key(cell: tuple[Step, str]) -> str:
    return f"{cell[0].name} | {cell[1]}"


def _is_done(cell: dict[str, object] | None) -> bool:
    return cell is not None and cell.get("code") == code()


if __name__ == "__main__":
    main()
