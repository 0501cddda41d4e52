"""Reports and records, before a run applies anything, how a target differs from its source.

That is publication drift (changed filters, column lists and partitions), another mode in the
pipeline file, and rows that were rewritten on the source without being sent.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg

from waldelta.errors import ConfigError, NeedsSync
from waldelta.failpoints import fault_point
from waldelta.lake.changelog import Snapshot, last_truncates
from waldelta.lake.ledger import TableState, now
from waldelta.pipeline.drift.catalog_state import CatalogTable, read_catalog_state, stored
from waldelta.pipeline.drift.consent import (
    check_may_copy,
    columns_to_stop,
    may_resync,
    schema_rules,
)
from waldelta.pipeline.drift.drift import PublicationDrift, find_drift
from waldelta.pipeline.drift.repair_plan import Repair, describe_moving
from waldelta.pipeline.drift.schema_evolution import refusal, retyped_columns
from waldelta.pipeline.drift.unsent_changes import (
    outdated_columns,
    rewritten,
    to_record,
    unsent_changes,
    with_stopped,
    with_truncated,
)
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets import (
    ReplicatedTarget,
    TargetSource,
    Watermarks,
    filter_of,
    record_state,
)
from waldelta.pipeline.targets.lifecycle import mark_for_copy_if_unchanged
from waldelta.pipeline.targets.target_sources import read_targets
from waldelta.postgres import Connection
from waldelta.postgres.publication_membership import from_texts
from waldelta.target_modes.target_mode import Feature

log = logging.getLogger(__name__)
# Maximum age of the record of a partitioned table: truncated leaves are found by rows that are
# older than the record.
RENEW_AFTER = timedelta(hours=1)


def read_published_now(
    connection: psycopg.Connection[Any],
    job: Job,
    mappings: Mapping[str, TargetSource],
    states: Sequence[TableState],
    locked: Collection[int] = (),
) -> dict[str, ReplicatedTarget]:
    """Returns the targets with their current sources, by name.

    Returns nothing, without a query, when no target was copied. ``locked``: see read_targets().
    """
    if not states:
        return {}
    targets = read_targets(connection, job.pipeline, mappings, sizes=False, locked=locked)
    return {str(target.id): target for target in targets}


def check_drift(
    job: Job,
    state: TableState,
    catalog: CatalogTable,
    target: ReplicatedTarget | None,
    drifted: dict[str, Repair],
) -> list[str]:
    """Returns the warnings about a target's drift.

    A drift that must be repaired raises NeedsSync. Before that, the target is marked and
    ``drifted`` gets what the repair needs.
    """
    if target is None:
        return []
    if target.problem is not None:
        raise ConfigError(target.problem)
    if catalog.truncated and _is_truncated(job, state):
        catalog = replace(catalog, truncated=catalog.truncated_alone)
    drift = find_drift(job.pipeline, state, catalog, target)
    if not job.pipeline.target.copies(state.table_name):
        return _continue_without_copy(job, state, drift)
    name, reasons = state.table_name, "; ".join(drift.reasons)
    evolves = drift.mends and may_resync(job, state)
    if evolves:
        mark_for_copy_if_unchanged(job, state, f"{name}: {reasons}")
        # Where the target isn't a mirror, a new copy repairs it and leaves the kept rows alone.
        drifted |= {name: drift.repair} if state.target_mode.supports(Feature.MEND) else {}
    elif drift.is_new:
        # Log at once: a run that is killed after the record was written has reported the drift,
        # too.
        if reasons:
            log.warning("table=%s drifted from its source: %s", name, reasons)
        _record(job, state, drift)
    if drift.mends:
        raise NeedsSync(
            f"{name}: {reasons}" + ("" if evolves else ": run the initial sync for it again")
        )
    return _describe(job, name, drift) if reasons else []


def _describe(job: Job, name: str, drift: PublicationDrift) -> list[str]:
    """Describe a drift where the target stays as it is, with the way to repair it."""
    reasons = "; ".join(drift.reasons)
    with job.source.connect("drift") as connection:
        moving = describe_moving(connection, drift.repair)
    summary = (
        f"{name} drifted from its source: {reasons}; the target stays as it is, like a table of a"
        " PostgreSQL subscriber"
    )
    return [
        (
            f"{summary}; {moving + ': ' if moving else 'to repair it: '}waldelta sync"
            f" FILE --tables {name}"
        )
    ]


def _continue_without_copy(job: Job, state: TableState, drift: PublicationDrift) -> list[str]:
    """Record a drift of a target that lacks rows on purpose (copy: false).

    From now on its changes are filtered by the new rules. Raises ConfigError when its own filter
    changed, because apply routes rows by the filter that the target was created with.
    """
    target_filter = filter_of(state)
    if (target_filter.text if target_filter else None) != drift.repair.where:
        name = state.table_name
        raise ConfigError(
            f"{name} has copy: false and can't follow a change of target.tables.{name}.where: undo"
            f" the change, or remove its target's folder and sync --tables {name}, to start with"
            " an empty target"
        )
    if drift.is_new:
        _record(job, state, drift)
    return []


def _is_truncated(job: Job, state: TableState) -> bool:
    """Returns whether a TRUNCATE of the whole table explains the truncated leaves; that one is
    sent.

    The target may not reflect that TRUNCATE yet. Or it reflects it since the leaves' files were
    recorded, at a time when it wasn't known yet what had landed.
    """
    watermarks = Watermarks(job, job.read_identity())
    change_log = watermarks.change_log
    last, after = change_log.last_batch(), watermarks.of(state)
    if last is None:
        return False
    snapshot = Snapshot.parse(state.snapshot)
    if last > after and last_truncates(change_log.stream(after, last), state, snapshot):
        return True
    if not (recorded := state.storage.as_of):
        return False
    begin = change_log.visible_upto(Snapshot(recorded, recorded), watermarks.identity.floor)
    batch = change_log.first_truncate(begin, after, state.relation_ids)
    return batch is not None and bool(
        last_truncates(change_log.stream(batch - 1, after), state, snapshot, since_xid=recorded)
    )


def _record(job: Job, state: TableState, drift: PublicationDrift) -> None:
    """Record what is now known of the drift, so that it is reported only once."""
    drifted_state = drift.state
    change = partial(
        replace,
        row_filter=drifted_state.row_filter,
        later_filters=drifted_state.later_filters,
        unrepaired_leaves=drifted_state.unrepaired_leaves,
        unpublished=drifted_state.unpublished,
        entries=drifted_state.entries,
    )
    record_state(job, state, change)


def check_mode(job: Job, state: TableState) -> None:
    """Check that the pipeline file's mode and ``copy`` fit how the target was made.

    A mirror with another mode now raises NeedsSync, and the target is marked; any other change of
    mode raises ModeRefused. ``copy: true`` for a table that was started without a copy also raises
    NeedsSync. The reverse, ``copy: false`` for a copied table, is only recorded.
    """
    name, target = state.table_name, job.pipeline.target
    mode, copies = target.mode_of(name), target.copies(name)
    if state.target_mode == mode and copies == (not state.copy_skipped):
        return
    state.target_mode.check_change(name, mode)
    if state.target_mode == mode and not copies:
        why = (
            "the pipeline file says copy: false now: from now on the target lacks rows that only a"
            " copy could add"
        )
        # The target won't be copied again, so it may lack rows.
        record_state(job, state, lambda latest: replace(latest, copy_skipped=True, reason=why))
        return
    reason = (
        f"{name}: the pipeline file says"
        f" {f'mode {mode}' if state.target_mode != mode else 'copy: true'} now"
    )
    if may_resync(job, state):
        mark_for_copy_if_unchanged(job, state, reason)
    raise NeedsSync(f"{reason}: sync it again")


def check_rewrite(job: Job, state: TableState, catalog: CatalogTable) -> list[str]:
    """Record how the source stores a target's table now; returns the warnings to report.

    PostgreSQL may have changed values of rows without sending them. Then the table's
    ``schema_changes`` decides: evolve marks the target for a copy and raises NeedsSync; ask does so
    once an operator agrees, and raises ConsentNeeded before; fail raises SchemaChanged; ignore
    returns a warning.
    """
    rules, storage = schema_rules(job, state), catalog.storage
    stopped: frozenset[str] = frozenset()
    is_rewritten = bool(rewritten(state.storage, storage))
    retyped = retyped_columns(state, catalog) if is_rewritten else {}
    if rules.policy == "ask" and is_rewritten:
        stopped = columns_to_stop(rules, state, retyped=retyped)
    seen = with_stopped(state, storage, stopped)
    outdated = outdated_columns(job, seen, storage)
    if what := "; ".join(unsent_changes(seen, storage, outdated)):
        what = "; ".join((what, *(str(of) for name, of in retyped.items() if name not in stopped)))
    renew = (
        any(file.inherits for file in storage.files)
        and state.storage.as_of < storage.as_of
        and state.at < now() - RENEW_AFTER
    )
    if not what and to_record(seen, storage, outdated, renew=renew) is None:
        return []
    copies = job.pipeline.target.copies(state.table_name)
    policy = rules.policy if copies else "ignore"
    if what and policy == "fail":
        raise refusal(state, what)
    if what and policy == "ask":
        check_may_copy(rules, state, what)
    if what and policy in ("evolve", "ask"):
        mark_for_copy_if_unchanged(job, state, f"{state.table_name}: {what}")
        raise NeedsSync(f"{state.table_name}: {what}")

    def with_storage(latest: TableState) -> TableState:
        if what:
            return replace(latest, storage=catalog.storage)
        latest_seen = with_stopped(latest, storage, stopped)
        return to_record(latest_seen, storage, outdated, renew=renew) or latest

    if record_state(job, state, with_storage).storage != state.storage:
        fault_point("rewrite.recorded")
    why = "schema_changes: ignore" if copies else "copy: false"
    return [f"{state.table_name}: {what}; {why} leaves the target as it is"] if what else []


# --- leaves of a target that merges partitions, or takes one partition. A leaf that joins the
# merged ones was created empty after the copy, so its changes are all that it holds.


def with_leaves(state: TableState, mappings: Mapping[str, TargetSource]) -> TableState:
    """Returns a target's state with all leaves that are its sources now.

    Leaves that were detached stay until another target takes them.
    """
    mapping = mappings.get(state.table_name)
    if mapping is None or mapping.root_id is None or mapping.root_id != state.root_id:
        return state
    elsewhere = {
        oid
        for name, source in mappings.items()
        if name != state.table_name
        for oid in source.relation_ids
    }
    leaves = sorted((mapping.relation_ids | set(state.relation_ids)) - elsewhere)
    return state if leaves == sorted(state.relation_ids) else replace(state, relation_ids=leaves)


def reduce_to_leaves(
    state: TableState, catalog: CatalogTable, mapping: TargetSource | None
) -> tuple[TableState, CatalogTable]:
    """Returns a target's recorded state and its source's current one, each of its own leaves only.

    This applies to a target that takes one partition of a published root, or merges partitions. A
    merged leaf that has left all publications isn't included, though it still is a partition.
    """
    if mapping is None:
        return state, catalog
    if mapping.root_id is not None:
        return _without_returned(state, mapping), replace(
            catalog, storage=stored(catalog, mapping.relation_ids)
        )
    if (partition := mapping.partition) is None:
        return state, catalog
    leaves = {
        leaf for leaf, above in catalog.above.items() if leaf == partition or partition in above
    }
    attached = {leaf: name for leaf, name in catalog.attached.items() if leaf in leaves}
    return state, replace(catalog, storage=stored(catalog, leaves), attached=attached)


def read_own_tables(
    connection: Connection,
    states: Sequence[TableState],
    mappings: Mapping[str, TargetSource],
    landed_as_of: int | None = None,
) -> tuple[list[TableState], dict[str, CatalogTable]]:
    """Read what the source has of these targets now; return both reduced as by reduce_to_leaves().

    ``landed_as_of``: see with_truncated().
    """
    there = read_catalog_state(connection, states)
    pairs = [
        reduce_to_leaves(state, there[state.table_name], mappings.get(state.table_name))
        for state in states
    ]
    reduced = [state for state, _ in pairs]
    tables = {state.table_name: table for state, table in pairs}
    return reduced, with_truncated(connection, reduced, tables, landed_as_of)


def _without_returned(state: TableState, mapping: TargetSource) -> TableState:
    """Returns the state without recorded leaves that were in no publication then.

    A run that was killed may have left them. Without them, they count as new when they return.
    """
    if not (relations := {m.relation for m in from_texts(state.entries)}):
        return state
    files = [
        file
        for file in state.storage.files
        if file.oid in relations or file.oid not in mapping.late
    ]
    return replace(state, storage=replace(state.storage, files=files))


def record_leaves(job: Job, state: TableState, mappings: Mapping[str, TargetSource]) -> TableState:
    """Record the leaves of with_leaves() in the ledger where they changed the state.

    Raises LockHeld while another run works on the target.
    """
    if with_leaves(state, mappings) is state:
        return state
    return record_state(job, state, lambda latest: with_leaves(latest, mappings))
