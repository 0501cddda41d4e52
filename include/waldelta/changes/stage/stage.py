"""Stages a range of landed batches: writes one target's net changes as files for the merge.

Messages are decoded into events, a target's own filter routes these, and the events of a key are
collapsed to its net change. This process does so for a small range: Spark's jobs would take seconds
for milliseconds of work. For a larger range, Spark's Python tasks do the same and read and write
the files themselves. Converting rows to Spark's on their way from the change log to the merge,
twice and once through its shuffle, would cost three times as much as decoding and collapsing them.

The tasks of one job decode pieces of the change log into buckets by key, as Arrow files. Those of
the next job collapse one bucket each. The rows passed on are counted, because a folder's listing
may be out of date, and an Arrow stream that ends too early reads as a complete one. Chains of moved
keys cross any partitioning by key, so a range with moves is one bucket.

A range of many targets' messages is split: tasks read it once and write it again by relation. A row
group of the log has all messages of its time. Reading one table's messages means reading every
group that has any, with all columns: for many tables, the whole range once for each.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from waldelta.arrow import Bools, Ints, one_array
from waldelta.changes.decode.collapse import ACTION_INSERT, ACTION_UPSERT, RAW_ROWS, net_changes
from waldelta.changes.decode.decode import CHANGE_COLUMNS, DecodePlan, collapse_events, decode_all
from waldelta.changes.decode.route import BUCKET, judge_files, route, routed
from waldelta.changes.decode.target_plan import TargetPlan
from waldelta.changes.stage.net_files import NetFiles, NetTable, check_rows, parent_files, write_net
from waldelta.errors import StagedLost, without_values
from waldelta.lake import (
    MOST_DRIVER_BYTES,
    Lake,
    parquet_format,
    remove_folder,
    staging_folder,
)
from waldelta.lake.changelog import ChangeLog, RowMessages, Stream
from waldelta.lake.changelog.batch_range import BYTES_PER_COLLAPSE
from waldelta.lake.changelog.row_messages import (
    ROW_SCHEMA,
    Piece,
    Volume,
    all_row_messages,
    row_messages,
)
from waldelta.lake.write_errors import change_log_write_error
from waldelta.pipeline import Job, named_error
from waldelta.spark import Runner
from waldelta.spark.runner import shares

log = logging.getLogger(__name__)

# The average number of tables, by bytes, waiting for a row group, from which splitting pays: it
# costs about as much as reading the group twice.
SPLIT_FROM_TABLES = 4
# Relations with fewer messages share a row group: the headers of its columns, and a reader's
# request for them, cost as much as that many messages.
ROWS_PER_GROUP = 2_048
# The largest row group that is written, so that readers hold no more than that at once.
GROUP_ROWS, GROUP_BYTES = 131_072, 16 << 20
_WRITTEN = pa.schema([("path", pa.string())])


@dataclass
class Split(RowMessages):
    """The row messages of a range, in files sorted by relation."""

    uri: str
    lake: Lake
    paths: Sequence[str] = field(repr=False)

    def dataset(self) -> ds.Dataset | None:
        """Returns all files as a dataset; None when there are no messages."""
        return self._dataset

    @cached_property
    def _dataset(self) -> ds.Dataset | None:
        # Cached, so that each file's footer is read once, not once for each table.
        if not self.paths:
            return None
        files, layout = self.lake.unchanging_files(self.uri), parquet_format(self.uri)
        fragments = [layout.make_fragment(path, files) for path in self.paths]
        return ds.FileSystemDataset(fragments, ROW_SCHEMA, layout, files)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without the opened dataset: tasks read only the files that they are
        given.
        """
        return {name: value for name, value in self.__dict__.items() if name != "_dataset"}


@contextmanager
def splitting(
    runner: Runner,
    job: Job,
    change_log: ChangeLog,
    waiting: Callable[[Stream], Collection[int]],
) -> Iterator[Callable[[Stream], Split | None]]:
    """Yields a function that splits a range, where that pays for the relations that wait for it.

    A range's files are removed when the next range is split. The function raises TargetNotWritable
    when they can't be written.
    """
    folders: list[str] = []

    def split_up(stream: Stream) -> Split | None:
        _remove(folders)
        if not should_split(change_log, stream, waiting(stream)):
            return None
        folders.append(staging_folder(job.lake, "messages", 0, stream.segments.upto, job.run_id))
        try:
            return split(runner, change_log, stream, folders[0])
        except Exception as err:
            raise named_error(err) or change_log_write_error(folders[0], err) or err from err

    try:
        yield split_up
    finally:
        _remove(folders)


