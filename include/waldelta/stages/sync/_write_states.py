"""Copy states: writes a snapshot into a target that stores more than a mirror, keeping its history.

Part of sync. The first copy is the target's content: its rows are valid from the snapshot on. A
later copy is compared with the target's live rows (``live_rows``), and only differences become
states, ends of states or changes, as of the snapshot. Several changes that the snapshot saw before
they were applied then count as one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable
from pyspark.sql import functions as F

from waldelta.changes.decode.collapse import ACTION_DELETE, ACTION_INSERT, ACTION_UPDATE
from waldelta.changes.decode.collapse_keyless import PLACE
from waldelta.changes.decode.row_states import MOVED, STATE_XID, TO_LSN, TO_TS
from waldelta.changes.merge import CommitTag, read_commit
from waldelta.changes.merge.commits import (
    check_alone,
    commit_equal,
    read_untouched,
    take_over_for_copy,
)
from waldelta.changes.merge.live_rows import SNAPSHOT, live_rows
from waldelta.changes.merge.snapshot_rows import staged_names, staged_shape
from waldelta.changes.merge.statements import as_stored, tagged
from waldelta.changes.merge.states import ENDS, STATES, Kept, count_actions, states_statement
from waldelta.changes.merge.target_table import (
    CommitResult,
    TargetColumn,
    prepare_target,
    replace_target,
    target_write_error,
)
from waldelta.changes.stage import staged_in
from waldelta.config import TargetMode
from waldelta.config.target_mode import (
    CHANGELOG,
    HISTORY,
    MIRROR,
    check_change,
    check_key,
    mode_columns,
)
from waldelta.errors import ModeRefused, WaldeltaError
from waldelta.lake.ledger import TableState
from waldelta.lake.staging_leftovers import staging_folder
from waldelta.lsn import Lsn
from waldelta.metadata_columns import (
    DELETED,
    LSN,
    OF_MODES,
    OP,
    SEQ,
    VALID_FROM,
    VALID_FROM_LSN,
    VALID_TO_LSN,
)
from waldelta.pipeline import Job
from waldelta.pipeline.targets.external_commits import check_target
from waldelta.pipeline.targets.watermarks import uri_of
from waldelta.snapshot import TableCopy
from waldelta.spark_sql import parquet, path, quote
from waldelta.stages.sync._snapshot_diff import TWICE, CopiedRows, differences

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotMoment:
    """The position and time at which a snapshot was taken."""

    lsn: Lsn
    at: datetime


@dataclass(frozen=True, slots=True)
class CopyCommit:
    """How a copy is committed: its moment, transaction and metadata; ``keeps``: old rows stay."""

    moment: SnapshotMoment
    txn: tuple[str, int]
    metadata: Mapping[str, Any]
    keeps: bool


def keeps_rows(job: Job, table: str, key: Sequence[str]) -> bool:
    """Returns whether the target keeps the rows of an earlier copy in its mode and later changes.

    Raises ModeRefused when its mode needs a key and the table has none, or when its mode differs
    from the target's.
    """
    mode = job.pipeline.target.mode_of(table)
    check_key(mode, table, key)
    held = [state.mode for state in job.ledger.complete_states(table)]
    if not held or not DeltaTable.is_deltatable(uri_of(job, table), job.storage_options):
        return False
    check_change(table, held[-1], mode)
    return held[-1] == mode != MIRROR


def prepare_states(
    spark: SparkSession, job: Job, table: str, columns: Sequence[TargetColumn], key: Sequence[str]
) -> None:
    """Create the target, if missing, with the columns of its mode.

    A changelog's key columns are nullable, because a TRUNCATE has no key.
    """
    mode, uri = job.pipeline.target.mode_of(table), uri_of(job, table)
    types = {column.name: column.spark_type for column in columns}
    added = mode_columns(mode, {name: types[name] for name in key})
    is_log = mode == CHANGELOG
    wanted = [TargetColumn(c.name, c.spark_type, c.arrow, c.nullable or is_log) for c in columns]
    # Delta's DDL needs only these; their Arrow types aren't used.
    wanted += [
        TargetColumn(name, kind, columns[0].arrow, nullable=True) for name, kind in added.items()
    ]
    prepare_target(spark, uri, wanted)
    for name in key if is_log else ():
        spark.sql(f"alter table {path(uri)} alter column {quote(name)} drop not null")


def copy_states(
    spark: SparkSession, job: Job, begun: TableState, copied: CopiedRows, commit: CopyCommit
) -> CommitResult:
    """Bring a target to the state of a snapshot, in one commit."""
    mode, uri = job.pipeline.target.mode_of(begun.table_name), uri_of(job, begun.table_name)
    if not commit.keeps:
        take_over_for_copy(spark, job, begun.table_name, begun.generation)
        frame = copied.stored.select("*", *_first(mode, copied.copy, commit.moment))
        return replace_target(spark, uri, frame, commit.txn, commit.metadata)
    try:
        return _add(spark, job, begun, copied, commit)
    except WaldeltaError:
        raise
    except Exception as err:
        raise target_write_error(uri, err) from None


def _first(mode: TargetMode, copy: TableCopy, moment: SnapshotMoment) -> list[Column]:
    """Returns the mode's columns for the rows of a first copy."""
    types = mode_columns(
        mode, {name: kind.spark for name, kind in copy.columns if name in copy.key_columns}
    )
    known = {
        DELETED: F.lit(False),
        VALID_FROM: F.lit(moment.at),
        VALID_FROM_LSN: F.lit(moment.lsn.value),
        OP: F.lit(SNAPSHOT),
        SEQ: F.lit(-1),
    }
    return [known.get(name, F.lit(None)).cast(kind).alias(name) for name, kind in types.items()]


