"""Formats values for people: ages, durations, sizes, numbers; the filters of the templates."""

from __future__ import annotations

import re
from datetime import datetime

from markupsafe import Markup

from waldelta.config.pipeline_folder import pipelines_folder
from waldelta.lsn import Lsn
from waldelta.monitoring.attention import SLOT_WORDS
from waldelta.quantities import counted, size
from waldelta_airflow.settings import REPOSITORY

# The line with the report's path, which ends the error of a failed check.
_REPORT = re.compile(r"\s+report: \S.*")

MARKS = {
    "passed": "✓",
    "succeeded": "✓",
    "synced": "✓",
    "ok": "✓",
    "warning": "!",
    "failed": "✕",
    "behind": "✕",
    "unknown": "?",
    "running": "…",
    "retrying": "…",
    "copying": "…",
    "needs_sync": "!",
    "removed": "–",
    "paused": "–",
    "equal": "✓",
    "repaired": "✓",
    "different": "✕",
    "not compared": "?",
    "success": "✓",
    "queued": "…",
}
# The stylesheet's classes, by state.
_CLASSES = {
    "succeeded": "passed",
    "synced": "passed",
    "ok": "passed",
    "behind": "failed",
    "needs_sync": "warning",
    "equal": "passed",
    "repaired": "passed",
    "different": "failed",
    "not compared": "unknown",
    "success": "passed",
    "queued": "running",
    "retrying": "running",
}
_RUN_KINDS = {
    "consume": "CDC",
    "sync": "initial sync",
    "reconcile": "reconciliation",
    "maintain": "maintenance",
    "validate": "validation",
}
_SLOT_MARKS = {"reserved": "ok", "extended": "ok", "unreserved": "warning", "lost": "failed"}


def duration(seconds: float | None) -> str:
    """Returns a duration in its two largest units; from ten of the larger one on, only in that.

    >>> duration(0.4), duration(75), duration(7260), duration(200_000)
    ('0.4 s', '1 min 15 s', '2 h 1 min', '2 d 7 h')
    """
    if seconds is None:
        return "–"
    if seconds < 10:
        return f"{seconds:.1f} s"
    for unit, in_it, below, name, smaller in (
        (60, 1, 3600, "min", "s"),
        (3600, 60, 86400, "h", "min"),
        (86400, 3600, float("inf"), "d", "h"),
    ):
        if seconds < 60:
            return f"{seconds:.0f} s"
        if seconds < below:
            rest = int(seconds % unit // in_it) if seconds < 10 * unit else 0
            return f"{int(seconds // unit)} {name}" + (f" {rest} {smaller}" if rest else "")
    return "–"


def ago(at: datetime | None, now: datetime) -> Markup:
    """Returns how long ago a time was; hovering shows the time itself."""
    if at is None:
        return Markup("–")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        at.isoformat(), moment(at), duration(max(0.0, (now - at).total_seconds())) + " ago"
    )


def run_kind(verb: str) -> str:
    """What a job's runs are called on the pages."""
    return _RUN_KINDS.get(verb, verb)


def moment(at: datetime | None) -> str:
    """Returns a time."""
    return f"{at:%Y-%m-%d %H:%M:%S} UTC" if at is not None else "–"


def bytes_of(count: float | None) -> str:
    """Returns an amount of WAL."""
    return size(round(count)) if count is not None else "–"


def number(count: int | None) -> str:
    """Returns a number of rows."""
    return f"{count:,}" if count is not None else "–"


def lsn(value: int | None) -> str:
    """Returns a WAL position."""
    return str(Lsn(value)) if value is not None else "–"


def slot_state(wal_status: str | None) -> Markup:
    """Returns what PostgreSQL's ``wal_status`` means for readers of the lake."""
    if wal_status is None:
        return Markup('<span class="dim">not recorded</span>')
    return mark(_SLOT_MARKS.get(wal_status, "unknown"), SLOT_WORDS.get(wal_status, wal_status))


def mark(state: str, word: str | None = None) -> Markup:
    """Returns a verdict or state as a coloured sign and a word."""
    return Markup('<span class="mark {}"><span aria-hidden="true">{}</span> {}</span>').format(
        _CLASSES.get(state, state), MARKS.get(state, "·"), word or state.replace("_", " ")
    )


def without_folder(text: object) -> str:
    """Returns a message without this installation's folders, which mean nothing to its readers.

    Files are named as in the repository, and a page that shows the message links to its report.
    """
    said = _REPORT.sub("", str(text))
    for folder in server_folders():
        said = said.replace(folder, "")
    return said


def server_folders() -> tuple[str, ...]:
    """Returns the folders that messages contain, longest first."""
    pipelines = pipelines_folder()
    return tuple(f"{folder}/" for folder in (pipelines, pipelines.parent, REPOSITORY))


FILTERS = {
    "duration": duration,
    "moment": moment,
    "size": bytes_of,
    "number": number,
    "counted": counted,
    "lsn": lsn,
    "mark": mark,
    "run_kind": run_kind,
    "slot_state": slot_state,
    "without_folder": without_folder,
}
