"""What merges of small and large targets have in common: rows, commit, what Spark does."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import write_deltalake

from tests.support.data.events import apply_one_by_one, random_events
from tests.support.data.merges import (
    NAMES,
    SCHEMA,
    changes_of,
    files_of,
    held,
    merge_large,
    merge_small,
    net_of,
    plan,
    rows,
    table,
    tag,
    write,
    write_files,
)
from tests.support.seeds import chosen_random, rounds
from waldelta.arrow import with_column
from waldelta.changes.decode.collapse import ColumnNumbering
from waldelta.changes.merge.commits import read_commit
from waldelta.changes.merge.merge import merge_staged
from waldelta.changes.merge.rows import ending_of_leaves
from waldelta.changes.stage.net_files import NetFiles
from waldelta.changes.stage.stage import Ending
from waldelta.errors import LockHeld
from waldelta.lake import Lake
from waldelta.lake.layout import STATISTICS_COLUMNS, TARGET_FILE_SIZE
from waldelta.metadata_columns import RELID
from waldelta.snapshot.read_table import RAW_TYPE

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.fixture(params=[merge_small, merge_large], ids=["small", "large"])
def merged(request):
    """Merges changes into a small target or a large one."""
    return request.param


LAYOUTS = {
    "one folder": {},
    "partitions of the key": {"partition_by": ["Id"]},
    "partitions that rows leave": {"partition_by": ["it's.big", "the `v`"]},
    "small files": {"configuration": {TARGET_FILE_SIZE: "1", STATISTICS_COLUMNS: "Id"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_batches_equal_a_plain_simulation(job, merged, layout):
    """Batch after batch the target holds what applying every change alone leaves."""
    create(job, **LAYOUTS[layout])
    rng = chosen_random()
    expected, last = {key: (f"b{key}", f"bt{key}") for key in range(6)}, 0
    write_files(job, *([(key, *values)] for key, values in expected.items()))
    for batch in [number + 1 for number in rounds(32)]:
        if events := random_events(rng, expected, rng.randrange(1, 25)):
            last = batch
            assert merged(job, events, batch) is not None
            expected = apply_one_by_one(expected, events)
            assert held(job) == expected, (batch, events)
            assert len(table(job).to_pyarrow_table()) == len(expected)
    assert table(job).transaction_version("app") == last


def test_what_the_commit_tells(job, merged):
    """Rows by operation; foreign columns are kept as by Spark's MERGE. A repeated batch is none."""
    write_files(job, [(1, "a", "A"), (2, "b", "B")], [(3, "c", "C")])
    events = [
        ("U", 1, 1, "a2", "~"),
        ("U", 2, 9, "b2", "B2"),
        ("D", 3, None, None, None),
        ("I", None, 4, "d", "D"),
        ("U", 7, 7, "lacking", "x"),
        ("D", 8, None, None, None),
    ]
    done = merged(job, events)
    cut, version = read_commit(job, plan().state, done), table(job).version()
    assert (cut.inserted, cut.updated, cut.deleted, cut.skipped) == (1, 2, 1, 2)
    assert cut.version == version
    found = {row["Id"]: row for row in table(job).to_pyarrow_table().to_pylist()}
    assert held(job) == {1: ("a2", "A"), 9: ("b2", "B2"), 4: ("d", "D")}
    expected = [(0.5, 0), (0.5, 1), (None, 3)]
    assert [(found[key]["gone"], found[key]["_wd_lsn"]) for key in (1, 9, 4)] == expected
    assert merged(job, events) is not None, "a repeated batch"
    assert table(job).version() == version
    assert read_commit(job, plan().state, tag()) == cut


def test_a_truncate_leaves_the_new_rows_alone(job, merged):
    """However large the target was before."""
    write_files(job, [(1, "a", "A")], [(2, "b", "B")])
    done = merged(job, [("I", None, 2, "new", "N")], truncated=True)
    assert held(job) == {2: ("new", "N")}
    assert read_commit(job, plan().state, replace(done, truncated=True)).inserted == 1


