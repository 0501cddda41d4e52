"""What a lake's bookkeeping tells people, from small tables written by the ledger itself."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter

import pyarrow as pa
import pytest

from spark_jobs.result import RunResult, StageResult, TableResult
from waldelta.expectation_results import IS_FRESH, REFERENCES_HOLD, ExpectationResult, append_expectation_results
from waldelta.lake import bookkeeping_uri
from waldelta.ledger import Ledger
from waldelta.ledger_rows import BatchCut, ForeignCommit, Gap, Run, TableState, TargetCut
from waldelta.ledger_table import LedgerTable
from waldelta.pipeline_file import PipelineFile
from waldelta.quarantine import IncompleteRow, Quarantine
from waldelta.reconcile.reconciliations import Reconciliation, Reconciliations
from waldelta.review.bookkeeping import Bookkeeping
from waldelta.review.compared import read_compared
from waldelta.review.freshness import Operations, read_changed, read_last_cut, read_tables
from waldelta.review.glance import read_glance
from waldelta.review.history import LagPoint, brought_up_to, lag_points, read_runs, thin_out
from waldelta.review.lacking import count_open, open_keys, read_of_run, read_open
from waldelta.review.run_details import read_run
from waldelta.review.verdicts import expectations_map, missed_earlier, read_checks, read_latest_checks, tables_map
from waldelta.slot_health import SlotReading

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def minutes(n: float) -> datetime:
    return NOON + timedelta(minutes=n)


@pytest.fixture
def book(lake):
    return Bookkeeping(lake)


def run(run_id: str, at: datetime, status="succeeded", **more) -> Run:
    """A run that ended two minutes after it had read the slot."""
    facts = {
        "seconds": 90.1234567,
        "as_of": at - timedelta(minutes=2),
        "lag_before_bytes": 1000,
        "lag_bytes": 10,
        "applied": status == "succeeded",
    }
    return Run(at, run_id, "consume", status, **facts | more)


def cut(batch: int, at: datetime, run_id="r", **targets: tuple[int, int, int]) -> BatchCut:
    done = [TargetCut(f"public.{n}", 1, batch, *counts) for n, counts in targets.items()]
    return BatchCut(at, run_id, batch, batch << 20, at - timedelta(minutes=3), done)


def result(at, run_id, table, success=True, severity="critical", meaning="key (id) is unique", count=0):
    return ExpectationResult(at, run_id, table, "kind", meaning, severity, "key", success, None, count, 1)


def pipeline(lake: str) -> PipelineFile:
    source = {"conn_id": "c", "slot": "s", "publications": [{"name": "p", "tables": [{"name": "public.a"}]}]}
    return PipelineFile.model_validate({"pipeline": "shop", "source": source, "target": {"root": lake}})


def test_a_lake_that_isnt_there_is_empty(book):
    """Before setup there is nothing to show, and nothing fails."""
    glance = read_glance(pipeline(book.root), book, NOON, 24)
    assert not glance.is_set_up
    assert (glance.upto, glance.latest, glance.cut, glance.tables, glance.attention) == (None, None, None, (), ())
    assert read_run(book, "consume", "r") is None
    assert tables_map(book, NOON, 10).rows == ()


def test_runs_are_one_line_each(book):
    """The last event of each counts; stages of one run, and runs of one id under other verbs, aren't mixed up."""
    for event in (
        run("one", minutes(2), "running", seconds=30.0),
        run("one", minutes(3), changes=7),
        replace(run("one", minutes(3)), verb="maintain", as_of=None),
        run("two", minutes(8), "failed"),
    ):
        book.ledger.append(event)
    lines = read_runs(book)
    assert [(r.run_id, r.verb, r.status) for r in lines] == [
        ("two", "consume", "failed"), ("one", "maintain", "succeeded"), ("one", "consume", "succeeded"),
    ]  # fmt: skip
    assert lines[2].changes == 7
    assert [r.run_id for r in read_runs(book, minutes(5))] == ["two"]
    assert brought_up_to(lines) == minutes(1)


