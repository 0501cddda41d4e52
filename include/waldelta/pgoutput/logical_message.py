"""Logical messages (pg_logical_emit_message) and Origin messages."""

from __future__ import annotations

from dataclasses import dataclass

from waldelta.pgoutput.wire import Reader

_TRANSACTIONAL = 1


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """What pg_logical_emit_message wrote; a non-transactional one stands even when its transaction is rolled back."""

    lsn: int
    is_transactional: bool
    prefix: str
    content: bytes


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a transaction was first committed, when it came here by replication."""

    commit_lsn: int
    name: str


def read_logical_message(data: bytes, *, streamed: bool = False) -> LogicalMessage:
    """Read a Message message; ``streamed`` as in read_relation()."""
    reader = Reader(data, "Message", "M")
    if streamed:
        reader.integer(4, "xid")
    flags = reader.integer(1, "flags")
    if flags & ~_TRANSACTIONAL:
        raise reader.error("flags", reader.position - 1, f"unknown flags {flags:#x}")
    lsn, prefix = reader.integer(8, "lsn"), reader.text("prefix")
    content = reader.content("content")
    reader.finish()
    return LogicalMessage(lsn, bool(flags & _TRANSACTIONAL), prefix, content)


def read_origin(data: bytes) -> Origin:
    """Read an Origin message."""
    reader = Reader(data, "Origin", "O")
    found = Origin(reader.integer(8, "commit_lsn"), reader.text("name"))
    reader.finish()
    return found
