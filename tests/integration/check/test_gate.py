"""Expectations before the merge: a table that stops, rows set aside, and how both go on."""

import json
from dataclasses import replace

import pytest
from deltalake import DeltaTable

import waldelta.stages.repair.repair as repair_module
from tests.oracles.target_rows import read_target
from tests.support.bookkeeping import read_expectation_results, release_of
from tests.support.pipelines import bare_job
from waldelta.errors import LockHeld
from waldelta.jobs import Pipeline
from waldelta.jobs.consume import consume
from waldelta.jobs.decide import run_decide
from waldelta.jobs.reconcile import run_reconcile
from waldelta.jobs.validate import run_validate
from waldelta.lake.ledger import (
    ACCEPTED,
    RESOLVED,
    WAITING,
    Decisions,
    ExpectationResult,
    Ledger,
    now,
)
from waldelta.monitoring.check_results import read_latest_checks
from waldelta.monitoring.decisions import read_decided
from waldelta.monitoring.overview import read_glance
from waldelta.monitoring.stopped_tables import read_stopped
from waldelta.monitoring.table_list import read_changed
from waldelta.pipeline import RunResult, TableResult
from waldelta.pipeline.run_result import RunFailed
from waldelta.pipeline.targets.corrected_expectations import find_corrected
from waldelta.pipeline.targets.quarantined_rows import (
    discard_quarantined,
    list_quarantined,
    release_tables,
)
from waldelta.spark import InProcess
from waldelta.stages.land.idle_check import check_idle
from waldelta.stages.repair.replay.interval import read_span
from waldelta.stages.repair.replay_runs import replay
from waldelta.stages.sync.sync import sync
from waldelta_airflow.reporting.assets import changed_targets

BIG = "(select string_agg(md5(i::text), '') from generate_series(1, 100) i)"
RULE = "{{type: expect_column_values_to_be_between, kwargs: {{column: v, min_value: 0}}, gate: {}}}"


class Gated:
    """A pipeline over tables ``t`` and ``u``; ``t`` has a file of expectations."""

    def __init__(
        self,
        runner,
        database,
        lake,
        folder,
        ddl="id int primary key, v int, big text",
        options=None,
        **parts,
    ):
        self.runner, self.database, self.folder = runner, database, folder
        database.execute(f"create table t({ddl}); create table u(id int primary key, v int)")
        if "big" in ddl:
            database.execute("alter table t alter big set storage external")
        quality = {"enabled": False, "suites": str(folder)}
        self.job = bare_job(
            database, lake, ["public.t", "public.u"], options, quality=quality, **parts
        )

    def own(self, *items):
        self.folder.joinpath("public.t.yml").write_text(
            "expectations:\n" + "".join(f"  - {item}\n" for item in items)
        )

    def run(self, run_id="run") -> TableResult:
        return consume(self.runner, replace(self.job, run_id=run_id)).tables.get(
            "public.t", TableResult()
        )

    def fails(self, run_id="run"):
        with pytest.raises(RunFailed) as failed:
            consume(self.runner, replace(self.job, run_id=run_id))
        return failed.value.result

    def rows(self, *columns, table="t"):
        rows = read_target(self.job.lake.target(f"public.{table}").uri, *columns or ("id", "v"))
        return sorted(map(tuple, rows))

    def source(self, columns="id, v", where="true"):
        return sorted(self.database.execute(f"select {columns} from t where {where}"))

    def rows_on_pages(self):
        """How many rows the pages say that runs inserted, updated and deleted, by table."""
        changed = read_changed(Ledger(self.job.lake), None)
        return {
            name: (of.operations.inserted, of.operations.updated, of.operations.deleted)
            for name, of in changed.items()
        }

    def failed(self):
        """How many expectations the pages say that the table doesn't meet."""
        return read_latest_checks(Ledger(self.job.lake), None)["public.t"].failed

    def stopped(self):
        return read_stopped(self.job.pipeline, Ledger(self.job.lake))

    def told(self):
        rows = Decisions(self.job.lake).rows("public.t", 1)
        return [(row.status, json.loads(row.key)["id"], row.outdated) for row in rows]


@pytest.fixture
def gated(runner, database, lake, tmp_path):
    folder = tmp_path / "suites"
    folder.mkdir()

    def make(*own, **kwargs):
        made = Gated(runner, database, lake, folder, **kwargs)
        if own:
            made.own(*own)
        return made

    return make


