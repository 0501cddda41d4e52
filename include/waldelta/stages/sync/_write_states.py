"""Copy states: writes a snapshot into a target that stores more than a mirror, keeping its history.

Part of sync. The first copy is the target's content: its rows are valid from the snapshot on. A
later copy is compared with the target's live rows, and only differences become states, ends of
states or changes, as of the snapshot. Several changes that the snapshot saw before they were
applied then count as one.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from waldelta.changes.merge import CommitTag
from waldelta.changes.merge.commits import (
    take_over_for_copy,
)
from waldelta.changes.merge.snapshot_rows import staged_shape
from waldelta.changes.merge.statements import as_stored, commit_statement
from waldelta.changes.merge.states import Kept, differences_query, metric_counts
from waldelta.changes.merge.target_table import (
    CommitResult,
    TargetColumn,
    prepare_target,
    replace_target,
    writing_target,
)
from waldelta.errors import ModeRefused
from waldelta.lake.ledger import TableState
from waldelta.lsn import Lsn
from waldelta.pipeline import Job
from waldelta.pipeline.targets import check_target
from waldelta.snapshot import TableCopy
from waldelta.spark import Runner
from waldelta.spark_sql import parquet, quote
from waldelta.stages.sync._snapshot_diff import CopiedRows, merge_differences
from waldelta.target_modes import TargetMode

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from waldelta.stages.sync._write import CopyRows

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SnapshotMoment:
    """The position and time at which a snapshot was taken."""

    lsn: Lsn
    at: datetime

    @property
    def sql(self) -> dict[str, str]:
        """Returns both as Spark SQL."""
        microseconds = round(self.at.timestamp() * 1_000_000)
        return {"lsn": f"{self.lsn.value:d}L", "time": f"timestamp_micros({microseconds:d})"}


def keeps_earlier_rows(job: Job, table: str, key: Sequence[str]) -> bool:
    """Returns whether the target keeps the rows of an earlier copy in its mode and later changes.

    Raises ModeRefused when its mode needs a key and the table has none, or when its mode differs
    from the target's.
    """
    mode = job.pipeline.target.mode_of(table)
    mode.check_key(table, key)
    held = job.ledger.complete_states(table)
    if not held or not job.lake.target(table).exists:
        return False
    held[-1].kept_as.check_change(table, mode)
    return held[-1].kept_as.keeps_rows


def prepare_states(
    runner: Runner, job: Job, table: str, columns: Sequence[TargetColumn], key: Sequence[str]
) -> None:
    """Create the target, if missing, with the columns of its mode.

    Where a TRUNCATE is a row, key columns are nullable, because it has no key.
    """
    mode, target = job.pipeline.target.mode_of(table), job.lake.target(table)
    types = {column.name: column.spark_type for column in columns}
    added = mode.columns({name: types[name] for name in key})
    is_log = mode.fold.has_changes
    wanted = [TargetColumn(c.name, c.spark_type, c.arrow, c.nullable or is_log) for c in columns]
    # Delta's DDL needs only these; their Arrow types aren't used.
    wanted += [
        TargetColumn(name, kind, columns[0].arrow, nullable=True) for name, kind in added.items()
    ]
    prepare_target(runner, target, wanted)
    for name in key if is_log else ():
        runner.spark().sql(
            f"alter table {target.relation} alter column {quote(name)} drop not null"
        )


def copy_states(
    runner: Runner, job: Job, begun: TableState, copied: CopiedRows, rows: CopyRows
) -> CommitResult:
    """Bring a target to the state of a snapshot, in one commit."""
    mode, target = job.pipeline.target.mode_of(begun.table_name), job.lake.target(begun.table_name)
    if not rows.keeps:
        take_over_for_copy(runner, job, begun.table_name, begun.generation)
        frame = copied.stored.selectExpr("*", *_first(mode, copied.copy, rows.moment))
        return replace_target(runner, target, frame, rows.tag)
    with writing_target(target):
        return _add(runner, job, begun, copied, rows)


def _first(mode: TargetMode, copy: TableCopy, moment: SnapshotMoment) -> list[str]:
    """Returns the mode's columns for the rows of a first copy, as Spark SQL."""
    kinds = dict(copy.columns)
    types = mode.columns({name: kinds[name].spark for name in copy.key_columns})
    first = {name: value.format(**moment.sql) for name, value in mode.first_values.items()}
    return [f"cast({first.get(name, 'null')} as {kind}) as {name}" for name, kind in types.items()]


def _add(
    runner: Runner,
    job: Job,
    begun: TableState,
    copied: CopiedRows,
    rows: CopyRows,
) -> CommitResult:
    mode = job.pipeline.target.mode_of(begun.table_name)
    copy, table, target = copied.copy, begun.table_name, job.lake.target(begun.table_name)
    compared = target.version
    if complete := job.ledger.complete_states(table):
        check_target(job, complete[-1], compared)
    held = target.frame(runner.spark())
    shared = held.drop(*mode.columns(dict.fromkeys(copy.key_columns, "")))
    stored_key = mode.stored_key(table, held, copy.key_columns)
    _check_comparable(table, copy, dict(shared.dtypes), dict(copied.stored.dtypes))
    _check_position(table, held, mode, rows.moment.lsn)
    take_over_for_copy(runner, job, table, begun.generation)

    def merge(folder: str, tag: CommitTag) -> CommitTag:
        names, key = tuple(name for name, _ in copy.columns), staged_shape(copy, copy.key_columns)
        kept = Kept(mode, names, key.key, stored_key=stored_key)
        source = as_stored(parquet(folder), [kind for _, kind in copy.columns])
        log.info("table=%s compared with what it keeps: %s", table, tag.counts)
        tag = replace(tag, counts=metric_counts(Counter(tag.counts)))
        moment = rows.moment.sql
        states = differences_query(kept, source, moment["lsn"], moment["time"])
        statement = mode.statement(target.relation, kept, f"({states})")
        return commit_statement(runner, tag, statement)

    done = merge_differences(
        runner, job, begun, copied, compared=compared, attempt=rows.tag.number, merge=merge
    )
    if done is None:
        raise ModeRefused(
            f"the target of {table} has rows with the same key, and its mode keeps rows: move"
            " its folder away and sync it again"
        )
    return CommitResult(done.version, done.compared, 0)


def _check_position(table: str, held: DataFrame, mode: TargetMode, lsn: Lsn) -> None:
    """Raise ModeRefused when the target has positions after the snapshot's.

    Positions identify states. A state that begins after its own end would be taken for one that
    never existed, and be removed.
    """
    (row,) = held.agg(*(F.max(name) for name in mode.positions)).collect()
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
