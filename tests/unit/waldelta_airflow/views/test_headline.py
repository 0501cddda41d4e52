"""The state of a pipeline in one sentence, and the one button."""

import re
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from urllib.parse import quote

import pytest

from tests.cases import cases
from tests.support.bookkeeping import NOON, pipeline
from waldelta.lake.ledger import Gap, RowCounts
from waldelta.monitoring.attention import KINDS, Attention
from waldelta.monitoring.check_results import FailedExpectation
from waldelta.monitoring.decisions import Quarantine
from waldelta.monitoring.overview import Glance
from waldelta.monitoring.reconciliation_status import Compared
from waldelta.monitoring.run_history import RunLine
from waldelta_airflow.views._headline import error_sentence, read_headline, setup_steps
from waldelta_airflow.views._installed_pipelines import RUN_NOW, DagState, Schedule
from waldelta_airflow.views._render import folded, run_name
from waldelta_airflow.views._situation import Situation

GLANCE = Glance(True, NOON, (), None, (), RowCounts(), 0, 0, (), (), Compared())
HOUR = timedelta(hours=1)
NEW = replace(GLANCE, is_set_up=False)
PIPELINE = pipeline("file:///lake")
KINDS_OF_DAGS = (*RUN_NOW, "resync")
MAY = {"may_trigger": True, "may_unpause": True}
DAGS = [DagState(kind, f"shop_{kind}", **MAY) for kind in KINDS_OF_DAGS]


def run(hours, status):
    return RunLine(NOON + timedelta(hours=hours), f"r{hours}", "consume", status)


def situation(*attention, glance=GLANCE, dags=DAGS, failed_run=None, has_slot=True, **more):
    schedule = Schedule(failed=failed_run, dags=tuple(dags), **more)
    progress = SimpleNamespace(remaining_seconds=90.0)
    about = (dags, NOON, attention, progress, has_slot)
    return Situation("", PIPELINE, glance, schedule, *about)


def headline(*attention, failed=(), **more):
    return read_headline(situation(*attention, **more), failed)


RUN = "/p/shop/dags/{}/run"
BUTTONS = [
    ("a paused DAG", Attention("failed", "paused", "the CDC DAG is paused"),
     ("Unpause shop_cdc", "/p/shop/dags/cdc/unpause", True)),
    ("never copied", Attention("warning", "never_copied", "t: never copied", objects=("t", "u")),
     ("Copy 2 tables", RUN.format("initial_sync") + "?table=t&table=u", True)),
    ("a difference", Attention("failed", "different", "t: different", ("reconciliation",),
                               objects=("t",)), ("Repair t", "/p/shop/repair/t", True)),
    ("differences", Attention("failed", "different", "t, u: different", ("reconciliation",),
                              objects=("t", "u")), ("Repair 2 tables", "/p/shop/repair", True)),
    ("another writer", Attention("warning", "decision", "t: another", ("waiting",), objects=("t",),
                                 waiting="external_commit"),
     ("Repair t", "/p/shop/repair/t", True)),
    ("rows in quarantine", Attention("warning", "decision", "t: rows", ("waiting",), objects=("t",),
                                     waiting="rows"),
     ("Decide on the rows of t", "/p/shop/waiting#rows", False)),
    ("an answer", Attention("warning", "decision", "t: answered", ("waiting",), objects=("t",),
                            waiting="answered"), ("See what waits", "/p/shop/waiting", False)),
    ("a lost slot", Attention("failed", "data_gap", "lost", ("run", "any", "r")),
     ("Recreate the slot and repair the tables", RUN.format("resync"), True)),
    ("a server that is away", Attention("failed", "failed_run", "failed", ("run", "consume", "r"),
                                        cause="SourceUnreachable"),
     ("Try again now", RUN.format("cdc"), True)),
    ("another error", Attention("failed", "failed_run", "failed", ("run", "consume", "r"),
                                cause="ConfigError"),
     ("Read the error of the run", "/p/shop/run/consume/r", False)),
    ("a run that is silent", Attention("warning", "silent_run", "silent", ("run", "consume", "r")),
     ("Read the log of the run", "/dags/shop_cdc/runs/r", False)),
    ("one table's check", Attention("failed", "failed_expectations", "t: failed",
                                    ("expectations",), objects=("t",)),
     ("See the rows that fail", "/p/shop/table/t#failed", False)),
    ("two tables' checks", Attention("failed", "failed_expectations", "t, u: failed",
                                     ("expectations",), objects=("t", "u")),
     ("See the rows that fail", "/p/shop/expectations", False)),
    ("a run that only Airflow knows", Attention("failed", "failed_dag_run", "failed"),
     ("Read the log of the run", "/dags/shop_cdc/runs/x", False)),
    ("nothing to press", Attention("warning", "lacks", "no pool"), None),
    ("a copy that is automatic", Attention("warning", "needs_copy", "t: waiting", objects=("t",)),
     None),
]  # fmt: skip


