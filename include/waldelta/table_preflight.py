"""What would break one table of a publication, or its target; a part of preflight."""

from __future__ import annotations

from collections.abc import Iterator

from waldelta.catalog import Leaf, Relation
from waldelta.effective_publication import is_overruled, own_leaves
from waldelta.finding import Finding, lacking, problem, size, warning
from waldelta.publication import PublicationState, PublicationTable
from waldelta.source_facts import Facts, ServerFacts, TableFacts
from waldelta.types.wire_format import has_wire_format

_RELKINDS = {"v": "a view", "m": "a materialized view", "f": "a foreign table", "S": "a sequence", "c": "a type"}


def judge_table(state: PublicationState, table: PublicationTable, facts: Facts) -> Iterator[Finding]:
    """What is wrong with one table of a publication."""
    found = facts.tables.get(table.id)
    where = f"publication {state.name!r}, table {table.id}"
    if found is None:
        yield problem(f"{where}: it does not exist: check schema and spelling")
        return
    relation = found.relation
    if unfit := _unfit(relation):
        yield problem(f"{where}: {unfit}")
        return
    if absent := [c for c in table.columns or () if c not in relation.column_names]:
        yield problem(f"{where}: column {', '.join(absent)} does not exist; it has {', '.join(relation.column_names)}")
        return
    yield from _generated(where, table, found, facts, state)
    yield from _reading(where, state, table, found, facts.server)
    if found.has_children:
        yield warning(f"{where}: its inheritance children aren't published with it: list those you want")
    yield from _partitions(where, state, table, found)
    if is_overruled(state, found, facts):
        if not table.is_plain:
            yield warning(f"{where}: its filter and column list count for nothing, since it is published as its root's")
    elif state.publishes_old_rows:
        # Of those that are never published PostgreSQL refuses nothing.
        for leaf in (leaf for leaf in own_leaves(state, found) if leaf.relkind == "r" and leaf.persistence == "p"):
            yield from _identity(where, state, table, found, leaf, facts.server.version)
    if relation.replica_identity == "f" and state.publishes_old_rows:
        total = sum(leaf.size_bytes for leaf in found.leaves)
        yield warning(
            f"{where}: REPLICA IDENTITY FULL writes the whole old row to WAL for each UPDATE and DELETE (measured: 64 "
            f"instead of 44 MB for 20,000 updates of 1 kB rows); the table has {size(total)}"
        )


def judge_binary(state: PublicationState, table: PublicationTable, facts: Facts) -> Iterator[Finding]:
    """Columns whose values could not be read once they came in binary format."""
    found = facts.tables.get(table.id)
    for column in found.relation.columns if found is not None else ():
        if (table.columns is None or column.name in table.columns) and not has_wire_format(column.type):
            yield problem(
                f"publication {state.name!r}, table {table.id}: column {column.name} is of type {column.type.name}, which can't "
                "be read in binary format: set source.options.binary to false, or leave the column out by a column list"
            )


def _unfit(relation: Relation) -> str | None:
    if relation.relkind not in ("r", "p"):
        return f"it is {_RELKINDS.get(relation.relkind, 'no table')}, which can't be published: name its tables"
    if relation.persistence == "u":
        return "it is unlogged, so its changes aren't in the WAL: alter table … set logged"
    if relation.persistence == "t":
        return "it is temporary and can't be published"
    if relation.id.schema in ("pg_catalog", "information_schema"):
        return "it is a system table and can't be published"
    return None


def _generated(
    where: str, table: PublicationTable, found: TableFacts, facts: Facts, state: PublicationState
) -> Iterator[Finding]:
    generated = [c.name for c in found.relation.columns if not state.sends(c)]
    listed = [c for c in generated if c in (table.columns or ())]
    if listed and facts.server.version < 180000:
        yield problem(
            f"{where}: generated column {', '.join(listed)} can't be published before PostgreSQL 18: take it out of "
            "the column list"
        )
    elif table.columns is None and generated:
        yield warning(f"{where}: generated column {', '.join(generated)} isn't published and won't be in the target")


