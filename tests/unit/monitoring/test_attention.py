"""What deserves attention in a lake's bookkeeping, and how the lake compares with its source."""

import json
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from tests.cases import cases
from tests.support.bookkeeping import append_by_kind, did, minutes, pipeline, result, run
from waldelta.decision_kinds import (
    ACTIONS,
    EXTERNAL_COMMIT,
    ROW,
    WAITING_KINDS,
    DecisionRequest,
    actions_of,
)
from waldelta.jobs.decide import _accept_commits
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    Decision,
    Decisions,
    ExternalCommit,
    Gap,
    Ledger,
    Reconciliation,
    Run,
    TableState,
    TargetCut,
)
from waldelta.lake.ledger.check_records import Reconciliations
from waldelta.monitoring.attention import concerning
from waldelta.monitoring.decisions import Waiting, WaitingItem, read_commits, read_decided
from waldelta.monitoring.overview import LAST_DAY, OVERVIEW, AirflowRuns, read_glance
from waldelta.monitoring.reconciliation_status import read_compared
from waldelta.pipeline.targets.quarantined_rows import STOP


@pytest.fixture
def book(lake):
    return Ledger(Lake(lake))


def glance(book, at, *airflow, scope=LAST_DAY):
    """What is known at that minute, of the last day; a glance at one table knows the same of it."""
    of = (pipeline(book.lake.root), book, minutes(at))
    whole = read_glance(*of, scope, *airflow)
    for line in whole.tables:
        of_table = read_glance(*of, replace(scope, table=line.table_name), *airflow)
        assert (of_table.tables, of_table.waiting) == ((line,), whole.waiting)
        items = (concerning(line.table_name, seen.attention) for seen in (of_table, whole))
        assert next(items) == next(items)
    return whole


def test_what_deserves_attention(book):
    """The worst first; each with the page that tells more."""
    for name, status in (("a", "synced"), ("b", "failed")):
        book.append(TableState(minutes(-9), "sync", f"public.{name}", 1, status))
    gap = Gap(
        minutes(1), "r", "open", "s", "1", 1, "0/1", 16, 32, "SlotLost", "slot 's' is lost",
        "run resync",
    )  # fmt: skip
    book.append(gap)
    why = json.dumps({"error": {"class": "ApplyError", "message": "no room\nat all"}})
    book.append(
        run(
            "r", minutes(2), "failed", retained_bytes=6000 << 20, wal_status="unreserved",
            applied=True, result=why,
        )
    )  # fmt: skip
    book.append_all([result(minutes(2), "r", "public.a", False)])
    Decisions(book.lake).add(
        [Decision(minutes(1), "r", "waiting", "public.a", 1, 1, "{}", ["body"])]
    )
    seen = glance(book, 5)
    assert [
        (item.severity, *(item.page[:1] or filter(None, [item.anchor]))) for item in seen.attention
    ] == [
        ("failed", "run"),
        ("failed", "run"),
        ("failed", "tables"),
        ("failed", "expectations"),
        ("failed",),
        ("warning",),
        ("warning", "waiting"),
    ]
    assert [item.waiting for item in seen.attention if item.kind == "decision"] == ["rows"]
    texts = " | ".join(item.text for item in seen.attention)
    for part in (
        "the slot lost changes: SlotLost",
        "run resync",
        "public.b",
        "unreserved",
        "failed: ApplyError: no room at all |",
        "6 GB",
        "public.a: rows are in quarantine",
    ):
        assert part in texts
    assert seen.verdicts == {"failed": 1}


def test_a_lost_slot_is_named_once_and_without_positions(book):
    """The open gap and the run that failed by it are one; positions are on the run's page."""
    detail = "slot 's' is lost (wal_removed): changes since 4/F0 are gone"
    book.append(
        Gap(minutes(1), "r", "open", "s", "1", 1, "0/1", 16, 32, "SlotLost", detail, "run resync")
    )
    why = json.dumps({"error": {"class": "SlotLost", "message": detail}})
    book.append(run("r", minutes(2), "failed", result=why))
    (told,) = glance(book, 5).attention
    expected = ("the slot lost changes: SlotLost: run resync", ("run", "any", "r"))
    assert (told.text, told.page) == expected


