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
from waldelta.lake.ledger import CAN_BE_JUDGED, ExpectationResult, of_tables
from waldelta.pipeline.job import Job
from waldelta.pipeline.targets.watermarks import synced_states

_COLUMNS = ("at", "table_name", "success", "origin", "expectation", "suite")
# Results of checks, of which those of gates and of earlier versions are no part.
_OF_CHECKS = pc.field("version").is_valid() & pc.field("suite").is_valid()
_OWN_UNMET = ((pc.field("origin") == "own") | (pc.field("expectation") == CAN_BE_JUDGED)) & (
    ~pc.field("success") | pc.field("success").is_null()
)


def find_corrected(job: Job, tables: Iterable[str]) -> list[str]:
    """Returns which of these targets failed their last check by expectations edited since.

    Each idle check asks, so the results of a target are read only if an own expectation of it has
    ever failed.
    """
    names, quality = set(tables), job.pipeline.quality
    if quality.suites is None or not quality.enabled or not names:
        return []
    results = job.ledger.table(ExpectationResult)
    unmet = results.scan(["table_name"], None, of_tables(names) & _OF_CHECKS & _OWN_UNMET)
    failed = set(unmet["table_name"].to_pylist())
    if not failed:
        return []
    # Files of expectations are assigned as checks assign them: which table a file is for depends on
    # all synced tables.
    synced = [state.table_name for state in synced_states(job)]
    suites = assign_suites(read_each(Path(quality.suites)), synced)
    rows = results.scan(_COLUMNS, None, of_tables(failed) & _OF_CHECKS)
    return sorted(
        name
        for name in failed
        if (suite := _suite_that_failed(rows.filter(pc.field("table_name") == name))) is not None
        and suite != suites.digest_of(name)
    )


def _suite_that_failed(rows: pa.Table) -> str | None:
    """Returns the digest of own expectations that a target's last check didn't meet, or None."""
    last = rows.filter((pc.field("at") == pc.max(rows["at"])) & _OWN_UNMET)
    return str(last["suite"][0].as_py()) if last.num_rows else None
