"""Corrected expectations: targets that failed their last check by own expectations that have been
edited since.

A run checks the targets that it changes. A target that nobody changes would show the result of the
old expectations until the next full check.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from waldelta.config.expectation_files import assign_suites, read_each
from waldelta.lake.ledger.expectation_results import CAN_BE_JUDGED, ExpectationResult
from waldelta.lake.ledger.table import of_tables
from waldelta.pipeline.job import Job

_COLUMNS = ("at", "table_name", "success", "origin", "expectation", "suite")


def corrected(job: Job, tables: Iterable[str]) -> list[str]:
    """Returns which of these targets failed their last check by expectations edited since.

    The results of all targets are read only when one of them has failed.
    """
    names, quality = set(tables), job.pipeline.quality
    if quality.suites is None or not quality.enabled:
        return []
    results = job.ledger.table(ExpectationResult)
    checks = pc.field("version").is_valid() & pc.field("suite").is_valid()
    unmet = ~pc.field("success") | pc.field("success").is_null()
    failed = results.scan(_COLUMNS, None, of_tables(names) & checks & unmet)
    failed_names = set(failed["table_name"].to_pylist())
    if not failed_names:
        return []
    suites = assign_suites(read_each(Path(quality.suites)), names)
    rows = results.scan(_COLUMNS, None, of_tables(failed_names) & checks)
    return sorted(
        name
        for name in failed_names
        if (suite := _suite_that_failed(rows.filter(pc.field("table_name") == name))) is not None
        and suite != suites.digest_of(name)
    )


def _suite_that_failed(rows: pa.Table) -> str | None:
    """Returns the digest of own expectations that a target's last check didn't meet, or None."""
    last = rows.filter(pc.field("at") == pc.max(rows["at"]))
    by_own = (pc.field("origin") == "own") | (pc.field("expectation") == CAN_BE_JUDGED)
    unmet = ~pc.field("success") | pc.field("success").is_null()
    found = last.filter(by_own & unmet)
    return str(found["suite"][0].as_py()) if found.num_rows else None
