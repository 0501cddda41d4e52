"""A TCP proxy in front of PostgreSQL: a network that can be cut, or stall."""

import socket
import struct
import threading
from contextlib import suppress

_RESET = struct.pack(
    "ii", 1, 0
)  # linger on, for no time: close sends RST, as a firewall that forgot the connection


class Network:
    """Forwards connections to ``(host, port)``; ``port`` of its own is where clients go."""

    def __init__(self, host: str, port: int) -> None:
        self._to = (host, port)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        self._flows = threading.Event()
        self._flows.set()
        self._down = False
        self._left: int | None = None
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, _: int = 0) -> None:
        """Reset every connection, and refuse new ones until it is healed."""
        self._down = True
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            self._reset(pair)

    def cut_after(self, count: int) -> None:
        """Cut once the server has sent ``count`` more bytes: in the middle of a message."""
        self._left = count

    def stall(self, _: int = 0) -> None:
        """Forward nothing until it is healed; connections stay open."""
        self._flows.clear()

    def lead_to(self, port: int) -> None:
        """From now on, forward to another server of that machine."""
        self._to = (self._to[0], port)

    def heal(self) -> None:
        """All as it was."""
        self._down, self._left = False, None
        self._flows.set()

    def close(self) -> None:
        """Cut, for good."""
        self._server.close()
        self.cut()
        self._flows.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._down:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            try:
                server = socket.create_connection(self._to)
            except OSError:  # it is being restarted
                client.close()
                continue
            pair = (client, server)
            with self._lock:
                self._pairs.add(pair)
            for one, other, is_answer in ((client, server, False), (server, client, True)):
                threading.Thread(
                    target=self._forward, args=(pair, one, other, is_answer), daemon=True
                ).start()

    def _forward(
        self,
        pair: tuple[socket.socket, socket.socket],
        one: socket.socket,
        other: socket.socket,
        is_answer: bool,
    ) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                self._flows.wait()
                if is_answer and self._left is not None:
                    if len(data) >= self._left:
                        other.sendall(data[: self._left])
                        self._left = None
                        self.cut()
                        return
                    self._left -= len(data)
                other.sendall(data)
        with self._lock:
            self._pairs.discard(pair)
        for end in pair:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _reset(self, pair: tuple[socket.socket, socket.socket]) -> None:
        for end in pair:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RDWR)
                end.close()
