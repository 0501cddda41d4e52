"""The slot in setup and teardown: who owns it, by ledger and server, and its creation or
adoption.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from waldelta.config import Source
from waldelta.errors import (
    LateWriter,
    LockHeld,
    PublicationGone,
    SlotForeign,
    SlotMissing,
    SourceChanged,
    SourceError,
    TransactionsStillOpen,
    WaldeltaError,
)
from waldelta.failpoints import fault_point
from waldelta.findings import Finding, problem, warning
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import SYNCED, SlotMove, now
from waldelta.lsn import Lsn
from waldelta.pipeline import Job
from waldelta.pipeline.targets import read_unlocked_sources, record_state
from waldelta.postgres import (
    READABLE_LSN,
    Connection,
    fetch,
    open_transactions,
    read_system_identifier,
)
from waldelta.postgres.publication_membership import (
    Membership,
    from_texts,
    is_same,
    is_uniform,
    lost_operations,
    says_alike,
    to_texts,
)
from waldelta.quantities import first_of, size
from waldelta.slot.acknowledge import kept_copy, named_use
from waldelta.slot.read.peek import call, without_streaming
from waldelta.slot.slot import (
    CREATE_TIMEOUT_S,
    PLUGIN,
    SlotState,
    check_ours,
    create_slot,
    drop_slot,
    read_slot,
)
from waldelta.slot.standby import slot_position, snapshots_logged, wait_replayed
from waldelta.stages.setup.facts.publications import PublicationState
from waldelta.stages.setup.facts.source_facts import Facts

log = logging.getLogger(__name__)


# After this time a connected standby has long replayed what was written before.
AWAY_TIMEOUT_S = 10
# A transaction that is open for as long isn't just passing.
LONG_OPEN_S = 10.0


def incarnation_events(job: Job) -> list[SlotMove]:
    """Returns the events that began or ended the slot's incarnations, oldest first."""
    return _begun_or_ended(job.ledger.slot_events(job.pipeline.source.slot))


def _begun_or_ended(moves: Sequence[SlotMove]) -> list[SlotMove]:
    return [move for move in moves if move.event != "promoted"]


def was_created_by_pipeline(moves: Sequence[SlotMove]) -> bool:
    """Returns whether this pipeline created the slot's current incarnation."""
    begins = [move for move in moves if move.is_begin or move.event == "creating"]
    return bool(begins) and begins[-1].event != "adopted"


def beyond(job: Job, slot: SlotState) -> Lsn | None:
    """Returns the furthest position this pipeline recorded for the slot, if the slot is beyond it.

    Otherwise returns None. Every move is recorded before it is made, so such a slot may be another
    one, created under this name.
    """
    begin = _last_begin(job)
    if begin is None:
        return None
    furthest = Lsn(job.ledger.furthest_lsn(slot.name, begin.incarnation))
    return furthest if slot.confirmed_flush_lsn > furthest else None


def _last_begin(job: Job) -> SlotMove | None:
    begins = [move for move in incarnation_events(job) if move.is_begin]
    return begins[-1] if begins else None


def check_same_server(conn: Connection, moves: Sequence[SlotMove]) -> None:
    """Raise SourceChanged when the connection leads to another server than the slot's.

    A slot of that name there belongs to another deployment, even if its publications fit this
    pipeline's file. Positions of two servers can't be compared.
    """
    if not moves or moves[-1].event == "dropped":
        return
    begin, system = moves[-1], read_system_identifier(conn)
    if begin.system_identifier != system:
        raise SourceChanged(
            f"slot {begin.slot!r} was set up on system {begin.system_identifier}, the connection"
            f" now leads to system {system}; nothing was dropped: point the connection back; if"
            " that server is gone for good, run resync first, which moves the pipeline to this"
            " server; a slot of that name here belongs to another deployment"
        )


