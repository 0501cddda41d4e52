"""Targets: what feeds each of them. Whoever wants to know which tables there are asks here, not the
publications.

Mostly a target is one published table, by its name. It may also gather the published leaves of a
partitioned table (``partition_root``), or take another table's rows through a filter of its own
(``from``): a ``where``, what a partition of that table holds, or both. Pure but for
read_target_sources() and read_targets().
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import psycopg

from waldelta.config import PipelineFile
from waldelta.config.pipeline_file import TargetTable
from waldelta.errors import TableBusy
from waldelta.metadata_columns import RELID, RELID_ATTNUM
from waldelta.pipeline.targets.target_filter import both
from waldelta.postgres import (
    CatalogRelation,
    Connection,
    PgType,
    PublishedTable,
    TableColumn,
    TableId,
)
from waldelta.postgres.catalog import Partition, PublishedRelation, read_partitions, read_relations
from waldelta.postgres.lock_waits import (
    LOCK_TIMEOUT_S,
    LockedTables,
    limited,
    read_around,
    read_locked_tables,
    within,
)
from waldelta.postgres.published_tables import read_published_relations, read_published_tables
from waldelta.postgres.type_catalog import INT8

_ATTEMPTS = 3

_BIGINT = PgType(INT8, -1, "bigint", type_name="int8")


@dataclass(frozen=True, slots=True)
class TargetSource:
    """What feeds a target: the relations whose changes are its changes, and the filter that they
    pass.

    ``source`` is the published table, or the partitioned one (``root_id``) whose leaves are
    gathered. ``where`` is the target's own filter as PostgreSQL reads it, of a target that takes
    one ``partition`` (its oid) of the source with that one's ``constraint``. ``late`` are gathered
    leaves that may have had rows before they were published. ``unread``: what that partition holds
    wasn't read, since somebody keeps it locked.
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
    """A target: its name, what feeds it, and that as one table (columns, key, filter, its leaves)
    as the target takes it.

    ``problem`` says why it can't be copied as things are.
    """

    id: TableId
    mapping: TargetSource
    table: PublishedTable
    problem: str | None = None

    @property
    def is_unread(self) -> bool:
        """Whether it isn't known which rows it takes, since somebody keeps what feeds it locked."""
        return self.mapping.unread or self.table.unread

    @property
    def other_source(self) -> str | None:
        """The table that feeds it, when that isn't the one of its name."""
        return None if self.mapping.source == self.id else str(self.mapping.source)


def read_target_sources(
    conn: Connection, pipeline: PipelineFile, locked: Collection[int] = ()
) -> dict[str, TargetSource]:
    """What feeds each target now, by the target's name; one statement when every target is a table
    of its own.

    Nothing is locked, but partitions of which targets take the rows (see read_partitions()).
    """
    published, entries = (
        read_published_relations(conn, pipeline.source.publication_names),
        pipeline.target.tables,
    )
    named = [TableId.parse(name) for name in (*merged_roots(entries), *sources(entries))]
    there = read_partitions(conn, named, locked) if named else {}
    return target_sources(
        entries, published, {name: found.oid for name, found in there.items()}, there
    )


def read_targets(
    conn: Connection,
    pipeline: PipelineFile,
    mappings: Mapping[str, TargetSource] | None = None,
    *,
    sizes: bool = True,
    locked: Collection[int] = (),
) -> list[ReplicatedTarget]:
    """The targets that a subscriber with this pipeline file would have, sorted by name; raises as
    read_published_tables().

    ``mappings`` is what read_target_sources() gave a moment ago (None: it is asked). ``sizes``: see
    read_leaves(); ``locked``: read_published_tables().
    """
    mappings = read_target_sources(conn, pipeline, locked) if mappings is None else mappings
    published = read_published_tables(
        conn, pipeline.source.publication_names, sizes=sizes, locked=locked
    )
    tables = {table.oid: table for table in published}
    roots = {
        r.oid: r
        for r in read_relations(
            conn, [f.root_id for f in mappings.values() if f.root_id is not None]
        )
    }
    # What has left the publications, or was dropped, since then feeds nothing.
    there = {
        name: mapping
        for name, mapping in mappings.items()
        if mapping.relation_ids & tables.keys()
        and (mapping.root_id is None or mapping.root_id in roots)
    }
    return sorted(
        (_target(TableId.parse(name), feed, tables, roots) for name, feed in there.items()),
        key=lambda t: t.id,
    )


