"""What a change of publications by setup means for the slot and for the copied tables.

pgoutput looks its publications up as of each change's WAL position. PostgreSQL 18 skips one that
doesn't exist yet; before, peek and get fail permanently. So setup first reads a copy of the slot in
a separate session, to get the server's own answer.

Setup changes publications in one transaction, so a table that is published before and after it was
never unpublished. Another program may have removed it for a while; a changed entry is the only sign
of that (waldelta.pipeline.drift.drift). So setup records which entries publish a table, when setup
itself replaces them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from waldelta.config import Source
from waldelta.errors import (
    LateWriter,
    LockHeld,
    PublicationGone,
    SlotMissing,
    SourceError,
    SourceUnreachable,
)
from waldelta.findings import Finding, problem, warning
from waldelta.lake.ledger import SYNCED
from waldelta.lsn import Lsn
from waldelta.pipeline import Job
from waldelta.pipeline.targets import read_unlocked_sources, record_state
from waldelta.postgres import READABLE_LSN, Connection, fetch
from waldelta.postgres.publication_membership import (
    Membership,
    from_texts,
    is_same,
    is_uniform,
    lost_operations,
    says_alike,
    to_texts,
)
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot import PLUGIN
from waldelta.slot.read import peek_error
from waldelta.slot.read.peek import call, whole
from waldelta.stages.setup.facts.publications import PublicationState
from waldelta.stages.setup.facts.source_facts import Facts

log = logging.getLogger(__name__)


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
            " file and add its tables to a publication that this slot already reads"
            ", or run teardown, setup"
            " and resync"
        )
    is_readable = slot.in_this_database and slot.plugin == PLUGIN and slot.wal_status != "lost"
    if is_readable and not slot.invalidation_reason:
        yield from _judge_existing(primary, conn, job)


def read_newer(conn: Connection, slot: str, publications: Sequence[str]) -> list[str]:
    """Returns the publications that may be newer than the slot, or were altered since its
    creation.
    """
    rows = fetch(conn, _YOUNG, {"publications": list(publications), "slot": slot})
    return [row.name for row in rows]


def _judge_existing(primary: Connection, conn: Connection, job: Job) -> Iterator[Finding]:
    source = job.pipeline.source
    names = read_newer(conn, source.slot, source.publication_names)
    if not names:
        return
    if (found := _try(job, names)) is not None:
        yield found
        if found.severity == "problem":
            return
    for row in fetch(primary, _OLDER, {"publications": names}):
        yield warning(
            f"publication {row.name!r} is newer than open transactions ({', '.join(row.older)}):"
            " PostgreSQL couldn't decode what they wrote before; wait until they have ended and a"
            " run without this publication has consumed them"
        )


def _try(job: Job, names: Sequence[str]) -> Finding | None:
    """Returns the result of decoding with these publications as a finding, or None.

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
    except (psycopg.Error, SourceUnreachable) as err:
        log.info("slot=%s no trial read is possible: %s", source.slot, err)
        return warning(
            f"publication {', '.join(map(repr, names))} may be newer than changes pending in slot"
            f" {source.slot!r}, and the trial read failed ({str(err).splitlines()[0]}): if a run"
            " stops with PublicationGone, follow its message"
        )
    return None


def _read_all(conn: Connection, source: Source, names: Sequence[str]) -> None:
    """Decode the slot's pending WAL with these publications, in a slot copy.

    Raises PublicationGone and psycopg.Error.
    """
    asked = source.model_copy(
        update={"slot": f"waldelta_trial_{conn.info.backend_pid}",
                "publications": [entry for entry in source.publications if entry.name in names]}
    )  # fmt: skip
    with closing(conn.cursor()) as cursor, _copied(cursor, source.slot, asked.slot):
        ((flushed,),) = cursor.execute(f"select ({READABLE_LSN})::text".encode()).fetchall()
        cursor.execute(f"set statement_timeout = '{TRIAL_S}s'".encode())
        try:
            cursor.execute(
                call("peek", whole(asked), Lsn.parse(flushed), None, "count(*)").encode()
            )
        except psycopg.errors.UndefinedObject as err:
            raise peek_error(source.slot, ServerError.of(err)) from None


@contextmanager
def _copied(cursor: psycopg.Cursor[Any], slot: str, name: str) -> Iterator[None]:
    """Create a temporary copy of the slot, so that readers of the slot aren't disturbed."""
    cursor.execute("select pg_copy_logical_replication_slot(%s, %s, true)", (slot, name))
    try:
        yield
    finally:  # After an error the server has dropped it already.
        drop = (
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name"
            " = %s"
        )
        cursor.execute(drop, (name,))


@contextmanager
def entries_kept(connection: psycopg.Connection[Any], job: Job) -> Iterator[None]:
    """Record in the ledger what publishes each copied table after the block.

    A table is recorded only if the ledger's entry was valid until then.
    """
    before = _entries(connection, job)
    yield
    after = _entries(connection, job)
    for name, state in job.ledger.table_states().items():
        was, now_are = before.get(name, frozenset()), after.get(name, frozenset())
        if state.status != SYNCED or not now_are or not is_replaced(state.entries, was, now_are):
            continue
        # For a new slot incarnation all tables are copied again; a run that is working on this
        # table compares for itself.
        with suppress(LockHeld, LateWriter, SlotMissing):
            record_state(job, state, partial(replace, entries=to_texts(now_are)))


def is_replaced(
    held: list[str], was: frozenset[Membership], now_are: frozenset[Membership]
) -> bool:
    """Returns whether the recorded entry was valid until setup replaced it; pure.

    Only then the new entry may be recorded. An entry stays when the replacement loses operations,
    until a run has seen that. It also stays when its rules differed by kind of change, which may
    have left wrong rows.
    """
    held_until_then = is_same(from_texts(held), was)
    alike = is_uniform(was) or says_alike(was, now_are)
    return (
        held_until_then
        and alike
        and not lost_operations(was, now_are)
        and to_texts(now_are) != held
    )


def _entries(connection: psycopg.Connection[Any], job: Job) -> dict[str, frozenset[Membership]]:
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
