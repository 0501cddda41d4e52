"""Renders pages from plain values: the templates, their filters (ages, durations, sizes, numbers as
text), and the headers of every response.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any
from urllib.parse import quote, urlencode

from airflow.timetables.interval import CronDataIntervalTimetable
from fastapi import Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from waldelta.config.pipeline_folder import pipelines_folder
from waldelta.control_characters import visible
from waldelta.lake.ledger import now
from waldelta.lsn import Lsn
from waldelta.monitoring.attention import SLOT_WORDS
from waldelta.quantities import counted, size
from waldelta_airflow.settings import REPOSITORY, URL_PREFIX
from waldelta_airflow.views._installed_pipelines import PIPELINE_DAGS

# The line with the report's path, which ends the error of a failed check.
_REPORT = re.compile(r"\s+report: \S.*")
# What ends the first sentence of an error; what follows is folded behind it.
_SENTENCE = re.compile(r"\s*\n\s*|(?<=[.;]) ")
_SHORT = 160

# The signs of the stylesheet's classes, and the states that are of a class by another name.
_NAMES = ("passed", "warning", "failed", "unknown", "running", "paused", "next")
MARKS = dict(zip(_NAMES, "✓!✕?…–→", strict=True))
_CLASSES = {
    **dict.fromkeys(("succeeded", "success", "synced", "ok", "equal", "repaired"), "passed"),
    **dict.fromkeys(("behind", "different"), "failed"),
    **dict.fromkeys(("retrying", "queued", "copying"), "running"),
    "needs_sync": "warning",
    "not compared": "unknown",
    "removed": "paused",
}
_RUN_KINDS = {dag.verb: dag.run for dag in PIPELINE_DAGS.values()} | {"validate": "validation"}
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
    if seconds < 60:
        return f"{seconds:.0f} s"
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    unit, name, part, smaller = next(of for of in units if seconds >= of[0])
    rest = int(seconds % unit // part) if seconds < 10 * unit else 0
    return f"{int(seconds // unit)} {name}" + (f" {rest} {smaller}" if rest else "")


def ago(at: datetime | None, now: datetime, form: str = "") -> Markup:
    """Returns how long ago a time was, or until it is; hovering shows the time itself.

    In the form ``since`` it is only the duration. page.js has it count, and shows the exact time
    in the reader's zone.
    """
    if at is None:
        return Markup("–")
    seconds = (now - at).total_seconds()
    text = duration(abs(seconds))
    if form != "since":
        text = f"in {text}" if seconds < 0 else f"{text} ago"
    since = Markup(' data-as="since"') if form else ""
    time = Markup('<time datetime="%s" title="%s"%s>%s</time>')
    return time % (at.isoformat(), f"{at:{_EXACT}}", since, text)


def run_name(run_id: str, now: datetime) -> Markup:
    """Returns a short name of a run: when it was for, and who or what started it.

    Airflow's ids are ``<kind>__<time>``; another id is shown as it is. Hovering shows the id.
    """
    kind, _, time = run_id.partition("__")
    try:
        at = datetime.fromisoformat(time).astimezone(UTC)
    except ValueError:
        return Markup('<span class="wrap">%s</span>') % visible(run_id)
    by = "" if kind == "scheduled" else f", {visible(kind).replace('_', ' ')}"
    return moment_name(at, now, visible(run_id)) + Markup.escape(by)


def moment_name(at: datetime, now: datetime, title: str = "") -> Markup:
    """Returns a time as its day and its minute; hovering shows the title and the exact time."""
    days = (now.date() - at.date()).days
    day = {0: "today", 1: "yesterday"}.get(days, f"{at:%-d %b}")
    name = Markup('<time datetime="%s" data-as="clock" data-title="%s" title="%s">%s %s</time>')
    return name % (at.isoformat(), title, title, day, f"{at:%H:%M}")


def folded(text: str, most: int = _SHORT) -> tuple[str, str]:
    """Returns a text of up to ``most`` characters and "", or its first sentence, cut to 160
    characters, and the whole text.

    >>> folded("the slot is lost: run resync")
    ('the slot is lost: run resync', '')
    >>> folded("2 tables failed:\\n- a: no room\\n" + 200 * "x")[0]
    '2 tables failed: a: no room'
    """
    first, *more = _SENTENCE.split(text, maxsplit=2)
    if first.endswith(":") and more:
        first = f"{first} {more[0].removeprefix('- ')}"
    if len(text) <= most:
        return text, ""
    return (first if len(first) <= _SHORT else f"{first[:_SHORT].rsplit(' ', 1)[0]} …"), text


def run_kind(verb: str) -> str:
    """What a job's runs are called on the pages."""
    return _RUN_KINDS.get(verb, verb)


_EXACT = "%Y-%m-%d %H:%M:%S UTC"


def clock(at: datetime | None, form: str = "exact") -> Markup:
    """Returns a time by a form of strftime; page.js shows it in the reader's zone."""
    if at is None:
        return Markup("–")
    text = at.strftime(_EXACT if form == "exact" else form)
    return Markup('<time datetime="%s" data-as="%s">%s</time>') % (at.isoformat(), form, text)