@cases("item, expected", BUTTONS)
def test_the_button_is_the_one_that_helps(item, expected):
    step = headline(item, failed_run="x").action
    assert (step and (step.label, step.address, step.is_form)) == expected


def test_a_copy_waits_while_its_dag_is_paused():
    item = Attention("warning", "needs_copy", "t: waiting for a new copy", objects=("t",))
    step = headline(item, dags=_dags(kind="initial_sync", is_paused=True)).action
    assert step.label == "Unpause shop_initial_sync"


def test_when_a_dag_was_paused_isnt_known():
    item = Attention("failed", "paused", "the CDC DAG is paused")
    assert headline(item).since is None


def test_no_button_for_what_may_not_or_would_not_start():
    item = Attention("failed", "paused", "the CDC DAG is paused")
    may_not = [replace(line, may_unpause=False) for line in DAGS]
    for dags in (may_not, []):
        step = headline(item, dags=dags).action
        assert (step.label, step.address) == ("Open shop_cdc in Airflow", "/dags/shop_cdc")
        assert (step.is_airflow, step.is_form) == (True, False)
    drift = Attention("warning", "drift", "t: drifted", ("reconciliation",))
    busy = [replace(dag, run_state="running") for dag in DAGS]
    assert not headline(drift, dags=busy).action.is_form


def test_a_copy_under_way_is_no_warning():
    """A copy without a run that is at it was killed."""
    item = Attention("warning", "copying", "t: copy in progress, or killed", objects=("t",))
    sync = DagState("initial_sync", "shop_initial_sync", run_state="running", **MAY)
    found = headline(item, dags=[sync])
    assert (found.state, found.heals, found.remedy) == (
        "running",
        "yes: the copy ends in about 1 min 30 s",
        "nothing: shop_cdc then applies what changed since",
    )
    assert headline(item).state == "warning"


# The unfinished run of the CDC DAG, the age of the scheduler's last heartbeat in seconds, and what
# an overdue run's page says because of both.
OVERDUE = [
    ("none is active", None, 5, "No run is active: the scheduler works, but created no run of",
     "no", "look at Airflow's import errors and at the limits of shop_cdc"),
    ("the scheduler is down", None, 3600,
     "No run is active: the scheduler's last heartbeat was 1 h ago", "no: no run starts until",
     "restart the scheduler's service"),
    ("there was no scheduler", None, None,
     "No run is active: Airflow's database has no heartbeat of a scheduler",
     "no: no run starts until", "restart the scheduler's service"),
    ("one is at work", "running", 5, "An earlier run is still active",
     "yes: the next run starts as soon as this one ends. No, if", "nothing while"),
    ("one waits", "queued", 5, "A run is queued: the slot's pool or the DAG's limit",
     "yes: the run starts when another one ends", "nothing, or free a place in the pool"),
    ("one waits for the scheduler", "queued", 3600,
     "A run is queued: the scheduler's last heartbeat was 1 h ago", "no: no run starts until",
     "restart the scheduler's service"),
]  # fmt: skip


@cases("state, silent, cause, heals, remedy", OVERDUE)
def test_what_keeps_an_overdue_run_and_what_to_do(state, silent, cause, heals, remedy):
    item = Attention("warning", "overdue", "the next run is overdue by 1 hour: an earlier run …")
    run_id = f"scheduled__{NOON.replace(hour=11).isoformat()}"
    dag = DagState("cdc", "shop_cdc", run_id=run_id, run_state=state, **MAY)
    due = NOON - timedelta(hours=1)
    heartbeat = None if silent is None else NOON - timedelta(seconds=silent)
    schedule = {"next_run_at": due, "scheduler_at": heartbeat}
    about = situation(item, dags=[dag], **schedule)
    found = read_headline(about)
    assert (found.sentence, found.since) == ("The next run is overdue by 1 hour", due)
    assert found.cause.startswith(cause)
    assert found.heals.startswith(heals)
    assert found.remedy.startswith(remedy)
    label = found.action and (found.action.label, found.action.address)
    log = ("Read the log of the run", f"/dags/shop_cdc/runs/{quote(run_id, safe='')}")
    works = silent == 5
    dag_page = ("Open shop_cdc in Airflow", "/dags/shop_cdc")
    # What a person does then is outside of Airflow.
    assert label == ((log if state else dag_page) if works else None)
    assert found.command == ""
    assert about.schedule.under_way == ((dag,) if state else ())


