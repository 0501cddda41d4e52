"""Moves the slot: verified consumption of what has landed, and idle moves. An intent precedes every
move.

The order of effects is essential. First the batch is durable in the lake, then the intent is
durable in the ledger, then a temporary slot copy keeps a way back. Only then does PostgreSQL forget
the changes.

What the slot still holds is compared with what has landed, before the slot is moved. The server
counts what the slot functions return; each transaction counts once.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg
from psycopg import sql

from waldelta.config import Source
from waldelta.errors import (
    ConsumeMismatch,
    LateWriter,
    NoFreeSlot,
    PublicationGone,
    SlotInUse,
    SlotStuck,
    SourceUnreachable,
    raised_as,
    without_values,
)
from waldelta.failpoints import fault_point
from waldelta.lake.changelog import Transactions
from waldelta.lake.changelog.batch_file import PreparedRows
from waldelta.lake.ledger import Ledger, SlotMove, now
from waldelta.lsn import Lsn
from waldelta.pgoutput.message_kinds import CHANGE_CODES, CODES, END_CODES, STREAM_ABORT
from waldelta.postgres import MEMBERS, Connection
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.read.peek import (
    NO_ROOM,
    ReadRequest,
    call,
    name_of_copy,
    peek_error,
    short_name,
    with_options,
    without_streaming,
)
from waldelta.slot.slot import missing_slot

log = logging.getLogger(__name__)

ORIGINS_SINCE = 160000  # The first version with the option, in the form of server_version.


@dataclass(frozen=True, slots=True)
class VerifiedRange:
    """Landed batches that were read from the slot with the same options, from ``begins`` on.

    ``first`` and ``last`` are their numbers, ``messages`` their messages in all. ``request``
    holds the options; it is None for batches whose commit Delta's log doesn't have any more.
    """

    request: ReadRequest | None
    begins: int
    first: int
    last: int
    messages: int = 0
    transactions: Transactions = field(default_factory=Transactions)

    def __add__(self, behind: VerifiedRange) -> VerifiedRange:
        """Returns this range joined with the one that was read after it."""
        return replace(
            self,
            last=behind.last,
            messages=self.messages + behind.messages,
            transactions=self.transactions + behind.transactions,
        )


def check_landed(
    connection: Connection, source: Source, move: SlotMove, landed: Transactions
) -> None:
    """Raise ConsumeMismatch when what the slot holds up to ``move.lsn`` isn't what has landed.

    The slot isn't moved.
    """
    pending = _slot_messages(connection, source, move.lsn)
    if not agree(connection, pending, landed):
        raise _mismatch(source, move, pending, landed, f"batch {move.batch}")


def check_behind(
    connection: Connection, source: Source, move: SlotMove, verified: VerifiedRange, position: int
) -> bool:
    """Check what other runs landed after the slot, which is at ``position`` or earlier.

    Their pipeline files may have requested more, or less, than this one's. The caller must use
    ``connection`` for nothing else. Returns whether it was compared: there may be nothing to
    compare, or no way to do it.
    """
    if move.lsn <= verified.begins and verified.transactions == Transactions():
        return False
    try:
        _check_range(connection, source, move, verified, position)
    except PublicationGone as err:
        # Before PostgreSQL 18, decoding fails once a publication in the list is gone; what landed
        # is durable.
        log.warning(
            "slot %s moves past %s..%s without a comparison: %s",
            *(move.slot, Lsn(verified.begins), Lsn(move.lsn), err),
        )
        return False
    return True


def _check_range(
    connection: Connection, source: Source, move: SlotMove, verified: VerifiedRange, position: int
) -> None:
    differing: Transactions | None = None
    for then in _as_then(connection, source, verified):
        pending, landed = _slot_messages(connection, then, move.lsn), verified.transactions
        if verified.begins > position:
            # The slot returns everything from its position on, including what an earlier request
            # skipped.
            landed += _slot_messages(connection, then, verified.begins)
        if agree(connection, pending, landed):
            return
        differing = differing or pending
    first, last = verified.first, verified.last
    batches = f"batch {last}" if first == last else f"batches {first} to {last}"
    raise _mismatch(source, move, differing or Transactions(), landed, batches)


def _as_then(connection: Connection, source: Source, verified: VerifiedRange) -> Iterator[Source]:
    if verified.request is not None:
        yield verified.request.apply_to(source)
    else:
        yield source
        now = source.options
        origins = (
            ("any", "none") if connection.info.server_version >= ORIGINS_SINCE else (now.origin,)
        )
        for messages, origin in itertools.product((False, True), origins):
            if (messages, origin) != (now.messages, now.origin):
                yield with_options(source, messages=messages, origin=origin)


def _mismatch(
    source: Source, move: SlotMove, pending: Transactions, landed: Transactions, batches: str
) -> ConsumeMismatch:
    return ConsumeMismatch(
        f"slot {source.slot!r} holds {pending} up to {Lsn(move.lsn)}, but landed {landed} in"
        f" {batches}; nothing of that was consumed: compare the slot's changes with the change log"
        " (docs/how-to/recover-a-slot.md#consumemismatch); to start over, run teardown, setup and"
        " resync"
    )


def _slot_messages(connection: Connection, source: Source, upto: int) -> Transactions:
    return count_messages(connection, "peek", without_streaming(source), Lsn(upto))


# A message that isn't transactional gets kind 0: it may come after the last transaction, or between
# two calls. A message that can't be read may have any length.
_KIND = (
    f"lsn, xid, case when length(data) = 0 then 0 when get_byte(data, 0) = {CODES['message']} and"
    " substr(data, 2, 1) = '\\x00' then 0 else get_byte(data, 0) end as kind"
)
# The fields of Transactions by their kinds.
_FIELDS = {
    CODES["commit"]: "commits", CODES["prepare"]: "prepares",
    CODES["commit_prepared"]: "prepared_commits", CODES["rollback_prepared"]: "prepared_rollbacks",
    CODES["insert"]: "inserts", CODES["update"]: "updates", CODES["delete"]: "deletes",
    CODES["truncate"]: "truncates", CODES["message"]: "messages",
}  # fmt: skip
# One row for each kind, and for each prepared transaction: the server evaluates very little per
# message.
_COUNTED = """
select {xid}, kind, count(*),
       coalesce(sum(xid::text::bigint) filter (where kind in ({ends})), 0),
       coalesce(sum(lsn - '0/0'::pg_lsn) filter (where kind in ({ends})), 0)
