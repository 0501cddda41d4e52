"""Moves the slot: verified consumption of what has landed, and idle moves. An intent precedes every
move.

The order of effects is essential. First the batch is durable in the lake, then the intent is
durable in the ledger, then a temporary slot copy keeps a way back. Only then does PostgreSQL forget
the changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace

import psycopg
from psycopg import sql

from waldelta.config import Source
from waldelta.errors import (
    ConsumeMismatch,
    LateWriter,
    NoFreeSlot,
    SlotInUse,
    SlotStuck,
    SourceUnreachable,
    without_values,
)
from waldelta.failpoints import fault_point
from waldelta.lake.changelog import Transactions
from waldelta.lake.ledger import Ledger, SlotMove, now
from waldelta.lsn import Lsn
from waldelta.postgres import Connection
from waldelta.slot.read.peek import name_of_copy, short_name, whole, with_options
from waldelta.slot.slot import missing_slot
from waldelta.slot.verify import (
    BINARY_COUNT_FROM,
    agree,
    check_landed,
    counted,
    is_plain,
    is_refused,
    named_use,
)

log = logging.getLogger(__name__)

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
    """Return the slot's confirmed_flush_lsn; raises SlotMissing where there is no slot."""
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
        consumed = counted(connection, "get", whole(source), Lsn(move.lsn))
    fault_point("consume.got")
    if not agree(connection, consumed, landed):
        differs = (
            f"slot {source.slot!r}: consumed {consumed} but landed {landed} in batch {move.batch}"
        )
        # Log before anything else may fail, so that the log has it in any case.
        log.error(differs)
        try:
            kept = name_of_kept(source.slot)
            connection.execute(
                "select pg_copy_logical_replication_slot(%s, %s, false)", (keep, kept)
            )
        except psycopg.Error as err:
            raise ConsumeMismatch(
                f"{differs}; the copy of the slot that holds these changes could not be kept"
                f" ({without_values(err)}): reconcile reports what differs from the source; to"
                " start over, run teardown, setup and resync"
            ) from err
        raise ConsumeMismatch(
            f"{differs}; the slot {kept!r} still holds these changes: compare them with the change"
            f" log, then drop the slot copy {kept!r}"
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
    """Count the same call with values in binary format, so that the server needn't print them.

    Returns None where values must be printed; then nothing was consumed. The call has a session of
    its own: a session in which decoding failed can't decode any more, and an error in the temporary
    copy's session would drop the copy.
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
            return counted(
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
    if (kept := kept_copy(connection, slot)) is not None:
        raise ConsumeMismatch(
            f"the slot copy {kept!r} of an earlier mismatch still exists and keeps WAL: compare"
            " its changes with the change log, then drop it with select"
            f" pg_drop_replication_slot('{kept}')"
        )


def kept_copy(connection: Connection, slot: str) -> str | None:
    """Return the name of the slot copy that an earlier mismatch left, if there is one."""
    kept = name_of_kept(slot)
    found = connection.execute(
        "select 1 from pg_replication_slots where slot_name = %s", (kept,)
    ).fetchone()
    return kept if found is not None else None


def name_of_kept(slot: str) -> str:
    """Return the name of the slot copy that a mismatch leaves."""
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
    # After a mismatch the copy is copied again, permanently. Without a free slot for that, nothing
    # would be left of the changes.
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