def _remove(folders: list[str]) -> None:
    while folders:
        remove_folder(folders.pop())


def should_split(change_log: ChangeLog, stream: Stream, relation_ids: Collection[int]) -> bool:
    """Returns whether to sort a range's row messages by relation before targets are applied.

    It pays if on average SPLIT_FROM_TABLES of these relations may have messages in a row group,
    judged by the files' statistics: else each target reads the groups itself.
    """
    ids = np.sort(np.fromiter(relation_ids, np.int64))
    if len(ids) < SPLIT_FROM_TABLES:
        return False
    weighed = total = 0
    for group in change_log.groups(all_row_messages(stream.segments)):
        (chunk,) = group.row_groups
        bounds = chunk.statistics.get("relation_id")
        least, most = (bounds["min"], bounds["max"]) if bounds else (ids[0], ids[-1])
        waiting = int(np.searchsorted(ids, most, "right") - np.searchsorted(ids, least, "left"))
        weighed, total = weighed + waiting * chunk.total_byte_size, total + chunk.total_byte_size
    return weighed >= SPLIT_FROM_TABLES * max(total, 1)


def split(runner: Runner, change_log: ChangeLog, stream: Stream, folder: str) -> Split:
    """Write the row messages of a range into files of a folder, each sorted by relation.

    Messages of one relation stay in the order of the log.
    """
    began = time.monotonic()
    condition, lake = all_row_messages(stream.segments), change_log.lake
    dealt = shares(change_log.pieces(condition))
    base, _, name = folder.rpartition("/")

    def write(number: int) -> pa.Table:
        # The name is unique to this attempt: an earlier one, taken for lost, may still be writing.
        path = f"part-{number}-{uuid.uuid4().hex}.parquet"
        files = lake.files(base)
        files.create_dir(name)
        parts = list(change_log.read(dealt[number], condition, ROW_SCHEMA.names))
        with (
            files.open_output_stream(f"{name}/{path}") as sink,
            pq.ParquetWriter(sink, ROW_SCHEMA, compression="lz4") as writer,
        ):
            for group in _groups(pa.Table.from_batches(parts, ROW_SCHEMA)):
                writer.write_table(group, row_group_size=GROUP_ROWS)
        return pa.table([[path]], schema=_WRITTEN)

    answers = runner.run(len(dealt), _WRITTEN, write)
    log.info(
        "rewrote the messages of many tables, sorted by table, in %.1f s", time.monotonic() - began
    )
    return Split(folder, lake, [row["path"] for row in answers])


