"""Draft: a pipeline file for some tables of a database, as text with comments, and the SQL that a
superuser, or the tables' owner, runs for it: the role that reads, its grants, the publications.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

import yaml

from waldelta.config import PipelineFile, load_pipeline_file
from waldelta.errors import ConfigError
from waldelta.grants import Attribute, Grant, Need, on_one_line, sql_name, statements
from waldelta.postgres import NAME_BYTES, CatalogRelation
from waldelta.postgres.publication_checks import needs_of
from waldelta.quantities import counted, first_of, size
from waldelta.stages.setup.draft.inventory import FoundTable, Inventory
from waldelta.stages.setup.facts.publications import (
    PublicationState,
    plan_publications,
    wanted_publication,
)
from waldelta.stages.setup.setup import STOP_ON_ERROR, SetupPlan
from waldelta.types.array import Array
from waldelta.types.text import Characters
from waldelta.types.type_map import target_type

DEFAULT_SCHEDULE = "*/5 * * * *"
_PLAIN = re.compile(r"\A[a-z_][a-z0-9_.]*\Z")
_MOST_EXCLUDED = 20
_IDENTITIES = {"d": "default", "i": "using index", "f": "full", "n": "nothing"}
# The first words of the file, by which it is known as init's own.
HEADER = "-- Written by `waldelta init`"


def pipeline_name(text: str) -> str:
    """Returns a name for a pipeline, made from a database's name.

    >>> pipeline_name("Shop-2 (test)"), pipeline_name("1")
    ('shop_2_test', 'p_1')
    """
    name = re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "pipeline"
    name = name if name[0].isalpha() else f"p_{name}"
    return name[: NAME_BYTES - len("_inserts_pub")]


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed pipeline over some tables of an inventory."""

    inventory: Inventory
    tables: tuple[FoundTable, ...]
    conn_id: str
    pipeline: str
    root: str
    schedule: str = DEFAULT_SCHEDULE
    # The row filter of the only table.
    where: str | None = None

    @property
    def slot(self) -> str:
        """Returns the slot's name."""
        return f"{self.pipeline}_cdc"

    @property
    def reader(self) -> ReaderRole:
        """Returns the role that the SQL grants to."""
        return reader_of(self.inventory, self.tables, self.pipeline)

    @property
    def taken(self) -> list[str]:
        """Returns which of the names of its slot and publications the server has already."""
        publications = {f"{self.pipeline}_{suffix}" for suffix in ("pub", "inserts_pub")}
        return [
            *(["slot " + self.slot] if self.slot in self.inventory.slots else []),
            *(f"publication {name}" for name in sorted(publications & self.inventory.publications)),
        ]

    def with_free_names(self) -> Draft:
        """Returns the draft under the first name, by a number behind it, that isn't taken."""
        numbered = (replace(self, pipeline=f"{self.pipeline}_{n}") for n in count(2))
        return next(draft for draft in chain([self], numbered) if not draft.taken)

    def as_yaml(self) -> str:
        """Returns the pipeline file's text."""
        return "\n".join([*self._head(), *self._publications(), *self._tail(), ""])

    def load(self) -> PipelineFile:
        """Returns the file as the product reads it; raises ConfigError for what it refuses, and for
        names that the server has already.
        """
        if self.taken:
            raise ConfigError(
                f"the server has {' and '.join(self.taken)} already, which pipeline"
                f" {self.pipeline!r} would create: choose another pipeline name (--pipeline); or,"
                " if nothing needs them, drop them"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"{self.pipeline}.yml"
            path.write_text(self.as_yaml(), encoding="utf-8")
            return load_pipeline_file(path)

    def as_sql(self) -> str:
        """Returns the SQL for the tables' owner, or a superuser: role, grants, publications."""
        return owners_sql(self.load(), self.inventory, self.tables, {})

    def _head(self) -> Iterator[str]:
        yield "# Written by `waldelta init`. All keys: docs/reference/pipeline-file.md"
        yield f"pipeline: {_scalar(self.pipeline)}"
        yield "source:"
        yield f"  conn_id: {_scalar(self.conn_id)}"
        yield f"  slot: {self.slot}"
        yield "  publications:"

    def _publications(self) -> Iterator[str]:
        keyed = [table for table in self.tables if table.identity]
        keyless = [table for table in self.tables if not table.identity]
        if keyed:
            yield from self._publication("pub", keyed)
        if keyless:
            yield from self._publication("inserts_pub", keyless, publish="[insert, truncate]")

    def _publication(
        self, suffix: str, tables: Iterable[FoundTable], publish: str | None = None
    ) -> Iterator[str]:
        tables = list(tables)
        yield f"    - name: {self.pipeline}_{suffix}"
        if publish is not None:
            yield f"      publish: {publish}  # updates and deletes need a key"
        if any(table.is_root for table in tables):
            yield "      publish_via_partition_root: true  # a partitioned table is one target"
        yield "      tables:"
        for number, table in enumerate(tables):
            yield f"        # {on_one_line(facts_of(table))}"
            for note in notes_of(table):
                yield f"        # {on_one_line(note)}"
            yield f"        - name: {_scalar(str(table.id))}"
            if self.where is not None:
                yield f"          where: {_scalar(self.where)}"
            elif number == 0:
                over = " over columns of the key" if table.identity and not table.is_full else ""
                yield f"          # where: <row filter in SQL{over}>"
            if number == 0:
                yield "          # columns: [<columns to replicate; by default all>]"

    def _tail(self) -> Iterator[str]:
        excluded = self.inventory.excluded
        if excluded:
            yield "    # Left out:"
            for table in excluded[:_MOST_EXCLUDED]:
                yield f"    # {on_one_line(f'{table.id}: {table.reason}')}"
        if len(excluded) > _MOST_EXCLUDED:
            yield f"    # and {len(excluded) - _MOST_EXCLUDED} more"
        yield "target:"
        yield f"  root: {_scalar(self.root)}"
        yield f"schedule: {_scalar(self.schedule)}  # of the DAG, in UTC"


def _scalar(text: str) -> str:
    """Returns a text as YAML writes it on one line.

    >>> _scalar("public.orders"), _scalar('public."Odd: name"')
    ('public.orders', '"public.\\\\"Odd: name\\\\""')
    """
    if _PLAIN.match(text) and yaml.safe_load(text) == text:
        return text
    return yaml.safe_dump(text, default_style='"', width=1 << 30, allow_unicode=True).strip()


def facts_of(table: FoundTable) -> str:
    """Returns rows, size, key and replica identity in one line."""
    relation, whole = table.relation, table.size_bytes + table.toast_bytes
    rows = "not analyzed yet" if table.rows is None else f"≈ {counted(table.rows, 'row')}"
    identity = _IDENTITIES[relation.replica_identity]
    return f"{rows}, {size(whole)}, {_key_of(relation)}, replica identity {identity}"


def _key_of(relation: CatalogRelation) -> str:
    """Returns the columns that identify rows; with replica identity full, all of them do."""
    if relation.primary_key:
        return f"key ({', '.join(relation.primary_key)})"
    if relation.replica_identity == "i" and relation.identity_columns:
        return f"key of an index ({', '.join(relation.identity_columns)})"
    return "key of all columns" if relation.replica_identity == "f" else "no key"


def notes_of(table: FoundTable) -> Iterator[str]:
    """Yields a line for each thing to know before the table is replicated."""
    if not table.identity:
        yield (
            f"{why_keyless(table)}, so only inserts and truncates are published:"
            f" {_remedy_of_keyless(table)}; then move it to the first publication"
        )
    elif table.is_full:
        yield "replica identity full: each UPDATE and DELETE writes the whole old row to WAL"
    if table.is_root:
        yield (
            f"partition root with {counted(len(table.leaves), 'partition')}: one target; partitions"
            " aren't listed singly"
        )
    if table.wide:
        toasted = f", {size(table.toast_bytes)} stored out of line" if table.toast_bytes else ""
        yield (
            f"big values in {first_of(table.wide)}{toasted}: a list of `columns` leaves out what"
            " the lake doesn't need"
        )
    if generated := [c.name for c in table.relation.columns if c.generated]:
        yield f"generated, not published: {', '.join(generated)}"
    stored = [(column, target_type(column.type)) for column in table.relation.columns]
    if texts := [
        f"{column.name} ({column.type.name})"
        for column, kind in stored
        if kind.is_text and not isinstance(kind, Characters)
    ]:
        yield f"text in the lake: {first_of(texts)}"
    if moments := [
        column.name
        for column, kind in stored
        if column.name in table.identity and kind.may_be_raw and not isinstance(kind, Array)
    ]:
        yield (
            f"a copy stops at a value of key column {', '.join(moments)} that the lake's type can't"
            " hold (infinity, NaN): name it under target.types.text if there are such"
        )
    if table.has_row_security:
        yield "row-level security: the role needs bypassrls where a policy hides rows from it"


def why_keyless(table: FoundTable) -> str:
    """Returns why nothing identifies a table's old rows."""
    if not table.relation.identity_columns:
        return table.relation.why_unidentified
    if table.is_identity_generated:
        return "a generated column is part of its replica identity"
    return "its partitions have another replica identity than the root"


def _remedy_of_keyless(table: FoundTable) -> str:
    relation, alter = table.relation, f"alter table {table.id} replica identity"
    if relation.identity_columns and not table.is_identity_generated:
        return "give all the same"
    if relation.replica_identity == "n" and relation.primary_key:
        return f"{alter} default"
    is_bare = not (relation.primary_key or relation.has_deferrable_key)
    return f"add a primary key, or: {alter} full" if is_bare else f"{alter} full"


@dataclass(frozen=True, slots=True)
class ReaderRole:
    """The role that a pipeline reads with; ``is_new``: the SQL creates it."""

    name: str
    is_new: bool


def reader_of(inventory: Inventory, tables: Sequence[FoundTable], pipeline: str) -> ReaderRole:
    """Returns the connection's own role, or one for the pipeline where the own may do too much."""
    if inventory.is_superuser or any(table.relation.owned for table in tables):
        name = f"{pipeline}_reader"
        return ReaderRole(name, name not in inventory.roles)
    return ReaderRole(inventory.role, is_new=False)


def owners_sql(
    file: PipelineFile,
    inventory: Inventory,
    tables: Sequence[FoundTable],
    actual: Mapping[str, PublicationState],
) -> str:
    """Returns the script for a pipeline file with these tables.

    ``actual`` are its publications that exist. The slot isn't part of the script: the role creates
    it by ``setup``, once a run will read it.
    """
    reader = reader_of(inventory, tables, file.pipeline)
    role = sql_name(reader.name)
    database = on_one_line(inventory.database)
    again = on_one_line(f"waldelta init {file.source.conn_id} --sql FILE")
    lines = [
        f"{HEADER}; after a change of the pipeline file, `{again}` writes it again.",
        f"-- Run it by psql -f in database {database}.",
        # The publications' script begins with it; grants must stop at the first error too.
        STOP_ON_ERROR,
        "-- By a superuser: the role that reads, and its grants.",
    ]
    if reader.is_new:
        lines.append(f"create role {role} login;  -- then set its password: \\password {role}")
    lines += statements(role, _needs(inventory, tables))
    lines.append("-- By the tables' owner, or a superuser: the publications.")
    lines += _publications(file, actual)
    return "\n".join([*lines, *_identities(file, tables), ""])


def _needs(inventory: Inventory, tables: Sequence[FoundTable]) -> Iterator[Need]:
    on_rds = "on Amazon RDS instead: grant rds_replication"
    yield Attribute("replication", f"for the slot; {on_rds}")
    if any(table.has_row_security for table in tables):
        yield Attribute("bypassrls", "row-level security would hide rows from copies")
    yield Grant("connect on database", sql_name(inventory.database))
    for schema in sorted({table.id.schema for table in tables}):
        yield Grant("usage on schema", sql_name(schema))
    for table in tables:
        name = sql_name(table.id.schema, table.id.name)
        yield Grant("select on", name, "for copies, repairs, and missing values")
    for table in tables:
        if table.is_root:
            yield from needs_of(table.leaves)


def _publications(file: PipelineFile, actual: Mapping[str, PublicationState]) -> Iterator[str]:
    wanted = [
        wanted_publication(file.pipeline, entry, file.source.slot)
        for entry in file.source.publications
        if entry.manage
    ]
    planned = plan_publications(wanted, actual)
    if not planned:
        yield "-- They are as the pipeline file says."
        return
    script = SetupPlan((), planned, create_slot=False, source=file.source).as_sql()
    yield script.removeprefix(f"{STOP_ON_ERROR}\n")


def _identities(file: PipelineFile, tables: Sequence[FoundTable]) -> Iterator[str]:
    keyless = [
        table
        for table in tables
        if not table.identity
        and not any(
            {"update", "delete"} & set(entry.publish)
            for entry in file.source.publications
            if entry.entries_of((table.id.schema, table.id.name))
        )
    ]
    if keyless:
        yield "-- To replicate updates and deletes of the other tables too:"
    for table in keyless:
        for relation in dict.fromkeys([table.id, *(leaf.id for leaf in table.leaves)]):
            name = sql_name(relation.schema, relation.name)
            yield f"-- {on_one_line(f'alter table {name} replica identity full;')}"
