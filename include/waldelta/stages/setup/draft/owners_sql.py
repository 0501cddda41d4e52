"""The SQL of init: what a superuser, or the tables' owner, runs for a pipeline file: the role that
reads, its grants, and the publications.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from waldelta.config import PipelineFile
from waldelta.grants import Attribute, Grant, Need, on_one_line, sql_name, statements
from waldelta.postgres.partition_access import needs_of
from waldelta.stages.setup import SetupPlan
from waldelta.stages.setup.draft.inventory import FoundTable, Inventory
from waldelta.stages.setup.facts import PublicationState
from waldelta.stages.setup.facts.publications import plan_publications, wanted_publication
from waldelta.stages.setup.setup import STOP_ON_ERROR

# The first words of the file, by which it is known as init's own.
HEADER = "-- Written by `waldelta init`"


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
    script = SetupPlan((), planned, create_slot=False, slot=file.source.slot).as_sql()
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
        yield "-- To replicate updates and deletes of tables without a key too:"
    for table in keyless:
        for relation in dict.fromkeys([table.id, *(leaf.id for leaf in table.leaves)]):
            name = sql_name(relation.schema, relation.name)
            yield f"-- {on_one_line(f'alter table {name} replica identity full;')}"
