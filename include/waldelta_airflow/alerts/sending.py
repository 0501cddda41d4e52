"""Sends what changed since the last time, for each pipeline, through an Airflow connection: Slack's
incoming webhook, a mail, or a webhook.

The secret stays in the connection. Errors name the connection only, because an address may be a
secret itself.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from airflow.configuration import conf
from airflow.sdk import BaseHook, BaseNotifier, Connection
from airflow.sdk.log import mask_secret

from waldelta.errors import AlertNotSent, ConfigError, WaldeltaError
from waldelta.monitoring.attention import Attention
from waldelta_airflow import settings
from waldelta_airflow._airflow_versions import AirflowNotFoundException
from waldelta_airflow.alerts.changes import compare
from waldelta_airflow.alerts.evaluation import evaluate
from waldelta_airflow.alerts.message import Line, Message, message_of

log = logging.getLogger(__name__)

_EVALUATED_AT = "evaluated_at"
_TIMEOUT_S = 10
_SLACK = "https://hooks.slack.com/services"
# Extras of an http connection that aren't headers.
_NOT_HEADERS = frozenset(
    (
        *("allow_redirects", "cert", "check_response", "headers", "max_redirects", "proxies"),
        *("proxy", "stream", "timeout", "trust_env", "verify", "verify_ssl"),
    )
)


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
        text = f"{where}: {failure['error_class']}: {failure['message']}"
        attention = Attention("failed", "failed_task", text)
        url = getattr(task, "log_url", "")
        line = Line("new", attention, datetime.now(UTC), failure["remedy"], url)
        failed: dict[str, WaldeltaError] = {}
        for conn_id in settings.alert_connections():
            try:
                send(conn_id, Message(failure["pipeline"], (line,)))
            except WaldeltaError as err:
                failed[conn_id] = err
        raise_failed(failed)


def send(conn_id: str, message: Message) -> None:
    """Send a message; raises AlertNotSent, or ConfigError for a connection that can't be used."""
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        raise ConfigError(
            f"Airflow has no connection {conn_id!r}, which WALDELTA_ALERTS names: add it, or"
            " correct WALDELTA_ALERTS"
        ) from None
    sender = _SENDERS.get(connection.conn_type or "")
    if sender is None:
        raise ConfigError(
            f"connection {conn_id!r} has type {connection.conn_type!r}: WALDELTA_ALERTS takes"
            f" connections of the types {', '.join(_SENDERS)}"
        )
    try:
        sender(connection, message)
    except (AlertNotSent, ConfigError):
        raise
    except Exception as err:  # Its text may contain the address.
        raise _not_sent(conn_id, type(err).__name__) from None


def _slack(connection: Connection, message: Message) -> None:
    """Post to the address, or to the token below the endpoint, as Airflow's provider does."""
    token = connection.password or ""
    if "://" in token:
        address = token
    else:
        host = connection.host or _SLACK
        host = host if "://" in host else f"{connection.schema or 'https'}://{host}"
        address = f"{host.rstrip('/')}/{token.lstrip('/')}"
    _post(connection, address, message.slack, {})


def _webhook(connection: Connection, message: Message) -> None:
    """Post to the connection's host, which may be a whole address; extras are headers."""
    host = connection.host or ""
    address = host if "://" in host else f"{connection.schema or 'http'}://{host}"
    if connection.port:
        start, _, rest = address.partition("://")
        place, slash, path = rest.partition("/")
        address = f"{start}://{place}:{connection.port}{slash}{path}"
    extra = connection.extra_dejson
    headers = {k: str(v) for k, v in extra.items() if k not in _NOT_HEADERS}
    headers |= {k: str(v) for k, v in (extra.get("headers") or {}).items()}
    _post(connection, address, message.document, headers)


def _post(
    connection: Connection, address: str, document: dict[str, Any], headers: dict[str, str]
) -> None:
    import httpx

    # The client logs every address that it calls.
    mask_secret(address)
    auth = (connection.login, connection.password or "") if connection.login else None
    answer = httpx.post(address, json=document, headers=headers, auth=auth, timeout=_TIMEOUT_S)
    if not answer.is_success:
        raise _not_sent(connection.conn_id, f"HTTP status {answer.status_code}")


def _mail(connection: Connection, message: Message) -> None:
    from airflow.providers.smtp.hooks.smtp import SmtpHook

    if not (to := connection.extra_dejson.get("to")):
        raise ConfigError(
            f'connection {connection.conn_id!r} has no "to": add the addresses to its extra'
        )
    with SmtpHook(connection.conn_id) as hook:
        hook.send_email_smtp(
            to=to, subject=message.subject, html_content=f"<pre>{html.escape(message.text)}</pre>"
        )


def _not_sent(conn_id: str, why: str) -> AlertNotSent:
    return AlertNotSent(
        f"alerts weren't sent through connection {conn_id!r} ({why}): correct the connection, or"
        " wait until the service answers"
    )


_SENDERS: dict[str, Callable[[Connection, Message], None]] = {
    "slackwebhook": _slack,
    "smtp": _mail,
    "http": _webhook,
}
