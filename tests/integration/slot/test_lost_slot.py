"""After a slot is gone: a recorded gap, a resync of rows that differ, and the slots after it."""

import re
import subprocess
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.oracles.compare import differing
from tests.support.pipelines import beside_superuser, job_for, pipeline_file
from tests.support.slot_state import lose
from waldelta.errors import SlotForeign, SlotMissing, SourceChanged, WaldeltaError
from waldelta.jobs.consume import consume
from waldelta.jobs.sync import run_resync
from waldelta.lake.ledger import TableState, now
from waldelta.lsn import Lsn
from waldelta.monitoring.status import read_status
from waldelta.pipeline.job import load_job
from waldelta.pipeline.run_result import RunFailed
from waldelta.postgres.server_position import read_position
from waldelta.slot.gaps import CLOSED, OPEN, open_gaps
from waldelta.slot.recovery import recover
from waldelta.slot.slot import create_slot, read_slot
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup.renew_slot import renew_slot
from waldelta.stages.setup.setup import apply_setup, plan_setup, teardown
from waldelta.stages.sync.sync import sync

TABLES = """
    create table kept(id int primary key, v text, f double precision, j jsonb, at timestamptz);
    insert into kept select g, repeat('v', 20), g / 3.0, '{"b": 1, "a": [1, 2]}', '2026-01-01'
      from generate_series(1, 2000) g;
    create table part(region int, id int, v text, primary key (region, id));
    insert into part select g % 5, g, 'v' from generate_series(1, 50) g;
    create table bag(v text);
    alter table bag replica identity full;
    insert into bag values ('a'), ('a'), ('b');
"""
# Nobody decodes these.
MEANWHILE = """
    update kept set v = 'changed' where id in (10, 20);
    update kept set f = '-0', at = 'infinity' where id = 30;
    update kept set id = id + 5000 where id = 40;
    delete from kept where id in (50, 60);
    insert into kept values (3001, 'new', 'nan', null, null);
    truncate part;
    insert into part select g % 5, g, 'v' from generate_series(11, 50) g where g % 10 <> 3;
    insert into part values (4, 1, 'inside'), (1, 100, 'outside');
    delete from bag where v = 'b';
    insert into bag values ('a');
"""
LATER = """
    update kept set v = 'later' where id = 71;
"""
WRITES = """
    insert into kept values ({0}, 'w', 1, '1', null);
    update kept set v = 'w{0}' where id in (10, 100);
    delete from kept where id = {0} % 7 + 200;
    update part set region = 5 - region where id = {0} % 9 + 10;
    insert into bag values ('w{0}');
"""


class Killed(BaseException):
    """What no handler catches."""


def kill(*_):
    raise Killed


def pipeline_of(lake, slot):
    tables = ["public.kept", "public.bag", {"name": "public.part", "where": "region > 2"}]
    return pipeline_file(lake, slot, tables, target={"root": lake, "deletion_vectors": True})


def merges(runner, job, table):
    history = (
        runner.spark()
        .sql(f"describe history delta.`{job.lake.target(table).uri}`")
        .where("operation = 'MERGE'")
        .collect()
    )
    return [
        {k: int(v) for k, v in row["operationMetrics"].items() if v.isdigit()} for row in history
    ]


