"""Opens the catalog of ``target.catalog`` by its Airflow connection."""

from __future__ import annotations

import os
from collections.abc import Mapping

from waldelta.catalogs.catalog import Catalog
from waldelta.config.airflow_connection import read_connection
from waldelta.config.catalog import CATALOG_CONNECTIONS, CatalogSettings


def open_catalog(settings: CatalogSettings, environment: Mapping[str, str] = os.environ) -> Catalog:
    """Returns the catalog; it is connected to at the first call.

    Raises ConfigError for a connection that isn't there, can't be read, or doesn't open a catalog
    of this type.
    """
    connection = None
    if settings.conn_id is not None:
        connection = read_connection(
            settings.conn_id,
            CATALOG_CONNECTIONS[settings.type],
            f"a catalog of type {settings.type}",
            environment,
        )
    if settings.type == "glue":
        from waldelta.catalogs.glue import GlueCatalog

        return GlueCatalog(connection, settings.name)
    assert connection is not None  # noqa: S101 - the settings need one for these types
    if settings.type == "hive":
        from waldelta.catalogs.hive import HiveMetastore

        return HiveMetastore(connection, settings.name)
    from waldelta.catalogs.unity import UnityCatalog

    return UnityCatalog(connection, str(settings.name))
