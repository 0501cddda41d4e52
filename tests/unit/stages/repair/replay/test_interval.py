"""What a replay takes of ledger and change log: which runs, which WAL, which batches."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.bookkeeping import append_by_kind
from tests.support.pipelines import job_of, whole_database
from waldelta.errors import StateError
from waldelta.lake.changelog.change_log import Reach
from waldelta.lake.ledger import BatchCut, ColumnState, Run, SlotMove, TableState
from waldelta.pgoutput.messages import Relation, RelationColumn
from waldelta.stages.repair.replay.interval import (
    falls_into,
    is_replay,
    place_columns_by_history,
    place_columns_by_name,
    plan_span,
    range_by_cuts,
    read_span,
    segments,
)

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def hours(n: float) -> datetime:
    return NOON + timedelta(hours=n)


def run(
    run_id="r", end=None, start=0, at=0.0, interval=None, status="succeeded", verb="consume"
) -> Run:
    bounds = (None, None) if interval is None else (hours(interval[0]), hours(interval[1]))
    return Run(hours(at), run_id, verb, status, "scheduled", *bounds, start, end)


INTERVALS = {
    "its own interval": (run(interval=(0, 1)), (0, 1), True),
    "the one before": (run(interval=(0, 1)), (1, 2), False),
    "the one behind": (run(interval=(1, 2)), (0, 1), False),
    "a larger one": (run(interval=(0, 24)), (1, 2), True),
    "a smaller one": (run(interval=(3, 4)), (0, 24), True),
    "none, and it ran then": (run(at=0.5), (0, 1), True),
    "none, and it ran later": (run(at=1), (0, 1), False),
    "a moment": (run(interval=(0, 0), at=9), (0, 1), True),
}


@pytest.mark.parametrize("case", INTERVALS)
def test_which_runs_an_interval_means(case):
    """A run's interval counts; where it has none, when it was."""
    one, (start, end), expected = INTERVALS[case]
    assert falls_into(one, hours(start), hours(end)) is expected


def test_each_entry_owns_the_wal_behind_the_one_before():
    """What a killed run landed is the next one's; an entry that ends no further owns nothing."""
    found = segments(
        [
            run("a", 10, 5),
            run("b"),
            run("c", 30, 20),
            run("a", 10, 5),
            run("d", 30, 30),
            run("d", 40, 30),
        ]
    )
    assert [(s.run.run_id, s.start, s.end) for s in found] == [
        ("a", 5, 10),
        ("c", 10, 30),
        ("d", 30, 40),
    ]


SPANS = {
    "its batches": ([(10, 30)], Reach({1: 10, 2: 20, 3: 30, 4: 40}), (1, 3)),
    "two runs, and what lies between":
     ([(0, 10), (20, 30)], Reach({1: 10, 2: 20, 3: 30, 4: 40}), (0, 3)),
    "it reaches back": ([(25, 30)], Reach({3: 30}, True, 22), (2, 3)),
    "nothing was landed": ([(12, 18)], Reach({1: 10, 2: 20}), None),
    "the log is empty": ([(12, 18)], Reach({}), None),
    "it doesn't reach back": ([(15, 30)], Reach({3: 30}, True, 22), StateError),
    "all of it was dropped": ([(15, 30)], Reach({}, True, 30), StateError),
    "nothing came since all of it was dropped": ([(30, 40)], Reach({}, True, 30), None),
}  # fmt: skip


@pytest.mark.parametrize("case", SPANS)
def test_the_batches_of_a_stretch_of_wal(case):
    """By where batches end; a log that was cut is refused, never replayed in part."""
    bounds, reach, expected = SPANS[case]
    kept = [replace(segments([run(end=1)])[0], start=start, end=end) for start, end in bounds]
    if expected is StateError:
        with pytest.raises(StateError, match="no longer reaches back to 0/F"):
            plan_span(kept, reach)
        return
    span = plan_span(kept, reach)
    assert (None if span.is_empty else (span.after, span.upto)) == expected
    assert ("nothing was landed" in str(span)) is (expected is None)


