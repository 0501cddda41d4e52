"""References: foreign keys between targets, which the check stage judges.

``plan_references`` decides which keys can be judged, and why others can't;
``count_rows_without_parent`` finds rows whose key has no matching row in the referenced target.
Both targets are read at one consistent cut: otherwise a row whose parent is one batch behind would
count as a row without a parent.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from waldelta.changes.merge.target_table import read_query
from waldelta.lake import DeltaTarget, TargetVersion
from waldelta.lake.ledger import SYNCED, BatchCut, ColumnState, TableState
from waldelta.metadata_columns import LSN
from waldelta.pipeline.drift import EVERYTHING
from waldelta.postgres.publication_membership import from_texts
from waldelta.spark import Runner
from waldelta.spark_sql import quote_in_template
from waldelta.stages.check.constraints.constraints import ForeignKey, KeyColumn
from waldelta.stages.check.measure.failing_rows import (
    MOST_EXAMPLES,
    FailingRows,
    LiveRows,
    Relation,
    VersionRows,
    has_few_keys,
    leave_to_spark,
    rows_of,
    text_of,
)
from waldelta.types.base import Comparison
from waldelta.types.type_map import key_type

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Takes the place of a column name in an expectation's arguments.
FOREIGN_KEY = "_wd_foreign_key"

_OPERATIONS = frozenset({"insert", "update", "delete", "truncate"})


@dataclass(frozen=True, slots=True)
class CheckedTarget:
    """A target to check, as one Delta version."""

    state: TableState
    version: int
    table: DeltaTarget

    def frame(self, runner: Runner) -> DataFrame:
        """Returns the target's live rows: without rows deleted on the source, and without former
        row versions.
        """
        return self.state.target_mode.live_rows(self.all_rows(runner), self.state.key_columns)

    def all_rows(self, runner: Runner) -> DataFrame:
        """Returns all rows of the target, also those that the source no longer has."""
        return self.table.frame(runner.spark(), self.version)

    def open(self) -> TargetVersion:
        """Opens the version without Spark."""
        return self.table.open(self.version)

    def live_columns(self, version: TargetVersion) -> list[str]:
        """Returns the columns of live rows."""
        names = version.schema.names
        return self.state.target_mode.source_columns(names, self.state.key_columns)

    def read_live(self, version: TargetVersion, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yields columns of the live rows of a target that keeps more, a few rows at a time."""
        text = self.state.target_mode.live_query(columns, self.state.key_columns)
        return (pa.Table.from_batches([batch]) for batch in read_query(version, text))

    def live_rows(self, version: TargetVersion) -> VersionRows:
        """Returns the version's live rows, as rows_of() reads them without Spark."""
        mode, key = self.state.target_mode, self.state.key_columns
        if not mode.keeps_rows:
            return version
        return LiveRows(version, mode.live_query(self.live_columns(version), key))


@dataclass(frozen=True, slots=True)
class Side:
    """A target, and the key's columns in it."""

    target: CheckedTarget
    columns: tuple[str, ...]

    @property
    def table(self) -> str:
        """Returns the target's name."""
        return self.target.state.table_name


@dataclass(frozen=True, slots=True)
class Reference:
    """A foreign key from rows of one target to rows of another, or the same one.

    ``comparisons`` define how each pair of columns is compared. With ``whole`` a partly null key
    breaks the constraint (MATCH FULL). The result is reported for target ``reported_for``.
    ``since``: only rows that changed from that position on are judged.
    """

    name: str
    referring: Side
    referenced: Side
    comparisons: tuple[Comparison, ...]
    reported_for: str
    whole: bool = False
    since: int | None = None

    @property
    def sides(self) -> tuple[Side, Side]:
        """Returns the referring side and the referenced one."""
        return self.referring, self.referenced

    @property
    def lookup_key(self) -> tuple[str, str, str]:
        """Returns the arguments of a reference's expectation that identify it, as a key for
        lookups.
        """
        return FOREIGN_KEY, self.referring.table, self.name

    @property
    def meaning(self) -> str:
        """Returns the expectation in words, for the target that it is reported for."""
        columns, referenced_columns = (
            ", ".join(self.referring.columns),
            ", ".join(self.referenced.columns),
        )
        if self.reported_for == self.referring.table:
            return (
                f"foreign key {self.name} holds: ({columns}) refers to {self.referenced.table}"
                f" ({referenced_columns})"
            )
        return (
            f"foreign key {self.name} of {self.referring.table} holds: its ({columns}) refers to"
            f" ({referenced_columns})"
        )


