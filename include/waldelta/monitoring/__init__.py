"""Reads a lake's bookkeeping for people: runs, lag, freshness, verdicts; without a JVM, a source or
Airflow.

Every function takes a ``Ledger`` and returns plain values; its cost doesn't grow with the
length of the history.
"""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.monitoring.overview import Glance, read_glance
    from waldelta.monitoring.run_details import read_run
    from waldelta.monitoring.run_history import read_runs
    from waldelta.monitoring.status import read_status
    from waldelta.monitoring.table_details import read_table_details

__all__ = ["Glance", "read_glance", "read_run", "read_runs", "read_status", "read_table_details"]
__getattr__ = lazy_exports(
    __name__,
    overview="Glance read_glance",
    run_details="read_run",
    run_history="read_runs",
    status="read_status",
    table_details="read_table_details",
)
