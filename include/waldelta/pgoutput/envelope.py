"""The envelope of a message in the change log: kind, relation, transaction, commit position and
time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from waldelta.errors import DecodeError
from waldelta.lsn import Lsn
from waldelta.pgoutput.byte_readers import (
    ArrowArray,
    Bytes,
    Mask,
    Messages,
    Positions,
    arrow_buffer,
    i8,
    u1,
    u4,
    unsigned,
)
from waldelta.pgoutput.commit_time import unix_us
from waldelta.pgoutput.message_kinds import (
    ABORT_SIZES,
    BY_LETTER,
    KINDS,
    PARALLEL_VERSION,
    STREAM_ABORT,
    MessageKind,
    ScopeRole,
    name_of,
)
from waldelta.pgoutput.messages import MARK, UnreadMessage, message_id

_FIELDS: list[pa.Field[Any]] = [
    pa.field("seq", pa.int64()),
    pa.field("kind", pa.string()),
    pa.field("relation_id", pa.int64()),
    # The top-level transaction's xid.
    pa.field("xid8", pa.int64()),
    # The xid at the beginning of a message between Stream Start and Stop: that of its
    # (sub)transaction, 32 bits; null elsewhere.
    pa.field("streamed_xid", pa.int64()),
    pa.field("lsn", pa.int64()),
    # Null where it isn't known yet: in streamed and prepared transactions.
    pa.field("commit_lsn", pa.int64()),
    # Where the WAL of a transaction, or of a message outside any, ends: the slot may move to it.
    pa.field("end_lsn", pa.int64()),
    # Our code reads it as an integer (waldelta.pgoutput.commit_time), because not every value is a
    # calendar time.
    pa.field("commit_ts", pa.timestamp("us", "UTC")),
    pa.field("data", pa.binary()),
]
ENVELOPE_SCHEMA = pa.schema(_FIELDS)

# Only one message is discarded: a Stream Abort, between transactions, of a transaction of which
# this call has sent no chunk. It undoes changes that were never sent, so no row depends on it.
# PostgreSQL 18.0 to 18.4 send it in every protocol version, even with streaming off: when a
# transaction larger than logical_decoding_work_mem is rolled back, the reorder buffer marks its
# subtransactions as streamed, and pgoutput sends their abort. Any other unrequested message raises
# DecodeError.


def _table(is_included: Callable[[MessageKind], bool]) -> NDArray[np.bool_]:
    """Returns, for each first byte, whether it is one of some kinds."""
    table = np.zeros(256, np.bool_)
    table[[kind.code for kind in KINDS if is_included(kind)]] = True
    return table


_OPENS = _table(lambda kind: kind.role is ScopeRole.OPENS)
_CLOSES = _table(lambda kind: kind.role is ScopeRole.CLOSES)
_PAIR = np.zeros(256, np.uint8)
for _kind in KINDS:
    _PAIR[_kind.code] = ord(_kind.pair or "\0")
_IS_EXACT = _table(lambda kind: kind.is_exact)
_DESCRIBES = _table(lambda kind: kind.role is ScopeRole.DESCRIBES)
_INSIDE_ONLY = _table(lambda kind: kind.role in (ScopeRole.INSIDE, ScopeRole.CLOSES))
_OUTSIDE_ONLY = _table(lambda kind: kind.role is ScopeRole.OUTSIDE)
_WITH_RELATION = _table(lambda kind: kind.has_relation)
_WITH_XID = _table(lambda kind: kind.has_xid)
_BEGIN, _STREAM_START, _MESSAGE = (BY_LETTER[letter].code for letter in "BSM")
_END_AT = {kind.letter: kind.end_at for kind in KINDS if kind.end_at is not None}
_COMMIT_AT = {kind.code: kind.commit_at for kind in KINDS if kind.commit_at is not None}
# The commit position of a message that wasn't read.
_UNKNOWN = -1
_EMPTY = "?"  # Used in place of the first byte of an empty message.


@dataclass(frozen=True, slots=True)
class _Scope:
    """The opening message of the scope that rows of the next record batch still belong to."""

    kind: int
    commit_lsn: int
    commit_ts_us: int

    @property
    def is_guess(self) -> bool:
        """Whether its opening message wasn't read: then any closing message closes the scope."""
        return self.commit_lsn == _UNKNOWN


