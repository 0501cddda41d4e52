"""What a lake's bookkeeping tells people, from small tables written by the ledger itself."""

import json
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from tests.cases import cases
from tests.support.bookkeeping import NOON, append_by_kind, did, minutes, pipeline, result, run
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    ALL_VALUES_KNOWN,
    CAN_BE_JUDGED,
    ColumnState,
    Decision,
    Decisions,
    ExpectationResult,
    Ledger,
    RowCounts,
    SlotReading,
    TableState,
    TargetCut,
)
from waldelta.lake.ledger.check_records import IS_FRESH, REFERENCES_HOLD, keep_results
from waldelta.monitoring.check_results import (
    expectations_map,
    missed_earlier,
    read_checks,
    read_latest_checks,
    tables_map,
)
from waldelta.monitoring.decisions import read_of_run, read_open
from waldelta.monitoring.overview import read_glance
from waldelta.monitoring.run_details import read_run
from waldelta.monitoring.run_history import (
    Point,
    complete_upto,
    lag_points,
    read_runs,
    scan_runs,
    thin_out,
)
from waldelta.monitoring.table_list import read_changed, read_table_details, read_tables
from waldelta.pipeline import RunResult, StageResult, TableResult
from waldelta.pipeline.run_result import LandedChanges, ReportedLag


@pytest.fixture
def book(lake):
    return Ledger(Lake(lake))


def test_a_lake_that_isnt_there_is_empty(book):
    """Before setup there is nothing to show, and nothing fails."""
    glance = read_glance(pipeline(book.lake.root), book, NOON)
    assert not glance.is_set_up
    assert (glance.upto, glance.latest, glance.tables, glance.attention) == (None, None, (), ())
    assert read_run(book, "consume", "r") is None
    assert tables_map(book, NOON, 10).rows == ()


def test_runs_are_one_line_each(book):
    """The last event of each counts; stages, and runs of one id under other verbs, stay apart."""
    events = [
        run("one", minutes(2), "running", seconds=30.0),
        run("one", minutes(3), changes=7),
        replace(run("one", minutes(3)), verb="maintain", as_of=None),
        run("two", minutes(8), "failed"),
    ]
    append_by_kind(book, events)
    lines = read_runs(book)
    assert [(r.run_id, r.verb, r.status) for r in lines] == [
        ("two", "consume", "failed"),
        ("one", "maintain", "succeeded"),
        ("one", "consume", "succeeded"),
    ]
    assert lines[2].changes == 7
    assert [r.run_id for r in read_runs(book, minutes(5))] == ["two"]
    assert complete_upto(lines) == minutes(1)


def test_lag_counts_from_the_last_run_that_was_applied(book):
    """Readers miss what was committed since then; a failed run brings nothing."""
    runs = [run("a", minutes(2)), run("b", minutes(7), "failed"), run("c", minutes(12))]
    append_by_kind(book, runs)
    expected = [("b", 420.0), ("c", 720.0)]
    assert [(p.run_id, p.value) for p in lag_points(scan_runs(book))] == expected


def test_thinning_out_keeps_peaks_and_failures():
    """Also where a failed run and the peak that follows it are neighbours."""
    points = [
        Point(minutes(n), float(n == 77), "failed" if n == 76 else "succeeded", str(n))
        for n in range(100)
    ]
    kept = thin_out(points, 10)
    assert len(kept) <= 10
    assert {point.run_id for point in kept} >= {"76", "77"}
    assert kept == sorted(kept, key=lambda point: point.at)


