"""Gate verdicts: what a gate found not to be met stands on the pages while it stops its table or
keeps rows out of it.

A table's next check takes its place. But where what failed is gone, nothing may be left to check:
of a row that was deleted before it was merged, or that waits in quarantine no more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from waldelta.errors import WaldeltaError
from waldelta.lake.ledger import Quarantine
from waldelta.lake.ledger.expectation_results import (
    ExpectationResult,
    append_expectation_results,
    expectations_table,
)
from waldelta.lake.ledger.records import now
from waldelta.lake.ledger.table import of_tables
from waldelta.pipeline import Job
from waldelta.pipeline.targets.lifecycle import target_generations

log = logging.getLogger(__name__)

# How the meanings of their results begin.
STOP, QUARANTINE = "gate stop: ", "gate quarantine: "
_KEPT_BACK = "what no gate holds back any more"


def record_passed(job: Job, table: str) -> None:
    """Enter as met what stopped a table whose changes have left its gate nothing to judge, and
    keeps no row out of it.
    """
    with record_or_warn(_KEPT_BACK, [table]):
        unmet = _unmet(job, [table])
        _, still = _keeping(job, unmet)
        _enter(job, [row for row in unmet if row not in still])


def record_let_in(job: Job, tables: Collection[str]) -> None:
    """Enter as met what has kept rows out of these tables, where none of them waits in quarantine
    for it any more.

    What stops a table still does: so may ``gate: quarantine`` (too many rows, or it can't be
    evaluated).
    """
    with record_or_warn(_KEPT_BACK, tables):
        once, still = _keeping(job, _unmet(job, tables))
        _enter(job, [row for row in once if row not in still])


def judged_by_gates(tables: Collection[str]) -> pc.Expression:
    """The results of gates of these tables: they judge what is in no version of a target yet."""
    return of_tables(tables) & pc.field("version").is_null()


def _unmet(job: Job, tables: Collection[str]) -> list[ExpectationResult]:
    """What gates were told last not to meet of these tables, or not to be able to judge."""
    told = expectations_table(job.pipeline.target.root, job.storage_options)
    rows = told.scan(ExpectationResult.schema.names, chosen=judged_by_gates(tables)).to_pylist()
    last = {
        (row["table_name"], row["meaning"]): row
        for row in rows
        if row["meaning"].startswith((STOP, QUARANTINE))
    }
    return [ExpectationResult(**row) for row in last.values() if not row["success"]]


def _keeping(
    job: Job, unmet: Sequence[ExpectationResult]
) -> tuple[list[ExpectationResult], list[ExpectationResult]]:
    """Those of these by which rows were set aside when they were told, and those by which some wait
    in quarantine now.
    """
    asked = [row for row in unmet if row.meaning.startswith(QUARANTINE)]
    if not asked:
        return [], []
    reasons = Quarantine(job.pipeline.target.root, job.storage_options).gate_reasons(
        {row.table_name for row in asked}, target_generations(job.ledger)
    )
    once, still = [], []
    for row in asked:
        # As the gate writes it: "fails <what it is called> (<its place>); …".
        called = f" {row.meaning.removeprefix(QUARANTINE)} ("
        named = [
            found
            for found in reasons
            if found.table_name == row.table_name and called in found.reason
        ]
        once += [row] if any(found.run_id == row.run_id for found in named) else []
        still += [row] if any(found.is_open for found in named) else []
    return once, still


def _enter(job: Job, over: Sequence[ExpectationResult]) -> None:
    at = now()
    rows = [
        replace(
            row,
            at=at,
            run_id=job.run_id,
            success=True,
            observed="nothing waits for it any more",
            unexpected_count=0,
        )
        for row in over
    ]
    append_expectation_results(job.pipeline.target.root, rows, job.storage_options)


@contextmanager
def record_or_warn(what: str, tables: Collection[str]) -> Iterator[None]:
    """The work itself is done: where this can't be entered, a warning in the log says so, and the
    tables' next check tells.
    """
    try:
        yield
    except (WaldeltaError, DeltaError, OSError, pa.ArrowException) as err:
        log.warning(
            "%s isn't told of %s before the next check: %s", what, ", ".join(sorted(tables)), err
        )
