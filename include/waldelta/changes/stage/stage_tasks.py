"""Decodes and collapses a larger range in Spark's Python tasks, which read and write files
themselves.

Converting rows to Spark's on their way from the change log to the merge, twice and once through its
shuffle, would cost three times as much as decoding and collapsing them. So the tasks of one job
decode pieces of the change log into buckets by key, as Arrow files. Those of the next job collapse
one bucket each. The rows passed on are counted, because a folder's listing may be out of date,
and an Arrow stream that ends too early reads as a complete one. Chains of moved keys cross any
partitioning by key, so a range with moves is one bucket.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from waldelta.changes.decode import DecodePlan, TargetPlan
from waldelta.changes.decode.collapse import ACTION_INSERT, ACTION_UPSERT
from waldelta.changes.decode.decode import CHANGE_COLUMNS, collapse_events, decode_all
from waldelta.changes.stage._buckets import buckets_of
from waldelta.changes.stage.net_files import rows_at_once
from waldelta.errors import StagedLost
from waldelta.lake.changelog.row_messages import Piece, RowMessages, Volume, row_messages
from waldelta.pipeline.task_errors import first_line
from waldelta.quantities import counted
from waldelta.spark import run_tasks
from waldelta.spark.tasks import shares

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# One task collapses about this many rows, or bytes of them; a larger range gets more tasks. A task
# has all its rows in memory three times.
STAGED_ROWS_PER_TASK = 500_000
STAGED_BYTES_PER_TASK = 128 << 20
# A task decodes at least this many rows or bytes, because each task writes a file for each bucket.
ROWS_PER_DECODE = 250_000
BYTES_PER_DECODE = 64 << 20
# What the collapsing tasks return, and the tasks that decode into buckets.
COUNTS = pa.schema(
    [
        ("action", pa.string()),
        ("rows", pa.int64()),
        ("verbatim", pa.int64()),
        ("incomplete", pa.bool_()),
    ]
)
DIVIDED = pa.schema([("name", pa.string()), ("rows", pa.list_(pa.int64()))])


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of staged net changes: by action, with raw values, and whether a new row lacks a large
    value.
    """

    by_action: dict[str, int]
    raw_rows: int
    incomplete: bool


def stage_in_tasks(
    spark: SparkSession, messages: RowMessages, plan: TargetPlan, folder: str
) -> Counted:
    """Write the net changes as Parquet into ``folder``.

    ``messages`` has at least the messages that the plan is about.
    """
    chosen = row_messages(plan.decode.segments, plan.state.relation_ids, plan.decode.snapshot)
    dealt = shares(messages.pieces(chosen), ROWS_PER_DECODE, BYTES_PER_DECODE)
    buckets = tasks_of(plan)
    decode_plan, lake = plan.decode, messages.lake
    base, _, net = folder.rpartition("/")
    events = f"{net}-events"

    def decoded(share: Sequence[Piece]) -> Iterator[pa.RecordBatch]:
        return decode_all(messages.read(share, chosen, CHANGE_COLUMNS), decode_plan)

    def divide(number: int) -> pa.Table:
        # The name is unique to this attempt: an earlier one, taken for lost, may still be writing.
        name = f"{number}-{uuid.uuid4().hex}.arrow"
        paths = [f"{events}/{bucket}/{name}" for bucket in range(buckets)]
        rows = _write_events(lake.files(base), paths, decoded(dealt[number]), decode_plan)
        return pa.table([[name], [rows]], schema=DIVIDED)

    def collapse_all(number: int) -> pa.Table:
        parts = [part for share in dealt for part in decoded(share)]
        return _collapse(parts, decode_plan, lake.files(base), f"{net}/part-{number}.parquet")

    if buckets == 1:
        return added_up(run_tasks(spark, 1, COUNTS, collapse_all))
    told = run_tasks(spark, len(dealt), DIVIDED, divide)
    # Every task gets the whole list: one file of each decoding task for each bucket.
    names, rows = [row["name"] for row in told], np.array([row["rows"] for row in told], np.int64)
    rows = rows.reshape(len(names), buckets)

    def collapse_bucket(number: int) -> pa.Table:
        files = lake.files(base)
        written = {
            f"{events}/{number}/{name}": int(n)
            for name, n in zip(names, rows[:, number], strict=True)
            if n
        }
        return _collapse(
            _read_events(files, written), decode_plan, files, f"{net}/part-{number}.parquet"
        )

    return added_up(run_tasks(spark, buckets, COUNTS, collapse_bucket))


def tasks_of(plan: TargetPlan) -> int:
    """Return how many tasks collapse a range: chains of moved keys cross any partitioning by
    key.
    """
    return 1 if plan.volume.moves or plan.may_move else tasks_for(plan.volume)


