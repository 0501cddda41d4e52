"""After every kind of change the target equals the source's published rows."""

from dataclasses import replace

import pytest
from deltalake import DeltaTable

import waldelta.changes.merge.merge as merge_module
import waldelta.changes.stage.stage as stage_module
import waldelta.stages.apply.apply_targets as apply_module
from tests.oracles.target_rows import source_rows, target_rows
from tests.support.concurrent_work import killed_in
from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from waldelta.errors import LateWriter, LockHeld, StagedLost, StateError
from waldelta.jobs.consume import consume
from waldelta.lake import local_path
from waldelta.lake.changelog import ChangeLog
from waldelta.lake.ledger import Ledger, RowCounts, TableState, now
from waldelta.monitoring.table_list import read_changed
from waldelta.pipeline import TableResult
from waldelta.spark import InProcess, open_runner
from waldelta.stages.apply import inspect as inspection
from waldelta.stages.apply.apply import apply
from waldelta.stages.land.drain import drain
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.spark

COLUMNS = ("id", "v", "big", "n", "ts", "d", "b", "a", "f", "ok")
DDL = """
create table t(
    id int primary key, v text, big text, n numeric(10,2), ts timestamptz, d date, b bytea,
      a int[], f float8, ok bool
)
"""
BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 400) i)"


def run(runner, job):
    drain(runner, job)
    applied = apply(runner, job)
    assert applied.failures == {}
    return applied


@pytest.fixture
def job(database, lake):
    database.execute(DDL)
    return bare_job(database, lake)


STATEMENTS = [
    (f"insert into t values (1, 'a', {BIG}, 1.5, '2020-01-01 12:00+00', '2020-01-01', '\\x00ff',"
     " '{1,2}', 1.5, true)"),
    ("insert into t select g, 'v' || g, null, g, now(), current_date, null, array[g], g, false"
     " from generate_series(2, 300) g"),
    "update t set v = 'changed' where id = 1",  # leaves big unchanged and TOASTed
    "update t set id = 1001 where id = 1",  # moves the key, big still unchanged
    "update t set n = null, ok = null, a = null where id between 5 and 9",
    "delete from t where id between 10 and 20",
    "insert into t select g, 'again' from generate_series(10, 12) g",
    "update t set id = id + 5000 where id between 30 and 60",
    ("begin; update t set id = -1 where id = 2; update t set id = 2 where id = 3; update t set"
     " id = 3 where id = -1; commit"),
    "truncate t; insert into t values (7, 'after', 'x')",
    (f"insert into t values (8, 'b', {BIG}); update t set v = 'c' where id = 8; update t set id"
     " = 9 where id = 8"),
]  # fmt: skip


@pytest.mark.usefixtures("merged_by_spark", "compiled")
def test_every_kind_of_change_in_one_run(runner, database, job, decoded_by_tasks):
    """One batch collapses to the source's rows in one commit; a second run changes nothing."""
    sync(runner, job)
    for statement in STATEMENTS:
        database.execute(statement)
    applied = run(runner, job)
    assert target_rows(job, "t", *COLUMNS) == source_rows(database, "t")
    (step,) = applied.steps
    assert step.targets[0].truncated
    version = job.ledger.last_cut().targets[0].version
    run(runner, job)
    assert job.ledger.last_cut().targets[0].version == version


@pytest.mark.usefixtures("decoded_by_tasks")
@pytest.mark.parametrize(
    "module, step",
    [
        (stage_module, "_stage"),
        pytest.param(apply_module, "fault_point", marks=pytest.mark.nightly("merged by Spark")),
    ],
)
def test_a_lost_file_of_net_changes_commits_nothing(
    request, database, job, monkeypatch, module, step
):
    """One that was gone behind the tasks, and one that was there until Spark merges."""
    runner = InProcess(pytest.fail)
    if module is apply_module:
        runner = request.getfixturevalue("runner")
    monkeypatch.setattr(stage_module, "ROWS_PER_COLLAPSE", 100)
    sync(runner, job)
    database.execute("insert into t(id) select g from generate_series(1, 300) g")
    drain(runner, job)
    folder, real = local_path(job.pipeline.target.root), getattr(module, step)

    def lose(*given):
        result = real(*given)
        for file in [*folder.rglob("net/*.parquet")][:1]:
            file.unlink()
        return result

    with monkeypatch.context() as patched:
        patched.setattr(module, step, lose)
        failure = apply(runner, job).failures["public.t"]
    assert (type(failure), failure.retryable) == (StagedLost, True)
    assert (job.ledger.last_cut(), target_rows(job, "t", "id")) == (None, [])
    run(runner, job)
    assert target_rows(job, "t", "id") == source_rows(database, "t", "id")