def test_runs_that_failed_the_same_way_are_counted_from_the_latest(book):
    for n, kind in enumerate(("LockHeld", "SchemaChanged", "SchemaChanged", "SchemaChanged")):
        why = json.dumps({"error": {"class": kind, "message": f"message {n}"}})
        book.append(run(f"r{n}", minutes(n), "failed", result=why))
    assert [one.run_id for one in glance(book, 5).alike] == ["r3", "r2", "r1"]
    book.append(run("fine", minutes(5)))
    assert glance(book, 6).alike == ()


def test_what_only_warns_is_told_behind_what_fails(book):
    """Drift, freshness, rows without parents; failed nightly runs; failed comparisons."""
    for name in "abcd":
        book.append(TableState(minutes(-9), "sync", f"public.{name}", 1, "synced"))
    book.append_all([result(minutes(-5000), "r", "public.a", False, "warning")])
    why = json.dumps({"error": {"class": "LockHeld", "message": "busy"}})
    night = Run(minutes(-3000), "night", "maintain", "failed", result=why)
    nights = (night, replace(night, run_id="compared", verb="reconcile"))
    append_by_kind(book, [*nights, run("r", minutes(2))])
    found = [
        (-200, "a", "different"),
        (-150, "b", "failed"),
        (-100, "a", "not compared"),
        (-100, "c", "equal"),
    ]
    found += [(-90, "d", "different"), (-80, "d", "failed"), (-70, "d", "repaired")]
    for at, name, status in found:
        row = Reconciliation(minutes(at), f"{status} at {at}", f"public.{name}", status)
        Reconciliations(book.lake).add([row])
    seen = glance(book, 5, scope=OVERVIEW)
    assert [(item.severity, item.text, item.page) for item in seen.attention] == [
        ("failed",
         ("public.a: different from the source; the latest attempt couldn't compare them again"),
         ("reconciliation",)),
        ("warning", "public.a: expectations failed (warning only)", ("expectations",)),
        ("warning", "public.b: the comparison with the source failed", ("reconciliation",)),
        ("warning", "the latest maintenance failed: LockHeld: busy", ("run", "maintain", "night")),
        ("warning", "the latest reconciliation failed: LockHeld: busy",
         ("run", "reconcile", "compared")),
    ]  # fmt: skip
    for verb in ("maintain", "reconcile"):
        book.append(replace(night, at=minutes(4), run_id="fine", verb=verb, status="succeeded"))
    Reconciliations(book.lake).add(
        [Reconciliation(minutes(4), "r", f"public.{n}", "equal") for n in "ab"]
    )
    (left,) = glance(book, 5).attention
    assert left.page == ("expectations",)


COMPARED = [
    ("nobody has asked", [], "ab", "unknown", ("never compared",), None),
    ("no table", [], "", "unknown", (), None),
    ("all of them", [("a", "equal"), ("b", "repaired")], "ab", "passed", (), 0),
    ("one of them", [("a", "equal")], "ab", "unknown", ("1 never compared",), 0),
    ("only attempts", [("a", "not compared"), ("b", "failed")], "ab", "unknown", ("2 no result",),
     None),
    ("an attempt takes no answer away", [("a", "equal"), ("a", "failed")], "a", "passed", (), 0),
    ("the latest answer counts", [("a", "equal"), ("a", "different"), ("b", "equal")], "ab",
     "failed", ("1 equal",), 2),
    ("of tables that are fed", [("x", "different"), ("a", "equal")], "a", "passed", (), 1),
    ("but for columns", [("a", "equal", "v"), ("b", "equal")], "ab", "unknown",
     ("1 equal, some columns not compared",), 0),
    ("repaired but for columns", [("a", "repaired", "v")], "a", "unknown",
     ("1 equal, some columns not compared",), 0),
    ("different with columns left out", [("a", "different", "v")], "a", "failed", (), None),
    ("with all columns since", [("a", "equal", "v"), ("a", "equal")], "a", "passed", (), 1),
]  # fmt: skip


