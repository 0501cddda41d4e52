"""A proxy in front of an object store: counts, holds, delays and fails requests."""

from __future__ import annotations

import http.client
import random
import re
import select
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

# What the User-Agent header of each client contains.
_CLIENTS = {
    "java": re.compile("aws-sdk-java|s3analyticsaccelerator|azsdk-java|Azure Blob FS"),
    "delta-rs": re.compile("object_store|delta-rs|deltalake"),
    "arrow": re.compile("aws-sdk-cpp|azsdk-cpp"),
    "python": re.compile("Boto3|Botocore|azsdk-python"),
}
_SLOW_DOWN = (
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
# These headers are about one connection, so each side of the proxy sets its own.
_OF_CONNECTION = frozenset({"connection", "expect", "keep-alive", "transfer-encoding"})
# How long a test waits for a request before it fails.
WAIT_S = 60.0


@dataclass(frozen=True)
class Request:
    """One request of a client, as the proxy received it.

    ``kind`` is the method, or LIST for the listing of a folder, or DELETES for many objects at
    once. ``is_conditional`` says that it creates the object only where there is none.
    """

    client: str
    kind: str
    path: str
    is_conditional: bool = False

    def __str__(self) -> str:
        """Return what patterns are matched with, e.g. ``java PUT /bucket/t/_delta_log/0.json``."""
        return f"{self.client} {self.kind} {self.path}"


@dataclass(frozen=True)
class Answer:
    """The status that a request got, None where there was no answer."""

    request: Request
    status: int | None


class Rule:
    """What happens to the next ``count`` requests that match a pattern; None means all of them."""

    def __init__(self, pattern: str, count: int | None) -> None:
        self._pattern, self._left = re.compile(pattern), count
        self._lock = threading.Lock()

    def applies_to(self, request: Request) -> bool:
        """Return whether a request matches, and count it if so."""
        with self._lock:
            if self._left == 0 or not self._pattern.search(str(request)):
                return False
            if self._left is not None:
                self._left -= 1
            return True


class Hold(Rule):
    """Requests that the proxy keeps from the store until they are released."""

    def __init__(self, pattern: str, count: int | None) -> None:
        super().__init__(pattern, count)
        self._held: list[Request] = []
        self._arrived = threading.Event()
        self._released = threading.Event()

    def wait(self, timeout_s: float = WAIT_S) -> Request:
        """Return the first request that is held, once there is one."""
        if not self._arrived.wait(timeout_s):
            raise TimeoutError(f"no request matched {self._pattern.pattern!r} in {timeout_s:g} s")
        return self._held[0]

    @property
    def has_held(self) -> bool:
        """Whether a request has arrived."""
        return self._arrived.is_set()

    def release(self) -> None:
        """Let the held requests reach the store, and hold no more."""
        self._released.set()

    def keep(self, request: Request) -> None:
        """Hold a request in the thread of its connection."""
        if not self._released.is_set():
            self._held.append(request)
            self._arrived.set()
            self._released.wait()


class StoreProxy:
    """Forwards requests to a store on a port of this machine; ``port`` is where clients go.

    >>> with StoreProxy(server.port) as proxy, proxy.hold("java PUT .*/0+1.json") as commit:
    ...     commit.wait()

    ``delay_s`` is added to every request. ``fail_share`` is the share of requests that are refused
    with 503, chosen by the seed.
    """

    def __init__(self, store_port: int, seed: int = 0) -> None:
        self.store_port = store_port
        self.delay_s, self.fail_share = 0.0, 0.0
        self._random, self._lock = random.Random(seed), threading.Lock()
        self._answers: list[Answer] = []
        self._holds: list[Hold] = []
        self._losses: list[Rule] = []
        self._server = _Server(self)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def answers(self) -> list[Answer]:
        """All requests so far, in the order of their answers."""
        with self._lock:
            return list(self._answers)

    def clear(self) -> None:
        """Forget the requests so far."""
        with self._lock:
            self._answers.clear()

    def counts(self) -> Counter[tuple[str, str]]:
        """Return how many requests each client made, by kind: ``{("java", "GET"): 3}``."""
        return Counter((a.request.client, a.request.kind) for a in self.answers)

    def statuses(self, pattern: str) -> list[int | None]:
        """Return the status of each request that matches a pattern."""
        return [a.status for a in self.answers if re.search(pattern, str(a.request))]

    @contextmanager
    def hold(self, pattern: str, count: int | None = 1) -> Iterator[Hold]:
        """Hold the next requests that match a pattern; the end of the block releases them."""
        rule = Hold(pattern, count)
        self._holds.append(rule)
        try:
            yield rule
        finally:
            rule.release()
            self._holds.remove(rule)

    @contextmanager
    def lose_answers(self, pattern: str, count: int | None = 1) -> Iterator[None]:
        """Passes the next matching requests on, and closes the connection unanswered."""
        rule = Rule(pattern, count)
        self._losses.append(rule)
        try:
            yield
        finally:
            self._losses.remove(rule)

    def __enter__(self) -> StoreProxy:
        threading.Thread(target=self._server.serve_forever, name="store proxy", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for rule in self._holds:
            rule.release()
        self._server.shutdown()
        self._server.server_close()

    def receive(self, request: Request) -> bool:
        """Hold and delay a request as configured; returns whether it is to fail."""
        for rule in list(self._holds):
            if rule.applies_to(request):
                rule.keep(request)
        if self.delay_s:
            time.sleep(self.delay_s)
        with self._lock:
            return self._random.random() < self.fail_share

    def is_lost(self, request: Request) -> bool:
        """Return whether the client doesn't get the answer to this request."""
        return any(rule.applies_to(request) for rule in list(self._losses))

    def record(self, request: Request, status: int | None) -> None:
        """Count a request."""
        with self._lock:
            self._answers.append(Answer(request, status))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    # Clients open many connections at the same moment.
    request_queue_size = 128

    def __init__(self, proxy: StoreProxy) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.proxy = proxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing where a client closed its connection."""


class _Connection(BaseHTTPRequestHandler):
    """One connection of a client, with one of its own to the store."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self._store = http.client.HTTPConnection("127.0.0.1", self.server.proxy.store_port)

    def finish(self) -> None:
        self._store.close()
        with suppress(OSError):  # The client has closed its end.
            super().finish()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def forward(self) -> None:
        """Answer one request as the store does, or as the proxy's rules say."""
        proxy, request = self.server.proxy, self._request()
        if "Transfer-Encoding" in self.headers:  # S3 refuses it, too.
            self.send_error(411)
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if proxy.receive(request):
            proxy.record(request, 503)
            self._answer(503, [("Content-Type", "application/xml")], _SLOW_DOWN)
            return
        try:
            response = self._ask(body)
            content = response.read()
        except (OSError, http.client.HTTPException):
            # The store is away: the client's connection ends as its own would.
            proxy.record(request, None)
            self.close_connection = True
            return
        proxy.record(request, response.status)
        if proxy.is_lost(request):
            self.close_connection = True
            return
        self._answer(response.status, response.getheaders(), content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = forward  # noqa: N815

    def _request(self) -> Request:
        agent = self.headers.get("User-Agent", "")
        client = next((name for name, words in _CLIENTS.items() if words.search(agent)), "other")
        parts = urlsplit(self.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        kind = self.command
        if kind == "GET" and ("list-type" in query or query.get("comp") == ["list"]):
            kind = "LIST"
        elif kind == "POST" and "delete" in query:
            kind = "DELETES"
        path = f"{parts.path}?{parts.query}" if kind == "LIST" else parts.path
        return Request(client, kind, path, self.headers.get("If-None-Match") == "*")

    def _ask(self, body: bytes) -> http.client.HTTPResponse:
        """Send the request to the store, with the headers that the client has signed."""
        sock = self._store.sock
        if sock is not None and select.select([sock], [], [], 0)[0]:
            # The store has closed the connection, which was idle for too long. The client can't see
            # that, as it would without the proxy.
            self._store.close()
        self._store.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _OF_CONNECTION:
                self._store.putheader(name, value)
        self._store.endheaders(body or None)
        return self._store.getresponse()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        self.send_response_only(status)
        names = {name.lower() for name, _ in headers}
        for name, value in headers:
            if name.lower() not in _OF_CONNECTION:
                self.send_header(name, value)
        # Chunked answers of a store name no length. The answer to HEAD names the object's.
        if "content-length" not in names and status not in (204, 304) and status >= 200:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
