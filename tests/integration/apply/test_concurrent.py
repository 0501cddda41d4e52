"""A backlog of several steps, applied while it lands: each change once, reported once."""

import threading
from dataclasses import replace

import pytest

from tests.oracles.compare import differing
from tests.support.pipelines import bare_job
from waldelta.errors import SourceUnreachable
from waldelta.jobs import consume as flow
from waldelta.jobs.consume import consume
from waldelta.pipeline import target_lock
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.apply import apply as apply_module
from waldelta.stages.apply import apply_targets
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.sync.sync import sync

WAIT_S = 60
# Of three transactions of fifty rows, each a step of its own: two would be more than 200 messages.
BATCH = {"max_changes": 100, "wal_window_mb": 16}
PER_BATCH = 150


@pytest.fixture
def job(runner, database, lake):
    database.execute(
        "create table t(id int primary key, a int, v text); create table u(id int primary key)"
    )
    made = bare_job(database, lake, ["public.t", "public.u"], batch=BATCH)
    database.execute("insert into t select g, g, 'before' from generate_series(-9, 0) g")
    sync(runner, made)
    return made


def write(database, batches, rows="t select g, g, 'v'", begin=1):
    for first in range(begin, begin + batches * PER_BATCH, 50):
        database.execute(f"insert into {rows} from generate_series({first}, {first + 49}) g")


class Held:
    """Has the landing wait behind some batches until they were applied, or fail there."""

    def __init__(self, monkeypatch, batches, error=None):
        self.upto, self.applied, self._batches, self._error = [], threading.Event(), batches, error
        apply, land = apply_module.apply_concurrently, flow.land_to_now

        def noticed(runner, applied, upto, caller):
            reached = apply(runner, applied, upto, caller)
            if reached >= upto:
                self.upto.append(upto)
                self.applied.set()
            return reached

        def held(runner, job, result, stage, on_landed):
            def wait(batch):
                on_landed(batch)
                if batch.batch in self._batches:
                    assert self.applied.wait(WAIT_S)
                    self.applied.clear()
                    if self._error is not None and batch.batch == max(self._batches):
                        raise self._error

            land(runner, job, result, stage, wait)

        monkeypatch.setattr(apply_module, "apply_concurrently", noticed)
        monkeypatch.setattr(flow, "land_to_now", held)


def in_cuts(job):
    """Rows that entered ``public.t`` by all published cuts: each is in one of them."""
    return sum(
        one.inserted
        for cut in job.ledger.batches()
        for one in cut.targets
        if one.table_name == "public.t"
    )


def test_steps_are_applied_while_others_land_and_told_once(runner, database, job, monkeypatch):
    """The result adds up over all steps, and each is a cut of its own."""
    write(database, 4)
    database.execute("update t set v = 'after' where id <= 0")
    held = Held(monkeypatch, {1, 2})
    result = consume(runner, job)
    assert held.upto[:2] == [1, 2]  # and those that came while the others landed
    assert (
        f"; {len(held.upto)} apply batches applied during landing" in result.stages["land"].detail
    )
    told = result.tables["public.t"]
    assert (told.inserted, told.updated, told.skipped) == (4 * PER_BATCH, 10, 0)
    assert result.landed.changes == 4 * PER_BATCH + 20  # with those of before the copy
    assert in_cuts(job) == 4 * PER_BATCH
    assert differing(runner, job) == {}
    assert result.landed.landed_as_of > 0
    following = consume(runner, replace(job, run_id="following"))
    assert (following.landed.changes, following.tables, following.warnings) == (0, {}, [])


def test_what_was_applied_before_landing_failed_is_told_by_the_next_run(
    runner, database, job, monkeypatch
):
    """The failed run has reported no table, so nobody takes it for checked."""
    write(database, 3)
    with monkeypatch.context() as patched:
        held = Held(patched, {1, 2}, SourceUnreachable("the server went away"))
        with pytest.raises(RunFailed) as caught:
            consume(runner, job)
    assert held.upto == [1, 2]
    failed = caught.value.result
    assert (failed.stages["land"].error["class"], failed.tables) == ("SourceUnreachable", {})
    assert "apply" not in failed.stages
    database.execute("delete from t where id = 1")
    following = consume(runner, replace(job, run_id="following"))
    told = following.tables["public.t"]
    assert (told.inserted, told.deleted) == (3 * PER_BATCH, 1)
    assert in_cuts(job) == 3 * PER_BATCH
    assert differing(runner, job) == {}