@dataclass(frozen=True, slots=True)
class _Scopes:
    """For every row: whether it is in a scope, the kind of the opening message, and its announced
    commit.
    """

    inside: Mask
    kind: Bytes
    commit_lsn: Positions
    commit_ts: Positions


class Envelope:
    """Adds the envelope to the record batches of one peek, in their order.

    ``next_xid8`` is pg_snapshot_xmax(pg_current_snapshot()), read around the beginning of the peek.
    Every decoded xid is within 2**31 of it, on either side, which determines the epoch of the
    32-bit xids. (A commit that waits for a synchronous standby is decoded, but is above it.)
    ``version`` is the requested protocol version, 1 to 4. ``skipped`` are messages that land
    without being read, by position and id (message_id()). ``given`` counts the messages so
    far, including discarded ones.
    """

    def __init__(
        self, next_xid8: int, version: int = 1, skipped: Collection[tuple[int, str]] = ()
    ) -> None:
        self.next_xid8, self.version = next_xid8, version
        self.given = 0
        self._skipped_ids = {message for _, message in skipped}
        self._skipped_lsns = np.array(sorted({lsn for lsn, _ in skipped}), np.int64)
        self._next_seq = 0
        # 32-bit xids of the transactions of which this call has sent chunks.
        self._streamed: set[int] = set()
        self._open: _Scope | None = None
        # The first of the messages that were just skipped. It, or a later one, may have begun or
        # ended a transaction.
        self._unsettled: UnreadMessage | None = None
        self._last: UnreadMessage | None = None
        self._needed = np.zeros(256, np.int64)
        for kind in KINDS:
            if kind.version <= version or kind.code == STREAM_ABORT:
                self._needed[kind.code] = kind.least_bytes

    def add(
        self, lsn: ArrowArray | ArrayLike, xid: ArrowArray | ArrayLike, data: ArrowArray
    ) -> pa.RecordBatch:
        """Returns one record batch of ENVELOPE_SCHEMA.

        ``lsn`` and ``xid`` are those of the slot function, as integers. ``xid8`` is null where the
        server returns none (a message outside any transaction). A Stream Abort of a transaction
        that this call hasn't streamed is discarded. Raises DecodeError, with the message's position
        and length, for a message that isn't of the requested protocol version, and for transactions
        and chunks whose messages don't pair up. A skipped message lands with a marked kind.
        """
        lsns, xids = _integers(lsn), _integers(xid)
        if not len(lsns) == len(xids) == len(data):
            raise ValueError("lsn, xid and data differ in length")
        if not (rows := self._skipped_rows(lsns, xids, data)):
            return self._read(lsns, xids, data)
        # There are almost none, so the ranges between them are read as usual.
        batches, begin = [], 0
        for row in rows:
            part = slice(begin, row)
            message = UnreadMessage.of(int(lsns[row]), int(xids[row]), data[row].as_py())
            batches += [self._read(lsns[part], xids[part], data[part]), self._unread(message)]
            begin = row + 1
        return pa.concat_batches([*batches, self._read(lsns[begin:], xids[begin:], data[begin:])])

    def _skipped_rows(self, lsns: Positions, xids: Positions, data: ArrowArray) -> list[int]:
        """Returns the rows of the messages that must be skipped."""
        if not self._skipped_ids:
            return []
        return [
            row
            for row in np.flatnonzero(np.isin(lsns, self._skipped_lsns)).tolist()
            if message_id(int(lsns[row]), int(xids[row]), data[row].as_py()) in self._skipped_ids
        ]

    def _unread(self, message: UnreadMessage) -> pa.RecordBatch:
        """Returns the envelope of one message that isn't read.

        Its content isn't known; only its first letter and the slot function's columns are. It
        begins or ends a transaction as its letter says, unless later messages show otherwise.
        """
        letter, scope, raw = message.kind or _EMPTY, self._open, message.raw
        code = ord(letter)
        chunked = scope is not None and scope.kind == _STREAM_START
        in_front = chunked and bool(_WITH_XID[code])
        alone = letter == "M" and not chunked and raw[1:2] == b"\0"
        transaction = (
            scope if scope is not None and scope.kind == _BEGIN and not scope.is_guess else None
        )
        role = self._role(message)
        # It may end the transaction, whatever its letter: a message that ends a transaction is at
        # the end of its WAL.
        may_end = not _END_AT.keys().isdisjoint((role, letter)) or (
            scope is not None and not chunked and letter != "M"
        )
        # The server counts the rows of a Prepare's transaction as prepared ones, wherever that
        # message is.
        in_place = role == letter or (letter == "P" and self._needed[code] > 0)
        values = {
            "seq": self._next_seq,
            "kind": MARK + letter + ("" if in_place else role),
            "relation_id": unsigned(raw, 5 if in_front else 1) if _WITH_RELATION[code] else None,
            "xid8": self._xid8(np.array([0 if alone else message.xid], np.int64))[0].as_py(),
            "streamed_xid": unsigned(raw, 1) if in_front else None,
            "lsn": message.lsn,
            "commit_lsn": transaction.commit_lsn if transaction is not None else None,
            "end_lsn": message.lsn if alone or may_end else None,
            "commit_ts": transaction.commit_ts_us if transaction is not None else None,
            "data": raw,
        }
        if in_place and _OPENS[code]:
            self._guess(code, message)
        elif in_place and _CLOSES[code]:
            self._open = None
        self._unsettled = self._unsettled or message
        self._last = message
        self._next_seq += 1
        self.given += 1
        return pa.RecordBatch.from_pylist([values], schema=ENVELOPE_SCHEMA)

    def _role(self, message: UnreadMessage) -> str:
        """Returns the letter of the message's role: its own, or else one that begins or ends a
        transaction.
        """
        letter, scope = message.kind or _EMPTY, self._open
        code = ord(letter)
        is_known = self._needed[code] > 0
        if scope is None:
            # A second end of the same transaction doesn't begin one.
            is_twice = letter in "CP" and self._last is not None and self._last.xid == message.xid
            return letter if is_known and (is_twice or not _INSIDE_ONLY[code]) else "B"
        closer = int(_PAIR[scope.kind])
        misplaced = (
            _OPENS[code]
            or _OUTSIDE_ONLY[code]
            or (_CLOSES[code] and code != closer and not scope.is_guess)
        )
        return letter if is_known and not misplaced else chr(closer)

    def _guess(self, kind: int, message: UnreadMessage) -> None:
        """Open the scope that an unread message seems to begin."""
        self._open = _Scope(kind, _UNKNOWN, 0)
        if kind == _STREAM_START:
            self._streamed.add(message.xid)

    def _resolve_unread(self, kind: Bytes) -> None:
        """Find out from later messages whether unread messages have begun or ended a
        transaction.
        """
        message, self._unsettled = self._unsettled, None
        if message is None:
            return
        closer, opener = _first(_CLOSES[kind]), _first(_OPENS[kind] | _OUTSIDE_ONLY[kind])
        if self._open is not None and opener == 0:
            self._open = None
        elif closer < opener:
            if self._open is None or self._open.is_guess:
                self._guess(int(_PAIR[kind[closer]]), message)
        elif self._open is None and (_INSIDE_ONLY[kind[0]] or _DESCRIBES[kind[0]]):
            # A chunk exceeds the visible messages more often than any other transaction does.
            is_chunk = self.version > 1 and len(message.raw) <= self._needed[_STREAM_START]
            self._guess(_STREAM_START if is_chunk else _BEGIN, message)

    def end(self) -> None:
        """Check at the end of the call that no transaction is open; raises DecodeError.

        An incomplete transaction would be sent again. The error names the last message, which
        should have closed the transaction. If that message is skipped, it closes the transaction.
        """
        if self._open is None or self._unsettled is not None:
            return
        error = DecodeError(
            BY_LETTER[chr(self._open.kind)].name,
            "transaction",
            0,
            f"no message closes it: message {self.given - 1} is the last of this call; the slot"
            " keeps the transaction",
        )
        error.unread = self._last
        raise error

    def _read(self, lsn: Positions, xid: Positions, data: ArrowArray) -> pa.RecordBatch:
        messages, has = Messages(data, "slot"), np.zeros(256, np.bool_)
        has[u1(messages.bytes, messages.start)] = True
        part = _Part(messages, lsn, xid, self._next_seq, self.version == 1, has)
        kind = self._kinds(part)
        if len(kind):
            self._resolve_unread(kind)
            self._last = part.message(len(kind) - 1)
        scopes = self._scopes(part, kind)
        chunked = scopes.inside & (scopes.kind == _STREAM_START)
        if self.version > 1:
            _check_chunked_sizes(part, kind, chunked, self._needed)
        in_front = chunked & _WITH_XID[kind]
        commit_lsn, commit_ts, decided = _commits(part, kind, scopes)
        alone = _nontransactional_messages(part, kind, chunked)
        is_landed = self._landing_mask(part, kind)
        letters = [None, arrow_buffer(np.arange(len(kind) + 1, dtype=np.int32)), arrow_buffer(kind)]
        body = messages.start + 1 + (4 * in_front if in_front.any() else 0)
        columns = [
            pa.array(self._next_seq + np.cumsum(is_landed) - 1),
            pa.Array.from_buffers(pa.string(), len(kind), letters),
            pa.array(u4(messages.bytes, body), mask=~_WITH_RELATION[kind]),
            self._xid8(_top_xids(part, kind, xid, alone)),
            _streamed_xids(messages, in_front),
            pa.array(part.lsn),
            pa.array(commit_lsn, mask=~decided),
            _ends(part, kind, alone),
            pa.array(commit_ts, mask=~decided).cast(pa.timestamp("us", "UTC")),
            data.cast(pa.binary()),
        ]
        self._next_seq += int(is_landed.sum())
        self.given += len(kind)
        batch = pa.RecordBatch.from_arrays(columns, schema=ENVELOPE_SCHEMA)
        return batch if is_landed.all() else batch.filter(pa.array(is_landed))

    def _landing_mask(self, part: _Part, kind: Bytes) -> Mask:
        """Returns which messages land: all but Stream Aborts of transactions without a chunk."""
        is_landed = np.ones(len(kind), np.bool_)
        source, start = part.messages.bytes, part.messages.start
        if part.has[_STREAM_START]:
            self._streamed.update(u4(source, start[kind == _STREAM_START] + 1).tolist())
        if part.has[STREAM_ABORT]:
            aborts = np.flatnonzero(kind == STREAM_ABORT)
            is_landed[aborts] = [
                xid in self._streamed for xid in u4(source, start[aborts] + 1).tolist()
            ]
        return is_landed

    def _kinds(self, part: _Part) -> Bytes:
        messages = part.messages
        empty = messages.start == messages.end
        kind = u1(messages.bytes, messages.start)
        size, needed = messages.end - messages.start, self._needed[kind]
        unknown = empty | (needed == 0)
        if unknown.any():
            row = int(np.argmax(unknown))
            first = messages.at(row)[:1].decode("latin-1")
            detail = f"unknown kind {first!r}" if first else "empty message"
            if first in BY_LETTER:
                detail = (
                    f"{first!r} belongs to protocol version {BY_LETTER[first].version}, but version"
                    f" {self.version} was requested"
                )
            raise part.error(row, "kind", 0, detail)
        wrong = (size < needed) | (_IS_EXACT[kind] & (size != needed))
        if part.has[STREAM_ABORT]:
            sizes = ABORT_SIZES if self.version >= PARALLEL_VERSION else ABORT_SIZES[:1]
            wrong |= (kind == STREAM_ABORT) & ~np.isin(size, sizes)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise part.error(row, "length", 0, f"{size[row]} bytes long, {needed[row]} wanted")
        return kind

    def _scopes(self, part: _Part, kind: Bytes) -> _Scopes:
        """Returns every row's scope; the last row's scope is kept for the next record batch."""
        source, start = part.messages.bytes, part.messages.start
        openers = np.flatnonzero(_OPENS[kind])
        # The element before the batch's own openers is the scope that the previous batch left open.
        opened = self._open or _Scope(0, 0, 0)
        plain = kind[openers] == _BEGIN
        times = np.zeros(len(openers), np.int64)
        times[plain] = _unix_us(part, openers[plain], 9)
        kinds = np.concatenate([np.array([opened.kind], np.uint8), kind[openers]])
        commit_lsns = np.concatenate([[opened.commit_lsn], i8(source, start[openers] + 1)])
        commit_times = np.concatenate([[opened.commit_ts_us], times])
        rows: Positions = np.arange(len(kind), dtype=np.int64)
        last_opener = _last(rows, _OPENS[kind])
        closes = _CLOSES[kind]
        ended_before = _last(rows, np.concatenate([[False], closes[:-1]]) if len(kind) else closes)
        which: Positions = np.asarray(np.searchsorted(openers, last_opener, side="right"))
        inside = (last_opener >= ended_before) & ((last_opener >= 0) | (self._open is not None))
        scopes = _Scopes(inside, kinds[which], commit_lsns[which], commit_times[which])
        _check_pairs(part, kind, scopes, begins_open=self._open is not None)
        if len(kind):
            still_open = bool(inside[-1]) and not closes[-1]
            last = which[-1]
            self._open = (
                _Scope(int(kinds[last]), int(commit_lsns[last]), int(commit_times[last]))
                if still_open
                else None
            )
        return scopes

    def _xid8(self, xid: Positions) -> ArrowArray:
        half, whole = 1 << 31, 1 << 32
        distance = (xid - (self.next_xid8 & (whole - 1)) + half) % whole - half
        return pa.array(self.next_xid8 + distance, mask=xid == 0)


