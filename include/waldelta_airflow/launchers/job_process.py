"""Runs a job as a child of the fork server (waldelta.cli.fork_server), which has imported what jobs
need.

Like ``ChildProcess`` it writes the job's output into the task's log line by line, and never
outlives the task: the server ends a job when the connection of its request is gone.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from waldelta.cli.fork_socket import other_end, send_request
from waldelta_airflow.launchers.child_process import end_group
from waldelta_airflow.settings import package_folder

log = logging.getLogger(__name__)

_ANSWER_TIMEOUT_S = 10.0
NO_ANSWER = 1


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
        """Log what the job writes, and return its exit code (negative: the signal that ended
        it).
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
    found = b""
    with suppress(ConnectionResetError):
        while not found.endswith(b"\n"):
            part = server.recv(1)
            if not part:
                return ""
            found += part
    return found.decode().strip()
