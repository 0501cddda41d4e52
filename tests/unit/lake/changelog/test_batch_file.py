"""A batch's file of the change log and its commit, whatever comes between."""

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema

from waldelta.errors import LateWriter, PeekTimeout, TargetNotWritable
from waldelta.lake import DeltaTarget, Lake, Tag
from waldelta.lake.changelog import ChangeLog, batch_file

SCHEMA = pa.schema(
    [
        ("seq", pa.int64()),
        ("relation_id", pa.int64()),
        ("xid8", pa.int64()),
        ("end_lsn", pa.int64()),
        ("data", pa.binary()),
    ]
)


@pytest.fixture
def log(tmp_path):
    """An empty change log."""
    made = ChangeLog(Lake(tmp_path.as_uri()), "slot")
    made.create(SCHEMA)
    return made


def part(*rows) -> pa.RecordBatch:
    """Rows of (seq, relation_id, xid8, end_lsn)."""
    return pa.RecordBatch.from_pylist(
        [dict(zip(SCHEMA.names, [*row, b"x" * 10], strict=True)) for row in rows], SCHEMA
    )


def land(log, batch, *parts, metadata="ours"):
    log.add(batch, log.write(batch, iter(parts), SCHEMA), metadata)


def files(log) -> list[Path]:
    return sorted(Path(log.uri.removeprefix("file://")).glob("batch=*/*.parquet"))


def test_a_log_is_made_where_there_is_nothing(log, tmp_path):
    """Made again it stays; beside unknown files, or where none can be, none is made."""
    land(log, 1, part((0, 7, 500, 90)))
    log.create(SCHEMA)
    assert log.last_batch() == 1
    shutil.rmtree(Path(log.uri.removeprefix("file://")) / "_delta_log")
    with pytest.raises(
        TargetNotWritable, match=r"it has files and no Delta log.*nothing was consumed"
    ):
        log.create(SCHEMA)
    (tmp_path / "file").touch()
    with pytest.raises(TargetNotWritable, match="nothing was consumed"):
        ChangeLog(Lake((tmp_path / "file").as_uri()), "slot").create(SCHEMA)


def test_what_came_is_a_batch_with_its_statistics(log, monkeypatch):
    """A row group is as large as what is held of it; a column without values has no bounds."""
    monkeypatch.setattr(batch_file, "BATCH_ROW_GROUP_BYTES", 60)
    land(log, 1, part((0, 7, 500, 90), (1, 8, None, 80)), part(), part((2, 7, 499, 100)))
    (file,) = log.place.open().files.to_pylist()
    told = {
        name: file[name]
        for name in file
        if name.partition(".")[0] in ("min", "max", "null_count", "num_records")
    }
    assert {name: value for name, value in told.items() if value is not None} == {
        "num_records": 3, "min.relation_id": 7, "max.relation_id": 8, "min.xid8": 499,
        "max.xid8": 500, "min.end_lsn": 80, "max.end_lsn": 100, "null_count.relation_id": 0,
        "null_count.xid8": 1, "null_count.end_lsn": 0,
    }  # fmt: skip
    assert DeltaTable(log.uri).to_pyarrow_table(columns=["batch", "seq"]).sort_by(
        "seq"
    ).to_pylist() == [{"batch": 1, "seq": number} for number in range(3)]
    assert pq.ParquetFile(files(log)[0]).num_row_groups == 2
    assert log.last_batch() == 1
    assert DeltaTable(log.uri).history(1)[0]["userMetadata"] == "ours"


def test_what_batches_weigh(log):
    """Before compression, and all that lies together with the rows that are asked for."""
    small, large = (
        [{"seq": 0, "relation_id": 7, "xid8": 500, "end_lsn": 90, "data": b"x" * size}]
        for size in (10, 1_000_000)
    )
    for batch, rows in enumerate((small, large, small + large), 1):
        land(log, batch, pa.RecordBatch.from_pylist(rows, SCHEMA))
    weights = log.bytes_of_batches(1, 3)
    assert sorted(weights) == [2, 3]
    assert all(1_000_000 < bytes_ < 1_010_000 for bytes_ in weights.values())
    assert all(file.stat().st_size < 100_000 for file in files(log))


