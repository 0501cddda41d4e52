"""Forks jobs from a process that has imported what they need: a job begins after 0.05 s instead of one or two seconds.

``python -m spark_jobs.fork_server SOCKET``, on a machine that runs Airflow's tasks, beside a warm Spark Connect server: then
Python's imports are most of what is left of a small run. The tasks find it by WALDELTA_FORK_SERVER (waldelta_airflow.job_process
is the other side) and start a process of their own where there is none. It is Python's own idea of a fork server
(multiprocessing.forkserver) for whole jobs: each is a child in a group of its own, with the environment, folder and output of
whoever asked.

The socket is the owner's alone, and the server answers no other user. A job ends with the task that asked for it. A server whose
code was replaced on disk starts itself anew, so that no job runs old code.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyspark.sql.connect.session  # noqa: F401 - what a job's first seconds go into

import spark_jobs.command_line
import spark_jobs.flow
import spark_jobs.quality
import waldelta
from spark_jobs.expectation_import import import_everything

log = logging.getLogger("waldelta.fork_server")

KILL_AFTER_S = 3.0
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
_REQUEST_TIMEOUT_S = 10.0


@dataclass(slots=True)
class _Job:
    """A child, who asked for it, and until when it may end by itself."""

    pid: int
    asker: socket.socket
    deadline: float | None = None


class ForkServer:
    """One server on one socket, in one thread."""

    def __init__(self, path: Path) -> None:
        self._path, self._code = path, newest_code()
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, _Job] = {}
        self._listener = _listen(path)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._ending = False
        self._stale = False

    def serve(self) -> bool:
        """Fork jobs until SIGTERM, with which they end too, or until the code on disk is another: then it's True."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._leave)
        signal.signal(signal.SIGINT, self._leave)
        signal.set_wakeup_fd(self._wake)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            while not (self._ending and not self._jobs):
                for key, _ in self._selector.select(0.5 if self._jobs else None):
                    self._react(key.fileobj)
                self._reap()
                self._kill_late()
        finally:
            if self._listener.fileno() >= 0:
                self._close_listener()
        return self._stale

    def _leave(self, *_: Any) -> None:
        self._ending, self._stale = True, False
        for job in self._jobs.values():
            self._end(job)

    def _react(self, source: Any) -> None:
        if source == self._woken:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 4096)
        elif source is self._listener:
            self._accept()
        else:  # nobody says anything after the request: the task has ended
            self._selector.unregister(source)
            for job in self._jobs.values():
                if job.asker is source:
                    log.info("job %s is ended: nobody waits for it any more", job.pid)
                    self._end(job)

    def _accept(self) -> None:
        asker, _ = self._listener.accept()
        asker.settimeout(_REQUEST_TIMEOUT_S)
        try:
            if not _is_owner(asker):
                asker.close()
                return
            if newest_code() != self._code:
                log.warning("the code on disk is another now: started anew when the last job has ended")
                self._ending = self._stale = True
                self._close_listener()
                asker.sendall(b"stale\n")
                asker.close()
                return
            request, output = _receive(asker)
        except (OSError, ValueError) as err:
            log.warning("a request is refused: %s", err)
            asker.close()
            return
        pid = os.fork()
        if pid == 0:
            self._become_job(request, output)
        os.close(output)
        self._jobs[pid] = _Job(pid, asker)
        self._selector.register(asker, selectors.EVENT_READ)
        with contextlib.suppress(OSError):  # gone already: the selector tells
            asker.sendall(f"started {pid}\n".encode())

    def _become_job(self, request: dict[str, Any], output: int) -> NoReturn:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(output, 1)
            os.dup2(output, 2)
            self._selector.close()
            for held in (self._listener, *(job.asker for job in self._jobs.values())):
                held.close()
            for held in (output, self._woken, self._wake):
                os.close(held)
            os.environ.clear()
            os.environ.update(request["environment"])
            time.tzset()
            os.chdir(request["folder"])
            sys.argv = ["spark_jobs", *request["arguments"]]
            logging.getLogger().handlers.clear()
            gc.unfreeze()
            gc.enable()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        spark_jobs.command_line.run_and_exit()

    def _reap(self) -> None:
        while self._jobs:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            job = self._jobs.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(job.asker)
            with contextlib.suppress(OSError):
                job.asker.sendall(f"exit {os.waitstatus_to_exitcode(status)}\n".encode())
            job.asker.close()

    def _end(self, job: _Job) -> None:
        if job.deadline is None:
            job.deadline = time.monotonic() + KILL_AFTER_S
            _signal(job.pid, signal.SIGTERM)

    def _kill_late(self) -> None:
        for job in self._jobs.values():
            if job.deadline is not None and time.monotonic() > job.deadline:
                _signal(job.pid, signal.SIGKILL)

    def _close_listener(self) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)


def newest_code() -> int:
    """When any of our modules was last written, in nanoseconds."""
    folders = [Path(package.__file__ or "").parent for package in (spark_jobs, waldelta)]
    return max(path.stat().st_mtime_ns for folder in folders for path in [folder, *folder.rglob("*.py")])


def _listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except OSError:
        if _answers(path):
            raise
        path.unlink()  # a killed server's
        listener.bind(str(path))
    finally:
        os.umask(before)
    listener.listen()
    return listener


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.connect(str(path))
        return True
    return False


def _is_owner(asker: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):  # macOS; there the socket's own rights decide
        return True
    _, uid, _ = _CREDENTIALS.unpack(asker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(uid == os.getuid())


def _receive(asker: socket.socket) -> tuple[dict[str, Any], int]:
    """The request, and the file that takes the job's output."""
    head, files, _, _ = socket.recv_fds(asker, _LENGTH.size, 1)
    if len(head) != _LENGTH.size or len(files) != 1:
        raise ValueError("it has no length, or nothing that takes the output")
    (left,), parts = _LENGTH.unpack(head), []
    while left:
        part = asker.recv(min(left, 1 << 16))
        if not part:
            os.close(files[0])
            raise ValueError("it is cut off")
        parts.append(part)
        left -= len(part)
    return json.loads(b"".join(parts)), files[0]


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def main(arguments: Sequence[str]) -> int:
    """Import, then serve on the socket named."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    import_everything()
    if threading.active_count() > 1:
        log.error("a module has started threads, which no fork survives: %s", threading.enumerate())
        return 1
    gc.collect()
    gc.disable()
    gc.freeze()  # a collection would write to every page that the jobs share
    server = ForkServer(Path(arguments[0]))
    log.info("jobs are forked on %s", arguments[0])
    if server.serve():
        os.execv(sys.executable, [*sys.orig_argv])  # noqa: S606 - what it was started with
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m spark_jobs.fork_server SOCKET")
    sys.exit(main(sys.argv[1:]))
