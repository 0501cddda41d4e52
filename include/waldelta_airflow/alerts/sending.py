"""Sends what changed since the last time, for each pipeline and channel."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from airflow.configuration import conf
from airflow.sdk import BaseNotifier

from waldelta.errors import AlertNotSent, WaldeltaError
from waldelta_airflow import settings
from waldelta_airflow.alerts.changes import compare
from waldelta_airflow.alerts.channels import send
from waldelta_airflow.alerts.evaluation import evaluate
from waldelta_airflow.alerts.message import Line, Message, message_of

log = logging.getLogger(__name__)

_EVALUATED_AT = "evaluated_at"


def send_alerts(context: Any) -> None:
    """Evaluate all pipelines, and send what began, lasts for long or ended.

    Raises the errors of channels that failed once the others have everything. What wasn't sent is
    sent the next time.
    """
    at, store = datetime.now(UTC), context["asset_state_store"]
    since = store.get(_EVALUATED_AT)
    base_url = conf.get("api", "base_url", fallback="") or ""
    failed: dict[str, WaldeltaError] = {}
    for one in evaluate(context["ti"], at, datetime.fromisoformat(since) if since else None):
        for conn_id in settings.alert_connections():
            key = f"{one.pipeline}/{conn_id}"
            sent = store.get(key) or {}
            changes = compare(one.found, one.known, sent, at)
            try:
                if changes.alerts:
                    send(conn_id, message_of(one.pipeline, changes.alerts, base_url))
                    log.info("%s: %s sent", key, [alert.state for alert in changes.alerts])
            except WaldeltaError as err:
                failed[conn_id] = err
                continue
            if changes.sent != sent:
                store.set(key, changes.sent)
    raise_failed(failed)
    store.set(_EVALUATED_AT, at.isoformat())


def raise_failed(failed: Mapping[str, WaldeltaError]) -> None:
    """Raise the error of the channels that failed, if any did."""
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        raise AlertNotSent("; ".join(str(err) for err in failed.values()))


class AlertNotifier(BaseNotifier):
    """Sends a task's failure at once: for DAGs that run by hand, which nothing watches."""

    template_fields: Sequence[str] = ()

    def notify(self, context: Any) -> None:
        """Send the failure, as reporting.notify describes it, to all channels."""
        failure, task = context["failure"], context.get("ti") or context.get("task_instance")
        where = (
            f"task {task.task_id} of {task.dag_id} failed" if task is not None else "a task failed"
        )
        line = Line(
            "new",
            "failed",
            f"{where}: {failure['error_class']}: {failure['message']}",
            datetime.now(UTC),
            failure["remedy"],
            getattr(task, "log_url", ""),
            "failed_task",
        )
        failed: dict[str, WaldeltaError] = {}
        for conn_id in settings.alert_connections():
            try:
                send(conn_id, Message(failure["pipeline"], (line,)))
            except WaldeltaError as err:
                failed[conn_id] = err
        raise_failed(failed)
