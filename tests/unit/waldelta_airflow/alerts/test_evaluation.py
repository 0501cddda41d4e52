"""What an evaluation finds when something doesn't answer, and which alerts a channel gets."""

import json
from datetime import datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse

from tests.support.bookkeeping import NOON
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, SlotMove, TableState
from waldelta.monitoring.attention import KINDS, Attention, on_names
from waldelta_airflow.alerts.evaluation import FILES, compare, evaluate

AT = NOON + timedelta(hours=1)


class Task:
    """A running task, as far as Airflow answers it: DAGs that exist, and runs by state."""

    def __init__(self, paused: tuple[str, ...] = (), *, knows: bool = True) -> None:
        self.paused, self.knows = paused, knows
        self.next_dagrun: datetime | None = AT

    def get_dag(self, dag_id: str) -> Any:
        if not self.knows:
            missing = ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": 404})
            raise AirflowRuntimeError(missing)
        return SimpleNamespace(is_paused=dag_id in self.paused, next_dagrun=self.next_dagrun)


def dag_run(run_id: str, ended: datetime, run_type: str = "scheduled") -> Any:
    at = ended - timedelta(minutes=1)
    return SimpleNamespace(run_id=run_id, logical_date=at, end_date=ended, run_type=run_type)


@pytest.fixture
def runs(monkeypatch):
    """The latest runs by DAG and state."""
    found: dict[tuple[str, str], Any] = {}
    monkeypatch.setattr(
        "waldelta_airflow.alerts.evaluation._previous",
        lambda dag_id, _, state: found.get((dag_id, state)),
    )
    return found


@pytest.fixture
def shop(write_pipeline, lake, runs, monkeypatch):
    """A pipeline that is set up; nothing listens at its source."""
    write_pipeline("shop")
    Ledger(Lake(f"{lake}/shop")).append(TableState(NOON, "sync", "public.flights", 1, "synced"))
    source = '{"conn_type": "postgres", "host": "127.0.0.1", "port": 1}'
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_SOURCE", source)


def found(task: Task, since: datetime | None = None) -> tuple[set[str], frozenset[str]]:
    files, shop = evaluate(task, AT, since)
    assert (files.pipeline, files.attention, shop.pipeline) == (FILES, (), "shop")
    return {f"{item.kind}: {item.text}" for item in shop.attention}, shop.kinds


def test_a_refused_file(pipelines, runs):
    """It is named, and known again once it is correct."""
    (pipelines / "shop.yml").write_text("pipeline: 7")
    (files,) = evaluate(Task(), AT, None)
    assert [(item.kind, item.objects) for item in files.attention] == [
        ("pipeline_file", ("shop.yml",))
    ]
    assert files.kinds == {"pipeline_file"}


def test_a_source_that_does_not_answer(shop):
    """The slot's state stays unknown."""
    texts, known = found(Task())
    says = "source: the source doesn't answer: SourceUnreachable: "
    assert [text for text in texts if text.startswith(says)]
    assert known == KINDS.keys() - {"slot"}


def test_a_connection_that_is_missing(shop, monkeypatch):
    monkeypatch.delenv("AIRFLOW_CONN_SHOP_SOURCE")
    texts, _ = found(Task())
    assert "source: its slot can't be read: AirflowNotFoundException" in texts


def test_a_lake_that_cannot_be_read(shop, monkeypatch, caplog):
    """Nothing else is known then, and another's message isn't quoted, nor values in the log."""

    value = "".join(["sec", "ret"])  # The log quotes the line that raises, not what it raises.

    def refuse(_):
        raise ValueError(f"invalid literal for int() with base 10: {value!r}")

    monkeypatch.setattr("waldelta_airflow._connections.pipeline_lake", refuse)
    expected = ({"lake: its lake can't be read from here: ValueError"}, frozenset({"lake"}))
    assert found(Task()) == expected
    assert "in refuse" in caplog.text
    assert value not in caplog.text