def _add(
    spark: SparkSession,
    job: Job,
    begun: TableState,
    copied: CopiedRows,
    commit: CopyCommit,
) -> CommitResult:
    mode, moment, txn = job.pipeline.target.mode_of(begun.table_name), commit.moment, commit.txn
    copy, table, uri = copied.copy, begun.table_name, uri_of(job, begun.table_name)
    compared = read_untouched(job, begun).version
    if complete := job.ledger.complete_states(table):
        check_target(job, complete[-1], compared)
    held = spark.read.format("delta").load(uri)
    _check_comparable(table, copy, dict(held.drop(*OF_MODES).dtypes), dict(copied.stored.dtypes))
    _check_position(table, held, mode, moment.lsn)
    take_over_for_copy(spark, job, table, begun.generation)
    live = live_rows(held, mode, copy.key_columns)
    found = differences(copy, copied.rows.toDF(*staged_names(copy)), live)
    folder = staging_folder(job.pipeline.target.root, table, begun.generation, txn[1], job.run_id)
    with staged_in(spark, folder):
        found.write.mode("overwrite").parquet(folder)
        copied.all_read()
        counts = count_actions(spark, folder)
        if TWICE in counts:
            raise ModeRefused(
                f"the target of {table} has rows with the same key, and its mode keeps rows: move"
                " its folder away and sync it again"
            )
        if not counts:
            done = commit_equal(
                spark, job, begun, CommitTag(*txn, job.run_id, verb="resync"), copy.key_columns[0]
            )
            check_alone(job, done, compared)
            return CommitResult(done.version, live.count(), 0)
        new = counts.get(ACTION_INSERT, 0) + counts.get(ACTION_UPDATE, 0)
        counted = {STATES: new, ENDS: counts.get(ACTION_DELETE, 0)}
        tag = CommitTag(*txn, job.run_id, counts=counted, verb="resync")
        names, types = zip(*copy.columns, strict=True)
        kept = Kept(mode, names, staged_shape(copy, copy.key_columns).key)
        states = as_states(kept, as_stored(parquet(folder), types), moment)
        with tagged(spark, tag):
            spark.sql(states_statement(uri, kept, f"({states})")).collect()
        done = read_commit(job, begun, tag)
        check_alone(job, done, compared)
    log.info("table=%s compared with what it keeps: %s", table, counts)
    total = live_rows(spark.read.format("delta").load(uri), mode, copy.key_columns).count()
    return CommitResult(done.version, total, 0)


def as_states(kept: Kept, source: str, moment: SnapshotMoment) -> str:
    """Returns differences as a query of the rows that row_versions would make, as of the
    snapshot.
    """
    at = f"timestamp_micros({round(moment.at.timestamp() * 1_000_000):d})"
    lsn = f"{moment.lsn.value:d}L"
    bases = [f"b{k}" for k in range(len(kept.key))]
    values = [f"c{i}" for i in range(len(kept.names))]
    told = [f"{lsn} as lsn", f"{at} as commit_ts"]
    if kept.mode == CHANGELOG:
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
    # In a history the state before an update ends too; a soft-deleted row is overwritten by its new
    # one.
    ends = (
        f"('{ACTION_DELETE}', '{ACTION_UPDATE}')"
        if kept.mode == HISTORY
        else f"('{ACTION_DELETE}')"
    )
    until = [f"{lsn} as {TO_LSN}", f"{at} as {TO_TS}"]
    return (
        f"{states} union all select '{ACTION_DELETE}' as action,"
        f" {', '.join([*bases, *values, *told, *until])}, raw from {source} where action in {ends}"
    )


def _check_position(table: str, held: DataFrame, mode: TargetMode, lsn: Lsn) -> None:
    """Raise ModeRefused when the target has positions after the snapshot's.

    Positions identify states. A state that begins after its own end would be taken for one that
    never existed, and be removed.
    """
    columns = (VALID_FROM_LSN, VALID_TO_LSN) if mode == HISTORY else (LSN,)
    (row,) = held.agg(*(F.max(name) for name in columns)).collect()
    newest = max((position for position in row if position is not None), default=0)
    if newest > lsn.value:
        raise ModeRefused(
            f"the source's WAL positions restarted: the target of {table} (mode {mode}) has"
            f" changes up to {Lsn(newest)}, but the source is only at {lsn} (another server, or"
            " restored); nothing was changed: move its folder away and sync it"
        )


def _check_comparable(
    table: str, copy: TableCopy, held: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    """Raise ModeRefused when old and new rows can't be in one table as they are."""
    if not copy.key_columns:
        raise ModeRefused(
            f"{table} has no key, so a new copy can't be compared with its changelog: move its"
            " folder away and sync it again"
        )
    if dict(held) != dict(wanted):
        differing = sorted(
            name for name in held.keys() | wanted.keys() if held.get(name) != wanted.get(name)
        )
        raise ModeRefused(
            f"{table} keeps rows with other columns, or types, than the source has now"
            f" ({', '.join(differing)}): alter the target's columns to match, or move its folder"
            " away, then sync it again"
        )
