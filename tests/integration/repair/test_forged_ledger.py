"""A writer of the lake forges rows of the ledger: none of their texts becomes SQL on the source."""

import json
from contextlib import contextmanager, suppress
from dataclasses import replace

import pytest
from deltalake import DeltaTable

from tests.oracles.target_rows import read_target
from tests.support.pipelines import bare_job
from tests.support.servers.called_functions import SAY_CALLED, calls
from waldelta.jobs import Pipeline
from waldelta.jobs.consume import consume
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.sync.sync import sync

# What a forger has the source call, as the reader. As an immutable function it is called while a
# statement is planned, and it works in a read-only transaction, too.
CALL = "public.seen()"
DDL = f"""
create function seen() returns bool immutable language plpgsql as $$
begin
    {SAY_CALLED}
    return true;
end $$;
create table t (id int, a int, big text, primary key (id, a));
alter table t alter big set storage external;
insert into t select g, g, repeat(md5(g::text), 200) from generate_series(1, 20) g;
create table secret (id int, a int, big text, primary key (id, a));
insert into secret select g, g + 30, 'secret ' || g from generate_series(1, 20) g;
"""


def publish(database, job, where):
    name = job.pipeline.source.publications[0].name
    database.execute(f"alter publication {name} set table t where ({where})")


@pytest.fixture
def job(runner, database, lake):
    """A pipeline with filters of its publication and of its own, which has copied its table."""
    database.execute(DDL)
    target = {"root": lake, "tables": {"public.t": {"where": "a < 1000"}}}
    made = bare_job(database, lake, target=target)
    publish(database, made, "a > 5")
    sync(runner, made)
    return made


@contextmanager
def nothing_is_called(database):
    """No statement in this block calls what the forger wrote."""
    with calls(database) as roles:
        database.execute("explain select public.seen()")
    assert roles, "the log doesn't show calls: this test shows nothing"
    with calls(database) as roles:
        yield
    assert roles == []


def forge(job, **values):
    """Write a row of the ledger as anyone can who may only write files of the lake."""
    job.ledger.append(replace(job.read_states()["public.t"], **values))


def targets_values(job):
    return [value for (value,) in read_target(job.lake.target("public.t").uri, "big")]


def test_a_type_name_is_no_sql(runner, database, job):
    """A row that differs is read again by its key."""
    called = f"int4 + {CALL}::int4 - 1"
    key, *others = job.read_states()["public.t"].columns
    forge(job, columns=[replace(key, type_name=called), *others])
    DeltaTable(job.lake.target("public.t").uri).update({"big": "'another'"}, predicate="id = 10")
    with nothing_is_called(database), pytest.raises(RunFailed):
        Pipeline(job.pipeline).reconcile(runner, run_id="first")


def test_another_tables_oid_shows_none_of_its_rows(runner, database, job):
    """The reader may read a table that no publication of the pipeline has."""
    (own,) = job.read_states()["public.t"].relation_ids
    ((other,),) = database.execute("select 'secret'::regclass::oid::bigint")
    forge(job, relation_ids=[other, own])
    database.execute("update t set a = 33 where id = 3")
    with suppress(RunFailed):
        consume(runner, replace(job, run_id="first"))
    assert not any("secret" in value for value in targets_values(job))


def forged_text(state, name):
    """The filter as it is stored, with a call."""
    text = f"(a > 7) AND {CALL}"
    if name == "row_filter":
        return text
    return json.dumps(json.loads(state.target_filter) | {"analysed": text})


@pytest.mark.parametrize(
    "name",
    ["row_filter", pytest.param("target_filter", marks=pytest.mark.soak("the other filter"))],
)
def test_a_stored_filter_is_no_sql(runner, database, job, name):
    """A changed filter is compared with the stored one: the source is read for new rows."""
    forge(job, **{name: forged_text(job.read_states()["public.t"], name)})
    publish(database, job, "a > 3")
    with nothing_is_called(database):
        result = consume(runner, replace(job, run_id="first"))
    assert result.status == "succeeded"
    assert len(targets_values(job)) == 17
