"""Writes a batch's file of the change log, one record batch at a time, and commits it.

The process that reads the slot writes the file.

Counts a batch of the change log so that PostgreSQL's count of the same transactions must agree.
"""

from __future__ import annotations

import errno
from collections.abc import Container, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tenacity
from deltalake.exceptions import CommitFailedError
from pyarrow.fs import FileSelector

from waldelta.arrow import group_batches, with_column
from waldelta.errors import LateWriter
from waldelta.lake.data_file import DataFile
from waldelta.lake.delta_log import Tag
from waldelta.lake.delta_target import CHECKPOINT_INTERVAL, DeltaTarget
from waldelta.lake.layout import NewFile
from waldelta.lake.storage import remove_empty_log
from waldelta.lake.write_errors import named_write_errors
from waldelta.pgoutput.message_kinds import CHANGE_KINDS, KINDS
from waldelta.pgoutput.messages import MARK
from waldelta.pgoutput.transactions import Landmark

XID_MASK = 0xFFFFFFFF
COLUMNS = ("kind", "xid8", "streamed_xid", "end_lsn", "commit_ts")
_CHANGES = pa.array(CHANGE_KINDS)
_ENDS = pa.array([kind.letter for kind in KINDS if kind.end_at is not None])


@dataclass(frozen=True, slots=True, order=True)
class PreparedRows:
    """The changes of one prepared transaction; ``xid`` has 32 bits, ``messages`` are transactional
    ones.
    """

    xid: int
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    messages: int = 0


@dataclass(frozen=True, slots=True)
class Transactions:
    """Counts on which two reads of the same WAL must agree: complete transactions, not bytes.

    Bytes may differ. ``messages`` counts transactional messages. The sums are over the ends of
    commits, prepares, and decisions on prepared transactions. Rows of transactions prepared in this
    batch are in ``in_prepared``, by xid, whatever is decided later.
    """

    commits: int = 0
    prepares: int = 0
    prepared_commits: int = 0
    prepared_rollbacks: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    messages: int = 0
    xid_sum: int = 0
    end_lsn_sum: int = 0
    in_prepared: tuple[PreparedRows, ...] = ()

    def __add__(self, other: Transactions) -> Transactions:
        """The sum of two batches."""
        both = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        return Transactions(**both | {"in_prepared": tuple(sorted(both["in_prepared"]))})

    @property
    def changes(self) -> int:
        """Row changes and truncates."""
        prepared = sum(p.inserts + p.updates + p.deletes + p.truncates for p in self.in_prepared)
        return self.inserts + self.updates + self.deletes + self.truncates + prepared

    def without(self, xids: Container[int]) -> Transactions:
        """Returns the counts without the rows of some prepared transactions."""
        return replace(self, in_prepared=tuple(p for p in self.in_prepared if p.xid not in xids))


@dataclass(frozen=True, slots=True)
class Landed:
    """One batch as stored in the lake; ``rows`` counts all messages, including those that don't
    count.

    ``commit_us`` is the latest commit time, see waldelta.pgoutput.commit_time.
    """

    batch: int
    rows: int
    transactions: Transactions
    end_lsn: int
    commit_us: int | None


def _with_server_kinds(part: pa.RecordBatch) -> pa.RecordBatch:
    """Returns messages with the kinds that the server counts.

    The kind of a message that landing didn't read is replaced by the message's first byte.
    """
    kind = part["kind"]
    if not pc.any(pc.starts_with(kind, MARK)).as_py():
        return part
    letters = pc.if_else(pc.starts_with(kind, MARK), pc.utf8_slice_codeunits(kind, 1, 2), kind)
    return with_column(part, "kind", letters)