def end_life(conn: Connection, job: Job) -> bool:
    """End the slot's current incarnation; returns whether the slot was dropped.

    The slot is dropped if it is known to be this pipeline's, and the end is recorded. Raises
    SlotForeign and SlotInUse without changes; LateWriter when another run has set it up again
    since.
    """
    name, dropped = job.pipeline.source.slot, False
    events = job.ledger.slot_events(name)
    moves = _begun_or_ended(events)
    if not moves or moves[-1].event == "dropped":
        return False
    if was_created_by_pipeline(moves) and (slot := read_slot(conn, name)) is not None:
        check_ours(slot)
        dropped = beyond(job, slot) is None and drop_slot(conn, name)
    fault_point("setup.dropped")
    job.ledger.append_slot_event(
        replace(moves[-1], at=now(), run_id=job.run_id, event="dropped", batch=None), events[-1]
    )
    return dropped


def slot_that_stays(
    slot: SlotState | None, moves: Sequence[SlotMove], furthest: Lsn | None = None
) -> list[str]:
    """Returns a line about a pgoutput slot of this database that teardown didn't drop.

    Its operator may think it is gone.
    """
    if slot is None or slot.plugin != PLUGIN or not slot.in_this_database or slot.is_synced:
        return []
    if furthest is not None:
        why = (
            f"it is at a position beyond {furthest}, the furthest this pipeline ever moved it, so"
            " another program may use it"
        )
    elif moves and not was_created_by_pipeline(moves):
        why = (
            "it existed before setup, or the lake's bookkeeping was lost and setup found the slot"
            " there"
        )
    else:
        why = (
            "the lake's bookkeeping doesn't know that this pipeline made it (was _waldelta"
            " removed?)"
        )
    return [
        (
            f"slot {slot.name} stays and keeps {size(slot.retained_bytes)} of WAL, growing: {why};"
            " unless another program reads it, drop it: select"
            f" pg_drop_replication_slot('{slot.name}')"
        )
    ]


def copy_that_stays(conn: Connection, slot: str) -> list[str]:
    """Returns a line about the slot copy that a mismatch left."""
    if (copy := kept_copy(conn, slot)) is None:
        return []
    return [
        (
            f"slot {copy} stays and keeps WAL, growing: it is the evidence of a mismatch"
            " (ConsumeMismatch); after you have examined it, drop it:"
            f" select pg_drop_replication_slot('{copy}')"
        )
    ]


def judge_waits(conn: Connection) -> Iterable[Finding]:
    """Yields a warning about transactions that would delay the slot's creation and the first copy.

    Short ones, of which a busy server always has some, are left out.
    """
    if waits := open_transactions(conn, older_than_s=LONG_OPEN_S):
        yield warning(
            f"transactions are open: {first_of([f'{who} since {since}' for who, since in waits])}:"
            f" setup waits for their end up to {CREATE_TIMEOUT_S} s, the initial sync up to 10"
            " minutes; end them first (pg_terminate_backend(pid), rollback prepared 'gid')"
        )


def judge_history(job: Job, slot: SlotState | None) -> Iterable[Finding]:
    """Yields what the ledger says against using the slot: it is gone, or belongs to others."""
    moves, name = incarnation_events(job), job.pipeline.source.slot
    alive = bool(moves) and moves[-1].is_begin
    if alive and slot is None:
        yield problem(
            f"slot {name!r} was set up at {moves[-1].at:%Y-%m-%d %H:%M} UTC and no longer exists:"
            " the lake lost the changes since then; run resync, which creates the slot again and"
            " repairs the targets"
        )
    if alive and slot is not None and slot.system_identifier != moves[-1].system_identifier:
        yield problem(
            f"slot {name!r} was set up on system {moves[-1].system_identifier}, the connection now"
            f" leads to system {slot.system_identifier}: point the connection back, or run resync"
        )
    if alive or slot is None or _is_half_made(moves, slot):
        return
    if slot.decoded and not job.pipeline.source.adopt_slot and not _was_ours(job, slot):
        yield problem(
            f"slot {name!r} existed before setup, and another program has read it: that program"
            " would miss the changes that this pipeline consumes; name another slot, or, when no"
            " other program needs it, write source.adopt_slot: true or drop it: select"
            f" pg_drop_replication_slot('{name}')"
        )
        return
    yield warning(
        f"slot {name!r} existed before setup: runs read it from its current position, and teardown"
        " won't drop it"
    )