CHANGED = [
    ("no cut is needed", [run("r", minutes(1), "failed", targets=did(1, a=(5, 1, 0)))],
     {"a": (5, 1, 0)}),
    (
        "each stage adds what it did",
        [
            run("r", minutes(1), "running"),
            run("r", minutes(2), "running", targets=did(1, a=(5, 0, 0))),
            run("r", minutes(3)),
        ],
        {"a": (5, 0, 0)},
    ),
    (
        "an attempt that began anew adds to what the one before did",
        [
            run("r", minutes(1), "failed", targets=did(1, a=(5, 0, 0))),
            run("r", minutes(2), targets=did(2, a=(2, 0, 0))),
        ],
        {"a": (7, 0, 0)},
    ),
    ("what a killed run committed is in the result of the run that found it",
     [run("later", minutes(3), targets=did(2, a=(9, 0, 0)))], {"a": (9, 0, 0)}),
    (
        "a replay and a repair count what they wrote",
        [
            run("r", minutes(1), targets=did(1, a=(5, 0, 0))),
            replace(run("r", minutes(2), targets=did(2, a=(0, 1, 0))), verb="replay"),
            replace(run("q", minutes(3), targets=did(3, a=(0, 0, 1))), verb="decide"),
        ],
        {"a": (5, 1, 1)},
    ),
    ("a copy is no change", [replace(run("s", minutes(1)), verb="sync")], {}),
    ("before the window", [run("r", minutes(-1), targets=did(1, a=(5, 0, 0)))], {}),
    (
        "each run that truncated a table",
        [
            run("q", minutes(1), targets=[TargetCut("public.a", 1, 1, truncated=True)]),
            run("r", minutes(2), targets=[TargetCut("public.a", 1, 1, truncated=True)]),
        ],
        {"a": (0, 0, 0, 0, 2)},
    ),
]  # fmt: skip


@cases("rows, expected", CHANGED)
def test_what_runs_did_by_table(book, rows, expected):
    """Each change once, whatever became of its run."""
    append_by_kind(book, rows)
    found = {name: done.operations for name, done in read_changed(book, minutes(0)).items()}
    assert found == {f"public.{name}": RowCounts(*counts) for name, counts in expected.items()}


def test_the_latest_change_of_a_table(book):
    """By its commit on the source if known, with the run and the version it wrote."""
    book.append(run("one", minutes(1), targets=did(1, minutes(-2), a=(5, 0, 0), b=(1, 0, 0))))
    skipped = [TargetCut("public.a", 1, 3, skipped=2)]
    book.append(run("two", minutes(6), targets=[*did(2, minutes(3), c=(0, 0, 1)), *skipped]))
    changed = read_changed(book, minutes(0))
    assert [(changed[f"public.{name}"].at, changed[f"public.{name}"].run_id) for name in "abc"] == [
        (minutes(6), "two"), (minutes(-2), "one"), (minutes(3), "two"),
    ]  # fmt: skip
    assert [
        (changed[f"public.{name}"].version, changed[f"public.{name}"].generation) for name in "ac"
    ] == [(1, 1), (2, 1)]
    assert set(read_changed(book, minutes(5))) == {"public.a", "public.c"}


@pytest.mark.parametrize("seconds, shown", [((0, 60, 120), False), ((0, 20, 60), True)])
def test_columns_of_a_heat_map_are_told_apart(book, seconds, shown):
    """By seconds where two runs checked within one minute."""
    at = [minutes(n / 60) for n in seconds]
    book.append_all([result(one, f"r{n}", "public.a") for n, one in enumerate(at)])
    heat = tables_map(book, minutes(9), 10)
    assert heat.shows_seconds is shown


def test_what_a_table_holds_and_where(book):
    """Columns by both types, the key, rows and size; before its copy, what is known."""
    columns = [
        ColumnState("id", 20, -1, "int8", "bigint", not_null=True),
        ColumnState("tags", 1009, -1, "_text", "array<string>", not_null=False),
    ]
    state = TableState(
        minutes(0), "s", "public.orders", 1, "synced", key_columns=["id"], columns=columns,
        row_filter="id > 0",
    )  # fmt: skip
    book.append(state)
    before = read_table_details(book, "public.orders")
    assert (before.key, before.rows, before.bytes) == (("id",), None, None)
    uri = f"{book.lake.root}/public/orders"
    types = {"id": pa.int64(), "_wd_lsn": pa.int64(), "tags": pa.list_(pa.string())}
    write_deltalake(uri, pa.table({name: pa.nulls(3, kind) for name, kind in types.items()}))
    found = read_table_details(book, "public.orders")
    expected = (uri, 3, 1, 0, ("only rows where id > 0",))
    assert (found.uri, found.rows, found.files, found.version, found.limits) == expected
    assert found.bytes > 0
    assert [(c.name, c.type, c.source_type, c.is_key) for c in found.columns] == [
        ("id", "bigint", "int8", True),
        ("tags", "array<string>", "_text", False),
        ("_wd_lsn", "bigint", None, False),
    ]
    assert read_table_details(book, "public.none") is None