def test_lag_counts_from_the_last_run_that_was_applied(book):
    """Readers miss what was committed since then, until the next run's end; a failed run brings nothing."""
    for event in (run("a", minutes(2)), run("b", minutes(7), "failed"), run("c", minutes(12))):
        book.ledger.append(event)
    assert [(p.run_id, p.seconds) for p in lag_points(read_runs(book))] == [("a", None), ("b", 420.0), ("c", 720.0)]


def test_thinning_out_keeps_peaks_and_failures():
    """Also where a failed run and the peak that follows it are neighbours."""
    points = [
        LagPoint(minutes(n), str(n), "failed" if n == 76 else "succeeded", float(n == 77), 5 if n == 12 else 0)
        for n in range(100)
    ]
    kept = thin_out(points, 10)
    assert len(kept) <= 10
    assert {point.run_id for point in kept} >= {"76", "77"}
    assert kept == sorted(kept, key=lambda point: point.at)
    assert "12" in {point.run_id for point in thin_out(points, 10, lambda point: point.lag_bytes)}


def test_a_ledger_of_an_earlier_version_is_read(book):
    """Without the columns that runs record today the lag is reckoned from the run's events; bytes aren't known."""
    fields = [
        f
        for f in Run.schema
        if f.name not in ("as_of", "lag_before_bytes", "lag_bytes", "retained_bytes", "wal_status", "applied")
    ]
    old = {"run_id": "old", "verb": "consume", "run_type": "scheduled", "changes": 1, "seconds": 60.0, "result": "{}"}
    LedgerTable(bookkeeping_uri(book.root, "runs"), pa.schema(fields)).extend(
        [
            old | {"at": minutes(1), "status": "running"},
            old | {"at": minutes(4), "status": "succeeded", "seconds": 120.0},
        ]
    )
    (line,) = read_runs(book)
    assert (line.as_of, line.applied, line.lag_bytes, line.wal_status) == (minutes(0), True, None, None)
    assert read_run(book, "consume", "old").stages == ()
    book.ledger.append(run("new", minutes(9)))
    assert [r.lag_bytes for r in read_runs(book)] == [10, None]


def test_what_batches_did_by_table(book):
    """Sums over the window; tables that a cut only names aren't changed."""
    book.ledger.append(cut(1, minutes(1), a=(5, 0, 0), b=(1, 0, 0)))
    book.ledger.append(cut(2, minutes(6), a=(1, 2, 3), b=(0, 0, 0)))
    changed = read_changed(book, minutes(0))
    assert changed["public.a"].operations == Operations(6, 2, 3)
    assert (changed["public.a"].batch, changed["public.b"].batch) == (2, 1)
    assert changed["public.b"].commit_ts == minutes(-2)
    assert set(read_changed(book, minutes(5))) == {"public.a"}
    assert (read_last_cut(book).batch, read_last_cut(book).end_lsn) == (2, 2 << 20)


def test_tables_say_up_to_when_they_are_complete(book):
    """Of one that the latest runs couldn't apply to, since which run; what is to be looked after comes first."""
    for name, status in (("a", "synced"), ("b", "synced"), ("c", "needs_sync")):
        book.ledger.append(TableState(minutes(-9), "sync", f"public.{name}", 1, status))
    stuck = json.dumps({"not_applied": ["public.b"]})
    book.ledger.append(run("fine", minutes(2)))
    book.ledger.append(run("stuck", minutes(7), "failed", result=stuck))
    book.ledger.append(run("again", minutes(12), "failed", result=stuck))
    lines = read_tables(book, read_runs(book), {}, {})
    assert [(t.table_name, t.status, t.complete_upto) for t in lines] == [
        ("public.b", "behind", minutes(0)),
        ("public.c", "needs_sync", None),
        ("public.a", "synced", minutes(10)),
    ]


def test_a_table_says_what_its_target_keeps(book):
    """Of a mirror there is nothing to say; a later state counts."""
    book.ledger.append(TableState(minutes(-9), "sync", "public.a", 1, "synced"))
    book.ledger.append(TableState(minutes(-8), "sync", "public.b", 1, "synced"))
    book.ledger.append(TableState(minutes(-7), "sync", "public.b", 2, "synced", mode="history"))
    lines = read_tables(book, [], {}, {})
    assert [(line.table_name, line.mode) for line in lines] == [("public.a", None), ("public.b", "history")]


