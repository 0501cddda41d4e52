"""Reads an error of PostgreSQL by its SQLSTATE: the message may be in any language."""

from __future__ import annotations

from dataclasses import dataclass

# Appendix "PostgreSQL Error Codes". Two characters are a class.
CONNECTION_EXCEPTION, PROTOCOL_VIOLATION = "08", "08P01"
DATA_EXCEPTION = "22"
INVALID_PARAMETER_VALUE = "22023"
INVALID_AUTHORIZATION, INVALID_PASSWORD = "28000", "28P01"
NO_DATABASE = "3D000"
SERIALIZATION_FAILURE = "40001"
INSUFFICIENT_PRIVILEGE, UNDEFINED_OBJECT = "42501", "42704"
INSUFFICIENT_RESOURCES, TOO_MANY_CONNECTIONS = "53", "53300"
DISK_FULL, OUT_OF_MEMORY, CONFIGURATION_LIMIT_EXCEEDED = "53100", "53200", "53400"
# Of a statement that would read a view, where restrict_nonsystem_relation_kind refuses it.
OBJECT_NOT_IN_PREREQUISITE_STATE = "55000"
OBJECT_IN_USE, CANT_CHANGE_RUNTIME_PARAM, LOCK_NOT_AVAILABLE = "55006", "55P02", "55P03"
OPERATOR_INTERVENTION, QUERY_CANCELED = "57", "57014"
# The server ends the session: admin_shutdown, crash_shutdown, cannot_connect_now,
# idle_session_timeout.
SESSION_ENDED = "57P"
# The data exceptions whose messages contain no value of a row: a division, bytes without an
# equivalent.
_WITHOUT_VALUES = ("22012", "22021", "22P05")


@dataclass(frozen=True, slots=True)
class ServerError:
    """An error that PostgreSQL raised, as psycopg or ADBC returns it.

    ``sqlstate`` is None where the server raised nothing: the connection was lost, or the driver
    failed. ``context`` says what the server was doing, as untranslated names within a translated
    text.
    """

    sqlstate: str | None
    message: str
    context: str = ""
    is_of_connection: bool = False

    @classmethod
    def of(cls, err: BaseException) -> ServerError:
        """Create it from an error of either driver."""
        # Not by class: importing ADBC loads pandas. Both drivers name such an error as DB-API does.
        is_of_connection = type(err).__name__ == "OperationalError"
        sqlstate = getattr(err, "sqlstate", None)
        if (diagnostics := getattr(err, "diag", None)) is not None:
            message, context = diagnostics.message_primary, diagnostics.context
        else:
            details = dict(getattr(err, "details", None) or ())
            message, context = (
                bytes(details.get(key, b"")).decode(errors="replace")
                for key in (b"PG_DIAG_MESSAGE_PRIMARY", b"PG_DIAG_CONTEXT")
            )
        said = message or next(iter(str(err).strip().splitlines()), "") or type(err).__name__
        return cls(sqlstate, said, context or "", is_of_connection)

    def is_one_of(self, *codes: str) -> bool:
        """Returns whether the SQLSTATE is one of these, or of one of these classes."""
        return self.sqlstate is not None and self.sqlstate.startswith(codes)

    @property
    def is_lost_connection(self) -> bool:
        """Whether the session has ended, by the server or by the network."""
        if self.sqlstate is None:
            return self.is_of_connection
        return self.is_one_of(CONNECTION_EXCEPTION, SESSION_ENDED)

    @property
    def is_from_decoding(self) -> bool:
        """Whether the output plugin raised it, while the slot's WAL was decoded."""
        return "pgoutput" in self.context

    @property
    def shown(self) -> str:
        """The message for an error or a log, on one line, without values of rows."""
        if self.is_one_of(DATA_EXCEPTION) and self.sqlstate not in _WITHOUT_VALUES:
            return "a value is invalid"
        return " ".join(self.message.split())