def test_tables_say_up_to_when_they_are_complete(book):
    """And since which run one isn't; what needs attention comes first."""
    stuck = json.dumps({"not_applied": ["public.b"]})
    rows = [
        *(
            TableState(minutes(-9), "sync", f"public.{name}", 1, status)
            for name, status in (("a", "synced"), ("b", "synced"), ("c", "needs_sync"))
        ),
        run("fine", minutes(2)),
        # Spark couldn't be reached: what has landed is in no target.
        run("no spark", minutes(7), "failed", applied=None),
        run("stuck", minutes(12), "failed", result=stuck),
        run("stuck again", minutes(17), "failed", result=stuck),
        run("no spark again", minutes(22), "failed", applied=None),
    ]
    append_by_kind(book, rows)
    lines = read_tables(book, read_runs(book), {}, {})
    assert [(t.table_name, t.status, t.complete_upto) for t in lines] == [
        ("public.b", "behind", minutes(0)), ("public.c", "needs_sync", None),
        ("public.a", "synced", minutes(15)),
    ]  # fmt: skip


def test_a_run_that_landed_a_part_leaves_tables_behind(book):
    """It has no time up to which all landed: a message can't be read, or the slot ended."""
    book.append(TableState(minutes(-9), "sync", "public.a", 1, "synced"))
    stuck = json.dumps({"not_applied": ["public.a"]})
    book.append(run("part", minutes(2), "failed", as_of=None, end_lsn=7, result=stuck))
    (line,) = read_tables(book, read_runs(book), {}, {})
    assert (line.status, line.complete_upto) == ("behind", None)


def test_a_runs_page_adds_up_its_attempts(book):
    """A repeated landing's result has only its own tables; the ledger has each attempt's."""
    first = run("r", minutes(1), "failed", targets=did(1, a=(100, 5, 0), b=(7, 0, 0)))
    own = {"tables": {"public.a": {"inserted": 3, "version": 2}}}
    again = run("r", minutes(4), targets=did(2, a=(3, 0, 1)), result=json.dumps(own), changes=116)
    book.append_all([first, run("other", minutes(3), targets=did(2, a=(50, 0, 0)))])
    assert not read_run(book, "consume", "r").is_retried
    book.append(again)
    found = read_run(book, "consume", "r")
    assert (found.work, found.is_retried) == ("116 changes", True)
    assert {
        table.table_name: (table.inserted, table.updated, table.deleted, table.version)
        for table in found.tables
    } == {"public.a": (103, 5, 1, 2), "public.b": (7, 0, 0, None)}


def test_a_table_says_what_its_target_keeps(book):
    """Of a mirror there is nothing to say; a later state counts."""
    book.append(TableState(minutes(-9), "sync", "public.a", 1, "synced"))
    book.append(TableState(minutes(-8), "sync", "public.b", 1, "synced"))
    book.append(TableState(minutes(-7), "sync", "public.b", 2, "synced", mode="history"))
    book.append(TableState(minutes(-6), "sync", "public.c", 1, "synced", copy_skipped=True))
    lines = read_tables(book, [], {}, {})
    expected = [("public.a", ""), ("public.b", "history"), ("public.c", "without a copy")]
    assert [(line.table_name, line.kind) for line in lines] == expected


