"""The change log: every message ever landed, raw, by batch; read here without a JVM.

Spark appends to it and decodes it (spark_jobs); this module reads back what a commit really holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError

from waldelta.lake import CHANGES, bookkeeping_uri, sync_commit
from waldelta.visibility import Snapshot

XID_MASK = 0xFFFFFFFF
ROW_KINDS = ("I", "U", "D")
# Of a row message, what it takes to decode it.
ROW_SCHEMA = pa.schema(
    [
        ("batch", pa.int64()), ("seq", pa.int64()), ("kind", pa.string()), ("relation_id", pa.int64()),
        ("xid8", pa.int64()), ("commit_lsn", pa.int64()), ("commit_ts", pa.timestamp("us", "UTC")),
        ("data", pa.binary()), ("moves", pa.bool_()),
    ]
)  # fmt: skip

# A batch, and a message's number within it.
Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Transactions:
    """What two readings of the same WAL must agree on: complete transactions, not bytes (facts: these may differ)."""

    commits: int = 0
    inserts: int = 0
    updates: int = 0
    deletes: int = 0
    truncates: int = 0
    xid_sum: int = 0
    end_lsn_sum: int = 0

    @property
    def changes(self) -> int:
        """Row changes and truncates."""
        return self.inserts + self.updates + self.deletes + self.truncates


@dataclass(frozen=True, slots=True)
class Landed:
    """One batch as the lake holds it."""

    batch: int
    rows: int
    transactions: Transactions
    end_lsn: int
    commit_ts: datetime | None
    by_relation: dict[int, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Volume:
    """Row messages that wait for a target, and whether any of them moves a key."""

    rows: int
    moves: bool


class ChangeLog:
    """Reads the change log of one lake; ``app_id`` is the slot's incarnation that writes it."""

    def __init__(self, root: str, app_id: str, storage_options: dict[str, str] | None = None) -> None:
        self.uri = bookkeeping_uri(root, CHANGES)
        self.app_id = app_id
        self._options = storage_options

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
        for file in (
            pa.table(table.get_add_actions(flatten=True)).select(["partition.batch", "num_records"]).to_pylist()
        ):
            batch = int(file["partition.batch"])
            if after_batch < batch <= upto_batch:
                found[batch] = found.get(batch, 0) + (file["num_records"] or 0)
        return found

    def landed_end(self, batch: int) -> int:
        """The end of a batch's last transaction, from the log's file statistics alone."""
        actions = pa.table(self._must_open().get_add_actions(flatten=True))
        of_batch = actions.filter(pc.equal(pc.cast(actions["partition.batch"], pa.int64()), batch))
        ends = [end for end in of_batch["max.end_lsn"].to_pylist() if end is not None]
        return max(ends) if ends else self.landed(batch).end_lsn

    def make_durable(self) -> int:
        """Force the newest commit onto the disk; returns its version."""
        table = self._must_open()
        version = table.version()
        sync_commit(self.uri, version)
        return version

    def has_commit(self, user_metadata: str) -> bool:
        """Whether one of the newest commits carries this userMetadata."""
        return any(entry.get("userMetadata") == user_metadata for entry in self._must_open().history(20))

    def landed(self, batch: int) -> Landed:
        """Count what the committed files of one batch hold."""
        tally = _Tally(batch)
        columns = ["kind", "relation_id", "xid8", "lsn", "end_lsn", "commit_ts"]
        for part in self._scan(pc.field("batch") == batch, columns):
            tally.add(part)
        return tally.landed()

    def timeline(self, after_batch: int, upto_batch: int) -> pa.Table:
        """Relation, type and truncate messages of a range of batches, in stream order."""
        chosen = _range(after_batch, upto_batch) & pc.field("timeline")
        columns = ["batch", "seq", "kind", "relation_id", "xid8", "data"]
        parts = list(self._scan(chosen, columns))
        if not parts:
            return pa.table({name: [] for name in columns})
        return pa.Table.from_batches(parts).sort_by([("batch", "ascending"), ("seq", "ascending")])

    def volume(self, after_batch: int, upto_batch: int, relation_ids: Sequence[int], snapshot: Snapshot) -> Volume:
        """How many row messages of these relations a range of batches holds that the snapshot doesn't see."""
        rows, moves = 0, False
        for part in self._rows_of(after_batch, upto_batch, relation_ids, snapshot, ["xid8", "moves"]):
            unseen = ~snapshot.sees(part["xid8"].to_numpy(zero_copy_only=False))
            rows += int(unseen.sum())
            moves = moves or bool(part["moves"].to_numpy(zero_copy_only=False)[unseen].any())
        return Volume(rows, moves)

    def rows(self, after_batch: int, upto_batch: int, most_bytes: int) -> pa.Table | None:
        """All row messages of a range of batches, as landed; None when they are more than ``most_bytes`` in memory."""
        parts: list[pa.RecordBatch] = []
        taken = 0
        for part in self._scan(_range(after_batch, upto_batch) & pc.field("kind").isin(ROW_KINDS), ROW_SCHEMA.names):
            taken += part.nbytes
            if taken > most_bytes:
                return None
            parts.append(part)
        return pa.Table.from_batches(parts) if parts else ROW_SCHEMA.empty_table()

    def has_changes(
        self,
        after_batch: int,
        upto_batch: int,
        relation_ids: Sequence[int],
        snapshot: Snapshot,
        between: tuple[Place, Place] | None = None,
    ) -> bool:
        """Whether a range of batches holds row messages of these relations that the snapshot doesn't see.

        ``between`` narrows it to a stretch of the stream, given as (batch, number).
        """
        chosen = _after(between[0]) & ~_after(between[1]) if between else None
        parts = self._rows_of(after_batch, upto_batch, relation_ids, snapshot, ["xid8"], chosen)
        return any(not snapshot.sees(part["xid8"].to_numpy(zero_copy_only=False)).all() for part in parts)

    def xids(self, after_batch: int, upto_batch: int, relation_ids: Sequence[int], snapshot: Snapshot) -> set[int]:
        """The top-level transactions that brought row messages of these relations in a range of batches."""
        parts = self._rows_of(after_batch, upto_batch, relation_ids, snapshot, ["xid8"])
        return {xid for part in parts for xid in part["xid8"].unique().to_pylist()}

    def has_truncates(self, after_batch: int, upto_batch: int) -> bool:
        """Whether a range of batches holds any TRUNCATE."""
        return "T" in self.timeline(after_batch, upto_batch)["kind"].to_pylist()

    def _rows_of(
        self,
        after_batch: int,
        upto_batch: int,
        relation_ids: Sequence[int],
        snapshot: Snapshot,
        columns: list[str],
        narrower: pc.Expression | None = None,
    ) -> Iterator[pa.RecordBatch]:
        chosen = (
            _range(after_batch, upto_batch)
            & pc.field("relation_id").isin(list(relation_ids))
            & (pc.field("xid8") >= snapshot.xmin)
            & pc.field("kind").isin(ROW_KINDS)
        )
        return self._scan(chosen if narrower is None else chosen & narrower, columns)

    def _scan(self, chosen: pc.Expression, columns: list[str]) -> Iterator[pa.RecordBatch]:
        table = self._open()
        if table is None:
            return iter(())
        dataset = table.to_pyarrow_dataset()
        scanner: ds.Scanner = dataset.scanner(columns=columns, filter=chosen, batch_size=131_072, batch_readahead=2,
                                              fragment_readahead=1)  # fmt: skip
        return iter(scanner.to_batches())

    def _open(self) -> DeltaTable | None:
        try:
            return DeltaTable(self.uri, storage_options=self._options)
        except TableNotFoundError:
            return None

    def _must_open(self) -> DeltaTable:
        return DeltaTable(self.uri, storage_options=self._options)


