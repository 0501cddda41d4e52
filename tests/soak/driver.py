"""A driver of several runs at once, each on a pipeline of its own, so that one kill meets each at
its own step.

    python -m tests.soak.driver

A line of JSON on stdin begins a run: {"verb", "file", "run_id", "details"}. It says on stdout when
it is ready, and of each run what it ended with. A scene's own runs are the command line's
(Scene.start); these share a session's start, which would be most of what a matrix of kills costs.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from itertools import cycle
from pathlib import Path
from queue import Queue
from typing import IO, Any

import waldelta.changes.merge.file_merge
import waldelta.changes.merge.merge
import waldelta.slot.recovery
import waldelta.stages.maintain.maintain
import waldelta.stages.repair.mend.mend
from tests.soak.scene import OLD_AGE, Scene, kill_driver, wait_until
from waldelta.jobs import Pipeline
from waldelta.lake.ledger import now
from waldelta.pipeline.run_result import RunFailed

MASTER = "local[2,4]"


class Driver:
    """The other side: starts the process, tells it what to run, and hears what became of it."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.driver"], env=environment,
                start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=errors,
            )  # fmt: skip
        self.ready = threading.Event()
        self._ended: dict[str, str] = {}
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    @classmethod
    def let_go(cls, scene: Scene) -> "Driver":
        """One for the scene and those beside it, that isn't held where its work begins."""
        driver = cls(os.environ | scene.environment, scene.log)
        scene.listener.hold(driver.process.pid)[1].set()
        return driver

    def begin(self, verb: str, file: Path, run_id: str, details: Mapping[str, Any]) -> None:
        """Begin a run; returns at once."""
        assert self.process.stdin is not None
        wanted = {"verb": verb, "file": str(file), "run_id": run_id, "details": details}
        self.process.stdin.write(json.dumps(wanted, default=datetime.isoformat).encode() + b"\n")
        self.process.stdin.flush()

    def ended(self, run_id: str) -> str | None:
        """What a run ended with: its own end, or the process's; None while it goes on."""
        code = self.process.poll()
        if run_id in self._ended or code is None:
            return self._ended.get(run_id)
        return f"killed by signal {-code}" if code < 0 else f"exit {code}"

    def wait_until_ready(self) -> None:
        """Until runs may begin."""
        wait_until(lambda: self.ready.is_set() or self.process.poll() is not None)

    def end(self) -> None:
        """Kill what is left of it."""
        if self.process.poll() is None:
            kill_driver(None, self.process.pid)
        self.process.wait()

    def _listen(self, output: IO[bytes]) -> None:
        for line in output:
            if line.startswith(b"ready"):
                self.ready.set()
            elif line.startswith(b"ended "):
                _, run_id, said = line.decode().rstrip("\n").split(" ", 2)
                self._ended[run_id] = said


def said(err: BaseException) -> str:
    """An error in a line, and what one that stands for several is made of."""
    cause = err.__cause__ if isinstance(err, RunFailed) and err.__cause__ is not None else err
    parts = "".join(f" {said(part)}" for part in getattr(cause, "causes", ()))
    return f"{type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}{parts}"[
        :300
    ]


def grow_old() -> None:
    """Maintenance in this process is as it will be in weeks: batches and rows expire."""
    waldelta.stages.maintain.maintain.now = lambda: now() + OLD_AGE
    waldelta.slot.recovery.MOVING = timedelta()


def merge_either_way() -> None:
    """Small targets are merged by this process, by tasks and by Spark in turn."""
    file_merge, apply = waldelta.changes.merge.file_merge, waldelta.changes.merge.merge
    mend = waldelta.stages.repair.mend.mend
    for module, name, goes in (
        (file_merge, "read_small", (True, False, False)),
        (apply, "merge_files", (True, False)),
        (mend, "merge_files", (True, False)),
    ):
        setattr(module, name, _in_turn(getattr(module, name), cycle(goes)))


def _in_turn(merge: Any, mine: Iterator[bool]) -> Any:
    return lambda *given, **tagged: merge(*given, **tagged) if next(mine) else None


def _run(runner: Any, wanted: dict[str, Any], told: Queue[str]) -> None:
    try:
        details = {name: _value(name, given) for name, given in wanted["details"].items()}
        getattr(Pipeline.load(wanted["file"]), wanted["verb"])(
            runner, run_id=wanted["run_id"], **details
        )
    except Exception as err:  # of any kind: a killed JVM's are py4j's
        told.put(f"ended {wanted['run_id']} {said(err)}")
    else:
        told.put(f"ended {wanted['run_id']} succeeded")


def _value(name: str, given: Any) -> Any:
    """As the verb takes it; JSON has no dates."""
    return datetime.fromisoformat(given) if name in ("start", "end") else given


def main() -> None:
    """Run what is asked for, each in a thread of its own, on Spark and in this process in turn.

    A run in this process continues on Spark where a merge is Spark's turn.
    """
    from waldelta.spark import InProcess, spark_session

    grow_old()
    merge_either_way()
    spark = spark_session(MASTER, name="soak")
    spark.sparkContext.setLogLevel("OFF")
    told: Queue[str] = Queue()
    output = os.dup(1)
    threading.Thread(target=_tell, args=(output, told), daemon=True).start()
    told.put("ready")
    for line, on_spark in zip(sys.stdin, cycle((True, False))):
        runner = spark.newSession() if on_spark else InProcess(spark.newSession)
        threading.Thread(target=_run, args=(runner, json.loads(line), told), daemon=True).start()


def _tell(output: int, told: Queue[str]) -> None:
    while True:
        os.write(output, told.get().encode() + b"\n")


if __name__ == "__main__":
    main()