def test_a_table_stops_and_goes_on(gated, database):
    """Nothing of it is merged, all of the others is; it goes on once its expectation is changed."""
    made = gated(RULE.format("stop"))
    database.execute("insert into t values (1, 1)")
    sync(made.runner, made.job)
    database.execute("insert into t values (2, -2), (3, 3); insert into u values (1, 1)")
    result = made.fails("first")
    assert result.error["class"] == "QualityFailed"
    assert "public.t" in result.error["message"]
    assert "1 row" in result.error["message"]
    assert "-2" not in result.error["message"].replace(str(made.folder), "")
    assert (made.rows(), made.rows(table="u")) == ([(1, 1)], [(1, 1)])
    assert made.told() == []
    # No cut is published, and the pages show what was done to the other table all the same.
    assert made.rows_on_pages() == {"public.u": (1, 0, 0)}
    (first,) = made.stopped()
    assert (first.table_name, first.waiting, first.may_pass) == ("public.t", 2, True)
    assert [(one.meaning, one.finding) for one in first.unmet] == [
        ("expect_column_values_to_be_between on v", "1 row")
    ]
    # Which rows fail is in the ledger, for those who may see it.
    (of_t,) = first.as_json()
    assert of_t["examples"] == [{"key": {"id": "2"}, "values": {"v": "-2"}}]
    assert Pipeline(made.job.pipeline).waiting(["public.t"]) == [of_t]
    # The slot was emptied all the same, and later changes are judged with what waits.
    assert result.stages["land"].status == "succeeded"
    database.execute("insert into t values (4, 4)")
    made.fails("second")
    assert made.rows() == [(1, 1)]
    (second,) = made.stopped()
    assert (second.waiting, second.since) == (3, first.since)
    root = Ledger(made.job.lake)
    told = {item.text: item.page for item in read_glance(made.job.pipeline, root, now()).attention}
    assert told[
        "public.t: stopped by a gate (expect_column_values_to_be_between on v), 3 changes wait"
    ] == ("waiting",)
    made.own(RULE.format("warn"))
    assert made.run("third").inserted == 3
    assert made.stopped() == []
    assert made.rows() == made.source()
    assert made.rows_on_pages() == {"public.u": (1, 0, 0), "public.t": (3, 0, 0)}
    verdicts = read_expectation_results(made.job.pipeline.target.root)
    assert {(v.run_id, v.success, v.unexpected_count, v.version) for v in verdicts} == {
        ("first", False, 1, None), ("second", False, 1, None),
    }  # fmt: skip


def test_released_changes_pass_once(gated, database):
    """What had landed by then passes, with who and why; what lands later is judged again."""
    made = gated(RULE.format("stop"))
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1)")
    made.fails("first")
    # What was released may end where the next commit begins.
    identity = made.job.read_identity()
    begin = max(
        DeltaTable(made.job.change_log(identity).uri)
        .to_pyarrow_table()["commit_lsn"]
        .drop_null()
        .to_pylist()
    )
    made.job.ledger.append(
        release_of(
            now(), "adjacent", "public.t", 1, (identity.incarnation, identity.timeline), begin,
            "ann",
        )
    )  # fmt: skip
    made.fails("adjacent")
    (told,) = release_tables(made.job, ["public.t"], by="ann", reason="known")
    assert (told.by, told.why) == ("ann", "known")
    (one,) = made.stopped()
    assert (one.released.by, one.may_pass, one.waiting) == ("ann", False, 1)
    database.execute("insert into t values (2, -2)")
    made.fails("second")
    assert made.rows() == []
    assert [(one.released, one.waiting) for one in made.stopped()] == [(None, 2)]
    database.execute("delete from t where id = 2")
    made.run("third")
    assert made.rows() == [(1, -1)]


@pytest.mark.nightly("a release, as in test_released_changes_pass_once")
def test_what_waits_is_released_behind_wal_without_changes(gated, database):
    """A run that finds none lands an empty batch, whose end says nothing of what landed before."""
    made = gated(RULE.format("stop"))
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1)")
    made.fails("first")
    database.execute("create table unpublished (id int)")
    made.fails("second")
    identity = made.job.read_identity()
    change_log = made.job.change_log(identity)
    assert change_log.end_lsn(change_log.last_batch()) == 0
    (told,) = release_tables(made.job, ["public.t"], by="ann")
    assert told.upto_lsn == change_log.end_lsn(1)
    made.run("third")
    assert made.rows() == [(1, -1)]


