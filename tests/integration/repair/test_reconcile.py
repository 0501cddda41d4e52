"""Reconciliation: every difference is found, and nothing else; repair mends exactly that."""

import itertools
import json
import threading
from dataclasses import replace
from datetime import date

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.integration.types.test_values import values  # noqa: F401 - a fixture
from tests.support.bookkeeping import read_expectation_results
from tests.support.fixtures.postgres import AT_HAND, new_database
from tests.support.pipelines import copied_pipeline, pipeline_on
from tests.support.seeds import is_long
from tests.support.waiting import wait_until
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    ALL_VALUES_KNOWN,
    DISCARDED,
    WAITING,
    Decision,
    Decisions,
    ExpectationResult,
    Ledger,
    Reconciliation,
    now,
)
from waldelta.pipeline.run_result import RunFailed
from waldelta.stages.land import drain as land_module
from waldelta.stages.repair import repair as repair_module
from waldelta.stages.repair.reconcile._target_side import TargetSide


def make(database, lake, publications=None, tables=None, **target):
    """A pipeline on publications that exist, set up and copied by the test itself."""
    entries = [{"name": name, "manage": False} for name in publications or ["p"]]
    target |= {"root": lake, "tables": tables or {}}
    return pipeline_on(database, lake, *entries, target=target)


def results_of(pipeline, run_id):
    """A run's results by table; after a retry, its last ones."""
    table = Ledger(Lake(pipeline.file.target.root)).table(Reconciliation)
    found = {row.table_name: row for row in table.read(pc.field("run_id") == run_id)}
    return [found[name] for name in sorted(found)]


def reconcile(runner, pipeline, run_id="reconcile", **options):
    """What a reconciliation found, by table, whether or not it failed."""
    failure = None
    try:
        pipeline.reconcile(runner, run_id=run_id, **options)
    except RunFailed as failed:
        failure = failed.result.error
    rows = results_of(pipeline, run_id)
    assert rows, failure
    return {row.table_name.removeprefix("public."): row for row in rows}


def told(row):
    """The rows that differ: kind, key, and the columns with both values."""
    return [
        (one.kind, json.loads(one.key), [(c.name, c.source, c.target) for c in one.columns])
        for one in row.differences
    ]


SOURCE = """
create table t (station text, day date, value numeric(8, 2), ratio double precision, note text,
  taken timestamptz, tags text[],
                primary key (station, day));
insert into t
select case when n % 3 = 0 then 'north' else 'south' end, date '2024-01-01' + n, case n when 7
  then 'NaN' else n / 8.0 end,
       case n when 8 then 'NaN' when 9 then '-0' else n / 3.0 end, nullif(repeat('x', n % 40), ''),
       timestamptz '2024-01-01' + n * interval '1 hour', array['a', n::text, null]
from generate_series(0, 999) as n;
create publication p for table t;
"""


@pytest.fixture
def pipeline(runner, database, lake):
    """One table with a composite key, copied."""
    database.execute(SOURCE)
    made = make(database, lake)
    made.setup()
    made.sync(runner)
    return made


def target(pipeline, table="public.t"):
    return DeltaTable(pipeline.target_path(table))


@pytest.fixture
def read_both_ways(monkeypatch):
    """Small targets, here and by Spark; gives the sums, rows and values of both, by pairs."""
    found = []

    def patch(name, as_list):
        real = getattr(TargetSide, name)

        def both(self, *given):
            assert self.small is not None
            here, there = real(self, *given), real(replace(self, small=None), *given)
            found.append((name, as_list(here), as_list(there)))
            return here

        monkeypatch.setattr(TargetSide, name, both)

    patch("sums", lambda sums: [sums.rows.tolist(), sums.totals.tolist()])
    patch("rows", lambda rows: sorted((*row.values(),) for row in rows.table.to_pylist()))
    patch(
        "values", lambda held: sorted((key, [*of.shown], [*of.exact]) for key, of in held.items())
    )
    return found


