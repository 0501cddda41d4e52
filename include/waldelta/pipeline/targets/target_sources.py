"""Maps each target to its source; code that needs the list of tables uses this, not the
publications.

Usually a target is one published table of the same name. A target may also merge the published
leaves of a partitioned table (``partition_root``). Or it takes rows of another table (``from``)
through a filter of its own: a ``where``, one partition of that table, or both. This module is pure
except for read_target_sources() and read_targets().

A target's own filter (``target.tables.<table>.where``): PostgreSQL analyses it, the ledger stores
it.

The copy is read through the filter, and later changes are routed by it. Both use the filter as
PostgreSQL analysed it when the copy began.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import psycopg

from waldelta.config import PipelineFile, TypeOptions
from waldelta.config.parse_text import parse_json
from waldelta.config.pipeline_file import TargetTable
from waldelta.errors import ConfigError, StateError, TableBusy
from waldelta.lake.ledger import ColumnState, TableState
from waldelta.metadata_columns import RELID, RELID_ATTNUM
from waldelta.postgres import (
    INT8,
    LOCK_TIMEOUT_S,
    CatalogRelation,
    Connection,
    LockedTables,
    Partition,
    PgType,
    PublishedRelation,
    PublishedTable,
    TableColumn,
    TableId,
    limited,
    read_around,
    read_locked_tables,
    read_partitions,
    read_published_relations,
    read_published_tables,
    read_relations,
    savepoint,
)
from waldelta.row_filter import Collation, EnumType, RowFilter, resolve_filter
from waldelta.types import column_types

_ATTEMPTS = 3

# What merged partitions must have in common.
COMMON: Mapping[str, Callable[[PublishedTable], frozenset[str]]] = {
    "column lists": lambda table: frozenset(column.name for column in table.columns),
    "row filters": lambda table: frozenset(filter(None, [table.row_filter])),
    "keys": lambda table: frozenset(table.key_columns),
}
_BIGINT = PgType(INT8, -1, "bigint", type_name="int8")


@dataclass(frozen=True, slots=True)
class TargetSource:
    """A target's source: the relations whose changes it gets, and the filter that they pass.

    ``source`` is the published table, or the partitioned one (``root_id``) whose leaves are merged.
    ``where`` is the target's own filter as PostgreSQL reads it. A target that takes one
    ``partition`` (its oid) of the source also has that partition's ``constraint``. ``late`` are
    merged leaves that may have had rows before they were published. ``unread`` is True when the
    partition's constraint wasn't read, because another session keeps the partition locked.
    """

    source: TableId
    relation_ids: frozenset[int]
    root_id: int | None = None
    where: str | None = None
    constraint: str | None = None
    late: frozenset[int] = frozenset()
    partition: int | None = None
    unread: bool = False

    def is_plain(self, target: str) -> bool:
        """Whether the target is the published table of its own name."""
        return self.root_id is None and str(self.source) == target


@dataclass(frozen=True, slots=True)
class ReplicatedTarget:
    """A target: its name, its source, and the source as one table (columns, key, filter, leaves).

    ``problem`` says why it can't be copied as things are.
    """

    id: TableId
    mapping: TargetSource
    table: PublishedTable
    problem: str | None = None

    @property
    def is_unread(self) -> bool:
        """Whether it is unknown which source rows belong to the target, because a session keeps a
        source table locked.
        """
        return self.mapping.unread or self.table.unread

    @property
    def other_source(self) -> str | None:
        """The name of its source table, when that isn't the target's own name."""
        return None if self.mapping.source == self.id else str(self.mapping.source)


def read_target_sources(
    conn: Connection, pipeline: PipelineFile, locked: Collection[int] = ()
) -> dict[str, TargetSource]:
    """Returns each target's current source, by the target's name.

    This needs one statement when every target is a table of its own. It locks nothing but the
    partitions whose rows a target takes (see read_partitions()).
    """
    published = read_published_relations(conn, pipeline.source.publication_names)
    entries = pipeline.target.tables
    return target_sources(entries, published, read_sources(conn, entries, locked))


def read_sources(
    conn: Connection, entries: Mapping[str, TargetTable], locked: Collection[int] = ()
) -> dict[TableId, Partition]:
    """Returns the tables with the names of targets that merge partitions, or that have another
    source: roots and partitions, as far as they exist.
    """
    table_ids = [TableId.parse(name) for name in (*merged_roots(entries), *sources(entries))]
    return read_partitions(conn, table_ids, locked) if table_ids else {}


def read_targets(
    conn: Connection,
    pipeline: PipelineFile,
    mappings: Mapping[str, TargetSource] | None = None,
    *,
    sizes: bool = True,
    locked: Collection[int] = (),
    only: TableId | None = None,
) -> list[ReplicatedTarget]:
    """Returns the targets of a subscriber with this pipeline file, or ``only`` one, by name.

    ``mappings`` is a recent result of read_target_sources() (None: it is read). ``sizes``: see
    read_leaves(); ``locked``: see read_published_tables(). Raises as read_published_tables().
    """
    mappings = read_target_sources(conn, pipeline, locked) if mappings is None else mappings
    oids = None
    if only is not None:
        mappings = {name: of for name, of in mappings.items() if TableId.parse(name) == only}
        oids = {oid for mapping in mappings.values() for oid in mapping.relation_ids}
    published = read_published_tables(
        conn, pipeline.source.publication_names, sizes=sizes, locked=locked, oids=oids
    )
    tables = {table.oid: table for table in published}
    roots = {
        r.oid: r
        for r in read_relations(
            conn, [f.root_id for f in mappings.values() if f.root_id is not None]
        )
    }
    # A table that has left the publications, or was dropped, since then is no source any more.
    there = {
        name: mapping
        for name, mapping in mappings.items()
        if mapping.relation_ids & tables.keys()
        and (mapping.root_id is None or mapping.root_id in roots)
    }
    targets = (
        (_target(TableId.parse(name), feed, tables, roots), pipeline.target.columns_of(name))
        for name, feed in there.items()
    )
    return sorted(
        (replace(target, table=renamed(target.table, names)) for target, names in targets),
        key=lambda t: t.id,
    )


def read_unlocked_sources(
    conn: Connection, pipeline: PipelineFile, *, sizes: bool = True
) -> tuple[dict[str, TargetSource], list[ReplicatedTarget], LockedTables]:
    """Returns the target sources, the targets, and which tables are locked.

    It waits for no session that already keeps a table locked. Raises TableBusy when new locks keep
    appearing; the caller's transaction and its snapshot stay valid.
    """

    def read(locked: frozenset[int]) -> tuple[dict[str, TargetSource], list[ReplicatedTarget]]:
        mappings = read_target_sources(conn, pipeline, locked)
        return mappings, read_targets(conn, pipeline, mappings, sizes=sizes, locked=locked)

    (mappings, targets), locked = read_around(conn, LOCK_TIMEOUT_S, read, read_locked_tables(conn))
    return mappings, targets, locked


def read_target(
    conn: Connection, pipeline: PipelineFile, table_id: TableId, *, catalogs: bool = False
) -> ReplicatedTarget | None:
    """Returns one target, or None if it isn't published; sessions that lock other tables don't
    matter.

    Raises TableBusy when its own tables stay locked; the caller's transaction and its snapshot stay
    valid. With ``catalogs``, this waits for no session at all: what only a lock can show (which
    rows the target takes) may then be missing.
    """
    locked, oids = read_locked_tables(conn), frozenset[int]()
    for _ in range(_ATTEMPTS):
        try:
            # Another session may take a lock right after the locks were read.
            with limited(conn, "lock_timeout", LOCK_TIMEOUT_S), savepoint(conn):
                while True:
                    targets = read_targets(
                        conn, pipeline, locked=locked.relations - oids, only=table_id
                    )
                    match = next(iter(targets), None)
                    if (
                        match is None
                        or catalogs
                        or (locked.relations - oids).isdisjoint(needed := _lockable(match))
                    ):
                        return match
                    oids |= needed
        except psycopg.errors.LockNotAvailable:
            now = read_locked_tables(conn)
            if not now.relations.isdisjoint(oids):
                raise now.busy(str(table_id)) from None
            locked = LockedTables(locked.relations | now.relations, now.holders)
    raise TableBusy(
        f"{table_id}: published tables stayed locked, one after the other, for {LOCK_TIMEOUT_S:g}"
        f" s each. Blocking sessions:\n{locked.holders}\nwait until they end, and run again"
    )


def _lockable(target: ReplicatedTarget) -> frozenset[int]:
    """The relations that are locked to read which rows a target takes, and how many there are."""
    table, leaves = (
        target.table,
        {oid for leaf in target.table.leaves for oid in (leaf.oid, *leaf.above)},
    )
    return frozenset({table.oid, *table.ancestors, *target.mapping.relation_ids, *leaves})


def target_sources(
    entries: Mapping[str, TargetTable],
    published: Sequence[PublishedRelation],
    tables: Mapping[TableId, Partition],
) -> dict[str, TargetSource]:
    """Returns each target's source; pure.

    ``tables`` are those of read_sources(). A merged leaf isn't a target itself. Neither is a table
    that ``from`` names, unless it has an entry of its own. An entry without a source is left out;
    preflight says why.
    """
    by_name = {str(relation.id): relation for relation in published}
    mappings = dict(_merge_partitions(entries, published, tables))
    merged_oids = {oid for mapping in mappings.values() for oid in mapping.relation_ids}
    with_source = dict(
        _with_source(
            entries, {n: r for n, r in by_name.items() if r.oid not in merged_oids}, tables
        )
    )
    sources = {str(feed.source) for feed in with_source.values()} - entries.keys()
    for name, relation in by_name.items():
        if relation.oid not in merged_oids and name not in with_source and name not in sources:
            entry = entries.get(name)
            mappings[name] = TargetSource(
                relation.id, frozenset([relation.oid]), where=entry.where if entry else None
            )
    return mappings | with_source


def merged_roots(entries: Mapping[str, TargetTable]) -> list[str]:
    """Returns the names of the targets that merge partitions."""
    return [name for name, entry in entries.items() if entry.partition_root]


def sources(entries: Mapping[str, TargetTable]) -> dict[str, str]:
    """Returns the targets whose source is another table, with that table's name."""
    return {
        name: e.source for name, e in entries.items() if e.source is not None and e.source != name
    }


