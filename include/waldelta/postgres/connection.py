"""Connections to PostgreSQL: by Airflow's conn_id, with the session settings that values depend
on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import Conninfo
from psycopg.pq import version as pq_version
from psycopg.rows import Row

from waldelta.config.airflow_connection import SOURCE_CONNECTIONS, read_connection
from waldelta.errors import (
    ConfigError,
    NameUnreadable,
    PrivilegeMissing,
    SessionAltered,
    SourceDiskFull,
    SourceError,
    SourceUnreachable,
    StandbyAway,
)
from waldelta.findings import sql_name
from waldelta.hidden_modules import hidden
from waldelta.quantities import first_of
from waldelta.server_errors.refused_connection import POOLED, ConnectionRefusal, connection_error
from waldelta.server_errors.sqlstate import INVALID_PARAMETER_VALUE, ServerError
from waldelta.server_errors.texts import UNTRANSLATABLE_BYTES

if TYPE_CHECKING:
    import adbc_driver_postgresql.dbapi
    import pyarrow as pa

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
    "default_transaction_isolation": "read committed",
}
# A setting of no meaning among the options that a connection begins with. A pooler that drops the
# options drops it, and a login trigger that changes settings doesn't.
_MARK, _MARKED = "waldelta.session", "on"
# Only a superuser may change this one, or a role with a grant on it: messages in English.
_MESSAGES = """
case when pg_catalog.has_parameter_privilege('lc_messages', 'set')
  then pg_catalog.set_config('lc_messages', 'C', false) end
"""
# PostgreSQL 17 has this one; older versions refuse it among a connection's options.
_TRANSACTION_TIMEOUT = """
case when pg_catalog.current_setting('transaction_timeout', true) is not null
  then pg_catalog.set_config('transaction_timeout', '0', false) end
"""
# A view's functions are called as the role that reads it, and an owner could swap one in for a
# table (CVE-2024-7348). PostgreSQL 15.8, 16.4 and 17.0 are the first with this setting. The
# system's views, and foreign tables that are partitions, can still be read.
_VIEWS = (
    "case when pg_catalog.current_setting('restrict_nonsystem_relation_kind', true) is not null"
    " then pg_catalog.set_config('restrict_nonsystem_relation_kind', '{kind}', {is_local}) end"
)
# ADBC reads the names of all types and columns while it connects. With this encoding, PostgreSQL
# sends them unconverted. Otherwise a name that UTF-8 can't represent, of any object, would end each
# connection.
_UNCONVERTED = "SQL_ASCII"
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
    """Returns the libpq connection string of an Airflow connection in ``AIRFLOW_CONN_<ID>`` (URI or
    JSON).

    Raises ConfigError when the variable is missing, isn't a PostgreSQL connection, or has a
    protection in its extra that libpq doesn't know. The error never contains the variable's value.
    """
    connection = read_connection(conn_id, SOURCE_CONNECTIONS, "a source", environment)
    fields = {
        "host": connection.host,
        "port": connection.port,
        "user": connection.login,
        "password": connection.password,
        "dbname": connection.schema,
        # What an extra has for libpq, known to it or not.
        **{
            k: v
            for k, v in connection.extra.items()
            if k in _LIBPQ_EXTRAS or k.startswith(_PROTECTS)
        },
    }
    if unknown := sorted(k for k in fields if k.startswith(_PROTECTS) and k not in _LIBPQ_EXTRAS):
        raise ConfigError(
            f"{connection.variable}: the extra sets {', '.join(unknown)}, which libpq"
            f" {pq_version() // 10000}.{pq_version() % 10000} does not know, so it would protect"
            " nothing: correct its name, or remove it"
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

    Raises SourceUnreachable, AuthenticationFailed, PrivilegeMissing, SessionAltered, or ConfigError
    for SSL settings that can't work and for a connection pooler. Each names host, port and
    database, but never the password.
    """

    return _open_connection(
        conninfo,
        application_name,
        lambda pinned: psycopg.connect(
            pinned, autocommit=True, prepare_threshold=None, cursor_factory=OneStatementCursor
        ),
        psycopg.Error,
    )


@contextmanager
def named_loss(conninfo: str) -> Iterator[None]:
    """Raise SourceUnreachable when a connection is lost during use, since a retry may succeed."""
    try:
        yield
    except psycopg.OperationalError as err:
        error = ServerError.of(err)
        if not error.is_lost_connection:
            raise
        raise SourceUnreachable(
            f"{describe(conninfo)} ended a connection in use, or the network did ({error.shown}):"
            " run again"
        ) from err


