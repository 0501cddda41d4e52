"""Runs a job as a process: a child of this one, or of the fork server (waldelta.cli.fork_server),
which has imported what jobs need.

The job's output goes into the task's log line by line, and the job never outlives the task. When
the task's process is killed and can't end anything, a watcher ends its child, and the server ends a
job whose connection is gone.

A job's result, and its failure as Airflow's: retried or not, with the whole message.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from waldelta.cli.fork_socket import other_end, send_request
from waldelta.errors import WaldeltaError
from waldelta_airflow._airflow_versions import AirflowException, AirflowFailException
from waldelta_airflow.settings import FORK_SERVER_VARIABLE, KILL_JOB_AFTER_S, package_folder

log = logging.getLogger(__name__)

USAGE_ERROR = 2


class _OfClass(Exception):
    """A failure with the classes of its errors, for notifications.

    See ``waldelta_airflow.reporting.notify``.
    """

    def __init__(self, text: str, kinds: Sequence[str] = (), message: str | None = None) -> None:
        super().__init__(text)
        self.kinds = tuple(kinds)
        self.message = text if message is None else message


class TaskFailed(_OfClass, AirflowException):
    """A task's failure that may disappear by itself: Airflow retries."""


class TaskFailedForGood(_OfClass, AirflowFailException):
    """A task's failure that a retry doesn't help."""


_DONE = ("succeeded", "skipped")
_WRITING_REPORTS = ("check", "reconcile")
# What later tasks need: names, counts and positions, never rows.
_SUMMARY = (
    "verb",
    "run_id",
    "changes",
    "start_lsn",
    "end_lsn",
    "lag_bytes",
    "tables",
    "not_applied",
    "needs_sync",
    "never_copied",
    "passed",
    "corrected",
    "report",
    "failed_expectations",
)


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job's result document, as ``--result`` writes it and the ledger stores it."""

    document: dict[str, Any]

    @classmethod
    def read(cls, path: Path, exit_code: int) -> JobResult:
        """Returns a job's result; raises when the job left none."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            pass
        if exit_code == USAGE_ERROR:
            raise AirflowFailException(
                "the job refused its arguments: the usage is in the log above"
            )
        how = (
            f"was ended by signal {-exit_code}"
            if exit_code < 0
            else f"ended with exit code {exit_code}"
        )
        raise AirflowException(
            f"the job {how} before it could report: its last lines are in the log above"
        )

    def summary(self) -> dict[str, Any]:
        """Returns the part that is passed to later tasks."""
        return {key: self.document[key] for key in _SUMMARY if key in self.document}

    def knows(self, stage: str) -> bool:
        """Returns whether the job reached this stage."""
        return stage in self._stages

    def require(self, stage: str | None = None) -> None:
        """Raise when the job, or this stage of it, failed."""
        if (failure := self.failure(stage)) is not None:
            raise failure

    def failure(self, stage: str | None = None) -> TaskFailed | TaskFailedForGood | None:
        """Returns the failure of the job, or of this stage; None when it didn't fail."""
        outcome = self._stages.get(stage or "", self.document)
        if outcome.get("status") in _DONE:
            return None
        error = self._stages.get(stage or "", {}).get("error") or self.document.get("error") or {}
        kinds = [error["class"], *error.get("causes", ())] if error else []
        kind = TaskFailed if error.get("retryable") else TaskFailedForGood
        return kind(self._failure_text(stage, error), kinds, error.get("message"))

    @property
    def _stages(self) -> dict[str, Any]:
        return self.document.get("stages") or {}

    def _failure_text(self, stage: str | None, error: dict[str, Any]) -> str:
        what = stage or self.document.get("verb", "the job")
        lines = [
            (
                f"{error['class']}: {error['message']}"
                if error
                else f"{what} failed without naming an error"
            )
        ]
        # The stages that write the run's report; after another's failure it is about other tables.
        writers = (self._stages.get(name, {}) for name in _WRITING_REPORTS)
        if not any(error == stage["error"] for stage in writers if stage.get("error")):
            return lines[0]
        failed = self.document.get("failed_expectations") or []
        names = [item if isinstance(item, str) else json.dumps(item) for item in failed]
        lines += [f"  failed: {name}" for name in names if name not in lines[0]]
        report = self.document.get("report")
        if report and "\nreport: " not in lines[0]:
            lines.append(f"report: {report}")
        return "\n".join(lines)


