"""Writing a copy's rows by tasks: what the target holds, what is told, what Spark does."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

from tests.support.bookkeeping import table_at
from tests.support.data.merges import one_by_one
from waldelta.changes.merge.target_table import TargetColumn
from waldelta.errors import LateWriter, SnapshotLost, TargetNotWritable
from waldelta.lake import Tag, delta_target, local_path
from waldelta.lake.data_file import recurring_columns
from waldelta.snapshot.read_table import METADATA_COLUMNS, RAW_TYPE
from waldelta.stages.sync._write_files import columns_of, copy_files, open_target

COLUMNS = [
    TargetColumn("id", "bigint", pa.int64(), False),
    TargetColumn("v", "string", pa.string(), True),
    TargetColumn("_wd_raw", "map<string,string>", RAW_TYPE, True),
]
SCHEMA = pa.schema([pa.field(c.name, c.arrow, c.nullable) for c in COLUMNS])


ONE_BY_ONE = SimpleNamespace(run=one_by_one)


@pytest.fixture
def uri(tmp_path):
    return f"{tmp_path.as_uri()}/s/t"


def part(*ids, raw=None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"id": i, "v": f"v{i}", "_wd_raw": raw} for i in ids], SCHEMA
    )


def copied(uri, *tasks, attempt=1, target=None, meanwhile=None, columns=COLUMNS):
    """A copy whose tasks read these parts; each is done twice, as Spark may."""
    target = target or open_target(table_at(uri), columns)

    def run(count, schema, task, *, stops):
        told = one_by_one(count, schema, task)
        if meanwhile is not None:
            meanwhile()
        return told

    return copy_files(
        SimpleNamespace(run=run), target, columns_of(columns), len(tasks), lambda n: iter(tasks[n]),
        Tag.of("app", attempt, {"verb": "sync", "n": attempt}), lambda: None,
    )  # fmt: skip


def ids(uri) -> list[int]:
    return sorted(DeltaTable(uri).to_pyarrow_table()["id"].to_pylist())


def test_a_copy_takes_the_place_of_all_that_was_there(uri):
    """In one commit that says whose it is; tasks without rows make no file."""
    copied(uri, [part(1, 2)])
    done = copied(uri, [part(3, 4), part(5)], [], [part(6, raw=[("v", "x")])], attempt=2)
    assert (ids(uri), done.commit.rows, done.raw_rows) == ([3, 4, 5, 6], 4, 1)
    table = DeltaTable(uri)
    (newest,) = table.history(1)
    assert (table.version(), table.transaction_version("app")) == (done.commit.version, 2)
    assert json.loads(newest["userMetadata"]) == {"waldelta": {"verb": "sync", "n": 2}}
    added = pa.table(table.get_add_actions(flatten=True))
    assert (sum(added["size_bytes"].to_pylist()), sorted(added["num_records"].to_pylist())) == (
        done.commit.bytes,
        [1, 3],
    )


def test_a_new_target_has_the_columns_that_spark_would_give_it(uri):
    columns = [
        TargetColumn("id", "bigint", pa.int64(), False),
        TargetColumn("s", "smallint", pa.int16(), True),
        TargetColumn("n", "decimal(12,2)", pa.decimal128(12, 2), True),
        TargetColumn("b", "binary", pa.binary(), True),
        TargetColumn("t", "timestamp", pa.timestamp("us", "UTC"), True),
        TargetColumn("l", "date", pa.date32(), True),
        TargetColumn("a", "array<int>", pa.list_(pa.int32()), True),
        *(TargetColumn(name, "", kind, True) for name, kind in METADATA_COLUMNS.items()),
    ]
    table = open_target(table_at(uri), columns).table
    told = [
        (f["name"], f["type"], f["nullable"])
        for f in json.loads(table.schema().to_json())["fields"]
    ]
    text_map = {
        "type": "map",
        "keyType": "string",
        "valueType": "string",
        "valueContainsNull": True,
    }
    assert told == [
        ("id", "long", False),
        ("s", "short", True),
        ("n", "decimal(12,2)", True),
        ("b", "binary", True),
        ("t", "timestamp", True),
        ("l", "date", True),
        ("a", {"type": "array", "elementType": "integer", "containsNull": True}, True),
        ("_wd_lsn", "long", True),
        ("_wd_commit_ts", "timestamp", True),
        ("_wd_raw", text_map, True),
    ]
    assert table.protocol().writer_features is None


def test_an_empty_copy_empties_the_target(uri):
    copied(uri, [part(1)])
    done = copied(uri, [], attempt=2)
    assert (ids(uri), done.commit.rows, done.commit.bytes) == ([], 0, 0)


def test_files_and_row_groups_have_bounds(uri, monkeypatch):
    """However large or small what is read at once may be."""
    monkeypatch.setattr("waldelta.lake.layout.ROWS_PER_FILE", 5)
    copied(uri, [part(*range(3)), part(*range(3, 16)), part(16), part(17)])
    assert ids(uri) == list(range(18))
    counts = [pq.read_metadata(path).num_rows for path in local_path(uri).glob("*.parquet")]
    # Each task was done twice.
    assert sorted(counts, reverse=True) == [5] * 6 + [3, 3]


def test_who_was_overtaken_by_waldelta_is_late(uri):
    """And leaves no file behind that its commit would have named."""
    target = open_target(table_at(uri), COLUMNS)
    with pytest.raises(LateWriter):
        copied(uri, [part(1)], target=target, meanwhile=lambda: copied(uri, [part(7)], attempt=2))
    with pytest.raises(LateWriter):
        copied(uri, [part(1)])
    assert ids(uri) == [7]


def test_files_of_a_commit_stay_whatever_fails_after_it(uri, monkeypatch):
    """The table names them from then on."""
    copied(uri, [part(1)])

    def full_disk(uri, version):
        raise TargetNotWritable(f"{uri} version {version}: no space left on device")

    monkeypatch.setattr("waldelta.lake.delta_target.sync_commit", full_disk)
    with pytest.raises(TargetNotWritable):
        copied(uri, [part(2)], attempt=2)
    assert ids(uri) == [2]


def test_what_others_commit_meanwhile_is_replaced_as_what_they_did_before(uri):
    copied(uri, [part(1)])
    copied(
        uri,
        [part(2)],
        attempt=2,
        meanwhile=lambda: write_deltalake(
            uri, pa.table(part(9).to_pydict(), SCHEMA), mode="append"
        ),
    )
    assert ids(uri) == [2]


def test_files_of_other_partitions_are_not_committed(uri):
    """An external writer has divided the rows by a column while tasks wrote undivided files."""
    copied(uri, [part(1)])

    def divide():
        rows = pa.table(part(9).to_pydict(), SCHEMA)
        write_deltalake(uri, rows, mode="overwrite", schema_mode="overwrite", partition_by=["v"])

    with pytest.raises(LateWriter):
        copied(uri, [part(2)], attempt=2, meanwhile=divide)
    assert DeltaTable(uri).metadata().partition_columns == ["v"]
    assert ids(uri) == [9]


def test_a_commit_whose_answer_was_lost_counts(uri, monkeypatch):
    target = open_target(table_at(uri), COLUMNS)
    real = delta_target.commit_files

    def lose(table, *given):
        real(DeltaTable(uri), *given)
        monkeypatch.undo()
        return real(table, *given)

    monkeypatch.setattr(delta_target, "commit_files", lose)
    done = copied(uri, [part(1)], target=target)
    assert (ids(uri), done.commit.version) == ([1], DeltaTable(uri).version())


def test_the_error_that_a_task_names_is_raised(uri):
    """Nothing is committed, no file of a task that failed is left."""

    def lost():
        yield part(1)
        raise SnapshotLost("gone")

    target = open_target(table_at(uri), COLUMNS)
    with pytest.raises(SnapshotLost):
        copy_files(
            ONE_BY_ONE, target, SCHEMA, 1, lambda _: lost(), Tag.of("app", 1, {}), pytest.fail
        )
    assert (ids(uri), list(local_path(uri).glob("*.parquet"))) == ([], [])


@pytest.mark.parametrize(
    "err", [SnapshotLost("gone"), RuntimeError("the job was aborted")], ids=["named", "Spark's"]
)
def test_a_copy_that_fails_leaves_no_file_of_the_tasks_that_ended(uri, err):
    """What the target holds, and what others have under way in its folder, stays."""
    copied(uri, [part(1)])
    before = sorted([*local_path(uri).glob("*.parquet"), local_path(uri) / "part-other.parquet"])
    (local_path(uri) / "part-other.parquet").touch()

    def run(count, schema, task, *, stops):
        one_by_one(count, schema, task)
        assert len(list(local_path(uri).glob("*.parquet"))) > len(before)
        raise err

    with pytest.raises((SnapshotLost, TargetNotWritable)):
        copy_files(
            SimpleNamespace(run=run), open_target(table_at(uri), COLUMNS), SCHEMA, 2,
            lambda n: iter([part(n)]), Tag.of("app", 2, {}), pytest.fail,
        )  # fmt: skip
    assert (ids(uri), sorted(local_path(uri).glob("*.parquet"))) == ([1], before)


def test_a_disk_that_takes_nothing_is_told(uri):
    target = open_target(table_at(uri), COLUMNS)

    def full():
        yield part(1)
        raise OSError(28, "No space left on device")

    with pytest.raises(TargetNotWritable, match="free space"):
        copy_files(
            ONE_BY_ONE, target, SCHEMA, 1, lambda _: full(), Tag.of("app", 1, {}), pytest.fail
        )


UNKNOWN = {
    "a name that Parquet can't hold":
     lambda uri: [*COLUMNS, TargetColumn("a b", "int", pa.int32(), True)],
    "a variant": lambda uri: [*COLUMNS, TargetColumn("j", "variant", pa.string(), True)],
    "append only": lambda uri: (DeltaTable.create(uri, SCHEMA,
      configuration={"delta.appendOnly": "true"}) and COLUMNS),
    "somebody's files": lambda uri: ((local_path(uri).mkdir(parents=True),
                                      (local_path(uri) / "x").touch()) and COLUMNS),
}  # fmt: skip


OTHER = {
    "another column": (
        [*COLUMNS, TargetColumn("w", "int", pa.int32(), True)],
        [("id", False), ("v", True), ("_wd_raw", True), ("w", True)],
    ),
    "another type": (
        [COLUMNS[0], TargetColumn("v", "int", pa.int32(), True), COLUMNS[2]],
        [("id", True), ("v", True), ("_wd_raw", True)],
    ),
    "a column less": ([COLUMNS[0], COLUMNS[2]], [("id", True), ("_wd_raw", True)]),
    "a key that is none any more": (
        [TargetColumn("id", "bigint", pa.int64(), True), *COLUMNS[1:]],
        [("id", True), ("v", True), ("_wd_raw", True)],
    ),
}


@pytest.mark.parametrize("case", OTHER)
def test_a_target_gets_other_columns_with_its_rows(uri, case):
    """In one commit, also when an external writer commits before it."""
    columns, fields = OTHER[case]
    copied(uri, [part(1)])
    schema = columns_of(columns)
    row = {"id": 2, "v": 5 if case == "another type" else "v"}
    batch = pa.RecordBatch.from_pylist([row], schema)
    external = pa.table(part(9).to_pydict(), SCHEMA)
    done = copied(
        uri,
        [batch],
        attempt=2,
        columns=columns,
        meanwhile=lambda: write_deltalake(uri, external, mode="append"),
    )
    table = DeltaTable(uri)
    assert (table.version(), [(f.name, f.nullable) for f in table.schema().fields]) == (
        done.commit.version,
        fields,
    )
    assert table.to_pyarrow_table().select(schema.names).to_pylist() == batch.to_pylist()


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_left_to_spark(uri, case):
    assert open_target(table_at(uri), UNKNOWN[case](uri)) is None


def test_a_target_may_have_lost_its_not_null(uri):
    """As one that Spark once replaced with other columns."""
    DeltaTable.create(
        uri, pa.schema([SCHEMA.field("v"), pa.field("id", pa.int64()), SCHEMA.field("_wd_raw")])
    )
    copied(uri, [part(1)])
    assert DeltaTable(uri).to_pyarrow_table().to_pylist() == [{"v": "v1", "id": 1, "_wd_raw": None}]


def test_values_that_recur_are_kept_in_a_dictionary():
    sample = pa.table(
        {
            "unique": range(10),
            "same": ["x"] * 10,
            "half": [n // 2 for n in range(10)],
            "raw": pa.nulls(10, RAW_TYPE),
        }
    )
    assert recurring_columns(sample) == ["same", "half"]


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "of a run that was killed"])
def test_timestamps_without_a_zone(uri, is_there):
    """delta-rs forgets the feature of NOT NULL, without which Spark can't read the table."""
    columns = [*COLUMNS, TargetColumn("at", "timestamp_ntz", pa.timestamp("us"), True)]
    if is_there:
        fields = [pa.field(column.name, column.arrow, column.nullable) for column in columns]
        DeltaTable.create(uri, Schema.from_arrow(pa.schema(fields)))
        assert DeltaTable(uri).protocol().writer_features == ["timestampNtz"]
    assert open_target(table_at(uri), columns).version == 1
    assert {*DeltaTable(uri).protocol().writer_features} == {"timestampNtz", "invariants"}
    assert open_target(table_at(uri), columns).version == 1
    assert open_target(table_at(f"{uri}-2"), COLUMNS).version == 0


def test_a_property_adds_no_feature(uri):
    """delta-rs would list some that the table doesn't use, and that other readers lack."""
    columns = [*COLUMNS, TargetColumn("at", "timestamp_ntz", pa.timestamp("us"), True)]
    table = open_target(table_at(uri), columns)
    features = {*DeltaTable(uri).protocol().writer_features}
    table.set_properties({"waldelta.generation": "2"})
    stored = DeltaTable(uri)
    assert stored.version() == table.version
    assert {*stored.protocol().writer_features} == features
    assert stored.metadata().configuration == {"waldelta.generation": "2"}
    assert stored.history(1)[0]["operation"] == "SET TBLPROPERTIES"
