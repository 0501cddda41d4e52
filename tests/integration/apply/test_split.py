"""Changes of many tables that lie mixed in the change log: read once, applied to each."""

import pytest

import waldelta.changes.stage.stage as split_module
import waldelta.pipeline.advisory_locks as locks_module
from tests.oracles.target_rows import read_target
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.lake import local_path
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.usefixtures("compiled")

TABLES = [f"t{n}" for n in range(8)]
LARGE = "t0"


@pytest.fixture
def job(database, lake, runner):
    for table in TABLES:
        database.execute(f"create table {table}(id int primary key, v text)")
        database.execute(f"insert into {table} select g, 'old' from generate_series(1, 300) g")
    job = bare_job(database, lake, [f"public.{table}" for table in TABLES])
    sync(runner, job)
    return job


def write_mixed(database):
    """Changes of all tables in turn, in each 100 of some and 1,500 of one."""
    database.execute(f"""
        do $$ begin
            for i in 1..20 loop
                {
        "".join(
            f"insert into {table} select 1000 * i + g, 'new'"
            f" from generate_series(1, {70 if table == LARGE else 2}) g;"
            f"update {table} set v = v || i where id = i; delete from {table} where id = 100 + i;"
            f"update {table} set id = -i where id = 200 + i;"
            for table in TABLES
        )
    }
                commit;
            end loop;
        end $$""")


def test_many_tables_mixed(runner, database, job, monkeypatch):
    """Few changes are applied here, many by tasks, all from one rewrite of the range by table."""
    made = []

    def split(*given):
        made.append(original(*given))
        return made[-1]

    original = split_module.split
    monkeypatch.setattr(split_module, "split", split)
    monkeypatch.setattr("waldelta.lake.changelog.batch_range.MOST_DRIVER_ROWS", 1000)
    sessions, connect = [], locks_module.connect
    monkeypatch.setattr(
        locks_module, "connect", lambda *given: sessions.append(given) or connect(*given)
    )
    write_mixed(database)
    result = consume(runner, job)
    assert len(made) == 1
    assert len(sessions) == 2  # One holds the slot's lock, the other one table's after the other's.
    assert all(result.tables[f"public.{table}"].changed for table in TABLES)
    for table in TABLES:
        found = read_target(job.lake.target(f"public.{table}").uri, "id", "v")
        expected = database.execute(f"select id, v from {table}")
        assert sorted(map(tuple, found)) == sorted(map(tuple, expected)), table
    assert list((local_path(job.pipeline.target.root) / "_waldelta" / "staging").glob("*")) == []
