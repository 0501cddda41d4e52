"""Forks jobs from a process that has already imported their modules: a job starts in 0.05 s instead
of one or two seconds.

``python -m waldelta.cli.fork_server SOCKET`` runs on a machine with Airflow's tasks, together with
a warm Spark Connect server: then Python's imports are most of what is left of a small run. The
tasks find it by WALDELTA_FORK_SERVER (waldelta_airflow.launchers.job_process is the client) and
start their own process where there is none. It applies Python's idea of a fork server
(multiprocessing.forkserver) to whole jobs: each is a child in its own process group, with the
requesting task's environment, folder and output.

Only the owner can open the socket, and the server serves no other user. A job ends with the task
that requested it. A server whose code was replaced on disk restarts itself, so that no job runs old
code.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import importlib
import logging
import os
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import waldelta
from waldelta.cli._output import COMMAND
from waldelta.cli.fork_socket import other_end, receive_request

log = logging.getLogger("waldelta.fork_server")

KILL_CHILD_AFTER_S = 3.0
# Shorter than the client's timeout, after which the client starts a process itself.
_REQUEST_TIMEOUT_S = 2.0
# The modules that a job's first seconds are spent on.
_NEEDED = (
    "pyspark.sql.connect.session",
    "waldelta.cli.command_line",
    "waldelta.jobs.consume",
    "waldelta.stages.check.write_pages",
    "waldelta.stages.check.suite.spark_conditions",
    "waldelta.stages.check.check",
    "waldelta.stages.land.drain",
    "waldelta.stages.apply.apply",
    "waldelta.stages.apply.apply_targets",
    "waldelta.stages.sync.sync",
    "waldelta.changes.merge.file_merge",
    "waldelta.pipeline.run_result",
    "sqlglot.dialects.postgres",
)


@dataclass(slots=True)
class _Job:
    """A child, the socket of the requesting task, and the time by which it must have ended."""

    pid: int
    asker: socket.socket
    deadline: float | None = None


class ForkServer:
    """One server on one socket, in one thread."""

    def __init__(self, path: Path, code: str) -> None:
        self._path, self._code = path, code
        self._selector = selectors.DefaultSelector()
        self._jobs: dict[int, _Job] = {}
        self._listener = _listen(path)
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        self._ending = False
        self._stale = False

    def serve(self) -> bool:
        """Fork jobs until SIGTERM, which also ends them, or until the code on disk has changed.

        Returns True if the code has changed.
        """
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
                if self._ending:
                    self.close()
                self._reap()
                for job in self._jobs.values():
                    if job.deadline is not None and time.monotonic() > job.deadline:
                        _signal(job.pid, signal.SIGKILL)
        finally:
            self.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
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
        else:
            # The client sends nothing after the request, so the socket is readable only when the
            # task has ended.
            self._selector.unregister(source)
            for job in self._jobs.values():
                if job.asker is source:
                    log.info("job %s ends: its caller has gone", job.pid)
                    self._end(job)

    def _accept(self) -> None:
        try:
            asker, _ = self._listener.accept()
        except OSError as err:  # No descriptor is left: the waiting client starts a process itself.
            log.warning("no connection can be accepted: %s", err)
            time.sleep(0.1)
            return
        asker.settimeout(_REQUEST_TIMEOUT_S)
        try:
            other_end(asker)
            if code_stamp() != self._code:
                log.warning("the code on disk has changed: the server restarts after its last job")
                self._ending = self._stale = True
                self.close()
                asker.sendall(b"stale\n")
                asker.close()
                return
            request, output = receive_request(asker, _REQUEST_TIMEOUT_S)
            if request["code"] != code_place():
                os.close(output)
                raise ValueError(
                    f"it is for the code in {request['code']}, but this server runs the code in"
                    f" {code_place()}"
                )
        except (OSError, ValueError, KeyError) as err:
            log.warning("a request is refused: %s", err)
            asker.close()
            return
        if (
            self._ending
            or _has_hung_up(asker)
            or (pid := self._fork(asker, request, output)) is None
        ):
            os.close(output)
            asker.close()
            return
        os.close(output)
        self._selector.register(asker, selectors.EVENT_READ)
        # The client is gone already, and the selector reports it.
        with contextlib.suppress(OSError):
            asker.sendall(f"started {pid} {os.getpid()}\n".encode())

    def _fork(self, asker: socket.socket, request: dict[str, Any], output: int) -> int | None:
        # A signal between fork and registration would miss the job, or in the child run the handler
        # that ends other jobs.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
        try:
            pid = os.fork()
            if pid == 0:
                asker.close()
                self._become_job(request, output, signals)
            self._jobs[pid] = _Job(pid, asker)
        except OSError as err:
            log.warning("no job can be forked: %s", err)
            return None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        return pid

    def _become_job(
        self, request: dict[str, Any], output: int, signals: set[int | signal.Signals]
    ) -> NoReturn:
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for stream, source in enumerate((nothing, output, output)):
                os.dup2(source, stream)
            os.close(nothing)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            self._selector.close()
            for inherited in (self._listener, *(job.asker for job in self._jobs.values())):
                inherited.close()
            for descriptor in (output, self._woken, self._wake):
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request["environment"])
            time.tzset()
            os.chdir(request["folder"])
            if (umask := request.get("umask")) is not None:
                os.umask(umask)
            sys.argv = [COMMAND, *request["arguments"]]
            logging.getLogger().handlers.clear()
            gc.set_threshold(500_000, 10, 50)  # As in __main__; what was imported stays frozen.
            gc.enable()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        from waldelta.cli.command_line import run_and_exit

        run_and_exit()

    def _reap(self) -> None:
        while self._jobs:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if (job := self._jobs.pop(pid, None)) is None:
                # The child belonged to another process, where this one is process 1 of a container.
                continue
            if job.deadline is not None:  # The job's own children may have ignored the signal.
                _signal(pid, signal.SIGKILL)
            with contextlib.suppress(KeyError):
                self._selector.unregister(job.asker)
            with contextlib.suppress(OSError):
                job.asker.sendall(f"exit {os.waitstatus_to_exitcode(status)}\n".encode())
            job.asker.close()

    def _end(self, job: _Job) -> None:
        if job.deadline is None:
            job.deadline = time.monotonic() + KILL_CHILD_AFTER_S
            _signal(job.pid, signal.SIGTERM)

    def close(self) -> None:
        """Accept no more jobs; may be called again."""
        if self._listener.fileno() < 0:
            return
        with contextlib.suppress(KeyError):
            self._selector.unregister(self._listener)
        self._listener.close()
        self._path.unlink(missing_ok=True)


def code_stamp() -> str:
    """Returns a digest that changes with any of our modules, and with any installation or
    removal.
    """
    ours = Path(waldelta.__file__ or "").parent
    installed = [Path(entry) for entry in sys.path if entry.endswith("site-packages")]
    digest = hashlib.sha256()
    for path in sorted({ours, *installed, *ours.rglob("*.py")}):
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            digest.update(
                f"{path} {status.st_mtime_ns} {status.st_size if path.is_file() else 0}\n".encode()
            )
    return digest.hexdigest()


def code_place() -> str:
    """Returns the folder of the modules that this server's jobs run."""
    return str(Path(waldelta.__file__ or "").resolve().parent)