def test_a_run_that_read_nothing_brings_no_table_further(book):
    """The source couldn't be reached: that is nothing any table is behind by, and none is complete up to then."""
    book.ledger.append(TableState(minutes(-9), "sync", "public.a", 1, "synced"))
    book.ledger.append(run("fine", minutes(2)))
    book.ledger.append(run("down", minutes(7), "failed"))
    (line,) = read_tables(book, read_runs(book), {}, {})
    assert (line.status, line.complete_upto) == ("synced", minutes(0))
    (line,) = read_tables(book, read_runs(book), {}, {}, looked=minutes(30))
    assert line.complete_upto == minutes(30)


CHECKS = [
    ("passed", [(True, "critical")]),
    ("warning", [(True, "critical"), (False, "warning")]),
    ("failed", [(False, "critical"), (False, "warning"), (None, "critical")]),
    ("unknown", [(None, "critical"), (False, "warning")]),
]


@pytest.mark.parametrize("verdict, found", CHECKS, ids=[c[0] for c in CHECKS])
def test_the_worst_finding_is_the_verdict(book, verdict, found):
    rows = [result(minutes(1), "r", "public.a", *outcome) for outcome in found]
    append_expectation_results(book.root, rows)
    (check,) = read_checks(book, None)
    assert (check.verdict, check.expectations) == (verdict, len(found))


def test_heat_maps(book):
    """Tables by runs and one table's expectations by runs; the newest run last, the worst row first."""
    append_expectation_results(
        book.root,
        [result(minutes(1), "one", "public.a"), replace(result(minutes(1), "one", "public.b"), not_checked=["gone"])],
    )
    missed = result(minutes(6), "two", "public.b", False, count=3)
    append_expectation_results(book.root, [replace(missed, not_checked=["unique key: none"])])
    heat = tables_map(book, minutes(9), 10)
    assert [r.run_id for r in heat.runs] == ["one", "two"]
    verdicts = {name: [c and c.verdict for c in cells] for name, cells in heat.rows}
    assert verdicts == {"public.b": ["passed", "failed"], "public.a": ["passed", None]}
    assert [name for name, _ in heat.rows] == ["public.b", "public.a"]
    assert [r.run_id for r in tables_map(book, minutes(9), 1).runs] == ["two"]
    of_one = expectations_map(book, "public.b", minutes(9), 10)
    assert of_one.not_checked == ("unique key: none",)
    ((name, cells),) = of_one.rows
    assert (name, [c.told for c in cells]) == ("key (id) is unique", ["met", "not met, 3 rows"])
    assert read_latest_checks(book, None)["public.b"].run_id == "two"


def test_what_is_not_met_is_listed_however_long_ago_it_was_found(book):
    """The runs of the heat map may all be newer, or may have judged only a part of what is expected of a table."""
    append_expectation_results(
        book.root,
        [
            result(minutes(-20_000), "old", "public.old", False), result(minutes(-20_000), "old", "public.warned", False, "warning"),
            result(minutes(-20_000), "old", "public.fine"), result(minutes(-20_000), "old", "public.partly", False),
            result(minutes(-20_000), "old", "public.gone", False),
        ],
    )  # fmt: skip
    append_expectation_results(book.root, [replace(reference(minutes(1), True), table_name="public.partly")])
    append_expectation_results(book.root, [result(minutes(2), "new", "public.new", False)])
    fed = [f"public.{name}" for name in ("old", "warned", "fine", "partly", "new", "never")]
    heat = tables_map(book, minutes(9), 2)
    assert [name for name, _ in heat.rows] == ["public.new", "public.partly"]
    found = missed_earlier(book, heat, minutes(-5_000), fed)
    assert [(c.table_name, c.verdict, c.told) for c in found] == [
        ("public.old", "failed", "1 failed of 1"), ("public.partly", "failed", "1 failed of 2"),
        ("public.warned", "warning", "1 not met (warning) of 1"),
    ]  # fmt: skip
    assert found[0].at == minutes(-20_000)