def test_a_fresh_copy_is_equal(runner, pipeline):
    """Every row, with NaN, minus zero and what the type can't hold."""
    row = reconcile(runner, pipeline)["t"]
    assert (row.status, row.source_rows, row.target_rows, row.differing) == ("equal", 1000, 1000, 0)


@pytest.mark.nightly("a refusal in a whole run")
def test_a_target_that_keeps_more_than_the_source_isnt_compared(runner, database, lake):
    """Its deleted rows aren't the source's: it says so instead of calling them differences."""
    database.execute(SOURCE)
    made = make(database, lake, tables={"public.t": {"mode": "soft_delete"}})
    made.setup()
    made.sync(runner)
    row = reconcile(runner, made)["t"]
    assert (row.status, row.reason) == (
        "not compared",
        "its target keeps rows that the source no longer has (mode soft_delete)",
    )


@pytest.mark.nightly("the same differences on the other runner")
def test_spark_finds_the_same_differences(runner, pipeline, read_both_ways):
    """Of rows that differ in their columns: how both show and compare them."""
    target(pipeline).delete("day = '2024-01-05'")
    target(pipeline).update(
        updates={"note": "'tampered'", "ratio": "null"}, predicate="day < '2024-01-12'"
    )
    found = reconcile(runner, pipeline)["t"]
    assert (found.missing, found.different) == (1, 10)
    assert [name for name, *_ in read_both_ways] == ["sums", "rows", "values"]
    for name, here, there in read_both_ways:
        assert here == there, name


def test_each_planted_difference_is_named_and_repair_mends_exactly_these(
    runner, database, pipeline, monkeypatch
):
    """A row deleted, one changed, one added behind our back: kind, key, column and both values;
    then they are gone.

    A repair that sleeps before its commit, and loses its lock, while another one does the work, has
    no effect when it wakes up.
    """
    held = target(pipeline)
    held.delete("station = 'south' and day = '2024-01-05'")
    held.update(
        updates={"note": "'tampered'"}, predicate="station = 'south' and day = '2024-01-06'"
    )
    held.update(updates={"_wd_raw": "null"}, predicate="day = '2024-01-08'")
    row = held.to_pyarrow_table().slice(0, 1)
    added = row.set_column(0, row.schema.field(0), pa.array(["west"], row.schema.field(0).type))
    write_deltalake(held, added, mode="append")
    found = reconcile(runner, pipeline)["t"]
    assert (found.status, found.missing, found.extra, found.different) == ("different", 1, 1, 2)
    north, south = {"station": "north"}, {"station": "south"}
    day = added["day"][0].as_py().isoformat()
    assert told(found) == [
        ("missing", south | {"day": "2024-01-05"}, []),
        ("different", south | {"day": "2024-01-06"}, [("note", "xxxxx", "tampered")]),
        ("different", south | {"day": "2024-01-08"}, [("value", "NaN", None)]),
        ("extra", {"station": "west", "day": day}, []),
    ], north
    version, mended = target(pipeline).version(), []

    def slept(*args, real=repair_module._commit):
        monkeypatch.setattr(repair_module, "_commit", real)
        database.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name ="
            " 'waldelta lock public.t'"
        )
        mended.append(
            reconcile(runner, pipeline, "repair", repair=True, by="mia", reason="foreign writer")[
                "t"
            ]
        )
        return real(*args)

    monkeypatch.setattr(repair_module, "_commit", slept)
    with pytest.raises(RunFailed, match=r"lock .*public\.t' was lost") as late:
        pipeline.reconcile(runner, run_id="slept", repair=True, by="zoe")
    assert late.value.result.error["class"] == "LockHeld"
    assert [(row.status, row.repaired, row.by) for row in mended] == [("repaired", 4, "mia")]
    # The other one fenced the sleeper off before it merged.
    after = [
        commit["operation"] for commit in target(pipeline).history() if commit["version"] > version
    ]
    assert after == ["WRITE", "SET TBLPROPERTIES"]
    state = pipeline.job().read_states()["public.t"]
    assert (state.status, state.reason) == (
        "synced",
        "reconcile --repair by mia: 4 rows differed: foreign writer",
    )
    again = reconcile(runner, pipeline, "again")["t"]
    assert (again.status, again.source_rows, again.target_rows) == ("equal", 1000, 1000)
    # The repair has told whose commits it repaired; the next run doesn't warn of them.
    (told_once,) = [
        w
        for w in run_warnings(pipeline, "repair")
        if "external commits to its target were repaired" in w
    ]
    assert told_once.count("; ") == 2
    database.execute(
        "insert into t values ('new', '2024-01-01')"
    )  # runs look at targets once a batch has landed
    consumed = pipeline.consume(runner, run_id="next")
    assert (consumed.warnings, consumed.targets.external_commits) == ([], [])
    assert pipeline.status()["waiting"] == []
    # What is written afterwards is another matter.
    target(pipeline).delete("day = '2024-01-05'")
    assert pipeline.consume(runner, run_id="after").targets.external_commits == ["public.t"]
    (commit,) = pipeline.status()["waiting"]
    assert "DELETE" in commit["reason"]


