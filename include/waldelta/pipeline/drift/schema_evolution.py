"""Schema evolution: how a target's columns follow the source's, from the Relation messages in a
batch range.

The stream has only names and types. The source's current catalogs show what happened in between: a
rename, or a drop and an add; a default for existing rows. NeedsSync asks for a new copy where the
catalogs can't show it, or where an ALTER rewrote rows without sending them. A new copy is exact,
but expensive.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

from waldelta.config import TypeOptions
from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.errors import NeedsSync, SchemaChanged
from waldelta.lake.ledger import ColumnState, TableState
from waldelta.metadata_columns import RELID_ATTNUM
from waldelta.pgoutput.messages import Relation, RelationColumn
from waldelta.pipeline.drift.catalog_state import CatalogTable
from waldelta.pipeline.drift.type_change import TypeChange
from waldelta.pipeline.drift.unsent_changes import rewritten
from waldelta.pipeline.targets import column_states
from waldelta.postgres import NUMERIC_OID, TEXT_OID, VARBIT_OID, VARCHAR_OID, PgType, TableColumn
from waldelta.types.numeric import decimal, precision_and_scale

# A greater precision of time, timestamp, timestamptz and timetz changes no value.
_WITH_DIGITS = frozenset({1083, 1114, 1184, 1266})
_MAY_GROW = frozenset({VARCHAR_OID, VARBIT_OID}) | _WITH_DIGITS


@dataclass(frozen=True, slots=True)
class NewColumn:
    """A column of the target after an evolution: the old column it continues, or its initial
    value.
    """

    state: ColumnState
    source: str | None
    fill: str | None = None
    same_type: bool = True


@dataclass(frozen=True, slots=True)
class Evolution:
    """A target's columns after an evolution, and each relation's position of every column.

    A position is None where the relation's rows don't have the column, or not with the type that a
    stopped column had.
    """

    columns: tuple[NewColumn, ...]
    key_columns: tuple[str, ...]
    dropped: tuple[str, ...]
    positions: tuple[tuple[int | None, ...], ...]

    @property
    def names(self) -> dict[str, str]:
        """The names of the columns that stay, by those that the target has."""
        return {c.source: c.state.name for c in self.columns if c.source is not None}

    @property
    def stopped(self) -> frozenset[str]:
        """The columns that stay with their last values."""
        return frozenset(column.state.name for column in self.columns if column.state.stopped)

    def changes(self, state: TableState) -> bool:
        """Whether the target has to change at all."""
        return {c.state.name: c.state for c in self.columns} != {c.name: c for c in state.columns}

    @property
    def only_adds(self) -> bool:
        """Whether the evolution only adds columns without a value for existing rows.

        Then no row needs to be written.
        """
        columns = [c for c in self.columns if c.source is not None]
        is_same = all(c.source == c.state.name and c.same_type for c in columns)
        return is_same and not self.dropped and not any(c.fill is not None for c in self.columns)

    @property
    def alters(self) -> bool:
        """Whether the table itself changes, not only what the ledger has of it.

        Another limit of a type, or another name on the source alone, changes only the ledger.
        """
        return not self.only_adds or any(column.source is None for column in self.columns)

    def describe(self) -> str:
        """List the changes by column name."""
        added = [c.state.name for c in self.columns if c.source is None]
        renamed = [
            f"{c.source} to {c.state.name}"
            for c in self.columns
            if c.source not in (None, c.state.name)
        ]
        widened = [
            f"{c.state.name} to {c.state.type_name}" for c in self.columns if not c.same_type
        ]
        parts = [
            ("added", added),
            ("dropped", list(self.dropped)),
            ("stopped", sorted(self.stopped)),
            ("renamed", renamed),
            ("widened", widened),
        ]
        return "; ".join(f"{word}: {', '.join(names)}" for word, names in parts if names)


def plan_evolution(  # noqa: PLR0913, PLR0917 - what was, came and is there, and what is wanted
    state: TableState,
    relations: Sequence[Relation],
    catalog: CatalogTable,
    types: dict[tuple[int, int], PgType],
    options: TypeOptions = DEFAULT_TYPES,
    stopped: Collection[str] = (),
    renames: Mapping[str, str] = MappingProxyType({}),
) -> Evolution:
    """Plan what is needed to apply rows of these relations, which are in stream order.

    ``types`` describes the types of the last relation's columns, ``options`` chooses their types in
    the lake. The ``stopped`` columns stay with their last values. ``renames`` are the names in the
    lake of columns that have another one there. Raises NeedsSync when only a new copy is exact.
    """
    attnums = [_attnums(state, catalog, relation) for relation in relations]
    alone = [column for column in state.columns if column.name in stopped]
    last_values = [_places(column, relations, attnums) for column in alone]
    hidden = {column.attnum for column in alone}
    places = [{n: k for k, n in enumerate(there) if n not in hidden} for there in attnums]
    relations = [
        replace(relation, columns=tuple(relation.columns[k] for k in there.values()))
        for relation, there in zip(relations, places, strict=True)
    ]
    numbers, last = [list(there) for there in places], relations[-1]
    _check_continuous(state, numbers)
    for number, name in _retyped_columns(state, relations, numbers).items():
        had = next((column for column in state.columns if column.attnum == number), None)
        change = type_change(had, catalog) if had is not None else TypeChange(name, "its first one")
        raise NeedsSync(
            f"{state.table_name}: {change}, which rewrote the rows, and PostgreSQL doesn't"
            " replicate rewrites"
        )
    copied = {column.attnum: column for column in state.columns if column not in alone}
    key = tuple(renames.get(name, name) for name in _key(state, relations, numbers))
    new = _with_types(last, numbers[-1], key, types, options, renames)
    columns = [_new_column(state, copied.get(column.attnum), catalog, column) for column in new]
    # New rows have no value in a stopped column.
    columns += [NewColumn(replace(c, stopped=True, not_null=False), c.name) for c in alone]
    dropped = tuple(column.name for number, column in copied.items() if number not in numbers[-1])
    positions = tuple(
        (*map(there.get, numbers[-1]), *(of_column[n] for of_column in last_values))
        for n, there in enumerate(places)
    )
    return Evolution(tuple(columns), key, dropped, positions)


def plan_empty(
    state: TableState,
    relations: Sequence[Relation],
    catalog: CatalogTable,
    types: dict[tuple[int, int], PgType],
    options: TypeOptions = DEFAULT_TYPES,
    renames: Mapping[str, str] = MappingProxyType({}),
) -> Evolution:
    """Plan the same for a target without rows.

    It may have columns that the source added after its first rows were sent. These are dropped, and
    added again when rows have them.
    """
    first = set(_attnums(state, catalog, relations[0]))
    columns = [column for column in state.columns if column.attnum in first]
    later = tuple(column.name for column in state.columns if column.attnum not in first)
    evolution = plan_evolution(
        replace(state, columns=columns), relations, catalog, types, options, renames=renames
    )
    return replace(evolution, dropped=evolution.dropped + later)


def changed_columns(
    state: TableState, relations: Sequence[Relation], catalog: CatalogTable
) -> tuple[list[str], dict[str, TypeChange]]:
    """Returns the columns outside the key that the last relation lacks, and those whose type
    changed in a way that rewrote the rows.
    """
    numbers = [_attnums(state, catalog, relation) for relation in relations]
    rewrote = _retyped_columns(state, relations, numbers)
    dropped = [column.name for column in state.columns if column.attnum not in numbers[-1]]
    retyped = [c for c in state.columns if c.attnum in rewrote and c.name not in dropped]
    return (
        [name for name in dropped if name not in state.key_columns],
        {column.name: type_change(column, catalog) for column in retyped},
    )


def retyped_columns(state: TableState, catalog: CatalogTable) -> dict[str, TypeChange]:
    """Returns the columns that have another type in the catalogs now, for which PostgreSQL rewrote
    the rows.
    """
    types = {column.attnum: column.type for column in catalog.columns.values()}
    return {
        column.name: type_change(column, catalog)
        for column in state.columns
        if not keeps_values(_type(column), types.get(column.attnum, _type(column)))
    }


def type_change(column: ColumnState, catalog: CatalogTable) -> TypeChange:
    """Returns a column's change from the type that it was copied with to that in the catalogs."""
    names = (now.type_name for now in catalog.columns.values() if now.attnum == column.attnum)
    return TypeChange(column.name, column.type_name, next(names, ""))