@dataclass(frozen=True, slots=True)
class _Part:
    """One record batch of messages, with the positions that errors report."""

    messages: Messages
    lsn: Positions
    xid: Positions
    first_seq: int
    # Whether it can't have any chunk.
    is_plain: bool
    # For each byte, whether some message begins with it.
    has: Mask

    def message(self, row: int) -> UnreadMessage:
        """Returns one message unchanged."""
        lsn, xid, raw = int(self.lsn[row]), int(self.xid[row]), self.messages.at(row)
        return UnreadMessage.of(lsn, xid, raw, False if self.is_plain else None)

    def error(self, row: int, field: str, offset: int, detail: str) -> DecodeError:
        """Returns the error for one message, with its position in the stream."""
        cause = self.messages.error(row, field, int(self.messages.start[row]) + offset, detail)
        unread = self.message(row)
        error = DecodeError(
            name_of(unread.kind) or "slot",
            cause.field,
            cause.offset,
            f"{cause.detail}, message {self.first_seq + row} of this call, at {Lsn(unread.lsn)};"
            " the slot keeps it",
        )
        error.unread = unread
        return error


def _check_pairs(part: _Part, kind: Bytes, scopes: _Scopes, *, begins_open: bool) -> None:
    """Check that scopes are opened and closed in turn, each by its own pair of messages.

    Also checks that the messages inside have the right kinds.
    """
    inside, closes = scopes.inside, _CLOSES[kind]
    outside = ~inside & _INSIDE_ONLY[kind]
    if outside.any():
        raise part.error(int(np.argmax(outside)), "transaction", 0, "no Begin message before it")
    # An opening message must not follow a row that is in a scope and doesn't close it.
    was_open = np.concatenate([[begins_open], inside[:-1] & ~closes[:-1]])[: len(kind)]
    nested = (_OPENS[kind] & was_open) | (inside & _OUTSIDE_ONLY[kind])
    if nested.any():
        raise part.error(
            int(np.argmax(nested)), "transaction", 0, "the one before it has no Commit message"
        )
    crossed = closes & (_PAIR[scopes.kind] != kind) & (scopes.commit_lsn != _UNKNOWN)
    if crossed.any():
        row = int(np.argmax(crossed))
        opener = name_of(chr(scopes.kind[row])) or ""
        raise part.error(row, "transaction", 0, f"it closes what a {opener} message opened")
    ends = np.flatnonzero(closes & (scopes.kind != _STREAM_START))
    announced = scopes.commit_lsn[ends]
    differs = (i8(part.messages.bytes, part.messages.start[ends] + 2) != announced) & (
        announced != _UNKNOWN
    )
    if differs.any():
        row = int(ends[np.argmax(differs)])
        raise part.error(row, "commit_lsn", 2, "not the one that its Begin message announced")


