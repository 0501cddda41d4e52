"""What earlier checks know: from where rows are to be judged, and which targets stayed."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from tests.support.bookkeeping import table_at
from tests.support.data.suites import state
from waldelta.config.quality import Quality
from waldelta.lake import Lake
from waldelta.lake.ledger import BatchCut, Ledger, TargetCut, now
from waldelta.lake.ledger.check_records import PassedSuite, keep_suites, latest_suites
from waldelta.stages.check.check_run import (
    CheckHistory,
    RunOutcome,
    changed_since,
    is_unchanged_since_full_check,
    met_at,
    suite_of,
)
from waldelta.stages.check.evaluate import met_before
from waldelta.stages.check.measure.references import CheckedTarget
from waldelta.stages.check.suite.expectation import PlannedExpectation
from waldelta.stages.check.suite.kinds import SuitePlan

PLAN = SuitePlan(
    "public.t", (PlannedExpectation("a", {"column": "id"}, "critical", "catalog", "m"),)
)
FRESH = PlannedExpectation(
    "expect_target_to_be_fresh", {"is_met": True}, "warning", "pipeline", "n"
)
COLUMNS = ["id", "_wd_lsn"]


def commit(uri, verb=None):
    metadata = {"userMetadata": json.dumps({"waldelta": {"verb": verb}})} if verb else {}
    write_deltalake(
        uri,
        pa.table({"id": [1]}),
        mode="append",
        commit_properties=CommitProperties(custom_metadata=metadata),
    )


def known(target, version=0, plan=PLAN, end_lsn=7, whole=False, generation=1):
    row = PassedSuite(
        now(), "r", target.table_name, generation, version, suite_of(plan), whole, end_lsn
    )
    return CheckHistory({target.table_name: [row]})


CASES = [
    ("as it was", [], {}, 7),
    ("changes applied", ["apply", "apply"], {}, 7),
    ("rows mended", ["apply", "repair"], {}, None),
    ("somebody else's rows", [None], {}, None),
    ("never judged", [], None, None),
    ("judged where no cut was", [], {"end_lsn": None}, None),
    ("another suite", [], {"plan": SuitePlan("public.t", ())}, None),
    ("another copy", [], {"generation": 2}, None),
    ("a suite with freshness", [],
     {"plan": replace(PLAN, expectations=(*PLAN.expectations, FRESH))}, 7),
    ("a later version was judged", [], {"version": 1}, None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("verbs", "row", "expected"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_changed_since(tmp_path, verbs, row, expected):
    """Only where nothing but applied changes came since, and the suite is the same."""
    target, uri = state([("id", "bigint", "bigint", True)]), str(tmp_path)
    for verb in ["sync", *verbs]:
        commit(uri, verb)
    at = CheckedTarget(target, len(verbs), table_at(uri))
    before = CheckHistory() if row is None else known(target, **row)
    assert changed_since(before, at, PLAN) == expected
    history = replace(at, state=replace(target, mode="history"))
    assert changed_since(before, history, PLAN) is None


MET = [
    ("judged as it is", {}, 0),
    ("where no cut was", {"end_lsn": None}, 0),
    ("at an earlier version", {"version": 0}, 0),
    ("at a later one", {"version": 3}, None),
    ("by another suite", {"plan": SuitePlan("public.t", ())}, None),
    ("before it was copied again", {"generation": 2}, None),
]


@pytest.mark.parametrize(("row", "expected"), [c[1:] for c in MET], ids=[c[0] for c in MET])
def test_met_at(row, expected):
    """The version behind which keys may be in two rows."""
    target = state([("id", "bigint", "bigint", True)])
    assert met_at(known(target, **row), CheckedTarget(target, 2, table_at("")), PLAN) == expected
    assert met_at(CheckHistory(), CheckedTarget(target, 2, table_at("")), PLAN) is None


NOON = datetime(2026, 1, 5, 12, tzinfo=UTC)  # a Monday
UPKEEP, WRITTEN = RunOutcome(is_upkeep=True), RunOutcome(written=frozenset({"public.t"}))
# What the check is, the setting, when all rows were last checked, and whether all are read.
FULL = [
    ("a run that wrote the target", WRITTEN, "@daily", NOON - timedelta(days=9), False),
    ("one that didn't", RunOutcome(), "@daily", NOON, True),
    ("a night after midnight", UPKEEP, "@daily", NOON - timedelta(hours=13), True),
    ("one on the same day", UPKEEP, "@daily", NOON - timedelta(hours=11), False),
    ("before the week ends", UPKEEP, "0 0 * * 0", NOON - timedelta(hours=13), False),
    ("after it", UPKEEP, "0 0 * * 0", NOON - timedelta(hours=37), True),
    ("where only changed rows were checked", UPKEEP, "@daily", None, True),
    ("without a schedule", UPKEEP, None, None, False),
]


@pytest.mark.parametrize(
    ("outcome", "schedule", "last", "is_full"), [c[1:] for c in FULL], ids=[c[0] for c in FULL]
)
def test_what_forces_a_full_check(outcome, schedule, last, is_full):
    """Not how many rows a run changed."""
    target = state([("id", "bigint", "bigint", True)])
    (row,) = known(target).judged[target.table_name]
    row = replace(row, at=last or NOON, whole=last is not None)
    pipeline = SimpleNamespace(quality=Quality(full_check=schedule))
    run = SimpleNamespace(
        outcome=outcome,
        pipeline=pipeline,
        began=NOON,
        history=CheckHistory({target.table_name: [row]}),
    )
    at = CheckedTarget(target, 2, table_at(""))
    assert (met_before(run, at, PLAN, None) is None) == is_full
    for other in (
        met_before(run, replace(at, state=replace(target, mode="history")), PLAN, None),
        met_before(run, at, PLAN, SimpleNamespace(is_small=True)),
        met_before(run, at, SuitePlan("public.t", ()), None),
    ):
        assert other is None


def test_settled(tmp_path):
    """By a full check of the same rows; a compaction changes none."""
    target, uri = state([("id", "bigint", "bigint", True)]), str(tmp_path)
    commit(uri, "sync")
    commit(uri, "apply")
    DeltaTable(uri).optimize.compact()

    def settled(at, plan=PLAN, **row):
        return is_unchanged_since_full_check(
            known(target, whole=True, **row), CheckedTarget(target, at, table_at(uri)), plan
        )

    assert (settled(1, version=1), settled(2, version=1), settled(1, version=2)) == (
        True,
        True,
        True,
    )
    assert (settled(2, version=0), settled(0, version=1)) == (False, False)
    assert not settled(1, replace(PLAN, refused=("x",)), version=1)
    assert not is_unchanged_since_full_check(
        known(target, version=1), CheckedTarget(target, 1, table_at(uri)), PLAN
    )


def test_after_too_many_commits_it_is_not_told(tmp_path, monkeypatch):
    """Each check would read them all."""
    monkeypatch.setattr("waldelta.stages.check.check_run.MOST_COMMITS", 2)
    target, uri = state([("id", "bigint", "bigint", True)]), str(tmp_path)
    for verb in ["sync", "apply", "apply", "apply"]:
        commit(uri, verb)
    found = [
        changed_since(known(target), CheckedTarget(target, version, table_at(uri)), PLAN)
        for version in (2, 3)
    ]
    assert found == [7, None]


OWN = [
    ("expect_column_values_to_be_between", {"column": "id", "min_value": 1}, True),
    ("ExpectColumnMaxToBeBetween", {"column": "id", "max_value": 9}, True),
    ("expect_column_max_to_be_between", {"column": "id", "max_value": {"$PARAMETER": "now()"}},
     False),
    ("expect_column_max_to_be_between", {"column": "id", "row_condition": "d < current_date()"},
     False),
    ("expect_column_values_to_be_between",
     {"column": "id", "min_value": 1, "row_condition": "d < current_date()"}, False),
    ("expect_target_rows_to_satisfy", {"condition": "id > 0 and coalesce(v, '') <> 'x'"}, True),
    ("expect_target_rows_to_satisfy", {"condition": "until > current_date()"}, False),
    ("expect_target_rows_to_satisfy", {"condition": "until > localtimestamp"}, False),
    ("expect_target_rows_to_satisfy", {"condition": "rand() < 1"}, False),
    ("expect_table_row_count_to_equal", {"value": 1}, True),
    ("expect_table_row_count_to_equal_other_table", {"other_table_name": "u"}, False),
    ("UnexpectedRowsExpectation", {"unexpected_rows_query": "select * from u"}, False),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "kwargs", "expected"), OWN)
def test_what_the_day_or_other_tables_decide_on_is_never_settled(tmp_path, kind, kwargs, expected):
    """Though the target's rows are those that met it."""
    target, uri = state([("id", "bigint", "bigint", True)]), str(tmp_path)
    commit(uri, "sync")
    plan = SuitePlan("public.t", (PlannedExpectation(kind, kwargs, "critical", "own", "m"),))
    assert (
        is_unchanged_since_full_check(
            known(target, plan=plan, whole=True), CheckedTarget(target, 0, table_at(uri)), plan
        )
        is expected
    )