@pytest.mark.nightly("a failing table beside a landing")
def test_a_table_that_fails_meanwhile_is_met_again_at_the_end(runner, database, job, monkeypatch):
    """It holds up nothing, isn't tried at each step, and is applied once it can be."""
    database.execute("insert into u select g from generate_series(1, 20) g")
    write(database, 3)
    real, locked, tried, meanwhile = (
        apply_module.apply_concurrently,
        apply_targets._apply_locked,
        [],
        [],
    )

    def apply(runner, applied, upto, caller):
        with target_lock(job, "public.u"):
            reached = real(runner, applied, upto, caller)
        assert list(applied.failures) == ["public.u"]
        meanwhile[:] = tried
        return reached

    def noticed(run, target, batches):
        tried.append(target.name)
        return locked(run, target, batches)

    monkeypatch.setattr(apply_module, "apply_concurrently", apply)
    monkeypatch.setattr(apply_targets, "_apply_locked", noticed)
    Held(monkeypatch, {1, 2})
    result = consume(runner, job)
    assert (result.tables["public.u"].inserted, result.tables["public.t"].inserted) == (
        20,
        3 * PER_BATCH,
    )
    assert differing(runner, job) == {}
    assert (sorted(meanwhile[:2]), meanwhile[2]) == (["public.t", "public.u"], "public.t")
    assert meanwhile.count("public.u") == 1
    # While one of them was behind there was no cut.
    assert {tuple(one.table_name for one in cut.targets) for cut in job.ledger.batches()} == {
        ("public.t", "public.u")
    }


@pytest.mark.nightly("a kill beside a landing")
def test_what_a_killed_run_committed_is_in_the_cut_of_the_step_that_follows(
    runner, database, job, monkeypatch
):
    """And told once, by the apply behind the landing."""
    write(database, 1)
    with monkeypatch.context() as patched:
        patched.setattr(apply_targets, "finish_step", killed)
        with pytest.raises(RunFailed, match="killed"):
            consume(runner, replace(job, run_id="killed"))
    assert in_cuts(job) == 0
    write(database, 2, begin=1001)
    Held(monkeypatch, {2})
    result = consume(runner, replace(job, run_id="following"))
    assert result.tables["public.t"].inserted == in_cuts(job) == 3 * PER_BATCH
    assert differing(runner, job) == {}


@pytest.mark.soak("a race of two stages")
def test_a_target_that_only_a_new_copy_makes_exact_is_copied_by_the_same_run(
    runner, database, job, monkeypatch
):
    """A column's new type marks it during landing; meanwhile the last cut stays."""
    database.execute("insert into t select g, g, 'v' from generate_series(1, 9) g")
    consume(runner, replace(job, run_id="first"))
    (first,) = job.ledger.batches()
    database.execute("alter table t alter a type text using 'n' || a")
    write(database, 2, "t select g, 'n', 'v'", begin=1001)
    held, cuts = Held(monkeypatch, {2}), []
    real = flow.apply_stage

    def applied(*args):
        cuts.extend(job.ledger.batches())
        real(*args)

    monkeypatch.setitem(flow.CONSUME_STAGES, "apply", applied)
    result = consume(runner, replace(job, run_id="second"))
    assert held.upto
    assert cuts == [first]
    assert any("copied again" in warning for warning in result.warnings), result.warnings
    assert differing(runner, job) == {}


def killed(*_, **__):
    raise RuntimeError("killed")


def test_no_cut_holds_a_copy_that_is_ahead_of_it(runner, database, lake, monkeypatch):
    """The first cut is the one that has caught up with the copy."""
    database.execute(
        "create table t(id int primary key, a int, v text); create table u(id int primary key)"
    )
    job = bare_job(database, lake, ["public.t", "public.u"], batch=BATCH)
    sync(runner, job, ["public.t"])
    write(database, 4)
    database.execute("insert into u select g from generate_series(1, 20) g")
    sync(runner, job, ["public.u"])
    held = Held(monkeypatch, {1, 2})
    consume(runner, job)
    assert held.upto[:2] == [1, 2]
    last = job.change_log(job.read_identity()).last_batch()
    assert [(cut.batch, len(cut.targets)) for cut in job.ledger.batches()] == [(last, 2)]


