"""Entries: records which publication entries publish a table, when setup itself replaces them.

Setup changes publications in one transaction, so a table that is published before and after it was
never unpublished. Another program may have removed it for a while; a changed entry is the only sign
of that (waldelta.pipeline.drift.drift).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg

from waldelta.errors import LateWriter, LockHeld, SlotMissing, SourceError
from waldelta.lake.ledger.records import SYNCED
from waldelta.pipeline import Job
from waldelta.pipeline.targets.target_sources import read_unlocked_sources
from waldelta.pipeline.targets.watermarks import record_state
from waldelta.postgres.publication_membership import (
    Membership,
    from_texts,
    is_same,
    is_uniform,
    lost_operations,
    says_alike,
    to_texts,
    was_away,
)

log = logging.getLogger(__name__)


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
    known = from_texts(held)
    # For an entry recorded by an earlier version, only its absence can be seen.
    held_until_then = (
        is_same(known, was) if known else bool(held) and bool(was) and not was_away(held, was)
    )
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
