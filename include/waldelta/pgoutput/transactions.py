"""Decides from control messages which messages of the change log count, and in which order.

This step between landing and decoding is pure, so it is tested as tables of cases. Plain
transactions are complete in the log, in commit order. A streamed one comes in chunks between other
messages, and counts only when its Stream Commit is in the *same* batch: every later call streams it
again from its beginning. A prepared one counts at its Commit Prepared, which may come batches
later. So the log is divided into *segments* in commit order; a row's *place* is its number in that
order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from waldelta.arrow import Ints
from waldelta.errors import DecodeError
from waldelta.pgoutput.message_kinds import name_of
from waldelta.pgoutput.messages import Control

# A message's position in the whole stream: its batch, then its number within the batch.
SEQ_BITS = 40
XID_BITS = 32
LAST_SEQ = (1 << SEQ_BITS) - 1
# The rows of Segments._table.
_FIRST, _LAST, _BASE, _LSN, _TIME = range(5)


def order_of(batch: int, seq: int) -> int:
    """Returns the position of a message in the stream of all batches, as it was landed."""
    return (batch << SEQ_BITS) | seq


@dataclass(frozen=True, slots=True)
class Landmark:
    """A control message with its position in the change log; ``xid8`` is the top-level
    transaction.
    """

    batch: int
    seq: int
    xid8: int
    control: Control


@dataclass(frozen=True, slots=True)
class Segment:
    """Messages ``first`` to ``last`` of a batch that count.

    In a chunk only streamed messages count, elsewhere only the others. ``commit_lsn`` and
    ``commit_ts_us`` are from the deciding message; -1 where each row has its own.
    """

    batch: int
    first: int
    last: int
    is_chunk: bool = False
    xid8: int = -1
    commit_lsn: int = -1
    commit_ts_us: int = -1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A transaction prepared in ``batch``.

    ``decided_in`` is the batch that committed it or rolled it back, or None.
    """

    gid: str
    xid8: int
    batch: int
    decided_in: int | None = None


