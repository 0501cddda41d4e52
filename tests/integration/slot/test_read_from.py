"""The slot on a standby (source.read_from), while copies come from the primary."""

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event

import pytest

from tests.support.servers.standby import (
    SCHEMA,
    ask,
    catch_up,
    configure,
    follow,
    held,
    insert,
    pipeline_on,
    promote,
    servers,
    there,
)
from tests.support.waiting import wait_until
from waldelta.background import run_concurrently
from waldelta.config import Publication
from waldelta.errors import ConfigError, NotStandby, PreflightFailed, SlotLost, SourceUnreachable
from waldelta.jobs import Pipeline
from waldelta.lake.ledger import now
from waldelta.pipeline.run_result import RunFailed
from waldelta.postgres import connect
from waldelta.slot.standby import committed_upto, slot_position
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup.slots_without_pipeline import (
    drop_slots_without_pipeline,
    find_slots_without_pipeline,
)

pytestmark = pytest.mark.spark

GRANT = "grant execute on function pg_log_standby_snapshot() to app"
KEPT = 8 << 30  # the servers' max_slot_wal_keep_size
SLOTS = "select count(*)::int from pg_replication_slots where slot_type = 'logical'"


@pytest.fixture
def read_from(monkeypatch) -> Callable:
    """Points source.read_from's connection at a server."""
    return lambda server, **at: monkeypatch.setenv(
        "AIRFLOW_CONN_TEST_STANDBY", server.uri(user="app", password="p", **at)
    )


@pytest.fixture
def pair(request, postgres, lead_to, read_from) -> Iterator[tuple]:
    """A primary and its standby, with the connections that lead there."""
    with servers(getattr(request, "param", max(postgres.version, 16))) as (primary, standby):
        ask(primary.start(), f"{SCHEMA}; reset role; {GRANT}")
        follow(standby, primary)
        lead_to(primary)
        read_from(standby)
        yield primary, standby


@contextmanager
def writing(primary) -> Iterator[None]:
    """Somebody who writes all the time, each change in a transaction of its own."""
    number = iter(range(1000, 1_000_000))

    def write(ended: Event) -> None:
        while not ended.is_set():
            insert(primary, next(number), "meanwhile")

    with run_concurrently(write, "writer"):
        yield