@pytest.mark.parametrize("kind", ["maintenance", "reconcile"])
def test_an_overdue_run_of_another_dag_has_the_same_causes(kind):
    item = Attention("warning", f"overdue_{kind}", f"the next run of the {kind} DAG is overdue")
    for state, silent, cause, heals, remedy in (case[1:] for case in OVERDUE):
        dag = DagState(kind, f"shop_{kind}", run_id="r", run_state=state, **MAY)
        heartbeat = None if silent is None else NOON - timedelta(seconds=silent)
        found = headline(item, dags=[dag], scheduler_at=heartbeat)
        assert found.cause.startswith(cause)
        assert found.heals.startswith(heals)
        assert found.remedy.startswith(remedy.replace("shop_cdc", f"shop_{kind}"))


# Everything that ends without a person, because a run follows.
BY_ITSELF = [
    *((kind, Attention("failed", kind, "t: x", objects=("t",))) for kind in KINDS),
    ("an error that a retry ends",
     Attention("failed", "failed_run", "failed: x", cause="SourceUnreachable")),
    *((what, Attention("failed", "decision", "t: x", objects=("t",), waiting=what))
      for what in ("answered", "released", "rows")),
]  # fmt: skip


@cases("item", BY_ITSELF)
def test_nothing_heals_by_itself_while_the_scheduler_is_down(item):
    slot = replace(run(1, "succeeded"), lag_bytes=5 << 30, retained_bytes=6 << 30)
    glance = replace(GLANCE, runs=(slot,), latest=slot)
    due = NOON + timedelta(minutes=3)
    situations = [
        situation(item, glance=glance, next_run_at=due, scheduler_at=NOON - timedelta(seconds=age))
        for age in (5, 3600)
    ]
    fine, down = map(read_headline, situations)
    heals = fine.heals.startswith(("yes", "only"))
    if heals or item.kind.startswith("overdue"):
        assert down.heals.startswith("no: no run starts until the scheduler works")
        assert down.remedy.startswith("restart the scheduler's service")
    else:
        assert (down.heals, down.remedy) == (fine.heals, fine.remedy)
    texts = ("the next run starts", "the scheduler is down; the next run is due")
    assert [about.next_run() for about in situations] == [(text, due) for text in texts]


WAITS = [
    ("a stopped table", "gate", "stopped by a gate (m), 7 changes wait",
     "no: its changes", "correct the rows at the source, or release"),
    ("a released table", "released",
     "stopped by a gate (m), 7 changes wait; released by ann, for the next run",
     "yes: the next run merges", "nothing"),
    ("a message", "message", "message 1 can't be read: changes wait",
     "no", "skip the message"),
    ("a change of the source", "schema_change", "a schema change waits: dropped c",
     "no", "agree to the change"),
    ("an answer", "answered", "answered for the next run to follow (agreed): dropped c",
     "yes", "nothing"),
    ("another writer", "external_commit", "another program wrote to the target",
     "no", "compare and repair"),
    ("rows", "rows", "rows are in quarantine", "only where", "retry, accept or discard"),
]  # fmt: skip


@cases("waiting, text, heals, remedy", WAITS)
def test_what_to_do_about_what_waits(waiting, text, heals, remedy):
    item = Attention(
        "failed", "decision", f"t: {text}", ("waiting",), objects=("t",), waiting=waiting
    )
    found = headline(item)
    assert found.heals.startswith(heals)
    assert found.remedy.startswith(remedy)


REASONS = [
    ("an expectation", ["fails amount isn't negative (a.yml)"],
     "These rows fail the expectation: amount isn't negative (a.yml)"),
    ("two of them", ["fails a", "fails b"], "These rows fail the expectation: a, b"),
    ("missing values", ["the source has no such row", "fails a"],
     "Reason: the source has no such row, fails a"),
    ("none", [], ""),
]  # fmt: skip