def test_nothing_to_change_still_is_a_commit(job, merged):
    """It is the target's watermark."""
    assert merged(job, [("D", 8, None, None, None)]) is not None
    assert (table(job).version(), table(job).transaction_version("app")) == (1, 1)


def test_moved_rows_leave_few_files(job):
    """A partition that rows only enter gets no file for each."""
    create(job, partition_by=["it's.big"])
    merge_small(job, [("I", None, n, "v", "open") for n in range(20)])
    for n in range(20):
        merge_small(job, [("U", n, n, "v", "done")], n + 2)
    assert len(table(job).file_uris()) < 10
    assert {row[1] for row in held(job).values()} == {"done"}


def test_new_rows_without_a_key(job, merged):
    """They are added beside those that are equal."""
    write(job, rows((1, "a", "A")))
    assert merged(job, [("I", None, 1, "a", "A")], numbering=ColumnNumbering(3, ())) is not None
    assert table(job).to_pyarrow_table()["Id"].to_pylist() == [1, 1]


def create(job, **options) -> None:
    """Another target, in place of the one that is there."""
    root = job.pipeline.target.root
    job.pipeline.target.root, job.lake = f"{root}/other", Lake(f"{root}/other")
    write_deltalake(f"{root}/other/s/t", SCHEMA.empty_table(), **options)


@pytest.mark.parametrize("value", ["a/b c%é:=?", "x" * 300, None], ids=ascii)
def test_values_of_partitions_are_read_as_they_were(job, merged, value):
    """Whatever a folder's name can hold. Files of other partitions stay."""
    create(job, partition_by=["it's.big"])
    assert merged(job, [("I", None, 2, "b", value), ("I", None, 3, "c", "C")]) is not None
    before = files_of(job)
    assert merged(job, [("U", 2, 2, "b2", "~"), ("I", None, 1, "a", value)], 2) is not None
    assert held(job) == {1: ("a", value), 2: ("b2", value), 3: ("c", "C")}
    kept = {file.name for file in before if file.parent.name == "it%27s.big=C"}
    # A task that runs twice leaves a file that no commit names.
    assert len(kept & {uri.rpartition("/")[2] for uri in table(job).file_uris()}) == 1
    assert merged(job, [("D", 1, None, None, None), ("D", 2, None, None, None)], 3) is not None
    assert held(job) == {3: ("c", "C")}


