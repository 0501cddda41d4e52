"""The change log: every message ever landed, raw, by batch; read here without a JVM.

A task of Spark writes each batch's file, and tasks decode it (spark_jobs); this module commits it, and reads back what a commit
really holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from waldelta.batch_file import BatchFile, commit_batch, create_log, write_batch
from waldelta.delta_log import read_metadata
from waldelta.lake import CHANGES, SPARKS_TIMESTAMPS, bookkeeping_uri, by_row_group, files_of, rooted, sync_commit
from waldelta.pgoutput.control import CONTROL_KINDS, read_control
from waldelta.pgoutput.envelope import ENVELOPE_SCHEMA
from waldelta.tally import COLUMNS, Landed, Tally
from waldelta.transactions import (
    SEQ_BITS,
    Bools,
    Ints,
    Landmark,
    Prepared,
    Segments,
    prepared_transactions,
    resolve,
)
from waldelta.visibility import Snapshot

ROW_KINDS = ("I", "U", "D")
# Of a row message, what it takes to decode it.
ROW_SCHEMA = pa.schema(
    [
        ("batch", pa.int64()), ("seq", pa.int64()), ("kind", pa.string()), ("relation_id", pa.int64()),
        ("xid8", pa.int64()), ("streamed_xid", pa.int64()), ("commit_lsn", pa.int64()),
        ("commit_ts", pa.timestamp("us", "UTC")), ("data", pa.binary()), ("moves", pa.bool_()),
    ]
)  # fmt: skip
_TIMELINE = ["batch", "seq", "kind", "relation_id", "xid8", "streamed_xid", "commit_lsn", "commit_ts", "data"]
_TIMELINE_SCHEMA = pa.schema(
    [pa.field("batch", pa.int64()), *(ENVELOPE_SCHEMA.field(name) for name in _TIMELINE if name != "batch")]
)
# Commits that are looked through first.
_NEWEST = 50
_PLACE = ["batch", "seq", "streamed_xid"]
_COMMIT = ["commit_lsn", "commit_ts"]


@dataclass(frozen=True, slots=True)
class Reach:
    """What the log holds of one life of the slot: the end of each batch, and whether earlier ones were dropped.

    Those that were dropped, ``dropped`` the last of them, end before ``begins_at``.
    """

    ends: dict[int, int]
    is_cut: bool = False
    begins_at: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """A row group of one of the log's files, by the file's place in the table; ``rows`` and ``bytes`` are all that it holds.

    The bytes are those of its values, before compression.
    """

    path: str
    batch: int
    row_group: int
    rows: int
    bytes: int


# Narrows rows by their place as landed, whether they were streamed, and their transaction.
Chooser = Callable[[Ints, Bools, Ints], Bools]


@dataclass(frozen=True, slots=True)
class Volume:
    """Row messages that wait for a target, whether any of them moves a key, and at most how many bytes they are."""

    rows: int
    moves: bool
    bytes: int


@dataclass(frozen=True)
class Stream:
    """A range of batches in commit order; ``timeline`` are its relation, type, truncate and control messages.

    The timeline also has those of earlier batches in which a transaction was prepared that the range commits.
    """

    timeline: pa.Table
    segments: Segments

    @cached_property
    def places(self) -> Ints:
        """The place in commit order of each message of the timeline, -1 for those that don't count."""
        return self.segments.places(*place_columns(self.timeline))

    def of_kind(self, kind: str) -> list[tuple[dict[str, Any], int]]:
        """Messages of one kind, each with its place in commit order."""
        chosen = pc.equal(self.timeline["kind"], kind)
        rows = self.timeline.filter(chosen).to_pylist()
        return list(zip(rows, self.places[chosen.to_numpy()].tolist(), strict=True))

    def has_truncates(self) -> bool:
        """Whether any TRUNCATE in the range counts."""
        return any(place >= 0 for _, place in self.of_kind("T"))


