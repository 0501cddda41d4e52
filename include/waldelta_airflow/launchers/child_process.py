"""Runs a job as a child process: its output goes into the task's log line by line, and it never
outlives the task.

Even when the task's process is killed and can't end anything, a watcher process ends the job.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from waldelta_airflow.settings import KILL_JOB_AFTER_S

log = logging.getLogger(__name__)


class ChildProcess:
    """One child process in its own process group."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command, self._environment = list(command), dict(environment)
        self._process: subprocess.Popen[str] | None = None

    def run(self) -> int:
        """Run to the end and return the exit code (negative: the signal that ended it)."""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if self._process.stdout is None:
            raise RuntimeError("the child's output isn't piped")
        with ended_with_us(self._process.pid), self._process.stdout as lines:
            for line in lines:
                log.info("%s", line.rstrip())
            return self._process.wait()

    def end(self) -> None:
        """End the child and its own children; safe to call at any time."""
        if self._process is not None:
            end_group(self._process.pid, self._process.poll)


# Reads a line when the group has ended normally, and end of file when the writing process died.
_WATCHER = 'read -r _ && exit; kill -s TERM -- "-$1"; sleep "$2"; kill -s KILL -- "-$1"'


@contextmanager
def ended_with_us(leader: int) -> Iterator[None]:
    """End a process group when this process dies in this block, even if it is killed.

    The group is watched from shortly after its start, usually a few milliseconds. A separate
    process has the other end of a pipe. A signal at the parent's death would reach only the group's
    leader (a JVM's Python driver would continue), and is sent already when a thread dies.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", _WATCHER, "sh", str(leader), f"{KILL_JOB_AFTER_S:.0f}"],
        env={},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as watcher:
        try:
            yield
        finally:
            watcher.communicate(b"ended\n")


def end_group(leader: int, reap: Callable[[], object]) -> None:
    """Ask a process group to end (SIGTERM), and kill it after a time limit.

    The process must have been started as the leader of its group. ``reap`` reads its exit code if
    it is this process's child, because it would still exist as a zombie.
    """
    _signal(leader, signal.SIGTERM)
    deadline = time.monotonic() + KILL_JOB_AFTER_S
    while time.monotonic() < deadline and _group_lives(leader, reap):
        time.sleep(0.05)
    # The leader may be gone while a grandchild (a JVM's Python driver) still runs.
    _signal(leader, signal.SIGKILL)


def _group_lives(leader: int, reap: Callable[[], object]) -> bool:
    reap()
    try:
        os.killpg(leader, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _signal(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        log.debug("process group %s has ended", group)
