"""The embedded stack: PostgreSQL, a warm Spark Connect server and Airflow, in one folder and on
loopback only.

``python -m demo.stack up|down|status``, or as a context manager::

    with Stack() as stack, stack.client() as airflow:
        airflow.run_to_end("flights_setup")
"""

from __future__ import annotations

from demo.stack.processes import StackError
from demo.stack.stack import Stack

__all__ = ["Stack", "StackError"]
