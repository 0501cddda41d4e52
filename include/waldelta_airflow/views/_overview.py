"""The page of all pipelines, by what they need, and the search over all that they have."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from operator import attrgetter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends

from waldelta.config import PipelineFile, dag_id_of
from waldelta.errors import stack_without_values
from waldelta.lake.ledger import now
from waldelta.monitoring.glance_cache import CachedGlance, GlanceCache
from waldelta.monitoring.overview import after_idle_check
from waldelta.monitoring.run_history import thin_out
from waldelta.pipeline.lag import Lag
from waldelta_airflow._connections import pipeline_lake
from waldelta_airflow.views import _pages as pages
from waldelta_airflow.views._access import READ_ERRORS, PageRequest, PageRequestDep, Reader, reason
from waldelta_airflow.views._headline import heals_of, joint_of
from waldelta_airflow.views._installed_pipelines import (
    PIPELINE_DAGS,
    Schedule,
    read_runs_named,
    read_schedules,
)
from waldelta_airflow.views._pictures import sparkline
from waldelta_airflow.views._render import render
from waldelta_airflow.views._situation import LATE, Situation

routes = APIRouter()
log = logging.getLogger(__name__)

State = Literal["person", "failing", "late", "warning", "unread", "running", "healthy", "setup"]
# The states in the order of the page, with their words.
STATES: dict[State, str] = {
    "person": "needs a person",
    "failing": "failing",
    "late": "late",
    "warning": "with warnings",
    "unread": "being read",
    "running": "running",
    "healthy": "healthy",
    "setup": "never ran",
}
_PER_PAGE = 30
# Up to this number of pipelines, healthy ones are shown as large as others.
_FEW = 12
_MOST_FOUND = 50
_LONGEST_TEXT = 200
# A sparkline has this many points at most.
_POINTS = 48
# A page with pipelines that are being read asks again after this many seconds.
_ASK_AGAIN_S = 2

_glances = GlanceCache(pipeline_lake)


@dataclass(frozen=True, slots=True)
class Find:
    """A search of the list of all pipelines: a part of a name, a state, the page's number."""

    q: str = ""
    state: State | None = None
    page: int = 1

    @property
    def name(self) -> str:
        """Returns the part of a name; no database takes a NUL."""
        return self.q.replace("\0", "").strip()[:_LONGEST_TEXT]

    @property
    def text(self) -> str:
        """Returns the part of a name, as names are compared with it."""
        return self.name.casefold()

    def but(self, state: State | None) -> dict[str, str]:
        """Returns the same search in another state (None: in any), as parameters of an address."""
        values = {"q": self.name, "state": state or ""}
        return {name: value for name, value in values.items() if value}


@dataclass(frozen=True)
class Card:
    """A pipeline on the page; it has no ``situation`` if it isn't read yet, or for a ``problem``.

    ``columns`` are those of its tables. ``is_current``: it isn't being read again.
    """

    name: str
    situation: Situation | None = None
    problem: str | None = None
    columns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_current: bool = True

    @cached_property
    def state(self) -> State:
        """Returns the pipeline's most urgent state: ``person`` (someone must act) before ``late``,
        ``warning`` and ``healthy``.
        """
        if self.problem is not None:
            return "person"
        if (situation := self.situation) is None:
            return "unread"
        failed = [item for item in situation.attention if item.severity == "failed"]
        if failed:
            is_lasting = any(heals_of(item, situation).split(":")[0] == "no" for item in failed)
            return "person" if is_lasting else "failing"
        if not situation.glance.is_set_up:
            return "setup"
        if situation.attention:
            return "late" if LATE & {item.kind for item in situation.attention} else "warning"
        return "running" if situation.schedule.under_way else "healthy"

    @property
    def lag(self) -> list[float]:
        """Returns the lag in seconds over the window, and now, as far as it is known."""
        if self.situation is None:
            return []
        glance, at = self.situation.glance, self.situation.at
        lag = [point.value for point in thin_out(glance.lag, _POINTS)]
        now = Lag.since(glance.upto, at).seconds
        return lag if now is None else [*lag, now]


@dataclass(frozen=True, slots=True)
class Match:
    """A table, column or run whose name has what the reader looks for, and its state as of a time.

    ``page`` is its address below the pipeline's. ``is_past``: the state says nothing of now.
    """

    pipeline: str
    name: str
    page: tuple[str, ...]
    state: str
    at: datetime | None
    is_past: bool = False


