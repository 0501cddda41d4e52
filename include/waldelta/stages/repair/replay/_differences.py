"""Differences: the changes by which a MERGE brings a target to the derived final states.

This follows the derivation of states and precedes the merge. Only rows that differ are written, so
a replay of correct rows commits nothing.
"""

from __future__ import annotations

from pyspark.sql import functions as F

from waldelta.changes.decode import TargetPlan
from waldelta.changes.decode.collapse import ACTION_SKIP, ACTION_UPDATE, ACTION_UPSERT
from waldelta.changes.decode.counts import RAW_ROWS
from waldelta.changes.stage import Staged
from waldelta.errors import ApplyError
from waldelta.metadata_columns import OURS
from waldelta.pipeline import Job
from waldelta.spark import Runner
from waldelta.spark_sql import parquet, quote
from waldelta.stages.repair.mend import ExpectedRows, differences
from waldelta.stages.repair.mend.mend import TWICE
from waldelta.stages.repair.replay._plan import ReplayPlan


def write_differences(
    runner: Runner,
    job: Job,
    states: str,
    replay: ReplayPlan,
    folder: str,
    discarded: str | None = None,
) -> Staged:
    """Compare the states in Parquet folder ``states`` with the target.

    Writes the changes into ``folder``. A row that differs becomes an update, a missing row an
    upsert, an extra row a delete. A row that may rightly be missing is counted as skipped. Rows of
    the keys in Parquet folder ``discarded`` are left as they are. Raises ApplyError when the target
    has a key twice.
    """
    decode = replay.target.decode
    rows = runner.spark().read.parquet(states)
    target = job.lake.target(replay.target.state.table_name).frame(runner.spark())
    if discarded is not None:
        but, shape = runner.spark().read.parquet(discarded), decode.shape
        rows = rows.join(but, shape.bases, "left_anti")
        key = zip(shape.bases, shape.key, strict=True)
        same = [target[quote(decode.names[i])] == but[base] for base, i in key]
        target = target.join(but, same, "left_anti")
    missing = f"'{ACTION_UPSERT}'"
    if not replay.invents:
        missing = f"case s.action when '{ACTION_UPDATE}' then '{ACTION_SKIP}' else {missing} end"
    metadata, extra = OURS if job.pipeline.target.metadata_columns else (), _extra(replay.target)
    expected = ExpectedRows(rows, decode.columns, decode.shape, metadata, missing, extra)
    differences(expected, target).write.mode("overwrite").parquet(folder)
    return _staged(runner, replay.target, folder)


def _staged(runner: Runner, plan: TargetPlan, folder: str) -> Staged:
    """Returns the staged changes with their counts; raises ApplyError for a key twice."""
    lacking = [F.col(flag) for flag in plan.decode.shape.flags]
    is_new = F.col("action") == ACTION_UPSERT
    incomplete = is_new & F.greatest(F.lit(False), F.lit(False), *lacking)
    found = runner.spark().read.parquet(folder).groupBy("action")
    by_action = found.agg(
        F.count("*").alias("rows"),
        F.count("raw").alias("verbatim"),
        F.max(incomplete).alias("incomplete"),
    ).collect()
    counts = {row["action"]: row["rows"] for row in by_action}
    if TWICE in counts:
        raise ApplyError(
            f"{plan.state.table_name}: its target has rows with the same key, which no replay can"
            " tell apart: copy it again (initial sync with its name in tables)"
        )
    if verbatim := sum(row["verbatim"] for row in by_action):
        counts[RAW_ROWS] = verbatim
    return Staged(folder, parquet(folder), counts, any(row["incomplete"] for row in by_action))


def _extra(plan: TargetPlan) -> str | None:
    """Returns which rows leave the target without a state: those that a TRUNCATE removed."""
    if not plan.truncated:
        return None
    if not plan.decode.merges_leaves:
        return "true"
    return f"t.t{plan.decode.relid} in ({', '.join(map(str, plan.truncated_leaves))})"
