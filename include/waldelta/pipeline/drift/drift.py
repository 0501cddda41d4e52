"""Finds drift: where a target no longer holds what a new copy would hold, though every change was
applied.

PostgreSQL sends nothing for rows that a changed filter newly admits or excludes. It also sends
nothing for a partition that is attached, detached or truncated, a column that enters a column list,
or an operation that wasn't published before. A PostgreSQL subscriber keeps such rows as they are.
This module is pure: it compares the ledger's record of the copy with the current catalogs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from waldelta.config import PipelineFile, TypeOptions
from waldelta.errors import FilterNotTranslatable, NeedsSync
from waldelta.lake.ledger import StorageState, TableState
from waldelta.pipeline.drift.catalog_state import CatalogTable
from waldelta.pipeline.drift.repair_plan import Repair, entered_columns, moved_leaves, reattached
from waldelta.pipeline.drift.unsent_changes import replaced_files
from waldelta.pipeline.targets import ReplicatedTarget, column_states, filter_of
from waldelta.pipeline.targets.target_sources import combine_filters
from waldelta.postgres import PublishedTable
from waldelta.postgres.publication_membership import (
    from_texts,
    lost_operations,
    to_texts,
    was_interrupted,
)
from waldelta.quantities import counted
from waldelta.row_filter.parse import parse_analysed

# The text of a filter that admits every row.
EVERYTHING = "true"


@dataclass(frozen=True, slots=True)
class PublicationDrift:
    """A change of the publications that affects a target: its description, the state to record, and
    whether this run must repair the target (``mends``).

    ``is_new`` is False while nothing has changed since the last record. ``repair`` holds what a
    repair needs.
    """

    reasons: tuple[str, ...]
    state: TableState
    mends: bool
    is_new: bool
    repair: Repair


def find_drift(
    pipeline: PipelineFile, state: TableState, catalog: CatalogTable, target: ReplicatedTarget
) -> PublicationDrift:
    """Compare a copied target with its source as it is published now.

    There is nothing to report or record without ``reasons`` and ``is_new``. ``catalog`` is the
    source in the catalogs.
    """
    table, mapping = target.table, target.mapping
    where = combine_filters(mapping.constraint, pipeline.target.where_of(state.table_name))
    state = _with_made_leaves(state, catalog, mapping.late)
    renamed = _renamed_filter(state, table)
    base_state = replace(state, row_filter=renamed) if renamed else state
    away = was_interrupted(from_texts(base_state.entries), table.entries) or _was_lost_unseen(
        base_state, table
    )
    own_reasons = list(_own_filter(base_state, where))
    published = list(_publication(base_state, table, away=away))
    truncated_or_reattached = reattached(base_state, catalog.storage) | catalog.truncated
    moved = frozenset().union(*moved_leaves(base_state, table), truncated_or_reattached)
    reasons = (*own_reasons, *published, *_partitions(base_state, table, catalog))
    if pipeline.target.drift == "repair":
        reasons += tuple(_recorded_before(base_state, moved))
    recorded = _record(base_state, table, catalog.storage, moved, away=away)
    # A table that was out of a publication for a while is repaired like a drift recorded earlier:
    # by a new copy.
    repaired_from = (
        replace(base_state, later_filters=recorded.later_filters) if away else base_state
    )
    repair = Repair(
        repaired_from, table, truncated_or_reattached, catalog.storage, where, mapping.partition
    )
    mends = bool(reasons) and pipeline.target.drift == "repair"
    if pipeline.target.drift is None:
        managed = {entry.name for entry in pipeline.source.publications if entry.manage}
        mends = bool(own_reasons) or (bool(published) and managed.issuperset(table.publications))
    return PublicationDrift(reasons, recorded, mends, is_new=recorded != state, repair=repair)


def repair_without_drift(
    pipeline: PipelineFile, state: TableState, catalog: CatalogTable, target: ReplicatedTarget
) -> Repair:
    """Returns a target's state, source and filter, with which its rows can be read again.

    Raises NeedsSync for a target that has drifted: it doesn't hold the rows that a new copy would.
    """
    name = state.table_name
    if replaced_files(state, catalog.storage):
        raise NeedsSync(
            f"{name}: some of its partitions have a new file, perhaps after a TRUNCATE: let a run"
            " check them first"
        )
    drift = find_drift(pipeline, state, catalog, target)
    if drift.reasons:
        reasons = "; ".join(drift.reasons)
        raise NeedsSync(
            f"{name} drifted ({reasons}): let a run, or sync --tables {name}, repair that first"
        )
    return drift.repair


def _with_made_leaves(
    state: TableState, catalog: CatalogTable, late: Collection[int]
) -> TableState:
    """Returns the state with the leaves that were created as partitions since the copy.

    Such a leaf was empty when it was created, so every row of it was sent. Leaves that were
    published ``late`` may have had rows before, and are left out.
    """
    if not state.storage.files:
        return state
    oids = {*(file.oid for file in state.storage.files), *catalog.attached, *late}
    new_files = [file for file in catalog.storage.files if file.oid not in oids]
    return (
        replace(state, storage=replace(state.storage, files=[*state.storage.files, *new_files]))
        if new_files
        else state
    )


def _own_filter(state: TableState, where: str | None) -> Iterator[str]:
    target_filter = filter_of(state)
    if (target_filter.text if target_filter else None) != where:
        text = target_filter.text if target_filter else "every row"
        yield (
            f"target.tables.{state.table_name}.where is {where or 'gone'}, but its copy was made"
            f" with {text}"
        )


def _filters(state: TableState) -> list[str]:
    """Returns the publications' filters known to have been in force since the copy, the copy's
    first.
    """
    return [state.row_filter or EVERYTHING, *state.later_filters]


def _publication(state: TableState, table: PublishedTable, *, away: bool) -> Iterator[str]:
    filters, present = _filters(state), table.row_filter or EVERYTHING
    if {present} != set(filters):
        yield f"its publications' filter is {present}, but its copy was made with {filters[0]}"
    # _record() stores an interruption in the publication as the same filter twice.
    if (away or _is_away_recorded(state)) and not _lacking(state, table):
        yield (
            "it was removed from a publication and added again, or had another filter or other"
            " options there for a while; PostgreSQL may not have sent the changes of that time"
        )
    if state.publishes and (publishes := sorted(table.publishes)) != state.publishes:
        yield (
            f"it publishes {', '.join(publishes)}, but at its copy it published"
            f" {', '.join(state.publishes)}"
        )
    if entered := entered_columns(state, table):
        yield f"column {', '.join(entered)} was added to its column list"


def _is_away_recorded(state: TableState) -> bool:
    return any(then == later for then, later in pairwise(_filters(state)))


def _lacking(state: TableState, table: PublishedTable) -> frozenset[str]:
    """Returns the operations that were published at the copy and aren't now."""
    return frozenset(state.publishes) - table.publishes