def _groups(rows: pa.Table) -> Iterator[pa.Table]:
    """Yields the rows by relation, a row group at a time.

    A row group has one relation's rows, or those of several relations with few.
    """
    # Combined once: taking rows from many pieces would combine them each time.
    rows = rows.combine_chunks()
    relation_id = rows["relation_id"].to_numpy()
    order = np.argsort(relation_id, kind="stable")
    most = max(1, min(GROUP_ROWS, GROUP_BYTES * len(rows) // max(rows.nbytes, 1)))
    for begin, end in _cuts(relation_id[order], most):
        yield rows.take(pa.array(order[begin:end]))


def _cuts(relation_id: Ints, most: int) -> Iterator[tuple[int, int]]:
    """Yields where row groups of sorted relations begin and end."""
    if not len(relation_id):
        return
    starts = np.flatnonzero(relation_id[1:] != relation_id[:-1]) + 1
    begin, least = 0, min(ROWS_PER_GROUP, most)
    for end in [*map(int, starts), len(relation_id)]:
        if end - begin >= least or end == len(relation_id):
            for first in range(begin, end, most):
                yield first, min(first + most, end)
            begin = end


# One task collapses about this many row messages, or BYTES_PER_COLLAPSE of them; a larger range
# gets more tasks.
ROWS_PER_COLLAPSE = 500_000
# What the collapsing tasks return, and the tasks that decode into buckets.
COUNTS = pa.schema(
    [
        ("action", pa.string()),
        ("rows", pa.int64()),
        ("raw_rows", pa.int64()),
        ("incomplete", pa.bool_()),
    ]
)
DIVIDED = pa.schema([("name", pa.string()), ("rows", pa.list_(pa.int64()))])


@dataclass(frozen=True, slots=True)
class Staged:
    """Net changes ready to be merged: their folder, and their number by action.

    ``incomplete``: a new row arrived without the value of a large column, which must be read from
    the source. ``ending`` says what a TRUNCATE makes of other rows that the target keeps. ``net``
    are changes in memory that aren't in the folder yet.
    """

    folder: str
    counts: dict[str, int]
    incomplete: bool = False
    ending: Ending | None = None
    net: NetTable | None = None

    @classmethod
    def of(cls, folder: str, parts: Sequence[Mapping[str, Any]]) -> Self:
        """Returns the changes in a folder by the counts of their parts (COUNTS)."""
        counts = Counter({RAW_ROWS: sum(part["raw_rows"] for part in parts)})
        for part in parts:
            counts[part["action"]] += part["rows"]
        return cls(folder, dict(counts), any(part["incomplete"] for part in parts))

    def on_disk(self) -> Staged:
        """Returns the changes in files of the folder, which a step other than the merge of a small
        target reads.
        """
        if self.net is not None:
            self.net.on_disk()
        return replace(self, net=None)


@dataclass(frozen=True, slots=True)
class Ending:
    """Ends the target's rows that a TRUNCATE affects and no net change names.

    The TRUNCATE is of one leaf, or the target's mode keeps deleted rows. ``are_current`` returns
    which rows end, and reads only ``columns`` of them. ``end`` returns the updates and deletes of
    such rows. ``clauses`` are the same as clauses of a MERGE.
    """

    columns: Sequence[str]
    are_current: Callable[[pa.Table], Bools]
    end: Callable[[pa.Table], pa.Table]
    clauses: Sequence[str]


def stage(runner: Runner, change_log: ChangeLog, plan: TargetPlan, folder: str) -> Staged:
    """Returns the net changes: in memory those of few messages, else as Parquet in ``folder``."""
    if plan.rows is not None:
        events = [*decode_all(plan.rows.to_batches(), plan.decode)]
        if events:
            table = pa.Table.from_batches(events)
            events = route(runner, table, plan.decode, f"{folder}-routed").to_batches()
        rows = _net_of(events, plan.decode)
        net = NetTable.of_rows(folder, change_log.lake, rows)
        staged = replace(Staged.of(folder, _counts(rows, plan.decode).to_pylist()), net=net)
        # Rows may take more memory than their messages: a null takes as much as a value.
        return staged.on_disk() if net.in_memory(MOST_DRIVER_BYTES) is None else staged
    staged = Staged.of(folder, _stage(runner, plan.split or change_log, plan, folder))
    staged_rows = sum(NetFiles.of(folder, change_log.lake).rows)
    check_rows(folder, staged_rows, net_changes(staged.counts))
    return staged


def check_whole(runner: Runner, staged: Staged) -> None:
    """Raise StagedLost unless Spark finds all rows that the tasks reported.

    Spark's listing of the folder may be older than ours.
    """
    rows = runner.spark().read.parquet(staged.folder).count()
    check_rows(staged.folder, rows, net_changes(staged.counts))


def tasks_for(volume: Volume) -> int:
    """Returns how many tasks this volume needs."""
    return max(1, -(-volume.rows // ROWS_PER_COLLAPSE), -(-volume.bytes // BYTES_PER_COLLAPSE))


def buckets_for(plan: TargetPlan) -> int:
    """Returns into how many buckets by key the events are divided: one if rows may change keys."""
    return 1 if plan.volume.moves or plan.may_move else tasks_for(plan.volume)


def _stage(runner: Runner, messages: RowMessages, plan: TargetPlan, folder: str) -> list[Any]:
    """Write the net changes as Parquet into ``folder``, and return their counts (COUNTS).

    ``messages`` has at least the messages that the plan is about.
    """
    condition = row_messages(plan.decode.segments, plan.state.relation_ids, plan.decode.snapshot)
    pieces = messages.pieces(condition)
    staging = _Staging(folder, messages.lake, plan.decode)

    def decoded(share: Sequence[Piece]) -> Iterator[pa.RecordBatch]:
        return decode_all(messages.read(share, condition, CHANGE_COLUMNS), staging.plan)

    buckets = buckets_for(plan)
    if buckets == 1 and plan.decode.routing is None:
        return runner.run(1, COUNTS, lambda number: staging.collapse(number, decoded(pieces)))
    dealt = shares(pieces)
    files = runner.run(
        len(dealt),
        DIVIDED,
        lambda number: staging.divide(number, decoded(dealt[number]), buckets),
    )
    # Every task gets the whole list: one file of each decoding task for each bucket.
    names, rows = [row["name"] for row in files], np.array([row["rows"] for row in files], np.int64)
    rows = rows.reshape(len(names), buckets)
    if plan.decode.routing is not None and rows.any():
        decoded_files = [f"{folder}-decoded/{name}.parquet" for name in names]
        judge_files(runner, decoded_files, plan.decode.routing, f"{folder}-routed")
    return runner.run(
        buckets,
        COUNTS,
        lambda number: staging.collapse(number, staging.read(number, names, rows[:, number])),
    )


@dataclass(frozen=True, slots=True)
class _Staging:
    """The folders in which tasks pass on events and write net changes.

    Events are next to the net changes: those of bucket N in ``<folder>-events/N``. For a target
    with a filter, ``<folder>-decoded`` has the columns that it reads, and ``<folder>-routed`` the
    operation that each event is for the target.
    """

    folder: str
    lake: Lake
    plan: DecodePlan

    def divide(self, number: int, parts: Iterable[pa.RecordBatch], buckets: int) -> pa.Table:
        """Write events as Arrow files, one for each bucket; returns their name and their rows."""
        # The name is unique to this attempt: an earlier one, taken for lost, may still be writing.
        name = f"{number}-{uuid.uuid4().hex}"
        rows = np.zeros(buckets, np.int64)
        plan, schema = self.plan, self.plan.event_schema
        files, net = parent_files(self.lake, self.folder)
        with ExitStack() as opened:
            sinks = [
                self._open_events(opened, files, f"{net}-events/{bucket}/{name}.arrow")
                for bucket in range(buckets)
            ]
            decoded = None
            if plan.routing is not None:
                decoded = self._open_decoded(opened, files, f"{net}-decoded/{name}.parquet")
            for part in parts:
                events = pa.Table.from_batches([part])
                bucket_of = buckets_of(_identities(events, plan), buckets)
                if decoded is not None:
                    in_bucket = events.append_column(BUCKET, pa.array(bucket_of))
                    decoded.write_table(in_bucket.select(decoded.schema.names))
                counts = np.bincount(bucket_of, minlength=buckets)
                rows, ends = rows + counts, np.cumsum(counts)
                order = pa.array(np.argsort(bucket_of, kind="stable"))
                events = events.select(schema.names).take(order)
                for sink, begin, end in zip(sinks, [0, *ends[:-1]], ends, strict=True):
                    if end > begin:
                        sink.write_table(events.slice(begin, end - begin))
        return pa.table([[name], [rows.tolist()]], schema=DIVIDED)

    def read(self, bucket: int, names: Sequence[str], rows: Ints) -> Iterator[pa.RecordBatch]:
        """Yields the events of a bucket, routed, from files with these numbers of rows.

        Raises StagedLost unless all rows are there.
        """
        files, net = parent_files(self.lake, self.folder)
        parts = [
            part
            for name, count in zip(names, rows.tolist(), strict=True)
            if count
            for part in _read_events(files, f"{net}-events/{bucket}/{name}.arrow", count)
        ]
        if self.plan.routing is None or not parts:
            yield from parts
            return
        folder = f"{self.folder}-routed/{BUCKET}={bucket}"
        with _staged_errors(folder):
            judged = NetFiles.of(folder, self.lake).read(["ord", "op"])
        check_rows(folder, len(judged), int(rows.sum()))
        yield from routed(pa.Table.from_batches(parts), judged).to_batches()

    def collapse(self, number: int, events: Iterable[pa.RecordBatch]) -> pa.Table:
        """Write the net changes of events as a file, and count them."""
        net = _net_of(events, self.plan)
        write_net(self.lake, self.folder, net, number)
        return _counts(net, self.plan)

    def _open_events(
        self, opened: ExitStack, files: FileSystem, path: str
    ) -> pa.ipc.RecordBatchStreamWriter:
        files.create_dir(path.rpartition("/")[0])
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        stream = opened.enter_context(files.open_output_stream(path))
        return opened.enter_context(
            pa.ipc.new_stream(stream, self.plan.event_schema, options=options)
        )

    def _open_decoded(self, opened: ExitStack, files: FileSystem, path: str) -> pq.ParquetWriter:
        files.create_dir(path.rpartition("/")[0])
        schema = self.plan.filtered_schema.append(pa.field(BUCKET, pa.int64()))
        return opened.enter_context(pq.ParquetWriter(path, schema, filesystem=files))


def _net_of(events: Iterable[pa.RecordBatch], plan: DecodePlan) -> pa.Table:
    parts = [*events]
    if not parts:
        return plan.net_schema.empty_table()
    return collapse_events(pa.Table.from_batches(parts, plan.event_schema), plan)


def _identities(events: pa.Table, plan: DecodePlan) -> list[pa.ChunkedArray]:
    """Returns texts of the columns that identify rows, the same for equal values."""
    texts = [
        pc.coalesce(events[f"o{k}"], events[f"c{i}"]) for k, i in enumerate(plan.numbering.identity)
    ]
    kinds = [plan.types[i] for i in plan.numbering.identity]
    return [
        pa.chunked_array([kind.equal_texts(part) for part in text.chunks], text.type)
        for text, kind in zip(texts, kinds, strict=True)
    ]


def _read_events(files: FileSystem, path: str, rows: int) -> list[pa.RecordBatch]:
    with (
        _staged_errors(path),
        files.open_input_stream(path) as stream,
        pa.ipc.open_stream(stream) as events,
    ):
        read = list(events)
    check_rows(path, sum(map(len, read)), rows)
    return read


@contextmanager
def _staged_errors(path: str) -> Iterator[None]:
    """Raise StagedLost for what can't be read: another run may have removed it."""
    try:
        yield
    except (OSError, pa.ArrowException) as err:
        raise StagedLost(
            f"a staged file can't be read: {path}: {without_values(err)}: run again"
        ) from None


def _counts(net: pa.Table, plan: DecodePlan) -> pa.Table:
    """Count net changes by action, those with raw values, and whether a new row lacks a large value
    (COUNTS).
    """
    if not len(net):
        return COUNTS.empty_table()
    lacks = plan.numbering.lacks_values(net)
    lacks &= np.asarray(pc.is_in(net["action"], value_set=pa.array([ACTION_INSERT, ACTION_UPSERT])))
    raw = np.asarray(net["raw"].is_valid())
    counts = []
    for action in net["action"].unique().to_pylist():
        rows = np.asarray(pc.equal(net["action"], action))
        raw_rows, incomplete = int((rows & raw).sum()), bool((rows & lacks).any())
        counts.append((action, int(rows.sum()), raw_rows, incomplete))
    return pa.table([*zip(*counts, strict=True)], schema=COUNTS)


_Hashes = npt.NDArray[np.uint64]

_SEED = 0x9E3779B97F4A7C15
_MIX = np.uint64(0xFF51AFD7ED558CCD)


def buckets_of(keys: Sequence[pa.ChunkedArray], count: int) -> Ints:
    """Returns the bucket, from 0 to ``count`` - 1, of each row of a key's binary columns.

    Nulls are equal to each other.
    """
    hashes = np.zeros(len(keys[0]), np.uint64)
    for key in keys:
        hashes = _mix_hashes(hashes * np.uint64(31) + _hashes(key))
    return (hashes % np.uint64(count)).astype(np.int64)


def _hashes(column: pa.ChunkedArray) -> _Hashes:
    """Returns sums of each byte times its position's number, modulo 2**64."""
    values = one_array(column).cast(pa.large_binary()).fill_null(b"")
    _, offsets, data = values.buffers()
    ends: Ints = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    data_bytes = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]]
    ends = ends - ends[0]
    places = np.arange(len(data_bytes)) - np.repeat(ends[:-1], np.diff(ends))
    # A pseudorandom number for each position within a value (splitmix64).
    count = int(places.max(initial=0)) + 1
    numbers = _mix_hashes(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_SEED))
    products = (data_bytes.astype(np.uint64) + np.uint64(1)) * numbers[places]
    sums: _Hashes = np.concatenate([np.zeros(1, np.uint64), np.cumsum(products, dtype=np.uint64)])
    return sums[ends[1:]] - sums[ends[:-1]]


def _mix_hashes(numbers: _Hashes) -> _Hashes:
    numbers = (numbers ^ (numbers >> np.uint64(33))) * _MIX
    return numbers ^ (numbers >> np.uint64(29))
