"""Differences: the changes by which a MERGE brings a target to the derived final states.

This follows the derivation of states and precedes the merge. Only rows that differ are written, so
a replay of correct rows commits nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from waldelta.changes.decode import TargetPlan
from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_PURGE,
    ACTION_SKIP,
    ACTION_UPDATE,
    ACTION_UPSERT,
)
from waldelta.changes.decode.counts import RAW_ROWS
from waldelta.changes.merge.statements import merged_raw, of_leaves, raw_entries
from waldelta.changes.stage import Staged
from waldelta.errors import ApplyError
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.spark_sql import parquet, path, quote
from waldelta.stages.repair.replay._plan import ReplayPlan

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def write_differences(  # noqa: PLR0913 - what is compared with what, by what, and where it goes
    spark: SparkSession,
    target: str,
    states: str,
    replay: ReplayPlan,
    folder: str,
    *,
    metadata_columns: bool,
    but: str | None = None,
) -> Staged:
    """Compare the states in Parquet folder ``states`` with the table at ``target``.

    Writes the changes into ``folder``. A row that differs becomes an update, a missing row an
    upsert, an extra row a delete. A row that may rightly be missing is counted as skipped. Rows of
    the keys in Parquet folder ``but`` are left as they are. Raises ApplyError when the target has a
    key twice.
    """
    plan = replay.target
    found = spark.sql(
        difference_statement(target, states, replay, metadata_columns=metadata_columns, but=but)
    )
    found.write.mode("overwrite").parquet(folder)
    lacking = [F.col(flag) for flag in plan.decode.shape.flags]
    incomplete = (
        (F.col("action") == ACTION_UPSERT) & F.greatest(F.lit(False), *lacking)
        if lacking
        else F.lit(False)
    )
    rows = spark.read.parquet(folder)
    by_action = (
        rows.groupBy("action")
        .agg(
            F.count("*").alias("rows"),
            F.count_distinct(F.struct(*plan.decode.shape.bases)).alias("keys"),
            F.count("raw").alias("verbatim"),
            F.max(incomplete).alias("incomplete"),
        )
        .collect()
    )
    if any(row["rows"] > row["keys"] for row in by_action):
        raise ApplyError(
            f"{plan.state.table_name}: its target has rows with the same key, which no replay can"
            " tell apart: copy it again (initial sync with its name in tables)"
        )
    counts = {row["action"]: row["rows"] for row in by_action}
    if verbatim := sum(row["verbatim"] for row in by_action):
        counts[RAW_ROWS] = verbatim
    return Staged(folder, parquet(folder), counts, any(row["incomplete"] for row in by_action))


def difference_statement(
    target: str, states: str, replay: ReplayPlan, *, metadata_columns: bool, but: str | None = None
) -> str:
    """Returns the SELECT of the changes, in the columns of collapse's net changes."""
    plan = replay.target
    names, key = plan.decode.names, plan.decode.shape.key
    on = " and ".join(f"t.{quote(names[i])} <=> s.b{k}" for k, i in enumerate(key))
    present = f"t.{quote(names[key[0]])} is not null"
    differs = " or ".join(_differences(plan, metadata_columns=metadata_columns)) or "false"
    missing = f"'{ACTION_UPSERT}'"
    if not replay.invents:
        missing = (
            f"case s.action when '{ACTION_UPDATE}' then '{ACTION_SKIP}' else '{ACTION_UPSERT}' end"
        )
    action = (
        f"case when s.action = '{ACTION_PURGE}' then case when {present} then '{ACTION_DELETE}' end"
        f" when not ({present}) then {missing} when {differs} then '{ACTION_UPDATE}' end"
    )
    asked = parquet(states)
    if but is not None:
        same = " and ".join(f"l.{base} <=> a.{base}" for base in plan.decode.shape.bases)
        asked = f"(select a.* from {asked} as a left anti join {parquet(but)} as l on {same})"
    columns = [name for name in plan.decode.net_schema.names if name != "action"]
    listed = ", ".join(columns)
    found = (
        f"select * from (select {action} as action, {', '.join(f's.{c}' for c in columns)}\n"
        f"from {asked} as s left join {path(target)} as t on {on})\n"
        "where action is not null"
    )
    if not plan.truncated:
        return found
    bases = {f"b{k}": f"t.{quote(names[i])}" for k, i in enumerate(key)}
    of_truncated = (
        f"\nwhere {of_leaves('t', plan.truncated_leaves)}" if plan.decode.merges_leaves else ""
    )
    # In a row of nulls these columns have the types of the states.
    rest = ", ".join(f"{bases.get(c, 'n.' + c)} as {c}" for c in columns)
    nothing = (
        f"(select {listed} from (select 1) left join (select * from {parquet(states)} where false)"
        " on true)"
    )
    return (
        f"{found}\nunion all\nselect '{ACTION_DELETE}' as action, {rest}\nfrom {path(target)} as t"
        f" left anti join {parquet(states)} as s on {on} cross join {nothing} as n{of_truncated}"
    )


def _differences(plan: TargetPlan, *, metadata_columns: bool) -> list[str]:
    """Returns a condition per column that is true where the target's row differs from the state."""
    shape = plan.decode.shape
    found = []
    for i, (name, kind) in enumerate(plan.decode.columns):
        if i in shape.key:
            continue
        sent = kind.stored_sql(f"s.c{i}")
        differs = f"not ({kind.exact_sql(f't.{quote(name)}')} <=> {kind.exact_sql(sent)})"
        found.append(f"(not s.u{i} and {differs})" if i in shape.toastable else differs)
    if metadata_columns:
        merged = merged_raw(plan.decode.names, shape.toastable)
        found += [f"not (t.{LSN} <=> s.lsn)", f"not (t.{COMMIT_TS} <=> s.commit_ts)"]
        found.append(f"not ({raw_entries(f't.{RAW}')} <=> {raw_entries(f'({merged})')})")
    return found
