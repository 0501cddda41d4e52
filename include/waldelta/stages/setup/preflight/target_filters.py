"""Problems with the targets' own filters (``target.tables.<table>.where``); part of preflight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from waldelta.config import PipelineFile, TypeOptions
from waldelta.config.pipeline_file import TargetTable
from waldelta.errors import ConfigError, PrivilegeMissing
from waldelta.findings import Finding, lacking, problem
from waldelta.grants import Grant, sql_name
from waldelta.lake.ledger import ColumnState
from waldelta.pipeline.targets import TargetSource
from waldelta.pipeline.targets.target_filter import column_states, unpublished
from waldelta.postgres import CatalogRelation, Connection, Leaf, TableId
from waldelta.postgres.catalog import read_leaves, read_relations, read_table_oids
from waldelta.row_filter import RowFilter, resolve_filter
from waldelta.row_filter.resolve import resolve
from waldelta.row_filter.typed_tree import column_type
from waldelta.stages.setup.preflight.targets import PlannedTargets

# Raises FilterNotTranslatable for a filter over such columns that can't be evaluated exactly.
Translate = Callable[[RowFilter, Sequence[ColumnState]], object]


def resolvable(row_filter: RowFilter, columns: Sequence[ColumnState]) -> object:
    """Check the part of the translation that needs no Spark: types and signatures."""
    return resolve(row_filter, {c.name: column_type(c.type_name, c.spark_type) for c in columns})


@dataclass(frozen=True, slots=True)
class _Filtered:
    """A target with a filter, the filter's table, and how that is published."""

    name: str
    text: str
    relation: CatalogRelation
    columns: frozenset[str]
    updates: bool
    leaves: tuple[Leaf, ...]


def judge_wheres(
    conn: Connection,
    pipeline: PipelineFile,
    planned: PlannedTargets,
    translate: Translate = resolvable,
) -> list[Finding]:
    """Returns findings about every target's filter.

    The target must have a source, PostgreSQL must accept the filter, and it must be translatable
    and evaluable on old rows.
    """
    findings: list[Finding] = []
    for name in sorted(pipeline.target.tables):
        where, mapping = pipeline.target.where_of(name), planned.sources.get(name)
        try:
            if (
                mapping is None
                and where is not None
                and not _is_reported(pipeline.target.tables[name], name, planned)
            ):
                raise ConfigError(_why_unfed(conn, name, planned))
            if mapping is not None and mapping.where is not None:
                found = _filtered(conn, name, mapping, planned)
                findings += _judge(conn, found, pipeline.target.types_of(name), translate)
        except PrivilegeMissing as err:
            needs = [] if mapping is None else _needed(conn, mapping)
            findings += [lacking(f"target.tables.{name}.where: {err}", *needs)] if needs else []
        except ConfigError as err:
            findings.append(
                problem(f"target.tables.{name}.{'where' if where is not None else 'from'}: {err}")
            )
    return findings


def _needed(conn: Connection, mapping: TargetSource) -> list[Grant]:
    """Returns the grants missing for analysing a filter, except those on published tables.

    Another finding reports those.
    """
    ((may_make_temporary,),) = conn.execute(
        "select has_database_privilege(current_database(), 'temporary')"
    ).fetchall()
    if not may_make_temporary:
        return [
            Grant(
                "temporary on database",
                sql_name(conn.info.dbname),
                "to analyse the targets' filters",
            )
        ]
    return (
        []
        if mapping.root_id is None
        else [Grant("select on", sql_name(mapping.source.schema, mapping.source.name))]
    )


def _is_reported(entry: TargetTable, name: str, planned: PlannedTargets) -> bool:
    """Returns whether a finding about the source mapping already explains why there is no
    source.
    """
    return entry.source is not None or entry.partition_root or name in planned.published


def _why_unfed(conn: Connection, name: str, planned: PlannedTargets) -> str:
    try:
        table = TableId.parse(name)
    except ValueError as err:
        return str(err)
    oid = read_table_oids(conn, [table]).get(table)
    if oid is None:
        return f"{name} does not exist: check schema and spelling"
    (relation,) = read_relations(conn, [oid])
    published = {planned.relation.oid: planned.relation for planned in planned.published.values()}
    if above := [published[a] for a in relation.ancestors if a in published]:
        return (
            f"its changes are published as those of {above[0].id}: set the filter on"
            f" {above[0].id}, or write from: {above[0].id} here to replicate only what this"
            " partition holds"
        )
    if any(oid in below.ancestors for below in published.values()):
        return (
            "its publication publishes its partitions, each a target of its own: set the filter"
            " on them, merge them with partition_root: true, or set publish_via_partition_root:"
            " true"
        )
    return "no publication of this pipeline publishes the table: check its name"


def _filtered(
    conn: Connection, name: str, mapping: TargetSource, planned: PlannedTargets
) -> _Filtered:
    fed = planned.relations_of(name)
    relation = (
        fed[0].relation if mapping.root_id is None else read_relations(conn, [mapping.root_id])[0]
    )
    leaves = read_leaves(conn, [part.relation.oid for part in fed])
    return _Filtered(
        name,
        mapping.where or "",
        relation,
        frozenset.intersection(*(frozenset(part.columns) for part in fed)),
        any("update" in part.publishes for part in fed),
        tuple(leaf for part in fed for leaf in leaves[part.relation.oid]),
    )


def _judge(
    conn: Connection, found: _Filtered, options: TypeOptions, translate: Translate
) -> Iterator[Finding]:
    relation = found.relation
    readable = next(
        (leaf.read_as for leaf in found.leaves if leaf.oid == relation.oid), relation.id
    )
    row_filter = resolve_filter(conn, readable, found.text)
    if absent := sorted(set(row_filter.columns) - found.columns):
        yield problem(unpublished(found.name, absent))
        return
    columns = [c for c in relation.columns if c.name in found.columns]
    key = relation.identity_columns if relation.replica_identity == "i" else relation.primary_key
    translate(row_filter, column_states(columns, key, options))
    if found.updates:
        yield from _identity(found.name, row_filter, found.leaves)


def _identity(name: str, row_filter: RowFilter, leaves: Sequence[Leaf]) -> Iterator[Finding]:
    """Yields a problem if an UPDATE lacks columns of the old row that the filter needs.

    PostgreSQL demands the same for its own filters.
    """
    for leaf in leaves:
        if (
            leaf.relkind == "r"
            and leaf.persistence == "p"
            and (outside := sorted(set(row_filter.columns) - set(leaf.identity_columns)))
        ):
            yield problem(
                f"target.tables.{name}.where uses {', '.join(outside)}, which the replica identity"
                f" ({', '.join(leaf.identity_columns) or 'none'}) doesn't cover, so an UPDATE"
                f" doesn't show whether the old row was in the target: alter table {leaf.id}"
                " replica identity full, add the column to the key, or publish no updates"
            )
            return
