"""A slot that standbys keep: made by setup, altered, left alone, or refused."""

from __future__ import annotations

import pytest

from tests.support.pipelines import PLANES, events, job_for
from waldelta.errors import PreflightFailed
from waldelta.postgres import connect
from waldelta.slot import read_slot
from waldelta.stages.setup.setup import apply_setup, plan_setup

pytestmark = pytest.mark.pg


def test_failover_slot(any_database, lake):
    """The file decides; without a word the slot stays as it is; refused before 17."""
    any_database.execute("create table planes (tail text primary key, year int)")
    publication = {"name": "p", "tables": [PLANES]}
    with connect(any_database.conninfo, "test") as conn:
        job = job_for(any_database, lake, publication, failover=True)
        if conn.info.server_version < 170000:
            with pytest.raises(
                PreflightFailed,
                match=r"source\.failover needs PostgreSQL 17 or later, this is 1[56]",
            ):
                apply_setup(conn, job)
            assert events(lake) == []
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
        assert events(lake) == ["creating", "created"]
