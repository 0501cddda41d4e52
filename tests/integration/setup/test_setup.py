"""Setup and teardown: idempotent by difference; only what the pipeline made is removed."""

import logging
import shutil
import subprocess
import uuid
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import pytest
from psycopg import sql

from tests.support.pipelines import job_for, job_of, slot_events, source_state
from tests.support.servers.roles import OWNS, READS, role_on
from waldelta.config import Source
from waldelta.errors import (
    LateWriter,
    LockHeld,
    PreflightFailed,
    PrivilegeMissing,
    SourceChanged,
    TableBusy,
    TransactionsStillOpen,
)
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger
from waldelta.pipeline import slot_lock
from waldelta.postgres import connect
from waldelta.slot.slot import create_slot, read_slot
from waldelta.stages.setup import _slot_setup as setup_slot
from waldelta.stages.setup import setup
from waldelta.stages.setup.facts.publications import Statement, read_publications
from waldelta.stages.setup.setup import STOP_ON_ERROR, SetupPlan, apply_setup, plan_setup, teardown
from waldelta.stages.setup.slots_without_pipeline import find_slots_without_pipeline

pytestmark = pytest.mark.pg


@pytest.fixture
def tables(database):
    database.execute(
        "create table flights (id int, origin varchar(3), note text, delay int, primary key (id,"
        " origin));create table planes (tail text primary key, year int); create table airlines"
        " (code text primary key)"
    )


FLIGHTS = {
    "name": "public.flights",
    "where": "origin = 'JFK' or origin like 'L%'",
    "columns": ["origin", "id", "delay"],
}
PLANES = {"name": "public.planes"}


@pytest.fixture
def job(database, lake, tables):
    """A run of a pipeline that publishes the flights."""
    return job_for(database, lake, {"name": "p", "tables": [FLIGHTS]})


def test_setup_is_idempotent(database, conn, lake, tables):
    """The second plan is empty, although PostgreSQL prints the filter in other words."""
    job = job_for(
        database,
        lake,
        {"name": "p", "tables": [FLIGHTS, PLANES], "publish_via_partition_root": True},
    )
    first = apply_setup(conn, job)
    assert len(first.statements) == 2
    assert first.create_slot
    slot = read_slot(conn, job.pipeline.source.slot)
    again = plan_setup(conn, job)
    assert again.is_empty
    assert again.as_sql() == ""
    apply_setup(conn, job)
    assert slot_events(lake) == ["creating", "created"]
    created = Ledger(Lake(lake)).slot_moves()[-1]
    assert created.incarnation == str(slot.confirmed_flush_lsn)
    assert (created.lsn, created.system_identifier, created.timeline) == (
        slot.confirmed_flush_lsn.value, slot.system_identifier, slot.timeline,
    )  # fmt: skip


@pytest.mark.parametrize(
    "before, after",
    [
        ({"tables": [FLIGHTS]}, {"tables": [FLIGHTS, PLANES]}),
        ({"tables": [FLIGHTS, PLANES]}, {"tables": [PLANES]}),
        ({"tables": [FLIGHTS, PLANES]}, {"tables": [{**FLIGHTS, "where": "id > 5 -- five"},
                                                           PLANES]}),
        ({"tables": [FLIGHTS]}, {"tables": [{**FLIGHTS, "columns": None}]}),
        ({"tables": [FLIGHTS, PLANES]}, {"tables": [{**FLIGHTS, "where": None},
                                                           {"name": "public.airlines"}]}),
        ({"tables": [PLANES]}, {"tables": [PLANES], "publish": ["insert"]}),
        ({"tables": [PLANES]}, {"tables": [PLANES], "publish_via_partition_root": True}),
        ({"tables": [PLANES]}, {"all_tables": True, "accept_future_tables": True}),
        ({"all_tables": True, "accept_future_tables": True}, {"tables": [FLIGHTS]}),
        ({"tables": [PLANES]}, {"schemas": ["public"], "accept_future_tables": True}),
        ({"tables": [PLANES], "schemas": ["public"], "accept_future_tables": True},
                {"tables": [{**PLANES, "where": "tail > 'x'"}], "schemas": ["other"],
                 "accept_future_tables": True}),
        ({"tables": [PLANES], "schemas": ["public"], "accept_future_tables": True},
                {"tables": [PLANES]}),
    ],
)  # fmt: skip
def test_alter_by_difference(database, conn, lake, tables, before, after):
    """The publication is the one that a fresh setup would make, and the slot stays."""
    database.execute("create schema other")
    job = job_for(database, lake, {"name": "p", **before})
    apply_setup(conn, job)
    slot = read_slot(conn, job.pipeline.source.slot)
    job = job_for(database, lake, {"name": "p", **after}, slot=slot.name)
    plan = apply_setup(conn, job)
    assert plan.statements
    assert plan_setup(conn, job).is_empty
    altered = read_publications(conn)["p"]
    assert read_slot(conn, slot.name).confirmed_flush_lsn == slot.confirmed_flush_lsn
    teardown(conn, job)
    apply_setup(conn, job)
    assert read_publications(conn)["p"] == altered