def differing(leaves: Sequence[PublishedTable]) -> str | None:
    """Returns what differs between leaves that must be merged into one target; None when they
    fit.
    """
    return next((what for what, of in COMMON.items() if len(set(map(of, leaves))) > 1), None)


def merge_partitions(root: CatalogRelation, leaves: Sequence[PublishedTable]) -> PublishedTable:
    """Returns the leaves as one table: the row's leaf, then the root's columns that all leaves
    publish.

    The key is the root's primary key when the leaves identify rows by it, else the leaf plus the
    leaf's key.
    """
    names = frozenset.intersection(*(frozenset(c.name for c in leaf.columns) for leaf in leaves))
    columns = [
        TableColumn(RELID, RELID_ATTNUM, _BIGINT, not_null=True),
        *(c for c in root.columns if c.name in names),
    ]
    key = (
        leaves[0].key_columns
        if all(set(t.key_columns) == set(leaves[0].key_columns) for t in leaves)
        else ()
    )
    if key and set(key) == set(root.primary_key):
        key = root.primary_key
    elif key:
        key = (RELID, *key)
    identities = {leaf.replica_identity for leaf in leaves}
    return PublishedTable(
        id=root.id,
        oid=root.oid,
        relkind=root.relkind,
        replica_identity=identities.pop() if len(identities) == 1 else "d",
        columns=tuple(columns),
        key_columns=key,
        primary_key=root.primary_key,
        identity_columns=(),
        row_filter=leaves[0].row_filter,
        leaves=tuple(of for leaf in leaves for of in leaf.leaves),
        relation_ids=tuple(leaf.oid for leaf in leaves),
        publishes=frozenset().union(*(leaf.publishes for leaf in leaves)),
        publications=tuple(sorted({name for leaf in leaves for name in leaf.publications})),
        ancestors=root.ancestors,
        entries=frozenset().union(*(leaf.entries for leaf in leaves)),
        unread=any(leaf.unread for leaf in leaves),
    )