def _type(column: ColumnState | RelationColumn) -> tuple[int, int]:
    return column.type_oid, column.typmod


def _places(
    column: ColumnState, relations: Sequence[Relation], numbers: Sequence[list[int]]
) -> list[int | None]:
    """Returns a column's position in each relation; None from its drop or change of type on."""
    places: list[int | None] = []
    had = None if column.stopped else _type(column)
    for relation, there in zip(relations, numbers, strict=True):
        at = there.index(column.attnum) if column.attnum in there else None
        now = None if at is None else _type(relation.columns[at])
        had = now if had and now and keeps_values(had, now) else None
        places.append(at if had else None)
    return places


def unchanged(state: TableState) -> Evolution:
    """Returns an evolution that keeps the target's columns, for a range without rows."""
    return Evolution(
        tuple(NewColumn(c, c.name) for c in state.columns), tuple(state.key_columns), (), ()
    )


def plan_ignoring(
    state: TableState, relations: Sequence[Relation], catalog: CatalogTable
) -> Evolution:
    """Plan to keep the target's columns: new ones are left out, missing ones are NULL.

    Raises SchemaChanged when the key lost a column, or a column's type holds other values now.
    """
    places = []
    for relation in relations:
        there = {column.name: k for k, column in enumerate(relation.columns)}
        # Rows of a table without a key are identified by all of their values.
        identity = [
            column.name_on_source
            for column in state.columns
            if column.name in state.key_columns or not state.key_columns
        ]
        if absent := [name for name in identity if name not in there]:
            raise SchemaChanged(
                f"{state.table_name}: its key lost {', '.join(absent)}: sync this table again"
            )
        for column in state.columns:
            place = there.get(column.name_on_source)
            now = relation.columns[place] if place is not None else None
            if now and not keeps_values(_type(column), _type(now)):
                change = type_change(column, catalog)
                raise SchemaChanged(f"{state.table_name}: {change}: sync this table again")
        places.append(tuple(there.get(column.name_on_source) for column in state.columns))
    return replace(unchanged(state), positions=tuple(places))


