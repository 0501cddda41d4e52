"""Entries: what in its publications publishes a table, as the ledger knows it, while setup itself
puts others in their place.

Setup changes publications in one transaction, so a table that is published before and after it was
published all the time. Anybody else may have taken it out for a while: that the entry is another
one is all that tells (waldelta.pipeline.drift.drift).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg

from waldelta.errors import LateWriter, LockHeld, SlotMissing, SourceError
from waldelta.lake.ledger.records import SYNCED, now
from waldelta.pipeline import Job, target_lock
from waldelta.pipeline.targets.target_sources import read_unlocked_sources
from waldelta.pipeline.targets.watermarks import check_same_copy
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
    """Enter into the ledger what publishes each copied table after the block, where the same as
    before did until then.
    """
    before = _entries(connection, job)
    yield
    after = _entries(connection, job)
    for name, state in job.ledger.table_states().items():
        was, now_are = before.get(name, frozenset()), after.get(name, frozenset())
        if state.status != SYNCED or not now_are or not is_replaced(state.entries, was, now_are):
            continue
        # Of a slot that begins another life, all tables are copied anew; a run that is at work on
        # this one looks for itself.
        with suppress(LockHeld, LateWriter, SlotMissing), target_lock(job, name):
            held = check_same_copy(job, state)
            job.ledger.append_state(
                replace(held, at=now(), run_id=job.run_id, entries=to_texts(now_are)), held
            )


def is_replaced(
    held: list[str], was: frozenset[Membership], now_are: frozenset[Membership]
) -> bool:
    """Whether what is recorded held until setup put something else in its place, so that this may
    be recorded; pure.

    What loses operations stays on record until a run has seen that. Rules that weren't the same for
    all kinds of changes stay on record as long as they may have left their mark.
    """
    known = from_texts(held)
    # Of what an earlier version recorded, it is known whether it is gone.
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
        # Of a table that somebody keeps locked nothing is recorded: the next run looks for itself.
        _, targets, _ = read_unlocked_sources(connection, job.pipeline, sizes=False)
        return {str(target.id): target.table.entries for target in targets if not target.is_unread}
    except SourceError as err:
        # Publications that can't be read together, which setup is there to mend.
        log.info("what publishes the tables can't be read: %s", err)
        return {}
