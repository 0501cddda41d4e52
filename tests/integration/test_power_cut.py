"""A power cut takes back whatever wasn't forced onto the disk: at each effect that builds on files, these have been.

Neither Spark nor delta-rs calls fsync; waldelta does, by os.fsync alone, so what it was called with is what the disk was told.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

import waldelta.consume
from spark_jobs.flow import consume
from spark_jobs.sync import sync
from tests.pipelines import bare_slot, pipeline_file
from waldelta.lake import local_path
from waldelta.ledger import Ledger

pytestmark = [pytest.mark.pg, pytest.mark.spark]


def volatile(root: Path, synced: dict[str, float], tables: str) -> list[str]:
    """What of some tables wouldn't survive: files not synced since they were written, folders not since a file came in."""
    needed: dict[Path, float] = {}
    for table in root.glob(tables):
        for folder in (table, *table.parents[: len(table.relative_to(root).parts) + 1]):
            needed.setdefault(folder, 0.0)
        for path in table.rglob("*"):
            if path.suffix in (".parquet", ".json"):  # what readers need; checksums and the like they can do without
                changed = path.stat().st_ctime  # also by being renamed
                needed[path] = path.stat().st_mtime
                needed[path.parent] = max(changed, needed.get(path.parent, 0.0))
    return sorted(str(path) for path, at in needed.items() if synced.get(str(path), -1.0) < at)


def test_nothing_is_built_on_what_a_power_cut_could_take_back(spark, database, tmp_path, monkeypatch):
    """The slot moves over what is on the disk, the ledger speaks of copies and cuts that are on the disk."""
    root, synced, seen = tmp_path / "lake", {}, {}
    real = os.fsync

    def fsync(handle):
        path = Path(f"/proc/self/fd/{handle}").readlink()
        real(handle)
        synced[str(path)] = time.time()

    def before(what, tables, function):
        def checked(*arguments, **details):
            seen.setdefault(what, []).append(volatile(root, synced, tables))
            return function(*arguments, **details)

        return checked

    monkeypatch.setattr("os.fsync", fsync)
    for name in ("_count", "_advance"):
        moved = before("move", "_waldelta/[cs][hl]*", getattr(waldelta.consume, name))  # changes, slot_moves
        monkeypatch.setattr(waldelta.consume, name, moved)
    for name, tables in (("append_state", "public/*"), ("append_cut", "public/*"), ("append", "_waldelta/changes")):
        monkeypatch.setattr(Ledger, name, before(name, tables, getattr(Ledger, name)))
    database.execute("create table t(id int primary key, v text)")
    database.execute("insert into t select g, 'x' from generate_series(1, 100) g")
    job = bare_slot(database, pipeline_file(root.as_uri(), f"s_{database.name}"))
    sync(spark, job)
    for number in range(2):
        database.execute("insert into t values (%s, 'y')", (1000 + number,))
        database.execute("update t set v = 'z' where id < 10")
        consume(spark, job)
    assert local_path(root.as_uri()) == root
    assert {what: len(found) > 0 for what, found in seen.items()} == dict.fromkeys(
        ("move", "append_state", "append_cut", "append"), True
    )
    assert {file for found in seen.values() for files in found for file in files} == set()
