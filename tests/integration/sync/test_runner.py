"""Where a run's work is done: in its own process while it is small, by Spark when there is more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from deltalake import DeltaTable

from tests.oracles.target_rows import read_target
from tests.support.pipelines import pipeline_file, written
from waldelta.errors import ConfigError
from waldelta.jobs import Pipeline
from waldelta.pipeline.job import lake_of
from waldelta.pipeline.run_result import RunFailed

pytestmark = pytest.mark.pg

# A Java that isn't there: whatever starts Spark ends with the error about it.
WITHOUT_JAVA = {"JAVA_HOME": "/nonexistent"}
TABLES = ("t", "u", "v")
TYPES = (
    "id int primary key, a text, n numeric(10, 2), at timestamptz, j jsonb, big text,"
    " since timestamp default '2024-02-29 12:00:00.5', many timestamp[] default '{infinity}'"
)


class Commands:
    """The command line on one pipeline file, each verb a process of its own."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def run(self, verb: str, *options: str, code: int = 0, **environment: str) -> dict:
        """Run a verb; returns its result."""
        result = self.file.with_suffix(".json")
        result.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "waldelta", verb, self.file, f"--result={result}", *options],
            env=os.environ | environment,
            capture_output=True,
            check=False,
            text=True,
        )
        assert done.returncode == code, done.stderr
        return json.loads(result.read_text()) if result.exists() else {}


@pytest.fixture
def commands(database, lake, tmp_path) -> Commands:
    """A pipeline of three tables with 500 rows each, set up and not copied yet."""
    for name in TABLES:
        database.execute(f"create table {name} ({TYPES})")
        database.execute(
            f"insert into {name} select i, 'x' || i, i, now(), '[1]', repeat('y', 20000) from"
            " generate_series(1, 500) i"
        )
    pipeline = pipeline_file(
        lake, f"s_{database.name}", [f"public.{name}" for name in TABLES], quality={"enabled": True}
    )
    made = Commands(written(pipeline, tmp_path))
    made.run("setup", **WITHOUT_JAVA)
    return made


def change(database) -> None:
    """Change some rows of each table."""
    for name in TABLES:
        database.execute(f"update {name} set a = a || '!' where id % 50 = 0")
        database.execute(f"delete from {name} where id % 70 = 1")
        database.execute(f"insert into {name} (id, a) select max(id) + 1, 'new' from {name}")


def held(lake: str, name: str) -> list[tuple]:
    """The target's rows, without the large values."""
    return sorted(map(tuple, read_target(f"{lake}/public/{name}", "id", "a", "n")))


def source(database, name: str) -> list[tuple]:
    """The same of the source."""
    return sorted(database.execute(f"select id, a, n from {name}"))


def runners(result: dict) -> set[str]:
    """Who worked for the stages."""
    return {stage["runner"] for stage in result["stages"].values()}


def test_small_runs_need_no_java(commands, database, lake):
    """Copy, changes, checks, an idle run, a comparison with the source, a repair."""
    assert runners(commands.run("sync", **WITHOUT_JAVA)) == {"this process"}
    change(database)
    result = commands.run("consume", **WITHOUT_JAVA)
    assert runners(result) == {"this process"}
    assert result["passed"] == [f"public.{name}" for name in TABLES]
    assert runners(commands.run("consume", **WITHOUT_JAVA)) == {"this process"}
    for name in TABLES:
        assert held(lake, name) == source(database, name)
    table = DeltaTable(f"{lake}/public/t")
    table.delete("id = 2")
    result = commands.run("reconcile", "--repair", "--reason=known", **WITHOUT_JAVA)
    assert runners(result) == {"this process"}
    assert held(lake, "t") == source(database, "t")


def test_the_python_object_needs_no_session(commands, database, lake, monkeypatch):
    """It opens one itself once there is more to do; the commands of the other tests do so, too."""
    monkeypatch.setattr(
        "waldelta.spark.session.spark_session", lambda *_, **__: pytest.fail("Java")
    )
    pipeline = Pipeline.load(commands.file)
    assert runners(pipeline.sync().document()) == {"this process"}
    change(database)
    assert runners(pipeline.consume().document()) == {"this process"}
    for name in TABLES:
        assert held(lake, name) == source(database, name)


