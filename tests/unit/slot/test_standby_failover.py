"""Failovers: what of a lake's history the promoted server shares, judged on plain facts."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from tests.support.pipelines import job_of, whole_database
from tests.support.slot_state import SLOT
from waldelta.errors import LateWriter, SourceChanged, SourceUnreachable, StandbyAway
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, Run, SlotMove, TableState
from waldelta.lake.ledger.prune_ledger import keep_moves
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, SlotIdentity
from waldelta.pipeline.job import identity_of
from waldelta.postgres.server_position import ServerPosition
from waldelta.postgres.walsender import alter_failover_command, parse_timeline_ends
from waldelta.slot.slot import check_health
from waldelta.slot.standby import (
    Promotion,
    _read_ends,
    check_followed,
    copies_beyond,
    judge_history,
    known_ends,
    record_promotion,
)
from waldelta.stages.repair.replay.interval import within_history

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def move(event: str, lsn: int, timeline: int = 1, incarnation: str = "0/1") -> SlotMove:
    return SlotMove(NOON, "r", event, "s", "1", timeline, incarnation, lsn)


def ends(**timelines: int) -> dict[int, Lsn]:
    return {int(name[1:]): Lsn(end) for name, end in timelines.items()}


# The lake's timeline, the server's, the server's history, what the lake knows of it, the landed
# end; what comes of it.
HISTORIES = {
    "promoted behind what has landed": (1, 2, ends(t1=100), {}, 90, 100),
    "promoted right at its end": (1, 2, ends(t1=100), {}, 100, 100),
    "twice meanwhile": (1, 3, ends(t1=100, t2=200), {}, 90, 100),
    "for the second time": (2, 3, ends(t1=100, t2=200), ends(t1=100), 190, 200),
    "nothing landed": (1, 2, ends(t1=100), {}, 0, 100),
    "the lake is ahead": (1, 2, ends(t1=100), {}, 101,
     r"branched off at 0/64.* up to 0/65.* lost 1 bytes"),
    "the lake is ahead of the first of two": (1, 3, ends(t1=100, t2=200), {}, 150,
     "is ahead of it"),
    "another branch": (2, 3, ends(t1=100), ends(t1=100), 50, "doesn't descend from the old one"),
    "another timeline of that number": (2, 3, ends(t1=80, t2=200), ends(t1=100), 90,
     "timeline 1 until 0/50"),
    "no history": (1, 2, {}, {}, 0, "doesn't descend from the old one"),
}  # fmt: skip


@pytest.mark.parametrize("case", HISTORIES)
def test_a_promotion_is_followed_only_within_common_history(case):
    ours, theirs, history, known, landed, expected = HISTORIES[case]
    identity = SlotIdentity("s", "1", ours, "0/1")
    server = ServerPosition("1", theirs, Lsn(1000), 1, 1 << 24, "postgres")
    if isinstance(expected, int):
        assert judge_history(identity, server, history, known, Lsn(landed)) == Lsn(expected)
        return
    with pytest.raises(SourceChanged, match=expected) as refused:
        judge_history(identity, server, history, known, Lsn(landed))
    assert "docs/how-to/failover.md" in str(refused.value)


def test_history_file():
    """As PostgreSQL writes it, with reasons; comments and empty lines aren't timelines."""
    text = (
        "1\t0/3000148\tno recovery target specified\n\n# note\n2\tA/50\tbefore 2026-01-01"
        " 00:00:00+00\n"
    )
    assert parse_timeline_ends(text) == {1: Lsn.parse("0/3000148"), 2: Lsn.parse("A/50")}
    assert parse_timeline_ends("") == {}


FURTHEST = {
    "no failover": ([move("created", 10), move("intent", 50)], 50),
    "idle moves beyond the failover don't count":
     ([move("created", 10), move("intent", 50), move("intent", 90), move("promoted", 70, 2)], 70),
    "where it was left is no move":
     ([move("created", 10), move("intent", 50), move("promoted", 70, 2)], 50),
    "moves on the new timeline":
     ([move("created", 10), move("intent", 90), move("promoted", 70, 2), move("intent", 80, 2)],
      80),
    "a late run on the old one":
     ([move("created", 10), move("promoted", 70, 2), move("intent", 80, 2), move("intent", 200, 1)],
      80),
    "two failovers": ([move("created", 10), move("intent", 90), move("promoted", 70, 2),
                       move("intent", 99, 2), move("promoted", 80, 3)], 80),
}  # fmt: skip