def test_a_pipeline_that_was_torn_down(shop, lake):
    """Its CDC DAG is paused for good; while it isn't, runs fail, and are reported."""
    book = Ledger(Lake(f"{lake}/shop"))
    for event in ("created", "dropped"):
        book.append(SlotMove(NOON, "run", event, "shop_cdc", "1", 1, "0/1", 1))
    assert found(Task(("shop_cdc",))) == (set(), frozenset(KINDS))
    texts, _ = found(Task())
    assert texts


def test_a_pipeline_that_airflow_does_not_know_yet(shop):
    _, known = found(Task(knows=False))
    assert KINDS.keys() - known == {
        "slot",
        "paused",
        "overdue",
        "failed_dag_run",
        *(
            f"{state}_{dag}"
            for state in ("paused", "overdue")
            for dag in ("maintenance", "reconcile")
        ),
    }


def test_paused_and_overdue(shop):
    """A run is due at the end of its interval, which Airflow doesn't pass on."""
    texts, _ = found(Task(("shop_cdc", "shop_maintenance")))
    assert {text.partition(":")[0] for text in texts} >= {"paused", "paused_maintenance"}
    late = Task()
    for minutes, overdue in ((15, False), (20, True)):
        late.next_dagrun = AT - timedelta(minutes=minutes)
        texts, _ = found(late)
        assert ("overdue: the next run is overdue by 15 minutes" in " ".join(texts)) is overdue
        # Maintenance is due once a day, so that its run of now isn't late.
        assert "overdue_maintenance" not in " ".join(texts)
    late.next_dagrun = AT - timedelta(days=3)
    assert "overdue_maintenance: the next run of the maintenance DAG is overdue" in " ".join(
        found(late)[0]
    )


