"""Merges net changes into a target file by file with Arrow, as one commit.

A Spark MERGE converts everything that it reads into Spark's rows, joins and shuffles them, and
writes them in the resulting order. Instead, a task reads a few of the target's files that may have
a key of the net changes, and looks up their keys in the changes. It rewrites each file that has
one, with the rows in their previous order. So files keep their key ranges, and later changes of
some rows touch few files. Later tasks add the changes that matched no row. The commit has the
transaction id and the userMetadata of a MERGE's commit. It is a compare-and-swap on the version
that was read, so it never overwrites a concurrent commit.

A small target is one task of this process: with many small tables, Spark's jobs would be most of a
run. That task writes the files that it rewrites in a partition as one, with the new rows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, compress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import tenacity

from waldelta.arrow import Ints, table_of
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_UPDATE,
    PLACE,
    net_changes,
)
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.merge.compare import FileRows
from waldelta.changes.merge.rows import (
    MergedRows,
    are_new,
    codes_of_duplicates,
    match,
    match_codes,
    matched_by,
    removals_of,
)
from waldelta.changes.merge.statements import (
    MERGED_DELETES,
    MERGED_INSERTS,
    MERGED_UPDATES,
    CommitTag,
    NetColumns,
)
from waldelta.changes.stage.net_files import (
    MOST_NET_BYTES,
    NetFiles,
    NetTable,
    at_places,
    batches,
    packed,
    parts_at_once,
    unpacked,
)
from waldelta.changes.stage.stage import Ending, Staged
from waldelta.errors import WaldeltaError, without_values
from waldelta.lake import (
    MOST_DRIVER_BYTES,
    DeltaTarget,
    Fence,
    Overtaken,
    TableError,
    TargetVersion,
)
from waldelta.lake.data_file import NEW_FILES, DataFiles, discard, new_prefix
from waldelta.lake.driver_limits import MOST_DRIVER_ROWS
from waldelta.lake.layout import Layout, NewFile, TableFile
from waldelta.metadata_columns import RAW
from waldelta.pipeline import Job
from waldelta.spark import Runner
from waldelta.spark.runner import Run, run_locally, shares
from waldelta.types import TargetType

log = logging.getLogger(__name__)

# The net changes whose keys are in memory at once.
MOST_NET_ROWS = 32 << 20
# A small target gets its new rows in a file of their own until it has this many files.
_MOST_FILES = 8
_NOWHERE = np.zeros(0, np.int64)
_COUNTS = (MERGED_INSERTS, MERGED_UPDATES, MERGED_DELETES)
MERGED = pa.schema(
    [
        ("removed", pa.string()),
        *NEW_FILES,
        *((name, pa.int64()) for name in _COUNTS),
        ("matched", pa.binary()),
        ("is_possible", pa.bool_()),
        ("shows_changes", pa.bool_()),
    ]
)
_FOUND = pa.schema([("found", pa.binary()), ("removed", pa.binary())])
# The columns of a table without a key whose rows net changes update or delete.
Duplicates = Sequence[tuple[str, TargetType]]


def read_small(table: TargetVersion, net: NetFiles) -> NetTable | None:
    """Returns the net changes in memory; None unless these and the target are small."""
    if not table.is_small or sum(net.rows) > MOST_DRIVER_ROWS:
        return None
    return net.in_memory(MOST_DRIVER_BYTES)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """What tasks do of a merge, each with a share of the target's files or a file of the net
    changes.

    The names of all files of this attempt begin with ``prefix``. A small target's share has all of
    its files, and its task also adds the new rows.
    """

    table: DeltaTarget
    layout: Layout
    changes: NetChanges
    net: NetFiles
    prefix: str
    # Whether rewritten files need files of their changed rows, for the change data feed.
    shows_changes: bool
    is_small: bool
    loaded: dict[str, pa.Table] = field(default_factory=dict)

    @property
    def schema(self) -> pa.Schema:
        """The target's columns."""
        return self.layout.schema

    @property
    def net_columns(self) -> NetColumns:
        """The columns that the net changes write."""
        return self.changes.net_columns

    @property
    def ending(self) -> Ending | None:
        """What ends rows that no net change names."""
        return self.changes.ending

    @property
    def count(self) -> int:
        """The number of net changes."""
        return sum(self.net.rows)

    def open(self, file: TableFile) -> ds.Dataset:
        """Returns the rows of one of its files, in memory where the target is small."""
        if (table := self.loaded.get(file.path)) is None:
            rows = file.open(self.table.lake, self.table.uri, self.schema)
            room = MOST_DRIVER_BYTES - sum(each.nbytes for each in self.loaded.values())
            table = table_of(batches(rows), self.schema, room) if self.is_small else None
            if table is None:
                return rows
            self.loaded[file.path] = table
        return ds.dataset(table)

    def _has_ending(self, file: TableFile) -> bool:
        """Returns whether a file may have rows that end without being named by a net change."""
        if self.ending is None:
            return False
        rows = self.open(file).to_table(columns=[*self.ending.columns])
        return bool(self.ending.are_current(rows).any())

    @contextmanager
    def _writing(self, answers: list[dict[str, Any]]) -> Iterator[Callable[[MergedRows], None]]:
        """Yields a function that writes rows into new files; answers tell of them."""
        files, layout, prefix = self.table.files, self.layout, self.prefix
        with (
            DataFiles(files, layout, prefix) as new,
            DataFiles(files, layout.of_changes, prefix) as changes,
        ):

            def write(rows: MergedRows) -> None:
                merged = rows.with_ended(self.ending)
                new.write(merged.rows())
                if self.shows_changes:
                    changes.write(merged.changed_rows())
                # As in a MERGE, deleted rows that no change names aren't counted.
                deletes = {MERGED_DELETES: rows.counts[MERGED_DELETES]}
                answers.append(_rows_of(**(merged.counts | deletes)))

            yield write
            answers += [
                _rows_of(**file, shows_changes=written is changes)
                for written in (new, changes)
                for file in written.close()
            ]

    def rewrite(self, share: Sequence[TableFile]) -> pa.Table:
        """Rewrite the files of a share that have a row of the net changes."""
        if not self.net_columns.numbering.key:  # All changes are new rows.
            return self.rewrite_taken(share, {})
        keys = [self.open(file).to_table(columns=self.net_columns.key_names) for file in share]
        of_row = match(
            pa.concat_tables(keys),
            self.net.read(["action", *self.net_columns.bases]),
            self.net_columns,
        )
        of_files = np.split(of_row, np.cumsum([len(part) for part in keys])[:-1])
        return self._rewrite_matched(share, of_files)

    def rewrite_taken(
        self, share: Sequence[TableFile], places: Mapping[str, tuple[Ints, Ints]]
    ) -> pa.Table:
        """Rewrite the files of a share.

        ``places`` has, by file, the numbers of rows that net changes replace or delete, and the net
        changes' numbers.
        """
        of_files = []
        for file in share:
            rows, numbers = places.get(file.path, (_NOWHERE, _NOWHERE))
            of_files.append(np.full(self.open(file).count_rows(), -1, np.int64))
            of_files[-1][rows] = numbers
        return self._rewrite_matched(share, of_files)

    def _rewrite_matched(self, share: Sequence[TableFile], of_files: Sequence[Ints]) -> pa.Table:
        """Rewrite files by the net change of each of their rows (-1: none).

        Returns what it did, and which changes it applied.
        """
        applied = matched_by(np.concatenate(of_files), self.count)
        new = np.zeros(self.count, np.bool_)
        if self.is_small:
            new = are_new(self.net.read(["action"]), applied)
        is_rewritten = self._are_rewritten(share, of_files, adds=bool(new.any()))
        rewritten = [*compress(zip(share, of_files, strict=True), is_rewritten)]
        # New rows alone are added by a task of their own.
        applied |= new if sum(len(of_file) for _, of_file in rewritten) else False
        changes, indices = self.net.take(applied, MOST_NET_BYTES), np.flatnonzero(applied)
        # The task returns the failure and doesn't raise it: after an error, Spark would retry the
        # task and read as much again.
        if changes is None:
            return pa.Table.from_pylist([_rows_of(is_possible=False)], MERGED)
        answers = [_rows_of(matched=packed(applied))]
        # Here, rows have indices of the applied changes, not of all changes.
        added = np.searchsorted(indices, np.flatnonzero(applied & new))
        groups = [[file] for file in rewritten]
        for files in [rewritten] if self.is_small and rewritten else groups:
            of_row = np.concatenate([of_file for _, of_file in files])
            of_row = np.where(of_row >= 0, np.searchsorted(indices, of_row), -1)
            answers += self._rewrite_as_one([file for file, _ in files], changes, of_row, added)
        return pa.Table.from_pylist(answers, MERGED)

    def _are_rewritten(
        self, share: Sequence[TableFile], of_files: Sequence[Ints], *, adds: bool
    ) -> list[bool]:
        """Returns which files are rewritten: those with rows that change.

        Of a small target, these are all files of their partitions. Many files are rewritten
        whenever something is written.
        """
        has_changes = [
            bool((of_file >= 0).any()) or self._has_ending(file)
            for file, of_file in zip(share, of_files, strict=True)
        ]
        if not self.is_small:
            return has_changes
        parts = [frozenset(file.partition.items()) for file in share]
        changed = {*compress(parts, has_changes)}
        if (adds or changed) and len(share) >= _MOST_FILES:
            changed |= {part for part, count in Counter(parts).items() if count > 1}
        return [part in changed for part in parts]

    def _rewrite_as_one(
        self, files: Sequence[TableFile], changes: pa.Table, of_row: Ints, added: Ints
    ) -> list[dict[str, Any]]:
        answers, begin = [_rows_of(removed=file.path) for file in files], 0
        rows_of_files = chain.from_iterable(batches(self.open(file)) for file in files)
        with self._writing(answers) as write:
            for part in parts_at_once(rows_of_files):
                rows = part.cast(self.schema)
                of_part = of_row[begin : begin + len(rows)]
                begin += len(rows)
                if len(of_part) < len(rows):  # The rest would be lost.
                    raise TableError(f"{self.table.uri} has rows that weren't matched")
                used = np.unique(np.concatenate([of_part[of_part >= 0], added]))
                place = np.where(of_part >= 0, np.searchsorted(used, of_part), -1)
                new = np.searchsorted(used, added)
                write(MergedRows(rows, at_places(changes, used), place, new, self.net_columns))
                added = _NOWHERE
        return answers

    def insert(self, number: int, chosen: Any) -> pa.Table:
        """Write the chosen rows of one of the net changes' files as new rows."""
        mask = np.unpackbits(chosen, count=self.net.rows[number]).astype(np.bool_)
        answers: list[dict[str, Any]] = []
        with self._writing(answers) as write:
            for part in self.net.parts_of(number, mask):
                new, nothing = np.arange(len(part)), self.schema.empty_table()
                write(MergedRows(nothing, part, _NOWHERE, new, self.net_columns))
        return pa.Table.from_pylist(answers, MERGED)

    def find(self, first: int, share: Sequence[TableFile]) -> pa.Table:
        """Search files, which are numbered from ``first``, for rows that equal removed ones.

        Returns four numbers of each: its file, its place in the file, and the first removed row
        that it equals, and that is also written alike. Of the removed rows it returns the last two.
        """
        columns = self.changes.duplicates or ()
        numbers = removals_of(self.net.read(["action", PLACE]))
        rows = self.net.take(self.net.are_in(numbers), MOST_NET_BYTES)
        if rows is None:
            return pa.Table.from_pylist([{"found": None}], _FOUND)
        removed = rows.take(pa.array(np.argsort(np.argsort(numbers))))
        metadata, matches = self.net_columns.metadata, [np.zeros((4, 0), np.int64)]
        for number, file in enumerate(share, first):
            begin = 0
            names = [*(name for name, _ in columns), *([RAW] if metadata else [])]
            for part in parts_at_once(batches(self.open(file), {n: pc.field(n) for n in names})):
                codes = codes_of_duplicates(part, removed, columns, metadata=metadata)
                equal, exact = (_first_like(of_both, len(part)) for of_both in codes)
                places = np.flatnonzero(equal >= 0)
                of_file = np.full(len(places), number)
                matches.append(np.stack([of_file, begin + places, equal[places], exact[places]]))
                begin += len(part)
        codes = codes_of_duplicates(self.schema.empty_table(), removed, columns, metadata=metadata)
        alike = np.stack([_first_like(np.concatenate([c, c]), len(removed)) for c in codes])
        rows_found = np.concatenate(matches, axis=1)
        needed = rows_found[:, _match_found(rows_found, alike) >= 0]
        answer = {"found": needed.tobytes(), "removed": alike.tobytes()}
        return pa.Table.from_pylist([answer], _FOUND)


