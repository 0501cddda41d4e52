"""Copies while somebody else alters the publication: no row falls between snapshot and stream."""

import pytest

import waldelta.stages.sync.sync as sync_module
from tests.oracles.target_rows import read_target
from tests.support.concurrent_work import before_rows
from tests.support.pipelines import bare_job
from waldelta.errors import SyncFailed, TransactionsStillOpen
from waldelta.jobs.consume import consume
from waldelta.monitoring.table_list import read_table_details
from waldelta.snapshot.exported_snapshot import wait_for_old_transactions
from waldelta.stages.sync.sync import sync


@pytest.fixture
def job(database, lake):
    database.execute("create table t(id int primary key, v text)")
    database.execute("insert into t values (1, 'a')")
    return bare_job(database, lake)


def ids(job):
    return sorted(row["id"] for row in read_target(job.lake.target("public.t").uri))


@pytest.fixture
def narrowed(database, job):
    """Rows from 10 on aren't published; gives the statement that publishes them."""
    publication = f"s_{database.name}_pub"
    database.execute(f"alter publication {publication} set table t where (id < 10)")
    return f"alter publication {publication} set table t"


def test_a_filter_widened_between_the_wait_and_a_snapshot(
    runner, database, job, narrowed, monkeypatch
):
    """A row of before, whose transaction no snapshot sees yet, is in no stream: it is awaited."""
    writer = database.connect()
    waited = []

    def wait(connection, timeout_s):
        waited.append(True)
        if len(waited) > 1:
            wait_for_old_transactions(connection, timeout_s, sleep=lambda _: writer.commit())
            return
        wait_for_old_transactions(connection, timeout_s)
        writer.execute("insert into t values (20, 'not sent by the old filter')")
        database.execute(narrowed)

    monkeypatch.setattr("waldelta.snapshot.exported_snapshot.wait_for_old_transactions", wait)
    sync(runner, job)
    writer.close()
    consume(runner, job)
    assert len(waited) == 2
    assert ids(job) == [1, 20]


def test_a_transaction_that_stays_open_then_is_named(runner, database, job, narrowed, monkeypatch):
    """As before the first snapshot; the copy fails by name, and nothing is taken for a copy."""
    writer = database.connect()

    def wait(connection, timeout_s):
        wait_for_old_transactions(connection, timeout_s)
        if not writer.info.transaction_status:
            writer.execute("insert into t values (20, 'x')")
            database.execute(narrowed)

    monkeypatch.setattr("waldelta.snapshot.exported_snapshot.wait_for_old_transactions", wait)
    monkeypatch.setattr(sync_module, "ATTEMPTS", 2)
    with pytest.raises(SyncFailed) as caught:
        sync(runner, job, old_transactions_timeout_s=0.2)
    assert isinstance(caught.value.failures["public.t"], TransactionsStillOpen)
    writer.close()


def test_a_table_that_leaves_and_returns_during_its_copy(runner, database, job, monkeypatch):
    """What changed in between is in neither snapshot nor stream, so the copy starts again."""
    publication, copies = f"s_{database.name}_pub", []

    def first():
        copies.append(True)
        if len(copies) == 1:
            database.execute(f"alter publication {publication} drop table t")
            database.execute("insert into t values (2, 'sent to nobody')")
            database.execute(f"alter publication {publication} add table t")

    before_rows(monkeypatch, first)
    (copied,) = sync(runner, job)
    assert (len(copies), copied.attempts, copied.state.generation) == (2, 2, 1)
    database.execute("insert into t values (3, 'sent')")
    consume(runner, job)
    assert ids(job) == [1, 2, 3]


def test_other_tables_come_and_go_without_a_second_copy(runner, database, job, monkeypatch):
    """A long copy isn't begun anew for what happens to others."""
    copies = []

    def first():
        copies.append(True)
        database.execute("create table other(id int primary key)")
        database.execute(f"alter publication s_{database.name}_pub add table other")

    before_rows(monkeypatch, first)
    (copied,) = sync(runner, job)
    assert (len(copies), copied.attempts) == (1, 1)


def test_a_copy_records_what_pages_name_of_its_columns(runner, database, job):
    """Columns that aren't published, and comments, which only the source's catalog has."""
    database.execute("alter table t add card text")
    database.execute("comment on column t.v is 'the value'")
    database.execute(f"alter publication s_{database.name}_pub set table t (id, v)")
    sync(runner, job)
    details = read_table_details(job.ledger, "public.t")
    assert details.unpublished == ("card",)
    assert {column.name: column.comment for column in details.columns if column.source_type} == {
        "id": None,
        "v": "the value",
    }
    assert set(details.published) == {"insert", "update", "delete", "truncate"}