def _merge_partitions(
    entries: Mapping[str, TargetTable],
    published: Sequence[PublishedRelation],
    tables: Mapping[TableId, Partition],
) -> Iterator[tuple[str, TargetSource]]:
    for name in merged_roots(entries):
        table_id = TableId.parse(name)
        root = tables[table_id].oid if table_id in tables else None
        # A table that is published by its root is one table already.
        below = [r for r in published if root in r.ancestors and r.relkind != "p"]
        leaves, late = frozenset(r.oid for r in below), frozenset(r.oid for r in below if r.is_late)
        if leaves:
            yield name, TargetSource(table_id, leaves, root, entries[name].where, late=late)


def _with_source(
    entries: Mapping[str, TargetTable],
    published: Mapping[str, PublishedRelation],
    tables: Mapping[TableId, Partition],
) -> Iterator[tuple[str, TargetSource]]:
    for name, source in sources(entries).items():
        relation, where = published.get(source), entries[name].where
        there = tables.get(TableId.parse(name))
        # A detached partition is an ordinary table; the source no longer has its rows.
        if relation is None or name in published or (there is None and where is None):
            continue
        if there is not None and relation.oid not in there.ancestors:
            continue
        constraint, partition = (there.constraint, there.oid) if there is not None else (None, None)
        condition, unread = combine_filters(constraint, where), there is not None and there.unread
        yield (
            name,
            TargetSource(
                relation.id,
                frozenset([relation.oid]),
                None,
                condition,
                constraint,
                partition=partition,
                unread=unread,
            ),
        )


