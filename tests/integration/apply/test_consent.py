"""With ``schema_changes: ask`` an operator decides before a target loses data or is copied."""

import re
from dataclasses import replace

import pytest

from tests.oracles.target_rows import source_rows, target_rows
from tests.support.pipelines import bare_job
from tests.support.seeds import chosen_random
from waldelta.errors import ConsentNeeded
from waldelta.jobs.consume import consume
from waldelta.jobs.decide import run_decide
from waldelta.pipeline.drift import columns_to_stop, open_questions, schema_rules
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.sync.sync import sync


@pytest.fixture
def job(runner, database, lake):
    """A copied table whose changes of columns are asked about."""
    labels = ", ".join(f"'w{n}'" for n in range(1, 10))
    database.execute(f"create type mood as enum ({labels})")
    database.execute(
        "create table t(id int primary key, v text, w mood not null default 'w9', n int);"
        " insert into t select g, 'v' || g, ('w' || g)::mood, g from generate_series(1, 6) g"
    )
    target = {"root": lake, "schema_changes": "ask"}
    job = bare_job(database, lake, ["public.t"], target=target)
    sync(runner, job)
    return job


def decide(runner, job, action):
    """Answers what waits as an operator does; returns what was asked."""
    waiting = [row for row in open_questions(job.ledger) if row.status == "waiting"]
    ids = [row.id for row in waiting]
    decided = run_decide(runner, job, action, ids=ids, reason="ticket 7", by="mia")
    assert decided.status == "succeeded"
    # A refused copy is applied at once: its table fails until it is synced.
    answered = {row.status: row.by for row in open_questions(job.ledger)}
    status = {"agree": "agreed", "refuse": "refused"}[action]
    copies = action == "refuse" and {row.kind for row in waiting} == {"copy"}
    assert answered == ({} if copies else {status: "mia"})
    return [row.reason for row in waiting]


# Changes of w that an operator refuses; a new row has a value in it after the second one only.
REFUSED = {
    "dropped": "alter table t drop column w; drop type mood",
    "retyped": "alter table t alter w drop default, alter w type text using 'x' || w, alter w set"
    " default 'later'; drop type mood",
}


def refuse_to_lose_a_column(runner, database, job, change=REFUSED["dropped"]):
    """The target keeps the column with its last values, also those of changes that waited."""
    database.execute("insert into t values (7, 'v7', 'w7', 7)")
    database.execute(f"{change}; update t set v = 'first' where id = 1")
    with pytest.raises(RunFailed, match="until an operator decides"):
        consume(runner, job)
    decide(runner, job, "refuse")
    consume(runner, job)


COPIES = "(if you agree, a new copy of 6 rows replaces the target's rows; if you refuse, "
# What is changed, what the decision says, and whether the table is copied once it is agreed to.
CHANGES = {
    "a dropped column": (
        "alter table t drop column w",
        ("the source has dropped column w (if you agree, the target loses its values in all rows, 6"
        " at the last copy; if you refuse, w stays with its last values, and new rows have none)"),
        False,
    ),
    "another type": (
        "alter table t alter column n type text using 'n' || n",
        ("column 'n' changed its type from integer to text, and the source doesn't send the changed"
        f" values {COPIES}n stays with its last values, and new rows have none)"),
        True,
    ),
    "a rewrite": (
        "alter table t alter column v type text using upper(v)",
        ("ALTER TABLE rewrote column v, and PostgreSQL doesn't replicate rewrites "
        f"{COPIES}its changes wait until it is synced)"),
        True,
    ),
    "another key": (
        "alter table t drop constraint t_pkey; alter table t add primary key (n)", COPIES, True
    ),
    "a lost replica identity": ("alter table t drop constraint t_pkey", COPIES, True),
}  # fmt: skip


# A change of a column that is asked about, and one that a copy follows.
ALWAYS = ("a dropped column", "another key")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            change,
            marks=() if change in ALWAYS else pytest.mark.nightly("a change alike"),
        )
        for change in CHANGES
    ],
)
def test_a_change_waits_until_it_is_agreed_to(runner, database, job, change):
    """Until then nothing is applied, and the question is recorded once."""
    statement, question, is_copied = CHANGES[change]
    generation = job.read_states()["public.t"].generation
    before = target_rows(job, "t", "id", "v", "w", "n")
    database.execute(statement)
    database.execute("insert into t(id, n) values (7, '7')")
    for _ in range(2):
        with pytest.raises(RunFailed, match="wait in the change log until an operator decides"):
            consume(runner, job)
    assert target_rows(job, "t", "id", "v", "w", "n") == before
    (asked,) = decide(runner, job, "agree")
    assert question in asked
    consume(runner, job)
    assert open_questions(job.ledger) == []
    names = database.execute(
        "select attname::text from pg_attribute where attrelid = 't'::regclass and attnum > 0 and"
        " not attisdropped order by attnum"
    )
    columns = [name for (name,) in names]
    assert target_rows(job, "t", *columns) == source_rows(database, "t")
    assert (job.read_states()["public.t"].generation > generation) is is_copied
    with pytest.raises(RunFailed, match=r"no schema change of public\.t waits for a decision"):
        run_decide(runner, job, "agree", tables=["public.t"], reason="again")


def test_what_takes_nothing_away_is_followed(runner, database, job):
    """An added column, a renamed one and a wider type lose no value."""
    database.execute("alter table t add column x int default 5; alter table t rename v to y")
    database.execute("insert into t values (7, 'a', 'w7', 7, 8)")
    consume(runner, job)
    assert target_rows(job, "t", "id", "y", "w", "n", "x") == source_rows(database, "t")