def lacks_room(err: psycopg.Error) -> SourceError | None:
    """Returns the named error of a query for whose result the server has no room, else None."""
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

    return _open_connection(
        make_conninfo(conninfo, replication="database"),
        application_name,
        lambda pinned: psycopg.connect(pinned, autocommit=True, prepare_threshold=None),
        psycopg.Error,
    )


def adbc_driver() -> Any:
    """Returns ADBC's DB-API of PostgreSQL.

    Its import takes tenths of a second, which an idle check must not pay. Its methods for polars,
    which nothing here calls, would load all of that.
    """
    with hidden("polars"):
        from adbc_driver_postgresql import dbapi

    return dbapi


def connect_arrow(conninfo: str, application_name: str) -> adbc_driver_postgresql.dbapi.Connection:
    """Open an ADBC connection (Arrow results) with the pinned session settings; raises as connect()
    does.
    """
    driver = adbc_driver()
    connection: adbc_driver_postgresql.dbapi.Connection = _open_connection(
        conninfo,
        application_name,
        lambda pinned: driver.connect(
            make_conninfo(pinned, client_encoding=_UNCONVERTED), autocommit=True
        ),
        driver.Error,
        {},
    )
    return connection


def limit_batches(cursor: adbc_driver_postgresql.dbapi.Cursor) -> None:
    """Make the cursor return Arrow batches of about 8 MB, so that the reading process stays
    small.
    """
    from adbc_driver_postgresql import StatementOptions

    cursor.adbc_statement.set_options(
        **{StatementOptions.BATCH_SIZE_HINT_BYTES.value: str(_BATCH_BYTES)}
    )


def record_batches(cursor: adbc_driver_postgresql.dbapi.Cursor) -> Iterator[pa.RecordBatch]:
    """Yields the Arrow batches of a query that the cursor has executed.

    Raises ADBC's errors, also while rows are fetched; with their SQLSTATE, as long as ADBC has the
    reader that keeps it.
    """
    import pyarrow as pa
    from adbc_driver_manager import AdbcStatusCode

    # ADBC's public reader, inside this one, raises OSError and ArrowInvalid without a code.
    reader = getattr(getattr(cursor, "_results", None), "reader", None)
    try:
        yield from cursor.fetch_record_batch() if reader is None else reader
    except (OSError, pa.ArrowException) as err:
        raise adbc_driver().OperationalError(str(err), status_code=AdbcStatusCode.IO) from None


def check_settings(
    conninfo: str, connection: Connection | adbc_driver_postgresql.dbapi.Connection
) -> None:
    """Raise SessionAltered when the session has lost a setting that values depend on.

    A function of the database may change a setting while a query runs that reads values.
    """
    with connection.cursor() as cursor:
        cursor.execute(_CURRENT)
        _check_current(conninfo, dict(zip(_SETTINGS, cursor.fetchall()[0], strict=False)))


def allow_views(connection: Connection) -> None:
    """Let the open transaction read views, for the event triggers that its DDL starts."""
    connection.execute(f"select {_VIEWS.format(kind='', is_local='true')}".encode())


def describe(conninfo: str) -> str:
    """Returns host, port and database for messages and logs."""
    fields = conninfo_to_dict(conninfo)
    return (
        f"{fields.get('host', 'localhost')}:{fields.get('port', 5432)}/{fields.get('dbname', '')}"
    )


def describe_server(connection: psycopg.Connection[Any]) -> str:
    """Returns host and port of an open connection for messages and logs."""
    return f"{connection.info.host}:{connection.info.port}"


def privilege_missing(
    connection: Connection, err: psycopg.errors.InsufficientPrivilege
) -> PrivilegeMissing:
    """Returns the error for a statement that PostgreSQL refused to the connection's role."""
    role, attribute = connection.info.user, ""
    row = connection.execute(_MAY_REPLICATE).fetchone() if not connection.closed else None
    if row == (False,):
        attribute = f"alter role {sql_name(role)} replication; "
    return PrivilegeMissing(
        f"PostgreSQL refused role {role!r}: {ServerError.of(err).shown}: {attribute}what the role"
        ' needs is in the documentation, "Privileges on the source"'
    )


