"""Merges row versions into a Delta target that keeps more than a mirror does, as one commit.

This follows row_versions, in place of merge. Every statement is built here, with quoted names, and
with numbers as the only values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from waldelta.changes.decode.collapse import (
    ACTION_DELETE,
    ACTION_INSERT,
    ACTION_SKIP,
    ACTION_UPDATE,
)
from waldelta.changes.decode.collapse_keyless import PLACE
from waldelta.changes.decode.counts import COMPLETED_ROWS, QUARANTINED_ROWS, RAW_ROWS
from waldelta.changes.decode.row_states import MOVED, STATE_XID, TO_LSN, TO_TS, Truncation
from waldelta.changes.merge.live_rows import TRUNCATE, live_rows
from waldelta.changes.merge.statements import (
    CommitTag,
    as_stored,
    merged_raw,
    new_value,
    tagged,
)
from waldelta.config import TargetMode
from waldelta.config.target_mode import CHANGELOG, HISTORY
from waldelta.errors import LateWriter
from waldelta.lake import write_parquet
from waldelta.metadata_columns import (
    BEFORE,
    COMMIT_TS,
    DELETED,
    DELETED_AT,
    LSN,
    OP,
    RAW,
    SEQ,
    UNCHANGED,
    VALID_FROM,
    VALID_FROM_LSN,
    VALID_TO,
    VALID_TO_LSN,
    XID,
)
from waldelta.spark_sql import parquet, path, quote, string

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from waldelta.changes.decode import TargetPlan
    from waldelta.changes.stage import Staged

# In a commit's counts: new rows, and ended states of the target.
STATES, ENDS = "states", "ends"
_COUNTED = (ACTION_SKIP, RAW_ROWS, COMPLETED_ROWS, QUARANTINED_ROWS)
_BASE = "waldelta_base"


@dataclass(frozen=True, slots=True)
class Kept:
    """A target as these statements see it: mode, columns, positions of the key and of TOASTable
    columns.

    Columns are given by position.
    """

    mode: TargetMode
    names: tuple[str, ...]
    key: tuple[int, ...]
    toastable: tuple[int, ...] = ()

    @property
    def key_names(self) -> list[str]:
        """The key's columns."""
        return [self.names[i] for i in self.key]


def kept_of(plan: TargetPlan) -> Kept:
    """Return the target of a plan."""
    decode = plan.decode
    return Kept(plan.state.kept_as, decode.names, decode.shape.key, decode.shape.toastable)


def complete_states(
    spark: SparkSession, uri: str, plan: TargetPlan, staged: Staged, folder: str
) -> Staged:
    """Complete states from the target's own rows with the values that no event sent.

    States of rows that the target doesn't have are skipped, and counted. The result is staged again
    in ``folder``, since the merge must not look up the target's rows a second time.
    """
    kept, counts = kept_of(plan), Counter(staged.counts)
    _check_read(plan)
    is_log = kept.mode == CHANGELOG
    looks_up = (
        bool(counts[ACTION_UPDATE])
        if not is_log
        else bool(kept.key) and _lacks(spark, staged, kept)
    )
    source = as_stored(staged.source, plan.decode.types)
    if not looks_up:
        return replace(staged, source=source, counts=_metric_counts(counts), net=None)
    base = (
        live_rows(spark.read.format("delta").load(uri), kept.mode, kept.key_names)
        if is_log
        else None
    )
    relation = _base_relation(uri, kept)
    if base is not None:
        base.createOrReplaceTempView(_BASE)
        relation = _BASE
    spark.sql(completed_query(kept, source, relation)).write.mode("overwrite").parquet(folder)
    updates = count_actions(spark, folder).get(ACTION_UPDATE, 0)
    if not is_log:
        counts[ACTION_SKIP] += counts[ACTION_UPDATE] - updates
        counts[ACTION_UPDATE] = updates
    return replace(staged, source=parquet(folder), counts=_metric_counts(counts), net=None)


def count_actions(spark: SparkSession, folder: str) -> dict[str, int]:
    """Return how many staged rows have each action."""
    rows = spark.read.parquet(folder).groupBy("action").count().collect()
    return {row["action"]: row["count"] for row in rows}


def _check_read(plan: TargetPlan) -> None:
    if plan.decode.unfolding is None:
        raise LateWriter(
            f"{plan.state.table_name}: another run synced it in another mode during this run: run"
            " again"
        )