def _attnums(state: TableState, catalog: CatalogTable, relation: Relation) -> list[int]:
    """Returns the columns' attribute numbers, which alone distinguish a renamed column from a new
    one.
    """
    copied = {column.name_on_source: column.attnum for column in state.columns}
    current = {name: column.attnum for name, column in catalog.columns.items()}
    numbers = current | copied
    for name in (column.name for column in relation.columns):
        if name not in numbers:
            raise NeedsSync(
                f"{state.table_name}: column {name!r} was added and dropped again, or renamed,"
                " before its changes were applied"
            )
        if current.get(name, numbers[name]) != numbers[name]:
            raise NeedsSync(
                f"{state.table_name}: column {name!r} was dropped, and another one took its name"
            )
    return [numbers[column.name] for column in relation.columns]


def _check_continuous(state: TableState, numbers: Sequence[list[int]]) -> None:
    """Raise NeedsSync for a column that comes or goes more than once within the range, as when it
    was removed from the publication and added again.
    """
    attnums = [column.attnum for column in state.columns]
    for number in {n for one in numbers for n in one}:
        there = [number in one for one in (attnums, *numbers)]
        if sum(a != b for a, b in pairwise(there)) > 1:
            raise NeedsSync(
                f"{state.table_name}: a column was removed from the publication and added again"
            )


def _with_types(
    relation: Relation,
    numbers: Sequence[int],
    key: Sequence[str],
    types: dict[tuple[int, int], PgType],
    options: TypeOptions,
    renames: Mapping[str, str],
) -> list[ColumnState]:
    """Returns a relation's columns with their names and types in the lake."""
    columns = [
        TableColumn(
            name := renames.get(column.name, column.name),
            number,
            types[_type(column)],
            not_null=False,
            source_name=column.name if column.name != name else None,
        )
        for number, column in zip(numbers, relation.columns, strict=True)
    ]
    return column_states(columns, key, options)


def _new_column(
    state: TableState, existing: ColumnState | None, catalog: CatalogTable, new: ColumnState
) -> NewColumn:
    if existing is None:
        now, name = catalog.columns[new.name_on_source], new.name_on_source
        highest = max((c.attnum for c in state.columns), default=0)
        # A number below those of the copied columns: the column existed already, but wasn't
        # published. A file of another number: the source of the column's first values may be gone,
        # such as a volatile default that was dropped.
        if (
            now.unsure
            or now.attnum < highest
            or now.attnum in rewritten(state.storage, catalog.storage)
        ):
            raise NeedsSync(
                f"{state.table_name}: column {name!r} was added with values for existing"
                " rows, which PostgreSQL doesn't send"
            )
        if now.last_dropped > highest:
            raise NeedsSync(
                f"{state.table_name}: column {name!r} may not be the same column as the"
                " earlier one of that name"
            )
        return NewColumn(new, None, now.missing)
    new = replace(new, not_null=existing.not_null)
    same_type = existing.stored_type == new.stored_type
    if not same_type and not _widens(existing, new):
        reason = other_type(existing.name, existing.stored_type, new.stored_type)
        raise NeedsSync(f"{state.table_name}: {reason}")
    return NewColumn(new, existing.name, same_type=same_type)