@dataclass(frozen=True)
class Segments:
    """The segments of a batch range, in commit order.

    The range begins after the first batch and includes the second. ``base`` is the place of each
    segment's first message. ``voided`` are subtransactions that were rolled back, as batch and xid
    in one number. ``missing`` are transactions committed in the range whose Prepare wasn't among
    the given messages. ``skipped`` are messages that an operator decided to skip, as ranges of
    positions in the log.
    """

    after: int
    upto: int
    parts: tuple[Segment, ...] = ()
    base: tuple[int, ...] = ()
    voided: frozenset[int] = frozenset()
    missing: tuple[Prepared, ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()

    @property
    def is_plain(self) -> bool:
        """Whether everything counts, in the order of the log."""
        return not self.parts and not self.skipped

    @property
    def older(self) -> tuple[Segment, ...]:
        """Segments in batches before the range: transactions prepared there and committed in it."""
        return tuple(s for s in self.parts if s.batch <= self.after)

    def places(self, batch: Ints, seq: Ints, streamed_xid: Ints) -> Ints:
        """Returns the place of each message in commit order; -1 for messages that don't count.

        ``streamed_xid`` is -1 outside chunks.
        """
        key = (batch << SEQ_BITS) | seq
        if self.is_plain:
            return key
        if self.parts:
            at = self.find(batch, seq, streamed_xid)
            place: Ints = self._table[_BASE, at] + key - self._table[_FIRST, at]
            place[at < 0] = -1
        else:
            place = key.copy()
        if self.voided:
            is_voided = np.isin((batch << XID_BITS) | streamed_xid, sorted(self.voided))
            place[is_voided & (streamed_xid >= 0)] = -1
        for first, last in self.skipped:
            place[(key >= first) & (key <= last)] = -1
        return place

    def is_voided(self, batch: int, streamed_xid: int) -> bool:
        """Returns whether a subtransaction of a batch was rolled back."""
        return (batch << XID_BITS) | streamed_xid in self.voided

    def find(self, batch: Ints, seq: Ints, streamed_xid: Ints) -> Ints:
        """Returns the number of each message's segment, or -1.

        Subtransactions that were rolled back are included.
        """
        key = (batch << SEQ_BITS) | seq
        segments = np.full(len(key), -1, np.int64)
        for is_chunk in (False, True):
            rows = (streamed_xid >= 0) == is_chunk
            numbers = self._by_place[is_chunk]
            if not len(numbers) or not rows.any():
                continue
            at = np.searchsorted(self._table[_FIRST, numbers], key[rows], side="right") - 1
            number = numbers[np.maximum(at, 0)]
            is_inside = (at >= 0) & (key[rows] <= self._table[_LAST, number])
            segments[rows] = np.where(is_inside, number, -1)
        return segments

    def commit_lsn(self, at: Ints, own: Ints) -> Ints:
        """Returns the commit position of messages in the segments ``at``; ``own`` is each row's
        own.
        """
        return self._decided_values(_LSN, at, own)

    def commit_ts_us(self, at: Ints, own: Ints) -> Ints:
        """Returns the commit time in microseconds since 1970, as commit_lsn() does."""
        return self._decided_values(_TIME, at, own)

    def _decided_values(self, column: int, at: Ints, lsn_or_time: Ints) -> Ints:
        is_known = (at >= 0) & (self._table[_LSN, at] >= 0)
        return np.where(is_known, self._table[column, at], lsn_or_time)

    @cached_property
    def _table(self) -> Ints:
        """For each segment its positions, place, and commit, each in a row of its own."""
        columns = [
            (
                order_of(s.batch, s.first),
                order_of(s.batch, s.last),
                base,
                s.commit_lsn,
                s.commit_ts_us,
            )
            for s, base in zip(self.parts, self.base, strict=True)
        ]
        return np.array(columns, np.int64).reshape(-1, 5).T

    @cached_property
    def _by_place(self) -> dict[bool, Ints]:
        """The numbers of chunks and of other segments, each in the order of the log."""
        chunks = np.array([s.is_chunk for s in self.parts], np.bool_)
        order = np.argsort(self._table[_FIRST], kind="stable")
        return {False: order[~chunks[order]], True: order[chunks[order]]}


def resolve(landmarks: Iterable[Landmark], after: int, upto: int) -> Segments:
    """Returns the segments of a range of batches.

    ``landmarks`` are the control messages of these batches and, if given, of earlier ones, which
    show what was prepared before.
    """
    by_batch: dict[int, list[Landmark]] = {}
    for landmark in landmarks:
        by_batch.setdefault(landmark.batch, []).append(landmark)
    resolver = _Resolver(after)
    # As soon as one batch has segments, every batch of the range gets them: messages outside all
    # segments don't count.
    for batch in sorted({*by_batch, *(range(after + 1, upto + 1) if by_batch else ())}):
        resolver.batch(batch, sorted(by_batch.get(batch, []), key=lambda landmark: landmark.seq))
    if not resolver.is_needed:
        return Segments(after, upto, missing=tuple(resolver.missing))
    parts, base = (
        tuple(s for s, _ in resolver.segments),
        tuple(place for _, place in resolver.segments),
    )
    return Segments(after, upto, parts, base, frozenset(resolver.voided), tuple(resolver.missing))


def prepared_transactions(landmarks: Iterable[Landmark]) -> list[Prepared]:
    """Returns every transaction that was prepared, with the batch that decided it.

    ``landmarks`` are in the log's order.
    """
    candidates: dict[tuple[str, int], Prepared] = {}
    decided: list[Prepared] = []
    for landmark in landmarks:
        control, name = landmark.control, (landmark.control.gid, landmark.xid8)
        if control.kind in ("P", "p"):
            candidates[name] = Prepared(*name, landmark.batch)
        elif control.kind in ("K", "r") and name in candidates:
            decided.append(Prepared(*name, candidates.pop(name).batch, landmark.batch))
    return [*decided, *candidates.values()]


@dataclass
class _Resolver:
    """Walks over the batches in order and notes the segments as their transactions are decided."""

    after: int
    segments: list[tuple[Segment, int]] = field(default_factory=list)
    voided: set[int] = field(default_factory=set)
    missing: list[Prepared] = field(default_factory=list)
    is_needed: bool = False
    _prepared: dict[tuple[str, int], list[Segment]] = field(default_factory=dict)
    _chunks: dict[int, list[Segment]] = field(default_factory=dict)
    _cursor: int = 0
    _plain_from: int = 0
    _opened_at: int = 0

    def batch(self, batch: int, landmarks: list[Landmark]) -> None:
        self._chunks, self._plain_from, self._cursor = {}, 0, order_of(batch, 0)
        self.is_needed |= bool(landmarks) and batch > self.after
        for landmark in landmarks:
            self._step(landmark)
        self._plain(batch, LAST_SEQ)

    def _step(self, landmark: Landmark) -> None:
        control, seq, kind = landmark.control, landmark.seq, landmark.control.kind
        if kind == "S":
            self._opened_at = seq
        elif kind == "E":
            chunk = Segment(landmark.batch, self._opened_at, seq, True, landmark.xid8)
            self._chunks.setdefault(landmark.xid8, []).append(chunk)
        elif kind == "A" and control.subxid != control.xid:
            self.voided.add((landmark.batch << XID_BITS) | control.subxid)
        elif kind == "A":
            self._chunks.pop(landmark.xid8, None)
        elif kind == "b":
            self._plain(landmark.batch, seq - 1)
            self._opened_at = seq
        elif kind == "P":
            prepared = Segment(landmark.batch, self._opened_at, seq, xid8=landmark.xid8)
            self._prepared[control.gid, landmark.xid8] = [prepared]
            self._plain_from = seq + 1
        elif kind == "p":
            self._prepared[control.gid, landmark.xid8] = self._chunks.pop(landmark.xid8, [])
        elif kind == "r":
            self._prepared.pop((control.gid, landmark.xid8), None)
        elif kind in ("c", "K"):
            self._commit(landmark)
        else:
            raise DecodeError(
                name_of(kind) or "control",
                "kind",
                0,
                f"{kind!r} of batch {landmark.batch}, message {seq}, isn't known to begin or end a"
                " transaction: update waldelta to the version that landed it",
            )

    def _commit(self, landmark: Landmark) -> None:
        """Handle a Stream Commit or Commit Prepared: earlier plain messages come first, then the
        transaction.
        """
        control = landmark.control
        if control.kind == "c":
            parts: list[Segment] | None = self._chunks.pop(landmark.xid8, [])
        else:
            parts = self._prepared.pop((control.gid, landmark.xid8), None)
        if parts is None and landmark.batch > self.after:
            self.missing.append(Prepared(control.gid, landmark.xid8, -1, landmark.batch))
        self._plain(landmark.batch, landmark.seq)
        for part in parts or ():
            decided = replace(part, commit_lsn=control.lsn, commit_ts_us=control.at_us)
            self._emit(decided, landmark.batch)

    def _plain(self, batch: int, last: int) -> None:
        if self._plain_from <= last:
            self._emit(Segment(batch, self._plain_from, last), batch)
        self._plain_from = last + 1

    def _emit(self, segment: Segment, decided_in: int) -> None:
        if decided_in > self.after:
            self.segments.append((segment, self._cursor))
        self._cursor += segment.last - segment.first + 1
