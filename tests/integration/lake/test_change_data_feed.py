"""Targets with a change data feed: on and off, and what copies, repairs and mends show."""

from __future__ import annotations

import os
import re
import time

import pytest
from deltalake import DeltaTable

from tests.oracles.change_feed import (
    TYPE,
    changes_by_delta_rs,
    changes_by_spark,
    compare_change_feed,
    ranges_of_columns,
)
from tests.support.pipelines import copied_pipeline, new_pipeline
from waldelta.lake import Lake, local_path
from waldelta.lake.delta_statements import vacuum
from waldelta.lake.layout import CHANGE_FOLDER


@pytest.fixture
def shop(runner, database, lake):
    """Makes another pipeline of table t, with a setting of the change data feed."""
    database.execute("create table t(id int primary key, v text)")
    database.execute("insert into t select g, 'v' || g from generate_series(1, 5) g")

    def made(shows: bool | None):
        target = {"root": lake} | ({} if shows is None else {"change_data_feed": shows})
        return new_pipeline(database, lake, ["public.t"], target=target)

    return made


def shown(pipeline, since: int) -> list[tuple]:
    """The changes after a version."""
    uri = pipeline.target_path("public.t")
    rows = changes_by_delta_rs(uri, since + 1, DeltaTable(uri).version())
    return sorted((row[TYPE].removeprefix("update_"), row["id"], row["v"]) for row in rows)


def version(pipeline) -> int:
    return DeltaTable(pipeline.target_path("public.t")).version()


def property_of(pipeline) -> str | None:
    table = DeltaTable(pipeline.target_path("public.t"))
    return table.metadata().configuration.get("delta.enableChangeDataFeed")


def test_it_is_switched_on_and_off(runner, database, shop):
    pipeline = copied_pipeline(runner, shop(None))
    assert property_of(pipeline) is None
    shop(True).maintain(runner)
    for pipeline, changes in ((shop(True), 1), (shop(None), 2)):
        since = version(pipeline)
        database.execute("update t set v = 'new' where id = 1")
        pipeline.consume(runner)
        assert (changes, shown(pipeline, since)[0][:2]) == (changes, ("postimage", 1))
        pipeline.maintain(runner)
    shop(False).maintain(runner)
    assert property_of(pipeline) == "false"


def alter_target(pipeline) -> None:
    """What only an external writer does: a row changes, one goes, one comes."""
    table = DeltaTable(pipeline.target_path("public.t"))
    table.update({"v": "'theirs'"}, predicate="id = 1")
    table.delete("id = 2")
    table.update({"id": "77"}, predicate="id = 3")


DIFFERENCE = [
    ("delete", 77, "v3"),
    ("insert", 2, "v2"),
    ("insert", 3, "v3"),
    ("postimage", 1, "v1"),
    ("preimage", 1, "theirs"),
]


@pytest.mark.parametrize(
    "how", [pytest.param("resync", marks=pytest.mark.nightly("a mend of all rows")), "reconcile"]
)
def test_a_repair_shows_only_the_rows_that_differed(runner, shop, how):
    pipeline = copied_pipeline(runner, shop(True))
    alter_target(pipeline)
    since = version(pipeline)
    if how == "resync":
        pipeline.resync(runner, ["public.t"])
    else:
        pipeline.reconcile(runner, repair=True)
    assert shown(pipeline, since) == DIFFERENCE
    assert compare_change_feed(pipeline.target_path("public.t")) == []


def test_the_first_copy_shows_inserts(runner, shop):
    pipeline = copied_pipeline(runner, shop(True))
    assert shown(pipeline, 0) == [("insert", n, f"v{n}") for n in range(1, 6)]


@pytest.mark.parametrize(
    "alteration",
    [
        "add w int default 5",
        "rename v to w",
        "drop v",
        "alter v type varchar(9)",
        "alter id type bigint",
    ],
)
def test_a_version_with_other_columns_shows_its_difference(runner, database, shop, alteration):
    """In the columns that it has in common with the version before."""
    pipeline = copied_pipeline(runner, shop(True))
    for statement in ("select 1", f"alter table t {alteration}"):
        database.execute(f"{statement}; update t set id = id + 10 where id % 2 = 0")
        database.execute("insert into t select 7; delete from t where id = 1 or id = 7")
        pipeline.consume(runner)
    target = Lake.of(pipeline.file.target.root).target("public.t")
    ranges = ranges_of_columns(target, 0)
    versions = [version for first, last, _ in ranges for version in range(first, last + 1)]
    assert versions == [*range(1, target.open().version + 1)]
    for first, last, replaced in ranges:
        assert compare_change_feed(target.uri, first, replaced, last=last) == []


WEEK_HOURS = 168


def age(uri: str) -> None:
    """Make all that a target has older than the versions that maintenance keeps."""
    then = time.time() - (WEEK_HOURS + 24) * 3600
    for path in local_path(uri).rglob("*"):
        if path.suffix == ".json":
            moment = r'("(?:deletionTimestamp|modificationTime|timestamp)":)\d+'
            path.write_text(re.sub(moment, rf"\g<1>{int(then * 1000)}", path.read_text()))
        os.utime(path, (then, then))


@pytest.mark.parametrize(
    "is_by_spark",
    [False, pytest.param(True, marks=pytest.mark.nightly("Spark's VACUUM and Spark as reader"))],
)
def test_vacuum_keeps_the_changes_of_versions_that_are_kept(runner, database, shop, is_by_spark):
    """Those of older versions go, with their files."""
    pipeline = copied_pipeline(runner, shop(True))
    uri = pipeline.target_path("public.t")

    def change(value):
        for statement in (
            f"update t set v = '{value}' where id < 4",
            "delete from t where id = 5",
            "insert into t values (5, 'n')",
            "truncate t; insert into t values (1)",
        ):
            database.execute(statement)
            pipeline.consume(runner)

    def files():
        return {path.name for path in (local_path(uri) / CHANGE_FOLDER).rglob("*.parquet")}

    def changes(reader, *where):
        rows = reader(*where, since + 1, last)
        return sorted((row["_commit_version"], row[TYPE], row["id"], row["v"]) for row in rows)

    change("old")
    old, since = files(), version(pipeline)
    age(uri)
    change("new")
    new, last = files() - old, version(pipeline)
    before = changes(changes_by_delta_rs, uri)
    assert {row[1] for row in before} >= {"insert", "delete", "update_postimage"}
    if is_by_spark:
        vacuum(runner.spark(), Lake.of(pipeline.file.target.root).target("public.t"), WEEK_HOURS)
    else:
        assert pipeline.maintain(runner).status == "succeeded"
    assert (bool(old), files()) == (True, new)
    assert changes(changes_by_delta_rs, uri) == before
    assert compare_change_feed(uri, since + 1, last=last) == []
    if is_by_spark:
        assert changes(changes_by_spark, runner.spark(), uri) == before