@cases("found, fed, verdict, told, oldest", COMPARED)
def test_how_the_lake_compares_with_its_source(book, found, fed, verdict, told, oldest):
    """However long ago that was; and it says how old the knowledge is."""
    long_ago = timedelta(days=400)
    rows = [
        Reconciliation(
            minutes(n) - long_ago, f"r{n}", f"public.{name}", status, skipped_columns=left_out
        )
        for n, (name, status, *left_out) in enumerate(found)
    ]
    Reconciliations(book.lake).add(rows)
    compared = read_compared(book, [f"public.{name}" for name in fed])
    assert (compared.verdict, compared.summary, compared.count) == (verdict, told, len(fed))
    # Rows that are added together differ by microseconds.
    begin = compared.oldest and compared.oldest.replace(microsecond=0)
    assert begin == (None if oldest is None else minutes(oldest) - long_ago)


DIFFERENT = [
    ("once", [("a", "different")], 0),
    ("night after night, and a failed attempt", [("a", "different"), ("a", "failed"),
                                                  ("a", "different")], 0),
    ("again after a repair", [("a", "different"), ("a", "repaired"), ("a", "different")], 2),
    ("two tables", [("b", "different"), ("a", "different"), ("b", "equal"), ("b", "different")], 1),
    ("a repaired one", [("a", "different"), ("a", "repaired")], None),
]  # fmt: skip


@cases("found, since", DIFFERENT)
def test_since_when_tables_differ(book, found, since):
    rows = [Reconciliation(minutes(n), "r", f"public.{of}", s) for n, (of, s) in enumerate(found)]
    Reconciliations(book.lake).add(rows)
    # Rows that are added together differ by microseconds.
    begin = read_compared(book, ["public.a", "public.b"]).different_since
    assert (begin and begin.replace(microsecond=0)) == (None if since is None else minutes(since))


def test_a_failed_attempt_at_a_run_that_goes_on_is_no_problem_yet(book):
    """Airflow is about to retry it, or its check follows; once the run is over, it is a problem."""
    book.append(TableState(minutes(-9), "sync", "public.a", 1, "synced"))
    Reconciliations(book.lake).add([Reconciliation(minutes(0), "c", "public.a", "equal")])
    held = {"error": {"class": "LockHeld", "message": "held by pid 7"}, "not_applied": ["public.a"]}
    first = run("r", minutes(2), "failed", result=json.dumps(held), targets=did(1, a=(5, 0, 0)))
    book.append(first)

    during, after = (
        glance(book, 5, AirflowRuns(active=frozenset([active]))) for active in ("r", "other")
    )
    assert [(item.severity, item.kind, item.text) for item in during.attention] == [
        ("warning", "failed_attempt",
         "the latest run goes on; an attempt at it failed: LockHeld: held by pid 7"),
        ("warning", "behind", "public.a: not up to date; changes wait"),
    ]  # fmt: skip
    assert (during.latest_status, after.latest_status) == ("retrying", "failed")
    expected = [("failed", "failed_run"), ("failed", "behind")]
    assert [(item.severity, item.kind) for item in after.attention] == expected
    # Its check comes with its retry.
    assert "unchecked" not in {item.kind for item in during.attention}


def test_a_table_is_unchecked_only_once_its_run_is_over(book):
    """Also where the run's first attempt ended, as on the first visit after the first run."""
    book.append(TableState(minutes(-9), "sync", "public.a", 1, "synced"))
    failed = run("r", minutes(2), "failed", applied=True, targets=did(1, a=(5, 0, 0)))
    book.append(failed)
    for active, found in ((frozenset("r"), False), (frozenset(), True)):
        airflow = AirflowRuns(active=active)
        items = glance(book, 3, airflow).attention
        assert ("unchecked" in {item.kind for item in items}) is found


def test_what_concerns_a_table_counts_no_other_tables(book):
    """Its page has no number of all tables that differ, or of all rows in quarantine."""
    rows = [Reconciliation(minutes(1), "r", f"public.{n}", "different") for n in "ab"]
    Reconciliations(book.lake).add(rows)
    states = [TableState(minutes(0), "s", f"public.{n}", 1, "synced") for n in "abc"]
    book.append_all(states)
    row = Decision(minutes(1), "r", "waiting", "public.a", 1, 1, "1", ["body"])
    Decisions(book.lake).add([row, replace(row, table_name="public.b")])
    attention = glance(book, 5).attention
    assert [item.text for item in concerning("public.a", attention)] == [
        "public.a: different from the source",
        "public.a: rows are in quarantine",
    ]
    assert concerning("public.c", attention) == ()