def _reading(
    where: str, state: PublicationState, table: PublicationTable, found: TableFacts, server: ServerFacts
) -> Iterator[Finding]:
    name, schema = found.relation.id, found.relation.id.schema
    wanted = set(table.columns or [c.name for c in found.relation.columns if state.sends(c)])
    if hidden := sorted((wanted | state.filter_columns.get(name, frozenset())) - found.readable):
        columns = f" ({', '.join(hidden)})" if found.readable else ""
        yield lacking(
            f"{where}: role {server.role!r} may not read it for the initial sync: grant usage on schema {schema} to "
            f"{server.role}; grant select{columns} on {name} to {server.role}"
        )
    if found.hidden_rows:
        yield lacking(
            f"{where}: row-level security hides rows from role {server.role!r}, so a copy would be refused: alter role "
            f"{server.role} bypassrls"
        )


def _partitions(where: str, state: PublicationState, table: PublicationTable, found: TableFacts) -> Iterator[Finding]:
    if found.relation.relkind == "p" and not state.via_root and not table.is_plain:
        yield problem(
            f"{where}: a filter or column list on a partitioned table counts only when it is published via its root: set "
            "publish_via_partition_root: true, or list the partitions"
        )
    if unfit := [str(leaf.id) for leaf in found.leaves if leaf.relkind != "r" or leaf.persistence != "p"]:
        yield warning(f"{where}: changes of {', '.join(unfit)} (foreign or unlogged) are never published")


def _identity(
    where: str, state: PublicationState, table: PublicationTable, found: TableFacts, leaf: Leaf, version: int
) -> Iterator[Finding]:
    relation = found.relation
    if leaf.oid != relation.oid:
        where = f"{where}, partition {leaf.id}"
    operations = " and ".join(o.upper() + "s" for o in ("update", "delete") if o in state.publish)
    fail = f"its {operations} would fail"
    key = set(leaf.identity_columns)
    if not key:
        yield problem(
            f"{where}: it has no primary key or replica identity, {fail}: add a primary key, or alter table {leaf.id} "
            "replica identity using index … (or full, where there is none), or publish only inserts and truncates"
        )
        return
    if leaf.replica_identity == "f" and not relation.primary_key:
        yield warning(
            f"{where}: it has no primary key, so a run that brings UPDATEs or DELETEs of it rewrites its whole target "
            f"(source: {size(leaf.size_bytes)}); a primary key avoids that"
        )
    yield from _identity_rules(where, state, table, found, leaf, version)


def _identity_rules(
    where: str, state: PublicationState, table: PublicationTable, found: TableFacts, leaf: Leaf, version: int
) -> Iterator[Finding]:
    relation, key, full = found.relation, set(leaf.identity_columns), leaf.replica_identity == "f"
    if outside := sorted(state.filter_columns.get(table.id, frozenset()) - key):
        yield problem(
            f"{where}: the filter uses {', '.join(outside)}, which the replica identity ({', '.join(sorted(key))}) doesn't "
            f"cover, so its own UPDATEs and DELETEs would fail: alter table {leaf.id} replica identity full, add the "
            "column to the key, or publish only inserts and truncates"
        )
    if table.columns is not None and full:
        yield problem(
            f"{where}: a column list can't stand beside REPLICA IDENTITY FULL, its UPDATEs and DELETEs would fail: "
            "remove the list, or use the primary key as replica identity"
        )
    elif table.columns is not None and (missing := sorted(key - set(table.columns))):
        yield problem(
            f"{where}: the column list lacks {', '.join(missing)} of the replica identity, so its UPDATEs and DELETEs would "
            "fail: add it to the list"
        )
    generated = {c.name for c in relation.columns if not state.sends(c)}
    if version >= 180000 and (table.columns is None or full) and generated & key:
        yield problem(
            f"{where}: the replica identity has the unpublished generated column {', '.join(sorted(generated & key))}, so "
            "its UPDATEs and DELETEs would fail: choose another replica identity"
        )
    via_root = state.via_root and leaf.oid != relation.oid
    same_kind = (leaf.replica_identity == "f") == (relation.replica_identity == "f")
    if via_root and not (same_kind and key == set(relation.identity_columns)):
        yield problem(
            f"{where}: its replica identity ({', '.join(sorted(key))}) differs from the root's "
            f"({', '.join(relation.identity_columns) or 'none'}), so old rows can't be read: give both the same"
        )
