"""A lake that an earlier version wrote is read, and a run of today goes on with it.

``2026-11-flat-modules.tar.xz`` was written by the last version before the modules moved into
packages: a copy of four tables, one per target mode, then two runs with inserts, updates, deletes
and a row that left its row filter, maintenance and a comparison.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.oracles.compare import compare_target
from tests.support.pipelines import pipeline_file
from waldelta.jobs.consume import consume
from waldelta.jobs.resync import run_resync
from waldelta.monitoring.status import read_status
from waldelta.pipeline.job import load_job
from waldelta.postgres.server_position import read_position

LAKE = Path(__file__).parents[2] / "cases/lakes/2026-11-flat-modules.tar.xz"
TABLES = ["public.orders", "public.prices", "public.notes", "public.events"]
MODES = {"public.prices": "history", "public.notes": "soft_delete", "public.events": "changelog"}
# The source as that version left it.
SOURCE = """
create table orders(
    id int primary key, customer text not null, amount numeric(10,2), at timestamptz, tags text[]);
create table prices(id int primary key, price numeric);
create table notes(id int primary key, body text);
create table events(id int primary key, kind text);
insert into orders
    select n, case n when 5 then 'moved' else 'c' || n end,
           case when n <= 3 then 99.99 else n * 1.5 end,
           '2026-01-01'::timestamptz + n * interval '1 day', array['a', 'b']
      from generate_series(1, 20) n where n not in (4, 6);
insert into orders
    values (21, 'late', 1, '2026-11-25', null), (5000, 'c6', 9, '2026-01-07', '{a,b}');
insert into prices values (1, 7), (3, 3), (4, 4), (5, 5), (6, 'NaN');
insert into notes values (2, 'x'), (3, 'n3'), (4, 'n4'), (5, 'n5'), (6, 'six');
insert into events values (2, 'k'), (3, 'k'), (4, 'k2');
"""


@pytest.fixture
def job(database, lake):
    """The pipeline that wrote the lake; its slot was on a server that is gone."""
    with tarfile.open(LAKE) as archive:
        archive.extractall(Path(lake.removeprefix("file://")), filter="data")
    database.execute(SOURCE)
    tables = [{"name": name} for name in TABLES]
    tables[0]["where"] = "id < 1000"
    pipeline = pipeline_file(
        lake,
        "shop_cdc",
        pipeline="shop",
        source={
            "conn_id": "test_source",
            "slot": "shop_cdc",
            "publications": [{"name": "shop_pub", "tables": tables}],
        },
        target={"root": lake, "tables": {name: {"mode": mode} for name, mode in MODES.items()}},
    )
    return load_job(pipeline, "today")


def rows(job, name, *columns):
    table = DeltaTable(f"{job.pipeline.target.root}/public/{name}")
    return [
        tuple(row.values()) for row in table.to_pyarrow_table(columns=list(columns)).to_pylist()
    ]


def past_prices(job):
    """The states that have ended: id, price, and the positions between which they held."""
    found = rows(job, "prices", "id", "price", "_wd_valid_from_lsn", "_wd_valid_to_lsn")
    return {state for state in found if state[-1] is not None}


@pytest.mark.soak("a lake of an earlier version")
def test_a_lake_of_an_earlier_version_is_read_and_continued(runner, database, job):
    """Its ledger, change log and targets; the source is another server's by now."""
    targets = read_status(job)["targets"]
    assert {name: targets[name]["status"] for name in targets} == dict.fromkeys(TABLES, "synced")
    assert [run.verb for run in job.ledger.runs()] == [
        "sync", "consume", "consume", "maintain", "reconcile"
    ]  # fmt: skip
    past = past_prices(job)
    assert sorted((key, price) for key, price, *_ in past) == [(1, "1"), (1, "2"), (2, "2")]
    events = rows(job, "events", "id", "_wd_op")

    server = read_position(database.connection)
    accepted = f"{server.system_identifier}/{server.timeline}"
    # Kept states hold positions: the source must be beyond them.
    database.execute("select pg_switch_wal()")
    database.execute("update prices set price = 8 where id = 1")
    assert run_resync(runner, job, accept_server=accepted).status == "succeeded"
    database.execute(
        "update orders set amount = 0 where id = 1; delete from orders where id = 2;"
        "update prices set price = 9 where id = 1; delete from notes where id = 2"
    )
    assert consume(runner, job).status == "succeeded"

    state = job.read_states()["public.orders"]
    assert compare_target(runner, job.source.conninfo, job.pipeline, state).rows == 0
    now_past = past_prices(job)
    assert past < now_past
    assert sorted((key, price) for key, price, *_ in now_past - past) == [(1, "7"), (1, "8")]
    assert sorted(rows(job, "notes", "id", "_wd_deleted")) == [
        (1, True), (2, True), (3, False), (4, False), (5, False), (6, False)
    ]  # fmt: skip
    assert set(events) <= set(rows(job, "events", "id", "_wd_op"))
