"""PostgreSQL's own subscription as an oracle: a second database with the same publications."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psycopg
import tenacity
from psycopg import sql

from demo.embedded_postgres import EmbeddedPostgres


@contextmanager
def native_subscriber(
    postgres: EmbeddedPostgres,
    database,
    publications: Sequence[str],
    create: Callable[[psycopg.Connection], None],
    *,
    copy_data: bool = False,
) -> Iterator[tuple[psycopg.Connection, str]]:
    """A connection to the subscriber, whose tables ``create`` makes, and its slot."""
    name = f"{database.name}_native"
    database.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (name,))
    database.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
    with psycopg.connect(postgres.conninfo(name), autocommit=True) as subscriber:
        create(subscriber)
        options = sql.SQL("create_slot = false, slot_name = {}, copy_data = {}").format(
            sql.Literal(name), sql.Literal(copy_data)
        )
        listed = sql.SQL(", ").join(map(sql.Identifier, publications))
        subscriber.execute(
            sql.SQL("create subscription {} connection {} publication {} with ({})").format(
                sql.Identifier(name), database.conninfo, listed, options
            )
        )
        try:
            _wait_until_copied(subscriber)
            yield subscriber, name
        finally:
            subscriber.execute(
                sql.SQL("alter subscription {} disable").format(sql.Identifier(name))
            )
            subscriber.execute(
                sql.SQL("alter subscription {} set (slot_name = none)").format(sql.Identifier(name))
            )
            subscriber.execute(sql.SQL("drop subscription {}").format(sql.Identifier(name)))
    database.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))


@tenacity.retry(
    retry=tenacity.retry_if_result(lambda done: not done),
    stop=tenacity.stop_after_delay(120),
    wait=tenacity.wait_fixed(0.05),
)
def _wait_until_copied(subscriber: psycopg.Connection) -> bool:
    (waiting,) = subscriber.execute(
        "select count(*) from pg_subscription_rel where srsubstate <> 'r'"
    ).fetchone()
    return waiting == 0


@tenacity.retry(
    retry=tenacity.retry_if_result(lambda done: not done),
    stop=tenacity.stop_after_delay(60),
    wait=tenacity.wait_fixed(0.05),
)
def _confirmed(database, slot: str, lsn: str) -> bool:
    query = (
        "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s"
    )
    return database.execute(query, (lsn, slot))[0][0]


def wait_until_caught_up(database, slot: str) -> None:
    """Return once the subscriber has everything that is committed now."""
    _confirmed(database, slot, database.execute("select pg_current_wal_lsn()::text")[0][0])