class TransactionCounts:
    """Adds up the record batches (COLUMNS) of one batch without keeping them.

    ``landmarks`` are the batch's control messages. A streamed message counts when its transaction
    was committed or prepared in this same batch and its subtransaction wasn't rolled back.
    """

    def __init__(self, batch: int, landmarks: Iterable[Landmark] = ()) -> None:
        self._batch = batch
        self._rows = 0
        self._kinds: dict[str, int] = {}
        self._xid_sum = self._lsn_sum = self._end = 0
        self._commit_us: int | None = None
        landmarks = list(landmarks)
        self._committed = {m.xid8: m.control.end_lsn for m in landmarks if m.control.kind == "c"}
        prepared = {m.xid8 for m in landmarks if m.control.kind in ("P", "p")}
        self._prepared = pa.array(sorted(prepared), pa.int64())
        self._in_prepared: dict[int, dict[str, int]] = {}
        complete = {*self._committed, *(m.xid8 for m in landmarks if m.control.kind == "p")}
        self._complete = pa.array(sorted(complete), pa.int64())
        voided = {
            m.control.subxid
            for m in landmarks
            if m.control.kind == "A" and m.control.subxid != m.control.xid
        }
        self._voided = pa.array(sorted(voided), pa.int64())
        self._with_rows: set[int] = set()

    def add(self, part: pa.RecordBatch) -> None:
        """Count one record batch."""
        self._rows += part.num_rows
        part = self._counting(_with_server_kinds(part))
        for item in pc.value_counts(self._plain(part)["kind"]).to_pylist():
            self._kinds[item["values"]] = self._kinds.get(item["values"], 0) + item["counts"]
        # Messages outside any transaction may lie after the last one, where the verifying call
        # doesn't read.
        lonely = part.filter(pc.and_(pc.equal(part["kind"], "M"), pc.is_valid(part["end_lsn"])))
        self._kinds["M"] = self._kinds.get("M", 0) - lonely.num_rows
        self._end = max(self._end, pc.max(part["end_lsn"]).as_py() or 0)
        self._add_ends(part.filter(pc.is_in(part["kind"], value_set=_ENDS)))

    def _counting(self, part: pa.RecordBatch) -> pa.RecordBatch:
        """Drop streamed messages that don't count; notes which streamed transactions have rows."""
        streamed = part["streamed_xid"]
        if streamed.null_count == len(streamed):
            return part
        counts = pc.and_(
            pc.is_in(part["xid8"], value_set=self._complete),
            pc.invert(pc.is_in(streamed, value_set=self._voided)),
        )
        part = part.filter(pc.or_(pc.is_null(streamed), counts))
        rows = pc.and_(
            pc.is_valid(part["streamed_xid"]), pc.is_in(part["kind"], value_set=_CHANGES)
        )
        self._with_rows.update(pc.unique(part["xid8"].filter(rows)).to_pylist())
        return part

    def _plain(self, part: pa.RecordBatch) -> pa.RecordBatch:
        """Drop rows of prepared transactions, which are counted one by one."""
        if not len(self._prepared):
            return part
        prepared = pc.and_(
            pc.is_in(part["xid8"], value_set=self._prepared),
            pc.is_in(part["kind"], value_set=_CHANGES),
        )
        rows = (
            pa.Table.from_batches([part.filter(prepared)])
            .group_by(["xid8", "kind"])
            .aggregate([([], "count_all")])
        )
        for row in rows.to_pylist():
            kinds = self._in_prepared.setdefault(row["xid8"] & XID_MASK, {})
            kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["count_all"]
        return part.filter(pc.invert(prepared))

    def _add_ends(self, ends: pa.RecordBatch) -> None:
        if not ends.num_rows:
            return
        # Whether a streamed transaction has any row is known only at the end.
        decided = ends.filter(pc.not_equal(ends["kind"], "c"))
        self._xid_sum += int(
            (decided["xid8"].to_numpy(zero_copy_only=False) & XID_MASK).sum(dtype=object)
        )
        self._lsn_sum += int(
            decided["end_lsn"].to_numpy(zero_copy_only=False).astype(np.int64).sum(dtype=object)
        )
        latest = pc.max(ends["commit_ts"].cast(pa.int64())).as_py()
        if latest is not None:
            self._commit_us = latest if self._commit_us is None else max(self._commit_us, latest)

    def landed(self) -> Landed:
        """Returns the sums."""
        kinds = self._kinds
        # PostgreSQL streams a large transaction even if nothing of it is published, but doesn't
        # send such a transaction otherwise.
        streamed = {xid8: end for xid8, end in self._committed.items() if xid8 in self._with_rows}
        return Landed(
            batch=self._batch,
            rows=self._rows,
            transactions=Transactions(
                commits=kinds.get("C", 0) + len(streamed),
                prepares=kinds.get("P", 0) + kinds.get("p", 0),
                prepared_commits=kinds.get("K", 0),
                prepared_rollbacks=kinds.get("r", 0),
                inserts=kinds.get("I", 0),
                updates=kinds.get("U", 0),
                deletes=kinds.get("D", 0),
                truncates=kinds.get("T", 0),
                messages=kinds.get("M", 0),
                xid_sum=self._xid_sum + sum(xid8 & XID_MASK for xid8 in streamed),
                end_lsn_sum=self._lsn_sum + sum(streamed.values()),
                in_prepared=tuple(
                    PreparedRows(xid, *(of.get(kind, 0) for kind in "IUDTM"))
                    for xid, of in sorted(self._in_prepared.items())
                ),
            ),
            end_lsn=self._end,
            commit_us=self._commit_us,
        )


