"""Control messages: where transactions begin, pause and end.

They are streamed (protocol version 2), prepared (3) or parallel (4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from waldelta.errors import DecodeError
from waldelta.pgoutput.byte_readers import MessageReader
from waldelta.pgoutput.commit_time import unix_us

# Messages that decide which rows count, and when. Begin and Commit aren't among them, because plain
# rows count anyway.
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
CONTROL_KINDS = tuple(CONTROL_NAMES)


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
    return _read(data, kind, CONTROL_NAMES[kind])


def begun_at(data: bytes) -> int | None:
    """Return the commit or prepare time from a transaction's first message, in microseconds since
    1970.

    None for any other message.
    """
    if (kind := data[:1].decode("latin-1")) not in _FIELDS:
        return None
    at = read_begin(data).at_us
    return at if kind == "B" else at or None


def read_begin(data: bytes) -> Control:
    """Read the first message of a transaction that isn't streamed: Begin, or Begin Prepare."""
    return _read(data, "B", "Begin") if data[:1] == b"B" else read_control(data)


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
_ABORT_BYTES, _PARALLEL_ABORT = 9, {"abort_lsn": "lsn", "abort_ts": "at_us"}


def _read(data: bytes, kind: str, name: str) -> Control:
    reader, fields = MessageReader(data, name, kind), _FIELDS[kind]
    if kind == "A" and len(data) > _ABORT_BYTES:
        fields = fields | _PARALLEL_ABORT
    values = {ours: _value(reader, field) for field, ours in fields.items()}
    values.pop("", None)
    reader.finish()
    return Control(kind, **values)


def _value(reader: MessageReader, field: str) -> Any:
    """Return a field's value; the end of its name says how it is encoded."""
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
