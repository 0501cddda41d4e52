"""A standby becomes the primary: the pipeline goes on where that is exact, planned or not."""

import re
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from deltalake import DeltaTable

from tests.support.pipelines import job_for, slot_events
from tests.support.servers.standby import (
    SCHEMA,
    accepted_resync,
    ask,
    catch_up,
    configure,
    follow,
    held,
    insert,
    keep_slot,
    pipeline_on,
    promote,
    servers,
    there,
)
from waldelta.errors import NotPrimary, PreflightFailed, SourceChanged
from waldelta.jobs import Pipeline
from waldelta.lsn import Lsn
from waldelta.pipeline.run_result import RunFailed
from waldelta.postgres import connect
from waldelta.slot.slot import read_slot
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup.setup import apply_setup, plan_setup
from waldelta.stages.setup.slots_without_pipeline import find_slots_without_pipeline

pytestmark = pytest.mark.spark


def slot_moves(pipeline: Pipeline, event: str) -> list:
    return [move for move in pipeline.job().ledger.slot_moves() if move.event == event]


def landed(pipeline: Pipeline) -> int:
    """Inserts in the change log."""
    job = pipeline.job()
    return (
        DeltaTable(job.change_log(job.read_identity()).uri)
        .to_pyarrow_table(columns=["kind"])["kind"]
        .to_pylist()
        .count("I")
    )


@pytest.fixture
def newer(postgres):
    """The version under test, where PostgreSQL keeps slots on standbys."""
    if postgres.version < 17:
        pytest.skip("PostgreSQL keeps slots on standbys from 17 on")
    return postgres.version


def test_a_promoted_standby_goes_on_with_the_slot_that_it_kept(runner, newer, lake, lead_to):
    """The slot lags behind what has landed; all waiting changes land once."""
    pipeline = pipeline_on(lake)
    with servers(newer) as (primary, standby):
        ask(primary.start(), SCHEMA)
        lead_to(primary)
        pipeline.setup()
        follow(standby, primary)
        # A slot that exists is altered, which the role may do through the replication protocol.
        pipeline = pipeline_on(lake, failover=True)
        plan = pipeline.setup()
        assert plan.alter_failover is True
        assert 'ALTER_REPLICATION_SLOT "flights" (FAILOVER true)' in plan.as_sql()
        assert any("synchronized_standby_slots is empty" in text for text in plan.warnings)
        assert pipeline.check().is_empty
        assert pipeline.status()["slot"]["failover"] is True
        keep_slot(standby, primary, pipeline)
        with connect(standby.conninfo(), "test") as there_now:
            assert read_slot(there_now, "flights").is_synced
            assert find_slots_without_pipeline(there_now, ()) == []
        insert(primary, 3, "read before")
        assert drain(runner, pipeline.job()).changes == 2
        insert(primary, 4, "not read yet")
        catch_up(standby, primary)
        primary.stop("immediate")

        lead_to(standby)
        with pytest.raises(NotPrimary, match=r"is a standby.*promote this server"):
            check_idle(pipeline.job())
        before = pipeline.job().read_identity()
        promote(standby)
        insert(standby, 5, "after")
        assert check_idle(pipeline.job()).has_work
        after = pipeline.job().read_identity()
        assert (before.timeline, after.timeline) == (1, 2)
        assert after.app_id == before.app_id
        assert drain(runner, pipeline.job()).changes == 4
        assert (landed(pipeline), len(slot_moves(pipeline, "promoted"))) == (6, 1)
        assert pipeline.check().is_empty
        # What the failed server writes from now on is lost, so nothing of it is read.
        primary.start()
        insert(primary, 5, "split brain")
        lead_to(primary)
        with pytest.raises(SourceChanged, match="the server from before a failover"):
            check_idle(pipeline.job())


def branch_off(one, other) -> None:
    """A second standby as of now, which receives nothing any more."""
    one.stop()
    other._make_readable()
    shutil.copy(one.folder / "password", other.folder / "password")
    shutil.rmtree(other.data, ignore_errors=True)
    subprocess.run(["cp", "-a", str(one.data), str(other.data)], check=True)
    with (other.data / "postgresql.auto.conf").open("a") as conf:
        conf.write("primary_conninfo = ''\n")
    one.start()
    other.start()


