"""Reading from a standby and failing over to one: lag, what costs the slot, configuration."""

import re
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from tests.support.bookkeeping import append_by_kind
from tests.support.pipelines import job_of, whole_database
from tests.support.slot_state import SLOT
from waldelta.config import PipelineFile
from waldelta.config.pipeline_file import SlotLimits
from waldelta.errors import (
    AuthenticationFailed,
    ConfigError,
    LateWriter,
    NotStandby,
    PeekTimeout,
    SlotForeign,
    SlotLost,
    SlotMissing,
    SourceChanged,
    SourceError,
    SourceUnreachable,
    StandbyAway,
    TransactionsStillOpen,
)
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, Run, SlotMove, TableState
from waldelta.lake.ledger.prune_ledger import keep_moves
from waldelta.lake.ledger.records import ConsumedBatch
from waldelta.lsn import Lsn
from waldelta.pipeline import Job, SlotIdentity, SourceConnections
from waldelta.pipeline.job import identity_of
from waldelta.postgres.server_position import ServerPosition
from waldelta.postgres.walsender import alter_failover_command, parse_timeline_ends
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.read.peek import peek_error
from waldelta.slot.recovery import recover
from waldelta.slot.slot import check_health, check_ours
from waldelta.slot.standby import (
    Promotion,
    _check_follows,
    _read_ends,
    _timeline,
    check_followed,
    check_slot,
    copies_beyond,
    judge_history,
    known_ends,
    record_promotion,
    replay_warnings,
)
from waldelta.stages.repair.replay.interval import end_at_failovers
from waldelta.stages.setup._slot_setup import _create_on_standby, slot_that_stays
from waldelta.stages.setup.facts.source_facts import ServerFacts
from waldelta.stages.setup.preflight.source import (
    _free_slots,
    _server_warnings,
    judge_servers,
    judge_settings,
)

PRIMARY = ServerPosition("1", 1, Lsn(1500), 1, 1 << 24, "postgres")
STANDBY = replace(PRIMARY, flush_lsn=Lsn(1000), primary_lsn=Lsn(1500))


def file(**source) -> PipelineFile:
    return whole_database(source=source)


@pytest.mark.parametrize(
    "position, read, lag, behind", [(PRIMARY, 1200, 300, None), (STANDBY, 900, 600, 500)]
)
def test_lag_is_measured_against_the_primary(position, read, lag, behind):
    """What the standby hasn't replayed counts, and is told apart."""
    assert (position.lag_of(Lsn(read)), position.replay_lag) == (lag, behind)


@pytest.mark.parametrize(
    "mb, severities", [(0, []), (1, []), (2, ["warning"]), (9, ["critical"])], ids=str
)
def test_a_standby_that_stays_behind_is_told(mb, severities):
    """By the limits of the slot's backlog, which doesn't grow meanwhile."""
    position = replace(STANDBY, primary_lsn=STANDBY.flush_lsn + (mb << 20))
    found = replay_warnings(position, SlotLimits(warn_mb=1, critical_mb=8))
    assert [warning.severity for warning in found] == severities
    assert replay_warnings(PRIMARY, SlotLimits()) == []


@pytest.mark.parametrize(
    "reason, prevention",
    [
        ("rows_removed", "hot_standby_feedback on"),
        ("conflicting", "hot_standby_feedback on"),
        ("wal_level_insufficient", "keep the primary's wal_level logical"),
        ("wal_removed", "max_slot_wal_keep_size"),
        ("idle_timeout", "idle_replication_slot_timeout"),
    ],
)
def test_a_lost_slot_says_what_prevents_it(reason, prevention):
    """By PostgreSQL's reason."""
    with pytest.raises(SlotLost, match=rf"is lost \({reason}\).* run resync, and .*{prevention}"):
        check_health(replace(SLOT, invalidation_reason=reason), "s")


@pytest.mark.parametrize(
    "theirs, told",
    [
        (replace(PRIMARY, system_identifier="2"),
         "replays system 1, timeline 1, and conn_id to system 2"),
        (replace(PRIMARY, timeline=2),
         "replays system 1, timeline 1, and conn_id to system 1, timeline 2"),
        (replace(PRIMARY, database="shop"),
         "to database 'postgres' of db2:5432, and conn_id to 'shop'"),
    ],
)  # fmt: skip
def test_another_server_s_standby_is_refused(theirs, told):
    """Another cluster's, timeline's or database's, whose slot would never have changes."""
    connection = SimpleNamespace(info=SimpleNamespace(host="db2", port=5432))
    with pytest.raises(NotStandby, match=f"read_from leads .*{told}"):
        _check_follows(connection, STANDBY, theirs)
    _check_follows(connection, STANDBY, PRIMARY)


