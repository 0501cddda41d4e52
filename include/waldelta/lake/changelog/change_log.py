"""The change log: every landed message, raw, by batch; this module reads it without a JVM.

A Spark task writes each batch's file, and tasks decode it. This module commits the file, and reads
back what the commit really contains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from waldelta.arrow import with_column
from waldelta.errors import DecodeError, SlotGap
from waldelta.failpoints import fault_point
from waldelta.lake.changelog.batch_file import (
    COLUMNS,
    XID_MASK,
    BatchFiles,
    Landed,
    TransactionCounts,
)
from waldelta.lake.changelog.row_messages import (
    RowMessages,
    Snapshot,
    Stream,
    of_batches,
)
from waldelta.lake.delta_target import DeltaTarget, TargetVersion
from waldelta.lake.lake import Lake
from waldelta.lake.ledger import SKIPPED, Decisions
from waldelta.lake.ledger.records import ConsumedBatch
from waldelta.lake.storage import CHANGES, local_path
from waldelta.pgoutput.byte_readers import unsigned
from waldelta.pgoutput.envelope import ENVELOPE_SCHEMA
from waldelta.pgoutput.message_kinds import (
    ABORT_SIZES,
    CHANGE_KINDS,
    CONTROL_KINDS,
    ROW_KINDS,
)
from waldelta.pgoutput.messages import MARK, Control, read_control, read_truncate
from waldelta.pgoutput.transactions import (
    LAST_SEQ,
    SEQ_BITS,
    Landmark,
    Prepared,
    order_of,
    prepared_transactions,
    resolve,
)
from waldelta.quantities import counted

_TIMELINE = [
    "batch",
    "seq",
    "kind",
    "relation_id",
    "xid8",
    "streamed_xid",
    "commit_lsn",
    "end_lsn",
    "commit_ts",
    "data",
]
# Commit times are integers, so that not each of them becomes a Python datetime.
_TIMELINE_SCHEMA = pa.schema(
    [
        (
            pa.field(name, pa.int64())
            if name in ("batch", "commit_ts")
            else ENVELOPE_SCHEMA.field(name)
        )
        for name in _TIMELINE
    ]
)
# Includes messages that landed without being read.
_CONTROLS = [*CONTROL_KINDS, *(MARK + kind for kind in CONTROL_KINDS)]
# Without one of these messages, it isn't known where a transaction's changes belong, or whether
# they count. The last letter of a message of an unknown kind is the kind that it may be.
_DECISIVE = f"^{MARK}.?[BbScPpKr]$"
# Delta's transaction id of commits that drop old batches; its version is the last dropped batch.
_PRUNED = "waldelta:pruned"
# The number of batches that an error message names.
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Reach:
    """What the log has of one slot incarnation: the end of each batch, and whether earlier batches
    were dropped.

    Dropped batches, up to ``dropped``, end before ``begins_at``.
    """

    ends: dict[int, int]
    is_cut: bool = False
    begins_at: int = 0
    dropped: int = 0


class ChangeLog(RowMessages, BatchFiles):
    """The change log of one lake; ``app_id`` is the slot incarnation that writes it."""

    def __init__(self, lake: Lake, app_id: str) -> None:
        self.lake, self.app_id = lake, app_id
        self.place = lake.bookkeeping(CHANGES)
        self.uri = self.place.uri

    def last_batch(self) -> int | None:
        """Returns the last batch landed by this slot incarnation, from the log's own transaction
        id.
        """
        table = self.place.find()
        return (table.committed(self.app_id) or None) if table is not None else None

    def highest_batch(self) -> int:
        """Returns the highest batch number in the log, of any incarnation; 0 when the log is
        empty.
        """
        return max(self._batches(), default=0)

    def lowest_batch(self) -> int | None:
        """Returns the lowest batch number still in the log, of any incarnation; None when it is
        empty.
        """
        return min(self._batches(), default=None)

    def _batches(self) -> list[int]:
        table = self.place.find()
        return (
            []
            if table is None
            else [int(p["batch"]) for p in table.table.partitions() if p["batch"] is not None]
        )

    def sizes(self, after_batch: int, upto_batch: int) -> dict[int, int]:
        """Returns the number of messages of each batch in a range, from file statistics."""
        table = self.place.find()
        return {} if table is None else _sizes(table, after_batch, upto_batch)

    def whole_sizes(
        self, consumed: Mapping[int, ConsumedBatch], after_batch: int, upto_batch: int
    ) -> dict[int, int]:
        """Returns sizes(), after a check that no messages are missing.

        Raises SlotGap when a batch has another number of messages than when the slot was advanced
        past it. Batches that maintenance has dropped don't count as missing. The log is read again,
        whatever this run knows of it: another writer may have overwritten a commit.
        """
        table = self.place.find(DeltaTarget.open_from_log)
        pruned = table.committed(_PRUNED) if table is not None else 0
        sizes = _sizes(table, after_batch, upto_batch) if table is not None else {}
        expected = {
            batch: of_batch.messages
            for batch, of_batch in consumed.items()
            if max(after_batch, pruned) < batch <= upto_batch and of_batch.messages is not None
        }
        if holes := sorted(
            batch for batch, messages in expected.items() if sizes.get(batch, 0) != messages
        ):
            descriptions = [
                f"batch {b} holds {counted(sizes.get(b, 0), 'message')}, but {expected[b]:,} had"
                " landed in it"
                for b in holes[:_MOST_NAMED]
            ]
            suffix = (
                f", and {counted(len(holes) - _MOST_NAMED, 'more batch', 'more batches')}"
                if len(holes) > _MOST_NAMED
                else ""
            )
            earlier_lsns = [
                of_batch.lsn for batch, of_batch in consumed.items() if batch < holes[0]
            ]
            raise SlotGap(
                f"the change log {self.uri} has lost messages that were consumed from the slot:"
                f" {'; '.join(descriptions)}{suffix}; no run reads past them: restore the missing"
                " files, or run resync (after a refused replay: with tables), which corrects the"
                " rows that differ",
                lost=(max(earlier_lsns, default=None), consumed[holes[-1]].lsn),
            )
        return sizes

    def prune(self, upto_batch: int, hours: int) -> None:
        """Drop the batches up to one, and delete files unused by any version of the last ``hours``.

        The commit is a compare-and-swap, as for batches: on an object store without one, Spark's
        DELETE would overwrite a batch that lands at the same moment. The commit records what was
        dropped, so that it isn't mistaken for lost messages.
        """
        table = self.place.open()
        version = table.version
        if any(batch <= upto_batch for batch in _sizes(table, 0, upto_batch)):
            # batch is the partition column, so whole files are removed, and none is read.
            table.delete(f"batch <= {upto_batch:d}", _PRUNED, upto_batch)
        fault_point("maintain.forgotten")
        version = self.place.sync_behind(version)
        table.vacuum(hours, full=True)
        self.place.sync_behind(version)
        # A later batch's folder may be about to get its file.
        folder = local_path(self.uri)
        for path in folder.glob("batch=*") if folder is not None else ():
            number = path.name.removeprefix("batch=")
            if number.isdecimal() and int(number) <= upto_batch:
                # rmdir() fails if the folder isn't empty, or isn't a folder.
                with suppress(OSError):
                    path.rmdir()
        table.drop_old_entries()

    def bytes_of_batches(self, after_batch: int, upto_batch: int) -> dict[int, int]:
        """Returns the bytes of each batch in a range, before compression, from the files'
        footers.
        """
        totals: dict[int, int] = {}
        for piece in self.pieces(of_batches(after_batch, upto_batch)):
            if piece.batch is not None:
                totals[piece.batch] = totals.get(piece.batch, 0) + piece.bytes
        return totals

    def visible_upto(self, snapshot: Snapshot, after_batch: int) -> int:
        """Returns the last batch up to which a snapshot sees every transaction after
        ``after_batch``.

        This reads file statistics alone. A copy from that snapshot has all of these transactions,
        so none of them must be applied to it.
        """
        table, visible = self.place.find(), after_batch
        # A batch with a file without the statistic has none.
        highest = ("max.xid8", "max", pc.ScalarAggregateOptions(skip_nulls=False))
        for row in _by_batch(table, highest) if table is not None else ():
            if row["batch"] > after_batch:
                if (xid8 := row["max.xid8_max"]) is None or xid8 >= snapshot.xmin:
                    break
                visible = row["batch"]
        return visible

    def end_lsn(self, batch: int) -> int:
        """Returns the position where the last transaction of a batch ends; 0 where none ends in it.

        File statistics have it, or else the batch is read.
        """
        rows = _by_batch(self.place.open(), ("max.end_lsn", "max"))
        ends = {row["batch"]: row["max.end_lsn_max"] for row in rows}
        return ends.get(batch) or self.landed(batch).end_lsn

    def commit_infos(self, batches: Collection[int]) -> dict[int, dict[str, Any]]:
        """Returns the metadata of recent batches' commits, by batch, as far as Delta's log still
        has it.
        """
        infos: dict[int, dict[str, Any]] = {}
        for commit in self.place.log.before(self.place.version + 1):
            # Batch numbers continue across slot incarnations, so no number is used twice.
            if commit.metadata.get("batch") in batches:
                infos[commit.metadata["batch"]] = commit.metadata
            if len(infos) == len(batches):
                break
        return infos

    def end_after(self, first_batch: int) -> int:
        """Returns the end of the last transaction after ``first_batch``, ignoring empty batches; 0:
        none.
        """
        return max(self.reach(first_batch).ends.values(), default=0)

    def reach(self, first_batch: int) -> Reach:
        """Returns the end positions of the batches after ``first_batch`` that the log still has,
        from file statistics alone.
        """
        table = self.place.find()
        if table is None:
            return Reach({})
        rows = [
            row
            for row in _by_batch(table, ("min.end_lsn", "min"), ("max.end_lsn", "max"))
            if row["batch"] > first_batch and row["max.end_lsn_max"] is not None
        ]
        ends = {row["batch"]: row["max.end_lsn_max"] for row in rows}
        # A batch that landed without messages is in no file either.
        dropped = max(table.committed(_PRUNED), first_batch)
        begins_at = rows[0]["min.end_lsn_min"] if rows else 0
        return Reach(ends, dropped > first_batch, begins_at, dropped)

    def landed(self, batch: int) -> Landed:
        """Count what the committed files of one batch contain."""
        timeline = self.timeline(batch - 1, batch)
        rows = timeline.filter(
            pc.is_in(timeline["kind"], value_set=pa.array(_CONTROLS))
        ).to_pylist()
        tally = TransactionCounts(
            batch,
            [Landmark(row["batch"], row["seq"], row["xid8"], _leniently(row)) for row in rows],
        )
        for part in self.scan(pc.field("batch") == batch, list(COLUMNS)):
            tally.add(part)
        return tally.landed()

    def timeline(self, after_batch: int, upto_batch: int) -> pa.Table:
        """Returns relation, type, truncate and control messages of a batch range, in the order of
        the log.
        """
        return self._timeline(of_batches(after_batch, upto_batch))

    def controls(self, upto_batch: int | None = None) -> pa.Table:
        """Returns the control messages of all batches, or of those up to one."""
        condition = pc.field("kind").isin(_CONTROLS)
        return self._timeline(
            condition if upto_batch is None else of_batches(0, upto_batch) & condition
        )

    def stream(self, after_batch: int, upto_batch: int) -> Stream:
        """Returns a range of batches in commit order, without skipped messages."""
        timeline = self.timeline(after_batch, upto_batch)
        left_out = _undecided_transactions(timeline)
        segments = resolve(landmarks(timeline, left_out), after_batch, upto_batch)
        if segments.missing:
            # Some transactions were prepared before the range and committed in it.
            earlier = self.controls(after_batch)
            left_out |= _undecided_transactions(earlier)
            marks = [*landmarks(earlier, left_out), *landmarks(timeline, left_out)]
            segments = resolve(marks, after_batch, upto_batch)
            batches = sorted({part.batch for part in segments.older})
            timeline = pa.concat_tables([self._timeline(pc.field("batch").isin(batches)), timeline])
        skipped = [
            *((place, place) for place in sorted(self._skipped_positions)),
            *self._ranges(left_out),
        ]
        rows = self._relations_at(self._skipped_positions) if self._skipped_positions else set()
        return Stream(
            timeline,
            replace(segments, skipped=tuple(skipped)),
            undescribed=_unread_relations(timeline) | rows,
        )

    @cached_property
    def _skipped_positions(self) -> frozenset[int]:
        """The positions of landed messages that an operator has decided to skip."""
        rows = Decisions(self.lake).messages()
        messages = [row.messages[0] for row in rows if row.status == SKIPPED and row.messages]
        return frozenset(
            order_of(m.batch, m.seq) for m in messages if m.batch is not None and m.seq is not None
        )

    def _ranges(self, transactions: frozenset[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns the ranges of positions of these transactions' changes.

        They weren't streamed, so each transaction's changes are contiguous.
        """
        ranges = []
        for batch, xid8 in sorted(transactions):
            condition = (pc.field("batch") == batch) & (pc.field("xid8") == xid8)
            condition &= pc.field("streamed_xid").is_null() & pc.field("kind").isin(CHANGE_KINDS)
            seqs = [
                seq for part in self.scan(condition, ["seq"]) for seq in part["seq"].to_pylist()
            ]
            if seqs:
                ranges.append((order_of(batch, min(seqs)), order_of(batch, max(seqs))))
        return ranges

    def _relations_at(self, places: Collection[int]) -> set[tuple[int, int]]:
        """Returns batch and relation of the row messages at these positions."""
        batches = sorted({place >> SEQ_BITS for place in places})
        condition = pc.field("batch").isin(batches) & pc.field("seq").isin(
            [place & LAST_SEQ for place in sorted(places)]
        )
        parts = self.scan(
            condition & pc.field("kind").isin(ROW_KINDS), ["batch", "seq", "relation_id"]
        )
        rows = [row for part in parts for row in part.to_pylist()]
        return {
            (row["batch"], row["relation_id"])
            for row in rows
            if order_of(row["batch"], row["seq"]) in places
        }

    def first_truncate(
        self, after_batch: int, upto_batch: int, relation_ids: Collection[int]
    ) -> int | None:
        """Returns the first batch of a range with a TRUNCATE of one of these relations; None
        without any.

        This reads only TRUNCATEs.
        """
        condition = (
            of_batches(after_batch, upto_batch) & pc.field("timeline") & (pc.field("kind") == "T")
        )
        oids, batches = set(relation_ids), []
        for part in self.scan(condition, ["batch", "seq", "streamed_xid", "data"]):
            for row in part.to_pylist():
                if order_of(row["batch"], row["seq"]) in self._skipped_positions:
                    continue
                truncated = read_truncate(row["data"], streamed=row["streamed_xid"] is not None)
                if not oids.isdisjoint(truncated):
                    batches.append(row["batch"])
        return min(batches, default=None)

    def prepared(self) -> list[Prepared]:
        """Returns every prepared transaction in the log, with the batch that decided it."""
        timeline = self.controls()
        return prepared_transactions(landmarks(timeline, _undecided_transactions(timeline)))

    def _timeline(self, condition: pc.Expression) -> pa.Table:
        parts = list(self.scan(condition & pc.field("timeline"), _TIMELINE))
        if not parts:
            return _TIMELINE_SCHEMA.empty_table()
        messages = pa.Table.from_batches(parts).select(_TIMELINE).cast(_TIMELINE_SCHEMA)
        timeline = messages.sort_by([("batch", "ascending"), ("seq", "ascending")])
        if not self._skipped_positions:
            return timeline
        places = zip(timeline["batch"].to_pylist(), timeline["seq"].to_pylist(), strict=True)
        condition = pa.array([order_of(*place) in self._skipped_positions for place in places])
        marked = pc.if_else(
            condition, pc.binary_join_element_wise(MARK, timeline["kind"], ""), timeline["kind"]
        )
        return with_column(timeline, "kind", marked)

    def dataset(self) -> ds.Dataset | None:
        """Returns all files of the log as a dataset; None before anything has landed."""
        table = self.place.find()
        return None if table is None else table.table.to_pyarrow_dataset()


