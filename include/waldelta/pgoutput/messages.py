"""The messages besides those of rows: where transactions begin, pause and end; relations; and what
pg_logical_emit_message wrote.

Transactions are streamed from protocol version 2 on, prepared from 3, parallel from 4.

A message that isn't decoded has its bytes, and the slot function's columns.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Self

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
from waldelta.pgoutput.commit_time import unix_us
from waldelta.pgoutput.message_kinds import BY_LETTER, CONTROL_KINDS, STREAM_ABORT, MessageKind
from waldelta.quantities import counted


@dataclass(frozen=True, slots=True)
class Control:
    """A control message, with the fields that its kind has.

    ``xid`` is the top-level transaction's, 32 bits wide. ``subxid`` is the subtransaction of a
    Stream Abort (equal to ``xid`` when the whole transaction was rolled back). ``lsn`` is the
    commit's or prepare's position, ``end_lsn`` its end, ``at_us`` its time in microseconds since
    1970.
    """

    kind: str
    xid: int = 0
    subxid: int = 0
    is_first: bool = False
    lsn: int = 0
    end_lsn: int = 0
    at_us: int = 0
    gid: str = ""


def read_control(data: bytes) -> Control:
    """Read a message of CONTROL_KINDS; raises DecodeError for any other or malformed message."""
    kind = chr(data[0]) if data else ""
    if kind not in CONTROL_KINDS:
        raise DecodeError("control", "kind", 0, f"{kind!r} is none of {', '.join(CONTROL_KINDS)}")
    return _read(data, BY_LETTER[kind])


def begun_at(data: bytes) -> int | None:
    """Returns the commit or prepare time from a transaction's first message, in microseconds since
    1970.

    None for any other message.
    """
    if (kind := data[:1].decode("latin-1")) not in _FIELDS:
        return None
    at = read_begin(data).at_us
    return at if kind == "B" else at or None


def read_begin(data: bytes) -> Control:
    """Read the first message of a transaction that isn't streamed: Begin, or Begin Prepare."""
    return _read(data, BY_LETTER["B"]) if data[:1] == b"B" else read_control(data)


# The fields of each kind in their order, and where their values are in a Control; "" nowhere: flags
# aren't used, and a Rollback Prepared repeats the time of the Prepare.
_PREPARED = {"lsn": "lsn", "end_lsn": "end_lsn", "ts": "at_us", "xid": "xid", "gid": "gid"}
_COMMIT = {"flags": "", "commit_lsn": "lsn", "end_lsn": "end_lsn", "commit_ts": "at_us"}
_ROLLBACK = {"flags": "", "prepare_end_lsn": "lsn", "end_lsn": "end_lsn", "prepare_ts": ""}
_FIELDS: dict[str, dict[str, str]] = {
    "B": {"final_lsn": "lsn", "commit_ts": "at_us", "xid": "xid"},
    "S": {"xid": "xid", "first_segment": "is_first"},
    "E": {},
    "A": {"xid": "xid", "subxid": "subxid"},
    "c": {"xid": "xid", **_COMMIT},
    "b": _PREPARED,
    **{kind: {"flags": "", **_PREPARED} for kind in "PpK"},
    "r": {**_ROLLBACK, "rollback_ts": "at_us", "xid": "xid", "gid": "gid"},
}
# Of a Stream Abort only with streaming 'parallel' (protocol version 4).
_PARALLEL_ABORT = {"abort_lsn": "lsn", "abort_ts": "at_us"}


def _read(data: bytes, kind: MessageKind) -> Control:
    reader, fields = MessageReader(data, kind.name, kind.letter), _FIELDS[kind.letter]
    if kind.code == STREAM_ABORT and len(data) > kind.least_bytes:
        fields = fields | _PARALLEL_ABORT
    values = {ours: _value(reader, field) for field, ours in fields.items()}
    values.pop("", None)
    reader.finish()
    return Control(kind.letter, **values)


def _value(reader: MessageReader, field: str) -> Any:
    """Returns a field's value; the end of its name says how it is encoded."""
    if field == "gid":
        return reader.text(field)
    if field.endswith("xid"):
        return reader.integer(4, field)
    if field.endswith("lsn"):
        return reader.integer(8, field)
    if field.endswith("ts"):
        return int(unix_us(np.array(reader.integer(8, field, signed=True))))
    value = reader.integer(1, field)
    if field == "flags" and value:
        raise reader.error(field, reader.position - 1, f"unknown flags {value:#x}")
    if value > 1:
        raise reader.error(field, reader.position - 1, f"neither 0 nor 1 but {value}")
    return bool(value)