@pytest.mark.nightly("a release of a table; test_released_changes_pass_once has rows")
def test_a_whole_table_is_released_too(gated, database):
    """Of what passed nothing is left to judge: no number of rows, and no mean, of nothing."""
    made = gated("{type: expect_table_row_count_to_be_between, kwargs: {min_value: 3}, gate: stop}")
    sync(made.runner, made.job)
    database.execute("insert into t values (1, 1)")
    made.fails("first")
    release_tables(made.job, ["public.t"], by="ann", reason="known")
    made.run("second")
    assert made.rows() == [(1, 1)]
    assert (
        read_expectation_results(made.job.pipeline.target.root)[-1].observed == "no rows to judge"
    )
    database.execute("insert into t values (2, 2)")
    made.fails("third")


STOP = "{type: expect_column_values_to_be_between, kwargs: {column: v, max_value: 9}, gate: stop}"


def refused(made, act, message):
    """It is refused by name, and changes neither the target, its copy, nor what is told of rows."""

    def found():
        return made.rows(), made.told(), made.job.read_states()["public.t"]

    before = found()
    with pytest.raises(RunFailed, match=message) as failed:
        act()
    assert any(remedy in str(failed.value) for remedy in ("decide FILE", "run consume"))
    assert found() == before


def retry(made, run_id):
    job = replace(made.job, run_id=run_id)
    return run_decide(made.runner, job, "retry", tables=["public.t"], by="ann")


def mend(made, run_id):
    run_reconcile(
        made.runner,
        replace(made.job, run_id=run_id),
        tables=["public.t"],
        repair=True,
        by="ann",
    )


@pytest.mark.soak("a retry beside other rows")
def test_a_retry_lets_nothing_else_pass(gated, database):
    """What waits is judged with the rows asked for: one that fails a gate keeps all out."""
    made = gated(RULE.format("quarantine"), STOP)
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1), (2, 2)")
    made.run("first")
    database.execute("insert into t values (4, 99), (5, 5)")
    made.fails("second")
    database.execute(
        "create table unpublished (id int)"
    )  # WAL without changes, which lands as an empty batch
    refused(made, lambda: retry(made, "held"), r"gate:\n.*1 row\) at .*expectations\[1\]")
    # What hasn't even landed is judged as well; nothing is released by a release of something else.
    database.execute("update t set v = -4 where id = 4")
    refused(made, lambda: retry(made, "aside"), r"expectations\[0\]")
    (found,) = [
        row
        for row in read_expectation_results(made.job.pipeline.target.root)
        if row.run_id == "held" and not row.success
    ]
    assert (found.unexpected_count, found.version) == (1, None)
    database.execute("update t set v = 4 where id = 4")
    retry(made, "fine")
    assert made.rows() == made.source(where="v > 0") == [(2, 2), (4, 4), (5, 5)]
    assert listed(made).keys() == {"1"}


def accept(made, run_id, *keys, **given):
    """Accept the rows of these ids in quarantine, or all of the table."""
    ids = [row["id"] for row in list_quarantined(made.job) if row["key"]["id"] in keys]
    job, tables = replace(made.job, run_id=run_id), None if keys else ["public.t"]
    ids = given.get("ids", ids)
    return run_decide(made.runner, job, "accept", ids=ids, tables=tables, reason="known", by="ann")


def listed(made):
    return {
        row["key"]["id"]: (row["values"]["v"], row["reason"]) for row in list_quarantined(made.job)
    }


def test_rows_are_accepted_by_decision(gated, database):
    """Rows or a whole table, whatever the gate says; who and why is kept, other rows are judged."""
    made = gated(RULE.format("quarantine"), STOP)
    database.execute("insert into t values (1, 1)")
    sync(made.runner, made.job)
    database.execute("update t set v = -1; insert into t values (2, -2), (3, -3), (4, -4)")
    made.run("first")
    before = {row["key"]["id"]: row["id"] for row in list_quarantined(made.job)}
    kept = before["4"]
    database.execute("update t set v = 3 where id = 3; update t set v = -5 where id = 4")
    accept(made, "one", "2")
    # The id of a row that wasn't decided stays, until its values change.
    after = {row["key"]["id"]: row["id"] for row in list_quarantined(made.job)}
    assert (after["1"], after["4"] != kept) == (before["1"], True)
    assert (made.rows(), listed(made).keys()) == ([(1, 1), (2, -2), (3, 3)], {"1", "4"})
    # Whoever has seen other values decides on those that there are now.
    with pytest.raises(RunFailed, match="not in quarantine"):
        accept(made, "late", ids=[kept])
    discard_quarantined(
        made.job,
        [row["id"] for row in list_quarantined(made.job) if row["key"]["id"] == "1"],
        by="ann",
        reason="noise",
    )
    accept(made, "all")
    assert (made.rows(), listed(made), made.failed()) == (made.source(), {}, 0)
    decided = read_decided(Ledger(made.job.lake))
    accepted = [
        (one.run_id, one.by, one.reason, one.rows) for one in decided if one.what == "accepted"
    ]
    assert accepted == [("all", "ann", "known", 2), ("one", "ann", "known", 1)]
    # A second attempt at the run, whose first one died before it could check.
    ids = Decisions(made.job.lake).ids_decided("one", ACCEPTED)
    assert accept(made, "one", ids=list(ids)).status == "succeeded"
    database.execute(
        "update t set v = 8 where id = 2; delete from t where id = 3; insert into t values (5, -5)"
    )
    made.run("second")
    assert (made.rows(), listed(made).keys()) == ([(1, -1), (2, 8), (4, -5)], {"5"})


