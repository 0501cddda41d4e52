"""The pipeline file's ``source``: the PostgreSQL server, its slot, and what the slot reads."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from waldelta.config.parse_text import StrictModel, refuse_if

Operation = Literal["insert", "update", "delete", "truncate"]
TableName = Annotated[
    str,
    Field(description="name with its schema, as PostgreSQL prints it, for example public.flights"),
]

_SLOT = re.compile(r"\A[a-z0-9_]{1,63}\Z")
_NAME_PART = re.compile(r'"(?:[^"]|"")+"|[^".\s]+')


def split_table_name(name: str) -> tuple[str, str]:
    """Split ``schema.table`` into its parts; parts with dots or upper case are double-quoted as in
    SQL.

    >>> split_table_name('public."odd.name"')
    ('public', 'odd.name')
    """
    parts = _NAME_PART.findall(name)
    refuse_if(
        len(parts) != 2 or ".".join(parts) != name,
        f"{name!r} is not a schema-qualified table name: write schema.table",
    )
    schema, table = (p[1:-1].replace('""', '"') if p.startswith('"') else p for p in parts)
    return schema, table


def is_pattern(name: str) -> bool:
    """Returns whether a table's name is a pattern: an unquoted ``*`` is in it.

    Raises ValueError for one in the schema.

    >>> [is_pattern(name) for name in ("sales.*", "sales.order_*", 'sales."a*b"')]
    [True, True, False]
    """
    schema, table = _NAME_PART.findall(name)
    has_star = ["*" in part and not part.startswith('"') for part in (schema, table)]
    refuse_if(
        has_star[0], f"{name!r}: a pattern's schema is written out: move * to the table's part"
    )
    return has_star[1]


def _matches(name: str, table: tuple[str, str]) -> bool:
    """Returns whether a table (schema and name) has this name, or matches this pattern."""
    parts = split_table_name(name)
    if not is_pattern(name):
        return parts == table
    fitting = ".*".join(re.escape(part) for part in parts[1].split("*"))
    return parts[0] == table[0] and re.fullmatch(fitting, table[1], re.DOTALL) is not None


def _list_duplicates(names: Iterable[str]) -> str:
    return ", ".join(sorted(name for name, count in Counter(names).items() if count > 1))


class TableEntry(StrictModel):
    """A table of a publication, or a pattern of tables."""

    name: str = Field(
        description=(
            "name with its schema, as PostgreSQL prints it, for example public.flights; or a"
            " pattern, such as sales.order_*"
        )
    )
    where: str | None = Field(
        None, description="row filter in PostgreSQL's SQL; the publisher evaluates it"
    )
    columns: tuple[str, ...] | None = Field(
        None, min_length=1, description="column list; without it all columns are published"
    )
    exclude: tuple[TableName, ...] = Field(
        (), description="tables or patterns that this pattern leaves out"
    )

    @field_validator("name", "exclude")
    @classmethod
    def _check_qualified(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        for name in [value] if isinstance(value, str) else value:
            split_table_name(name)
            is_pattern(name)
        return value

    @model_validator(mode="after")
    def _fits_a_pattern(self) -> Self:
        outside = [n for n in self.exclude if split_table_name(n)[0] != self.parts[0]]
        refuse_if(
            self.exclude and not self.is_pattern,
            f"exclude is for patterns, and {self.name} is a table: remove it",
        )
        refuse_if(
            self.columns is not None and self.is_pattern,
            f"columns can't be combined with the pattern {self.name}: list the table itself too",
        )
        refuse_if(
            outside,
            f"exclude has {', '.join(outside)}, which {self.name} can't match: name tables of"
            f" schema {self.parts[0]}",
        )
        return self

    @property
    def parts(self) -> tuple[str, str]:
        """Schema and table name, unquoted."""
        return split_table_name(self.name)

    @property
    def is_pattern(self) -> bool:
        """Whether the name stands for all tables that it matches."""
        return is_pattern(self.name)

    def matches(self, table: tuple[str, str]) -> bool:
        """Returns whether the entry publishes this table (schema and name)."""
        return _matches(self.name, table) and not any(_matches(n, table) for n in self.exclude)


class Publication(StrictModel):
    """A publication that the slot reads: tables, schemas or everything, and the operations."""

    name: str = Field(
        min_length=1,
        max_length=63,
        description="setup creates it and marks it with a comment",
    )
    publish: tuple[Operation, ...] = Field(
        ("insert", "update", "delete", "truncate"), description="published operations"
    )
    publish_via_partition_root: bool = Field(
        False,
        description="true: a partitioned table is one target, instead of each partition",
    )
    publish_generated_columns: Literal["none", "stored"] = Field(
        "none",
        description=(
            "stored: also publish stored generated columns of tables without a column list"
            " (PostgreSQL 18+)"
        ),
    )
    tables: tuple[TableEntry, ...] = Field((), description="published tables")
    all_tables: bool = Field(False, description="true: publish every table; needs a superuser")
    schemas: tuple[str, ...] = Field(
        (), description="publish every table of these schemas; needs a superuser"
    )
    manage: bool = Field(
        True, description="false: the publication exists already, and setup never alters it"
    )
    accept_future_tables: bool = Field(
        False,
        description=(
            "true: accept that updates and deletes of a later table without a key fail;"
            " required for all_tables or schemas that publish these"
        ),
    )
    new_tables: Literal["report", "adopt"] = Field(
        "report",
        description=(
            "tables created later that match a pattern: report warns, adopt publishes and copies"
            " them"
        ),
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        doubled = _list_duplicates(t.name for t in self.tables)
        refuse_if(
            self.all_tables and (self.tables or self.schemas),
            "all_tables stands alone: remove tables and schemas",
        )
        refuse_if(
            self.manage and not (self.all_tables or self.tables or self.schemas),
            "name what it publishes: tables, schemas or all_tables (or manage: false)",
        )
        refuse_if(doubled, f"listed twice: {doubled}")
        refuse_if(
            not self.patterns and self.new_tables == "adopt",
            "new_tables: adopt needs a pattern in tables, such as sales.*",
        )
        refuse_if(
            self.patterns and not self.manage,
            "manage: false and patterns exclude each other: setup never alters the publication,"
            f" so list its tables instead of {', '.join(t.name for t in self.patterns)}",
        )
        return self

    @property
    def patterns(self) -> tuple[TableEntry, ...]:
        """The entries of ``tables`` that are patterns."""
        return tuple(entry for entry in self.tables if entry.is_pattern)

    def adopts(self, table: tuple[str, str]) -> bool:
        """Returns whether runs publish and copy this table (schema and name) by themselves."""
        return self.new_tables == "adopt" and any(e.is_pattern for e in self.entries_of(table))

    def entries_of(self, table: tuple[str, str]) -> list[TableEntry]:
        """Returns the entry that names a table (schema and name), else the patterns it matches."""
        matching = [entry for entry in self.tables if entry.matches(table)]
        return [entry for entry in matching if not entry.is_pattern] or matching


class Options(StrictModel):
    """Options of the pgoutput plugin and of consumption."""

    binary: bool = Field(
        False,
        description=(
            "true: values in PostgreSQL's binary format; setup refuses types without a binary"
            " reader"
        ),
    )
    streaming: Literal["off", "on", "parallel"] = Field(
        "off",
        description=(
            "on: large transactions arrive before they commit; parallel: the same in protocol"
            " 4 (PostgreSQL 16+)"
        ),
    )
    two_phase: bool = Field(
        False,
        description=(
            "true: prepared transactions arrive at PREPARE; only for a slot created with it"
        ),
    )
    origin: Literal["any", "none"] = Field(
        "any",
        description=(
            "none: leave out changes that reached the source by replication (PostgreSQL 16+)"
        ),
    )
    messages: bool = Field(
        False, description="true: store logical messages in <root>/_waldelta/messages"
    )
    acknowledge: Literal["get", "peek", "advance"] = Field(
        "get",
        description=(
            "how the slot moves past landed changes: get compares what the slot returns, and needs"
            " a free slot for a copy; peek compares first and needs none; advance doesn't compare"
        ),
    )

    @field_validator("streaming", mode="before")
    @classmethod
    def _yaml_boolean(cls, value: object) -> object:
        # YAML reads a bare on or off as a boolean.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class Source(StrictModel):
    """The PostgreSQL server, its slot and publications."""

    conn_id: str = Field(
        min_length=1,
        description=(
            "Airflow connection of type postgres; outside Airflow the variable"
            " AIRFLOW_CONN_<CONN_ID>, as URI or JSON"
        ),
    )
    read_from: str | None = Field(
        None,
        min_length=1,
        description=(
            "Airflow connection of a standby that has the slot (PostgreSQL 16+); not with failover"
        ),
    )
    slot: str = Field(description=("name of the logical replication slot; one pipeline per slot"))
    adopt_slot: bool = Field(
        False,
        description=(
            "true: setup takes over a slot that another program has read, which then misses changes"
        ),
    )
    failover: bool | None = Field(
        None,
        description=(
            "true: PostgreSQL keeps the slot on standbys too (PostgreSQL 17+); without the"
            " key an existing slot stays as it is"
        ),
    )
    publications: tuple[Publication, ...] = Field(
        min_length=1, description="publications that the slot reads"
    )
    options: Options = Field(Options(), description="options of pgoutput and of acknowledgement")

    @field_validator("slot")
    @classmethod
    def _slot_name(cls, value: str) -> str:
        refuse_if(
            not _SLOT.match(value),
            "slot names have 1 to 63 lower-case letters, digits and underscores",
        )
        return value

    @model_validator(mode="after")
    def _one_server_has_the_slot(self) -> Self:
        doubled = _list_duplicates(self.publication_names)
        refuse_if(doubled, f"publications listed twice: {doubled}")
        refuse_if(
            self.read_from is not None and self.failover is not None,
            "read_from and failover exclude each other: a standby's own slot is kept on no"
            " other server",
        )
        refuse_if(
            self.read_from == self.conn_id,
            "read_from is conn_id: name the standby's connection, or leave it out to read from"
            " the primary",
        )
        return self

    @property
    def conn_ids(self) -> list[str]:
        """The connections that a run needs: the primary's, and that of the standby it reads from,
        if any.
        """
        return [self.conn_id, *([self.read_from] if self.read_from is not None else [])]

    @property
    def publication_names(self) -> list[str]:
        """The publications' names, as listed."""
        return [publication.name for publication in self.publications]
