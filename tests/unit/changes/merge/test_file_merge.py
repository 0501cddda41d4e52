"""Merging file by file in tasks changes only the files that are concerned."""

import json
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from pyspark import cloudpickle

from tests.support.data.merges import (
    SCHEMA,
    changes_of,
    files_of,
    held,
    large,
    merge_large,
    merge_plan,
    merge_small,
    net_of,
    one_by_one,
    plan,
    rows,
    staged,
    table,
    table_uri,
    tag,
    write,
    write_files,
)
from tests.support.data.pg_types import ANY_NUMERIC
from tests.support.seeds import rounds
from waldelta.changes.decode.collapse import ColumnNumbering, common_net_schema
from waldelta.changes.merge import compare
from waldelta.changes.merge import file_merge as module
from waldelta.changes.merge.commits import read_commit
from waldelta.changes.merge.rows import ending_of_leaves
from waldelta.changes.merge.statements import CommitTag
from waldelta.changes.stage.net_files import packed, unpacked
from waldelta.changes.stage.stage import Staged
from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.errors import StagedLost
from waldelta.lake import local_path
from waldelta.lake.layout import TableFile
from waldelta.snapshot.read_table import RAW_TYPE
from waldelta.types.numeric import Number
from waldelta.types.text import Characters
from waldelta.types.type_map import target_type

pytestmark = pytest.mark.usefixtures("small_parts")


def names_of(job) -> set[str]:
    return set(pa.table(table(job).get_add_actions(flatten=True))["path"].to_pylist())


def test_only_files_that_hold_a_changed_row_are_written_anew(job, monkeypatch):
    """Others whose bounds exclude it aren't even read."""
    write_files(
        job, [(1, "a", "A"), (9, "i", "I")], [(10, "j", "J"), (19, "s", "S")], [(20, "t", "T")]
    )
    before, opened, of = names_of(job), [], TableFile.open
    monkeypatch.setattr(
        TableFile, "open", lambda file, *to: opened.append(file.path) or of(file, *to)
    )
    assert merge_large(job, [("U", 10, 10, "j2", "J2"), ("U", 5, 5, "lacking", "x")]) is not None
    kept = names_of(job) & before
    assert (len(kept), len(names_of(job))) == (2, 3)
    assert {*opened} == before - {path_of(job, 20)}


def path_of(job, least) -> str:
    """The file whose least id this is."""
    told = pa.table(table(job).get_add_actions(flatten=True))
    (path,) = told.filter(pc.field("min.Id") == least)["path"].to_pylist()
    return path


def test_tasks_tell_no_more_than_there_are_changes(job, monkeypatch):
    """However many files are read, each of which may hold any of them."""
    monkeypatch.setattr("waldelta.spark.runner.BYTES_PER_TASK", 1)
    write_files(job, *([(n, "a", "A"), (1000 + n, "b", "B")] for n in range(8)))
    told = []

    def run(*given):
        told.append(one_by_one(*given))
        return told[-1]

    changes = [("U", n, n, "c", "C") for n in range(100)]
    assert merge_large(job, changes, run=run) is not None
    matched = [len(row["matched"]) for row in told[0] if row["matched"] is not None]
    assert (len(matched), sum(matched)) == (8, 4 * 8)
    assert sum(values == ("c", "C") for values in held(job).values()) == 8


