"""Names the error of a connection that isn't made: by the server's SQLSTATE, else by libpq's text.

libpq returns only the text of an answer to a login, in the server's language. So a login that the
server refused is traced for its code: first without the password, and with it only where the answer
can't be about the password. A second wrong password could lock the account.
"""

from __future__ import annotations

import os
import re
import select
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo
from psycopg.pq import ConnStatus, PGconn, PollingStatus

from waldelta.errors import (
    AuthenticationFailed,
    ConfigError,
    PrivilegeMissing,
    SourceError,
    SourceUnreachable,
)
from waldelta.findings import sql_name
from waldelta.server_errors import sqlstate as codes
from waldelta.server_errors import texts
from waldelta.server_errors.sqlstate import ServerError

_TRACE_BYTES = 1 << 20
# libpq takes no password from there, nor from its variable. An empty one counts as none.
_NO_PASSWORD = {"password": "", "passfile": "/dev/null/none"}

ConnectError = SourceError | ConfigError

POOLED = (
    "a connection pooler answers instead of the server and doesn't keep sessions: point the"
    " connection at PostgreSQL itself"
)
_OPTIONS_REFUSED = (
    "the server refuses a setting of the connection ({reason}): correct the extra's options, or"
    " the settings of role and database"
)
_LOGIN_REFUSED = (
    "the server refused user {user!r}: check login and password of the connection, and that the"
    " role may log in ({reason})"
)
# The SQLSTATE or its class, the error, and the remedy; the first that fits counts.
_BY_SQLSTATE: tuple[tuple[str, type[ConnectError], str], ...] = (
    (codes.PROTOCOL_VIOLATION, ConfigError, f"{POOLED} ({{reason}})"),
    (
        codes.TOO_MANY_CONNECTIONS,
        SourceUnreachable,
        (
            "the server has no connection left for user {user!r} ({reason}): end idle ones, or"
            " raise max_connections, or the limit that the message names"
        ),
    ),
    (
        codes.SESSION_ENDED,
        SourceUnreachable,
        (
            "the server takes no connections now ({reason}): wait until it is up; its log shows"
            " the progress"
        ),
    ),
    (
        codes.INVALID_PASSWORD,
        AuthenticationFailed,
        _LOGIN_REFUSED,
    ),
    (
        codes.INVALID_AUTHORIZATION,
        AuthenticationFailed,
        (
            "the server doesn't let user {user!r} in from here ({reason}): check the connection's"
            " login, that the role exists and may log in, and that pg_hba.conf has a line for it;"
            " for a hostssl line, set sslmode in the connection's extra, and sslcert and sslkey if"
            " it asks for a client certificate"
        ),
    ),
    (
        codes.NO_DATABASE,
        AuthenticationFailed,
        (
            "database {database!r} does not exist: check the connection's database (Airflow calls"
            " it schema)"
        ),
    ),
    (
        codes.INSUFFICIENT_PRIVILEGE,
        PrivilegeMissing,
        ("role {user!r} may not connect ({reason}): {grant}"),
    ),
    (codes.INVALID_PARAMETER_VALUE, ConfigError, _OPTIONS_REFUSED),
    (codes.UNDEFINED_OBJECT, ConfigError, _OPTIONS_REFUSED),
    (codes.CANT_CHANGE_RUNTIME_PARAM, ConfigError, _OPTIONS_REFUSED),
)
_BY_TEXT: tuple[tuple[re.Pattern[str], type[ConnectError], str], ...] = (
    (
        texts.CERTIFICATE_FILE,
        ConfigError,
        (
            "{reason}: correct sslrootcert, sslcert, sslkey or sslmode in the connection's extra,"
            " or put the file there"
        ),
    ),
    (
        texts.NO_SSL,
        ConfigError,
        (
            "the connection asks for SSL, which this server doesn't offer: switch it on there, or"
            " change the extra's sslmode"
        ),
    ),
    (
        texts.UNTRUSTED_CERTIFICATE,
        ConfigError,
        (
            "the server's certificate isn't trusted ({reason}): set sslrootcert in the"
            " connection's extra to the authority that signed it"
        ),
    ),
    (
        texts.CLIENT_CERTIFICATE_REFUSED,
        ConfigError,
        (
            "the server doesn't accept the client certificate ({reason}): set sslcert and sslkey"
            " in the connection's extra to one that it trusts"
        ),
    ),
    (texts.INVALID_OPTION, ConfigError, "{reason}: correct the connection's extra"),
    (
        texts.NO_PASSWORD,
        AuthenticationFailed,
        _LOGIN_REFUSED,
    ),
)
_OTHER_ANSWER = (
    "the server refused the session ({reason}{state}): see the database's event triggers on login"
    " (PostgreSQL 17), the settings of role and database, and the server's log"
)