@contextmanager
def named_failures() -> Iterator[None]:
    """Turn waldelta's named errors into Airflow's: only those that may disappear are retried."""
    try:
        yield
    except WaldeltaError as err:
        kinds = [type(each).__name__ for each in (err, *err.causes)]
        raised = TaskFailed if err.retryable else TaskFailedForGood
        # Not chained, because the log would repeat the message below a useless traceback.
        raise raised(f"{kinds[0]}: {err}", kinds, str(err)) from None


_ANSWER_TIMEOUT_S = 10.0
NO_ANSWER = 1


class Launcher(Protocol):
    """Runs one job on some machine; an Airflow task runs one after the other.

    The job writes its result to the file that its arguments name.
    """

    def run(self) -> int:
        """Start the job, wait for its end, and return its exit code."""

    def end(self) -> None:
        """Cancel the job and all that it started; safe to call at any time."""


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


class ForkedJob:
    """One job of a fork server: ``ask`` starts it, ``run`` waits for its end."""

    def __init__(self, server: socket.socket, pid: int, output: int) -> None:
        self._server, self._pid, self._output = server, pid, output
        self._lives = True

    @classmethod
    def ask(
        cls, path: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> ForkedJob | None:
        """Have the server at this socket start a job.

        Returns None when no server answers, or its code differs from that on disk. The environment,
        which has secrets, is sent over the socket, whose other end must belong to this user.
        """
        reading, writing = os.pipe()
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.settimeout(_ANSWER_TIMEOUT_S)
        try:
            if Path(path).stat().st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user")
            server.connect(path)
            answering = other_end(server)
            request = {
                "arguments": list(arguments),
                "environment": dict(environment),
                "folder": str(Path.cwd()),
                "code": str(package_folder().resolve()),
                "umask": _umask(),
            }
            send_request(server, request, writing)
            word, *numbers = _line(server).split() or ["nothing"]
            if word != "started":
                raise ConnectionError(f"it answered {word}")
            pid, by = map(int, numbers)
            if answering is not None and by != answering:
                raise ConnectionError(
                    "it is in another container, where this task could not end its processes"
                )
        except (OSError, ValueError) as err:
            log.warning(
                "the fork server at %s can't run the job, which gets its own process: %s",
                path,
                err,
            )
            server.close()
            os.close(reading)
            return None
        finally:
            os.close(writing)
        server.settimeout(None)
        return cls(server, pid, reading)

    def run(self) -> int:
        """Log the job's output, and return its exit code (negative: the number of the signal that
        ended it).

        Returns NO_ANSWER if the fork server ended before the job did.
        """
        log.info("the job is process %s", self._pid)
        # The output is a file descriptor.
        with open(self._output, encoding="utf-8", errors="replace") as lines:  # noqa: PTH123
            for line in lines:
                log.info("%s", line.rstrip())
        with self._server:
            word, _, number = _line(self._server).partition(" ")
        self._lives = False  # From now on another process may have its pid.
        if word != "exit":
            log.warning("the fork server ended before it reported how the job ended")
            return NO_ANSWER
        return int(number)

    def end(self) -> None:
        """End the job and its own children; safe to call at any time."""
        if self._lives:
            end_group(self._pid, lambda: None)
            self._lives = False


def process_of(arguments: Sequence[str], environment: Mapping[str, str]) -> Launcher:
    """Returns the job as a child of this machine's fork server, if there is one, else of this
    process.
    """
    if (server := os.environ.get(FORK_SERVER_VARIABLE)) and (
        job := ForkedJob.ask(server, arguments, environment)
    ):
        return job
    # -P: use the installed package, not a folder of that name in Airflow's working directory.
    return ChildProcess([sys.executable, "-P", "-m", "waldelta", *arguments], environment)


def _umask() -> int | None:
    """Returns this process's umask from /proc, because elsewhere it can't be read without setting
    it.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    return None


def _line(server: socket.socket) -> str:
    """Returns one short line; empty when the other side is gone."""
    received = b""
    with suppress(ConnectionResetError):
        while not received.endswith(b"\n"):
            part = server.recv(1)
            if not part:
                return ""
            received += part
    return received.decode().strip()