@pytest.mark.soak("a retry after a release")
def test_a_retry_takes_what_was_released(gated, database):
    """As a run would; the rows asked for are judged by the gate that set them aside."""
    made = gated(RULE.format("quarantine"), STOP)
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1)")
    made.run("first")
    database.execute("insert into t values (4, 99); update t set v = -2 where id = 1")
    made.fails("second")
    release_tables(made.job, ["public.t"], by="ann", reason="known")
    retry(made, "released")
    assert (made.rows(), listed(made)["1"][0]) == ([(4, 99)], "-2")
    accept(made, "accepted", "1")
    assert made.rows() == made.source() == [(1, -2), (4, 99)]


@pytest.mark.soak("a repair beside quarantined rows")
def test_a_repair_lets_nothing_else_pass(gated, database):
    """Neither what waits and fails a gate, nor rows set aside, nor discarded rows that changed."""
    made = gated(RULE.format("quarantine"), STOP)
    database.execute("insert into t values (1, 1), (2, 2), (3, 3)")
    sync(made.runner, made.job)
    database.execute("insert into t values (6, -6), (7, -7)")
    made.run("first")
    DeltaTable(made.job.lake.target("public.t").uri).delete("id = 2")
    refused(made, lambda: mend(made, "aside"), "2 rows are quarantined by a gate or discarded")
    discard_quarantined(made.job, tables=["public.t"], by="ann", reason="noise")
    database.execute("update t set v = 7 where id = 7")
    refused(made, lambda: mend(made, "discarded"), "changes of discarded rows wait")
    made.run("second")
    database.execute("update t set v = 99 where id = 3")
    made.fails("third")
    refused(made, lambda: mend(made, "held"), r"expectations\[1\]")
    database.execute("update t set v = 9 where id = 3")
    mend(made, "fine")
    assert made.rows() == [(1, 1), (2, 2), (3, 9)]


WHOLE = [
    ("one of the table",
     "{type: expect_table_row_count_to_be_between, kwargs: {max_value: 1}, gate: stop}", "not met"),
    ("one with lists in a list",
     ("{type: expect_column_pair_values_to_be_in_set, kwargs: {column_A: id, column_B: v,"
      " value_pairs_set: [[1, 1]]}, gate: stop}"), "1 row"),
    (
        "one of quantiles",
        (
            "{type: expect_column_quantile_values_to_be_between, kwargs: {column: v,"
            " quantile_ranges: {quantiles: [0.0, 1.0], value_ranges: [[0, null], [null, 9]]}},"
            " gate: stop}"
        ),
        "not met",
    ),
    ("a share of rows",
     ("{type: expect_column_values_to_be_between, kwargs: {column: v, min_value: 0, mostly:"
      " 0.9}, gate: stop}"), "1 row"),
    ("one that can't be evaluated",
     ("{type: expect_column_values_to_match_regex, kwargs: {column: big, regex: '('}, gate:"
      " stop}"), "can't be evaluated: INVALID_PARAMETER_VALUE"),
    ("a condition in Spark SQL",
     ("{type: expect_target_rows_to_satisfy, kwargs: {condition: v > 0, meaning: positive},"
      " gate: stop}"), "1 row"),
]  # fmt: skip


# The rows that fail, of expectations that identify them.
EXAMPLES = {
    "one with lists in a list": [({}, {"id": 2, "v": -2})],
    "a share of rows": [({"id": "2"}, {"v": "-2"})],
    "a condition in Spark SQL": [({"id": "2"}, {"v": "-2"})],
}


@pytest.mark.usefixtures("compiled")
@pytest.mark.soak("every kind of expectation as a gate")
def test_any_expectation_can_stop(gated, database):
    """By row or of all rows together, Great Expectations' or ours; each alone, of the same rows."""
    made = gated()
    sync(made.runner, made.job)
    database.execute("insert into t values (1, 1, 'x'), (2, -2, 'x')")
    for name, item, message in WHOLE:
        made.own(item)
        told = made.fails(name).error["message"]
        assert message in told, name
        assert item.partition(",")[0].removeprefix("{type: ") in told, name
        assert made.rows() == [], name
        (stopped,) = made.stopped()
        found = [(e.get("key", {}), e["values"]) for one in stopped.unmet for e in one.examples]
        assert found == EXAMPLES.get(name, []), name