def test_a_refused_copy_leaves_the_table_as_it_is(runner, database, job):
    """Its changes wait until it is synced."""
    database.execute("alter table t alter column v type text using upper(v)")
    database.execute("insert into t(id, n) values (7, 7)")
    with pytest.raises(RunFailed, match="until an operator decides"):
        consume(runner, job)
    decide(runner, job, "refuse")
    with pytest.raises(RunFailed, match="an operator refused a new copy"):
        consume(runner, job)
    assert len(target_rows(job, "t", "id")) == 6
    sync(runner, job, ["public.t"])
    consume(runner, job)
    assert target_rows(job, "t", "id", "v", "w", "n") == source_rows(database, "t")


@pytest.mark.parametrize(
    "change",
    ["dropped", pytest.param("retyped", marks=pytest.mark.nightly("another way to lose values"))],
)
def test_a_refused_column_keeps_its_last_values(runner, database, job, change):
    """Through random changes in several runs; new rows have none, and the next drop asks again."""
    chance = chosen_random()
    last = {key: f"w{key}" for key in range(1, 7)} | {7: "w7"}
    refuse_to_lose_a_column(runner, database, job, REFUSED[change])
    for _ in range(4):
        for _ in range(chance.randint(1, 12)):
            key, other = chance.randint(1, 12), chance.randint(1, 12)
            kind = chance.choice(("insert", "update", "update", "move", "delete"))
            if kind == "insert" and key not in last:
                database.execute(f"insert into t(id, v, n) values ({key}, 'new', {key})")
                last[key] = None
            elif kind == "update":
                database.execute(f"update t set v = v || 'x' where id = {key}")
            elif kind == "move" and key in last and other not in last:
                database.execute(f"update t set id = {other} where id = {key}")
                last[other] = last.pop(key)
            elif kind == "delete":
                database.execute(f"delete from t where id = {key}")
                last.pop(key, None)
        consume(runner, job)
        source = {key: row for key, *row in database.execute("select id, v, n from t")}
        expected = [(key, *source[key], last[key]) for key in last]
        assert target_rows(job, "t", "id", "v", "n", "w") == sorted(expected, key=repr)
    database.execute("alter table t drop column if exists w, drop column v")
    database.execute("insert into t values (20, 20)")
    with pytest.raises(
        RunFailed, match=re.escape("public.t: the source has dropped column v (if you agree")
    ):
        consume(runner, job)


def test_a_retyped_column_that_returns_to_its_type_is_asked_about(runner, database, job):
    """Rows got other values in the meantime; the column stays stopped until a copy."""
    statement = "alter table t alter n type text using 'n' || n"
    refuse_to_lose_a_column(runner, database, job, statement)
    database.execute("alter table t alter n type int using substr(n, 2)::int * 10")
    database.execute("insert into t(id, n) values (8, 80)")
    consume(runner, job)
    assert target_rows(job, "t", "id", "n") == [*((k, k) for k in range(1, 8)), (8, None)]
    sync(runner, job, ["public.t"])
    consume(runner, job)
    assert target_rows(job, "t", "id", "v", "w", "n") == source_rows(database, "t")


def test_a_refused_column_is_lost_only_by_a_copy_that_is_agreed_to(runner, database, job):
    """What else needs a new copy doesn't take the column along: it waits."""
    refuse_to_lose_a_column(runner, database, job)
    database.execute("alter table t alter column n type text using 'n' || n")
    database.execute("insert into t values (8, 'a', 'b')")
    with pytest.raises(RunFailed, match="until an operator decides"):
        consume(runner, job)
    assert target_rows(job, "t", "w")[0] == ("w1",)
    (asked,) = decide(runner, job, "agree")
    assert "a new copy of 6 rows replaces the target's rows, without w;" in asked
    consume(runner, job)
    assert target_rows(job, "t", "id", "v", "n") == source_rows(database, "t")
    assert "w" not in {column.name for column in job.read_states()["public.t"].columns}


def test_a_decision_on_a_column_counts_after_a_repair(runner, database, job):
    """Which begins another generation of the target."""
    refuse_to_lose_a_column(runner, database, job)
    state = job.read_states()["public.t"]
    assert [column.name for column in state.columns if column.stopped] == ["w"]
    before = [replace(column, stopped=False) for column in state.columns]
    later = replace(state, generation=state.generation + 1, columns=before)
    assert columns_to_stop(schema_rules(job, later), later, ["w"]) == {"w"}
    of_another_table = replace(later, relation_ids=[state.relation_ids[0] + 1])
    with pytest.raises(ConsentNeeded):
        columns_to_stop(schema_rules(job, of_another_table), of_another_table, ["w"])


def test_a_copy_that_nobody_was_asked_for_leaves_a_refused_column(runner, database, job):
    """Another filter of the target would need one."""
    refuse_to_lose_a_column(runner, database, job)
    tables = {"public.t": {"where": "id > 2"}}
    target = job.pipeline.target.model_validate(
        job.pipeline.target.model_dump(exclude_unset=True) | {"tables": tables}
    )
    narrow = replace(job, pipeline=job.pipeline.model_copy(update={"target": target}))
    with pytest.raises(RunFailed, match="a new copy drops columns that an operator decided to"):
        consume(runner, narrow)
    assert target_rows(job, "t", "w")[0] == ("w1",)
