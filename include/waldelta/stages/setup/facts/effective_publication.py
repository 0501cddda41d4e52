"""How each leaf partition is effectively published when a slot reads several publications.

pgoutput (get_rel_sync_entry): a publication via root publishes a leaf as the topmost member above
it, and only that member's filter and column list apply; any other publication publishes it as
itself. Of a slot's publications only those apply that publish the leaf as the topmost of all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from waldelta.postgres import Leaf, TableId
from waldelta.stages.setup.facts.publications import PublicationState, PublicationTable
from waldelta.stages.setup.facts.source_facts import Facts, TableFacts

_ITSELF = 1 << 30  # Deeper than any member of a publication.


@dataclass(frozen=True, slots=True)
class Entry:
    """How one publication publishes a leaf: as which table, at which depth, with which columns.

    ``columns`` are the columns sent, ``listed`` whether by a column list; ``has_generated`` is
    about the table.
    """

    publication: str
    table: TableId
    depth: int
    columns: frozenset[str]
    listed: bool
    has_generated: bool
    publishes_generated: bool

    def clashes(self, other: Entry) -> bool:
        """Returns whether pgoutput stops permanently where both publish a table."""
        flags = self.has_generated and not self.listed and not other.listed
        return self.columns != other.columns or (
            flags and self.publishes_generated != other.publishes_generated
        )


def members(state: PublicationState, facts: Facts) -> list[PublicationTable]:
    """Returns the tables that a publication names or covers.

    Of partition trees that it covers, only the topmost table is returned.
    """
    covered = [
        PublicationTable(i)
        for i in facts.scopes.get(state.name, ())
        if i not in {t.id for t in state.tables}
    ]
    return [*state.tables, *covered]


def is_overruled(state: PublicationState, table: TableFacts, facts: Facts) -> bool:
    """Returns whether the publication publishes the table's rows as another table's.

    The table's own filter and column list then have no effect.
    """
    if not state.via_root:
        return False
    named = {
        facts.tables[member.id].relation.oid
        for member in members(state, facts)
        if member.id in facts.tables
    }
    return not named.isdisjoint(table.relation.ancestors)


def own_leaves(state: PublicationState, table: TableFacts) -> list[Leaf]:
    """Returns the leaves published by this table's entry, not by effective entries of their own."""
    listed = (
        set() if state.via_root else {member.id for member in state.tables} - {table.relation.id}
    )
    return [leaf for leaf in table.leaves if leaf.id not in listed]


def find_clashes(states: Iterable[PublicationState], facts: Facts) -> Iterator[tuple[Entry, Entry]]:
    """Yields pairs of publications that can't be decoded together, once per table."""
    by_leaf: dict[int, list[Entry]] = {}
    for state in states:
        for leaf, entry in _entries(state, facts).items():
            by_leaf.setdefault(leaf, []).append(entry)
    told: set[tuple[TableId, str]] = set()
    for entries in by_leaf.values():
        top = min(entry.depth for entry in entries)
        first, *others = [entry for entry in entries if entry.depth == top]
        for other in others:
            if first.clashes(other) and (first.table, other.publication) not in told:
                told.add((first.table, other.publication))
                yield first, other


def _entries(state: PublicationState, facts: Facts) -> dict[int, Entry]:
    """Returns how the publication publishes each leaf, by oid."""
    found: dict[int, Entry] = {}
    for member in members(state, facts):
        table = facts.tables.get(member.id)
        if table is None or is_overruled(state, table, facts):
            continue
        for leaf in own_leaves(state, table):
            as_root = state.via_root and table.relation.relkind == "p"
            name, depth = (
                (member.id, len(table.relation.ancestors)) if as_root else (leaf.id, _ITSELF)
            )
            columns = table.relation.columns
            every = frozenset(column.name for column in columns if state.sends(column))
            sent = frozenset(member.columns) if member.columns is not None else every
            generated = any(column.generated for column in columns)
            found[leaf.oid] = Entry(
                state.name,
                name,
                depth,
                sent,
                member.columns is not None,
                generated,
                state.publishes_generated,
            )
    return found
