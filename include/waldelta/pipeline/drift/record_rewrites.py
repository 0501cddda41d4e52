"""Reports, before a run applies anything, tables whose rows were rewritten on the source without
being sent.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from waldelta.errors import NeedsSync
from waldelta.failpoints import fault_point
from waldelta.lake.ledger import TableState
from waldelta.lake.ledger.records import StorageState, now
from waldelta.pipeline.drift.catalog_state import CatalogTable
from waldelta.pipeline.drift.outdated_labels import outdated_columns
from waldelta.pipeline.drift.rewrites import to_record, unsent_changes
from waldelta.pipeline.drift.schema_evolution import refusal
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.needs_copy import mark_same_copy
from waldelta.pipeline.targets.watermarks import record_state

# Maximum age of the record of a partitioned table: truncated leaves are found by rows that are
# older than the record.
RENEW_AFTER = timedelta(hours=1)


def check_mode(job: Job, state: TableState) -> None:
    """Check that the pipeline file's mode and ``copy`` fit how the target was made.

    A mirror with another mode now raises NeedsSync, and the target is marked; any other change of
    mode raises ModeRefused. ``copy: true`` for a table that was started without a copy also raises
    NeedsSync. The reverse, ``copy: false`` for a copied table, is only recorded.
    """
    name, target = state.table_name, job.pipeline.target
    wanted, copies = target.mode_of(name), target.copies(name)
    if state.kept_as == wanted and copies == (not state.copy_skipped):
        return
    state.kept_as.check_change(name, wanted)
    if state.kept_as == wanted and not copies:
        _record_skipped_copy(job, state)
        return
    reason = (
        f"{name}: the pipeline file says"
        f" {f'mode {wanted}' if state.kept_as != wanted else 'copy: true'} now"
    )
    if target.recopies(name):
        mark_same_copy(job, state, reason)
    raise NeedsSync(f"{reason}: sync it again")


def _record_skipped_copy(job: Job, state: TableState) -> None:
    """Record that a copied target won't be copied again, so that it may lack rows from now on."""
    why = (
        "the pipeline file says copy: false now: from now on the target lacks rows that only a"
        " copy could add"
    )
    record_state(job, state, lambda latest: replace(latest, copy_skipped=True, reason=why))


def check_rewrite(job: Job, state: TableState, catalog: CatalogTable) -> list[str]:
    """Record how the source stores a target's table now; returns the warnings to report.

    When rows may have got other values that weren't sent, the policy decides: NeedsSync is raised
    (and the target marked), or SchemaChanged.
    """
    outdated = outdated_columns(job, state, catalog.storage)
    what = "; ".join(unsent_changes(state, catalog.storage, outdated))
    renew = _is_stale(state, catalog.storage)
    if not what and to_record(state, catalog.storage, outdated, renew=renew) is None:
        return []
    copies = job.pipeline.target.copies(state.table_name)
    policy = job.pipeline.target.policy_of(state.table_name) if copies else "ignore"
    if what and policy == "fail":
        raise refusal(state, what)
    if what and policy == "evolve":
        mark_same_copy(job, state, f"{state.table_name}: {what}")
        raise NeedsSync(f"{state.table_name}: {what}")

    def with_storage(latest: TableState) -> TableState:
        if what:
            return replace(latest, storage=catalog.storage)
        return to_record(latest, catalog.storage, outdated, renew=renew) or latest

    if record_state(job, state, with_storage).storage != state.storage:
        fault_point("rewrite.recorded")
    why = "schema_changes: ignore" if copies else "copy: false"
    return [f"{state.table_name}: {what}; {why} leaves the target as it is"] if what else []


def _is_stale(state: TableState, storage: StorageState | None) -> bool:
    held = state.storage
    if held is None or storage is None or not any(file.inherits for file in storage.files):
        return False
    return held.as_of < storage.as_of and state.at < now() - RENEW_AFTER
