"""Problems with targets: their source mappings (``from``, ``partition_root``), filters (``where``)
and own expectations; part of preflight.

It judges the publications in force after setup, which may not exist yet. So what they publish is
derived from what they name, as PostgreSQL does. Expectations that can't be evaluated on their
target fail every check of its table, and with a gate they stop its changes, so they are reported
before there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter
from pathlib import Path

from waldelta.config import PipelineFile, TypeOptions
from waldelta.config.expectation_files import OwnSuiteFile, TargetColumns, read_own_suites
from waldelta.config.pipeline_file import Target, TargetTable
from waldelta.errors import ConfigError, ModeRefused, PrivilegeMissing
from waldelta.findings import (
    Finding,
    Grant,
    lacking,
    problem,
    problem_if,
    sql_name,
    warning,
    warning_if,
)
from waldelta.lake.ledger import ColumnState, TableState
from waldelta.metadata_columns import METADATA_TYPES, RELID
from waldelta.pipeline import Job
from waldelta.pipeline.targets import TargetSource, column_states
from waldelta.pipeline.targets.move_target import name_problems, plan_moves
from waldelta.pipeline.targets.target_sources import (
    COMMON,
    describe_unpublished,
    merge_partitions,
    merged_roots,
    read_sources,
    renamed,
    sources,
    target_sources,
)
from waldelta.postgres import (
    CatalogRelation,
    Connection,
    Leaf,
    Partition,
    PublishedRelation,
    PublishedTable,
    TableId,
    published_table,
    read_relations,
    read_table_oids,
)
from waldelta.row_filter import RowFilter, resolve_filter
from waldelta.row_filter.spark.translate import spark_condition
from waldelta.stages.setup.facts.publications import PublicationState
from waldelta.stages.setup.facts.source_facts import Facts, members
from waldelta.target_modes.column_names import clashes
from waldelta.target_modes.modes import named_mode
from waldelta.target_modes.target_mode import Feature

# Yields what is wrong with a target's own expectations, by the columns that it has or will have.
JudgeSuite = Callable[[str, OwnSuiteFile, TargetColumns], Iterable[Finding]]


@dataclass(frozen=True, slots=True)
class PlannedTargets:
    """What will be published, by name, and the source mapping of each target.

    ``relations`` are the published tables, by oid, with the columns that aren't published.
    """

    published: Mapping[str, PublishedTable]
    sources: Mapping[str, TargetSource]
    findings: tuple[Finding, ...] = ()
    relations: Mapping[int, CatalogRelation] = field(default_factory=dict)

    def tables_of(self, target: str) -> list[PublishedTable]:
        """Returns the source tables of a target."""
        oids = self.sources[target].relation_ids
        return [table for table in self.published.values() if table.oid in oids]

    def columns_of(self, name: str, target: Target) -> list[ColumnState]:
        """Returns the columns of a target's source tables as the target will have them."""
        tables = [renamed(table, target.columns_of(name)) for table in self.tables_of(name)]
        return [
            column
            for table in tables
            for column in column_states(table.columns, table.key_columns, target.types_of(name))
        ]

    def describe(self) -> list[str]:
        """Returns lines about targets whose source isn't just their own table, and tables without a
        target.
        """
        lines = []
        for name, mapping in sorted(self.sources.items()):
            through = f" where {mapping.where}".replace("\n", " ") if mapping.where else ""
            if mapping.root_id is not None:
                leaves = sorted(str(table.id) for table in self.tables_of(name))
                lines.append(f"{name} merges partitions {', '.join(leaves)}{through}")
            elif not mapping.is_plain(name):
                lines.append(f"{name} gets the changes of {mapping.source}{through}")
        feeding = {str(feed.source) for feed in self.sources.values()}
        lines += [
            (
                f"{name} is not a target itself: only other targets get its changes (to keep it as"
                f" one, write {name}: {{}} under target.tables)"
            )
            for name in sorted(feeding - self.sources.keys())
        ]
        return lines