def _sizes(table: TargetVersion, after_batch: int, upto_batch: int) -> dict[int, int]:
    return {
        row["batch"]: row["num_records_sum"] or 0
        for row in _by_batch(table, ("num_records", "sum"))
        if after_batch < row["batch"] <= upto_batch
    }


def _by_batch(table: TargetVersion, *statistics: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Returns statistics of the files of each batch, aggregated as Arrow does, by batch.

    Returns nothing where no file has one of them, such as in a log without files.
    """
    files = table.files
    if not {name for name, *_ in statistics} <= {*files.column_names}:
        return []
    files = files.append_column("batch", files["partition.batch"].cast(pa.int64()))
    return list(files.group_by("batch").aggregate([*statistics]).sort_by("batch").to_pylist())


def landmarks(
    timeline: pa.Table, excluded: frozenset[tuple[int, int]] = frozenset()
) -> list[Landmark]:
    """Returns the decoded control messages of a timeline, without those of ``excluded``
    transactions.

    For an unread Stream Abort or Stream Stop, the slot function's own columns are enough.
    """
    xids = {xid8 for _, xid8 in excluded}
    kinds = pa.array([*CONTROL_KINDS, MARK + "A", MARK + "E"])
    rows = timeline.filter(pc.is_in(timeline["kind"], value_set=kinds)).to_pylist()
    return [
        Landmark(
            row["batch"],
            row["seq"],
            row["xid8"],
            _control_message(row) if row["kind"][0] == MARK else read_control(row["data"]),
        )
        for row in rows
        if row["xid8"] not in xids
    ]


def _leniently(row: dict[str, Any]) -> Control:
    try:
        return read_control(row["data"]) if row["kind"][0] != MARK else _control_message(row)
    except DecodeError:
        return _control_message(row)


def _control_message(row: dict[str, Any]) -> Control:
    """Build a control message from its kind, its transaction and its position."""
    kind, xid = row["kind"].removeprefix(MARK), row["xid8"] & XID_MASK
    if kind == "A" and len(row["data"]) in ABORT_SIZES:
        return Control(kind, unsigned(row["data"], 1) or 0, unsigned(row["data"], 5) or 0)
    # The slot function returns the aborted (sub)transaction's own xid.
    return Control(kind, -1 if kind == "A" else xid, xid, end_lsn=row["end_lsn"] or 0)


def _undecided_transactions(timeline: pa.Table) -> frozenset[tuple[int, int]]:
    """Returns batch and xid8 of transactions whose deciding message wasn't read.

    That message decides whether and where their changes count.
    """
    is_undecided = pc.and_(
        pc.match_substring_regex(timeline["kind"], _DECISIVE), pc.is_valid(timeline["xid8"])
    )
    rows = timeline.filter(is_undecided).select(["batch", "xid8"]).to_pylist()
    return frozenset((row["batch"], row["xid8"]) for row in rows)


def _unread_relations(timeline: pa.Table) -> frozenset[tuple[int, int | None]]:
    """Returns the batch and the relation's oid of each Relation message that landing couldn't read.

    The oid is None when the message is too short to have one.
    """
    rows = timeline.filter(pc.equal(timeline["kind"], MARK + "R"))
    return frozenset(
        (row["batch"], row["relation_id"])
        for row in rows.select(["batch", "relation_id"]).to_pylist()
    )
