"""What the demo prints at its end, and when it calls that a success."""

import io
import json
from collections import Counter

import httpx
import pytest
from rich.console import Console

from demo.airflow_client import AirflowClient, AirflowError, DagRun, TaskRun
from demo.outcome import DemoOutcome, show
from tests.oracles.compare import Difference
from waldelta.lake import Lake
from waldelta.lake.ledger import Ledger, Run, TargetCut, now

EQUAL = Difference("public.flights", 200, 200, 0, 0)
UNEQUAL = Difference(
    "public.flights", 200, 200, 1, 1, ("missing carrier=AA, flight=1", "extra carrier=AA, flight=1")
)


@pytest.fixture
def ledger(lake):
    """One run, recorded in two steps."""
    made = Ledger(Lake(lake))
    for changes in (0, 9000):
        result = {"changes": changes, "report": "/lake/report.html" if changes else None}
        did = TargetCut(
            "public.flights", 1, 1, inserted=10, updated=20, deleted=5, truncated=bool(changes)
        )
        made.append(
            Run(now(), "run-1", "consume", "running", result=json.dumps(result), targets=[did])
        )
    return made


def outcome(ledger, *differences):
    tasks = tuple(
        TaskRun(name, "success", 1, -1, None, None, seconds)
        for name, seconds in (("land", 1.0), ("apply", 2.0))
    )
    skipped = DagRun("flights_cdc", "run-0", "scheduled", "success", None, None, None, {},
                     (TaskRun("land", "skipped", 0, -1, None, None, None),))  # fmt: skip
    runs = [
        skipped,
        DagRun("flights_cdc", "run-1", "manual", "success", None, None, 4.0, {}, tasks),
    ]
    operations = Counter({("flights", "update"): 60})
    return DemoOutcome(operations, {"load": 1.0}, runs, list(differences), ledger)


def shown(made):
    console = Console(file=io.StringIO(), width=250)
    show(made, console)
    return console.file.getvalue()


def test_equal_targets_are_a_success(ledger):
    """Rows by operation, seconds by stage, changes per second, the verdict, and where to look."""
    made = outcome(ledger, EQUAL)
    text = shown(made)
    assert made.equal
    assert made.applied()["public.flights"] == Counter(
        inserted=20, updated=40, deleted=10, skipped=0, truncated=1
    )
    assert "9,000 in 3.0 s of land and apply: 3,000 changes/s" in text
    assert "0 differences between 1 target and their source" in text
    assert "/lake/report.html" in text
    assert ledger.lake.root in text


def test_any_difference_is_a_failure(ledger):
    """The rows concerned are counted and some are named."""
    made = outcome(ledger, UNEQUAL)
    text = shown(made)
    assert not made.equal
    # One without a comparison proves nothing.
    assert not outcome(ledger).equal
    assert "public.flights: 1 row missing, 1 too many" in text
    assert "extra carrier=AA, flight=1" in text
    assert "2 differences" in text


def test_what_the_api_refuses_and_which_dags_never_come_are_errors_with_the_reason():
    answers = {
        "/auth/token": httpx.Response(201, json={"access_token": "t"}),
        "/api/v2/dags": httpx.Response(200, json={"dags": []}),
        "/api/v2/importErrors": httpx.Response(
            200, json={"import_errors": [{"filename": "shop.yml", "stack_trace": "unknown key"}]}
        ),
        "/api/v2/pools": httpx.Response(404, text="no such pool"),
    }
    client = AirflowClient("http://airflow", "user", "password")
    client._http = httpx.Client(
        base_url=client.url, transport=httpx.MockTransport(lambda asked: answers[asked.url.path])
    )
    with pytest.raises(AirflowError, match=r"no_such_dag; unknown key"):
        client.wait_for_dags(["no_such_dag"], timeout_s=0)
    with pytest.raises(AirflowError, match="HTTP 404: no such pool"):
        client.get("/pools")
