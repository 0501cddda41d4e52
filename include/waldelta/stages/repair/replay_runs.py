"""Replay: brings the rows that a range of runs changed to the source's present state.

The change log says which keys the runs' messages touched; the rows themselves are read from the
source, as in every repair. So later changes stay, and rows that the runs didn't touch aren't read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import psycopg
import pyarrow as pa

from waldelta.changes.decode.relation_versions import RelationVersion, read_versions
from waldelta.changes.decode.target_plan import (
    TargetPlan,
    as_merged_partition,
    bringing_rows,
    check_prepared,
    plan_decode,
)
from waldelta.errors import (
    ModeRefused,
    NeedsSync,
    SchemaChanged,
    WaldeltaError,
)
from waldelta.lake import staging_folder
from waldelta.lake.changelog import (
    BatchNumbers,
    BatchRange,
    BatchRanges,
    Snapshot,
    last_truncates,
)
from waldelta.lake.ledger import SYNCED, TableState
from waldelta.pipeline import Job, RunResult, of_table
from waldelta.pipeline.drift import Evolution, NewColumn, why_other_rows
from waldelta.pipeline.targets import RequiredAction, TableLifecycle, Watermarks
from waldelta.postgres import read_types
from waldelta.spark import Runner
from waldelta.stages.repair.mend.current_targets import CurrentTargets
from waldelta.stages.repair.mend.touched_keys import read_touched
from waldelta.stages.repair.repair import Again, repair
from waldelta.stages.repair.replay.interval import (
    Span,
    place_columns_by_history,
    place_columns_by_name,
)
from waldelta.stages.sync.sync import sync
from waldelta.target_modes.target_mode import Feature

log = logging.getLogger(__name__)


@dataclass
class Replayed:
    """A replay's effect: numbers of targets, of touched keys and of corrected rows, and tables that
    failed.
    """

    tables: int = 0
    keys: int = 0
    rows: int = 0
    failures: dict[str, WaldeltaError] = field(default_factory=dict)


def replay(
    runner: Runner, job: Job, result: RunResult, span: Span, tables: Collection[str] | None = None
) -> Replayed:
    """Correct every replicated target, or these, where the batches of ``span`` touched rows.

    What was landed and corrected, and warnings, are added to the result. A failing table doesn't
    stop the others. A table that can't be corrected stays as it is and gets a warning. Without a
    key, or after a TRUNCATE, all rows are compared with the source's.
    """
    for name in tables or ():
        if not (mode := job.pipeline.target.mode_of(name)).supports(Feature.MEND):
            raise ModeRefused(
                f"{name} has mode {mode}, so a replay would overwrite rows that it keeps: sync it"
                " again, which adds what differs as changes"
            )
    current = CurrentTargets.read(runner, job, "replay", result)
    identity, outcome = job.read_identity(), Replayed()
    change_log, numbers = job.change_log(identity), BatchNumbers(span.after, span.upto)
    touched = BatchRanges(change_log, change_log.sizes(*numbers)).of(numbers)
    work = _Replay(runner, job, result, span, touched, outcome)
    marks = Watermarks(job, identity)
    for lifecycle in current.lifecycles:
        name, state = lifecycle.table_name, lifecycle.state
        if state is None or not state.snapshot or (tables is not None and name not in tables):
            continue
        try:
            if not _is_touched(touched, state):
                continue
            if (why := _why_not(lifecycle, state, marks, span)) is not None:
                result.warn([f"{name} isn't replayed: {why}"])
            else:
                work.mend(current, state)
        except (SchemaChanged, NeedsSync) as err:
            result.warn([f"{of_table(err, name)}: it isn't replayed, and stays as it is"])
        except WaldeltaError as err:
            log.error("table=%s not replayed: %s", name, err)
            outcome.failures[name] = of_table(err, name)
    return outcome


def _why_not(
    lifecycle: TableLifecycle, state: TableState, marks: Watermarks, span: Span
) -> str | None:
    """Returns why a target stays as it is, or None."""
    if lifecycle.action != RequiredAction.APPLY:
        return lifecycle.why
    if (why := why_other_rows(state)) is not None:
        return why
    is_late = marks.of(state) <= span.after
    return "it hasn't applied the range yet: the next run does" if is_late else None


@dataclass(frozen=True, slots=True)
class _Replay:
    """A replay of one range of runs."""

    runner: Runner
    job: Job
    result: RunResult
    span: Span
    touched: BatchRange
    outcome: Replayed

    def mend(self, current: CurrentTargets, state: TableState) -> None:
        """Bring the rows of one target that the range touched to the source's present state."""
        runner, job, name = self.runner, self.job, state.table_name
        folder = staging_folder(job.lake, "replay", 0, 0, f"{job.run_id} {name}")
        with job.source.connect("replay") as connection:
            keys = _touched_rows(runner, job, connection, self.touched, state, folder)
        reason = f"replay of {self.span}"
        if keys is None:
            if state.unrepaired_leaves:
                raise SchemaChanged(
                    "the range touches all its rows, and partitions were added or removed since"
                    " its copy, whose rows stay in the target: a resync would bring and remove them"
                )
            (copied,) = sync(runner, job, [name], reason, by_diff=True)
            self.result.add_copy(copied)
            rows = copied.written
        elif not len(keys):
            return
        else:
            mended = repair(runner, job, current.as_copied(job, name), Again(reason, touched=keys))
            mended.add_to(self.result)
            rows = mended.cut.written
            self.outcome.keys += len(keys)
        self.outcome.tables, self.outcome.rows = self.outcome.tables + 1, self.outcome.rows + rows


