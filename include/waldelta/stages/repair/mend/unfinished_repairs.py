"""Finds out whether an aborted or killed repair was committed, and records its target's state.

This happens under the target's lock. A repair first records its target's new state (``copying``,
with the snapshot) in the ledger, commits under its own transaction id, and records that it is done.
A run that finds only the first row reads the target's Delta log. If the commit is missing, the run
commits an empty one in its place: Delta skips a commit that begins later under that id, and refuses
one that has begun. The target and its state are then as before the repair.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from waldelta.changes.merge.commits import commit_nothing, committed_verb, read_commit
from waldelta.changes.merge.statements import CommitTag
from waldelta.errors import (
    ApplyError,
    ConfigError,
    LateWriter,
    LockHeld,
    SparkUnreachable,
    StateError,
    without_values,
)
from waldelta.failpoints import fault_point
from waldelta.lake import row_count
from waldelta.lake.ledger import (
    ACCEPTED,
    COPYING,
    RESOLVED,
    SYNCED,
    Decision,
    Decisions,
    TableState,
    TargetCut,
    now,
    watched_rows,
)
from waldelta.lake.ledger.decisions import latest_rows
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, target_lock
from waldelta.pipeline.job import identity_of, incarnation_of
from waldelta.pipeline.targets import RequiredAction, TableLifecycle, TargetSource, read_lifecycles
from waldelta.spark import Runner

log = logging.getLogger(__name__)

_REPAIR, _VOID = "repair", "void"


def repair_tag(
    first_row: TableState, run_id: str, counts: Mapping[str, int] | None = None
) -> CommitTag:
    """Returns the identity of the repair's single commit.

    ``first_row`` is its first ledger row, whose time is unique.
    """
    app_id = (
        f"waldelta:repair:{first_row.table_name}:{first_row.generation}:{first_row.at.isoformat()}"
    )
    return CommitTag(app_id, 1, run_id, counts=dict(counts or {}), verb=_REPAIR)


def carry_over(job: Job, first_row: TableState, rows: Sequence[Decision]) -> None:
    """Make these the quarantine's rows of the generation that a repair begins; it has no others.

    They are the rows that the target continues to lack, and accepted rows, whose decision is
    recorded with the repair.
    """
    quarantine = Decisions(job.lake)
    if rows or quarantine.outlines(first_row.table_name, first_row.generation):
        quarantine.replace(first_row.table_name, first_row.generation, -1, rows)


def record_repaired(
    runner: Runner, job: Job, first_row: TableState, cut: TargetCut, by: str | None = None
) -> None:
    """Record in the ledger that a repair is done, and that its quarantined rows were read again.

    Raises LateWriter when another run owns the target now.
    """
    original = _original_state(job, first_row)
    row_count = _count_rows(runner, job, first_row.table_name)
    at = now()
    last_row = replace(
        first_row, at=at, status=SYNCED, rows=row_count, seconds=(at - first_row.at).total_seconds()
    )
    job.ledger.append_state(last_row, first_row)
    fault_point("repair.recorded")
    # These records are for readers: rows of an earlier generation have no effect any more.
    quarantine = Decisions(job.lake)
    carried = latest_rows(quarantine.rows(first_row.table_name, first_row.generation))
    reason = f"read again as of {Lsn(first_row.snapshot_lsn)}" + (
        f": {first_row.reason}" if first_row.reason else ""
    )
    past = []
    for key in sorted(watched_rows(quarantine.rows(original.table_name, original.generation))):
        if key not in carried:
            past.append(
                Decision(
                    at,
                    first_row.run_id,
                    RESOLVED,
                    original.table_name,
                    original.generation,
                    0,
                    key,
                    why=reason,
                    by=by,
                )
            )
        elif carried[key].status == ACCEPTED:
            past.append(replace(carried[key], at=at, generation=original.generation))
    if past:
        quarantine.add(past)
    log.info("table=%s repaired at version %d", first_row.table_name, cut.version)


def _count_rows(runner: Runner, job: Job, name: str) -> int:
    """Returns the target's row count, from its log where possible."""
    target = job.lake.target(name)
    table = target.open()
    counted = None if table.has_deletion_vectors else row_count(table.files)
    return target.frame(runner.spark()).count() if counted is None else counted


