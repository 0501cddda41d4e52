"""Entries: what in its publications publishes a table, as the ledger knows it, while setup itself puts others in their place.

Setup changes publications in one transaction, so a table that is published before and after it was published all the time.
Anybody else may have taken it out for a while: that the entry is another one is all that tells (waldelta.drift).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg

from waldelta.errors import LateWriter, LockHeld, SlotMissing, SourceError
from waldelta.job import Job
from waldelta.ledger import now
from waldelta.locks import target_lock
from waldelta.standing import SYNCED
from waldelta.targets import read_targets
from waldelta.watermark import check_same_copy

log = logging.getLogger(__name__)


@contextmanager
def entries_kept(connection: psycopg.Connection[Any], job: Job) -> Iterator[None]:
    """Enter into the ledger what publishes each copied table after the block, where the same as before did until then."""
    before = _entries(connection, job)
    yield
    after = _entries(connection, job)
    for name, state in job.ledger.table_states().items():
        was, now_are = before.get(name, frozenset()), after.get(name, frozenset())
        if state.status != SYNCED or was.isdisjoint(state.entries) or not now_are or sorted(now_are) == state.entries:
            continue
        # Of a slot that begins another life, all tables are copied anew; a run that is at work on this one looks for itself.
        with suppress(LockHeld, LateWriter, SlotMissing), target_lock(job, name):
            held = check_same_copy(job, state)
            job.ledger.append_state(replace(held, at=now(), run_id=job.run_id, entries=sorted(now_are)), held)


def _entries(connection: psycopg.Connection[Any], job: Job) -> dict[str, frozenset[str]]:
    try:
        return {str(target.id): target.table.entries for target in read_targets(connection, job.pipeline)}
    except SourceError as err:  # publications that can't be read together, which setup is there to mend
        log.info("what publishes the tables can't be read: %s", err)
        return {}
