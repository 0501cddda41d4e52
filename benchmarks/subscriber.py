"""PostgreSQL's own subscription as a baseline, in a server of its own."""

from __future__ import annotations

from collections.abc import Callable

import psycopg
import tenacity

from benchmarks.baselines import Baseline
from benchmarks.place import PUBLICATION, Place
from benchmarks.stack import database
from benchmarks.workloads import NATIVE

WAIT_S = 3600


class Subscriber(Baseline):
    """PostgreSQL's own subscription, in a server of its own."""

    name = NATIVE

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._scope = database(place.stack.subscriber, place.name)
        self._conninfo = self._scope.__enter__()
        self._subscribed = False
        self._run(place.source.create)

    def prepare(self) -> None:
        """Subscribe, copy, and pause."""
        self.copy()
        self._pause()

    def copy(self) -> dict[str, float] | None:
        if self._subscribed:
            self._run(f"drop subscription {self.place.name}; truncate {', '.join(self.place.source.tables)}")
        # The slot is named after the workload; one cluster to another, so creating it waits for nobody.
        self._run(f"create subscription {self.place.name} connection '{self.place.conninfo}' publication {PUBLICATION}")
        self._subscribed = True
        self._wait("select not exists (select from pg_subscription_rel where srsubstate <> 'r')", self._run)

    def apply(self) -> dict[str, float] | None:
        end = self.place.sql("select pg_current_wal_lsn()::text")[0][0]
        self._run(f"alter subscription {self.place.name} enable")
        confirmed = (
            f"select confirmed_flush_lsn >= '{end}' from pg_replication_slots where slot_name = '{self.place.name}'"
        )
        self._wait(confirmed, self.place.sql)
        self._pause()

    def close(self) -> None:
        if self._subscribed:
            self._run(f"drop subscription {self.place.name}")
        self._scope.__exit__(None, None, None)

    def _pause(self) -> None:
        self._run(f"alter subscription {self.place.name} disable")
        self._wait(f"select not active from pg_replication_slots where slot_name = '{self.place.name}'", self.place.sql)

    def _run(self, statements: str) -> list[tuple]:
        rows: list[tuple] = []
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            # One by one: dropping a subscription can't be part of an implicit transaction.
            for statement in [statements] if "$$" in statements else statements.split(";"):
                cursor = connection.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def _wait(self, query: str, run: Callable[[str], list[tuple]]) -> None:
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda done: not done),
            stop=tenacity.stop_after_delay(WAIT_S),
            wait=tenacity.wait_fixed(0.02),
        )
        retry(lambda: run(query)[0][0])
