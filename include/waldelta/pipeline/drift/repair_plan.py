"""Plans a repair: which rows enter a drifted target and which leave it, and when only a new copy of
the whole table is exact.

All but describe_moving() is pure. Comparing filters is enough, because the stream has every change
to a row that the filter in force admits before or after the change. Let the filter change once,
from ``before`` to ``after``, while changes wait in the log. A row with a change among them is
*touched*, and is read again. Any other row was changed only where the filter in force didn't let
the change through. Under ``before``, such a row wasn't in the target; under ``after``, it doesn't
belong in the target now.

So the rows to add are those that ``after`` admits and ``before`` didn't. The rows to remove are
those whose content in the target ``after`` doesn't admit. Two changes of the filter between two
reads of the catalogs break this, and look the same as one change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import psycopg
from psycopg import sql

from waldelta import quantities
from waldelta.errors import ConfigError, FilterNotTranslatable, PrivilegeMissing
from waldelta.lake.ledger import StorageState, TableState
from waldelta.pipeline.targets import filter_of, read_target_filter
from waldelta.postgres import Leaf, PublishedTable, is_superuser, limited, planned_rows, savepoint
from waldelta.postgres.publication_membership import EVERY_CHANGE, from_texts, is_uniform
from waldelta.row_filter import RowFilter
from waldelta.row_filter.parse import (
    ArrayExpression,
    Call,
    Cast,
    Column,
    Literal,
    Node,
    Quantified,
    Test,
    children,
    parse_analysed,
    walk,
)
from waldelta.row_filter.source_sql import source_sql
from waldelta.snapshot.read_selected import Choice, of_leaves_together, whole_table
from waldelta.snapshot.read_table import of_leaves
from waldelta.target_modes.target_mode import Feature

# A table with few rows is repaired either way. Of a larger table, a repair pays off only up to this
# share of entering rows: beyond it, a copy costs no more.
FEW_ROWS = 10_000
MOST_OF_TABLE = 0.3
_PLAIN = frozenset({"=", "<>", "<", "<=", ">", ">=", "AND", "OR", "NOT"})
# Counting may take this long in all; after that the planner's estimate is used.
_COUNT_TIMEOUT_S = 2.0
# Each statement waits at most this long for a lock, because a report isn't worth waiting for a
# session that alters the table.
_LOCK_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class Repair:
    """A drifted target as it was copied, and the table as it is published now.

    ``truncated_or_reattached`` are leaves that were truncated, or detached and attached again.
    ``storage`` is the storage state in which they were found. ``where`` is the target's current
    filter. ``partition`` is the oid of the only partition that the target takes; None: the target
    takes the whole table.
    """

    state: TableState
    table: PublishedTable
    truncated_or_reattached: frozenset[int] = frozenset()
    storage: StorageState = field(default_factory=StorageState)
    where: str | None = None
    partition: int | None = None

    @property
    def attached(self) -> frozenset[int]:
        """Leaves with rows that weren't sent: attached since the copy, truncated, or attached
        again.
        """
        came, _ = moved_leaves(self.state, self.table)
        return came | self.truncated_or_reattached | self._unrepaired_leaves

    @property
    def detached(self) -> frozenset[int]:
        """Leaves that were detached since the copy, if only for a while.

        Their rows in the target may lie within no partition's bounds now.
        """
        _, went = moved_leaves(self.state, self.table)
        unrepaired = set(self.state.unrepaired_leaves) - {leaf.oid for leaf in self.table.leaves}
        return (
            went
            | unrepaired
            | self._unrepaired_leaves
            | (self.truncated_or_reattached & reattached(self.state, self.storage))
        )

    @property
    def replaced_leaves(self) -> frozenset[int]:
        """Leaves whose rows in the target a repair replaces: some there may be of other leaves."""
        return self.attached if self.detached else self.truncated_or_reattached

    @property
    def _unrepaired_leaves(self) -> frozenset[int]:
        unrepaired = set(self.state.unrepaired_leaves)
        return frozenset(leaf.oid for leaf in self.table.leaves if leaf.oid in unrepaired)


@dataclass(frozen=True, slots=True)
class FilterRule:
    """The rows that a target takes: those that both its publications' filter and its own admit.

    Both are texts as PostgreSQL prints them.
    """

    published: str | None = None
    target_filter: str | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """The filters that are set."""
        return tuple(part for part in (self.published, self.target_filter) if part is not None)

    @property
    def condition(self) -> str:
        """Both filters as one SQL condition.

        >>> FilterRule("(a > 1)", "(b > 2)").condition
        '((a > 1)) and ((b > 2))'
        """
        return _all(self.parts)


def moved_leaves(state: TableState, table: PublishedTable) -> tuple[frozenset[int], frozenset[int]]:
    """Returns the oids of the leaf partitions that joined a table, and of those that left it, since
    the ledger last recorded their files; both are empty without partitions or a record.
    """
    if table.relkind != "p" or not state.storage.files:
        return frozenset(), frozenset()
    oids = {file.oid for file in state.storage.files} - {table.oid}
    came = frozenset(
        leaf.oid for leaf in table.leaves if leaf.relkind == "r" and leaf.oid not in oids
    )
    return came, frozenset(oids - {leaf.oid for leaf in table.leaves})


def reattached(state: TableState, now: StorageState) -> frozenset[int]:
    """Returns the oids of leaves detached and attached again since the files were last recorded."""
    then = {file.oid: file.inherits for file in state.storage.files if file.inherits is not None}
    return frozenset(
        file.oid for file in now.files if then.get(file.oid, file.inherits) != file.inherits
    )


def entered_columns(state: TableState, table: PublishedTable) -> list[str]:
    """Returns the names of published columns that were unpublished at the copy or at a later check.

    Other new columns were added to the table; schema evolution handles them.
    """
    return [column.name for column in table.columns if column.attnum in state.unpublished]


def merges_partitions(repair: Repair) -> bool:
    """Whether the target merges partitions that are published as themselves."""
    return repair.state.root_id is not None


def why_other_rows(state: TableState) -> str | None:
    """Returns why a target differs from its source on purpose, or None."""
    if state.copy_skipped:
        return "its existing rows were not copied (copy: false), so it lacks rows by design"
    if not state.target_mode.supports(Feature.MEND):
        return f"its target keeps rows that the source no longer has (mode {state.target_mode})"
    return None


def obstacle(repair: Repair) -> str | None:
    """Returns why only a whole copy is exact; None when the rows that enter and leave are known."""
    state, table = repair.state, repair.table
    copied = {(c.attnum, c.name, c.type_oid, c.typmod) for c in state.columns if not c.stopped}
    present = {(c.attnum, c.name, c.type.oid, c.type.typmod) for c in table.columns}
    checks = [
        (
            not state.target_mode.supports(Feature.MEND),
            f"it is kept as {state.target_mode}, which a repair would overwrite",
        ),
        (
            str(table.id) != (state.source_table or state.table_name),
            "its changes come from another table than its copy",
        ),
        (
            not table.key_columns or state.key_columns != list(table.key_columns),
            "it has no key, or another key than its copy",
        ),
        (any(c.stopped for c in state.columns), "some of its columns stay with their last values"),
        (copied != present, "its columns differ from its copy's"),
        (
            bool(entered_columns(state, table)),
            "a column was added to its column list, and its earlier values weren't sent",
        ),
        (
            not state.snapshot or not _is_same_relation(repair),
            "it isn't the relation that was copied",
        ),
        (
            bool(state.later_filters),
            "its filter changed before, and the records since then are incomplete",
        ),
        (not table.publishes >= EVERY_CHANGE, "not every kind of change is published"),
        (
            not _is_known_uniform(repair),
            "its publications don't publish inserts, updates and deletes by the same filters",
        ),
        (
            state.publishes != sorted(table.publishes),
            "other operations are published than when it was copied",
        ),
    ]
    return next((why for applies, why in checks if applies), None)


def _is_same_relation(repair: Repair) -> bool:
    # Merged partitions may come and go.
    if repair.state.root_id is not None:
        return repair.state.root_id == repair.table.oid
    return set(repair.state.relation_ids) == set(repair.table.relation_ids)


def _is_known_uniform(repair: Repair) -> bool:
    """Whether each kind of change was and is published by the filter of the copy.

    With one publication for all kinds, it is.
    """
    then, now = from_texts(repair.state.entries), repair.table.entries
    return (
        is_uniform(now) and is_uniform(then) and (bool(then) or len(repair.table.publications) == 1)
    )


def is_dear(entering: float, rows: float) -> bool:
    """Returns whether a copy of a whole table of ``rows`` costs no more than reading the
    ``entering`` rows.

    >>> is_dear(9_000, 10_000), is_dear(500_000, 1_000_000), is_dear(200_000, 1_000_000)
    (False, True, False)
    """
    return entering > max(FEW_ROWS, MOST_OF_TABLE * rows)


def entering(former: FilterRule, after: FilterRule, nullable: Iterable[str]) -> tuple[str, ...]:
    """Returns SQL conditions for the rows that ``after`` admits and ``former`` didn't; no row
    matches two.

    PostgreSQL finds no index range in ``(…) is not true``, but does in ``not (…)``. The two differ
    where a filter is NULL. A filter made of comparisons is NULL only where one of its columns is.
    ``nullable`` are the columns that may be NULL.

    >>> entering(FilterRule("(a > 5)"), FilterRule("(a > 3)"), ())
    ('((a > 3)) and not (((a > 5)))',)
    >>> entering(FilterRule("(a > 5)"), FilterRule(), {"a"})
    ('not (((a > 5)))', '("a" is null) and (((a > 5))) is null')
    >>> entering(FilterRule(), FilterRule("(a > 5)"), ())
    ()
    """
    common = set(after.parts)
    gone = tuple(part for part in former.parts if part not in common)
    if not gone:
        return ()
    old = _all(gone)
    admitted = list(after.parts)
    columns = _null_only_with_columns(gone)
    if columns is None:
        return (_join_words(admitted, f"({old}) is not true"),)
    conditions = [_join_words(admitted, f"not ({old})")]
    if absent := sorted(columns & set(nullable)):
        names = " or ".join(f"{sql.Identifier(name).as_string(None)} is null" for name in absent)
        conditions.append(_join_words(admitted, f"({names}) and ({old}) is null"))
    return tuple(conditions)


def _join_words(parts: Iterable[str], last: str) -> str:
    return " and ".join([*(f"({part})" for part in parts), last])


def _all(parts: Iterable[str]) -> str:
    return " and ".join(f"({part})" for part in parts) or "true"


def _null_only_with_columns(filters: Iterable[str]) -> frozenset[str] | None:
    """Returns the columns of filters that can be NULL only where one of these columns is NULL.

    Returns None when that isn't certain.
    """
    columns: set[str] = set()
    for text in filters:
        try:
            tree = parse_analysed(text)
        except FilterNotTranslatable:
            return None
        if not _is_plain(tree):
            return None
        columns |= {node.name for node in walk(tree) if isinstance(node, Column)}
    return frozenset(columns)


def _is_plain(node: Node) -> bool:
    """Whether an expression has only comparisons of columns and constants, joined by AND, OR and
    NOT.

    All built-in comparisons are strict, and none returns NULL for values that aren't NULL.
    """
    match node:
        case Column() | Test():
            return True
        case Literal():
            return node.kind != "null"
        case Cast(operand=Literal(), type=kind) if kind.is_array:
            return False  # The array's text may contain NULL.
        case Call() | Quantified():
            name = node.name if isinstance(node, Call) else node.operator
            return name in _PLAIN and all(map(_is_plain, children(node)))
        case Cast() | ArrayExpression():
            return all(map(_is_plain, children(node)))
    return False


def within_leaves(drifted: Repair, condition: str) -> str:
    """Limit the condition to the merged leaves: the root may have others, which aren't
    published.
    """
    if not merges_partitions(drifted):
        return condition
    return (
        f"({condition}) and"
        f" {of_leaves([leaf.oid for leaf in drifted.table.leaves]).as_string(None)}"
    )


@dataclass(frozen=True, slots=True)
class MovingRows:
    """A target's filter before and after a drift, and the rows that enter and leave it.

    No row matches two choices of the same side.
    """

    former: FilterRule
    after: FilterRule
    enter: tuple[Choice, ...]
    leave: tuple[Choice, ...]


def moving_rows(
    drifted: Repair,
    target_filter: RowFilter | None,
    files: Mapping[int, int] = MappingProxyType({}),
) -> MovingRows:
    """Returns the rows that this drift moves in and out of the target; pure.

    ``target_filter`` is the pipeline file's current one for the target. Entering rows are read leaf
    by leaf. ``files`` are the leaves' files as a snapshot sees them. Raises FilterNotTranslatable
    for a stored filter that can't be resolved: only a whole copy is exact then.
    """
    state, table = drifted.state, drifted.table
    was = filter_of(state)
    after = FilterRule(table.row_filter, target_filter.analysed if target_filter else None)
    former = FilterRule(
        _as_source_sql(state.row_filter, after.published, table),
        _as_source_sql(was.analysed if was else None, after.target_filter, table),
    )
    nullable = [column.name_on_source for column in table.columns if not column.not_null]
    enters = entering(former, after, nullable)
    # Leaves that are read through one table are read together: otherwise each would need a scan of
    # that whole table.
    together: dict[object, list[Leaf]] = {}
    for leaf in table.leaves:
        if leaf.relkind == "r":
            together.setdefault((leaf.through or leaf, leaf.oid in drifted.attached), []).append(
                leaf
            )
    enter = tuple(
        of_leaves_together(leaves, condition, files)
        for leaves in together.values()
        for condition in ((after.condition,) if leaves[0].oid in drifted.attached else enters)
    )
    leave = tuple(
        whole_table(table, condition, files) for condition in entering(after, former, nullable)
    )
    return MovingRows(former, after, enter, leave)


def _as_source_sql(stored: str | None, current: str | None, table: PublishedTable) -> str | None:
    """Returns a filter that the ledger stores as SQL for the source.

    A text that the server has just printed itself is used as it is.
    """
    if stored is None or stored == current:
        return stored
    return source_sql(stored, {column.name_on_source: column.type for column in table.columns})


def describe_moving(connection: psycopg.Connection[Any], drifted: Repair) -> str | None:
    """Describe how many rows a repair would add and remove; None when that isn't known.

    The rows are counted on the source, or estimated where counting takes too long. A repair may
    remove more: the source doesn't know rows of the target for which no change was sent.
    """
    name = drifted.state.table_name
    if merges_partitions(drifted) or is_superuser(connection):
        return None
    try:
        with limited(connection, "lock_timeout", _LOCK_TIMEOUT_S):
            target_filter = read_target_filter(connection, name, drifted.where, drifted.table)
            moving = moving_rows(drifted, target_filter)
            # The texts are either deparsed by PostgreSQL or names that were quoted before.
            select = sql.SQL("select from {} where {}").format
            sides = [
                [select(sql.SQL(of.relation), sql.SQL(of.condition)) for of in side]
                for side in (moving.enter, moving.leave)
            ]
            counted = _count(connection, sides)
            numbers = counted or [
                sum(planned_rows(connection, rows) for rows in side) for side in sides
            ]
    except (psycopg.Error, ConfigError, FilterNotTranslatable, PrivilegeMissing):
        return None  # A column of the old filter is gone, or another session has locked the table.
    if not any(numbers):
        return None
    about = "" if counted else "about "
    return (
        f"a repair would add {about}{quantities.counted(numbers[0], 'row')} and remove"
        f" {about}{numbers[1]:,}"
    )


def _count(
    connection: psycopg.Connection[Any], sides: Sequence[Sequence[sql.Composable]]
) -> list[int] | None:
    """Returns the number of rows of each side; None when counting takes too long."""
    counted = sql.SQL("(select count(*) from ({}) as r)")
    sums = [
        sql.SQL(" + ").join([sql.SQL("0"), *map(counted.format, statements)])
        for statements in sides
    ]
    query = sql.SQL("select {}").format(sql.SQL(", ").join(sums))
    try:
        with limited(connection, "statement_timeout", _COUNT_TIMEOUT_S), savepoint(connection):
            return list(connection.execute(query).fetchall()[0])
    except psycopg.errors.QueryCanceled:
        return None