LATER, EARLIER = AT - timedelta(minutes=1), AT - timedelta(minutes=4)
FAILED_RUNS = {
    "none": ({}, None),
    "the latest failed": ({("shop_cdc", "failed"): dag_run("f", LATER),
                           ("shop_cdc", "success"): dag_run("s", EARLIER)},
                          "failed_dag_run: the latest DAG run failed (f): see its log in Airflow"),
    "a later one succeeded":
     ({("shop_cdc", "failed"): dag_run("f", EARLIER), ("shop_cdc", "success"): dag_run("s", LATER)},
      "failed_run: run f failed, and a later run succeeded"),
    "it failed before the last evaluation":
     ({("shop_cdc", "failed"): dag_run("f", AT - timedelta(minutes=6)),
       ("shop_cdc", "success"): dag_run("s", LATER)}, None),
    "a backfill": ({("shop_cdc", "failed"): dag_run("f", LATER, "backfill")}, None),
    "maintenance": (
        {("shop_maintenance", "failed"): dag_run("f", LATER)},
        "failed_dag_run: the latest run of shop_maintenance failed (f): see its log in Airflow",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("ended", "text"), FAILED_RUNS.values(), ids=FAILED_RUNS)
def test_failed_runs(shop, runs, ended, text):
    runs.update(ended)
    texts, _ = found(Task(), since=AT - timedelta(minutes=5))
    told = {text for text in texts if text.startswith("failed")}
    assert told == ({text} if text else set())


ALL = frozenset(KINDS)
HOUR = timedelta(hours=1)


def copy_failed(*tables: str) -> list[Attention]:
    return list(on_names("failed", "failed_copy", tables, "{}: the copy failed"))


def slot(severity="warning", text="the slot keeps 6 GB") -> list[Attention]:
    return [Attention(severity, "slot", text)]


def failed_run(cause: str) -> list[Attention]:
    return [Attention("failed", "failed_run", f"the latest run failed: {cause}: x", cause=cause)]


# What each evaluation finds, by the hours at which they follow each other; what each one sends.
STORIES = {
    "nothing": ([(0, []), (1, [])], [[], []]),
    "begins, lasts, ends": ([(0, slot()), (1, slot()), (2, [])],
     [["new the slot keeps 6 GB"], [], ["recovered the slot keeps 6 GB"]]),
    "figures change": ([(0, slot()), (1, slot(text="the slot keeps 7 GB"))],
     [["new the slot keeps 6 GB"], []]),
    "again after a day": (
        [(0, slot()), (23, slot()), (24, slot()), (25, slot()), (48, slot())],
        [
            ["new the slot keeps 6 GB"],
            [],
            ["lasting the slot keeps 6 GB"],
            [],
            ["lasting the slot keeps 6 GB"],
        ],
    ),
    "gets worse, and better": ([(0, slot()), (1, slot("failed", "lost soon")), (2, slot())],
     [["new the slot keeps 6 GB"], ["new lost soon"], []]),
    "one more table": (
        [(0, copy_failed("a")), (1, copy_failed("a", "b")), (2, copy_failed("b")), (3, [])],
        [
            ["new a: the copy failed"],
            ["new b: the copy failed"],
            ["recovered a: the copy failed"],
            ["recovered b: the copy failed"],
        ],
    ),
    "many tables": (
        [(0, copy_failed(*"abcde")), (1, [])],
        [
            ["new a, b, c and 2 more: the copy failed"],
            ["recovered a, b, c and 2 more: the copy failed"],
        ],
    ),
    "another error": (
        [(0, failed_run("SlotLost")), (1, failed_run("SlotLost")), (2, failed_run("ApplyError"))],
        [
            ["new the latest run failed: SlotLost: x"],
            [],
            ["new the latest run failed: ApplyError: x"],
        ],
    ),
    "two of one kind": ([(0, [*slot(), *slot("failed", "lost soon")]), (1, slot())],
     [["new the slot keeps 6 GB; lost soon"], []]),
    "comes back": ([(0, slot()), (1, []), (2, slot())],
     [["new the slot keeps 6 GB"], ["recovered the slot keeps 6 GB"], ["new the slot keeps 6 GB"]]),
    "a copy in progress": ([(0, [Attention("warning", "copying", "a: copy in progress")])], [[]]),
}  # fmt: skip


@pytest.mark.parametrize(("found", "sent"), STORIES.values(), ids=STORIES)
def test_what_is_sent(found, sent):
    state: dict = {}
    told = []
    for hour, items in found:
        changes = compare(items, ALL, state, NOON + hour * HOUR)
        told.append([f"{alert.state} {alert.attention.text}" for alert in changes.alerts])
        state = json.loads(json.dumps(changes.entries))
    assert told == sent


def test_since_when():
    """The time of the first alert, also a day later and at the end."""
    state, since = {}, []
    for hour, items in ((0, slot()), (24, slot()), (30, [])):
        changes = compare(items, ALL, state, NOON + hour * HOUR)
        since += [alert.since for alert in changes.alerts]
        state = changes.entries
    assert since == [NOON] * 3


def test_what_could_not_be_evaluated_neither_begins_nor_ends():
    state = compare([*slot(), *copy_failed("a")], ALL, {}, NOON).entries
    lost = [Attention("failed", "lake", "its lake can't be read")]
    unread = compare(lost, frozenset({"lake"}), state, NOON + HOUR)
    assert [alert.attention.kind for alert in unread.alerts] == ["lake"]
    again = compare(slot(), ALL, unread.entries, NOON + 2 * HOUR)
    expected = [("recovered", "failed_copy"), ("recovered", "lake")]
    assert sorted((alert.state, alert.attention.kind) for alert in again.alerts) == expected
    assert again.entries.keys() == {"slot:"}


def test_what_is_stored_stays_small():
    """Airflow warns above 64 KB; a message may be long, and tables many."""
    long = Attention("failed", "failed_run", "x " * 500)
    many = copy_failed(*(f"public.table_{n}" for n in range(100)))
    stored = compare([long, *many], ALL, {}, NOON).entries
    assert len(json.dumps(stored)) < 40_000