HEADLINES = [
    ("none was compared", {}, "unknown", "0 of 10 tables", ("never compared",)),
    ("one, and it is equal", {"a": 0}, "unknown", "1 of 10 tables", ("9 never compared",)),
    ("one, and it differs", {"a": None}, "failed", "1 of 10 tables differs", ("9 never compared",)),
    ("two differ", {"a": None, "b": None, "c": 0}, "failed", "2 of 10 tables differ",
     ("1 equal", "7 never compared")),
    ("equal but for rows that an operator discarded", dict.fromkeys("abcdefghi", 0) | {"j": 3},
     "passed", "10 of 10 tables", ("3 rows not compared: quarantined or discarded",)),
]  # fmt: skip


@cases("lacking, verdict, headline, summary", HEADLINES)
def test_the_number_beside_a_verdict_is_what_the_verdict_is_about(
    book, lacking, verdict, headline, summary
):
    """A red count is of tables that differ. ``lacking``: rows left out, None where it differs."""
    rows = [
        Reconciliation(
            minutes(1), "r", f"public.{n}", "different" if m is None else "equal", lacking=m or 0
        )
        for n, m in lacking.items()
    ]
    Reconciliations(book.lake).add(rows)
    compared = read_compared(book, [f"public.{name}" for name in "abcdefghij"])
    assert (compared.verdict, compared.headline, compared.summary) == (verdict, headline, summary)


TOLD_BY_RUNS = [
    ("nothing", {}, None),
    ("what has begun, or was set up or published, since",
     {key: ["public.late"] for key in ("never_copied", "unpublished", "new_tables")}, None),
    ("a table without a copy", {"never_copied": ["public.x"]},
     ("warning", "public.x: published, but never copied")),
    ("a listed table that its publication lacks", {"unpublished": ["public.x"]},
     ("failed", "public.x: in the pipeline file, but not")),
    ("a new table that matches a pattern", {"new_tables": ["public.x"]},
     ("warning", "public.x: matches a pattern, but isn't published: run setup")),
    ("a suite of no table", {"unused_suites": ["/e/x.yml fits no table"]},
     ("warning", "expectation files without a table: /e/x.yml")),
    ("a slot in danger", {"slot_critical": ["slot 's' is lost in 2 hours"]},
     ("failed", "at the start of the latest run: slot 's' is lost")),
]  # fmt: skip


@cases("found, told", TOLD_BY_RUNS)
def test_what_the_latest_run_found_is_told(book, found, told):
    """Also while a later one runs, or failed before it could know."""
    book.append(run("r", minutes(0), result=json.dumps({"stages": {"apply": {}}} | found)))
    book.append(TableState(minutes(1), "sync", "public.late", 1, "synced"))
    Reconciliations(book.lake).add([Reconciliation(minutes(1), "x", "public.late", "equal")])

    def items(at):
        found = glance(book, at).attention
        return [(item.severity, item.text) for item in found]

    attention = items(2)
    idle = glance(book, 2, AirflowRuns(minutes(1))).attention
    assert len(idle) == len([item for item in attention if "latest run" not in item[1]])
    assert len(attention) == (told is not None)
    assert all(severity == told[0] and text.startswith(told[1]) for severity, text in attention)
    book.append(run("down", minutes(3), "failed"))
    book.append(run("now", minutes(4), "running"))
    of_others = [
        [item for item in listed if "latest run" not in item[1]] for listed in (items(5), attention)
    ]
    assert of_others[0] == of_others[1]
    book.append(run("fine", minutes(6), result=json.dumps({"stages": {"apply": {}}})))
    assert items(7) == []


