"""Queries to the PostgreSQL server: connections, catalogs, published tables and columns, lock
waits.
"""

from waldelta.postgres.catalog import (
    CatalogRelation,
    Leaf,
    PublishedTable,
    TableColumn,
    TableId,
)
from waldelta.postgres.connection import Connection, connect, describe
from waldelta.postgres.type_catalog import PgType

__all__ = [
    "CatalogRelation",
    "Connection",
    "Leaf",
    "PgType",
    "PublishedTable",
    "TableColumn",
    "TableId",
    "connect",
    "describe",
]