@routes.get("/")
def overview_page(request: PageRequestDep, find: Annotated[Find, Depends()]) -> str:
    """Returns the page of these pipelines by what they need most, then by name.

    It shows runs of only the DAGs that the reader may read.
    """
    at, order, reader = now(), list(STATES), request.reader
    cards = _cards(request, at)
    cards.sort(key=lambda card: (order.index(card.state), card.name))
    found = _found(cards, find, reader) if find.text else {}
    counts = Counter(card.state for card in cards)
    named = [card for card in cards if find.text in card.name.casefold()]
    listed = [card for card in named if find.state in (None, card.state)]
    turn = pages.Turning.of(find.page, listed, _PER_PAGE)
    is_unread = any(card.state == "unread" or not card.is_current for card in cards)
    return render(
        "overview.html",
        request.base,
        at,
        is_under_way=any(card.situation and card.situation.schedule.under_way for card in cards),
        refresh_s=_ASK_AGAIN_S if is_unread else None,
        count=len(cards),
        counts=counts,
        states=STATES,
        is_few=len(cards) <= _FEW,
        find=find,
        q=find.name,
        joint_of=joint_of,
        sparkline=sparkline,
        found=found,
        is_found=bool(listed or any(items for items, _ in found.values())),
        turn=turn,
    )


def _cards(request: PageRequest, at: datetime) -> list[Card]:
    pipelines = request.pipelines()
    files = [pipeline for pipeline in pipelines.values() if isinstance(pipeline, PipelineFile)]
    schedules = {file.pipeline: Schedule() for file in files} | read_schedules(files)
    glances = _glances.read(files, {name: of.active for name, of in schedules.items()}, at)
    return [
        Card(name, problem=pipeline)
        if isinstance(pipeline, str)
        else _card(request, pipeline, schedules[name], at, glances[name])
        for name, pipeline in pipelines.items()
    ]


def _card(
    request: PageRequest,
    pipeline: PipelineFile,
    schedule: Schedule,
    at: datetime,
    cached: CachedGlance,
) -> Card:
    name, err = pipeline.pipeline, cached.error
    if err is not None:
        if not isinstance(err, READ_ERRORS):
            log.error("the overview can't show pipeline %s: %s", name, stack_without_values(err))
        return Card(name, problem=f"its lake can't be read from here: {reason(err, pipeline)}")
    if cached.glance is None:
        return Card(name, is_current=False)
    # Only unfinished runs of other DAGs are shown.
    schedule = replace(schedule, dags=request.reader.dags(schedule.under_way))
    glance = after_idle_check(cached.glance, schedule.idle_checked_at)
    attention = pages.attention_of(pipeline, glance, schedule, at)
    situation = Situation(request.base, pipeline, glance, schedule, (), at, attention)
    return Card(name, situation, columns=cached.columns, is_current=cached.is_current)


def _found(cards: Iterable[Card], find: Find, reader: Reader) -> dict[str, tuple[list[Any], int]]:
    text, tables, columns = find.text, [], []
    runs: dict[tuple[str, str], tuple[str, datetime]] = {}
    cards = [card for card in cards if find.state in (None, card.state)]
    for card in cards:
        if (situation := card.situation) is None:
            continue
        for line in situation.glance.tables:
            name = line.table_name.casefold()
            page, is_past = ("table", line.table_name), situation.of_table(line).is_past
            state = (line.status, line.complete_upto, is_past)
            table = Match(card.name, line.table_name, page, *state)
            tables += [table] if text in name else []
            columns += [
                replace(table, name=column)
                for column in card.columns.get(line.table_name, ())
                # A text with a point may name table and column.
                if text in column.casefold()
                or (text in f"{name}.{column.casefold()}" and text not in name)
            ]
        for run in situation.glance.runs:
            if text in run.run_id.casefold():
                runs[card.name, run.run_id] = (run.status, run.at)
    # Airflow has older runs, and those that didn't reach the ledger.
    dags = {dag_id_of(card.name, kind): card.name for card in cards for kind in PIPELINE_DAGS}
    older = read_runs_named(find.name, dags, _MOST_FOUND, reader.may_read_dag)
    for dag_id, run_id, status, at in older:
        runs.setdefault((dags[dag_id], run_id), (status, at))
    matches = [
        Match(name, run_id, ("run", pages.ANY_VERB, run_id), status, at)
        for (name, run_id), (status, at) in runs.items()
    ]
    latest = sorted(matches, key=attrgetter("at"), reverse=True)
    return {
        kind: (list(items[:_MOST_FOUND]), len(items))
        for kind, items in (("tables", tables), ("columns", columns), ("runs", latest))
    }
