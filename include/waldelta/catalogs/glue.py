"""AWS Glue's Data Catalog; entries are as Glue's own crawler makes them of Delta tables.

Athena, Trino, Redshift Spectrum and Spark take the location from them and read Delta's log.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from waldelta.catalogs.catalog import (
    DELTA_PROPERTIES,
    NameRule,
    Registered,
    Registration,
    object_location,
)
from waldelta.catalogs.hive import INPUT, OUTPUT, SERDE, hive_type
from waldelta.config.airflow_connection import AirflowConnection
from waldelta.errors import CatalogRefused, CatalogTableForeign, CatalogUnreachable, ConfigError
from waldelta.lake.delta_statements import CATALOG_PROVIDER

_RULE = NameRule("Glue", 255)
# Limits of Glue's API for a column's comment, a table's description and a column's type.
_MOST_COMMENT, _MOST_DESCRIPTION, _MOST_TYPE = 255, 2048, 131_072
_PARAMETERS = {**DELTA_PROPERTIES, "table_type": "DELTA", "classification": CATALOG_PROVIDER}
_NO_CLIENT = (
    "boto3, the client of Glue, isn't installed here: run `pip install 'waldelta[glue]'` where the"
    " jobs run"
)
_AGAIN = ("Throttling", "ThrottlingException", "InternalServiceException", "OperationTimeout")
# Parts of Glue's description of a table that a change of it takes.
_KEPT = ("Owner", "Retention")


class GlueCatalog:
    """A client of Glue, made at the first call."""

    def __init__(self, connection: AirflowConnection | None, catalog_id: str | None = None) -> None:
        """Without a connection, the machine's own identity is used."""
        self._connection = connection
        self._catalog = {} if catalog_id is None else {"CatalogId": catalog_id}

    def stored_name(self, name: str) -> str:
        """Returns the name in lower case, which Athena needs."""
        return _RULE.check(name)

    def tables(self, schema: str, names: Collection[str]) -> dict[str, Registered]:
        """Returns the entries of these names; of several, by reading the database's."""
        entries: dict[str, Any] = {}
        with self._calling(schema):
            pages = self._client.get_paginator("get_tables")
            try:
                if len(names) == 1:
                    (name,) = names
                    request = {"DatabaseName": schema, "Name": name, **self._catalog}
                    return {name: _to_registered(self._client.get_table(**request)["Table"])}
                for page in pages.paginate(DatabaseName=schema, **self._catalog):
                    entries |= {entry["Name"]: entry for entry in page["TableList"]}
            except self._client.exceptions.EntityNotFoundException:
                return {}
        return {name: _to_registered(entries[name]) for name in names if name in entries}

    def create_schema(self, schema: str, properties: Mapping[str, str]) -> None:
        """Create a database unless there is one."""
        with self._calling(schema):
            try:
                self._client.get_database(Name=schema, **self._catalog)
            except self._client.exceptions.EntityNotFoundException:
                database = {"Name": schema, "Parameters": dict(properties)}
                self._client.create_database(DatabaseInput=database, **self._catalog)

    def create(self, table: Registration) -> None:
        """Make an entry of an external table."""
        with self._calling(f"{table.schema}.{table.name}"):
            self._client.create_table(
                DatabaseName=table.schema, TableInput=_input(table, {}), **self._catalog
            )

    def alter(self, table: Registration, current: Registered) -> None:
        """Replace an entry, whose former version Glue archives."""
        former = {name: current.entry[name] for name in _KEPT if name in current.entry}
        with self._calling(current.label):
            self._client.update_table(
                DatabaseName=table.schema,
                TableInput=former | _input(table, current.properties),
                **self._catalog,
            )

    def drop(self, current: Registered) -> None:
        """Remove an entry without the files."""
        with self._calling(current.label):
            try:
                self._client.delete_table(
                    DatabaseName=current.schema, Name=current.name, **self._catalog
                )
            except self._client.exceptions.EntityNotFoundException:
                return

    @cached_property
    def _client(self) -> Any:
        try:
            import boto3
            from botocore.config import Config
        except ImportError as err:
            raise ConfigError(_NO_CLIENT) from err

        limits = {"connect_timeout": 5, "read_timeout": 30, "retries": {"total_max_attempts": 3}}
        # Other variables name the endpoint of the lake's store.
        endpoint = os.environ.get("AWS_ENDPOINT_URL_GLUE")
        config = Config(ignore_configured_endpoint_urls=True, **limits)
        if (connection := self._connection) is None:
            return boto3.client("glue", endpoint_url=endpoint, config=config)
        extra = connection.extra
        service = dict(extra.get("service_config") or {}).get("glue") or {}
        session = boto3.Session(
            aws_access_key_id=connection.login or extra.get("aws_access_key_id"),
            aws_secret_access_key=connection.password or extra.get("aws_secret_access_key"),
            aws_session_token=extra.get("aws_session_token"),
            region_name=service.get("region_name") or extra.get("region_name"),
            profile_name=extra.get("profile_name"),
        )
        if (role := extra.get("role_arn")) is not None:
            session = _with_role(session, str(role), config)
        endpoint = service.get("endpoint_url") or extra.get("endpoint_url") or endpoint
        return session.client("glue", endpoint_url=endpoint, config=config)

    @contextmanager
    def _calling(self, label: str) -> Iterator[None]:
        try:
            from botocore.exceptions import (
                BotoCoreError,
                ClientError,
                ConnectionError,  # noqa: A004 - botocore's
                HTTPClientError,
            )
        except ImportError as err:
            raise ConfigError(_NO_CLIENT) from err
        try:
            yield
        except ClientError as err:
            code = err.response["Error"]["Code"]
            status = err.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            if code == "AlreadyExistsException":
                raise CatalogTableForeign(
                    f"{label} was made by another program at the same time: the next run compares"
                    " it"
                ) from err
            if code in _AGAIN or status >= 500:
                raise CatalogUnreachable(
                    f"Glue doesn't answer the call for {label} ({code}): the next run tries again"
                ) from err
            raise CatalogRefused(f"Glue refuses {label}: {err}"[:400]) from err
        except (ConnectionError, HTTPClientError) as err:
            raise CatalogUnreachable(f"Glue can't be reached ({err})"[:400]) from err
        except BotoCoreError as err:  # No credentials, no region.
            raise CatalogRefused(f"Glue can't be called: {err}"[:400]) from err


