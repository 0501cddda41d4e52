"""Effects that build on files wait until os.fsync forced these onto the disk."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

import waldelta.slot.acknowledge
from tests.support.disk import Disk, volatile
from tests.support.pipelines import bare_job, written
from waldelta.jobs.consume import consume
from waldelta.jobs.maintain import run_maintain
from waldelta.lake import local_path
from waldelta.lake.ledger import Ledger
from waldelta.stages.sync.sync import sync


def test_nothing_is_built_on_what_a_power_cut_could_take_back(
    runner, database, tmp_path, monkeypatch
):
    """Before the slot moves and the ledger records, files are on the disk."""
    root, seen = tmp_path / "lake", {}
    disk = Disk(monkeypatch)

    def before(what, tables, function):
        def checked(*arguments, **details):
            seen.setdefault(what, []).append(disk.volatile(root, tables))
            return function(*arguments, **details)

        return checked

    for module, name in (
        (waldelta.slot.acknowledge, "count_messages"),
        (waldelta.slot.acknowledge, "_advance"),
    ):
        moved = before("move", "_waldelta/[cs][hl]*", getattr(module, name))  # changes, slot_moves
        monkeypatch.setattr(module, name, moved)
    for name, tables in (
        ("append_state", "public/*"),
        ("append_cut", "public/*"),
        ("append", "_waldelta/changes"),
    ):
        monkeypatch.setattr(Ledger, name, before(name, tables, getattr(Ledger, name)))
    database.execute("create table t(id int primary key, v text)")
    database.execute("insert into t select g, 'x' from generate_series(1, 100) g")
    job = bare_job(database, root.as_uri())
    sync(runner, job)
    for change in ("update t set v = 'z' where id < 10", "insert into t values (1000, 'y')"):
        database.execute(change)
        consume(runner, job)
    target = root / "public/t"
    compacting = DeltaTable(target).version() + 2  # Spark writes a checkpoint with it
    DeltaTable(target).alter.set_table_properties({"delta.checkpointInterval": str(compacting)})
    with monkeypatch.context() as larger:
        larger.setattr("waldelta.lake.driver_limits.MOST_DRIVER_ROWS", 0)
        run_maintain(runner, job)
    assert [e["operation"] for e in DeltaTable(target).history() if e["version"] == compacting] == [
        "OPTIMIZE"
    ]
    assert (target / f"_delta_log/{compacting:020d}.checkpoint.parquet").exists()
    assert local_path(root.as_uri()) == root
    assert {what: len(found) > 0 for what, found in seen.items()} == dict.fromkeys(
        ("move", "append_state", "append_cut", "append"), True
    )
    assert {file for found in seen.values() for files in found for file in files} == set()
    assert disk.volatile(root, "*/*") == []


@pytest.mark.soak("every system call of a whole run")
def test_the_kernel_saw_every_file_of_a_run_be_synced(runner, database, tmp_path):
    """By strace, of the whole job with its JVM; needs the right to trace processes."""
    root, trace = tmp_path / "lake", tmp_path / "trace"
    database.execute("create table t(id int primary key, v text)")
    job = bare_job(database, root.as_uri())
    sync(runner, job)
    file = written(job.pipeline, tmp_path)
    database.execute("insert into t select g, 'x' from generate_series(1, 100) g")
    began = time.time()
    strace = f"strace -f -qq -y -ttt --seccomp-bpf -e trace=fsync -o {trace}".split()
    subprocess.run(
        [*strace, sys.executable, "-m", "spark_jobs", "consume", str(file)],
        check=True, timeout=300,
    )  # fmt: skip
    found = re.findall(r"^\d+ +([\d.]+) fsync\(\d+<(.*)>\) += 0$", trace.read_text(), re.MULTILINE)
    synced = {Path(path): float(at) for at, path in found}
    assert volatile(root, "*/*", lambda path, at: at < began or synced.get(path, 0.0) >= at) == []
    assert {path.parent.parent.name for path in synced if path.suffix == ".json"} >= {
        "t",
        "changes",
        "slot_moves",
        "batches",
    }
