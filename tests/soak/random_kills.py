"""Random kills under load: runs are killed at random moments, over and over, and at the end nothing is lost or doubled.

    python -m tests.soak.random_kills RESULTS.json --kills 200 [--connect] [--minutes 30] [--seed N]

A writer commits all the time. Each run is killed (kill -9 of its Python, of its JVM, of both; or of a Connect client, whose
server goes on with what it was told) at a random moment of its work; after a few kills, and perhaps an immediate stop of
PostgreSQL, an ordinary run follows, and the targets are compared.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from spark_jobs.result import RunFailed
from tests.random_workload import KINDS
from tests.soak.scene import Scene, kill_driver, kill_jvm, kill_process, new_scene
from waldelta.errors import WaldeltaError
from waldelta.ledger import now

KILLS = {"driver": kill_driver, "python": kill_process, "jvm": kill_jvm}
CLIENT = {"client": kill_process}  # of a Spark Connect server, which lives on
KILLS_BETWEEN_COMPARISONS = 4


class Load:
    """Commits random transactions until it is told to pause."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.transactions = scene, 0
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Write, beside whatever else happens."""
        self._ended.clear()
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def pause(self) -> None:
        """Write no more; returns when the last transaction has ended."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _write(self) -> None:
        while not self._ended.wait(0.1):
            self.scene.write(1)
            self.transactions += 1
            if self.transactions % 150 == 0:
                self.scene.alter(*KINDS)


def kill_one(scene: Scene, ready: Any, how: str, longest_s: float) -> str | None:
    """Let a run work for a random time, then kill it; returns at which step it was last, None when it was over by then."""
    moment = scene.random.uniform(0, longest_s)
    scene.listener.reached.clear()
    scene.release(ready)
    began = time.monotonic()
    while time.monotonic() - began < moment and ready.poll() is None:
        time.sleep(0.005)
    if ready.poll() is not None:
        return None
    (KILLS | CLIENT)[how](scene, ready.pid)
    ready.wait()
    reached = list(scene.listener.reached)
    return reached[-1] if reached else "start"


class Soak:
    """Rounds of a few kills, an ordinary run and a comparison; ``said`` is what came of them so far."""

    def __init__(self, scene: Scene) -> None:
        self.scene, self.load = scene, Load(scene)
        self.kills: Counter[str] = Counter()
        self.where: Counter[str] = Counter()
        self.said: dict[str, Any] = {"seed": scene.seed, "at": f"{now():%Y-%m-%d}", "problems": [], "comparisons": 0}
        # As long as a run's work takes here and now; a kill comes at any moment of it.
        self._longest_s = 10.0
        # Over Connect a run has its session's lock from the start, so the next one can't wait beside it.
        self._ready = None if scene.remote else scene.start("consume")

    def round(self) -> None:
        """Kill some runs while the source is written to, perhaps the server too; then see what an ordinary run makes of it."""
        scene = self.scene
        self.load.start()
        for _ in range(KILLS_BETWEEN_COMPARISONS):
            run = self._ready or scene.start("consume")
            self._ready = None if scene.remote else scene.start("consume")
            how = "client" if scene.remote else scene.random.choice(list(KILLS))
            if (step := kill_one(scene, run, how, self._longest_s)) is not None:
                self.kills[how] += 1
                self.where[step] += 1
        self.load.pause()
        if scene.random.random() < 0.3:
            scene.restart_server()
            self.kills["server"] += 1
        scene.settle()
        try:
            self._longest_s = scene.run("consume")
        except (RunFailed, WaldeltaError) as err:
            self.said["problems"].append(f"{type(err).__name__}: {err.__cause__ or err}")
        self.said["problems"] += scene.differences()
        self.said["comparisons"] += 1
        self.said |= {"kills": dict(self.kills), "where": dict(self.where), "transactions": self.load.transactions}

    def close(self) -> None:
        """End what still runs."""
        self.load.pause()
        if self._ready is not None:
            kill_driver(self.scene, self._ready.pid)


def main() -> None:
    """Kill until there were enough, and write down what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--connect", action="store_true", help="clients of a Spark Connect server that lives on")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    deadline = time.monotonic() + 60 * options.minutes
    with new_scene(options.seed, connect=options.connect) as scene:
        soak = Soak(scene)
        try:
            while soak.kills.total() < options.kills and time.monotonic() < deadline and not soak.said["problems"]:
                soak.round()
                options.results.write_text(json.dumps(soak.said, indent=1))
                print(soak.said, flush=True)
        finally:
            soak.close()
    if soak.said["problems"]:
        raise SystemExit(f"seed {options.seed}: {soak.said['problems']}")


if __name__ == "__main__":
    main()
