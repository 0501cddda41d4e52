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
    begun: TableState, run_id: str, counts: Mapping[str, int] | None = None
) -> CommitTag:
    """Returns the identity of the repair's single commit.

    ``begun`` is its first ledger row, whose time is unique.
    """
    app_id = f"waldelta:repair:{begun.table_name}:{begun.generation}:{begun.at.isoformat()}"
    return CommitTag(app_id, 1, run_id, counts=dict(counts or {}), verb=_REPAIR)


def carry_over(job: Job, begun: TableState, rows: Sequence[Decision]) -> None:
    """Make these the quarantine's rows of the generation that a repair begins; it has no others.

    They are the rows that the target continues to lack, and accepted rows, whose decision is
    recorded with the repair.
    """
    quarantine = Decisions(job.lake)
    if rows or quarantine.outlines(begun.table_name, begun.generation):
        quarantine.replace(begun.table_name, begun.generation, -1, rows)


def record_repaired(
    runner: Runner, job: Job, begun: TableState, cut: TargetCut, by: str | None = None
) -> None:
    """Record in the ledger that a repair is done, and that its quarantined rows were read again.

    Raises LateWriter when another run owns the target now.
    """
    before = _before(job, begun)
    held = _count_rows(runner, job, begun.table_name)
    at = now()
    done = replace(begun, at=at, status=SYNCED, rows=held, seconds=(at - begun.at).total_seconds())
    job.ledger.append_state(done, begun)
    fault_point("repair.recorded")
    # These records are for readers: rows of an earlier generation have no effect any more.
    quarantine = Decisions(job.lake)
    carried = latest_rows(quarantine.rows(begun.table_name, begun.generation))
    reason = f"read again as of {Lsn(begun.snapshot_lsn)}" + (
        f": {begun.reason}" if begun.reason else ""
    )
    past = []
    for key in sorted(watched_rows(quarantine.rows(before.table_name, before.generation))):
        if key not in carried:
            past.append(
                Decision(
                    at,
                    begun.run_id,
                    RESOLVED,
                    before.table_name,
                    before.generation,
                    0,
                    key,
                    why=reason,
                    by=by,
                )
            )
        elif carried[key].status == ACCEPTED:
            past.append(replace(carried[key], at=at, generation=before.generation))
    if past:
        quarantine.add(past)
    log.info("table=%s repaired at version %d", begun.table_name, cut.version)


def _count_rows(runner: Runner, job: Job, name: str) -> int:
    """Returns the target's row count, from its log where possible."""
    target = job.lake.target(name)
    table = target.open()
    counted = None if table.has_deletion_vectors else row_count(table.files)
    return target.frame(runner.spark()).count() if counted is None else counted


def end_repair(runner: Runner, job: Job, begun: TableState) -> TargetCut | None:
    """Find out whether an aborted repair was committed, and record its end in the ledger.

    Returns None when it never will be committed. The caller must have the target's lock. Raises
    StateError when the target's Delta log no longer contains that, LateWriter when another run owns
    the target now.
    """
    name, tag = begun.table_name, repair_tag(begun, begun.run_id)
    if committed_verb(job, begun, tag) is None:
        _void(runner, job, begun, tag)
    verb = committed_verb(job, begun, tag)
    if verb == _REPAIR:
        cut = replace(read_commit(job, begun, tag), skipped=0)
        record_repaired(runner, job, begun, cut)
        log.warning("table=%s its interrupted repair was committed, nothing to do", name)
        return cut
    if verb != _VOID:
        raise StateError(
            f"{name}: its Delta log doesn't show whether its repair was committed: it needs a new"
            " copy"
        )
    before = _before(job, begun)
    # The generation was never a target's, and pruning would keep discarded rows of it for ever.
    carry_over(job, begun, [])
    job.ledger.append_state(replace(before, at=now(), run_id=job.run_id), begun)
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
    standings, cuts, ended = read_lifecycles(job, published), {}, False
    for found in standings:
        begun = found.state
        # A copy's first row has no snapshot yet.
        if begun is None or begun.status != COPYING or not begun.snapshot:
            continue
        if found.action not in (RequiredAction.COPY, RequiredAction.BROKEN):
            continue
        try:
            _check_same_timeline(job, begun)
            with target_lock(job, begun.table_name):
                if (
                    job.read_state(begun.table_name) == begun
                    and (cut := end_repair(runner, job, begun)) is not None
                ):
                    cuts[begun.table_name] = cut
            ended = True
        except (LateWriter, LockHeld) as err:
            log.info("table=%s %s", begun.table_name, err)
        except (ConfigError, SparkUnreachable):
            raise
        except Exception as err:  # Spark's errors too: a copy repairs the table.
            log.warning("table=%s needs a new copy: %s", begun.table_name, without_values(err))
    return (read_lifecycles(job, published) if ended else standings), cuts


def _check_same_timeline(job: Job, begun: TableState) -> None:
    """Raise StateError after a failover: it checks only ``synced`` targets against the new primary.

    A repair may have begun before the failover.
    """
    moves, slot = job.ledger.slot_moves(), job.pipeline.source.slot
    if identity_of(slot, moves).timeline != incarnation_of(slot, moves).timeline:
        raise StateError(
            f"{begun.table_name}: the source failed over, perhaps since its repair began"
        )


def _void(runner: Runner, job: Job, begun: TableState, tag: CommitTag) -> None:
    target = job.lake.target(begun.table_name)
    try:
        commit_nothing(runner, target, replace(tag, verb=_VOID), begun.key_columns[0])
    except (ConfigError, SparkUnreachable):
        raise
    except Exception as err:
        # The repair may have just committed after all.
        if committed_verb(job, begun, tag) is None:
            raise ApplyError(f"{begun.table_name}: {without_values(err)}") from err


def _before(job: Job, begun: TableState) -> TableState:
    """Returns the target's ledger row that a repair replaced."""
    rows = [row for row in job.read_all_states(begun.table_name) if row.at < begun.at]
    if not rows:
        raise StateError(
            f"{begun.table_name}: the ledger doesn't show its state before its repair: it needs a"
            " new copy"
        )
    return rows[-1]
