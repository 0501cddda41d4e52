"""Reading from a standby: its lag, what costs its slot, and the pipeline file."""

import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.pipelines import job_of, whole_database
from tests.support.slot_state import SLOT
from waldelta.config import PipelineFile
from waldelta.config.pipeline_file import SlotLimits
from waldelta.errors import (
    AuthenticationFailed,
    ConfigError,
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
from waldelta.lake.ledger.records import ConsumedBatch
from waldelta.lsn import Lsn
from waldelta.pipeline import SlotIdentity, SourceConnections
from waldelta.postgres.server_position import ServerPosition
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot import check_ours, recover
from waldelta.slot.read import peek_error
from waldelta.slot.slot import check_health
from waldelta.slot.standby import _check_follows, _timeline, check_slot, replay_warnings
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
        last_batch=lambda: 1, landed_end=lambda _: 1200, whole_sizes=lambda *_: {1: 1}
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
