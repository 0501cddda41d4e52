"""Reads a slot through the SQL functions, as Arrow record batches with their envelope.

A peek leaves the slot where it is, so it can be repeated. What it returns is landed before anything
is consumed, and how it was requested is stored with it.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from waldelta.arrow import storage
from waldelta.config import Publication, Source
from waldelta.errors import (
    PeekTimeout,
    PeekTooLarge,
    PrivilegeMissing,
    PublicationGone,
    SlotInUse,
    SourceDiskFull,
    SourceError,
    SourceUnreachable,
    StandbyAway,
)
from waldelta.failpoints import fault_point
from waldelta.lsn import Lsn
from waldelta.pgoutput.envelope import ENVELOPE_SCHEMA, Envelope
from waldelta.pgoutput.message_kinds import CODES, TIMELINE_KINDS, protocol_version
from waldelta.pgoutput.messages import MARK
from waldelta.postgres import (
    NAME_BYTES,
    check_settings,
    ended_by_replay,
    limit_batches,
    record_batches,
    wait_until_none,
)
from waldelta.postgres.connection import adbc_driver
from waldelta.postgres.sessions import ARROW_SESSIONS, PLAIN_SESSIONS
from waldelta.server_errors import sqlstate as codes
from waldelta.server_errors.sqlstate import ServerError

log = logging.getLogger(__name__)

OLD_BACKEND_TIMEOUT_S = 30

LANDING_SCHEMA = pa.schema(
    [
        *ENVELOPE_SCHEMA,
        # True for TIMELINE_KINDS and for messages that aren't read: so few that whole row groups
        # without any are skipped.
        pa.field("timeline", pa.bool_()),
        # True for an update whose key changed (it includes its old key).
        pa.field("moves", pa.bool_()),
    ]
)


# Every call streams an open transaction again from its beginning, so this condition leaves out the
# messages of a transaction that has a Stream Start but no Stream Commit or Stream Prepare. A
# transaction that was prepared earlier may be streamed again, too. Commit Prepared and Rollback
# Prepared end it, so these are always returned. The filter saves transfer only: the server collects
# all rows first. pg_logical_slot_peek_binary_changes() returns the subtransaction's xid with a
# Stream Abort message, whose first field is the top-level xid.
_IS_COMPLETE = """
case when get_byte(data, 0) = {stream_abort}
    then ('x' || encode(substr(data, 2, 4), 'hex'))::bit(32)::bigint::text::xid
    else xid
end not in (
    select xid from changes where get_byte(data, 0) = {stream_start}
    except
    select xid from changes where get_byte(data, 0) in ({stream_commit}, {stream_prepare})
) or get_byte(data, 0) in ({commit_prepared}, {rollback_prepared})
"""
_COMPLETE = """
with changes as materialized ({changes})
select lsn, xid, data from changes where {is_complete}
"""
# pg_logical_slot_peek_binary_changes() returns a streamed logical message with the top-level xid,
# even if a subtransaction wrote it. So the rows don't show whether a savepoint's rollback removed
# the message. The query therefore reads the same WAL a second time without streaming: PostgreSQL
# then returns only messages that weren't rolled back, each with its own lsn. A message with flags 0
# isn't transactional: it counts although its transaction is still open.
_COMPLETE_WITH_MESSAGES = """
with changes as materialized ({changes}),
     messages as materialized (
         select lsn, get_byte(data, 1) = 0 as alone
         from ({whole}) as whole
         where get_byte(data, 0) = {message}
     )