def reference(at, success, meaning="a row of b is there", run_id="night"):
    return replace(result(at, run_id, "public.a", success, "warning", meaning), expectation=REFERENCES_HOLD)


def gate(at, success, meaning="gate stop: amounts are positive"):
    return replace(result(at, "reread", "public.a", success, meaning=meaning), version=None)


KEY, CHECKED = result(minutes(1), "day", "public.a"), result(minutes(1), "day", "public.a", False, meaning="CHECK c")
OTHERS = result(minutes(2), "night", "public.b")
LATEST_CHECKS = [
    ("a maintenance hides no failed check", [KEY, CHECKED, reference(minutes(2), True)], (3, 1, 0)),
    ("nor one of its references another", [KEY, reference(minutes(2), False), reference(minutes(2), True, "of c")], (3, 0, 1)),
    ("nor the freshness that it judges", [KEY, CHECKED, replace(reference(minutes(2), True, "fresh"), expectation=IS_FRESH)], (3, 1, 0)),
    ("nor a gate that rows passed again", [KEY, CHECKED, gate(minutes(2), True)], (3, 1, 0)),
    ("what a gate stops counts", [KEY, gate(minutes(2), False)], (2, 1, 0)),
    ("until the table is checked again", [gate(minutes(0), False), KEY], (1, 0, 0)),
    ("an expectation that isn't there any more is no matter", [replace(CHECKED, at=minutes(0)), KEY], (1, 0, 0)),
    ("what was found again counts once", [reference(minutes(0), False), KEY, reference(minutes(2), True)], (2, 0, 0)),
    ("a check leaves out what maintenance judges", [reference(minutes(0), False), KEY], (2, 0, 1)),
    ("a foreign key that a later maintenance didn't find is gone", [reference(minutes(0), False), reference(minutes(1.5), True, "of c"), KEY], (2, 0, 0)),
    ("nor is one counted that a later check didn't find", [replace(reference(minutes(0), False), run_id="r"), result(minutes(0), "r", "public.a"), KEY], (1, 0, 0)),
    ("nor one of the check that a later maintenance didn't find", [KEY, reference(minutes(1), False, run_id="day"), reference(minutes(2), True, "of c")], (2, 0, 0)),
    ("also while another table is checked in full", [KEY, reference(minutes(1.5), False), OTHERS, reference(minutes(2), True, "of c")], (2, 0, 0)),
    ("one that couldn't be evaluated counts as that", [CHECKED, replace(CHECKED, at=minutes(2), success=None)], (1, 0, 0)),
]  # fmt: skip


@pytest.mark.parametrize("rows, counts", [case[1:] for case in LATEST_CHECKS], ids=[case[0] for case in LATEST_CHECKS])
def test_the_last_word_on_each_expectation_counts(book, rows, counts):
    """Checks, maintenance and gates each judge a part of what is expected of a table."""
    for _, of_one_check in groupby(rows, attrgetter("at")):
        append_expectation_results(book.root, list(of_one_check))
    check = read_latest_checks(book, None)["public.a"]
    assert (check.expectations, check.failed, check.warnings) == counts


def test_a_table_that_nothing_changes_keeps_its_verdict(book):
    """However long ago it was checked: a page that forgets what failed says that all is well."""
    append_expectation_results(book.root, [CHECKED, replace(KEY, table_name="public.b")])
    append_expectation_results(book.root, [result(minutes(9), "later", "public.b"), reference(minutes(9), True)])
    found = read_latest_checks(book, minutes(5), ["public.a", "public.b", "public.c"])
    assert {name: check.verdict for name, check in found.items()} == {"public.a": "failed", "public.b": "passed"}


def test_a_check_that_is_tried_again_counts_as_it_ended(book):
    """Its task was cleared: the run has the same id; and so has another DAG's run of that moment."""
    append_expectation_results(book.root, [KEY, CHECKED])
    append_expectation_results(book.root, [replace(row, at=minutes(3), success=True) for row in (KEY, CHECKED)])
    append_expectation_results(book.root, [reference(minutes(4), None, run_id="day")])
    (check,) = read_checks(book, None, "day")
    assert (check.expectations, check.failed, check.unknown, check.verdict) == (3, 0, 1, "unknown")


