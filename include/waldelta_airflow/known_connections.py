"""Prints connections that Airflow knows, for a shell's commands: ``python -m
waldelta_airflow.known_connections ID …``.

The command line asks in a process of its own, because loading Airflow takes seconds and changes the
logging of its process. The answer goes through a pipe, which only the calling command reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout


def known_connections(conn_ids: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the known connections in their JSON form, and by id why others can't be taken.

    An error is named by its class, because its text may repeat what couldn't be read.
    """
    from airflow.utils.session import create_session

    from waldelta_airflow.airflow_entries import find_connection

    documents: dict[str, str] = {}
    refused: dict[str, str] = {}
    for conn_id in conn_ids:
        try:
            with create_session() as session:
                connection = find_connection(session, conn_id)
                if connection is None:
                    continue
                if connection.extra_dejson.get("iam"):
                    refused[conn_id] = "its extra has iam, and only tasks get IAM tokens"
                else:
                    documents[conn_id] = connection.as_json()
        except Exception as err:  # a key that doesn't decrypt it, a database without tables
            refused[conn_id] = type(err).__name__
    return documents, refused


if __name__ == "__main__":
    with redirect_stdout(sys.stderr):  # Airflow's logging is set up on stdout.
        answer = known_connections(sys.argv[1:])
    print(json.dumps(answer))
