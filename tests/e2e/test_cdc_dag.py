"""The DAGs under real Airflow: set up, copy, apply, be idle, refuse, keep secrets."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from itertools import pairwise
from pathlib import Path

import pytest
from deltalake import DeltaTable

from demo.airflow_client import AirflowError, DagRun
from demo.stack import Stack
from tests.e2e.shop import CDC, NO_COPY, NOT_NEEDED, Shop, change, clear, have_parsed, make_shop
from tests.e2e.shown_secrets import (
    assert_none_shown,
    contains,
    files,
    none_in_arguments,
    readable_by_others,
    spark_configuration,
)
from tests.support.machine_load import times_longer
from tests.support.servers.mail_server import MailServer
from tests.support.servers.serving import serving
from tests.support.waiting import wait_until

CUT_PAGE = Path(__file__).parents[2] / "docs/how-to/read-a-cut.md"
pytestmark = [
    pytest.mark.nightly("needs Airflow's stack for long; test_demo runs the DAGs"),
    pytest.mark.long("starts Airflow's stack; a backfill is four runs of a DAG"),
]


@pytest.fixture(scope="module")
def mails(stack: Stack) -> Iterator[list[EmailMessage]]:
    """What the pipelines' notifiers have sent."""
    with serving(MailServer()) as server, stack.client() as client:
        plain = json.dumps({"disable_ssl": True, "disable_tls": True})
        client.set_connection("mail", "smtp", host="127.0.0.1", port=server.port, extra=plain)
        yield server.mails


@pytest.fixture(scope="module")
def shop(stack: Stack, mails: list[EmailMessage]) -> Iterator[Shop]:
    """Jobs go to the stack's warm Spark Connect server."""
    yield from make_shop(stack, "shop", "waldelta_spark")


@pytest.fixture(scope="module")
def submitted_shop(stack: Stack) -> Iterator[Shop]:
    """After the copy, jobs go through spark-submit, one application per run."""
    with stack.client() as client:
        client.set_connection("submit", "spark", host="local[2]")
    for made in make_shop(stack, "submitted", "waldelta_spark"):
        # Each task reads the pipeline file when it runs.
        file = stack.pipelines / "submitted.yml"
        file.write_text(
            file.read_text().replace("spark_conn_id: waldelta_spark", "spark_conn_id: submit")
        )
        have_parsed(stack)
        yield made


def test_the_initial_sync_copies_what_the_publication_publishes(shop):
    """The targets hold the filtered rows; each has an asset event."""
    assert shop.is_equal()
    sync = shop.runs[1]
    assert sync.states == dict.fromkeys(["sync", "check", "report"], "success") | NOT_NEEDED
    events = shop.client.asset_events(source_dag_id="shop_initial_sync")
    assert {e["name"]: e["extra"]["rows"] for e in events} == {
        "shop/public.orders": 50,
        "shop/public.customers": 10,
    }


def test_a_run_applies_changes_and_emits_an_event_per_changed_target(shop):
    """Only orders changed, so only orders has an event, with counts and LSNs."""
    change(shop)
    with none_in_arguments(secrets_of(shop.stack)):
        run = shop.run("cdc")
    assert run.states == dict.fromkeys(CDC, "success") | NO_COPY
    assert shop.is_equal()
    (event,) = shop.client.asset_events(source_dag_id="shop_cdc", source_run_id=run.run_id)
    assert (event["name"], event["uri"]) == ("shop/public.orders", f"{shop.root}/public/orders")
    extra = event["extra"]
    assert (extra["inserted"], extra["updated"], extra["deleted"], extra["run_id"]) == (
        2,
        0,
        2,
        run.run_id,
    )
    assert extra["start_lsn"] < extra["end_lsn"]


def told(mails: list[EmailMessage], error: str) -> list[EmailMessage]:
    return [mail for mail in mails if mail["subject"] == f"shop {error}"]


def run_red(shop: Shop, failed: str) -> tuple[DagRun, list[str]]:
    """A CDC run of which one stage's task fails; the names of its asset events."""
    run = shop.client.wait(f"{shop.name}_cdc", shop.client.trigger(f"{shop.name}_cdc"))
    shop.runs.append(run)
    assert run.state == "failed"
    assert run.states == dict.fromkeys(CDC, "success") | NO_COPY | {
        failed: "failed",
        "fail_the_run": "failed",
    }
    return run, [
        e["name"]
        for e in shop.client.asset_events(source_dag_id=run.dag_id, source_run_id=run.run_id)
    ]