@dataclass(frozen=True, slots=True)
class ChangedTarget:
    """A run's effect on a target's keys: its new version, and whether rows may have been
    removed.
    """

    version: int | None
    lost_rows: bool = True


@dataclass(frozen=True, slots=True)
class ReferenceFacts:
    """What is needed to decide which foreign keys can be judged: table states, Delta tables, and
    the newest consistent cut.

    ``changed`` are the targets that the run changed and this check covers. The other three are
    names of targets: ``lacking`` have rows in quarantine, the run read rows of ``read_again`` from
    the source at a position after the cut, and ``beyond_cut`` contain changes after the cut.
    """

    states: Mapping[str, TableState]
    targets: Mapping[str, DeltaTarget]
    cut: BatchCut | None
    changed: Mapping[str, ChangedTarget]
    lacking: Collection[str] = ()
    read_again: Collection[str] = ()
    beyond_cut: Collection[str] = ()


def plan_references(
    keys: Sequence[ForeignKey], facts: ReferenceFacts
) -> Iterator[tuple[str, Reference | str]]:
    """Yields which foreign keys are judged in the checked targets, or why one isn't, with the
    target that reports it; pure.

    A key between targets that aren't checked is left out, and so is one to a table that is not
    replicated. The referring target reports the result. If only the referenced target is checked
    and may have lost rows, that target reports it.
    """
    for key in keys:
        for referring in _targets_of(facts.states, key.table_id):
            complete, partial = _referenced_targets(facts.states, key)
            if not complete and not partial:
                continue
            referenced = (complete or partial)[0]
            reporter = _changed_target(facts, referring.table_name, referenced.table_name)
            if reporter is None:
                continue
            obstacle = key.obstacle or (
                # A row without a parent could be correct.
                _of_states(referring, referenced)
                or _of_cut(facts, (referring, referenced))
                or _of_columns(key, referring, referenced)
                if complete
                else _why_incomplete(key, partial)
            )
            if obstacle is not None:
                of = "" if reporter == referring.table_name else f" of {key.table_name}"
                yield reporter, f"foreign key {key.name}{of}: not checked, because {obstacle}"
                continue
            comparisons = tuple(
                c for c in _comparisons(key, referring, referenced) if c is not None
            )
            sides = _side(facts, referring, key.referring), _side(facts, referenced, key.referenced)
            # NaN or infinity may be stored raw, and be null in its column.
            columns = [_target_column(referring, column) for column in key.referring]
            whole = key.is_full and not any(c is None or c.stored_as.may_be_raw for c in columns)
            yield reporter, Reference(key.name, *sides, comparisons, reporter, whole=whole)


def restrict_to_changes(
    reference: Reference, since: int | None, facts: ReferenceFacts
) -> Reference:
    """Returns the reference restricted to rows changed since a position, where no others can
    fail.
    """
    there = facts.changed.get(reference.referenced.table)
    if (
        since is None
        or reference.referring.target.state.target_mode.keeps_rows
        or (there is not None and there.lost_rows)
    ):
        return reference
    return replace(reference, since=since)


def _targets_of(states: Mapping[str, TableState], relation_id: int) -> list[TableState]:
    """Returns the synced targets that take this relation's rows as a whole.

    The relation is the source table itself, or the root whose partitions are merged into one
    target.
    """
    return [
        state
        for state in states.values()
        if state.status == SYNCED
        and (state.root_id == relation_id or list(state.relation_ids) == [relation_id])
    ]


def _referenced_targets(
    states: Mapping[str, TableState], key: ForeignKey
) -> tuple[list[TableState], list[TableState]]:
    """Returns the targets that have all rows of the referenced table, and those that have some."""
    whole = [s for s in _targets_of(states, key.referenced_id) if _why_partial(s, key) is None]
    oids = {key.referenced_id, *key.leaves}
    related = (s for s in states.values() if oids & {*s.relation_ids, s.root_id})
    return whole, [s for s in related if s.status == SYNCED and s not in whole]


