"""The limit of a statement's time, when it can't be put back."""

import psycopg
import pytest

from waldelta.postgres.lock_waits import limited


class Ending:
    """A connection whose last statement, which puts the limit back, fails."""

    def __init__(self):
        self.closed, self.sent = False, 0

    def execute(self, *_):
        self.sent += 1
        if self.sent > 1:
            raise psycopg.errors.QueryCanceled("canceling statement due to user request")
        return self

    def fetchall(self):
        return [("0", "1000")]

    def close(self):
        self.closed = True


def test_a_session_that_keeps_a_limit_is_closed():
    """It would end later statements. What was done has succeeded, so nothing is raised."""
    connection = Ending()
    with limited(connection, "statement_timeout", 1.0):
        pass
    assert connection.closed


def test_the_error_of_a_statement_stays_the_first():
    connection = Ending()
    with pytest.raises(ZeroDivisionError), limited(connection, "lock_timeout", 1.0):
        raise ZeroDivisionError
    assert connection.closed
