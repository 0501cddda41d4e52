"""Job decide: carries out an operator's decision on rows, tables and messages that wait.

::

    retry, accept           quarantined rows -> read again -> targets   (stages.repair)
    check                   targets -> expectations -> Data Docs        (stages.check)
    discard, release, skip, agree, refuse   decision -> ledger

A retry applies the gates again, and rows that fail stay in quarantine with their current values.
Accepted rows are written whatever a gate says. Both work like a repair, because the source's
current row is exact only at a snapshot from which the stream continues. The next run honours what
was discarded, released or skipped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from waldelta.decision_kinds import DecisionRequest
from waldelta.errors import NeedsSync, WaldeltaError
from waldelta.jobs._stages import Stage, all_failures, check_stage, resume_result, run_stages
from waldelta.lake.ledger import ACCEPTED, Decisions, TableState, now, watched_rows
from waldelta.lake.ledger.decisions import AGREED, REFUSED
from waldelta.lsn import Lsn
from waldelta.monitoring.decisions import read_commits
from waldelta.monitoring.stopped_tables import check_stopped
from waldelta.pipeline import Job, RunResult, StageResult, of_table
from waldelta.pipeline.drift import answer_questions
from waldelta.pipeline.targets import unknown_tables
from waldelta.pipeline.targets.quarantined_rows import (
    current_user,
    discard_quarantined,
    release_tables,
    rows_to_accept,
)
from waldelta.pipeline.targets.unreadable_messages import skip_messages
from waldelta.quantities import counted
from waldelta.spark import Runner
from waldelta.stages.repair.mend.current_targets import CurrentTargets
from waldelta.stages.repair.repair import Again, repair

log = logging.getLogger(__name__)

_STILL = (
    "row still fails a gate and stays in quarantine",
    "rows still fail a gate and stay in quarantine",
)


def run_decide(runner: Runner, job: Job, action: str, **fields: Any) -> RunResult:
    """Carry out a decision, and record it in the ledger with who and why.

    ``fields`` are the other fields of a DecisionRequest.

    Rows of a table that can't be repaired stay in quarantine, and the failure names the table. The
    other tables are checked as in a run, including those that an earlier attempt at this run
    repaired. Discards, releases and skips are recorded for all that is named, or for nothing.
    Raises RunFailed, caused by a ConfigError for what doesn't wait for such a decision.
    """
    request = DecisionRequest(action, **fields)
    request = replace(request, by=request.by or current_user())

    def record(runner: Runner, job: Job, result: RunResult, stage: StageResult) -> None:
        request.check()
        if (decide := _RECORDED.get(request.action)) is not None:
            stage.detail = decide(job, request)
        elif (rows := _accept_commits(job, request)) is not None:
            _repair_rows(runner, job, result, stage, rows)
        else:
            stage.detail = f"{counted(len(set(request.ids)), 'external commit')} accepted"

    result = resume_result(job, "decide", fresh=False)
    stages: dict[str, Stage] = {request.action: record}
    if request.action not in _RECORDED:
        stages["check"] = check_stage
    return run_stages(runner, job, result, stages, None)


def _accept_commits(job: Job, request: DecisionRequest) -> DecisionRequest | None:
    """Record that the operator agrees to the external commits that are named; returns the request
    for what is left, None where that is nothing.
    """
    if request.action != "accept" or not request.ids:
        return request
    decisions, at = Decisions(job.lake), now()
    commits = [row for row in read_commits(job.ledger) if row.id in request.ids]
    rows = [row.decided(ACCEPTED, job.run_id, at, request.by, request.reason) for row in commits]
    if rows:
        decisions.add(rows)
    # Another attempt at the run finds what it has recorded.
    accepted_ids = {row.id for row in decisions.accepted_commits() if row.run_id == job.run_id}
    ids = set(request.ids) - accepted_ids
    return replace(request, ids=ids) if ids else None


def _discard(job: Job, request: DecisionRequest) -> str:
    decisions = discard_quarantined(
        job, request.ids, request.tables, by=request.by, reason=request.reason
    )
    return f"{counted(len({row.id for row in decisions}), 'decision')} recorded"


def _release(job: Job, request: DecisionRequest) -> str:
    tables = request.tables or ()
    check_stopped(job, tables)
    releases = release_tables(job, tables, by=request.by, reason=request.reason)
    upto = Lsn(releases[0].upto_lsn)
    return f"{counted(len(releases), 'table')} released up to {upto}; the next consume merges them"


def _skip(job: Job, request: DecisionRequest) -> str:
    skip_messages(job, request.ids, by=request.by or "", reason=request.reason)
    return f"{counted(len(set(request.ids)), 'message')} skipped; the next consume goes on"


def _answer(job: Job, request: DecisionRequest, answer: str) -> str:
    answers = answer_questions(job, answer, request.ids, request.tables, request.by, request.reason)
    return f"{counted(len(answers), 'schema change')} {answer}; the next consume goes on from there"


# Decisions that only the ledger has; the next run reads them there.
_RECORDED: Mapping[str, Callable[[Job, DecisionRequest], str]] = MappingProxyType(
    {
        "discard": _discard,
        "release": _release,
        "skip": _skip,
        "agree": partial(_answer, answer=AGREED),
        "refuse": partial(_answer, answer=REFUSED),
    }
)


def _repair_rows(
    runner: Runner, job: Job, result: RunResult, stage: StageResult, request: DecisionRequest
) -> None:
    """Read quarantined rows again and write them, a retry only those that pass their gates."""
    failures: dict[str, WaldeltaError] = {}
    current = CurrentTargets.read(runner, job, "decide", result)
    if unknown := sorted(set(request.tables or ()) - current.states.keys()):
        raise unknown_tables(unknown, current.states)
    rows: Counter[str] = Counter()
    for name, again in sorted(_rows_to_read(job, current.states, request).items()):
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


def _rows_to_read(
    job: Job, states: Mapping[str, TableState], request: DecisionRequest
) -> dict[str, Again]:
    """Returns by table which rows are read again, and how."""
    why = f": {request.reason}" if request.reason else ""
    again = Again(f"{request.action} by {request.by}{why}", request.by)
    quarantine, tables = Decisions(job.lake), request.tables
    if request.action == "retry":
        lacking = quarantine.open_counts({name: state.generation for name, state in states.items()})
        return dict.fromkeys(lacking if tables is None else lacking.keys() & set(tables), again)
    again = replace(again, why=request.reason)
    if not request.ids:
        open_tables = [
            name
            for name in tables or ()
            if watched_rows(quarantine.outlines(name, states[name].generation))
        ]
        return dict.fromkeys(open_tables, replace(again, accepts_all=True))
    ids_by_table: dict[str, set[str]] = {}
    for row in rows_to_accept(job, request.ids, tables):
        ids_by_table.setdefault(row.table_name, set()).add(row.id)
    # The other quarantined rows of these tables are judged again, as by a retry.
    return {name: replace(again, accepted=frozenset(ids)) for name, ids in ids_by_table.items()}


def _read_again(
    runner: Runner, job: Job, result: RunResult, current: CurrentTargets, name: str, again: Again
) -> dict[str, int]:
    """Returns how many rows were corrected and left the quarantine, and how many it kept."""
    try:
        as_copied = current.as_copied(job, name)
        open_counts = Decisions(job.lake).open_counts({name: as_copied.state.generation})
        effect = repair(runner, job, as_copied, again)
    except NeedsSync as err:
        raise NeedsSync(
            f"{of_table(err, name)}; its rows stay in quarantine: sync --tables {name} copies it"
            " again"
        ) from err
    effect.add_to(result)
    return {
        "corrected": open_counts.get(name, 0) - effect.failing_rows,
        "kept": effect.failing_rows,
    }
