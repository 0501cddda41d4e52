"""Repair: after a filter changed, the target equals the source's filtered rows."""

import itertools
import os
import random
from dataclasses import replace

import pytest
from deltalake import DeltaTable

import waldelta.stages.land.drain as land_module
import waldelta.stages.repair.repair as repair_module
from tests.oracles.compare import compare_target
from tests.oracles.random_workload import Workload
from tests.support.pipelines import bare_job, bare_slot, pipeline_file
from tests.support.seeds import chosen_seed
from waldelta.config import Publication
from waldelta.jobs.consume import consume
from waldelta.pipeline.drift.repair_plan import FilterRule, entering
from waldelta.stages.land.drain import drain
from waldelta.stages.sync.sync import sync

RUNS = itertools.count()

DDL = """
create table t(id int, a int not null, n int, v text, primary key (id, a));
alter table t alter v set storage external;
insert into t select g, g, nullif(g % 7, 0), case g % 2 when 0 then repeat(md5(g::text), 200)
  else 'v' end
from generate_series(1, 40) g;
create index on t(a);
"""


def run(runner, job):
    """A run of its own: one that is complete would be replayed."""
    return consume(runner, replace(job, run_id=f"run {next(RUNS)}"))


def with_own_filter(job, table, text):
    target = job.pipeline.target
    tables = (
        {**target.tables, table: {"where": text}}
        if text
        else {k: v for k, v in target.tables.items() if k != table}
    )
    document = {**target.model_dump(exclude_unset=True), "tables": tables}
    return replace(
        job,
        pipeline=job.pipeline.model_copy(update={"target": type(target).model_validate(document)}),
    )


def publish(database, job, text, table="t"):
    name = job.pipeline.source.publications[0].name
    others = "".join(
        f", {entry.name}"
        for entry in job.pipeline.source.publications[0].tables
        if entry.name != f"public.{table}"
    )
    database.execute(
        f"alter publication {name} set table {table} {f'where ({text})' if text else ''}{others}"
    )


def difference(runner, job, table="t"):
    return compare_target(
        runner, job.source.conninfo, job.pipeline, job.read_states()[f"public.{table}"]
    )


@pytest.fixture
def job(runner, database, lake):
    """A table of forty rows, of which those with a > 20 were copied."""
    database.execute(DDL)
    made = bare_job(database, lake)
    publish(database, made, "a > 20")
    sync(runner, made)
    return made


def told(result):
    found = [warning.split(": ")[-1] for warning in result.warnings if "it was repaired" in warning]
    assert len(found) == 1, result.warnings
    return found[0]


@pytest.mark.nightly("each kind of moving row at once; test_drift has one changed filter")
def test_rows_enter_and_leave_in_one_merge(runner, database, job, monkeypatch):
    """A small target's files become one; touched rows are read again; the stream goes on behind."""
    database.execute("insert into t select g, g, g, 'late' from generate_series(1001, 1010) g")
    run(runner, job)  # a second file
    publish(database, job, "a > 10 and a < 1006")
    files = DeltaTable(job.lake.target("public.t").uri).file_uris()
    assert (
        told(run(runner, job))
        == "10 rows added, 5 removed, 0 that changed during the repair were read again"
    )
    after = set(DeltaTable(job.lake.target("public.t").uri).file_uris())
    before = set(files)
    assert (len(before - after), len(after - before)) == (2, 1)
    assert difference(runner, job).rows == 0
    assert run(runner, job).warnings == []

    def write_then_land(*args):
        database.execute(
            "update t set n = 77 where a in (2, 3); insert into t values (5000, 4, 1, 'w'); delete"
            " from t where a = 15"
        )
        return land_module.land_through(*args)

    # Unread in the slot, around the change: into, out of, within and outside of both filters.
    changes = """
        update t set n = {0} where a in (3, 14, 30);
        update t set a = a + 1000, id = id + {0} where a in (4, 16);
        update t set id = id + {0} where a in (5, 17, 31);
        delete from t where a in (6 + {0}, 19 + {0}, 33 + {0});
        insert into t values (2000 + {0}, 7, 1, 'x'), (2000 + {0}, 18, 1, 'x'), (2000 + {0}, 37, 1,
          'x');
        update t set a = 8 where a = 20 + {0};
        update t set a = 21 where a = 9 + {0}
    """
    database.execute(changes.format(0))
    publish(database, job, "a < 20")
    database.execute(changes.format(1))
    with monkeypatch.context() as patched:
        patched.setattr(repair_module, "land_through", write_then_land)
        assert "rows added" in told(run(runner, job))
    assert difference(runner, job).rows > 0  # what was written since the snapshot is the next run's
    assert run(runner, job).warnings == []
    assert difference(runner, job).rows == 0