def run_warnings(pipeline, run_id):
    return json.loads(pipeline.job().ledger.run_result(run_id, "reconcile").result)["warnings"]


@pytest.mark.soak("keys that only Spark stages")
def test_keys_that_spark_has_staged_are_read_again_beside_others(
    runner, database, lake, monkeypatch
):
    """Those of many changes in flight; Spark writes a timestamp otherwise than Arrow does."""
    monkeypatch.setattr("waldelta.lake.changelog.batch_range.MOST_DRIVER_ROWS", 0)
    database.execute(
        "create table t (at timestamptz primary key, n int); create publication p for table"
        " t;insert into t select timestamptz '2024-01-01 00:00Z' + n * interval '1 hour', n from"
        " generate_series(0, 19) n"
    )
    pipeline = copied_pipeline(runner, make(database, lake))
    target(pipeline).update(updates={"n": "-1"}, predicate="n in (3, 4)")
    database.execute("update t set n = 100 where n = 4; delete from t where n = 5")
    found = reconcile(runner, pipeline, repair=True)["t"]
    assert (found.status, found.in_flight, found.differing, found.repaired) == ("repaired", 2, 1, 3)
    assert reconcile(runner, pipeline, "after")["t"].status == "equal"


@pytest.mark.soak("keys that only Spark compares")
def test_rows_are_repaired_by_keys_that_arrow_cannot_compare(runner, database, lake):
    """Spark compares arrays, and goes on from what was read again."""
    database.execute(
        "create table t (k int[] primary key, n int); create publication p for table t;"
        "insert into t values ('{1,2}', 1), ('{}', 2), ('{3,null}', 3)"
    )
    pipeline = copied_pipeline(runner, make(database, lake))
    target(pipeline).update(updates={"n": "-1"}, predicate="n <> 2")
    found = reconcile(runner, pipeline, repair=True)["t"]
    assert (found.status, found.differing, found.repaired) == ("repaired", 2, 2)
    assert reconcile(runner, pipeline, "after")["t"].status == "equal"


def test_the_run_fails_while_a_target_differs(runner, pipeline):
    """The error names the table and what to do; the ledger has the run."""
    target(pipeline).delete("day = '2024-01-05'")
    with pytest.raises(
        RunFailed, match=r"1 target doesn't match the source.*\n  - public.t: 1 missing, 0 extra"
    ) as failed:
        pipeline.reconcile(runner, run_id="r")
    assert failed.value.result.error["class"] == "TargetDiffers"
    assert pipeline.job().ledger.run_result("r", "reconcile").status == "failed"


