"""Applies net changes to rows of a target as statements.merge_statement's MERGE does, with Arrow
and NumPy: which change each row matches, what the rows are afterwards, and which rows are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import Bools, Ints, one_array
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
from waldelta.changes.merge.statements import (
    MERGED_DELETES,
    MERGED_INSERTS,
    MERGED_UPDATES,
    NetColumns,
    of_leaves,
)
from waldelta.changes.stage.stage import Ending
from waldelta.lake.commit_files import (
    POSTIMAGE,
    PREIMAGE,
    SHOWN_DELETE,
    SHOWN_INSERT,
    changed_rows,
)
from waldelta.metadata_columns import RAW, RELID
from waldelta.types import TargetType
from waldelta.types.hstore import Hstore


def match(held: pa.Table, net: pa.Table, net_columns: NetColumns) -> Ints:
    """Returns, for each row of the target, the net change of its key; -1 for none.

    Both tables need only their key columns.
    """
    if not net_columns.numbering.key:  # All changes are new rows.
        return np.full(len(held), -1, np.int64)
    return match_keys(
        [held[name] for name in net_columns.key_names], [net[base] for base in net_columns.bases]
    )


def match_keys(rows: Sequence[pa.ChunkedArray], keys: Sequence[pa.ChunkedArray]) -> Ints:
    """Returns, for each row by the columns of its key, the place of that key among ``keys``; -1 for
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
    net_columns: NetColumns

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

    def with_ended(self, ending: Ending | None) -> Self:
        """Returns the same with the changes of rows that end."""
        if ending is None:
            return self
        ends = (self.of_row < 0) & ending.are_current(self.held)
        numbers = len(self.net) + np.cumsum(ends) - 1
        ended = ending.end(self.held.filter(pa.array(ends)))
        net = pa.concat_tables([self.net, ended], promote_options="default")
        return replace(self, net=net, of_row=np.where(ends, numbers, self.of_row))

    @cached_property
    def _changed(self) -> pa.Table:
        """The updated rows as they are after the merge, then the new ones."""
        return self._built(self._updated)

    def _built(self, stay: Bools) -> pa.Table:
        schema, sources = self.held.schema, self.net_columns.sources
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
        names, toastable = self.net_columns.names, self.net_columns.numbering.toastable
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
        if flag not in self.net_columns.numbering.flags:
            return np.zeros(len(self.held), np.bool_)
        keeps: Bools = np.append(np.asarray(self.net[flag].fill_null(False)), False)
        return self._updated & keeps[self.of_row]

    @cached_property
    def _deleted(self) -> Bools:
        gone = np.append(has_action(self.net, ACTION_DELETE, ACTION_PURGE), False)
        return np.asarray(gone[self.of_row])

    @cached_property
    def _updated(self) -> Bools:
        return (self.of_row >= 0) & ~self._deleted


def ending_of_leaves(leaves: Sequence[int]) -> Ending:
    """Returns the end of the rows of truncated leaves (oids): they are deleted."""

    def are_current(rows: pa.Table) -> Bools:
        return np.asarray(pc.is_in(rows[RELID], value_set=pa.array(leaves, rows[RELID].type)))

    def end(rows: pa.Table) -> pa.Table:
        return pa.table({"action": pa.array([ACTION_DELETE] * len(rows), pa.string())})

    return Ending([RELID], are_current, end, [f"{of_leaves('t', leaves)} then delete"])


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
    rows: pa.Table, changes: pa.Table, net_columns: NetColumns, kinds: Mapping[str, TargetType]
) -> Bools:
    """Returns which rows of the target are stored as the complete change at their place."""
    equal = np.ones(len(rows), np.bool_)
    for name, source in net_columns.compared.items():
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


def removals_of(net: pa.Table) -> Ints:
    """Returns the positions of the updates and deletes, in the order of the changes."""
    removals = np.flatnonzero(has_action(net, ACTION_UPDATE, ACTION_DELETE))
    return removals[np.argsort(np.asarray(net[PLACE])[removals], kind="stable")]


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
