"""Counts a batch of the change log so that PostgreSQL's count of the same transactions must
agree.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, fields, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.arrow import with_column
from waldelta.pgoutput.messages import MARK
from waldelta.pgoutput.transactions import Landmark

XID_MASK = 0xFFFFFFFF
COLUMNS = ("kind", "xid8", "streamed_xid", "end_lsn", "commit_ts")
_ROW_KINDS = pa.array(["I", "U", "D", "T", "M"])
_ENDS = pa.array(["C", "c", "P", "p", "K", "r"])


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
        """Return the counts without the rows of some prepared transactions."""
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


def _unmarked(part: pa.RecordBatch) -> pa.RecordBatch:
    """Give unread messages the kind of their first byte, by which the server counts them."""
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
        part = self._counting(_unmarked(part))
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
            pc.is_valid(part["streamed_xid"]), pc.is_in(part["kind"], value_set=_ROW_KINDS)
        )
        self._with_rows.update(pc.unique(part["xid8"].filter(rows)).to_pylist())
        return part

    def _plain(self, part: pa.RecordBatch) -> pa.RecordBatch:
        """Drop rows of prepared transactions, which are counted one by one."""
        if not len(self._prepared):
            return part
        prepared = pc.and_(
            pc.is_in(part["xid8"], value_set=self._prepared),
            pc.is_in(part["kind"], value_set=_ROW_KINDS),
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
        known = ends.filter(pc.not_equal(ends["kind"], "c"))
        self._xid_sum += int(
            (known["xid8"].to_numpy(zero_copy_only=False) & XID_MASK).sum(dtype=object)
        )
        self._lsn_sum += int(
            known["end_lsn"].to_numpy(zero_copy_only=False).astype(np.int64).sum(dtype=object)
        )
        latest = pc.max(ends["commit_ts"].cast(pa.int64())).as_py()
        if latest is not None:
            self._commit_us = latest if self._commit_us is None else max(self._commit_us, latest)

    def landed(self) -> Landed:
        """Return the sums."""
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
