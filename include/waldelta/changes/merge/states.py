"""Merges row versions into a Delta target that keeps more than a mirror does, as one commit.

This follows row_versions, in place of merge. Every statement is built here, with quoted names, and
with numbers as the only values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa

from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_SKIP,
    ACTION_UPDATE,
    COMPLETED_ROWS,
    PLACE,
    QUARANTINED_ROWS,
    RAW_ROWS,
)
from waldelta.changes.merge.statements import (
    CommitTag,
    as_stored,
    commit_statement,
    merged_raw,
    new_value,
)
from waldelta.lake import DeltaTarget, write_parquet
from waldelta.metadata_columns import COMMIT_TS, LSN, RAW
from waldelta.spark import Runner
from waldelta.spark_sql import parquet, quote
from waldelta.target_modes import Fold, TargetMode
from waldelta.target_modes.target_mode import MOVED, STATE_XID, TO_LSN, TO_TS

if TYPE_CHECKING:
    from waldelta.changes.decode.target_plan import TargetPlan
    from waldelta.changes.stage.stage import Staged

# In a commit's counts: new rows, and ended states of the target.
STATES, ENDS = "states", "ends"
_COUNTED = (ACTION_SKIP, RAW_ROWS, COMPLETED_ROWS, QUARANTINED_ROWS)
_BASE = "waldelta_base"


@dataclass(frozen=True, slots=True)
class Kept:
    """A target as these statements see it: mode, columns, positions of the key and of TOASTable
    columns.

    Columns are given by position. In statements the target is ``t``, and staged rows are ``s``.
    """

    # Whether a staged state ends a state of the target, or begins one.
    ended: ClassVar[str] = f"s.action = '{ACTION_DELETE}'"
    begun: ClassVar[str] = f"s.action in ('{ACTION_INSERT}', '{ACTION_UPDATE}')"

    mode: TargetMode
    names: tuple[str, ...]
    key: tuple[int, ...]
    toastable: tuple[int, ...] = ()
    # TargetMode.stored_key() of the target.
    stored_key: tuple[str, ...] = ()

    @property
    def key_names(self) -> list[str]:
        """The key's columns."""
        return [self.names[i] for i in self.key]

    @property
    def values(self) -> list[tuple[str, str]]:
        """The columns that every target has, quoted, with the staged values for new rows."""
        values = [(quote(name), f"s.c{i}") for i, name in enumerate(self.names)]
        return [*values, (LSN, "s.lsn"), (COMMIT_TS, "s.commit_ts"), (RAW, "s.raw")]


def kept_of(plan: TargetPlan) -> Kept:
    """Return the target of a plan."""
    decode = plan.decode
    return Kept(plan.state.kept_as, decode.names, decode.shape.key, decode.shape.toastable)


def complete_states(
    runner: Runner, target: DeltaTarget, plan: TargetPlan, staged: Staged, folder: str
) -> Staged:
    """Complete states from the target's own rows with the values that no event sent.

    States of rows that the target doesn't have are skipped, and counted. The result is staged again
    in ``folder``, since the merge must not look up the target's rows a second time.
    """
    kept, counts = kept_of(plan), Counter(staged.counts)
    is_log = kept.mode.fold.has_changes
    looks_up = counts[ACTION_UPDATE] > 0
    if is_log:
        flags = " or ".join(f"u{i}" for i in kept.toastable)
        lacking = f"select 1 from {staged.source} where {flags} limit 1"
        looks_up = bool(kept.key and flags and runner.spark().sql(lacking).collect())
    source = as_stored(staged.source, plan.decode.types)
    if not looks_up:
        return replace(staged, source=source, counts=metric_counts(counts), net=None)
    current = kept.mode.current_rows(target.frame(runner.spark()), kept.key_names)
    current.createOrReplaceTempView(_BASE)
    runner.spark().sql(completed_query(kept, source, _BASE)).write.mode("overwrite").parquet(folder)
    updates = count_actions(runner, folder).get(ACTION_UPDATE, 0)
    if not is_log:
        counts[ACTION_SKIP] += counts[ACTION_UPDATE] - updates
        counts[ACTION_UPDATE] = updates
    return replace(staged, source=parquet(folder), counts=metric_counts(counts), net=None)


def count_actions(runner: Runner, folder: str) -> dict[str, int]:
    """Return how many staged rows have each action."""
    rows = runner.spark().read.parquet(folder).groupBy("action").count().collect()
    return {row["action"]: row["count"] for row in rows}


def metric_counts(counts: Counter[str]) -> dict[str, int]:
    """Return counts that match Delta's metrics of the commit.

    Inserted rows are states, updated rows are ended states.
    """
    told = {name: counts[name] for name in _COUNTED if counts[name]}
    return told | {
        STATES: counts[ACTION_INSERT] + counts[ACTION_UPDATE],
        ENDS: counts[ACTION_DELETE],
    }