select lsn, xid, data
from changes
where (
    {is_complete}
    or (get_byte(data, 0) = {message} and lsn in (select lsn from messages where alone))
) and (get_byte(data, 0) <> {message} or lsn in (select lsn from messages))
"""


@dataclass(frozen=True, slots=True)
class PeekBound:
    """The bounds of one peek: WAL position, number of changes (None: any), and time.

    ``from_lsn`` is the slot's position, for the record. ``skipped`` are messages that land without
    being read, by position and id.
    """

    upto_lsn: Lsn
    upto_nchanges: int | None
    statement_timeout_s: float
    next_xid8: int
    from_lsn: Lsn | None = None
    skipped: frozenset[tuple[int, str]] = frozenset()


@dataclass(slots=True)
class PeekTimes:
    """Durations of a peek in seconds.

    ``total_s`` is what the statement timeout counts; ``server_s`` excludes our processing of the
    answer. ``messages`` counts all messages that the server returned: a limit on their number
    includes discarded ones.
    """

    server_s: float = 0.0
    total_s: float = 0.0
    messages: int = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count a block that waits for the server."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.server_s += time.monotonic() - began


def most_messages(source: Source, max_changes: int) -> int | None:
    """Returns how many messages one call may return; no limit while open transactions are streamed.

    A call that ends within a streamed transaction would end at the same place each time. The server
    also counts Begin, Commit and Relation. Without extra room for them, a backlog of one full batch
    would need a second call, and all that goes with it, for its last hundredth.
    """
    return max_changes + max_changes // 4 if source.options.streaming == "off" else None


def plugin_options(source: Source) -> list[str]:
    """Returns pgoutput's options as the SQL functions take them: name, value, name, value …

    Source: the chapter on logical streaming replication parameters.
    """
    names = ",".join('"' + p.name.replace('"', '""') + '"' for p in source.publications)
    choices = source.options
    options = {"proto_version": str(protocol_version(choices)), "publication_names": names}
    if choices.streaming != "off":
        options["streaming"] = choices.streaming
    flags = {
        "two_phase": choices.two_phase,
        "messages": choices.messages,
        "binary": choices.binary,
    }
    options |= {name: "true" for name, is_on in flags.items() if is_on}
    if choices.origin != "any":
        options["origin"] = choices.origin
    return [text for pair in options.items() for text in pair]


def reader_name(slot: str) -> str:
    """Returns the application_name of the backend that reads a slot for us."""
    # Slots with a long common prefix need a hash to differ.
    name = f"waldelta read {slot}"
    return name if len(name) <= NAME_BYTES else f"{name[: NAME_BYTES - 9]}_{_hash_of(slot)}"


def short_name(slot: str) -> str:
    """Returns the slot's name; for a long one, its beginning and a hash that makes it unique."""
    return slot if len(slot) <= 50 else f"{slot[:41]}_{_hash_of(slot)}"


def _hash_of(slot: str) -> str:
    return hashlib.sha256(slot.encode()).hexdigest()[:8]


def name_of_copy(slot: str) -> str:
    """Returns the name of the temporary slot copy that keeps a way back while the slot is
    consumed.
    """
    return f"{short_name(slot)}_before_get"


def peek(
    conninfo: str, source: Source, bound: PeekBound, times: PeekTimes | None = None
) -> Iterator[pa.RecordBatch]:
    """Read the slot up to ``bound`` and yield record batches of LANDING_SCHEMA; ``times`` gets
    durations.

    This runs in a Spark task. A retry of that task first ends the backend that its predecessor
    left, because a backend whose client died keeps the slot for seconds. Raises SlotInUse when
    another process uses the slot, PeekTimeout when the read window was too large for the statement
    timeout, and PeekTooLarge or SourceDiskFull when it was too large for the server's disk or
    memory.
    """
    with PLAIN_SESSIONS.session(conninfo, f"waldelta fence {source.slot}") as fence:
        _terminate_backends(fence, source.slot, _READERS)
    statement, times = _statement(source, bound), times or PeekTimes()
    envelope = Envelope(bound.next_xid8, protocol_version(source.options), bound.skipped)
    began = time.monotonic()
    try:
        with (
            ARROW_SESSIONS.session(conninfo, reader_name(source.slot)) as connection,
            connection.cursor() as cursor,
        ):
            limit_batches(cursor)
            cursor.execute(f"set statement_timeout = {int(bound.statement_timeout_s * 1000)}")
            began = time.monotonic()
            with times.waiting():
                cursor.execute(statement)
                batches = record_batches(cursor)
                batch = next(batches, None)
            while batch is not None:
                yield _add_envelope(envelope, batch)
                fault_point("land.reading")
                with times.waiting():
                    batch = next(batches, None)
            envelope.end()
            times.total_s = time.monotonic() - began
            times.messages = envelope.given
            check_settings(conninfo, connection)
    except adbc_driver().Error as err:
        timed_out = time.monotonic() - began >= bound.statement_timeout_s
        raise _read_error(source.slot, ServerError.of(err), timed_out) from None


