"""The kinds of expectations, and the suite of them that each target must meet."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation
    from waldelta.stages.check.suite.kind import ExpectationKind
    from waldelta.stages.check.suite.kinds import kind_of
    from waldelta.stages.check.suite.plan import SuitePlan, plan_suite
    from waldelta.stages.check.suite.target_facts import SourceRules
    from waldelta.stages.check.suite.verdict import QualityReport, TableVerdict

__all__ = [
    "ExpectationKind",
    "Outcome",
    "PlannedExpectation",
    "QualityReport",
    "SourceRules",
    "SuitePlan",
    "TableVerdict",
    "kind_of",
    "plan_suite",
]
__getattr__ = lazy_exports(
    __name__,
    expectation="Outcome PlannedExpectation",
    kind="ExpectationKind",
    kinds="kind_of",
    plan="SuitePlan plan_suite",
    target_facts="SourceRules",
    verdict="QualityReport TableVerdict",
)