def test_a_run_that_read_nothing_brings_no_table_further(book):
    """The source couldn't be reached: no table is behind by that, or complete up to then."""
    book.append(TableState(minutes(-9), "sync", "public.a", 1, "synced"))
    book.append(run("fine", minutes(2)))
    book.append(run("down", minutes(7), "failed"))
    (line,) = read_tables(book, read_runs(book), {}, {})
    assert (line.status, line.complete_upto) == ("synced", minutes(0))
    # By hand, or with a landing that somebody has marked as done.
    book.append(run("apply alone", minutes(12), as_of=None))
    (line,) = read_tables(book, read_runs(book), {}, {})
    assert (line.complete_upto, complete_upto(read_runs(book))) == (minutes(0), minutes(0))
    (line,) = read_tables(book, read_runs(book), {}, {}, idle_checked_at=minutes(30))
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
    book.append_all(rows)
    (check,) = read_checks(book, None)
    assert (check.verdict, check.expectations) == (verdict, len(found))


def test_heat_maps(book):
    """Tables, or one table's expectations, by runs; newest run last, worst row first."""
    book.append_all(
        [
            result(minutes(1), "one", "public.a"),
            replace(result(minutes(1), "one", "public.b"), not_checked=["gone"]),
        ]
    )
    missed = result(minutes(6), "two", "public.b", False, count=3)
    book.append_all([replace(missed, not_checked=["unique key: none"])])
    heat = tables_map(book, minutes(9), 10)
    assert [run_id for _, run_id in heat.runs] == ["one", "two"]
    verdicts = {name: [c and c.verdict for c in cells] for name, cells in heat.rows}
    assert verdicts == {"public.b": ["passed", "failed"], "public.a": ["passed", None]}
    assert [name for name, _ in heat.rows] == ["public.b", "public.a"]
    assert [run_id for _, run_id in tables_map(book, minutes(9), 1).runs] == ["two"]
    of_one = expectations_map(book, "public.b", minutes(9), 10)
    assert of_one.not_checked == ("unique key: none",)
    ((name, cells),) = of_one.rows
    assert (name, [c.finding for c in cells]) == ("key (id) is unique", ["met", "not met, 3 rows"])
    assert read_latest_checks(book, None)["public.b"].run_id == "two"


def test_what_is_not_met_is_listed_however_long_ago_it_was_found(book):
    """The heat map's runs may all be newer, or have judged only a part."""
    book.append_all(
        [
            result(minutes(-20_000), "old", "public.old", False),
            result(minutes(-20_000), "old", "public.warned", False, "warning"),
            result(minutes(-20_000), "old", "public.fine"),
            result(minutes(-20_000), "old", "public.partly", False),
            result(minutes(-20_000), "old", "public.gone", False),
        ]
    )
    book.append_all([replace(reference(minutes(1), True), table_name="public.partly")])
    book.append_all([result(minutes(2), "new", "public.new", False)])
    fed = [f"public.{name}" for name in ("old", "warned", "fine", "partly", "new", "never")]
    heat = tables_map(book, minutes(9), 2)
    assert [name for name, _ in heat.rows] == ["public.new", "public.partly"]
    found = missed_earlier(book, heat, minutes(-5_000), fed)
    assert [(c.table_name, c.verdict, c.summary) for c in found] == [
        ("public.old", "failed", "1 failed of 1"), ("public.partly", "failed", "1 failed of 2"),
        ("public.warned", "warning", "1 not met (warning) of 1"),
    ]  # fmt: skip
    assert found[0].at == minutes(-20_000)


def reference(at, success, meaning="a row of b is there", run_id="night"):
    return replace(
        result(at, run_id, "public.a", success, "warning", meaning), expectation=REFERENCES_HOLD
    )


def gate(at, success, meaning="gate stop: amounts are positive"):
    return replace(result(at, "reread", "public.a", success, meaning=meaning), version=None)


def unknown(at, success, version=None):
    return replace(
        reference(at, success, "all values known", "day"),
        expectation=ALL_VALUES_KNOWN,
        version=version,
    )