@dataclass(frozen=True, slots=True)
class NetChanges:
    """Net changes that are staged in a folder, the columns that they write, and what a TRUNCATE
    before them removes.

    ``is_truncated``: all rows that the target had are gone. ``duplicates`` are the columns of a
    table without a key whose rows the changes update or delete. ``in_memory`` as ``Staged.net``.
    """

    folder: str
    net_columns: NetColumns
    is_truncated: bool = False
    duplicates: Duplicates | None = None
    ending: Ending | None = None
    in_memory: NetTable | None = None

    @classmethod
    def of(cls, job: Job, plan: TargetPlan, staged: Staged, tag: CommitTag) -> NetChanges:
        """Returns the staged changes of a plan."""
        # Net changes of a target that keeps more than a mirror have the metadata columns among the
        # others, because a row whose state ends keeps them (ModeTarget.names).
        metadata = job.pipeline.target.metadata_columns and not plan.state.target_mode.keeps_rows
        net_columns = NetColumns(plan.decode.names, plan.decode.numbering, metadata)
        duplicates = None
        takes = tag.counts.keys() & {ACTION_UPDATE, ACTION_DELETE}
        if takes and not (plan.is_truncated or net_columns.numbering.key):
            duplicates = plan.decode.columns
        return cls(
            staged.folder, net_columns, plan.is_truncated, duplicates, staged.ending, staged.net
        )


