"""Sends what changed since the last time, for each pipeline, through an Airflow connection: Slack's
incoming webhook, a mail, or a webhook.

The secret stays in the connection. Errors name the connection only, because an address may be a
secret itself.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from airflow.configuration import conf
from airflow.sdk import BaseHook, BaseNotifier, Connection
from airflow.sdk.log import mask_secret

from waldelta.control_characters import as_one_entry
from waldelta.error_catalog import ERRORS
from waldelta.errors import AlertNotSent, ConfigError, WaldeltaError
from waldelta.monitoring.attention import KINDS, Attention
from waldelta.quantities import counted
from waldelta_airflow import settings
from waldelta_airflow._airflow_versions import AirflowNotFoundException
from waldelta_airflow.alerts.evaluation import Alert, compare, evaluate
from waldelta_airflow.settings import URL_PREFIX

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
            entries = store.get(key) or {}
            changes = compare(one.attention, one.kinds, entries, at)
            try:
                if changes.alerts:
                    send(conn_id, message_of(one.pipeline, changes.alerts, base_url))
                    log.info("%s: %s sent", key, [alert.state for alert in changes.alerts])
            except WaldeltaError as err:
                failed[conn_id] = err
                continue
            if changes.entries != entries:
                store.set(key, changes.entries)
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
    except Exception as err:  # The error's text may contain the address, which may be secret.
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
        start, _, authority_and_path = address.partition("://")
        place, slash, path = authority_and_path.partition("/")
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


# Slack takes 50 blocks, of 3,000 characters each.
_MOST_BLOCKS, _MOST_IN_A_BLOCK = 45, 2_900
# An alert names so many expectations that failed.
_MOST_DETAILS = 5


@dataclass(frozen=True, slots=True)
class Line(Alert):
    """An alert as it is sent: ``remedy`` says what to do, ``url`` where to see more."""

    remedy: str = ""
    url: str = ""

    @property
    def word(self) -> str:
        """Returns what the line begins with.

        >>> Line("lasting", Attention("failed", "slot", "lost"), datetime.min).word
        'PROBLEM CONTINUES'
        """
        if self.state == "recovered":
            return "RECOVERED"
        word = "PROBLEM" if self.attention.severity == "failed" else "WARNING"
        return f"{word} CONTINUES" if self.state == "lasting" else word

    @property
    def details(self) -> list[str]:
        """Returns the first lines about single objects, and how many more there are."""
        texts = [as_one_entry(text) for _, text in self.attention.details]
        count = len(texts) - _MOST_DETAILS
        return texts[:_MOST_DETAILS] + ([f"and {counted(count, 'more')}"] if count > 0 else [])

    @property
    def advice(self) -> str:
        """Returns since when, and what to do."""
        since = f"since {self.since:%Y-%m-%d %H:%M} UTC"
        return f"{since}; to do: {self.remedy}" if self.remedy else since


@dataclass(frozen=True, slots=True)
class Message:
    """What began, lasts or ended in one pipeline."""

    pipeline: str
    lines: tuple[Line, ...]

    @property
    def subject(self) -> str:
        """Returns the message in a few words.

        >>> Message("shop", ()).subject
        'waldelta shop: recovered'
        """
        open_lines = [line for line in self.lines if line.state != "recovered"]
        what = counted(len(open_lines), "alert") if open_lines else "recovered"
        return f"waldelta {self.pipeline}: {what}"

    @property
    def text(self) -> str:
        """Returns the message as plain text."""
        parts = [self.subject]
        for line in self.lines:
            parts += [f"{line.word}: {line.attention.text}", f"  {line.advice}"]
            parts += [f"  - {text}" for text in line.details]
            parts += [f"  {line.url}"] if line.url else []
        return "\n".join(parts)

    @property
    def slack(self) -> dict[str, Any]:
        """Returns the payload of a Slack incoming webhook."""
        sections = [_section_block(f"*{_mrkdwn(self.subject)}*")]
        for line in self.lines[:_MOST_BLOCKS]:
            link = f" <{line.url}|open>" if line.url else ""
            details = "".join(f"\n• {_mrkdwn(text)}" for text in line.details)
            text = f"*{line.word}*: {_mrkdwn(line.attention.text)}\n_{_mrkdwn(line.advice)}_{link}"
            sections.append(_section_block(text + details))
        if count := len(self.lines) - _MOST_BLOCKS:
            sections += [_section_block(f"and {counted(count, 'more alert')}")] if count > 0 else []
        return {"text": self.subject, "blocks": sections}

    @property
    def document(self) -> dict[str, Any]:
        """Returns the message as JSON, for a webhook."""
        alerts = [
            {
                "state": line.state,
                "severity": line.attention.severity,
                "kind": line.attention.kind,
                "tables": list(line.attention.objects),
                "text": line.attention.text,
                "details": line.details,
                "since": line.since.isoformat(),
                "remedy": line.remedy,
                "url": line.url,
            }
            for line in self.lines
        ]
        return {
            "pipeline": self.pipeline,
            "subject": self.subject,
            "text": self.text,
            "alerts": alerts,
        }


def message_of(pipeline: str, alerts: Sequence[Alert], base_url: str) -> Message:
    """Returns the message of these alerts; links lead to the pages below Airflow's address."""
    return Message(pipeline, tuple(_line(pipeline, alert, base_url) for alert in alerts))


def _line(pipeline: str, alert: Alert, base_url: str) -> Line:
    item = alert.attention
    line = Line(alert.state, replace(item, text=as_one_entry(_safe_text(item))), alert.since)
    if alert.state == "recovered":
        return line
    return replace(line, remedy=KINDS[item.kind].remedy, url=_page(base_url, pipeline, item))


def _safe_text(item: Attention) -> str:
    """Returns the item's text without the message of an error that isn't waldelta's own.

    Such a message may contain a secret or a row's value.
    """
    kinds = ("failed_run", "failed_maintenance", "failed_reconciliation")
    beginning, separator, _ = item.text.partition(f": {item.cause}: ")
    if item.cause and item.kind in kinds and separator and item.cause not in ERRORS:
        return f"{beginning}: {item.cause}: see its log"
    return item.text


def _page(base_url: str, pipeline: str, item: Attention) -> str:
    if not base_url or item.kind == "pipeline_file":
        return ""
    parts = "/".join(quote(part, safe="") for part in ("p", pipeline, *item.page))
    anchor = f"#{item.anchor}" if item.anchor else ""
    return f"{base_url.rstrip('/')}{URL_PREFIX}/{parts}{anchor}"


def _section_block(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:_MOST_IN_A_BLOCK]}}


def _mrkdwn(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
