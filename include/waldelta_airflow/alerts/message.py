"""The message about one pipeline: as text, as Slack's blocks, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

from waldelta.control_characters import as_one_entry
from waldelta.error_catalog import ERRORS
from waldelta.monitoring.attention import KINDS, Attention
from waldelta.quantities import counted
from waldelta_airflow.alerts.changes import Alert
from waldelta_airflow.settings import URL_PREFIX

# Slack takes 50 blocks, of 3,000 characters each.
_MOST_BLOCKS, _MOST_IN_A_BLOCK = 45, 2_900


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
    def more(self) -> str:
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
            parts += [f"{line.word}: {line.attention.text}", f"  {line.more}"]
            parts += [f"  {line.url}"] if line.url else []
        return "\n".join(parts)

    @property
    def slack(self) -> dict[str, Any]:
        """Returns the payload of a Slack incoming webhook."""
        shown = [_section(f"*{_mrkdwn(self.subject)}*")]
        for line in self.lines[:_MOST_BLOCKS]:
            link = f" <{line.url}|open>" if line.url else ""
            shown.append(
                _section(
                    f"*{line.word}*: {_mrkdwn(line.attention.text)}\n_{_mrkdwn(line.more)}_{link}"
                )
            )
        if left := len(self.lines) - _MOST_BLOCKS:
            shown += [_section(f"and {counted(left, 'more alert')}")] if left > 0 else []
        return {"text": self.subject, "blocks": shown}

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
    line = Line(alert.state, replace(item, text=as_one_entry(_safe(item))), alert.since)
    if alert.state == "recovered":
        return line
    return replace(line, remedy=KINDS[item.kind].remedy, url=_page(base_url, pipeline, item))


def _safe(item: Attention) -> str:
    """Returns the text without the message of an error that isn't waldelta's own.

    Such a message may contain a secret or a row's value.
    """
    kinds = ("failed_run", "failed_maintenance", "failed_reconciliation")
    before, found, _ = item.text.partition(f": {item.cause}: ")
    if item.cause and item.kind in kinds and found and item.cause not in ERRORS:
        return f"{before}: {item.cause}: see its log"
    return item.text


def _page(base_url: str, pipeline: str, item: Attention) -> str:
    if not base_url or item.kind == "pipeline_file":
        return ""
    parts = "/".join(quote(part, safe="") for part in ("p", pipeline, *item.page))
    anchor = f"#{item.anchor}" if item.anchor else ""
    return f"{base_url.rstrip('/')}{URL_PREFIX}/{parts}{anchor}"


def _section(text: str) -> dict[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text[:_MOST_IN_A_BLOCK]}}


def _mrkdwn(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
