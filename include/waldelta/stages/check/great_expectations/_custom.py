"""Classes and metrics of the kinds that Great Expectations lacks; importing this module registers
them, and imports all of Great Expectations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import wraps
from types import new_class
from typing import Any

from great_expectations.compatibility import pydantic
from great_expectations.core.metric_domain_types import MetricDomainTypes
from great_expectations.core.metric_function_types import MetricPartialFunctionTypes
from great_expectations.execution_engine import ExecutionEngine, SparkDFExecutionEngine
from great_expectations.expectations.core import ExpectColumnQuantileValuesToBeBetween
from great_expectations.expectations.expectation import (
    BatchExpectation,
    render_suite_parameter_string,
)
from great_expectations.expectations.metrics.metric_provider import metric_partial, metric_value
from great_expectations.expectations.metrics.table_metric_provider import TableMetricProvider
from great_expectations.render import (
    LegacyDiagnosticRendererType,
    LegacyRendererType,
    RenderedStringTemplateContent,
)
from great_expectations.render.renderer.renderer import renderer
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from waldelta.stages.check.measure.duplicate_keys import find_duplicate_keys
from waldelta.stages.check.measure.profile import PROFILED, Measurements, measure_profile
from waldelta.stages.check.suite.kind import ExpectationKind
from waldelta.stages.check.suite.kinds import KINDS

# Attribute of the execution engine: what was measured in the background.
MEASUREMENTS = "measured_in_background"


class UnsatisfiedRowCount(TableMetricProvider):
    """Counts the rows for which a condition isn't true, in one scan with a table's other
    aggregates.
    """

    metric_name = "target_rows.unsatisfied_count"
    value_keys = ("condition",)

    @metric_partial(
        engine=SparkDFExecutionEngine,
        partial_fn_type=MetricPartialFunctionTypes.AGGREGATE_FN,
        domain_type=MetricDomainTypes.TABLE,
    )
    def _spark(
        cls,  # noqa: N805
        metric_domain_kwargs: dict[str, Any],
        metric_value_kwargs: dict[str, Any],
        **_: Any,
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        # As in a publication's row filter, a null condition admits no row.
        admitted = F.coalesce(F.expr(metric_value_kwargs["condition"]), F.lit(False))
        return F.count(F.when(~admitted, F.lit(1))), metric_domain_kwargs, {}


class _TargetExpectation(BatchExpectation):
    """Base class of our expectations, which their kinds describe and judge."""

    @classmethod
    @abstractmethod
    def _kind(cls) -> ExpectationKind:
        """Returns the kind of the expectation."""

    @classmethod
    @renderer(renderer_type=LegacyRendererType.PRESCRIPTIVE)
    @render_suite_parameter_string
    def _prescriptive_renderer(
        cls,
        configuration: Any = None,
        result: Any = None,  # noqa: ARG003
        runtime_configuration: Any = None,
        **_: Any,
    ) -> list[RenderedStringTemplateContent]:
        template, params = cls._kind().words(configuration.kwargs)
        styling = (runtime_configuration or {}).get("styling")
        content = {"template": template, "params": dict(params), "styling": styling}
        return [
            RenderedStringTemplateContent(
                content_block_type="string_template", string_template=content
            )
        ]

    @classmethod
    @renderer(renderer_type=LegacyDiagnosticRendererType.UNEXPECTED_STATEMENT)
    def _diagnostic_unexpected_statement_renderer(
        cls, configuration: Any = None, result: Any = None, runtime_configuration: Any = None
    ) -> list[Any]:
        # The observed value already contains the number of rows. Great Expectations would expect
        # shares of values, and log that they are missing.
        if result is not None and (result.result or {}).get("unexpected_count"):
            return []
        shown: list[Any] = super()._diagnostic_unexpected_statement_renderer(
            configuration, result, runtime_configuration
        )
        return shown

    def _validate(
        self,
        metrics: dict[str, Any],
        runtime_configuration: dict[str, Any] | None = None,  # noqa: ARG002
        execution_engine: ExecutionEngine[Any] | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        kind = self._kind()
        arguments = {name: getattr(self, name) for name in kind.arguments}
        success, details = kind.judge(arguments, metrics)
        return {"success": success, "result": details}


class _BackgroundMetric(TableMetricProvider):
    """Returns what was measured in the background, or else measures it by Spark."""

    value_keys = ("columns",)
    # What finds the measurement, in the place of the columns.
    lookup_key: tuple[str, ...] | None = None

    @staticmethod
    @abstractmethod
    def measure(frame: DataFrame, columns: Sequence[Any]) -> Any:
        """Measures the frame by Spark."""

    @metric_value(engine=SparkDFExecutionEngine)
    def _spark(
        cls,  # noqa: N805
        execution_engine: SparkDFExecutionEngine,
        metric_domain_kwargs: dict[str, Any],
        metric_value_kwargs: dict[str, Any],
        **_: Any,
    ) -> Any:
        columns = metric_value_kwargs["columns"]
        measurements: Measurements = getattr(execution_engine, MEASUREMENTS, {})
        future = measurements.get(cls.lookup_key or tuple(columns))
        if future is not None and (measured := future.result()) is not None:
            return measured
        frame, _, _ = execution_engine.get_compute_domain(
            metric_domain_kwargs, MetricDomainTypes.TABLE
        )
        return cls.measure(frame, columns)


class DuplicateKeyRows(_BackgroundMetric):
    """Counts rows that share their key with another row."""

    metric_name = "target_rows.duplicate_keys"
    measure = staticmethod(find_duplicate_keys)


class TargetProfile(_BackgroundMetric):
    """Returns row count and column distributions."""

    metric_name = "target_rows.profile"
    measure = staticmethod(measure_profile)
    lookup_key = PROFILED


def _answering_in_json(validate: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Returns the method with Python's booleans instead of NumPy's.

    A checkpoint that writes NumPy booleans as JSON raises.
    """

    @wraps(validate)
    def answer(self: Any, *given: Any, **named: Any) -> dict[str, Any]:
        found = validate(self, *given, **named)
        details = found["result"]["details"]
        details["success_details"] = [bool(one) for one in details["success_details"]]
        return {**found, "success": bool(found["success"])}

    return answer


# Seen in Great Expectations 1.24. A replacement class would be registered with a warning in each
# run's log.
setattr(  # noqa: B010 - mypy refuses the assignment
    ExpectColumnQuantileValuesToBeBetween,
    "_validate",
    _answering_in_json(ExpectColumnQuantileValuesToBeBetween._validate),  # noqa: SLF001
)


def register(kind: ExpectationKind) -> None:
    """Create Great Expectations' class for a kind, which registers itself under the kind's type."""
    arguments = kind.arguments.items()
    members = {
        "__module__": __name__,
        "__doc__": type(kind).__doc__,
        "__annotations__": {name: argument.type for name, argument in arguments},
        "_kind": classmethod(lambda _: kind),
        "metric_dependencies": kind.metrics,
        "success_keys": tuple(kind.arguments),
        **{
            name: pydantic.Field(description=argument.meaning, **argument.options)
            for name, argument in arguments
        },
    }
    name = "".join(word.capitalize() for word in kind.type.split("_"))
    new_class(name, (_TargetExpectation,), exec_body=lambda body: body.update(members))


for _kind in KINDS.values():
    if _kind.metrics:
        register(_kind)
