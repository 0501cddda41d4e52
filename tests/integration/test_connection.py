"""What a connection that fails is told as: its own error and remedy for each cause, by both drivers, without the password."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import psycopg
import pytest
import tenacity
from psycopg.conninfo import make_conninfo

from demo.embedded_postgres import free_port
from tests.pipelines import pipeline_file
from waldelta.connection import connect, connect_arrow
from waldelta.errors import AuthenticationFailed, ConfigError, SourceUnreachable
from waldelta.job import Job
from waldelta.shared_connection import SharedConnection

pytestmark = pytest.mark.pg

SECRET = "secret-7x9"
# sslmode=prefer would ask twice, and the second answer would be the one that is told.
PLAIN = {"sslmode": "disable", "password": SECRET}

CASES = {
    "wrong password": (PLAIN, AuthenticationFailed, "refused user 'postgres': check login and password"),
    "no password": ({"sslmode": "disable", "password": ""}, AuthenticationFailed, "refused user 'postgres'"),
    "role missing": ({"user": "waldelta_no_such"}, AuthenticationFailed, "role 'waldelta_no_such' does not exist"),
    "database missing": (
        {"user": "waldelta_trusted", "dbname": "waldelta_no_such"},
        AuthenticationFailed,
        "database 'waldelta_no_such' does not exist",
    ),
    "rejected by pg_hba.conf": ({"user": "waldelta_rejected"}, AuthenticationFailed, "pg_hba.conf doesn't let user"),
    "not in pg_hba.conf": (
        {"user": "waldelta_unlisted"},
        AuthenticationFailed,
        "pg_hba.conf doesn't let user 'waldelta_unlisted' in from here (FATAL:  no pg_hba.conf entry",
    ),
    "SSL wanted, not offered": ({"sslmode": "require"}, ConfigError, "asks for SSL, which this server doesn't offer"),
    "sslrootcert missing": (
        {"sslmode": "verify-full", "sslrootcert": "/nowhere/root.crt", "port": "ssl"},
        ConfigError,
        'root certificate file "/nowhere/root.crt" does not exist: correct sslrootcert',
    ),
    "sslmode misspelt": ({"sslmode": "requiered"}, ConfigError, 'invalid sslmode value: "requiered": correct'),
    "refused": ({"port": "closed"}, SourceUnreachable, "can't be reached (Connection refused): check host, port"),
    "unknown host": ({"host": "nowhere.invalid"}, SourceUnreachable, "nowhere.invalid"),
}


@pytest.fixture(scope="module")
def doors(postgres):
    """A cluster whose pg_hba.conf has every kind of answer."""
    rules = (
        "host all waldelta_rejected all reject\n"
        "host all waldelta_trusted,waldelta_no_such all trust\n"
        "host all postgres all scram-sha-256\n"
        "local all all trust\n"
    )
    with psycopg.connect(postgres.conninfo(), autocommit=True) as admin:
        (path,) = admin.execute("show hba_file").fetchone()
        before = Path(path).read_text()
        admin.execute("create role waldelta_trusted login")
        Path(path).write_text(rules)
        try:
            _reload(admin)
            yield postgres
        finally:
            Path(path).write_text(before)
            _reload(admin)
            admin.execute("drop role waldelta_trusted")


def _reload(admin: psycopg.Connection) -> None:
    """Ask for new rules, and wait until the postmaster has read them."""
    (before,) = admin.execute("select pg_conf_load_time()").fetchone()
    admin.execute("select pg_reload_conf()")
    while admin.execute("select pg_conf_load_time()").fetchone() == (before,):
        admin.execute("select pg_sleep(0.02)")


@pytest.fixture
def speaks_ssl():
    """A port whose server says yes to SSL and hangs up: the embedded server is built without it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    client, _ = server.accept()
                except OSError:
                    return
                with client:
                    client.recv(8)
                    client.sendall(b"S")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("open_connection", [connect, connect_arrow], ids=["psycopg", "adbc"])
