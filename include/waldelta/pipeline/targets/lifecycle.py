"""Where a table is in its lifecycle, from what is published and what the ledger has of it.

Apply, sync, resync, the idle check, setup and status all use this module, so that they agree on
what becomes of a table.

Apply marks a table that only a new copy makes exact ``needs_sync``, and skips it; landing and the
other tables go on. The same run copies a small table. A sync that follows copies a large one: in
Airflow, the run triggers the DAG of the initial sync. A copy that failed or was killed leaves the
table marked, so that every run tries again, or asks for a sync, until a copy succeeds.

The names of tables that an operator gives are checked here, too, before anything is started.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from typing import Any

import psycopg

from waldelta.config import dag_id_of
from waldelta.config.pipeline_file import SchemaPolicy
from waldelta.error_catalog import ERRORS
from waldelta.errors import ConfigError, LakeError, LateWriter, LockHeld, TableBusy
from waldelta.failpoints import fault_point
from waldelta.lake.ledger import (
    COPYING,
    FAILED,
    NEEDS_SYNC,
    REMOVED,
    SYNCED,
    Ledger,
    TableState,
    now,
)
from waldelta.pipeline.advisory_locks import target_lock
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.target_sources import TargetSource, read_target_sources, read_targets
from waldelta.pipeline.targets.watermarks import check_same_copy
from waldelta.postgres import LOCK_TIMEOUT_S, TableId, read_around, read_bytes, read_locked_tables
from waldelta.quantities import first_of

log = logging.getLogger(__name__)

_AWAY = "it is no longer published, and its target stays as it is"
_NEVER = "it was never copied"
_OF_EARLIER_SLOT = "its copy belongs to an earlier slot"
_RETURNED = (
    "it left the publications and returned, and PostgreSQL did not send the changes in between"
)
_RECREATED = "it was dropped and created again on the source"
_NAME_TAKEN = "it was renamed on the source, and another published table has its name now"
_OTHER_SOURCE = "its changes come from other tables than its copy"

_KILLED = "it was killed"
# What is said of a table by its name. PostgreSQL also publishes a table without columns.
NOT_PUBLISHED = (
    "is no longer published, or has no published column any more: its target stays unchanged; to"
    " replicate it again, run setup or give it a column, then run the initial sync, since changes"
    " made in between aren't applied"
)

_MOST_NAMED = 10
_ATTEMPTS = 5
# The pause between attempts of an initial copy, after the first two; it doubles each time.
_SHORTEST_PAUSE, _LONGEST_PAUSE = timedelta(minutes=5), timedelta(hours=6)


class RequiredAction(StrEnum):
    """What must happen to a table next."""

    APPLY = "apply"  # Runs apply the table's landed changes.
    # The initial sync copies it, and hasn't begun. Until then its target doesn't count.
    FIRST = "first copy"
    # A run, or a sync after it, copies it: only a new copy is exact, or an initial copy wasn't
    # finished.
    COPY = "copy"
    WAIT = "wait"  # A copy is running.
    REMOVED = "removed"  # The table isn't published any more.
    BROKEN = "broken"  # The table gets no changes until an operator syncs it.


@dataclass(frozen=True, slots=True)
class LatestState:
    """A table's latest state, and whether its target has had a complete copy since it was last
    published.

    ``attempts`` are the copies begun since the last complete one.
    """

    state: TableState
    copied: bool
    attempts: int = 0


@dataclass(frozen=True, slots=True)
class TableLifecycle:
    """What a table requires and why; ``state`` is None when the current slot incarnation doesn't
    know it.

    ``failed`` describes how the last attempt to copy it ended. It is None when there was none
    since, or when one is running.
    """

    table_name: str
    action: RequiredAction
    state: TableState | None = None
    reason: str = ""
    failed: str | None = None

    @property
    def why(self) -> str:
        """How the last copy ended, else why a copy is needed."""
        return f"its last copy {self.failed}" if self.failed else self.reason


def lifecycle_of(
    table_name: str,
    published: Mapping[str, TargetSource],
    newest: LatestState | None,
    *,
    running: bool = False,
    policy: SchemaPolicy = "evolve",
    at: datetime | None = None,
) -> TableLifecycle:
    """Returns a table's lifecycle at a moment (None: now); otherwise pure.

    ``published`` has each target's current source. ``running`` is True when a run works on the
    table's copy. ``policy`` decides whether a copy may start without an operator when only waldelta
    knows that it is needed.
    """
    state = newest.state if newest else None
    mapping = published.get(table_name)
    is_same_source = state is not None and _has_source(state, mapping, published)
    if mapping is None and not (is_same_source and state is not None and state.status == SYNCED):
        return TableLifecycle(table_name, RequiredAction.REMOVED, state, _AWAY)
    if newest is None or state is None:
        return TableLifecycle(table_name, RequiredAction.FIRST, None, _NEVER)
    if state.status == REMOVED:
        return TableLifecycle(table_name, RequiredAction.FIRST, state, _RETURNED)
    if state.status == SYNCED and is_same_source:
        return TableLifecycle(table_name, RequiredAction.APPLY, state)
    lifecycle = _to_be_copied(table_name, published, newest, running=running, policy=policy)
    return (
        lifecycle
        if newest.copied or lifecycle.action == RequiredAction.WAIT
        else _first_copy(lifecycle, newest, at or now())
    )


def _has_source(
    state: TableState, mapping: TargetSource | None, published: Mapping[str, TargetSource]
) -> bool:
    """Whether changes still come from the tables that the target was copied from."""
    if mapping is not None and mapping.root_id is not None:
        return state.root_id == mapping.root_id  # Leaves may come and go.
    if (
        mapping is not None
        and state.root_id is None
        and not mapping.relation_ids.isdisjoint(state.relation_ids)
    ):
        return True
    if mapping is not None or state.source_table is not None or state.root_id is not None:
        return False
    # A renamed table is still published; apply names the renaming and the remedy.
    return _is_published(state, published)


def _is_published(state: TableState, published: Mapping[str, TargetSource]) -> bool:
    """Whether the table that a target was copied from is published, under any name."""
    return any(
        of.is_plain(name) and not of.relation_ids.isdisjoint(state.relation_ids)
        for name, of in published.items()
    )


def _to_be_copied(
    table_name: str,
    published: Mapping[str, TargetSource],
    newest: LatestState,
    *,
    running: bool,
    policy: SchemaPolicy,
) -> TableLifecycle:
    state, mapping = newest.state, published.get(table_name)
    reason = state.reason or ""
    if state.status == SYNCED:
        was_plain = state.source_table is None and state.root_id is None
        is_plain = was_plain and mapping is not None and mapping.is_plain(table_name)
        reason = (
            _OTHER_SOURCE
            if not is_plain
            else _NAME_TAKEN
            if _is_published(state, published)
            else _RECREATED
        )
    failed = None
    if state.status == FAILED:
        failed, reason = f"failed ({reason})", ""
    if not newest.copied:
        reason = _NEVER
    if state.status == COPYING:
        if running:
            return TableLifecycle(table_name, RequiredAction.WAIT, state, reason)
        failed = "was killed"
    # A target that is marked for a copy was either never copied, or a copy was agreed to.
    follows = policy == "evolve" or (policy == "ask" and state.status != SYNCED)
    return TableLifecycle(
        table_name,
        RequiredAction.COPY if follows else RequiredAction.BROKEN,
        state,
        reason,
        failed,
    )


def _first_copy(lifecycle: TableLifecycle, newest: LatestState, at: datetime) -> TableLifecycle:
    """An initial copy that an operator started is retried automatically where that can help.

    The pauses between attempts grow.
    """
    state = newest.state
    if lifecycle.failed is None:
        return replace(lifecycle, action=RequiredAction.FIRST)
    if state.status == FAILED and _needs_operator(state.reason or ""):
        return replace(lifecycle, action=RequiredAction.BROKEN)
    again = state.at + _pause(newest.attempts)
    if at >= again:
        return replace(lifecycle, action=RequiredAction.COPY)
    return replace(
        lifecycle,
        action=RequiredAction.BROKEN,
        failed=f"{lifecycle.failed}, to be tried again after {again:%Y-%m-%d %H:%M} UTC",
    )


def _needs_operator(reason: str) -> bool:
    """Whether another attempt of a copy would fail in the same way, so that an operator is needed.

    An error without a name may come from a dead JVM, and is retried.

    >>> failed = ("ConfigError", "TableBusy", "TargetNotWritable", "Py4JNetworkError")
    >>> [_needs_operator(f"{error}: …") for error in failed]
    [True, False, False, False]
    """
    error = ERRORS.get(reason.partition(":")[0])
    return error is not None and not error.retryable and not issubclass(error, LakeError)


def _pause(attempts: int) -> timedelta:
    """The pause after this many attempts.

    >>> [str(_pause(n)) for n in (1, 2, 3, 4, 8, 9, 1000)]
    ['0:00:00', '0:05:00', '0:10:00', '0:20:00', '5:20:00', '6:00:00', '6:00:00']
    """
    return (
        timedelta()
        if attempts < 2
        else min(_SHORTEST_PAUSE * 2 ** min(attempts - 2, 10), _LONGEST_PAUSE)
    )


def latest_by_name(rows: Iterable[TableState]) -> dict[str, LatestState]:
    """Returns each table's latest state from the ledger's rows, oldest first."""
    latest: dict[str, LatestState] = {}
    for row in rows:
        previous = latest.get(row.table_name)
        copied = row.status != REMOVED and (
            row.status in (SYNCED, NEEDS_SYNC) or (previous is not None and previous.copied)
        )
        attempts = 0 if previous is None or row.status in (SYNCED, REMOVED) else previous.attempts
        latest[row.table_name] = LatestState(row, copied, attempts + (row.status == COPYING))
    return latest


def target_generations(ledger: Ledger) -> dict[str, int]:
    """Returns the copy generation of each target's data.

    A copy that is running or has failed already has its number in the ledger, but isn't the
    target's data yet.
    """
    rows = ledger.generations()
    newest = {name: generation for name, generation, _ in rows}
    return newest | {name: generation for name, generation, status in rows if status == SYNCED}


def read_published(
    connection: psycopg.Connection[tuple[object, ...]], job: Job
) -> dict[str, TargetSource]:
    """Returns each target's current source among the pipeline's publications, by the target's name.

    It waits for no session that keeps a table locked.
    """
    return read_target_sources(connection, job.pipeline, read_locked_tables(connection).relations)


def check_names(job: Job, names: Iterable[str]) -> None:
    """Raise ConfigError for a name that is neither published nor in the ledger.

    Before the pipeline's first setup any name is accepted, because the job then says what is
    missing.
    """
    with job.source.connect("tables") as connection:
        table_names = set(read_published(connection, job)) | set(job.ledger.table_states())
    if table_names and (
        unknown := sorted({str(TableId.parse(name)) for name in names} - table_names)
    ):
        raise unknown_tables(unknown, table_names)


def unknown_tables(unknown: Collection[str], table_names: Collection[str]) -> ConfigError:
    """Returns the error of names that none of the known tables has.

    >>> print(unknown_tables(["public.ordrs"], ["public.orders", "public.lines"]))
    the pipeline has no table public.ordrs: did you mean public.orders?
    """
    names = sorted(table_names)
    near = [match for name in unknown for match in get_close_matches(name, names, 1)]
    hint = (
        f"did you mean {', '.join(near)}?"
        if near
        else f"it has {first_of(names) or 'none yet: run setup'}"
    )
    return ConfigError(f"the pipeline has no table {', '.join(sorted(unknown))}: {hint}")


def read_lifecycles(job: Job, published: Mapping[str, TargetSource]) -> list[TableLifecycle]:
    """Returns every table that is published or was copied in the current slot incarnation, by
    name.
    """
    rows = job.ledger.table_rows()
    latest = latest_by_name(job.read_identity().states_of(rows))
    earlier = {row.table_name for row in rows} - latest.keys()
    # Once a renamed table has been copied under its new name, the target of the old one is left.
    copied = {name for name, newest in latest.items() if newest.state.status == SYNCED}
    sources = {name: of for name, of in published.items() if name not in copied}
    lifecycles = [
        _read(job, name, published if name in published else sources, latest.get(name))
        for name in sorted(latest.keys() | published.keys())
    ]
    return [
        replace(one, reason=_OF_EARLIER_SLOT) if one.table_name in earlier else one
        for one in lifecycles
    ]


def record_removed(
    job: Job, all_lifecycles: Iterable[TableLifecycle], *, recopied: bool = False
) -> list[str]:
    """Record in the ledger which tables aren't published any more; returns the newly recorded ones.

    Such tables get no changes, so once published again they must be copied again. A table that was
    never copied is left out. So is one that returned and was copied again after the publications
    were read, unless this reading of the publications is newer (``recopied``).
    """
    names = []
    for lifecycle in all_lifecycles:
        if (
            lifecycle.action == RequiredAction.REMOVED
            and lifecycle.state is not None
            and _record_removed(job, lifecycle.state, recopied=recopied)
        ):
            log.warning("table=%s %s", lifecycle.table_name, NOT_PUBLISHED)
            names.append(lifecycle.table_name)
    return names


def check_not_removed(job: Job, first_row: TableState, verb: str) -> None:
    """Raise LateWriter if a run recorded that a table left the publications while it was ``verb``
    (copied, repaired).

    Changes of that time are in no copy or repair that began before, with ``first_row``.
    """
    latest = job.ledger.table_rows(first_row.table_name)[-1]
    if (latest.generation, latest.status) != (first_row.generation, COPYING):
        raise LateWriter(
            f"{first_row.table_name} left the publications while it was {verb}: sync it again once"
            " it is published"
        )


def _record_removed(job: Job, first_state: TableState, *, recopied: bool) -> bool:
    """Record that a table left the publications; returns whether this call did.

    Returns False if another run recorded it first, or began another copy of the table.
    """
    state: TableState | None = first_state
    for _ in range(_ATTEMPTS):
        if (
            state is None
            or state.status == REMOVED
            or (state.generation != first_state.generation and not recopied)
        ):
            return False
        try:
            job.ledger.append_state(
                replace(state, at=now(), run_id=job.run_id, status=REMOVED, reason=_AWAY),
                state,
            )
            return True
        except LateWriter:
            state = job.read_state(first_state.table_name)
    raise LateWriter(
        f"{first_state.table_name} isn't published any more, but other runs kept changing its"
        " ledger entry: run again"
    )


def record_killed(job: Job, all_lifecycles: Iterable[TableLifecycle]) -> bool:
    """Record in the ledger which initial copies were killed; returns whether there were any.

    The pause before the next attempt counts from this record: without it, a copy that was killed
    after a day would be due at once.
    """
    recorded = False
    for lifecycle in all_lifecycles:
        state = lifecycle.state
        if (
            state is None
            or state.status != COPYING
            or lifecycle.reason != _NEVER
            or lifecycle.action not in (RequiredAction.COPY, RequiredAction.BROKEN)
        ):
            continue
        with (
            suppress(LockHeld, LateWriter),
            target_lock(job, lifecycle.table_name),
        ):  # A LockHeld or LateWriter means that another run has taken the copy over.
            job.ledger.append_state(
                replace(state, at=now(), run_id=job.run_id, status=FAILED, reason=_KILLED), state
            )
            recorded = True
    return recorded


def never_copied(job: Job, all_lifecycles: Iterable[TableLifecycle]) -> str | None:
    """Returns a message about published tables without a target, and what to do; None without
    any.
    """
    lifecycles = requiring(all_lifecycles, RequiredAction.FIRST)
    if not lifecycles:
        return None
    listed = first_of([f"{table.table_name} ({table.why})" for table in lifecycles], _MOST_NAMED)
    return (
        f"published, but without a copy to which runs can apply changes: {listed}; run the initial"
        f" sync ({dag_id_of(job.pipeline.pipeline, 'initial_sync')}, or sync), which copies"
        " them"
    )


def copied_by_runs(
    job: Job, published: Mapping[str, TargetSource], all_lifecycles: Iterable[TableLifecycle]
) -> list[TableLifecycle]:
    """Returns the tables without a copy that a run copies by itself, or leaves to the initial sync.

    These are tables that match patterns with ``new_tables: adopt``. Other new tables wait for an
    operator to start the initial sync.
    """
    adopting = [p for p in job.pipeline.source.publications if p.new_tables == "adopt"]
    return [
        table
        for table in requiring(all_lifecycles, RequiredAction.FIRST)
        for source in [published[table.table_name].source]
        if any(publication.adopts((source.schema, source.name)) for publication in adopting)
    ]


def requiring(
    all_lifecycles: Iterable[TableLifecycle], *kinds: RequiredAction
) -> list[TableLifecycle]:
    """Returns the tables that require one of these actions."""
    return [lifecycle for lifecycle in all_lifecycles if lifecycle.action in kinds]


def states_requiring(
    all_lifecycles: Iterable[TableLifecycle], *kinds: RequiredAction
) -> list[TableState]:
    """Returns the states of the targets that have one and require one of these actions."""
    lifecycles = requiring(all_lifecycles, *kinds)
    return [lifecycle.state for lifecycle in lifecycles if lifecycle.state is not None]


def states_to_apply(all_lifecycles: Iterable[TableLifecycle]) -> list[TableState]:
    """Returns the states of the targets to which runs apply landed changes.

    The apply stage and the idle check both ask here, so that no run starts for a target that it
    would leave out.
    """
    return states_requiring(all_lifecycles, RequiredAction.APPLY)


def _read(
    job: Job, name: str, published: Mapping[str, TargetSource], newest: LatestState | None
) -> TableLifecycle:
    running = (
        newest is not None
        and newest.state.status == COPYING
        and name in published
        and _is_locked(job, name)
    )
    policy = job.pipeline.target.policy_of(name)
    if not job.pipeline.target.copies(name):
        policy = "fail"  # A table that only a copy makes exact waits for the operator.
    return lifecycle_of(name, published, newest, running=running, policy=policy)


def copies_under_way(job: Job) -> list[str]:
    """Returns the names of tables that a run is copying or repairing right now.

    Changes that landed since their snapshots wait for them.
    """
    states = job.read_states()
    unfinished = [name for name in sorted(states) if states[name].status in (COPYING, NEEDS_SYNC)]
    return [name for name in unfinished if _is_locked(job, name)]


def _is_locked(job: Job, table: str) -> bool:
    """Whether a run works on the target right now."""
    try:
        with target_lock(job, table):
            return False
    except LockHeld:
        return True


def mark_for_copy(job: Job, state: TableState, reason: str) -> None:
    """Record that a target needs a new copy; the caller holds its lock and passes its latest
    ``state``.
    """
    marked = replace(state, at=now(), run_id=job.run_id, status=NEEDS_SYNC, reason=reason)
    job.ledger.append_state(marked, state)
    fault_point("resync.marked")


def mark_for_copy_if_unchanged(job: Job, state: TableState, reason: str) -> None:
    """Record under the target's lock that it needs a new copy.

    Raises LockHeld, and LateWriter when another run has copied it since ``state`` was read.
    """
    with target_lock(job, state.table_name):
        mark_for_copy(job, check_same_copy(job, state), reason)


def read_table_bytes(job: Job) -> tuple[dict[str, int], dict[str, TableBusy]]:
    """Returns the size of each target's source tables with TOAST, by the target's name.

    Also returns the error of each target whose tables stay locked too long to be read.
    """
    with job.source.connect("sizes") as connection:
        (sizes, unread), locked = read_around(
            connection, LOCK_TIMEOUT_S, partial(_table_bytes, connection, job)
        )
    return sizes, {name: locked.busy(name) for name in unread}


def _table_bytes(
    connection: psycopg.Connection[Any], job: Job, locked: Collection[int]
) -> tuple[dict[str, int], set[str]]:
    """Returns the sizes, and the names of targets left out because their tables (oids) are
    ``locked``.
    """
    targets = read_targets(connection, job.pipeline, sizes=False, locked=locked)
    leaves = {str(target.id): {leaf.oid for leaf in target.table.leaves} for target in targets}
    unread = {
        str(target.id)
        for target in targets
        if target.is_unread or not leaves[str(target.id)].isdisjoint(locked)
    }
    readable = {name: oids for name, oids in leaves.items() if name not in unread}
    return read_bytes(connection, readable), unread
