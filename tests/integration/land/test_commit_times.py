"""Any commit time that a replication origin sets lands, is applied and is shown."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from deltalake import DeltaTable

from tests.support.pipelines import pipeline_file
from waldelta.jobs.consume import consume
from waldelta.jobs.sync import run_resync
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger
from waldelta.monitoring.overview import read_glance
from waldelta.pgoutput.commit_time import EARLIEST, LATEST
from waldelta.pipeline.job import load_job
from waldelta.postgres.server_position import read_position
from waldelta.slot.health import oldest_unapplied, oldest_unread
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.setup.setup import apply_setup
from waldelta.stages.sync.sync import sync

PLAIN = datetime(2026, 3, 1, tzinfo=UTC)
# What the origin's node says, ascending, and what the lake shows.
TIMES = {
    "-infinity": EARLIEST, "0044-03-15 00:00:00+00 BC": EARLIEST, "2026-03-01 00:00:00+00": PLAIN,
    "20000-01-01 00:00:00+00": LATEST, "294276-12-31 00:00:00+00": LATEST, "infinity": LATEST,
}  # fmt: skip


def commit_at(database, origin, moment, statement):
    with database.connect() as session:
        session.execute("select pg_replication_origin_session_setup(%s)", (origin,))
        session.execute("select pg_replication_origin_xact_setup('0/1234', %s)", (moment,))
        session.execute(statement)
        session.commit()
        # A closed session's process holds the origin a little longer.
        session.execute("select pg_replication_origin_session_reset()")


@pytest.mark.nightly("each kind of clock in whole runs")
def test_any_commit_time_is_right(runner, database, lake):
    """In the slot, the change log, a mirror, a history, cuts, pages, an idle check, a resync."""
    database.execute(
        "create table t(id int primary key, v text); create table h(id int primary key, v text)"
    )
    target = {"root": lake, "tables": {"public.h": {"mode": "history"}}}
    tables = ["public.t", "public.h"]
    job = load_job(pipeline_file(lake, f"s_{database.name}", tables, target=target), "first")
    with job.source.connect("setup") as connection:
        apply_setup(connection, job)
    sync(runner, job)
    origin = f"o_{database.name}"
    database.execute("select pg_replication_origin_create(%s)", (origin,))
    try:
        for number, moment in enumerate(TIMES):
            commit_at(
                database,
                origin,
                moment,
                f"insert into t values ({number}); insert into h values ({number})",
            )
        assert first_waiting(job) == EARLIEST
        assert consume(runner, job).status == "succeeded"
        assert job.ledger.last_cut().commit_ts == LATEST
        assert shown(job, "t") == dict(enumerate(TIMES.values()))
        assert {row["id"]: row["_wd_valid_from"] for row in rows(job, "h")} == shown(job, "t")

        for number, moment in reversed([*enumerate(TIMES)]):
            commit_at(
                database,
                origin,
                moment,
                f"update t set v = 'again' where id = {number}; truncate h",
            )
        assert first_waiting(job) == LATEST
        drain(runner, job)
        assert set(oldest_unapplied(job, list(job.read_states().values())).values()) == {EARLIEST}
        assert consume(runner, job).status == "succeeded"
        assert shown(job, "t") == dict(enumerate(TIMES.values()))
        assert {row["_wd_valid_to"] for row in rows(job, "h")} == {LATEST}
        assert not check_idle(job).has_work
        glance = read_glance(job.pipeline, Ledger(Lake(lake)), datetime.now(UTC))
        assert {line.table_name for line in glance.tables if line.changed is not None} == set(
            tables
        )

        commit_at(database, origin, "infinity", "insert into t values (100)")
        database.execute("select pg_drop_replication_slot(%s)", (job.pipeline.source.slot,))
        assert run_resync(runner, replace(job, run_id="resync")).status == "succeeded"
        assert shown(job, "t").keys() == {*range(len(TIMES)), 100}
    finally:
        database.execute("select pg_replication_origin_drop(%s)", (origin,))


def first_waiting(job):
    with job.source.connect_slot("test") as connection:
        return oldest_unread(connection, job, read_position(connection).flush_lsn)


def rows(job, name):
    table = DeltaTable(job.lake.target(f"public.{name}").uri)
    return table.to_pyarrow_table().to_pylist()


def shown(job, name):
    return {row["id"]: row["_wd_commit_ts"] for row in rows(job, name)}
