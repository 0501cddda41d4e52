"""PostgreSQL's own subscription as an oracle: a second database of the same cluster, fed by the same publication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import tenacity
from psycopg import sql

from demo.embedded_postgres import EmbeddedPostgres


@contextmanager
def native_subscriber(
    postgres: EmbeddedPostgres, database, publication: str, create: Callable[[psycopg.Connection], None]
) -> Iterator[tuple[psycopg.Connection, str]]:
    """A connection to the subscriber, whose empty tables ``create`` makes, and its slot; rows written from now on arrive."""
    name, slot = f"{database.name}_sub", f"{database.name}_sub"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (slot,))
    database.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with psycopg.connect(postgres.conninfo(name), autocommit=True) as subscriber:
        create(subscriber)
        subscribe = sql.SQL(
            "create subscription {} connection {} publication {} with (create_slot = false, slot_name = {}, copy_data = false)"
        )
        subscriber.execute(
            subscribe.format(sql.Identifier(name), database.conninfo, sql.Identifier(publication), sql.Literal(slot))
        )
        try:
            yield subscriber, slot
        finally:
            subscriber.execute(sql.SQL("alter subscription {} disable").format(sql.Identifier(name)))
            subscriber.execute(sql.SQL("alter subscription {} set (slot_name = none)").format(sql.Identifier(name)))
            subscriber.execute(sql.SQL("drop subscription {}").format(sql.Identifier(name)))
    database.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@tenacity.retry(
    retry=tenacity.retry_if_result(lambda done: not done),
    stop=tenacity.stop_after_delay(60),
    wait=tenacity.wait_fixed(0.05),
)
def _confirmed(database, slot: str, lsn: str) -> bool:
    query = "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s"
    return database.execute(query, (lsn, slot))[0][0]


def wait_until_caught_up(database, slot: str) -> None:
    """Return once the subscriber has everything that is committed now."""
    _confirmed(database, slot, database.execute("select pg_current_wal_lsn()::text")[0][0])
