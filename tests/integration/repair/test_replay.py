"""Replay: rows damaged in the lake are as the source has them, where an interval's runs wrote."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from deltalake import DeltaTable

from tests.support.pipelines import bare_job
from waldelta.errors import StateError
from waldelta.jobs.consume import consume
from waldelta.jobs.replay import replay
from waldelta.lake.ledger import Ledger, now
from waldelta.lake.staging_leftovers import staged_for
from waldelta.monitoring.table_list import read_changed
from waldelta.pipeline import target_lock
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.land.drain import land_backlog
from waldelta.stages.sync.sync import sync

BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 100) i)"
TABLES = f"""
create table t(id int primary key, v text, big text, n numeric(6,2), at timestamptz, tags text[],
  doc jsonb);
alter table t alter big set storage external;
create table full_id(a int, b text, v text, primary key (a, b));
alter table full_id replica identity full;
create table emptied(id int primary key, v text);
create table keyless(v text);
alter table keyless replica identity full;
create table own(id int primary key, v int);
alter table own replica identity full;
insert into t select g, 'v' || g, g || {BIG}, g, 'infinity', array['x'], '{{}}'
  from generate_series(1, 12) g;
insert into full_id select g, 'b' || g, 'v' from generate_series(1, 6) g;
insert into emptied select g, 'old' from generate_series(1, 5) g;
insert into keyless values ('a'), ('a');
insert into own select g, g from generate_series(1, 6) g;
"""
NAMES = ["t", "full_id", "emptied", "keyless", "own"]
WHERES = {"public.own": {"where": "v > 3"}}
MONTHS = [datetime(2025, month, 1, tzinfo=UTC) for month in (1, 2, 3, 4)]


@pytest.fixture
def job(runner, database, lake):
    """Copied, and three runs of three months: before the replayed one, itself, and after it."""
    database.execute(TABLES)
    job = bare_job(
        database,
        lake,
        [f"public.{name}" for name in NAMES],
        target={"root": lake, "tables": WHERES},
    )
    sync(runner, job)
    steps = [
        f"insert into t values (20, 'early', {BIG}, 'NaN', null, null, null)",
        f"""update t set v = 'changed' where id in (1, 2);
            update t set id = 30 where id = 3;
            delete from t where id = 4;
            insert into t values (21, 'new', {BIG}, 2, '-infinity', array[null, 'y'], '[1, 2]');
            update t set v = 'touched' where id = 20;
            update t set id = 99 where id = 5; update t set id = 5
              where id = 6; update t set id = 6 where id = 99;
            update full_id set v = 'w' where a <= 2; update full_id set b = 'moved' where a = 3;
            delete from full_id where a = 4;
            update emptied set v = 'new' where id = 1; insert into emptied values (6, 'six');
            insert into keyless values ('b'), ('c'); delete from keyless where v = 'c';
            update own set v = 10 where id = 1; update own set v = 0
              where id = 5; update own set v = 7 where id = 6""",
        """update t set v = 'later' where id = 2; update t set id = 31 where id = 30;
            insert into t(id, v) values (3, 'again');
            delete from t where id = 21;
            alter table t add column late int default 5; update t set late = 6 where id = 12;
            truncate emptied; insert into emptied values (1, 'after'), (7,
              'seven'); update emptied set v = 'x' where id = 7""",
    ]
    for n, step in enumerate(steps):
        for statement in step.split(";"):
            database.execute(statement)
        run = replace(
            job,
            run_id=f"run {n}",
            run_type="scheduled",
            interval_start=MONTHS[n],
            interval_end=MONTHS[n + 1],
        )
        consume(runner, run)
    return job


def rows(job, name):
    """What a target has; a row that was read again has the snapshot's position."""
    table = DeltaTable(job.lake.target(f"public.{name}").uri).to_pyarrow_table()
    columns = [c for c in table.column_names if c not in ("_wd_lsn", "_wd_commit_ts")]
    return sorted(repr(tuple(row.values())) for row in table.select(columns).to_pylist())


def state(runner, job):
    return {name: rows(job, name) for name in NAMES}


def versions(job):
    return {name: DeltaTable(job.lake.target(f"public.{name}").uri).version() for name in NAMES}


def backfill(runner, job, month=1, run_id="backfill", **details):
    start, end = MONTHS[month], MONTHS[month + 1]
    return consume(
        runner,
        replace(
            job, run_id=run_id, run_type="backfill", interval_start=start, interval_end=end,
            **details,
        ),
    )  # fmt: skip


