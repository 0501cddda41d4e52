"""As which roles a function of a table's owner is called."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

# For the body of a function in PL/pgSQL. The server's log also has calls in transactions that are
# rolled back, of which NOTIFY sends nothing.
SAY_CALLED = "raise log 'called in % as %', current_database(), current_user;"


@contextmanager
def calls(database) -> Iterator[list[str]]:
    """Gives the roles as which such functions of the database are called in this block."""
    roles: list[str] = []
    with (database.server.data / "server.log").open("rb") as log:
        log.seek(0, 2)
        yield roles
        written = log.read().decode(errors="replace")
    roles += re.findall(rf"called in {re.escape(database.name)} as (\S+)", written)
