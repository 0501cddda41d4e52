"""What all catalogs have in common: an entry for a Delta table, and the calls that keep it."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from waldelta.errors import CatalogNameRefused
from waldelta.lake.delta_statements import CATALOG_PROVIDER

# The properties that mark an entry as a pipeline's, with its target, the target's location, and a
# digest of what the entry was made from.
PIPELINE, TARGET, LOCATION, DEFINITION = (
    "waldelta.pipeline",
    "waldelta.table",
    "waldelta.location",
    "waldelta.definition",
)
# Words that Trino and Athena take for a name only in quotes; Spark and Hive quote many of them.
_WORDS = (
    "alter and as between by case cast constraint create cross cube current_date current_time"
    " current_timestamp current_user deallocate delete describe distinct drop else end escape"
    " except execute exists extract false for from full group grouping having in inner insert"
    " intersect into is join left like localtime localtimestamp natural normalize not null on or"
    " order outer prepare recursive right rollup select skip table then trim true uescape union"
    " unnest using values when where with"
)
RESERVED_WORDS = frozenset(_WORDS.split())
# By these Spark, Trino and Athena find out that an entry is of a Delta table.
DELTA_PROPERTIES = {"spark.sql.sources.provider": CATALOG_PROVIDER, "EXTERNAL": "TRUE"}


@dataclass(frozen=True, slots=True)
class EntryColumn:
    """A column as Delta's log has it: its type as Spark's ``simpleString``, and as JSON."""

    name: str
    spark_type: str
    json_type: Any
    is_nullable: bool = True
    comment: str | None = None

    @property
    def json_field(self) -> dict[str, Any]:
        """Returns the field as in the JSON of Spark's schemas."""
        comment = {} if self.comment is None else {"comment": self.comment}
        return {
            "name": self.name,
            "type": self.json_type,
            "nullable": self.is_nullable,
            "metadata": comment,
        }


@dataclass(frozen=True, slots=True)
class Registration:
    """An entry to be made: a table at ``location``, or the view ``query``."""

    schema: str
    name: str
    location: str
    columns: tuple[EntryColumn, ...]
    comment: str | None
    properties: Mapping[str, str]
    query: str | None = None


@dataclass(frozen=True, slots=True)
class Registered:
    """An entry that a catalog has; ``entry`` is the catalog's own object of it.

    ``columns`` are the names of its columns, in lower case where the catalog ignores case.
    """

    schema: str
    name: str
    location: str
    columns: tuple[str, ...]
    properties: Mapping[str, str]
    entry: Any = field(default=None, repr=False, compare=False)

    @property
    def label(self) -> str:
        """The entry's name with its schema, for messages."""
        return f"{self.schema}.{self.name}"


class Catalog(Protocol):
    """A connection to a catalog; every call raises CatalogError.

    Names are those that ``stored_name`` returns.
    """

    def stored_name(self, name: str) -> str:
        """Returns a name as the catalog stores it; raises CatalogNameRefused."""

    def tables(self, schema: str, names: Collection[str]) -> dict[str, Registered]:
        """Returns the entries of these names, without those that aren't there."""

    def create_schema(self, schema: str, properties: Mapping[str, str]) -> None:
        """Create a schema unless there is one."""

    def create(self, table: Registration) -> None:
        """Make an entry; raises CatalogTableForeign when there is one by then."""

    def alter(self, table: Registration, current: Registered) -> None:
        """Replace an entry; properties that other programs have set stay."""

    def drop(self, current: Registered) -> None:
        """Remove an entry; the table's files stay."""


@dataclass(frozen=True, slots=True)
class NameRule:
    """The names that a catalog takes, which it stores in lower case."""

    catalog: str
    longest: int
    pattern: str = r"[a-z0-9_]+"
    characters: str = "letters without accents, digits and underscores"

    def check(self, name: str) -> str:
        """Returns the name in lower case; raises CatalogNameRefused."""
        stored = name.lower()
        if len(stored.encode()) > self.longest:
            why = f"it is longer than {self.longest} bytes"
        elif not re.fullmatch(self.pattern, stored):
            why = f"it has other characters than {self.characters}"
        else:
            return stored
        raise CatalogNameRefused(
            f"{self.catalog} can't have the name {name!r}: {why}: give the target another name"
            " (target.tables, name), or read it by its path"
        )


def object_location(uri: str) -> str:
    """Returns a target's URI by the scheme that readers outside of Hadoop know."""
    return re.sub(r"\As3a://", "s3://", uri)


def is_same_location(first: str, second: str) -> bool:
    """Returns whether two URIs name one folder; a catalog may have shortened ``file:///``."""
    return _normal(first) == _normal(second)


def is_within(location: str, root: str) -> bool:
    """Returns whether a location is in the folder ``root``."""
    (scheme, place), (of_root, folder) = _normal(location), _normal(root)
    return scheme == of_root and place.startswith(f"{folder}/")


def _normal(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    path = parts.path.rstrip("/")
    return parts.scheme.replace("s3a", "s3").replace("s3n", "s3") or "file", parts.netloc + path