@cases("reasons, cause", REASONS)
def test_why_rows_are_in_quarantine(reasons, cause):
    item = Attention("warning", "decision", "t: rows", objects=("t",), waiting="rows")
    quarantine = {"t": Quarantine(reasons, NOON), "u": Quarantine(["another"], NOON - HOUR)}
    found = read_headline(replace(situation(item), quarantine=quarantine))
    assert (found.cause, found.since) == (cause, NOON)


NEXT = [
    ("a schedule", {"next_run_at": NOON + timedelta(minutes=3)}, "the next run starts", 3),
    ("one that is late", {"next_run_at": NOON - timedelta(minutes=3)}, "the next run was due", -3),
    ("paused", {"is_paused": True}, "no run starts: shop_cdc is paused", None),
    ("by hand", {}, "nothing: runs are started by hand", None),
    ("paused before the first copy", {"is_paused": True, "glance": NEW},
     "no run starts: shop_cdc is paused until step 3", None),
    ("unpaused before it", {"next_run_at": NOON + timedelta(minutes=3), "glance": NEW},
     "the next run starts", 3),
    ("unknown to Airflow", {"glance": NEW, "dags": []}, "", None),
]  # fmt: skip


@cases("schedule, text, minutes", NEXT)
def test_what_the_schedule_does_next(schedule, text, minutes):
    at = None if minutes is None else NOON + timedelta(minutes=minutes)
    assert situation(**schedule).next_run() == (text, at)


def test_each_kind_says_what_to_do():
    """And where a state doesn't end by itself, that it doesn't."""
    for kind in KINDS:
        item = Attention("failed", kind, "x")
        assert headline(item).remedy, kind
    assert headline(Attention("failed", "failed_copy", "x")).heals.startswith("no")


@pytest.mark.parametrize(
    "kind", ["copied_since", "drift", "never_copied", "new_tables", "unpublished"]
)
def test_what_to_do_begins_with_what_the_button_starts(kind):
    found = headline(Attention("warning", kind, "t: x", objects=("t",)))
    begins = found.action.address.partition("/run")[0].rpartition("/")[2]
    assert re.search(r"shop_(\w+)", found.remedy)[1] == begins


def test_a_failure_began_with_the_first_run_that_failed_and_says_its_cause():
    glance = replace(GLANCE, runs=(run(4, "failed"), run(3, "failed"), run(2, "succeeded")))
    text = "the latest run failed: SchemaChanged: public.t: column a changed"
    found = headline(Attention("failed", "failed_run", text, cause="SchemaChanged"), glance=glance)
    assert found.sentence == "The latest run failed"
    assert found.cause == "SchemaChanged: public.t: column a changed"
    assert found.since == NOON + timedelta(hours=3)
    assert found.heals == "no: the next run fails the same way"


HEALS = [
    ("an error that stays, once", "SchemaChanged", 1, "no: the next run fails the same way"),
    ("again and again", "SchemaChanged", 4, "no: it failed 4 times the same way"),
    ("a server that is away", "SourceUnreachable", 3,
     "yes, once the cause is gone; so far it failed 3 times the same way"),
    ("an error of another library, once", "OSError", 1, ""),
    ("and again", "OSError", 2, "not likely: it failed 2 times the same way"),
]  # fmt: skip


@cases("cause, times, expected", HEALS)
def test_whether_a_failure_heals_by_itself(cause, times, expected):
    alike = tuple(run(9 - n, "failed") for n in range(times))
    item = Attention("failed", "failed_run", f"the latest run failed: {cause}: why", cause=cause)
    found = headline(item, glance=replace(GLANCE, alike=alike))
    assert (found.heals, found.since) == (expected, alike[-1].at)


WAL = [
    (
        "all of it is read",
        2048,
        "Only 2 kB of it is unread",
        "on the source's primary, find the transaction with the command",
        None,
    ),
    ("it is unread", 5 << 30, "5 GB of it is unread", "run the CDC DAG", "Read the WAL now"),
]


@cases("unread, cause, remedy, label", WAL)
def test_what_keeps_the_wal_and_what_to_do(unread, cause, remedy, label):
    line = replace(run(1, "succeeded"), lag_bytes=unread, retained_bytes=6 << 30)
    slot = replace(line, wal_status="reserved")
    item = Attention("warning", "slot", "the slot keeps 6 GB of WAL")
    found = headline(item, glance=replace(GLANCE, runs=(slot,), latest=slot))
    assert found.cause.startswith(cause)
    assert found.remedy.startswith(remedy)
    assert found.heals.startswith("yes, once")
    assert (found.action and found.action.label) == label
    # Only a transaction that has written keeps WAL.
    is_read = "where backend_xid is not null" in found.command
    assert (is_read, bool(found.joint)) == 2 * (label is None,)


