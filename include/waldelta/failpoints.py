"""Fault points: places between two effects where a test can cause a failure at that exact moment.

A point does something only if ``WALDELTA_FAULT_SOCKET`` is in the environment, which only tests
set: it sends its name to the Unix socket of that path, and continues after a response. The
listening test decides what fails: this process, the JVM, the server, the disk, the network. This
module itself breaks, executes and reads nothing.
"""

from __future__ import annotations

import os
import socket

SOCKET = "WALDELTA_FAULT_SOCKET"


def fault_point(step: str) -> None:
    """Send ``step pid`` to the test's socket, and wait for the response; does nothing outside
    tests.
    """
    path = os.environ.get(SOCKET)
    if path is None:
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.connect(path)
        listener.sendall(f"{step} {os.getpid()}\n".encode())
        listener.recv(1)
