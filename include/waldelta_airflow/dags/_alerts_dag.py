"""Sends alerts of all pipelines to the connections in WALDELTA_ALERTS.

Every five minutes the task evaluates what the *Pipelines* page shows: failed and overdue runs,
paused DAGs, the slot, tables and rows that wait, differences from the source. It sends each alert
once, again every 24 hours, and once more when it ends.

- *If it fails*: a connection refused the message, as the log says. The next run sends it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Asset, task

from waldelta_airflow import settings
from waldelta_airflow.launchers.job_result import named_failures

# What was sent is stored as the state of this asset, which outlives runs and restarts.
_SENT = Asset("waldelta/alerts")


def build_alerts_dag() -> DAG:
    """Returns the DAG that evaluates all pipelines; it isn't paused when Airflow first sees it."""
    with DAG(
        dag_id=settings.ALERTS_DAG,
        schedule="*/5 * * * *",
        auto_register=False,
        catchup=False,
        max_active_runs=1,
        is_paused_upon_creation=False,
        tags={"waldelta", "alerts"},
        doc_md=__doc__,
        default_args={
            "retries": 1,
            "retry_delay": settings.retry_delay(),
            "execution_timeout": settings.ALERTS_TIMEOUT,
        },
        dagrun_timeout=timedelta(hours=1),
    ) as dag:

        @task(inlets=[_SENT])
        def send_alerts(**context: Any) -> None:
            from waldelta_airflow.alerts import sending

            with named_failures():
                sending.send_alerts(context)

        send_alerts()
    return dag
