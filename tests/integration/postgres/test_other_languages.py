"""Errors of a server whose messages aren't English have the same names and remedies."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import psycopg
import pytest
from adbc_driver_manager.dbapi import Error
from psycopg.conninfo import make_conninfo

from tests.support.fixtures.postgres import INSTALLED, new_database, new_postgres
from tests.support.pipelines import job_for
from tests.support.servers.foreign_language import in_a_foreign_language
from waldelta.errors import (
    AuthenticationFailed,
    PeekTimeout,
    PrivilegeMissing,
    PublicationGone,
    SnapshotLost,
    SourceUnreachable,
)
from waldelta.lsn import Lsn
from waldelta.postgres import connect
from waldelta.postgres.connection import connect_arrow, record_batches
from waldelta.postgres.walsender import read_timeline
from waldelta.server_errors.sqlstate import ServerError
from waldelta.slot.read.peek import PeekBound, peek
from waldelta.snapshot.read_table import run_statement, snapshot_reader
from waldelta.stages.setup.setup import apply_setup

pytestmark = pytest.mark.pg


def _has_german() -> bool:
    """Debian's PostgreSQL has translations; a message in one needs the locale, too."""
    locales = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=True).stdout
    return bool(INSTALLED) and "de_DE.utf8" in locales.split()


# The wheel's PostgreSQL has no translations. 18 doesn't raise where a publication is gone.
LANGUAGES = ["nonsense", *(["German"] if _has_german() else [])]


@pytest.fixture(scope="module")
def server():
    version, settings = (
        (INSTALLED[0], {"lc_messages": "de_DE.UTF-8"}) if _has_german() else (16, {})
    )
    cluster = new_postgres(version, settings | {"fsync": "off"})
    try:
        yield cluster.start()
    finally:
        cluster.delete()


@pytest.fixture(params=LANGUAGES)
def source(request, server, monkeypatch) -> Iterator[tuple]:
    """A database, and how a role connects that can't choose the language of messages."""
    with new_database(server, monkeypatch) as database:
        role = f"r_{database.name}"
        database.execute(f"create role {role} login replication password 'p'")
        database.execute("create table t (id int primary key, v text)")
        database.execute(f"grant select on t to {role}; alter table t owner to {role}")
        database.execute(f"grant create on database {database.name} to {role}")
        direct = server.conninfo(database.name, role, "p")
        spoken = in_a_foreign_language if request.param == "nonsense" else nullcontext
        with spoken(direct) as conninfo:
            yield database, conninfo, role
        database.connection.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where usename = %s",
            (role,),
        )
        database.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database ="
            " current_database()"
        )
        database.execute("drop publication if exists p")
        database.execute(f"drop owned by {role}; drop role {role}")


def everything(job, timeout_s=60.0):
    bound = PeekBound(Lsn((1 << 63) - 1), None, timeout_s, 1)
    return list(peek(job.source.conninfo, job.pipeline.source, bound))


@contextmanager
def english_nowhere(error):
    """The error is raised, and what the server says in it isn't English."""
    with pytest.raises(error) as caught:
        yield caught
    for words in ("canceling", "does not exist (", "permission denied", "must be superuser"):
        assert words not in str(caught.value)


def test_a_slot_that_cant_be_read(source, lake):
    """For each reason, by both drivers: a smaller read window, or what to do."""
    database, conninfo, role = source
    entry = {"name": "p", "tables": [{"name": "public.t"}]}
    job = job_for(conninfo, lake, entry)
    with connect(database.conninfo, "test") as owner:
        apply_setup(owner, job)
    database.execute("insert into t select g, 'x' from generate_series(1, 5000) g")
    with english_nowhere(PeekTimeout):
        everything(job, timeout_s=0.001)
    database.execute("drop publication p; insert into t values (0, 'x')")
    with english_nowhere(PublicationGone):
        everything(job)
    database.execute(f"alter role {role} noreplication")
    with english_nowhere(PrivilegeMissing) as caught:
        everything(job)
    assert "the attribute replication" in str(caught.value)
    with english_nowhere(PrivilegeMissing) as caught:
        read_timeline(conninfo)
    assert f"alter role {role} replication" in str(caught.value)
    with english_nowhere(PrivilegeMissing) as caught, job.source.connect("test") as connection:
        connection.execute(
            "select * from pg_logical_slot_peek_binary_changes(%s, null, 1)",
            (job.pipeline.source.slot,),
        )
    assert f"alter role {role} replication" in str(caught.value)


@pytest.mark.parametrize("keeps_codes", [True, False], ids=["as it is", "changed"])
def test_a_reader_of_adbc(database, keeps_codes):
    """It has a failed fetch's code by a private part of ADBC, and is an error without."""
    with connect_arrow(database.conninfo, "test") as connection, connection.cursor() as cursor:
        cursor.execute("select 1 / (g - 100000) from generate_series(1, 200000) g")
        public = SimpleNamespace(fetch_record_batch=cursor.fetch_record_batch)
        with pytest.raises(Error) as caught:
            list(record_batches(cursor if keeps_codes else public))
    error = ServerError.of(caught.value)
    assert error.sqlstate == ("22012" if keeps_codes else None)
    assert error.is_lost_connection is not keeps_codes


def test_a_copy_that_cant_go_on(source):
    """A table that is gone starts its copy again; a missing grant is named."""
    database, conninfo, role = source
    for change, error in (
        (f"alter table t owner to postgres; revoke all on t from {role}", PrivilegeMissing),
        ("drop table t", SnapshotLost),
    ):
        database.execute(change)
        copy = type("Copy", (), {"table": "public.t"})()
        with english_nowhere(error), snapshot_reader(conninfo, copy, "test") as connection:
            run_statement(connection, "select * from public.t")


def test_a_session_that_the_server_ends(source):
    database, conninfo, _ = source
    copy = type("Copy", (), {"table": "public.t"})()
    database.execute("insert into t select g, 'x' from generate_series(1, 10) g")
    with english_nowhere(SourceUnreachable), snapshot_reader(conninfo, copy, "test") as connection:
        run_statement(connection, "select pg_terminate_backend(pg_backend_pid())")


@pytest.mark.parametrize("opened", [connect, connect_arrow], ids=["psycopg", "adbc"])
@pytest.mark.parametrize(
    "changed, told",
    [
        ({"dbname": "waldelta_no_such"}, "database 'waldelta_no_such' does not exist: check"),
        ({"password": "wrong"}, "check login and password"),
    ],
    ids=["database", "password"],
)
def test_a_login_that_is_refused(source, opened, changed, told):
    _, conninfo, _ = source
    with english_nowhere(AuthenticationFailed) as caught:
        opened(make_conninfo(conninfo, **changed), "test")
    assert told in str(caught.value)
    assert "firewall" not in str(caught.value)


def test_the_language_is_another_one(source):
    """The test's own condition: the role reads no English message."""
    _, conninfo, _ = source
    with psycopg.connect(conninfo) as session, pytest.raises(psycopg.Error) as caught:
        session.execute("select nothing_of_this_name()")
    assert "does not exist" not in str(caught.value)