def _why_partial(state: TableState, key: ForeignKey) -> str | None:
    filters = {state.row_filter or EVERYTHING, *state.later_filters}
    is_root, tables = state.root_id is not None, set(state.relation_ids)
    return _first({
        "its existing rows were not copied (copy: false)": state.copy_skipped,
        "its publication has a row filter": filters != {EVERYTHING},
        "the target has a filter": state.target_filter is not None,
        "not all partitions are published": is_root and not key.leaves <= tables,
        "it holds one partition only": not is_root and tables != {key.referenced_id},
    })  # fmt: skip


def _first(obstacles: Mapping[str, object]) -> str | None:
    return next((why for why, is_so in obstacles.items() if is_so), None)


def _changed_target(facts: ReferenceFacts, referring: str, referenced: str) -> str | None:
    if referring in facts.changed:
        return referring
    there = facts.changed.get(referenced)
    return referenced if there is not None and there.lost_rows else None


def _why_incomplete(key: ForeignKey, partial: Sequence[TableState]) -> str:
    """Returns why no target is known to have every row that may be referred to."""
    why = next(
        (f" ({s.table_name} doesn't: {why})" for s in partial if (why := _why_partial(s, key))), ""
    )
    return f"no target holds all rows of {key.referenced_name}{why}"


def _of_columns(key: ForeignKey, referring: TableState, referenced: TableState) -> str | None:
    for state, columns in ((referring, key.referring), (referenced, key.referenced)):
        if absent := [column.name for column in columns if _target_column(state, column) is None]:
            return f"{state.table_name} has no column {', '.join(absent)}"
    pairs = zip(
        _comparisons(key, referring, referenced), key.referring, key.referenced, strict=True
    )
    if unlike := [
        f"{column.name} and {referenced_column.name}"
        for comparison, column, referenced_column in pairs
        if comparison is None
    ]:
        return f"equal values may look different in the lake: {', '.join(unlike)}"
    return None


def _of_states(referring: TableState, referenced: TableState) -> str | None:
    obstacles = {
        f"the row filter of {referring.table_name} has changed since its copy, so the target may"
        " keep rows that no longer pass it": bool(referring.later_filters),
        f"{referring.table_name} keeps deleted rows, and has no key to find them by":
            referring.target_mode.keeps_rows and not referring.key_columns,
    }  # fmt: skip
    for state in (referring, referenced):
        missing = ", ".join(sorted(_OPERATIONS - _published_operations(state)))
        obstacles |= {
            f"the publications of {state.table_name} don't publish every {missing}": bool(missing),
            f"partitions of {state.table_name} were added or removed since its copy":
                bool(state.unrepaired_leaves),
        }  # fmt: skip
    return _first(obstacles)


def _published_operations(state: TableState) -> frozenset[str]:
    """Returns the operations that were published both at the copy and when last read."""
    now = from_texts(state.entries)
    operations = frozenset[str]().union(*(m.publishes for m in now)) if now else _OPERATIONS
    return operations & frozenset(state.publishes) if state.publishes else operations


def _of_cut(facts: ReferenceFacts, states: Sequence[TableState]) -> str | None:
    """Returns why two targets can't be compared at their current versions."""
    apart = "the two targets are at different positions"
    if facts.cut is None:
        return f"{apart}: no batch has been applied to all targets yet"
    obstacles: dict[str, object] = {}
    for state in states:
        name, target = state.table_name, facts.cut.of(state)
        # The version of the cut would be taken for the current result.
        is_ahead = name in facts.beyond_cut or (
            target is not None
            and (changed := facts.changed.get(name)) is not None
            and changed.version not in (None, target.version)
        )
        obstacles |= {
            f"{apart}: {name} was copied, or read again, since the last batch":
                target is None or state.snapshot_lsn > facts.cut.end_lsn,
            f"{apart}: {name} has a batch that other targets lack": is_ahead,
            f"{apart}: rows of {name} were read from the source":
                name in facts.read_again or (target is not None and target.completed),
            f"{name} lacks rows that are, or were, in quarantine": name in facts.lacking,
        }  # fmt: skip
    return _first(obstacles)


def _target_column(state: TableState, column: KeyColumn) -> ColumnState | None:
    """Returns the target's column by the source column's name and number; None if another column
    has the name.
    """
    return next(
        (
            c
            for c in state.columns
            if c.name_on_source == column.name and c.attnum in (0, column.attnum)
        ),
        None,
    )