class ChangeLog:
    """Reads the change log of one lake; ``app_id`` is the slot's incarnation that writes it."""

    def __init__(self, root: str, app_id: str, storage_options: dict[str, str] | None = None) -> None:
        self.uri = bookkeeping_uri(root, CHANGES)
        self.app_id = app_id
        self.storage_options = storage_options

    def last_batch(self) -> int | None:
        """The number of the last batch landed by this incarnation of the slot, from the log's own transaction id."""
        table = self._open()
        return table.transaction_version(self.app_id) if table is not None else None

    def highest_batch(self) -> int:
        """The highest batch number in the log, of any incarnation; 0 when it is empty."""
        return max(self._batches(), default=0)

    def lowest_batch(self) -> int | None:
        """The lowest batch number that the log still holds, of any incarnation; None when it is empty."""
        return min(self._batches(), default=None)

    def _batches(self) -> list[int]:
        table = self._open()
        return [] if table is None else [int(p["batch"]) for p in table.partitions() if p["batch"] is not None]

    def sizes(self, after_batch: int, upto_batch: int) -> dict[int, int]:
        """Messages by batch in a range, from the log's file statistics."""
        table = self._open()
        if table is None:
            return {}
        found: dict[int, int] = {}
        for file in files_of(table).select(["partition.batch", "num_records"]).to_pylist():
            batch = int(file["partition.batch"])
            if after_batch < batch <= upto_batch:
                found[batch] = found.get(batch, 0) + (file["num_records"] or 0)
        return found

    def bytes_of_batches(self, after_batch: int, upto_batch: int) -> dict[int, int]:
        """Bytes by batch in a range, before compression, from the footers of the files."""
        found: dict[int, int] = {}
        for piece in self.pieces(_range(after_batch, upto_batch)):
            found[piece.batch] = found.get(piece.batch, 0) + piece.bytes
        return found

    def held_by(self, snapshot: Snapshot, after_batch: int) -> int:
        """The last batch up to which a snapshot sees every transaction after ``after_batch``, from file statistics alone.

        A copy taken from that snapshot holds all of them, so nobody has to read them for it.
        """
        table = self._open()
        if table is None:
            return after_batch
        actions = files_of(table)
        if "max.xid8" not in actions.column_names:
            return after_batch
        last: dict[int, int | None] = {}
        for file in actions.select(["partition.batch", "max.xid8"]).to_pylist():
            batch, highest = int(file["partition.batch"]), file["max.xid8"]
            before = last.get(batch, highest)
            last[batch] = None if highest is None or before is None else max(highest, before)
        held = after_batch
        for batch in sorted(batch for batch in last if batch > after_batch):
            highest = last[batch]
            if highest is None or highest >= snapshot.xmin:
                break
            held = batch
        return held

    def landed_end(self, batch: int) -> int:
        """The end of a batch's last transaction, from the log's file statistics alone; 0 of an empty one, which tells nothing."""
        actions = files_of(self._must_open())
        of_batch = actions.filter(pc.equal(pc.cast(actions["partition.batch"], pa.int64()), batch))
        ends = [end for end in of_batch["max.end_lsn"].to_pylist() if end is not None]
        return max(ends) if ends else self.landed(batch).end_lsn

    def told(self, batches: Collection[int]) -> dict[int, dict[str, Any]]:
        """What the commits of recent batches tell, by batch, as far as Delta's log still has them."""
        found: dict[int, dict[str, Any]] = {}
        wanted, count = set(batches), _NEWEST
        while wanted:
            history = self._must_open().history(count)
            for told in map(read_metadata, history):
                # Numbers go on where a slot's former life ended: none is given twice.
                if told.get("batch") in wanted:
                    found[told["batch"]] = told
            wanted -= found.keys()
            if len(history) < count:
                break
            count *= 4
        return found

    def end_after(self, first_batch: int) -> int:
        """The end of the last transaction in the batches after ``first_batch``, however many empty ones follow; 0: none."""
        return max(self.reach(first_batch).ends.values(), default=0)

    def reach(self, first_batch: int) -> Reach:
        """What it still holds of the batches after ``first_batch``, from file statistics alone."""
        table = self._open()
        if table is None:
            return Reach({})
        actions = files_of(table)
        names = ["partition.batch", "min.end_lsn", "max.end_lsn"]
        ends: dict[int, int] = {}
        begins: dict[int, int] = {}
        # A log without files has no statistics.
        for file in actions.select(names).to_pylist() if set(names) <= set(actions.column_names) else ():
            batch, least, most = int(file[names[0]]), file[names[1]], file[names[2]]
            if batch > first_batch and most is not None:
                ends[batch] = max(most, ends.get(batch, most))
                begins[batch] = min(least, begins.get(batch, least))
        landed = table.transaction_version(self.app_id) or 0
        lowest = min(ends, default=max(landed, first_batch) + 1)
        return Reach(ends, lowest > first_batch + 1, begins.get(lowest, 0), lowest - 1)

    def create(self, schema: pa.Schema) -> None:
        """Create the empty log of batches with this schema, unless it is there; raises TargetNotWritable."""
        create_log(self.uri, schema, self.storage_options)

    def write(self, batch: int, parts: Iterable[pa.RecordBatch], schema: pa.Schema) -> BatchFile | None:
        """Write what comes as the file of a batch, which counts once add() has committed it; doesn't open the table."""
        return write_batch(rooted(self.uri, self.storage_options), self.uri, batch, parts, schema)

    def add(self, batch: int, file: BatchFile | None, metadata: str) -> None:
        """Commit a batch, durable when this returns; raises LateWriter when another run has."""
        sync_commit(self.uri, commit_batch(self._must_open, self.app_id, batch, file, metadata))

    def landed(self, batch: int) -> Landed:
        """Count what the committed files of one batch hold."""
        tally = Tally(batch, landmarks(self.timeline(batch - 1, batch)))
        for part in self._scan(pc.field("batch") == batch, list(COLUMNS)):
            tally.add(part)
        return tally.landed()

    def timeline(self, after_batch: int, upto_batch: int) -> pa.Table:
        """Relation, type, truncate and control messages of a range of batches, in the order of the log."""
        return self._timeline(_range(after_batch, upto_batch))

    def stream(self, after_batch: int, upto_batch: int) -> Stream:
        """A range of batches in commit order."""
        timeline = self.timeline(after_batch, upto_batch)
        segments = resolve(landmarks(timeline), after_batch, upto_batch)
        if segments.missing:
            # Prepared before the range, committed in it.
            earlier = self._timeline(_range(0, after_batch) & pc.field("kind").isin(CONTROL_KINDS))
            segments = resolve([*landmarks(earlier), *landmarks(timeline)], after_batch, upto_batch)
            batches = sorted({part.batch for part in segments.older})
            timeline = pa.concat_tables([self._timeline(pc.field("batch").isin(batches)), timeline])
        return Stream(timeline, segments)

    def prepared(self) -> list[Prepared]:
        """Every prepared transaction in the log, with the batch that decided it."""
        return prepared_transactions(landmarks(self._timeline(pc.field("kind").isin(CONTROL_KINDS))))

    def unseen(self, stream: Stream, relation_ids: Sequence[int], snapshot: Snapshot) -> tuple[int, bool]:
        """How many row messages of these relations a range of batches holds that the snapshot doesn't see, and whether one moves a key."""
        rows, moves = 0, False
        for part in self.rows_of(stream.segments, relation_ids, snapshot, ["xid8", "moves"]):
            unseen = ~snapshot.sees(part["xid8"].to_numpy(zero_copy_only=False))
            rows += int(unseen.sum())
            moves = moves or bool(part["moves"].to_numpy(zero_copy_only=False)[unseen].any())
        return rows, moves

    def bytes_at_most(self, stream: Stream) -> int:
        """What the row messages of a range of batches are at most, before compression, from the footers of its files."""
        return sum(piece.bytes for piece in self.pieces(_rows_in(stream.segments)))

    def bytes_by_relation(self, stream: Stream) -> dict[int, int]:
        """What the row messages of a range of batches are in bytes; reads them all, a few at once."""
        found: dict[int, int] = {}
        for part in self._scan(_rows_in(stream.segments), ["relation_id", "data"]):
            sizes = pa.table({"relation_id": part["relation_id"], "bytes": pc.binary_length(part["data"])})
            for row in sizes.group_by("relation_id").aggregate([("bytes", "sum")]).to_pylist():
                found[row["relation_id"]] = found.get(row["relation_id"], 0) + row["bytes_sum"]
        return found

    def rows(self, stream: Stream, most_bytes: int) -> pa.Table | None:
        """All row messages of a range of batches that count; None when they are more than ``most_bytes`` in memory."""
        parts: list[pa.RecordBatch] = []
        taken = 0
        for part in self._scan(_rows_in(stream.segments), ROW_SCHEMA.names):
            taken += part.nbytes
            if taken > most_bytes:
                return None
            parts.append(part)
        rows = pa.Table.from_batches(parts) if parts else ROW_SCHEMA.empty_table()
        if stream.segments.is_plain:
            return rows
        return rows.filter(pa.array(stream.segments.places(*place_columns(rows)) >= 0))

    def pieces(self, chosen: pc.Expression) -> list[Piece]:
        """The row groups that may hold rows of ``chosen`` (row_messages()), told by the files' own statistics."""
        table = self._open()
        found: list[Piece] = []
        if table is None:
            return found
        for part in by_row_group(table.to_pyarrow_dataset(), chosen).get_fragments():
            batch = int(ds.get_partition_keys(part.partition_expression)["batch"])
            (group,) = part.row_groups
            found.append(Piece(part.path, batch, group.id, group.num_rows, group.total_byte_size))
        return found

    def read(self, pieces: Sequence[Piece], chosen: pc.Expression, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """The rows of ``chosen`` in some pieces; doesn't open the table, so that tasks may do it."""
        files = rooted(self.uri, self.storage_options)
        layout = ds.ParquetFileFormat(read_options=SPARKS_TIMESTAMPS)
        fragments = [
            layout.make_fragment(piece.path, files, pc.field("batch") == piece.batch, [piece.row_group])
            for piece in pieces
        ]
        dataset = ds.FileSystemDataset(fragments, ROW_SCHEMA, layout, files)
        return _batches(dataset, chosen, columns)

    def has_changes(
        self, stream: Stream, relation_ids: Sequence[int], snapshot: Snapshot, chosen: Chooser | None = None
    ) -> bool:
        """Whether a range of batches holds row messages of these relations that the snapshot doesn't see.

        ``chosen`` narrows it to some rows, by their places as landed, whether they were streamed, and their xid8.
        """
        columns = ["xid8"] if chosen is None else ["xid8", *_PLACE]
        for part in self.rows_of(stream.segments, relation_ids, snapshot, columns):
            xid8 = part["xid8"].to_numpy(zero_copy_only=False)
            unseen = ~snapshot.sees(xid8)
            if chosen is not None:
                batch, seq, streamed_xid = place_columns(part)
                unseen &= chosen((batch << SEQ_BITS) | seq, streamed_xid >= 0, xid8)
            if unseen.any():
                return True
        return False

    def oldest_commit(self, stream: Stream, relation_ids: Sequence[int], snapshot: Snapshot) -> datetime | None:
        """When the first of such row messages was committed."""
        found = []
        for part in self.rows_of(stream.segments, relation_ids, snapshot, ["xid8", *_COMMIT, *_PLACE]):
            unseen = part.filter(pa.array(~snapshot.sees(part["xid8"].to_numpy(zero_copy_only=False))))
            _, at = commits(unseen, stream.segments)
            found.append(pc.min(at).as_py())
        return min(filter(None, found), default=None)

    def xids(self, segments: Segments, relation_ids: Sequence[int], snapshot: Snapshot) -> set[int]:
        """The top-level transactions that brought row messages of these relations."""
        parts = self.rows_of(segments, relation_ids, snapshot, ["xid8"])
        return {xid for part in parts for xid in part["xid8"].unique().to_pylist()}

    def rows_of(
        self,
        segments: Segments,
        relation_ids: Sequence[int],
        snapshot: Snapshot,
        columns: list[str],
    ) -> Iterator[pa.RecordBatch]:
        """Row messages of these relations that count, but for those of transactions that the snapshot certainly sees."""
        chosen = row_messages(segments, relation_ids, snapshot)
        if segments.is_plain:
            yield from self._scan(chosen, columns)
            return
        for part in self._scan(chosen, [*dict.fromkeys([*columns, *_PLACE])]):
            yield part.filter(pa.array(segments.places(*place_columns(part)) >= 0))

    def _timeline(self, chosen: pc.Expression) -> pa.Table:
        parts = list(self._scan(chosen & pc.field("timeline"), _TIMELINE))
        if not parts:
            return _TIMELINE_SCHEMA.empty_table()
        return pa.Table.from_batches(parts).sort_by([("batch", "ascending"), ("seq", "ascending")])

    def _scan(self, chosen: pc.Expression, columns: list[str]) -> Iterator[pa.RecordBatch]:
        table = self._open()
        if table is None:
            return iter(())
        return _batches(by_row_group(table.to_pyarrow_dataset(), chosen), chosen, columns)

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.uri, storage_options=self.storage_options)
        except TableNotFoundError:
            return None

    def _must_open(self) -> DeltaTable:
        return DeltaTable(self.uri, storage_options=self.storage_options)


