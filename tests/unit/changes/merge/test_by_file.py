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

from tests.support.data.merges import (
    SCHEMA,
    file_merge,
    files_of,
    held,
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
from waldelta.changes.decode.collapse import EventShape, net_schema
from waldelta.changes.merge import by_file as module
from waldelta.changes.merge.by_driver import merge_in_driver
from waldelta.changes.merge.by_file import merge_files
from waldelta.changes.merge.statements import CommitTag
from waldelta.changes.stage.net_files import packed, unpacked
from waldelta.changes.stage.stage import Staged
from waldelta.config.type_options import DEFAULT_TYPES
from waldelta.errors import StagedLost
from waldelta.lake import UNFENCED, local_path
from waldelta.lake.layout import HeldFile
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
    before, opened, of = names_of(job), [], HeldFile.open
    monkeypatch.setattr(
        HeldFile, "open", lambda file, *to: opened.append(file.path) or of(file, *to)
    )
    assert file_merge(job, [("U", 10, 10, "j2", "J2"), ("U", 5, 5, "lacking", "x")]) is not None
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
    assert file_merge(job, changes, run=run) is not None
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
    assert file_merge(job, [("I", None, 4, "d", "D"), ("I", None, 5, "e", "E")]) is not None
    assert before < names_of(job)
    assert set(held(job)) == {1, 4, 5}


def test_a_file_whose_rows_are_all_gone_has_no_successor(job):
    write_files(job, [(1, "a", "A")])
    assert file_merge(job, [("D", 1, None, None, None)]) is not None
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
    assert file_merge(job, [("U", k, k, "c", "C") for k in (1, 4)], run=run) is None
    assert (ended, files_of(job)) == ([2], files)
    assert file_merge(job, [("I", None, 7, "d", "D")]) is not None


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
        assert file_merge(job, events, run=run) is None
    assert (files_of(job), len(done)) == (files, rounds)


def test_a_file_that_is_gone_leaves_it_to_spark(job, monkeypatch):
    """As when an OPTIMIZE and a VACUUM come between."""
    write_files(job, [(1, "a", "A")], [(2, "b", "B")])
    may_hold = module.may_hold

    def vacuumed(files, *given):
        (local_path(table_uri(job)) / files["path"][-1].as_py()).unlink()
        return may_hold(files, *given)

    monkeypatch.setattr(module, "may_hold", vacuumed)
    assert file_merge(job, [("U", key, key, "x", "X") for key in (1, 2)]) is None


def test_changes_that_are_not_all_there_are_left_to_spark(job):
    """Which fails for lack of its source."""
    net = net_of([("I", None, 4, "d", "D")])
    planned = replace(tag(), counts={"upsert": 2})
    changes = Staged(staged(job, net), "", {})
    runner = SimpleNamespace(run=one_by_one)
    assert merge_files(runner, job, plan(), changes, planned, UNFENCED) is None


def test_there_is_a_checkpoint_every_so_often(job, monkeypatch):
    """Of the version that was committed."""
    monkeypatch.setattr("waldelta.lake.delta_target.CHECKPOINT_INTERVAL", 2)
    for batch in (1, 2):
        file_merge(job, [("I", None, batch, "v", "w")], batch)
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
    file_merge(job, [("U", 2, 2, "c", "C")])
    (name,) = names_of(job)
    group = pq.read_metadata(local_path(table_uri(job)) / name).row_group(0)
    bounded = {
        group.column(k).path_in_schema
        for k in range(group.num_columns)
        if group.column(k).is_stats_set
    }
    assert "gone" not in bounded
    assert "Id" in bounded


def test_somebody_elses_commit_is_not_overwritten(job):
    """Whoever was first stands; what is merged here is left to Spark, which merges into that."""
    write_files(job, [(1, "a", "A")])

    def late() -> None:
        write(job, rows((5, "theirs", "x")))

    assert file_merge(job, [("U", 1, 1, "b", "B")], fence=SimpleNamespace(verify=late)) is None
    assert held(job) == {5: ("theirs", "x")}
    # Theirs, and what they replaced.
    assert len(files_of(job)) == 2


def test_files_carry_statistics(job):
    """By which other readers skip them too."""
    write_files(job, [(1, "a", "A")])
    file_merge(job, [("U", 1, 1, "b", "B"), ("I", None, 7, "c", "C")])
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
    made = plan(shape=EventShape(3, ()))
    made.decode.names = ("v", "n", "d")
    made.decode.columns = list(zip(made.decode.names, V_KINDS, strict=True))
    return made


def net_of_duplicates(changes) -> pa.Table:
    """Of (action, old row, new row)."""
    net = net_schema(EventShape(3, ()), [pa.string(), pa.int64(), pa.string()])
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


def merged_duplicates(job, made, rows, batch=1) -> CommitTag | None:
    net = net_of_duplicates(rows)
    counts = Counter(action for action, *_ in rows)
    planned = replace(tag(batch), counts=dict(counts))
    changes = Staged(staged(job, net), "", {})
    return merge_files(SimpleNamespace(run=one_by_one), job, made, changes, planned, UNFENCED)


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
    before, opened, of = names_of(job), [], HeldFile.open
    monkeypatch.setattr(
        HeldFile, "open", lambda file, *to: opened.append(file.path) or of(file, *to)
    )
    done = merged_duplicates(
        job,
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
        assert merged_duplicates(job, made, changes, batch) is not None
        by_tasks = stored(job)
        table(job).restore(version)
        counts = dict(Counter(action for action, *_ in changes))
        planned = replace(tag(batch + 1), counts=counts)
        net = Staged("", "", counts, net=net_of_duplicates(changes))
        assert merge_in_driver(job, made, net, planned, UNFENCED) is not None
        assert (attempt, by_tasks) == (attempt, stored(job))