def test_own_expectations_may_be_of_one_meaning(book):
    """In results of earlier versions that of their type, when they have no notes: none hides another."""
    rows = [result(minutes(1), "r", "public.a", success, meaning="expect_x") for success in (True, False, True)]
    append_expectation_results(book.root, rows)
    (check,) = read_checks(book, None)
    assert (check, check.expectations, check.failed) == (read_latest_checks(book, None)["public.a"], 3, 1)
    ((_, (cell,)),) = expectations_map(book, "public.a", minutes(2), 10).rows
    assert cell.verdict == "failed"


def test_a_runs_page_is_what_its_stages_recorded(book, lake):
    """Through the result that runs write: stages, tables, the slot, the error; and what it left in other tables."""
    done = RunResult("consume", "r", "failed", start_lsn="0/10", end_lsn="0/20", changes=3, lag_bytes=5)
    done.stages = {"land": StageResult("succeeded", 1.5, "1 batches"), "apply": StageResult("failed", 2.0)}
    done.tables = {"public.a": TableResult(1, 2, reread=4, version=7)}
    done.not_applied, done.warnings = ["public.b"], ["look"]
    done.error = {"class": "ApplyError", "message": "no", "retryable": False}
    done.as_of = minutes(0).isoformat()
    done.slot_before = SlotReading(minutes(0).isoformat(), "reserved", 900, 1 << 20)
    done.slot_after = SlotReading(minutes(1).isoformat(), "extended", 5, 2 << 20, 77)
    read_back = RunResult.from_json(done.to_json())
    assert read_back == done
    ledger = Ledger(lake)
    read_back.record(
        type("Job", (), {"ledger": ledger, "run_type": "scheduled", "interval_start": None, "interval_end": None})()
    )
    ledger.append(TableState(minutes(1), "r", "public.c", 1, "synced", reason="columns changed: added x"))
    Quarantine(lake).add([IncompleteRow(minutes(1), "r", "quarantined", "public.a", 1, 1, '{"id": "1"}', ["body"])])
    (line,) = read_runs(book)
    assert (line.as_of, line.lag_before_bytes, line.lag_bytes, line.wal_status) == (minutes(0), 900, 5, "extended")
    assert (line.retained_bytes, line.applied) == (2 << 20, False)
    seen = read_run(book, "consume", "r")
    assert [(s.name, s.status, s.seconds) for s in seen.stages] == [
        ("land", "succeeded", 1.5),
        ("apply", "failed", 2.0),
    ]
    assert [(t.table_name, t.is_behind, t.schema) for t in seen.tables] == [
        ("public.b", True, ()), ("public.a", False, ()), ("public.c", False, ("columns changed: added x",)),
    ]  # fmt: skip
    assert (seen.tables[1].reread, seen.error_class, seen.warnings) == (4, "ApplyError", ("look",))
    assert [row.key for row in seen.quarantined] == ['{"id": "1"}']
    assert seen.slot_after.safe_wal_size == 77


def test_rows_that_targets_lack(book):
    """What was resolved, read again or of an earlier copy isn't lacking any more; nor is one that came back counted twice."""

    def row(n, status, key, table="public.a", generation=2):
        return IncompleteRow(minutes(n), "r", status, table, generation, 1, key, ["body"], reason="gone")

    for told in (
        row(1, "quarantined", "old copy", generation=1), row(2, "quarantined", "resolved"), row(3, "quarantined", "twice"),
        row(4, "resolved", "resolved"), row(5, "resolved", "twice"), row(6, "quarantined", "twice"),
        row(7, "reread", "reread"), row(8, "quarantined", "b", "public.b"), row(9, "quarantined", "gone table", "public.x"),
    ):  # fmt: skip
        Quarantine(book.root).add([told])
    generations = {"public.a": 2, "public.b": 2, "public.c": 1}
    assert count_open(book, generations) == {"public.a": 1, "public.b": 1}
    assert [(row.key, row.reason) for row in read_open(book, open_keys(book, generations))] == [
        ("twice", "gone"),
        ("b", "gone"),
    ]
    assert count_open(book, generations) == Quarantine(book.root).open_counts(generations)
    first, count = read_of_run(book, "r", 2)
    assert ([row.key for row in first], count) == (["old copy", "resolved"], 9)
    assert count_open(Bookkeeping(book.root + "x"), generations) == {}


