"""The socket between a task and the fork server: a request, with the file for the job's output, and
the identity of the other side.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

# Arguments and environment of a process are shorter: Linux allows a quarter of the stack limit,
# which is 2 MB.
LONGEST_REQUEST = 8 << 20
_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")


def send_request(server: socket.socket, request: Mapping[str, Any], output: int) -> None:
    """Request a job; ``output`` is a file descriptor that is duplicated to the other side.

    Raises ValueError for a request that is too long.
    """
    document = json.dumps(request).encode()
    _check_length(len(document))
    socket.send_fds(server, [_LENGTH.pack(len(document))], [output])
    server.sendall(document)


def receive_request(asker: socket.socket, timeout_s: float) -> tuple[dict[str, Any], int]:
    """Returns the request, and the file descriptor for the job's output; raises ValueError if
    invalid.

    Raises TimeoutError if the request is not complete in time.
    """
    deadline = time.monotonic() + timeout_s
    asker.settimeout(timeout_s)
    head, files, _, _ = socket.recv_fds(asker, _LENGTH.size, 1)
    try:
        if len(head) != _LENGTH.size or len(files) != 1:
            raise ValueError("it has no length, or no file for the output")
        os.set_inheritable(files[0], False)
        (remaining,), parts = _LENGTH.unpack(head), []
        _check_length(remaining)
        while remaining:
            asker.settimeout(max(deadline - time.monotonic(), 0.001))
            part = asker.recv(min(remaining, 1 << 16))
            if not part:
                raise ValueError("it is incomplete")
            parts.append(part)
            remaining -= len(part)
        return json.loads(b"".join(parts)), files[0]
    except BaseException:
        for number in files:
            os.close(number)
        raise


def _check_length(length: int) -> None:
    if length > LONGEST_REQUEST:
        raise ValueError(f"it has {length} bytes, and no request needs more than {LONGEST_REQUEST}")


def other_end(connection: socket.socket) -> int | None:
    """Returns the pid of the process at the other end; raises PermissionError for another user's.

    Returns None where the system doesn't provide it (macOS): there the socket's permissions protect
    it.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        raise PermissionError("the process at the other end belongs to another user")
    return int(pid)