def _target(
    table_id: TableId,
    mapping: TargetSource,
    tables: Mapping[int, PublishedTable],
    roots: Mapping[int, CatalogRelation],
) -> ReplicatedTarget:
    leaf_tables = sorted(
        (tables[oid] for oid in mapping.relation_ids if oid in tables), key=lambda table: table.id
    )
    if mapping.root_id is None:
        partition, leaves = mapping.partition, leaf_tables[0].leaves
        table_leaves = (
            leaves if partition is None else tuple(leaf for leaf in leaves if leaf.is_of(partition))
        )
        return ReplicatedTarget(table_id, mapping, replace(leaf_tables[0], leaves=table_leaves))
    what = differing(leaf_tables)
    problem = (
        f"{table_id}: its partitions are published with different {what}: give them the same"
        if what
        else None
    )
    return ReplicatedTarget(
        table_id, mapping, merge_partitions(roots[mapping.root_id], leaf_tables), problem
    )


def renamed(table: PublishedTable, names: Mapping[str, str]) -> PublishedTable:
    """Returns a source table with its columns' names in the lake, by ``names`` of the source."""
    if not names:
        return table

    def stored(columns: Sequence[str]) -> tuple[str, ...]:
        return tuple(names.get(name, name) for name in columns)

    return replace(
        table,
        columns=tuple(
            replace(c, name=names[c.name], source_name=c.name) if c.name in names else c
            for c in table.columns
        ),
        key_columns=stored(table.key_columns),
        primary_key=stored(table.primary_key),
        identity_columns=stored(table.identity_columns),
    )


def read_target_filter(
    conn: Connection, target: str, where: str | None, table: PublishedTable
) -> RowFilter | None:
    """Returns a target's filter over its source table, as the server understands it now; None
    without one.

    Raises ConfigError for a filter that the server refuses, or that uses unpublished columns.
    """
    if where is None:
        return None
    row_filter = resolve_filter(conn, table.read_as, where)
    if absent := sorted(
        set(row_filter.columns) - {column.name_on_source for column in table.columns}
    ):
        raise ConfigError(describe_unpublished(target, absent))
    return row_filter


def combine_filters(constraint: str | None, where: str | None) -> str | None:
    """Combine a partition's constraint and a filter into one filter.

    >>> combine_filters("(a > 1)", "b or c")
    '((a > 1)) and (b or c\\n)'
    """
    if constraint is None or where is None:
        return constraint or where
    return f"({constraint}) and ({where}\n)"  # The line break ends a comment in the filter.


def describe_unpublished(table: str, columns: Sequence[str]) -> str:
    """Describe a filter that uses columns which never arrive."""
    return (
        f"target.tables.{table}.where uses column {', '.join(columns)}, which isn't published: add"
        " it to the column list, or remove it from the filter"
    )


def column_states(
    columns: Sequence[TableColumn], key_columns: Sequence[str], options: TypeOptions
) -> list[ColumnState]:
    """Returns published columns as the ledger records them."""
    types = column_types({c.name: c.type for c in columns}, tuple(key_columns), options)
    return [
        ColumnState(
            c.name,
            c.type.oid,
            c.type.typmod,
            c.type.name,
            types[c.name].ledger_name,
            c.not_null,
            c.attnum,
            source_name=c.source_name,
        )
        for c in columns
    ]


def to_text(row_filter: RowFilter | None) -> str | None:
    """Returns a filter in the ledger's form.

    >>> from_text(to_text(RowFilter("a > 5", "(a > 5)", ("a",)))).analysed
    '(a > 5)'
    """
    if row_filter is None:
        return None
    return json.dumps(
        {
            "text": row_filter.text,
            "analysed": row_filter.analysed,
            "columns": list(row_filter.columns),
            "collations": {
                name: collation.value for name, collation in row_filter.collations.items()
            },
            "default_collation": row_filter.default_collation.value,
            "is_utf8": row_filter.is_utf8,
            "enums": {name: enum.name for name, enum in row_filter.enums.items()},
        }
    )


def from_text(text: str) -> RowFilter:
    """Read a filter from the ledger; raises StateError for any other text."""
    try:
        values = parse_json(text)
        return RowFilter(
            values["text"],
            values["analysed"],
            tuple(values["columns"]),
            {name: Collation(value) for name, value in values["collations"].items()},
            Collation(values["default_collation"]),
            values["is_utf8"],
            {name: EnumType(printed) for name, printed in values["enums"].items()},
        )
    except (ValueError, KeyError, TypeError, AttributeError) as err:
        raise StateError(
            f"the ledger holds no readable filter of a target ({err}): sync the table again"
        ) from None


def filter_of(state: TableState) -> RowFilter | None:
    """Returns the filter of a target's copy, by which its changes are routed, too."""
    return None if state.target_filter is None else from_text(state.target_filter)
