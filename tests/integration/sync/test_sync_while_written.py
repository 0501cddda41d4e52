"""Copies under writers at full speed: two at once, one anew, while runs land and apply."""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Event

import psycopg
import pytest

from tests.oracles.compare import compare_target
from tests.support.pipelines import bare_job
from tests.support.seeds import chosen_seed
from waldelta.background import run_concurrently
from waldelta.jobs.consume import consume
from waldelta.pipeline.job import load_job
from waldelta.stages.sync.sync import sync

OLD, NEW, KEYLESS = TABLES = ("public.old", "public.new", "public.keyless")
ROWS, WRITERS = 20_000, 3
# Each of so many rows, spread over all chunks, inserted ones included; keys move, too.
STATEMENTS = (
    (
        "insert into {t} select (random() * 1e9)::int + 100000, 'new' from generate_series(1, 3) on"
        " conflict do nothing"
    ),
    "update {t} set v = v || '.' where id between {k} and {k} + 3",
    "update {t} set id = -id where id = {k} and not exists (select from {t} where id = -{k})",
    "delete from {t} where id = {k} + 5",
    "savepoint s; update {t} set v = 'undone' where id = {k}; rollback to s",
)


def writer(database, seed: int):
    """Commits random transactions, one after the other, until it is told to end."""

    def write(ended: Event) -> None:
        rng = random.Random(seed)
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            while not ended.is_set():
                done = [
                    rng.choice(STATEMENTS).format(t=rng.choice(TABLES), k=rng.randrange(ROWS))
                    for _ in range(rng.randrange(1, 4))
                ]
                try:
                    connection.execute(f"begin; {'; '.join(done)}; commit".encode())
                except psycopg.errors.DeadlockDetected:
                    connection.rollback()

    return write


@pytest.fixture
def job(database, lake):
    """A table that is copied and fed, and two that were never copied, one of them without a key."""
    for table in TABLES:
        key = "" if table == KEYLESS else "primary key"
        database.execute(f"create table {table} (id int {key}, v text)".encode())
        database.execute(
            f"insert into {table} select g, repeat('x', 100)"
            f" from generate_series(1, {ROWS}) g".encode()
        )
    database.execute("create index on keyless (id)")
    database.execute("alter table keyless replica identity full")
    return bare_job(database, lake, list(TABLES))


def test_each_change_is_in_the_target_once(runner, database, job):
    """Neither lost between copy and stream nor applied on top of a copy that had it."""
    seed = chosen_seed()
    sync(runner, job, [OLD])

    def run(name: str):
        return load_job(job.pipeline, name)

    with ThreadPoolExecutor(2) as pool:
        with ExitStack() as writers:
            for number in range(WRITERS):
                writers.enter_context(
                    run_concurrently(writer(database, seed + number), f"writer {number}")
                )
            copies = [
                pool.submit(
                    sync,
                    writers.enter_context(runner.sibling(number)),
                    run(f"sync {names}"),
                    names,
                    "a test",
                )
                for number, names in enumerate(([NEW, KEYLESS], [OLD]))
            ]
            runs = 0
            while not all(copy.done() for copy in copies) or runs < 2:
                runs += 1
                assert consume(runner, run(f"run {runs}")).landed.changes
        assert [len(copy.result()) for copy in copies] == [2, 1]
    consume(runner, run("last"))
    for state in job.read_states().values():
        difference = compare_target(runner, job.source.conninfo, job.pipeline, state)
        assert difference.rows == 0, (f"WALDELTA_SEED={seed}", runs, difference)
        assert state.rows