REFUSED = [
    ("of the whole table",
     "{type: expect_table_row_count_to_be_between, kwargs: {max_value: 1}, gate: quarantine}",
     "identifies the failing rows"),
    ("of a share",
     ("{type: expect_column_values_to_not_be_null, kwargs: {column: v, mostly: 0.5}, gate:"
      " quarantine}"), "remove mostly"),
    ("of a column that isn't there",
     "{type: expect_column_values_to_match_regex, kwargs: {column: bog, regex: x}, gate: stop}",
     "did you mean big?"),
    ("of SQL that doesn't parse",
     ("{type: expect_target_rows_to_satisfy, kwargs: {condition: v >, meaning: m}, gate:"
      " quarantine}"), "is no condition in Spark SQL"),
    ("in a file that can't be read", "{typo: x}", "can't be read"),
]  # fmt: skip


def test_gates_that_are_refused(gated, database):
    """The table waits, since nobody knows what may pass; the others go on."""
    made = gated()
    sync(made.runner, made.job)
    for number, (name, item, message) in enumerate(REFUSED, 1):
        made.own(item)
        database.execute(f"insert into t values ({number}, 1); insert into u values ({number}, 1)")
        result = made.fails(name)
        assert result.error["class"] == "ConfigError", name
        assert message in result.error["message"], name
        assert (made.rows(), made.rows(table="u")) == (
            [],
            [(n, 1) for n in range(1, number + 1)],
        ), name


@pytest.mark.usefixtures("compiled")
def test_rows_are_set_aside(gated, database, decoded_by_tasks):
    """New rows aren't written, updated ones stay; moved and replaced ones leave nothing."""
    made = gated(RULE.format("quarantine"))
    database.execute("insert into t select g, g from generate_series(1, 8) g")
    sync(made.runner, made.job)
    for statement in (
        "insert into t values (9, -9), (10, 10)",
        "update t set v = -1 where id = 1",
        "update t set v = 20 where id = 2",
        "update t set id = 30, v = -3 where id = 3",
        "delete from t where id = 4",
        "delete from t where id = 5; insert into t values (5, -5)",
        "update t set id = 60 where id = 6; insert into t values (6, -6)",
        "update t set id = 70, v = -7 where id = 7; insert into t values (7, 7)",
        "update t set v = -8 where id = 8; update t set v = 80 where id = 8",
    ):
        database.execute(statement)
    done = made.run("first")
    assert done.quarantined == 6
    assert made.rows() == [(1, 1), (2, 20), (7, 7), (8, 80), (10, 10), (60, 6)]
    assert sorted(made.told()) == sorted(
        (WAITING, key, key == "1") for key in ("1", "30", "5", "6", "70", "9")
    )
    listed = {row["key"]["id"]: row for row in list_quarantined(made.job)}
    assert listed["9"]["values"] == {"id": "9", "v": "-9", "big": None}
    assert "expect_column_values_to_be_between on v" in listed["9"]["reason"]
    assert [chr(bytes.fromhex(message["raw"])[0]) for message in listed["9"]["messages"]] == ["I"]


def replayed(made, job):
    """The tables that a replay of the job's own run fails for."""
    return replay(made.runner, job, RunResult("replay", job.run_id), read_span(job)).failures


@pytest.mark.soak("a kill during a replay")
def test_rows_that_a_replay_brings_stay_listed_until_it_has_committed(gated, database, monkeypatch):
    """They are in no run's changes any more."""
    made = gated(RULE.format("quarantine"))
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1)")
    made.run("first")
    made.own(RULE.format("warn"))
    job = replace(made.job, run_id="first")

    def killed(*_):
        raise LockHeld("gone")

    with monkeypatch.context() as first:
        first.setattr(repair_module, "_commit", killed)
        assert list(replayed(made, job)) == ["public.t"]
    assert ([row["key"]["id"] for row in list_quarantined(made.job)], made.rows()) == (["1"], [])
    assert replayed(made, job) == {}
    assert (list_quarantined(made.job), made.rows()) == ([], [(1, -1)])