def test_partition_root_switched_on_and_off_with_its_filter(database, conn, lake):
    """A root's filter needs publish_via_partition_root, so the statements' order matters."""
    database.execute(
        "create table r (id int primary key) partition by range (id);"
        "create table r1 partition of r for values from (0) to (10)"
    )
    plain = {"name": "p", "tables": [{"name": "public.r"}]}
    via_root = {
        "name": "p",
        "tables": [{"name": "public.r", "where": "id > 1"}],
        "publish_via_partition_root": True,
    }
    slot = "s_" + uuid.uuid4().hex[:8]
    for entry in (plain, via_root, plain):
        job = job_for(database, lake, entry, slot=slot)
        apply_setup(conn, job)
        assert plan_setup(conn, job).is_empty


def test_change_behind_our_back_is_put_right(conn, job):
    apply_setup(conn, job)
    conn.execute("alter publication p set table public.flights where (id > 3)")
    plan = apply_setup(conn, job)
    assert "filter or column list changed: public.flights" in plan.describe()
    assert plan_setup(conn, job).is_empty


def test_sql_for_a_dba_does_the_same(database, conn, lake, tables):
    """A DBA runs the script; then a role that owns nothing sets up the rest."""
    with role_on(conn, READS) as role:
        info = database.server.conninfo(database.name, role, "p")
        job = job_for(info, lake, {"name": "p", "tables": [FLIGHTS, PLANES]})
        with connect(info, "test") as plain:
            plan = plan_setup(plain, job)
            assert any("publication 'p' must be created" in p for p in plan.problems)
            assert any("doesn't own public.flights" in p for p in plan.problems)
            before = source_state(database)
            with pytest.raises(PreflightFailed):
                apply_setup(plain, job)
            assert source_state(database) == before
            publications, _, _ = plan.as_sql().partition("-- after the publications")
            database.execute(publications.removeprefix(f"{STOP_ON_ERROR}\n"))
            plan = apply_setup(plain, job)
            assert plan.statements == ()
            assert plan.problems == ()
            assert plan_setup(plain, job).is_empty
            before = source_state(database)
            with pytest.raises(PrivilegeMissing, match="publication p belongs to another role"):
                teardown(plain, job)
            assert source_state(database) == before
            database.execute("drop publication p")
            assert teardown(plain, job) == [f"slot {job.pipeline.source.slot}"]


def test_sql_for_a_dba_that_fails_makes_no_slot(database, conn, lake, tables):
    """Such a slot would hold WAL for nobody, and psql goes on after an error by default."""
    plan = plan_setup(conn, job_for(database, lake, {"name": "p", "tables": [FLIGHTS, PLANES]}))
    database.execute("drop table planes")
    psql = [str(database.server.bin / "psql"), "-X", "-d", database.conninfo]
    done = subprocess.run(
        psql, input=plan.as_sql(), capture_output=True, text=True, check=False, timeout=60
    )
    assert 'relation "public.planes" does not exist' in done.stderr
    assert read_publications(conn) == {}
    assert read_slot(conn, plan.source.slot) is None
    assert done.returncode == 3  # psql's own, for a script that an error ended


def test_sql_for_a_dba_never_breaks_the_application(database, conn, lake, tables):
    """A role that owns nothing can't try the filter: the plan itself refuses."""
    with role_on(conn, READS) as role:
        info = database.server.conninfo(database.name, role, "p")
        outside = {"name": "public.planes", "where": "Year > 1990"}
        with connect(info, "test") as plain:
            plan = plan_setup(plain, job_for(info, lake, {"name": "p", "tables": [outside]}))
            with pytest.raises(
                PreflightFailed, match="the filter uses year, which the replica identity"
            ) as caught:
                plan.require_for_dba()
            assert not any("doesn't own" in text for text in caught.value.problems)
            plan_setup(
                plain, job_for(info, lake, {"name": "p", "tables": [FLIGHTS]})
            ).require_for_dba()