def _listen(path: Path) -> socket.socket:
    """Create the socket at ``path`` only once connections are accepted.

    A client that finds it connects at once.
    """
    if path.exists() and (not path.is_socket() or _answers(path)):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    coming = path.with_name(f"{os.getpid()}")
    umask = os.umask(0o177)
    try:
        listener.bind(str(coming))
    finally:
        os.umask(umask)
    listener.listen()
    coming.replace(path)  # This replaces the socket of a killed server.
    return listener


def _answers(path: Path) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(1)
        client.connect(str(path))
        return True
    return False


def _has_hung_up(asker: socket.socket) -> bool:
    """Returns whether the client has given up, and started a process itself."""
    asker.setblocking(False)
    try:
        return not asker.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    finally:
        asker.settimeout(_REQUEST_TIMEOUT_S)


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        try:
            os.killpg(group, number)
        except ProcessLookupError:  # The child was forked, and isn't the leader of its group yet.
            os.kill(group, number)


def main(arguments: Sequence[str]) -> int:
    """Import what jobs need, then fork jobs on the socket that ``arguments`` name; returns the exit
    code.

    Where the code on disk has changed, the process starts itself again.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    code = code_stamp()  # Computed first, so that an upgrade during the imports is detected.
    for name in _NEEDED:
        importlib.import_module(name)
    importlib.import_module(
        "waldelta.stages.check.great_expectations.lazy_import"
    ).import_everything()
    if threading.active_count() > 1:
        log.error("a module has started threads, which no fork survives: %s", threading.enumerate())
        return 1
    gc.collect()
    gc.disable()
    gc.freeze()  # A collection would write to every page that the jobs share.
    try:
        server = ForkServer(Path(arguments[0]), code)
    except OSError as err:
        log.error(
            "no socket can be made at %s (%s): make its folder, or choose another path",
            arguments[0],
            err,
        )
        return 1
    log.info("jobs are forked on %s", arguments[0])
    if server.serve():
        os.execv(sys.executable, [*sys.orig_argv])  # noqa: S606 - what it was started with
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m waldelta.cli.fork_server SOCKET")
    sys.exit(main(sys.argv[1:]))
