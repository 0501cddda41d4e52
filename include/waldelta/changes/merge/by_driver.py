"""Merges few net changes into a small target in the driver, as one commit, with Arrow and delta-rs.

Spark spends seconds of CPU on planning and compiling for milliseconds of work. With many small
tables, that would be most of a run. The commit has the transaction id and the userMetadata of a
MERGE's commit. It is a compare-and-swap on the version that was read, so it never overwrites a
concurrent commit.

Applies net changes to a target's rows as statements.merge_statement's MERGE does, with Arrow and
NumPy.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools, Ints, one_array, table_of
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_PURGE,
    ACTION_UPDATE,
    ACTION_UPSERT,
    PLACE,
    codes_of,
    codes_of_both,
)
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.merge.statements import (
    MERGED_DELETES,
    MERGED_INSERTS,
    MERGED_UPDATES,
    CommitTag,
    WrittenColumns,
    written_columns,
)
from waldelta.changes.stage.net_files import batches
from waldelta.changes.stage.stage import Ending, Staged
from waldelta.lake import MOST_DRIVER_BYTES, READ_FAILURES, Fence, TargetVersion, replace_by_rows
from waldelta.lake.commit_files import (
    POSTIMAGE,
    PREIMAGE,
    SHOWN_DELETE,
    SHOWN_INSERT,
    changed_rows,
)
from waldelta.lake.layout import Layout, PartitionKey, key_of
from waldelta.lake.storage import row_group_bytes
from waldelta.metadata_columns import RAW, RELID
from waldelta.pipeline import Job
from waldelta.types import TargetType
from waldelta.types.hstore import Hstore

log = logging.getLogger(__name__)


def match(held: pa.Table, net: pa.Table, written: WrittenColumns) -> Ints:
    """Return, for each row of the target, the net change of its key; -1 for none.

    Both tables need only their key columns.
    """
    if not written.shape.key:  # All changes are new rows.
        return np.full(len(held), -1, np.int64)
    return match_keys(
        [held[name] for name in written.key_names], [net[base] for base in written.bases]
    )


def match_keys(rows: Sequence[pa.ChunkedArray], keys: Sequence[pa.ChunkedArray]) -> Ints:
    """Return, for each row by the columns of its key, the place of that key among ``keys``; -1 for
    none.
    """
    pairs = list(zip(rows, keys, strict=True))
    if len(pairs) == 1 and all(pa.types.is_integer(column.type) for column in pairs[0]):
        return _match_integers(*pairs[0])
    of_keys, of_rows = codes_of_both(keys, rows)
    # Nulls equal nothing: a new row whose old row moved elsewhere in the batch has no base.
    has_row, has_key = (np.ones(len(columns[0]), np.bool_) for columns in (rows, keys))
    for row, key in pairs:
        has_row &= np.asarray(row.is_valid())
        has_key &= np.asarray(key.is_valid())
    codes = max(of_keys.max(initial=-1), of_rows.max(initial=-1)) + 1
    place_of = np.full(int(codes), -1, np.int64)
    place_of[of_keys[has_key]] = np.flatnonzero(has_key)
    return np.where(has_row, place_of[of_rows], -1)


def _match_integers(held: pa.ChunkedArray, net: pa.ChunkedArray) -> Ints:
    """Returns what match_keys() does, by a search that is quick where both are nearly in order."""
    places = np.flatnonzero(np.asarray(net.is_valid()))
    values = np.asarray(net.drop_null(), np.int64)
    order = np.argsort(values, kind="stable")
    values, places = values[order], places[order]
    if not len(places):
        return np.full(len(held), -1, np.int64)
    sought = np.asarray(held.fill_null(0), np.int64)
    at = np.searchsorted(values, sought, side="right") - 1
    is_there = (at >= 0) & (values[at] == sought) & np.asarray(held.is_valid())
    return np.where(is_there, places[at], -1)


def are_new(net: pa.Table, matched: Bools) -> Bools:
    """Returns which net changes are new rows; only their actions are needed.

    ``matched`` has those whose key has a row in the target.
    """
    return has_action(net, ACTION_INSERT, ACTION_UPSERT) & ~matched


def matched_by(of_row: Ints, changes: int) -> Bools:
    """Returns which of this many net changes have a row in the target."""
    matched = np.zeros(changes, np.bool_)
    matched[of_row[of_row >= 0]] = True
    return matched


def has_action(net: pa.Table, *actions: str) -> Bools:
    """Returns which rows have one of these actions."""
    return np.asarray(pc.is_in(net["action"], value_set=pa.array(actions)))


@dataclass(frozen=True)
class MergedRows:
    """Rows of a target and net changes, with the change that each row matches and the new rows."""

    held: pa.Table
    net: pa.Table
    of_row: Ints
    new: Ints
    written: WrittenColumns

    @property
    def counts(self) -> dict[str, int]:
        """The number of changed rows of the target, by operation."""
        return {
            MERGED_INSERTS: len(self.new),
            MERGED_UPDATES: int(self._updated.sum()),
            MERGED_DELETES: int(self._deleted.sum()),
        }

    def rows(self) -> pa.Table:
        """Returns the rows after the merge, new ones last."""
        return self._built(~self._deleted)

    def touched_partitions(self, layout: Layout) -> set[PartitionKey]:
        """Returns the partitions that have changed rows before the merge or after it."""
        before = self.held.filter(pa.array(self.of_row >= 0))
        return {key_of(part) for rows in (before, self._changed) for part, _ in layout.divide(rows)}

    def new_rows(self) -> pa.Table:
        """Returns only the new rows."""
        return self._built(np.zeros(len(self.held), np.bool_))

    def changed_rows(self) -> pa.Table:
        """Returns the rows of the change data feed: each updated row before and after it, whether
        or not its values differ, deleted rows and new ones.
        """
        updates = int(self._updated.sum())
        return changed_rows(
            {
                PREIMAGE: self.held.filter(pa.array(self._updated)),
                POSTIMAGE: self._changed.slice(0, updates),
                SHOWN_DELETE: self.held.filter(pa.array(self._deleted)),
                SHOWN_INSERT: self._changed.slice(updates),
            }
        )

    @cached_property
    def _changed(self) -> pa.Table:
        """The updated rows as they are after the merge, then the new ones."""
        return self._built(self._updated)

    def _built(self, stay: Bools) -> pa.Table:
        schema, sources = self.held.schema, self.written.sources
        columns = [self._column(field, sources.get(field.name), stay) for field in schema]
        return pa.table(columns, schema=schema)

    def _column(self, field: pa.Field, source: str | None, stay: Bools) -> pa.ChunkedArray:
        """Returns values of the rows that stay, changed ones among them, then those of new rows."""
        before = self.held[field.name]
        if source is None:  # The source doesn't have the column any more.
            after = pa.chunked_array([pa.nulls(len(self.net), field.type)])
            changed = np.zeros(len(before), np.bool_)
        else:
            after = self.net[source].cast(field.type)
            changed = self._updated & ~self._keeps(source)
        if source == "raw":
            before, changed = self._with_combined(before, after)
        place = np.where(changed, len(before) + self.of_row, np.arange(len(before)))[stay]
        both = pa.chunked_array([*before.chunks, *after.chunks], before.type)
        return both.take(pa.array(np.concatenate([place, len(before) + self.new])))

    def _with_combined(
        self, before: pa.ChunkedArray, after: pa.ChunkedArray
    ) -> tuple[pa.ChunkedArray, Bools]:
        """Returns the target's raw values, combined where an updated row keeps some, and which rows
        get other ones.
        """
        names, toastable = self.written.names, self.written.shape.toastable
        keeps = {names[i]: self._keeps(f"c{i}") for i in toastable}
        combines = np.logical_or.reduce([np.zeros(len(before), np.bool_), *keeps.values()])
        combines &= np.asarray(before.is_valid())
        if not (rows := np.flatnonzero(combines)).size:
            return before, self._updated
        old, sent = before.take(pa.array(rows)), after.take(pa.array(self.of_row[rows]))
        of_rows = {name: keep[rows] for name, keep in keeps.items()}
        combined = combined_raw(one_array(old), one_array(sent), of_rows).cast(before.type)
        place = np.arange(len(before))
        place[rows] = len(before) + np.arange(len(rows))
        both = pa.chunked_array([*before.chunks, combined])
        return both.take(pa.array(place)), self._updated & ~combines

    def _keeps(self, source: str) -> Bools:
        """Returns which updated rows keep their value of a column, since none was sent."""
        flag = source.replace("c", "u", 1)
        if flag not in self.written.shape.flags:
            return np.zeros(len(self.held), np.bool_)
        keeps: Bools = np.append(np.asarray(self.net[flag]), False)
        return self._updated & keeps[self.of_row]

    @cached_property
    def _deleted(self) -> Bools:
        gone = np.append(has_action(self.net, ACTION_DELETE, ACTION_PURGE), False)
        return np.asarray(gone[self.of_row])

    @cached_property
    def _updated(self) -> Bools:
        return (self.of_row >= 0) & ~self._deleted


def with_ended(
    rows: pa.Table, of_row: Ints, net: pa.Table, ending: Ending | None
) -> tuple[Ints, pa.Table]:
    """Returns the net change of each of the target's rows (-1: none), and all net changes, with
    those of rows that end.
    """
    if ending is None:
        return of_row, net
    ends = (of_row < 0) & ending.are_current(rows)
    numbers = len(net) + np.cumsum(ends) - 1
    ended = ending.end(rows.filter(pa.array(ends)))
    return np.where(ends, numbers, of_row), pa.concat_tables([net, ended])


def combined_raw(current: pa.Array, raws: pa.Array, keeps: Mapping[str, Bools]) -> pa.Array:
    """Returns the raw values after updates: those that were sent, and the target's (``current``)
    of columns that keep their values.

    ``keeps`` has, by column, which rows keep its value.
    """
    parent, entries = _entries(current)
    stays = np.zeros(len(parent), np.bool_)
    for column, keep in keeps.items():
        stays |= np.asarray(pc.equal(entries.field("key"), column)) & keep[parent]
    new_parents, new_entries = _entries(raws)
    parent = np.concatenate([parent[stays], new_parents])
    entries = pa.concat_arrays([entries.filter(pa.array(stays)), new_entries])
    entries = entries.take(pa.array(np.argsort(parent, kind="stable")))
    counts = np.bincount(parent, minlength=len(raws))
    offsets = pa.array(np.append(0, np.cumsum(counts)), pa.int32())
    names, texts = entries.field("key"), entries.field("value")
    return pa.MapArray.from_arrays(offsets, names, texts, mask=pa.array(counts == 0))


def _entries(raws: pa.Array) -> tuple[Ints, pa.StructArray]:
    """Returns the entries of all maps, and the row of each."""
    lists = raws.cast(pa.list_(pa.struct([("key", pa.string()), ("value", pa.string())])))
    lengths = np.asarray(pc.list_value_length(lists).fill_null(0))
    return np.repeat(np.arange(len(raws)), lengths), lists.flatten()


def are_equal(
    rows: pa.Table, changes: pa.Table, written: WrittenColumns, kinds: Mapping[str, TargetType]
) -> Bools:
    """Returns which rows of the target are stored as the complete change at their place."""
    equal = np.ones(len(rows), np.bool_)
    for name, source in written.compared.items():
        kind = Hstore() if name == RAW else kinds[name]
        equal &= _are_written_alike(rows[name], changes[source], kind, is_raw=name == RAW)
    return equal


def _are_written_alike(
    rows: pa.ChunkedArray, changes: pa.ChunkedArray, kind: TargetType, *, is_raw: bool
) -> Bools:
    here, sent = (values.cast(kind.arrow) for values in (rows, changes))
    if here.null_count == len(here) and sent.null_count == len(sent):
        return np.ones(len(here), np.bool_)
    none = pa.array([], kind.arrow)
    if kind.exact_values(none) is none:  # Arrow's own equality tells its values apart.
        equal = pc.equal(here, sent)
        if here.null_count or sent.null_count:
            nulls = pc.and_(here.is_null(), sent.is_null())
            equal = pc.or_(equal.fill_null(False), nulls)
        return np.asarray(equal)
    values = kind.exact_values(pa.concat_arrays([*here.chunks, *sent.chunks]))
    codes = codes_of([pa.chunked_array([_raw_entries(values) if is_raw else values])])
    return np.asarray(codes[: len(here)] == codes[len(here) :])


_REMOVALS = pa.array([ACTION_UPDATE, ACTION_DELETE])


def match_duplicates(
    rows: pa.Table, net: pa.Table, columns: Sequence[tuple[str, TargetType]], *, metadata: bool
) -> Ints:
    """Return, for each row of the target, the update or delete that takes it; -1 for none.

    Each change takes one of the rows that equal its old row, in the order of the changes. Rows that
    are written exactly like the old rows are taken first. ``columns`` are the published columns;
    ``metadata``: the target has raw values.
    """
    removals = removals_of(net["action"], net[PLACE])
    codes = codes_of_duplicates(rows, net.take(pa.array(removals)), columns, metadata=metadata)
    return np.append(removals, -1)[match_codes(*codes, len(rows))]


def removals_of(actions: pa.ChunkedArray, places: pa.ChunkedArray) -> Ints:
    """Returns the positions of the updates and deletes, in the order of the changes."""
    removals = np.flatnonzero(np.asarray(pc.is_in(actions, value_set=_REMOVALS)))
    return removals[np.argsort(np.asarray(places)[removals], kind="stable")]


def match_codes(equal: Ints, exact: Ints, count: int) -> Ints:
    """Returns, for each of ``count`` rows, the removed row that takes it; -1 for none.

    The codes are those of codes_of_duplicates(), of the rows and then of the removed ones.
    """
    is_exact = _numbers(exact[:count]) < _sought(exact, count)[exact[:count]]
    equal_rows, sought = equal[:count], _sought(equal, count)
    number = _numbers(equal_rows, ~is_exact)
    is_taken = number < sought[equal_rows]
    # Changes that take equal rows are next to each other, in their order.
    of_code = np.argsort(equal[count:], kind="stable")
    begin = np.cumsum(sought) - sought
    of_row = np.full(count, -1, np.int64)
    of_row[is_taken] = of_code[(begin[equal_rows] + number)[is_taken]]
    return of_row


def codes_of_duplicates(
    rows: pa.Table,
    removed: pa.Table,
    columns: Sequence[tuple[str, TargetType]],
    *,
    metadata: bool,
) -> tuple[Ints, Ints]:
    """Returns integers of the rows and then of the removed ones: the same where they are equal, and
    where they are also written alike.
    """
    equal: list[pa.Array] = []
    exact: list[pa.Array] = []
    for i, (name, kind) in enumerate(columns):
        both = _both(rows[name], removed[f"b{i}"], kind.arrow)
        equal.append(kind.equal_values(both))
        if (written := kind.exact_values(both)) is not equal[-1]:
            exact.append(written)
    if metadata:
        raws = _both(rows[RAW], removed["base_raw"], Hstore().arrow)
        equal.append(_raw_entries(Hstore().exact_values(raws)))
    codes = codes_of([pa.chunked_array([values]) for values in equal])
    if not exact:
        return codes, codes
    return codes, codes_of([pa.chunked_array([values]) for values in (pa.array(codes), *exact)])


def _raw_entries(raws: pa.Array) -> pa.Array:
    """Returns packed raw values as raw_entries() does: null without any."""
    is_empty = pc.equal(pc.binary_length(raws), 0)
    return pc.if_else(is_empty, pa.scalar(None, raws.type), raws)


def _both(rows: pa.ChunkedArray, removed: pa.ChunkedArray, kind: pa.DataType) -> pa.Array:
    return one_array(pa.chunked_array([*rows.cast(kind).chunks, *removed.cast(kind).chunks], kind))


def _sought(codes: Ints, count: int) -> Ints:
    """Returns how many rows of each code are removed."""
    return np.bincount(codes[count:], minlength=int(codes.max(initial=-1)) + 1)


def _numbers(codes: Ints, is_late: Bools | None = None) -> Ints:
    """Returns the number of each row among those of its code, those that are late last."""
    order = np.argsort(codes, kind="stable") if is_late is None else np.lexsort((is_late, codes))
    counts = np.bincount(codes, minlength=1)
    begin = np.cumsum(counts) - counts
    numbers = np.empty(len(codes), np.int64)
    numbers[order] = np.arange(len(codes)) - begin[codes[order]]
    return numbers


# New rows alone are appended as one more file, up to this many files.
_MOST_FILES = 8


def merge_in_driver(
    job: Job, plan: TargetPlan, staged: Staged, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    """Commit net changes under ``tag``; returns the tag with counts of what they did.

    ``staged.net`` has the columns of ``plan.decode.net_schema``. ``fence`` is verified after the
    target was read. Returns None where others must merge: without these rows, for a target that
    isn't small, truncated leaves of a table with a key, features of Delta that only Spark writes,
    or when the target can't be written as it was read.
    """
    decode = plan.decode
    if staged.net is None or (plan.truncated_leaves and decode.shape.key):
        return None
    changes = NetChanges(
        staged.net,
        written_columns(job, plan),
        plan.is_truncated,
        plan.truncated_leaves,
        decode.columns if changes_copies(plan, tag) else None,
        staged.ending,
    )
    table = job.lake.target(plan.state.table_name).open()
    if table.committed(tag.app_id) >= tag.batch:
        return tag  # Delta skips a repeated MERGE in the same way.
    try:
        return _merge(table, changes, tag, fence)
    except READ_FAILURES as err:
        # For example, another writer has committed since. Spark will merge, or report why it can't.
        # If this commit succeeded after all, Spark won't repeat it.
        log.info(
            "table=%s can't be merged by the driver, so Spark merges it: %s",
            plan.state.table_name,
            err,
        )
        return None


@dataclass(frozen=True, slots=True)
class NetChanges:
    """Net changes, their target columns, and whether all rows that the target had are gone.

    ``truncated_leaves`` are the oids of leaves whose rows are gone. ``duplicates`` are the columns
    of a table without a key whose rows the changes update or delete. ``ending`` says which rows
    that no change names end.
    """

    rows: pa.Table
    written: WrittenColumns
    is_truncated: bool = False
    truncated_leaves: Sequence[int] = ()
    duplicates: Sequence[tuple[str, TargetType]] | None = None
    ending: Ending | None = None

    @property
    def truncates(self) -> bool:
        """Whether rows are gone that no change names."""
        return self.is_truncated or bool(self.truncated_leaves)

    def without_truncated(self, rows: pa.Table) -> tuple[pa.Table, pa.Table]:
        """Returns the target's rows that stay, and those of truncated leaves."""
        if not self.truncated_leaves:
            return rows, rows.slice(0, 0)
        leaves = pa.array(self.truncated_leaves, rows[RELID].type)
        truncated = pc.is_in(rows[RELID], value_set=leaves)
        return rows.filter(pc.invert(truncated)), rows.filter(truncated)

    def match(self, rows: pa.Table) -> Ints:
        """Return, for each row of the target, the net change that takes it; -1 for none."""
        if self.duplicates is None:
            return match(rows, self.rows, self.written)
        return match_duplicates(rows, self.rows, self.duplicates, metadata=self.written.metadata)