def _was_lost_unseen(state: TableState, table: PublishedTable) -> bool:
    """Returns whether a merged leaf has lost an operation that other leaves still publish.

    The sum of all leaves' operations doesn't show such a loss.
    """
    operations = lost_operations(from_texts(state.entries), table.entries)
    return bool(
        (operations.intersection(state.publishes) if state.publishes else operations)
        - _lacking(state, table)
    )


def _partitions(state: TableState, table: PublishedTable, catalog: CatalogTable) -> Iterator[str]:
    """Describe leaves that came with rows, went, or were truncated since the files were last
    recorded.

    They are reported once, since PostgreSQL sends nothing about them.
    """
    came, gone = moved_leaves(state, table)
    if came:
        yield (
            f"partition {_leaf_names(table, came)} was added; PostgreSQL did not send the rows that"
            " it already had"
        )
    if gone:
        yield (f"{counted(len(gone), 'partition')} left the table; their rows stay in the target")
    if back := reattached(state, catalog.storage):
        yield (
            f"partition {_leaf_names(table, back)} was detached and attached again; PostgreSQL did"
            " not send the changes in between"
        )
    if truncated := catalog.truncated - back:
        yield (
            f"partition {_leaf_names(table, truncated)} was probably truncated (it has a new file"
            " without an old row); its old rows stay in the target, because PostgreSQL doesn't"
            " send a partition's TRUNCATE"
        )


def _leaf_names(table: PublishedTable, leaves: Collection[int]) -> str:
    return ", ".join(sorted(str(leaf.id) for leaf in table.leaves if leaf.oid in leaves))


def _recorded_before(state: TableState, moved: Collection[int]) -> Iterator[str]:
    """Describe leaves that came, went or were truncated when the run only reported that."""
    if leaves := set(state.unrepaired_leaves).difference(moved):
        yield (
            f"{counted(len(leaves), 'partition')} changed earlier (added, removed or truncated),"
            " which was reported but not repaired"
        )


def unpublished_columns(table: PublishedTable, storage: StorageState) -> list[int]:
    """Returns the numbers of the table's columns that aren't published."""
    published = {column.attnum for column in table.columns}
    return [a.attnum for a in storage.attributes if a.attnum not in published]


def as_published(
    state: TableState,
    table: PublishedTable,
    storage: StorageState,
    target_filter: str | None,
    types: TypeOptions,
) -> TableState:
    """Returns a target's state with all that is published of its table, as of a snapshot whose rows
    it holds.

    Drift that was recorded since an earlier snapshot is over.
    """
    return replace(
        state,
        relation_ids=list(table.relation_ids),
        columns=column_states(table.columns, table.key_columns, types),
        row_filter=table.row_filter,
        storage=storage,
        target_filter=target_filter,
        later_filters=[],
        publishes=sorted(table.publishes),
        entries=to_texts(table.entries),
        unpublished=unpublished_columns(table, storage),
        unrepaired_leaves=[],
    )


def _record(
    state: TableState,
    table: PublishedTable,
    storage: StorageState,
    moved: Collection[int],
    *,
    away: bool,
) -> TableState:
    present, last = table.row_filter or EVERYTHING, _filters(state)[-1]
    # Once the operations are published again, only this record shows that changes weren't sent.
    away = away or (bool(_lacking(state, table)) and not _is_away_recorded(state))
    if away or last != present:
        # The same filter twice means that another one was in force in between.
        later = [last, present] if away and last != present else [present]
        state = replace(state, later_filters=[*state.later_filters, *later])
    return replace(
        state,
        unrepaired_leaves=sorted({*state.unrepaired_leaves, *moved}),
        unpublished=sorted({*state.unpublished, *unpublished_columns(table, storage)}),
        entries=to_texts(table.entries),
    )


def _renamed_filter(state: TableState, table: PublishedTable) -> str | None:
    """Returns the publication's current filter when only names of columns in it have changed."""
    if state.row_filter is None or table.row_filter is None or state.row_filter == table.row_filter:
        return None
    today = {column.attnum: column.name_on_source for column in table.columns}
    names = {
        column.name_on_source: today.get(column.attnum, column.name_on_source)
        for column in state.columns
    }
    with suppress(FilterNotTranslatable):
        if parse_analysed(state.row_filter, names=names) == parse_analysed(table.row_filter):
            return table.row_filter
    return None
