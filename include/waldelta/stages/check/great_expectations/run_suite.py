"""Builds Great Expectations' objects for a planned suite, and runs it on one version of its
target.
"""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import great_expectations as gx
from great_expectations.compatibility import pydantic
from great_expectations.core.batch_definition import BatchDefinition
from great_expectations.core.expectation_validation_result import (
    ExpectationSuiteValidationResult,
    ExpectationValidationResult,
)
from great_expectations.data_context.data_context.ephemeral_data_context import (
    EphemeralDataContext,
)
from great_expectations.data_context.types.base import (
    DataContextConfig,
    InMemoryStoreBackendDefaults,
)
from great_expectations.datasource.fluent import SparkDatasource
from great_expectations.expectations.expectation import Expectation
from great_expectations.expectations.registry import (
    get_expectation_impl,
    list_registered_expectation_implementations,
)
from pyspark.sql import DataFrame

from waldelta.errors import ConfigError
from waldelta.lake.ledger import ColumnProfile
from waldelta.stages.check.great_expectations._custom import MEASUREMENTS
from waldelta.stages.check.measure.profile import Measured, Measurements
from waldelta.stages.check.suite.expectation import Outcome, PlannedExpectation
from waldelta.stages.check.suite.kinds import SuitePlan, kind_of
from waldelta.stages.check.suite.target_kinds import PROFILE, WITHOUT_VALUES


def open_context() -> EphemeralDataContext:
    """Returns a context that writes nothing and sends no data."""
    config = DataContextConfig(
        config_version=4.0,
        analytics_enabled=False,
        # Great Expectations reads a dict, as from a file.
        progress_bars={"globally": False},  # type: ignore[arg-type]
        fluent_datasources={},
        store_backend_defaults=InMemoryStoreBackendDefaults(),
    )
    context: EphemeralDataContext = gx.get_context(mode="ephemeral", project_config=config)
    return context


META = "waldelta"  # Under this key an expectation carries its number in the plan.


def build_suite(name: str, plan: SuitePlan) -> gx.ExpectationSuite:
    """Returns the suite of a plan; raises ConfigError that lists every refused own expectation."""
    suite, refused = build_known(name, plan)
    if refused is not None:
        raise refused
    return suite


def build_known(name: str, plan: SuitePlan) -> tuple[gx.ExpectationSuite, ConfigError | None]:
    """Returns the suite without refused own expectations, and the error that lists these, or
    None.
    """
    known = _known()
    problems: list[str] = []
    built = []
    for number, planned in enumerate(plan.expectations):
        try:
            built.append(_build(number, planned, known))
        except ValueError as err:
            problems.append(f"{planned.place or planned.type}: {err}")
    refused = (
        ConfigError("expectations are refused:\n" + "\n".join(f"  - {p}" for p in problems))
        if problems
        else None
    )
    return gx.ExpectationSuite(name=name, expectations=built), refused