def test_what_was_applied_to_a_table_that_left_is_told(runner, database, job, monkeypatch):
    """It left behind the step that was applied: nobody would ask for it later."""
    write(database, 3)
    real = flow.apply_stage

    def left(*args):
        database.execute(
            f"alter publication {job.pipeline.source.publications[0].name} drop table t"
        )
        real(*args)

    monkeypatch.setitem(flow.CONSUME_STAGES, "apply", left)
    held = Held(monkeypatch, {1, 2})
    result = consume(runner, job)
    assert held.upto[:2] == [1, 2]
    assert result.tables["public.t"].inserted >= 2 * PER_BATCH
    assert result.targets.unpublished == ["public.t"]


@pytest.mark.parametrize(
    "fails_in",
    ["inspect", pytest.param("_apply_inspected", marks=pytest.mark.nightly("a later failure"))],
)
def test_an_apply_that_fails_before_it_tells_leaves_it_to_the_next_run(
    runner, database, job, monkeypatch, fails_in
):
    """Nothing follows on the source, and a table has left: an idle check finds it."""
    write(database, 2)
    database.execute(
        "create table unpublished(v text); insert into unpublished select repeat('x', 100) from"
        " generate_series(1, 100)"
    )
    Held(monkeypatch, {1, 2})

    def fail(*args):
        database.execute(
            f"alter publication {job.pipeline.source.publications[0].name} drop table t"
        )
        raise SourceUnreachable("the server went away")

    real = apply_module._apply_inspected
    # While more lands, the run's wait for it is passed as a fourth value.
    behind = (
        fail if fails_in == "inspect" else lambda *args: real(*args) if len(args) == 4 else fail()
    )
    with monkeypatch.context() as patched:
        patched.setattr(apply_module, fails_in, behind)
        with pytest.raises(RunFailed):
            consume(runner, job)
    assert check_idle(job).reason == "a run ended before it reported what it applied"
    following = consume(runner, replace(job, run_id="following"))
    assert following.tables["public.t"].inserted == 2 * PER_BATCH
    assert not check_idle(job).has_work


@pytest.mark.soak("a race of two stages")
def test_a_truncated_root_is_no_riddle_to_the_apply_behind(runner, database, lake, monkeypatch):
    """Its TRUNCATE was applied before anybody could say what emptied the leaves."""
    database.execute(
        "create table p(id int primary key, v text) partition by range (id);"
        "create table p1 partition of p for values from (minvalue) to (0);"
        "create table p2 partition of p for values from (0) to (maxvalue);"
        "insert into p select g, 'before' from generate_series(-9, 9) g"
    )
    job = bare_job(database, lake, ["public.p"], batch=BATCH)
    name = job.pipeline.source.publications[0].name
    database.execute(f"alter publication {name} set (publish_via_partition_root = true)")
    sync(runner, job)
    database.execute("truncate p")
    write(database, 3, "p select g * (case when g % 2 = 0 then 1 else -1 end), 'v'")
    held = Held(monkeypatch, {1, 2})
    result = consume(runner, job)
    assert held.upto[:2] == [1, 2]
    assert result.warnings == []
    assert differing(runner, job) == {}


@pytest.mark.nightly("a schema change beside a landing")
def test_columns_that_come_and_go_while_it_lands(runner, database, job, monkeypatch):
    """Each step goes by the catalogs as they are when it has landed."""
    write(database, 2)
    database.execute("alter table t add column w text default 'w', drop column a")
    database.execute("insert into t (id, v) select g, 'new' from generate_series(1001, 1150) g")
    held = Held(monkeypatch, {1})
    result = consume(runner, job)
    assert held.upto[:1] == [1]
    assert (result.tables["public.t"].inserted, differing(runner, job)) == (3 * PER_BATCH, {})


@pytest.mark.soak("a race of two stages")
def test_drift_that_is_noticed_meanwhile_is_mended_by_the_same_run(
    runner, database, lake, monkeypatch
):
    """The apply behind the landing repairs it: rows enter and leave, no copy is made."""
    database.execute(
        "create table t(id int, a int, primary key (id, a)); insert into t select g, g from"
        " generate_series(-50, 0) g"
    )
    job = bare_job(database, lake, batch=BATCH)
    sync(runner, job)
    write(database, 2, "t select g, g")
    database.execute(
        f"alter publication {job.pipeline.source.publications[0].name} set table t where (a > -20)"
    )
    held = Held(monkeypatch, {1})
    result = consume(runner, job)
    assert held.upto[:1] == [1]
    assert any("it was repaired" in warning for warning in result.warnings), result.warnings
    assert differing(runner, job) == {}