def _merge(
    table: TargetVersion, changes: NetChanges, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    net, written = changes.rows, changes.written
    if not has_columns(table, written):
        return None
    held = table.schema.empty_table() if changes.is_truncated else small_rows(table)
    if held is None:
        return None
    held, gone = changes.without_truncated(held)
    of_row = changes.match(held)
    new = np.flatnonzero(are_new(net, matched_by(of_row, len(net))))
    of_row, net = with_ended(held, of_row, net, changes.ending)
    merge = MergedRows(held, net, of_row, new, written)
    tag = replace(tag, counts=tag.counts | merge.counts)
    adds_only = not (
        changes.truncates or merge.counts[MERGED_UPDATES] or merge.counts[MERGED_DELETES]
    )
    appends = adds_only and (len(table.files) < _MOST_FILES or not len(new))
    files, layout, change_rows = table.held_files, table.layout, None
    if appends:
        removed, rows = [], merge.new_rows()
    elif changes.truncates:
        removed, rows = files, merge.rows()
    else:
        touched = merge.touched_partitions(layout)
        removed = [file for file in files if key_of(file.partition) in touched]
        rows = layout.of_partitions(merge.rows(), touched)
    # Rows of removed and added files have nothing in common after a TRUNCATE.
    if table.shows_changes and not (appends or changes.is_truncated):
        change_rows = pa.concat_tables([merge.changed_rows(), changed_rows({SHOWN_DELETE: gone})])
    fence.verify()
    replace_by_rows(table, removed, rows, tag.delta, changes=change_rows)
    return tag


def changes_copies(plan: TargetPlan, tag: CommitTag) -> bool:
    """Returns whether the changes update or delete duplicate rows of a table without a key."""
    return not plan.decode.shape.key and bool(tag.counts.keys() & {ACTION_UPDATE, ACTION_DELETE})


def has_columns(table: TargetVersion, written: WrittenColumns) -> bool:
    """Returns whether the table has the written columns and requires only implemented features."""
    return table.is_writable and set(table.schema.names).issuperset(written.sources)


def small_rows(table: TargetVersion) -> pa.Table | None:
    """Returns all rows of a target that this process reads without Spark, else None.

    Its files are small, its features are implemented, and its rows take at most MOST_DRIVER_BYTES.
    """
    if not (table.is_small and table.is_writable):
        return None
    dataset = table.dataset()
    # A first batch of large rows would be in memory before it could be counted, so the footers are
    # checked first.
    if sum(row_group_bytes(dataset)) > MOST_DRIVER_BYTES:
        return None
    return table_of(batches(dataset), table.schema, MOST_DRIVER_BYTES)