def ended_by_replay(what: str, error: ServerError) -> StandbyAway:
    """Returns the error for a statement that a standby's replay ended."""
    return StandbyAway(
        f"{what} was ended by the standby's replay ({error.shown}): see that the standby has"
        " hot_standby_feedback on and a primary_slot_name; run again"
    )


def pin(conninfo: str, connection: Connection | adbc_driver_postgresql.dbapi.Connection) -> None:
    """Set the settings in the session, whatever a login trigger changed, and verify them.

    Raises ConfigError when a connection pooler answers instead of the server: it drops startup
    options, reports an invented pid for a backend that it shares, or has another backend run the
    next statement. Setup may have connected directly. Behind a pooler, values would be printed with
    other settings, and a lock would pass to the next client of that backend.
    """
    with connection.cursor() as cursor:
        cursor.execute(_PIN)
        first = cursor.fetchall()[0][-1]
        cursor.execute(_CURRENT)
        *values, mark, second = cursor.fetchall()[0]
    if isinstance(mark, bytes):
        # ADBC reads the names of types while it connects, and doesn't recognise quoted ones.
        raise SessionAltered(
            f"{describe(conninfo)}: a login trigger sets quote_all_identifiers, and ADBC can't read"
            " types then: remove that from the database's event trigger on login"
        )
    is_other = isinstance(connection, psycopg.Connection) and connection.info.backend_pid != second
    if mark != _MARKED or first != second or is_other:
        raise ConfigError(f"{describe(conninfo)}: {POOLED}")
    _check_current(conninfo, dict(zip(_SETTINGS, values, strict=True)))


def _check_current(conninfo: str, current: Mapping[str, str]) -> None:
    """Raise SessionAltered for a setting that has another value than the pinned one."""
    for name, value in _SETTINGS.items():
        # The first part of DateStyle is the output's; the other part isn't ours.
        if current[name].partition(",")[0] != value:
            raise SessionAltered(
                f"{describe(conninfo)}: {name} was set to {value!r} in this session, and is"
                f" {current[name]!r} now, so values would be printed otherwise: find what changes"
                " settings of open sessions: a function of the database (set_config), or a"
                " connection pooler"
            )


def _literal(text: str) -> str:
    return sql.Literal(text).as_string()


# PostgreSQL prints these two with their units.
_SETTINGS = {
    name: value for name, value in SESSION_SETTINGS.items() if not name.endswith("_timeout")
}  # fmt: skip
# Qualified, and without an operator: a login trigger may have set any search_path.
_PIN = "select {}, {}, {}, {}, pg_catalog.pg_backend_pid()".format(
    ", ".join(
        f"pg_catalog.set_config({_literal(name)}, {_literal(value)}, false)"
        for name, value in SESSION_SETTINGS.items()
    ),
    _MESSAGES,
    _TRANSACTION_TIMEOUT,
    _VIEWS.format(kind="view", is_local="false"),
)
_CURRENT = "select {}, pg_catalog.current_setting({}, true), pg_catalog.pg_backend_pid()".format(
    ", ".join(f"pg_catalog.current_setting({_literal(name)})" for name in _SETTINGS),
    _literal(_MARK),
)
_MAY_REPLICATE = (
    "select rolreplication or rolsuper from pg_catalog.pg_roles where rolname = current_user"
)


C = TypeVar("C", bound="Connection | adbc_driver_postgresql.dbapi.Connection")