def _is_half_made(moves: Sequence[SlotMove], slot: SlotState) -> bool:
    """Returns whether a setup created this slot and died before it recorded that in the ledger.

    Its newest record is then that it was about to.
    """
    return (
        bool(moves)
        and moves[-1].event == "creating"
        and slot.confirmed_flush_lsn.value >= moves[-1].lsn
    )


def _was_ours(job: Job, slot: SlotState) -> bool:
    """Returns whether the slot is where this lake's last incarnation could have left it.

    No other program moved it then.
    """
    begin = _last_begin(job)
    if begin is None or begin.system_identifier != slot.system_identifier:
        return False
    return begin.lsn <= slot.confirmed_flush_lsn.value and beyond(job, slot) is None


def failover_to_set(source: Source, slot: SlotState | None) -> bool | None:
    """Returns the failover property to set on an existing slot; None when it stays."""
    return (
        source.failover
        if slot is not None and source.failover not in (None, slot.failover)
        else None
    )


def ensure_slot(primary: Connection, conn: Connection, job: Job, *, scripted: bool = False) -> None:
    """Create the slot, or adopt the existing one, and record it, unless that was done before.

    A slot that the DBA's script created (``scripted``) counts as created by this pipeline. ``conn``
    connects to the server that will have the slot: the primary, or a standby, which is waited for
    until it has the publications. Raises LateWriter when another run, assuming that this one died,
    does the same; its record stays.
    """
    name = job.pipeline.source.slot
    events, slot = job.ledger.slot_events(name), read_slot(conn, name)
    moves, last = _begun_or_ended(events), events[-1] if events else None
    if moves and moves[-1].is_begin:
        return
    wait_replayed(primary, conn)
    position = slot_position(conn, job, primary)
    timeline = position.timeline
    if slot is not None:
        if not slot.confirmed_flush_lsn.value:
            raise SlotForeign(
                f"slot {name!r} is being created by another session at this moment: run setup again"
            )
        is_ours = scripted or _is_half_made(moves, slot)
        _record(job, replace(slot, timeline=timeline), "created" if is_ours else "adopted", last)
        return
    system, flushed = position.system_identifier, position.flush_lsn.value
    creating = job.ledger.append_slot_event(
        SlotMove(now(), job.run_id, "creating", name, system, timeline, "", flushed), last
    )
    fault_point("setup.creating")
    slot = _create(primary, conn, job, creating)
    fault_point("setup.created")
    _record(job, replace(slot, timeline=timeline), "created", creating)


def _create(primary: Connection, conn: Connection, job: Job, creating: SlotMove) -> SlotState:
    """Create the slot; if that fails, record that nothing was created, and raise."""
    source = job.pipeline.source
    try:
        if conn is not primary:
            return _create_on_standby(primary, conn, source)
        return create_slot(
            conn, source.slot, two_phase=source.options.two_phase, failover=bool(source.failover)
        )
    except (WaldeltaError, psycopg.errors.DuplicateObject) as err:
        # Nothing was created: a slot of this name that appears later is another program's.
        job.ledger.append_slot_event(replace(creating, at=now(), event="dropped"), creating)
        if isinstance(err, WaldeltaError):
            raise
        raise SlotForeign(
            f"slot {source.slot!r} was created by another session at this moment: run setup again"
        ) from err


def _create_on_standby(primary: Connection, conn: Connection, source: Source) -> SlotState:
    with snapshots_logged(primary):
        try:
            return create_slot(
                conn, source.slot, two_phase=source.options.two_phase, primary=primary
            )
        except TransactionsStillOpen:
            # On a busy primary there always are open transactions, also while the standby isn't
            # connected, which is then the error to report.
            wait_replayed(primary, conn, AWAY_TIMEOUT_S)
            raise