def _lacks(spark: SparkSession, staged: Staged, kept: Kept) -> bool:
    flags = " or ".join(f"u{i}" for i in kept.toastable)
    return bool(flags) and bool(
        spark.sql(f"select 1 from {staged.source} where {flags} limit 1").collect()
    )


def _metric_counts(counts: Counter[str]) -> dict[str, int]:
    """Return counts that match Delta's metrics of the commit.

    Inserted rows are states, updated rows are ended states.
    """
    told = {name: counts[name] for name in _COUNTED if counts[name]}
    return told | {
        STATES: counts[ACTION_INSERT] + counts[ACTION_UPDATE],
        ENDS: counts[ACTION_DELETE],
    }


def _base_relation(uri: str, kept: Kept) -> str:
    of = f"{VALID_TO_LSN} is null" if kept.mode == HISTORY else f"not {DELETED}"
    return f"(select * from {path(uri)} where {of})"


def completed_query(kept: Kept, source: str, base: str) -> str:
    """Return the staged rows, completed with the values that only the target has."""
    on = " and ".join(f"t.{quote(kept.names[i])} = s.b{k}" for k, i in enumerate(kept.key))
    is_log = kept.mode == CHANGELOG
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
        start = VALID_FROM if kept.mode == HISTORY else COMMIT_TS
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


def merge_states(
    spark: SparkSession, uri: str, plan: TargetPlan, staged: Staged, tag: CommitTag
) -> CommitTag:
    """Commit the staged rows; returns the tag they were committed under."""
    kept, truncates = (
        kept_of(plan),
        plan.decode.unfolding.truncates if plan.decode.unfolding else (),
    )
    source = staged.source
    if kept.mode == CHANGELOG and truncates:
        folder = f"{staged.folder}-truncates"
        write_parquet(folder, _truncate_rows(truncates))
        source = f"({_with_truncates(kept, source, folder)})"
    with tagged(spark, tag):
        spark.sql(states_statement(uri, kept, source, truncates)).collect()
    return tag


def states_statement(
    uri: str, kept: Kept, source: str, truncates: Sequence[Truncation] = ()
) -> str:
    """Return the one statement that merges row versions into the target.

    Its first TRUNCATE ends all current states of the target.
    """
    if kept.mode == CHANGELOG:
        return append_statement(uri, kept, source)
    if kept.mode == HISTORY:
        return history_statement(uri, kept, source, truncates)
    return soft_delete_statement(uri, kept, source, truncates)


def history_statement(
    uri: str, kept: Kept, source: str, truncates: Sequence[Truncation] = ()
) -> str:
    """Return the MERGE that ends current states and adds new ones.

    A state that began where it ends was never visible, and is deleted.
    """
    on = " and ".join(f"t.{quote(kept.names[i])} = s.b{k}" for k, i in enumerate(kept.key))
    inserts = [
        *_values(kept),
        (VALID_FROM, "s.commit_ts"),
        (VALID_FROM_LSN, "s.lsn"),
        (VALID_TO, f"s.{TO_TS}"),
        (VALID_TO_LSN, f"s.{TO_LSN}"),
    ]
    statement = (
        f"merge into {path(uri)} as t\nusing {source} as s\non {on} and t.{VALID_TO_LSN} is null"
        f" and s.action = '{ACTION_DELETE}'\nwhen matched and t.{VALID_FROM_LSN} >= s.{TO_LSN} then"
        f" delete\nwhen matched then update set t.{VALID_TO} = greatest(t.{VALID_FROM}, s.{TO_TS}),"
        f" t.{VALID_TO_LSN} = s.{TO_LSN}\nwhen not matched and s.action in ('{ACTION_INSERT}',"
        f" '{ACTION_UPDATE}') then\n  {_insert(inserts)}"
    )
    if truncates:
        lsn, at = truncates[0].lsn, f"timestamp_micros({truncates[0].at_us:d})"
        is_open = f"when not matched by source and t.{VALID_TO_LSN} is null"
        statement += (
            f"\n{is_open} and t.{VALID_FROM_LSN} >= {lsn:d} then delete"
            f"\n{is_open} then update set t.{VALID_TO} = greatest(t.{VALID_FROM}, {at}), "
            f"t.{VALID_TO_LSN} = greatest(t.{VALID_FROM_LSN}, {lsn:d})"
        )
    return statement