def _with_role(session: Any, role: str, config: Any) -> Any:
    import boto3

    answer = session.client("sts", config=config).assume_role(
        RoleArn=role, RoleSessionName="waldelta"
    )
    credentials = answer["Credentials"]
    return boto3.Session(
        aws_access_key_id=credentials["AccessKeyId"],
        aws_secret_access_key=credentials["SecretAccessKey"],
        aws_session_token=credentials["SessionToken"],
        region_name=session.region_name,
    )


def _input(table: Registration, properties: Mapping[str, str]) -> dict[str, Any]:
    location = object_location(table.location)
    columns = []
    for column in table.columns:
        kind = hive_type(column.spark_type)
        # The reader takes the columns from Delta's log anyway.
        described = {"Name": column.name, "Type": kind if len(kind) <= _MOST_TYPE else "string"}
        if column.comment:
            described["Comment"] = column.comment[:_MOST_COMMENT]
        columns.append(described)
    entry: dict[str, Any] = {
        "Name": table.name,
        "TableType": "EXTERNAL_TABLE",
        "PartitionKeys": [],
        "Parameters": dict(properties) | _PARAMETERS | dict(table.properties),
        "StorageDescriptor": {
            "Columns": columns,
            "Location": location,
            "InputFormat": INPUT,
            "OutputFormat": OUTPUT,
            "SerdeInfo": {
                "SerializationLibrary": SERDE,
                "Parameters": {"serialization.format": "1", "path": location},
            },
        },
    }
    if table.comment:
        # The API allows bytes, and a character has at most four.
        entry["Description"] = table.comment.encode()[:_MOST_DESCRIPTION].decode(errors="ignore")
    return entry


def _to_registered(entry: Mapping[str, Any]) -> Registered:
    storage = entry.get("StorageDescriptor", {})
    return Registered(
        entry["DatabaseName"],
        entry["Name"],
        storage.get("Location", ""),
        tuple(column["Name"].lower() for column in storage.get("Columns", ())),
        entry.get("Parameters", {}),
        entry,
    )
