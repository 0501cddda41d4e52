"""Plans the expectation suite of each target."""

from typing import TYPE_CHECKING

from waldelta.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from waldelta.stages.check.suite.plan import PlannedExpectation, SuitePlan, plan_suite
    from waldelta.stages.check.suite.verdict import Outcome, QualityReport, TableVerdict

__all__ = [
    "Outcome",
    "PlannedExpectation",
    "QualityReport",
    "SuitePlan",
    "TableVerdict",
    "plan_suite",
]
__getattr__ = lazy_exports(
    __name__,
    plan="PlannedExpectation SuitePlan plan_suite",
    verdict="Outcome QualityReport TableVerdict",
)
