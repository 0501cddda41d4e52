"""Reads landed row messages (inserts, updates and deletes) by relation and transaction.

A range of landed batches in commit order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from numpy.typing import NDArray

from waldelta.arrow import Bools, Ints, table_of
from waldelta.errors import DecodeError
from waldelta.lake.lake import Lake
from waldelta.lake.ledger import TableState
from waldelta.lake.storage import by_row_group, parquet_format, scan_options
from waldelta.pgoutput.commit_time import shown
from waldelta.pgoutput.message_kinds import ROW_KINDS
from waldelta.pgoutput.messages import Relation, read_relation, read_truncate
from waldelta.pgoutput.transactions import SEQ_BITS, Segments


@dataclass(frozen=True)
class Stream:
    """A batch range in commit order; ``timeline`` has its relation, type, truncate and control
    messages.

    When the range commits a transaction prepared in earlier batches, the timeline includes those
    batches, too. ``undescribed`` has batches and relations (None: any) where a Relation message was
    skipped, or a row without a description.
    """

    timeline: pa.Table
    segments: Segments
    undescribed: frozenset[tuple[int, int | None]] = frozenset()

    @cached_property
    def places(self) -> Ints:
        """The position in commit order of each timeline message; -1 for messages that don't
        count.
        """
        return self.segments.places(*place_columns(self.timeline))

    def of_kind(self, kind: str) -> list[tuple[dict[str, Any], int]]:
        """Returns the messages of one kind, each with its position in commit order."""
        is_of_kind = pc.equal(self.timeline["kind"], kind)
        rows = self.timeline.filter(is_of_kind).to_pylist()
        return list(zip(rows, self.places[is_of_kind.to_numpy()].tolist(), strict=True))

    def has_truncates(self) -> bool:
        """Returns whether any TRUNCATE in the range counts."""
        return any(place >= 0 for _, place in self.of_kind("T"))

    @cached_property
    def relations(self) -> list[tuple[Relation, int]]:
        """The decoded Relation messages, each with its position in commit order, read once for all
        targets.

        A message that can't be decoded fails only the table that it is about.
        """
        decoded = []
        for row, place in self.of_kind("R"):
            with suppress(DecodeError):
                decoded.append(
                    (read_relation(row["data"], streamed=row["streamed_xid"] is not None), place)
                )
        return decoded


def place_columns(rows: pa.Table | pa.RecordBatch) -> tuple[Ints, Ints, Ints]:
    """Returns batch, number and stream xid (-1: none) of messages."""
    batch, seq = (
        np.asarray(rows[name].to_numpy(zero_copy_only=False), np.int64) for name in ("batch", "seq")
    )
    streamed = pc.fill_null(rows["streamed_xid"], -1).to_numpy(zero_copy_only=False)
    return batch, seq, np.asarray(streamed, np.int64)


def commits(changes: pa.RecordBatch, segments: Segments) -> tuple[pa.Array, pa.Array]:
    """Returns the commit position and the displayed commit time of changes.

    For streamed and prepared transactions, both arrive later than the rows.
    """
    lsn, at = changes["commit_lsn"], changes["commit_ts"]
    if not segments.parts:
        return lsn, shown(at)
    stretch = segments.find(*place_columns(changes))
    own_lsn = np.asarray(pc.fill_null(lsn, 0).to_numpy(zero_copy_only=False), np.int64)
    own_at = np.asarray(
        pc.fill_null(at.cast(pa.int64()), 0).to_numpy(zero_copy_only=False), np.int64
    )
    times = shown(pa.array(segments.commit_ts_us(stretch, own_at)))
    return pa.array(segments.commit_lsn(stretch, own_lsn)), times


def last_truncates(
    stream: Stream, state: TableState, snapshot: Snapshot, since_xid: int = 0
) -> dict[int, int]:
    """Returns by relation oid the place, in commit order, of the last TRUNCATE that the target's
    copy doesn't reflect.

    Only transactions (xid8) from ``since_xid`` on are included. TRUNCATEs that don't count are left
    out: of transactions that are prepared and undecided, or rolled back, and of earlier batches
    that are in the timeline for another transaction.
    """
    places: dict[int, int] = {}
    for row, place in stream.of_kind("T"):
        if place < 0 or row["xid8"] < since_xid or snapshot.sees(np.array([row["xid8"]])).all():
            continue
        truncated = read_truncate(row["data"], streamed=row["streamed_xid"] is not None)
        for oid in set(truncated) & set(state.relation_ids):
            places[oid] = max(place, places.get(oid, place))
    return places


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A ``pg_snapshot``: ``xmin:xmax:xip_list``, all 64-bit top-level transaction ids.

    >>> Snapshot.parse("10:20:12,15").sees(np.array([9, 12, 13, 20])).tolist()
    [True, False, True, False]
    """

    xmin: int
    xmax: int
    running: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read PostgreSQL's text form; raises ValueError on anything else."""
        xmin, xmax, running = text.split(":")
        return cls(int(xmin), int(xmax), tuple(int(xid) for xid in running.split(",") if xid))

    def sees(self, xid8: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns whether each transaction id is visible, as ``pg_visible_in_snapshot`` does."""
        visible: NDArray[np.bool_] = xid8 < self.xmax
        if self.running:
            visible &= ~np.isin(xid8, np.array(self.running, np.int64))
        return visible


# The columns of a row message that decoding needs.
ROW_SCHEMA = pa.schema(
    [
        ("batch", pa.int64()),
        ("seq", pa.int64()),
        ("kind", pa.string()),
        ("relation_id", pa.int64()),
        ("xid8", pa.int64()),
        ("streamed_xid", pa.int64()),
        ("commit_lsn", pa.int64()),
        ("commit_ts", pa.timestamp("us", "UTC")),
        ("data", pa.binary()),
        ("moves", pa.bool_()),
    ]
)
_PLACE = ["batch", "seq", "streamed_xid"]
_COMMIT = ["commit_lsn", "commit_ts"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A row group of a file, by the file's path in its folder; ``rows`` and ``bytes`` are its
    totals.

    The bytes are those of the values before compression. ``batch`` is the partition of a change log
    file, and None for other files.
    """

    path: str
    batch: int | None
    row_group: int
    rows: int
    bytes: int


# Selects rows by their position as landed, by whether they were streamed, and by their transaction.
Chooser = Callable[[Ints, Bools, Ints], Bools]


@dataclass(frozen=True, slots=True)
class Volume:
    """The row messages that wait for a target: their number, whether any moves a key, and at most
    how many bytes.
    """

    rows: int
    moves: bool
    bytes: int


class RowMessages(ABC):
    """Reads row messages of the change log, or of a copy of some of them, in the folder ``uri``."""

    uri: str
    lake: Lake

    @abstractmethod
    def dataset(self) -> ds.Dataset | None:
        """Returns all files as a dataset; None for a log that doesn't exist yet."""

    def unseen(
        self, stream: Stream, relation_ids: Sequence[int], snapshot: Snapshot
    ) -> tuple[int, bool]:
        """Returns how many row messages of these relations the snapshot doesn't see, in a batch
        range.

        Also returns whether one of them moves a key.
        """
        rows, moves = 0, False
        for part in self.rows_of(stream.segments, relation_ids, snapshot, ["xid8", "moves"]):
            unseen = ~snapshot.sees(part["xid8"].to_numpy(zero_copy_only=False))
            rows += int(unseen.sum())
            moves = moves or bool(part["moves"].to_numpy(zero_copy_only=False)[unseen].any())
        return rows, moves

    def bytes_by_relation(self, stream: Stream) -> dict[int, int]:
        """Returns the bytes of a range's row messages by relation; reads them all, a few at a
        time.
        """
        totals: dict[int, int] = {}
        for part in self.scan(all_row_messages(stream.segments), ["relation_id", "data"]):
            sizes = pa.table(
                {"relation_id": part["relation_id"], "bytes": pc.binary_length(part["data"])}
            )
            for row in sizes.group_by("relation_id").aggregate([("bytes", "sum")]).to_pylist():
                totals[row["relation_id"]] = totals.get(row["relation_id"], 0) + row["bytes_sum"]
        return totals

    def rows(
        self, stream: Stream, most_bytes: int, relation_ids: Sequence[int] | None = None
    ) -> pa.Table | None:
        """Returns a range's row messages that count, of all or of some relations.

        Returns None when they take more than ``most_bytes`` of memory.
        """
        condition = all_row_messages(stream.segments)
        if relation_ids is not None:
            condition &= pc.field("relation_id").isin(list(relation_ids))
        rows = table_of(self.scan(condition, ROW_SCHEMA.names), ROW_SCHEMA, most_bytes)
        if rows is None or stream.segments.is_plain:
            return rows
        return rows.filter(pa.array(stream.segments.places(*place_columns(rows)) >= 0))

    def pieces(self, condition: pc.Expression) -> list[Piece]:
        """Returns the row groups that may have rows of ``condition`` (row_messages()), by file
        statistics.
        """
        row_groups: list[Piece] = []
        for part in self.groups(condition):
            by = ds.get_partition_keys(part.partition_expression)
            (group,) = part.row_groups
            batch = int(by["batch"]) if by else None
            row_groups.append(
                Piece(part.path, batch, group.id, group.num_rows, group.total_byte_size)
            )
        return row_groups

    def groups(self, condition: pc.Expression) -> Iterator[ds.ParquetFileFragment]:
        """Returns the row groups that may have rows of the condition, as one fragment each."""
        dataset = self.dataset()
        return (
            iter(()) if dataset is None else iter(by_row_group(dataset, condition).get_fragments())
        )

    def read(
        self, pieces: Sequence[Piece], condition: pc.Expression, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Returns the rows of ``condition`` in some pieces.

        It opens only their files, so tasks can use it.
        """
        files, layout = self.lake.unchanging_files(self.uri), parquet_format(self.uri)
        fragments = [
            layout.make_fragment(
                piece.path,
                files,
                None if piece.batch is None else pc.field("batch") == piece.batch,
                [piece.row_group],
            )
            for piece in pieces
        ]
        dataset = ds.FileSystemDataset(fragments, ROW_SCHEMA, layout, files)
        return self._scan(dataset, condition, columns)

    def has_changes(
        self,
        stream: Stream,
        relation_ids: Sequence[int],
        snapshot: Snapshot,
        select: Chooser | None = None,
    ) -> bool:
        """Returns whether a batch range has row messages of these relations that the snapshot
        doesn't see.

        ``select`` limits them by position as landed, by whether they were streamed, and by xid8.
        """
        columns = ["xid8"] if select is None else ["xid8", *_PLACE]
        for part in self.rows_of(stream.segments, relation_ids, snapshot, columns):
            xid8 = part["xid8"].to_numpy(zero_copy_only=False)
            unseen = ~snapshot.sees(xid8)
            if select is not None:
                batch, seq, streamed_xid = place_columns(part)
                unseen &= select((batch << SEQ_BITS) | seq, streamed_xid >= 0, xid8)
            if unseen.any():
                return True
        return False

    def oldest_commit(
        self, stream: Stream, relation_ids: Sequence[int], snapshot: Snapshot
    ) -> datetime | None:
        """Returns when the first of such row messages was committed."""
        times = []
        for part in self.rows_of(
            stream.segments, relation_ids, snapshot, ["xid8", *_COMMIT, *_PLACE]
        ):
            unseen = part.filter(
                pa.array(~snapshot.sees(part["xid8"].to_numpy(zero_copy_only=False)))
            )
            _, at = commits(unseen, stream.segments)
            times.append(pc.min(at).as_py())
        return min(filter(None, times), default=None)

    def xids(self, segments: Segments, relation_ids: Sequence[int], snapshot: Snapshot) -> set[int]:
        """Returns the top-level transactions of these relations' row messages."""
        parts = self.rows_of(segments, relation_ids, snapshot, ["xid8"])
        return {xid for part in parts for xid in part["xid8"].unique().to_pylist()}

    def rows_of(
        self,
        segments: Segments,
        relation_ids: Sequence[int],
        snapshot: Snapshot,
        columns: list[str],
    ) -> Iterator[pa.RecordBatch]:
        """Yields these relations' row messages that count.

        Messages of transactions that the snapshot certainly sees are left out.
        """
        condition = row_messages(segments, relation_ids, snapshot)
        if segments.is_plain:
            yield from self.scan(condition, columns)
            return
        for part in self.scan(condition, [*dict.fromkeys([*columns, *_PLACE])]):
            yield part.filter(pa.array(segments.places(*place_columns(part)) >= 0))

    def scan(self, condition: pc.Expression, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields some columns of the rows that ``condition`` selects, reading little ahead."""
        dataset = self.dataset()
        if dataset is None:
            return iter(())
        return self._scan(by_row_group(dataset, condition), condition, columns)

    def _scan(
        self, dataset: ds.Dataset, condition: pc.Expression, columns: Sequence[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yields rows, reading little ahead, so that memory doesn't grow with the log."""
        scanner: ds.Scanner = dataset.scanner(
            columns=list(columns),
            filter=condition,
            batch_size=131_072,
            batch_readahead=2,
            fragment_readahead=1,
            fragment_scan_options=scan_options(self.uri),
        )
        return iter(scanner.to_batches())


def row_messages(
    segments: Segments, relation_ids: Sequence[int], snapshot: Snapshot
) -> pc.Expression:
    """Select these relations' row messages in a batch range that a copy from ``snapshot`` may
    lack.
    """
    return (
        all_row_messages(segments)
        & pc.field("relation_id").isin(list(relation_ids))
        & (pc.field("xid8") >= snapshot.xmin)
    )


def all_row_messages(segments: Segments) -> pc.Expression:
    """Select row messages of any relation in a range of batches, and in the earlier parts that it
    commits.
    """
    return _messages(segments) & pc.field("kind").isin(ROW_KINDS)


def logical_messages(segments: Segments) -> pc.Expression:
    """Select the logical messages in a batch range, and of its prepared transactions before it."""
    return _messages(segments) & (pc.field("kind") == "M")


def _messages(segments: Segments) -> pc.Expression:
    condition, seq = of_batches(segments.after, segments.upto), pc.field("seq")
    for part in segments.older:
        condition |= (pc.field("batch") == part.batch) & (seq >= part.first) & (seq <= part.last)
    return condition


def of_batches(after_batch: int, upto_batch: int) -> pc.Expression:
    """Select what was landed after one batch, up to and including another."""
    return (pc.field("batch") > after_batch) & (pc.field("batch") <= upto_batch)