def merge_files(
    runner: Runner, job: Job, table_name: str, changes: NetChanges, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    """Commit net changes under ``tag``; returns the tag with counts of what they did.

    ``fence`` is verified after the target was read. Returns None where Spark must merge: for
    features of Delta that only Spark writes, for more net changes than fit into memory, or when the
    target can't be written as it was read.
    """
    overtaken = tenacity.retry_if_exception_type(Overtaken)
    twice = tenacity.Retrying(retry=overtaken, stop=tenacity.stop_after_attempt(2), reraise=True)
    try:
        return twice(_merge, runner, job.lake.target(table_name), changes, tag, fence)
    except WaldeltaError:
        raise
    except Exception as err:
        # Spark will merge, or report why it can't. If this commit succeeded after all, Spark won't
        # repeat it.
        log.warning(
            "table=%s can't be merged file by file, so Spark merges it as a whole: %s",
            table_name,
            without_values(err),
        )
        return None


def _merge(
    runner: Runner, target: DeltaTarget, changes: NetChanges, tag: CommitTag, fence: Fence
) -> CommitTag | None:
    table = target.open()
    if table.committed(tag.app_id) >= tag.batch:
        return tag  # Delta skips a repeated MERGE in the same way.
    net = changes.in_memory or NetFiles.of(changes.folder, target.lake)
    target_rows = FileRows.of(table, changes.net_columns)
    count = sum(net.rows)
    if target_rows is None or count != net_changes(tag.counts) or count > MOST_NET_ROWS:
        return None
    # Rows of removed and added files have nothing in common after a TRUNCATE.
    shows = table.shows_changes and not changes.is_truncated
    small = read_small(table, net)
    is_small, net = small is not None, small or net.on_disk()
    changes = replace(changes, in_memory=None)  # Spark's tasks would be sent them.
    tasks = _Tasks(target, table.layout, changes, net, new_prefix(), shows, is_small)
    run = runner.run if small is None else run_locally
    merge = (_Merge if changes.duplicates is None else _DuplicatesMerge)(run, tasks, target_rows)
    return _merged(merge, table, tag, fence)


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

    def __init__(self, run: Run, tasks: _Tasks, target_rows: FileRows) -> None:
        self._run, self._tasks, self._target_rows = run, tasks, target_rows
        self._keys = tasks.net.read(["action", *tasks.net_columns.bases])
        self._applied = np.zeros(len(self._keys), np.bool_)
        self.added: list[NewFile] = []
        self.changes: list[NewFile] = []
        self.removed: list[TableFile] = target_rows.files if tasks.changes.is_truncated else []
        self.counts = dict.fromkeys(_COUNTS, 0)

    def rewrite(self) -> bool:
        """Rewrite the files with rows of the net changes; returns False when Arrow can't rewrite
        one.
        """
        return self._rewritten(self._touched(), self._tasks.rewrite)

    def _shares(self, files: list[TableFile]) -> list[list[TableFile]]:
        if self._tasks.is_small:
            return [files] if files else []
        # A task reads at least half as many rows as there are net changes, because it reads all of
        # their keys, too.
        return shares(files, self._tasks.count // 2)

    def _rewritten(
        self, files: list[TableFile], rewrite: Callable[[Sequence[TableFile]], pa.Table]
    ) -> bool:
        parts, by_path = self._shares(files), {file.path: file for file in files}
        answers = self._run(len(parts), MERGED, lambda number: rewrite(parts[number]))
        for row in answers:
            if row["matched"] is not None:
                self._applied[unpacked(row["matched"], len(self._keys))] = True
            if row["removed"] is not None:
                self.removed.append(by_path[row["removed"]])
            self._count(row)
        return all(row["is_possible"] for row in answers)

    def insert(self) -> None:
        """Write the other net changes that are new rows as files of their own."""
        # A commit that only adds files shows their rows without others.
        is_shown = self._tasks.shows_changes and bool(self.removed)
        tasks = replace(self._tasks, shows_changes=is_shown)
        parts = tasks.net.by_file(are_new(self._keys, self._applied))
        chosen = [(number, np.packbits(mask)) for number, mask in parts]
        for row in self._run(len(chosen), MERGED, lambda number: tasks.insert(*chosen[number])):
            self._count(row)

    def discard(self) -> None:
        """Remove the files, which will never be read."""
        discard(self._tasks.table, self._tasks.prefix)

    def _count(self, row: Any) -> None:
        if row["path"] is not None:
            (self.changes if row["shows_changes"] else self.added).append(NewFile.of(row))
        for name in _COUNTS:
            self.counts[name] += row[name]

    def _touched(self) -> list[TableFile]:
        """Returns the files that may have a row of the net changes, or all of a small target."""
        tasks, net_columns, files = self._tasks, self._tasks.net_columns, self._target_rows.files
        if tasks.changes.is_truncated:
            return []
        if tasks.ending is not None or (tasks.is_small and net_columns.numbering.key):
            return files
        if not net_columns.numbering.key:
            return files if tasks.is_small and len(files) >= _MOST_FILES else []
        bases = [self._keys[base] for base in net_columns.bases]
        return self._target_rows.files_with(net_columns.key_names, bases)


class _DuplicatesMerge(_Merge):
    """A merge of updates and deletes of a table without a key.

    Each takes one of the rows that equal its old row, in the order of the changes. Rows that are
    written exactly like the old rows are taken first. Tasks search the files for such rows, and
    return no more of them than changes need. Those that are taken are chosen among all of these.
    Then only their files are rewritten.
    """

    def rewrite(self) -> bool:
        """Rewrite the files with rows that the net changes take; returns False as of _Merge."""
        tasks, files = self._tasks, self._searched()
        parts = self._shares(files)
        begin = np.cumsum([0, *map(len, parts)]).tolist()
        answers = self._run(len(parts), _FOUND, lambda n: tasks.find(begin[n], parts[n]))
        if any(row["found"] is None for row in answers):
            return False
        places = self._taken(files, answers) if answers else {}
        is_whole = tasks.is_small or tasks.ending is not None
        rewritten = [file for file in self._target_rows.files if is_whole or file.path in places]
        return self._rewritten(rewritten, lambda share: tasks.rewrite_taken(share, places))

    def _taken(
        self, files: Sequence[TableFile], answers: Sequence[Any]
    ) -> dict[str, tuple[Ints, Ints]]:
        """Returns the places of the rows that are taken by file, and the changes that take them."""
        matches = np.concatenate(
            [np.frombuffer(row["found"], np.int64).reshape(4, -1) for row in answers], axis=1
        )
        of_row = _match_found(
            matches, np.frombuffer(answers[0]["removed"], np.int64).reshape(2, -1)
        )
        changes = np.append(removals_of(self._tasks.net.read(["action", PLACE])), -1)[of_row]
        taken = ((matches[0] == number) & (of_row >= 0) for number in range(len(files)))
        return {
            file.path: (matches[1][places], changes[places])
            for file, places in zip(files, taken, strict=True)
            if places.any()
        }

    def _searched(self) -> list[TableFile]:
        """Returns the files that may have a row that equals an old one.

        Bounds of a column tell where equal values are always written alike.
        """
        exact = [
            (f"b{i}", name)
            for i, (name, kind) in enumerate(self._tasks.changes.duplicates or ())
            if kind.is_fixed_size and _is_written_alike(kind)
        ]
        old = self._tasks.net.read(["action", PLACE, *(base for base, _ in exact)])
        old = old.take(pa.array(removals_of(old)))
        # A null is in any file.
        columns = [(name, old[base]) for base, name in exact if not old[base].null_count]
        if not columns:
            return self._target_rows.files
        names, keys = zip(*columns, strict=True)
        return self._target_rows.files_with(names, keys)


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


def _rows_of(**what: Any) -> dict[str, Any]:
    return dict.fromkeys(_COUNTS, 0) | {"is_possible": True} | what