from {changes} as changes
group by 1, 2
"""
# Rows of transactions prepared in this range are separated from all others.
_WITH_PREPARED = """
with changes as materialized ({changes}),
     prepared as (select distinct xid from changes where kind = {prepare})
"""
# The server's answer is read up to the first message that counts.
_FIRST = """
with changes as materialized ({changes})
select (select data from changes where substr(data, 1, 1) <> '\\x{abort:02x}' limit 1),
       (select count(*) from (select from changes limit {most}) as given)
"""
_MORE = 16
_XID_PREPARED = (
    "case when kind in ({changes}) and xid in (select xid from prepared) then xid::text::bigint end"
)
# With fewer changes than these, the check and the extra session cost more than they save.
BINARY_COUNT_FROM = 100_000


def count_messages(connection: Connection, verb: str, source: Source, upto: Lsn) -> Transactions:
    """Returns the counts of the messages that a call of the slot's functions returns up to a
    position; the server counts them.

    It reads the ``whole`` source: the counts are the same however the landed messages were
    streamed. Rows of prepared transactions are counted by transaction.
    """
    changes = call(verb, source, upto, None, _KIND)
    if source.options.two_phase:
        xid = _XID_PREPARED.format(changes=CHANGE_CODES)
        query = _WITH_PREPARED.format(changes=changes, **CODES)
        query += _COUNTED.format(xid=xid, changes="changes", ends=END_CODES)
    else:
        query = _COUNTED.format(xid="null::bigint", changes=f"({changes})", ends=END_CODES)
    sums: Counter[str] = Counter()
    in_prepared: dict[int, Counter[str]] = {}
    with named_use(source.slot):
        counts = connection.execute(query.encode()).fetchall()
    for xid, kind, rows, xid_sum, lsn_sum in counts:
        of_kind = {_FIELDS[kind]: int(rows)} if kind in _FIELDS else {}
        if xid is None:
            sums.update(of_kind, xid_sum=int(xid_sum), end_lsn_sum=int(lsn_sum))
        else:
            in_prepared.setdefault(int(xid), Counter()).update(of_kind)
    prepared = (PreparedRows(xid, **of) for xid, of in in_prepared.items())
    return Transactions(**sums, in_prepared=tuple(sorted(prepared)))


def agree(connection: Connection, one: Transactions, other: Transactions) -> bool:
    """Returns whether both are equal, except for prepared transactions that were rolled back."""
    rolled_back = _rolled_back(
        connection, [rows.xid for rows in (*one.in_prepared, *other.in_prepared)]
    )
    return one.without(rolled_back) == other.without(rolled_back)


def _rolled_back(connection: Connection, xids: Sequence[int]) -> set[int]:
    """Returns those of some recent transactions that were rolled back.

    When a prepared transaction is rolled back before, or while, it is decoded, pgoutput may send
    all of its rows, some or none.
    """
    if not xids:
        return set()
    rows = connection.execute(
        """
        select x
        from unnest(%s::bigint[]) as x,
             lateral (select pg_snapshot_xmax(pg_current_snapshot())::text::bigint as next) as s
        where pg_xact_status((next - (next - x) %% (1::bigint << 32))::text::xid8) = 'aborted'
        """,
        (list(xids),),
    )
    return {int(xid) for (xid,) in rows.fetchall()}


def first_message(connection: Connection, source: Source, upto: Lsn) -> bytes | None:
    """Returns the first message that the slot has for us up to a position; None without any.

    It reads the ``whole`` source, of which landing discards every Stream Abort (envelope). The
    server's limit counts those, so more messages are requested while nothing else comes. Raises
    PeekTimeout after a statement timeout, and as named_use() does.
    """
    most = 1
    while True:
        query = _FIRST.format(
            changes=call("peek", source, upto, most, "data"), abort=STREAM_ABORT, most=most
        )
        with named_use(source.slot, psycopg.errors.QueryCanceled):
            ((data, count),) = connection.execute(query.encode()).fetchall()
        first = bytes(data) if data is not None else None
        if first is not None or count < most:
            return first
        most *= _MORE


def named_use(slot: str, *kinds: type[psycopg.Error]) -> AbstractContextManager[None]:
    """Name the server's error when another process reads the slot at that moment, a publication is
    gone, or the server has no room for the answer; errors of other ``kinds``, too.
    """
    common = (psycopg.errors.ObjectInUse, psycopg.errors.UndefinedObject, *NO_ROOM)
    return raised_as(lambda err: peek_error(slot, ServerError.of(err)), common + kinds)


def is_plain(connection: psycopg.Connection[Any], publication_names: Sequence[str]) -> bool:
    """Returns whether all published columns have types whose binary form comes from PostgreSQL
    itself.

    Printing values takes a tenth of decoding. But a send function may refuse a value that an output
    function prints, and an error during decoding is dangerous: before PostgreSQL 15.15, 16.11, 17.7
    and 18.1 the next decoding in the same session may crash the server ("Fix
    access-to-already-freed-memory issue in pgoutput"). So the catalogs are checked first.

    Types without a binary form are fine, too: their values are sent as text. Arrays, rows and
    ranges are excluded, because they may contain other types.
    """
    row = connection.execute(
        _UNPLAIN.encode(), {"publications": list(publication_names)}
    ).fetchone()
    return row == (False,)


def is_refused(err: psycopg.Error) -> bool:
    """Returns whether an error is about values, for example of a column that was dropped since.

    Errors about the server, the slot or privileges aren't.
    """
    environment_errors = (
        psycopg.OperationalError
        | psycopg.errors.InsufficientPrivilege
        | psycopg.errors.UndefinedObject
    )
    return not isinstance(err, environment_errors)


# PostgreSQL's own functions have oids below 16384 (FirstNormalObjectId). Domains and enums use
# those of their base types.
_UNPLAIN = (
    MEMBERS
    + """
select exists (
    select
    from member m
    join pg_attribute a on a.attrelid = m.relid and a.attnum > 0 and not a.attisdropped
    join pg_type t on t.oid = a.atttypid
    where t.typsend::oid >= 16384
       or t.typsend::oid in (
           'pg_catalog.array_send'::regproc, 'pg_catalog.record_send'::regproc,
           'pg_catalog.range_send'::regproc,
           'pg_catalog.multirange_send'::regproc
       )
)
"""
)


Sessions = Callable[[], AbstractContextManager[Connection]]


def consume(
    connection: Connection,
    source: Source,
    ledger: Ledger,
    move: SlotMove,
    landed: Transactions,
    sessions: Sessions | None = None,
) -> Transactions:
    """Consume the slot up to ``move.lsn``, and verify that this is what has landed.

    ``sessions`` opens more connections like ``connection``. Raises ConsumeMismatch when the
    consumed transactions aren't the landed ones. It then makes the slot copy permanent so that
    nothing is lost; with ``acknowledge: peek`` nothing has been consumed yet. Raises SlotStuck when
    the slot didn't move, SlotInUse when another process reads it.
    """
    fault_point("consume.landed")
    by_get = source.options.acknowledge == "get"
    ledger.append(replace(move, at=now(), event="intent", compared_after=by_get))
    fault_point("consume.intended")
    if by_get:
        consumed = _get_verified(connection, source, move, landed, sessions)
        ledger.append(replace(move, at=now(), event="compared"))
    else:
        if source.options.acknowledge == "peek":
            check_landed(connection, source, move, landed)
        _advance(connection, source.slot, move.lsn)
        consumed = landed
    fault_point("consume.moved")
    _check_moved(connection, source.slot, move.lsn)
    return consumed


def move_idle_slot(connection: Connection, slot: str, ledger: Ledger, move: SlotMove) -> None:
    """Move a slot past WAL that was read and has nothing for us, so that it doesn't keep that
    WAL.
    """
    ledger.append(replace(move, at=now(), event="intent"))
    fault_point("idle.intended")
    _advance(connection, slot, move.lsn)
    fault_point("idle.moved")
    _check_moved(connection, slot, move.lsn)


def confirmed_lsn(connection: Connection, slot: str) -> Lsn:
    """Returns the slot's confirmed_flush_lsn; raises SlotMissing where there is no slot."""
    row = connection.execute(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", (slot,)
    ).fetchone()
    if row is None:
        raise missing_slot(slot)
    if row[0] is None:
        raise SlotStuck(f"slot {slot!r} has no confirmed position: check pg_replication_slots")
    return Lsn.parse(row[0])


def _get_verified(
    connection: Connection,
    source: Source,
    move: SlotMove,
    landed: Transactions,
    sessions: Sessions | None,
) -> Transactions:
    _check_alone(connection, move)
    keep = _copy_slot(connection, source.slot)
    fault_point("consume.copied")
    consumed = None
    if sessions is not None and landed.changes >= BINARY_COUNT_FROM and not source.options.binary:
        consumed = _get_in_binary(sessions, source, move, keep, connection.info.backend_pid)
        if consumed is None:
            _check_alone(connection, move)
    if consumed is None:
        consumed = count_messages(connection, "get", without_streaming(source), Lsn(move.lsn))
    fault_point("consume.got")
    if not agree(connection, consumed, landed):
        differs = (
            f"slot {source.slot!r}: consumed {consumed} but landed {landed} in batch {move.batch}"
        )
        # Keeping the copy may fail, so the difference is logged first.
        log.error(differs)
        try:
            copy = name_of_kept(source.slot)
            connection.execute(
                "select pg_copy_logical_replication_slot(%s, %s, false)", (keep, copy)
            )
        except psycopg.Error as err:
            raise ConsumeMismatch(
                f"{differs}; the copy of the slot that holds these changes could not be kept"
                f" ({without_values(err)}): reconcile reports what differs from the source; to"
                " start over, run teardown, setup and resync"
            ) from err
        raise ConsumeMismatch(
            f"{differs}; the slot {copy!r} still holds these changes: compare them with the change"
            f" log, then drop the slot copy {copy!r}"
        )
    # If its session was lost while another one consumed, the copy is gone already, and the result
    # is valid.
    with suppress(psycopg.OperationalError):
        connection.execute("select pg_drop_replication_slot(%s)", (keep,))
    return consumed


def _check_alone(connection: Connection, move: SlotMove) -> None:
    """Raise LateWriter when another run has moved the slot since.

    A read after that move returns nothing, which isn't a mismatch.
    """
    if confirmed_lsn(connection, move.slot).value >= move.lsn:
        raise LateWriter(f"another run has moved slot {move.slot!r} to {Lsn(move.lsn)}: run again")


def _get_in_binary(
    sessions: Sessions, source: Source, move: SlotMove, keep: str, pid: int
) -> Transactions | None:
    """Move the slot by a call that returns values in binary format, and return the counts of its
    messages.

    Binary format saves the server printing the values. Returns None where values must be printed as
    texts; then nothing was consumed. The call has a session of its own: a session in which decoding
    failed can't decode any more, and an error in the temporary copy's session would drop the copy.
    """
    with sessions() as session:
        if not is_plain(session, source.publication_names):
            return None
        query = (
            "select 1 from pg_replication_slots where slot_name = %s and temporary and"
            " active_pid = %s"
        )
        if session.execute(query, (keep, pid)).fetchone() is None:
            raise SourceUnreachable(
                f"the session that holds the slot copy {keep!r} was lost before anything was"
                " consumed: the changes have landed; run again"
            )
        try:
            return count_messages(
                session, "get", with_options(source, streaming="off", binary=True), Lsn(move.lsn)
            )
        except psycopg.Error as err:  # The slot moves only after the last message.
            if not is_refused(err):
                raise
            log.info(
                "slot=%s reading values as text, because PostgreSQL can't send them in binary"
                " format: %s",
                source.slot,
                err.diag.message_primary,
            )
            return None


def check_no_mismatch(connection: Connection, slot: str) -> None:
    """Raise ConsumeMismatch while the slot copy of an earlier mismatch exists.

    No run may continue past the changes that the copy keeps.
    """
    if (copy := kept_copy(connection, slot)) is not None:
        raise ConsumeMismatch(
            f"the slot copy {copy!r} of an earlier mismatch still exists and keeps WAL: compare"
            " its changes with the change log, then drop it with select"
            f" pg_drop_replication_slot('{copy}')"
        )


def kept_copy(connection: Connection, slot: str) -> str | None:
    """Returns the name of the slot copy that an earlier mismatch left, if there is one."""
    name = name_of_kept(slot)
    row = connection.execute(
        "select 1 from pg_replication_slots where slot_name = %s", (name,)
    ).fetchone()
    return name if row is not None else None


def name_of_kept(slot: str) -> str:
    """Returns the name of the slot copy that a mismatch leaves."""
    return f"{short_name(slot)}_mismatch"


def _copy_slot(connection: Connection, slot: str) -> str:
    name = name_of_copy(slot)
    leftover = connection.execute(_HOLDER, (name,)).fetchone()
    if leftover is not None:
        raise SlotInUse(
            f"a slot {name!r} already exists ({leftover[0]}), and this run needs that name for its"
            " slot copy; nothing was consumed, the changes have landed: end its session, or drop"
            f" it (select pg_drop_replication_slot('{name}'))"
        )
    # After a mismatch, the temporary copy of the slot is copied to a permanent slot. That needs a
    # free slot: without one, the changes would be lost.
    free = (
        "select current_setting('max_replication_slots')::int - count(*) >= 2 from"
        " pg_replication_slots"
    )
    if connection.execute(free).fetchone() != (True,):
        raise NoFreeSlot(
            f"two free replication slots are needed to consume slot {slot!r}, one for a temporary"
            " slot copy and one to keep that copy after a mismatch: drop unused slots, or raise"
            " max_replication_slots; nothing was consumed, the changes have landed"
        )
    connection.execute("select pg_copy_logical_replication_slot(%s, %s, true)", (slot, name))
    return name


def _advance(connection: Connection, slot: str, lsn: int) -> None:
    if confirmed_lsn(connection, slot).value >= lsn:
        return
    statement = sql.SQL("select pg_replication_slot_advance({}, {}::pg_lsn)")
    with named_use(slot):
        connection.execute(statement.format(sql.Literal(slot), sql.Literal(str(Lsn(lsn)))))


def _check_moved(connection: Connection, slot: str, lsn: int) -> None:
    confirmed = confirmed_lsn(connection, slot)
    if confirmed.value < lsn:
        raise SlotStuck(
            f"slot {slot!r} should have moved to {Lsn(lsn)} but is at {confirmed}: WAL accumulates"
            " on the server; check pg_replication_slots and the server's log"
        )


_HOLDER = """
select coalesce('of pid ' || s.active_pid || coalesce(' (' || nullif(a.application_name,
  '') || ')', ''), 'of no session')
from pg_replication_slots s
left join pg_stat_activity a on a.pid = s.active_pid
where s.slot_name = %s
"""
