"""A web server for tests: takes JSON and keeps it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Posted:
    """One request."""

    path: str
    headers: Mapping[str, str]
    document: dict[str, Any]


class _Request(BaseHTTPRequestHandler):
    server: HookServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.answers.get(self.path, 200)
        if status == 200:
            self.server.posted.append(Posted(self.path, dict(self.headers), json.loads(body)))
        self.send_response(status)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Write nothing between the tests' own output."""


class HookServer(ThreadingHTTPServer):
    """Listens on a free port; ``answers`` are statuses by path, where it isn't 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.posted: list[Posted] = []
        self.answers: dict[str, int] = {}

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"

    def take(self, path: str) -> list[dict[str, Any]]:
        """What came to a path since the last call."""
        taken = [one.document for one in self.posted if one.path == path]
        self.posted = [one for one in self.posted if one.path != path]
        return taken
