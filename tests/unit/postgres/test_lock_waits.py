import psycopg
import pytest

from waldelta.postgres.lock_waits import limited


class Ending:
    """A connection whose last statement, which puts the limit back, fails."""

    def __init__(self, *, closed):
        self.closed, self.sent = closed, 0

    def execute(self, *_):
        self.sent += 1
        if self.sent > 1:
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return self

    def fetchall(self):
        return [("0", "1000")]


def test_a_limit_that_could_not_be_put_back_is_reported():
    """It would end later statements of the session."""
    with (
        pytest.raises(psycopg.errors.QueryCanceled),
        limited(Ending(closed=False), "statement_timeout", 1.0),
    ):
        pass


def test_a_lost_connection_keeps_its_first_error():
    with pytest.raises(ZeroDivisionError), limited(Ending(closed=True), "lock_timeout", 1.0):
        raise ZeroDivisionError