def test_a_failed_check_takes_the_event_of_its_table_only(shop, mails):
    """The run is red, and the data team alone is notified."""
    suite = (
        "expectations: [{type: expect_column_max_to_be_between, kwargs: {column: id, max_value:"
        " 0}}]"
    )
    (shop.suites / "public.customers.yml").write_text(suite)
    shop.source.execute("update customers set name = name || '!' where id = 1")
    change(shop)
    _, events = run_red(shop, "check")
    (shop.suites / "public.customers.yml").unlink()
    assert events == ["shop/public.orders"]
    assert shop.is_equal()
    run = shop.run("cdc")  # The corrected file is judged, though nothing has changed.
    (event,) = shop.client.asset_events(source_dag_id="shop_cdc", source_run_id=run.run_id)
    assert event["name"] == "shop/public.customers"
    wait_until(lambda: told(mails, "QualityFailed"))
    assert [mail["to"] for mail in told(mails, "QualityFailed")] == ["team@example.org"]


def test_a_table_that_cant_be_applied_doesnt_keep_the_others_from_being_checked(shop):
    """The other carries on when it can."""
    customers = DeltaTable(f"{shop.root}/public/customers")
    customers.alter.set_table_properties({"delta.appendOnly": "true"})
    shop.source.execute("update customers set name = name || '?' where id = 2")
    change(shop)
    run, events = run_red(shop, "apply")
    assert events == ["shop/public.orders"]
    log = shop.client.log("shop_cdc", run.run_id, "check")
    assert "the job is process" in log  # of the fork server, which has imported all that it needs
    assert "checked table=public.orders" in log
    assert "checked table=public.customers" not in log
    assert "public.customers" in shop.client.log("shop_cdc", run.run_id, "apply")
    customers.update_incremental()
    customers.alter.set_table_properties({"delta.appendOnly": "false"})
    change(shop)
    shop.run("cdc")
    assert shop.is_equal()


def test_a_run_without_changes_ends_within_three_seconds_and_moves_the_slot(shop):
    """Without Spark, on a quiet machine of usual speed."""
    shop.run("cdc")
    looks: list[float] = []
    while len(looks) < 5 and min(looks, default=9) >= 3:  # a busy machine gets a few tries
        # More than a WAL file: the slot isn't moved for less. The next tries read it again, because
        # the slot still needs it to decode what follows.
        shop.source.execute(
            f"create table unpublished_{len(looks)} as"
            " select repeat(md5(n::text), 30) note from generate_series(1, 17000) n"
        )
        before = confirmed(shop)
        run = shop.run("cdc")
        assert (
            run.states
            == {"slot_has_changes": "success"} | dict.fromkeys(CDC[1:], "skipped") | NO_COPY
        )
        assert confirmed(shop) > before
        looks += [
            task.seconds / times_longer()
            for task in run.tasks
            if task.task_id == "slot_has_changes"
        ]
    assert min(looks) < 3, (looks, times_longer())


def confirmed(shop: Shop) -> int:
    query = "select confirmed_flush_lsn - '0/0' from pg_replication_slots where slot_name = %s"
    return int(shop.source.execute(query, (f"{shop.name}_cdc",)).fetchone()[0])


def run_over(shop: Shop, start: datetime, end: datetime) -> DagRun:
    """A CDC run of an interval of another day than the backfill's."""
    day = (start + timedelta(days=9)).isoformat()
    body = {
        "logical_date": day,
        "data_interval_start": start.isoformat(),
        "data_interval_end": end.isoformat(),
        "conf": {},
    }
    return shop.client.wait(
        "shop_cdc", shop.client.post("/dags/shop_cdc/dagRuns", body)["dag_run_id"]
    )