def tasks_for(volume: Volume) -> int:
    """Return how many tasks this volume needs."""
    return max(
        1, -(-volume.rows // STAGED_ROWS_PER_TASK), -(-volume.bytes // STAGED_BYTES_PER_TASK)
    )


def added_up(counted: Iterable[Any]) -> Counted:
    """Add up the counts of all parts, as returned by count()."""
    counted = list(counted)
    by_action: dict[str, int] = {}
    for row in counted:
        by_action[row["action"]] = by_action.get(row["action"], 0) + row["rows"]
    return Counted(
        by_action,
        sum(row["verbatim"] for row in counted),
        any(row["incomplete"] for row in counted),
    )


def _write_events(
    files: FileSystem, paths: Sequence[str], parts: Iterator[pa.RecordBatch], plan: DecodePlan
) -> list[int]:
    """Write events as Arrow files, one for each bucket; returns the number of rows of each."""
    rows = np.zeros(len(paths), np.int64)
    with ExitStack() as opened:
        sinks = []
        for path in paths:
            files.create_dir(path.rpartition("/")[0])
            stream = opened.enter_context(files.open_output_stream(path))
            options = pa.ipc.IpcWriteOptions(compression="lz4")
            sinks.append(
                opened.enter_context(pa.ipc.new_stream(stream, plan.event_schema, options=options))
            )
        for part in parts:
            events = pa.Table.from_batches([part])
            bucket_of = buckets_of(_identities(events, plan), len(paths))
            order = np.argsort(bucket_of, kind="stable")
            counts = np.bincount(bucket_of, minlength=len(paths))
            rows, ends = rows + counts, np.cumsum(counts)
            events = events.take(pa.array(order))
            for sink, begin, end in zip(sinks, [0, *ends[:-1]], ends, strict=True):
                if end > begin:
                    sink.write_table(events.slice(begin, end - begin))
    return rows.tolist()


def _identities(events: pa.Table, plan: DecodePlan) -> list[pa.ChunkedArray]:
    """Return texts of the columns that identify rows, the same for equal values."""
    texts = [
        pc.coalesce(events[f"o{k}"], events[f"c{i}"]) for k, i in enumerate(plan.shape.identity)
    ]
    kinds = [plan.types[i] for i in plan.shape.identity]
    return [
        pa.chunked_array([kind.equal_texts(part) for part in text.chunks], text.type)
        for text, kind in zip(texts, kinds, strict=True)
    ]


def _read_events(files: FileSystem, written: Mapping[str, int]) -> list[pa.RecordBatch]:
    """Return the events of one bucket from its files, given with their numbers of rows.

    Raises StagedLost unless all rows are there.
    """
    parts: list[pa.RecordBatch] = []
    for path, rows in written.items():
        try:
            with files.open_input_stream(path) as stream, pa.ipc.open_stream(stream) as events:
                read = list(events)
        except (OSError, pa.ArrowException) as err:
            raise StagedLost(
                f"a staged file can't be read: {path}: {first_line(err)}: run again"
            ) from None
        if (found := sum(map(len, read))) != rows:
            raise StagedLost(
                f"staged events are gone: {path} has {counted(found, 'row')} of {rows:,} that were"
                " written: run again"
            )
        parts += read
    return parts


def _collapse(
    parts: Sequence[pa.RecordBatch], plan: DecodePlan, files: FileSystem, path: str
) -> pa.Table:
    """Write the net changes of events as a file, and count them."""
    files.create_dir(path.rpartition("/")[0])
    net = plan.net_schema.empty_table()
    if parts:
        net = collapse_events(pa.Table.from_batches(parts, plan.event_schema), plan)
    # Readers read no more than a row group at once.
    pq.write_table(net, path, filesystem=files, row_group_size=rows_at_once(net))
    return count(net, plan)


def count(net: pa.Table, plan: DecodePlan) -> pa.Table:
    """Count net changes by action, as for Counted."""
    if not len(net):
        return COUNTS.empty_table()
    lacks = np.zeros(len(net), np.bool_)
    for flag in plan.shape.flags:
        lacks |= np.asarray(net[flag])
    lacks &= np.asarray(pc.is_in(net["action"], value_set=pa.array([ACTION_INSERT, ACTION_UPSERT])))
    told = pa.table(
        {
            "action": net["action"],
            "verbatim": net["raw"].is_valid().cast(pa.int64()),
            "incomplete": lacks,
        }
    )
    counted = told.group_by("action").aggregate(
        [([], "count_all"), ("verbatim", "sum"), ("incomplete", "max")]
    )
    names = ("action", "count_all", "verbatim_sum", "incomplete_max")
    return counted.select(names).rename_columns(COUNTS.names).cast(COUNTS)
