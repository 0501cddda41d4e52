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

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from waldelta.errors import NeedsSync, WaldeltaError
from waldelta.jobs._stages import Stage, all_failures, check_stage, continued, run_stages
from waldelta.lake.ledger import Decisions, TableState, watched_rows
from waldelta.pipeline import Job, RunResult, StageResult, of_table
from waldelta.pipeline.targets import unknown_tables
from waldelta.quantities import counted
from waldelta.spark import Runner
from waldelta.stages.check.gate.quarantined_rows import current_user, rows_to_accept
from waldelta.stages.repair.mend.current_targets import CurrentTargets
from waldelta.stages.repair.repair import Again, repair

log = logging.getLogger(__name__)

_STILL = (
    "row still fails a gate and stays in quarantine",
    "rows still fail a gate and stay in quarantine",
)


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

    def choose(replicated: Mapping[str, TableState]) -> dict[str, Again]:
        generations = {name: state.generation for name, state in replicated.items()}
        lacking = Decisions(job.lake).open_counts(generations)
        return dict.fromkeys(lacking if tables is None else lacking.keys() & set(tables), again)

    return _run(runner, job, "retry", choose, tables)


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
    cause = f"quarantine --accept by {by}: {reason}"

    def choose(replicated: Mapping[str, TableState]) -> dict[str, Again]:
        if not rows:
            quarantine = Decisions(job.lake)
            lacking = [
                name
                for name in tables or ()
                if watched_rows(quarantine.outlines(name, replicated[name].generation))
            ]
            return dict.fromkeys(lacking, Again(cause, by, accepts_all=True, why=reason))
        chosen: dict[str, set[str]] = {}
        for row in rows_to_accept(job, rows, tables):
            chosen.setdefault(row.table_name, set()).add(row.id)
        return {
            name: Again(cause, by, accepted=frozenset(ids), why=reason)
            for name, ids in chosen.items()
        }

    return _run(runner, job, "accept", choose, tables)


def _run(
    runner: Runner,
    job: Job,
    action: str,
    choose: Callable[[Mapping[str, TableState]], Mapping[str, Again]],
    tables: Collection[str] | None,
) -> RunResult:
    """Run the job; ``choose`` selects, from the replicated tables by name, which ones are read
    again and how.

    Raises ConfigError for names in ``tables`` that are not replicated.
    """

    def read_again(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        failures: dict[str, WaldeltaError] = {}
        current = CurrentTargets.read(runner, job, "quarantine", result)
        if unknown := sorted(set(tables or ()) - current.states.keys()):
            raise unknown_tables(unknown, current.states)
        rows: Counter[str] = Counter()
        for name, again in sorted(choose(current.states).items()):
            try:
                rows.update(_read_again(runner, job, result, current, name, again))
            except WaldeltaError as err:
                log.error("table=%s %s", name, err)
                failures[name] = of_table(err, name)
        result.targets.leave_behind(failures)
        corrected, within = counted(rows["corrected"], "row"), counted(len(result.tables), "table")
        stage.detail = f"{corrected} of {within} corrected"
        if failing := rows["kept"]:
            result.warnings.append(counted(failing, *_STILL))
            stage.detail += f"; {result.warnings[-1]}"
        if failures:
            raise all_failures(failures)

    stages: dict[str, Stage] = {action: read_again, "check": check_stage}
    earlier = continued(job, "quarantine", fresh=False)
    result = RunResult("quarantine", job.run_id, tables=earlier.tables, attempt=earlier.attempt)
    return run_stages(runner, job, result, stages, None)


def _read_again(
    runner: Runner, job: Job, result: RunResult, current: CurrentTargets, name: str, again: Again
) -> dict[str, int]:
    """Returns how many rows were corrected and left the quarantine, and how many it kept."""
    try:
        as_copied = current.as_copied(job, name)
        before = Decisions(job.lake).open_counts({name: as_copied.state.generation})
        done = repair(runner, job, as_copied, again)
    except NeedsSync as err:
        raise NeedsSync(
            f"{of_table(err, name)}; its rows stay in quarantine: sync --tables {name} copies it"
            " again"
        ) from err
    done.add_to(result)
    return {"corrected": before.get(name, 0) - done.kept, "kept": done.kept}