@pytest.mark.parametrize("changed, error, told", CASES.values(), ids=CASES)
def test_each_cause_has_its_error(doors, speaks_ssl, changed, error, told, open_connection):
    ports = {"ssl": str(speaks_ssl), "closed": str(free_port())}
    given = changed | ({"port": ports[changed["port"]]} if "port" in changed else {})
    conninfo = make_conninfo(doors.conninfo(), **given)
    with pytest.raises(error) as caught:
        open_connection(conninfo, "test")
    assert type(caught.value) is error
    assert told in str(caught.value)
    assert SECRET not in str(caught.value)
    assert doors.password not in str(caught.value)


@pytest.mark.parametrize("open_connection", [connect, connect_arrow], ids=["psycopg", "adbc"])
def test_no_limit_of_the_databases_ends_what_is_asked(any_database, open_connection):
    """Each stage sets the bound that it needs; a version that doesn't know a setting takes no offence."""
    for setting in ("statement_timeout", "transaction_timeout", "idle_session_timeout"):
        if any_database.execute("select 1 from pg_settings where name = %s", (setting,)):
            any_database.execute(f"alter database {any_database.name} set {setting} = '50ms'")
    with open_connection(any_database.conninfo, "test") as connection, connection.cursor() as cursor:
        cursor.execute("select 1 from pg_sleep(0.1)")
        assert cursor.fetchone() == (1,)


def test_a_silent_network_ends_a_wait(postgres):
    """Packets that are dropped without a word are noticed in a minute; who knows better says so in the connection."""
    conninfo = postgres.conninfo()
    with connect(conninfo, "test") as plain, connect(f"{conninfo} keepalives_idle=5", "test") as chosen:
        kept = [connection.info.get_parameters() for connection in (plain, chosen)]
    assert [(k["keepalives_idle"], k["tcp_user_timeout"]) for k in kept] == [("30", "60000"), ("5", "60000")]


@pytest.mark.parametrize("lost", [True, False])
def test_a_connection_lost_in_use_has_its_error(postgres, lake, lost):
    """One that can be tried again; a statement that is cancelled keeps its own."""
    job = Job(pipeline_file(lake, "s"), postgres.conninfo(), "run")
    error, ends = (SourceUnreachable, "terminate") if lost else (psycopg.errors.QueryCanceled, "cancel")
    with pytest.raises(error) as caught, job.connect("test") as connection:
        connection.execute(f"select pg_{ends}_backend(pg_backend_pid()), pg_sleep(60)")
    if lost:
        assert caught.value.retryable
        assert "run again" in str(caught.value)
        assert postgres.password not in str(caught.value)


def test_a_shared_connection_is_opened_anew_only_when_it_was_lost(postgres, lake):
    """Idle or in use; what a use fails by has its name, as of a connection of its own."""
    job, met = Job(pipeline_file(lake, "shared"), postgres.conninfo(), "test"), []
    with SharedConnection(job, "share") as shared:

        def pid(within=lambda _: None) -> int:
            with shared.use() as connection:
                met.append(connection.info.backend_pid)
                within(connection)
            return met[-1]

        def lost(connection) -> None:
            killer.execute("select pg_terminate_backend(%s, 10000)", (connection.info.backend_pid,))
            connection.execute("select 1")

        def defect(_) -> None:
            raise KeyError

        first = pid()
        assert pid() == first
        with connect(postgres.conninfo(), "killer") as killer:
            killer.execute("select pg_terminate_backend(%s, 10000)", (first,))
            pid()
            with pytest.raises(SourceUnreachable, match="ended a connection in use"):
                pid(lost)
            with pytest.raises(KeyError):
                pid(defect)
            assert pid() == pid()
            # Twice the first, the second and the last.
            assert len(met) - len(set(met)) == 3, met
    told = "select count(*) from pg_stat_activity where application_name = 'waldelta share shared'"
    wait = tenacity.Retrying(stop=tenacity.stop_after_delay(10), wait=tenacity.wait_fixed(0.05), reraise=True)
    with connect(postgres.conninfo(), "looker") as looker:
        for attempt in wait:
            with attempt:
                assert looker.execute(told).fetchone() == (0,)
