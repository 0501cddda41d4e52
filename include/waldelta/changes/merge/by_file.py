"""Merges many net changes, or few into a large target, file by file in Spark's tasks with Arrow.

Everything is one commit. A Spark MERGE converts everything that it reads into Spark's rows, joins
and shuffles them, and writes them in the resulting order. Instead, a task reads a few of the
target's files that may have a key of the net changes, and looks up their keys in the changes. It
rewrites each file that has one, with the rows in their previous order. So files keep their key
ranges, and later changes of some rows touch few files. Later tasks add the changes that matched no
row. The commit has the metadata of a MERGE's commit and is a compare-and-swap on the version that
was read (as merge_in_driver's).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from waldelta.arrow import Bools, Ints
from waldelta.changes.decode.collapse import PLACE, net_changes
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.merge.by_driver import (
    MergedRows,
    are_new,
    changes_copies,
    codes_of_duplicates,
    has_columns,
    match,
    match_codes,
    matched_by,
    removals_of,
    with_ended,
)
from waldelta.changes.merge.statements import (
    MERGED_DELETES,
    MERGED_INSERTS,
    MERGED_UPDATES,
    CommitTag,
    WrittenColumns,
    written_columns,
)
from waldelta.changes.stage.net_files import (
    NetFiles,
    at_places,
    batches,
    packed,
    parts_at_once,
    unpacked,
)
from waldelta.changes.stage.stage import Ending, Staged
from waldelta.errors import WaldeltaError, without_values
from waldelta.lake import DeltaTarget, Fence, Overtaken, TargetVersion
from waldelta.lake.data_file import DataFiles, discard, new_prefix, shared_order
from waldelta.lake.layout import HeldFile, Layout, NewFile, held_files
from waldelta.lake.storage import is_within
from waldelta.metadata_columns import RAW
from waldelta.pipeline import Job
from waldelta.spark import Runner
from waldelta.spark.runner import shares
from waldelta.types import TargetType

log = logging.getLogger(__name__)

# The net changes of a task's files, which the task keeps in memory. Beyond this, Spark merges,
# which can spill.
MOST_NET_BYTES = 512 << 20
# The net changes whose keys are in memory at once.
MOST_NET_ROWS = 32 << 20
MERGED = pa.schema(
    [
        ("removed", pa.string()),
        ("path", pa.string()),
        ("size", pa.int64()),
        ("stats", pa.string()),
        ("partition", pa.string()),
        ("updated", pa.int64()),
        ("deleted", pa.int64()),
        ("inserted", pa.int64()),
        ("matched", pa.binary()),
        ("is_possible", pa.bool_()),
        ("shows_changes", pa.bool_()),
    ]
)
_FOUND = pa.schema([("number", pa.int64()), ("found", pa.binary()), ("removed", pa.binary())])
# The columns of a table without a key whose rows net changes update or delete.
Duplicates = Sequence[tuple[str, TargetType]]


def readable_files(table: TargetVersion, written: WrittenColumns) -> pa.Table | None:
    """Returns a target's files (``TargetVersion.files``); None when only Spark can read them."""
    files = table.files
    is_own = all(is_within(path) for path in files["path"].to_pylist())
    return files if is_own and has_columns(table, written) else None


