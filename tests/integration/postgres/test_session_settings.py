"""Our sessions' settings, whatever role, database, login trigger and functions set."""

from contextlib import closing

import pytest

from waldelta.errors import SessionAltered
from waldelta.postgres import connect
from waldelta.postgres.connection import check_settings, connect_arrow, connect_walsender
from waldelta.snapshot.read_table import run_statement, snapshot_reader

OPEN = {"psycopg": connect, "adbc": connect_arrow, "walsender": connect_walsender}
# Each changes how a value is printed or read, or what a name means.
OTHERS = {
    "DateStyle": "SQL, DMY", "IntervalStyle": "iso_8601", "TimeZone": "Asia/Tokyo",
    "extra_float_digits": "-5", "bytea_output": "escape", "client_encoding": "LATIN1",
    "lc_monetary": "C.UTF-8", "xmlbinary": "hex", "search_path": "public",
    "quote_all_identifiers": "on", "row_security": "on", "standard_conforming_strings": "off",
    "default_transaction_isolation": "serializable", "statement_timeout": "1h",
    "lc_messages": "C.UTF-8",
}  # fmt: skip
PINNED = {
    "IntervalStyle": "postgres", "TimeZone": "UTC", "extra_float_digits": "1",
    "bytea_output": "hex", "client_encoding": "UTF8", "lc_monetary": "C", "xmlbinary": "base64",
    "search_path": "pg_catalog", "quote_all_identifiers": "off", "row_security": "off",
    "standard_conforming_strings": "on", "default_transaction_isolation": "read committed",
    "statement_timeout": "0", "lc_messages": "C",
}  # fmt: skip
LOGIN = """
create function public.on_login() returns event_trigger language plpgsql as $$begin {} end$$;
create event trigger on_login on login execute function public.on_login()
"""


def on_login(database, statements: str) -> None:
    for statement in LOGIN.format(statements).split(";\ncreate"):
        database.execute(
            statement if "function public.on_login() r" in statement else f"create{statement}"
        )


def run(connection, query):
    with closing(connection.cursor()) as cursor:
        cursor.execute(query)
        return cursor.fetchall()


def current(connection, setting):
    return run(connection, f"select current_setting('{setting}')")[0][0]


@pytest.mark.parametrize("opened", OPEN)
@pytest.mark.parametrize("where", ["database", "role", "login trigger"])
def test_a_session_has_our_settings(any_database, opened, where):
    """A login trigger of PostgreSQL 17 runs after a connection's options were set."""
    name = any_database.name
    with any_database.connect(autocommit=True) as owner:
        if where == "login trigger" and owner.info.server_version >= 170000:
            on_login(
                any_database,
                "".join(
                    f"perform pg_catalog.set_config('{k}', '{v}', false);"
                    for k, v in OTHERS.items()
                    if opened != "adbc" or k != "quote_all_identifiers"
                ),
            )
        else:
            of = f"database {name}" if where == "database" else f"role postgres in database {name}"
            for setting, value in OTHERS.items():
                owner.execute(f"alter {of} set {setting} to '{value}'")
        with closing(OPEN[opened](any_database.conninfo, "test")) as connection:
            shown = {name: current(connection, name) for name in PINNED}
            assert shown == PINNED
            assert current(connection, "DateStyle").startswith("ISO")
        owner.execute(f"alter role postgres in database {name} reset all")


@pytest.mark.parametrize("opened", OPEN)
def test_a_login_trigger_that_raises_is_named(any_database, opened):
    """The server is there, and no pooler is in between."""
    if any_database.connection.info.server_version < 170000:
        # Before 17, what ends a login is a setting that isn't allowed; the conninfo asks for it.
        conninfo, told = f"{any_database.conninfo} options='-c work_mum=1'", "correct the extra's"
    else:
        on_login(
            any_database,
            "if session_user = 'postgres' and current_setting('application_name')"
            " = 'test' then raise exception 'not today'; end if;",
        )
        conninfo, told = any_database.conninfo, "see the database's event triggers on login"
    with pytest.raises(Exception, match=told) as caught:
        OPEN[opened](conninfo, "test")
    assert "can't be reached" not in str(caught.value)
    assert "pooler" not in str(caught.value)


def test_adbc_reads_no_value_whose_type_it_doesnt_know(any_database):
    """It reads the types before we can set anything, and takes unknown ones for bytes."""
    if any_database.connection.info.server_version >= 170000:
        on_login(any_database, "set quote_all_identifiers = on;")
        with pytest.raises(SessionAltered, match="a login trigger sets quote_all_identifiers"):
            connect_arrow(any_database.conninfo, "test")
    any_database.execute(f"alter database {any_database.name} set quote_all_identifiers = on")
    any_database.execute("drop event trigger if exists on_login")
    with connect_arrow(any_database.conninfo, "test") as connection:
        assert current(connection, "quote_all_identifiers") == "off"


@pytest.mark.parametrize("opened", OPEN)
def test_a_setting_that_was_changed_later(postgres, opened):
    """By a function of the database, for example, that a query of ours called."""
    with closing(OPEN[opened](postgres.conninfo(), "test")) as connection:
        for setting in set(OTHERS) - {"lc_messages", "statement_timeout"}:
            check_settings(postgres.conninfo(), connection)
            ours = current(connection, setting)
            run(connection, f"select set_config('{setting}', '{OTHERS[setting]}', false)")
            with pytest.raises(SessionAltered, match=f"{setting} was set to .* find what changes"):
                check_settings(postgres.conninfo(), connection)
            run(connection, f"select set_config('{setting}', '{ours}', false)")


def test_no_value_of_such_a_session_is_used(database):
    """What reads rows verifies the settings behind the last row."""
    copy = type("Copy", (), {"table": "public.t"})()
    with (
        pytest.raises(SessionAltered, match="bytea_output"),
        snapshot_reader(database.conninfo, copy, "test") as connection,
    ):
        run_statement(connection, "select set_config('bytea_output', 'escape', false)")


def test_a_role_without_the_right_keeps_its_language(database):
    """Messages are in English where the role may say so, and nothing fails where it may not."""
    role = f"r_{database.name}"
    database.execute(f"create role {role} login password 'p'")
    database.execute(f"alter role {role} set lc_messages = 'C.UTF-8'")
    conninfo = database.server.conninfo(database.name, role, "p")
    for is_granted, expected in ((False, "C.UTF-8"), (True, "C")):
        if is_granted:
            database.execute(f"grant set on parameter lc_messages to {role}")
        for opened in ("psycopg", "adbc"):
            with closing(OPEN[opened](conninfo, "test")) as connection:
                assert current(connection, "lc_messages") == expected
    database.execute(f"drop owned by {role}; drop role {role}")