@pytest.mark.parametrize("replayed, is_ahead", [(1000, False), (1500, False), (1501, True)])
def test_a_standby_ahead_of_its_primary_has_other_wal(replayed, is_ahead):
    """A primary sends only what it has flushed, and is asked afterwards."""
    connection = SimpleNamespace(info=SimpleNamespace(host="db2", port=5432))
    with pytest.raises(SourceChanged, match="recreate the standby") if is_ahead else nullcontext():
        _check_follows(connection, replace(STANDBY, flush_lsn=Lsn(replayed)), PRIMARY)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({}, ["hot_standby_feedback is off and primary_slot_name is empty"]),
        ({"hot_standby_feedback": "on"}, ["primary_slot_name is empty"]),
        ({"hot_standby_feedback": "on", "primary_slot_name": "s"}, []),
        ({"hot_standby_feedback": "on", "primary_slot_name": "s", "wal_level": "replica"},
         ["wal_level .* is 'replica'"]),
        ({"hot_standby_feedback": "on", "primary_slot_name": "s", "search_path": ""},
         ["a connection pooler answers"]),
    ],
)  # fmt: skip
def test_settings_that_cost_the_slot(settings, said):
    """Warned of before anything is made; decoding without wal_level logical is refused."""
    usual = {"wal_level": "logical", "search_path": "pg_catalog", "hot_standby_feedback": "off"}
    standby = SimpleNamespace(settings=usual | settings, behind_pooler=False)
    found = [finding.text for finding in judge_settings(standby)]
    assert [bool(re.search(text, told)) for text, told in zip(said, found, strict=True)] == [
        True
    ] * len(said)


def test_read_from_is_another_server_and_no_failover_slot():
    """Both are said at their place in the file."""
    for source, said in (
        ({"read_from": "c"}, "read_from is conn_id"),
        ({"read_from": "d", "failover": True}, "exclude each other"),
        ({"read_from": "d", "failover": False}, "exclude each other"),
    ):
        with pytest.raises(ValueError, match=said):
            file(**source)
    assert file(read_from="d").source.conn_ids == ["c", "d"]


def test_a_run_without_the_standby_s_connection_does_not_fall_back_on_the_primary():
    """It would make, or move, another slot of that name."""
    assert SourceConnections(file().source, "host=primary").slot_conninfo == "host=primary"
    assert (
        SourceConnections(file(read_from="d").source, "host=primary", "host=standby").slot_conninfo
        == "host=standby"
    )
    with pytest.raises(ConfigError, match=r"'d' \(source\.read_from\) wasn't passed to this run"):
        _ = SourceConnections(file(read_from="d").source, "host=primary").slot_conninfo


def test_a_standby_that_restarted_is_waited_for(monkeypatch):
    """It replays again what had landed; WAL that the primary lacks too is lost."""
    identity = SlotIdentity("s", "1", 1, "0/1")
    log = SimpleNamespace(
        last_batch=lambda: 1, end_lsn=lambda _: 1200, whole_sizes=lambda *_: {1: 1}
    )
    ledger = SimpleNamespace(
        furthest_lsn=lambda *_: 1200, consumed_batches=lambda *_: {1: ConsumedBatch(1200, 1)}
    )
    job = SimpleNamespace(ledger=ledger)
    monkeypatch.setattr("waldelta.slot.recovery.check_no_mismatch", lambda *_: None)
    monkeypatch.setattr("waldelta.slot.recovery.confirmed_lsn", lambda *_: Lsn(1200))
    with pytest.raises(StandbyAway, match="has replayed WAL only up to 0/3E8") as away:
        recover(None, job, identity, log, STANDBY)
    assert away.value.retryable
    with pytest.raises(SourceChanged, match="restored to an earlier state"):
        recover(None, job, identity, log, replace(STANDBY, primary_lsn=Lsn(1100)))


ENDS = {
    "an administrator": ("57P01", False, SourceUnreachable),
    "a crash": ("57P02", False, SourceUnreachable),
    "a shutdown": ("57P03", False, SourceUnreachable),
    "the network": (None, True, SourceUnreachable),
    "a defect of the driver": (None, False, SourceError),
    "a lock": ("55P03", False, SourceUnreachable),
    "replay": ("40001", False, StandbyAway),
    "the statement timeout": ("57014", False, PeekTimeout),
    "unreadable WAL": ("XX000", False, SourceError),
}


@pytest.mark.parametrize("state, is_of_connection, kind", ENDS.values(), ids=ENDS)
def test_what_ended_a_read(state, is_of_connection, kind):
    """A lost connection is retried; what the server says of the WAL isn't, in any language."""
    found = peek_error("s", ServerError(state, "ωωω", "", is_of_connection))
    assert type(found) is kind
    assert found.retryable == (kind is not SourceError)


def test_a_person_cancels_before_the_timeout_has_passed():
    """The server's code is the same."""
    found = peek_error("s", ServerError("57014", "ωωω"), timed_out=False)
    assert type(found) is SourceUnreachable