def test_the_position_is_of_the_newest_cut_alone():
    """Of a target that stands elsewhere nobody knows which changes it holds."""
    target = state([("id", "bigint", "bigint", True)])
    cut = BatchCut(now(), "r", 1, 99, None, [TargetCut(target.table_name, target.generation, 4)])
    found = CheckHistory(cut=cut)
    assert (found.end_of(target, 4), found.end_of(target, 5), CheckHistory().end_of(target, 4)) == (
        99,
        None,
        None,
    )
    assert found.end_of(replace(target, generation=9), 4) is None


def test_kept_rows(tmp_path):
    """The latest of each table, and the latest of a whole target, outlive maintenance."""
    ledger = Ledger(Lake(tmp_path.as_uri()))
    assert latest_suites(ledger, ["t"]) == {}
    for version, whole in enumerate([True, True, False, False]):
        ledger.append_all(
            [PassedSuite(now(), "r", name, 1, version, "s", whole) for name in ("t", "u")]
        )
    for dropped in (4, 0):
        assert ledger.table(PassedSuite).prune(keep_suites) == dropped
        latest = latest_suites(ledger, ["t"])
        assert {
            name: [(row.version, row.whole) for row in rows] for name, rows in latest.items()
        } == {"t": [(1, True), (3, False)]}