@pytest.mark.parametrize("ending", ["\n", "\r", "\x0b", "\x85", "\u2028"], ids=ascii)
def test_no_name_ends_a_comment_of_the_script(ending):
    reason = f"publication p{ending}drop table important; -- does not exist"
    source = Source(conn_id="c", slot="s", publications=[{"name": "p", "all_tables": True}])
    plan = SetupPlan(
        (), (Statement(sql.SQL("select 1"), reason),), create_slot=False, source=source
    )
    assert [line for line in plan.as_sql().splitlines() if line.startswith("drop")] == []


def test_least_privilege(database, conn, lake):
    """LOGIN REPLICATION, CREATE on the database and ownership of the tables suffice."""
    with role_on(conn, OWNS.format(database=database.name)) as role:
        info = database.server.conninfo(database.name, role, "p")
        with connect(info, "test") as plain:
            plain.execute("create table app.t (id int primary key, v int)")
            job = job_for(
                info, lake, {"name": "p", "tables": [{"name": "app.t", "where": "id > 1"}]}
            )
            apply_setup(plain, job)
            assert plan_setup(plain, job).is_empty
            dropped = teardown(plain, job)
            assert dropped == [f"slot {job.pipeline.source.slot}", "publication p"]


def test_privilege_lost_since_the_publication_was_made(database, conn, lake):
    """Restating a publication needs ownership of all its tables; all is rolled back."""
    with role_on(conn, OWNS.format(database=database.name)) as role:
        info = database.server.conninfo(database.name, role, "p")
        with connect(info, "test") as plain:
            for table in ("t", "u"):
                plain.execute(f"create table app.{table} (id int primary key)")
            both = [{"name": "app.t"}, {"name": "app.u"}]
            job = job_for(info, lake, {"name": "p", "tables": both})
            apply_setup(plain, job)
            conn.execute("alter table app.u owner to postgres")
            conn.execute(f"grant select on app.u to {role}")
            before = source_state(database)
            both = [{"name": "app.t", "where": "id > 1"}, {"name": "app.u"}]
            job = job_for(info, lake, {"name": "p", "tables": both}, slot=job.pipeline.source.slot)
            with pytest.raises(
                PrivilegeMissing, match="must be owner of table u; nothing was changed"
            ):
                apply_setup(plain, job)
            assert source_state(database) == before
            teardown(plain, job)


def test_teardown_removes_only_what_the_pipeline_made(database, conn, lake, tables):
    database.execute("create publication theirs for table planes")
    before = source_state(database)
    job = job_for(
        database, lake, {"name": "p", "tables": [FLIGHTS]}, {"name": "theirs", "manage": False}
    )
    apply_setup(conn, job)
    assert teardown(conn, job) == [f"slot {job.pipeline.source.slot}", "publication p"]
    assert source_state(database) == before
    assert teardown(conn, job) == []
    assert slot_events(lake) == ["creating", "created", "dropped"]
    apply_setup(conn, job)
    assert slot_events(lake)[-1] == "created"


def test_teardown_leaves_what_another_server_has(new_server, database, conn, lake, job):
    """Another program reads the slot of that name there."""
    for _ in range(3):  # so that its position doesn't tell that it is another one
        database.execute("create table w (); drop table w; select pg_switch_wal()")
    apply_setup(conn, job)
    slot = job.pipeline.source.slot
    server = new_server().start()
    with connect(server.conninfo(), "test") as elsewhere:
        elsewhere.execute(
            "create table public.flights (id int, origin text, delay int, primary key (id, origin))"
        )
        other = job_for(
            server.conninfo(), f"{lake}_there", {"name": "p", "tables": [FLIGHTS]}, slot=slot
        )
        apply_setup(elsewhere, other)
        assert (
            read_slot(elsewhere, slot).confirmed_flush_lsn
            < read_slot(conn, slot).confirmed_flush_lsn
        )
        with pytest.raises(SourceChanged, match="nothing was dropped: point the connection back"):
            teardown(elsewhere, job_of(job.pipeline, server.conninfo()))
        assert read_slot(elsewhere, slot) is not None
        assert set(read_publications(elsewhere)) == {"p"}
    assert slot_events(lake) == ["creating", "created"]
    assert teardown(conn, job) == [f"slot {slot}", "publication p"]