def test_the_stream_is_read_from_the_standby(runner, pair, lake, read_from):
    """Under writers; stopped for a while; refused by name once it is promoted."""
    primary, standby = pair
    pipeline = pipeline_on(lake, read_from="test_standby")
    read_from(primary)
    with pytest.raises(
        PreflightFailed,
        match=r"source\.read_from leads to .*, which is no standby, or was promoted",
    ):
        pipeline.setup()
    read_from(standby, dbname="template1")
    with pytest.raises(
        PreflightFailed, match=r"to database 'template1' of .*, and conn_id to 'postgres'"
    ):
        pipeline.setup()
    read_from(standby)
    plan = pipeline.setup()
    assert not any("standby" in text for text in plan.warnings), plan.warnings
    # Run on the primary as it stands, without comments, it makes no slot that nobody would read.
    assert "on the standby of connection 'test_standby'" in plan.as_sql()
    of_primary, _, of_standby = plan.as_sql().partition("\\endif\n")
    ask(primary, of_standby)
    # On the standby what is the primary's is passed over.
    psql = [str(standby.bin / "psql"), "-X", "-d", standby.conninfo()]
    done = subprocess.run(
        psql, input=f"{of_primary}\\endif", capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert (ask(primary, SLOTS), ask(standby, SLOTS)) == ([(0,)], [(1,)])
    ask(primary, "select pg_create_logical_replication_slot('flights', 'pgoutput')")
    pause(standby)
    with writing(primary):
        # Snapshots see what the standby replays later; u's duplicates show what was applied again.
        pipeline.sync(runner)
        # What it doesn't replay can't be read, and counts as lag; nothing is lost meanwhile.
        assert not check_idle(pipeline.job()).has_work
        slot = pipeline.status()["slot"]
        assert 0 < slot["replay_lag_bytes"] <= slot["lag_bytes"]
        with pipeline.job().source.connect_slot("test") as connection:
            asked, server = now(), slot_position(connection, pipeline.job())
            assert committed_upto(connection, server, asked) < asked
        # By what the standby has received; PostgreSQL itself says what is there at position 0/0.
        assert abs(slot["safe_wal_size"] - (KEPT - slot["retained_bytes"])) <= 16 << 20
        assert any("the primary also has a slot 'flights'" in text for text in slot["warnings"]), (
            slot["warnings"]
        )
        standby.stop()
        with pytest.raises(SourceUnreachable, match=f":{standby.port}/"):
            check_idle(pipeline.job())
        standby.start()
        assert any(
            "the primary also has a slot 'flights'" in text
            for text in pipeline.consume(runner).warnings
        )
    orphans(primary, standby)
    ask(primary, "select pg_drop_replication_slot('flights')")
    insert(primary, 3, "after")
    ask(primary, "truncate app.t; insert into app.t values (1, 'anew')")
    catch_up(standby, primary)
    assert pipeline.consume(runner).landed.changes > 0
    assert held(lake) == there(primary)

    # Of another database, so no orphan; still, whoever drops the other leaves the publication.
    ask(primary, "create database other")
    ask(primary, "select pg_create_logical_replication_slot('flights', 'pgoutput')", "other")
    assert orphans(primary, standby) == [
        "slot flights",
        "publication p stays: another server has a slot flights too",
    ]

    promote(standby)
    with pytest.raises(NotStandby, match=r"read_from leads to .* or was promoted"):
        check_idle(pipeline.job())


@pytest.mark.parametrize("pair", [16], indirect=True, ids="PostgreSQL {}".format)
@pytest.mark.soak("a standby of the oldest version")
def test_the_oldest_version_that_can(pair, lake):
    """Its functions and slots differ; by idle checks alone, which start no Spark."""
    primary, standby = pair
    pipeline = pipeline_on(lake, read_from="test_standby")
    plan = pipeline.setup()
    assert not any("standby" in text for text in plan.warnings), plan.warnings
    assert ask(standby, SLOTS) == [(1,)]
    ask(primary, "create table app.unpublished as select 1 as id")
    ask(primary, "select pg_switch_wal()")
    catch_up(standby, primary)
    seen = check_idle(pipeline.job())
    assert (seen.has_work, seen.moved_to is not None) == (False, True)
    insert(primary, 2, "after")
    catch_up(standby, primary)
    assert check_idle(pipeline.job()).has_work
    slot = pipeline.status()["slot"]
    assert abs(slot["safe_wal_size"] - (KEPT - slot["retained_bytes"])) <= 16 << 20
    # What waits is tried where the slot is.
    ask(primary, "create publication young for table app.t")
    catch_up(standby, primary)
    publications = [*pipeline.file.source.publications, Publication(name="young", manage=False)]
    source = pipeline.file.source.model_copy(update={"publications": publications})
    (found,) = Pipeline(pipeline.file.model_copy(update={"source": source})).check().problems
    assert '(publication "young" does not exist)' in found
    assert pipeline.teardown() == ["slot flights", "publication p"]
    assert ask(standby, SLOTS) == [(0,)]


def orphans(primary, standby) -> list[str]:
    """Slots without a pipeline, as an operator who names no file drops them."""
    with connect(primary.conninfo(), "test") as one, connect(standby.conninfo(), "test") as other:
        found = find_slots_without_pipeline(one, (), other)
        lines = [
            (orphan.slot.in_recovery, " on the standby keeps" in orphan.describe())
            for orphan in found
        ]
        assert lines in ([(False, False), (True, True)], [(True, True)]), lines
        if len(found) == 1:
            return drop_slots_without_pipeline(one, primary.conninfo(), found, ["flights"], other)
        with pytest.raises(
            ConfigError, match="the primary and the standby both have a slot 'flights'"
        ):
            drop_slots_without_pipeline(one, primary.conninfo(), found, ["flights"], other)
        return []


def pause(standby) -> None:
    """Let the standby receive, and replay nothing."""
    ask(standby, "select pg_wal_replay_pause()")
    wait_until(lambda: ask(standby, "select pg_get_wal_replay_pause_state()") == [("paused",)])


@pytest.mark.soak("a second standby and a resync")
def test_a_slot_that_the_standby_lost_is_made_anew(runner, pair, lake):
    """Vacuum takes rows that the slot needs without hot_standby_feedback."""
    primary, standby = pair
    pipeline = pipeline_on(lake, read_from="test_standby")
    configure(standby, hot_standby_feedback="off")
    standby.stop()
    standby.start()
    ask(primary, f"revoke{GRANT.removeprefix('grant').replace(' to ', ' from ')}")
    plan = pipeline.check()
    assert any("hot_standby_feedback is off: vacuum" in text for text in plan.warnings), (
        plan.warnings
    )
    assert any(
        "may not execute pg_log_standby_snapshot() on the primary" in text for text in plan.warnings
    )
    ask(primary, GRANT)
    pipeline.setup()
    pipeline.sync(runner)
    insert(primary, 2, "lost")
    lose_slot(primary, standby)
    with pytest.raises(SlotLost, match=r"hot_standby_feedback on and a primary_slot_name"):
        check_idle(pipeline.job())
    with pytest.raises(RunFailed, match="is lost"):
        pipeline.consume(runner)
    pipeline.resync(runner)
    assert held(lake) == there(primary)
    insert(primary, 3, "after")
    catch_up(standby, primary)
    pipeline.consume(runner)
    assert held(lake) == there(primary)
    assert pipeline.teardown() == ["slot flights", "publication p"]
    assert ask(standby, SLOTS) == [(0,)]


def lose_slot(primary, standby) -> None:
    """Vacuum the catalogs until the standby's slot is invalidated."""

    def is_lost() -> bool:
        ask(primary, "create table app.gone (i int)")
        ask(primary, "drop table app.gone")
        for catalog in ("pg_class", "pg_attribute", "pg_type"):
            ask(primary, f"vacuum {catalog}")
        catch_up(standby, primary)
        return ask(
            standby, "select conflicting from pg_replication_slots where slot_type = 'logical'"
        ) == [(True,)]

    wait_until(is_lost)
