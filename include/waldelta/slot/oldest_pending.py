"""Finds the oldest pending commit, by the slot and by the change log.

A source without changes has none, however long ago the last run was.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import psycopg

from waldelta.errors import PeekTimeout, StateError
from waldelta.lake.changelog import Snapshot
from waldelta.lake.ledger import TableState
from waldelta.lsn import Lsn
from waldelta.pgoutput.commit_time import shown_at
from waldelta.pgoutput.messages import begun_at
from waldelta.pipeline import Job, slot_lock
from waldelta.pipeline.targets import Watermarks
from waldelta.postgres import limited
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.acknowledge import confirmed_lsn, first_message
from waldelta.slot.read import peek_error
from waldelta.slot.read.decode_failure import Refusal
from waldelta.slot.read.peek import NO_ROOM, with_options

# A dead pipeline's first change is found at once. WAL without any of ours is searched for this
# long.
SEARCH_BUDGET_S = 30.0


def oldest_unread(connection: psycopg.Connection[Any], job: Job, upto: Lsn) -> datetime | None:
    """Return the commit time of the first transaction that the slot still has for us up to a
    position.

    Returns None without any. Raises LockHeld and SlotInUse while a run reads the slot, PeekTimeout
    when there is too much WAL to search, PeekTooLarge or SourceDiskFull when the server has no room
    for the answer, and StateError while the slot is behind what has landed.
    """
    source, identity = job.pipeline.source, job.read_identity()
    landed = Lsn(job.change_log(identity).end_after(identity.floor))
    try:
        with slot_lock(job), limited(connection, "statement_timeout", SEARCH_BUDGET_S):
            confirmed = confirmed_lsn(connection, source.slot)
            if confirmed < landed:
                raise StateError(
                    f"slot {source.slot!r} is at {confirmed}, behind {landed}, the end of its"
                    " landed changes, as after an immediate stop of its server: the next run moves"
                    " the slot"
                )
            # Messages that aren't transactional have no commit time, and targets have none of them.
            changes = with_options(source, streaming="off", messages=False)
            first = first_message(connection, changes, upto)
    except psycopg.errors.QueryCanceled as err:
        raise PeekTimeout(
            f"slot {source.slot!r} has more pending WAL than the search can read in"
            f" {SEARCH_BUDGET_S:g} s"
        ) from err
    except (psycopg.errors.UndefinedObject, psycopg.errors.ObjectInUse, *NO_ROOM) as err:
        raise peek_error(source.slot, ServerError.of(err)) from None
    except psycopg.DatabaseError as err:
        if Refusal.of(ServerError.of(err)) is None:
            raise
        raise StateError(
            f"PostgreSQL can't decode the oldest pending change in slot {source.slot!r}: the next"
            " run reports why"
        ) from err
    if first is None:
        return None
    at = begun_at(first)
    if at is None:
        raise StateError(
            f"the oldest pending change in slot {source.slot!r} belongs to no transaction and has"
            " no commit time"
        )
    return shown_at(at)


def oldest_unapplied(job: Job, states: Sequence[TableState]) -> dict[str, datetime]:
    """Return, by target, the oldest commit that has landed but isn't applied.

    Targets that can't be read are left out.
    """
    watermarks, found = Watermarks(job, job.read_identity()), {}
    change_log = watermarks.change_log
    last = change_log.last_batch()
    if last is None:
        return {}
    for state in states:
        try:
            applied = watermarks.of(state)
        except StateError:
            continue
        if applied >= last:
            continue
        stream, snapshot = change_log.stream(applied, last), Snapshot.parse(state.snapshot)
        if (at := change_log.oldest_commit(stream, state.relation_ids, snapshot)) is not None:
            found[state.table_name] = at
    return found