def read_unlocked_sources(
    conn: Connection, pipeline: PipelineFile, *, sizes: bool = True
) -> tuple[dict[str, TargetSource], list[ReplicatedTarget], LockedTables]:
    """What feeds each target, the targets, and which tables are locked: nobody is waited for who
    keeps one locked already.

    Raises TableBusy when that never ends; a transaction that this is asked in, and its snapshot, go
    on.
    """

    def read(locked: frozenset[int]) -> tuple[dict[str, TargetSource], list[ReplicatedTarget]]:
        mappings = read_target_sources(conn, pipeline, locked)
        return mappings, read_targets(conn, pipeline, mappings, sizes=sizes, locked=locked)

    (mappings, targets), locked = read_around(conn, LOCK_TIMEOUT_S, read, read_locked_tables(conn))
    return mappings, targets, locked


def read_target(
    conn: Connection, pipeline: PipelineFile, table_id: TableId, *, catalogs: bool = False
) -> ReplicatedTarget | None:
    """One of the targets, if there is such a one; nobody who keeps another one's tables locked is
    waited for.

    Raises TableBusy when its own stay locked; the transaction that this is asked in, and its
    snapshot, are as they were then. ``catalogs``: what only a lock shows (which rows it takes) may
    be left out, and nobody at all is waited for.
    """
    locked, own = read_locked_tables(conn), frozenset[int]()
    for _ in range(_ATTEMPTS):
        try:
            # Somebody may take a lock right after the look at them.
            with limited(conn, "lock_timeout", LOCK_TIMEOUT_S), within(conn):
                while True:
                    targets = read_targets(conn, pipeline, locked=locked.relations - own)
                    found = next((target for target in targets if target.id == table_id), None)
                    if (
                        found is None
                        or catalogs
                        or (locked.relations - own).isdisjoint(needed := _lockable(found))
                    ):
                        return found
                    own |= needed
        except psycopg.errors.LockNotAvailable:
            now = read_locked_tables(conn)
            if not now.relations.isdisjoint(own):
                raise now.busy(str(table_id)) from None
            locked = LockedTables(locked.relations | now.relations, now.holders)
    raise TableBusy(
        f"{table_id}: one published table after the other couldn't be read for {LOCK_TIMEOUT_S:g} s"
        f" each. Locks that stand in the way:\n{locked.holders}\nwait until they end, and run again"
    )


def _lockable(target: ReplicatedTarget) -> frozenset[int]:
    """What is locked to read which rows it takes, and how many there are."""
    table, leaves = (
        target.table,
        {oid for leaf in target.table.leaves for oid in (leaf.oid, *leaf.above)},
    )
    return frozenset({table.oid, *table.ancestors, *target.mapping.relation_ids, *leaves})


