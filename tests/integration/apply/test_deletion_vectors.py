"""Targets with deletion vectors: the same rows, files that stay, and the way back."""

import json
import os
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from deltalake import DeltaTable, QueryBuilder

from benchmarks.verify import duckdb_of_delta
from tests.oracles.compare import differing
from tests.support.pipelines import copied_pipeline, new_pipeline


@pytest.fixture
def pipeline(runner, database, lake):
    database.execute("create table t(id int primary key, v text)")
    database.execute("insert into t select g, 'v' || g from generate_series(1, 1000) g")
    return copied_pipeline(
        runner,
        new_pipeline(database, lake, ["public.t"], target={"root": lake, "deletion_vectors": True}),
    )


def marked(pipeline):
    """The data files with marks, and the files of marks, of the newest commit."""
    folder = Path(urlsplit(pipeline.target_path("public.t")).path)
    newest = max((folder / "_delta_log").glob("*.json"))
    added = [json.loads(line).get("add") for line in newest.read_text().splitlines()]
    return [add for add in added if add and add.get("deletionVector")], list(
        folder.glob("**/deletion_vector_*.bin")
    )


def rows_in_duckdb(pipeline):
    """As DuckDB's own reader of Delta finds them."""
    with duckdb_of_delta() as connection:
        query, uri = (
            "select count(*), sum(id), min(v) from delta_scan(?)",
            pipeline.target_path("public.t"),
        )
        return connection.execute(query, [uri]).fetchone()


def rows(pipeline):
    """As delta-rs reads them, whose tables for Arrow can't."""
    table = DeltaTable(pipeline.target_path("public.t"))
    found = (
        QueryBuilder()
        .register("t", table)
        .execute("select count(*), sum(id), min(v) from t")
        .read_all()
    )
    return tuple(found.column(i)[0].as_py() for i in (0, 1, 2))


def test_changed_rows_are_marked_and_their_files_stay(runner, database, pipeline, monkeypatch):
    """Every reader finds the source's rows, and the files of marks are synced to the disk."""
    everything = "select count(*), sum(id), min(v) from t"
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        "waldelta.lake.storage.os.fsync",
        lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real(fd))[1],
    )
    assert (marked(pipeline), [rows_in_duckdb(pipeline)]) == (
        ([], []),
        database.execute(everything),
    )
    database.execute("update t set v = 'new' where id % 100 = 0; delete from t where id % 100 = 1")
    pipeline.consume(runner)
    adds, files = marked(pipeline)
    assert adds
    assert files
    assert {str(f) for f in files} <= set(synced)
    assert differing(runner, pipeline.job()) == {}
    assert [rows(pipeline)] == [rows_in_duckdb(pipeline)] == database.execute(everything)
