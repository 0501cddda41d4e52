"""External writers commit to targets, between runs and during a merge."""

import ast
import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql.types import BooleanType

import waldelta.changes.merge.file_merge
import waldelta.changes.merge.merge
from tests.support.fixtures.postgres import new_database
from tests.support.pipelines import copied_pipeline, new_pipeline, pipeline_file
from waldelta.jobs import Pipeline
from waldelta.lake import TargetVersion, local_path
from waldelta.pipeline.run_result import RunFailed
from waldelta.spark import OnSpark


@dataclass(frozen=True)
class Foreign:
    """What somebody does to a table, and as what it is told; None: it changes no row."""

    act: Callable
    told: str | None = None


def append(_, uri):
    key = 1000 + DeltaTable(uri).version()
    write_deltalake(
        uri, pa.table({"id": pa.array([key], pa.int32()), "v": ["foreign"]}), mode="append"
    )


def update(_, uri):
    DeltaTable(uri).update({"v": "'foreign'"}, predicate="id = 1")


def restore(_, uri):
    DeltaTable(uri).restore(DeltaTable(uri).version() - 1)


def optimize(_, uri):
    DeltaTable(uri).optimize.compact()


def vacuum(_, uri):
    DeltaTable(uri).vacuum(0, dry_run=False, enforce_retention_duration=False)


def compact(_, uri):
    optimize(_, uri)
    vacuum(_, uri)


TABLES = ("t_append", "t_update", "t_restore", "t_compact", "t_other")
# By delta-rs, since it is done from a task of Spark's as well.
BESIDE = {
    "t_append": Foreign(append, "WRITE"),
    "t_update": Foreign(update, "UPDATE"),
    "t_restore": Foreign(restore, "RESTORE"),
    "t_compact": Foreign(compact),
    "t_other": Foreign(optimize),
}


@pytest.fixture(scope="module")
def database(postgres):
    with pytest.MonkeyPatch.context() as patch, new_database(postgres, patch) as made:
        yield made


@pytest.fixture(scope="module")
def runner(spark_jvm):
    return OnSpark(spark_jvm())


@pytest.fixture(scope="module")
def pipeline(runner, database, tmp_path_factory):
    """Tables with a key and two rows each, without our columns, so that anybody can write."""
    for name in TABLES:
        database.execute(f"create table {name}(id int primary key, v text)")
        database.execute(f"insert into {name} values (1, 'source'), (2, 'source')")
    lake = (tmp_path_factory.mktemp("foreign") / "lake").as_uri()
    target = {"root": lake, "metadata_columns": False}
    return copied_pipeline(
        runner, new_pipeline(database, lake, [f"public.{n}" for n in TABLES], target=target)
    )


@pytest.fixture
def add(database):
    """Adds a row to each table, which becomes a file of its own that OPTIMIZE can compact."""

    def made(number):
        for name in TABLES:
            database.execute(f"insert into {name} values (%s, 'source')", (number,))

    return made


@pytest.fixture
def change(database, add):
    """Changes a row of each table and adds one."""

    def made(number):
        add(number)
        for name in TABLES:
            database.execute(f"update {name} set v = %s where id = 2", (f"changed {number}",))

    return made


def target_uri_of(pipeline, name):
    return pipeline.target_path(f"public.{name}")


def rows_of(pipeline, name, version=None):
    held = DeltaTable(target_uri_of(pipeline, name), version=version).to_pyarrow_table(
        columns=["id", "v"]
    )
    return sorted(tuple(row.values()) for row in held.to_pylist())


def told_by(result):
    told = [warning for warning in result.warnings if "an external writer wrote" in warning]
    return {warning.partition(":")[0].removeprefix("public."): warning for warning in told}


def names(cases):
    return sorted(name for name, foreign in cases.items() if foreign.told)