def target_sources(
    entries: Mapping[str, TargetTable],
    published: Sequence[PublishedRelation],
    roots: Mapping[TableId, int],
    partitions: Mapping[TableId, Partition],
) -> dict[str, TargetSource]:
    """What feeds each target; pure. ``roots`` are oids of tables to gather, ``partitions`` what has
    the name of a target.

    A leaf that is gathered is no target itself; nor is a table that ``from`` names, unless it has
    an entry of its own. An entry that nothing feeds is left out: preflight says why.
    """
    by_name = {str(relation.id): relation for relation in published}
    found = dict(_merged(entries, published, roots))
    taken = {oid for mapping in found.values() for oid in mapping.relation_ids}
    fed = dict(
        _with_source(entries, {n: r for n, r in by_name.items() if r.oid not in taken}, partitions)
    )
    sources = {str(feed.source) for feed in fed.values()} - entries.keys()
    for name, relation in by_name.items():
        if relation.oid not in taken and name not in fed and name not in sources:
            own = entries.get(name)
            found[name] = TargetSource(
                relation.id, frozenset([relation.oid]), where=own.where if own else None
            )
    return found | fed


def merged_roots(entries: Mapping[str, TargetTable]) -> list[str]:
    """The names of the targets that gather leaves."""
    return [name for name, entry in entries.items() if entry.partition_root]


def sources(entries: Mapping[str, TargetTable]) -> dict[str, str]:
    """The targets that another table feeds, with that table's name."""
    return {
        name: e.source for name, e in entries.items() if e.source is not None and e.source != name
    }


def differing(leaves: Sequence[PublishedTable]) -> str | None:
    """What leaves that are to be gathered in one target don't have in common; None when they
    fit.
    """
    for what, of in (
        ("column lists", lambda t: frozenset(c.name for c in t.columns)),
        ("row filters", lambda t: t.row_filter),
        ("keys", lambda t: frozenset(t.key_columns)),
    ):
        if len({of(leaf) for leaf in leaves}) > 1:
            return what
    return None


def merge_partitions(root: CatalogRelation, leaves: Sequence[PublishedTable]) -> PublishedTable:
    """The leaves as one table: the root's columns that all of them publish, after each row's leaf.

    The key is the root's primary key when the leaves' rows are found by it, else the leaf with the
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


def _merged(
    entries: Mapping[str, TargetTable],
    published: Sequence[PublishedRelation],
    roots: Mapping[TableId, int],
) -> Iterator[tuple[str, TargetSource]]:
    for name in merged_roots(entries):
        root = roots.get(TableId.parse(name))
        # What is published by its root comes as one table already.
        below = [r for r in published if root in r.ancestors and r.relkind != "p"]
        leaves, late = frozenset(r.oid for r in below), frozenset(r.oid for r in below if r.is_late)
        if root is not None and leaves:
            yield (
                name,
                TargetSource(TableId.parse(name), leaves, root, entries[name].where, late=late),
            )


def _with_source(
    entries: Mapping[str, TargetTable],
    published: Mapping[str, PublishedRelation],
    partitions: Mapping[TableId, Partition],
) -> Iterator[tuple[str, TargetSource]]:
    for name, source in sources(entries).items():
        relation, where = published.get(source), entries[name].where
        there = partitions.get(TableId.parse(name))
        # A partition that was detached is a table as any other, whose rows the source no longer
        # has.
        if relation is None or name in published or (there is None and where is None):
            continue
        if there is not None and relation.oid not in there.ancestors:
            continue
        constraint, partition = (there.constraint, there.oid) if there is not None else (None, None)
        own, unread = both(constraint, where), there is not None and there.unread
        yield (
            name,
            TargetSource(
                relation.id,
                frozenset([relation.oid]),
                None,
                own,
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
    found = sorted(
        (tables[oid] for oid in mapping.relation_ids if oid in tables), key=lambda table: table.id
    )
    if mapping.root_id is None:
        partition, leaves = mapping.partition, found[0].leaves
        own = (
            leaves if partition is None else tuple(leaf for leaf in leaves if leaf.is_of(partition))
        )
        return ReplicatedTarget(table_id, mapping, replace(found[0], leaves=own))
    what = differing(found)
    problem = (
        f"{table_id}: its partitions are published with different {what}: give them the same"
        if what
        else None
    )
    return ReplicatedTarget(
        table_id, mapping, merge_partitions(roots[mapping.root_id], found), problem
    )