@pytest.mark.soak("a race with a writer")
def test_nothing_is_found_while_a_writer_writes(runner, database, pipeline):
    """What the stream has yet to bring is in flight on both sides; what was planted is found."""
    pipeline.consume(runner)
    ended, errors, count = threading.Event(), [], 4 if is_long() else 2

    def write():
        try:
            with psycopg.connect(database.conninfo, autocommit=True) as connection:
                number = 0
                # Some hundred transactions a second: what counts is that it never rests.
                while not ended.wait(0.003):
                    number += 1
                    day = f"date '2024-01-01' + {number % 900}"
                    connection.execute(f"update t set note = 'w{number}' where day = {day}")
                    connection.execute(f"delete from t where day = {day} + 1")
                    connection.execute(
                        f"insert into t values ('new', date '2030-01-01' + {number}, {number}, 1,"
                        " 'n', now(), null)"
                    )
        except Exception as err:
            errors.append(err)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        rounds = []
        for number in range(count):
            row = reconcile(runner, pipeline, f"busy {number}")["t"]
            rounds.append((row.status, row.in_flight > 0, row.reason))
            pipeline.consume(runner)
        target(pipeline).update(updates={"note": "'tampered'"}, predicate="day = '2026-08-20'")
        row = reconcile(runner, pipeline, "planted")["t"]
    finally:
        ended.set()
        thread.join()
    assert errors == []
    assert rounds == [("equal", True, None)] * count
    assert (row.status, row.different, row.differing) == ("different", 1, 1)
    pipeline.consume(runner)
    assert reconcile(runner, pipeline, "mended", repair=True)["t"].status == "repaired"
    assert reconcile(runner, pipeline, "after")["t"].status == "equal"


@pytest.mark.soak("a standby that has to be waited for")
def test_a_commit_that_is_applied_before_it_is_visible_is_no_difference(runner, database, pipeline):
    """Waiting for a synchronous standby it is decoded, and every snapshot has the old row."""
    pipeline.consume(runner)
    database.execute("alter system set synchronous_standby_names = 'absent'")
    database.execute("select pg_reload_conf()")
    waiting = database.connect(autocommit=True)
    try:
        waiting.pgconn.send_query(
            b"""with gone as (delete from t where day = '2024-01-05'),
              added as (insert into t values ('new', '2030-01-01', 1))
            update t set note = 'unseen' where day = '2024-01-06'"""
        )
        writer = f"select 1 from pg_stat_activity where pid = {waiting.info.backend_pid}"
        wait_until(lambda: database.execute(f"{writer} and wait_event = 'SyncRep'"))
        pipeline.consume(runner)
        assert target(pipeline).to_pyarrow_table()["note"].to_pylist().count("unseen") == 1
        assert database.execute("select count(*) from t where note = 'unseen'") == [(0,)]
        row = reconcile(runner, pipeline, "unseen")["t"]
        assert (row.status, row.in_flight, row.source_rows, row.target_rows) == (
            "equal",
            3,
            998,
            998,
        )
        target(pipeline).update(updates={"note": "'tampered'"}, predicate="day = '2024-01-07'")
        row = reconcile(runner, pipeline, "tampered")["t"]
        assert (row.status, row.different, row.differing) == ("different", 1, 1)
    finally:
        database.execute("alter system reset synchronous_standby_names")
        database.execute("select pg_reload_conf()")
    wait_until(lambda: database.execute(f"{writer} and state = 'idle'"))
    waiting.close()
    row = reconcile(runner, pipeline, "seen")["t"]
    assert (row.differing, row.in_flight) == (1, 0)


def test_tables_without_a_key_are_multisets(runner, database, lake):
    """Copies of a row are counted; with changes in flight there is no answer, and why is said."""
    database.execute(
        "create table t (a int, b text); alter table t replica identity full;insert into t select n"
        " % 5, 'x' from generate_series(1, 50) n; create publication p for table t"
    )
    pipeline = copied_pipeline(runner, make(database, lake))
    assert reconcile(runner, pipeline)["t"].status == "equal"
    held = target(pipeline)
    write_deltalake(held, held.to_pyarrow_table(filters=[("a", "=", 2)]).slice(0, 3), mode="append")
    held.delete("a = 4")
    found = reconcile(runner, pipeline, "planted", repair=True)["t"]
    assert (found.status, found.missing, found.extra, found.different) == ("different", 10, 3, 0)
    assert [(one.kind, json.loads(one.key), one.rows) for one in found.differences] == [
        ("extra", {"a": "2", "b": "x"}, 3),
        ("missing", {"a": "4", "b": "x"}, 10),
    ]
    assert "sync --tables public.t copies it again" in found.reason
    database.execute("insert into t values (9, 'new')")
    found = reconcile(runner, pipeline, "in flight")["t"]
    assert (found.status, found.reason[:37]) == (
        "not compared",
        "1 of its changes are not applied yet,",
    )


