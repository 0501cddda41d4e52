"""Job quarantine, as retry or accept: reads quarantined rows from the source again and repairs
their targets, or records why that isn't possible.

::

    retry, accept  quarantined rows -> read again -> targets   (stages.repair)
    check          targets -> expectations -> Data Docs        (stages.check)

A retry applies the gates again, and rows that fail stay in quarantine with their current values.
Accepted rows are written whatever a gate says: an operator's decision, recorded with who and why.
Both work like a repair, because the source's current row is exact only at a snapshot from which the
stream continues.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from waldelta.jobs._shared_stages import check_stage
from waldelta.jobs._stages import Stage, all_failures, continued, run_stages
from waldelta.lake.ledger import Quarantine, TableState, watched_rows
from waldelta.pipeline import Job, RunResult, StageResult
from waldelta.spark import Runner
from waldelta.stages.check.gate.quarantined_rows import current_user, rows_to_accept
from waldelta.stages.repair import read_quarantined_again
from waldelta.stages.repair.repair import Again


def run_retry(
    runner: Runner,
    job: Job,
    tables: Collection[str] | None = None,
    by: str | None = None,
    reason: str | None = None,
) -> RunResult:
    """Read the quarantined rows of all targets, or of these, again, and apply their gates again.

    A table that can't be repaired doesn't stop the others: its rows stay in quarantine, and the
    failure names it. The others are checked as in a run, including those that an earlier attempt at
    this run repaired. ``by`` is the operator, by default the user of this process; the ledger, with
    ``reason``, and the repaired rows record it. Raises RunFailed.
    """
    by = by or current_user()
    again = Again(f"quarantine --retry by {by}" + (f": {reason}" if reason else ""), by)

    def wanted(replicated: Mapping[str, TableState]) -> dict[str, Again]:
        generations = {name: state.generation for name, state in replicated.items()}
        lacking = Quarantine(job.lake).open_counts(generations)
        return dict.fromkeys(lacking if tables is None else lacking.keys() & set(tables), again)

    return _run(runner, job, "retry", wanted, tables)


def run_accept(
    runner: Runner,
    job: Job,
    rows: Collection[str],
    tables: Collection[str] | None,
    by: str | None,
    reason: str,
) -> RunResult:
    """Read these quarantined rows (ids), or all of these tables, again, and write them without
    gates.

    The other quarantined rows of these tables are judged again, as by a retry. Raises RunFailed,
    caused by a ConfigError for rows that aren't in quarantine.
    """
    by = by or current_user()
    told = f"quarantine --accept by {by}: {reason}"

    def wanted(replicated: Mapping[str, TableState]) -> dict[str, Again]:
        if not rows:
            quarantine = Quarantine(job.lake)
            lacking = [
                name
                for name in tables or ()
                if watched_rows(quarantine.outlines(name, replicated[name].generation))
            ]
            return dict.fromkeys(lacking, Again(told, by, accepts_all=True, why=reason))
        chosen: dict[str, set[str]] = {}
        for row in rows_to_accept(job, rows, tables):
            chosen.setdefault(row.table_name, set()).add(row.id)
        return {
            name: Again(told, by, accepted=frozenset(ids), why=reason)
            for name, ids in chosen.items()
        }

    return _run(runner, job, "accept", wanted, tables)


def _run(
    runner: Runner,
    job: Job,
    action: str,
    wanted: Callable[[Mapping[str, TableState]], Mapping[str, Again]],
    tables: Collection[str] | None,
) -> RunResult:
    def read_again(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        failures = read_quarantined_again(runner, job, result, stage, wanted, tables)
        if failures:
            raise all_failures(failures)

    stages: dict[str, Stage] = {action: read_again, "check": check_stage}
    earlier = continued(job, "quarantine", fresh=False)
    result = RunResult("quarantine", job.run_id, tables=earlier.tables, attempt=earlier.attempt)
    return run_stages(runner, job, result, stages, None)