def plan_targets(
    conn: Connection, pipeline: PipelineFile, in_force: Mapping[str, PublicationState], facts: Facts
) -> PlannedTargets:
    """Returns the source mapping of each target after setup, with findings."""
    entries = pipeline.target.tables
    relations, leaves, by_oid = _entries(conn, in_force, facts)
    topmost = {
        oid: of for oid, of in by_oid.items() if by_oid.keys().isdisjoint(relations[oid].ancestors)
    }
    tables = [
        published_table(
            relations[oid],
            frozenset().union(*(entry.columns for entry in of)),
            [entry.row_filter for entry in of],
            [entry.publishes for entry in of],
            leaves[oid],
        )
        for oid, of in topmost.items()
    ]
    published = {str(table.id): table for table in tables if table.columns}
    there = read_sources(conn, entries)
    relations_by_name = {
        str(relation.id): relation
        for relation in read_relations(conn, [p.oid for p in there.values()])
    }
    short = [PublishedRelation(t.id, t.oid, t.relkind, t.ancestors) for t in published.values()]
    mappings = target_sources(entries, short, there)
    planned = PlannedTargets(dict(sorted(published.items())), mappings, relations=relations)
    judged = (
        *(_judge_entries(relations[oid].id, of) for oid, of in topmost.items()),
        *(
            _judge_merged(name, relations_by_name.get(name), entries, planned)
            for name in merged_roots(entries)
        ),
        *(_judge_source(*each, there, entries, planned) for each in sources(entries).items()),
        judge_entries(entries, planned),
        judge_modes(entries, planned),
        judge_columns(pipeline, planned),
    )
    return replace(planned, findings=tuple(chain.from_iterable(judged)))


def judge_entries(entries: Mapping[str, TargetTable], planned: PlannedTargets) -> Iterator[Finding]:
    """Yields a warning for each entry under ``target.tables`` that no target follows."""
    for name in sorted(entries.keys() - planned.sources.keys()):
        if entries[name].source is not None or entries[name].partition_root:
            continue
        try:
            printed = str(TableId.parse(name))
        except ValueError as err:
            yield warning(f"target.tables.{name}: no target has this entry's options: {err}")
            continue
        remedy = "publish it, or correct the name"
        yield warning(
            f"target.tables.{name}: no target has this entry's options, because no table of this"
            f" name is published: {f'write {printed}' if printed in planned.sources else remedy}"
        )


def judge_modes(entries: Mapping[str, TargetTable], planned: PlannedTargets) -> Iterator[Finding]:
    """Yields a problem for each target whose mode needs a key and whose source has none."""
    for name in sorted(entries.keys() & planned.sources.keys()):
        try:
            for table in planned.tables_of(name):
                named_mode(entries[name].mode).check_key(name, table.key_columns)
        except ModeRefused as err:
            yield problem(f"target.tables.{name}.mode: {err}")


def judge_columns(pipeline: PipelineFile, planned: PlannedTargets) -> Iterator[Finding]:
    """Yields findings about columns that a target can't have, or whose values it can't all store,
    and names for columns that aren't published.
    """
    target = pipeline.target
    for name in sorted(planned.sources):
        columns = {c.name_on_source: c for c in planned.columns_of(name, target)}
        if absent := sorted(target.columns_of(name).keys() - columns.keys()):
            yield warning(
                f"target.tables.{name}.columns: no column {', '.join(absent)} is published"
            )
        names = [column.name for column in columns.values()]
        for clash in clashes(names, metadata_columns=target.metadata_columns):
            yield problem(f"target {name}: {clash}")
        partial = [column.name for column in columns.values() if column.stored_as.may_be_raw]
        yield from warning_if(
            partial and not target.metadata_columns,
            f"target {name}: metadata_columns is off, so values that a type of the lake can't hold"
            " (NaN in a decimal, infinite dates, years BC) become null and are lost:"
            f" {', '.join(partial)}; name columns that may have such values under types.text",
        )


def judge_names(
    job: Job, planned: PlannedTargets, states: Mapping[str, TableState]
) -> Iterator[Finding]:
    """Yields findings about the targets' names in the lake, and which targets will be moved."""
    problems = name_problems(job.lake.names, planned.sources, {})
    yield from map(problem, problems.values())
    for name, why in plan_moves(job, states).items():
        stored, new = job.lake.stored_name(name), job.lake.names.of(name)
        if why is not None and name not in problems:
            yield warning(f"{name} stays {stored} in the lake: {why}")
        elif why is None:
            yield warning(f"{name} is {stored} in the lake: the next run moves it to {new}")