class _Tally:
    """Adds up record batches without holding them."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._rows = 0
        self._kinds: dict[str, int] = {}
        self._by_relation: dict[int, dict[str, int]] = {}
        self._xid_sum = self._lsn_sum = self._end = 0
        self._commit_ts: datetime | None = None

    def add(self, part: pa.RecordBatch) -> None:
        self._rows += part.num_rows
        for item in pc.value_counts(part["kind"]).to_pylist():
            self._kinds[item["values"]] = self._kinds.get(item["values"], 0) + item["counts"]
        grouped = pa.Table.from_batches([part]).group_by(["relation_id", "kind"]).aggregate([([], "count_all")])
        for row in grouped.to_pylist():
            if row["relation_id"] is not None and row["kind"] in "IUD":
                kinds = self._by_relation.setdefault(row["relation_id"], {})
                kinds[row["kind"]] = kinds.get(row["kind"], 0) + row["count_all"]
        commits = part.filter(pc.equal(part["kind"], "C"))
        if commits.num_rows:
            self._xid_sum += int((commits["xid8"].to_numpy(zero_copy_only=False) & XID_MASK).sum(dtype=object))
            self._lsn_sum += int(commits["lsn"].to_numpy(zero_copy_only=False).astype(np.int64).sum(dtype=object))
            self._end = max(self._end, pc.max(commits["end_lsn"]).as_py())
            latest = pc.max(commits["commit_ts"]).as_py()
            self._commit_ts = latest if self._commit_ts is None else max(self._commit_ts, latest)

    def landed(self) -> Landed:
        kinds = self._kinds
        return Landed(
            batch=self._batch,
            rows=self._rows,
            transactions=Transactions(
                commits=kinds.get("C", 0), inserts=kinds.get("I", 0), updates=kinds.get("U", 0),
                deletes=kinds.get("D", 0), truncates=kinds.get("T", 0), xid_sum=self._xid_sum,
                end_lsn_sum=self._lsn_sum,
            ),
            end_lsn=self._end,
            commit_ts=self._commit_ts,
            by_relation=self._by_relation,
        )  # fmt: skip


def _after(place: Place) -> pc.Expression:
    batch, seq = place
    return (pc.field("batch") > batch) | ((pc.field("batch") == batch) & (pc.field("seq") > seq))


def _range(after_batch: int, upto_batch: int) -> pc.Expression:
    return (pc.field("batch") > after_batch) & (pc.field("batch") <= upto_batch)
