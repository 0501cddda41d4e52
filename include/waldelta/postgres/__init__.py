"""Queries to the PostgreSQL server: connections, catalogs, published tables and columns, lock
waits.
"""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
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
__getattr__ = lazy_exports(
    __name__,
    catalog="CatalogRelation Leaf PublishedTable TableColumn TableId",
    connection="Connection connect describe",
    type_catalog="PgType",
)