# The columns by which files are pruned, and from which the landed end is read.
STATISTICS = ("relation_id", "xid8", "end_lsn")
# With small row groups, both cores can decode one batch, and readers of the timeline skip groups
# without timeline messages.
BATCH_ROW_GROUP_BYTES = 16 << 20
# Values of these columns repeat, or are near each other. The messages themselves aren't worth a
# dictionary or statistics.
_RECURRING = [
    "kind",
    "relation_id",
    "xid8",
    "streamed_xid",
    "commit_lsn",
    "end_lsn",
    "commit_ts",
    "timeline",
    "moves",
]
_LAYOUT = {
    "compression": "snappy",
    "use_dictionary": _RECURRING,
    "write_statistics": _RECURRING,
}
_KEPT = "; nothing was consumed from the slot"
_PROPERTIES = {
    "delta.dataSkippingStatsColumns": ",".join(STATISTICS),
    "delta.checkpointInterval": str(CHECKPOINT_INTERVAL),
}
_ATTEMPTS = 10
_NEWEST = 20


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A file that is written but not committed: its path in the table, its bytes and its Delta
    statistics.
    """

    path: str
    size: int
    stats: str


class BatchFiles:
    """Writes the files of the change log at ``place``, and commits them for a slot incarnation."""

    place: DeltaTarget
    app_id: str

    def create(self, schema: pa.Schema) -> None:
        """Create the empty log unless it exists, as Spark's CREATE TABLE would.

        Raises TargetNotWritable.
        """
        place = self.place
        if place.exists:
            return
        remove_empty_log(place.uri)
        with named_write_errors(place.uri, besides=_KEPT):
            files = place.files.get_file_info(FileSelector("", allow_not_found=True))
            # Another run may have created the log in the meantime, which is just as good.
            if any(file.base_name != "_delta_log" for file in files) and not place.exists:
                raise FileExistsError(errno.EEXIST, "it has files and no Delta log")
            place.create(
                pa.schema([("batch", pa.int64()), *schema]),
                mode="ignore",
                partition_by=["batch"],
                configuration=_PROPERTIES,
                raise_if_key_not_exists=False,
            )
            place.sync_commit(0)

    def write(
        self, batch: int, parts: Iterable[pa.RecordBatch], schema: pa.Schema
    ) -> BatchFile | None:
        """Write record batches as the file of a batch, which counts once add() has committed it.

        Returns None, and writes no file, when there are none. This doesn't open the Delta table,
        and memory holds one row group. Raises TargetNotWritable when the file can't be written, and
        whatever ``parts`` raises.
        """
        prefix = f"batch={batch:d}/part-"
        kinds = (OSError, pa.ArrowException)
        named_errors = partial(named_write_errors, self.place.uri, "Spark's tasks", _KEPT, kinds)
        with DataFile(self.place.files, schema, prefix, _LAYOUT, STATISTICS) as file:
            for group in group_batches(parts, BATCH_ROW_GROUP_BYTES):
                with named_errors():
                    file.write(group)
                del group  # The group would stay in memory while the next one is collected.
            with named_errors():
                written = file.close()
        return BatchFile(**written) if written else None

    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(CommitFailedError),
        stop=tenacity.stop_after_attempt(_ATTEMPTS),
        wait=tenacity.wait_random(0, 0.5),
        reraise=True,
    )
    def add(self, batch: int, file: BatchFile | None, metadata: str) -> None:
        """Commit a batch durably.

        Without a file, only the batch's number is committed, and counts as landed. Each attempt is
        a compare-and-swap on a version without the batch. Raises LateWriter when another run has
        committed it.
        """
        table = self.place.open_known()
        if table.committed(self.app_id) < batch:
            partition = {"batch": str(batch)}
            added = [] if file is None else [NewFile(file.path, file.size, file.stats, partition)]
            table.replace_files([], added, Tag(self.app_id, batch, metadata))
            return
        newest = table.commits(_NEWEST)
        own_versions = (
            entry["version"] for entry in newest if entry.get("userMetadata") == metadata
        )
        if (version := next(own_versions, None)) is None:
            raise LateWriter(
                f"batch {batch} of the change log was landed by another run: run again"
            )
        # The commit exists although its answer was lost, or the run was killed before this call.
        table.keep(version)