@cache
def schedule(cron: str | None) -> Markup:
    """Returns a cron expression in Airflow's words, which hovering shows as it is; empty for a DAG
    that is triggered by hand.
    """
    if cron is None:
        return Markup()
    words = CronDataIntervalTimetable(cron, "UTC").description
    return Markup('<span title="%s (UTC)">%s</span>') % (cron, words or cron)


def _or_dash(text_of: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: "–" if value is None else text_of(value)


number = _or_dash("{:,}".format)
bytes_of = _or_dash(lambda count: size(round(count)))
lsn = _or_dash(lambda value: str(Lsn(value)))


def slot_state(wal_status: str | None) -> Markup:
    """Returns what PostgreSQL's ``wal_status`` means for readers of the lake."""
    if wal_status is None:
        return Markup('<span class="dim">not recorded</span>')
    return mark(_SLOT_MARKS.get(wal_status, "unknown"), SLOT_WORDS.get(wal_status, wal_status))


def mark(state: str, word: str | None = None, *, is_past: bool = False) -> Markup:
    """Returns a verdict or state as a coloured sign and a word; what isn't known has only words.

    What was fine in the past says so.

    >>> mark("ok", "2 tables", is_past=True)
    Markup('<span class="mark unknown">earlier: 2 tables</span>')
    """
    name, text = state_class(state), word or state.replace("_", " ")
    if is_past and name == "passed":
        name, text = "unknown", f"earlier: {text}"
    if name == "unknown":
        return Markup('<span class="mark unknown">%s</span>') % text
    sign = Markup('<span class="mark %s"><span aria-hidden="true">%s</span> %s</span>')
    return sign % (name, MARKS.get(name, "·"), text)


def state_class(state: str) -> str:
    return _CLASSES.get(state, state)


def without_folder(text: object) -> str:
    """Returns a message without this installation's folders, which mean nothing to its readers.

    Files are named as in the repository, and a page that shows the message links to its report.
    """
    said = _REPORT.sub("", str(text))
    for folder in server_folders():
        said = said.replace(folder, "")
    return said


def server_folders() -> tuple[str, ...]:
    """Returns the folders that are removed from messages, longest first."""
    pipelines = pipelines_folder()
    return tuple(f"{folder}/" for folder in (pipelines, pipelines.parent, REPOSITORY))


# No external resources, no script but page.js, and no framing by other sites. Values come from the
# source, and must not run code with the reader's login.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
        "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "private, no-store",
}
# In a sandbox neither a script nor a refresh in a report takes effect, also in one written by an
# earlier version. Its links lead back with the reader's login, since its origin stays the same.
REPORT_HEADERS = HEADERS | {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'self'; sandbox allow-same-origin"
    )
}
STYLE_HEADERS = {"Cache-Control": "private, max-age=300", "X-Content-Type-Options": "nosniff"}
# A page with an unfinished run is renewed after this many seconds, any other after a minute.
# Without its script the browser reloads it.
_REFRESH_S = 5


async def add_headers(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Respond with HEADERS, also where FastAPI makes the response; a page's own headers stay."""
    response = await call_next(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def url(base: str, *parts: str, **query: str | int | Sequence[str]) -> str:
    """Returns the address of a page; ``base`` is the application's mount point.

    Each part is quoted as a whole.
    """
    path = "/".join([base, *(quote(part, safe="") for part in parts)]) if parts else f"{base}/"
    return f"{path}?{urlencode(query, True, quote_via=quote)}" if query else path


def airflow_url(base: str, *parts: str) -> str:
    """Returns the address of one of Airflow's own pages, below which the application is mounted."""
    return "/".join([base.removesuffix(URL_PREFIX), *(quote(part, safe="") for part in parts)])


def render(
    template: str,
    base: str,
    at: datetime | None = None,
    *,
    is_under_way: bool = False,
    refresh_s: int | None = None,
    **values: Any,
) -> str:
    """Returns a page with every value escaped; with something unfinished it refreshes itself, or
    after ``refresh_s``.
    """
    moment = at or now()
    values.setdefault("here", template.removesuffix(".html"))
    return (
        _templates()
        .get_template(template)
        .render(
            url=partial(url, base),
            airflow=partial(airflow_url, base),
            now=moment,
            ago=partial(ago, now=moment),
            run_name=partial(run_name, now=moment),
            marks=MARKS,
            refresh_s=refresh_s or (_REFRESH_S if is_under_way else None),
            **values,
        )
    )


class Exact(str):
    """A value that a form sends back, which must stay as it is."""

    __slots__ = ()


def _shown(value: object) -> str:
    """Returns what a page shows of a value: names from the source with control characters as
    escapes.
    """
    if isinstance(value, Exact):
        return value
    return Markup(visible(value)) if isinstance(value, Markup) else visible(str(value))  # noqa: S704


@cache
def _templates() -> Environment:
    found = Environment(
        loader=PackageLoader("waldelta_airflow.views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    filters = (clock, counted, duration, folded, mark, run_kind, schedule, slot_state)
    found.filters.update({of.__name__: of for of in (*filters, state_class, without_folder)})
    found.filters.update(exact=Exact, lsn=lsn, moment=clock, number=number, size=bytes_of)
    return found