# A snapshot that sees no transaction: the range's changes count, also those that a later copy has.
_SEES_NOTHING = "1:1:"


def _is_touched(batch_range: BatchRange, state: TableState) -> bool:
    # A TRUNCATE may be of its table.
    whole_history = replace(state, snapshot=_SEES_NOTHING)
    return batch_range.count(whole_history) > 0 or batch_range.stream.has_truncates()


def _touched_rows(
    runner: Runner,
    job: Job,
    connection: psycopg.Connection[Any],
    batch_range: BatchRange,
    state: TableState,
    folder: str,
) -> pa.Table | None:
    """Returns the keys that a range touches (touched_schema()); None: it may touch any row.

    It does with a TRUNCATE, and in a table without a key. Raises SchemaChanged for columns that the
    ledger can't map to the key.
    """
    whole_history, stream = replace(state, snapshot=_SEES_NOTHING), batch_range.stream
    check_prepared(stream, state, Snapshot.parse(state.snapshot))
    snapshot = Snapshot.parse(whole_history.snapshot)
    volume = batch_range.volume(whole_history)
    if last_truncates(stream, whole_history, snapshot) or not state.key_columns:
        return None
    rules = job.pipeline.target.schema_rules_of(state.table_name)
    described = read_versions(stream, state.relation_ids) if volume.rows else []
    versions = bringing_rows(batch_range, snapshot, described)
    history = [row for row in job.read_all_states(state.table_name) if row.status == SYNCED]
    evolution = _as_they_are(state, history, versions, follows=rules.policy != "ignore")
    types = partial(read_types, connection)
    decode = plan_decode(types, batch_range, whole_history, versions, evolution, rules)
    rows = batch_range.rows_of(whole_history)
    plan = TargetPlan(whole_history, batch_range.batches, volume, decode, False, rows, False, None)
    return read_touched(runner, batch_range.change_log, plan, folder)


def _as_they_are(
    state: TableState,
    history: Sequence[TableState],
    versions: Sequence[RelationVersion],
    *,
    follows: bool,
) -> Evolution:
    """Returns the evolution that keeps the target's columns, with their positions in old rows
    too.
    """
    column_sets = [row.columns for row in history]
    positions = []
    for version in versions:
        relation = as_merged_partition(version.relation, state)
        places = (
            place_columns_by_history(state, column_sets, relation)
            if follows
            else place_columns_by_name(state, relation)
        )
        if places is None or any(
            at is None and c.name in state.key_columns
            for at, c in zip(places, state.columns, strict=True)
        ):
            listed = ", ".join(column.name for column in relation.columns)
            raise SchemaChanged(
                f"{state.table_name}: the range has rows with other columns ({listed}), which the"
                " ledger can't map to the target's: copy it again (initial sync with its name in"
                " tables)"
            )
        positions.append(places)
    columns = tuple(NewColumn(column, column.name) for column in state.columns)
    return Evolution(columns, tuple(state.key_columns), (), tuple(positions))