def test_a_slot_that_existed_before_is_adopted_and_left(conn, lake, job):
    create_slot(conn, job.pipeline.source.slot)
    plan = apply_setup(conn, job)
    assert any("existed before" in w for w in plan.warnings)
    assert slot_events(lake) == ["adopted"]
    slot = job.pipeline.source.slot
    dropped, stays = teardown(conn, job)
    assert dropped == "publication p"
    assert stays.startswith(f"slot {slot} stays and keeps ")
    assert "it existed before setup" in stays
    assert f"drop it: select pg_drop_replication_slot('{slot}')" in stays
    assert read_slot(conn, slot) is not None
    assert len(teardown(conn, job)) == 1


@pytest.mark.parametrize("set_up_again", [False, True])
def test_teardown_after_the_lake_was_lost_says_that_the_slot_stays(conn, lake, job, set_up_again):
    """Nothing says any more that the slot is ours; it would fill the source's disk."""
    apply_setup(conn, job)
    shutil.rmtree(urlsplit(lake).path)
    if set_up_again:
        apply_setup(conn, job)
    slot = f"slot {job.pipeline.source.slot}"
    if (
        set_up_again
    ):  # the publications' comments name it, it was made behind them, and nobody has read it
        assert teardown(conn, job) == [slot, "publication p"]
        return
    dropped, stays = teardown(conn, job)
    assert dropped == "publication p"
    assert stays.startswith(f"{slot} stays and keeps ")
    assert "bookkeeping" in stays


def test_teardown_is_silent_on_a_slot_of_another_database(database, conn, job):
    """Slot names are unique on a server; that one is nobody's business here."""
    slot = job.pipeline.source.slot
    with connect(database.server.conninfo(), "test") as other:
        create_slot(other, slot)
        try:
            assert teardown(conn, job) == []
        finally:
            other.execute("select pg_drop_replication_slot(%s)", (slot,))


@pytest.mark.parametrize("dies_after", ["creating", "slot"])
def test_setup_that_died_half_way_is_finished_by_the_next(conn, lake, job, monkeypatch, dies_after):
    """A slot made by a run that died before it could record it counts as created, not adopted."""
    real = setup_slot.create_slot

    def dying(*args, **kwargs):
        if dies_after == "slot":
            real(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_slot, "create_slot", dying)
    with pytest.raises(KeyboardInterrupt):
        apply_setup(conn, job)
    monkeypatch.setattr(setup_slot, "create_slot", real)
    apply_setup(conn, job)
    assert slot_events(lake)[-1] == "created"
    assert teardown(conn, job) == [f"slot {job.pipeline.source.slot}", "publication p"]


@pytest.mark.parametrize("stops_at", ["setup.creating", "setup.created"])
def test_a_setup_that_wakes_up_late_leaves_what_another_recorded(
    conn, lake, job, monkeypatch, stops_at
):
    """Its life of the slot would begin at a position that runs have moved the slot from since."""

    def sleep(point):
        if point == stops_at:
            monkeypatch.undo()
            # As when its host was away for so long that the server gave its connections up.
            ended = (
                "select pg_terminate_backend(pid, 5000) from pg_stat_activity where"
                " application_name = %s"
            )
            assert conn.execute(
                ended, (f"waldelta lock {job.pipeline.source.slot}",)
            ).fetchall() == [(True,)]
            apply_setup(conn, job)

    monkeypatch.setattr(setup_slot, "fault_point", sleep)
    with pytest.raises(LateWriter):
        apply_setup(conn, job)
    assert (slot_events(lake)[-1], slot_events(lake).count("created")) == ("created", 1)
    assert plan_setup(conn, job).is_empty
    assert teardown(conn, job) == [f"slot {job.pipeline.source.slot}", "publication p"]


def test_a_slot_dropped_behind_our_back_is_never_silently_made_anew(conn, lake, job):
    apply_setup(conn, job)
    conn.execute("select pg_drop_replication_slot(%s)", (job.pipeline.source.slot,))
    with pytest.raises(PreflightFailed, match="the lake lost the changes since then"):
        apply_setup(conn, job)
    assert teardown(conn, job) == ["publication p"]
    apply_setup(conn, job)
    assert slot_events(lake)[-2:] == ["creating", "created"]