def why_not_built(type_name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Returns why there is no expectation of this type with these arguments; None if there is."""
    try:
        _build(0, PlannedExpectation(type_name, dict(kwargs), "critical", "own", ""), _known())
    except ValueError as err:
        return str(err)
    return None


def _known() -> dict[str, type[Expectation]]:
    return {
        key: impl
        for type_name in list_registered_expectation_implementations()
        for impl in [get_expectation_impl(type_name)]
        for key in (type_name, impl.__name__)
    }


def _build(
    number: int, planned: PlannedExpectation, known: Mapping[str, type[Expectation]]
) -> Expectation:
    kind = known.get(planned.type)
    if kind is None:
        near = difflib.get_close_matches(planned.type, known, n=1)
        hint = (
            f": did you mean {near[0]}?"
            if near
            else ": see Great Expectations' gallery for the names"
        )
        raise ValueError(f"no expectation is called {planned.type!r}{hint}")
    if reserved := sorted({"id", "meta", "severity", "notes"} & set(planned.kwargs)):
        raise ValueError(
            f"kwargs.{reserved[0]} isn't allowed: write severity and notes next to kwargs, not in"
            " it"
        )
    meta = {META: number, "origin": planned.origin}
    arguments: dict[str, Any] = {**planned.kwargs, "severity": planned.severity, "meta": meta}
    if planned.origin == "own" and not planned.meaning.startswith(planned.type):
        arguments["notes"] = planned.meaning
    try:
        return kind(**arguments)
    except pydantic.ValidationError as err:
        raise ValueError(f"{planned.type}: {_refused_arguments(kind, err)}") from err
    except (TypeError, ValueError) as err:
        raise ValueError(f"{planned.type}: {err}") from err


def _refused_arguments(kind: type[Expectation], err: pydantic.ValidationError) -> str:
    """Returns each refused argument with the reason, once.

    For an argument of several types pydantic lists each type that the value isn't.
    """
    whys: dict[str, list[str]] = {}
    for error in err.errors():
        name = ".".join(str(part) for part in error["loc"] if part != "__root__")
        why = str(error["msg"])
        if error["type"] == "value_error.extra":
            near = difflib.get_close_matches(name, kind.__fields__, 1)
            why = f"no such argument: {f'did you mean {near[0]}?' if near else 'remove it'}"
        whys.setdefault(f"kwargs.{name}" if name else "kwargs", []).append(why)
    # A value of a wrong type also counts as no value.
    named = {name: of for name, of in whys.items() if name != "kwargs"} or whys
    return "; ".join(f"{name}: {', or '.join(dict.fromkeys(of))}" for name, of in named.items())


# The first validation only counts, because examples cost a query per expectation; they are fetched
# for failed ones.
COUNTS_ONLY: dict[str, Any] = {"result_format": "SUMMARY", "partial_unexpected_count": 0}
# Examples of failed values appear only in the reports, never in logs.
WITH_EXAMPLES: dict[str, Any] = {"result_format": "SUMMARY", "partial_unexpected_count": 5}


class SuiteCheck:
    """A suite prepared in a context: create it in one thread; ``run`` may be called from
    several.
    """

    def __init__(self, context: EphemeralDataContext, suite: gx.ExpectationSuite) -> None:
        self.name = suite.name
        self._suite = suite
        # Caching pays off for many scans, but a suite's aggregates are one scan.
        self._source: SparkDatasource = context.data_sources.add_spark(suite.name, persist=False)
        asset = self._source.add_dataframe_asset(suite.name)
        self._batch: BatchDefinition[None] = asset.add_batch_definition_whole_dataframe("version")

    def run(
        self,
        frame: DataFrame,
        measurements: Measurements,
    ) -> ExpectationSuiteValidationResult:
        """Validate the frame on its own session; failed expectations are evaluated again for
        examples.

        ``measurements`` are what was requested before.
        """
        engine = self._source.get_execution_engine()
        # By default the engine uses the process's default session, which lacks this frame's
        # temporary views.
        engine.spark = frame.sparkSession
        setattr(engine, MEASUREMENTS, measurements)
        batch = self._batch.get_batch({"dataframe": frame})
        result = batch.validate(self._suite, result_format=COUNTS_ONLY)
        if numbers := {
            _number(item)
            for item in result.results
            if not item.success and "partial_unexpected_list" in item.result
        }:
            examples = batch.validate(self._part(numbers), result_format=WITH_EXAMPLES)
            better = {_number(item): item for item in examples.results}
            result.results = [better.get(_number(item), item) for item in result.results]
        return result

    def judge_again(
        self, result: ExpectationSuiteValidationResult, rows: DataFrame, among: Collection[int]
    ) -> set[int]:
        """Validate expectations that aren't met again, on these rows; those met count as met.

        ``among`` are the numbers of the expectations to take. Returns the numbers of those met.
        """
        again = {_number(item) for item in result.results if not item.success} & {*among}
        if not again:
            return set()
        if rows.isEmpty():  # No aggregate can be computed of no rows.
            met = {_number(item): item for item in result.results if _number(item) in again}
            for item in met.values():
                item.success, item.result, item.exception_info = True, {}, {}
        else:
            found = self._batch.get_batch({"dataframe": rows}).validate(
                self._part(again), result_format=COUNTS_ONLY
            )
            met = {_number(item): item for item in found.results if item.success}
        result.results = [met.get(_number(item), item) for item in result.results]
        return set(met)

    def _part(self, numbers: set[int]) -> gx.ExpectationSuite:
        # An expectation can belong to only one suite, so the new suite gets copies.
        chosen = [copy.copy(e) for e in self._suite.expectations if (e.meta or {})[META] in numbers]
        return gx.ExpectationSuite(name=f"{self.name} examples", expectations=chosen)


def outcomes(result: ExpectationSuiteValidationResult, plan: SuitePlan) -> tuple[Outcome, ...]:
    """Returns each judged expectation's outcome, in the plan's order."""
    found = (_outcome(item, plan) for item in sorted(result.results, key=_number))
    return tuple(one for one in found if kind_of(one.planned.type).is_judged(one.planned.kwargs))


def measured(result: ExpectationSuiteValidationResult) -> Measured | None:
    """Returns the measured profile, or None; removes it from the result, whose pages don't show
    it.
    """
    for item in result.results:
        if (found := item.result.pop(PROFILE, None)) is not None:
            return found[0], [ColumnProfile(**column) for column in found[1:]]
    return None


def _outcome(item: ExpectationValidationResult, plan: SuitePlan) -> Outcome:
    observed = item.result.get(WITHOUT_VALUES, item.result.get("observed_value"))
    unexpected = item.result.get("unexpected_count")
    raised = not item.success and _raised(item.exception_info or {})
    return Outcome(
        plan.expectations[_number(item)],
        None if raised else bool(item.success),
        None if observed is None else str(observed)[:200],
        None if unexpected is None else int(unexpected),
        examples=_examples(item),
    )


def _examples(item: ExpectationValidationResult) -> tuple[str, ...]:
    """Returns some failing values of a column, or of several, as JSON; their rows are unknown."""
    values = item.result.get("partial_unexpected_list") or ()
    named = item.expectation_config.kwargs if item.expectation_config is not None else {}
    pair = [named[name] for name in ("column_A", "column_B") if name in named]
    columns = pair or named.get("column_list") or [named.get("column", "values")]
    return tuple(
        json.dumps({"values": _by_column(value, columns)}, default=str)
        for value in values[: WITH_EXAMPLES["partial_unexpected_count"]]
    )


def _by_column(value: Any, columns: Sequence[str]) -> dict[str, Any]:
    """Returns a failing value by its column, or those of a row of several columns.

    >>> _by_column((2, -2), ["id", "v"]), _by_column({"id": 2, "v": -2}, ["id", "v"])
    ({'id': 2, 'v': -2}, {'id': 2, 'v': -2})
    >>> _by_column([1, 2], ["items"])
    {'items': [1, 2]}
    """
    if isinstance(value, dict):
        return value
    is_row = isinstance(value, (list, tuple)) and len(value) == len(columns) > 1
    return dict(zip(columns, value, strict=True)) if is_row else {str(columns[0]): value}


def _number(item: ExpectationValidationResult) -> int:
    configuration = item.expectation_config
    if configuration is None:  # Results of a suite always have a configuration.
        raise KeyError(META)
    return int(configuration.meta[META])


def _raised(info: dict[str, Any]) -> bool:
    """Returns whether evaluation raised; the information is of the expectation or of each
    metric.
    """
    if "raised_exception" in info:
        return bool(info["raised_exception"])
    return any(isinstance(part, dict) and part.get("raised_exception") for part in info.values())