@dataclass(frozen=True, slots=True)
class ConnectionRefusal:
    """A connection that wasn't made: the driver's text, and the server's SQLSTATE, if it answered.

    ``is_of_query`` is True when the server refused a query that every connection begins with.
    """

    text: str
    sqlstate: str | None
    is_of_query: bool = False

    @classmethod
    def of(cls, err: Exception, conninfo: str, timeout_s: float) -> ConnectionRefusal:
        """Create it from a driver's error; ``conninfo`` is what it tried to connect with."""
        text, raised = str(err), ServerError.of(err)
        if raised.sqlstate is not None:
            return cls(raised.message, raised.sqlstate, is_of_query=True)
        if texts.SERVER_ANSWERED.search(text) is None:
            return cls(text, None)
        answer = trace_login(make_conninfo(conninfo, **_NO_PASSWORD), timeout_s)
        if not answer.needs_password:
            return cls(text, answer.sqlstate)
        # An answer that may be about the password names the user, in any language.
        is_named = re.search(rf"(?<!\w){re.escape(answer.user)}(?!\w)", _reason(text)) is not None
        if is_named and texts.NOT_OF_PASSWORD.search(_reason(text)) is None:
            return cls(text, codes.INVALID_PASSWORD)
        return cls(text, trace_login(conninfo, timeout_s).sqlstate)


@dataclass(frozen=True, slots=True)
class LoginAnswer:
    """What a server answered to a login: the SQLSTATE of its refusal, if it refused it."""

    sqlstate: str | None = None
    needs_password: bool = False
    user: str = ""


def trace_login(conninfo: str, timeout_s: float) -> LoginAnswer:
    """Log in once, and return what the server answers within the time.

    libpq writes what it receives to a file in memory. It needs Linux; elsewhere there is no code.
    """
    if not hasattr(os, "memfd_create"):
        return LoginAnswer()
    trace, deadline = os.memfd_create("libpq"), time.monotonic() + timeout_s
    pgconn = PGconn.connect_start(conninfo.encode())
    try:
        pgconn.trace(trace)
        while pgconn.status != ConnStatus.BAD and (remaining_s := deadline - time.monotonic()) > 0:
            polled = pgconn.connect_poll()
            if polled not in (PollingStatus.READING, PollingStatus.WRITING):
                break
            sockets: tuple[list[int], list[int]] = ([], [])
            sockets[polled == PollingStatus.WRITING].append(pgconn.socket)
            select.select(*sockets, [], remaining_s)
        pgconn.untrace()
        received = os.pread(trace, _TRACE_BYTES, 0).decode(errors="replace")
        codes_received = texts.TRACED_SQLSTATE.findall(received)
        return LoginAnswer(
            codes_received[-1] if codes_received else None,
            pgconn.needs_password,
            pgconn.user.decode(errors="replace"),
        )
    except psycopg.Error:
        return LoginAnswer()
    finally:
        pgconn.finish()
        os.close(trace)


def connection_error(
    where: str, parameters: Mapping[str, Any], refusal: ConnectionRefusal
) -> ConnectError:
    """Returns the named error; ``parameters`` are the fields of the connection to ``where``."""
    state, reason = refusal.sqlstate, _reason(refusal.text)
    if refusal.is_of_query:
        return _with_retry(
            SourceError(
                f"{where} refused a query that every connection begins with ({reason}): the"
                " server's log has details"
            ),
            state,
        )
    for code, kind, remedy in _BY_SQLSTATE:
        if state is not None and state.startswith(code):
            return kind(f"{where}: {_fill_remedy(remedy, reason, parameters)}")
    if state is not None:
        answer = _OTHER_ANSWER.format(reason=reason, state=f", SQLSTATE {state}")
        return _with_retry(SourceError(f"{where}: {answer}"), state)
    for words, kind, remedy in _BY_TEXT:
        if words.search(refusal.text):
            return kind(f"{where}: {_fill_remedy(remedy, reason, parameters)}")
    if texts.SERVER_ANSWERED.search(refusal.text):
        error = SourceError(f"{where}: {_OTHER_ANSWER.format(reason=reason, state='')}")
        error.retryable = True  # It was refused once, and not the second time.
        return error
    return SourceUnreachable(f"{where} can't be reached ({reason}): check host, port and firewall")


def _with_retry(error: SourceError, state: str | None) -> SourceError:
    passing = (
        codes.CONNECTION_EXCEPTION,
        codes.INSUFFICIENT_RESOURCES,
        codes.OPERATOR_INTERVENTION,
    )
    error.retryable = state is not None and state.startswith(passing)
    return error


def _fill_remedy(remedy: str, reason: str, parameters: Mapping[str, Any]) -> str:
    user, database = str(parameters.get("user", "")), str(parameters.get("dbname", ""))
    role = sql_name(user)
    grant = f"grant connect on database {sql_name(database)} to {role}"
    if parameters.get("replication"):
        grant = f"alter role {role} replication; {grant}"
    return remedy.format(reason=reason, user=user, database=database, grant=grant)


def _reason(text: str) -> str:
    """Returns the reason from a driver's longer message.

    >>> failed = 'connection failed: connection to server at "::1", port 5 failed'
    >>> _reason(f"{failed}: Connection refused\\n\\tIs the server …")
    'Connection refused'
    """
    lines = text.strip().splitlines()
    line = next((line for line in lines if " failed: " in line), lines[0] if lines else "")
    return re.sub(r"^.*\b(failed|connect|bad): (?=\S)", "", line).strip() or "no answer"