SINCE = [
    ("below it, then above", [6, 6, 4], (2, False)),
    ("above it in all known runs", [6, 6, 6], (1, True)),
    ("above it just now", [6, 4, 6], (3, False)),
]


@cases("kept, expected", SINCE)
def test_since_when_the_slot_keeps_more_than_its_limit(kept, expected):
    runs = [replace(run(3 - n, "succeeded"), retained_bytes=g << 30) for n, g in enumerate(kept)]
    item = Attention("warning", "slot", "the slot keeps 6 GB of WAL")
    found = headline(item, glance=replace(GLANCE, runs=tuple(runs), latest=runs[0]))
    assert ((found.since - NOON) / timedelta(hours=1), found.is_older) == expected


def test_a_slot_is_lost_before_a_run_records_the_gap():
    lost = replace(run(1, "succeeded"), wal_status="lost", retained_bytes=6 << 30, lag_bytes=0)
    item = Attention("failed", "slot", "slot s: its wal_status is lost")
    found = headline(item, glance=replace(GLANCE, runs=(lost,), latest=lost))
    assert (found.action.address, found.action.needs_reason) == (RUN.format("resync"), True)
    assert (found.remedy, found.command) == ("run shop_resync", "")


def test_a_lost_slot_names_its_cause_and_the_way_back():
    gap = Gap(NOON, "r", "open", "s", "1", 1, "0/1", 1, 2, "SlotLost", "s is lost", "run resync")
    item = Attention("failed", "data_gap", "the slot lost changes: SlotLost: run resync",
                     ("run", "any", "r"), cause="SlotLost")  # fmt: skip
    found = headline(item, glance=replace(GLANCE, gaps=(gap,)))
    assert (found.sentence, found.cause, found.remedy, found.since) == (
        "The slot lost changes", "SlotLost: s is lost", "run resync", NOON,
    )  # fmt: skip


def test_a_failed_expectation_is_named_by_its_meaning_and_its_rows():
    item = Attention("failed", "failed_expectations", "t: critical expectations failed",
                     ("expectations",), objects=("t",))  # fmt: skip
    failed = [
        FailedExpectation(NOON, "r", "t", meaning, "critical", finding, NOON - hours * HOUR)
        for meaning, finding, hours in (
            ("amount isn't negative", "3 rows", 2),
            ("key is unique", "not met", 3),
        )
    ]
    found = headline(item, failed=failed)
    assert found.sentence == "t: amount isn't negative: 3 rows fail"
    assert found.cause == "t: key is unique: not met"
    assert found.since == NOON - 3 * HOUR


def test_a_runs_headline_is_a_sentence_with_what_failed():
    message = "1 critical expectation failed (the changes are applied and safe):\n  - t: a: 1 row"
    error = {"class": "QualityFailed", "message": message}
    failed = [FailedExpectation(NOON, "r", "t", "a", "critical", "1 row", NOON)]
    cause = "QualityFailed: 1 critical expectation failed (the changes are applied and safe)"
    assert error_sentence(error, failed) == ("t: a: 1 row fails", cause)
    sentence, _ = error_sentence(error, [])
    assert sentence.endswith("applied and safe): t: a: 1 row")
    assert error_sentence({"class": "OSError"}, []) == ("OSError", "OSError")


def test_a_remedy_names_no_file_of_the_repository():
    for kind in KINDS:
        assert "docs/" not in headline(Attention("warning", kind, "x")).remedy


def test_a_pipeline_without_trouble():
    assert headline().state == "ok"
    paused = [replace(dag, is_paused=True) for dag in DAGS]
    for dags, button in ((DAGS, "run"), (paused, "unpause")):
        empty = headline(glance=NEW, dags=dags, has_slot=False)
        assert (empty.state, empty.action.address) == ("unknown", f"/p/shop/dags/setup/{button}")


def _dags(run_state=None, kind="setup", *, is_paused=False):
    state = DagState(kind, f"shop_{kind}", is_paused, "r", run_state, **MAY)
    return [dag if dag.kind != kind else state for dag in DAGS]


