"""A range of landed batches as the driver reads it, once for all targets that apply it next."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from waldelta.lake.changelog.change_log import ChangeLog
from waldelta.lake.changelog.row_messages import (
    Piece,
    RowMessages,
    Snapshot,
    Stream,
    Volume,
    all_row_messages,
    row_messages,
)
from waldelta.lake.driver_limits import MOST_DRIVER_MESSAGE_BYTES, MOST_DRIVER_ROWS
from waldelta.lake.ledger import TableState

# One task collapses about this many bytes of messages, and has them in memory three times. Above
# that, it pays to read the whole range to count each table's bytes.
BYTES_PER_COLLAPSE = 128 << 20


class BatchNumbers(NamedTuple):
    """The batches that were landed after one of them, up to and including another."""

    after: int
    upto: int

    @property
    def is_empty(self) -> bool:
        """Whether there is no batch among them."""
        return self.upto <= self.after


SplitUp = Callable[[Stream], RowMessages | None]


class BatchRange:
    """The messages in the change log after one batch, up to and including another.

    ``split`` writes the row messages of a range by relation where that pays, with many messages for
    many targets; elsewhere it returns None.
    """

    def __init__(
        self,
        change_log: ChangeLog,
        batches: BatchNumbers,
        messages: int,
        split: SplitUp = lambda _: None,
    ) -> None:
        self.change_log, self.batches, self._messages = change_log, batches, messages
        self._split_up = split
        self._read: tuple[list[int], pa.Table | None] | None = None

    @cached_property
    def stream(self) -> Stream:
        """The range in commit order, and its relation, type, truncate and control messages."""
        return self.change_log.stream(*self.batches)

    @cached_property
    def split(self) -> RowMessages | None:
        """The range's row messages by relation; None where they are read from the change log."""
        return None if self._rows is not None else self._split_up(self.stream)

    @cached_property
    def _rows(self) -> pa.Table | None:
        """The row messages that count; None when they are too much for the driver."""
        if self._messages > self._most_rows:
            return None
        return self.change_log.rows(self.stream, MOST_DRIVER_MESSAGE_BYTES)

    @property
    def is_in_memory(self) -> bool:
        """Whether all row messages are in memory, by relation; threads may share the range then."""
        return self._rows is not None and self._by_relation is not None

    @property
    def _most_rows(self) -> int:
        return 0 if self.change_log.lake.on_spark else MOST_DRIVER_ROWS

    def volume(self, state: TableState) -> Volume:
        """Returns how much of the range waits for one target."""
        rows = self.rows_of(state)
        return Volume(*self._waiting(state), self._bytes_of(state) if rows is None else rows.nbytes)

    def count(self, state: TableState) -> int:
        """Returns how many of its row messages wait for one target."""
        return self._waiting(state)[0]

    def _waiting(self, state: TableState) -> tuple[int, bool]:
        snapshot = Snapshot.parse(state.snapshot)
        if (rows := self.rows_of(state)) is None:
            return (self.split or self.change_log).unseen(self.stream, state.relation_ids, snapshot)
        unseen = ~snapshot.sees(rows["xid8"].to_numpy())
        return int(unseen.sum()), bool(np.any(rows["moves"].to_numpy()[unseen]))

    def _bytes_of(self, state: TableState) -> int:
        if self.split is not None:
            return sum(piece.bytes for piece in self._pieces_of(self.split, state))
        if self._bytes <= BYTES_PER_COLLAPSE:
            return self._bytes
        return sum(self._bytes_by_relation.get(oid, 0) for oid in state.relation_ids)

    @cached_property
    def _bytes(self) -> int:
        """The most bytes of its row messages before compression, from the files' footers."""
        pieces = self.change_log.pieces(all_row_messages(self.stream.segments))
        return sum(piece.bytes for piece in pieces)

    @cached_property
    def _bytes_by_relation(self) -> dict[int, int]:
        return self.change_log.bytes_by_relation(self.stream)

    def rows_of(self, state: TableState) -> pa.Table | None:
        """Returns one target's row messages, when they are few enough to be read in the driver."""
        if self._rows is None:
            if self.split is None:
                return None
            ids, rows = [*state.relation_ids], None
            # Cached, because the same target reads it several times in a row.
            if self._read is None or self._read[0] != ids:
                size = sum(piece.rows for piece in self._pieces_of(self.split, state))
                if size <= self._most_rows:
                    rows = self.split.rows(self.stream, MOST_DRIVER_MESSAGE_BYTES, ids)
                self._read = ids, rows
            return self._read[1]
        parts = [self._by_relation[oid] for oid in state.relation_ids if oid in self._by_relation]
        return pa.concat_tables(parts) if parts else self._rows.slice(0, 0)

    def _pieces_of(self, split: RowMessages, state: TableState) -> list[Piece]:
        return split.pieces(
            row_messages(self.stream.segments, state.relation_ids, Snapshot.parse(state.snapshot))
        )

    @cached_property
    def _by_relation(self) -> dict[int, pa.Table]:
        return {} if self._rows is None else split_by_relation(self._rows)


def split_by_relation(rows: pa.Table) -> dict[int, pa.Table]:
    """Returns row messages by relation, each in the order of the log.

    They are sorted once, so that many relations cost no more than one.
    """
    if not len(rows):
        return {}
    relation_id = rows["relation_id"].to_numpy()
    order = np.argsort(relation_id, kind="stable")
    sorted_rows, sorted_ids = rows.take(pa.array(order)), relation_id[order]
    starts = np.flatnonzero(np.concatenate([[True], sorted_ids[1:] != sorted_ids[:-1]]))
    ends = [*starts[1:], len(order)]
    return {
        int(sorted_ids[a]): sorted_rows.slice(a, b - a) for a, b in zip(starts, ends, strict=True)
    }


class BatchRanges:
    """The batch ranges of one apply batch; targets at the same batch share a range."""

    def __init__(
        self, change_log: ChangeLog, sizes: Mapping[int, int], split: SplitUp = lambda _: None
    ) -> None:
        self.change_log, self._sizes, self._split = change_log, sizes, split
        self._read: dict[BatchNumbers, BatchRange] = {}

    def of(self, batches: BatchNumbers) -> BatchRange:
        """Returns the range of these batches."""
        after, upto = batches
        if (batch_range := self._read.get(batches)) is None:
            messages = sum(size for batch, size in self._sizes.items() if after < batch <= upto)
            batch_range = BatchRange(self.change_log, batches, messages, self._split)
            self._read = {batches: batch_range}
        return batch_range
