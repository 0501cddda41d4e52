"""Cuts that are handed out can be read, whatever was compacted, vacuumed or deleted."""

import shutil

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.support.disk import Disk
from tests.support.pipelines import job_of, whole_database
from waldelta.errors import StateError
from waldelta.jobs import Pipeline
from waldelta.lake import local_path
from waldelta.lake.ledger import BatchCut, TargetCut, now
from waldelta.lake.storage import sync_commit
from waldelta.monitoring.status import _newest_cut
from waldelta.pipeline.targets.consistent_cuts import renew_cut

NAMES = ("t", "u")


@pytest.fixture
def pipeline(lake):
    """As whoever has the pipeline file has it, where neither Spark nor the source is at hand."""
    return Pipeline(whole_database(lake, {"conn_id": "nowhere"}))


@pytest.fixture
def job(pipeline):
    return job_of(pipeline.file, run_id="test")


def write(pipeline, name, mode="append"):
    write_deltalake(uri(pipeline, name), pa.table({"id": [1, 2]}), mode=mode)


def compact(pipeline, name):
    DeltaTable(uri(pipeline, name)).optimize.compact()


def vacuum(pipeline, name):
    DeltaTable(uri(pipeline, name)).vacuum(0, dry_run=False, enforce_retention_duration=False)


def uri(pipeline, name):
    return pipeline.target_path(f"public.{name}")


def publish(pipeline, job, batch):
    """Changes of a batch in every table, and the cut."""
    for name in NAMES:
        write(pipeline, name)
    versions = [
        TargetCut(f"public.{name}", 1, DeltaTable(uri(pipeline, name)).version()) for name in NAMES
    ]
    job.ledger.append_cut(BatchCut(now(), "r", batch, batch, None, versions), job.ledger.last_cut())


def read(pipeline, cut):
    return {
        name: (
            DeltaTable(uri(pipeline, name), version=cut[f"public.{name}"])
            .to_pyarrow_table()
            .num_rows
        )
        for name in NAMES
    }


def test_the_newest_cut_is_read_by_one_call(pipeline, job):
    assert pipeline.cut() == {}
    for batch in range(3):
        publish(pipeline, job, batch)
    write(pipeline, "t")  # a run under way
    assert pipeline.cut() == {"public.t": 2, "public.u": 2}
    assert read(pipeline, pipeline.cut()) == {"t": 6, "u": 6}


def test_a_version_that_was_vacuumed_is_given_by_a_later_one_of_the_same_rows(pipeline, job):
    for batch in range(3):
        publish(pipeline, job, batch)
    compact(pipeline, "t")
    vacuum(pipeline, "t")
    assert pipeline.cut() == {"public.t": 5, "public.u": 2}
    assert read(pipeline, pipeline.cut()) == {"t": 6, "u": 6}
    renew_cut(job)
    renew_cut(job)
    assert len(job.ledger.batches()) == 4
    write(pipeline, "t", "overwrite")
    assert pipeline.cut() == {"public.t": 5, "public.u": 2}
    vacuum(pipeline, "t")
    with pytest.raises(StateError, match="no consistent cut can be read any more"):
        pipeline.cut()
    assert "no consistent cut can be read any more" in _newest_cut(job)["problem"]
    publish(pipeline, job, 3)
    assert _newest_cut(job)["batch"] == 3
    assert read(pipeline, pipeline.cut()) == {"t": 4, "u": 8}


def test_a_vacuum_by_others_is_told_by_whoever_publishes_the_cut_behind_it(pipeline, job):
    """The runs that come look from that cut on; a compaction alone is nobody's business."""
    for batch in range(2):
        publish(pipeline, job, batch)
    compact(pipeline, "t")
    assert renew_cut(job) == []
    vacuum(pipeline, "t")
    (told,) = renew_cut(job)
    assert "public.t: a VACUUM kept fewer versions" in told
    assert pipeline.cut() == {"public.t": 4, "public.u": 1}
    assert [cut.expired for cut in job.ledger.batches()] == [True, True, False, False]
    assert renew_cut(job) == []


def test_what_others_compacted_is_on_the_disk_before_a_cut_names_it(
    pipeline, job, lake, monkeypatch
):
    """Our own commits were made durable by whoever made them."""
    disk, found = Disk(monkeypatch), []
    publish(pipeline, job, 0)
    publish(pipeline, job, 1)
    for name in NAMES:
        sync_commit(uri(pipeline, name), 1)
    real = job.ledger.append_cut

    def append_cut(_, *rows):
        found.append(disk.volatile(local_path(lake), "public/*"))
        real(*rows)

    monkeypatch.setattr(type(job.ledger), "append_cut", append_cut)
    compact(pipeline, "t")
    renew_cut(job)
    assert pipeline.cut() == {"public.t": 2, "public.u": 1}
    assert found == [[]]


@pytest.mark.parametrize("damage", ["removed", "torn"])
def test_a_damaged_target_keeps_no_other_from_its_new_version(pipeline, job, damage):
    for batch in range(2):
        publish(pipeline, job, batch)
    for name in NAMES:
        compact(pipeline, name)
    folder = local_path(uri(pipeline, "t"))
    (
        shutil.rmtree(folder)
        if damage == "removed"
        else (folder / f"_delta_log/{2:020d}.json").write_bytes(b'{"add": {')
    )
    renew_cut(job)
    expected = [("public.t", 1), ("public.u", 2)]
    assert [(t.table_name, t.version) for t in job.ledger.last_cut().targets] == expected


@pytest.mark.parametrize("expired", [False, True])
def test_an_older_cut_that_can_be_read_is_given_unless_it_expired(pipeline, job, expired):
    """Whose files are all in use still, while a file of the newest was changed and vacuumed."""
    for batch in range(3):
        publish(pipeline, job, batch)
    if expired:
        job.ledger.expire_cuts(job.ledger.last_cut().at)
    DeltaTable(uri(pipeline, "t")).restore(1)
    vacuum(pipeline, "t")
    if expired:
        with pytest.raises(StateError):
            pipeline.cut()
        return
    assert pipeline.cut() == {"public.t": 1, "public.u": 1}
    assert read(pipeline, pipeline.cut()) == {"t": 4, "u": 4}


def test_a_table_that_was_removed_is_in_no_cut(pipeline, job):
    publish(pipeline, job, 0)
    shutil.rmtree(uri(pipeline, "t").removeprefix("file://"))
    with pytest.raises(StateError):
        pipeline.cut()