@pytest.mark.soak("a second cause of a copy")
def test_what_only_a_copy_mends(runner, database, job):
    """A TRUNCATE meanwhile, and a filter that Spark can't evaluate; told, and mended whole."""
    publish(database, job, "a > 5")
    database.execute("truncate t; insert into t values (1, 6, 6, 'v'), (2, 2, 2, 'v')")
    result = run(runner, job)
    assert (
        "public.t needs a whole copy: it was truncated or altered during the repair"
        in result.warnings
    )
    assert difference(runner, job).rows == 0
    publish(database, job, "hashint4(a) > 5")
    assert any("needs a whole copy" in text for text in run(runner, job).warnings)
    assert difference(runner, job).rows == 0


@pytest.mark.parametrize(
    "before, after",
    [
        ("a > 1000", "a > 900"),
        ("a > 900 and a < 950 or a = 7", "a > 800 and a < 960"),
        ("n > 19000", "n > 18900"),
        ("a = any (array[5, 6])", "a = any (array[5, 6, 7])"),
    ],
)
def test_an_index_finds_the_rows_that_enter(database, before, after):
    """However many rows both filters admit; rows where the old one is NULL are found, once each."""
    database.execute("create table t(id int primary key, a int not null, n int)")
    database.execute("insert into t select g, g, nullif(g, 18950) from generate_series(1, 20000) g")
    database.execute("create index on t(a); create index on t(n)")
    database.execute("analyze t")
    found = []
    for condition in entering(FilterRule(f"({before})"), FilterRule(f"({after})"), ["n"]):
        found += [row[0] for row in database.execute(f"select id from only t where {condition}")]
        plan = "\n".join(
            row[0] for row in database.execute(f"explain select * from only t where {condition}")
        )
        assert "Seq Scan" not in plan, plan
    expected = database.execute(f"select id from t where ({after}) and ({before}) is not true")
    assert sorted(found) == sorted(row[0] for row in expected)


KEYED = [
    "part > 2",
    "part < 2",
    "part in (1, 5)",
    "id > 60",
    "id between 30 and 90 and part <> 3",
    "part % 2 = 0",
    None,
]
WHOLE = [*KEYED, "a > 50", "a < 50 or b is null", "not a > 20"]


@pytest.mark.soak("random drift in many rounds")
def test_random_drift(runner, database, lake, monkeypatch):
    """Filters of a publication and of a target change at random, while others write. The seed is
    printed; WALDELTA_SEED repeats one, WALDELTA_ROUNDS makes it longer.
    """
    seed = chosen_seed()
    choose = random.Random(seed)
    with database.connect(autocommit=True) as connection:
        connection.execute("set lock_timeout = '10s'")  # a repair keeps no lock while it lands
        workload = Workload(connection, seed, ["t", "u"])
        filters = WHOLE if choose.random() < 0.5 else KEYED
        if filters is WHOLE:
            database.execute(
                "alter table t replica identity full; alter table u replica identity full"
            )
        # Filters of several publications are ORed.
        second = f"s_{database.name}_pub2"
        database.execute(f"create publication {second} for table t where (id < 0)")
        file = pipeline_file(lake, f"s_{database.name}", ["public.t", "public.u"])
        both = [*file.source.publications, Publication(name=second, manage=False)]
        source = file.source.model_copy(update={"publications": both})
        target = file.target.model_copy(update={"drift": "repair"})
        job = bare_slot(database, file.model_copy(update={"source": source, "target": target}))
        publish(database, job, choose.choice(KEYED))
        for _ in range(20):
            workload.transaction()
        sync(runner, job)

        def write_then_drain(*args):
            for _ in range(5):
                workload.transaction()
            return drain(*args)

        monkeypatch.setattr(land_module, "drain", write_then_drain)
        done = []
        for _ in range(int(os.environ.get("WALDELTA_ROUNDS") or 1)):
            workload.truncates = choose.random() < 0.2  # what a TRUNCATE needs is a copy
            for _ in range(10):
                workload.transaction()
            done.append((choose.choice(filters), choose.choice(filters)))
            if choose.random() < 0.5:
                publish(database, job, done[-1][0])
            else:
                database.execute(
                    f"alter publication {second} set table t where ({done[-1][0] or 'true'})"
                )
            job = with_own_filter(job, "public.u", done[-1][1])
            for _ in range(10):
                workload.transaction()
            result, _ = run(runner, job), run(runner, job)
            print(done[-1], result.warnings)
            for table in "tu":
                found = difference(runner, job, table)
                assert found.rows == 0, (f"WALDELTA_SEED={seed}", done, result.warnings, found)
