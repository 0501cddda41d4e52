"""Writes pgoutput messages, as PostgreSQL's proto.c does; the tests' counterpart of the decoder."""

import struct

import pyarrow as pa

UNCHANGED = object()  # a TOASTed value that wasn't sent


class Binary(bytes):
    """A value sent in binary format."""


EPOCH_US = 946_684_800_000_000


def begin(final_lsn: int, commit_ts_us: int, xid: int) -> bytes:
    """``commit_ts_us`` counts from 1970."""
    return b"B" + struct.pack("!qqI", final_lsn, commit_ts_us - EPOCH_US, xid)


def commit(commit_lsn: int, end_lsn: int, commit_ts_us: int, flags: int = 0) -> bytes:
    return b"C" + struct.pack("!Bqqq", flags, commit_lsn, end_lsn, commit_ts_us - EPOCH_US)


def origin(lsn: int, name: str) -> bytes:
    return b"O" + struct.pack("!q", lsn) + name.encode() + b"\0"


def relation(relation_id, schema, name, columns, identity="d", xid=None) -> bytes:
    """``columns`` are (name, type oid, typmod, is_key)."""
    head = (
        b"R"
        + _xid(xid)
        + struct.pack("!I", relation_id)
        + schema.encode()
        + b"\0"
        + name.encode()
        + b"\0"
    )
    body = b"".join(
        struct.pack("!B", is_key) + column.encode() + b"\0" + struct.pack("!Ii", oid, typmod)
        for column, oid, typmod, is_key in columns
    )
    return head + identity.encode() + struct.pack("!H", len(columns)) + body


def type_(oid: int, schema: str, name: str, xid=None) -> bytes:
    return (
        b"Y" + _xid(xid) + struct.pack("!I", oid) + schema.encode() + b"\0" + name.encode() + b"\0"
    )


def tuple_data(values) -> bytes:
    return struct.pack("!H", len(values)) + b"".join(map(_value, values))


def insert(relation_id: int, new, xid=None) -> bytes:
    return b"I" + _xid(xid) + struct.pack("!I", relation_id) + b"N" + tuple_data(new)


def update(relation_id: int, new, key=None, old=None, xid=None) -> bytes:
    before = (
        b"K" + tuple_data(key)
        if key is not None
        else b"O" + tuple_data(old)
        if old is not None
        else b""
    )
    return b"U" + _xid(xid) + struct.pack("!I", relation_id) + before + b"N" + tuple_data(new)


def delete(relation_id: int, key=None, old=None, xid=None) -> bytes:
    before = b"K" + tuple_data(key) if key is not None else b"O" + tuple_data(old)
    return b"D" + _xid(xid) + struct.pack("!I", relation_id) + before


def truncate(relation_ids, cascade=False, restart_identity=False, xid=None) -> bytes:
    flags = cascade | restart_identity << 1
    return (
        b"T"
        + _xid(xid)
        + struct.pack(f"!IB{len(relation_ids)}I", len(relation_ids), flags, *relation_ids)
    )


def message(lsn: int, prefix: str, content: bytes, transactional: bool = True, xid=None) -> bytes:
    head = b"M" + _xid(xid) + struct.pack("!Bq", transactional, lsn)
    return head + prefix.encode() + b"\0" + struct.pack("!I", len(content)) + content


def messages(*given: bytes, large: bool = False) -> pa.Array:
    """The messages as the array that a slot function's column arrives in."""
    return pa.array(given, pa.large_binary() if large else pa.binary())


def _xid(xid) -> bytes:
    return b"" if xid is None else struct.pack("!I", xid)


def _value(value) -> bytes:
    if value is None:
        return b"n"
    if value is UNCHANGED:
        return b"u"
    raw = value.encode() if isinstance(value, str) else bytes(value)
    return (b"b" if isinstance(value, Binary) else b"t") + struct.pack("!I", len(raw)) + raw


def stream_start(xid: int, first: bool = True) -> bytes:
    return b"S" + struct.pack("!IB", xid, first)


def stream_stop() -> bytes:
    return b"E"


def stream_commit(xid: int, commit_lsn: int, end_lsn: int, commit_ts_us: int) -> bytes:
    return b"c" + struct.pack("!IBqqq", xid, 0, commit_lsn, end_lsn, commit_ts_us - EPOCH_US)


def stream_abort(
    xid: int, subxid: int, abort_lsn: int | None = None, abort_ts_us: int = EPOCH_US
) -> bytes:
    """With ``abort_lsn`` as protocol version 4 sends it."""
    more = b"" if abort_lsn is None else struct.pack("!qq", abort_lsn, abort_ts_us - EPOCH_US)
    return b"A" + struct.pack("!II", xid, subxid) + more


def begin_prepare(lsn: int, end_lsn: int, ts_us: int, xid: int, gid: str) -> bytes:
    return b"b" + _prepared(lsn, end_lsn, ts_us, xid, gid)


def prepare(lsn: int, end_lsn: int, ts_us: int, xid: int, gid: str) -> bytes:
    return b"P\0" + _prepared(lsn, end_lsn, ts_us, xid, gid)


def stream_prepare(lsn: int, end_lsn: int, ts_us: int, xid: int, gid: str) -> bytes:
    return b"p\0" + _prepared(lsn, end_lsn, ts_us, xid, gid)


def commit_prepared(lsn: int, end_lsn: int, ts_us: int, xid: int, gid: str) -> bytes:
    return b"K\0" + _prepared(lsn, end_lsn, ts_us, xid, gid)


def rollback_prepared(
    prepare_end_lsn: int, end_lsn: int, prepare_ts_us: int, ts_us: int, xid: int, gid: str
) -> bytes:
    times = (prepare_ts_us - EPOCH_US, ts_us - EPOCH_US)
    return (
        b"r\0" + struct.pack("!qqqqI", prepare_end_lsn, end_lsn, *times, xid) + gid.encode() + b"\0"
    )


def _prepared(lsn: int, end_lsn: int, ts_us: int, xid: int, gid: str) -> bytes:
    return struct.pack("!qqqI", lsn, end_lsn, ts_us - EPOCH_US, xid) + gid.encode() + b"\0"