def judge_replaced(
    conn: Connection, states: Iterable[TableState], facts: Facts
) -> Iterator[Finding]:
    """Yields a warning for each target whose source was replaced since its copy."""
    for state in sorted(states, key=attrgetter("table_name")):
        table = facts.tables.get(TableId.parse(state.source_table or state.table_name))
        if table is None or state.root_id is not None or not state.relation_ids:
            continue
        if table.relation.relkind == "r" and table.relation.oid not in state.relation_ids:
            row = conn.execute(_NAME_OF_OID, (list(state.relation_ids),)).fetchone()
            yield warning(
                f"{table.relation.id} isn't the table that its target was copied from, which"
                f" {'was dropped' if row is None else f'is {row[0]} now'}: setup publishes the"
                f" new one, and the next run copies it into {state.table_name}"
            )


_NAME_OF_OID = "select oid::regclass::text from pg_class where oid = any(%s::oid[])"


@dataclass(frozen=True, slots=True)
class _Entry:
    """How a publication publishes a relation.

    ``sends_generated`` is its option for generated columns, where the relation has any and no
    column list names what is sent.
    """

    publication: str
    columns: frozenset[str]
    row_filter: str | None
    publishes: frozenset[str]
    sends_generated: bool | None

    def clashes(self, second: _Entry) -> bool:
        """Returns whether pgoutput stops permanently where both publish a relation."""
        options = {self.sends_generated, second.sends_generated}
        return self.columns != second.columns or options == {True, False}


def _entries(
    conn: Connection, in_force: Mapping[str, PublicationState], facts: Facts
) -> tuple[dict[int, CatalogRelation], dict[int, tuple[Leaf, ...]], dict[int, list[_Entry]]]:
    """Returns the published relations, their leaves, and the publications' entries for them, each
    by the relation's oid.

    By the rules of pg_publication_tables, a relation is a leaf partition, or the root of a
    publication via root, which includes its partitions.
    """
    roots = [table for table in facts.tables.values() if table.relation.relkind == "p"]
    parts = [leaf.oid for root in roots for leaf in root.leaves]
    relations = {part.oid: part for part in read_relations(conn, parts)} if parts else {}
    leaves: dict[int, tuple[Leaf, ...]] = {}
    entries: dict[int, list[_Entry]] = {}
    for state in in_force.values():
        listed = {member.id for member in members(state, facts)}
        for member in members(state, facts):
            table = facts.tables.get(member.id)
            if table is None or table.relation.relkind not in ("r", "p"):
                continue
            relation = table.relation
            published = {relation.oid: table.leaves}
            if relation.relkind == "p" and not state.via_root:
                stored = [leaf for leaf in table.leaves if leaf.relkind == "r"]
                published = {leaf.oid: (leaf,) for leaf in stored if leaf.id not in listed}
            relations[relation.oid], leaves = relation, leaves | published
            for oid in published:
                columns, is_own = relations[oid].columns, oid == relation.oid
                names = member.columns if is_own else None
                names_sent = names or [column.name for column in columns if state.sends(column)]
                has_generated = names is None and any(column.generated for column in columns)
                entries.setdefault(oid, []).append(
                    _Entry(
                        state.name,
                        frozenset(names_sent),
                        member.row_filter if is_own else None,
                        state.publish,
                        state.publishes_generated if has_generated else None,
                    )
                )
    return relations, leaves, entries


def _judge_entries(table: TableId, entries: Sequence[_Entry]) -> Iterator[Finding]:
    first, *tail = entries
    for entry in tail:
        yield from problem_if(
            first.clashes(entry),
            f"publications {first.publication!r} and {entry.publication!r} give {table} different"
            " column lists, which pgoutput can't decode: give it the same columns (and"
            " publish_generated_columns) in both",
        )