def _check_chunked_sizes(part: _Part, kind: Bytes, chunked: Mask, needed: Positions) -> None:
    """Check sizes between Stream Start and Stop, where messages have an extra xid."""
    short = chunked & _WITH_XID[kind] & (part.messages.end - part.messages.start < needed[kind] + 4)
    if short.any():
        row = int(np.argmax(short))
        raise part.error(
            row,
            "length",
            0,
            f"too short for its kind with an xid: {needed[kind[row]] + 4} bytes wanted",
        )


def _commits(part: _Part, kind: Bytes, scopes: _Scopes) -> tuple[Positions, Positions, Mask]:
    """Returns commit position and time of every row, and for which rows they are known."""
    lsn, at = scopes.commit_lsn, scopes.commit_ts
    has_commit = scopes.inside & (scopes.kind == _BEGIN) & (lsn != _UNKNOWN)
    for code, (lsn_at, ts_at) in _COMMIT_AT.items():
        if part.has[code]:
            rows = np.flatnonzero(kind == code)
            lsn[rows] = i8(part.messages.bytes, part.messages.start[rows] + lsn_at)
            at[rows] = _unix_us(part, rows, ts_at)
            has_commit[rows] = True
    return lsn, at, has_commit


def _ends(part: _Part, kind: Bytes, alone: Positions) -> ArrowArray:
    """Returns where the WAL of each transaction, or of a message outside any, ends."""
    source, start = part.messages.bytes, part.messages.start
    ends, has_end = np.zeros(len(kind), np.int64), np.zeros(len(kind), np.bool_)
    for letter, offset in _END_AT.items():
        if part.has[ord(letter)]:
            rows = np.flatnonzero(kind == ord(letter))
            ends[rows] = i8(source, start[rows] + offset)
            has_end[rows] = True
    if len(alone):
        ends[alone] = i8(source, start[alone] + 2)
        has_end[alone] = True
    return pa.array(ends, mask=~has_end)


