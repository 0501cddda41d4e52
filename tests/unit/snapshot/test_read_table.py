"""Reading a table under a snapshot: what a task's error shows when it reaches the driver."""

import traceback

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import pytest

from waldelta.errors import SourceUnreachable
from waldelta.postgres import TableId
from waldelta.postgres.sessions import ARROW_SESSIONS
from waldelta.snapshot.read_table import TableCopy, read_chunks


class LostConnection:
    def cursor(self):
        raise adbc.OperationalError(
            "[libpq] the connection broke off\nQuery: select 'a value'",
            status_code=adbc_driver_manager.AdbcStatusCode.IO,
        )

    def close(self):
        pass


def test_the_drivers_own_error_stays_out_of_the_traceback(monkeypatch):
    """A task's exception reaches the driver's log as text, with all errors that it shows."""
    monkeypatch.setattr(ARROW_SESSIONS, "_open", lambda *_: LostConnection())
    copy = TableCopy(TableId("public", "t"), (), None, "00000003-1", {}, None)
    with pytest.raises(SourceUnreachable, match="broke off") as caught:
        list(read_chunks("host=h", copy, [object()], "test"))
    shown = "".join(traceback.format_exception(caught.value))
    assert "a value" not in shown
