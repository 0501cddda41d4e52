"""What an error of either driver is taken for."""

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import psycopg
import pytest

from waldelta.server_errors.sqlstate import ServerError

IO = adbc_driver_manager.AdbcStatusCode.IO
DETAILS = [
    (b"PG_DIAG_MESSAGE_PRIMARY", b"Division durch Null"),
    (b"PG_DIAG_CONTEXT", "Ausgabe-Plugin »pgoutput«".encode()),
]
ERRORS = {
    "psycopg's": (
        psycopg.errors.lookup("22012")("ωωω"),
        ServerError("22012", "ωωω"),
    ),
    "ADBC's, with its details": (
        adbc.DataError(
            "INVALID_DATA: …", status_code=IO, sqlstate="22012", details=DETAILS
        ),
        ServerError("22012", "Division durch Null", "Ausgabe-Plugin »pgoutput«"),
    ),
    "a lost connection": (
        psycopg.OperationalError("server closed the connection\nmore"),
        ServerError(None, "server closed the connection", "", is_of_connection=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("err, expected", ERRORS.values(), ids=ERRORS)
def test_an_error(err, expected):
    assert ServerError.of(err) == expected


@pytest.mark.parametrize(
    "state, is_of_connection, expected",
    [
        ("08006", True, True),
        ("57P01", True, True),
        (None, True, True),
        (None, False, False),
        ("57014", True, False),
        ("53200", True, False),
    ],
)
def test_which_errors_mean_that_the_session_has_ended(state, is_of_connection, expected):
    assert ServerError(state, "", "", is_of_connection).is_lost_connection is expected


@pytest.mark.parametrize(
    "state, shown",
    [("22P02", "a value is invalid"), ("22012", "»geheim« by zero"), ("42P01", "»geheim« by zero")],
)
def test_no_value_of_a_row_is_shown(state, shown):
    """Messages about a value repeat it, between the quotes of any language."""
    assert ServerError(state, "»geheim«\n by  zero").shown == shown