def damage(shop: Shop, newest: int) -> None:
    """What an external writer may do: to the first row, and to the newest ones."""
    orders = DeltaTable(f"{shop.root}/public/orders")
    ids = [id_ for (id_,) in shop.target("orders", "id")]
    last = max(ids)
    orders.delete(f"id = {min(ids)}")
    orders.update(updates={"note": "'damaged'"}, predicate=f"id > {last - newest}")


def version(shop: Shop) -> int:
    return DeltaTable(f"{shop.root}/public/orders").version()


def test_backfills_and_cleared_runs_replay(stack, shop):
    """Over intervals with and without runs: what was damaged is repaired once."""
    months = [datetime(2024, month, 1, tzinfo=UTC) for month in (1, 2, 3)]
    shop.run("cdc")
    ordinary = []
    for start, end in pairwise(months):
        change(shop)
        ordinary.append(run_over(shop, start, end))
    assert [run.state for run in ordinary] == ["success", "success"]
    assert shop.is_equal()
    damage(shop, newest=2)
    assert not shop.is_equal()
    path = stack.pipelines / "shop.yml"
    text = path.read_text()
    try:
        path.write_text(text.replace("schedule: null\nm", 'schedule: "0 0 1 * *"\nm'))
        have_parsed(stack)
        wait_until(lambda: shop.client.get("/dags/shop_cdc")["timetable_summary"] == "0 0 1 * *")
        shop.client.backfill(
            "shop_cdc", months[0], months[2] + timedelta(days=1), max_active_runs=1
        )
        replays = dict.fromkeys(CDC, "success") | NO_COPY
        found = [
            shop.client.wait("shop_cdc", r.run_id)
            for r in shop.client.runs("shop_cdc", run_type="backfill")
        ]
        first, second, third = sorted(found, key=lambda run: run.run_id)
        # The schedule has a run of its own by now.
        wait_until(lambda: all(run.finished for run in shop.client.runs("shop_cdc")), 600)
    finally:
        path.write_text(text)
        have_parsed(stack)
    assert (first.states, second.states) == (replays, replays)
    assert (
        third.states
        == {"slot_has_changes": "success"} | dict.fromkeys(CDC[1:], "skipped") | NO_COPY
    )
    assert "nothing to replay: the ledger knows no run" in shop.client.log(
        "shop_cdc", third.run_id, "slot_has_changes"
    )
    assert shop.is_equal()
    events = [
        e for run in (first, second) for e in shop.client.asset_events(source_run_id=run.run_id)
    ]
    assert [(e["name"], e["extra"]["inserted"], e["extra"]["updated"]) for e in events] == [
        ("shop/public.orders", 1, 1), ("shop/public.orders", 0, 1),
    ]  # fmt: skip
    assert "this run replays: WAL " in shop.client.log("shop_cdc", first.run_id, "slot_has_changes")

    damage(shop, newest=1)
    assert clear(shop, ordinary[1]).states == replays
    assert shop.is_equal()


def test_a_broken_file_is_an_import_error_and_the_others_live(stack, shop):
    """The UI's banner names the file and the remedy; the other pipelines' DAGs stay."""
    bad = stack.pipelines / "bad.yml"
    try:
        bad.write_text((stack.pipelines / "shop.yml").read_text().replace("slot:", "slott:"))
        have_parsed(stack)
        # Airflow drops errors of files outside its DAG folder at each refresh, until the next.
        seen: dict[str, str] = {}
        wait_until(lambda: seen.update(shop.client.import_errors()) or str(bad) in seen)
        message = seen[str(bad)]
        assert "source.slott: unknown key: did you mean slot?" in message
        assert {
            "shop_setup",
            "shop_initial_sync",
            "shop_cdc",
            "shop_maintenance",
        } <= shop.client.dag_ids()
    finally:
        bad.unlink()
        have_parsed(stack)
    wait_until(lambda: str(bad) not in shop.client.import_errors())


def test_a_named_error_is_shown_whole_and_not_retried(stack, shop, mails):
    """The log says what to do, and who subscribed to errors is notified."""
    shop.source.execute("alter table customers rename to clients")
    try:
        with pytest.raises(AirflowError, match=r"PreflightFailed: .*public.customers"):
            shop.run("setup")
        run = shop.client.run("shop_setup", shop.client.runs("shop_setup")[0].run_id)
        assert {task.task_id: (task.state, task.try_number) for task in run.tasks} == {
            "preflight": ("failed", 1),
            "set_up": ("upstream_failed", 0),
        }
        wait_until(lambda: told(mails, "PreflightFailed"))
        (mail,) = told(mails, "PreflightFailed")
        assert mail["to"] == "dba@example.org"
        assert "public.customers" in (text := mail.get_body().get_content())
        assert "correct every listed finding" in text
    finally:
        shop.source.execute("alter table clients rename to customers")


