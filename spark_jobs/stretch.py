"""Stretch: a range of landed batches as the driver reads it, once for all the targets that have it before them."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from waldelta.change_log import ChangeLog, Stream, Volume
from waldelta.ledger import TableState
from waldelta.visibility import Snapshot

# Up to this much is read into the driver and decoded there; Spark's tasks take what is more.
SMALL_ROWS = 100_000
SMALL_BYTES = 32 << 20


class Stretch:
    """What lies in the change log between two batches (after the first, up to and with the second)."""

    def __init__(self, change_log: ChangeLog, batches: tuple[int, int], messages: int) -> None:
        self.change_log, self.batches, self._messages = change_log, batches, messages

    @cached_property
    def stream(self) -> Stream:
        """Its transactions in commit order, and what its relations looked like."""
        return self.change_log.stream(*self.batches)

    @cached_property
    def _rows(self) -> pa.Table | None:
        """All row messages, or None when they are too many to be read here."""
        if self._messages > SMALL_ROWS:
            return None
        return self.change_log.rows(self.stream, SMALL_BYTES)

    def volume(self, state: TableState) -> Volume:
        """How much of it waits for one target."""
        snapshot = Snapshot.parse(state.snapshot)
        if (rows := self.rows_of(state)) is None:
            return self.change_log.volume(self.stream, state.relation_ids, snapshot)
        unseen = ~snapshot.sees(rows["xid8"].to_numpy())
        return Volume(int(unseen.sum()), bool(np.any(rows["moves"].to_numpy()[unseen])))

    def rows_of(self, state: TableState) -> pa.Table | None:
        """One target's row messages, when all of them are few enough to be read here."""
        if self._rows is None:
            return None
        return self._rows.filter(pc.is_in(self._rows["relation_id"], value_set=pa.array(state.relation_ids)))


class Stretches:
    """The stretches of one step; targets with the same batches before them share one."""

    def __init__(self, change_log: ChangeLog, sizes: dict[int, int]) -> None:
        self.change_log, self._sizes = change_log, sizes
        self._read: dict[tuple[int, int], Stretch] = {}

    def between(self, after: int, upto: int) -> Stretch:
        """What lies after one batch, up to and with another."""
        if (after, upto) not in self._read:
            messages = sum(size for batch, size in self._sizes.items() if after < batch <= upto)
            self._read = {(after, upto): Stretch(self.change_log, (after, upto), messages)}
        return self._read[after, upto]