def test_what_deserves_attention(book):
    """The worst first; each with the page that tells more."""
    for name, status in (("a", "synced"), ("b", "failed")):
        book.ledger.append(TableState(minutes(-9), "sync", f"public.{name}", 1, status))
    gap = Gap(minutes(1), "r", "open", "s", "1", 1, "0/1", 16, 32, "SlotLost", "slot 's' is lost", "run resync")
    book.ledger.append(gap)
    why = json.dumps({"error": {"class": "ApplyError", "message": "no room\nat all"}})
    book.ledger.append(
        run("r", minutes(2), "failed", retained_bytes=6000 << 20, wal_status="unreserved", applied=True, result=why)
    )
    append_expectation_results(book.root, [result(minutes(2), "r", "public.a", False)])
    Quarantine(book.root).add([IncompleteRow(minutes(1), "r", "quarantined", "public.a", 1, 1, "{}", ["body"])])
    glance = read_glance(pipeline(book.root), book, minutes(5), 24)
    assert [(item.severity, *item.page[:1]) for item in glance.attention] == [
        ("failed",), ("failed", "run"), ("failed", "tables"), ("failed", "expectations"), ("failed",), ("warning",),
        ("warning", "quarantine"),
    ]  # fmt: skip
    texts = " | ".join(item.text for item in glance.attention)
    for part in (
        "0/10..0/20",
        "run resync",
        "public.b",
        "unreserved",
        "failed: ApplyError: no room |",
        "6 GB",
        "1 row in quarantine",
    ):
        assert part in texts
    assert glance.verdicts == {"failed": 1}


def test_what_only_warns_is_told_behind_what_fails(book):
    """Drift, freshness, rows without partners; runs of the night that failed; attempts that couldn't compare."""
    for name in "abcd":
        book.ledger.append(TableState(minutes(-9), "sync", f"public.{name}", 1, "synced"))
    append_expectation_results(book.root, [result(minutes(-5000), "r", "public.a", False, "warning")])
    why = json.dumps({"error": {"class": "LockHeld", "message": "busy"}})
    night = Run(minutes(-3000), "night", "maintain", "failed", result=why)
    for event in (night, replace(night, run_id="compared", verb="reconcile"), run("r", minutes(2))):
        book.ledger.append(event)
    found = [(-200, "a", "different"), (-150, "b", "failed"), (-100, "a", "not compared"), (-100, "c", "equal")]
    found += [(-90, "d", "different"), (-80, "d", "failed"), (-70, "d", "repaired")]
    for at, name, status in found:
        row = Reconciliation(minutes(at), f"{status} at {at}", f"public.{name}", status)
        Reconciliations(book.root).add([row])
    glance = read_glance(pipeline(book.root), book, minutes(5), 24, reach=timedelta(days=2))
    assert [(item.severity, item.text, item.page) for item in glance.attention] == [
        (
            "failed",
            "public.a: other rows than the source has; the latest attempt couldn't compare them again",
            ("reconciliation",),
        ),
        ("warning", "public.a: expectations not met that only warn", ("expectations",)),
        ("warning", "public.b: comparing with the source failed", ("reconciliation",)),
        ("warning", "the latest maintenance failed: LockHeld: busy", ("run", "maintain", "night")),
        ("warning", "the latest reconciliation failed: LockHeld: busy", ("run", "reconcile", "compared")),
    ]
    for verb in ("maintain", "reconcile"):
        book.ledger.append(replace(night, at=minutes(4), run_id="fine", verb=verb, status="succeeded"))
    Reconciliations(book.root).add([Reconciliation(minutes(4), "r", f"public.{n}", "equal") for n in "ab"])
    (left,) = read_glance(pipeline(book.root), book, minutes(5), 24).attention
    assert left.page == ("expectations",)


