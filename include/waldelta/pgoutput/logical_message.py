"""Logical messages (pg_logical_emit_message)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from waldelta.errors import DecodeError
from waldelta.pgoutput.byte_readers import (
    ArrowArray,
    Mask,
    MessageReader,
    Messages,
    Positions,
    copy_out,
    i8,
    u1,
    u4,
)

_TRANSACTIONAL = 1


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message of pg_logical_emit_message.

    A non-transactional one counts even when its transaction is rolled back.
    """

    lsn: int
    is_transactional: bool
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class LogicalMessages:
    """Many logical messages, column by column; ``prefix`` is text, ``content`` bytes."""

    lsn: Positions
    is_transactional: Mask
    prefix: ArrowArray
    content: ArrowArray


def read_logical_message(data: bytes, *, streamed: bool = False) -> LogicalMessage:
    """Read a Message message; ``streamed`` as in MessageReader."""
    reader = MessageReader(data, "Message", "M", streamed=streamed)
    flags = reader.integer(1, "flags")
    if flags & ~_TRANSACTIONAL:
        raise reader.error("flags", reader.position - 1, f"unknown flags {flags:#x}")
    lsn = reader.integer(8, "lsn", signed=True)
    if lsn < 0:
        raise reader.error("lsn", reader.position - 8, "not a WAL position")
    prefix = reader.text("prefix")
    content = reader.content("content")
    reader.finish()
    return LogicalMessage(lsn, bool(flags & _TRANSACTIONAL), prefix, content)


def decode_logical_messages(data: ArrowArray, streamed: Mask | None = None) -> LogicalMessages:
    """Read many Message messages at once; raises DecodeError for the first malformed one.

    ``streamed`` says which of them are between Stream Start and Stop, where an xid follows the
    first byte; None: none.
    """
    messages = Messages(data, "Message")
    source, start, end = messages.bytes, messages.start, messages.end
    in_front = (
        np.zeros(len(messages), np.int64) if streamed is None else 4 * streamed.astype(np.int64)
    )
    flags_at = start + 1 + in_front
    flags, lsn, prefix_at = u1(source, flags_at), i8(source, flags_at + 1), flags_at + 9
    zeros = np.append(np.flatnonzero(source == 0), len(source))
    prefix_end = zeros[np.minimum(np.searchsorted(zeros, prefix_at), len(zeros) - 1)]
    content_at = prefix_end + 5
    wrong = (u1(source, start) != ord("M")) | (flags > _TRANSACTIONAL) | (lsn < 0)
    wrong |= content_at + u4(source, prefix_end + 1) != end
    if wrong.any():
        row = int(np.argmax(wrong))
        read_logical_message(messages.at(row), streamed=bool(in_front[row]))
        raise messages.error(row, "content", int(prefix_at[row]), "malformed")
    everywhere = np.ones(len(messages), np.bool_)
    prefix = copy_out(messages, prefix_at, prefix_end, everywhere)
    try:
        text = prefix.cast(pa.string())
    except pa.ArrowInvalid:
        raise DecodeError("Message", "prefix", 10, "not UTF-8") from None
    content = copy_out(messages, content_at, end, everywhere)
    return LogicalMessages(lsn, flags == _TRANSACTIONAL, text, content)