def _statement(source: Source, bound: PeekBound) -> str:
    """Returns the query of a peek; with streaming, it leaves out messages that don't count."""
    columns = "lsn, xid, data"
    changes = call("peek", source, bound.upto_lsn, bound.upto_nchanges, columns)
    if source.options.streaming == "off":
        return changes
    is_complete = _IS_COMPLETE.format(**CODES)
    if not source.options.messages:
        return _COMPLETE.format(changes=changes, is_complete=is_complete)
    plain = call("peek", without_streaming(source), bound.upto_lsn, bound.upto_nchanges, columns)
    return _COMPLETE_WITH_MESSAGES.format(
        changes=changes, whole=plain, is_complete=is_complete, message=CODES["message"]
    )


def call(verb: str, source: Source, upto_lsn: Lsn, upto_nchanges: int | None, select: str) -> str:
    """Returns a call of ``pg_logical_slot_{peek,get}_binary_changes`` as SQL; values are quoted
    literals.

    ``without_streaming(source)`` instead of a source keeps open transactions out of the answer.
    """
    template = sql.SQL(
        "select {select} from pg_catalog.{function}({slot}, {lsn}::pg_lsn, {nchanges}, {options})"
    )
    return template.format(
        select=sql.SQL(select),
        function=sql.Identifier(f"pg_logical_slot_{verb}_binary_changes"),
        slot=sql.Literal(source.slot),
        lsn=sql.Literal(str(upto_lsn)),
        nchanges=sql.Literal(upto_nchanges),
        options=sql.SQL(", ").join(map(sql.Literal, plugin_options(source))),
    ).as_string()


def without_streaming(source: Source) -> Source:
    """Returns the source without streaming: each transaction comes once, in one piece, when
    complete.
    """
    return with_options(source, streaming="off")


def with_options(source: Source, **options: object) -> Source:
    """Returns the source with these options of pgoutput."""
    return source.model_copy(update={"options": source.options.model_copy(update=options)})


def end_old_backends(connection: psycopg.Connection[Any], slot: str) -> None:
    """End all backends of dead runs of this pipeline that hold the slot or its copy.

    They would continue without a client. The caller must hold the slot's lock and not use the slot
    yet.
    """
    _terminate_backends(connection, slot, f"{_READERS} union {_HOLDERS}")


def _terminate_backends(connection: psycopg.Connection[Any], slot: str, query: str) -> None:
    """Terminate the backends whose pids a query returns, and wait until they have ended.

    A backend of another role can't be terminated here; the slot's check reports it by pid.
    """
    params = {"reader": reader_name(slot), "slot": slot, "copy": name_of_copy(slot)}

    def find_old_backends() -> list[int]:
        return [pid for (pid,) in connection.execute(query.encode(), params)]

    ended = set()
    for pid in find_old_backends():
        with suppress(psycopg.errors.InsufficientPrivilege):
            connection.execute("select pg_terminate_backend(%s)", (pid,))
            log.warning("slot=%s ended the backend %d, which an earlier run left behind", slot, pid)
            ended.add(pid)
    if ended:
        wait_until_none(lambda: ended.intersection(find_old_backends()), OLD_BACKEND_TIMEOUT_S)