# What Airflow and the ledger know of a pipeline without tables: its steps, how the next is done.
STEPS = [
    ("nothing done", DAGS, False, ["next", "after shop_setup", "after shop_setup"],
     "run shop_setup"),
    ("paused", _dags(is_paused=True), False, ["next", "after shop_setup", "after shop_setup"],
     "unpause shop_setup and run shop_setup"),
    ("at work", _dags("running"), False, ["running", "after shop_setup", "after shop_setup"],
     "nothing: the next step"),
    ("failed", _dags("failed"), False, ["failed", "after shop_setup", "after shop_setup"],
     "read the log of its run"),
    ("set up", _dags("success"), False, ["done", "next", "after shop_initial_sync"],
     "run shop_initial_sync"),
    ("set up on a command line", [], True, ["done", "next", "after shop_initial_sync"],
     "wait until Airflow has read shop.yml"),
    ("for a reader", [replace(dag, may_trigger=False, may_unpause=False) for dag in DAGS], True,
     ["done", "next", "after shop_initial_sync"], "ask a user who may trigger it: run"),
]  # fmt: skip


@cases("dags, has_slot, words, how", STEPS)
def test_the_steps_say_what_is_done_and_what_is_next(dags, has_slot, words, how):
    steps = setup_steps(situation(glance=NEW, dags=dags, has_slot=has_slot))
    assert [step.word for step in steps.values()] == words
    found = headline(glance=NEW, dags=dags, has_slot=has_slot)
    assert found.remedy.startswith(how)
    verb = {"running": "is running", "failed": "failed"}
    number, word = next((n, w) for n, w in enumerate(words, 1) if w in ("next", *verb))
    text = f"Not set up yet. Step {number} of 3 {verb.get(word, 'is next')}: "
    assert found.sentence.startswith(text)
    assert (found.command == "waldelta sync shop.yml") is (dags == [])


def test_a_reader_of_a_part_of_the_dags_asks_who_may_trigger_the_others():
    about = situation(glance=NEW)
    about = replace(about, dags=[one for one in DAGS if one.kind != "initial_sync"])
    found = read_headline(about)
    assert found.remedy == "ask a user who may trigger shop_initial_sync"
    assert found.command == ""


def test_a_difference_has_its_cause_and_why_the_run_succeeded():
    """What other programs wrote stands with the attention for their commits."""
    latest = run(1, "succeeded")
    glance = replace(GLANCE, latest=latest, compared=Compared(different_since=NOON))
    differs = Attention("failed", "different", "t: different", ("reconciliation",), objects=("t",))
    commit = Attention("warning", "decision", "t: another program wrote", objects=("t",),
                       details=(("t", "version 17 (UPDATE by a)"),))  # fmt: skip
    found = headline(differs, commit, glance=glance)
    assert found.cause == "Another program wrote version 17 (UPDATE by a)"
    assert found.joint.striptags().startswith("the reconciliation today 12:00 found the difference")
    # The write came before the reconciliation that found it.
    assert (found.since, found.is_older) == (NOON, True)
    assert not headline(differs, glance=glance).is_older
    assert headline(differs).cause == ""
    assert headline(differs, glance=replace(glance, latest=run(1, "failed"))).joint == ""


NAMES = [
    ("today", "scheduled__2026-01-01T09:30:00+00:00", "today 09:30"),
    ("in another zone", "scheduled__2026-01-01T09:30:00+02:00", "today 07:30"),
    ("yesterday, by hand", "manual__2025-12-31T23:00:00.5+00:00", "yesterday 23:00, manual"),
    ("earlier, repeated", "backfill__2025-12-24T23:00:00+00:00", "24 Dec 23:00, backfill"),
    ("another id", "nightly <1>", "nightly <1>"),
]


@cases("run_id, name", NAMES)
def test_a_run_has_a_short_name(run_id, name):
    at = NOON.replace(year=2026, month=1, day=1)
    markup = run_name(run_id, at)
    assert markup.striptags() == name
    assert "<1>" not in markup


def test_a_long_error_is_folded_behind_its_first_sentence():
    assert folded("short: do this") == ("short: do this", "")
    long = "The slot is lost. " + "x" * 300
    assert folded(long) == ("The slot is lost.", long)
    first, rest = folded("word " * 80)
    assert (len(first) < 170, first.endswith(" …"), rest) == (True, True, "word " * 80)
