"""Prints connections that Airflow knows, for a shell's commands: ``python -m
waldelta_airflow.known_connections ID …``.

The command line asks in a process of its own, because loading Airflow takes seconds and changes the
logging of its process. The answer goes through a pipe, which nobody else reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout

from waldelta_airflow.airflow_entries import find_connection


def known_connections(conn_ids: Sequence[str]) -> dict[str, str]:
    """Returns each known connection in its JSON form; raises SQLAlchemyError without a database."""
    from airflow.utils.session import create_session

    with create_session() as session:
        found = {conn_id: find_connection(session, conn_id) for conn_id in conn_ids}
        return {conn_id: one.as_json() for conn_id, one in found.items() if one is not None}


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # Airflow's logging is set up on stdout.
        answer = known_connections(sys.argv[1:])
    print(json.dumps(answer))
