"""Selects which runs replay the change log instead of consuming the slot, and which part of it.

A run replays when Airflow calls it a backfill, or when it is cleared after it succeeded. The ledger
of runs turns its interval, or the run itself, into a range of WAL, and the change log turns that
into batches. Pure except ``read_span`` and ``is_replay``, which read the ledger and the log's file
statistics; no Spark, no source.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate

from waldelta.errors import StateError
from waldelta.lake.changelog.change_log import Reach
from waldelta.lake.ledger import BatchCut, ColumnState, Run, SlotMove, TableState
from waldelta.lsn import Lsn
from waldelta.pgoutput.messages import Relation
from waldelta.pipeline import Job

CONSUME_VERB, REPLAY = "consume", "replay"


@dataclass(frozen=True, slots=True)
class Span:
    """What is replayed: WAL from ``start`` to ``end``, landed in the batches from ``after`` + 1 to
    ``upto``.

    Without anything to replay, ``upto`` equals ``after`` and ``why`` has the reason.
    """

    start: Lsn
    end: Lsn
    after: int = 0
    upto: int = 0
    why: str = ""

    @property
    def is_empty(self) -> bool:
        """Returns whether there is nothing to replay."""
        return self.upto <= self.after

    def __str__(self) -> str:
        return (
            f"nothing to replay: {self.why}" if self.is_empty else f"WAL {self.start} to {self.end}"
        )


@dataclass(frozen=True, slots=True)
class ConsumedWal:
    """A range of WAL, after ``start`` up to ``end``, and the run that consumed it."""

    run: Run
    start: int
    end: int


def is_replay(job: Job, stages: Collection[str] | None = None) -> bool:
    """Returns whether a run, or only these stages of it, replays the change log instead of
    consuming the slot.

    A backfill replays, and so does a run that is cleared after it consumed the slot and succeeded.
    Stages after apply replay if the run's last result is one of a replay.
    """
    if job.run_type == "backfill":
        return True
    if not job.again:
        return False
    consumed = job.ledger.run_result(job.run_id, CONSUME_VERB)
    if consumed is None or consumed.status != "succeeded":
        return False
    if stages is None or {"land", "apply"} & set(stages):
        return True
    replayed = job.ledger.run_result(job.run_id, REPLAY)
    return replayed is not None and replayed.at > consumed.at


def read_span(job: Job) -> Span:
    """Returns the range of WAL and batches that a run replays.

    Raises StateError when the change log no longer has the range's first batches, SlotGap when a
    batch in it is missing.
    """
    ledger = job.ledger
    identity = job.read_identity()
    rows = end_at_failovers(
        [run for run in ledger.runs() if run.verb == CONSUME_VERB], ledger.slot_events()
    )
    runs_of_id = [run for run in rows if run.run_id == job.run_id]
    interval = None
    if job.run_type == "backfill" or not runs_of_id:
        if job.interval_start is None or job.interval_end is None:
            raise StateError("a replay needs the start and the end of an interval: give both")
        interval = (job.interval_start, job.interval_end)
    runs = [
        run
        for run in rows
        if run.run_id == job.run_id or (interval is not None and falls_into(run, *interval))
    ]
    spans = [
        segment
        for segment in segments(run for run in rows if run.at >= identity.since)
        if segment.run in runs
    ]
    if not spans:
        return Span(Lsn(0), Lsn(0), why=_why_nothing(runs, interval))
    change_log = job.change_log(identity)
    # Keys are brought to their current states, so everything that landed since the span's start is
    # read.
    start = min(segment.start for segment in spans)
    consumed = ledger.consumed_batches(identity.slot, identity.incarnation)
    change_log.whole_sizes(
        {b: of for b, of in consumed.items() if of.lsn > start}, 0, max(consumed, default=0)
    )
    return plan_span(spans, range_by_cuts(change_log.reach(identity.floor), ledger.batches()))


def falls_into(run: Run, start: datetime, end: datetime) -> bool:
    """Returns whether a run belongs to an interval: by its own interval, or else by its time.

    An interval of length zero, as Airflow sets for some manual runs, is a point in time.
    """
    begin, until = run.interval_start or run.at, run.interval_end or run.at
    return begin < end and (until > start or begin == until >= start)


def end_at_failovers(runs: Iterable[Run], events: Iterable[SlotMove]) -> list[Run]:
    """Returns the runs, with those before a failover ending where the new server left their
    timeline.
    """
    promotions = [move for move in events if move.event == "promoted"]
    return [
        (
            replace(
                run,
                end_lsn=min([run.end_lsn, *(move.lsn for move in promotions if run.at < move.at)]),
            )
            if run.end_lsn is not None
            else run
        )
        for run in runs
    ]


def segments(runs: Iterable[Run]) -> list[ConsumedWal]:
    """Returns the WAL that each ledger entry consumed, from the end of the previous entry.

    So WAL that a killed run landed without an entry belongs to the next one. An entry that ends no
    further has none.
    """
    ended = [run for run in runs if run.end_lsn is not None]
    ends = list(accumulate((run.end_lsn or 0 for run in ended), max))
    starts = [ended[0].start_lsn or 0, *ends[:-1]] if ended else []
    return [
        ConsumedWal(run, *bounds)
        for run, *bounds in zip(ended, starts, ends, strict=True)
        if bounds[0] < bounds[1]
    ]


def range_by_cuts(reach: Reach, cuts: Iterable[BatchCut]) -> Reach:
    """Returns the log's reach, beginning where the last dropped batch ended if its cut is stored.

    The log itself knows only its first commit, which is after the end of the run before. A batch
    without transactions has no cut: where nothing is left, the last cut's end is that of the log.
    """
    ends = [
        cut.end_lsn
        for cut in cuts
        if cut.batch == reach.dropped or (not reach.ends and cut.batch < reach.dropped)
    ]
    return replace(reach, begins_at=max(ends)) if reach.is_cut and ends else reach


def plan_span(spans: Sequence[ConsumedWal], reach: Reach) -> Span:
    """Returns the batches with the WAL of these segments and between them; raises StateError."""
    start, end = min(s.start for s in spans), max(s.end for s in spans)
    if reach.is_cut and start < reach.begins_at:
        raise StateError(
            f"the change log no longer reaches back to {Lsn(start)}, where the runs to be replayed"
            f" began: nothing is left of it before {Lsn(reach.begins_at)}"
            " (maintenance.keep_changes_days); copy the tables again instead (initial sync with"
            " tables=…)"
        )
    batches = [batch for batch, landed in reach.ends.items() if start < landed <= end]
    if not batches:
        return Span(
            Lsn(start), Lsn(end), why=f"nothing was landed between {Lsn(start)} and {Lsn(end)}"
        )
    return Span(Lsn(start), Lsn(end), min(batches) - 1, max(batches))


def _why_nothing(runs: Sequence[Run], interval: tuple[datetime, datetime] | None) -> str:
    if runs:
        return (
            "its runs landed nothing, or used an earlier incarnation of the slot, and every table"
            " was copied since"
        )
    if interval is None:
        return "this run landed nothing"
    return (
        f"the ledger knows no run of the interval from {interval[0]:%Y-%m-%d %H:%M:%S} to"
        f" {interval[1]:%Y-%m-%d %H:%M:%S} UTC"
    )


def place_columns_by_history(
    state: TableState, history: Sequence[Sequence[ColumnState]], relation: Relation
) -> tuple[int | None, ...] | None:
    """Returns the position of each target column in a relation's old rows; None: not in them.

    ``history`` are the target's column sets since its copy: only attribute numbers distinguish a
    renamed column from another with its name. Returns None when the ledger doesn't know the
    relation's column set for certain.
    """
    names = {column.name: k for k, column in enumerate(relation.columns)}
    layouts = {
        tuple((c.name_on_source, c.attnum) for c in columns)
        for columns in history
        if {c.name_on_source for c in columns} == set(names)
    }
    if len(layouts) != 1:
        return None
    numbers = {number: names[name] for name, number in layouts.pop()}
    return tuple(numbers.get(column.attnum) for column in state.columns)


def place_columns_by_name(state: TableState, relation: Relation) -> tuple[int | None, ...]:
    """Returns the position in a relation of each of the target's columns, found by name; None for a
    column that the relation lacks.

    For a target that doesn't follow its source's columns.
    """
    names = {column.name: k for k, column in enumerate(relation.columns)}
    return tuple(names.get(column.name_on_source) for column in state.columns)