def test_a_slot_that_postgresql_keeps_on_the_standby_is_not_ours():
    """It can't be read, moved or dropped there; after a promotion it is a slot like others."""
    kept = replace(SLOT, failover=True, synced=True, in_recovery=True)
    with pytest.raises(
        SlotForeign, match=r"copy of the primary's failover slot .* choose another slot name"
    ):
        check_ours(kept)
    assert slot_that_stays(kept, []) == []
    promoted = replace(kept, in_recovery=False)
    check_ours(promoted)
    assert len(slot_that_stays(promoted, [])) == 1


def test_several_servers_behind_one_address_are_refused():
    """The slot is on one of them, and a run that met another would miss it, or make one more."""
    one, restarted, other = (
        ("10.0.0.1:5432", "08:00"),
        ("10.0.0.1:5432", "09:00"),
        ("10.0.0.2:5432", "08:00"),
    )
    assert list(judge_servers({one})) == []
    for both in ({one, other}, {one, restarted}):
        (found,) = judge_servers(both)
        assert (
            found.severity,
            "leads to more than one server (10.0.0.1:5432 (started 08:00), " in found.text,
        ) == ("problem", True)


def test_a_slot_that_is_missing_names_the_standby_asked(monkeypatch):
    """A balancer in front of several shows itself by that."""
    monkeypatch.setattr("waldelta.slot.standby.read_slot", lambda *_: None)
    connection = SimpleNamespace(info=SimpleNamespace(host="other", port=5432))
    for source, said in (
        ({"read_from": "d"}, r"does not exist on the standby other:5432: run"),
        ({}, "exist: run"),
    ):
        with pytest.raises(SlotMissing, match=said):
            check_slot(connection, job_of(file(**source), read_conninfo=""))


@pytest.mark.parametrize(
    "met, kind",
    [
        (SourceError("refused"), SourceUnreachable),
        (SourceUnreachable("no place"), SourceUnreachable),
        (AuthenticationFailed("the password"), AuthenticationFailed),
    ],
)
def test_what_keeps_the_timeline_from_being_read(monkeypatch, met, kind):
    """A password that is wrong stays so: it isn't tried again."""

    def read(_):
        raise met

    monkeypatch.setattr("waldelta.slot.standby.read_timeline", read)
    with pytest.raises(kind):
        _timeline(job_of(file(read_from="d"), read_conninfo="host=standby"))


@pytest.mark.parametrize("lagging, kind", [(True, StandbyAway), (False, TransactionsStillOpen)])
def test_a_standby_that_is_away_is_told_before_open_transactions(monkeypatch, lagging, kind):
    """Of which a busy primary always has some."""

    def create(*_, **__):
        raise TransactionsStillOpen("pid 1")

    def wait(*_):
        if lagging:
            raise StandbyAway("not replayed")

    monkeypatch.setattr("waldelta.stages.setup._slot_setup.create_slot", create)
    monkeypatch.setattr("waldelta.stages.setup._slot_setup.wait_replayed", wait)
    monkeypatch.setattr(
        "waldelta.stages.setup._slot_setup.snapshots_logged", lambda _: nullcontext()
    )
    with pytest.raises(kind):
        _create_on_standby(None, None, file(read_from="d").source)


def test_each_setting_is_judged_where_it_counts():
    """Snapshots' and locks' sessions are the primary's; slot and WAL the standby's."""
    usual = {"max_slot_wal_keep_size": "1", "max_replication_slots": "1", "server_encoding": "UTF8"}
    timeouts = {"idle_in_transaction_session_timeout": "7", "idle_session_timeout": "7"}

    def server(**settings) -> ServerFacts:
        return ServerFacts(
            180000, False, usual | settings, "r", "d", False, False, True, True, True, True, 1, 0,
            0, False,
        )  # fmt: skip

    def told(primary, standby) -> list[str]:
        facts = SimpleNamespace(server=primary, slot_server=standby)
        return [
            found.text.partition(" ")[0] for found in _server_warnings(file(read_from="d"), facts)
        ]

    assert told(server(**timeouts), server()) == list(timeouts)
    assert told(server(), server(**timeouts)) == []
    assert told(server(), server(idle_replication_slot_timeout="7")) == [
        "idle_replication_slot_timeout"
    ]
    (found,) = _free_slots(file(read_from="d"), server(), slot_exists=False)
    assert "replication slots of the standby of source.read_from: 1 of 1 are used" in found.text


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
    append_by_kind(ledger, moves)
    assert ledger.furthest_lsn("s", "0/1") == furthest
    # Whatever maintenance drops.
    ledger.table(SlotMove).prune(lambda rows: keep_moves(rows, NOON + timedelta(days=1)))
    assert ledger.furthest_lsn("s", "0/1") == furthest
    assert identity_of("s", ledger.slot_events()).timeline == max(
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
    kept = end_at_failovers(runs, [move("created", 1), move("promoted", 70, 2)])
    assert [run.end_lsn for run in kept] == [70, None, 85]
    assert end_at_failovers(runs, [move("created", 1)]) == runs


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
    life, *promoted = job.ledger.slot_events()
    assert known_ends(life, promoted) == {1: Lsn(7)}
