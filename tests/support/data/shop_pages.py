"""The scene of the pages' tests: a shop's lake, with values that would like to be markup, and what
is read off a page."""

import json
from dataclasses import replace
from datetime import timedelta
from html.parser import HTMLParser

from tests.support.bookkeeping import add_reports, release_of, run
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    Decision,
    Decisions,
    ExpectationResult,
    Ledger,
    Reconciliation,
    RowDifference,
    Run,
    SentMessage,
    TableState,
    TargetCut,
    now,
)
from waldelta.lake.ledger.check_records import ColumnDifference, Reconciliations
from waldelta.monitoring.check_results import FailedExpectation
from waldelta.monitoring.stopped_tables import Stopped
from waldelta.stages.check.reports.entries import ReportEntry

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>\u202e\x9b'
OWN = {"sec-fetch-site": "same-origin"}
RUN_ID = "scheduled__2026-01-01T12:00:00+00:00"
PAGES = [
    "",
    "p/shop",
    "p/shop?hours=168",
    "p/shop/runs",
    "p/shop/runs?failed=true",
    "p/shop/expectations",
    "p/shop/reconciliation",
    "p/shop/waiting",
]


def fill(pipeline, run_id=RUN_ID, said="fine"):
    root, at = pipeline.target.root, now()
    ledger = Ledger(Lake(root))
    ledger.append_all(
        [
            TableState(at - timedelta(hours=9), "manual__1", table, 1, status, reason=said)
            for table, status in (("public.orders", "synced"), (f"public.{said}", "failed"))
        ]
    )
    runs = []
    for n, status in ((30, "succeeded"), (20, "failed"), (10, "succeeded")):
        result = {
            "stages": {"land": {"status": "succeeded", "seconds": 1.25, "detail": said}},
            "tables": {"public.orders": {"inserted": 12345, "completed": 7, "version": 3}},
            "warnings": [said],
            "error": {"class": "ApplyError", "message": said} if status == "failed" else None,
        }
        ended = at - timedelta(minutes=n)
        name = run_id if n == 10 else f"{run_id}{n}"
        runs.append(
            Run(
                ended, name, "consume", status, start_lsn=1 << 20, end_lsn=2 << 20, changes=12345,
                seconds=9.0, result=json.dumps(result), as_of=ended - timedelta(minutes=1),
                lag_before_bytes=5 << 20, lag_bytes=0, retained_bytes=16 << 20,
                wal_status="reserved", applied=status == "succeeded",
                targets=[TargetCut("public.orders", 1, 3, inserted=n)],
            )
        )  # fmt: skip
    ledger.append_all(runs)
    ledger.append(
        ExpectationResult(
            at, run_id, "public.orders", "k", said, "critical", "key", False, said, 2, 3, [said]
        )
    )
    row = Decision(
        at, run_id, "waiting", "public.orders", 1, 1, json.dumps({"id": said}), [said],
        json.dumps({said: said, "n": None}), reason=said,
        messages=[SentMessage(1, 2, 1 << 20, 77, said.encode()), SentMessage(1, 3, None, 77)],
    )  # fmt: skip
    gone = replace(row, status="discarded", key=json.dumps({"id": f"{said} 2"}), by=said)
    released = release_of(at, run_id, "public.orders", 1, ("1", 1), 1 << 20, said, said)
    Decisions(ledger.lake).add([row, gone, released])
    odd = RowDifference(
        "different", json.dumps({"id": said}), 1, [ColumnDifference(said, said, None)]
    )
    gone = RowDifference("missing", json.dumps({"id": "2"}))
    Reconciliations(ledger.lake).add(
        [
            Reconciliation(at, run_id, "public.orders", "different", position=1 << 20, version=3,
                           source_rows=12345, target_rows=12344, missing=1, different=1, buckets=64,
                           differing_buckets=2, differences=[odd, gone], by=said),
            Reconciliation(at, run_id, f"public.{said}", "not compared", said),
        ]
    )  # fmt: skip
    run = (at, pipeline.pipeline, run_id)
    entry = ReportEntry(*run, "public.orders", 3, 1, (said,), (), "page")
    add_reports(pipeline, entry, name="a b")
    return pipeline


class Links(HTMLParser):
    """Collects what a page leads to, and whether its tables say what their headers are for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.unscoped = 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.tags.append(tag)
        if "href" in found:
            self.links.append(found["href"])
        self.unscoped += tag == "th" and "scope" not in found


def lacking(text, *parts):
    """Those of the parts that a page doesn't have."""
    return [part for part in parts if part not in text]


def quarantined(n, table="public.orders", reason="fails amount is positive", **more):
    key, sent = json.dumps({"id": str(n)}), json.dumps({"id": str(n), "amount": "-1", "note": None})
    return Decision(
        now(), "r", "waiting", table, 1, 1, key, [], sent, 1 << 20, reason=reason, **more
    )


def stopped(table, waiting=7, released=None, may_pass=True):
    since = now() - timedelta(hours=3)
    examples = (
        {"key": {"id": "7"}, "values": {"amount": "v4lue"}},
        {"key": {}, "values": {"amount": None}},
    )
    unmet = FailedExpectation(
        now(), "r", table, "amount is positive", "critical", "2 rows", since, examples, may_pass
    )
    return Stopped(table, (unmet,), waiting, released)


def leave_behind(shop, *tables: str) -> None:
    """A run that applied the changes of all other tables."""
    result = json.dumps({"not_applied": list(tables)})
    Ledger(Lake(shop.target.root)).append(
        run("late", now(), "failed", applied=False, result=result)
    )