@pytest.mark.parametrize("submits", [False, True], ids=["small", "large"])
def test_spark_submit_runs_one_application_whose_stages_the_tasks_show(submitted_shop, submits):
    """Equal targets, an event; only a large run's first task started Spark."""
    shop = submitted_shop
    change(shop)
    if submits:
        shop.source.execute(
            "insert into customers select n, 'many' from generate_series(1001, 1002000) n"
        )
    with none_in_arguments(secrets_of(shop.stack)):
        run = shop.run("cdc")
    assert run.states == dict.fromkeys(CDC, "success") | NO_COPY
    assert shop.is_equal()
    events = shop.client.asset_events(source_dag_id="submitted_cdc", source_run_id=run.run_id)
    inserted = {"submitted/public.orders": 2} | (
        {"submitted/public.customers": 1_001_000} if submits else {}
    )
    assert {event["name"]: event["extra"]["inserted"] for event in events} == inserted
    logs = {task: shop.client.log("submitted_cdc", run.run_id, task) for task in CDC[1:]}
    of_spark = [task for task, log in logs.items() if "Spark-Submit cmd" in log]
    assert of_spark == (["land"] if submits else [])


def test_the_dag_of_a_page_starts_by_an_event_and_reads_a_cut(stack, shop):
    """The DAG of docs/how-to/read-a-cut.md, with the two tables that the shop has."""
    *_, code = re.findall(r"```python\n(.*?)```", CUT_PAGE.read_text(), re.DOTALL)
    code = code.replace("/opt/pipelines/shop.yml", str(stack.pipelines / "shop.yml"))
    code = code.replace("s3a://lake/shop", shop.root).replace(', "public.lines")', ")")
    query = "select orders.id, name from orders join customers on customers.id = customer"
    code = re.sub(r"select customers.name.*?by customers.name", query, code, flags=re.DOTALL)
    (stack.dags / "revenue.py").write_text(code)
    shop.client.wait_for_dags(["revenue"])
    shop.client.unpause("revenue")
    change(shop)
    shop.run("cdc")
    wait_until(lambda: shop.client.runs("revenue"))
    run = shop.client.wait("revenue", shop.client.runs("revenue")[0].run_id)
    assert run.states == {"cut": "success", "report": "success"}, shop.client.log(
        "revenue", run.run_id, "cut"
    )
    rows = shop.client.xcom("revenue", run.run_id, "report")
    # Airflow names the type of each tuple.
    found = [tuple(row["__data__"]) for row in rows]
    assert sorted(found) == shop.wanted(f"{query} where status <> 'draft'")
    (stack.dags / "revenue.py").unlink()


@pytest.mark.parametrize("fixture", ["shop", "submitted_shop"])
def test_the_password_is_nowhere_to_be_seen(stack, fixture, request):
    """Of all runs up to this one: arguments, logs, XComs, templates, files."""
    shop = request.getfixturevalue(fixture)
    secrets = secrets_of(stack)
    change(shop)
    with none_in_arguments(secrets):
        shop.run("cdc")
    for run in shop.runs:
        assert_none_shown(shop.client, run, secrets)
    # Data Docs, the ledger and the targets are below the lake.
    assert [p for p in files(stack.folder / "lake") if contains(p, secrets)] == []
    assert [
        p
        for p in files(stack.folder)
        if readable_by_others(p, stack.folder) and contains(p, secrets)
    ] == []


@pytest.mark.usefixtures("shop")
def test_the_spark_servers_configuration_holds_no_password(stack):
    """What any session of the server can read of its configuration after the jobs have run."""
    assert stack.secrets.source not in spark_configuration(stack.spark.remote)


def secrets_of(stack: Stack) -> set[str]:
    return {stack.secrets.source, stack.secrets.spark_token}