UNKNOWN = {
    "another feature": (lambda job: table(job).alter.add_constraint({"c": '"Id" > 0'}), {}),
    "append only": (lambda job: table(job).alter.set_table_properties({"delta.appendOnly": "true"}),
                    {}),
    "partitions of a type with other equal values": (
        lambda job: create(job, partition_by=["gone"]),
        {},
    ),
    "without our columns":
     (lambda job: write(job, SCHEMA.empty_table().select(NAMES), schema_mode="overwrite"), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_left_to_spark(job, merged, case):
    """It is told before anything is written."""
    arrange, options = UNKNOWN[case]
    arrange(job)
    before = table(job).version()
    assert merged(job, [("I", None, 4, "d", "D")], **options) is None
    assert table(job).version() == before


def ended(rows: pa.Table) -> pa.Table:
    """An odd row is deleted, an even one keeps all but its v."""
    count = len(rows)
    odd = np.asarray(rows["Id"]) % 2 == 1
    actions = np.where(odd, "delete", "update").tolist()
    net = net_of([("U", 1, 1, "ended", "~")]).take(pa.array(np.zeros(count, np.int64)))
    for name, values in (("action", pa.array(actions)), ("b0", rows["Id"]), ("c0", rows["Id"])):
        net = with_column(net, name, values)
    return net


def test_a_truncate_of_rows_that_a_target_keeps(job, merged):
    """It ends current rows that no change names, in all files, and leaves the others."""
    files = [[(1, "a", "A"), (2, "b", "B")], [(3, "c", "C"), (4, "old", "D")], [(6, "old", "F")]]
    write_files(job, *files)

    def are_current(rows):
        return np.asarray(pc.not_equal(rows["the `v`"], "old"))

    ending = Ending(["the `v`"], are_current, ended, [])
    done = merged(job, [("U", 1, 1, "x", "~"), ("I", None, 9, "n", "N")], ending=ending)
    assert held(job) == {
        1: ("x", "A"), 2: ("ended", "B"), 4: ("old", "D"), 6: ("old", "F"), 9: ("n", "N")
    }  # fmt: skip
    cut = read_commit(job, plan().state, done)
    assert (cut.inserted, cut.updated, cut.deleted, cut.skipped) == (1, 2, 0, 0)
    assert merged(job, [], batch=2, ending=ending) is not None
    assert held(job) == {2: ("ended", "B"), 4: ("old", "D"), 6: ("old", "F")}


def test_a_truncate_of_one_leaf(job, merged):
    """Its rows go, except those that came again; no other row is read as gone."""
    leaves = pa.array([1, 2, 2], pa.int64())
    held_rows = rows((1, "a", "A"), (2, "b", "B"), (3, "c", "C"))
    write(job, held_rows.append_column(RELID, leaves), schema_mode="overwrite")
    done = merged(job, [("I", None, 3, "n", "N")], ending=ending_of_leaves([2]))
    assert held(job) == {1: ("a", "A"), 3: ("n", "N")}
    cut = read_commit(job, plan().state, done)
    assert (cut.inserted, cut.updated, cut.deleted, cut.skipped) == (0, 1, 0, 0)


RAW_BIG, RAW_V = ("it's.big", "x"), ("the `v`", "y")


@pytest.mark.parametrize(
    ("big", "sent", "after"),
    [
        ("~", None, [RAW_BIG]),
        ("~", [RAW_V], [RAW_BIG, RAW_V]),
        ("B", [RAW_V], [RAW_V]),
        ("B", None, None),
    ],
)
def test_raw_values_of_an_updated_row(job, merged, big, sent, after):
    """Values that weren't sent keep their entries in _wd_raw beside those that came."""
    with_raw = rows((1, "a", "A"), (2, "a", "A")).set_column(
        6, SCHEMA.field("_wd_raw"), pa.array([[RAW_BIG]] * 2, RAW_TYPE)
    )
    write(job, with_raw)
    assert merged(job, [("U", 1, 1, "b", big), ("I", None, 3, "n", "N")], raw=sent) is not None
    found = {row["Id"]: row["_wd_raw"] for row in table(job).to_pyarrow_table().to_pylist()}
    assert found == {1: after, 2: [RAW_BIG], 3: sent}
    assert held(job)[1] == ("b", "A" if big == "~" else big)


def test_whoever_may_not_write_any_more_does_not(job, merged):
    """Asked when the target was read."""

    def taken() -> None:
        raise LockHeld("by another run")

    with pytest.raises(LockHeld):
        merged(job, [("I", None, 4, "d", "D")], fence=SimpleNamespace(verify=taken))
    assert held(job) == {}


def test_files_that_spark_merges_are_there_before_the_fence(job, monkeypatch):
    """A run that takes the target over later removes them, and so ends Spark's statement."""
    monkeypatch.setattr("waldelta.changes.merge.file_merge.MOST_NET_ROWS", 0)
    write(job, rows((1, "a", "A")))
    net = net_of([("I", None, 4, "d", "D")])
    changes = changes_of(job, net, {"insert": 1}, in_memory=True)

    def taken() -> None:
        assert NetFiles.of(changes.folder, job.lake).rows == [1]
        raise LockHeld("by another run")

    with pytest.raises(LockHeld):
        merge_staged(None, job, changes, plan(), tag(), SimpleNamespace(verify=taken))