KEY, CHECKED = (
    result(minutes(1), "day", "public.a"),
    result(minutes(1), "day", "public.a", False, meaning="CHECK c"),
)
OTHERS = result(minutes(2), "night", "public.b")
LATEST_CHECKS = [
    ("a maintenance hides no failed check", [KEY, CHECKED, reference(minutes(2), True)], (3, 1, 0)),
    ("nor one of its references another",
     [KEY, reference(minutes(2), False), reference(minutes(2), True, "of c")], (3, 0, 1)),
    (
        "nor the freshness that it judges",
        [KEY, CHECKED, replace(reference(minutes(2), True, "fresh"), expectation=IS_FRESH)],
        (3, 1, 0),
    ),
    ("nor a gate that rows passed again", [KEY, CHECKED, gate(minutes(2), True)], (3, 1, 0)),
    ("what a gate stops counts", [KEY, gate(minutes(2), False)], (2, 1, 0)),
    ("until the table is checked again", [gate(minutes(0), False), KEY], (1, 0, 0)),
    ("an expectation that isn't there any more is no matter",
     [replace(CHECKED, at=minutes(0)), KEY], (1, 0, 0)),
    ("what was found again counts once",
     [reference(minutes(0), False), KEY, reference(minutes(2), True)], (2, 0, 0)),
    ("a check leaves out what maintenance judges", [reference(minutes(0), False), KEY], (2, 0, 1)),
    ("a foreign key that a later maintenance didn't find is gone",
     [reference(minutes(0), False), reference(minutes(1.5), True, "of c"), KEY], (2, 0, 0)),
    (
        "nor is one counted that a later check didn't find",
        [
            replace(reference(minutes(0), False), run_id="r"),
            result(minutes(0), "r", "public.a"),
            KEY,
        ],
        (1, 0, 0),
    ),
    (
        "nor one of the check that a later maintenance didn't find",
        [KEY, reference(minutes(1), False, run_id="day"), reference(minutes(2), True, "of c")],
        (2, 0, 0),
    ),
    ("also while another table is checked in full",
     [KEY, reference(minutes(1.5), False), OTHERS, reference(minutes(2), True, "of c")], (2, 0, 0)),
    (
        "rows that were discarded lack no value any more, and say nothing else",
        [
            KEY,
            reference(minutes(1), False),
            unknown(minutes(1), False, 1),
            unknown(minutes(2), True),
        ],
        (3, 0, 1),
    ),
    (
        "until the table is checked again, or maintained",
        [unknown(minutes(0), False), KEY, unknown(minutes(2), False), reference(minutes(3), True)],
        (2, 0, 0),
    ),
    ("one that couldn't be evaluated counts as that",
     [CHECKED, replace(CHECKED, at=minutes(2), success=None)], (1, 0, 0)),
]  # fmt: skip


@cases("rows, counts", LATEST_CHECKS)
def test_the_last_word_on_each_expectation_counts(book, rows, counts):
    """Checks, maintenance and gates each judge a part of what is expected of a table."""
    for _, of_one_check in groupby(rows, attrgetter("at")):
        book.append_all(list(of_one_check))
    check = read_latest_checks(book, None)["public.a"]
    assert (check.expectations, check.failed, check.warnings) == counts


def unjudged(at, version=1, run_id="broke off"):
    return replace(
        result(at, run_id, "public.a", None, meaning="all can be judged"),
        expectation=CAN_BE_JUDGED,
        version=version,
    )


UNJUDGED = [
    ("what failed before stays beside it", [KEY, CHECKED, unjudged(minutes(2))], (3, 1, 1)),
    ("also where the target wasn't found", [KEY, CHECKED, unjudged(minutes(2), None)], (3, 1, 1)),
    ("however often", [CHECKED, unjudged(minutes(2)), unjudged(minutes(3), None)], (2, 1, 1)),
    ("nothing else is known", [unjudged(minutes(2))], (1, 0, 1)),
    ("a check ends it", [unjudged(minutes(0)), KEY, CHECKED], (2, 1, 0)),
    ("one that refuses a suite says so beside the rest", [KEY, unjudged(minutes(1)), CHECKED],
     (3, 1, 1)),
    ("a maintenance that judges the rest alone ends it",
     [KEY, CHECKED, unjudged(minutes(2), None), reference(minutes(3), True)], (3, 1, 0)),
    ("who discards rows doesn't", [KEY, unjudged(minutes(2), None), unknown(minutes(3), True)],
     (3, 0, 1)),
    ("nor a maintenance before it", [KEY, reference(minutes(2), True), unjudged(minutes(3))],
     (3, 0, 1)),
]  # fmt: skip


