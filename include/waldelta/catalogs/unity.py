"""Unity Catalog by its open REST API, version 2.1, as the project publishes it (api/all.yaml).

The API has no call that changes a table: an entry is removed and made again. It is one of an
external table, whose files stay.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from waldelta.catalogs.catalog import (
    EntryColumn,
    NameRule,
    Registered,
    Registration,
    object_location,
)
from waldelta.config.airflow_connection import AirflowConnection
from waldelta.config.parse_text import parse_json
from waldelta.errors import CatalogRefused, CatalogTableForeign, CatalogUnreachable, ConfigError

_API = "/api/2.1/unity-catalog"
_TIMEOUT_S = 30.0
_RULE = NameRule(
    "Unity Catalog",
    255,
    r"[a-z0-9_@-]+",
    "letters without accents, digits, underscores and hyphens",
)
# ColumnTypeName of the API, by the first word of Spark's type.
_TYPES = {
    "bigint": "LONG",
    "int": "INT",
    "smallint": "SHORT",
    "tinyint": "BYTE",
    "boolean": "BOOLEAN",
    "float": "FLOAT",
    "double": "DOUBLE",
    "date": "DATE",
    "timestamp": "TIMESTAMP",
    "timestamp_ntz": "TIMESTAMP_NTZ",
    "string": "STRING",
    "binary": "BINARY",
    "decimal": "DECIMAL",
    "array": "ARRAY",
    "struct": "STRUCT",
    "map": "MAP",
    "variant": "VARIANT",
}


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the token to another host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


class UnityCatalog:
    """A catalog of a Unity Catalog server; each call is a request."""

    def __init__(self, connection: AirflowConnection, catalog: str) -> None:
        """The connection has the server's address, and a token as its password.

        Raises ConfigError where the address isn't one.
        """
        host = (connection.host or "").rstrip("/")
        if not host:
            raise ConfigError(f"{connection.variable} has no host: name Unity Catalog's server")
        if "://" not in host:
            scheme = connection.schema if connection.schema in ("http", "https") else "https"
            host = f"{scheme}://{host}"
        if not host.startswith(("http://", "https://")):
            raise ConfigError(f"{connection.variable}: the host's scheme isn't http or https")
        self._server = host if connection.port is None else f"{host}:{connection.port}"
        self._token, self._catalog = connection.password, catalog

    def stored_name(self, name: str) -> str:
        """Returns the name in lower case, as Databricks stores it."""
        return _RULE.check(name)

    def tables(self, schema: str, names: Collection[str]) -> dict[str, Registered]:
        """Returns the entries of these names; of several, by reading the schema's."""
        if len(names) == 1:
            (name,) = names
            entry = self._call("GET", f"/tables/{self._path(schema, name)}", missing=None)
            return {} if entry is None else {name: _to_registered(entry)}
        entries: dict[str, Registered] = {}
        query: dict[str, Any] = {"catalog_name": self._catalog, "schema_name": schema}
        while True:
            answer = self._call("GET", f"/tables?{urlencode(query)}", missing={})
            entries |= {one["name"]: _to_registered(one) for one in answer.get("tables") or ()}
            if not (token := answer.get("next_page_token")):
                return {name: entries[name] for name in names if name in entries}
            query["page_token"] = token

    def create_schema(self, schema: str, properties: Mapping[str, str]) -> None:
        """Create a schema unless there is one; the catalog must exist."""
        if self._call("GET", f"/schemas/{self._path(schema)}", missing=None) is None:
            body = {"name": schema, "catalog_name": self._catalog, "properties": dict(properties)}
            self._call("POST", "/schemas", body)

    def create(self, table: Registration) -> None:
        """Make an entry of an external table."""
        self._call("POST", "/tables", self._body(table, {}))

    def alter(self, table: Registration, current: Registered) -> None:
        """Remove the entry and make it again, since the API has no other way."""
        self.drop(current)
        self._call("POST", "/tables", self._body(table, current.properties))

    def drop(self, current: Registered) -> None:
        """Remove an entry without the files."""
        self._call("DELETE", f"/tables/{self._path(current.schema, current.name)}", missing=None)

    def _path(self, *names: str) -> str:
        return quote(".".join((self._catalog, *names)), safe="")

    def _body(self, table: Registration, properties: Mapping[str, str]) -> dict[str, Any]:
        return {
            "name": table.name,
            "catalog_name": self._catalog,
            "schema_name": table.schema,
            "table_type": "EXTERNAL",
            "data_source_format": "DELTA",
            "storage_location": object_location(table.location),
            "columns": [_column(number, column) for number, column in enumerate(table.columns)],
            "properties": dict(properties) | dict(table.properties),
        } | ({"comment": table.comment} if table.comment else {})

    def _call(self, method: str, path: str, body: Any = None, **otherwise: Any) -> Any:
        """Returns the answer; ``missing`` where the server answers that there is nothing."""
        request = urllib.request.Request(  # noqa: S310 - its scheme was checked
            f"{self._server}{_API}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Accept": "application/json", "Content-Type": "application/json"},
        )
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        try:
            with _OPENER.open(request, timeout=_TIMEOUT_S) as answer:
                return parse_json(answer.read() or b"{}")
        except urllib.error.HTTPError as err:
            if err.code == 404 and "missing" in otherwise:
                return otherwise["missing"]
            raise self._error_of(err, f"{method} {path.split('?', maxsplit=1)[0]}") from err
        except (OSError, ValueError) as err:
            reason = getattr(err, "reason", None) or err
            raise CatalogUnreachable(
                f"Unity Catalog at {self._server} can't be reached ({reason})"
            ) from err

    def _error_of(
        self, err: urllib.error.HTTPError, call: str
    ) -> CatalogRefused | CatalogTableForeign | CatalogUnreachable:
        where = f"Unity Catalog at {self._server}"
        if err.code >= 500 or err.code == 429:
            return CatalogUnreachable(f"{where} doesn't answer ({err.code} to {call})")
        try:
            answer = dict(parse_json(err.read(10_000)))
        except (OSError, ValueError, TypeError):
            answer = {}
        code = str(answer.get("error_code") or "")
        if err.code == 409 or code.endswith("ALREADY_EXISTS"):
            return CatalogTableForeign(
                f"{where} has it already ({call}): another program made it at the same time, and"
                " the next run compares it"
            )
        text = f"{where} refuses {call}: {err.code} {code} {answer.get('message') or ''}"
        return CatalogRefused(text[:400].rstrip())


def _column(position: int, column: EntryColumn) -> dict[str, Any]:
    kind = column.spark_type
    described: dict[str, Any] = {
        "name": column.name,
        "type_text": kind,
        "type_json": json.dumps(column.json_field),
        "type_name": _TYPES[kind.split("(")[0].split("<")[0]],
        "position": position,
        "nullable": column.is_nullable,
    }
    if kind.startswith("decimal("):
        precision, scale = kind.removeprefix("decimal(").removesuffix(")").split(",")
        described |= {"type_precision": int(precision), "type_scale": int(scale)}
    if column.comment:
        described["comment"] = column.comment
    return described


def _to_registered(entry: Mapping[str, Any]) -> Registered:
    return Registered(
        entry["schema_name"],
        entry["name"],
        entry.get("storage_location") or "",
        tuple(column["name"].lower() for column in entry.get("columns") or ()),
        entry.get("properties") or {},
        entry,
    )
