"""Opens the catalog of ``target.catalog`` by its Airflow connection."""

from __future__ import annotations

import os
from collections.abc import Mapping

from waldelta.catalogs.catalog import Catalog
from waldelta.config.airflow_connection import AirflowConnection, read_connection
from waldelta.config.catalog import CatalogSettings, CatalogType
from waldelta.errors import ConfigError

# The types of connections that open a catalog, and an example of each.
_CONNECTIONS: Mapping[CatalogType, tuple[tuple[str, ...], str]] = {
    "hive": (("hive_metastore",), "hive-metastore://metastore.example:9083"),
    "glue": (("aws",), "aws://KEY:SECRET@/?region_name=eu-central-1"),
    "unity": (("databricks", "http"), "databricks://:TOKEN@workspace.example"),
}


def open_catalog(settings: CatalogSettings, environment: Mapping[str, str] = os.environ) -> Catalog:
    """Returns the catalog; it is connected to at the first call.

    Raises ConfigError for a connection that isn't there, can't be read, or doesn't open a catalog
    of this type.
    """
    connection = _read(settings, environment)
    if settings.type == "glue":
        from waldelta.catalogs.glue import GlueCatalog

        return GlueCatalog(connection, settings.name)
    assert connection is not None  # noqa: S101 - the settings need one for these types
    if settings.type == "hive":
        from waldelta.catalogs.hive import HiveMetastore

        return HiveMetastore(connection, settings.name)
    from waldelta.catalogs.unity import UnityCatalog

    return UnityCatalog(connection, str(settings.name))


def _read(settings: CatalogSettings, environment: Mapping[str, str]) -> AirflowConnection | None:
    if settings.conn_id is None:
        return None
    types, example = _CONNECTIONS[settings.type]
    connection = read_connection(settings.conn_id, example, environment)
    if connection.conn_type not in types:
        raise ConfigError(
            f"{connection.variable} has type {connection.conn_type!r}, which doesn't open a catalog"
            f" of type {settings.type}: choose a connection of type {' or '.join(types)}"
        )
    return connection