def test_locked_table(database, conn, lake, tables, monkeypatch):
    """Set-up gives up after its attempts, names who holds the lock, and leaves nothing."""
    monkeypatch.setattr("waldelta.stages.setup.facts.publications.DDL_LOCK_TIMEOUT_MS", 50)
    monkeypatch.setattr(setup, "DDL_LOCK_TIMEOUT_MS", 50)
    monkeypatch.setattr(setup, "LOCK_ATTEMPTS", 2)
    for entry in ({"name": "public.planes"}, {"name": "public.planes", "where": "tail > 'N'"}):
        job = job_for(database, lake, {"name": "p", "tables": [entry]})
        before = source_state(database)
        with database.connect(application_name="vacuum-like") as other, other.transaction():
            other.execute("lock table planes in share update exclusive mode")
            with pytest.raises(TableBusy, match=r"vacuum-like\) on public.planes"):
                apply_setup(conn, job)
        assert source_state(database) == before


def test_trying_a_filter_ends_no_autovacuum(database, conn, job, monkeypatch):
    """PostgreSQL ends a worker after deadlock_timeout; the trial gives up before."""
    monkeypatch.setattr(setup, "LOCK_ATTEMPTS", 1)
    looked = []
    conn.add_notice_handler(lambda notice: looked.append(notice.message_primary))
    for setting in (
        "deadlock_timeout = '600ms'",
        "log_lock_waits = on",
        "client_min_messages = log",
    ):
        conn.execute(f"set {setting}")
    with database.connect(application_name="vacuum-like") as other, other.transaction():
        other.execute("lock table flights in share update exclusive mode")
        with pytest.raises(
            TableBusy, match=r"1 attempts of 300 ms; .*\n.*vacuum-like\) on public.flights"
        ):
            plan_setup(conn, job)
    assert looked == []


def test_a_filter_that_stays_as_it_is_waits_for_nobody(database, conn, job):
    """The server has judged it before, so a vacuum of hours stops neither check nor resync."""
    apply_setup(conn, job)
    with database.connect(application_name="vacuum-like") as other, other.transaction():
        other.execute("lock table flights in share update exclusive mode")
        plan = plan_setup(conn, job)
        assert (plan.statements, plan.problems) == ((), ())


def test_a_table_that_nobody_can_read(database, conn, lake, tables, monkeypatch):
    """As during a VACUUM FULL; setup has the slot's lock, so nothing would land if it waited."""
    monkeypatch.setattr(setup, "DDL_LOCK_TIMEOUT_MS", 50)
    monkeypatch.setattr(setup, "LOCK_ATTEMPTS", 2)
    database.execute("create publication theirs for table planes where (tail > 'A')")
    job = job_for(database, lake, {"name": "p", "tables": [FLIGHTS, {"name": "public.airlines"}]})
    apply_setup(conn, job)
    wider = {"name": "p", "tables": [FLIGHTS, {"name": "public.airlines"}], "publish": ["insert"]}
    changed = job_for(database, lake, wider, slot=job.pipeline.source.slot)

    @contextmanager
    def locked(table):
        with database.connect(application_name="vacuum-like") as other, other.transaction():
            other.execute(f"lock table {table} in access exclusive mode")
            yield

    conn.execute("set statement_timeout = '20s'")  # else this test would wait, too
    before = source_state(database)
    for table in ("flights", "airlines"):
        with locked(table):
            for verb in (plan_setup, apply_setup):
                with pytest.raises(TableBusy, match=rf"vacuum-like\) on public.{table}"):
                    verb(conn, changed)
    assert source_state(database) == before
    with locked("planes"):
        assert plan_setup(conn, job).is_empty
        apply_setup(conn, changed)
        assert find_slots_without_pipeline(conn, [job.pipeline.source.slot]) == []
    with locked("flights"):
        assert teardown(conn, job) == [f"slot {job.pipeline.source.slot}", "publication p"]


@pytest.mark.parametrize("prepared", [False, True])
def test_old_transactions_hold_up_slot_creation(database, conn, tables, prepared):
    """The error names them, by pid or by gid, and no half-made slot stays."""
    with database.connect(application_name="slow-app") as other:
        gid = f"g_{uuid.uuid4().hex[:8]}"
        other.execute("insert into planes values ('a', 1)")
        if prepared:
            other.execute(f"prepare transaction '{gid}'")
        try:
            expected = gid if prepared else "slow-app"
            with pytest.raises(TransactionsStillOpen, match=expected):
                create_slot(conn, "s_blocked_" + database.name, timeout_s=0.5)
            assert read_slot(conn, "s_blocked_" + database.name) is None
        finally:
            other.rollback()
            if prepared:
                database.execute(f"rollback prepared '{gid}'")