def _record(job: Job, slot: SlotState, event: str, after: SlotMove | None) -> None:
    # The incarnation's name is the position where it begins. A number is added if an earlier one
    # began there: a slot that is adopted again may not have moved.
    incarnation = began = str(slot.confirmed_flush_lsn)
    incarnations = {move.incarnation for move in job.ledger.slot_events() if move.is_begin}
    if earlier := sum(one == began or one.startswith(f"{began}.") for one in incarnations):
        incarnation = f"{began}.{earlier + 1}"
    # Batches of an earlier incarnation stay in the change log, and the new one begins after them. A
    # run of the earlier one that is about to commit has taken at most the number after the highest,
    # and finds out at its next step.
    log_holds = ChangeLog(job.lake, "").highest_batch()
    moves = job.ledger.slot_moves()
    # The change log may have been lost.
    highest = max([log_holds, *(move.batch or 0 for move in moves)])
    behind = highest + 1 if highest or any(move.is_begin for move in moves) else 0
    job.ledger.append_slot_event(
        SlotMove(
            now(),
            job.run_id,
            event,
            slot.name,
            slot.system_identifier,
            slot.timeline,
            incarnation,
            slot.confirmed_flush_lsn.value,
            behind,
        ),
        after,
    )
    log.info("slot=%s %s at lsn=%s", slot.name, event, incarnation)


# --- changes of publications: what they mean for the slot and for the copied tables.
#
# pgoutput looks its publications up as of each change's WAL position. PostgreSQL 18 skips one that
# doesn't exist yet; before, peek and get fail permanently. So setup first reads a copy of the slot
# in a separate session, to get the server's own answer.
#
# Setup changes publications in one transaction, so a table that is published before and after it
# was never unpublished. Another program may have removed it for a while; a changed entry is the
# only sign of that (waldelta.pipeline.drift.drift). So setup records which entries publish a table,
# when setup itself replaces them.


# All pending WAL is decoded once for this; the first change that can't be decoded ends it at once.
TRIAL_S = 20


def judge_newer(
    primary: Connection,
    conn: Connection,
    job: Job,
    managed: Sequence[PublicationState],
    facts: Facts,
) -> Iterator[Finding]:
    """Yields findings about publications that are newer than changes pending in the slot.

    Setup would create them, or a DBA did. ``conn`` connects to the server that has the slot;
    ``primary`` knows which transactions are open.
    """
    slot = facts.slot
    if slot is None or facts.server.version >= 180000 or facts.server.in_recovery:
        return
    for name in sorted(p.name for p in managed if p.name not in facts.actual):
        yield problem(
            f"publication {name!r} would be newer than changes pending in slot {slot.name!r},"
            " which PostgreSQL could not decode then (before PostgreSQL 18): remove it from the"
            " file and add its tables to a publication that this slot already reads, or run"
            " teardown, setup and resync"
        )
    is_readable = slot.in_this_database and slot.plugin == PLUGIN and slot.wal_status != "lost"
    names = read_newer(conn, slot.name, job.pipeline.source.publication_names)
    if not names or not is_readable or slot.invalidation_reason:
        return
    if (finding := _try_decoding(job, names)) is not None:
        yield finding
        if finding.severity == "problem":
            return
    for row in fetch(primary, _OLDER, {"publications": names}):
        yield warning(
            f"publication {row.name!r} is newer than open transactions"
            f" ({', '.join(row.older)}): PostgreSQL couldn't decode what they wrote before;"
            " wait until they have ended and a run without this publication has consumed them"
        )


def read_newer(conn: Connection, slot: str, publications: Sequence[str]) -> list[str]:
    """Returns the publications that may be newer than the slot, or were altered since its
    creation.
    """
    rows = fetch(conn, _YOUNG, {"publications": list(publications), "slot": slot})
    return [row.name for row in rows]


def _try_decoding(job: Job, names: Sequence[str]) -> Finding | None:
    """Returns a finding if pending WAL can't be decoded with these publications, or if that can't
    be tried; else None.

    It uses a separate session, because setup retries on its own connections when a table was
    locked. Before PostgreSQL 15.15, 16.11 and 17.7 a second decode in a session with a failed one
    may crash the server.
    """
    source = job.pipeline.source
    try:
        with job.source.connect_slot("trial") as connection:
            _read_all(connection, source, names)
    except PublicationGone as err:
        return problem(str(err))
    except (psycopg.Error, SourceError) as err:
        log.info("slot=%s no trial read is possible: %s", source.slot, err)
        return warning(
            f"publication {', '.join(map(repr, names))} may be newer than changes pending in slot"
            f" {source.slot!r}, and the trial read failed ({str(err).splitlines()[0]}): if a run"
            " stops with PublicationGone, follow its message"
        )
    return None


