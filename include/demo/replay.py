"""The year 2013 as it happened, played into the demo's source database hour by hour.

One simulated hour is one transaction: flights move to another airport or past the month's end, are
cancelled (DELETE), put on again (INSERT), depart and land (UPDATE), and the hour's weather is
observed (INSERT). On the first of each month the fleet is looked after in a transaction over
several tables; in August the weather is cut and partly filled again. The same flights and seed
always make the same year.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import psycopg

from demo.replay_steps import CUT, FLEET, INDEXES, PLAN, STEPS, Step

SEED = 2013
WEATHER_CUT = datetime(2013, 8, 1, tzinfo=UTC)
WEATHER_KEPT_FROM = 4  # after the cut, the months from April on are filled in again

Operations = Counter[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Slice:
    """A stretch of simulated hours: first hour inclusive, last exclusive."""

    first: datetime
    last: datetime

    @property
    def name(self) -> str:
        """How the slice is shown."""
        return f"{self.first:%d %b} – {self.last - timedelta(hours=1):%d %b}"


@dataclass
class ReplayedQuarter:
    """What a slice did: rows by table and operation, and transactions."""

    operations: Operations = field(default_factory=Counter)
    transactions: int = 0

    @property
    def changes(self) -> int:
        """Changed rows; a TRUNCATE counts as one."""
        return self.operations.total()


def prepare(conninfo: str, seed: int = SEED) -> None:
    """Decide what happens to every flight and when; nothing published is touched."""
    with psycopg.connect(conninfo) as connection:
        connection.execute("drop table if exists replay.plan")
        connection.execute(PLAN, {"seed": seed})
        connection.execute(INDEXES)


def plan_slices(count: int) -> list[Slice]:
    """The year, from the last day of 2012 on (flights of 1 January move then), cut into ``count``
    equal slices.
    """
    first, last = datetime(2012, 12, 31, tzinfo=UTC), datetime(2014, 1, 4, tzinfo=UTC)
    hours = int((last - first) / timedelta(hours=1))
    bounds = [first + timedelta(hours=hours * n // count) for n in range(count + 1)]
    return [Slice(a, b) for a, b in pairwise(bounds)]


def replay(
    conninfo: str, part: Slice, progress: Callable[[int], None] = lambda _: None
) -> ReplayedQuarter:
    """Play one slice, one transaction per simulated hour; ``progress`` gets the rows changed so
    far, day by day.
    """
    done = ReplayedQuarter()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        # A plan that fits any hour; made anew for each one, planning would cost more than the rows.
        connection.execute("set plan_cache_mode = force_generic_plan")
        connection.prepare_threshold = 1
        busy = _busy_hours(connection, part)
        for day in _days(part):
            _replay_day(connection, day, busy, done)
            progress(done.changes)
        _flush(connection)
    return done


def _replay_day(
    connection: psycopg.Connection,
    hours: list[datetime],
    busy: list[set[datetime]],
    done: ReplayedQuarter,
) -> None:
    sent: list[tuple[Step, psycopg.Cursor]] = []
    with connection.pipeline():
        for hour in hours:
            events = _events(hour, busy)
            if not events:
                continue
            with connection.transaction():
                for step, parameters in events:
                    sent.append((step, connection.cursor().execute(step.statement, parameters)))
            done.transactions += 1
    for step, cursor in sent:
        done.operations[step.table, step.operation] += (
            1 if step.operation == "truncate" else cursor.rowcount
        )


def _flush(connection: psycopg.Connection) -> None:
    """Have everything that was committed written out: only then a slot decodes it."""
    connection.execute("set synchronous_commit = on")
    connection.execute("select pg_logical_emit_message(true, 'demo', '')")


def _events(
    hour: datetime, busy: list[set[datetime]]
) -> list[tuple[Step, tuple[Any, ...] | dict[str, Any]]]:
    """The statements of an hour with their parameters."""
    events: list[tuple[Step, tuple[Any, ...] | dict[str, Any]]] = []
    if hour.year == 2013 and hour.day == 1 and hour.hour == 0:
        events += [(step, {"month": hour.month}) for step in FLEET]
    if hour == WEATHER_CUT:
        events += [(step, {"from_month": WEATHER_KEPT_FROM, "now": hour}) for step in CUT]
    events += [(step, (hour,)) for step, hours in zip(STEPS, busy, strict=True) if hour in hours]
    return events


def _busy_hours(connection: psycopg.Connection, part: Slice) -> list[set[datetime]]:
    """For each step the hours of the slice in which it has something to do."""
    busy = []
    for step in STEPS:
        rows = connection.execute(step.hours).fetchall()
        busy.append(
            {hour for (hour,) in rows if hour is not None and part.first <= hour < part.last}
        )
    return busy


def _days(part: Slice) -> Iterator[list[datetime]]:
    hour = part.first
    while hour < part.last:
        day = [hour + timedelta(hours=n) for n in range(24)]
        yield [h for h in day if h < part.last]
        hour += timedelta(hours=24)