@pytest.mark.nightly("each step of losing a slot; test_resync continues after one")
def test_a_dropped_slot(runner, database, lake, monkeypatch):
    """Killed thrice, the next command goes on; unchanged rows aren't written."""
    database.execute(TABLES)
    job = load_job(pipeline_of(lake, f"s_{database.name}"), "first")
    slot = job.pipeline.source.slot
    with job.source.connect("setup") as connection:
        apply_setup(connection, job)
    sync(runner, job)
    database.execute("update kept set v = 'streamed' where id = 1")
    consume(runner, job)
    former_end, former = (
        database.execute("select confirmed_flush_lsn::text from pg_replication_slots")[0][0],
        job.read_identity(),
    )
    database.execute("select pg_drop_replication_slot(%s)", (slot,))
    database.execute(MEANWHILE)
    for run in (
        lambda: consume(runner, replace(job, run_id="a")),
        lambda: check_idle(job),
        lambda: check_idle(job),
    ):
        with pytest.raises((RunFailed, SlotMissing)):
            run()
    (gap,) = read_status(job)["gaps"]
    assert (gap["run_id"], gap["from_lsn"], gap["cause"]) == ("a", former_end, "SlotMissing")
    assert "resync" in gap["remedy"]

    writer = database.connect()

    def write_and_stay_open(connection, timeout_s):
        writer.execute(WRITES.format(4001))

    again = replace(job, run_id="again")
    for step, run in (
        (
            "waldelta.stages.setup.setup.fault_point",
            lambda: run_resync(runner, again, ["public.kept"]),
        ),
        (
            "waldelta.stages.sync.sync.check_not_removed",
            lambda: run_resync(runner, again, ["public.kept"]),
        ),
        ("waldelta.stages.sync.sync.check_not_removed", lambda: consume(runner, again)),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(step, kill)
            with pytest.raises(Killed):
                run()
    assert [g.status for g in job.ledger.gaps(slot)] == [OPEN]
    database.execute(LATER)
    with monkeypatch.context() as patched:
        patched.setattr(
            "waldelta.snapshot.exported_snapshot.wait_for_old_transactions", write_and_stay_open
        )
        result = run_resync(runner, again)
    database.execute(
        WRITES.format(4002).replace("in (10, 100)", "= 70").replace("id = {0}", "id = 9")
    )
    writer.commit()
    writer.close()

    # The killed one wrote what differed by then, the other what has differed since.
    last, first = merges(runner, job, "public.kept")[:2]
    for found, expected in ((first, (2, 3, 3, 0)), (last, (0, 1, 0, 0))):
        assert (
            tuple(
                found[f"numTargetRows{name}"]
                for name in ("Inserted", "Updated", "Deleted", "Copied")
            )
            == expected
        )
    told = {
        name.removeprefix("public."): (
            t.compared,
            t.inserted,
            t.updated,
            t.deleted,
            t.unchanged,
            t.rows,
        )
        for name, t in result.tables.items()
    }
    assert told == {
        "kept": (1999, 0, 1, 0, 1998, None),
        "part": (13, 1, 0, 8, 12, None),
        "bag": (None, 0, 0, 0, None, 3),
    }
    assert "public.bag was copied as a whole: it has no key" in result.warnings
    rows = {
        row["id"]: row["_wd_lsn"]
        for row in runner.spark()
        .read.format("delta")
        .load(job.lake.target("public.kept").uri)
        .collect()
    }
    assert rows[2] < rows[1] <= Lsn.parse(former_end).value < rows[10] == rows[3001] < rows[71]
    life = job.read_identity()
    assert life.incarnation != former.incarnation
    opened, closed = job.ledger.gaps(slot)
    assert (opened.status, closed.status, closed.run_id, closed.incarnation) == (
        OPEN,
        CLOSED,
        "again",
        former.incarnation,
    )
    assert closed.to_lsn == Lsn.parse(life.incarnation).value
    assert read_status(job)["gaps"] == []
    consume(runner, replace(job, run_id="b"))
    assert differing(runner, job) == {}
    # A resync of a slot that is fine makes nothing anew.
    assert (run_resync(runner, replace(job, run_id="c")).tables, job.read_identity()) == ({}, life)


@pytest.fixture
def job(database, lake):
    database.execute("create table t (id int primary key)")
    return job_for(database, lake, {"name": "p", "tables": [{"name": "public.t"}]})


def dropped(conn, job):
    conn.execute("select pg_drop_replication_slot(%s)", (job.pipeline.source.slot,))


def advanced(conn, job):
    conn.execute("insert into public.t values (1)")
    conn.execute(
        "select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())",
        (job.pipeline.source.slot,),
    )


def of_another_server(conn, job):
    """The ledger says so, and no slot is here."""
    job.ledger.append(replace(job.ledger.slot_events()[-1], at=now(), system_identifier="1"))
    dropped(conn, job)


@pytest.mark.parametrize(
    "breaks, cause",
    [(dropped, "SlotMissing"), (advanced, "SlotGap"), (of_another_server, "SourceChanged")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_slot_is_made_anew_once(conn, job, breaks, cause):
    """It has a life of its own, and the gap stands in the ledger once however often it is met."""
    apply_setup(conn, job)
    former = job.read_identity()
    assert renew_slot(job) is None
    breaks(conn, job)
    with pytest.raises(WaldeltaError, match="resync"):
        check_idle(job)
    accepted = None
    if breaks is of_another_server:
        server = read_position(conn)
        accepted = f"{server.system_identifier}/{server.timeline}"
        for wrong in (None, "1/1"):
            with pytest.raises(SourceChanged, match=f"--accept-server {accepted}"):
                renew_slot(job, accept_server=wrong)
        assert read_slot(conn, former.slot) is None
    if breaks is advanced:
        # Nothing shows that it is the slot of before: somebody else may have made it since.
        with pytest.raises(SlotForeign, match=r"beyond .* another program may have moved it"):
            renew_slot(job)
        assert read_slot(conn, former.slot) is not None
        dropped(conn, job)
    gap = renew_slot(job, accept_server=accepted)
    assert (gap.cause, gap.from_lsn) == (cause, Lsn.parse(former.incarnation).value)
    assert (gap.to_lsn is None) is (breaks is of_another_server)
    assert job.read_identity().incarnation != former.incarnation
    assert [found.cause for found in open_gaps(job.ledger.gaps(former.slot))] == [cause]
    assert renew_slot(job) is None
    assert not check_idle(job).has_work


def test_a_connection_that_led_elsewhere_for_a_while(conn, job):
    """Nothing was lost: the gap is closed by the next look that finds the slot as it was left."""
    apply_setup(conn, job)
    life = job.ledger.slot_events()[-1]
    job.ledger.append(replace(life, at=now(), timeline=7))
    with pytest.raises(WaldeltaError, match="timeline 7"):
        check_idle(job)
    (gap,) = open_gaps(job.ledger.gaps(life.slot))
    assert (gap.to_lsn, gap.remedy.partition(",")[0]) == (None, "point the connection back")
    job.ledger.append(replace(life, at=now()))
    check_idle(job)
    assert open_gaps(job.ledger.gaps(life.slot)) == []


def test_a_slot_that_another_may_have_made_outlives_the_teardown(conn, job):
    """Nothing but its position shows that it was dropped and made again."""
    apply_setup(conn, job)
    slot = job.pipeline.source.slot
    dropped(conn, job)
    conn.execute("insert into public.t values (1)")
    create_slot(conn, slot)
    said = teardown(conn, job)
    assert said[0] == "publication p"
    assert re.match(
        rf"slot {slot} stays .* at a position beyond .* drop it: select pg_drop_replication_slot",
        said[1],
    )
    assert read_slot(conn, slot) is not None


def test_what_the_script_for_a_dba_made_is_ours(database, conn, job):
    """A resync replaces the slot that the publications' comments name."""
    plan, slot = plan_setup(conn, job), job.pipeline.source.slot
    psql = [str(database.server.bin / "psql"), "-X", "-d", database.conninfo]
    subprocess.run(
        psql, input=plan.as_sql(), capture_output=True, text=True, check=True, timeout=60
    )
    assert beside_superuser(found.text for found in apply_setup(conn, job).findings) == []
    assert [move.event for move in job.ledger.slot_events()] == ["created"]
    lose(database)
    gap = renew_slot(job)
    assert gap is not None
    assert gap.cause == "SlotLost"
    assert read_slot(conn, slot).wal_status == "reserved"
    # One that was there before the publications isn't the script's, whatever comments say.
    teardown(conn, job)
    create_slot(conn, slot)
    assert any("existed before" in warning for warning in apply_setup(conn, job).warnings)
    assert any("existed before" in line for line in teardown(conn, job))


def test_what_is_not_ours_stays(conn, job):
    """An adopted slot; nothing to resync before setup and after teardown."""
    slot = job.pipeline.source.slot
    with pytest.raises(SlotMissing, match="was never set up for this lake: run setup"):
        renew_slot(job)
    create_slot(conn, slot)
    apply_setup(conn, job)
    advanced(conn, job)
    with pytest.raises(SlotForeign, match="this pipeline did not create it"):
        renew_slot(job)
    assert read_slot(conn, slot) is not None
    teardown(conn, job)
    with pytest.raises(SlotMissing, match=r"was torn down at .* run setup, then resync"):
        renew_slot(job)
    assert job.ledger.gaps(slot) == []


def copied(job, at=None):
    """What a sync records in the slot's present life."""
    incarnation = job.read_identity().incarnation
    job.ledger.append(
        TableState(at or now(), "r", "public.t", 1, "synced", incarnation=incarnation)
    )


def test_a_slot_adopted_twice_at_the_same_place_has_two_lives(conn, job):
    """Changes in between never came, and the position doesn't say so."""
    create_slot(conn, job.pipeline.source.slot)
    apply_setup(conn, job)
    first = job.read_identity()
    copied(job)
    assert list(job.read_states()) == ["public.t"]
    teardown(conn, job)
    apply_setup(conn, job)
    second = job.read_identity()
    assert job.read_states() == {}
    assert second.incarnation == f"{first.incarnation}.2"
    assert second.app_id != first.app_id
    copied(job)
    teardown(conn, job)
    apply_setup(conn, job)
    assert job.read_identity().incarnation == f"{first.incarnation}.3"
    assert job.read_states() == {}


@pytest.mark.parametrize("landed", [[7], []], ids=["some landed", "nothing landed"])
def test_a_late_batch_of_the_life_before_has_a_number_of_its_own(conn, job, landed):
    """A run that died with its slot may commit its batch during the next life."""
    apply_setup(conn, job)
    assert job.read_identity().floor == 0
    log = job.change_log(job.read_identity())
    for batch in landed:
        write_deltalake(
            log.uri, pa.table({"batch": [batch], "ordinal": [0]}), partition_by=["batch"]
        )
    late = log.highest_batch() + 1
    teardown(conn, job)
    apply_setup(conn, job)
    identity = job.read_identity()
    new = recover(conn, job, identity, job.change_log(identity), read_position(conn))
    assert late <= job.read_identity().floor < new.next_batch


def test_a_clock_set_back_between_two_lives_revives_no_copy(conn, job):
    """By the clock the copy of the first life is the younger one."""
    apply_setup(conn, job)
    copied(job, datetime(2100, 1, 1, tzinfo=UTC))
    assert list(job.read_states()) == ["public.t"]
    teardown(conn, job)
    apply_setup(conn, job)
    assert job.read_states() == {}
    copied(job)
    assert list(job.read_states()) == ["public.t"]
