"""Moves targets to the names that the pipeline file gives them, without copying their rows.

The ledger says where a target is. A folder on a disk is renamed, and the ledger has the new name
afterwards; a run that is killed in between leaves the target at the new name alone, where the next
run finds it. An object store can't rename a folder, so the operator moves it there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from waldelta.config import split_table_name
from waldelta.config.target_names import TargetNames
from waldelta.errors import LateWriter, LockHeld
from waldelta.failpoints import fault_point
from waldelta.lake import DeltaTarget, local_path, move_folder
from waldelta.lake.ledger import REMOVED, TableState, now
from waldelta.lake.storage import encode_segment
from waldelta.pipeline.advisory_locks import target_lock
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.watermarks import apply_app_id, check_same_copy, sync_app_id

log = logging.getLogger(__name__)
# The longest name of a file or folder, in bytes, on the file systems of Linux and macOS.
_MOST_BYTES = 255


def name_problems(
    names: TargetNames, tables: Iterable[str], names_in_lake: Mapping[str, str]
) -> dict[str, str]:
    """Returns by target why its name in the pipeline file can't be its name in the lake.

    ``names_in_lake`` are the names of targets that exist, by target.
    """
    problems: dict[str, str] = {}
    owners = {split_table_name(name): table for table, name in names_in_lake.items()}
    for table in sorted(tables):
        name = names.of(table)
        parts = split_table_name(name)
        owner, longest = owners.setdefault(parts, table), max(map(len, map(encode_segment, parts)))
        if owner != table:
            problems[table] = (
                f"{table} and {owner} would both be {name} in the lake: give one of them another"
                " name (target.tables, name)"
            )
        elif longest > _MOST_BYTES:
            problems[table] = (
                f"{table} would be {name} in the lake, whose folder's name would have {longest}"
                f" bytes, more than the {_MOST_BYTES} of a file system: give it a shorter name"
                " (target.tables, name)"
            )
    return problems


def plan_moves(job: Job, states: Mapping[str, TableState]) -> dict[str, str | None]:
    """Returns the targets whose name in the pipeline file isn't their name in the lake.

    Each has the reason why it can't be moved, or None.
    """
    names = {name: job.lake.stored_name(name) for name in states}
    tables = [
        name
        for name, state in sorted(states.items())
        if state.status != REMOVED and names[name] != job.lake.names.of(name)
    ]
    problems = name_problems(job.lake.names, tables, names)
    return {name: problems.get(name) or _why_not_moved(job, states[name]) for name in tables}


def move_targets(job: Job) -> list[str]:
    """Move all targets whose name in the pipeline file isn't their name in the lake.

    Returns a warning for each target that can't be moved; runs go on where it is.
    """
    states = job.read_states()
    problems = plan_moves(job, states)
    for table in [table for table, problem in problems.items() if problem is None]:
        # Another run that works on the target has its lock: a later run moves it.
        with suppress(LockHeld, LateWriter):
            problems[table] = _move(job, states[table])
    warnings = [
        f"{table} stays {job.lake.stored_name(table)} in the lake: {problem}"
        for table, problem in problems.items()
        if problem is not None
    ]
    for warning in warnings:
        log.warning("%s", warning)
    return warnings


def _move(job: Job, state: TableState) -> str | None:
    """Move a target under its lock; returns why not, or None."""
    table, name = state.table_name, job.lake.names.of(state.table_name)
    with target_lock(job, table):
        latest = check_same_copy(job, state)
        if why := _why_not_moved(job, latest):
            return why
        old, new = job.lake.target(table), job.lake.target_named(name)
        if old.uri != new.uri and _has_files(old):
            fault_point("move.begun")
            try:
                move_folder(old.uri, new.uri)
            except OSError as err:
                return f"{old.uri} can't become {new.uri} ({err.strerror}): check their permissions"
        fault_point("move.renamed")
        job.ledger.append_state(
            replace(latest, at=now(), run_id=job.run_id, stored_name=name), latest
        )
        fault_point("move.recorded")
    log.info("table=%s is at %s now, it was at %s", table, new.uri, old.uri)
    return None


def _why_not_moved(job: Job, state: TableState) -> str | None:
    table = state.table_name
    old, new = job.lake.target(table), job.lake.target_named(job.lake.names.of(table))
    if old.uri == new.uri or not _has_files(new):
        is_stuck = old.uri != new.uri and local_path(old.uri) is None and _has_files(old)
        return (
            f"an object store can't rename a folder: move {old.uri} to {new.uri} by the store's own"
            " tools while no run works, or write the old name again"
            if is_stuck
            else None
        )
    identity = job.read_identity()
    ids = (apply_app_id(identity, state), sync_app_id(identity, table))
    # A run that was killed has moved it, or the operator.
    is_moved = not _has_files(old) and any(
        (committed := new.committed(id_)) is not None and committed[1] for id_ in ids
    )
    if is_moved:
        return None
    return f"{new.uri} exists already: remove it, or give the target another name"


def _has_files(target: DeltaTarget) -> bool:
    if (folder := local_path(target.uri)) is None:
        return target.exists
    return folder.is_dir() and any(folder.iterdir())