DAMAGE = {
    "t": ["update {} set v = 'damaged', n = null, _wd_raw = null where id in (1, 2)",
          "delete from {} where id in (3, 5, 20)",
          "insert into {} (id, v) values (30, 'phantom'), (21, 'phantom'), (4, 'phantom')"],
    "full_id": ["delete from {} where a in (1, 3)", "update {} set v = 'damaged' where a = 2",
                "insert into {} (a, b, v) values (3, 'b3', 'phantom')"],
    "emptied": ["update {} set v = 'damaged' where id = 1",
                "insert into {} (id, v) values (6, 'phantom')"],
    "keyless": ["delete from {} where v = 'a'", "insert into {} (v) values ('b')"],
    "own": ["delete from {} where id = 6", "update {} set v = 5 where id = 1",
            "insert into {} (id, v) values (5, 5)"],
}  # fmt: skip


def damage(runner, job, names=DAMAGE):
    for name in names:
        for statement in DAMAGE[name]:
            runner.spark().sql(
                statement.format(f"delta.`{job.lake.target(f'public.{name}').uri}`")
            ).collect()


@pytest.mark.soak("a second replay of many runs")
def test_replays_mend_what_their_runs_changed(runner, database, job):
    """Rows lost, changed and invented are as they were; later changes stay, right rows too."""
    right, before = state(runner, job), versions(job)
    interval = {"run_type": "backfill", "interval_start": MONTHS[1], "interval_end": MONTHS[2]}
    some = replay(
        runner, replace(job, run_id="some", **interval), tables=["public.t", "public.own"]
    )
    assert (versions(job), set(some.tables)) == (before, {"public.t", "public.own"})
    assert not any(table.changed for table in some.tables.values())

    with target_lock(job, "public.own"), pytest.raises(RunFailed, match="held by another run"):
        replay(runner, replace(job, run_id="beside", **interval), tables=["public.own"])

    damage(runner, job)
    began = now()
    done = backfill(runner, job)
    assert state(runner, job) == right
    assert (done.verb, done.status, done.warnings) == ("replay", "succeeded", [])
    assert done.stages["apply"].detail.endswith(" keys of 5 tables, 20 rows corrected")
    assert done.tables.pop("public.keyless").rows == 3  # It was copied.
    mended = {name: (t.inserted, t.updated, t.deleted) for name, t in done.tables.items()}
    assert mended == {
        "public.t": (3, 2, 3),
        "public.full_id": (2, 1, 1),
        "public.emptied": (0, 1, 1),
        "public.own": (1, 1, 1),
    }
    shown = read_changed(Ledger(job.lake), began)
    assert {
        name: (of.operations.inserted, of.operations.updated, of.operations.deleted)
        for name, of in shown.items()
        if name in mended
    } == mended

    # Clearing a run does the same: it has ended well, so it consumes no more.
    damage(runner, job, ["t"])
    cleared = consume(runner, replace(job, run_id="run 0", run_type="scheduled", again=True))
    assert (cleared.verb, list(cleared.tables)) == ("replay", ["public.t"])
    found = cleared.tables["public.t"]
    assert (found.inserted, found.updated, found.deleted) == (1, 0, 0)
    assert sum("'touched'" in row for row in rows(job, "t")) == 1
    assert [staged_for(job.lake, f"public.{name}") for name in NAMES] == [[]] * len(NAMES)

    never = replace(
        job,
        run_id="night",
        run_type="backfill",
        interval_start=MONTHS[3],
        interval_end=MONTHS[3] + timedelta(1),
    )
    nothing = consume(runner, never)
    assert (nothing.status, nothing.tables) == ("succeeded", {})
    assert (
        "nothing to replay: the ledger knows no run of the interval"
        in nothing.stages["apply"].detail
    )

    log = job.change_log(job.read_identity())
    log.prune(1, 168)
    with pytest.raises(RunFailed) as failed:
        backfill(runner, job, month=0)
    assert isinstance(failed.value.__cause__, StateError)
    assert "no longer reaches back" in str(failed.value)
    # What is left can be replayed from its beginning: no transaction was between the runs.
    damage(runner, job, ["full_id"])
    backfill(runner, job, run_id="the first that is left")
    assert state(runner, job) == right

    log.prune(99, 168)
    with pytest.raises(RunFailed, match="no longer reaches back"):
        backfill(runner, job, run_id="nothing is left")


def test_the_first_run_that_brought_changes_is_replayed(runner, database, lake):
    """Batches before it had nothing, as those that a reconciliation lands; none was dropped."""
    database.execute("create table t (id int primary key, v text)")
    job = bare_job(database, lake)
    sync(runner, job)
    for number in range(2):
        database.execute(f"create table other_{number} (id int)")
        land_backlog(runner, job)
    database.execute("insert into t values (1, 'first')")
    consume(runner, replace(job, run_id="first", interval_start=MONTHS[1], interval_end=MONTHS[2]))
    DeltaTable(job.lake.target("public.t").uri).delete()
    backfill(runner, job)
    assert rows(job, "t")
