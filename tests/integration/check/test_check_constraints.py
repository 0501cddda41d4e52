"""CHECK constraints of the source, and the labels of its enums, are expected of its target."""

from dataclasses import replace
from functools import partial

import pytest
from deltalake import DeltaTable

from tests.support.bookkeeping import read_expectation_results
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.lake.ledger import SYNCED, BatchCut, ColumnState, TableState, now
from waldelta.pipeline import RunResult, StageResult
from waldelta.pipeline.run_result import RunFailed
from waldelta.postgres.server_position import read_oldest_xid
from waldelta.row_filter import EnumType
from waldelta.stages.check.constraints.constraints import (
    CheckConstraint,
    read_check_constraints,
    read_enums,
)
from waldelta.stages.check.suite.source_constraints import read_rules
from waldelta.stages.sync.sync import sync

pytestmark = pytest.mark.usefixtures("compiled")


def test_a_row_that_violates_one_is_found(runner, database, lake):
    """Null meets it, a foreign row may not; one that isn't valid for all rows says nothing."""
    database.execute(
        "create type mood as enum ('sad', 'ok'); create table t(id int primary key, v int check (v"
        " > 0), w int, m mood)"
    )
    database.execute("insert into t values (1, 1, -1), (2, null, null)")
    database.execute("alter table t add constraint later check (w > 0) not valid")
    job = bare_job(database, lake, quality={"enabled": True})
    sync(runner, job)
    database.execute("insert into t values (3, 3, 3)")
    result = consume(runner, replace(job, run_id="fine"))
    assert result.checked.passed == ["public.t"]
    of_run = {r.meaning: r.success for r in read_expectation_results(lake) if r.run_id == "fine"}
    assert of_run["CHECK constraint t_v_check holds: (v > 0)"]
    assert [
        success for meaning, success in of_run.items() if meaning.startswith("m has labels of")
    ] == [True]
    assert not any("later" in meaning for meaning in of_run)
    DeltaTable(job.lake.target("public.t").uri).update({"v": "-5"}, predicate="id = 1")
    database.execute("insert into t values (4, 4, 4)")
    with pytest.raises(RunFailed) as failed:
        consume(runner, replace(job, run_id="wrong"))
    assert failed.value.result.checked.failed_expectations[0].startswith(
        "public.t: expect_target_rows_to_satisfy: CHECK constraint t_v_check holds: (v > 0) (1 row)"
    )


def test_which_count(database, lake):
    """Those of transactions that have landed, and whose texts are equal when their bytes are."""
    database.execute("create table t(id int primary key, v int, a text)")
    job = bare_job(database, lake)
    # As a server with ICU makes one that is nondeterministic; the embedded one has no ICU.
    database.execute('create collation loose from "C"')
    database.execute("update pg_collation set collisdeterministic = false where collname = 'loose'")
    database.execute(
        "alter table t add b text collate loose check (b <> 'x'), add constraint first check (v"
        " > 0)"
    )
    landed_as_of = read_oldest_xid(database.connection)
    database.execute("alter table t add constraint second check (v < 9)")
    state = TableState(now(), "r", "public.t", 1, "synced")
    first, second = CheckConstraint("first", "(v > 0)"), CheckConstraint("second", "(v < 9)")
    with job.source.connect("test") as connection:
        read = partial(read_check_constraints, connection)
        checks = {"public.t": [first, replace(second, has_landed=False)]}
        assert read([state], landed_as_of) == checks
        assert read([state], landed_as_of + 100) == {"public.t": [first, second]}
        assert read([replace(state, table_name="public.none")], landed_as_of) == read([], 0) == {}


def test_maintenance_judges_by_the_newest_run_that_landed(database, lake):
    """Each night of a source at rest makes a cut of its own; while none does, that is told."""
    database.execute("create table t(id int primary key, v int check (v > 0))")
    job = bare_job(database, lake)
    job.ledger.append(TableState(now(), "copy", "public.t", 1, SYNCED))
    (before,) = read_rules(job, RunResult("maintain", "early"), ["public.t"]).values()
    assert ([*before.checks], ["t_v_check" in text for text in before.omitted]) == ([], [True])
    landed = RunResult("consume", "landed")
    landed.landed.landed_as_of = read_oldest_xid(database.connection)
    landed.stages["apply"] = StageResult("succeeded", 0.0)
    # Its cuts are of what it has applied meanwhile, and lack what it has landed since.
    landing = RunResult("consume", "landing")
    landing.landed.landed_as_of = landed.landed.landed_as_of + 1
    for result in (landed, landing, *(RunResult("maintain", f"night{n}") for n in range(30))):
        job.ledger.append(BatchCut(now(), result.run_id, 1, 0, None))
        result.record(job)
    (after,) = read_rules(job, RunResult("maintain", "now"), ["public.t"]).values()
    assert ([check.name for check in after.checks], [*after.omitted]) == (["t_v_check"], [])


def test_which_labels(database):
    """An enum's, and a domain's over one, as they are now; other types have none."""
    database.execute(
        "create type mood as enum ('sad', 'ok'); create domain feeling as mood; create domain felt"
        " as feeling"
    )
    database.execute("alter type mood add value 'fine' before 'ok'")
    oids = {
        name: database.execute("select %s::regtype::oid::bigint", (name,))[0][0]
        for name in ("mood", "felt", "text")
    }
    columns = [
        ColumnState(name, oid, -1, name, "string", not_null=False) for name, oid in oids.items()
    ]
    state = TableState(now(), "r", "public.t", 1, "synced", columns=columns)
    enum = EnumType("mood", ("sad", "fine", "ok"))
    assert read_enums(database.connection, [state]) == {"public.t": {"mood": enum, "felt": enum}}
    assert read_enums(database.connection, []) == {}
