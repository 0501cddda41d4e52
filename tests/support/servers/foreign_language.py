"""A server whose messages nobody can read: PostgreSQL behind a proxy that puts nonsense in their
place.

Codes, names within a context, and values stay as they are, as in a translation.
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from psycopg.conninfo import conninfo_to_dict, make_conninfo

NONSENSE = "ξφψ ωωω ζχ"
_SSL_REQUEST, _GSS_REQUEST = 80877103, 80877104
# Names in quotes and positions in WAL: what a translation of a context keeps.
_KEPT = re.compile(r'"[^"]*"|»[^«]*«|\b[0-9A-F]+/[0-9A-F]+\b')


@contextmanager
def in_a_foreign_language(conninfo: str) -> Iterator[str]:
    """The connection string of the proxy, for one that has no TLS."""
    fields = conninfo_to_dict(conninfo)
    server = (str(fields["host"]), int(str(fields["port"])))
    with _listening(lambda client: _serve(client, server)) as port:
        yield make_conninfo(conninfo, host="127.0.0.1", port=port)


@contextmanager
def _listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with suppress(OSError):
                while True:
                    client, _ = listener.accept()
                    threading.Thread(target=serve, args=(client,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _serve(client: socket.socket, address: tuple[str, int]) -> None:
    with client, socket.create_connection(address) as server:
        try:
            _exchange(client, server)
        except (OSError, EOFError):
            # The thread of the other direction waits for the client; close() wouldn't end that.
            for end in (client, server):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def _exchange(client: socket.socket, server: socket.socket) -> None:
    while True:
        first = _read(client, 8)
        body = _read(client, int.from_bytes(first[:4], "big") - 8)
        server.sendall(first + body)
        if int.from_bytes(first[4:], "big") not in (_SSL_REQUEST, _GSS_REQUEST):
            break
        client.sendall(_read(server, 1))
    threading.Thread(target=_pass_on, args=(client, server), daemon=True).start()
    while True:
        head = _read(server, 5)
        body = _read(server, int.from_bytes(head[1:], "big") - 4)
        if head[:1] in (b"E", b"N"):
            body = _translated(body)
        client.sendall(head[:1] + (len(body) + 4).to_bytes(4, "big") + body)


def _pass_on(client: socket.socket, server: socket.socket) -> None:
    with suppress(OSError):
        while chunk := client.recv(1 << 16):
            server.sendall(chunk)
        server.shutdown(socket.SHUT_RDWR)


def _read(source: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        chunk = source.recv(size - len(got))
        if not chunk:
            raise EOFError
        got += chunk
    return bytes(got)


def _translated(fields: bytes) -> bytes:
    """The fields of an error, with nonsense for severity, message, detail, hint and context."""
    out = []
    for field in fields.rstrip(b"\0").split(b"\0"):
        kind, text = field[:1], field[1:].decode()
        if kind in (b"M", b"W"):
            text = " ".join([NONSENSE, *_KEPT.findall(text)])
        elif kind in (b"S", b"D", b"H"):
            text = NONSENSE
        out.append(kind + text.encode())
    return b"\0".join(out) + b"\0\0"
