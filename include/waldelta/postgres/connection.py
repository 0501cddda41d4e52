"""Connections to PostgreSQL: by Airflow's conn_id, with the session settings that values depend
on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo
from psycopg.pq import version as pq_version
from psycopg.rows import Row

from waldelta.config.airflow_connection import read_connection
from waldelta.errors import (
    AuthenticationFailed,
    ConfigError,
    PrivilegeMissing,
    SourceDiskFull,
    SourceError,
    SourceUnreachable,
    StandbyAway,
    raised_as,
)

if TYPE_CHECKING:
    import adbc_driver_postgresql.dbapi

# A connection with any kind of rows.
Connection = psycopg.Connection[Any]

# The text of a value depends on the settings of the session that prints it, so the copy, the slot
# functions and every check use this one list.
SESSION_SETTINGS: dict[str, str] = {
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "client_encoding": "UTF8",
    "lc_monetary": "C",
    "xmlbinary": "base64",
    "search_path": "pg_catalog",
    "quote_all_identifiers": "off",
    "row_security": "off",
    # A row filter is read as standard SQL. If a backslash escaped a quote, the server would read
    # another text, which could contain further statements.
    "standard_conforming_strings": "on",
    # A role's or database's own limit would end long reads each time; each stage sets the limit
    # that it needs. A connection may be idle as long as a run works.
    "statement_timeout": "0",
    "idle_session_timeout": "0",
    # A reader's role is often read-only, and then couldn't analyse a filter with a temporary table.
    # As a serializable reader, we could make the application's own serializable transactions fail.
    "default_transaction_read_only": "off",
    "default_transaction_isolation": "read\\ committed",
}
# The same for settings of PostgreSQL 17, which older versions refuse among a connection's options;
# plus values that reveal a connection pooler.
_FIRST = """
select case when current_setting('transaction_timeout', true) is not null
  then set_config('transaction_timeout', '0', false) end,
       current_setting('search_path'),
       pg_backend_pid()
"""
# ADBC reads the names of all types and columns while it connects. With this encoding, PostgreSQL
# sends them unconverted. Otherwise a name that UTF-8 can't represent, of any object, would end each
# connection.
_UNCONVERTED = "SQL_ASCII"
_TO_UTF8 = "select pg_catalog.set_config('client_encoding', 'UTF8', false)"
_BATCH_BYTES = 8 << 20
# A backend whose client vanished ends within a minute, and with it the slot, snapshot or lock that
# it holds. During a statement it checks every ten seconds whether its client is still there.
_SERVER_KEEPALIVES = {
    "tcp_keepalives_idle": "30", "tcp_keepalives_interval": "10", "tcp_keepalives_count": "3",
}  # fmt: skip
# Not for a backend that sends much: Linux would also end a connection to a live client that
# receives nothing for that long.
_GIVES_UP_SENDING = {"tcp_user_timeout": "60000"}
_CHECKS_CLIENT = {"client_connection_check_interval": "10000"}
POSTGRES_CONNECT_TIMEOUT_S = 10
# PostgreSQL keeps this much of a name.
NAME_BYTES = 63
# A network that silently drops every packet ends a wait in a minute, instead of the two hours of a
# kernel's default.
KEEPALIVES = {
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
}

# Set elsewhere: in the connection's own fields, and for all of our connections.
_SAID_ELSEWHERE = frozenset(
    {
        "user",
        "password",
        "host",
        "port",
        "dbname",
        "application_name",
        "fallback_application_name",
        "client_encoding",
    }
)
# Keys of an Airflow connection's extra that libpq knows, except those it hides as developers'
# options. Other keys belong to Airflow or its hooks.
_LIBPQ_EXTRAS = frozenset(
    option.keyword.decode() for option in Conninfo.get_defaults() if option.dispchar != b"D"
) - _SAID_ELSEWHERE  # fmt: skip
# Keys that begin like this are checked even where libpq doesn't know them: a user who sets one
# relies on its protection.
_PROTECTS = ("ssl", "gss", "krb", "require", "channel")


def conninfo_from_environment(conn_id: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return the libpq connection string of an Airflow connection in ``AIRFLOW_CONN_<ID>`` (URI or
    JSON).

    Raises ConfigError when the variable is missing, isn't a PostgreSQL connection, or has a
    protection in its extra that libpq doesn't know. The error never contains the variable's value.
    """
    found = read_connection(conn_id, _EXAMPLE, environment)
    if found.conn_type not in ("postgres", "postgresql"):
        raise ConfigError(
            f"{found.variable} is a connection of type {found.conn_type!r}, and the source is"
            f" PostgreSQL: write {_EXAMPLE}"
        )
    fields = {
        "host": found.host,
        "port": found.port,
        "user": found.login,
        "password": found.password,
        "dbname": found.schema,
        **_of_libpq(found.extra),
    }
    if unknown := sorted(k for k in fields if k.startswith(_PROTECTS) and k not in _LIBPQ_EXTRAS):
        raise ConfigError(
            f"{found.variable}: the extra sets {', '.join(unknown)}, which libpq"
            f" {_libpq_version()} does not know, so it would protect nothing: correct its"
            " name, or remove it"
        )
    return make_conninfo("", **{k: v for k, v in fields.items() if v not in (None, "")})