def by_tasks(monkeypatch, acts):
    """Between the reading of the target and the commit of what tasks merged."""
    monkeypatch.setattr("waldelta.changes.merge.file_merge.read_small", lambda *_: None)
    real = TargetVersion.replace_files

    def commit(table, *given, **named):
        if "/_waldelta/" not in table.place.uri:
            acts(table.place.uri.rpartition("/")[2])
        return real(table, *given, **named)

    monkeypatch.setattr(TargetVersion, "replace_files", commit)


def by_spark(monkeypatch, acts):
    """While Spark's MERGE, which has chosen the target's version by then, reads what it merges."""
    monkeypatch.setattr("waldelta.changes.merge.merge.merge_files", lambda *_: None)
    module = waldelta.changes.merge.merge
    merge_by_spark, as_stored = module._merge, module.as_stored

    def merge(runner, job, changes, plan, tag, fence):
        table = plan.state.table_name.removeprefix("public.")

        def beside(_):
            acts(table)
            return True

        name = f"beside_{table}"
        runner.spark().udf.register(name, beside, BooleanType())
        with monkeypatch.context() as patch:
            patch.setattr(
                module,
                "as_stored",
                lambda *given: f"(select * from {as_stored(*given)} where {name}(action))",
            )
            return merge_by_spark(runner, job, changes, plan, tag, fence)

    monkeypatch.setattr(module, "_merge", merge)


@pytest.mark.soak("a race with another writer")
@pytest.mark.parametrize(("way", "number"), [(by_tasks, 10), (by_spark, 20)])
def test_what_others_commit_beside_a_merge_is_neither_lost_nor_undone(
    runner, pipeline, add, change, monkeypatch, tmp_path, way, number
):
    """The merge is done again on what they left; what changed data is told by the same run."""

    def act(name):
        if not (done := tmp_path / name).exists():
            done.touch()
            BESIDE[name].act(None, target_uri_of(pipeline, name))
            (tmp_path / f"{name}.rows").write_text(repr(rows_of(pipeline, name)))

    add(100 + number)
    pipeline.consume(runner)
    change(number)
    with monkeypatch.context() as patch:
        way(patch, act)
        result = pipeline.consume(runner)
    assert sorted(told_by(result)) == names(BESIDE)
    expected = {}
    for name in TABLES:
        left = dict(ast.literal_eval((tmp_path / f"{name}.rows").read_text()))
        expected[name] = left | ({2: f"changed {number}"} if 2 in left else {}) | {number: "source"}
    assert {name: rows_of(pipeline, name) for name in TABLES} == {
        n: sorted(e.items()) for n, e in expected.items()
    }
    assert pipeline.consume(runner).warnings == []


def test_a_copy_into_a_target_that_keeps_rows_reads_no_file_of_an_external_commit(
    runner, database, lake, tmp_path
):
    """Such a copy compares its rows with the target's."""
    database.execute(
        "create table s_kept(id int primary key, v text); insert into s_kept values (1, 'a')"
    )
    file = pipeline_file(
        lake,
        f"s_kept_{database.name}",
        ["public.s_kept"],
        target={"root": lake, "tables": {"public.s_kept": {"mode": "soft_delete"}}},
    )
    made = copied_pipeline(runner, Pipeline(file))
    folder = local_path(target_uri_of(made, "s_kept"))
    _stray(folder, tmp_path / "outside", _fifo)
    told = _failure_of(lambda: made.resync(runner, ["public.s_kept"]))
    assert re.search(r"s_kept\b.*not a regular file.*move the table's folder away first", told), (
        told
    )
    shutil.move(folder, tmp_path / "away")
    made.resync(runner, ["public.s_kept"])
    assert rows_of(made, "s_kept") == [(1, "a")]


def _linked(folder, outside):
    (folder / "link").symlink_to(outside)
    return "link/x.parquet"


def _fifo(folder, _):
    os.mkfifo(folder / "evil.parquet")
    return "evil.parquet"


