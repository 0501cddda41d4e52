"""Replay of a table without a key: its rows can't be told apart, so the table is rebuilt from its
copy.

The copy is the target's own version that the sync committed, which Delta keeps as long as
maintenance promises. All later changes are applied to it, and the target is replaced if it differs
from the result.
"""

from __future__ import annotations

from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_INSERT
from waldelta.changes.merge.keyless import KeylessTarget, different_rows, rewritten_rows
from waldelta.changes.merge.statements import FOUND_DELETES, FOUND_UPDATES
from waldelta.changes.stage.stage import stage
from waldelta.errors import SchemaChanged
from waldelta.lake import DeltaTarget, TableError
from waldelta.lake.changelog import BatchNumbers, ChangeLog, Snapshot
from waldelta.lake.ledger import TableState
from waldelta.pipeline import Job
from waldelta.spark import Runner
from waldelta.spark_sql import parquet
from waldelta.stages.repair.replay._plan import ReplayPlan


def batches_since_copy(
    job: Job, change_log: ChangeLog, state: TableState, watermark: int
) -> BatchNumbers:
    """Returns the range of all batches since the copy.

    Raises SchemaChanged when the change log no longer goes back to the copy.
    """
    identity = job.read_identity()
    after = min(change_log.visible_upto(Snapshot.parse(state.snapshot), identity.floor), watermark)
    lowest = change_log.lowest_batch()
    if lowest is None or lowest > after + 1:
        raise SchemaChanged(
            f"{state.table_name} has no key, and the change log no longer reaches back to its copy"
        )
    job.read_landed_sizes(identity, after, watermark)  # raises SlotGap
    return BatchNumbers(after, watermark)


def write_rows(
    runner: Runner,
    job: Job,
    change_log: ChangeLog,
    replay: ReplayPlan,
    folder: str,
) -> dict[str, int]:
    """Write the target's expected rows as Parquet into ``folder``; returns counts of differences.

    Raises SchemaChanged when the copy's version is gone, or had other columns.
    """
    plan, table = replay.target, KeylessTarget.of(job, replay.target)
    target = job.lake.target(plan.state.table_name)
    staged = stage(runner, change_log, plan, f"{folder}-net/net")
    base = (
        f"{target.relation} limit 0"
        if plan.is_truncated
        else target.relation_at(_version_of_copy(plan.state, target))
    )
    rows = runner.spark().sql(rewritten_rows(base, staged.source, table))
    rows.write.mode("overwrite").parquet(folder)
    statement = different_rows(target.relation, parquet(folder), table)
    ((lacking, many),) = runner.spark().sql(statement).collect()
    found = {ACTION_INSERT: int(lacking), ACTION_DELETE: int(many)}
    return {FOUND_UPDATES: 0, FOUND_DELETES: int(many), **found} if lacking or many else {}


def _version_of_copy(state: TableState, target: DeltaTarget) -> int:
    """Returns the target's version that its sync committed, if it is readable with today's
    columns.
    """
    table = target.open()
    present = table.schema.names
    for entry in table.commits():
        written = entry["waldelta"]
        if (written.get("verb"), written.get("generation")) == ("sync", state.generation):
            try:
                copied = target.open(int(entry["version"]))
            except TableError:
                break
            if copied.schema.names == present:
                return copied.version
            raise SchemaChanged(
                f"{state.table_name} has no key, and its columns changed since its copy"
            )
    raise SchemaChanged(
        f"{state.table_name} has no key, and the version of its copy isn't there any more"
    )