def test_changes_before_the_copy_are_not_applied_twice(runner, database, job):
    """Landing goes on before and during a copy; what the snapshot saw is left out by xid."""
    database.execute("insert into t(id, v) select g, 'x' from generate_series(1, 100) g")
    database.execute("update t set v = 'y' where id <= 50")
    drain(runner, job)
    with database.connect() as open_transaction:
        database.execute("delete from t where id = 1")
        open_transaction.execute("select pg_current_xact_id()")
        open_transaction.rollback()
    sync(runner, job)
    database.execute("update t set v = 'z' where id = 2")
    run(runner, job)
    assert target_rows(job, "t", *COLUMNS) == source_rows(database, "t")


def test_an_update_of_a_row_the_target_lacks_is_skipped_and_counted(runner, database, job):
    """As PostgreSQL's subscriber does; an upsert would invent rows."""
    database.execute("insert into t(id, v) values (1, 'a'), (2, 'b')")
    sync(runner, job)
    DeltaTable(job.lake.target("public.t").uri).delete("id = 1")
    database.execute("update t set v = 'x'")
    applied = run(runner, job)
    assert target_rows(job, "t", "id", "v") == [(2, "x")]
    assert (applied.steps[0].targets[0].updated, applied.steps[0].targets[0].skipped) == (1, 1)


@pytest.mark.nightly("a race with another run, merged by Spark")
@pytest.mark.usefixtures("merged_by_spark")
@pytest.mark.parametrize("moment", ["count_statement", "commit_statement"])
def test_a_run_that_lost_its_target_while_it_merged_adds_nothing_twice(
    runner, database, lake, monkeypatch, moment
):
    """Another run has applied the first batch meanwhile; Delta's version alone lets both write."""
    database.execute(
        "create table t(id int); alter table t replica identity full; insert into t values (0)"
    )
    job = bare_job(database, lake)
    sync(runner, job)
    for number in (1, 2):
        changed = (
            "; delete from t where id = 0" if (moment, number) == ("count_statement", 2) else ""
        )
        database.execute(f"insert into t values ({number}){changed}")
        drain(runner, job)
    real, ours = getattr(merge_module, moment), []

    def taken_over(*given, **named):
        if not ours:
            ours.append(True)
            database.execute(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity where"
                " application_name = 'waldelta lock public.t'"
            )
            with monkeypatch.context() as first:
                first.setattr(inspection, "plan_apply_batches", lambda *_: [1])
                assert apply(runner, replace(job, run_id="the other")).failures == {}
        return real(*given, **named)

    monkeypatch.setattr(merge_module, moment, taken_over)
    assert isinstance(apply(runner, job).failures["public.t"], LockHeld)
    assert target_rows(job, "t", "id") == [(0,), (1,)]
    run(runner, job)
    assert target_rows(job, "t", "id") == source_rows(database, "t")


def test_values_that_the_type_cant_hold_are_counted(runner, database, job):
    """They are stored raw beside the row; the run's summary says how many rows have such."""
    sync(runner, job)
    database.execute(
        "insert into t(id, n, ts) values (1, 'NaN', 'infinity'), (2, 1.5, now()), (3, null,"
        " '-infinity')"
    )
    assert consume(runner, job).tables["public.t"].raw_rows == 2


def test_values_that_are_lost_are_told(runner, database, lake):
    """Without metadata columns there is no place for them."""
    database.execute("create table t(id int primary key, n numeric(5,2))")
    target = {"root": lake, "metadata_columns": False}
    job = bare_job(database, lake, target=target)
    sync(runner, job)
    database.execute("insert into t values (1, 'NaN'), (2, 1)")
    (warning,) = consume(runner, job).warnings
    assert warning.startswith(
        "public.t: 1 row has values that their types can't hold; metadata_columns is off"
    )


def test_what_a_killed_run_committed_is_told_by_the_next(runner, database, job):
    """A run that died between merge and report leaves rows that nobody counted or announced."""
    sync(runner, job)
    database.execute("insert into t(id, v) values (1, 'a'), (2, 'b')")
    drain(runner, job)
    with killed_in("waldelta.stages.apply.apply_targets.read_commit"):
        apply(runner, job)
    result = consume(runner, replace(job, run_id="the next"))
    assert (result.tables["public.t"].inserted, result.tables["public.t"].changed) == (2, True)
    again = consume(runner, replace(job, run_id="and another"))
    assert not again.tables.get("public.t", TableResult()).changed
    shown = read_changed(Ledger(job.lake), None)["public.t"]
    assert (shown.operations, shown.run_id) == (RowCounts(inserted=2), "the next")


