"""``target.catalog``: where readers find the targets by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from waldelta.config.airflow_connection import ConnectionTypes
from waldelta.config.parse_text import StrictModel, refuse_if
from waldelta.config.stores import STORES

CatalogType = Literal["hive", "glue", "unity"]
CATALOG_CONNECTIONS: Mapping[CatalogType, ConnectionTypes] = {
    "hive": ConnectionTypes(
        ("hive_metastore",),
        "hive-metastore://metastore.example:9083",
        "--conn-host HOST --conn-port 9083",
    ),
    "glue": STORES["s3"].connections,
    "unity": ConnectionTypes(
        ("databricks", "http"), "databricks://:TOKEN@workspace.example", "--conn-host HOST"
    ),
}
SOURCE_SCHEMA = "{schema}"
# Catalogs have their own views in these.
RESERVED_SCHEMAS = frozenset({"information_schema", "sys"})


class CatalogSettings(StrictModel):
    """Catalog that every target is registered in by its name, after its first commit."""

    type: CatalogType = Field(
        description="Hive metastore (Thrift), AWS Glue, or Unity Catalog (REST API)"
    )
    name: str | None = Field(
        None,
        min_length=1,
        description=(
            "name of the catalog (required for Unity), Glue's catalog id, or the catalog of a"
            " Hive 3 metastore"
        ),
    )
    schema_name: str = Field(
        SOURCE_SCHEMA,
        alias="schema",
        min_length=1,
        description=(
            "schema (database) of the tables; {schema} is the source table's, as in raw_{schema}"
        ),
    )
    conn_id: str | None = Field(
        None,
        min_length=1,
        description=(
            "Airflow connection that opens the catalog; for Glue, by default the machine's own"
            " identity"
        ),
    )
    cut_views: bool = Field(
        False,
        description=(
            "true: the schema <schema>_cut has a view of each target as of the newest consistent"
            " cut (Hive metastore only)"
        ),
    )

    @field_validator("schema_name")
    @classmethod
    def _template(cls, value: str) -> str:
        refuse_if(
            not re.fullmatch(r"\w+", value.replace(SOURCE_SCHEMA, "s"), re.ASCII),
            f"schema has letters, digits, underscores and {SOURCE_SCHEMA}",
        )
        refuse_if(
            value.lower() in RESERVED_SCHEMAS,
            f"{value} is the catalog's own schema: choose another",
        )
        return value

    @model_validator(mode="after")
    def _fits_type(self) -> Self:
        refuse_if(
            self.conn_id is None and self.type != "glue",
            f"type {self.type} needs conn_id: name the Airflow connection that opens the catalog",
        )
        refuse_if(
            self.name is None and self.type == "unity",
            "type unity needs name: the catalog in which the tables are registered",
        )
        refuse_if(
            self.cut_views and self.type != "hive",
            f"cut_views needs type hive: views of another catalog can't be made for type"
            f" {self.type}",
        )
        return self

    def schema_of(self, source_schema: str) -> str:
        """Returns the catalog's schema for a target of this schema."""
        return self.schema_name.replace(SOURCE_SCHEMA, source_schema)
