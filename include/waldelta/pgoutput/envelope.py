"""What the change log keeps beside every message's bytes: kind, relation, transaction, commit position and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
from numpy.typing import ArrayLike, NDArray

from waldelta.errors import DecodeError
from waldelta.pgoutput.wire import (
    EPOCH_SHIFT_US,
    TIMESTAMP_MAX_US,
    TIMESTAMP_MIN_US,
    ArrowArray,
    Bytes,
    Mask,
    Messages,
    Positions,
    arrow_buffer,
    i8,
    u1,
    u4,
)

_FIELDS: list[pa.Field[Any]] = [
    pa.field("seq", pa.int64()),
    pa.field("kind", pa.string()),
    pa.field("relation_id", pa.int64()),
    pa.field("xid8", pa.int64()),
    pa.field("lsn", pa.int64()),
    pa.field("commit_lsn", pa.int64()),
    pa.field("end_lsn", pa.int64()),
    pa.field("commit_ts", pa.timestamp("us", "UTC")),
    pa.field("data", pa.binary()),
]
ENVELOPE_SCHEMA = pa.schema(_FIELDS)

# First bytes by the protocol version that brought them. Those of later versions will open and close chunks of
# streamed transactions beside B and C; until then they are refused, because their rows carry an xid in front.
KINDS = {1: "BCORYIUDTM", 2: "SEcA", 3: "bPKrp"}
_BEGIN, _COMMIT = ord("B"), ord("C")
_WITH_RELATION = b"RIUD"
_IN_TRANSACTION = b"CIUDT"
_NAMES = {"B": "Begin", "C": "Commit", "O": "Origin", "R": "Relation", "Y": "Type", "I": "Insert", "U": "Update",
          "D": "Delete", "T": "Truncate", "M": "Message"}  # fmt: skip
# Bytes a message has at least; Begin and Commit have exactly these.
_SIZES = {"B": 21, "C": 26, "O": 10, "R": 9, "Y": 7, "I": 8, "U": 8, "D": 8, "T": 6, "M": 15}


@dataclass(frozen=True, slots=True)
class _Transaction:
    """The Begin message that the rows of the next record batch still belong to."""

    commit_lsn: int
    commit_ts_us: int


class Envelope:
    """Adds the envelope to the record batches of one peek, in their order.

    ``next_xid8`` is pg_snapshot_xmax(pg_current_snapshot()) taken about when the peek began: every xid decoded lies
    within 2**31 of it, on either side (a commit that waits for a synchronous standby is decoded, yet lies above it),
    which gives the 32-bit xids their epoch.
    """

    def __init__(self, next_xid8: int) -> None:
        self.next_xid8 = next_xid8
        self._next_seq = 0
        self._open: _Transaction | None = None

    def add(self, lsn: ArrowArray | ArrayLike, xid: ArrowArray | ArrayLike, data: ArrowArray) -> pa.RecordBatch:
        """One record batch of ENVELOPE_SCHEMA; ``lsn`` and ``xid`` are the slot function's, as integers.

        ``xid8`` is null where the server gives none (a message outside any transaction). Raises DecodeError for a
        message that isn't of protocol version 1, and for Begin and Commit messages that don't pair up.
        """
        messages = Messages(data, "slot")
        kind = self._kinds(messages)
        if not len(kind) == len(lsn) == len(xid):  # type: ignore[arg-type]
            raise ValueError("lsn, xid and data differ in length")
        commit_lsn, commit_ts, inside, end_lsn = self._commits(messages, kind)
        columns = [
            pa.array(np.arange(self._next_seq, self._next_seq + len(kind))),
            _kind_column(kind),
            _relation_ids(messages, kind),
            self._xid8(_integers(xid)),
            pa.array(_integers(lsn)),
            pa.array(commit_lsn, mask=~inside),
            pa.array(end_lsn, mask=kind != _COMMIT),
            pa.array(commit_ts, mask=~inside).cast(pa.timestamp("us", "UTC")),
            data.cast(pa.binary()),
        ]
        self._next_seq += len(kind)
        return pa.RecordBatch.from_arrays(columns, schema=ENVELOPE_SCHEMA)

    def _kinds(self, messages: Messages) -> Bytes:
        empty = messages.start == messages.end
        kind = u1(messages.bytes, messages.start)
        needed = np.zeros(256, np.int64)
        for letter, least in _SIZES.items():
            needed[ord(letter)] = least
        size = messages.end - messages.start
        unknown = empty | (needed[kind] == 0)
        if unknown.any():
            _refuse(messages, int(np.argmax(unknown)))
        exact = (kind == _BEGIN) | (kind == _COMMIT)
        wrong = (size < needed[kind]) | (exact & (size != needed[kind]))
        if wrong.any():
            row = int(np.argmax(wrong))
            detail = f"{size[row]} bytes long, {needed[kind[row]]} wanted"
            raise _error(messages, row, "length", 0, detail)
        return kind

    def _commits(self, messages: Messages, kind: Bytes) -> tuple[Positions, Positions, Mask, Positions]:
        """For every row its transaction's commit LSN and time, whether it has one, and a Commit's end LSN."""
        source, start = messages.bytes, messages.start
        begins, commits = np.flatnonzero(kind == _BEGIN), np.flatnonzero(kind == _COMMIT)
        # One place before the batch's own Begins stands for the transaction left open by the batch before.
        opened = self._open or _Transaction(0, 0)
        commit_lsns = np.concatenate([[opened.commit_lsn], i8(source, start[begins] + 1)])
        commit_times = np.concatenate([[opened.commit_ts_us], _unix_us(messages, begins, 9)])
        rows: Positions = np.arange(len(kind), dtype=np.int64)
        last_begin = _last(rows, kind == _BEGIN)
        ended_before = _last(rows, np.concatenate([[False], kind[:-1] == _COMMIT]) if len(kind) else kind == _COMMIT)
        which: Positions = np.asarray(np.searchsorted(begins, last_begin, side="right"))
        inside = (last_begin >= ended_before) & ((last_begin >= 0) | (self._open is not None))
        self._check_pairs(messages, kind, inside, commit_lsns[which])
        end_lsn = np.zeros(len(kind), np.int64)
        end_lsn[commits] = i8(source, start[commits] + 10)
        if len(kind):
            still_open = bool(inside[-1]) and kind[-1] != _COMMIT
            last = which[-1]
            self._open = _Transaction(int(commit_lsns[last]), int(commit_times[last])) if still_open else None
        return commit_lsns[which], commit_times[which], inside, end_lsn

    def _check_pairs(self, messages: Messages, kind: Bytes, inside: Mask, commit_lsn: Positions) -> None:
        outside = ~inside & np.isin(kind, np.frombuffer(_IN_TRANSACTION, np.uint8))
        if outside.any():
            raise _error(messages, int(np.argmax(outside)), "transaction", 0, "no Begin message before it")
        # A Begin must not find a transaction open: the row before it is inside one and isn't its Commit.
        before = np.concatenate([[self._open is not None], inside[:-1] & (kind[:-1] != _COMMIT)])[: len(kind)]
        nested = (kind == _BEGIN) & before
        if nested.any():
            raise _error(messages, int(np.argmax(nested)), "transaction", 0, "the one before it has no Commit message")
        commits = np.flatnonzero(kind == _COMMIT)
        differs = i8(messages.bytes, messages.start[commits] + 2) != commit_lsn[commits]
        if differs.any():
            row = int(commits[np.argmax(differs)])
            raise _error(messages, row, "commit_lsn", 2, "not the one that its Begin message announced")

    def _xid8(self, xid: Positions) -> ArrowArray:
        half, whole = 1 << 31, 1 << 32
        distance = (xid - (self.next_xid8 & (whole - 1)) + half) % whole - half
        return pa.array(self.next_xid8 + distance, mask=xid == 0)


def _last(rows: Positions, mask: NDArray[np.bool_]) -> Positions:
    """For each row the last row up to it where ``mask`` holds, or -1."""
    return np.maximum.accumulate(np.where(mask, rows, -1)) if len(rows) else rows


def _kind_column(kind: Bytes) -> ArrowArray:
    offsets = arrow_buffer(np.arange(len(kind) + 1, dtype=np.int32))
    return pa.Array.from_buffers(pa.string(), len(kind), [None, offsets, arrow_buffer(kind)])


def _relation_ids(messages: Messages, kind: Bytes) -> ArrowArray:
    without = ~np.isin(kind, np.frombuffer(_WITH_RELATION, np.uint8))
    return pa.array(u4(messages.bytes, messages.start + 1), mask=without)


def _unix_us(messages: Messages, rows: Positions, offset: int) -> Positions:
    """Timestamps of the messages ``rows`` as microseconds since 1970."""
    times = i8(messages.bytes, messages.start[rows] + offset)
    wrong = (times < TIMESTAMP_MIN_US) | (times > TIMESTAMP_MAX_US)
    if wrong.any():
        raise _error(messages, int(rows[np.argmax(wrong)]), "commit_ts", offset, "not a timestamp")
    return times + EPOCH_SHIFT_US


def _integers(values: ArrowArray | ArrayLike) -> Positions:
    if isinstance(values, pa.Array):
        return np.asarray(values.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False))
    return np.asarray(values).astype(np.int64)


def _refuse(messages: Messages, row: int) -> NoReturn:
    first = messages.at(row)[:1].decode("latin-1")
    later = next((v for v, kinds in KINDS.items() if first and v > 1 and first in kinds), None)
    detail = f"{first!r} belongs to protocol version {later}, 1 was asked for" if later else f"unknown kind {first!r}"
    raise messages.error(row, "kind", int(messages.start[row]), detail if first else "empty message")


def _error(messages: Messages, row: int, field: str, offset: int, detail: str) -> DecodeError:
    found = messages.error(row, field, int(messages.start[row]) + offset, detail)
    name = _NAMES[chr(messages.bytes[messages.start[row]])]
    return DecodeError(name, found.field, found.offset, found.detail)
