"""A server that keeps what Unity Catalog's API is sent, and refuses what its specification doesn't
have; tests/cases/unity_catalog_api.json is the part of the specification that is used.
"""

from __future__ import annotations

import json
import re
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import jsonschema

API = Path(__file__).parents[2] / "cases" / "unity_catalog_api.json"
BASE = "/api/2.1/unity-catalog"
TOKEN = "unity-t0ken"
_PAGE = 2


@cache
def specification() -> dict[str, Any]:
    """The specification; its objects have no other keys than those it names."""
    document = json.loads(API.read_text())
    for kind in document["components"]["schemas"].values():
        if "properties" in kind:
            kind["additionalProperties"] = False
    return document


def check(name: str, value: Any) -> None:
    """Raise jsonschema's error unless a value is of a kind of the specification."""
    kinds = specification()["components"]
    jsonschema.validate(value, {"$ref": f"#/components/schemas/{name}", "components": kinds})


class _Request(BaseHTTPRequestHandler):
    server: UnityServer

    def do_GET(self) -> None:
        self._answer("get")

    def do_POST(self) -> None:
        self._answer("post")

    def do_DELETE(self) -> None:
        self._answer("delete")

    def log_message(self, *_: Any) -> None:
        """Write nothing between the tests' own output."""

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._send(401, {"error_code": "UNAUTHENTICATED", "message": "no token"})
        if self.server.status and method in self.server.failing:
            return self._send(self.server.status, {"error_code": "X", "message": "as told"})
        path = parts.path.removeprefix(BASE)
        for template, calls in specification()["paths"].items():
            pattern = re.sub(r"\\{\w+\\}", "([^/]+)", re.escape(template))
            if (found := re.fullmatch(pattern, path)) and method in calls:
                break
        else:
            return self._send(501, {"error_code": "UNIMPLEMENTED", "message": path})
        call = calls[method]
        asked = dict(parse_qsl(parts.query))
        known = {one["name"]: one for one in call.get("parameters", ()) if one["in"] == "query"}
        # Polars sends the name twice.
        assert asked.keys() - {"full_name"} <= known.keys(), asked
        assert {n for n, one in known.items() if one.get("required")} <= asked.keys(), asked
        body = None
        if method == "post":
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            kind = call["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            check(kind.rpartition("/")[2], body)
        name = unquote(found[1]) if found.groups() else None
        status, answer = getattr(self.server, call["operationId"])(name, asked, body)
        content = call["responses"]["200"]["content"]["application/json"]["schema"]
        if status == 200 and "$ref" in content:
            check(content["$ref"].rpartition("/")[2], answer)
        return self._send(status, answer)

    def _send(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class UnityServer(ThreadingHTTPServer):
    """Listens on a free port; it has one catalog, ``lake``.

    Calls by the methods ``failing`` are answered with ``status``, unless that is 0.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.schemas: dict[str, dict[str, Any]] = {}
        self.entries: dict[str, dict[str, Any]] = {}
        self.status, self.failing = 0, ("get", "post", "delete")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    # Each by the specification's operationId.

    def createSchema(self, _: Any, __: Any, body: Any) -> Any:  # noqa: N802
        if body["catalog_name"] != "lake":
            return 404, {"error_code": "CATALOG_NOT_FOUND", "message": body["catalog_name"]}
        self.schemas[f"lake.{body['name']}"] = body
        return 200, body

    def getSchema(self, name: str, *_: Any) -> Any:  # noqa: N802
        found = self.schemas.get(name)
        return (404, {"error_code": "SCHEMA_NOT_FOUND"}) if found is None else (200, found)

    def createTable(self, _: Any, __: Any, body: Any) -> Any:  # noqa: N802
        schema = f"{body['catalog_name']}.{body['schema_name']}"
        if schema not in self.schemas:
            return 404, {"error_code": "SCHEMA_NOT_FOUND"}
        name = f"{schema}.{body['name']}"
        if name in self.entries:
            return 400, {"error_code": "TABLE_ALREADY_EXISTS"}
        self.entries[name] = body | {
            "table_id": f"id of {name}",
            "created_at": 0,
            "updated_at": 0,
        }
        return 200, self.entries[name]

    def listTables(self, _: Any, asked: dict[str, str], __: Any) -> Any:  # noqa: N802
        schema = f"{asked['catalog_name']}.{asked['schema_name']}"
        if schema not in self.schemas:
            return 404, {"error_code": "SCHEMA_NOT_FOUND"}
        every = [one for name, one in self.entries.items() if name.startswith(f"{schema}.")]
        first = int(asked.get("page_token", 0))
        more = {"next_page_token": str(first + _PAGE)} if first + _PAGE < len(every) else {}
        return 200, {"tables": every[first : first + _PAGE]} | more

    def getTable(self, name: str, *_: Any) -> Any:  # noqa: N802
        found = self.entries.get(name)
        return (404, {"error_code": "TABLE_NOT_FOUND"}) if found is None else (200, found)

    def deleteTable(self, name: str, *_: Any) -> Any:  # noqa: N802
        found = self.entries.pop(name, None)
        return (404, {"error_code": "TABLE_NOT_FOUND"}) if found is None else (200, {})