@cases("rows, counts", UNJUDGED)
def test_a_check_that_broke_off_takes_no_verdict_away(book, rows, counts):
    """Nor is it shown once the target was checked, or what failed is older than the window."""
    for _, of_one_check in groupby(rows, attrgetter("at")):
        book.append_all(list(of_one_check))
    for since in (None, minutes(1.5)):
        check = read_latest_checks(book, since, ["public.a"])["public.a"]
        assert (check.expectations, check.failed, check.unknown) == counts
    book.table(ExpectationResult).prune(lambda rows: keep_results(rows, minutes(9)))
    check = read_latest_checks(book, None)["public.a"]
    assert (check.failed, check.unknown) == counts[1:]


def test_a_check_that_broke_off_and_was_tried_again_counts_as_it_ended(book):
    """On the maps as well; what wasn't tried again couldn't be judged."""
    for rows in (
        [unjudged(minutes(0), run_id="day"), unjudged(minutes(0), run_id="lost")],
        [KEY, result(minutes(1), "lost", "public.b")],
    ):
        book.append_all(rows)
    (_, of_b), (_, of_a) = sorted(tables_map(book, minutes(9), 10).rows, reverse=True)
    assert [cell and cell.verdict for cell in of_a] == ["passed", "unknown"]
    assert [cell and cell.verdict for cell in of_b] == [None, "passed"]
    found = dict(expectations_map(book, "public.a", minutes(9), 10).rows)
    assert {name: [cell and cell.verdict for cell in cells] for name, cells in found.items()} == {
        "all can be judged": ["unknown", None], "key (id) is unique": [None, "passed"],
    }  # fmt: skip


def test_who_discards_rows_checks_nothing(book):
    """The table's last check is as old as it was."""
    for rows in (
        [KEY, unknown(minutes(1), False, 1)],
        [replace(unknown(minutes(2), True), run_id="discard")],
    ):
        book.append_all(rows)
    check = read_latest_checks(book, None)["public.a"]
    assert (check.at, check.run_id, check.warnings) == (minutes(1), "day", 0)


def test_a_table_that_nothing_changes_keeps_its_verdict(book):
    """However long ago it was checked: a page that forgets what failed says that all is well."""
    book.append_all([CHECKED, replace(KEY, table_name="public.b")])
    book.append_all([result(minutes(9), "later", "public.b"), reference(minutes(9), True)])
    found = read_latest_checks(book, minutes(5), ["public.a", "public.b", "public.c"])
    expected = {"public.a": "failed", "public.b": "passed"}
    assert {name: check.verdict for name, check in found.items()} == expected


def test_a_check_that_is_tried_again_counts_as_it_ended(book):
    """A cleared run has the same id, and so has another DAG's run of that moment."""
    book.append_all([KEY, CHECKED])
    book.append_all([replace(row, at=minutes(3), success=True) for row in (KEY, CHECKED)])
    book.append_all([reference(minutes(4), None, run_id="day")])
    (check,) = read_checks(book, None, "day")
    assert (check.expectations, check.failed, check.unknown, check.verdict) == (3, 0, 1, "unknown")


def test_own_expectations_may_be_of_one_meaning(book):
    """Earlier results had their type's if they had no notes: none hides another."""
    rows = [
        result(minutes(1), "r", "public.a", success, meaning="expect_x")
        for success in (True, False, True)
    ]
    book.append_all(rows)
    (check,) = read_checks(book, None)
    expected = (read_latest_checks(book, None)["public.a"], 3, 1)
    assert (check, check.expectations, check.failed) == expected
    ((_, (cell,)),) = expectations_map(book, "public.a", minutes(2), 10).rows
    assert cell.verdict == "failed"