def _open_connection(
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
    for settings in (defaults | _CHECKS_CLIENT, defaults):
        pinned = _pin_settings(conninfo, application_name, settings)
        try:
            with ExitStack() as closing:
                connection = open_(pinned)
                closing.callback(connection.close)
                pin(conninfo, connection)
                closing.pop_all()
                return connection
        except refused as err:
            parameters = conninfo_to_dict(pinned)
            refusal = ConnectionRefusal.of(err, pinned, float(parameters["connect_timeout"] or 0))
        if refusal.sqlstate != INVALID_PARAMETER_VALUE:
            break
    # The traceback doesn't show the driver's error, whose text may have values or credentials.
    raise connection_error(describe(conninfo), conninfo_to_dict(conninfo), refusal) from None


def _pin_settings(conninfo: str, application_name: str, defaults: Mapping[str, str]) -> str:
    """Returns the connection string with our settings; the connection's own choices override
    ``defaults``.
    """
    parameters = conninfo_to_dict(conninfo)
    switches = _switches(SESSION_SETTINGS | {_MARK: _MARKED})
    options = " ".join(
        filter(None, (_switches(defaults), str(parameters.get("options") or ""), switches))
    )
    return make_conninfo(
        conninfo,
        **{key: value for key, value in KEEPALIVES.items() if key not in parameters},
        application_name=application_name[:NAME_BYTES],
        options=options,
        connect_timeout=str(parameters.get("connect_timeout") or POSTGRES_CONNECT_TIMEOUT_S),
    )


def _switches(settings: Mapping[str, str]) -> str:
    return " ".join(
        f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items()
    )


# --- names of catalog objects with bytes that UTF-8 can't represent: PostgreSQL refuses every
# answer that would include one

# As bytea, a name is sent without conversion.
_NAMES = """
select kind, id, pg_catalog.convert_to(name, pg_catalog.getdatabaseencoding())
from (
    select 'role', oid, rolname::text from pg_catalog.pg_roles
    union all
    select 'schema', oid, nspname::text from pg_catalog.pg_namespace
    union all
    select case relkind when 'i' then 'index' when 'I' then 'index' when 'S' then 'sequence'
             when 'v' then 'view' else 'table' end, oid, relname::text
    from pg_catalog.pg_class
    where relkind <> 'c'
    union all
    select 'column', attrelid, c.relname::text || '.' || a.attname::text
    from pg_catalog.pg_attribute a
    join pg_catalog.pg_class c on c.oid = a.attrelid
    where not a.attisdropped and c.relkind not in ('i', 'I') and a.attname::text ~ %(letters)s
    union all
    select 'type', oid, typname::text
    from pg_catalog.pg_type
    where typelem = 0 and (typrelid = 0 or exists (
        select from pg_catalog.pg_class c where c.oid = typrelid and c.relkind = 'c'))
    union all
    select 'enum label', enumtypid, enumlabel::text from pg_catalog.pg_enum
    union all
    select 'constraint', oid, conname::text from pg_catalog.pg_constraint
    union all
    select 'publication', oid, pubname::text from pg_catalog.pg_publication
) as names (kind, id, name)
where name ~ %(letters)s
"""
# Selects names with characters beyond ASCII.
_LETTERS = r"[^\x01-\x7f]"
_CONVERTS = (
    "select pg_catalog.convert(%s::bytea, pg_catalog.getdatabaseencoding()::name, 'UTF8'::name)"
)


def name_unreadable(conninfo: str, err: psycopg.errors.UntranslatableCharacter) -> SourceError:
    """Returns the error for a query whose answer has a text that UTF-8 can't represent.

    It names the objects whose names contain the bytes in PostgreSQL's message.
    """
    said = ServerError.of(err).shown
    lacking = bytes(int(byte, 16) for byte in UNTRANSLATABLE_BYTES.findall(said))
    with connect(conninfo, "waldelta names") as connection:
        rows = connection.execute(_NAMES.encode(), {"letters": _LETTERS}).fetchall()
        names = [(kind, oid, name) for kind, oid, name in rows if lacking in name]
        culprits = list(_unconvertible_names(connection, names))
    where = f"{describe(conninfo)}: PostgreSQL can't send a text of its catalogs as UTF-8 ({said})"
    if not culprits:
        return SourceError(
            f"{where}: look for it in constraints, defaults and comments of the published tables,"
            " and replace it there"
        )
    objects = first_of(
        [
            f'{kind} "{name.decode("ascii", "backslashreplace")}" (oid {oid})'
            for kind, oid, name in culprits
        ]
    )
    it = "it" if len(culprits) == 1 else "those that published tables need"
    return NameUnreadable(
        f"{where}, found in the name of {objects}: rename {it}, in a session with"
        " the database's encoding as client_encoding"
    )


def _unconvertible_names(
    connection: psycopg.Connection[tuple[object, ...]], names: Sequence[tuple[str, int, bytes]]
) -> Iterator[tuple[str, int, bytes]]:
    """Yields the names that PostgreSQL can't convert.

    It tests halves, since most names can be converted.
    """
    if not names:
        return
    try:
        connection.execute(_CONVERTS, (b" ".join(name for _, _, name in names),))
    except psycopg.errors.UntranslatableCharacter:
        if len(names) == 1:
            yield from names
            return
        middle = len(names) // 2
        yield from _unconvertible_names(connection, names[:middle])
        yield from _unconvertible_names(connection, names[middle:])