# What a commit of somebody else's names as a file, by table; None: its entry of the log is a FIFO.
STRAYS = {
    "s_fifo": _fifo,
    "s_absolute": lambda _, outside: str(outside / "x.parquet"),
    "s_percents": lambda folder, outside: (
        "%2e%2e/" * len(folder.parts) + str(outside / "x.parquet").lstrip("/")
    ),
    "s_linked": _linked,
    "s_entry": None,
}
READING = {
    "consume": lambda pipeline, runner: pipeline.consume(runner),
    "reconcile": lambda pipeline, runner: pipeline.reconcile(runner),
    "repair": lambda pipeline, runner: pipeline.reconcile(runner, repair=True),
    "validate": lambda pipeline, runner: pipeline.validate(runner),
    "maintain": lambda pipeline, runner: pipeline.maintain(runner),
}


def _stray(folder, outside, act):
    """Commits a file that no reader may follow to a table."""
    entry = folder / "_delta_log" / f"{DeltaTable(folder.as_uri()).version() + 1:020d}.json"
    if act is None:
        os.mkfifo(entry)
        return
    outside.mkdir()
    file = next(folder.rglob("*.parquet"))
    shutil.copy(file, outside / "x.parquet")
    add = {
        "path": act(folder, outside),
        "partitionValues": {},
        "size": file.stat().st_size,
        "modificationTime": 0,
        "dataChange": True,
    }
    lines = ({"commitInfo": {"operation": "WRITE", "timestamp": 0}}, {"add": add})
    entry.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def _failure_of(act, seconds=240):
    """What an action fails with; also when it waits for a FIFO."""
    ended = []

    def run():
        try:
            ended.append(act())
        except RunFailed as err:
            ended.append(err)

    running = threading.Thread(target=run, daemon=True)
    running.start()
    running.join(seconds)
    assert ended, "it hangs"
    assert isinstance(ended[0], RunFailed), ended[0]
    return str(ended[0])


@pytest.mark.nightly("each job, of which a copy is ordinary")
def test_no_job_reads_a_file_that_an_external_commit_leads_to_elsewhere(
    runner, database, lake, tmp_path
):
    """Not even one that would be read before any run applies changes again; other tables go on."""
    tables = [*STRAYS, "s_fine"]
    for name in tables:
        database.execute(
            f"create table {name}(id int primary key, v text); insert into {name} values (1, 'a')"
        )
    made = copied_pipeline(
        runner,
        Pipeline(
            pipeline_file(lake, f"s_stray_{database.name}", [f"public.{name}" for name in tables])
        ),
    )
    for name in tables:
        database.execute(f"insert into {name} values (2, 'b')")
    made.consume(runner)
    for name, act in STRAYS.items():
        _stray(local_path(target_uri_of(made, name)), tmp_path / f"outside_{name}", act)
    versions = {name: DeltaTable(target_uri_of(made, name)).version() for name in STRAYS}
    for name in tables:
        database.execute(f"update {name} set v = 'c' where id = 1")
    for verb, act in READING.items():
        told = _failure_of(lambda act=act: act(made, runner))
        wrong = {
            name: re.search(rf"{name}\b[^\n]*(isn't in its folder|not a regular file)[^\n]*", told)
            for name in STRAYS
        }
        assert all(wrong.values()), (verb, told)
        assert "s_fine" not in told, verb
    assert {name: DeltaTable(target_uri_of(made, name)).version() for name in STRAYS} == versions
    assert rows_of(made, "s_fine") == [(1, "c"), (2, "b")]

    # A copy is the remedy, and reads none of these files.
    copied = ["s_fifo", "s_linked", "s_entry"]
    for entry in local_path(target_uri_of(made, "s_entry")).glob("_delta_log/*.json"):
        if entry.is_fifo():
            entry.unlink()
    made.resync(runner, [f"public.{name}" for name in copied])
    assert [rows_of(made, name) for name in copied] == [[(1, "c"), (2, "b")]] * len(copied)
