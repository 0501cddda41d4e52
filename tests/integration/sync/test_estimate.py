"""The estimate of check: close to what a copy has, only where one is due, never an error."""

import pytest

from tests.support.pipelines import job_of, pipeline_file
from tests.support.servers.roles import connect_as, new_role, own_everything
from waldelta.jobs import Pipeline
from waldelta.lake.ledger import SYNCED, TableState, now

ROWS = 60_000
TABLES = """
create table public.orders (id int, region text, note text, primary key (id, region));
insert into public.orders
  select n, (array['EU', 'US', 'APAC'])[1 + n % 3], md5(n::text) from generate_series(1, 60000) n;
create table public.docs (id int primary key, body text);
alter table public.docs alter body set storage external;
insert into public.docs select n, repeat(md5(n::text), 200) from generate_series(1, 500) n;
create table public.days (id int, day date, primary key (day, id)) partition by range (day);
create table public.days_1 partition of public.days
  for values from ('2025-01-01') to ('2026-01-01');
create table public.days_2 partition of public.days
  for values from ('2026-01-01') to ('2027-01-01');
insert into public.days select n, date '2025-12-31' + n % 2 from generate_series(1, 20000) n;
create table public.nothing (id int primary key);
"""


@pytest.fixture
def estimate(database, lake, monkeypatch):
    """Gives what check estimates for a pipeline file's tables, as their owner."""
    database.execute(TABLES)
    slot = f"s_{database.name}"

    def checked(*entries, **overrides):
        tables = [{"name": e} if isinstance(e, str) else e for e in entries]
        publication = {"name": "p", "tables": tables, "publish_via_partition_root": True}
        source = {"conn_id": "test_source", "slot": slot, "publications": [publication]}
        file = pipeline_file(lake, slot, **{"source": source} | overrides)
        return Pipeline(file).check()

    with new_role(database, "owner") as owner:
        own_everything(database, owner)
        connect_as(monkeypatch, database, owner)
        yield checked


@pytest.mark.parametrize(
    "entry, rows",
    [
        ("public.orders", ROWS),
        ({"name": "public.orders", "where": "region = 'EU'"}, ROWS // 3),
        ({"name": "public.orders", "where": "id <= 30000"}, ROWS // 2),
        ({"name": "public.docs", "columns": ["id"]}, 500),
        ("public.days", 20_000),
        ("public.nothing", 0),
    ],
)
def test_rows_are_those_that_the_filters_let_through(estimate, entry, rows):
    """A sample of such small tables reads them whole."""
    found = estimate(entry).estimate
    assert found.tables == 1
    assert found.rows == pytest.approx(rows, rel=0.02, abs=1)


def test_a_targets_own_filter_counts_too(estimate):
    target = {"tables": {"public.orders": {"where": "region = 'EU'"}}}
    plan = estimate("public.orders", target={"root": "file:///tmp/none"} | target)
    assert plan.problems == ()
    assert plan.estimate.rows == ROWS // 3


def test_a_column_list_saves_bytes_in_the_lake(estimate):
    whole, few = (
        estimate({"name": "public.docs"} | columns).estimate
        for columns in ({}, {"columns": ["id"]})
    )
    assert few.lake_bytes < whole.lake_bytes
    assert whole.source_bytes > 500 * 6400


def test_a_plan_ends_with_the_estimate(estimate):
    text = estimate("public.orders", "public.docs").describe()
    *_, head, amount, time, wal, cost = text.splitlines()
    assert head == "initial copy, estimated:"
    assert amount.startswith("  - 2 tables, about 60,500 rows: reads ")
    assert "sample: public.orders for" in time or "sample: public.docs for" in time
    # A loaded machine takes more than a second for the sample, which then has a rate.
    assert "max_slot_wal_keep_size: 1.0 TB" in wal or "too short for a rate" in wal
    assert "snapshots that hold vacuum back" in cost


def test_tables_that_have_a_copy_arent_estimated(estimate, database, lake):
    """Neither are those that are never copied."""
    pipeline = Pipeline(estimated_file(database, lake))
    pipeline.setup()
    job = job_of(pipeline.file, database.conninfo)
    life = job.read_identity().incarnation
    state = TableState(now(), "run", "public.orders", 1, SYNCED, incarnation=life)
    job.ledger.append_state(state, None)
    assert pipeline.check().estimate.tables == 1
    pipeline.teardown()
    target = {"root": lake, "tables": {"public.orders": {"copy": False}}}
    assert estimate("public.orders", target=target).estimate is None


def estimated_file(database, lake):
    return pipeline_file(lake, f"s_{database.name}", ["public.orders", "public.docs"])


def test_a_table_that_the_role_cant_read_is_named(estimate, database, monkeypatch):
    with new_role(database, "reader") as role:
        database.execute(f"grant select on public.docs to {role}")
        connect_as(monkeypatch, database, role)
        plan = estimate("public.orders", "public.docs")
    assert plan.estimate.unread == ("public.orders",)
    assert plan.estimate.rows == 500


def test_a_superuser_reads_no_table(estimate, database, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_TEST_SOURCE", database.uri)
    plan = estimate("public.orders")
    assert "no estimate: role postgres is a superuser" in plan.describe()
    assert any("let the connection use the role that init writes" in w for w in plan.warnings)


def test_nothing_is_estimated_of_what_cant_be_set_up(estimate):
    plan = estimate("public.orders", "public.missing")
    assert plan.problems
    assert plan.estimate is None
    assert "initial copy" not in plan.describe()


def test_a_table_that_is_locked_afterwards_is_left_out(estimate, database, lake):
    """Nor does a server that is away make check fail."""
    plan = estimate("public.orders", "public.docs")
    job = job_of(estimated_file(database, lake), database.conninfo)
    with database.connect() as other:
        other.execute("lock table public.docs in access exclusive mode")
        found = plan.with_estimate(job).estimate
    assert (found.unread, found.rows) == (("public.docs",), ROWS)
    away = job_of(job.pipeline, database.conninfo.replace("dbname=", "dbname=no_"))
    assert "no estimate" in plan.with_estimate(away).describe()


def test_a_slot_that_wont_outlive_the_copy_is_a_warning(estimate, database, postgres):
    """By the WAL that the server writes during the sample, or wrote before."""
    database.execute("alter system set max_slot_wal_keep_size = '0MB'")
    database.execute("select pg_reload_conf()")
    try:
        found = estimate("public.orders").estimate
        assert found.wal_limit_mb == 0
        assert bool(found.findings) == bool(found.wal_bytes)
    finally:
        database.execute("alter system reset max_slot_wal_keep_size")
        database.execute("select pg_reload_conf()")


def test_the_sample_writes_nothing(estimate, database):
    before = database.execute("select pg_current_xact_id()::text::bigint")[0][0]
    plan = estimate("public.orders")
    assert plan.estimate.rows == ROWS
    # The trial of the publication takes one, and is rolled back.
    after = database.execute("select pg_current_xact_id()::text::bigint")[0][0]
    assert after - before <= 2