def test_own_expectations_and_gates_need_no_session(commands, database, lake, monkeypatch):
    """Of kinds that are known: they are met, keep a row out, and stop a table run after run."""
    monkeypatch.setattr(
        "waldelta.spark.session.spark_session", lambda *_, **__: pytest.fail("Java")
    )
    suites = commands.file.parent / "suites"
    suites.mkdir()

    def own(name: str, gate: str) -> None:
        items = [
            ("expect_column_values_to_be_between", {"column": "n", "min_value": 0}),
            ("expect_column_values_to_match_regex", {"column": "a", "regex": "^x"}),
        ]
        texts = {"expectations": [{"type": t, "kwargs": k, "gate": gate} for t, k in items]}
        (suites / f"public.{name}.yml").write_text(yaml.safe_dump(texts))

    document = yaml.safe_load(commands.file.read_text())
    document["quality"] = document.get("quality", {}) | {"suites": str(suites)}
    commands.file.write_text(yaml.safe_dump(document))
    for name, gate in zip(TABLES, ("warn", "quarantine", "stop"), strict=True):
        own(name, gate)
    pipeline = Pipeline.load(commands.file)
    assert runners(pipeline.sync().document()) == {"this process"}
    for name in TABLES:
        database.execute(f"insert into {name} (id, a, n) values (501, 'xx', 1)")
    database.execute("insert into u (id, a) values (502, 'y'); update v set n = -1 where id = 7")
    for _ in range(2):  # The second run finds the same changes waiting.
        with pytest.raises(RunFailed) as failed:
            pipeline.consume()
        result = failed.value.result.document()
        assert "expect_column_values_to_be_between on n (1 row)" in result["error"]["message"]
        assert runners(result) == {"this process"}
        assert [row["key"] for row in pipeline.waiting(["public.u"])] == [{"id": "502"}]
        assert [len(held(lake, name)) for name in TABLES] == [501, 501, 500]


def test_modes_that_keep_rows_need_no_session(commands, database, lake, monkeypatch):
    """Copies, changes with a TRUNCATE, checks, and copies that are compared with what is kept."""
    monkeypatch.setattr(
        "waldelta.spark.session.spark_session", lambda *_, **__: pytest.fail("Java")
    )
    database.execute("alter table u add foreign key (id) references t on delete cascade")
    document = yaml.safe_load(commands.file.read_text())
    modes = dict(zip(TABLES, ("history", "soft_delete", "changelog"), strict=True))
    document["target"]["tables"] = {f"public.{t}": {"mode": mode} for t, mode in modes.items()}
    commands.file.write_text(yaml.safe_dump(document))
    pipeline = Pipeline.load(commands.file)
    assert runners(pipeline.sync().document()) == {"this process"}
    for emptied in (False, True):
        if emptied:
            database.execute("truncate t, u, v")
            for name in TABLES:
                database.execute(f"insert into {name} (id, a) values (1, 'x'), (50, 'x')")
        change(database)
        result = pipeline.consume().document()
        assert runners(result) == {"this process"}
        assert result["passed"] == [f"public.{name}" for name in TABLES]
        for name, of_live in (("t", ("_wd_valid_to_lsn", None)), ("u", ("_wd_deleted", False))):
            rows = read_target(f"{lake}/public/{name}", "id", "a", "n", of_live[0])
            live = [tuple(row[:3]) for row in rows if row[3] is of_live[1]]
            assert sorted(live) == source(database, name)
    again = pipeline.sync(tables=[f"public.{name}" for name in TABLES])
    assert runners(again.document()) == {"this process"}


@pytest.mark.nightly("four further processes; small runs without Java are ordinary")
def test_more_work_names_the_missing_java(commands, database, lake):
    """What was landed stays, and a run that has Java goes on: also in an application of Spark's,
    after a process that ends where it would have started a session.
    """
    commands.run("sync", **WITHOUT_JAVA)
    database.execute("insert into t (id, a) select i, 'z' from generate_series(1001, 1002000) as i")
    failed = commands.run("consume", "--run-id=one", code=1, **WITHOUT_JAVA)
    assert failed["error"]["class"] == "JavaMissing"
    assert failed["stages"]["land"]["status"] == "succeeded"
    needed = commands.run("consume", "--run-id=two", code=75, WALDELTA_WITHOUT_SPARK="1")
    assert needed == {}
    done = commands.run("consume", "--run-id=two", "--again")
    assert done["stages"]["land"]["runner"] == "this process"
    why = "Spark: 1,001,003 messages wait, this process applies up to 1,000,000"
    assert done["stages"]["apply"]["runner"] == why
    assert held(lake, "t") == source(database, "t")


def test_spark_does_all_where_it_is_told_to(commands):
    """Also what is small; WALDELTA_RUNNER takes the place of the file's runner."""
    failed = commands.run("sync", code=1, WALDELTA_RUNNER="spark", **WITHOUT_JAVA)
    assert failed["error"]["class"] == "JavaMissing"


@pytest.mark.parametrize(
    ("runner", "variable", "on_spark"),
    [
        ("auto", None, False),
        ("spark", None, True),
        ("auto", "spark", True),
        ("spark", "auto", False),
    ],
)
def test_the_lake_says_who_works(lake, runner, variable, on_spark):
    """The variable comes first."""
    environment = {} if variable is None else {"WALDELTA_RUNNER": variable}
    assert lake_of(pipeline_file(lake, "s", runner=runner), environment).on_spark is on_spark


def test_another_runner_is_refused(lake):
    """By its name."""
    with pytest.raises(ConfigError, match="WALDELTA_RUNNER is 'sparc': set it to auto or spark"):
        lake_of(pipeline_file(lake, "s"), {"WALDELTA_RUNNER": "sparc"})
