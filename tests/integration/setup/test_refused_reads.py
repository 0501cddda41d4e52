"""What the source refuses a reader is named with the remedy that helps."""

import logging

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.support.pipelines import job_for
from waldelta.errors import SourceError
from waldelta.findings import sql_name
from waldelta.pipeline import SourceConnections
from waldelta.postgres import connect
from waldelta.postgres.connection import lacks_room
from waldelta.snapshot.exported_snapshot import wait_for_old_transactions
from waldelta.snapshot.read_table import privilege_remedy
from waldelta.stages.setup import _slot_setup
from waldelta.stages.setup.setup import plan_setup

pytestmark = pytest.mark.pg


def test_a_policy_needs_bypassrls_and_a_missing_grant_needs_select(database):
    """Both refusals have the same SQLSTATE; a grant doesn't open a policy."""
    role = f'Reader "{database.name}"'
    database.execute(
        f"create role {sql_name(role)} login password 'p'; create table plain (id int);"
        f" create table hidden (id int); grant select on hidden to {sql_name(role)};"
        " alter table hidden enable row level security"
    )
    try:
        info = make_conninfo(database.conninfo, user=role, password="p")
        assert privilege_remedy(info, "public.plain") == "grant select on it"
        assert privilege_remedy(info, "public.hidden") == (
            "a row-level security policy would hide rows: let a superuser run alter role"
            f" {sql_name(role)} bypassrls"
        )
        assert privilege_remedy("host=/nowhere", "public.plain") == "grant select on it"
    finally:
        database.execute(f"drop owned by {sql_name(role)}; drop role {sql_name(role)}")


def test_a_query_without_room_is_a_named_error(database, lake):
    """By any session of a run, whatever it reads; not psycopg's own error."""
    job = job_for(database, lake, {"name": "p", "tables": [{"name": "public.t"}]})
    database.execute(f"alter database {database.name} set temp_file_limit = '64kB'")
    source = SourceConnections(job.pipeline.source, database.conninfo)
    with (
        pytest.raises(SourceError, match=r"exceeds .temp_file_limit.*: raise temp_file_limit, or"),
        source.connect("test") as connection,
    ):
        connection.execute("select n from generate_series(1, 1000000) n order by -n").fetchone()


@pytest.mark.parametrize(
    "error, told",
    [
        (psycopg.errors.DiskFull, "a disk of the server is full"),
        (psycopg.errors.OutOfMemory, "no memory for a query"),
        (psycopg.errors.AdminShutdown, None),
    ],
)
def test_which_errors_are_about_room(error, told):
    named = lacks_room(error("refused"))
    assert named is None if told is None else told in str(named)


def test_check_and_sync_name_the_transactions_that_they_wait_for(
    database, lake, caplog, monkeypatch
):
    """Setup waited a minute for them, and the initial sync ten, without a word before."""
    database.execute("create table t (id int primary key)")
    job = job_for(database, lake, {"name": "p", "tables": [{"name": "public.t"}]})
    caplog.set_level(logging.INFO)
    with connect(database.conninfo, "test") as conn, database.connect() as writer:
        writer.execute("set application_name = 'month end'; insert into t values (1)")
        assert not any("are open" in text for text in plan_setup(conn, job).warnings)
        monkeypatch.setattr(_slot_setup, "LONG_OPEN_S", 0.0)
        (told,) = (text for text in plan_setup(conn, job).warnings if "are open" in text)
        pid = writer.info.backend_pid
        assert f"pid {pid} (month end) since " in told
        assert "setup waits for their end up to 60 s, the initial sync up to 10 minutes" in told
        wait_for_old_transactions(conn, 60, sleep=lambda _: writer.rollback())
        assert f"waiting up to 60 s for older transactions: pid {pid} (month end)" in caplog.text
        assert not any("are open" in text for text in plan_setup(conn, job).warnings)
