"""A range of landed batches in commit order."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from waldelta.arrow import Ints
from waldelta.errors import DecodeError
from waldelta.lake.ledger import TableState
from waldelta.pgoutput import Relation, Segments, read_relation, read_truncate
from waldelta.pgoutput.commit_time import shown


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
        """Return the messages of one kind, each with its position in commit order."""
        chosen = pc.equal(self.timeline["kind"], kind)
        rows = self.timeline.filter(chosen).to_pylist()
        return list(zip(rows, self.places[chosen.to_numpy()].tolist(), strict=True))

    def has_truncates(self) -> bool:
        """Return whether any TRUNCATE in the range counts."""
        return any(place >= 0 for _, place in self.of_kind("T"))

    @cached_property
    def relations(self) -> list[tuple[Relation, int]]:
        """The decoded Relation messages, each with its position in commit order, read once for all
        targets.

        A message that can't be decoded fails only the table that it is about.
        """
        found = []
        for row, place in self.of_kind("R"):
            with suppress(DecodeError):
                found.append(
                    (read_relation(row["data"], streamed=row["streamed_xid"] is not None), place)
                )
        return found


def place_columns(rows: pa.Table | pa.RecordBatch) -> tuple[Ints, Ints, Ints]:
    """Return batch, number and stream xid (-1: none) of messages."""
    batch, seq = (
        np.asarray(rows[name].to_numpy(zero_copy_only=False), np.int64) for name in ("batch", "seq")
    )
    streamed = pc.fill_null(rows["streamed_xid"], -1).to_numpy(zero_copy_only=False)
    return batch, seq, np.asarray(streamed, np.int64)


def commits(changes: pa.RecordBatch, segments: Segments) -> tuple[pa.Array, pa.Array]:
    """Return the commit position and the displayed commit time of changes.

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
    """Return the position of the last TRUNCATE of each relation that the target's copy doesn't
    reflect.

    Only transactions (xid8) from ``since_xid`` on are included. TRUNCATEs that don't count are left
    out: of transactions that are prepared and undecided, or rolled back, and of earlier batches
    that are in the timeline for another transaction.
    """
    found: dict[int, int] = {}
    for row, place in stream.of_kind("T"):
        if place < 0 or row["xid8"] < since_xid or snapshot.sees(np.array([row["xid8"]])).all():
            continue
        truncated = read_truncate(row["data"], streamed=row["streamed_xid"] is not None)
        for oid in set(truncated) & set(state.relation_ids):
            found[oid] = max(place, found.get(oid, place))
    return found


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
        """Return whether each transaction id is visible, as ``pg_visible_in_snapshot`` does."""
        visible: NDArray[np.bool_] = xid8 < self.xmax
        if self.running:
            visible &= ~np.isin(xid8, np.array(self.running, np.int64))
        return visible