def _batches(dataset: ds.Dataset, chosen: pc.Expression, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Rows with little read ahead, so that memory doesn't grow with the log."""
    scanner: ds.Scanner = dataset.scanner(columns=list(columns), filter=chosen, batch_size=131_072, batch_readahead=2,
                                          fragment_readahead=1)  # fmt: skip
    return iter(scanner.to_batches())


def landmarks(timeline: pa.Table) -> list[Landmark]:
    """The control messages of a timeline, read."""
    rows = timeline.filter(pc.is_in(timeline["kind"], value_set=pa.array(CONTROL_KINDS))).to_pylist()
    return [Landmark(row["batch"], row["seq"], row["xid8"], read_control(row["data"])) for row in rows]


def place_columns(rows: pa.Table | pa.RecordBatch) -> tuple[Ints, Ints, Ints]:
    """Batch, number, and the xid in front (-1: none) of messages."""
    batch, seq = (np.asarray(rows[name].to_numpy(zero_copy_only=False), np.int64) for name in ("batch", "seq"))
    streamed = pc.fill_null(rows["streamed_xid"], -1).to_numpy(zero_copy_only=False)
    return batch, seq, np.asarray(streamed, np.int64)


def commits(changes: pa.RecordBatch, segments: Segments) -> tuple[pa.Array, pa.Array]:
    """Commit position and time; those of streamed and prepared transactions were unknown when they were landed."""
    lsn, at = changes["commit_lsn"], changes["commit_ts"]
    if segments.is_plain:
        return lsn, at
    stretch = segments.find(*place_columns(changes))
    own_lsn = np.asarray(pc.fill_null(lsn, 0).to_numpy(zero_copy_only=False), np.int64)
    own_at = np.asarray(pc.fill_null(at.cast(pa.int64()), 0).to_numpy(zero_copy_only=False), np.int64)
    times = pa.array(segments.commit_ts_us(stretch, own_at)).cast(at.type)
    return pa.array(segments.commit_lsn(stretch, own_lsn)), times


def covering(segments: Segments) -> pc.Expression:
    """The range of batches, and the earlier parts that it commits."""
    chosen = _range(segments.after, segments.upto)
    for part in segments.older:
        seq = pc.field("seq")
        chosen |= (pc.field("batch") == part.batch) & (seq >= part.first) & (seq <= part.last)
    return chosen


def row_messages(segments: Segments, relation_ids: Sequence[int], snapshot: Snapshot) -> pc.Expression:
    """Row messages of these relations in a range of batches that a copy from ``snapshot`` may lack."""
    return _rows_in(segments) & pc.field("relation_id").isin(list(relation_ids)) & (pc.field("xid8") >= snapshot.xmin)


def _rows_in(segments: Segments) -> pc.Expression:
    """Row messages of any relation in a range of batches."""
    return covering(segments) & pc.field("kind").isin(ROW_KINDS)


def _range(after_batch: int, upto_batch: int) -> pc.Expression:
    return (pc.field("batch") > after_batch) & (pc.field("batch") <= upto_batch)