def _judge_merged(
    name: str,
    root: CatalogRelation | None,
    entries: Mapping[str, TargetTable],
    planned: PlannedTargets,
) -> Iterator[Finding]:
    where = f"target.tables.{name}.partition_root"
    if root is None or root.relkind != "p":
        absent = "does not exist: check schema and spelling"
        why = absent if root is None else "isn't partitioned: remove partition_root"
        yield problem(f"{where}: {name} {why}")
        return
    family = {root.oid, *root.ancestors}
    whole = [table for table in planned.published.values() if table.relkind == "p" and (
        table.oid in family or root.oid in table.ancestors)]  # fmt: skip
    if whole:
        yield problem(
            f"{where}: {whole[0].id} is published via its root, so its partitions'"
            " changes arrive as changes of the root: remove partition_root, or set"
            " publish_via_partition_root: false"
        )
    elif name not in planned.sources:
        yield problem(
            f"{where}: no publication of this pipeline publishes a partition of it: publish {name}"
        )
    else:
        yield from _judge_leaves(where, name, root, entries, planned)


# What merged partitions must have in common, and how to give it to them.
_REMEDIES = {
    "column lists": "give them the same",
    "row filters": "give them the same, or give the target a where",
    "keys": "give them the same primary key, or replica identities of the same columns",
}


def _judge_leaves(
    where: str,
    name: str,
    root: CatalogRelation,
    entries: Mapping[str, TargetTable],
    planned: PlannedTargets,
) -> Iterator[Finding]:
    leaves = planned.tables_of(name)
    for what, of in COMMON.items():
        listed = "; ".join(f"{t.id}: {', '.join(sorted(of(t))) or 'none'}" for t in leaves)
        yield from problem_if(
            len(set(map(of, leaves))) > 1,
            f"{where}: its partitions have different {what} ({listed}): {_REMEDIES[what]}",
        )
    names = sorted(str(table.id) for table in leaves if str(table.id) in entries)
    oids = {table.oid for table in leaves}
    overlaps = sorted(
        n
        for n, f in planned.sources.items()
        if n != name and f.root_id is not None and f.relation_ids & oids
    )
    yield from problem_if(
        names,
        f"{where}: {', '.join(names)} can't be a target too: remove its entry under target.tables",
    )
    yield from problem_if(
        overlaps, f"{where}: {', '.join(overlaps)} merges the same partitions: remove one of them"
    )
    if conflicts := [c.name for c in root.columns if c.name.lower() == RELID]:
        yield problem(
            f"{where}: it has a column {conflicts[0]}, a name that the target needs for each row's"
            " partition: rename it"
        )


def _judge_source(
    name: str,
    source: str,
    there: Mapping[TableId, Partition],
    entries: Mapping[str, TargetTable],
    planned: PlannedTargets,
) -> Iterator[Finding]:
    where = f"target.tables.{name}.from"
    table, partition = planned.published.get(source), there.get(TableId.parse(name))
    merged = {
        str(leaf.id)
        for root in merged_roots(entries)
        if root in planned.sources
        for leaf in planned.tables_of(root)
    }
    judged = (
        (
            source in merged or source in merged_roots(entries),
            (
                f"partition_root merges the partitions of {source}: set the filter on a table"
                " that is published"
            ),
        ),
        (
            table is None,
            (
                f"no publication of this pipeline publishes {source} under that name: name a table"
                " that is published (of partitions published via their root, the root)"
            ),
        ),
        (
            name in planned.published,
            f"{name} is published itself, and target names are unique: choose another name",
        ),
        (
            partition is not None and table is not None and table.oid not in partition.ancestors,
            f"{name} exists on the source and isn't a partition of {source}: choose another name",
        ),
        (
            partition is None and entries[name].where is None,
            f"{name} is no partition of {source}, so it would hold all of it: write a where",
        ),
    )
    reasons = [f"{where}: {reason}" for applies, reason in judged if applies]
    yield from map(problem, reasons[:1])