def test_nothing_came(log):
    """The batch's number counts all the same, and there is no file."""
    land(log, 1, part())
    land(log, 2)
    assert (log.last_batch(), files(log), log.highest_batch()) == (2, [], 0)


def test_a_read_that_breaks_off_leaves_nothing(log, monkeypatch):
    """Whatever was written by then."""
    monkeypatch.setattr(batch_file, "BATCH_ROW_GROUP_BYTES", 1)

    def breaks_off():
        yield part((0, 7, 500, 90))
        raise PeekTimeout("too slow")

    with pytest.raises(PeekTimeout):
        log.write(1, breaks_off(), SCHEMA)
    assert files(log) == []


def test_a_place_that_cant_be_written_is_named(log):
    folder = Path(log.uri.removeprefix("file://"))
    (folder / "batch=1").write_text("a file in the way")
    with pytest.raises(TargetNotWritable, match="nothing was consumed"):
        log.write(1, iter([part((0, 7, 500, 90))]), SCHEMA)


def test_the_making_of_a_log_is_made_up_for(tmp_path, monkeypatch):
    """Broken off before its first commit had its name, or while somebody else made it."""
    log = ChangeLog(Lake(f"{tmp_path.as_uri()}/killed"), "slot")
    folder = Path(log.uri.removeprefix("file://"))
    unfinished = folder / "_delta_log/00000000000000000000.json#1"
    unfinished.parent.mkdir(parents=True)
    unfinished.write_text("{}")
    log.create(SCHEMA)
    assert DeltaTable(log.uri).version() == 0
    log = ChangeLog(Lake(f"{tmp_path.as_uri()}/both"), "slot")
    asked, real = [], DeltaTable.is_deltatable

    def others_make_it(uri, options=None):
        if not asked:
            asked.append(DeltaTable.create(uri, Schema.from_arrow(SCHEMA)))
            return False
        return real(uri, options)

    monkeypatch.setattr(DeltaTable, "is_deltatable", staticmethod(others_make_it))
    log.create(SCHEMA)
    assert (len(asked), DeltaTable(log.uri).version()) == (1, 0)


def test_a_batch_is_landed_once(log):
    """Whoever comes second is told, unless the commit is its own, whose answer it never got."""
    land(log, 1, part((0, 7, 500, 90)), metadata="first")
    with pytest.raises(LateWriter, match="batch 1"):
        land(log, 1, part((0, 7, 500, 90)), metadata="second")
    land(log, 1, part((0, 7, 500, 90)), metadata="first")
    assert DeltaTable(log.uri).to_pyarrow_table().num_rows == 1


def test_somebody_elses_commit_comes_between(log, monkeypatch):
    """It is tried again behind that one, with the same file; not when that was the batch itself."""
    opened, others = DeltaTarget.open, ["maintenance", "the batch"]

    def late(place):
        table = opened(place)
        if others and others.pop(0) == "maintenance":
            DeltaTable(log.uri).alter.set_table_properties({"delta.appendOnly": "false"})
        elif not table.committed("slot"):
            theirs = Tag("slot", 1, "theirs")
            opened(log.place).replace_files([], [], theirs)
        return table

    monkeypatch.setattr(DeltaTarget, "open", late)
    with pytest.raises(LateWriter):
        land(log, 1, part((0, 7, 500, 90)))
    assert [
        json.loads(json.dumps(entry.get("userMetadata"))) for entry in DeltaTable(log.uri).history()
    ][:1] == ["theirs"]
    monkeypatch.setattr(DeltaTarget, "open", opened)
    land(log, 2, part((0, 7, 500, 90)))
    assert log.last_batch() == 2


def test_a_checkpoint_keeps_the_last_batch(log, monkeypatch):
    monkeypatch.setattr("waldelta.lake.delta_target.CHECKPOINT_INTERVAL", 2)
    for batch in (1, 2, 3):
        land(log, batch, part((0, 7, 500, 90)))
    assert [
        path.name
        for path in Path(log.uri.removeprefix("file://")).glob("_delta_log/*.checkpoint.parquet")
    ] == [f"{2:020d}.checkpoint.parquet"]
    assert log.last_batch() == 3