def _read_all(conn: Connection, source: Source, names: Sequence[str]) -> None:
    """Decode the slot's pending WAL with these publications, in a slot copy, so that readers of the
    slot aren't disturbed. The copy is temporary, and ends with the session.

    Raises errors of named_use() and psycopg.Error.
    """
    trial = source.model_copy(
        update={"slot": f"waldelta_trial_{conn.info.backend_pid}",
                "publications": [entry for entry in source.publications if entry.name in names]}
    )  # fmt: skip
    conn.execute("select pg_copy_logical_replication_slot(%s, %s, true)", (source.slot, trial.slot))
    ((flushed,),) = conn.execute(f"select ({READABLE_LSN})::text".encode()).fetchall()
    conn.execute(f"set statement_timeout = '{TRIAL_S}s'".encode())
    with named_use(source.slot):
        conn.execute(
            call("peek", without_streaming(trial), Lsn.parse(flushed), None, "count(*)").encode()
        )


@contextmanager
def entries_kept(connection: psycopg.Connection[Any], job: Job) -> Iterator[None]:
    """Record in the ledger what publishes each copied table after the block.

    A table is recorded only if the ledger's entry was valid until then.
    """
    old_entries = _read_memberships(connection, job)
    yield
    new_entries = _read_memberships(connection, job)
    for name, state in job.ledger.table_states().items():
        was, now_are = old_entries.get(name, frozenset()), new_entries.get(name, frozenset())
        if state.status != SYNCED or not now_are or not is_replaced(state.entries, was, now_are):
            continue
        # For a new slot incarnation all tables are copied again; a run that is working on this
        # table compares for itself.
        with suppress(LockHeld, LateWriter, SlotMissing):
            record_state(job, state, partial(replace, entries=to_texts(now_are)))


def is_replaced(
    recorded: list[str], was: frozenset[Membership], now_are: frozenset[Membership]
) -> bool:
    """Returns whether the recorded entry was valid until setup replaced it; pure.

    Only then the new entry may be recorded. An entry stays when the replacement loses operations,
    until a run has seen that. It also stays when its rules differed by kind of change, which may
    have left wrong rows.
    """
    return (
        is_same(from_texts(recorded), was)
        and (is_uniform(was) or says_alike(was, now_are))
        and not lost_operations(was, now_are)
        and to_texts(now_are) != recorded
    )


def _read_memberships(
    connection: psycopg.Connection[Any], job: Job
) -> dict[str, frozenset[Membership]]:
    try:
        # Nothing is recorded for a locked table: the next run compares for itself.
        _, targets, _ = read_unlocked_sources(connection, job.pipeline, sizes=False)
        return {str(target.id): target.table.entries for target in targets if not target.is_unread}
    except SourceError as err:
        # These publications can't be read together, and setup is about to correct that.
        log.info("the tables' publications can't be read: %s", err)
        return {}


# A row older than every transaction whose catalogs the slot needs existed when all pending WAL was
# written. ALTER PUBLICATION renews its row too, so a newer row is only a reason to try.
_YOUNG = """
select p.pubname as name
from pg_publication p
join pg_replication_slots s on s.slot_name = %(slot)s
where p.pubname = any(%(publications)s::name[]) and age(p.xmin) <= age(s.catalog_xmin)
order by p.pubname
"""

_OLDER = """
select *
from (
    select p.pubname as name,
           array(
               select coalesce('prepared transaction ' || quote_literal(x.gid), 'pid ' || l.pid)
               from pg_locks l
               left join pg_prepared_xacts x on x.transaction::text = l.transactionid::text
               left join pg_stat_activity a on a.pid = l.pid
               where l.locktype = 'transactionid' and l.granted
                 and age(l.transactionid) > age(p.xmin)
                 and coalesce(x.database, a.datname) = current_database()
           ) as older
    from pg_publication p
    where p.pubname = any(%(publications)s::name[])
) found
where cardinality(older) > 0
order by name
"""