@pytest.mark.soak("a replay beside discarded rows")
def test_a_replay_leaves_discarded_rows_as_they_are(gated, database):
    """Those that the target lacks, and those that it has as they were; damage beside is mended."""
    made = gated(RULE.format("quarantine"))
    database.execute("insert into t values (1, 1)")
    sync(made.runner, made.job)
    database.execute("insert into t values (2, -2), (3, 3); update t set v = -1 where id = 1")
    made.run("first")
    discard_quarantined(made.job, tables=["public.t"], by="Ann", reason="noise")
    DeltaTable(made.job.lake.target("public.t").uri).delete("id = 3")
    told = made.told()
    for gate in ("quarantine", "warn"):
        made.own(RULE.format(gate))
        job = replace(made.job, run_id="first")
        assert replayed(made, job) == {}
        assert (made.rows(), list_quarantined(made.job), made.told()) == (
            [(1, 1), (3, 3)],
            [],
            told,
        )


@pytest.mark.nightly("later changes of rows that test_rows_are_set_aside has")
@pytest.mark.usefixtures("compiled")
def test_later_changes_of_such_rows(gated, database, decoded_by_tasks):
    """Each is judged anew; what the change doesn't send is read from the source."""
    made = gated(RULE.format("quarantine"))
    database.execute(f"insert into t select g, g, g || {BIG} from generate_series(1, 6) g")
    sync(made.runner, made.job)
    database.execute(
        f"update t set v = -v, big = 'new' || {BIG}; update t set id = 10 * id where id > 3; insert"
        " into t values (7, -7, 'x')"
    )
    assert made.run("first").quarantined == 7
    assert made.rows() == [(1, 1), (2, 2), (3, 3)]
    # Their large value isn't sent again.
    database.execute(
        "update t set v = 1 where id in (1, 40, 7); update t set id = 22, v = 2 where id = 2;"
        " delete from t where id = 50"
    )
    made.run("second")
    columns = "id", "v", "big"
    assert made.rows(*columns) == sorted(
        [
            *made.source("id, v, big", "v > 0"),
            (3, 3, "3" + made.database.execute(f"select {BIG}")[0][0]),
        ]
    )
    assert {row["key"]["id"] for row in list_quarantined(made.job)} == {"3", "60"}
    assert [row for row in made.told() if row[0] == RESOLVED]


def test_read_again_or_discarded(gated, database):
    """Accepted rows pass as the source has them; discarded ones stay until they change."""
    made = gated(RULE.format("quarantine"))
    database.execute(f"insert into t select g, g, g || {BIG} from generate_series(1, 3) g")
    sync(made.runner, made.job)
    database.execute(f"update t set v = -v, big = 'new' || {BIG} where id < 3")
    made.run("first")
    discard_quarantined(made.job, tables=["public.t"], by="ann", reason="noise")
    assert list_quarantined(made.job) == []
    database.execute("update t set v = 5 where id = 1")
    made.run("second")
    assert made.rows("id", "v", "big") == sorted(
        [
            *made.source("id, v, big", "id <> 2"),
            (2, 2, "2" + made.database.execute(f"select {BIG}")[0][0]),
        ]
    )
    database.execute("update t set v = -3 where id = 3")
    made.run("third")
    assert made.failed() == 1
    accept(made, "accept")
    assert made.rows() == made.source()
    assert (list_quarantined(made.job), made.failed()) == ([], 0)


@pytest.mark.nightly("what the pages say after each further decision")
def test_what_keeps_no_row_out_is_met(gated, database):
    """Each expectation, once the last of its rows is gone or decided on, though no row changes."""
    made = gated(RULE.format("quarantine"), STOP.replace("stop", "quarantine"))
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1), (2, -2), (3, 99)")
    made.run("first")
    ids = {row["key"]["id"]: row["id"] for row in list_quarantined(made.job)}
    assert (sorted(ids), made.failed()) == (["1", "2", "3"], 2)
    discard_quarantined(made.job, [ids["1"]], by="ann", reason="noise")
    assert made.failed() == 2
    discard_quarantined(made.job, [ids["3"]], by="ann", reason="noise")
    assert made.failed() == 1
    database.execute("delete from t where id = 2")
    assert not made.run("second").changed
    assert (made.rows(), made.failed()) == ([], 0)


