"""Domains, lengths and precisions of the source are expected of its target."""

from dataclasses import replace

import pytest

from tests.support.bookkeeping import read_expectation_results
from tests.support.pipelines import bare_job
from waldelta.jobs.consume import consume
from waldelta.jobs.validate import run_validate
from waldelta.lake.ledger import ColumnState, TableState, now
from waldelta.pipeline.run_result import RunFailed
from waldelta.postgres.server_position import read_oldest_xid
from waldelta.stages.check.constraints.constraints import read_declared_types
from waldelta.stages.sync.sync import sync

TYPES = """
create domain positive as numeric(9,2) check (value > 0);
create domain small as positive not null check (value < 100);
create domain tag as varchar(5) check (value !~~ 'x%');
"""


@pytest.mark.usefixtures("compiled")
@pytest.mark.soak("every declared type at its bounds")
def test_values_that_no_row_of_the_source_has(runner, database, lake):
    """PostgreSQL's values meet their types, NaN and negative scales too; others' may not."""
    database.execute(
        TYPES
        + """
        create table t(id int primary key, a small, b tag, c char(3), d varbit(4), e numeric(50,3),
          f numeric(3,-2), g numeric(2,4), h bit(2));
        insert into t values (1, 1.5, 'abcde', 'ä', b'1011', 'NaN', 12345, 0.0099, b'10'), (2, 99,
          null, null, null, -1.5, null, null, null);
    """
    )
    job = bare_job(database, lake, quality={"enabled": True})
    sync(runner, job)
    database.execute("insert into t values (3, 3, 'b', 'abc', b'', 12.3456, 0, -0.0001, b'11')")
    consume(runner, replace(job, run_id="fine"))
    found = {r.meaning: r.success for r in read_expectation_results(lake) if r.run_id == "fine"}
    meanings = [
        "domain constraint positive_check of column a holds: (VALUE > (0)::numeric)",
        "domain constraint small_check of column a holds: ((VALUE)::numeric < (100)::numeric)",
        "column a has no nulls, as its domain public.small says",
        "domain constraint tag_check of column b holds: ((VALUE)::text !~~ 'x%'::text)",
        "b fits character varying(5)", "c fits character(3)", "d fits bit varying(4)",
        "e fits numeric(50,3)", "f fits numeric(3,-2)", "g fits numeric(2,4)", "h fits bit(2)",
    ]  # fmt: skip
    assert {meaning: found.get(meaning) for meaning in meanings} == dict.fromkeys(meanings, True)
    run_validate(runner, replace(job, run_id="all"))
    found = {r.meaning: r.success for r in read_expectation_results(lake) if r.run_id == "all"}
    assert {meaning: found.get(meaning) for meaning in meanings} == dict.fromkeys(meanings, True)
    target = f"delta.`{job.lake.target('public.t').uri}`"
    runner.spark().sql(
        f"update {target} set a = 200, b = 'xabcdef', c = 'abcd', d ="
        " '10110', e = '1.5', f = 150, g = 0.01, h = '1' where id = 1"
    ).collect()
    runner.spark().sql(f"update {target} set a = null where id = 2").collect()
    database.execute("insert into t values (4, 4)")
    with pytest.raises(RunFailed):
        consume(runner, replace(job, run_id="wrong"))
    found = {r.meaning: r.success for r in read_expectation_results(lake) if r.run_id == "wrong"}
    assert {meaning: found.get(meaning) for meaning in meanings} == dict.fromkeys(
        meanings, False
    ) | {meanings[0]: True}


def test_which_are_read(database):
    """Validated ones of landed transactions; of lengths the wider; nothing of another column."""
    database.execute(
        TYPES + "alter domain tag add constraint later check (length(value) > 1) not valid"
    )
    database.execute(
        "create table t(id int primary key, a small, v varchar(3), w varchar(9), x varchar(3), n"
        " numeric(50,2))"
    )
    landed = read_oldest_xid(database.connection)
    database.execute("alter domain positive add constraint late check (value <> 7)")
    (oid,) = database.execute("select 't'::regclass::oid::bigint")[0]
    (small,) = database.execute("select 'small'::regtype::oid::bigint")[0]
    columns = [
        ColumnState("a", small, -1, "small", "decimal(9,2)", False, 2),
        ColumnState("v", 1043, 9, "character varying(5)", "string", False, 3),
        ColumnState("w", 1043, 9, "character varying(5)", "string", False, 4),
        ColumnState("x", 1043, 9, "character varying(5)", "string", False, 9),
        ColumnState("n", 1700, ((50 << 16) | 1) + 4, "numeric(50,1)", "string", False, 6),
    ]
    state = TableState(now(), "r", "public.t", 1, "synced", relation_ids=[oid], columns=columns)
    a, v, w = read_declared_types(database.connection, [state], landed)["public.t"]
    assert ([c.name for c in a.checks], a.not_null, a.precision) == (
        ["small_check", "positive_check"],
        ("small",),
        (9, 2),
    )
    assert (v.length, w.length) == (5, 9)
    found = read_declared_types(database.connection, [state], read_oldest_xid(database.connection))[
        "public.t"
    ]
    assert [c.name for c in found[0].checks] == ["small_check", "late", "positive_check"]