@pytest.mark.nightly("each kind of published part at once")
def test_filters_partitions_and_column_lists_are_those_of_the_copy(runner, database, lake):
    """Via the root, gathered leaves, a partition, an own filter: each target holds its part."""
    database.execute("""
        create table r (id int, region text, v int, secret text, primary key (id,
          region)) partition by list (region);
        create table r_a partition of r for values in ('a'); create table r_b partition of r for
          values in ('b');
        create table g (id int, region text, v int, primary key (id,
          region)) partition by list (region);
        create table g_a partition of g for values in ('a'); create table g_b partition of g for
          values in ('b');
        create table f (id int primary key, v text);
        insert into r select n, case when n % 2 = 0 then 'a' else 'b' end, n, 's'
          from generate_series(1, 300) n;
        insert into g select n, case when n % 2 = 0 then 'a' else 'b' end, n
          from generate_series(1, 300) n;
        insert into f select n, 'v' || n from generate_series(1, 300) n;
        create publication p for table r (id, region, v)
          where (id > 50) with (publish_via_partition_root);
        create publication q for table g_a, g_b, f;
        """)
    tables = {"public.g": {"partition_root": True}, "public.f": {"where": "id % 3 = 0"}}
    pipeline = copied_pipeline(runner, make(database, lake, ["p", "q"], tables))
    found = reconcile(runner, pipeline)
    assert {name: (row.status, row.source_rows) for name, row in found.items()} == {
        "f": ("equal", 100), "g": ("equal", 300), "r": ("equal", 250)
    }  # fmt: skip
    for name, predicate in (("f", "id = 3"), ("g", "id = 4"), ("r", "id = 60")):
        target(pipeline, f"public.{name}").delete(predicate)
        target(pipeline, f"public.{name}").update(
            updates={"v": "'9'" if name == "f" else "9"}, predicate="id = 99"
        )
    database.execute(
        [
            "update f set v = 'w' where id > 200",
            " update g set region = 'b' where id = 2",
            " truncate g_b",
        ][0]
    )
    database.execute(
        "update g set v = 7 where id = 10; delete from r where id = 70; insert into r values (900,"
        " 'a', 900, 's')"
    )
    found = reconcile(runner, pipeline, "planted", repair=True)
    assert {
        name: (row.status, row.missing, row.different, row.repaired >= 2)
        for name, row in found.items()
    } == dict.fromkeys("fgr", ("repaired", 1, 1, True))
    pipeline.consume(runner)
    assert {row.status for row in reconcile(runner, pipeline, "after").values()} == {"equal"}


def test_what_can_not_be_compared_is_told_why(runner, database, pipeline):
    """Drift, a truncation in flight, unpublished operations: no number that means nothing."""
    database.execute("alter publication p set table t where (ratio > 10)")
    row = reconcile(runner, pipeline)["t"]
    assert (row.status, "drifted" in row.reason) == ("not compared", True)
    database.execute("alter publication p set table t")
    database.execute("alter publication p set (publish = 'insert, update')")
    row = reconcile(runner, pipeline, "operations")["t"]
    assert row.status == "not compared"


@pytest.mark.nightly("a truncation in flight")
def test_a_truncation_in_flight_is_no_difference(runner, database, pipeline):
    """All keys are touched by it: there is an answer once it was applied."""
    database.execute("truncate t")
    row = reconcile(runner, pipeline)["t"]
    assert (row.status, row.reason) == (
        "not compared",
        "it was truncated or altered during the repair",
    )
    pipeline.consume(runner)
    assert reconcile(runner, pipeline, "after")["t"].status == "equal"