@dataclass(frozen=True, slots=True)
class _Tasks:
    """What tasks do of a merge, each with a share of the target's files or a file of the net
    changes.

    The names of all files of this attempt begin with ``prefix``.
    """

    table: DeltaTarget
    layout: Layout
    written: WrittenColumns
    net: NetFiles
    prefix: str
    # Whether rewritten files need files of their changed rows, for the change data feed.
    shows_changes: bool
    ending: Ending | None = None

    @property
    def schema(self) -> pa.Schema:
        """The target's columns."""
        return self.layout.schema

    @property
    def count(self) -> int:
        """The number of net changes."""
        return sum(self.net.rows)

    def open(self, file: HeldFile) -> ds.Dataset:
        """Returns the rows of one of its files."""
        return file.open(self.table.lake, self.table.uri, self.schema)

    def _has_ending(self, file: HeldFile) -> bool:
        """Returns whether a file may have rows that end without being named by a net change."""
        if self.ending is None:
            return False
        rows = self.open(file).to_table(columns=[*self.ending.columns])
        return bool(self.ending.are_current(rows).any())

    def _write(self) -> DataFiles:
        return DataFiles(self.table.files, self.layout, self.prefix)

    def _write_changes(self) -> DataFiles:
        return DataFiles(self.table.files, self.layout.of_changes, self.prefix)

    def rewrite(self, share: Sequence[HeldFile]) -> pa.Table:
        """Rewrite the files of a share that have a row of the net changes."""
        keys = [self.open(file).to_table(columns=self.written.key_names) for file in share]
        of_row = match(
            pa.concat_tables(keys), self.net.read(["action", *self.written.bases]), self.written
        )
        of_files = np.split(of_row, np.cumsum([len(part) for part in keys])[:-1])
        return self._rewrite_matched(share, of_files)

    def rewrite_taken(
        self, share: Sequence[HeldFile], places: Mapping[str, tuple[Ints, Ints]]
    ) -> pa.Table:
        """Rewrite the files of a share.

        ``places`` has, by file, the numbers of rows that net changes replace or delete, and the net
        changes' numbers.
        """
        of_files = []
        for file in share:
            rows, numbers = places[file.path]
            of_files.append(np.full(self.open(file).count_rows(), -1, np.int64))
            of_files[-1][rows] = numbers
        return self._rewrite_matched(share, of_files)

    def _rewrite_matched(self, share: Sequence[HeldFile], of_files: Sequence[Ints]) -> pa.Table:
        """Rewrite files by the net change of each of their rows (-1: none).

        Returns what it did, and which changes matched a row.
        """
        matched = matched_by(np.concatenate(of_files), self.count)
        changes, indices = self.net.take(matched, MOST_NET_BYTES), np.flatnonzero(matched)
        # The task returns the failure and doesn't raise it: after an error, Spark would retry the
        # task and read as much again.
        if changes is None:
            return pa.Table.from_pylist([_rows_of(is_possible=False)], MERGED)
        answers = [_rows_of(matched=packed(matched))]
        for file, of_file in zip(share, of_files, strict=True):
            if (of_file >= 0).any() or self._has_ending(file):
                # Here, rows have indices of the matched changes, not of all changes.
                of_matched = np.where(of_file >= 0, np.searchsorted(indices, of_file), -1)
                answers += self._rewrite_file(file, changes, of_matched)
        return pa.Table.from_pylist(answers, MERGED)

    def _rewrite_file(
        self, file: HeldFile, changes: pa.Table, of_row: Ints
    ) -> list[dict[str, Any]]:
        with self._write() as new, self._write_changes() as change_files:
            updated = deleted = begin = 0
            for part in parts_at_once(batches(self.open(file))):
                rows = part.cast(self.schema)
                of_part = of_row[begin : begin + len(rows)]
                begin += len(rows)
                indices = np.unique(of_part[of_part >= 0])
                place = np.where(of_part >= 0, np.searchsorted(indices, of_part), -1)
                place, net = with_ended(rows, place, at_places(changes, indices), self.ending)
                merged = MergedRows(rows, net, place, np.zeros(0, np.int64), self.written)
                new.write(merged.rows())
                if self.shows_changes:
                    change_files.write(merged.changed_rows())
                counts = merged.counts
                updated += counts[MERGED_UPDATES]
                deleted += counts[MERGED_DELETES]
            removed = _rows_of(removed=file.path, updated=updated, deleted=deleted)
            return [removed, *_as_rows(new, change_files)]

    def insert(self, number: int, chosen: Any) -> pa.Table:
        """Write the chosen rows of one of the net changes' files as new rows."""
        mask = np.unpackbits(chosen, count=self.net.rows[number]).astype(np.bool_)
        nothing, nowhere = self.schema.empty_table(), np.zeros(0, np.int64)
        with self._write() as new, self._write_changes() as change_files:
            for part in self.net.parts_of(number, mask):
                merged = MergedRows(nothing, part, nowhere, np.arange(len(part)), self.written)
                new.write(merged.new_rows())
                if self.shows_changes:
                    change_files.write(merged.changed_rows())
            answers = _as_rows(new, change_files)
        answers.append(_rows_of(inserted=int(mask.sum())))
        return pa.Table.from_pylist(answers, MERGED)

    def find(self, columns: Duplicates, number: int, share: Sequence[HeldFile]) -> pa.Table:
        """Search files for rows that equal removed ones.

        Returns four numbers of each: its file in the share, its place in the file, and the first
        removed row that it equals, and that is also written alike. Of the removed rows it returns
        the last two.
        """
        order = self.net.read(["action", PLACE])
        numbers = removals_of(order["action"], order[PLACE])
        rows = self.net.take(self.net.are_in(numbers), MOST_NET_BYTES)
        if rows is None:
            return pa.Table.from_pylist([{"number": number}], _FOUND)
        removed = rows.take(pa.array(np.argsort(np.argsort(numbers))))
        metadata, matches = self.written.metadata, [np.zeros((4, 0), np.int64)]
        for at, file in enumerate(share):
            begin = 0
            names = [*(name for name, _ in columns), *([RAW] if metadata else [])]
            for part in parts_at_once(batches(self.open(file), {n: pc.field(n) for n in names})):
                codes = codes_of_duplicates(part, removed, columns, metadata=metadata)
                equal, exact = (_first_like(of_both, len(part)) for of_both in codes)
                places = np.flatnonzero(equal >= 0)
                of_file = np.full(len(places), at)
                matches.append(np.stack([of_file, begin + places, equal[places], exact[places]]))
                begin += len(part)
        codes = codes_of_duplicates(self.schema.empty_table(), removed, columns, metadata=metadata)
        alike = np.stack([_first_like(np.concatenate([c, c]), len(removed)) for c in codes])
        rows_found = np.concatenate(matches, axis=1)
        needed = rows_found[:, _match_found(rows_found, alike) >= 0]
        answer = {"number": number, "found": needed.tobytes(), "removed": alike.tobytes()}
        return pa.Table.from_pylist([answer], _FOUND)


