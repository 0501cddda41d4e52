"""What PostgreSQL says about a value is shown without it."""

import psycopg
import pytest

from waldelta.errors import without_values

SECRET = "s3cret-4711"
STATEMENTS = {
    "a value": ("select 'SECRET'::int", "SQLSTATE 22P02, InvalidTextRepresentation"),
    "a key": ("insert into t values (1, 'SECRET'), (1, 'SECRET')",
              "SQLSTATE 23505, UniqueViolation, t, pk"),
    "a check": ("insert into t values (2, 'xSECRET')", "SQLSTATE 23514, CheckViolation, t, short"),
    "a function": ("do $$ begin raise 'SECRET'; end $$", "SQLSTATE P0001, RaiseException"),
}  # fmt: skip


@pytest.mark.parametrize(("statement", "words"), STATEMENTS.values(), ids=STATEMENTS)
def test_no_value_of_a_row_in_errors_of_postgresql(database, statement, words):
    """Neither in the message, nor in DETAIL and CONTEXT."""
    database.execute(
        "create table if not exists t (id int constraint pk primary key, v text,"
        " constraint short check (v not like 'x%'))"
    )
    with (
        psycopg.connect(database.conninfo, autocommit=True) as connection,
        pytest.raises(psycopg.Error) as caught,
    ):
        connection.execute(statement.replace("SECRET", SECRET))
    assert without_values(caught.value) == words