def test_what_was_found_holds_while_nothing_changes(book):
    """Of a source at rest no run is recorded but maintenance's."""
    book.append(
        run(
            "r",
            minutes(0),
            result=json.dumps({"stages": {"apply": {}}, "never_copied": ["public.x"]}),
        )
    )
    book.append(replace(run("night", minutes(5000)), verb="maintain"))
    seen = glance(book, 5005, scope=OVERVIEW)
    assert (seen.latest.run_id, len(seen.attention)) == ("r", 1)


def test_a_listed_table_that_a_look_found_to_have_left_is_told(book):
    """No run need have followed; what the file no longer lists left on purpose."""
    for name in ("public.a", "public.z"):
        book.append(TableState(minutes(0), "sync", name, 1, "synced"))
        book.append(TableState(minutes(1), "look", name, 1, "removed"))
    (told,) = glance(book, 2).attention
    assert (told.severity, told.text.partition(":")[0]) == ("failed", "public.a")
    book.append(TableState(minutes(3), "sync", "public.a", 2, "synced"))
    assert "publication" not in str(glance(book, 4).attention)


def test_who_else_wrote_to_a_target_is_told_until_it_was_compared(book):
    """By version and time of both, and in all columns: a new target's versions begin anew."""
    commits = [ExternalCommit(version, "UPDATE", "ann", minutes(version)) for version in (4, 9)]
    unsaid = [ExternalCommit(3, "UPDATE", "ann")]
    foreign = dict.fromkeys("abceg", commits) | {"d": unsaid, "f": []}
    states = [
        TableState(minutes(10), "r", f"public.{name}", 1, "synced", external_commits=found)
        for name, found in foreign.items()
    ]
    states += [TableState(minutes(11), "r", "public.e", 1, "removed", external_commits=commits)]
    book.append_all(states)
    answers = [
        ("a", 9, 20),
        ("b", 8, 21),
        ("d", 50, 22),
        ("c", 12, 5),
        ("f", 1, 23),
        ("a", 10, 24, "v"),
        ("g", 9, 25, "v"),
    ]
    rows = [
        Reconciliation(
            minutes(at), "x", f"public.{name}", "equal", version=version, skipped_columns=left_out
        )
        for name, version, at, *left_out in sorted(answers, key=lambda answer: answer[2])
    ]
    Reconciliations(book.lake).add(rows)
    (told,) = glance(book, 30).attention
    assert (told.severity, told.page) == ("warning", ("waiting",))
    assert told.text.startswith("public.b, public.c, public.g: another program wrote to the target")
    # An operator agrees to that of b, and to one of g's.
    of_b, of_c, of_g, other = read_commits(book)
    assert [one.table_name[-1] for one in (of_b, of_c, of_g, other)] == ["b", "c", "g", "g"]
    job = SimpleNamespace(lake=book.lake, ledger=book, run_id="accept")
    asked = DecisionRequest("accept", {of_b.id, of_g.id}, None, "a fix", "ann")
    for attempt in (asked, replace(asked, ids={*asked.ids, "0" * 16})):
        left = _accept_commits(job, attempt)
        assert (left and left.ids) == (None if attempt is asked else {"0" * 16})
    (told,) = glance(book, 30).attention
    assert (told.objects, read_commits(book)) == (("public.c", "public.g"), [of_c, other])
    decided = {(one.table_name, one.what, one.by, one.reason) for one in read_decided(book)}
    assert decided == {(f"public.{n}", "accepted", "ann", "a fix") for n in "bg"}


CHECKED_A = replace(result(minutes(8), "night", "public.a"), version=2)
UNCHECKED = [
    ("its check ran out of time", [], True),
    ("so did that of later changes",
     [CHECKED_A, run("more", minutes(9), targets=did(4, a=(0, 1, 0)))], True),
    ("a gate's word is no check", [replace(CHECKED_A, version=None)], True),
    ("a check of what was there before, entered late", [replace(CHECKED_A, version=1)], True),
    ("a run that was killed long ago is none under way",
     [run("lost", minutes(9), "running"), run("r", minutes(10))], True),
    ("while a run is under way", [run("now", minutes(99), "running")], False),
    ("it was checked since", [CHECKED_A], False),
    ("that was tried, and is told", [replace(CHECKED_A, success=None)], False),
    ("later changes that wrote no row",
     [CHECKED_A, run("more", minutes(9), targets=[TargetCut("public.a", 1, 4, skipped=3)])], False),
    ("copied anew since", [TableState(minutes(9), "s", "public.a", 2, "synced")], False),
    ("to be copied again", [TableState(minutes(9), "s", "public.a", 1, "needs_sync")], False),
]  # fmt: skip


