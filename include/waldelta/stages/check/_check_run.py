"""Check run: what the targets of one check are judged by, and where that is measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime

from waldelta.config import PipelineFile
from waldelta.config.expectation_files import OwnSuites, TargetColumns
from waldelta.errors import ConfigError
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import LSN
from waldelta.pipeline import unexpected_error
from waldelta.spark import Runner, RunnerPool
from waldelta.stages.check._incremental import Known
from waldelta.stages.check.gate.decided_rows import PositionRange
from waldelta.stages.check.great_expectations.own_expectations import why_refused
from waldelta.stages.check.suite import Outcome, SourceRules, SuitePlan, TableVerdict, plan_suite
from waldelta.stages.check.suite.profile_drift import Before
from waldelta.stages.check.suite.target_facts import CheckedTarget
from waldelta.stages.check.suite.verdict import unchecked
from waldelta.target_modes import Feature

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """A run's effect on its targets: the Delta versions it wrote, which targets get a quick check,
    and which of these are ``paged``.

    The others of these get a report page only when they fail an expectation, or have one that only
    Great Expectations can evaluate.
    """

    versions: Mapping[str, int] = field(default_factory=dict)
    quick: frozenset[str] = frozenset()
    paged: frozenset[str] = frozenset()
    # By target: what the constraints of its source tables guarantee.
    rules: Mapping[str, SourceRules] = field(default_factory=dict)
    # True for a scheduled full check. A target that is unchanged since a full check found its suite
    # met is then judged only by expectations that depend on other data.
    is_upkeep: bool = False
    # True when other runs may go on during this check, and may record newer results.
    is_concurrent: bool = False

    def has_page(self, verdict: TableVerdict) -> bool:
        """Returns whether a target gets a page that a quick check found to meet everything.

        Upkeep writes one of what it judged anew.
        """
        return verdict.table in self.paged or (self.is_upkeep and verdict.whole)

    def is_quick(self, state: TableState) -> bool:
        """Returns whether a target gets a quick check; upkeep evaluates what may have changed."""
        return self.is_upkeep or (
            state.table_name in self.quick and state.kept_as.supports(Feature.QUICK_CHECKS)
        )


@dataclass(frozen=True, slots=True)
class CheckRun:
    """One check of some targets.

    ``rules`` is what the source guarantees, and ``before`` what earlier runs measured, by target.
    ``known`` is what earlier checks established.
    """

    pipeline: PipelineFile
    run_id: str
    began: datetime
    runner: Runner
    pool: RunnerPool
    background: ThreadPoolExecutor
    own: OwnSuites
    outcome: RunOutcome
    known: Known
    rules: Mapping[str, SourceRules]
    before: Mapping[str, Before]
    # By target: the positions of rows that operators let in although they fail its gates.
    decided: Mapping[str, Sequence[PositionRange]] = field(default_factory=dict)

    def rules_of(self, target: CheckedTarget) -> SourceRules:
        """Returns the source rules of a target."""
        return self.rules[target.state.table_name]

    def suite_of(
        self, target: CheckedTarget, columns: Sequence[str], rules: SourceRules | None = None
    ) -> SuitePlan:
        """Returns the plan of a target with these columns; ``rules`` replaces the source's."""
        name = target.state.table_name
        plan = plan_suite(
            target.state,
            columns,
            self.own.by_table.get(name),
            rules or self.rules_of(target),
            self.before.get(name),
        )
        if name in self.decided and LSN not in columns:
            plan = _without_positions(plan)
        refused = self.own.refused.get(name)
        return replace(plan, refused=refused) if refused else _without_refused(plan, self, target)


def _without_positions(plan: SuitePlan) -> SuitePlan:
    """Returns a plan whose gates are warnings, since nothing tells decided rows from the others."""
    changed = tuple(replace(p, severity="warning") if p.is_gate else p for p in plan.expectations)
    told = (
        "gates: only warnings here, since without metadata columns rows that an operator accepted"
        " or released can't be distinguished"
    )
    return replace(plan, expectations=changed, omitted=(*plan.omitted, told))


def _without_refused(plan: SuitePlan, run: CheckRun, target: CheckedTarget) -> SuitePlan:
    """Returns a plan without the own expectations that can't be evaluated, with their errors."""
    file, state = run.own.by_table.get(plan.table), target.state
    if file is None:
        return plan
    columns = TargetColumns(target.open().spark_types, bool(state.key_columns))
    whys = {
        file.place(number): why_refused(item, columns, is_built=False)
        for number, item in enumerate(file.suite.expectations)
    }
    listed = "\n".join(f"  - {place}: {why}" for place, of in whys.items() for why in of)
    if not listed:
        return plan
    kept = tuple(p for p in plan.expectations if not whys.get(p.place or ""))
    error = ConfigError(f"expectations are refused:\n{listed}")
    return replace(plan, expectations=kept, refused=error)


def about(run: CheckRun, target: CheckedTarget, omitted: Sequence[str]) -> dict[str, str]:
    """Returns what a report page says about the data it judges; ``omitted`` isn't judged."""
    facts = {
        "pipeline": run.pipeline.pipeline,
        "table": target.state.table_name,
        "Airflow run": run.run_id,
        "Delta version": str(target.version),
        "location": target.table.uri,
    }
    return facts | ({"not checked": "; ".join(omitted)} if omitted else {})


def failed(table: str, version: int | None, err: Exception) -> TableVerdict:
    """Returns the verdict on a target that couldn't be judged at all."""
    named = unexpected_error(table, err)
    log.error("table=%s couldn't be checked: %s", table, named)
    return TableVerdict(table, version, (unchecked(named),), ())


def refused(err: ConfigError | None) -> list[Outcome]:
    """Returns the outcome of own expectations that are refused, if there are some."""
    return [] if err is None else [unchecked(err)]
