"""The Hive metastore by its Thrift API; entries are as Spark and Trino make them of Delta tables.

Both find the folder in the serde's parameter ``path``, and read the columns from Delta's log.
Formats and serde are those that Spark names for a table that Hive itself can't read.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from waldelta.catalogs.catalog import (
    DELTA_PROPERTIES,
    LOCATION,
    NameRule,
    Registered,
    Registration,
)
from waldelta.config.airflow_connection import AirflowConnection
from waldelta.errors import (
    CatalogNameRefused,
    CatalogRefused,
    CatalogTableForeign,
    CatalogUnreachable,
    ConfigError,
)

_CONNECT_MS, _TIMEOUT_MS = 5_000, 30_000
_PORT = 9083
INPUT = "org.apache.hadoop.mapred.SequenceFileInputFormat"
OUTPUT = "org.apache.hadoop.hive.ql.io.HiveSequenceFileOutputFormat"
SERDE = "org.apache.hadoop.hive.serde2.lazy.LazySimpleSerDe"
# What the metastore's own database holds, and the part of a schema that Spark puts into a property.
_MOST_COMMENT, _MOST_PROPERTY = 255, 4000
_NO_CLIENT = (
    "the Hive metastore's client isn't installed here: run `pip install 'waldelta[hive]'` where the"
    " jobs run"
)
# Hive lacks these types; its reader would have to read the same values.
_TYPES = {"timestamp_ntz": "timestamp", "variant": "struct<metadata:binary,value:binary>"}
_RULE = NameRule("the Hive metastore", 128)


def hive_type(spark_type: str) -> str:
    """Returns a type by Hive's name.

    >>> hive_type("array<timestamp_ntz>"), hive_type("struct<variant:int>"), hive_type("bigint")
    ('array<timestamp>', 'struct<variant:int>', 'bigint')
    """
    return re.sub(r"\w+(?!\w|:)", lambda word: _TYPES.get(word[0], word[0]), spark_type)


class HiveMetastore:
    """A connection to a metastore, opened at the first call."""

    def __init__(self, connection: AirflowConnection, catalog: str | None = None) -> None:
        """``catalog`` is one of the metastore's, of Hive 3 and later; None for its own.

        Raises ConfigError for a connection that asks for what this client doesn't do.
        """
        extra = connection.extra
        mechanism = extra.get("auth_mechanism") or extra.get("authMechanism") or "NOSASL"
        if mechanism != "NOSASL" or extra.get("use_ssl"):
            raise ConfigError(
                f"{connection.variable} asks for SASL or TLS, which waldelta's client of the Hive"
                " metastore doesn't do: give it an address that takes plain Thrift"
            )
        if not connection.host:
            raise ConfigError(f"{connection.variable} has no host: name the Hive metastore's")
        self._hosts = connection.host.split(",")
        self._port = connection.port or _PORT
        self._user, self._catalog = connection.login, catalog

    def stored_name(self, name: str) -> str:
        """Returns the name in lower case."""
        return _RULE.check(name)

    def tables(self, schema: str, names: Collection[str]) -> dict[str, Registered]:
        """Returns the entries of these names, by one request."""
        kinds = self._kinds
        request = kinds.GetTablesRequest(
            dbName=schema, tblNames=sorted(names), catName=self._catalog
        )
        with self._calling(schema):
            try:
                entries = self._client.get_table_objects_by_name_req(request).tables
            except (kinds.UnknownDBException, kinds.NoSuchObjectException):
                return {}
        return {entry.tableName: _to_registered(entry) for entry in entries}

    def create_schema(self, schema: str, properties: Mapping[str, str]) -> None:
        """Create a database unless there is one."""
        kinds = self._kinds
        database = kinds.Database(name=schema, parameters=dict(properties))
        if self._catalog is not None:
            database.catalogName = self._catalog
        with self._calling(schema):
            try:
                self._client.get_database(self._qualify(schema))
            except kinds.NoSuchObjectException:
                try:
                    self._client.create_database(database)
                except kinds.AlreadyExistsException:
                    return

    def create(self, table: Registration) -> None:
        """Make an entry of an external table, or of a view."""
        with self._calling(f"{table.schema}.{table.name}"):
            self._client.create_table(self._entry(table, {}))

    def alter(self, table: Registration, current: Registered) -> None:
        """Replace an entry.

        A metastore refuses some changes of columns, by position; it is given a new entry then.
        """
        entry = self._entry(table, current.properties)
        with self._calling(current.label):
            try:
                self._client.alter_table(self._qualify(table.schema), table.name, entry)
            except self._kinds.InvalidOperationException:
                self._client.drop_table(self._qualify(table.schema), table.name, False)
                self._client.create_table(entry)

    def drop(self, current: Registered) -> None:
        """Remove an entry without the files."""
        with self._calling(current.label):
            try:
                self._client.drop_table(self._qualify(current.schema), current.name, False)
            except self._kinds.NoSuchObjectException:
                return

    def _qualify(self, schema: str) -> str:
        # Calls without a request object take the catalog as a prefix (MetaStoreUtils of Hive 3).
        return schema if self._catalog is None else f"@{self._catalog}#{schema}"

    @property
    def _kinds(self) -> Any:
        try:
            from pymetastore.hive_metastore import ttypes
        except ImportError as err:
            raise ConfigError(_NO_CLIENT) from err
        return ttypes

    @cached_property
    def _client(self) -> Any:
        from pymetastore.hive_metastore import ThriftHiveMetastore
        from thrift.protocol import TBinaryProtocol
        from thrift.transport import TSocket, TTransport

        # It logs a stack for each address that can't be reached, besides the error.
        TSocket.logger.setLevel(logging.CRITICAL)
        for number, host in enumerate(self._hosts, 1):
            socket = TSocket.TSocket(host.strip(), self._port)
            socket.setTimeout(_CONNECT_MS)
            transport = TTransport.TBufferedTransport(socket)
            try:
                transport.open()
            except TTransport.TTransportException:
                if number == len(self._hosts):
                    raise
                continue
            socket.setTimeout(_TIMEOUT_MS)
            break
        client = ThriftHiveMetastore.Client(TBinaryProtocol.TBinaryProtocol(transport))
        if self._user:
            client.set_ugi(self._user, [])
        return client

    @contextmanager
    def _calling(self, label: str) -> Iterator[None]:
        kinds = self._kinds
        from thrift.Thrift import TException
        from thrift.transport.TTransport import TTransportException

        where = f"the Hive metastore at {','.join(self._hosts)}:{self._port}"
        try:
            yield
        except (TTransportException, OSError) as err:
            self.__dict__.pop("_client", None)
            raise CatalogUnreachable(f"{where} can't be reached ({_text(err)})") from err
        except kinds.AlreadyExistsException as err:
            raise CatalogTableForeign(
                f"{label} was made by another program at the same time: the next run compares it"
            ) from err
        except kinds.InvalidObjectException as err:
            raise CatalogNameRefused(f"{where} refuses {label}: {_text(err)}") from err
        except TException as err:
            raise CatalogRefused(f"{where} refuses {label}: {_text(err)}") from err

    def _entry(self, table: Registration, properties: Mapping[str, str]) -> Any:
        kinds, is_view = self._kinds, table.query is not None
        serde = {"serialization.format": "1"} | ({} if is_view else {"path": table.location})
        parameters = {"comment": table.comment} if table.comment else {}
        parameters |= _schema_properties(table) if is_view else DELTA_PROPERTIES
        # The metastore would count the folder's files at each change.
        parameters |= {} if is_view else {"DO_NOT_UPDATE_STATS": "true"}
        former = {name: value for name, value in properties.items() if name != "comment"}
        entry = kinds.Table(
            dbName=table.schema,
            tableName=table.name,
            owner=self._user or "waldelta",
            tableType="VIRTUAL_VIEW" if is_view else "EXTERNAL_TABLE",
            partitionKeys=[],
            parameters=former | parameters | dict(table.properties),
            viewOriginalText=table.query,
            viewExpandedText=table.query,
            sd=kinds.StorageDescriptor(
                cols=[
                    kinds.FieldSchema(
                        column.name,
                        hive_type(column.spark_type),
                        (column.comment or "")[:_MOST_COMMENT] or None,
                    )
                    for column in table.columns
                ],
                location=None if is_view else table.location,
                inputFormat=INPUT,
                outputFormat=OUTPUT,
                compressed=False,
                numBuckets=-1,
                bucketCols=[],
                sortCols=[],
                parameters={},
                serdeInfo=kinds.SerDeInfo(serializationLib=SERDE, parameters=serde),
            ),
        )
        if self._catalog is not None:
            entry.catName = self._catalog
        return entry


def _schema_properties(table: Registration) -> dict[str, str]:
    """Returns a view's schema as Spark stores it, since the metastore's is in lower case."""
    text = json.dumps({"type": "struct", "fields": [column.json_field for column in table.columns]})
    parts = [text[at : at + _MOST_PROPERTY] for at in range(0, len(text), _MOST_PROPERTY)]
    name = "spark.sql.sources.schema"
    return {f"{name}.numParts": str(len(parts))} | {
        f"{name}.part.{number}": part for number, part in enumerate(parts)
    }


def _to_registered(entry: Any) -> Registered:
    properties = entry.parameters or {}
    serde = entry.sd.serdeInfo.parameters or {} if entry.sd.serdeInfo is not None else {}
    is_view = entry.tableType == "VIRTUAL_VIEW"
    location = properties.get(LOCATION) if is_view else serde.get("path") or entry.sd.location
    return Registered(
        entry.dbName,
        entry.tableName,
        location or "",
        tuple(column.name for column in entry.sd.cols),
        properties,
        entry,
    )


def _text(err: BaseException) -> str:
    return str(getattr(err, "message", None) or err).splitlines()[0][:300]