def merge_files(
    runner: Runner,
    job: Job,
    plan: TargetPlan,
    staged: Staged,
    tag: CommitTag,
    fence: Fence,
) -> CommitTag | None:
    """Commit staged net changes under ``tag``; returns the tag with counts.

    ``fence`` is verified, and None returned, as in merge_in_driver(); None also for truncated
    leaves.
    """
    if plan.truncated_leaves:
        return None
    written, name, truncated = written_columns(job, plan), plan.state.table_name, plan.is_truncated
    duplicates = plan.decode.columns if changes_copies(plan, tag) and not truncated else None
    return merge_written(
        runner, job, name, written, staged.folder, tag=tag, fence=fence, truncated=truncated,
        duplicates=duplicates, ending=staged.ending,
    )  # fmt: skip


def merge_written(  # noqa: PLR0913 - a target, what is written to it, and how it is committed
    runner: Runner,
    job: Job,
    table_name: str,
    written: WrittenColumns,
    folder: str,
    *,
    tag: CommitTag,
    fence: Fence,
    truncated: bool = False,
    duplicates: Duplicates | None = None,
    ending: Ending | None = None,
) -> CommitTag | None:
    """Commit as merge_files() does, by the columns that the net changes write.

    ``duplicates`` and ``ending`` are as in NetChanges.
    """
    table = job.lake.target(table_name).open()
    if table.committed(tag.app_id) >= tag.batch:
        return tag  # Delta skips a repeated MERGE in the same way.
    try:
        net = NetFiles.of(folder, job.lake)
        count, files = sum(net.rows), readable_files(table, written)
        if files is None or count != net_changes(tag.counts) or count > MOST_NET_ROWS:
            return None
        # Rows of removed and added files have nothing in common after a TRUNCATE.
        shows = table.shows_changes and not truncated
        tasks = _Tasks(table.place, table.layout, written, net, new_prefix(), shows, ending)
        merge = (
            _Merge(runner, tasks, files, truncated=truncated)
            if duplicates is None
            else _DuplicatesMerge(runner, tasks, files, duplicates)
        )
        return _merged(merge, table, tag, fence)
    except WaldeltaError:
        raise
    except Exception as err:
        # For example, another writer has committed since. Spark will merge, or report why it can't.
        # If this commit succeeded after all, Spark won't repeat it.
        log.warning(
            "table=%s can't be merged file by file, so Spark merges it as a whole: %s",
            table_name,
            without_values(err),
        )
        return None


def _merged(merge: _Merge, table: TargetVersion, tag: CommitTag, fence: Fence) -> CommitTag | None:
    try:
        if not merge.rewrite():
            merge.discard()
            return None
        merge.insert()
        tag = replace(tag, counts=tag.counts | merge.counts)
        fence.verify()
    except Exception:
        merge.discard()
        raise
    try:
        table.replace_files(merge.removed, merge.added, tag.delta, changes=merge.changes)
    except Overtaken:  # After any other error, the commit may exist.
        merge.discard()
        raise
    return tag


