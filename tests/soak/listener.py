"""Answers the fault points (waldelta.failpoints), and breaks something at the armed one."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from waldelta.failpoints import SOCKET

Action = Callable[[int], None]


class Listener:
    """Listens on a Unix socket; ``reached`` are the steps told, in order."""

    def __init__(self, path: Path, *, gates: bool = True) -> None:
        """``gates``: whether other processes wait at their first point for `hold`."""
        self.path = path
        self.reached: list[str] = []
        self._armed: dict[str, tuple[Action, int]] = {}
        self._has_gates = gates
        self._gates: dict[int, tuple[threading.Event, threading.Event]] = {}
        self._lock = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to be listened to."""
        return {SOCKET: str(self.path)}

    def arm(self, step: str, action: Action, after: int = 0) -> threading.Event:
        """At ``step``, once, when it was passed ``after`` times: call ``action`` with the pid of
        who is there, then let it go on.

        Returns an event that is set once the action is over.
        """
        done = threading.Event()

        def act(pid: int) -> None:
            try:
                action(pid)
            finally:
                done.set()

        with self._lock:
            self.reached.clear()
            self._armed = {step: (act, after)}
        return done

    def disarm(self) -> None:
        """What is still armed, since nobody came there, isn't for whoever comes next."""
        with self._lock:
            self._armed = {}

    def hold(self, pid: int) -> tuple[threading.Event, threading.Event]:
        """Keeps a process at its first fault point: one event tells of it, one lets it go on."""
        with self._lock:
            return self._gates.setdefault(pid, (threading.Event(), threading.Event()))

    def close(self) -> None:
        """Answer nobody any more."""
        self._server.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            step, pid = connection.makefile().readline().split()
            if self._has_gates and step == "run.begun" and int(pid) != os.getpid():
                there, go_on = self.hold(int(pid))
                there.set()
                go_on.wait()
            if (action := self._take(step)) is not None:
                action(int(pid))
            try:
                connection.sendall(b"\n")
            except OSError:  # it was killed
                return

    def _take(self, step: str) -> Action | None:
        with self._lock:
            self.reached.append(step)
            action, after = self._armed.get(step, (None, 0))
            if action is None:
                return None
            if after:
                self._armed[step] = (action, after - 1)
                return None
            del self._armed[step]
            return action