def _widens(existing: ColumnState, new: ColumnState) -> bool:
    """Whether the target's own values, cast, equal those of a new copy.

    That is so for a numeric whose limits grew, unless an option chose either type. A decimal type
    that isn't the numeric's own prints other zeros, and another type rounds.
    """
    if existing.type_oid != NUMERIC_OID or new.type_oid != NUMERIC_OID:
        return False
    old_type, new_type = decimal(existing.typmod), decimal(new.typmod)
    return (
        old_type is not None
        and old_type.spark == existing.stored_type
        and new.stored_type == (new_type.spark if new_type is not None else "string")
    )


def other_type(column: str, stored: str, configured: str) -> str:
    """Describe a column whose type in the lake isn't the one chosen by the pipeline file's
    ``types``.
    """
    types = f"{stored} in its target, and {configured} by the pipeline file's types"
    return f"column {column!r} is {types}"


def keeps_values(old: tuple[int, int], new: tuple[int, int]) -> bool:
    """Returns whether ALTER TYPE from one (oid, typmod) to another changes no value and writes no
    row.

    Follows PostgreSQL's ATColumnChangeRequiresRewrite: limits that grow, and text types that share
    their storage.
    """
    if old == new:
        return True
    (old_oid, old_typmod), (new_oid, new_typmod) = old, new
    if old_oid == new_oid == NUMERIC_OID:
        old_limits, new_limits = precision_and_scale(old_typmod), precision_and_scale(new_typmod)
        return new_limits is None or (
            old_limits is not None and old_limits[1] == new_limits[1] and new_typmod > old_typmod
        )
    if old_oid == new_oid:
        return old_oid in _MAY_GROW and (
            new_typmod == -1 or (old_typmod != -1 and new_typmod >= old_typmod)
        )
    return {old_oid, new_oid} == {TEXT_OID, VARCHAR_OID} and new_typmod == -1


def _retyped_columns(
    state: TableState, relations: Sequence[Relation], numbers: Sequence[list[int]]
) -> dict[int, str]:
    """Returns the columns, by number, whose types in this range don't all hold the same values."""
    types = {column.attnum: [_type(column)] for column in state.columns}
    names = {}
    for relation, there in zip(relations, numbers, strict=True):
        for number, column in zip(there, relation.columns, strict=True):
            types.setdefault(number, []).append(_type(column))
            names[number] = column.name
    return {
        number: names[number]
        for number, had in types.items()
        if not all(keeps_values(*pair) for pair in pairwise(had))
    }


def _key(
    state: TableState, relations: Sequence[Relation], numbers: Sequence[list[int]]
) -> tuple[str, ...]:
    key = [
        column.attnum
        for name in state.key_columns
        for column in state.columns
        if column.name == name
    ]
    for relation, there in zip(relations, numbers, strict=True):
        flagged = {
            number for number, column in zip(there, relation.columns, strict=True) if column.is_key
        }
        # Old rows have only the columns of the replica identity. So another identity, if only for a
        # while, is another key. With a wider identity, several rows may have had the same key. Of
        # complete old rows, all columns are flagged; of merged partitions, the leaf.
        surplus = (
            flagged.difference(key, {RELID_ATTNUM})
            if key and relation.replica_identity != "f"
            else ()
        )
        if set(key) - set(there) or (flagged and not flagged.issuperset(key)) or surplus:
            raise NeedsSync(f"{state.table_name}: its replica identity changed")
    names = dict(zip(numbers[-1], relations[-1].columns, strict=True))
    return tuple(names[number].name for number in key)


def check_key(state: TableState, catalog: CatalogTable) -> None:
    """Raise NeedsSync when rows of the source may share what was a key when they were copied.

    With REPLICA IDENTITY FULL the stream doesn't show that a primary key was dropped.
    """
    key_numbers = {column.attnum for column in state.columns if column.name in state.key_columns}
    if key_numbers and catalog.key is not None and not (catalog.key and catalog.key <= key_numbers):
        raise NeedsSync(
            f"{state.table_name}: its key ({', '.join(state.key_columns)}) was dropped or replaced"
            " on the source"
        )


def refusal(state: TableState, what: str) -> SchemaChanged:
    """Returns the error that the policy ``fail`` raises for a change."""
    return SchemaChanged(
        f"{state.table_name}: {what}; its changes wait in the change log: sync this table again"
        f" (initial sync with tables={state.table_name}), or let runs follow such changes with"
        " schema_changes: evolve"
    )
