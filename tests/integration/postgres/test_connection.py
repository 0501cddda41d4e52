"""Each cause of a failed connection has its error and remedy, by both drivers."""

import socket
import threading
from contextlib import closing, nullcontext, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from tests.support.fixtures.postgres import new_database
from tests.support.pipelines import job_of, pipeline_file
from tests.support.servers.foreign_language import in_a_foreign_language
from tests.support.servers.serving import listening
from tests.support.waiting import wait_until
from waldelta.errors import AuthenticationFailed, ConfigError, SourceError, SourceUnreachable
from waldelta.pipeline.source import SharedConnection
from waldelta.postgres import connect
from waldelta.postgres.connection import connect_arrow
from waldelta.rehearsal.embedded_postgres import free_port

SECRET = "secret-7x9"
# sslmode=prefer would ask twice, and the second answer would be the one that is told.
PLAIN = {"sslmode": "disable", "password": SECRET}

# One address: psycopg tries each that a name has.
PLAIN_TCP = {"sslmode": "disable", "host": "127.0.0.1"}

CASES = {
    "wrong password": (PLAIN, AuthenticationFailed,
                       "refused user 'postgres': check login and password"),
    "no password": ({"sslmode": "disable", "password": ""}, AuthenticationFailed,
                    "refused user 'postgres'"),
    "role missing": ({"user": "waldelta_no_such"}, AuthenticationFailed,
                     "the server doesn't let user 'waldelta_no_such' in from here ("),
    "database missing": ({"user": "waldelta_trusted", "dbname": "waldelta_no_such"},
                         AuthenticationFailed, "database 'waldelta_no_such' does not exist"),
    "rejected by pg_hba.conf": ({"user": "waldelta_rejected"}, AuthenticationFailed,
                                "that pg_hba.conf has a line for it"),
    "not in pg_hba.conf": ({"user": "waldelta_unlisted"}, AuthenticationFailed,
                           "that pg_hba.conf has a line for it"),
    "SSL wanted, not offered": ({"sslmode": "require"}, ConfigError,
                                "asks for SSL, which this server doesn't offer"),
    "sslrootcert missing": ({"sslmode": "verify-full", "sslrootcert": "/nowhere/root.crt",
        "port": "ssl"}, ConfigError,
        'root certificate file "/nowhere/root.crt" does not exist: correct sslrootcert'),
    "sslmode misspelt": ({"sslmode": "requiered"}, ConfigError,
                         'invalid sslmode value: "requiered": correct'),
    "refused": ({"port": "closed"}, SourceUnreachable,
                "can't be reached (Connection refused): check host, port"),
    "unknown host": ({"host": "nowhere.invalid"}, SourceUnreachable, "nowhere.invalid"),
}  # fmt: skip


# What a server, or a pooler in its place, answers to the very beginning.
ANSWERS = {
    "a pooler": ("08P01", "unsupported startup parameter: options", ConfigError,
                 "point the connection at PostgreSQL itself"),
    "a newer one": ("08P01", "unsupported startup parameter in options: tcp_keepalives_idle",
                    ConfigError, "at PostgreSQL itself"),
    "full": ("53300", "sorry, too many clients already", SourceUnreachable,
             "no connection left for user 'postgres'"),
    "full but for superusers": ("53300",
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
        SourceUnreachable, "raise max_connections"),
    "the role's limit": ("53300", 'too many connections for role "postgres"', SourceUnreachable,
                         "or the limit that the message names"),
    "not yet up": ("57P03", "the database system is starting up", SourceUnreachable,
                   "takes no connections now"),
    "a login trigger": ("P0001", "sorry, not today", SourceError,
                        "see the database's event triggers on login"),
    "a setting of the extra": ("42704", 'unrecognized configuration parameter "work_mum"',
                               ConfigError, "correct the extra's options"),
}  # fmt: skip