def judge_wheres(
    conn: Connection, pipeline: PipelineFile, planned: PlannedTargets
) -> list[Finding]:
    """Returns findings about every target's filter.

    The target must have a source, PostgreSQL must accept the filter, and it must be translatable
    and evaluable on old rows.
    """
    findings: list[Finding] = []
    for name in sorted(pipeline.target.tables):
        entry, mapping = pipeline.target.tables[name], planned.sources.get(name)
        where = entry.where
        # Another finding says why a published table, or one with another source, has no target.
        has_own_finding = entry.source or entry.partition_root or name in planned.published
        try:
            if mapping is None and where is not None and not has_own_finding:
                raise ConfigError(_why_unfed(conn, name, planned))
            if mapping is not None and mapping.where is not None:
                findings += _judge_where(
                    conn, name, mapping.where, pipeline.target.types_of(name), planned
                )
        except PrivilegeMissing as err:
            needs = [] if mapping is None else _missing_grants(conn, mapping)
            findings += [lacking(f"target.tables.{name}.where: {err}", *needs)] if needs else []
        except ConfigError as err:
            findings.append(
                problem(f"target.tables.{name}.{'where' if where is not None else 'from'}: {err}")
            )
    return findings


def _missing_grants(conn: Connection, mapping: TargetSource) -> list[Grant]:
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


def _why_unfed(conn: Connection, name: str, planned: PlannedTargets) -> str:
    try:
        table = TableId.parse(name)
    except ValueError as err:
        return str(err)
    oid = read_table_oids(conn, [table]).get(table)
    if oid is None:
        return f"{name} does not exist: check schema and spelling"
    (relation,) = read_relations(conn, [oid])
    published = {table.oid: table for table in planned.published.values()}
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


def _judge_where(
    conn: Connection, name: str, where: str, options: TypeOptions, planned: PlannedTargets
) -> list[Finding]:
    """Returns findings about a target's filter; raises ConfigError, and FilterNotTranslatable."""
    parts, root = planned.tables_of(name), planned.sources[name].root_id
    table = parts[0]
    if root is not None:
        table = merge_partitions(read_relations(conn, [root])[0], parts)
    row_filter = resolve_filter(conn, table.read_as, where)
    if absent := sorted(set(row_filter.columns) - {column.name for column in table.columns}):
        return [problem(describe_unpublished(name, absent))]
    spark_condition(row_filter, column_states(table.columns, table.key_columns, options))
    return list(_identity(name, row_filter, table.leaves)) if "update" in table.publishes else []


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


def read_only(_: str, __: OwnSuiteFile, ___: TargetColumns) -> Iterable[Finding]:
    """Yields nothing: only the files themselves are judged."""
    return ()


def judge_suites(
    pipeline: PipelineFile,
    planned: PlannedTargets,
    states: Mapping[str, TableState],
    judge: JudgeSuite = read_only,
) -> Iterator[Finding]:
    """Yields findings about rejected files, files without a target, and expectations that a target
    can't be judged by.
    """
    folder = pipeline.quality.suites
    suites = read_own_suites(Path(folder) if folder else None, planned.sources, "of this pipeline")
    for name, err in sorted(suites.refused.items()):
        yield problem(f"expectations of {name}: {err}")
    for name, file in sorted(suites.by_table.items()):
        mode = pipeline.target.mode_of(name)
        for number, item in enumerate(file.suite.expectations):
            if item.gate != "warn" and not mode.supports(Feature.GATES):
                yield problem(
                    f"{file.place(number)}: gate: {item.gate} needs a target of mode mirror, and"
                    f" this one has mode {mode}: make it warn"
                )
        yield from judge(name, file, _columns(pipeline, name, planned, states.get(name)))
    for text in suites.unused:
        yield warning(f"unused expectations: {text}")


def _columns(
    pipeline: PipelineFile, name: str, planned: PlannedTargets, state: TableState | None
) -> TargetColumns:
    """Returns the columns that a target will have, by the columns that its source publishes."""
    columns, tables = planned.columns_of(name, pipeline.target), planned.tables_of(name)
    types = {} if state is None else {c.name: c.spark_type for c in state.columns}
    types |= {c.name: c.spark_type for c in columns}
    existing = {n for table in tables for n in planned.relations[table.oid].column_names}
    unpublished = existing - {c.name_on_source for c in columns}
    has_key = bool(state and state.key_columns) or any(table.key_columns for table in tables)
    if pipeline.target.metadata_columns:
        types |= METADATA_TYPES
    if planned.sources[name].root_id is not None:
        types[RELID] = "bigint"
    return TargetColumns(types, has_key, frozenset(unpublished - types.keys()))