def test_gates_of_few_rows_need_no_spark(gated, database):
    """What is set aside, what stops, and complete rows that are judged again: Arrow finds all."""
    made = gated(RULE.format("quarantine"), STOP)
    made.runner = InProcess(pytest.fail)
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1), (2, 2), (3, -3)")
    assert made.run("first").quarantined == 2
    database.execute("insert into t values (4, 99)")
    made.fails("stopped")
    database.execute("update t set v = 4 where id = 4; update t set v = 3 where id = 3")
    done = retry(made, "again")
    assert done.stages["retry"].detail == (
        "1 row of 1 table corrected; 1 row still fails a gate and stays in quarantine"
    )
    decided = [(one.what, one.by, one.rows) for one in read_decided(Ledger(made.job.lake))]
    assert sorted(decided) == [("retried", "ann", 1), ("retried, still fails", "ann", 1)]
    assert made.rows() == made.source(where="v > 0")
    assert listed(made).keys() == {"1"}
    database.execute(f"insert into t values (5, -5, {BIG}); update t set v = -6 where id = 1")
    assert made.run("large").quarantined == 2
    # The update doesn't send the large value, which is read from the source before the gate judges.
    database.execute("update t set v = 5 where id = 5; insert into t values (6, -6)")
    done = made.run("complete")
    assert (done.completed, done.quarantined) == (1, 1)
    assert made.rows() == made.source(where="v > 0")


def test_too_many_rows_stop_the_table(gated, database, monkeypatch):
    """Many bad rows at once are no few bad rows: nothing is merged or told of rows till they go."""
    monkeypatch.setattr("waldelta.stages.check.gate.gate.MOST_SET_ASIDE", 3)
    made = gated(RULE.format("quarantine"))
    sync(made.runner, made.job)
    database.execute("insert into t values (9, -9)")
    made.run("first")
    told = made.told()
    database.execute("insert into t select g, -g from generate_series(1, 4) g")
    assert "at most 3 at once" in made.fails("second").error["message"]
    assert (made.rows(), made.told()) == ([], told)
    (stopped,) = made.stopped()
    assert len(stopped.unmet[0].examples) == 4
    discard_quarantined(made.job, tables=["public.t"], by="ann", reason="noise")
    assert made.failed() == 1
    database.execute("delete from t where id < 9")
    made.run("third")
    assert (made.rows(), made.failed()) == ([], 0)


@pytest.mark.nightly("a second gate beside the first")
def test_a_stop_judges_what_is_left(gated, database):
    """Rows that another expectation sets aside aren't merged, so they don't stop the table."""
    made = gated(
        RULE.format("quarantine"),
        "{type: expect_column_values_to_be_between, kwargs: {column: v, min_value: -1}, gate:"
        " stop}",
    )
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -5), (2, 2)")
    made.run()
    assert made.rows() == [(2, 2)]


@pytest.mark.usefixtures("compiled")
def test_columns_that_a_change_does_not_send(gated, database):
    """An unchanged large value was judged when it came: its absence doesn't count."""
    few = "column: v, max_value: 4, row_condition: big is null, condition_parser: spark"
    made = gated(
        "{type: expect_column_values_to_not_be_null, kwargs: {column: big}, gate: quarantine}",
        f"{{type: expect_column_values_to_be_between, kwargs: {{{few}}}, gate: stop}}",
    )
    database.execute(f"insert into t values (1, 1, {BIG}), (2, 2, {BIG})")
    sync(made.runner, made.job)
    database.execute("update t set v = 5 where id = 1; update t set big = null where id = 2")
    assert made.run().quarantined == 1
    assert made.rows() == [(1, 5), (2, 2)]


@pytest.mark.parametrize("metadata", [True, False])
def test_values_that_the_lake_does_not_hold_are_no_nulls(
    runner, database, lake, tmp_path, metadata
):
    """They stand verbatim beside the null; without that nothing tells them from nulls."""
    ddl = "id int primary key, v int, till date, gone date"
    made = Gated(
        runner, database, lake, tmp_path, ddl, target={"root": lake, "metadata_columns": metadata}
    )
    items = [
        ("not_be_null", "till", "quarantine"),
        ("not_be_null", "TILL, mostly: 0.5", "stop"),
        ("be_null", "gone", "quarantine"),
    ]
    made.own(
        *(
            f"{{type: expect_column_values_to_{kind}, kwargs: {{column: {of}}}, gate: {gate}}}"
            for kind, of, gate in items
        )
    )
    sync(made.runner, made.job)
    database.execute(
        "insert into t values (1, 1, '2026-01-01'), (2, 2, 'infinity'), (3, 3, '0044-03-15 BC'),"
        " (4, 4, null)"
    )
    database.execute(
        "insert into t values (5, 5, 'infinity', 'infinity'), (6, 6, 'infinity', '2026-01-01')"
    )
    made.run()
    assert [row[0] for row in made.rows()] == ([1, 2, 3] if metadata else [1])