def test_a_column_that_was_added_since_is_left_out_until_the_target_has_it(
    runner, database, pipeline
):
    """The target gets it with the next change; the others are compared meanwhile."""
    database.execute("alter table t add column extra int")
    row = reconcile(runner, pipeline)["t"]
    assert (row.status, row.skipped_columns) == ("equal", ["extra"])


def test_a_key_that_the_target_has_twice_is_told(runner, pipeline):
    """No repair by key can mend that."""
    held = target(pipeline)
    write_deltalake(
        held, held.to_pyarrow_table(filters=[("station", "=", "north")]).slice(0, 1), mode="append"
    )
    row = reconcile(runner, pipeline, repair=True)["t"]
    assert (row.status, row.doubled, row.differing) == ("different", 1, 1)
    assert (
        "not repaired: its target has rows with the same key: sync --tables public.t" in row.reason
    )


# That the texts are the same in each version of the server, test_values asks without Spark.
NEWEST_FIRST = sorted(AT_HAND, reverse=True)
VERSIONS = [
    NEWEST_FIRST[0],
    *(
        pytest.param(version, marks=pytest.mark.soak("other versions of PostgreSQL"))
        for version in NEWEST_FIRST[1:]
    ),
]


@pytest.mark.nightly("the planted differences have some types, test_wire_format every one")
@pytest.mark.parametrize("any_postgres", VERSIONS, indirect=True, ids="PostgreSQL {}".format)
def test_every_type_is_equal_as_copied_and_as_streamed(runner, values, lake):  # noqa: F811
    """No type's text in a checksum depends on how its value came, nor on the server's version."""
    pipeline = copied_pipeline(runner, make(values, lake))
    copied = reconcile(runner, pipeline)["t"]
    values.execute("update t set id = id + 1000 where id % 2 = 0")
    values.execute("insert into t (id) values (5000)")
    pipeline.consume(runner)
    streamed = reconcile(runner, pipeline, "streamed")["t"]
    assert [(row.status, row.skipped_columns, told(row)) for row in (copied, streamed)] == [
        ("equal", [], [])
    ] * 2
    assert streamed.source_rows == copied.source_rows + 1


@pytest.mark.soak("every type on both engines")
@pytest.mark.parametrize("any_postgres", VERSIONS[:1], indirect=True, ids="PostgreSQL {}".format)
def test_every_type_has_the_same_hash_whoever_reads_it(
    runner,
    values,  # noqa: F811
    lake,
    read_both_ways,
    monkeypatch,
):
    """As Spark wrote it and as delta-rs did; a repair by either brings it back."""
    for number in range(len(values.cases)):  # with a space in its name Spark alone reads a column
        values.execute(f'alter table t rename "c {number}" to c{number}')
    pipeline = copied_pipeline(runner, make(values, lake))
    assert reconcile(runner, pipeline)["t"].status == "equal"
    values.execute("insert into t (id) values (5000)")
    pipeline.consume(runner)
    assert reconcile(runner, pipeline, "appended")["t"].status == "equal"
    values.execute("update t set id = id + 1000 where id % 2 = 0")
    pipeline.consume(runner)
    streamed = reconcile(runner, pipeline, "streamed")["t"]
    assert (streamed.status, streamed.skipped_columns) == ("equal", [])
    for repaired_by in ("WRITE", "MERGE"):
        target(pipeline).update(updates={"c0": "coalesce(not c0, true)"})
        mended = reconcile(runner, pipeline, repaired_by, repair=True)["t"]
        assert (mended.status, mended.repaired) == ("repaired", streamed.source_rows)
        assert target(pipeline).history(1)[0]["operation"] == repaired_by
        assert reconcile(runner, pipeline, f"after {repaired_by}")["t"].status == "equal"
        # Too much for Arrow once it was staged: Spark goes on from there.
        monkeypatch.setattr("waldelta.changes.merge.compare.FileRows.of", lambda *_: None)
        monkeypatch.setattr("waldelta.stages.repair.mend.mend.merge_files", lambda *_, **__: None)
    assert {name for name, *_ in read_both_ways} == {"sums", "rows", "values"}
    for name, here, there in read_both_ways:
        assert here == there, name