@cases("since, told", UNCHECKED)
def test_changes_that_nobody_checked_are_told(book, since, told):
    """A later run checks only what it changed: of others an older verdict would stand."""
    events = [TableState(minutes(-9), "s", f"public.{name}", 1, "synced") for name in "ab"]
    events += [result(minutes(-8), "s", f"public.{name}") for name in "ab"]
    events += [
        run("one", minutes(2), "failed", targets=did(2, a=(1, 0, 0))),
        run("two", minutes(7), targets=did(3, b=(1, 0, 0))),
        replace(result(minutes(7), "two", "public.b"), version=3),
        *since,
    ]
    append_by_kind(book, events)

    def unchecked(of):
        found = read_glance(of, book, minutes(100)).attention
        return [
            (item.severity, item.text, item.page) for item in found if "not checked" in item.text
        ]

    expected = ("warning", "public.a: not checked since the last change", ("expectations",))
    shop = pipeline(book.lake.root)
    assert unchecked(shop) == [expected] * told
    off = shop.quality.model_copy(update={"enabled": False})
    assert unchecked(shop.model_copy(update={"quality": off})) == []


MENDED = [
    ("nothing was done", [], "different"),
    ("copied", [("copying", 2, ""), ("synced", 2, "s")], "copied"),
    ("copied, and its columns changed since",
     [("copying", 2, ""), ("synced", 2, "s"), ("synced", 2, "s")], "copied"),
    ("a copy that failed", [("copying", 2, ""), ("failed", 2, "")], "different"),
    ("a copy under way", [("copying", 2, "")], "different"),
    ("a repair of what drifted", [("copying", 2, "s"), ("synced", 2, "s")], "different"),
    ("a repair after a copy",
     [("copying", 2, ""), ("synced", 2, "s"), ("copying", 3, "t"), ("synced", 3, "t")], "copied"),
    ("its columns changed", [("synced", 1, "s")], "different"),
    ("a copy that nobody knows the beginning of", [("synced", 2, "s")], "different"),
    ("it left the publications", [("removed", 1, "s")], None),
]  # fmt: skip


@cases("states, found", MENDED)
def test_a_copy_takes_a_difference_away_until_it_is_compared_again(book, states, found):
    """A repair of drift or of quarantined rows doesn't: it changes only its rows."""
    before = [(0, "copying", 1, ""), (1, "synced", 1, "s")]
    book.append_all(
        [
            TableState(minutes(n), "r", "public.a", generation, status, snapshot=snapshot)
            for n, status, generation, snapshot in [
                *before,
                *((6 + n, *state) for n, state in enumerate(states)),
            ]
        ]
    )
    Reconciliations(book.lake).add([Reconciliation(minutes(5), "r", "public.a", "different")])
    seen = glance(book, 20)
    assert seen.compared.count == (found is not None)
    assert [kind for kind in ("different", "copied") if getattr(seen.compared, kind)] == (
        [found] if found else []
    )
    told = [
        (item.severity, item.text) for item in seen.attention if item.page == ("reconciliation",)
    ]
    expected = {
        "different": [("failed", "public.a: different from the source")],
        "copied": [("warning", "public.a: differed and was copied since then: compare again")],
    }
    assert told == expected.get(found, [])


def test_a_run_that_was_killed_is_told_by_its_silence(book):
    """It is the latest, and still running for the ledger."""
    book.append(run("r", minutes(2), "running"))
    assert glance(book, 30).attention == ()
    (silent,) = glance(book, 302).attention
    assert "no update from the latest run for 5 hours" in silent.text
    assert silent.page == ("run", "consume", "r")


