"""Enums in CHECK constraints and in a target's filter: PostgreSQL and the lake judge alike."""

from dataclasses import replace

import pyarrow as pa
from deltalake import DeltaTable

from tests.support.bookkeeping import read_expectation_results
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.row_filter.spark.evaluate import evaluate
from waldelta.stages.check.suite.kinds import plan_suite
from waldelta.stages.check.suite.source_constraints import read_rules
from waldelta.stages.sync.sync import sync

LABELS = ("new", "it's", "Done. Really", "gone")
NAME = '"My Schema"."Order.State ""x"""'
DDL = f"""
create schema "My Schema";
create type public.state as enum ('new', 'it''s', 'Done. Really', 'gone');
create type {NAME} as enum ('new', 'it''s', 'Done. Really', 'gone');
create domain public.phase as public.state check (value <> 'gone');
create type public.span as range (subtype = int);
create table t (id int primary key, a public.state, b {NAME}, c phase,
  s public.span);
"""
CONSTRAINTS = [
    "a = 'new'", "a <> 'it''s'", "a in ('new', 'Done. Really')", "a not in ('new', 'gone')",
    "a = any ('{new,gone}')", "a < 'Done. Really'", "a <= 'new'", "'it''s' <= a", "a > 'gone'",
    "a between 'it''s' and 'Done. Really'", "a is distinct from 'new'", "a::text like 'n%'",
    "case a when 'new' then b = 'new' else true end", "coalesce(a, 'gone') <> 'gone'", "b = 'new'",
    "b in ('it''s', 'Done. Really')", "b >= 'Done. Really'", "c::public.state = 'new'",
    "c::public.state <> all (array['new', 'it''s']::public.state[])", "a = c::public.state",
]  # fmt: skip
REFUSED = {
    "s <> '[1,5)'": "the type public.span, which is neither",
    "a < c::public.state": "the order of the labels of public.state",
}


def test_constraints(runner, database, lake):
    """Each row is judged as the server judges it, by each constraint that isn't refused."""
    database.execute(DDL)
    job = bare_job(database, lake)
    sync(runner, job)
    constraints = [*CONSTRAINTS, *REFUSED]
    for number, text in enumerate(constraints):
        database.execute(f"alter table t add constraint c{number} check ({text}) not valid")
        database.execute(f"alter table t validate constraint c{number}")
    result = consume(runner, replace(job, run_id="lands"))
    (rules,) = read_rules(job, result, ["public.t"]).values()
    (state,) = job.read_states().values()
    plan = plan_suite(state, [column.name for column in state.columns], None, rules)
    conditions = {
        item.meaning.split()[2]: item.kwargs["condition"]
        for item in plan.expectations
        if item.meaning.startswith("CHECK")
    }
    rows = [(a, b, c) for a in (*LABELS, None) for b in (*LABELS, None) for c in (*LABELS, None)]
    held = pa.table(dict(zip("abc", map(list, zip(*rows, strict=True)), strict=True)))
    row = f"select %s::public.state as a, %s::{NAME} as b, %s::public.state as c"
    for number, text in enumerate(CONSTRAINTS):
        escaped = text.replace("%", "%%")
        theirs = [
            database.execute(f"select ({escaped}) is not false from ({row}) t", values)[0][0]
            for values in rows
        ]
        assert (text, evaluate(conditions[f"c{number}"], held).to_pylist()) == (text, theirs)
    assert any("domain constraint phase_check" in item.meaning for item in plan.expectations)
    assert [text.count("not checked") for text in plan.omitted] == [1, 1]
    for text, reason in zip(plan.omitted, REFUSED.values(), strict=True):
        assert reason in text


def test_a_targets_filter(runner, database, lake):
    """It may compare an enum's column; rows enter and leave by it, without Spark."""
    database.execute(DDL)
    database.execute("insert into t values (1, 'new'), (2, 'it''s'), (3, 'gone'), (4, null)")
    where = {"public.t": {"where": "a in ('new', 'it''s') and b is null"}}
    job = bare_job(
        database, lake, target={"root": lake, "tables": where}, quality={"enabled": True}
    )
    database.execute("alter table t replica identity full")
    sync(runner, job)
    database.execute("update t set a = 'gone' where id = 1; update t set a = 'new' where id = 3")
    consume(runner, replace(job, run_id="routes"))
    assert not runner.uses
    rows = DeltaTable(job.lake.target("public.t").uri).to_pyarrow_table(columns=["id"])
    assert sorted(rows["id"].to_pylist()) == [2, 3]
    of_run = {r.meaning: r.success for r in read_expectation_results(lake) if r.run_id == "routes"}
    assert [success for text, success in of_run.items() if "target's filter" in text] == [True]
