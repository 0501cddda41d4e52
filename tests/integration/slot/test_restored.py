"""A server restored to an earlier day: positions of its lost future are refused."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest

from tests.support.pipelines import bare_slot, pipeline_file
from waldelta.errors import ConsumeMismatch, SourceChanged
from waldelta.rehearsal.embedded_postgres import EmbeddedPostgres
from waldelta.slot.acknowledge import confirmed_lsn
from waldelta.stages.land.drain import drain
from waldelta.stages.land.idle_check import check_idle


@contextmanager
def connected(server: EmbeddedPostgres) -> Iterator[SimpleNamespace]:
    """What bare_slot needs of a database."""
    with psycopg.connect(server.conninfo(), autocommit=True) as connection:
        yield SimpleNamespace(name="restored", connection=connection, execute=connection.execute)


def copy_files(one: Path, other: Path) -> None:
    """All files as they are, with their owner."""
    subprocess.run(["cp", "-a", str(one), str(other)], check=True)


def test_a_restored_server_is_refused(runner, new_server, lake, monkeypatch):
    """By the end of its WAL, or, once that has grown past the lake's end again, by what it holds
    there; or by its timeline.

    System identifier and timeline of a server whose disk was put back are those of before, and the
    slot stands where it stood.
    """
    server = new_server().start()
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", server.uri())
    with connected(server) as database:
        database.execute("create table t(id int primary key, v text)")
        job = bare_slot(database, pipeline_file(lake, "restored"))
        database.execute("insert into t values (0, 'before')")
        drain(runner, job)
    server.stop()
    backup = server.folder / "backup"
    copy_files(server.data, backup)
    server.start()
    for number in (1, 2):  # in two batches: not only the last one counts
        with connected(server) as database:
            database.execute(
                "insert into t select g, 'lost' from generate_series(%s::int, %s) g",
                (number * 100, number * 100 + 9),
            )
        drain(runner, job)
    server.stop()
    shutil.rmtree(server.data)
    copy_files(backup, server.data)
    server.start()
    for verb in (check_idle, lambda job: drain(runner, job)):
        with pytest.raises(SourceChanged, match="restored to an earlier state"):
            verb(job)
    with connected(server) as database:
        database.execute("insert into t select g, 'another' from generate_series(1000, 3000) g")
        before = confirmed_lsn(database.connection, "restored")
        # Where each batch is acknowledged without a comparison, too: here the slot would forget
        # what nobody has read.
        unverified = pipeline_file(lake, "restored", options={"acknowledge": "advance"})
        for verb in (check_idle, lambda job: drain(runner, job)):
            for asked in (job, replace(job, pipeline=unverified)):
                with pytest.raises(ConsumeMismatch, match="nothing of that was consumed"):
                    verb(asked)
        assert confirmed_lsn(database.connection, "restored") == before
    server.stop()
    with (server.data / "postgresql.conf").open("a") as conf:
        conf.write("restore_command = 'false'\n")
    (server.data / "recovery.signal").touch()
    shutil.chown(server.data / "recovery.signal", server.data.owner(), server.data.group())
    server.start()
    with connected(server) as database:
        while database.execute("select pg_is_in_recovery()").fetchone()[0]:
            pass
        database.execute("checkpoint")
    with pytest.raises(
        SourceChanged, match=r"timeline 1; the connection now leads to system .* timeline 2"
    ):
        drain(runner, job)
