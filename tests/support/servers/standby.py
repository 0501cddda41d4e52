"""Standbys that keep the primary's slots, and restored and upgraded servers."""

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg
from deltalake import DeltaTable

from tests.support.fixtures.postgres import new_postgres
from tests.support.pipelines import pipeline_file
from tests.support.waiting import wait_until
from waldelta.jobs import Pipeline
from waldelta.pipeline.run_result import RunFailed
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres
from waldelta.stages.land.idle_check import check_idle

SETTINGS = {"fsync": "off", "shared_buffers": "32MB"}


@contextmanager
def servers(version: int, count: int = 2) -> Iterator[list[EmbeddedPostgres]]:
    """Clusters that aren't made yet, in folders of their own; gone afterwards."""
    with ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(new_postgres(version, dict(SETTINGS)))
            stack.callback(made[-1].delete)
        yield made


def ask(server: EmbeddedPostgres, statement: str, dbname: str = "postgres") -> list[tuple]:
    """Run SQL as superuser and give its rows, if any."""
    with psycopg.connect(server.conninfo(dbname), autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


def follow(standby: EmbeddedPostgres, primary: EmbeddedPostgres, slot: str = "standby") -> None:
    """Make a standby that streams from the primary, through a physical slot, and start it."""
    standby._make_readable()
    shutil.copy(primary.folder / "password", standby.folder / "password")
    options = f"-D {standby.data} -R -C -S {slot} -c fast".split()
    standby._run("pg_basebackup", "-d", primary.conninfo(), *options)
    configure(standby, hot_standby_feedback="on")
    standby.start()


def configure(server: EmbeddedPostgres, **settings: str) -> None:
    """Settings for the next start."""
    with (server.data / "postgresql.conf").open("a") as conf:
        conf.writelines(f"{name} = '{value}'\n" for name, value in settings.items())


def keep_slot(standby: EmbeddedPostgres, primary: EmbeddedPostgres, pipeline: Pipeline) -> None:
    """Let the standby take over where the primary's slot stands, until it keeps it for good.

    PostgreSQL keeps none that needs older catalogs than the standby has: the slot has to pass
    records of running transactions.
    """
    slot = pipeline.file.source.slot
    kept = (
        "select synced and not temporary and invalidation_reason is null from pg_replication_slots"
        f" where slot_name = '{slot}'"
    )

    def synchronized() -> bool:
        ask(primary, "select pg_log_standby_snapshot()")
        ask(primary, "select pg_switch_wal()")  # an idle slot is moved when that frees a file
        check_idle(pipeline.job())
        catch_up(standby, primary)
        ask(standby, "select pg_sync_replication_slots()")
        return ask(standby, kept) == [(True,)]

    wait_until(synchronized)


def catch_up(standby: EmbeddedPostgres, primary: EmbeddedPostgres) -> None:
    """Wait until the standby has replayed all that the primary has written."""
    # A record of its own: where a file of WAL ends is reached by no record. Before PostgreSQL 17
    # only a commit flushes it, whose transaction keeps a failover slot, which is newer, from being
    # synchronized.
    message = "false, 'test', 'here', true" if primary.version >= 17 else "true, 'test', 'here'"
    ((written,),) = ask(primary, f"select pg_logical_emit_message({message})::text")

    def replayed() -> bool:
        return ask(standby, f"select pg_last_wal_replay_lsn() >= '{written}'::pg_lsn") == [(True,)]

    wait_until(replayed)


def promote(standby: EmbeddedPostgres) -> None:
    """Make it the primary of a new timeline."""
    standby._run("pg_ctl", "promote", "-w", "-D", str(standby.data))


# The least that a pipeline's role needs; t has a key, u shows by duplicates what came twice.
SCHEMA = """
    create role app login replication password 'p';
    create schema app authorization app;
    grant create on database postgres to app;
    set role app;
    create table app.t (id int primary key, v text);
    create table app.u (v text);
    insert into app.t values (1, 'before');
    insert into app.u values ('before');
"""


def pipeline_on(lake: str, **source) -> Pipeline:
    tables = [{"name": "app.t"}, {"name": "app.u"}]
    publication = {"name": "p", "tables": tables, "publish": ["insert", "truncate"]}
    own = {"conn_id": "test_source", "slot": "flights", "publications": [publication], **source}
    return Pipeline(pipeline_file(lake, "flights", source=own))


def held(lake: str) -> dict[str, list]:
    """What the targets hold, duplicates included."""
    return {
        name: sorted(
            DeltaTable(f"{lake}/app/{name}").to_pyarrow_table(columns=["v"])["v"].to_pylist()
        )
        for name in "tu"
    }


def there(server) -> dict[str, list]:
    """What the source's tables hold."""
    return {
        name: [v for (v,) in ask(server, f'select v from app.{name} order by v collate "C"')]
        for name in "tu"
    }


def insert(server, number: int, v: str) -> None:
    ask(server, f"insert into app.t values ({number}, '{v}'); insert into app.u values ('{v}')")


def accepted_resync(runner, pipeline) -> None:
    """A resync, accepting the server that the first one's refusal names."""
    try:
        pipeline.resync(runner)
    except RunFailed as err:
        found = re.search(r"--accept-server (\d+/\d+)", str(err))
        if found is None:
            raise
        pipeline.resync(runner, accept_server=found[1])