def go_back(runner, pipeline: Pipeline, now, failed, lead_to) -> None:
    """The failed primary follows the one that took over, and takes over again."""
    for socket in filter(
        Path.is_socket, now.data.iterdir()
    ):  # pg_rewind would copy it; TCP is enough
        socket.unlink()
    failed._run("pg_rewind", "-D", str(failed.data), "--source-server", now.conninfo(), "-R")
    configure(failed, primary_slot_name="standby", hot_standby_feedback="on")
    ask(now, "select pg_create_physical_replication_slot('standby')")
    failed.start()
    insert(now, 5, "read before going back")
    pipeline.consume(runner, "sixth")
    keep_slot(failed, now, pipeline)
    insert(now, 6, "not read yet")
    catch_up(failed, now)
    now.stop()
    promote(failed)
    lead_to(failed)
    insert(failed, 7, "back")
    pipeline.consume(runner, "seventh")
    assert held(pipeline.file.target.root) == there(failed)


@pytest.mark.soak("a second failover of two servers")
def test_what_the_standby_had_not_received(runner, newer, lake, tmp_path, lead_to):
    """A lake that is ahead is refused; one whose copy alone is ahead takes that table anew; both
    are exact in the end.

    ``synchronized_standby_slots`` keeps a lake from being ahead: nothing is given away that the
    standby hasn't received.
    """
    pipeline, second = (
        pipeline_on(lake, failover=True),
        pipeline_on((tmp_path / "second").as_uri(), failover=True),
    )
    with servers(newer, 3) as (primary, standby, late):
        ask(primary.start(), SCHEMA)
        lead_to(primary)
        pipeline.setup()
        follow(standby, primary)
        pipeline.sync(runner)
        insert(primary, 2, "read before")
        pipeline.consume(runner, "first")
        keep_slot(standby, primary, pipeline)
        catch_up(standby, primary)
        branch_off(standby, late)
        shutil.copytree(urlsplit(lake).path, tmp_path / "second")
        insert(primary, 3, "lost")
        second.sync(runner, ["app.t"], "to have a copy of what will be lost")
        pipeline.consume(runner, "second")
        ask(primary, "create table app.other ()")
        pipeline.consume(runner, "a batch without rows")

        ask(primary, "alter system set synchronized_standby_slots = 'standby'")
        ask(primary, "select pg_reload_conf()")
        standby.stop()
        insert(primary, 4, "not received")
        with pytest.raises(RunFailed, match="standby has no standby connected"):
            pipeline.consume(runner, "third")
        primary.stop("immediate")

        lead_to(late)
        promote(late)
        insert(late, 3, "instead")
        where = "select confirmed_flush_lsn from pg_replication_slots where slot_name = 'flights'"
        before = ask(late, where)
        for verb in (
            lambda: check_idle(pipeline.job()),
            lambda: pipeline.consume(runner, "fourth"),
        ):
            with pytest.raises(
                (SourceChanged, RunFailed),
                match=r"is ahead of it; run resync.*/how-to/failover\.md",
            ):
                verb()
        assert (ask(late, where), slot_moves(pipeline, "promoted")) == (before, [])

        second.consume(runner, "fifth")
        assert held(second.file.target.root) == there(late)
        (promoted,) = slot_moves(second, "promoted")
        again = [
            state
            for state in second.job().read_all_states()
            if state.table_name == "app.t" and state.reason
        ]
        assert f"beyond the failover at {Lsn(promoted.lsn)}" in again[-1].reason

        go_back(runner, second, late, primary, lead_to)
        assert [move.timeline for move in slot_moves(second, "promoted")] == [2, 3]

        # The runbook for the lake that was ahead; the other one has moved the slot meanwhile, as
        # somebody else may have.
        with pytest.raises(
            RunFailed, match=r"beyond .*, the furthest this pipeline ever moved it.*drop it"
        ):
            accepted_resync(runner, pipeline)
        ask(primary, "select pg_drop_replication_slot('flights')")
        accepted_resync(runner, pipeline)
        insert(primary, 8, "after the resync")
        pipeline.consume(runner, "eighth")
        assert held(lake) == there(primary)


def test_failover_slot(any_database, lake):
    """The file decides; without a word the slot stays as it is; refused before 17."""
    any_database.execute("create table planes (tail text primary key, year int)")
    publication = {"name": "p", "tables": [{"name": "public.planes"}]}
    with connect(any_database.conninfo, "test") as conn:
        job = job_for(any_database, lake, publication, failover=True)
        if conn.info.server_version < 170000:
            with pytest.raises(
                PreflightFailed,
                match=r"source\.failover needs PostgreSQL 17 or later, this is 1[56]",
            ):
                apply_setup(conn, job)
            assert slot_events(lake) == []
            return
        slot = job.pipeline.source.slot
        first = apply_setup(conn, job)
        assert (
            f"select pg_create_logical_replication_slot('{slot}', 'pgoutput', false, false, true);"
            in first.as_sql()
        )
        assert (first.alter_failover, plan_setup(conn, job).is_empty) == (None, True)
        for wanted, altered, there in (
            (None, None, True),
            (False, False, False),
            (None, None, False),
            (True, True, True),
        ):
            job = job_for(any_database, lake, publication, slot=slot, failover=wanted)
            assert apply_setup(conn, job).alter_failover is altered
            assert (read_slot(conn, slot).failover, plan_setup(conn, job).is_empty) == (there, True)
        assert slot_events(lake) == ["creating", "created"]