def end_repair(runner: Runner, job: Job, first_row: TableState) -> TargetCut | None:
    """Find out whether an aborted repair was committed, and record its end in the ledger.

    Returns None when it never will be committed. The caller must have the target's lock. Raises
    StateError when the target's Delta log no longer contains that, LateWriter when another run owns
    the target now.
    """
    name, tag = first_row.table_name, repair_tag(first_row, first_row.run_id)
    if committed_verb(job, first_row, tag) is None:
        _void(runner, job, first_row, tag)
    verb = committed_verb(job, first_row, tag)
    if verb == _REPAIR:
        cut = replace(read_commit(job, first_row, tag), skipped=0)
        record_repaired(runner, job, first_row, cut)
        log.warning("table=%s its interrupted repair was committed, nothing to do", name)
        return cut
    if verb != _VOID:
        raise StateError(
            f"{name}: its Delta log doesn't show whether its repair was committed: it needs a new"
            " copy"
        )
    original = _original_state(job, first_row)
    # The generation was never a target's, and pruning would keep discarded rows of it for ever.
    carry_over(job, first_row, [])
    job.ledger.append_state(replace(original, at=now(), run_id=job.run_id), first_row)
    log.warning(
        "table=%s its interrupted repair was not committed, so its target is unchanged", name
    )
    return None


def end_killed_repairs(
    runner: Runner, job: Job, published: Mapping[str, TargetSource]
) -> tuple[list[TableLifecycle], dict[str, TargetCut]]:
    """Returns every table's lifecycle after ending killed repairs, and what committed ones did.

    A repair whose end is unknown leaves its table to be copied. Raises ConfigError and
    SparkUnreachable where no session is available, which isn't about a table.
    """
    all_lifecycles, cuts, ended = read_lifecycles(job, published), {}, False
    for lifecycle in all_lifecycles:
        first_row = lifecycle.state
        # A copy's first row has no snapshot yet.
        if first_row is None or first_row.status != COPYING or not first_row.snapshot:
            continue
        if lifecycle.action not in (RequiredAction.COPY, RequiredAction.BROKEN):
            continue
        try:
            _check_same_timeline(job, first_row)
            with target_lock(job, first_row.table_name):
                if (
                    job.read_state(first_row.table_name) == first_row
                    and (cut := end_repair(runner, job, first_row)) is not None
                ):
                    cuts[first_row.table_name] = cut
            ended = True
        except (LateWriter, LockHeld) as err:
            log.info("table=%s %s", first_row.table_name, err)
        except (ConfigError, SparkUnreachable):
            raise
        except Exception as err:  # Spark's errors too: a copy repairs the table.
            log.warning("table=%s needs a new copy: %s", first_row.table_name, without_values(err))
    return (read_lifecycles(job, published) if ended else all_lifecycles), cuts


def _check_same_timeline(job: Job, first_row: TableState) -> None:
    """Raise StateError after a failover: it checks only ``synced`` targets against the new primary.

    A repair may have begun before the failover.
    """
    moves, slot = job.ledger.slot_moves(), job.pipeline.source.slot
    if identity_of(slot, moves).timeline != incarnation_of(slot, moves).timeline:
        raise StateError(
            f"{first_row.table_name}: the source failed over, perhaps since its repair began"
        )


def _void(runner: Runner, job: Job, first_row: TableState, tag: CommitTag) -> None:
    target = job.lake.target(first_row.table_name)
    try:
        commit_nothing(runner, target, replace(tag, verb=_VOID), first_row.key_columns[0])
    except (ConfigError, SparkUnreachable):
        raise
    except Exception as err:
        # The repair may have just committed after all.
        if committed_verb(job, first_row, tag) is None:
            raise ApplyError(f"{first_row.table_name}: {without_values(err)}") from err


def _original_state(job: Job, first_row: TableState) -> TableState:
    """Returns the target's ledger row that a repair replaced."""
    rows = [row for row in job.read_all_states(first_row.table_name) if row.at < first_row.at]
    if not rows:
        raise StateError(
            f"{first_row.table_name}: the ledger doesn't show its state before its repair: it needs"
            " a new copy"
        )
    return rows[-1]
