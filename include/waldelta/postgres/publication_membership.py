"""Memberships: how each publication publishes a table, and whether that changed between two checks.
Pure.

An entry of a publication never changes: ALTER PUBLICATION removes it and adds another one with a
new oid. ``ALTER PUBLICATION … SET (…)`` replaces the publication's row. So an entry that still
exists was in force all the time. Of removed and added entries, it is only known that both were in
force at some time.

They are one change of the rules if one command made it, which can be recognized. ``SET TABLE``
removes before it adds, so the new entry isn't the first action of its transaction, while that of a
single ``ADD TABLE`` is (pg_publication_rel.cmin). The same is true for a table set in place of its
schema. A server that went through recovery, or was a standby, has lost that information: then both
count as separate.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

EVERY_CHANGE = frozenset({"insert", "update", "delete"})


@dataclass(frozen=True, slots=True)
class Membership:
    """How one publication (by oid) publishes one relation.

    ``entries`` are those that publish it: ``table 16402``, ``schema 16404``, ``all 16400``.
    ``version`` is the xmin of the publication's row; another ``owner``, ``options`` or operations
    (``publishes``) explain a change of it. ``is_apart``: the command that made the entries was the
    first in its transaction; known only for current memberships.
    """

    relation: int
    publication: int
    entries: frozenset[str]
    version: int = 0
    owner: int = 0
    options: str = ""
    publishes: frozenset[str] = frozenset()
    row_filter: str | None = None
    column_list: str | None = None
    is_apart: bool = False

    def continues(self, then: Membership) -> bool:
        """Whether the membership equals an earlier one, ``then``, and was in force all the time.

        Changes of options other than ``publish`` are detected elsewhere.
        """
        explained = self.owner != then.owner or self.options != then.options
        return (
            self.place == then.place
            and self._keeps_an_entry(then)
            and self.publishes == then.publishes
            and (self.version == then.version or explained)
        )

    def _keeps_an_entry(self, then: Membership) -> bool:
        """Whether one entry published the relation all the time under the current rules.

        Other entries may have come or gone. Of several entries, one determines the filter. So
        another filter than before may come from another entry, and an entry that went while others
        came may have been the one that determined it.
        """
        common = self.entries & then.entries
        nested = bool(common) and common in (self.entries, then.entries)
        alike = (self.row_filter, self.column_list) == (then.row_filter, then.column_list)
        return nested and (self.entries == then.entries or alike)

    def follows(self, then: Membership) -> bool:
        """Whether one command may have replaced the other membership by this one."""
        same_entry = not self.entries.isdisjoint(then.entries)
        return self.publication == then.publication and (same_entry or not self.is_apart)

    @property
    def place(self) -> tuple[int, int]:
        """The relation and the publication; a pair has one membership at a time."""
        return self.relation, self.publication

    @property
    def kinds(self) -> frozenset[str]:
        """Whether it is published by its own name, its schema's, or with all tables."""
        return frozenset(entry.split()[0] for entry in self.entries)


Rules = Mapping[str, frozenset[str | None]]


def rules(memberships: Collection[Membership]) -> Rules:
    """Returns the filters by which each operation is published, ORed.

    None admits every row, and is the only element then.
    """
    operations = sorted(_operations(memberships))
    return {
        op: _or_filters(m.row_filter for m in memberships if op in m.publishes) for op in operations
    }


def is_uniform(memberships: Collection[Membership]) -> bool:
    """Returns whether inserts, updates and deletes are all published by the one filter of a copy.

    Each relation is judged by itself; True also where nothing is known of any.
    """
    return all(
        rules(of).get(op) == _or_filters(m.row_filter for m in of)
        for of in _by_relation(memberships).values()
        for op in EVERY_CHANGE
    )


def is_same(then: Collection[Membership], now: Collection[Membership]) -> bool:
    """Returns whether the same rules were in force all the time, for each relation.

    False where the earlier rules aren't known.
    """
    memberships = {m.place: m for m in then}
    continuations = [m for m in now if m.place in memberships and m.continues(memberships[m.place])]
    return bool(then) and _each(then) == _each(now) == _each(continuations)