PAGE = (Path(__file__).parents[3] / "docs/how-to/failover.md").read_text(encoding="utf-8")
KEPT = re.search(r"```sql\n(select slot_name, synced, .*?;)", PAGE, re.DOTALL)[1].replace(
    "flights_cdc", "flights"
)
SECTION = re.search(r"## Planned switchover\n(.*?)\n## ", PAGE, re.DOTALL)[1]


def steps() -> list[tuple[str, list[str]]]:
    """The section's blocks in order: their language, and their statements or commands."""
    found = re.findall(r"```(\w+)\n(.*?)```", SECTION, re.DOTALL)
    blocks = [(kind, textwrap.dedent(text)) for kind, text in found]
    split = {"sql": ";", "sh": "\n"}
    return [
        (
            kind,
            [
                part.strip().replace("flights_cdc", "flights")
                for part in text.split(split[kind])
                if part.strip()
            ],
        )
        for kind, text in blocks
    ]


def execute(server, command: str) -> None:
    """A command of the page's on the old primary's machine."""
    program, *arguments = shlex.split(command)
    if program == "touch":
        (path,) = arguments
        (server.data / path.removeprefix("OLD/")).touch()
        return
    assert program == "pg_ctl"
    if arguments == ["start", "-D", "OLD"]:
        server.start()  # with the port and the log of a test
        return
    server._run(
        program,
        *(str(server.data) if argument == "OLD" else argument for argument in arguments),
        "-w",
    )


@pytest.mark.soak("two switches between two servers")
def test_the_page(runner, postgres, lake, lead_to):
    """There, and back again, while nobody notices but by the connection."""
    if postgres.version < 17:
        pytest.skip("PostgreSQL keeps slots on standbys from 17 on")
    pipeline = pipeline_on(lake, failover=True)
    with servers(postgres.version) as (old, new):
        ask(old.start(), SCHEMA)
        lead_to(old)
        pipeline.setup()
        ask(
            old, "alter system set synchronized_standby_slots = 'standby'"
        )  # comes along to the standby
        follow(new, old)
        ask(old, "select pg_reload_conf()")
        pipeline.sync(runner)
        insert(old, 2, "read before")
        pipeline.consume(runner, "first")
        keep_slot(new, old, pipeline)
        insert(old, 3, "read, and the kept slot lags behind")
        pipeline.consume(runner, "second")
        insert(old, 4, "not read yet")

        stop, promote, consume, keep_wal, rejoin, keep = steps()
        ((_, synced, temporary, why, _),) = ask(new, KEPT)
        assert (synced, temporary, why) == (True, False, None)
        for command in stop[1]:
            execute(old, command)
        for statement in promote[1]:
            ask(new, statement)
        lead_to(new)
        insert(new, 5, "after")
        assert consume[1] == ["waldelta consume FILE"]  # in this session instead of one of its own
        assert pipeline.consume(runner, "third").landed.changes == 4
        assert held(lake) == there(new)
        (promoted,) = [
            move for move in pipeline.job().ledger.slot_moves() if move.event == "promoted"
        ]
        assert promoted.timeline == 2

        for statement in keep_wal[1]:
            ask(new, statement)
        old_again(old, new)
        for command in rejoin[1]:
            execute(old, command)
        drop, synchronize = keep[1]
        ask(old, drop)
        insert(new, 6, "with a standby again")
        pipeline.consume(runner, "fourth")
        assert kept_again(old, new, pipeline, synchronize)
        assert held(lake) == there(new)


def old_again(old, new) -> None:
    """The settings of a standby, which the page names."""
    conninfo = new.conninfo().replace("'", "")
    configure(
        old, primary_conninfo=conninfo, primary_slot_name="standby", hot_standby_feedback="on"
    )


def kept_again(old, new, pipeline: Pipeline, synchronize: str) -> bool:
    """Waits until the standby keeps the slot; the statement may come too early."""
    keep_slot(old, new, pipeline)
    ask(old, synchronize)
    ((_, synced, temporary, why, _),) = ask(old, KEPT)
    return (synced, temporary, why) == (True, False, None)