_READERS = (
    "select pid from pg_stat_activity where application_name = %(reader)s and datname ="
    " current_database()"
)
# Our backends have names made of their purpose and the slot, cut off where PostgreSQL does.
_HOLDERS = """
select a.pid
from pg_replication_slots s
join pg_stat_activity a on a.pid = s.active_pid
where s.slot_name in (%(slot)s, %(copy)s)
  and a.datname = current_database()
  and a.pid <> pg_backend_pid()
  and a.application_name = left('waldelta ' || split_part(a.application_name, ' ',
    2) || ' ' || %(slot)s, 63)
"""


def _add_envelope(envelope: Envelope, batch: pa.RecordBatch) -> pa.RecordBatch:
    lsn, xid, messages = (storage(column) for column in batch.columns)
    enveloped = envelope.add(_big_endian(lsn, ">u8"), _big_endian(xid, ">u4"), messages)
    kind, data = enveloped.column("kind"), enveloped.column("data")
    timeline = pc.or_(
        pc.is_in(kind, value_set=pa.array(TIMELINE_KINDS)), pc.starts_with(kind, MARK)
    )
    old_key = pc.equal(pc.binary_slice(data, 5, 6), b"K")
    streamed = pc.is_valid(enveloped.column("streamed_xid"))
    if pc.any(streamed).as_py():
        old_key = pc.if_else(streamed, pc.equal(pc.binary_slice(data, 9, 10), b"K"), old_key)
    moves = pc.and_(pc.equal(kind, "U"), old_key)
    return pa.RecordBatch.from_arrays([*enveloped.columns, timeline, moves], schema=LANDING_SCHEMA)


def _big_endian(column: pa.Array, dtype: str) -> pa.Array:
    """Convert pg_lsn and xid, which ADBC returns as wire bytes of a fixed width, to integers."""
    width = np.dtype(dtype).itemsize
    _, offsets, values = column.buffers()
    if values is None or len(column) == 0:
        return pa.array([], pa.int64())
    first = int(np.frombuffer(offsets, np.int32)[column.offset])
    numbers = np.frombuffer(values, dtype, count=len(column), offset=first)
    if len(values) < first + width * len(column):
        raise SourceError(
            "the driver returned WAL positions of an unexpected width: pin adbc-driver-postgresql"
        )
    return pa.array(numbers.astype(np.int64))


# A set-returning function stores its answer in temporary files once it exceeds work_mem.
NO_ROOM = (
    psycopg.errors.DiskFull,
    psycopg.errors.OutOfMemory,
    psycopg.errors.ConfigurationLimitExceeded,
)


def _reader_error(slot: str, error: ServerError) -> SourceUnreachable | StandbyAway | None:
    """Returns the error for a reader that was ended from outside; the next one may succeed."""
    if error.is_one_of(codes.SERIALIZATION_FAILURE):
        return ended_by_replay(f"reading slot {slot!r}", error)
    if error.is_one_of(codes.LOCK_NOT_AVAILABLE, codes.QUERY_CANCELED):
        return SourceUnreachable(
            f"the statement that read slot {slot!r} was ended ({error.shown}): run again"
        )
    if error.is_lost_connection:
        return SourceUnreachable(
            f"the server ended the connection that read slot {slot!r}, or the network did"
            f" ({error.shown}): run again"
        )
    return None


def _lacks_room(slot: str, error: ServerError) -> PeekTooLarge | SourceDiskFull | None:
    """Returns the error for an answer for which there is no room.

    A single message that is too large, whatever memory the server has, has another code.
    """
    if error.is_one_of(codes.DISK_FULL):
        return SourceDiskFull(
            f"a disk of the server is full, through reading slot {slot!r} or other use"
            f" ({error.shown}): free space on the disk of its temporary files (temp_tablespaces)"
            " or, if the message names pg_replslot, of its data directory; or raise"
            " logical_decoding_work_mem"
        )
    remedies = {
        codes.CONFIGURATION_LIMIT_EXCEEDED: (
            "raise temp_file_limit for the role (alter role … set temp_file_limit)"
        ),
        codes.OUT_OF_MEMORY: (
            "lower batch.wal_window_mb, or find out what uses the server's memory"
        ),
    }
    if error.sqlstate not in remedies:
        return None
    return PeekTooLarge(
        f"the server has no room for the result of reading slot {slot!r} ({error.shown}):"
        f" {remedies[error.sqlstate]}"
    )