@pytest.fixture(scope="module")
def doors(postgres):
    """A cluster whose pg_hba.conf has every kind of answer."""
    rules = (
        "host all waldelta_rejected all reject\n"
        "host all waldelta_trusted,waldelta_no_such all trust\n"
        "host all postgres,waldelta_crowded all scram-sha-256\n"
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


REFUSED_ONCE = {
    "wrong password": ({"password": SECRET}, AuthenticationFailed, "check login and password", 1),
    "right password, no such database": ({"dbname": "waldelta_no_such"}, AuthenticationFailed,
                                         "database 'waldelta_no_such' does not exist", 0),
    "the role has no connection left": ({"user": "waldelta_crowded", "password": "p"},
                                        SourceUnreachable,
                                        "no connection left for user 'waldelta_crowded'", 0),
}  # fmt: skip


@pytest.mark.parametrize("open_connection", [connect, connect_arrow], ids=["psycopg", "adbc"])
@pytest.mark.parametrize("is_foreign", [False, True], ids=["English", "another language"])
@pytest.mark.parametrize("changed, error, told, count", REFUSED_ONCE.values(), ids=REFUSED_ONCE)
def test_a_wrong_password_is_sent_once(
    doors, changed, error, told, count, open_connection, is_foreign
):
    """Servers lock an account after some wrong passwords. The server's log says how many it got."""
    if is_foreign and "crowded" in told:
        error, told = AuthenticationFailed, "check login and password"
    language = in_a_foreign_language if is_foreign else nullcontext
    with connect(doors.conninfo(), "test") as admin:
        admin.execute("drop role if exists waldelta_crowded")
        admin.execute("create role waldelta_crowded login password 'p' connection limit 0")
        before = _wrong_passwords(doors)
        with language(doors.conninfo()) as conninfo, pytest.raises(error) as caught:
            open_connection(make_conninfo(conninfo, **(PLAIN_TCP | changed)), "test")
        assert told in str(caught.value)
        assert _wrong_passwords(doors) - before == count


def _wrong_passwords(server) -> int:
    return (
        (server.data / "server.log")
        .read_text(errors="replace")
        .count("password authentication failed")
    )


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
@pytest.mark.parametrize("is_foreign", [False, True], ids=["English", "another language"])
@pytest.mark.parametrize("changed, error, told", CASES.values(), ids=CASES)
def test_each_cause_has_its_error(
    doors, speaks_ssl, changed, error, told, open_connection, is_foreign
):
    """Whatever language the server's messages have."""
    ports = {"ssl": str(speaks_ssl), "closed": str(free_port())}
    given = changed | ({"port": ports[changed["port"]]} if "port" in changed else {})
    language = in_a_foreign_language if is_foreign else nullcontext
    with language(doors.conninfo()) as conninfo, pytest.raises(error) as caught:
        open_connection(make_conninfo(conninfo, **given), "test")
    assert type(caught.value) is error
    assert told in str(caught.value)
    assert SECRET not in str(caught.value)
    assert doors.password not in str(caught.value)


@pytest.mark.parametrize("open_connection", [connect, connect_arrow], ids=["psycopg", "adbc"])
@pytest.mark.parametrize("code, said, error, told", ANSWERS.values(), ids=ANSWERS)
def test_what_a_server_answers_at_once_has_its_remedy(
    postgres, code, said, error, told, open_connection
):
    """Neither host, port nor firewall are wrong then."""
    fields = f"SFATAL\0VFATAL\0C{code}\0M{said}\0\0".encode()

    def answer(client: socket.socket) -> None:
        client.recv(4096)
        client.sendall(b"E" + (4 + len(fields)).to_bytes(4, "big") + fields)

    with listening(answer) as port:
        conninfo = make_conninfo(
            postgres.conninfo(), host="127.0.0.1", port=port, sslmode="disable"
        )
        with pytest.raises(error) as caught:
            open_connection(conninfo, "test")
    assert type(caught.value) is error
    assert said in str(caught.value)
    assert told in str(caught.value)
    assert "firewall" not in str(caught.value)


@pytest.mark.parametrize(
    "open_connection, loses",
    [(connect, "options"), (connect_arrow, "options"), (connect, "pid")],
    ids=["psycopg", "adbc", "makes up the backend's pid"],
)
def test_no_run_goes_through_a_pooler(postgres, open_connection, loses):
    """It drops settings that values are printed by, or shares sessions' locks."""
    plain = make_conninfo(postgres.conninfo(), sslmode="disable")
    where = psycopg.conninfo.conninfo_to_dict(plain)

    def pool(client: socket.socket) -> None:
        with socket.create_connection((where["host"], int(where["port"]))) as server:
            parts = client.recv(1 << 16)[8:].rstrip(b"\0").split(b"\0")
            kept = [
                p
                for pair in zip(parts[::2], parts[1::2], strict=True)
                if loses != pair[0].decode()
                for p in pair
            ]
            body = (196608).to_bytes(4, "big") + b"\0".join(kept) + b"\0\0"
            server.sendall((4 + len(body)).to_bytes(4, "big") + body)
            threading.Thread(target=pass_on, args=(client, server), daemon=True).start()
            pass_on(server, client, b"K\0\0\0\x0c\0" if loses == "pid" else None)

    told = (
        r"a connection pooler answers instead of the server.* point the connection at PostgreSQL"
        r" itself"
    )
    with listening(pool) as port, pytest.raises(ConfigError, match=told) as caught:
        open_connection(make_conninfo(plain, host="127.0.0.1", port=port), "test")
    assert postgres.password not in str(caught.value)


def pass_on(one: socket.socket, other: socket.socket, key: bytes | None = None) -> None:
    """Everything that comes; of the message that begins with ``key`` with another number in it."""
    with suppress(OSError):
        while chunk := one.recv(1 << 16):
            other.sendall(chunk.replace(key, key[:-1] + b"\x7f") if key else chunk)
        other.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("open_connection", [connect, connect_arrow], ids=["psycopg", "adbc"])
def test_no_limit_of_the_databases_ends_what_is_asked(any_database, open_connection):
    """Each stage sets its own bound; versions without a setting don't mind."""
    for setting in ("statement_timeout", "transaction_timeout", "idle_session_timeout"):
        if any_database.execute("select 1 from pg_settings where name = %s", (setting,)):
            any_database.execute(f"alter database {any_database.name} set {setting} = '50ms'")
    with (
        open_connection(any_database.conninfo, "test") as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute("select 1 from pg_sleep(0.1)")
        assert cursor.fetchone() == (1,)


@pytest.mark.parametrize("open_connection", [connect, connect_arrow], ids=["psycopg", "adbc"])
def test_no_default_of_the_databases_changes_a_transaction(any_database, open_connection):
    """Filters need a temporary table, and a serializable reader can fail writers."""
    for setting, value in (
        ("default_transaction_read_only", "on"),
        ("default_transaction_isolation", "serializable"),
    ):
        any_database.execute(f"alter database {any_database.name} set {setting} = '{value}'")
    shown = (
        "select current_setting('transaction_read_only'), current_setting('transaction_isolation')"
    )
    with (
        open_connection(any_database.conninfo, "test") as connection,
        connection.cursor() as cursor,
    ):
        cursor.execute(shown)
        assert cursor.fetchone() == ("off", "read committed")


def test_a_silent_network_ends_a_wait(postgres):
    """Packets dropped without a word are noticed in a minute, unless the connection says more."""
    conninfo = postgres.conninfo()
    with (
        connect(conninfo, "test") as plain,
        connect(f"{conninfo} keepalives_idle=5", "test") as chosen,
    ):
        kept = [connection.info.get_parameters() for connection in (plain, chosen)]
    assert [(k["keepalives_idle"], k["tcp_user_timeout"]) for k in kept] == [
        ("30", "60000"),
        ("5", "60000"),
    ]


@pytest.mark.parametrize("lost", [True, False])
def test_a_connection_lost_in_use_has_its_error(postgres, lake, lost):
    """One that can be tried again; a statement that is cancelled keeps its own."""
    job = job_of(pipeline_file(lake, "s"), postgres.conninfo(), "run")
    error, ends = (
        (SourceUnreachable, "terminate") if lost else (psycopg.errors.QueryCanceled, "cancel")
    )
    with pytest.raises(error) as caught, job.source.connect("test") as connection:
        connection.execute(f"select pg_{ends}_backend(pg_backend_pid()), pg_sleep(60)")
    if lost:
        assert caught.value.retryable
        assert "run again" in str(caught.value)
        assert postgres.password not in str(caught.value)


def test_a_shared_connection_is_opened_anew_only_when_it_was_lost(postgres, lake):
    """Idle or in use; what a use fails by has its name, as of a connection of its own."""
    job, met = job_of(pipeline_file(lake, "shared"), postgres.conninfo(), "test"), []
    with SharedConnection(job.source, "share") as shared:

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
    with connect(postgres.conninfo(), "looker") as looker:
        wait_until(lambda: looker.execute(told).fetchone() == (0,))


@pytest.mark.parametrize("open_connection", [connect, connect_arrow], ids=["psycopg", "adbc"])
def test_a_query_is_one_statement_and_its_strings_are_standard(database, open_connection):
    """A filter's text is part of a statement, whatever the server's settings are."""
    database.execute(f"alter database {database.name} set standard_conforming_strings = off")
    database.execute("create table victim()")
    conninfo = make_conninfo(database.conninfo, options="-c standard_conforming_strings=off")
    with (
        closing(open_connection(conninfo, "test")) as connection,
        closing(connection.cursor()) as cursor,
    ):
        cursor.execute("select length('\\')")
        assert cursor.fetchone() == (1,)
        with pytest.raises(
            Exception, match="cannot insert multiple commands into a prepared statement"
        ):
            cursor.execute("select 1; drop table victim")
    assert database.execute("select count(*) from victim") == [(0,)]


def test_what_adbc_asks_first_isnt_the_networks_fault(doors, database):
    """It reads all types and columns while it connects; here the server refuses that."""
    database.execute("revoke select on pg_type from public")
    with pytest.raises(SourceError) as caught:
        connect_arrow(make_conninfo(database.conninfo, user="waldelta_trusted"), "test")
    assert type(caught.value) is SourceError
    assert "refused a query that every connection begins with (permission denied for table" in str(
        caught.value
    )


def test_adbc_reads_utf_8_whatever_names_lack_it(postgres, monkeypatch):
    """It reads the names of all types and columns while it connects."""
    with new_database(
        postgres, monkeypatch, "encoding 'WIN1252' locale 'C' template template0"
    ) as database:
        database.execute_bytes(b'create table "unrelated\x81"(id int, "c\x8d" int)', "WIN1252")
        database.execute("create type \"tÿpe\" as enum ('€')")
        database.execute('create table t(v text, "ç" "tÿpe")')
        database.execute("insert into t values ('€é', '€')")
        monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
        with connect_arrow(database.conninfo, "test") as connection, connection.cursor() as cursor:
            cursor.execute(
                "select v, \"ç\"::text, current_setting('client_encoding') as now from public.t"
            )
            assert cursor.fetch_arrow_table().to_pylist() == [{"v": "€é", "ç": "€", "now": "UTF8"}]
