"""Expectations that Great Expectations lacks; importing this module registers them, and imports all
of Great Expectations.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import asdict
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

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
from pyspark.sql import functions as F

from waldelta.quantities import counted
from waldelta.stages.check.measure import DuplicateKeys, Measured, find_duplicate_keys
from waldelta.stages.check.measure.columns import column_differences
from waldelta.stages.check.measure.profile import profile_aggregate, read_profile
from waldelta.stages.check.measure.row_conditions import is_met
from waldelta.stages.check.suite.profile_drift import find_departures

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

# Attribute of the execution engine: counts of duplicate keys, or Futures of them, that were
# requested before.
PREFETCHED_DUPLICATES = "duplicate_keys_asked_ahead"
# Attribute of the execution engine: a Future of the target's profile; its result is None where
# Arrow couldn't measure it.
PREFETCHED_PROFILE = "profile_measured_ahead"
# Result entry: the observed value without the rows' values that ``observed_value`` shows in the
# report.
WITHOUT_VALUES = "observed_without_values"
# Result entry: the target's measured profile.
PROFILE = "profile"


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
    """Base class of our expectations: describes itself in words, and judges its metrics."""

    @classmethod
    @abstractmethod
    def _words(cls, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Returns the expectation in words for the report, as a template and its parameters."""

    @abstractmethod
    def _judge(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Returns success and result."""

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
        template, params = cls._words(configuration.kwargs)
        return _sentence(template, params, runtime_configuration)

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
        return self._judge(metrics)


class ExpectTargetRowsToSatisfy(_TargetExpectation):
    """Every row of the target, or a share of them, makes a Spark SQL condition true.

    Null counts as not true.
    """

    condition: str = pydantic.Field(description="a condition in Spark SQL")
    meaning: str = pydantic.Field(description="the same in words, for the report")
    mostly: float = pydantic.Field(
        1.0, ge=0, le=1, description="smallest share of rows that must meet it"
    )

    metric_dependencies: ClassVar[tuple[str, ...]] = (
        "target_rows.unsatisfied_count",
        "table.row_count",
    )
    success_keys: ClassVar[tuple[str, ...]] = ("condition", "mostly")
    args_keys: ClassVar[tuple[str, ...]] = ("condition",)

    @classmethod
    def _words(cls, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        share = " for a share of $mostly" if kwargs.get("mostly", 1) < 1 else ""
        return f"$meaning{share}; in Spark SQL: $condition", kwargs

    def _judge(self, metrics: dict[str, Any]) -> dict[str, Any]:
        unexpected, rows = metrics["target_rows.unsatisfied_count"], metrics["table.row_count"]
        details = {
            "observed_value": counted(unexpected, "row doesn't", "rows don't"),
            "element_count": rows,
        }
        return {
            "success": is_met(unexpected, rows, self.mostly),
            "result": {**details, "unexpected_count": unexpected},
        }


class DuplicateKeyRows(TableMetricProvider):
    """Counts rows that share their key with another row."""

    metric_name = "target_rows.duplicate_keys"
    value_keys = ("columns",)

    @metric_value(engine=SparkDFExecutionEngine)
    def _spark(
        cls,  # noqa: N805
        execution_engine: SparkDFExecutionEngine,
        metric_domain_kwargs: dict[str, Any],
        metric_value_kwargs: dict[str, Any],
        **_: Any,
    ) -> DuplicateKeys:
        columns = metric_value_kwargs["columns"]
        asked: Future[DuplicateKeys] | None = getattr(
            execution_engine, PREFETCHED_DUPLICATES, {}
        ).get(tuple(columns))
        if asked is not None:
            return asked.result()
        frame, _, _ = execution_engine.get_compute_domain(
            metric_domain_kwargs, MetricDomainTypes.TABLE
        )
        return find_duplicate_keys(frame, columns)


class ExpectTargetKeyToBeUnique(_TargetExpectation):
    """No two rows of the target have equal values in all of these columns."""

    columns: list[str] = pydantic.Field(description="the key's columns")

    metric_dependencies: ClassVar[tuple[str, ...]] = (
        "target_rows.duplicate_keys",
        "table.row_count",
    )
    success_keys: ClassVar[tuple[str, ...]] = ("columns",)
    args_keys: ClassVar[tuple[str, ...]] = ("columns",)

    @classmethod
    def _words(cls, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "key ($listed) is unique", {"listed": ", ".join(kwargs["columns"])}

    def _judge(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return _none_found(metrics, "row shares its key", "rows share their key")


class _MeasuredEarly(_TargetExpectation):
    """Base class of expectations on all kept rows, or on two targets, that are measured beforehand.

    ``DuplicateKeyRows`` returns the measured counts.
    """

    columns: list[str] = pydantic.Field(description="columns that identify the measured counts")
    meaning: str = pydantic.Field(description="what is expected, in words")

    success_keys: ClassVar[tuple[str, ...]] = ("columns",)
    args_keys: ClassVar[tuple[str, ...]] = ("columns",)

    @classmethod
    def _words(cls, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "$meaning", kwargs


class ExpectKeptRowsToHold(_MeasuredEarly):
    """The rows that a target keeps besides its live rows are consistent."""

    metric_dependencies: ClassVar[tuple[str, ...]] = ("target_rows.duplicate_keys",)

    def _judge(self, metrics: dict[str, Any]) -> dict[str, Any]:
        broken = metrics["target_rows.duplicate_keys"].rows
        return {
            "success": broken == 0,
            "result": {
                "observed_value": counted(broken, "row doesn't", "rows don't"),
                "unexpected_count": broken,
            },
        }


class ExpectTargetRowsToReferToRows(_MeasuredEarly):
    """Every row of a target with a foreign key has its parent row, in both targets at one cut."""

    metric_dependencies: ClassVar[tuple[str, ...]] = (
        "target_rows.duplicate_keys",
        "table.row_count",
    )

    def _judge(self, metrics: dict[str, Any]) -> dict[str, Any]:
        return _none_found(metrics, "row has no parent row", "rows have no parent row")


def _none_found(metrics: dict[str, Any], one: str, more: str) -> dict[str, Any]:
    """Returns the result of an expectation that no rows are found, with examples where some are."""
    found: DuplicateKeys = metrics["target_rows.duplicate_keys"]
    shown = f", such as {'; '.join(f'({key})' for key in found.examples)}" if found.examples else ""
    details = {
        "observed_value": f"{counted(found.rows, one, more)}{shown}",
        WITHOUT_VALUES: counted(found.rows, one, more),
        "element_count": metrics["table.row_count"],
    }
    return {"success": found.rows == 0, "result": {**details, "unexpected_count": found.rows}}


class _FoundBefore(_TargetExpectation):
    """Base class of expectations whose result the run determined before, without reading the
    rows.
    """

    meaning: str = pydantic.Field(description="what is expected, in words")
    is_met: bool = pydantic.Field(description="whether it is")
    observed: str = pydantic.Field(description="what was found")

    metric_dependencies: ClassVar[tuple[str, ...]] = ("table.row_count",)
    success_keys: ClassVar[tuple[str, ...]] = ("is_met", "observed")
    args_keys: ClassVar[tuple[str, ...]] = ("meaning",)

    @classmethod
    def _words(cls, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "$meaning", {"meaning": kwargs["meaning"]}

    def _judge(self, metrics: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        return {"success": self.is_met, "result": {"observed_value": self.observed}}


class ExpectTargetToBeFresh(_FoundBefore):
    """The target's lag behind the source is within its limit."""


class ExpectTargetToKnowAllValues(_FoundBefore):
    """The target lacks no row for want of a value that wasn't sent.

    An UPDATE doesn't send TOASTed values that it didn't change.
    """


class TargetProfile(TableMetricProvider):
    """Returns row count and column distributions, measured in the background or else by a Spark
    scan.
    """

    metric_name = "target_rows.profile"
    value_keys = ("columns",)

    @metric_value(engine=SparkDFExecutionEngine)
    def _spark(
        cls,  # noqa: N805
        execution_engine: SparkDFExecutionEngine,
        metric_domain_kwargs: dict[str, Any],
        metric_value_kwargs: dict[str, Any],
        **_: Any,
    ) -> Measured:
        ahead: Future[Measured | None] | None = getattr(execution_engine, PREFETCHED_PROFILE, None)
        if ahead is not None and (measured := ahead.result()) is not None:
            return measured
        columns = metric_value_kwargs["columns"]
        frame, _, _ = execution_engine.get_compute_domain(
            metric_domain_kwargs, MetricDomainTypes.TABLE
        )
        return read_profile(columns, frame.agg(profile_aggregate(columns)).collect()[0][0])


class ExpectTargetToBeAsBefore(_TargetExpectation):
    """Row count or column distributions are within the bounds of earlier runs.

    Without bounds the expectation only measures.
    """

    columns: list[list[Any]] = pydantic.Field(
        description="what is measured: names, and whether they are numbers"
    )
    bounds: dict[str, Any] = pydantic.Field(
        description="from and to where each statistic is as before"
    )
    part: str = pydantic.Field(description="rows or columns")
    meaning: str = pydantic.Field(description="what is expected, in words")

    metric_dependencies: ClassVar[tuple[str, ...]] = ("target_rows.profile",)
    success_keys: ClassVar[tuple[str, ...]] = ("columns", "bounds")
    args_keys: ClassVar[tuple[str, ...]] = ("part",)

    @classmethod
    def _words(cls, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        note = "" if kwargs["bounds"] else " (not judged until enough runs have measured it)"
        return "$meaning$note", {"meaning": kwargs["meaning"], "note": note}

    def _judge(self, metrics: dict[str, Any]) -> dict[str, Any]:
        rows, columns = measured = metrics["target_rows.profile"]
        found = find_departures(measured, self.part, self.bounds)
        details = {
            "observed_value": "; ".join(found) or counted(rows, "row"),
            "element_count": rows,
        }
        if self.part == "rows":
            details[PROFILE] = [rows, *(asdict(column) for column in columns)]
        return {"success": not found, "result": details}


class ExpectTargetColumnsToMatch(_TargetExpectation):
    """The target has the given columns with the given Spark types, and otherwise only ``_wd_``
    columns.
    """

    columns: dict[str, str] = pydantic.Field(description="Spark type by column")

    metric_dependencies: ClassVar[tuple[str, ...]] = ("table.column_types",)
    success_keys: ClassVar[tuple[str, ...]] = ("columns",)
    args_keys: ClassVar[tuple[str, ...]] = ("columns",)

    @classmethod
    def _words(cls, kwargs: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        listed = ", ".join(f"{name} {type_name}" for name, type_name in kwargs["columns"].items())
        return "columns and types match the ones recorded: $listed", {"listed": listed}

    def _judge(self, metrics: dict[str, Any]) -> dict[str, Any]:
        held = {
            column["name"]: column["type"].simpleString()
            for column in metrics["table.column_types"]
        }
        differences = column_differences(self.columns, held)
        return {
            "success": not differences,
            "result": {"observed_value": "; ".join(differences) or "as recorded"},
        }


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


def _sentence(
    template: str, params: dict[str, Any], runtime_configuration: dict[str, Any] | None
) -> list[RenderedStringTemplateContent]:
    styling = (runtime_configuration or {}).get("styling")
    content = {"template": template, "params": dict(params), "styling": styling}
    return [
        RenderedStringTemplateContent(content_block_type="string_template", string_template=content)
    ]