@pytest.mark.soak("a database in another encoding")
def test_a_source_in_another_encoding_differs_in_nothing_else(runner, postgres, monkeypatch, lake):
    """Its bytes aren't the lake's; texts of keys, values and elements are, copied or streamed."""
    with new_database(
        postgres, monkeypatch, "encoding 'LATIN1' locale 'C' template template0"
    ) as latin:
        latin.execute(
            "create table t (name text primary key, note text, tags text[], v int);insert into t"
            " select chr(192 + n), 'né ' || chr(192 + n), array['ß', null, chr(192 + n)], n from"
            " generate_series(0, 60) n;create publication p for table t"
        )
        made = make(latin, lake)
        made.setup()
        made.sync(runner)
        latin.execute(
            "update t set note = 'déjà vu' where v < 9; insert into t values ('naïve', 'ÿ', '{ø}',"
            " 100)"
        )
        made.consume(runner)
        latin.execute("update t set note = 'à venir' where v = 20")
        row = reconcile(runner, made)["t"]
        assert (row.status, row.source_rows, row.in_flight, told(row)) == ("equal", 61, 1, [])
        held = target(made)
        held.update(updates={"note": "'tampered'"}, predicate="name = 'Ê'")
        added = held.to_pyarrow_table().slice(0, 1)
        write_deltalake(
            held, added.set_column(0, added.schema.field(0), pa.array(["€"])), mode="append"
        )
        row = reconcile(runner, made, "planted", repair=True)["t"]
        assert (row.status, told(row)) == (
            "repaired",
            [
                ("different", {"name": "Ê"}, [("note", "né Ê", "tampered")]),
                ("extra", {"name": "€"}, []),
            ],
        )
        assert reconcile(runner, made, "again")["t"].status == "equal"


@pytest.mark.nightly("a quarantined row, as in test_gate")
def test_rows_that_the_target_is_known_to_lack_are_told_as_such(runner, database, pipeline):
    """Quarantined or discarded: no difference, nor repaired or forgotten. Others are compared."""
    held = target(pipeline)
    foreign = held.to_pyarrow_table(filters=pc.field("day") == date(2024, 1, 6))
    held.delete("day in ('2024-01-05', '2024-01-06')")
    state, quarantine = (
        pipeline.job().read_states()["public.t"],
        Decisions(Lake(pipeline.file.target.root)),
    )
    keys = [json.dumps({"station": "south", "day": f"2024-01-0{day}"}) for day in (5, 6)]
    quarantine.add(
        [
            Decision(now(), "r", WAITING, "public.t", state.generation, 0, keys[0]),
            Decision(now(), "r", DISCARDED, "public.t", state.generation, 0, keys[1]),
        ]
    )
    row = reconcile(runner, pipeline, repair=True)["t"]
    assert (row.status, row.lacking, row.source_rows, row.repaired) == ("equal", 2, 998, 0)
    # The repair takes what is quarantined along, and goes on leaving out what was discarded.
    target(pipeline).delete("day = '2024-01-07'")
    counted = ExpectationResult(
        now(), "r", "public.t", ALL_VALUES_KNOWN, "m", "warning", "pipeline", False, None, None, 1
    )
    Ledger(Lake(pipeline.file.target.root)).append_all([counted])
    row = reconcile(runner, pipeline, "repair", repair=True)["t"]
    assert (row.status, row.missing, row.repaired) == ("repaired", 1, 2)
    # What a check had counted is told anew.
    assert [row.success for row in read_expectation_results(pipeline.file.target.root)] == [
        False,
        True,
    ]
    row = reconcile(runner, pipeline, "repaired")["t"]
    assert (row.status, row.lacking, row.source_rows) == ("equal", 1, 999)
    write_deltalake(target(pipeline), foreign, mode="append")
    row = reconcile(runner, pipeline, "foreign", repair=True)["t"]
    assert (row.status, row.lacking, told(row)) == (
        "different",
        1,
        [("extra", json.loads(keys[1]), [])],
    )
    assert "1 row is quarantined by a gate or discarded" in row.reason
    target(pipeline).delete("day = '2024-01-06'")
    database.execute("delete from t where day = '2024-01-06'")
    database.execute("insert into t values ('south', '2024-01-06', 1)")
    pipeline.consume(runner)
    row = reconcile(runner, pipeline, "anew")["t"]
    assert (row.status, row.lacking, row.source_rows) == ("equal", 0, 1000)
    target(pipeline).update(updates={"note": "'tampered'"}, predicate="day = '2024-01-06'")
    row = reconcile(runner, pipeline, "tampered")["t"]
    assert told(row) == [("different", json.loads(keys[1]), [("note", None, "tampered")])]