def test_the_remedy_of_a_failure_is_shown_whole(book):
    """It is at the end of the message: behind many tables, or in a line of its own."""
    remedy = "run the initial sync for each of them again"
    message = "9 of 9 tables not synced:\n" + "\n".join(
        f"  - public.t{n}: {'why ' * 30}" for n in range(9)
    )
    why = json.dumps({"error": {"class": "SyncFailed", "message": f"{message}\n{remedy}"}})
    book.append(TableState(minutes(-9), "sync", "public.a", 1, "synced"))
    book.append(run("r", minutes(2), "failed", result=why))
    texts = [item.text for item in glance(book, 5).attention]
    (text,) = [text for text in texts if "SyncFailed" in text]
    assert "SyncFailed: 9 of 9 tables not synced: - public.t0: why" in text
    assert text.endswith(remedy)
    assert "\n" not in text


def test_drift_that_is_only_reported(book):
    """Until a repair or a copy, whose state has none any more."""
    for n, drift in enumerate(({"later_filters": ["true"]}, {"unrepaired_leaves": [7]}, {})):
        book.append(TableState(minutes(n), "r", "public.a", 1, "synced", **drift))
        found = glance(book, n).attention
        assert [(item.kind, item.objects) for item in found] == (
            [("drift", ("public.a",))] if drift else []
        )


OF_SWITCHED_OFF = [
    # What was recorded of public.a before its change to version 3, or after it; and the verdict.
    ("a failed check before the change", {"version": 2}, {}, None),
    ("a failed check of that version", {"version": 3}, {}, "failed"),
    ("a gate that is gone", {"version": None, "meaning": f"{STOP}m"}, {}, None),
    ("a gate that stops it", {"version": None, "meaning": f"{STOP}m"},
     {"result": json.dumps({"stages": {"apply": {}}, "not_applied": ["public.a"]})}, "failed"),
]  # fmt: skip


@cases("judged, last, verdict", OF_SWITCHED_OFF)
def test_results_that_nothing_renews_are_not_shown(book, judged, last, verdict):
    """Without checks a table would stay red for ever."""
    book.append(TableState(minutes(-9), "s", "public.a", 1, "synced"))
    failed = result(minutes(-8), "s", "public.a", False)
    book.append_all([replace(failed, **judged)])
    book.append(run("one", minutes(2), targets=did(3, a=(1, 0, 0))))
    if last:
        book.append(run("two", minutes(4), "failed", **last))
    shop = pipeline(book.lake.root)
    off = shop.quality.model_copy(update={"enabled": False})
    shop = shop.model_copy(update={"quality": off})
    (line,) = read_glance(shop, book, minutes(100)).tables
    assert (line.check and line.check.verdict) == verdict


# What waits in a target, by kind, and its rows in quarantine; what to decide on.
TO_DECIDE = [
    *((kind, [kind], 0, of.severity, kind) for kind, of in WAITING_KINDS.items() if kind != "rows"),
    ("rows", [], 2, "warning", "rows"),
    ("a gate, and rows", ["gate"], 2, "failed", "gate"),
    ("a skipped message, and rows", ["skipped"], 2, "warning", "rows"),
    ("an answer, and a stopped table", ["answered", "gate"], 0, "failed", "gate"),
]


@cases("waiting, rows, severity, kind", TO_DECIDE)
def test_what_to_decide_on(waiting, rows, severity, kind):
    commit = SimpleNamespace(table_name="t", reason="external commit: version 7 (UPDATE by a)")
    times = {name: minutes(n) for n, name in enumerate(waiting, 1)}
    items = [WaitingItem(name, ("t",), commit, at) for name, at in times.items()]
    line = SimpleNamespace(table_name="t", in_quarantine=rows)
    (item,) = Waiting(items).attention([line])
    assert (item.kind, item.severity, item.waiting) == ("decision", severity, kind)
    assert item.since == min(times.values(), default=None)


def test_every_action_is_of_a_kind_and_each_stored_kind_of_one():
    """A new kind is one entry, which all that lists kinds follows."""
    kinds = WAITING_KINDS.values()
    assert {action for kind in kinds for action in kind.buttons} == set(ACTIONS)
    stored = [(name, kind.status) for kind in kinds for name in kind.stored]
    assert sorted(stored) == sorted(set(stored))
    assert actions_of(EXTERNAL_COMMIT, "waiting") == ("accept",)
    assert actions_of(ROW, "discarded") == ()
