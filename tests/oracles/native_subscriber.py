"""PostgreSQL's own subscription as an oracle: a second database with the same publications."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import psycopg
from psycopg import sql

from tests.support.waiting import wait_until
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres


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
            lacking = "select from pg_subscription_rel where srsubstate <> 'r'"
            wait_until(lambda: not subscriber.execute(lacking).fetchall())
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


def wait_until_caught_up(database, slot: str) -> None:
    """Return once the subscriber has everything that is committed now."""
    ((now,),) = database.execute("select pg_current_wal_lsn()::text")
    confirmed = (
        "select confirmed_flush_lsn >= %s::pg_lsn from pg_replication_slots where slot_name = %s"
    )
    wait_until(lambda: database.execute(confirmed, (now, slot)) == [(True,)])
