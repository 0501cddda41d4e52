"""Fault points: between two effects, a place where a test may break something at exactly that
moment.

Only with ``WALDELTA_FAULT_SOCKET`` in the environment, which only tests set, does a point do
anything: it tells the Unix socket of that name where it is, and goes on when it is answered.
Whoever listens decides what breaks: this process, the JVM, the server, the disk, the network.
Nothing is broken, executed or read from here.
"""

from __future__ import annotations

import os
import socket

SOCKET = "WALDELTA_FAULT_SOCKET"


def fault_point(step: str) -> None:
    """Say that ``step`` was reached, as ``step pid``, and wait for the answer; nothing at all
    outside of tests.
    """
    path = os.environ.get(SOCKET)
    if path is None:
        return
    with socket.socket(socket.AF_UNIX) as listener:
        listener.connect(path)
        listener.sendall(f"{step} {os.getpid()}\n".encode())
        listener.recv(1)