def completed_query(kept: Kept, source: str, base: str) -> str:
    """Return the staged rows, completed with the values that only the target has."""
    on = " and ".join(f"t.{quote(kept.names[i])} = s.b{k}" for k, i in enumerate(kept.key))
    is_log = kept.mode.fold.has_changes
    wanted = "true" if is_log else f"s.action = '{ACTION_UPDATE}'"
    held = f"t.{quote(kept.names[kept.key[0]])} is not null"
    columns = ["s.action", *(f"s.b{k}" for k in range(len(kept.key)))]
    columns += [
        f"{new_value(i, name, kept.toastable)} as c{i}" for i, name in enumerate(kept.names)
    ]
    columns += [f"(s.u{i} and not ({held})) as u{i}" for i in kept.toastable]
    columns.append("s.lsn")
    if is_log:
        columns += [
            "s.commit_ts",
            f"s.{PLACE}",
            f"s.{STATE_XID}",
            f"s.{MOVED}",
            *(f"s.o{k}" for k in range(len(kept.key))),
        ]
    else:
        start = kept.mode.began_at
        columns += [f"greatest(s.commit_ts, t.{start}) as commit_ts", f"s.{TO_LSN}"]
        columns.append(
            f"case when s.{TO_TS} is null then null else greatest(s.{TO_TS}, t.{start}) end as"
            f" {TO_TS}"
        )
    columns.append(f"{merged_raw(kept.names, kept.toastable)} as raw")
    where = "" if is_log else f"\nwhere s.action <> '{ACTION_UPDATE}' or {held}"
    return (
        f"select {', '.join(columns)}\nfrom {source} s left join {base} t on {wanted} and"
        f" {on}{where}"
    )


def differences_query(kept: Kept, source: str, lsn: str, at: str) -> str:
    """Return differences from a snapshot as the rows that row_versions would make of changes.

    ``lsn`` and ``at`` are its position and time, as Spark SQL.
    """
    bases = [f"b{k}" for k in range(len(kept.key))]
    values = [f"c{i}" for i in range(len(kept.names))]
    told = [f"{lsn} as lsn", f"{at} as commit_ts"]
    if kept.mode.fold.has_changes:
        place = f"-row_number() over (order by {', '.join(bases)}) as {PLACE}"
        keys = {i: f"b{k}" for k, i in enumerate(kept.key)}
        gone = [f"{keys[i]} as c{i}" if i in keys else f"c{i}" for i in range(len(kept.names))]
        rest = [
            f"cast(null as bigint) as {STATE_XID}",
            f"false as {MOVED}",
            *(f"{b} as o{k}" for k, b in enumerate(bases)),
        ]
        return f"select action, {', '.join([*gone, *told, place, *rest])}, raw from {source}"
    ended = [f"cast(null as bigint) as {TO_LSN}", f"cast(null as timestamp) as {TO_TS}"]
    states = (
        f"select action, {', '.join([*bases, *values, *told, *ended])}, raw from {source} "
        f"where action in ('{ACTION_INSERT}', '{ACTION_UPDATE}')"
    )
    # The state before an update ends too, where it is kept; else the new one overwrites it.
    ends = (
        f"('{ACTION_DELETE}', '{ACTION_UPDATE}')"
        if kept.mode.fold is Fold.STATES
        else f"('{ACTION_DELETE}')"
    )
    until = [f"{lsn} as {TO_LSN}", f"{at} as {TO_TS}"]
    return (
        f"{states} union all select '{ACTION_DELETE}' as action,"
        f" {', '.join([*bases, *values, *told, *until])}, raw from {source} where action in {ends}"
    )


def merge_states(
    runner: Runner, target: DeltaTarget, plan: TargetPlan, staged: Staged, tag: CommitTag
) -> CommitTag:
    """Commit the staged rows; returns the tag they were committed under."""
    kept, source = kept_of(plan), staged.source
    truncates = plan.decode.unfolding.truncates if plan.decode.unfolding else ()
    if kept.mode.fold.has_changes:
        name, frame = plan.state.table_name, target.frame(runner.spark())
        kept = replace(kept, stored_key=kept.mode.stored_key(name, frame, kept.key_names))
        if truncates:
            folder = f"{staged.folder}-truncates"
            at = pa.array([t.at_us for t in truncates], pa.int64())
            rows = {
                "lsn": [t.lsn for t in truncates],
                "commit_ts": at.cast(pa.timestamp("us", "UTC")),
                PLACE: [t.place for t in truncates],
                STATE_XID: [t.xid for t in truncates],
            }
            write_parquet(folder, pa.table(rows))
            source = f"({_with_truncates(kept, source, folder)})"
    statement = kept.mode.statement(target.relation, kept, source, truncates)
    return commit_statement(runner, tag, statement)


def _with_truncates(kept: Kept, source: str, folder: str) -> str:
    """Return the changes, and a row without values for each TRUNCATE."""
    names = (
        [f"c{i}" for i in range(len(kept.names))]
        + [f"o{k}" for k in range(len(kept.key))]
        + ["raw"]
    )
    flags = [f"u{i}" for i in kept.toastable]
    told = ["lsn", "commit_ts", PLACE, STATE_XID]
    every = ["action", *names, *flags, MOVED, *told]
    empty = ["'truncate'", *(["null"] * len(names)), *(["false"] * len(flags)), "false", *told]
    return (
        f"select {', '.join(every)} from {source} union all select {', '.join(empty)} from"
        f" {parquet(folder)}"
    )