@pytest.mark.parametrize("moves, furthest", FURTHEST.values(), ids=FURTHEST)
def test_how_far_the_slot_was_read_in_the_present_history(moves, furthest, lake):
    """After a failover the server has other WAL, which must not be passed over."""
    ledger = Ledger(Lake(lake))
    for row in moves:
        ledger.append(row)
    assert ledger.furthest_lsn("s", "0/1") == furthest
    # Whatever maintenance drops.
    ledger.table(SlotMove).prune(lambda rows: keep_moves(rows, NOON + timedelta(days=1)))
    assert ledger.furthest_lsn("s", "0/1") == furthest
    assert identity_of("s", ledger.slot_lives()).timeline == max(
        m.timeline for m in moves if m.event != "intent"
    )


def test_a_slot_made_anew_is_on_the_timeline_of_its_making():
    moves = [
        move("created", 10),
        move("promoted", 70, 2),
        move("dropped", 0),
        move("created", 80, 2, "0/50"),
    ]
    assert identity_of("s", moves).timeline == 2
    # A server restored to another history begins with a life of its own.
    assert (
        identity_of("s", [*moves, move("dropped", 0), move("created", 5, 1, "0/5")]).timeline == 1
    )


def test_earlier_promotions_are_known():
    life = move("created", 10)
    assert known_ends(life, [life]) == {}
    moves = [life, move("promoted", 70, 2), move("promoted", 80, 4)]
    assert known_ends(life, moves) == {1: Lsn(70), 2: Lsn(80)}


def test_copies_of_what_was_lost():
    """Their snapshots call transactions seen whose numbers the new primary gives to others."""
    states = [
        TableState(NOON, "r", name, 1, status, snapshot_lsn=lsn)
        for name, status, lsn in [
            ("a", "synced", 70),
            ("b", "synced", 71),
            ("c", "copying", 99),
            ("d", "needs_sync", 99),
        ]
    ]
    assert [state.table_name for state in copies_beyond(states, Lsn(70))] == ["b"]


def test_runs_end_within_the_present_history():
    """What a run read beyond the failover belongs to the run that reads it on the new primary."""
    runs = [
        Run(NOON - timedelta(hours=1), "a", "consume", "succeeded", start_lsn=0, end_lsn=90),
        Run(NOON - timedelta(hours=1), "b", "consume", "failed"),
        Run(NOON + timedelta(hours=1), "c", "consume", "succeeded", start_lsn=70, end_lsn=85),
    ]
    kept = within_history(runs, [move("created", 1), move("promoted", 70, 2)])
    assert [run.end_lsn for run in kept] == [70, None, 85]
    assert within_history(runs, [move("created", 1)]) == runs


def test_a_standby_that_is_away_is_named():
    """Reading would wait for it without a word."""
    slot = replace(SLOT, failover=True, standbys_away=("east", "west"))
    with pytest.raises(StandbyAway, match="east, west has no standby connected"):
        check_health(slot, "s")
    assert check_health(replace(slot, standbys_away=()), "s").failover


def test_command():
    assert (
        alter_failover_command("s", failover=True).as_string()
        == 'ALTER_REPLICATION_SLOT "s" (FAILOVER true)'
    )


def job_on(lake: str) -> Job:
    return job_of(whole_database(lake), "host=127.0.0.1 port=1", "run")


def test_a_run_on_the_old_server_lands_nothing_more(lake):
    """Its lock is the old server's, so nothing else says that another run went on."""
    job = job_on(lake)
    job.ledger.append(move("created", 10))
    late = job.read_identity()
    check_followed(job, late)
    job.ledger.append(move("promoted", 70, 2))
    with pytest.raises(
        LateWriter,
        match=r"another run has followed .* to timeline 2, while this run reads timeline 1",
    ):
        check_followed(job, late)
    check_followed(job, job.read_identity())


def test_a_history_that_cannot_be_read_is_asked_for_again(lake):
    """No walsender free just now, or a proxy: no reason to take the server for another one."""
    with pytest.raises(
        SourceUnreachable,
        match=r"only its timeline history .* couldn't be read: .* can't be reached",
    ) as refused:
        _read_ends(
            job_on(lake),
            SlotIdentity("s", "1", 1, "0/1"),
            ServerPosition("1", 2, Lsn(1000), 1, 1 << 24, "postgres"),
        )
    assert refused.value.retryable


def test_a_promotion_is_recorded_once(lake):
    """A run behind another's record would add that the current timeline was left too."""
    job = job_on(lake)
    job.ledger.append(move("created", 5))
    promotion = Promotion(SlotIdentity("s", "1", 2, "0/1"), Lsn(7))
    for _ in range(2):
        record_promotion(job, promotion)
    life, *promoted = job.ledger.slot_lives()
    assert known_ends(life, promoted) == {1: Lsn(7)}
