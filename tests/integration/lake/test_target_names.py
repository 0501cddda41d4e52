"""Targets by other names in the lake: every verb finds them, and another name moves the folder."""

from __future__ import annotations

import pytest
import yaml
from deltalake import DeltaTable, write_deltalake

from tests.oracles.compare import differing
from tests.support.concurrent_work import killed_at
from tests.support.pipelines import new_pipeline
from waldelta.jobs.dbt_sources import dbt_sources
from waldelta.lake import local_path
from waldelta.monitoring.table_list import read_table_details
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets import move_target
from waldelta.stages.setup.setup import plan_setup

TABLES = ("t", "u")


@pytest.fixture
def made(database, lake):
    """A function that returns the pipeline with these settings of the target."""
    for name in TABLES:
        database.execute(f"create table {name} (id int primary key, v text)")
        database.execute(f"insert into {name} select g, 'old' from generate_series(1, 5) g")
    names = [f"public.{name}" for name in TABLES]
    return lambda **target: new_pipeline(database, lake, names, target={"root": lake, **target})


def folders(lake):
    """The targets' folders below the lake's root."""
    root = local_path(lake)
    found = (path.parent.relative_to(root) for path in root.glob("*/*/_delta_log"))
    return sorted(str(path) for path in found if path.parts[0] != "_waldelta")


def run(runner, database, pipeline, value):
    """Changes of all tables, and a run that applies them; returns the run's result."""
    for name in TABLES:
        database.execute(f"update {name} set v = '{value}' where id = 1")
        database.execute(f"insert into {name} (v, id) select 'n', max(id) + 1 from {name}")
    result = pipeline.consume(runner)
    assert differing(runner, pipeline.job()) == {}
    return result


def test_every_verb_works_by_names_of_the_file(runner, database, lake, made):
    """The targets' keys everywhere else are still the names of the source's tables."""
    pipeline = made(names="raw.{schema}_{table}", tables={"public.u": {"name": "second"}})
    pipeline.setup()
    pipeline.sync(runner)
    assert folders(lake) == ["public/second", "raw/public_t"]
    result = run(runner, database, pipeline, "new")
    assert sorted(result.tables) == ["public.t", "public.u"]
    DeltaTable(pipeline.target_path("public.t")).delete("id = 2")
    pipeline.reconcile(runner, repair=True)
    pipeline.maintain(runner)
    pipeline.validate(runner)
    assert differing(runner, pipeline.job()) == {}
    sources = yaml.safe_load(dbt_sources(pipeline.job()))["sources"]
    assert [(source["schema"], source["tables"][0]["name"]) for source in sources] == [
        ("raw", "public_t"),
        ("public", "second"),
    ]
    details = read_table_details(pipeline.job().ledger, "public.t")
    assert details.uri.endswith("/raw/public_t")
    pipeline.sync(runner, tables=["public.t"], reason="again")
    assert folders(lake) == ["public/second", "raw/public_t"]


def test_another_name_moves_the_folder(runner, database, lake, made, conn):
    """A run that is killed at any moment of it leaves a target that the next one finds."""
    made().setup()
    made().sync(runner)
    ids = {name: DeltaTable(f"{lake}/public/{name}").metadata().id for name in TABLES}
    for step in ("move.begun", "move.renamed", "move.recorded"):
        schema = step.replace(".", "_")
        pipeline = made(names=f"{schema}.{{schema}}_{{table}}")
        warned = plan_setup(conn, pipeline.job()).warnings
        assert any(f"moves it to {schema}.public_t" in text for text in warned)
        with killed_at(step, move_target.__name__):
            pipeline.consume(runner)
        assert not run(runner, database, pipeline, step).warnings
        assert folders(lake) == [f"{schema}/public_t", f"{schema}/public_u"]
        uris = {name: pipeline.target_path(f"public.{name}") for name in TABLES}
        assert {name: DeltaTable(uri).metadata().id for name, uri in uris.items()} == ids
    run(runner, database, made(), "back")
    assert folders(lake) == ["public/t", "public/u"]


def test_a_name_that_is_taken_leaves_the_target_where_it_is(runner, database, lake, made, conn):
    """Changes are applied all the same, and check says why."""
    made().setup()
    made().sync(runner)
    write_deltalake(f"{lake}/public/mine", DeltaTable(f"{lake}/public/u").to_pyarrow_table())
    pipeline = made(tables={"public.t": {"name": "u"}, "public.u": {"name": "mine"}})
    for name in TABLES:
        database.execute(f"insert into {name} values (9, 'stays')")
    warnings = [text for text in pipeline.consume(runner).warnings if "in the lake" in text]
    assert [text.split(":")[0] for text in sorted(warnings)] == [
        "public.t stays public.t in the lake",
        "public.u stays public.u in the lake",
    ]
    assert differing(runner, made().job()) == {}
    assert len(DeltaTable(f"{lake}/public/mine").history()) == 1
    assert [text for text in plan_setup(conn, pipeline.job()).warnings if "lake" in text]


def test_two_targets_of_one_name_are_refused_before_anything_is_made(
    runner, database, lake, made, conn
):
    """By check, and by a sync without it."""
    made().setup()
    pipeline = made(tables={f"public.{name}": {"name": "both"} for name in TABLES})
    problems = plan_setup(conn, pipeline.job()).problems
    assert any("would both be public.both" in text for text in problems)
    with pytest.raises(RunFailed, match=r"would both be public\.both"):
        pipeline.sync(runner)
    assert folders(lake) == ["public/both"]


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("public.absent", "no table of this name is published: publish it, or correct the name"),
        ('public."order"', "no table of this name is published: write public.order"),
        ("order", "write schema.table"),
        ("public.order", None),
    ],
)
def test_options_of_no_target_are_named(database, lake, key, text):
    """A table's name is what PostgreSQL prints with its own quotes."""
    database.execute('create table "order" (id int primary key)')
    target = {"root": lake, "tables": {key: {"file_size": "64mb"}}}
    plan = new_pipeline(database, lake, ["public.order"], target=target).check(estimate=False)
    warnings = [warning for warning in plan.warnings if warning.startswith("target.tables")]
    assert len(warnings) == (text is not None)
    for warning in warnings:
        assert warning.startswith(f"target.tables.{key}: no target has this entry's options")
        assert text in warning