@pytest.mark.soak("a race that takes two copies")
def test_a_copy_made_anew_while_apply_waited_is_not_mixed_with_old_changes(
    runner, database, job, monkeypatch
):
    """What was chosen for one copy is never merged into the next one."""
    database.execute("insert into t(id, v) values (1, 'a')")
    sync(runner, job)
    database.execute("update t set v = 'b'")
    drain(runner, job)
    database.execute("update t set v = 'c'")
    real = inspection.end_killed_repairs

    def synced_again(*args):
        found = real(*args)
        sync(runner, job, ["public.t"], "by hand")
        return found

    monkeypatch.setattr(inspection, "end_killed_repairs", synced_again)
    assert isinstance(apply(runner, job).failures["public.t"], LateWriter)
    assert target_rows(job, "t", "id", "v") == [(1, "c")]
    monkeypatch.undo()
    run(runner, job)
    assert target_rows(job, "t", *COLUMNS) == source_rows(database, "t")


@pytest.mark.parametrize("policy", ["fail", "ignore"])
def test_a_table_whose_last_sync_failed_is_left_out(runner, database, lake, policy):
    """It gets no changes until an operator syncs it, and every run says so."""
    database.execute("create table t(id int primary key, v text, n numeric(10,2), big text)")
    target = {"root": lake, "schema_changes": policy}
    job = bare_job(database, lake, target=target)
    sync(runner, job)
    job.ledger.append(TableState(now(), "r", "public.t", 2, "failed", reason="disk full"))
    database.execute("insert into t(id) values (1)")
    drain(runner, job)
    failure = apply(runner, job).failures["public.t"]
    assert isinstance(failure, StateError)
    assert "disk full" in str(failure)


def test_two_slots_in_one_lake_are_refused(runner, database, job, lake):
    """Both would apply the same changes to the same tables."""
    other = bare_slot(database, pipeline_file(lake, f"s2_{database.name}"))
    with pytest.raises(StateError, match=r"give each pipeline its own target\.root"):
        drain(runner, other)


def test_messages_that_cannot_be_read_fail_each_table_by_its_name(
    runner, database, lake, monkeypatch
):
    """Also where several targets would share them."""

    def fail(*_):
        raise OSError("connection reset")

    names = [f"public.{name}" for name in "abc"]
    for name in names:
        database.execute(f"create table {name}(id int primary key)")
    job = bare_job(database, lake, names)
    sync(runner, job)
    for name in names:
        database.execute(f"insert into {name} values (1)")
    drain(runner, job)
    monkeypatch.setattr(ChangeLog, "rows", fail)
    failures = apply(runner, job).failures
    assert sorted(failures) == names
    assert all(name in str(failure) for name, failure in failures.items())


def test_an_application_continues_what_a_process_without_spark_has_left(
    database, lake, monkeypatch
):
    """Its result has what the process landed, committed and warned of, each once."""
    names = ["public.a", "public.b"]
    for name in names:
        database.execute(f"create table {name}(id int primary key)")
        database.execute(f"insert into {name} values (1)")
    job = replace(bare_job(database, lake, names), run_id="two processes")
    with open_runner("test", job) as runner:
        sync(runner, job)
    DeltaTable(f"{lake}/public/a").delete("id = 1")
    for name in names:
        database.execute(f"insert into {name} values (2)")

    def stage(runner, change_log, plan, folder):
        if plan.state.table_name == "public.b":
            runner.spark()
        return real(runner, change_log, plan, folder)

    real = apply_module.stage
    with monkeypatch.context() as without:
        without.setenv("WALDELTA_WITHOUT_SPARK", "1")
        without.setattr(apply_module, "stage", stage)
        with pytest.raises(SystemExit, match="75"), open_runner("test", job) as runner:
            consume(runner, job)
    with open_runner("test", job) as runner:
        result = consume(runner, replace(job, again=True))
    assert (result.status, result.landed.changes) == ("succeeded", 2)
    assert {name: table.inserted for name, table in result.tables.items()} == dict.fromkeys(
        names, 1
    )
    assert result.targets.external_commits == ["public.a"]
    assert sum("an external writer wrote" in warning for warning in result.warnings) == 1