def test_a_target_without_metadata_columns_holds_null_for_what_its_types_cannot(
    runner, database, lake
):
    """Then a value beside its type's range is null there, and that is no difference."""
    database.execute(SOURCE)
    pipeline = copied_pipeline(runner, make(database, lake, metadata_columns=False))
    row = reconcile(runner, pipeline)["t"]
    assert (row.status, row.source_rows) == ("equal", 1000)


@pytest.mark.parametrize(
    "repairs", [False, pytest.param(True, marks=pytest.mark.nightly("the same before a repair"))]
)
def test_a_backlog_is_landed_before_a_snapshot_is_held(
    runner, database, pipeline, monkeypatch, repairs
):
    """Only what came meanwhile lands while vacuum is held back, by a session that says why."""
    held, writes = [], itertools.count()
    holders = (
        "select application_name from pg_stat_activity where datname = current_database() "
        "and backend_xmin is not null and state = 'idle in transaction'"
    )

    def written_meanwhile(*of, real=land_module.drain):
        names = [name for (name,) in database.execute(holders)]
        drained = real(*of)
        database.execute(f"insert into t values ('west', date '2000-01-01' + {next(writes)})")
        held.append((names, drained.changes))
        return drained

    database.execute("insert into t values ('east', '2024-01-01'), ('east', '2024-01-02')")
    monkeypatch.setattr(land_module, "drain", written_meanwhile)
    if repairs:
        target(pipeline).delete("day = '2024-01-08'")
    assert reconcile(runner, pipeline, repair=repairs)["t"].status == (
        "repaired" if repairs else "equal"
    )
    slot, ours = pipeline.file.source.slot, [("reconcile", 2, 1), ("repair", 1, 1)]
    expected = []
    for verb, waited, came in ours if repairs else ours[:1]:
        name = f"waldelta {verb} {slot}" + (" public.t" if verb == "repair" else "")
        expected += [([], waited), ([name], came)]
    assert held == expected


def test_a_locked_table_is_not_waited_for(runner, database, lake):
    """It isn't compared, the others are; nor does a table that is unknown by now stop them."""
    database.execute(
        "create table locked (id int primary key); create table free (id int primary key)"
    )
    database.execute(
        "create publication p for table locked where (id > 0), free; insert into free values (1)"
    )
    made = make(database, lake)
    made.setup()
    made.sync(runner)
    with database.connect(
        application_name="vacuum", options="-c idle_in_transaction_session_timeout=60s"
    ) as locker:
        locker.execute("lock table locked in access exclusive mode")
        found = reconcile(runner, made, tables=["public.locked", "public.free", "public.gone"])
        locker.rollback()
    assert {name: row.status for name, row in found.items()} == {
        "locked": "not compared", "free": "equal", "gone": "not compared",
    }  # fmt: skip
    assert "vacuum" in found["locked"].reason
    assert "no longer replicated" in found["gone"].reason
