"""Replay: brings the rows that a range of runs changed to the source's present state.

The change log says which keys the runs' messages touched; the rows themselves are read from the
source, as in every repair. So later changes stay, and rows that the runs didn't touch aren't read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

from waldelta.errors import (
    ModeRefused,
    NeedsSync,
    SchemaChanged,
    WaldeltaError,
)
from waldelta.lake import staging_folder
from waldelta.lake.changelog import BatchNumbers, BatchRange, BatchRanges
from waldelta.lake.ledger import TableState
from waldelta.pipeline import Job, RunResult, of_table
from waldelta.pipeline.drift import why_other_rows
from waldelta.pipeline.targets import RequiredAction, TableLifecycle, Watermarks
from waldelta.spark import Runner
from waldelta.stages.repair.mend.current_targets import CurrentTargets
from waldelta.stages.repair.repair import Again, repair
from waldelta.stages.repair.replay.interval import Span
from waldelta.stages.repair.replay.touched_rows import is_touched, touched_rows
from waldelta.stages.sync.sync import sync
from waldelta.target_modes import Feature

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
    identity, done = job.read_identity(), Replayed()
    change_log, numbers = job.change_log(identity), BatchNumbers(span.after, span.upto)
    touched = BatchRanges(change_log, change_log.sizes(*numbers)).of(numbers)
    work = _Replay(runner, job, result, span, touched, done)
    marks = Watermarks(job, identity)
    for lifecycle in current.lifecycles:
        name, state = lifecycle.table_name, lifecycle.state
        if state is None or not state.snapshot or (tables is not None and name not in tables):
            continue
        try:
            if not is_touched(touched, state):
                continue
            if (why := _why_not(lifecycle, state, marks, span)) is not None:
                result.warn([f"{name} isn't replayed: {why}"])
            else:
                work.mend(current, state)
        except (SchemaChanged, NeedsSync) as err:
            result.warn([f"{of_table(err, name)}: it isn't replayed, and stays as it is"])
        except WaldeltaError as err:
            log.error("table=%s not replayed: %s", name, err)
            done.failures[name] = of_table(err, name)
    return done


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
    done: Replayed

    def mend(self, current: CurrentTargets, state: TableState) -> None:
        """Bring the rows of one target that the range touched to the source's present state."""
        runner, job, name = self.runner, self.job, state.table_name
        folder = staging_folder(job.lake, "replay", 0, 0, f"{job.run_id} {name}")
        with job.source.connect("replay") as connection:
            keys = touched_rows(runner, job, connection, self.touched, state, folder)
        reason = f"replay of {self.span}"
        if keys is None:
            if state.unrepaired_leaves:
                raise SchemaChanged(
                    "the range touches all its rows, and partitions were added or removed since"
                    " its copy, whose rows stay in the target: a resync would bring and remove them"
                )
            (copied,) = sync(runner, job, [name], reason, by_diff=True)
            self.result.add_copy(copied)
            rows = copied.rows if copied.diff is None else copied.diff.written
        elif not len(keys):
            return
        else:
            as_copied = current.as_copied(job, name)
            mended = repair(runner, job, as_copied, Again(reason, touched=keys))
            mended.add_to(self.result)
            rows = mended.cut.written
            self.done.keys += len(keys)
        self.done.tables, self.done.rows = self.done.tables + 1, self.done.rows + rows
