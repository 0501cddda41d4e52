"""Gate verdicts: a failed gate's result is shown on the pages while it stops its table or excludes
rows.

The table's next check replaces it. If the failing rows are gone, there may be nothing left to
check, for example when a row was deleted before the merge or left quarantine. Then this module
records the result as met.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pyarrow.compute as pc

from waldelta.errors import WaldeltaError
from waldelta.lake import READ_FAILURES
from waldelta.lake.ledger import ExpectationResult, Quarantine, now, of_tables
from waldelta.pipeline import Job
from waldelta.pipeline.targets import target_generations

log = logging.getLogger(__name__)

# The meanings of gate results begin with these.
STOP, QUARANTINE = "gate stop: ", "gate quarantine: "
_KEPT_BACK = "the end of a gate's stop"


def record_passed(job: Job, table: str) -> None:
    """Record a table's stop results as met when its changes left the gate nothing to judge.

    Results that still exclude a row stay.
    """
    with record_or_warn(_KEPT_BACK, [table]):
        unmet = _unmet(job, [table])
        _, still = _keeping(job, unmet)
        _enter(job, [row for row in unmet if row not in still])


def record_let_in(job: Job, tables: Collection[str]) -> None:
    """Record the results that excluded rows from these tables as met when no such row is
    quarantined.

    A result that stops a table stays, including one of ``gate: quarantine`` (too many rows, or the
    expectation can't be evaluated).
    """
    with record_or_warn(_KEPT_BACK, tables):
        once, still = _keeping(job, _unmet(job, tables))
        _enter(job, [row for row in once if row not in still])


def judged_by_gates(tables: Collection[str]) -> pc.Expression:
    """Returns the filter for gate results of these tables: they have no version of a target."""
    return of_tables(tables) & pc.field("version").is_null()


def _unmet(job: Job, tables: Collection[str]) -> list[ExpectationResult]:
    """Returns the latest gate results of these tables that are not met or couldn't be evaluated."""
    last = {
        (row.table_name, row.meaning): row
        for row in job.ledger.table(ExpectationResult).read(judged_by_gates(tables))
        if row.meaning.startswith((STOP, QUARANTINE))
    }
    return [row for row in last.values() if not row.success]


def _keeping(
    job: Job, unmet: Sequence[ExpectationResult]
) -> tuple[list[ExpectationResult], list[ExpectationResult]]:
    """Returns the results that set rows aside when recorded, and those with rows still in
    quarantine.
    """
    asked = [row for row in unmet if row.meaning.startswith(QUARANTINE)]
    if not asked:
        return [], []
    reasons = Quarantine(job.lake).gate_reasons(
        {row.table_name for row in asked}, target_generations(job.ledger)
    )
    once, still = [], []
    for row in asked:
        # The gate writes reasons in this form: "fails <what it is called> (<its place>); …".
        called = f" {row.meaning.removeprefix(QUARANTINE)} ("
        named = [
            (quarantined.run_id, is_open)
            for quarantined, is_open in reasons
            if quarantined.table_name == row.table_name and called in (quarantined.reason or "")
        ]
        once += [row] if any(run_id == row.run_id for run_id, _ in named) else []
        still += [row] if any(is_open for _, is_open in named) else []
    return once, still


def _enter(job: Job, over: Sequence[ExpectationResult]) -> None:
    at = now()
    rows = [
        replace(
            row,
            at=at,
            run_id=job.run_id,
            success=True,
            observed="no changes wait at this gate any more",
            unexpected_count=0,
        )
        for row in over
    ]
    job.ledger.append_all(rows)


@contextmanager
def record_or_warn(what: str, tables: Collection[str]) -> Iterator[None]:
    """Log a warning when recording fails: the work itself is done, and the next check records
    it.
    """
    try:
        yield
    except (WaldeltaError, *READ_FAILURES) as err:
        log.warning(
            "%s can't be recorded for %s before the next check: %s",
            what,
            ", ".join(sorted(tables)),
            err,
        )
