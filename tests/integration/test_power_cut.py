"""A power cut takes back whatever wasn't forced onto the disk: at each effect that builds on files, these have been.

What was forced is told by os.fsync, which is all that asks for it (tests.power).
"""

from __future__ import annotations

import pytest
from deltalake import DeltaTable

import waldelta.consume
from spark_jobs.flow import consume
from spark_jobs.maintain import run_maintain
from spark_jobs.sync import sync
from tests.pipelines import bare_slot, pipeline_file
from tests.power import Disk
from waldelta.lake import local_path
from waldelta.ledger import Ledger

pytestmark = [pytest.mark.pg, pytest.mark.spark]


def test_nothing_is_built_on_what_a_power_cut_could_take_back(spark, database, tmp_path, monkeypatch):
    """The slot moves over what is on the disk, the ledger speaks of copies and cuts that are on the disk; maintenance leaves nothing."""
    root, seen = tmp_path / "lake", {}
    disk = Disk(monkeypatch)

    def before(what, tables, function):
        def checked(*arguments, **details):
            seen.setdefault(what, []).append(disk.volatile(root, tables))
            return function(*arguments, **details)

        return checked

    for name in ("_count", "_advance"):
        moved = before("move", "_waldelta/[cs][hl]*", getattr(waldelta.consume, name))  # changes, slot_moves
        monkeypatch.setattr(waldelta.consume, name, moved)
    for name, tables in (("append_state", "public/*"), ("append_cut", "public/*"), ("append", "_waldelta/changes")):
        monkeypatch.setattr(Ledger, name, before(name, tables, getattr(Ledger, name)))
    database.execute("create table t(id int primary key, v text)")
    database.execute("insert into t select g, 'x' from generate_series(1, 100) g")
    job = bare_slot(database, pipeline_file(root.as_uri(), f"s_{database.name}"))
    sync(spark, job)
    for change in ("update t set v = 'z' where id < 10", "insert into t values (1000, 'y')"):
        database.execute(change)
        consume(spark, job)
    target = root / "public/t"
    compacting = DeltaTable(target).version() + 2  # Spark writes a checkpoint with it
    DeltaTable(target).alter.set_table_properties({"delta.checkpointInterval": str(compacting)})
    run_maintain(spark, job)
    assert [e["operation"] for e in DeltaTable(target).history() if e["version"] == compacting] == ["OPTIMIZE"]
    assert (target / f"_delta_log/{compacting:020d}.checkpoint.parquet").exists()
    assert local_path(root.as_uri()) == root
    assert {what: len(found) > 0 for what, found in seen.items()} == dict.fromkeys(
        ("move", "append_state", "append_cut", "append"), True
    )
    assert {file for found in seen.values() for files in found for file in files} == set()
    assert disk.volatile(root, "*/*") == []