COMPARED = [
    ("nobody has asked", [], "ab", "unknown", ("never compared",), None),
    ("no table", [], "", "unknown", (), None),
    ("all of them", [("a", "equal"), ("b", "repaired")], "ab", "passed", (), 0),
    ("one of them", [("a", "equal")], "ab", "unknown", ("1 never compared",), 0),
    ("only attempts", [("a", "not compared"), ("b", "failed")], "ab", "unknown", ("2 without an answer",), None),
    ("an attempt takes no answer away", [("a", "equal"), ("a", "failed")], "a", "passed", (), 0),
    ("the latest answer counts", [("a", "equal"), ("a", "different"), ("b", "equal")], "ab", "failed", ("1 different",), 2),
    ("of tables that are fed", [("x", "different"), ("a", "equal")], "a", "passed", (), 1),
]  # fmt: skip


@pytest.mark.parametrize("found, fed, verdict, told, oldest", [c[1:] for c in COMPARED], ids=[c[0] for c in COMPARED])
def test_how_the_lake_compares_with_its_source(book, found, fed, verdict, told, oldest):
    """However long ago that was; and it says how old the knowledge is."""
    long_ago = timedelta(days=400)
    for n, (name, status) in enumerate(found):
        Reconciliations(book.root).add([Reconciliation(minutes(n) - long_ago, f"r{n}", f"public.{name}", status)])
    compared = read_compared(book, [f"public.{name}" for name in fed])
    assert (compared.verdict, compared.told, compared.count) == (verdict, told, len(fed))
    assert compared.oldest == (None if oldest is None else minutes(oldest) - long_ago)


TOLD_BY_RUNS = [
    ("nothing", {}, None),
    ("a table without a copy", {"never_copied": ["public.x"]}, ("warning", "public.x: published, but never copied")),
    ("unless that has begun since", {"never_copied": ["public.late"]}, None),
    ("a suite of no table", {"unused_suites": ["/e/x.yml fits no table"]}, ("warning", "expectations that judge nothing: /e/x.yml")),
    ("a slot in danger", {"slot_critical": ["slot 's' is lost in 2 hours"]}, ("failed", "when the latest run began, slot 's' is lost")),
]  # fmt: skip


@pytest.mark.parametrize("found, told", [case[1:] for case in TOLD_BY_RUNS], ids=[case[0] for case in TOLD_BY_RUNS])
def test_what_the_latest_run_found_is_told(book, found, told):
    """Also while a later one runs, or failed before it could know."""
    book.ledger.append(run("r", minutes(0), result=json.dumps({"stages": {"apply": {}}} | found)))
    book.ledger.append(TableState(minutes(1), "sync", "public.late", 1, "synced"))
    Reconciliations(book.root).add([Reconciliation(minutes(1), "x", "public.late", "equal")])

    def items(at):
        found = read_glance(pipeline(book.root), book, minutes(at), 24).attention
        return [(item.severity, item.text) for item in found]

    attention = items(2)
    idle = read_glance(pipeline(book.root), book, minutes(2), 24, looked=minutes(1)).attention
    assert len(idle) == len([item for item in attention if "latest run" not in item[1]])
    assert len(attention) == (told is not None)
    assert all(severity == told[0] and text.startswith(told[1]) for severity, text in attention)
    book.ledger.append(run("down", minutes(3), "failed"))
    book.ledger.append(run("now", minutes(4), "running"))
    of_others = [[item for item in listed if "latest run" not in item[1]] for listed in (items(5), attention)]
    assert of_others[0] == of_others[1]
    book.ledger.append(run("fine", minutes(6), result=json.dumps({"stages": {"apply": {}}})))
    assert items(7) == []


def test_what_was_found_holds_while_nothing_changes(book):
    """Of a source at rest no run is recorded but maintenance's."""
    book.ledger.append(run("r", minutes(0), result=json.dumps({"stages": {"apply": {}}, "never_copied": ["public.x"]})))
    book.ledger.append(replace(run("night", minutes(5000)), verb="maintain"))
    glance = read_glance(pipeline(book.root), book, minutes(5005), 24, reach=timedelta(days=2))
    assert (glance.latest.run_id, len(glance.attention)) == ("r", 1)