class OneStatementCursor(psycopg.Cursor[Row]):
    """Sends every query by the extended protocol, where the server refuses a second statement.

    The text of a row filter becomes part of statements, and must not be able to add a statement.
    """

    def _execute_send(self, query: Any, **options: Any) -> None:
        super()._execute_send(query, **(options | {"force_extended": True}))


def connect(conninfo: str, application_name: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Open an autocommit connection with the pinned session settings.

    Raises SourceUnreachable, AuthenticationFailed, PrivilegeMissing, or ConfigError for SSL
    settings that can't work and for a connection pooler. Each names host, port and database, but
    never the password.
    """

    def open_(pinned: str) -> psycopg.Connection[tuple[Any, ...]]:
        connection = psycopg.connect(pinned, autocommit=True, cursor_factory=OneStatementCursor)
        connection.prepare_threshold = None

        def first() -> None:
            _check_whole(
                conninfo, connection.execute(_FIRST).fetchall(), connection.info.backend_pid
            )

        return _after(connection, first)

    return _opened(conninfo, application_name, open_, psycopg.OperationalError)


@contextmanager
def named_loss(conninfo: str) -> Iterator[None]:
    """Raise SourceUnreachable when a connection is lost during use, since a retry may succeed."""
    try:
        yield
    except psycopg.OperationalError as err:
        if err.sqlstate is not None and not err.sqlstate.startswith(_CONNECTION_LOST):
            raise
        reason = str(err).partition("\n")[0]
        raise SourceUnreachable(
            f"{describe(conninfo)} ended a connection in use, or the network did ({reason}): run"
            " again"
        ) from err


def lacks_room(err: psycopg.Error) -> SourceError | None:
    """Return the named error of a query for whose result the server has no room, else None."""
    reason = err.diag.message_primary or type(err).__name__
    if isinstance(err, psycopg.errors.ConfigurationLimitExceeded):
        return SourceError(
            f"a query exceeded a limit of the server ({reason}): raise temp_file_limit, or the"
            " limit that the message names, for the role (alter role … set)"
        )
    if isinstance(err, psycopg.errors.DiskFull):
        return SourceDiskFull(
            f"a disk of the server is full ({reason}): free space on the disk of its temporary"
            " files (temp_tablespaces)"
        )
    if isinstance(err, psycopg.errors.OutOfMemory):
        return SourceError(
            f"the server has no memory for a query ({reason}): find out what uses it, or run again"
        )
    return None


def connect_walsender(conninfo: str, application_name: str) -> psycopg.Connection[tuple[Any, ...]]:
    """Open a connection for commands of the replication protocol (through ``pgconn``).

    Raises as connect() does. It needs what reading a slot needs, the REPLICATION attribute, and a
    free walsender (max_wal_senders).
    """

    def as_walsender(pinned: str) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(make_conninfo(pinned, replication="database"), autocommit=True)

    return _opened(conninfo, application_name, as_walsender, psycopg.OperationalError)


def connect_arrow(conninfo: str, application_name: str) -> adbc_driver_postgresql.dbapi.Connection:
    """Open an ADBC connection (Arrow results) with the pinned session settings; raises as connect()
    does.
    """
    # The import loads pandas: half a second, which an idle check must not pay.
    import adbc_driver_postgresql.dbapi

    def open_(pinned: str) -> adbc_driver_postgresql.dbapi.Connection:
        connection = adbc_driver_postgresql.dbapi.connect(
            make_conninfo(pinned, client_encoding=_UNCONVERTED), autocommit=True
        )

        def first() -> None:
            with connection.cursor() as cursor:
                cursor.execute(_TO_UTF8)
                cursor.fetchall()
                cursor.execute(_FIRST)
                _check_whole(conninfo, cursor.fetchall())

        return _after(connection, first)

    return _opened(conninfo, application_name, open_, adbc_driver_postgresql.dbapi.Error, {})


def limit_batches(cursor: adbc_driver_postgresql.dbapi.Cursor) -> None:
    """Make the cursor return Arrow batches of about 8 MB, so that the reading process stays
    small.
    """
    from adbc_driver_postgresql import StatementOptions

    cursor.adbc_statement.set_options(
        **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
    )


def describe(conninfo: str) -> str:
    """Return host, port and database for messages and logs."""
    fields = conninfo_to_dict(conninfo)
    return (
        f"{fields.get('host', 'localhost')}:{fields.get('port', 5432)}/{fields.get('dbname', '')}"
    )


def describe_server(connection: psycopg.Connection[Any]) -> str:
    """Return host and port of an open connection for messages and logs."""
    return f"{connection.info.host}:{connection.info.port}"


def privilege_missing(role: str, said: str) -> PrivilegeMissing:
    """Return the error for a statement that PostgreSQL refused to the role, with its message."""
    quoted = sql.Identifier(role).as_string()
    attribute = f"alter role {quoted} replication; " if "replication slots" in said else ""
    return PrivilegeMissing(
        f"PostgreSQL refused role {role!r}: {said}: {attribute}what the role needs is in"
        " docs/reference/privileges.md"
    )


def ended_by_replay(what: str, said: str) -> StandbyAway:
    """Return the error for a statement that a standby's replay ended."""
    return StandbyAway(
        f"{what} was ended by the standby's replay ({said.strip().splitlines()[0]}): see that the"
        " standby has hot_standby_feedback on and a primary_slot_name"
        " (docs/how-to/read-from-a-standby.md); run again"
    )


def _check_whole(conninfo: str, found: Sequence[Sequence[Any]], pid: int | None = None) -> None:
    """Raise ConfigError when a connection pooler answers instead of the server.

    A pooler drops startup options, or reports an invented pid for a backend that it shares. Setup
    may have connected directly. Behind a pooler, values would be printed with other settings, and a
    lock would pass to the next client of that backend.
    """
    ((_, search_path, answering),) = found
    if search_path != SESSION_SETTINGS["search_path"] or pid not in (None, answering):
        raise ConfigError(f"{describe(conninfo)}: {_POOLED}")


class _Closeable(Protocol):
    def close(self) -> None: ...


C = TypeVar("C", bound=_Closeable)


def _after(connection: C, first: Callable[[], object]) -> C:
    """Return the connection after running ``first``; it is closed when that fails."""
    try:
        first()
    except BaseException:
        connection.close()
        raise
    return connection


def _opened(
    conninfo: str,
    application_name: str,
    open_: Callable[[str], C],
    refused: type[Exception],
    further: Mapping[str, str] = _GIVES_UP_SENDING,
) -> C:
    """Open a connection with the pinned settings; ``refused`` is what the driver raises.

    Servers on some platforms refuse one of them; then it is left out.
    """
    defaults = {**_SERVER_KEEPALIVES, **further}
    with raised_as(partial(_connect_error, conninfo), refused):
        try:
            return open_(_pinned(conninfo, application_name, defaults | _CHECKS_CLIENT))
        except refused as err:
            if not any(name in str(err) for name in _CHECKS_CLIENT):
                raise
        return open_(_pinned(conninfo, application_name, defaults))


def _pinned(conninfo: str, application_name: str, defaults: Mapping[str, str]) -> str:
    """Return the connection string with our settings; the connection's own choices override
    ``defaults``.
    """
    given = conninfo_to_dict(conninfo)
    chosen = str(given.get("options") or "")
    options = " ".join(
        part for part in (_switches(defaults), chosen, _switches(SESSION_SETTINGS)) if part
    )
    return make_conninfo(
        conninfo,
        **{key: value for key, value in KEEPALIVES.items() if key not in given},
        application_name=application_name[:NAME_BYTES],
        options=options,
        connect_timeout=str(given.get("connect_timeout") or POSTGRES_CONNECT_TIMEOUT_S),
    )


def _switches(settings: Mapping[str, str]) -> str:
    return " ".join(f"-c {name}={value}" for name, value in settings.items())


def _of_libpq(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of an extra that are meant for libpq, known to it or not."""
    return {k: v for k, v in extra.items() if k in _LIBPQ_EXTRAS or k.startswith(_PROTECTS)}


def _libpq_version() -> str:
    return f"{pq_version() // 10000}.{pq_version() % 10000}"


_EXAMPLE = "postgresql://user:password@host:port/database"
# connection_exception; admin_shutdown, crash_shutdown, cannot_connect_now, idle_session_timeout. A
# network failure has no SQLSTATE.
_CONNECTION_LOST = ("08", "57P")
# insufficient_resources, operator_intervention: a retry may not meet them.
_PASSING = ("53", "57")
_ConnectError = SourceError | ConfigError

_POOLED = (
    "a connection pooler answers instead of the server and doesn't keep sessions: point the"
    " connection at PostgreSQL itself"
)
# libpq's or the server's message, the error for it, and the remedy; the first match counts.
_REFUSALS: tuple[tuple[str, type[_ConnectError], str], ...] = (
    (r"unsupported startup parameter", ConfigError, f"{_POOLED} ({{reason}})"),
    (
        r"too many (clients|connections)|remaining connection slots|exceeds .?max_wal_senders",
        SourceUnreachable,
        (
            "the server has no connection left for user {user!r} ({reason}): end idle ones, or"
            " raise max_connections, or the limit that the message names"
        ),
    ),
    (
        r"the database system is",
        SourceUnreachable,
        (
            "the server takes no connections now ({reason}): wait until it is up; its log shows"
            " the progress"
        ),
    ),
    (
        r"permission denied for database",
        PrivilegeMissing,
        (
            "role {user!r} may not connect: grant connect on database {database} to {user}"
            " (docs/reference/privileges.md)"
        ),
    ),
    (
        (
            r'file "[^"]*" does not exist|but not private key file|could not (read|load|open)'
            r" .*(certificate|private key)"
        ),
        ConfigError,
        (
            "{reason}: correct sslrootcert, sslcert, sslkey or sslmode in the connection's extra,"
            " or put the file there"
        ),
    ),
    (
        r"server does not support SSL",
        ConfigError,
        (
            "the connection asks for SSL, which this server doesn't offer: switch it on there, or"
            " change the extra's sslmode"
        ),
    ),
    (
        r"certificate verify failed|server certificate for",
        ConfigError,
        (
            "the server's certificate isn't trusted ({reason}): set sslrootcert in the"
            " connection's extra to the authority that signed it"
        ),
    ),
    (
        (
            r"alert (certificate|unknown ca|bad certificate|unsupported certificate)|requires a"
            r" valid client certificate"
        ),
        ConfigError,
        (
            "the server doesn't accept the client certificate ({reason}): set sslcert and sslkey"
            " in the connection's extra to one that it trusts"
        ),
    ),
    (
        r"invalid \w+ value|invalid connection option",
        ConfigError,
        "{reason}: correct the connection's extra",
    ),
    (
        r"no pg_hba\.conf entry|pg_hba\.conf rejects",
        AuthenticationFailed,
        (
            "its pg_hba.conf doesn't let user {user!r} in from here ({reason}): add a line there"
            " or, for a hostssl line, set sslmode in the connection's extra"
        ),
    ),
    (
        r"authentication failed|no password supplied",
        AuthenticationFailed,
        "the server refused user {user!r}: check login and password of the connection",
    ),
    (
        r'role "[^\n]*" does not exist',
        AuthenticationFailed,
        "role {user!r} does not exist: check the connection's login, or create the role",
    ),
    (
        r'database "[^\n]*" does not exist',
        AuthenticationFailed,
        (
            "database {database!r} does not exist: check the connection's database (Airflow calls"
            " it schema)"
        ),
    ),
)


def _connect_error(conninfo: str, err: Exception) -> _ConnectError:
    where, text = describe(conninfo), str(err)
    given, reason = conninfo_to_dict(conninfo), _reason(text)
    for said, kind, remedy in _REFUSALS:
        if re.search(said, text):
            told = remedy.format(
                reason=reason, user=given.get("user", ""), database=given.get("dbname", "")
            )
            return kind(f"{where}: {told}")
    sqlstate = getattr(err, "sqlstate", None)
    if sqlstate is not None and not sqlstate.startswith(_CONNECTION_LOST):
        refused = SourceError(
            f"{where} refused a query that every connection begins with ({reason}): the server's"
            " log has details"
        )
        refused.retryable = sqlstate.startswith(_PASSING)
        return refused
    return SourceUnreachable(f"{where} can't be reached ({reason}): check host, port and firewall")


def _reason(text: str) -> str:
    """Return the reason from a driver's longer message.

    >>> failed = 'connection failed: connection to server at "::1", port 5 failed'
    >>> _reason(f"{failed}: Connection refused\\n\\tIs the server …")
    'Connection refused'
    >>> _reason("Failed to execute query 'SELECT\\n 1\\n': ERROR:  out of shared memory\\n")
    'out of shared memory'
    """
    if refused := re.search(r"\bERROR: +(.*)", text):
        return refused[1]
    lines = text.strip().splitlines()
    found = next((line for line in lines if " failed: " in line), lines[0] if lines else "")
    return re.sub(r"^.*\b(failed|connect|bad): (?=\S)", "", found).strip() or "no answer"