def _read_error(slot: str, error: ServerError, timed_out: bool) -> SourceError:
    if timed_out and error.sqlstate is None:
        # A driver that loses the code (see record_batches) must not stop the slot.
        error = replace(error, sqlstate=codes.QUERY_CANCELED)
    return peek_error(slot, error, timed_out=timed_out)


def peek_error(slot: str, error: ServerError, *, timed_out: bool = True) -> SourceError:
    """Returns the named error for an error of either driver about a read of the slot.

    ``timed_out``: the statement timeout has passed, so it is the reason if the server canceled the
    statement; a cancellation by a person has the same SQLSTATE.
    """
    if error.is_one_of(codes.OBJECT_IN_USE):
        return SlotInUse(f"slot {slot!r} is being read by another process: {error.shown}")
    if error.is_one_of(codes.QUERY_CANCELED) and timed_out:
        return PeekTimeout(f"reading slot {slot!r} took longer than the statement timeout")
    if (error_of_reader := _reader_error(slot, error) or _lacks_room(slot, error)) is not None:
        return error_of_reader
    if error.is_one_of(codes.INSUFFICIENT_PRIVILEGE):
        return PrivilegeMissing(
            f"reading slot {slot!r} was refused ({error.shown}): give the role that reads it the"
            " attribute replication; what it needs is in docs/reference/privileges.md"
        )
    if error.is_one_of(codes.UNDEFINED_OBJECT) and error.is_from_decoding:
        return PublicationGone(
            f"a publication does not exist at the WAL position at which slot {slot!r} is read"
            f" ({error.shown}): it was renamed or dropped, or created after changes that still"
            " wait in the slot, and PostgreSQL before 18 can't decode those with it. If it was"
            " renamed, rename it back. If it is new in the pipeline file, remove it from the file,"
            " let a run consume the waiting changes, add it again, and sync its tables. If setup"
            " should create it, remove it from the file and add its tables to a publication that"
            " this slot already reads. If it was dropped, even if it was created again, run"
            " teardown, setup and resync"
        )
    # The text is one line, as tasks return errors, and has the position of the change.
    state = f" (SQLSTATE {error.sqlstate})" if error.sqlstate is not None else ""
    context = f": {' '.join(error.context.split())}" if error.context else ""
    return SourceError(f"reading slot {slot!r} failed: {error.shown}{state}{context}")


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The options of a source that decide what a slot returns, as a batch's Delta commit stores
    them.

    With them, verification re-reads the slot in the same way. The pipeline file may have changed by
    the time that a run finds a slot behind what has landed.
    """

    publication_names: tuple[str, ...]
    messages: bool
    origin: str

    @classmethod
    def of(cls, source: Source) -> Self:
        """Returns the options that the pipeline file has now."""
        return cls(tuple(source.publication_names), source.options.messages, source.options.origin)

    @classmethod
    def read(cls, info: Mapping[str, Any]) -> Self | None:
        """Returns the options that a Delta commit's metadata contains; None without options."""
        if "publication_names" not in info:
            return None
        return cls(tuple(info["publication_names"]), info["messages"], info["origin"])

    def apply_to(self, source: Source) -> Source:
        """Returns the source with the publications and options of this request."""
        names = self.publication_names
        publications = tuple(Publication(name=name, manage=False) for name in names)
        return with_options(source, messages=self.messages, origin=self.origin).model_copy(
            update={"publications": publications}
        )
