"""Control messages: where transactions begin, pause and end.

They are streamed (protocol version 2), prepared (3) or parallel (4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from waldelta.errors import DecodeError
from waldelta.pgoutput.byte_readers import MessageReader
from waldelta.pgoutput.commit_time import unix_us

# Messages that decide which rows count, and when. Begin and Commit aren't among them, because plain
# rows count anyway.
CONTROL_KINDS = ("S", "E", "A", "c", "b", "P", "p", "K", "r")
CONTROL_NAMES = {
    "S": "Stream Start",
    "E": "Stream Stop",
    "A": "Stream Abort",
    "c": "Stream Commit",
    "b": "Begin Prepare",
    "P": "Prepare",
    "p": "Stream Prepare",
    "K": "Commit Prepared",
    "r": "Rollback Prepared",
}


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
    if kind not in CONTROL_NAMES:
        raise DecodeError("control", "kind", 0, f"{kind!r} is none of {', '.join(CONTROL_KINDS)}")
    reader = MessageReader(data, CONTROL_NAMES[kind], kind)
    found = _READERS[kind](reader)
    reader.finish()
    return found


def begun_at(data: bytes) -> int | None:
    """Return the commit or prepare time from a transaction's first message, in microseconds since
    1970.

    None for any other message.
    """
    if data[:1] != b"B":
        return read_control(data).at_us or None if data and chr(data[0]) in CONTROL_NAMES else None
    return read_begin(data).at_us


def read_begin(data: bytes) -> Control:
    """Read the first message of a transaction that isn't streamed: Begin, or Begin Prepare."""
    if data[:1] != b"B":
        return read_control(data)
    reader = MessageReader(data, "Begin", "B")
    lsn, at = reader.integer(8, "final_lsn"), _time(reader, "commit_ts")
    xid = reader.integer(4, "xid")
    reader.finish()
    return Control("B", xid, lsn=lsn, at_us=at)


def _stream_start(reader: MessageReader) -> Control:
    xid, first = reader.integer(4, "xid"), reader.integer(1, "first_segment")
    if first > 1:
        raise reader.error("first_segment", reader.position - 1, f"neither 0 nor 1 but {first}")
    return Control("S", xid, is_first=bool(first))


def _stream_stop(_: MessageReader) -> Control:
    return Control("E")


def _stream_abort(reader: MessageReader) -> Control:
    xid, subxid = reader.integer(4, "xid"), reader.integer(4, "subxid")
    if reader.position == len(reader.data):
        return Control("A", xid, subxid)
    # Only with streaming 'parallel' (protocol version 4).
    return Control(
        "A", xid, subxid, lsn=reader.integer(8, "abort_lsn"), at_us=_time(reader, "abort_ts")
    )


def _stream_commit(reader: MessageReader) -> Control:
    xid = reader.integer(4, "xid")
    _no_flags(reader)
    lsn, end = reader.integer(8, "commit_lsn"), reader.integer(8, "end_lsn")
    return Control("c", xid, lsn=lsn, end_lsn=end, at_us=_time(reader, "commit_ts"))


def _prepared(kind: str, reader: MessageReader) -> Control:
    """Read a message about a prepared transaction; all but Begin Prepare have flags, none used."""
    if kind != "b":
        _no_flags(reader)
    is_rollback = kind == "r"  # It has the position and the time of Prepare, too.
    lsn = reader.integer(8, "prepare_end_lsn" if is_rollback else "lsn")
    end, at = reader.integer(8, "end_lsn"), _time(reader, "prepare_ts" if is_rollback else "ts")
    if is_rollback:
        at = _time(reader, "rollback_ts")
    return Control(
        kind, reader.integer(4, "xid"), lsn=lsn, end_lsn=end, at_us=at, gid=reader.text("gid")
    )


def _no_flags(reader: MessageReader) -> None:
    if flags := reader.integer(1, "flags"):
        raise reader.error("flags", reader.position - 1, f"unknown flags {flags:#x}")


def _time(reader: MessageReader, field: str) -> int:
    return int(unix_us(np.array(reader.integer(8, field, signed=True))))


_READERS: dict[str, Callable[[MessageReader], Control]] = {
    "S": _stream_start,
    "E": _stream_stop,
    "A": _stream_abort,
    "c": _stream_commit,
    **{kind: partial(_prepared, kind) for kind in "bPpKr"},
}
