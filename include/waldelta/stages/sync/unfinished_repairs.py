"""Repair's end: whether a repair that broke off, or was killed, has committed, and what the ledger
says of its target from then on.

Under the target's lock. A repair enters into the ledger what its target will be (``copying``, with
the snapshot), commits under a transaction id of its own, and enters that it is done. Whoever finds
only the first asks the target's Delta log. Where the commit is missing, an empty one takes its
place: Delta skips whatever still begins under that id, and refuses whatever has begun. The target
is then what it was before, and so is its state.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from waldelta.changes.merge import CommitTag, read_commit
from waldelta.changes.merge.commits import committed_verb
from waldelta.changes.merge.statements import tagged, void_statement
from waldelta.errors import (
    ApplyError,
    ConfigError,
    LateWriter,
    LockHeld,
    SparkUnreachable,
    StateError,
)
from waldelta.failpoints import fault_point
from waldelta.lake import files_of
from waldelta.lake.ledger import IncompleteRow, Quarantine, TableState, TargetCut
from waldelta.lake.ledger.quarantine import ACCEPTED, RESOLVED, latest_rows, watched_rows
from waldelta.lake.ledger.records import COPYING, SYNCED, now
from waldelta.lake.storage import has_deletion_vectors, row_count
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, target_lock
from waldelta.pipeline.slot_identity import identity_of, incarnation_of
from waldelta.pipeline.targets import RequiredAction, TableLifecycle, TargetSource
from waldelta.pipeline.targets.lifecycle import read_lifecycles
from waldelta.pipeline.targets.watermarks import uri_of
from waldelta.pipeline.task_errors import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_REPAIR, _VOID = "repair", "void"


def repair_tag(
    begun: TableState, run_id: str, counts: Mapping[str, int] | None = None
) -> CommitTag:
    """The identity of the one commit of a repair; ``begun`` is its first row of the ledger, whose
    time no other has.
    """
    app_id = f"waldelta:repair:{begun.table_name}:{begun.generation}:{begun.at.isoformat()}"
    return CommitTag(app_id, 1, run_id, counts=dict(counts or {}), verb=_REPAIR)


def carry_over(job: Job, begun: TableState, rows: Sequence[IncompleteRow]) -> None:
    """Make these the quarantine's rows of the generation that a repair begins: until it ends it has
    no others.

    Those that the target goes on to lack, and those that were accepted: who decided that is
    recorded with the repair itself.
    """
    quarantine = Quarantine(job.pipeline.target.root, job.storage_options)
    if rows or quarantine.outlines(begun.table_name, begun.generation):
        quarantine.replace(begun.table_name, begun.generation, -1, rows)


def record_repaired(
    spark: SparkSession, job: Job, begun: TableState, cut: TargetCut, by: str | None = None
) -> TableState:
    """Enter into the ledger that a repair is done, and of its quarantined rows that they were read
    again.

    Raises LateWriter when the target is another's meanwhile.
    """
    before = _before(job, begun)
    held = _count_rows(spark, job, begun.table_name)
    at = now()
    done = replace(begun, at=at, status=SYNCED, rows=held, seconds=(at - begun.at).total_seconds())
    done = job.ledger.append_state(done, begun)
    fault_point("repair.recorded")
    # For people: rows of an earlier generation count no more.
    quarantine = Quarantine(job.pipeline.target.root, job.storage_options)
    carried = latest_rows(quarantine.rows(begun.table_name, begun.generation))
    reason = f"read again as of {Lsn(begun.snapshot_lsn)}" + (
        f": {begun.reason}" if begun.reason else ""
    )
    past = []
    for key in sorted(watched_rows(quarantine.rows(before.table_name, before.generation))):
        if key not in carried:
            past.append(
                IncompleteRow(
                    at,
                    begun.run_id,
                    RESOLVED,
                    before.table_name,
                    before.generation,
                    0,
                    key,
                    reason=reason,
                    by=by,
                )
            )
        elif carried[key].status == ACCEPTED:
            past.append(replace(carried[key], at=at, generation=before.generation))
    if past:
        quarantine.add(past)
    log.info("table=%s repaired at version %d", begun.table_name, cut.version)
    return done


def _count_rows(spark: SparkSession, job: Job, name: str) -> int:
    """How many rows the target has: by its log, where that tells."""
    table = DeltaTable(uri_of(job, name), storage_options=job.storage_options)
    counted = None if has_deletion_vectors(table) else row_count(files_of(table))
    return (
        spark.read.format("delta").load(uri_of(job, name)).count() if counted is None else counted
    )


def end_repair(spark: SparkSession, job: Job, begun: TableState) -> TargetCut | None:
    """Find out whether a repair that broke off has committed, and enter its end into the ledger;
    None: it never will.

    The caller holds the target's lock. Raises StateError when the target's Delta log doesn't tell
    any more, LateWriter when the target is another's meanwhile.
    """
    name, tag = begun.table_name, repair_tag(begun, begun.run_id)
    if committed_verb(job, begun, tag) is None:
        _void(spark, job, begun, tag)
    verb = committed_verb(job, begun, tag)
    if verb == _REPAIR:
        cut = replace(read_commit(job, begun, tag), skipped=0)
        record_repaired(spark, job, begun, cut)
        log.warning("table=%s its repair had been committed when it broke off: it is done", name)
        return cut
    if verb != _VOID:
        raise StateError(
            f"{name}: its Delta log doesn't tell whether its repair was committed: it is to be"
            " copied"
        )
    before = _before(job, begun)
    # Of a generation that no target was ever of: pruning keeps what is discarded, however old.
    carry_over(job, begun, [])
    job.ledger.append_state(replace(before, at=now(), run_id=job.run_id), begun)
    log.warning(
        "table=%s its repair hadn't been committed when it broke off: it is as it was before", name
    )
    return None


def end_killed_repairs(
    spark: SparkSession, job: Job, published: Mapping[str, TargetSource]
) -> tuple[list[TableLifecycle], dict[str, TargetCut]]:
    """Where every table stands, once the repairs that were killed have been ended; and what those
    did that had committed.

    A repair whose end nobody can tell leaves its table to be copied. Raises ConfigError and
    SparkUnreachable where no session can be had, which says nothing of a table.
    """
    standings, cuts, ended = read_lifecycles(job, published), {}, False
    for found in standings:
        begun = found.state
        if begun is None or not _was_killed(found, begun):
            continue
        try:
            _check_same_timeline(job, begun)
            with target_lock(job, begun.table_name):
                if (
                    job.table_state(begun.table_name) == begun
                    and (cut := end_repair(spark, job, begun)) is not None
                ):
                    cuts[begun.table_name] = cut
            ended = True
        except (LateWriter, LockHeld) as err:
            log.info("table=%s %s", begun.table_name, err)
        except (ConfigError, SparkUnreachable):
            raise
        except Exception as err:  # Spark's too: a copy mends it
            log.warning("table=%s is to be copied: %s", begun.table_name, first_line(err))
    return (read_lifecycles(job, published) if ended else standings), cuts


def _was_killed(found: TableLifecycle, state: TableState) -> bool:
    # A copy's first row has no snapshot yet.
    return (
        found.action in (RequiredAction.COPY, RequiredAction.BROKEN)
        and state.status == COPYING
        and bool(state.snapshot)
    )


def _check_same_timeline(job: Job, begun: TableState) -> None:
    """A failover judges by what is ``synced`` how much of it the new primary has: a repair may have
    been begun before it.
    """
    moves, slot = job.ledger.slot_moves(), job.pipeline.source.slot
    if identity_of(slot, moves).timeline != incarnation_of(slot, moves).timeline:
        raise StateError(
            f"{begun.table_name}: the source failed over, perhaps since its repair began"
        )


def _void(spark: SparkSession, job: Job, begun: TableState, tag: CommitTag) -> None:
    statement = void_statement(uri_of(job, begun.table_name), begun.key_columns[0])
    try:
        with tagged(spark, replace(tag, verb=_VOID)):
            spark.sql(statement).collect()
    except (ConfigError, SparkUnreachable):
        raise
    except Exception as err:
        # Perhaps because the repair has just committed after all.
        if committed_verb(job, begun, tag) is None:
            raise ApplyError(f"{begun.table_name}: {first_line(err)}") from err


def _before(job: Job, begun: TableState) -> TableState:
    """The target's row of the ledger that a repair replaced."""
    rows = [row for row in job.table_rows(begun.table_name) if row.at < begun.at]
    if not rows:
        raise StateError(
            f"{begun.table_name}: the ledger doesn't tell what it was before its repair: it is to"
            " be copied"
        )
    return rows[-1]