def soft_delete_statement(
    uri: str, kept: Kept, source: str, truncates: Sequence[Truncation] = ()
) -> str:
    """Return the MERGE that keeps each key's last state, marked when the row is gone."""
    ended = f"s.action = '{ACTION_DELETE}'"
    on = " and ".join(
        f"t.{quote(kept.names[i])} = case when {ended} then s.b{k} else s.c{i} end"
        for k, i in enumerate(kept.key)
    )
    gone = f"s.{TO_LSN} is not null"
    values = [(name, value) for name, value in _values(kept) if name not in (LSN, COMMIT_TS)]
    values += [
        (LSN, f"coalesce(s.{TO_LSN}, s.lsn)"), (COMMIT_TS, f"coalesce(s.{TO_TS}, s.commit_ts)"),
        (DELETED, gone), (DELETED_AT, f"s.{TO_TS}"),
    ]  # fmt: skip
    marks = (
        f"update set t.{DELETED} = true, t.{DELETED_AT} = greatest(t.{COMMIT_TS}, {{at}}), "
        f"t.{COMMIT_TS} = greatest(t.{COMMIT_TS}, {{at}}), t.{LSN} = greatest(t.{LSN}, {{lsn}})"
    )
    sets = ", ".join(f"t.{name} = {value}" for name, value in values)
    statement = (
        f"merge into {path(uri)} as t\nusing (select * from {source} where action <>"
        f" '{ACTION_SKIP}') as s\non {on}\nwhen matched and {ended} and not t.{DELETED} then"
        f" {marks.format(at=f's.{TO_TS}', lsn=f's.{TO_LSN}')}\nwhen matched and not ({ended}) then"
        f" update set {sets}\nwhen not matched and not ({ended}) then\n  {_insert(values)}"
    )
    if truncates:
        at = f"timestamp_micros({truncates[0].at_us:d})"
        statement += (
            f"\nwhen not matched by source and not t.{DELETED} then"
            f" {marks.format(at=at, lsn=f'{truncates[0].lsn:d}L')}"
        )
    return statement


def append_statement(uri: str, kept: Kept, source: str) -> str:
    """Return the INSERT of every change."""
    unknown = ", ".join(
        f"case when s.u{i} then {string(kept.names[i])} end" for i in kept.toastable
    )
    lacking = f"array_compact(array({unknown}))" if unknown else "array()"
    columns = [
        *_values(kept), (OP, "s.action"), (SEQ, f"s.{PLACE}"), (XID, f"s.{STATE_XID}"),
        (UNCHANGED, f"nullif({lacking}, cast(array() as array<string>))"),
    ]  # fmt: skip
    if kept.key:
        fields = ", ".join(f"{string(name)}, s.o{k}" for k, name in enumerate(kept.key_names))
        columns.append((BEFORE, f"case when s.{MOVED} then named_struct({fields}) end"))
    listed, values = (
        ", ".join(name for name, _ in columns),
        ", ".join(value for _, value in columns),
    )
    return f"insert into {path(uri)} ({listed})\nselect {values}\nfrom {source} as s"


def _values(kept: Kept) -> list[tuple[str, str]]:
    values = [(quote(name), f"s.c{i}") for i, name in enumerate(kept.names)]
    return [*values, (LSN, "s.lsn"), (COMMIT_TS, "s.commit_ts"), (RAW, "s.raw")]


def _insert(columns: Sequence[tuple[str, str]]) -> str:
    return (
        f"insert ({', '.join(n for n, _ in columns)}) values ({', '.join(v for _, v in columns)})"
    )


def _truncate_rows(truncates: Sequence[Truncation]) -> pa.Table:
    at = pa.array([t.at_us for t in truncates], pa.int64()).cast(pa.timestamp("us", "UTC"))
    return pa.table(
        {
            "lsn": [t.lsn for t in truncates],
            "commit_ts": at,
            PLACE: [t.place for t in truncates],
            STATE_XID: [t.xid for t in truncates],
        }
    )


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
    empty = [f"'{TRUNCATE}'", *(["null"] * len(names)), *(["false"] * len(flags)), "false", *told]
    return (
        f"select {', '.join(every)} from {source} union all select {', '.join(empty)} from"
        f" {parquet(folder)}"
    )