def test_who_else_wrote_to_a_target_is_told_until_it_was_compared(book):
    """By the version and the time of both: the versions of a target that was made anew begin anew."""
    commits = [ForeignCommit(version, "UPDATE", "ann", minutes(version)) for version in (4, 9)]
    unsaid = [ForeignCommit(3, "UPDATE", "ann")]
    for name, found in {"a": commits, "b": commits, "c": commits, "d": unsaid, "e": commits, "f": []}.items():
        book.ledger.append(TableState(minutes(10), "r", f"public.{name}", 1, "synced", foreign_commits=found))
    book.ledger.append(TableState(minutes(11), "r", "public.e", 1, "removed", foreign_commits=commits))
    answers = [("a", 9, 20), ("b", 8, 21), ("d", 50, 22), ("c", 12, 5), ("f", 1, 23)]
    for name, version, at in sorted(answers, key=lambda answer: answer[2]):
        Reconciliations(book.root).add([Reconciliation(minutes(at), "x", f"public.{name}", "equal", version=version)])
    (told,) = read_glance(pipeline(book.root), book, minutes(30), 24).attention
    assert (told.severity, told.page) == ("warning", ("reconciliation",))
    assert told.text.startswith("public.b, public.c: somebody else wrote to its target")


MENDED = [
    ("nothing was done", [], "different"),
    ("copied", [("copying", 2, ""), ("synced", 2, "s")], "copied"),
    ("copied, and its columns changed since", [("copying", 2, ""), ("synced", 2, "s"), ("synced", 2, "s")], "copied"),
    ("a copy that failed", [("copying", 2, ""), ("failed", 2, "")], "different"),
    ("a copy under way", [("copying", 2, "")], "different"),
    ("a repair of what drifted", [("copying", 2, "s"), ("synced", 2, "s")], "different"),
    ("a repair after a copy", [("copying", 2, ""), ("synced", 2, "s"), ("copying", 3, "t"), ("synced", 3, "t")], "copied"),
    ("its columns changed", [("synced", 1, "s")], "different"),
    ("a copy that nobody knows the beginning of", [("synced", 2, "s")], "different"),
    ("it left the publications", [("removed", 1, "s")], None),
]  # fmt: skip


@pytest.mark.parametrize("states, found", [case[1:] for case in MENDED], ids=[case[0] for case in MENDED])
def test_a_copy_takes_a_difference_away_until_it_is_compared_again(book, states, found):
    """What a repair of drift, or of rows in quarantine, doesn't: it mends the rows that it is about."""
    for status, snapshot in (("copying", ""), ("synced", "s")):
        book.ledger.append(TableState(minutes(0), "r", "public.a", 1, status, snapshot=snapshot))
    Reconciliations(book.root).add([Reconciliation(minutes(5), "r", "public.a", "different")])
    for n, (status, generation, snapshot) in enumerate(states):
        book.ledger.append(TableState(minutes(6 + n), "r", "public.a", generation, status, snapshot=snapshot))
    glance = read_glance(pipeline(book.root), book, minutes(20), 24)
    assert glance.compared.count == (found is not None)
    assert [kind for kind in ("different", "copied") if getattr(glance.compared, kind)] == ([found] if found else [])
    told = [(item.severity, item.text) for item in glance.attention if item.page == ("reconciliation",)]
    expected = {
        "different": [("failed", "public.a: other rows than the source has")],
        "copied": [("warning", "public.a: differed, and was copied since: compare again")],
    }
    assert told == expected.get(found, [])


def test_a_run_that_was_killed_is_told_by_its_silence(book):
    """It is the latest, and still running for the ledger."""
    book.ledger.append(run("r", minutes(2), "running"))
    assert read_glance(pipeline(book.root), book, minutes(30), 24).attention == ()
    (silent,) = read_glance(pipeline(book.root), book, minutes(302), 24).attention
    assert "nothing for 5.0 hours" in silent.text
    assert silent.page == ("run", "consume", "r")