def test_a_runs_page_is_what_its_stages_recorded(book, lake):
    """Stages, tables, the slot, the error; and what it left in other tables."""
    before = SlotReading(minutes(0).isoformat(), "reserved", 900, 1 << 20)
    after = SlotReading(minutes(1).isoformat(), "extended", 5, 2 << 20, 77)
    done = RunResult(
        "consume",
        "r",
        "failed",
        landed=LandedChanges(3, "0/10", "0/20", as_of=minutes(0).isoformat(), slot_before=before),
        reported=ReportedLag(5, after),
    )
    done.stages = {
        "land": StageResult("succeeded", 1.5, "1 batches"),
        "apply": StageResult("failed", 2.0),
    }
    done.tables = {"public.a": TableResult(1, 2, completed=4, version=7)}
    done.targets.not_applied, done.warnings = ["public.b"], ["look"]
    done.error = {"class": "ApplyError", "message": "no", "retryable": False}
    read_back = RunResult.from_json(done.to_json())
    assert read_back == done
    ledger = Ledger(Lake(lake))
    read_back.record(
        type(
            "Job",
            (),
            {
                "ledger": ledger,
                "run_type": "scheduled",
                "interval_start": None,
                "interval_end": None,
            },
        )()
    )
    ledger.append(
        TableState(minutes(1), "r", "public.c", 1, "synced", reason="columns changed: added x")
    )
    Decisions(Lake(lake)).add(
        [Decision(minutes(1), "r", "waiting", "public.a", 1, 1, '{"id": "1"}', ["body"])]
    )
    (line,) = read_runs(book)
    expected = (minutes(0), 900, 5, "extended")
    assert (line.as_of, line.lag_before_bytes, line.lag_bytes, line.wal_status) == expected
    assert (line.retained_bytes, line.applied) == (2 << 20, False)
    seen = read_run(book, "consume", "r")
    expected = [("land", "succeeded", 1.5), ("apply", "failed", 2.0)]
    assert [(name, s.status, s.seconds) for name, s in seen.stages.items()] == expected
    assert [(t.table_name, t.is_behind, t.schema) for t in seen.tables] == [
        ("public.b", True, ()),
        ("public.a", False, ()),
        ("public.c", False, ("columns changed: added x",)),
    ]
    assert (seen.tables[1].completed, seen.error["class"]) == (4, "ApplyError")
    assert seen.result["warnings"] == ["look"]
    assert [row.key for row in seen.quarantined] == ['{"id": "1"}']
    assert seen.slot_after.safe_wal_size == 77


def test_rows_that_targets_lack(book):
    """Not what was resolved, completed or of an earlier copy, nor one row twice."""

    def row(n, status, key, table="public.a", generation=2):
        return Decision(minutes(n), "r", status, table, generation, 1, key, ["body"], reason="gone")

    for told in (
        row(1, "waiting", "old copy", generation=1),
        row(2, "waiting", "resolved"),
        row(3, "waiting", "twice"),
        row(4, "resolved", "resolved"),
        row(5, "resolved", "twice"),
        row(6, "waiting", "twice"),
        row(7, "completed", "completed"),
        row(8, "waiting", "b", "public.b"),
        row(9, "waiting", "gone table", "public.x"),
    ):
        Decisions(book.lake).add([told])
    generations = {"public.a": 2, "public.b": 2, "public.c": 1}
    quarantine = Decisions(book.lake)
    assert quarantine.open_counts(generations) == {"public.a": 1, "public.b": 1}
    shown = read_open(book, quarantine.scan_open(generations))
    assert [(row.key, row.reason) for row in shown] == [("twice", "gone"), ("b", "gone")]
    assert quarantine.open_rows(generations) == shown
    first, count = read_of_run(book, "r", 2)
    assert ([row.key for row in first], count) == (["old copy", "resolved"], 9)
    assert Decisions(Lake(book.lake.root + "x")).open_counts(generations) == {}
