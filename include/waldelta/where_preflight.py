"""What would go wrong with the targets' own filters (``target.tables.<table>.where``); a part of preflight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

from waldelta.catalog import Leaf, Relation, TableId, read_leaves, read_relations, read_table_oids
from waldelta.effective_publication import members
from waldelta.errors import ConfigError
from waldelta.finding import Finding, problem
from waldelta.ledger import ColumnState
from waldelta.pipeline_file import PipelineFile
from waldelta.publication import PublicationState
from waldelta.row_filter import RowFilter, resolve_filter
from waldelta.row_filter.resolve import resolve
from waldelta.row_filter.typed import column_type
from waldelta.source_facts import Facts
from waldelta.target_filter import column_states, unpublished
from waldelta.type_options import TypeOptions

Connection = psycopg.Connection[Any]
# Raises FilterNotTranslatable for a filter over such columns that can't be evaluated exactly.
Translate = Callable[[RowFilter, Sequence[ColumnState]], object]


def resolvable(row_filter: RowFilter, columns: Sequence[ColumnState]) -> object:
    """The part of the translation that needs no Spark: types and signatures."""
    return resolve(row_filter, {c.name: column_type(c.type_name, c.spark_type) for c in columns})


@dataclass(frozen=True, slots=True)
class _Target:
    """A target with a filter, and the table that it is of."""

    name: str
    text: str
    relation: Relation
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True, slots=True)
class _Published:
    """How the publications in force publish one table, taken together."""

    columns: frozenset[str]
    updates: bool


def judge_wheres(
    conn: Connection,
    pipeline: PipelineFile,
    in_force: Mapping[str, PublicationState],
    facts: Facts,
    translate: Translate = resolvable,
) -> list[Finding]:
    """Every target's filter: its table is one target, PostgreSQL takes it, it can be translated, old rows can be judged."""
    findings: list[Finding] = []
    for name in sorted(pipeline.target.tables):
        text = pipeline.target.where_of(name)
        if text is None:
            continue
        where = f"target.tables.{name}.where"
        try:
            table = TableId.parse(name)
        except ValueError as err:
            findings.append(problem(f"{where}: {err}"))
            continue
        oid = read_table_oids(conn, [table]).get(table)
        if oid is None:
            findings.append(problem(f"{where}: {name} does not exist: check schema and spelling"))
            continue
        (relation,) = read_relations(conn, [oid])
        found = _Target(name, text, relation, read_leaves(conn, [oid])[oid])
        try:
            published = _published(conn, relation, in_force, facts)
            findings += _judge(conn, found, published, pipeline.target.types_of(name), translate)
        except ConfigError as err:
            findings.append(problem(f"{where}: {err}"))
    return findings


def _published(
    conn: Connection, relation: Relation, in_force: Mapping[str, PublicationState], facts: Facts
) -> _Published:
    """Raises ConfigError for a table whose changes don't come under its own name."""
    above = {r.id for r in read_relations(conn, relation.ancestors)} if relation.ancestors else set()
    columns: set[str] = set()
    updates, covered = False, False
    for state in in_force.values():
        for member in members(state, facts):
            if member.id in above and state.via_root:
                raise ConfigError(f"its changes are published as those of {member.id}: give that the filter")
            if member.id != relation.id and member.id not in above:
                continue
            if relation.relkind == "p" and not state.via_root:
                raise ConfigError(
                    f"publication {state.name!r} publishes its partitions, each a target of its own: give them the filter, or "
                    "set publish_via_partition_root: true"
                )
            covered, updates = True, updates or "update" in state.publish
            every = [c.name for c in relation.columns if state.sends(c)]
            columns |= set(every if member.columns is None or member.id != relation.id else member.columns)
    if not covered:
        raise ConfigError("no publication of this pipeline publishes the table: check its name")
    return _Published(frozenset(columns), updates)


def _judge(
    conn: Connection, found: _Target, published: _Published, options: TypeOptions, translate: Translate
) -> Iterator[Finding]:
    row_filter = resolve_filter(conn, found.relation.id, found.text)
    if absent := sorted(set(row_filter.columns) - published.columns):
        yield problem(unpublished(found.name, absent))
        return
    columns = [c for c in found.relation.columns if c.name in published.columns]
    relation = found.relation
    key = relation.identity_columns if relation.replica_identity == "i" else relation.primary_key
    translate(row_filter, column_states(columns, key, options))
    if published.updates:
        yield from _identity(found.name, row_filter, found.leaves)


def _identity(name: str, row_filter: RowFilter, leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """Whether an UPDATE tells what the filter must know of the old row, as PostgreSQL demands of its own filters."""
    for leaf in leaves:
        if leaf.relkind == "r" and (outside := sorted(set(row_filter.columns) - set(leaf.identity_columns))):
            yield problem(
                f"target.tables.{name}.where uses {', '.join(outside)}, which the replica identity "
                f"({', '.join(leaf.identity_columns) or 'none'}) doesn't cover, so an UPDATE doesn't tell whether the old row was "
                f"in the target: alter table {leaf.id} replica identity full, add the column to the key, or publish no updates"
            )
            return