@pytest.mark.parametrize("count", [0, 1, 7, 8, 64, 1000])
def test_which_changes_are_told_in_the_fewest_bytes(count):
    """As bits or as numbers."""
    for chosen in {0, 1, count // 40, count // 8, count}:
        which = np.zeros(count, np.bool_)
        which[random.sample(range(count), min(chosen, count))] = True
        told = packed(which)
        assert len(told) <= min(-(-count // 8), 4 * int(which.sum()))
        assert unpacked(told, count).tolist() == np.flatnonzero(which).tolist()


def test_new_rows_alone_leave_all_files(job):
    write_files(job, [(1, "a", "A")])
    before = names_of(job)
    assert merge_large(job, [("I", None, 4, "d", "D"), ("I", None, 5, "e", "E")]) is not None
    assert before < names_of(job)
    assert set(held(job)) == {1, 4, 5}


def test_a_file_whose_rows_are_all_gone_has_no_successor(job):
    write_files(job, [(1, "a", "A")])
    assert merge_large(job, [("D", 1, None, None, None)]) is not None
    assert names_of(job) == set()


def test_more_net_changes_than_memory_is_meant_for_are_left_to_spark(job, monkeypatch):
    """The task tells it: Spark would repeat one that fails. New rows aren't held."""
    write_files(job, *([(k + n, "a", "A") for n in range(3)] for k in (1, 4)))
    files, ended = files_of(job), []

    def run(count, *given):
        told = one_by_one(count, *given)
        ended.append(count)
        return told

    monkeypatch.setattr(module, "MOST_NET_BYTES", 1)
    assert merge_large(job, [("U", k, k, "c", "C") for k in (1, 4)], run=run) is None
    assert (ended, files_of(job)) == ([2], files)
    assert merge_large(job, [("I", None, 7, "d", "D")]) is not None


@pytest.mark.parametrize("rounds", [1, 2], ids=["of files written anew", "of new rows"])
@pytest.mark.parametrize(
    "err", [StagedLost("gone"), RuntimeError("the job was aborted")], ids=["named", "Spark's"]
)
def test_a_merge_that_fails_leaves_no_file_of_the_tasks_that_ended(job, err, rounds):
    """What the target holds, and what others have under way in its folder, stays."""
    write_files(job, [(1, "a", "A")], [(2, "b", "B")])
    (local_path(table_uri(job)) / "part-other.parquet").touch()
    files, done = files_of(job), []

    def run(*given):
        told = one_by_one(*given)
        done.append(1)
        if len(done) == rounds:
            assert files_of(job) > files
            raise err
        return told

    events = [("U", 1, 1, "c", "C"), ("U", 2, 2, "d", "D"), ("I", None, 3, "e", "E")]
    with pytest.raises(StagedLost) if isinstance(err, StagedLost) else nullcontext():
        assert merge_large(job, events, run=run) is None
    assert (files_of(job), len(done)) == (files, rounds)


def test_a_file_that_is_gone_leaves_it_to_spark(job, monkeypatch):
    """As when an OPTIMIZE and a VACUUM come between."""
    write_files(job, [(1, "a", "A")], [(2, "b", "B")])
    may_hold = compare.may_hold

    def vacuumed(files, *given):
        (local_path(table_uri(job)) / files["path"][-1].as_py()).unlink()
        return may_hold(files, *given)

    monkeypatch.setattr(compare, "may_hold", vacuumed)
    assert merge_large(job, [("U", key, key, "x", "X") for key in (1, 2)]) is None


def test_changes_that_are_not_all_there_are_left_to_spark(job):
    """Which fails for lack of its source."""
    net = net_of([("I", None, 4, "d", "D")])
    planned = replace(tag(), counts={"upsert": 2})
    changes = Staged(staged(job, net), {})
    assert merge_plan(job, plan(), changes, planned) is None


def test_there_is_a_checkpoint_every_so_often(job, monkeypatch):
    """Of the version that was committed."""
    monkeypatch.setattr("waldelta.lake.delta_target.CHECKPOINT_INTERVAL", 2)
    for batch in (1, 2):
        merge_large(job, [("I", None, batch, "v", "w")], batch)
    assert [
        path.name[19:20]
        for path in (local_path(table_uri(job)) / "_delta_log").glob("*.checkpoint.parquet")
    ] == ["2"]


def test_no_reader_skips_a_value_that_is_no_number(job):
    """Arrow's bounds of a column leave NaN out, and for Spark it is the greatest."""
    number = SCHEMA.get_field_index("gone")
    with_nan = rows((1, "a", "A"), (2, "b", "B")).set_column(
        number, SCHEMA.field(number), pa.array([float("nan"), 1.0])
    )
    write(job, with_nan)
    merge_large(job, [("U", 2, 2, "c", "C")])
    (name,) = names_of(job)
    group = pq.read_metadata(local_path(table_uri(job)) / name).row_group(0)
    bounded = {
        group.column(k).path_in_schema
        for k in range(group.num_columns)
        if group.column(k).is_stats_set
    }
    assert "gone" not in bounded
    assert "Id" in bounded


@pytest.mark.parametrize("commits", [1, 2])
def test_somebody_elses_commit_is_not_overwritten(job, commits):
    """Changes are merged into it, or left to Spark where that happens again."""
    write_files(job, [(1, "a", "A")])
    theirs = [rows((1, "theirs", "x"))] * commits

    def late() -> None:
        if theirs:
            write(job, theirs.pop())

    done = merge_large(job, [("U", 1, 1, "b", "B")], fence=SimpleNamespace(verify=late))
    if commits == 1:
        assert (done is None, held(job)) == (False, {1: ("b", "B")})
    else:
        assert (done, held(job)) == (None, {1: ("theirs", "x")})
        # Theirs, and what they replaced.
        assert len(files_of(job)) == 3


def test_new_rows_alone_are_added_in_files_of_their_own(job, monkeypatch):
    """Until there are many, then all become one; a checkpoint keeps the watermark."""
    monkeypatch.setattr("waldelta.lake.delta_target.CHECKPOINT_INTERVAL", 3)
    monkeypatch.setattr(module, "_MOST_FILES", 3)
    files = []
    for batch in range(1, 7):
        merge_small(job, [("I", None, batch, "v", "w")], batch)
        files.append(len(table(job).file_uris()))
    assert files == [1, 2, 3, 1, 2, 3]
    (checkpoint,) = (local_path(table_uri(job)) / "_delta_log").glob("*6.checkpoint.parquet")
    assert checkpoint.stat().st_size
    assert (table(job).transaction_version("app"), len(held(job))) == (6, 6)


@pytest.mark.parametrize("count", [1, 2])
def test_new_rows_without_a_key_leave_all_others(job, monkeypatch, count):
    """Also where many files become one, and a part that is read has a single row."""
    monkeypatch.setattr(module, "_MOST_FILES", 3)
    monkeypatch.setattr(module, "parts_at_once", lambda rows: map(table_of_batch, rows))
    write_files(job, *([(n, "a", "A")] * count for n in range(3)))
    done = merge_small(job, [("I", None, 9, "new", "N")], numbering=ColumnNumbering(3, ()))
    assert done is not None
    ids = sorted(table(job).to_pyarrow_table()["Id"].to_pylist())
    assert ids == sorted([0, 1, 2] * count + [9])
    assert len(table(job).file_uris()) == 1


def table_of_batch(batch) -> pa.Table:
    return pa.Table.from_batches([batch])


def test_a_row_at_a_key_that_the_batch_leaves_empty_goes(job):
    """A repeated batch meets the row that it inserted the first time, and deletes."""
    write(job, rows((1, "a", "A"), (2, "b", "B")))
    done = merge_small(job, [("I", None, 1, "a", "A"), ("D", 1, None, None, None)])
    assert held(job) == {2: ("b", "B")}
    assert read_commit(job, plan().state, done).deleted == 1


def test_files_carry_statistics(job):
    """By which other readers skip them too."""
    write_files(job, [(1, "a", "A")])
    merge_large(job, [("U", 1, 1, "b", "B"), ("I", None, 7, "c", "C")])
    entry = local_path(table_uri(job)) / "_delta_log" / f"{table(job).version():020d}.json"
    adds = [json.loads(line)["add"] for line in entry.read_text().splitlines() if '"add"' in line]
    told = {
        (s["numRecords"], s["minValues"]["Id"], s["maxValues"]["the `v`"])
        for a in adds
        if (s := json.loads(a["stats"]))
    }
    assert told == {(1, 1, "b"), (1, 7, "c")}
    for add in adds:
        assert pq.read_metadata(local_path(table_uri(job)) / add["path"]).num_rows == 1


V_KINDS = (
    Characters(),
    Number("bigint", pa.int64(), "int8"),
    target_type(ANY_NUMERIC, DEFAULT_TYPES),
)
DUPLICATES = pa.schema(
    [("v", pa.string()), ("n", pa.int64()), ("d", pa.string()), *list(SCHEMA)[3:]]
)


def keyless(job) -> SimpleNamespace:
    """A plan of a table without a key, whose target is empty."""
    write(job, DUPLICATES.empty_table(), schema_mode="overwrite")
    made = plan(numbering=ColumnNumbering(3, ()))
    made.decode.names = ("v", "n", "d")
    made.decode.columns = list(zip(made.decode.names, V_KINDS, strict=True))
    return made


def net_of_duplicates(changes) -> pa.Table:
    """Of (action, old row, new row)."""
    net = common_net_schema(ColumnNumbering(3, ()), [pa.string(), pa.int64(), pa.string()])
    net = net.append(pa.field("place", pa.int64()))
    for name in ("base_raw", "raw"):
        net = net.append(pa.field(name, RAW_TYPE))
    listed = [
        {"action": action, "lsn": 9, "place": place}
        | {f"b{i}": value for i, value in enumerate(old or ())}
        | {f"c{i}": value for i, value in enumerate(new or ())}
        for place, (action, old, new) in enumerate(changes)
    ]
    return pa.Table.from_pylist(listed, net)


def merged_duplicates(job, made, rows, batch=1, in_memory=None) -> CommitTag | None:
    net = net_of_duplicates(rows)
    counts = Counter(action for action, *_ in rows)
    planned = replace(tag(batch), counts=dict(counts))
    return merge_plan(job, made, changes_of(job, net, {}, in_memory=in_memory), planned)


def stored(job) -> list[tuple]:
    found = table(job).to_pyarrow_table().select(["v", "n", "d"]).to_pylist()
    return sorted((tuple(row.values()) for row in found), key=repr)


def write_duplicates(job, *files) -> None:
    for file in files:
        rows = [dict(zip(("v", "n", "d", "gone"), (*row, 0.5), strict=True)) for row in file]
        write_deltalake(table_uri(job), pa.Table.from_pylist(rows, DUPLICATES), mode="append")


A1, A2, B1 = ("a", 1, "1.0"), ("a", 1, "1.00"), ("b", 1, "1.0")


def test_changes_of_duplicate_rows_rewrite_the_files_with_rows_they_take(job, monkeypatch):
    """Rows that are written alike first, wherever they are; bounds exclude a file of others."""
    made = keyless(job)
    write_duplicates(job, [A1, A1], [A2, B1], [("a", 7, "1.0")])
    before, opened, of = names_of(job), [], TableFile.open
    monkeypatch.setattr(
        TableFile, "open", lambda file, *to: opened.append(file.path) or of(file, *to)
    )
    done = merged_duplicates(
        large(job),
        made,
        [("delete", A2, None), ("update", B1, ("b", 2, "2")), ("insert", None, A1)],
    )
    assert stored(job) == sorted([A1, A1, ("b", 2, "2"), ("a", 7, "1.0"), A1], key=repr)
    assert (len(names_of(job) & before), len({*opened})) == (2, 2)
    assert [done.counts[f"merged_{kind}"] for kind in ("inserts", "updates", "deletes")] == [
        1,
        1,
        1,
    ]
    gone = [row["gone"] for row in table(job).to_pyarrow_table().to_pylist()]
    assert sorted(gone, key=str) == [0.5] * 4 + [None]


def test_a_change_of_no_duplicate_row_is_skipped(job):
    made = keyless(job)
    write_duplicates(job, [A1], [A1])
    files = names_of(job)
    deletes = [("delete", A1, None)] * 3 + [("delete", ("z", 1, None), None)]
    assert merged_duplicates(job, made, deletes).counts["merged_deletes"] == 2
    assert (stored(job), names_of(job) & files) == ([], set())
    merged_duplicates(job, made, [("delete", B1, None)], batch=2)
    assert table(job).version() == 5


def test_random_duplicates_are_merged_as_in_a_small_target(job):
    """Equal rows remain in both, and as many that are written alike."""
    rng = random.Random(46)

    def row():
        return rng.choice("ab"), rng.choice([1, 2, None]), rng.choice(["1.0", "1.00", None])

    for attempt in rounds(24):
        made = keyless(job)
        write_duplicates(job, *([row() for _ in range(rng.randrange(1, 9))] for _ in range(4)))
        changes = [
            rng.choice([("delete", row(), None), ("update", row(), row()), ("insert", None, row())])
            for _ in range(rng.randrange(1, 12))
        ]
        version, batch = table(job).version(), 2 * attempt + 1
        assert merged_duplicates(large(job), made, changes, batch) is not None
        by_tasks = stored(job)
        table(job).restore(version)
        assert merged_duplicates(job, made, changes, batch + 1) is not None
        assert (attempt, by_tasks) == (attempt, stored(job))


SIZES = {"small": lambda job: job, "large": large}


@pytest.mark.parametrize("most_bytes", [module.MOST_DRIVER_BYTES, 1], ids=["few", "many"])
@pytest.mark.parametrize("in_memory", [True, False], ids=["in memory", "in files"])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_changes_do_the_same_in_memory_and_in_files(job, monkeypatch, size, in_memory, most_bytes):
    """More of them than memory is meant for are written to files for the tasks."""
    monkeypatch.setattr(module, "MOST_DRIVER_BYTES", most_bytes)
    write_files(job, [(1, "a", "A"), (2, "b", "B")], [(3, "c", "C"), (4, "d", "D")])
    events = [("U", 1, 1, "x", None), ("U", 4, 5, "y", "Y"), ("D", 2, None, None, None)]
    events += [("I", None, 6, "z", "Z"), ("U", 9, 9, "lacking", "L")]
    done = merge_small(size(job), events, in_memory=in_memory)
    assert held(job) == {1: ("x", None), 3: ("c", "C"), 5: ("y", "Y"), 6: ("z", "Z")}
    merged = [done.counts[f"merged_{kind}"] for kind in ("inserts", "updates", "deletes")]
    assert merged == [1, 2, 1]
    made = keyless(job)
    write_duplicates(job, [A1, A1], [A2, B1])
    rows = [("delete", A2, None), ("update", B1, ("b", 2, "2")), ("insert", None, A1)]
    done = merged_duplicates(size(job), made, rows, 2, in_memory)
    assert stored(job) == sorted([A1, A1, ("b", 2, "2"), A1], key=repr)
    merged = [done.counts[f"merged_{kind}"] for kind in ("inserts", "updates", "deletes")]
    assert merged == [1, 1, 1]


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_duplicate_rows_of_merged_partitions(job, size):
    """One of the equal rows changes; a truncated leaf's go; own columns keep their values."""
    schema = pa.schema([("v", pa.string()), ("_wd_relid", pa.int64()), *list(SCHEMA)[3:]])
    held = [("a", 1), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    target = [{"v": v, "_wd_relid": leaf, "gone": 0.5, "_wd_lsn": -1} for v, leaf in held]
    write(job, pa.Table.from_pylist(target, schema), schema_mode="overwrite")
    numbering = ColumnNumbering(2, ())
    found = [
        {"action": "update", "b0": "a", "b1": 1, "c0": "A", "c1": 1, "lsn": 9, "place": 2},
        {"action": "delete", "b0": "b", "b1": 1, "lsn": 9, "place": 3},
        {"action": "delete", "b0": "b", "b1": 1, "lsn": 9, "place": 4},
        {"action": "insert", "c0": "new", "c1": 2, "lsn": 9, "place": 5},
    ]
    types = [pa.string(), pa.int64()]
    net = common_net_schema(numbering, types).append(pa.field("place", pa.int64()))
    for name in ("base_raw", "raw"):
        net = net.append(pa.field(name, RAW_TYPE))
    leaf = plan(truncated=True, leaves=(2,), numbering=numbering)
    kinds = (Characters(), Number("bigint", pa.int64(), "int8"))
    leaf.decode.names = ("v", "_wd_relid")
    leaf.decode.columns = list(zip(leaf.decode.names, kinds, strict=True))
    counts = {"update": 1, "delete": 2, "insert": 1}
    rows, counted = pa.Table.from_pylist(found, net), replace(tag(), counts=counts)
    changes = changes_of(size(job), rows, counts, ending_of_leaves([2]))
    done = merge_plan(size(job), leaf, changes, counted)
    rows = table(job).to_pyarrow_table().select(["v", "_wd_relid", "gone", "_wd_lsn"]).to_pylist()
    expected = [("A", 1, 0.5, 9), ("a", 1, 0.5, -1), ("new", 2, None, 9)]
    assert sorted(tuple(row.values()) for row in rows) == expected
    cut = read_commit(job, leaf.state, done)
    assert (cut.inserted, cut.updated, cut.deleted, cut.skipped) == (1, 1, 1, 1)


def test_spark_is_sent_no_changes_that_are_in_memory(job):
    """Each task would have them all; it reads their files."""
    write_files(job, [(1, "a", "A")])
    sent = []

    def run(count, schema, task, *, stops=False):
        sent.append(cloudpickle.dumps(task))
        return one_by_one(count, schema, task, stops=stops)

    events = [("U", 1, 1, "needle", "A"), ("I", None, 2, "needle", "B")]
    assert merge_small(large(job), events, run=run, in_memory=True) is not None
    assert [b"needle" in text for text in sent] == [False, False]
    assert held(job) == {1: ("needle", "A"), 2: ("needle", "B")}
