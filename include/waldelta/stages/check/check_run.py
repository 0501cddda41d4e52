"""Check run: what the targets of one check are judged by, what earlier checks established about
them, and which get a report page.

A page costs seconds, because Great Expectations describes the results. So a small target, or one
that a run changed little, gets its page from maintenance, or when it fails.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime

from waldelta.config import PipelineFile
from waldelta.config.expectation_files import OwnSuites, TargetColumns
from waldelta.config.schedule import latest_time
from waldelta.lake import READ_FAILURES, DeltaTarget, row_count
from waldelta.lake.ledger import BatchCut, TableState
from waldelta.lake.ledger.check_records import PassedSuite
from waldelta.metadata_columns import LSN
from waldelta.pipeline import Job, RunResult, unexpected_error
from waldelta.pipeline.targets.quarantined_rows import PositionRange
from waldelta.spark import RunnerPool
from waldelta.stages.check.great_expectations.own_expectations import why_refused
from waldelta.stages.check.measure.profile import ProfileBounds
from waldelta.stages.check.measure.references import CheckedTarget
from waldelta.stages.check.suite.expectation import (
    Outcome,
    SourceRules,
    TableVerdict,
    unchecked,
)
from waldelta.stages.check.suite.kinds import SuitePlan, depends_on, plan_suite

# Expectations of these kinds depend on more than the target's rows, so they are also judged for an
# unchanged target.
_NOT_OF_ROWS = ("earlier runs", "other data")
# While an expectation fails, no new result is stored, and each check reads all commits since the
# last stored one. After more commits than this, all rows are judged.
MOST_COMMITS = 200


@dataclass(frozen=True, slots=True)
class CheckHistory:
    """What earlier checks recorded: of each target the versions that passed their suite, and the
    newest consistent cut.
    """

    judged: Mapping[str, Sequence[PassedSuite]] = field(default_factory=dict)
    cut: BatchCut | None = None

    def end_of(self, state: TableState, version: int) -> int | None:
        """Returns the position up to which a target's version contains all changes and none later.

        Returns None for a version that isn't in the newest consistent cut.
        """
        if self.cut is None or (target := self.cut.of(state)) is None:
            return None
        return self.cut.end_lsn if target.version == version else None

    def last_met(
        self, target: CheckedTarget, plan: SuitePlan, *, whole: bool = False
    ) -> PassedSuite | None:
        """Returns the last check, or the last of all rows, if all rows met this suite then."""
        checks = self.judged.get(target.state.table_name, ())
        last = next((row for row in reversed(checks) if row.whole or not whole), None)
        suite = (target.state.generation, suite_of(plan))
        return last if last is not None and (last.generation, last.suite) == suite else None


def suite_of(plan: SuitePlan) -> str:
    """Returns a digest of the expectations that depend only on the target's rows."""
    parts = [
        [p.type, p.kwargs, p.severity]
        for p in plan.expectations
        if depends_on(p) not in _NOT_OF_ROWS
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def are_met(outcomes: Sequence[Outcome]) -> bool:
    """Returns whether all outcomes that depend on the target's rows are successful."""
    return all(o.success for o in outcomes if depends_on(o.planned) not in _NOT_OF_ROWS)


def keep_other_data(plan: SuitePlan) -> SuitePlan:
    """Returns the plan with only the expectations that depend on other data than the rows.

    A target that is unchanged since a full check needs no other expectation.
    """
    expectations = (p for p in plan.expectations if depends_on(p) == "other data")
    return replace(plan, expectations=tuple(expectations))


def is_unchanged_since_full_check(
    history: CheckHistory, target: CheckedTarget, plan: SuitePlan
) -> bool:
    """Returns whether a full check found a version's rows to meet the whole suite."""
    last_pass = history.last_met(target, plan, whole=True)
    # Own expectations may also depend on the current date or on other tables.
    may_change = any(depends_on(planned) == "anything" for planned in plan.expectations)
    if last_pass is None or plan.refused or may_change:
        return False
    first, last = sorted((last_pass.version, target.version))
    return first == last or target.table.log.newest_with_rows_of(first) >= last


def changed_since(history: CheckHistory, target: CheckedTarget, plan: SuitePlan) -> int | None:
    """Returns the position from which rows have changed since all of them met the suite.

    Returns None where that is unknown. Only applied changes may lie between the two versions,
    because their rows carry their position. Rows that were copied, repaired or written by an
    external writer carry an older position, or none.
    """
    last_pass = history.last_met(target, plan)
    if last_pass is None or last_pass.end_lsn is None:
        return None
    if target.state.target_mode.keeps_rows or target.version - last_pass.version > MOST_COMMITS:
        return None
    seen = last_pass.version
    for commit in target.table.log.behind(last_pass.version):
        if commit.version > target.version:
            break
        # The verb comes first because a large commit has a line for each file.
        if commit.metadata.get("verb") != "apply" and commit.changes_data:
            return None
        seen = commit.version
    return last_pass.end_lsn if seen == target.version else None


def met_at(history: CheckHistory, target: CheckedTarget, plan: SuitePlan) -> int | None:
    """Returns the target's latest checked version if all its rows met this suite, else None.

    A version after the target's current one doesn't count.
    """
    last = history.last_met(target, plan)
    return last.version if last is not None and last.version <= target.version else None


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A run's effect on its targets: the Delta versions it wrote, and which of them are ``paged``.

    The others that were ``written`` get a report page only when they fail an expectation. Of
    targets that the run didn't write all rows are judged, and each gets a page.
    """

    versions: Mapping[str, int] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    paged: frozenset[str] = frozenset()
    # By target: the rules that its source tables' constraints guarantee.
    rules: Mapping[str, SourceRules] = field(default_factory=dict)
    # True for maintenance, which checks in full as ``quality.full_check`` says. A target that is
    # unchanged since a full check found its suite met is then judged only by expectations that
    # depend on other data.
    is_upkeep: bool = False
    # True when other runs may go on during this check, and may record newer results.
    is_concurrent: bool = False

    def has_page(self, verdict: TableVerdict) -> bool:
        """Returns whether a target gets a report page.

        A target that fails always gets one. Maintenance writes a page for each target whose rows it
        judged in full.
        """
        if verdict.version is None:
            return False
        if any(not outcome.success for outcome in verdict.outcomes):
            return True
        if self.is_upkeep:
            return verdict.whole
        return verdict.table in self.paged or verdict.table not in self.written


@dataclass(frozen=True, slots=True)
class CheckRun:
    """One check of some targets.

    ``rules`` are the constraints of the source's tables, and ``bounds`` the profiles that earlier
    runs measured, both by target. ``history`` is what earlier checks recorded.
    """

    pipeline: PipelineFile
    run_id: str
    began: datetime
    pool: RunnerPool
    background: ThreadPoolExecutor
    own_suites: OwnSuites
    outcome: RunOutcome
    history: CheckHistory
    rules: Mapping[str, SourceRules]
    bounds: Mapping[str, ProfileBounds]
    # By target: position ranges of rows that operators accepted or released although the rows fail
    # its gates.
    decided: Mapping[str, Sequence[PositionRange]] = field(default_factory=dict)

    def suite_of(self, target: CheckedTarget, types: Mapping[str, str]) -> SuitePlan:
        """Returns the plan of a target with these columns, by their Spark types."""
        name = target.state.table_name
        plan = plan_suite(
            target.state,
            [*types],
            self.own_suites.by_table.get(name),
            self.rules[name],
            self.bounds.get(name),
        )
        if name in self.decided and LSN not in types:
            plan = _without_positions(plan)
        if (refused := self.own_suites.refused.get(name)) is not None:
            return replace(plan, refused=(str(refused),))
        return _without_refused(plan, self, TargetColumns(types, bool(target.state.key_columns)))


def _without_positions(plan: SuitePlan) -> SuitePlan:
    """Returns a plan whose gates are warnings, because the target's rows have no positions that
    would show which rows operators decided on.
    """
    changed = tuple(replace(p, severity="warning") if p.is_gate else p for p in plan.expectations)
    note = (
        "gates: only warnings here, since without metadata columns rows that an operator accepted"
        " or released can't be distinguished"
    )
    return replace(plan, expectations=changed, omitted=(*plan.omitted, note))


def _without_refused(plan: SuitePlan, run: CheckRun, columns: TargetColumns) -> SuitePlan:
    """Returns a plan without the own expectations that can't be evaluated, with their errors."""
    file = run.own_suites.by_table.get(plan.table)
    if file is None:
        return plan
    whys = {
        file.place(number): why_refused(item, columns, is_built=False)
        for number, item in enumerate(file.suite.expectations)
    }
    listed = "\n".join(f"  - {place}: {why}" for place, of in whys.items() for why in of)
    if not listed:
        return plan
    expectations = tuple(p for p in plan.expectations if not whys.get(p.place or ""))
    return replace(
        plan, expectations=expectations, refused=(f"expectations are refused:\n{listed}",)
    )


def needs_full_check(run: CheckRun, target: CheckedTarget) -> bool:
    """Returns whether ``quality.full_check`` had a time since all rows met the target's suite."""
    if (schedule := run.pipeline.quality.full_check) is None:
        return False
    checks = [row.at for row in run.history.judged.get(target.state.table_name, ()) if row.whole]
    return not checks or max(checks) < latest_time(schedule, run.began)


def verdict_of_error(table: str, version: int | None, err: Exception) -> TableVerdict:
    """Returns the verdict on a target that couldn't be judged at all."""
    error = unexpected_error(table, err)
    log.error("table=%s couldn't be checked: %s", table, error)
    return TableVerdict(table, version, (unchecked(error),), ())


# Up to this many changes, or this share of the target's rows, count as few.
_FEW, _SHARE = 10_000, 0.1
# The verbs whose results say how many rows changed.
MERGES = ("consume", "decide")
# A sync of more tables than this writes no pages.
_MOST_PAGES = 20


def paged_targets(job: Job, result: RunResult, tables: Sequence[str]) -> list[str]:
    """Returns the tables whose targets get a page, of those that the run wrote."""
    if result.verb == "sync" and len(tables) > _MOST_PAGES:
        return []
    changes = {
        name: result.tables[name].written if result.verb in MERGES else None for name in tables
    }
    return [
        name
        for name, written in changes.items()
        if has_page(written, job.lake.target(name), result.tables[name].version)
    ]


def has_page(changes: int | None, target: DeltaTarget, version: int | None) -> bool:
    """Returns whether a target's version is large, and mostly other than before these changes.

    ``changes`` is None where all rows may have changed.
    """
    if changes is not None and changes <= _FEW:
        return False
    try:
        table = target.open(version)
    except READ_FAILURES as err:
        log.info("%s gets a page, since its rows can't be counted: %s", target.uri, err)
        return True
    if table.is_small:
        return False
    rows = row_count(table.files)
    return changes is None or rows is None or changes > rows * _SHARE