class _Merge:
    """A merge in progress: the files it removes and adds, and its numbers of changed rows."""

    def __init__(self, runner: Runner, tasks: _Tasks, files: pa.Table, *, truncated: bool) -> None:
        self._runner, self._tasks, self._files, self._truncated = runner, tasks, files, truncated
        self._held = held_files(files)
        self._keys = tasks.net.read(["action", *tasks.written.bases])
        self._matched = np.zeros(len(self._keys), np.bool_)
        self.added: list[NewFile] = []
        self.changes: list[NewFile] = []
        self.removed: list[HeldFile] = [*self._held] if truncated else []
        self.counts = {MERGED_INSERTS: 0, MERGED_UPDATES: 0, MERGED_DELETES: 0}

    def rewrite(self) -> bool:
        """Rewrite the files with rows of the net changes; returns False when Arrow can't rewrite
        one.
        """
        tasks = self._tasks
        # A task reads at least half as many rows as there are net changes, because it reads all of
        # their keys, too.
        parts = shares(self._touched(), tasks.count // 2)
        answers = self._runner.run(len(parts), MERGED, lambda number: tasks.rewrite(parts[number]))
        return self._are_rewritten(answers)

    def _are_rewritten(self, answers: Sequence[Any]) -> bool:
        files = {file.path: file for file in self._held}
        for row in answers:
            if row["matched"] is not None:
                self._matched[unpacked(row["matched"], len(self._keys))] = True
            if row["removed"] is not None:
                self.removed.append(files[row["removed"]])
            self._add(row)
        return all(row["is_possible"] for row in answers)

    def insert(self) -> None:
        """Write the net changes that are new rows as files of their own."""
        # A commit that only adds files shows their rows without others.
        is_shown = self._tasks.shows_changes and bool(self.removed)
        tasks = replace(self._tasks, shows_changes=is_shown)
        parts = np.split(are_new(self._keys, self._matched), np.cumsum(tasks.net.rows)[:-1])
        chosen = [(number, np.packbits(part)) for number, part in enumerate(parts) if part.any()]
        for row in self._runner.run(
            len(chosen), MERGED, lambda number: tasks.insert(*chosen[number])
        ):
            self._add(row)

    def discard(self) -> None:
        """Remove the files, which will never be read."""
        discard(self._tasks.table, self._tasks.prefix)

    def _add(self, row: Any) -> None:
        if row["path"] is not None:
            (self.changes if row["shows_changes"] else self.added).append(NewFile.of(row))
        for name, count in zip(
            self.counts, (row["inserted"], row["updated"], row["deleted"]), strict=True
        ):
            self.counts[name] += count

    def _touched(self) -> list[HeldFile]:
        """Returns the files that may have a row of the net changes."""
        written = self._tasks.written
        if self._truncated or not written.shape.key:
            return []
        if self._tasks.ending is not None:
            return self._held
        chosen = may_hold(
            self._files, written.key_names, [self._keys[base] for base in written.bases]
        )
        return list(compress(self._held, chosen))


class _DuplicatesMerge(_Merge):
    """A merge of updates and deletes of a table without a key.

    Each takes one of the rows that equal its old row. Tasks search the files for such rows, and
    return no more of them than changes need. Those that are taken are chosen among all of these, as
    match_duplicates() does in a small target. Then only their files are rewritten.
    """

    def __init__(
        self,
        runner: Runner,
        tasks: _Tasks,
        files: pa.Table,
        columns: Duplicates,
    ) -> None:
        super().__init__(runner, tasks, files, truncated=False)
        self._columns = columns

    def rewrite(self) -> bool:
        """Rewrite the files with rows that the net changes take; returns False as of _Merge."""
        tasks, columns = self._tasks, self._columns
        parts = shares(self._touched(), tasks.count // 2)
        answers = self._runner.run(
            len(parts), _FOUND, lambda number: tasks.find(columns, number, parts[number])
        )
        if any(row["found"] is None for row in answers):
            return False
        if not answers:
            return True
        files = [file for part in parts for file in part]
        begin = np.cumsum([0, *map(len, parts)]).tolist()
        matches = np.concatenate(
            [_numbers_of(row, begin[row["number"]]) for row in answers], axis=1
        )
        of_row = _match_found(
            matches, np.frombuffer(answers[0]["removed"], np.int64).reshape(2, -1)
        )
        order = tasks.net.read(["action", PLACE])
        changes = np.append(removals_of(order["action"], order[PLACE]), -1)[of_row]
        hits = [
            (file, matches[1][places], changes[places])
            for number, file in enumerate(files)
            if (places := (matches[0] == number) & (of_row >= 0)).any()
        ]
        of_file = {file.path: (rows, numbers) for file, rows, numbers in hits}
        rewritten = shares([file for file, *_ in hits])
        return self._are_rewritten(
            self._runner.run(
                len(rewritten),
                MERGED,
                lambda number: tasks.rewrite_taken(rewritten[number], of_file),
            )
        )

    def _touched(self) -> list[HeldFile]:
        """Returns the files that may have a row that equals an old one.

        Bounds of a column tell where equal values are always written alike.
        """
        exact = [
            (f"b{i}", name)
            for i, (name, kind) in enumerate(self._columns)
            if kind.is_fixed_size and _is_written_alike(kind)
        ]
        old = self._tasks.net.read(["action", PLACE, *(base for base, _ in exact)])
        old = old.take(pa.array(removals_of(old["action"], old[PLACE])))
        # A null is in any file.
        columns = [(name, old[base]) for base, name in exact if not old[base].null_count]
        if not columns:
            return self._held
        names, keys = zip(*columns, strict=True)
        return list(compress(self._held, may_hold(self._files, names, keys)))


def _numbers_of(answer: Any, first: int) -> Ints:
    """Returns a task's findings with the numbers that its files have among all files; the task
    counts its own from 0.
    """
    matches = np.frombuffer(answer["found"], np.int64).reshape(4, -1)
    moved: Ints = matches + np.array([[first], [0], [0], [0]])
    return moved


def _is_written_alike(kind: TargetType) -> bool:
    none = pa.array([], kind.arrow)
    return kind.equal_values(none) is none


def _first_like(codes: Ints, count: int) -> Ints:
    """Returns, for each of ``count`` rows, the first removed row with its code; -1 for none."""
    removed = codes[count:]
    first = np.full(int(codes.max(initial=-1)) + 1, -1, np.int64)
    first[removed[::-1]] = np.arange(len(removed))[::-1]
    return first[codes[:count]]


def _match_found(matches: Ints, removed: Ints) -> Ints:
    """Returns, for each row that a search found, the number of the removed row that it is matched
    with; -1 for none.
    """
    equal, exact = (np.concatenate([matches[k + 2], removed[k]]) for k in (0, 1))
    return match_codes(equal, exact + 1, matches.shape[1])


def _as_rows(new: DataFiles, change_files: DataFiles) -> list[dict[str, Any]]:
    return [
        _rows_of(**file, shows_changes=files is change_files)
        for files in (new, change_files)
        for file in files.close()
    ]


def _rows_of(**what: Any) -> dict[str, Any]:
    return {"updated": 0, "deleted": 0, "inserted": 0, "is_possible": True} | what


def may_hold(files: pa.Table, names: Sequence[str], keys: Sequence[pa.ChunkedArray]) -> Bools:
    """Returns which files (``TargetVersion.files``) may have a row with one of these keys.

    ``keys`` has the values of the columns ``names``.
    """
    verdicts = np.ones(len(files), np.bool_)
    for name, column in zip(names, keys, strict=True):
        sides = [f"partition.{name}"] * 2
        if sides[0] not in files.column_names:
            sides = [f"min.{name}", f"max.{name}"]
        least, most = map(files.schema.get_field_index, sides)
        if least >= 0 and most >= 0:
            verdicts &= _span_any(files.column(least), files.column(most), column.drop_null())
    return verdicts


def _span_any(least: pa.ChunkedArray, most: pa.ChunkedArray, values: pa.ChunkedArray) -> Bools:
    """Returns which ranges include one of the values; a range without an end may include any."""
    if (order := shared_order(least.type, values.type)) is None:
        return np.ones(len(least), np.bool_)
    values, least, most = (column.cast(order.kind) for column in (values, least, most))
    most = order.upper_ends(most)
    columns = (values, least, most)
    ranks = np.asarray(
        pc.rank(
            pa.chunked_array([c for column in columns for c in column.chunks], order.kind),
            tiebreaker="dense",
        )
    )
    of_values, of_least, of_most = np.split(ranks, np.cumsum([len(values), len(least)]))
    of_values = np.sort(of_values)
    spans = np.searchsorted(of_values, of_least) < np.searchsorted(of_values, of_most, side="right")
    return np.asarray(spans | np.asarray(least.is_null()) | np.asarray(most.is_null()))