REPLICA_IDENTITIES = frozenset("dnfi")
_KEY_FLAG = 1
_CASCADE, _RESTART_IDENTITY = 1, 2


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A published column; ``is_key``: it is part of the replica identity."""

    name: str
    type_oid: int
    typmod: int
    is_key: bool


@dataclass(frozen=True, slots=True)
class Relation:
    """One version of a table's shape; ``replica_identity`` is pg_class.relreplident."""

    relation_id: int
    schema: str
    name: str
    replica_identity: str
    columns: tuple[RelationColumn, ...]


def read_relation(data: bytes, *, streamed: bool = False) -> Relation:
    """Read a Relation message; ``streamed`` as in MessageReader."""
    # https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html
    reader = MessageReader(data, "Relation", "R", streamed=streamed)
    relation_id = reader.integer(4, "relation_id")
    # An empty namespace stands for pg_catalog.
    schema, name = reader.text("schema") or "pg_catalog", reader.text("name")
    identity = chr(reader.integer(1, "replica_identity"))
    if identity not in REPLICA_IDENTITIES:
        raise reader.error("replica_identity", reader.position - 1, f"unknown setting {identity!r}")
    count = reader.integer(2, "column_count")
    columns = tuple(_read_column(reader, f"columns[{k}]") for k in range(count))
    reader.finish()
    return Relation(relation_id, schema, name, identity, columns)


def _read_column(reader: MessageReader, field: str) -> RelationColumn:
    flags = reader.integer(1, f"{field}.flags")
    name = reader.text(f"{field}.name")
    type_oid = reader.integer(4, f"{field}.type_oid")
    typmod = reader.integer(4, f"{field}.typmod", signed=True)
    return RelationColumn(name, type_oid, typmod, bool(flags & _KEY_FLAG))


def read_truncate(data: bytes, *, streamed: bool = False) -> tuple[int, ...]:
    """Returns the relations that a Truncate message names; ``streamed`` as in MessageReader."""
    reader = MessageReader(data, "Truncate", "T", streamed=streamed)
    count = reader.integer(4, "relation_count")
    flags = reader.integer(1, "flags")
    if flags & ~(_CASCADE | _RESTART_IDENTITY):
        raise reader.error("flags", reader.position - 1, f"unknown flags {flags:#x}")
    # Checked before the loop: a flipped byte may claim four billion relations.
    if count * 4 != len(data) - reader.position:
        claimed = counted(count, "relation doesn't", "relations don't")
        raise reader.error("relation_count", 1, f"{claimed} fit the message's length")
    return tuple(reader.integer(4, f"relation_ids[{k}]") for k in range(count))


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


# The prefix of the kind of a message that landed without being read. No reader requests such a
# kind.
MARK = "!"
# A longer message is stored with its beginning only until it lands, which stores all of it.
MOST_MESSAGE_BYTES = 1 << 20
ID_LETTERS = 16


@dataclass(frozen=True, slots=True)
class UnreadMessage:
    """A message that can't be decoded; ``xid`` has 32 bits.

    People name it by ``id``, which is the same in every call that returns it, and after it has
    landed. ``batch`` and ``seq`` are its position in the change log, None before it has landed.
    ``streamed``: whether it is between Stream Start and Stop, where an xid follows the first byte;
    None where that isn't known.
    """

    id: str
    lsn: int
    xid: int
    raw: bytes
    batch: int | None = None
    seq: int | None = None
    streamed: bool | None = None

    @classmethod
    def of(cls, lsn: int, xid: int, raw: bytes, streamed: bool | None = None) -> Self:
        """Create a complete message that hasn't landed."""
        return cls(message_id(lsn, xid, raw), lsn, xid, raw, streamed=streamed)

    @property
    def kind(self) -> str:
        """The message's first byte as a letter; empty for an empty message."""
        return self.raw[:1].decode("latin-1")

    def landed(self, batch: int, seq: int) -> Self:
        """Returns the message with its position in the change log."""
        return replace(self, batch=batch, seq=seq)

    def shortened(self) -> Self:
        """Returns the message with at most the first MOST_MESSAGE_BYTES of its bytes."""
        return replace(self, raw=self.raw[:MOST_MESSAGE_BYTES])


def message_id(lsn: int, xid: int, raw: bytes) -> str:
    """Returns the ``id`` of a complete message."""
    return hashlib.sha256(b"%d %d " % (lsn, xid) + raw).hexdigest()[:ID_LETTERS]
