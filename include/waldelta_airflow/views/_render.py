"""Renders plain values as pages: the templates, and the headers of every response."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import cache, partial
from typing import Any
from urllib.parse import quote

from fastapi import Request, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from waldelta.control_characters import visible
from waldelta.lake.ledger import now
from waldelta.stages.check.reports.page import POLICY
from waldelta_airflow.settings import URL_PREFIX
from waldelta_airflow.views._formats import FILTERS, MARKS, ago

# No external resources, no scripts, and no framing by other sites. Values come from the source, and
# must not run code with the reader's login.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; img-src 'self' data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "private, no-store",
}
# The list of reports contains its own style.
INDEX_HEADERS = HEADERS | {"Content-Security-Policy": f"{POLICY}; frame-ancestors 'self'"}
# In a sandbox neither a script nor a refresh in a report takes effect, also in one written by an
# earlier version.
REPORT_HEADERS = HEADERS | {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'self'; sandbox"
    )
}
# A page with a button may submit forms only to these pages.
FORM_HEADERS = HEADERS | {
    "Content-Security-Policy": (
        HEADERS["Content-Security-Policy"].replace("form-action 'none'", "form-action 'self'")
    )
}
STYLE_HEADERS = {"Cache-Control": "private, max-age=300", "X-Content-Type-Options": "nosniff"}
# The browser reloads a page with an unfinished run after this many seconds, without a script.
_REFRESH_S = 10


async def add_headers(
    request: Request, call_next: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Respond with HEADERS, also where FastAPI makes the response; a page's own headers stay."""
    response = await call_next(request)
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def url(base: str, *parts: str, **query: str | int) -> str:
    """Returns the address of a page; ``base`` is the application's mount point.

    Each part is quoted as a whole.
    """
    path = "/".join([base, *(quote(part, safe="") for part in parts)]) if parts else f"{base}/"
    asked = "&".join(f"{name}={quote(str(value))}" for name, value in query.items())
    return f"{path}?{asked}" if asked else path


def airflow_url(base: str, *parts: str) -> str:
    """Returns the address of one of Airflow's own pages, below which the application is mounted."""
    return "/".join([base.removesuffix(URL_PREFIX), *(quote(part, safe="") for part in parts)])


def render(
    template: str,
    base: str,
    at: datetime | None = None,
    *,
    is_under_way: bool = False,
    **values: Any,
) -> str:
    """Returns a page with every value escaped; with something unfinished it refreshes itself."""
    moment = at or now()
    values.setdefault("here", "")
    return (
        _templates()
        .get_template(template)
        .render(
            url=partial(url, base),
            airflow=partial(airflow_url, base),
            now=moment,
            ago=partial(ago, now=moment),
            marks=MARKS,
            refresh_s=_REFRESH_S if is_under_way else None,
            **values,
        )
    )


class Exact(str):
    """A value that a form sends back, which must stay as it is."""

    __slots__ = ()


def _shown(value: object) -> str:
    """Return what a page shows of a value: names from the source with control characters as
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
    found.filters.update(FILTERS, exact=Exact)
    return found