def test_a_slot_that_could_not_be_created_is_nobodys_later(database, conn, lake, job, monkeypatch):
    """One of that name that another program makes isn't ours: teardown leaves it."""
    real = setup_slot.create_slot
    monkeypatch.setattr(
        setup_slot, "create_slot", lambda *args, **kwargs: real(*args, **kwargs, timeout_s=0.2)
    )
    with database.connect() as other:
        other.execute("insert into planes values ('a', 1)")
        with pytest.raises(TransactionsStillOpen):
            apply_setup(conn, job)
        other.rollback()
    monkeypatch.undo()
    assert slot_events(lake) == ["creating", "dropped"]
    create_slot(conn, job.pipeline.source.slot)
    apply_setup(conn, job)
    assert slot_events(lake)[-1] == "adopted"
    dropped, _ = teardown(conn, job)
    assert dropped == "publication p"
    assert read_slot(conn, job.pipeline.source.slot) is not None


def test_a_slot_that_somebody_reads_now_and_then_is_not_adopted(database, conn, lake, tables):
    """Its reader would lose what we consume; adopt_slot: true adopts it."""
    job = job_for(database, lake, {"name": "p", "tables": [PLANES]})
    slot = job.pipeline.source.slot
    database.execute("create publication theirs for table planes")
    create_slot(conn, slot)
    database.execute("insert into planes values ('theirs', 1)")
    _get_as(conn, slot, "theirs")
    before = source_state(database)
    with pytest.raises(
        PreflightFailed,
        match=r"another program has read it: .* write source\.adopt_slot: true or drop it",
    ):
        apply_setup(conn, job)
    assert (source_state(database), slot_events(lake)) == (before, [])
    named = job_for(database, lake, {"name": "p", "tables": [PLANES]}, slot=slot, adopt_slot=True)
    assert any("existed before" in w for w in apply_setup(conn, named).warnings)
    assert slot_events(lake) == ["adopted"]


def test_a_slot_that_this_lake_has_read_is_adopted_again(database, conn, lake, tables):
    """Where it left it; once somebody else has moved it, it is somebody else's."""
    job = job_for(database, lake, {"name": "p", "tables": [PLANES]})
    slot = job.pipeline.source.slot
    create_slot(conn, slot)
    apply_setup(conn, job)
    database.execute("insert into planes values ('ours', 1)")
    _get_as(conn, slot, "p")
    moved = read_slot(conn, slot).confirmed_flush_lsn.value
    job.ledger.append(replace(job.ledger.slot_moves()[-1], event="intent", lsn=moved))
    teardown(conn, job)
    apply_setup(conn, job)
    assert slot_events(lake)[-2:] == ["dropped", "adopted"]
    teardown(conn, job)
    database.execute("create publication theirs for table planes")
    database.execute("insert into planes values ('theirs', 1)")
    _get_as(conn, slot, "theirs")
    with pytest.raises(PreflightFailed, match="another program has read it"):
        apply_setup(conn, job)


def _get_as(conn, slot, publication):
    conn.execute(
        "select count(*) from pg_logical_slot_get_binary_changes"
        "(%s, null, null, 'proto_version', '1', 'publication_names', %s)",
        (slot, publication),
    )


def test_setup_waits_for_nobody_elses_run(conn, job):
    with slot_lock(job), pytest.raises(LockHeld, match=f"waldelta lock {job.pipeline.source.slot}"):
        apply_setup(conn, job)
    apply_setup(conn, job)


def test_a_publication_dropped_from_the_file_is_pointed_out(database, conn, lake, tables):
    job = job_for(
        database, lake, {"name": "p", "tables": [FLIGHTS]}, {"name": "q", "tables": [PLANES]}
    )
    apply_setup(conn, job)
    job = job_for(database, lake, {"name": "p", "tables": [FLIGHTS]}, slot=job.pipeline.source.slot)
    assert any("'q' was made by this pipeline" in w for w in plan_setup(conn, job).warnings)


def test_no_password_in_plan_or_log(database, conn, job, caplog):
    caplog.set_level(logging.DEBUG)
    plan = apply_setup(conn, job)
    assert database.server.password not in caplog.text + plan.describe() + repr(job)