CUTS = {
    "the one dropped last": (Reach({3: 30}, True, 22, 2), [(1, 10), (2, 20), (3, 30)], 20),
    "published again": (Reach({3: 30}, True, 22, 2), [(2, 19), (2, 20)], 20),
    "it isn't kept": (Reach({3: 30}, True, 22, 2), [(1, 10), (3, 30)], 22),
    "none was dropped": (Reach({3: 30}, False, 22, 2), [(2, 20)], 22),
    "all were": (Reach({}, True, 0, 2), [(2, 20)], 20),
    "all were, and the last had nothing": (Reach({}, True, 0, 3), [(1, 10), (2, 20)], 20),
}


@pytest.mark.parametrize("case", CUTS)
def test_where_the_log_begins(case):
    """Where the last dropped batch ended: the run behind began there, before any commit left."""
    reach, cuts, expected = CUTS[case]
    assert (
        range_by_cuts(reach, [BatchCut(NOON, "r", *cut, None) for cut in cuts]).begins_at
        == expected
    )


@pytest.fixture
def job(lake):
    interval = {"interval_start": hours(0), "interval_end": hours(1)}
    unscheduled = job_of(whole_database(lake))
    made = replace(unscheduled, run_type="scheduled", **interval)
    made.ledger.append(SlotMove(hours(-9), "setup", "created", "s", "1", 1, "0", 0))
    return made


ENTRIES = {
    "it never ran": ([], None, False),
    "it is under way": ([run("run", status="running")], None, False),
    "it failed": ([run("run", status="failed")], None, False),
    "it ended well, and is cleared": ([run("run")], None, True),
    "from its second task on": ([run("run")], ["apply"], True),
    "its check alone": ([run("run")], ["check", "report"], False),
    "the check of its replay":
     ([run("run"), run("run", at=1, verb="replay", status="running")], ["check"], True),
    "another run's": ([run("other")], None, False),
}  # fmt: skip


@pytest.mark.parametrize("case", ENTRIES)
def test_which_runs_replay(job, case):
    """A run that has ended well consumes no more; a backfill never did."""
    entries, stages, expected = ENTRIES[case]
    append_by_kind(job.ledger, entries)
    assert is_replay(replace(job, again=True), stages) is expected
    assert not is_replay(job, stages)
    assert is_replay(replace(job, run_type="backfill"), stages)


NOTHING = {
    "no run of that time":
     ([run("other", 10, interval=(5, 6))],
      "the ledger knows no run of the interval from 2026-01-01 12:00:00"),
    "an earlier life's": ([run("other", 10, interval=(0, 1), at=-10)],
                          "an earlier incarnation of the slot"),
    "idle ones": ([run("other", interval=(0, 1))], "landed nothing"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOTHING)
def test_an_interval_without_anything(job, case):
    """It is said why there is nothing to replay, and nothing fails."""
    entries, why = NOTHING[case]
    append_by_kind(job.ledger, entries)
    span = read_span(replace(job, run_type="backfill"))
    assert span.is_empty
    assert why in str(span)


def test_an_interval_must_be_told(job):
    """Without one nothing says what to replay."""
    with pytest.raises(StateError, match="give both"):
        read_span(replace(job, run_type="backfill", interval_end=None))


def column(name, attnum) -> ColumnState:
    return ColumnState(name, 25, -1, "text", "string", False, attnum)


STATE = TableState(
    NOON, "r", "public.t", 1, "synced", publishes=["insert", "update"],
    columns=[column("id", 1), column("new", 2)],
)  # fmt: skip
OLD = [column("id", 1), column("old", 2)]
DROPPED = [column("id", 1), column("old", 3)]
RELATIONS = {
    "as it is": ([OLD], ["id", "new"], (0, 1)),
    "renamed since": ([OLD], ["old", "id"], (1, 0)),
    "added since": ([[column("id", 1)]], ["id"], (0, None)),
    "two of that name": ([OLD, DROPPED], ["id", "old"], None),
    "unknown": ([OLD], ["id", "other"], None),
}


@pytest.mark.parametrize("case", RELATIONS)
def test_old_columns_are_placed_by_their_numbers(case):
    """As the ledger's history of the target has them, or not at all."""
    history, names, expected = RELATIONS[case]
    columns = tuple(RelationColumn(name, 25, -1, False) for name in names)
    relation = Relation(1, "public", "t", "d", columns)
    assert place_columns_by_history(STATE, [*history, STATE.columns], relation) == expected
    assert place_columns_by_name(STATE, relation) == tuple(
        names.index(c) if c in names else None for c in ("id", "new")
    )
