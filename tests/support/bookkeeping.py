"""Rows of a lake's bookkeeping, for tests of what people are told of it."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import pyarrow as pa
from deltalake import write_deltalake

from waldelta.config import PipelineFile
from waldelta.lake import DeltaTarget, Lake, bookkeeping_uri
from waldelta.lake.ledger import RELEASED, Decision, ExpectationResult, Ledger, Run, TargetCut
from waldelta.lake.ledger.decisions import TABLE
from waldelta.lake.ledger.records import LedgerRow, schema_of
from waldelta.lake.ledger.table import in_order
from waldelta.pipeline.report_folder import CHECKS
from waldelta.stages.check.reports.docs_store import DocsStore
from waldelta.stages.check.reports.entries import ReportEntry

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def minutes(n: float) -> datetime:
    return NOON + timedelta(minutes=n)


def run(run_id: str, at: datetime, status="succeeded", **more) -> Run:
    """A run that ended two minutes after it had read the slot."""
    facts = {
        "seconds": 90.1234567,
        "as_of": at - timedelta(minutes=2),
        "lag_before_bytes": 1000,
        "lag_bytes": 10,
        "applied": status == "succeeded",
        "targets": [],
    }
    return Run(at, run_id, "consume", status, **facts | more)


def did(
    version: int, committed_at: datetime | None = None, **targets: tuple[int, int, int]
) -> list[TargetCut]:
    """What a run did to targets: rows inserted, updated and deleted."""
    return [
        TargetCut(f"public.{n}", 1, version, *counts, commit_ts=committed_at)
        for n, counts in targets.items()
    ]


def result(
    at, run_id, table, success=True, severity="critical", meaning="key (id) is unique", count=0
):
    return ExpectationResult(
        at, run_id, table, "kind", meaning, severity, "key", success, None, count, 1
    )


def append_by_kind(book: Ledger, rows: Sequence[LedgerRow]) -> None:
    """Add rows in one commit of each kind, in their order; those of one moment stay apart."""
    for kind in dict.fromkeys(map(type, rows)):
        alike = [row for row in rows if type(row) is kind]
        is_in_order = len({row.at for row in alike}) == len(alike)
        book.append_all(alike if is_in_order else in_order(alike))


def read_expectation_results(root: str) -> list[ExpectationResult]:
    """All results, oldest first."""
    return Ledger(Lake(root)).table(ExpectationResult).read()


def write_earlier(root: str, rows: Sequence[LedgerRow], lacking: Collection[str]) -> None:
    """Write the table of these rows as a version did that didn't have some of its columns."""
    kind = type(rows[0])
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=schema_of(kind))
    write_deltalake(bookkeeping_uri(root, kind.table), table.drop_columns(list(lacking)))


def pipeline(lake: str) -> PipelineFile:
    source = {
        "conn_id": "c",
        "slot": "s",
        "publications": [{"name": "p", "tables": [{"name": "public.a"}]}],
    }
    return PipelineFile.model_validate(
        {"pipeline": "shop", "source": source, "target": {"root": lake}}
    )


def table_at(uri: str) -> DeltaTarget:
    """The Delta table at a URI or path, of a lake without credentials."""
    return DeltaTarget(Lake(uri), uri)


PAGE = "<h1>page</h1>"


def add_reports(
    pipeline: PipelineFile, *entries: ReportEntry, name: str = "", text: str = PAGE
) -> list[ReportEntry]:
    """List reports of one run of their pipeline, each with a page where its entry names one.

    Returns them as they are listed.
    """
    first = entries[0]
    own = pipeline.model_copy(update={"pipeline": first.pipeline})
    lake = Lake(pipeline.target.root)
    run = DocsStore(own, lake).begin(CHECKS, first.run_id, first.at)
    listed = []
    for entry in entries:
        page = entry.page and run.page_of(run.write_page(name or quote(entry.table, safe=""), text))
        listed.append(replace(entry, page=page))
    run.write_list(listed)
    return listed


def release_of(at, run_id, table, generation, identity, upto, by, why=None, after=0):
    """The ledger's row of a table that an operator released, by (incarnation, timeline)."""
    incarnation, timeline = identity
    return Decision(
        at, run_id, RELEASED, table, generation, 0, "", by=by, kind=TABLE, why=why,
        decided_at=at, incarnation=incarnation, timeline=timeline, after_lsn=after, upto_lsn=upto,
    )  # fmt: skip