def _comparisons(
    key: ForeignKey, referring: TableState, referenced: TableState
) -> Iterator[Comparison | None]:
    for column, referenced_column in zip(key.referring, key.referenced, strict=True):
        stored, referenced_stored = (
            _target_column(referring, column),
            _target_column(referenced, referenced_column),
        )
        if stored is None or referenced_stored is None:
            yield None
        else:
            yield key_type(column.base_oid, stored.stored_as).compared_with(
                key_type(referenced_column.base_oid, referenced_stored.stored_as)
            )


def _side(facts: ReferenceFacts, state: TableState, columns: Sequence[KeyColumn]) -> Side:
    cut = facts.cut
    (version,) = (
        t.version for t in (cut.targets if cut else ()) if t.table_name == state.table_name
    )
    target_columns = (_target_column(state, column) for column in columns)
    names = tuple(column.name for column in target_columns if column is not None)
    return Side(CheckedTarget(state, version, facts.targets[state.table_name]), names)


def count_rows_without_parent(runner: Runner, reference: Reference) -> FailingRows:
    """Returns the rows without a parent row.

    Where this process reads both targets' keys, all rows are judged, whatever has changed.
    """
    with leave_to_spark(f"judges foreign key {reference.name}"):
        if (sides := rows_to_compare(reference)) is not None:
            return rows_without_parent(reference, *sides)
    rows, parents = (side.target.frame(runner) for side in reference.sides)
    if reference.since is not None:
        rows = rows.where(f"{LSN} >= {reference.since}")
    return rows_without_parent(reference, rows, parents)


def rows_to_compare(reference: Reference) -> tuple[VersionRows, VersionRows] | None:
    """Returns both targets' rows; None when only Spark reads or compares the keys.

    Raises what delta-rs and Arrow raise.
    """
    referring, parent = (side.target for side in reference.sides)
    if "number" in reference.comparisons:
        return None
    versions = referring.open(), parent.open()
    sides = zip(reference.sides, versions, strict=True)
    are_few = all(has_few_keys(version, side.columns) for side, version in sides)
    return (referring.live_rows(versions[0]), parent.live_rows(versions[1])) if are_few else None


def rows_without_parent(reference: Reference, rows: Relation, parents: Relation) -> FailingRows:
    """Returns the rows without a parent row; those with a null in their key refer to nothing."""
    comparisons = reference.comparisons
    sides: tuple[tuple[tuple[str, ...], tuple[Comparison, ...]], ...] = (
        (reference.referring.columns, ("padded", "own padded")),
        (reference.referenced.columns, ("padded",)),
    )
    keys_of_rows, keys_of_parents = (
        ", ".join(
            f"{_comparison_form(quote_in_template(name), comparison, padded)} as k{n}"
            for n, (name, comparison) in enumerate(zip(names, comparisons, strict=True))
        )
        for names, padded in sides
    )
    keys = [f"k{n}" for n in range(len(comparisons))]
    equal_keys = " and ".join(f"c.{key} = p.{key}" for key in keys)
    refers = (" or " if reference.whole else " and ").join(f"c.{key} is not null" for key in keys)
    # The SQL contains only quoted columns.
    orphans = (
        f"from (select {keys_of_rows} from {{rows}}) as c left anti join"  # noqa: S608
        f" (select {keys_of_parents} from {{parents}}) as p on {equal_keys} where {refers}"
    )
    (counts,) = rows_of(f"select count(*) as n {orphans}", rows=rows, parents=parents)
    if not counts["n"]:
        return FailingRows()
    listed = ", ".join(f"c.{key} as {key}" for key in keys)
    text = f"select distinct {listed} {orphans} limit {MOST_EXAMPLES}"
    examples = sorted(map(text_of, rows_of(text, rows=rows, parents=parents)))
    return FailingRows(counts["n"], tuple(examples))


def _comparison_form(column: str, comparison: Comparison, padded: Collection[Comparison]) -> str:
    """Returns a column of a key in the form that is compared, without trailing blanks where
    ``padded`` says so.
    """
    if comparison in padded:
        return f"trim(trailing ' ' from {column})"
    return f"cast({column} as bigint)" if comparison == "integer" else column
