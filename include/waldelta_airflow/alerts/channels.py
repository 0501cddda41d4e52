"""Sends a message through an Airflow connection: Slack's incoming webhook, a mail, or a webhook.

The secret stays in the connection. Errors name the connection only, because an address may be a
secret itself.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from waldelta.errors import AlertNotSent, ConfigError
from waldelta_airflow._airflow_versions import AirflowNotFoundException

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from waldelta_airflow.alerts.message import Message

_TIMEOUT_S = 10
_SLACK = "https://hooks.slack.com/services"
# Extras of an http connection that aren't headers.
_NOT_HEADERS = frozenset(
    (
        *("allow_redirects", "cert", "check_response", "headers", "max_redirects", "proxies"),
        *("proxy", "stream", "timeout", "trust_env", "verify", "verify_ssl"),
    )
)


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

    to = connection.extra_dejson.get("to")
    if not to:
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
