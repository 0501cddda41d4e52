"""PostgreSQL's own subscription as a baseline, in its own server."""

from __future__ import annotations

import psycopg
import tenacity

from benchmarks.baselines import Baseline
from benchmarks.place import PUBLICATION, Place
from benchmarks.stack import database
from benchmarks.workloads import NATIVE

WAIT_S = 3600


class Subscriber(Baseline):
    """PostgreSQL's own subscription, in its own server."""

    name = NATIVE

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._scope = database(place.stack.subscriber, place.name)
        self._conninfo = self._scope.__enter__()
        self._subscribed = self._streams = False
        self._run(place.source.create)

    def prepare(self) -> None:
        """Subscribe, copy, and pause."""
        self.copy()
        self._streams = True
        self.settle()

    def copy(self) -> dict[str, float] | None:
        # The slot is named after the workload. It is on another cluster, so creating it doesn't
        # wait for this transaction.
        self._run(
            f"create subscription {self.place.name} connection '{self.place.conninfo}' publication"
            f" {PUBLICATION}"
        )
        self._subscribed = True
        self._wait(
            self._conninfo,
            "select not exists (select from pg_subscription_rel where srsubstate <> 'r')",
        )

    def apply(self) -> dict[str, float] | None:
        end = self.place.sql("select pg_current_wal_lsn()::text")[0][0]
        self._run(f"alter subscription {self.place.name} enable")
        self._wait(self.place.conninfo, f"select confirmed_flush_lsn >= '{end}' from {self._slot}")

    def settle(self) -> None:
        """Pause while the next backlog is written, or truncate the tables for the next copy."""
        if self._streams:
            self._run(f"alter subscription {self.place.name} disable")
            self._wait(self.place.conninfo, f"select not active from {self._slot}")
        else:
            self._run(
                f"drop subscription {self.place.name}; truncate"
                f" {', '.join(self.place.source.tables)}"
            )
            self._subscribed = False

    def verify(self) -> None:
        """Raise RuntimeError where the subscriber's tables differ from the source's."""
        for table in self.place.source.tables:
            query = f"select count(*), sum(hashtextextended(t::text, 0)) from {table} t"
            with psycopg.connect(self._conninfo) as connection:
                here = connection.execute(query.encode()).fetchone()
            if [here] != (there := self.place.sql(query)):
                raise RuntimeError(
                    f"the native subscriber's {table} (rows, checksum) is {here}, the source's"
                    f" {there[0]}"
                )

    def close(self) -> None:
        if self._subscribed:
            self._run(f"drop subscription {self.place.name}")
        self._scope.__exit__(None, None, None)

    @property
    def _slot(self) -> str:
        return f"pg_replication_slots where slot_name = '{self.place.name}'"

    def _run(self, statements: str) -> None:
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            # One by one: dropping a subscription can't be part of an implicit transaction.
            for statement in [statements] if "$$" in statements else statements.split(";"):
                connection.execute(statement.encode())

    @staticmethod
    def _wait(conninfo: str, query: str) -> None:
        """Poll until the condition is true, over one connection, since new connections cost the
        source CPU.
        """
        retry = tenacity.Retrying(
            retry=tenacity.retry_if_result(lambda done: not done),
            stop=tenacity.stop_after_delay(WAIT_S),
            wait=tenacity.wait_fixed(0.02),
        )
        with psycopg.connect(conninfo, autocommit=True) as connection:
            retry(lambda: connection.execute(query.encode()).fetchone()[0])