def was_interrupted(then: Collection[Membership], now: Collection[Membership]) -> bool:
    """Returns whether other rules may have been in force in between than a single change explains.

    Each relation is judged by itself. Relations that were or are in no publication don't count, nor
    does what isn't known.
    """
    old_rules, new_rules = _by_relation(then), _by_relation(now)
    return any(
        _was_interrupted(old_rules[relation], new_rules[relation])
        for relation in old_rules.keys() & new_rules.keys()
    )


def lost_operations(then: Collection[Membership], now: Collection[Membership]) -> frozenset[str]:
    """Returns operations that some relation isn't published with any more.

    Relations in no publication then or now don't count.
    """
    old_rules, new_rules = _by_relation(then), _by_relation(now)
    common = old_rules.keys() & new_rules.keys()
    return frozenset().union(
        *(_operations(old_rules[of]) - _operations(new_rules[of]) for of in common)
    )


def says_alike(then: Collection[Membership], now: Collection[Membership]) -> bool:
    """Returns whether each relation is published by the same rules, whatever was in force in
    between.
    """
    return _each(then) == _each(now)


def _was_interrupted(then: Collection[Membership], now: Collection[Membership]) -> bool:
    places = {m.place: m for m in now}
    continuations = {
        m: places[m.place] for m in then if m.place in places and places[m.place].continues(m)
    }
    # The filter of an unchanged membership may read differently, because a column was renamed.
    was, there, always = (
        _by_rules(memberships)
        for memberships in (
            [continuations.get(m, m) for m in then],
            now,
            list(continuations.values()),
        )
    )
    stayed = {m.place for m in continuations}
    gone, came = (
        [m for m in then if m.place not in stayed],
        [m for m in now if m.place not in stayed],
    )
    at_once = len(gone) == len(came) == 1 and came[0].follows(gone[0])
    if was == there:
        # One command doesn't replace an entry by an equal one, unless it is of another kind.
        return always != was and not (at_once and gone[0].kinds != came[0].kinds)
    if _taken_together(then) == _taken_together(now):
        return True  # Neither the filter nor the operations show what differs between operations.
    if always in (was, there):
        return False  # Publication only grew, or only shrank.
    return not at_once


def _by_relation(memberships: Iterable[Membership]) -> dict[int, list[Membership]]:
    groups: dict[int, list[Membership]] = {}
    for m in memberships:
        groups.setdefault(m.relation, []).append(m)
    return groups


def _each(memberships: Collection[Membership]) -> dict[int, Any]:
    return {relation: _by_rules(of) for relation, of in _by_relation(memberships).items()}


def _operations(memberships: Iterable[Membership]) -> frozenset[str]:
    return frozenset().union(*(m.publishes for m in memberships))


def _by_rules(memberships: Collection[Membership]) -> tuple[Rules, frozenset[str | None]]:
    return rules(memberships), frozenset(m.column_list for m in memberships)


def _taken_together(memberships: Collection[Membership]) -> tuple[frozenset[Any], ...]:
    filters, lists = (
        (m.row_filter for m in memberships),
        frozenset(m.column_list for m in memberships),
    )
    return _or_filters(filters), _operations(memberships), lists


def _or_filters(filters: Iterable[str | None]) -> frozenset[str | None]:
    conditions = frozenset(filters)
    return frozenset({None}) if None in conditions else conditions


def to_texts(memberships: Iterable[Membership]) -> list[str]:
    """Returns memberships as the ledger's texts.

    A publication has one text for all relations with the same rules.

    >>> ways = frozenset({"table 2"})
    >>> held = [Membership(relation, 1, ways, row_filter="(a > 1)") for relation in (7, 8)]
    >>> len(to_texts(held)), from_texts(to_texts(held)) == held
    (1, True)
    """
    relations: dict[str, list[int]] = {}
    for m in memberships:
        rule = asdict(m) | {"entries": sorted(m.entries), "publishes": sorted(m.publishes)}
        relation, _ = rule.pop("relation"), rule.pop("is_apart")
        relations.setdefault(json.dumps(rule), []).append(relation)
    return sorted(
        json.dumps({**json.loads(rule), "relations": sorted(of)}) for rule, of in relations.items()
    )


def from_texts(texts: Iterable[str]) -> list[Membership]:
    """Read memberships from the ledger."""
    memberships: list[Membership] = []
    for text in texts:
        said = json.loads(text)
        said |= {"entries": frozenset(said["entries"]), "publishes": frozenset(said["publishes"])}
        memberships += [Membership(relation, **said) for relation in said.pop("relations")]
    return memberships