def _nontransactional_messages(part: _Part, kind: Bytes, chunked: Mask) -> Positions:
    """Returns logical messages that aren't transactional.

    They count whatever happens to the transaction that wrote them.
    """
    if not part.has[_MESSAGE]:
        return np.zeros(0, np.int64)
    logical = np.flatnonzero((kind == _MESSAGE) & ~chunked)
    return np.asarray(logical[u1(part.messages.bytes, part.messages.start[logical] + 1) == 0])


def _top_xids(part: _Part, kind: Bytes, xid: Positions, alone: Positions) -> Positions:
    """Returns the top-level transactions.

    The slot function returns a Stream Abort with its subtransaction's xid, but the message has the
    top-level one. A message that isn't transactional gets the xid of the (sub)transaction in which
    it was written, to which it doesn't belong.
    """
    if len(alone):
        xid = xid.copy()
        xid[alone] = 0
    if part.has[STREAM_ABORT]:
        aborts = np.flatnonzero(kind == STREAM_ABORT)
        messages, xid = part.messages, xid.copy()
        xid[aborts] = u4(messages.bytes, messages.start[aborts] + 1)
    return xid


def _streamed_xids(messages: Messages, in_front: Mask) -> ArrowArray:
    if not in_front.any():
        return pa.nulls(len(in_front), pa.int64())
    return pa.array(u4(messages.bytes, messages.start + 1), mask=~in_front)


def _first(mask: Mask) -> int:
    """Returns the first row where ``mask`` is True; the number of rows when there is none."""
    return int(np.argmax(mask)) if mask.any() else len(mask)


def _last(rows: Positions, mask: NDArray[np.bool_]) -> Positions:
    """Returns, for each row, the last row up to it where ``mask`` is True, or -1."""
    return np.maximum.accumulate(np.where(mask, rows, -1)) if len(rows) else rows


def _unix_us(part: _Part, rows: Positions, offset: int) -> Positions:
    """Returns timestamps of the messages ``rows`` as microseconds since 1970.

    No value is refused, because an error would stop the slot.
    """
    return unix_us(i8(part.messages.bytes, part.messages.start[rows] + offset))


def _integers(values: ArrowArray | ArrayLike) -> Positions:
    if isinstance(values, pa.Array):
        return np.asarray(values.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False))
    return np.asarray(values).astype(np.int64)
