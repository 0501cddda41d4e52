"""Sessions that are used again: what a use leaves is gone, and a lost session is replaced."""

from __future__ import annotations

from contextlib import suppress

import pytest

from tests.support.waiting import wait_until
from waldelta.postgres.sessions import ARROW_SESSIONS, PLAIN_SESSIONS

STATE = (
    "select pg_backend_pid(), current_setting('statement_timeout'),"
    " current_setting('application_name'), current_setting('my.mark', true)"
)
OPENED = {"psycopg": PLAIN_SESSIONS, "adbc": ARROW_SESSIONS}


def ask(session, text):
    """What a statement returns, in a session of either driver."""
    with session.cursor() as cursor:
        cursor.execute(text)
        return cursor.fetchall()[0]


def use(sessions, conninfo, *statements):
    """The state in which a use finds its session, before it runs statements there."""
    with sessions.session(conninfo, "use") as session:
        state = ask(session, STATE)
        for statement in statements:
            ask(session, statement)
        return state


@pytest.mark.parametrize("driver", OPENED)
def test_a_session_is_used_again_as_if_it_were_new(database, driver):
    sessions, conninfo = OPENED[driver], database.conninfo
    changes = (
        "select set_config('statement_timeout', '5s', false), set_config('my.mark', 'x', false)"
    )
    with sessions.reuse():
        first = use(sessions, conninfo, changes)
        assert first[2] == "use"
        pid, *state = use(sessions, conninfo)
        # A setting that the server doesn't know stays known, without its value.
        assert (pid, *state[:-1], state[-1] or None) == first
        with sessions.session(conninfo, "use"), sessions.session(conninfo, "use") as second:
            assert ask(second, STATE)[0] != pid
        with suppress(LookupError), sessions.session(conninfo, "use") as session:
            failed = ask(session, STATE)[0]
            raise LookupError
        assert use(sessions, conninfo)[0] != failed
        database.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where application_name = 'waldelta idle' and datname = current_database()"
        )
        assert use(sessions, conninfo)[1:] == first[1:]
    assert use(sessions, conninfo)[0] != use(sessions, conninfo)[0]
    idle = "select from pg_stat_activity where application_name = 'waldelta idle'"
    wait_until(lambda: not database.execute(f"{idle} and datname = current_database()"))


def test_a_transaction_ends_with_its_use(database):
    with PLAIN_SESSIONS.reuse():
        with PLAIN_SESSIONS.session(database.conninfo, "use") as session:
            session.execute("begin")
            session.execute("create table public.left_open(id int)")
        with PLAIN_SESSIONS.session(database.conninfo, "use") as again:
            assert again is session
            assert again.execute("select to_regclass('public.left_open')").fetchall() == [(None,)]
