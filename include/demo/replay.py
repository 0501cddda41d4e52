"""Replays the year 2013 as it happened into the demo's source database, hour by hour.

One simulated hour is one transaction: flights move to another airport or past the month's end, are
cancelled (DELETE), added again (INSERT), depart and land (UPDATE), and the hour's weather is
observed (INSERT). On the first of each month, a transaction over several tables updates the fleet.
In August, the weather is truncated and partly filled again. The same flights and seed always
produce the same year.
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
WEATHER_KEPT_FROM = 4  # After the truncate, the months from April on are filled in again.

Operations = Counter[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Slice:
    """A range of simulated hours: first hour inclusive, last exclusive."""

    first: datetime
    last: datetime

    @property
    def name(self) -> str:
        """The displayed name."""
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
    """Decide what happens to every flight and when; changes nothing that is published."""
    with psycopg.connect(conninfo) as connection:
        connection.execute("drop table if exists replay.plan")
        connection.execute(PLAN, {"seed": seed})
        connection.execute(INDEXES)


def plan_slices(count: int) -> list[Slice]:
    """Divide the year into ``count`` equal slices.

    It begins on the last day of 2012, because flights of 1 January move then.
    """
    first, last = datetime(2012, 12, 31, tzinfo=UTC), datetime(2014, 1, 4, tzinfo=UTC)
    hours = int((last - first) / timedelta(hours=1))
    bounds = [first + timedelta(hours=hours * n // count) for n in range(count + 1)]
    return [Slice(a, b) for a, b in pairwise(bounds)]


def replay(
    conninfo: str, part: Slice, progress: Callable[[int], None] = lambda _: None
) -> ReplayedQuarter:
    """Replay one slice, one transaction per simulated hour.

    ``progress`` gets the number of rows changed so far, after each day.
    """
    done = ReplayedQuarter()
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("set synchronous_commit = off")
        # One generic plan fits any hour; planning each one would cost more than changing the rows.
        connection.execute("set plan_cache_mode = force_generic_plan")
        connection.prepare_threshold = 1
        busy = _busy_hours(connection, part)
        for day in _days(part):
            _replay_day(connection, day, busy, done)
            progress(done.changes)
        # A slot decodes only WAL that was flushed to disk.
        connection.execute("set synchronous_commit = on")
        connection.execute("select pg_logical_emit_message(true, 'demo', '')")
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


def _events(
    hour: datetime, busy: list[set[datetime]]
) -> list[tuple[Step, tuple[Any, ...] | dict[str, Any]]]:
    """Returns the statements of an hour with their parameters."""
    events: list[tuple[Step, tuple[Any, ...] | dict[str, Any]]] = []
    if hour.year == 2013 and hour.day == 1 and hour.hour == 0:
        events += [(step, {"month": hour.month}) for step in FLEET]
    if hour == WEATHER_CUT:
        events += [(step, {"from_month": WEATHER_KEPT_FROM, "now": hour}) for step in CUT]
    events += [(step, (hour,)) for step, hours in zip(STEPS, busy, strict=True) if hour in hours]
    return events


def _busy_hours(connection: psycopg.Connection, part: Slice) -> list[set[datetime]]:
    """Returns, for each step, the hours of the slice in which it changes rows."""
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