def test_a_killed_run_is_judged_anew(gated, database, monkeypatch):
    """A run died between telling of rows and the merge: only the next one's judgement stands."""
    made = gated(RULE.format("quarantine"))
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1), (2, 2)")

    def die(*_):
        raise SystemExit(1)

    with monkeypatch.context() as patched:
        patched.setattr("waldelta.stages.apply.apply_targets.merge_staged", die)
        with pytest.raises(SystemExit):
            made.run("first")
    assert made.told() == [(WAITING, "1", False)]
    made.own(RULE.format("warn"))
    made.run("second")
    assert (made.rows(), made.told()) == ([(1, -1), (2, 2)], [])


def test_a_table_without_a_key(gated, database):
    """It can be stopped; rows can't be set aside, as nothing tells them from their copies."""
    made = gated(ddl="v int")
    database.execute("alter table t replica identity full")
    made.own(RULE.format("stop"))
    sync(made.runner, made.job)
    database.execute("insert into t values (1), (-1)")
    assert "1 row" in made.fails("first").error["message"]
    made.own(RULE.format("quarantine"))
    assert "needs a key" in made.fails("second").error["message"]
    made.own(RULE.format("warn"))
    made.run("third")
    assert made.rows("v") == [(-1,), (1,)]


def checked(made, run_id, act=None):
    """The result of a run that checks its targets, or of what an operator does, by its id."""
    return (act or consume)(made.runner, replace(enabled(made), run_id=run_id))


def enabled(made):
    """The job of the same pipeline with checks after its runs."""
    quality = made.job.pipeline.quality.model_copy(update={"enabled": True})
    return replace(made.job, pipeline=made.job.pipeline.model_copy(update={"quality": quality}))


@pytest.mark.nightly("the checks after a decision that ordinary tests take")
def test_what_was_let_in_by_decision_passes_the_checks(gated, database):
    """Accepted and released rows turn no run red, and other programs hear of the table again."""
    made = gated(RULE.format("quarantine"), STOP)
    database.execute("insert into t values (1, 1)")
    sync(made.runner, made.job)
    database.execute("insert into t values (2, -2)")
    checked(made, "first")
    (row,) = list_quarantined(made.job)
    done = checked(
        made,
        "accept",
        lambda runner, job: run_decide(
            runner, job, "accept", ids=[row["id"]], reason="known", by="ann"
        ),
    )
    assert (done.status, list(changed_targets(done.document()))) == ("succeeded", ["public.t"])
    assert (made.rows(), made.failed()) == ([(1, 1), (2, -2)], 0)
    database.execute("insert into t values (3, 99)")
    with pytest.raises(RunFailed):
        checked(made, "stopped")
    release_tables(made.job, ["public.t"], by="ann", reason="known")
    (stopped,) = made.stopped()
    assert "released by ann, for the next run" in stopped.describe()
    done = checked(made, "released")
    text = "accepted or released by an operator: 1 row"
    results = made.job.ledger.table(ExpectationResult).read()
    assert {of.run_id for of in results if of.success and of.observed == text} == {"released"}
    assert text in [of["result"] for of in done.expectations()]
    assert list(changed_targets(done.document())) == ["public.t"]
    assert (made.rows(), made.failed()) == ([(1, 1), (2, -2), (3, 99)], 0)
    # Neither a later run, nor a check of all rows.
    database.execute("insert into t values (4, 4)")
    assert list(changed_targets(checked(made, "later").document())) == ["public.t"]
    assert checked(made, "all", run_validate).status == "succeeded"
    # A row that nobody decided on still fails, as one that another program wrote.
    made.runner.spark().sql(
        f"insert into delta.`{made.job.lake.target('public.t').uri}` (id, v, _wd_lsn)"
        " values (9, -9, 1)"
    )
    with pytest.raises(RunFailed, match="between on v"):
        checked(made, "damaged", run_validate)


def test_a_corrected_expectation_is_judged_again(gated, database):
    """The next run finds work in it, and other programs hear of what changed while it failed."""
    made = gated(RULE.format("warn"))
    sync(made.runner, made.job)
    database.execute("insert into t values (1, -1)")
    with pytest.raises(RunFailed) as failed:
        checked(made, "first")
    assert changed_targets(failed.value.result.document()) == {}
    assert find_corrected(enabled(made), ["public.t", "public.u"]) == []
    made.own(RULE.format("warn").replace("min_value: 0", "min_value: -5"))
    assert find_corrected(enabled(made), ["public.t", "public.u"]) == ["public.t"]
    seen = check_idle(enabled(made))
    assert (seen.has_work, "public.t" in seen.reason) == (True, True)
    done = checked(made, "second")
    assert list(changed_targets(done.document())) == ["public.t"]
    assert (made.failed(), find_corrected(enabled(made), ["public.t"])) == (0, [])
