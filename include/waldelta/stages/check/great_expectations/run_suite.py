"""Builds Great Expectations' objects for a planned suite, and runs it on one version of its target.

Importing this module imports all of Great Expectations, and registers classes of the kinds that it
lacks: it checks their arguments and describes them.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import new_class
from typing import Any

import great_expectations as gx
from great_expectations.compatibility import pydantic
from great_expectations.core.expectation_validation_result import (
    ExpectationSuiteValidationResult,
    ExpectationValidationResult,
    expectationSuiteValidationResultSchema,
)
from great_expectations.data_context.data_context.ephemeral_data_context import (
    EphemeralDataContext,
)
from great_expectations.data_context.types.base import (
    DataContextConfig,
    InMemoryStoreBackendDefaults,
)
from great_expectations.datasource.fluent import SparkDatasource
from great_expectations.expectations.expectation import (
    BatchExpectation,
    Expectation,
    _format_map_output,
)
from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
from great_expectations.expectations.registry import (
    get_expectation_impl,
    get_renderer_impl,
    list_registered_expectation_implementations,
)
from great_expectations.render import (
    LegacyDiagnosticRendererType,
    LegacyRendererType,
    RenderedContent,
)
from pyspark.sql import DataFrame

from waldelta.errors import ConfigError
from waldelta.stages.check.suite.expectation import (
    ExpectationKind,
    Outcome,
    PlannedExpectation,
    TableVerdict,
)
from waldelta.stages.check.suite.kinds import KINDS, SuitePlan, kind_of

log = logging.getLogger(__name__)


class _TargetExpectation(BatchExpectation):
    """Base class of our expectations, which their kinds describe and judge without it."""

    @classmethod
    @abstractmethod
    def _kind(cls) -> ExpectationKind:
        """Returns the kind of the expectation."""

    def _validate(self, *_: Any, **__: Any) -> dict[str, Any]:
        # Great Expectations registers no class without this method.
        raise NotImplementedError(f"{self._kind().type} is judged without Great Expectations")


def register(kind: ExpectationKind) -> None:
    """Create Great Expectations' class for a kind, which registers itself under the kind's type."""
    arguments = kind.arguments.items()
    members = {
        "__module__": __name__,
        "__doc__": kind.summary or type(kind).__doc__,
        "__annotations__": {name: argument.type for name, argument in arguments},
        "_kind": classmethod(lambda _: kind),
        "success_keys": tuple(kind.arguments),
        **{
            name: pydantic.Field(description=argument.meaning, **argument.options)
            for name, argument in arguments
        },
    }
    name = "".join(word.capitalize() for word in kind.type.split("_"))
    new_class(name, (_TargetExpectation,), exec_body=lambda body: body.update(members))


for _kind in KINDS.values():
    if _kind.is_ours:
        register(_kind)


def _open_context() -> EphemeralDataContext:
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


_OUTSIDE = "write it next to kwargs, not in it"
# What an expectation of Great Expectations takes besides its own arguments.
_RESERVED = {"id": "remove it", "meta": "remove it", "severity": _OUTSIDE, "notes": _OUTSIDE}
META = "waldelta"  # Under this key an expectation carries its number in the plan.


def build_suite(name: str, plan: SuitePlan) -> gx.ExpectationSuite:
    """Returns the suite of a plan; raises ConfigError for what Great Expectations refuses."""
    classes = _read_classes()
    try:
        built = [
            _build(number, planned, classes) for number, planned in enumerate(plan.expectations)
        ]
    except ValueError as err:
        raise ConfigError(f"expectations are refused: {err}") from err
    return gx.ExpectationSuite(name=name, expectations=built)


def why_not_built(type_name: str, kwargs: Mapping[str, Any]) -> str | None:
    """Returns why there is no expectation of this type with these arguments; None if there is."""
    try:
        _build(
            0, PlannedExpectation(type_name, dict(kwargs), "critical", "own", ""), _read_classes()
        )
    except ValueError as err:
        return str(err)
    return None


def _read_classes() -> dict[str, type[Expectation]]:
    return {
        key: impl
        for type_name in list_registered_expectation_implementations()
        for impl in [get_expectation_impl(type_name)]
        for key in (type_name, impl.__name__)
    }


def _build(
    number: int, planned: PlannedExpectation, classes: Mapping[str, type[Expectation]]
) -> Expectation:
    kind = classes.get(planned.type)
    if kind is None:
        near = difflib.get_close_matches(planned.type, classes, n=1)
        hint = (
            f": did you mean {near[0]}?"
            if near
            else ": see Great Expectations' gallery for the names"
        )
        raise ValueError(f"no expectation is called {planned.type!r}{hint}")
    for name, remedy in _RESERVED.items():
        if name in planned.kwargs:
            raise ValueError(f"kwargs.{name} isn't allowed: {remedy}")
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
    by_argument = {name: of for name, of in whys.items() if name != "kwargs"} or whys
    return "; ".join(
        f"{name}: {', or '.join(dict.fromkeys(of))}" for name, of in by_argument.items()
    )


# The first validation only counts, because examples cost a query per expectation; they are fetched
# for failed ones.
COUNTS_ONLY: dict[str, Any] = {"result_format": "SUMMARY", "partial_unexpected_count": 0}
# Examples of failed values appear only in the reports, never in logs.
WITH_EXAMPLES: dict[str, Any] = {"result_format": "SUMMARY", "partial_unexpected_count": 5}


def judge_frame(name: str, plan: SuitePlan, frame: DataFrame) -> tuple[Outcome, ...]:
    """Returns each expectation's outcome on these rows, in the plan's order.

    ``name`` is the suite's. Failed ones are evaluated again for examples. Raises ConfigError as
    build_suite() does.
    """
    suite = build_suite(name, plan)
    # Caching pays off for many scans, but a suite's aggregates are one scan.
    source: SparkDatasource = _open_context().data_sources.add_spark(name, persist=False)
    # By default the engine uses the process's default session, which lacks this frame's temporary
    # views.
    source.get_execution_engine().spark = frame.sparkSession
    whole = source.add_dataframe_asset(name).add_batch_definition_whole_dataframe("version")
    batch = whole.get_batch({"dataframe": frame})
    results = _by_number(batch.validate(suite, result_format=COUNTS_ONLY).results)
    missed = {
        n for n, i in results.items() if not i.success and "partial_unexpected_list" in i.result
    }
    if missed:
        # An expectation can belong to only one suite, so the new suite gets copies.
        copies = [copy.copy(e) for e in suite.expectations if (e.meta or {})[META] in missed]
        part = gx.ExpectationSuite(name=f"{name} examples", expectations=copies)
        results |= _by_number(batch.validate(part, result_format=WITH_EXAMPLES).results)
    return tuple(_outcome(results[n], p) for n, p in enumerate(plan.expectations))


def _by_number(
    results: Sequence[ExpectationValidationResult],
) -> dict[int, ExpectationValidationResult]:
    return {int(_configuration(item).meta[META]): item for item in results}


def _outcome(item: ExpectationValidationResult, planned: PlannedExpectation) -> Outcome:
    observed = item.result.get("observed_value")
    unexpected = item.result.get("unexpected_count")
    raised = None if item.success else _exception_text(item.exception_info or {})
    return Outcome(
        planned,
        None if raised else bool(item.success),
        None if observed is None else str(observed)[:200],
        None if unexpected is None else int(unexpected),
        examples=_examples(item),
        details=item.result,
        raised=raised,
    )


def _examples(item: ExpectationValidationResult) -> tuple[str, ...]:
    """Returns some failing values of a column, or of several, as JSON; their rows are unknown."""
    values = item.result.get("partial_unexpected_list") or ()
    arguments = _configuration(item).kwargs
    pair = [arguments[name] for name in ("column_A", "column_B") if name in arguments]
    columns = pair or arguments.get("column_list") or [arguments.get("column", "values")]
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


def _configuration(item: ExpectationValidationResult) -> ExpectationConfiguration:
    if item.expectation_config is None:  # Results of a suite always have a configuration.
        raise KeyError(META)
    return item.expectation_config


def _exception_text(info: dict[str, Any]) -> str | None:
    """Returns why evaluation raised; the information is of the expectation or of each metric."""
    parts = [info] if "raised_exception" in info else [*info.values()]
    messages = (
        str(part.get("exception_message"))
        for part in parts
        if isinstance(part, dict) and part.get("raised_exception")
    )
    return next(messages, None)


def suite_result(
    verdict: TableVerdict, name: str, about: Mapping[str, str]
) -> ExpectationSuiteValidationResult:
    """Returns a verdict as a result of Great Expectations, with values as JSON has them, which a
    page is rendered from.

    ``about`` is what the page says about the data. Outcomes that are an error have no place in it,
    nor has an own expectation that was judged although Great Expectations refuses its arguments.
    """
    judged = [
        outcome
        for outcome in verdict.outcomes
        if outcome.error is None
        and (
            outcome.planned.origin != "own"
            or why_not_built(outcome.planned.type, outcome.planned.kwargs) is None
        )
    ]
    judged += [Outcome(planned, True, None, None) for planned in verdict.measured_only]
    suite = build_suite(name, SuitePlan(name, tuple(outcome.planned for outcome in judged)))
    result = ExpectationSuiteValidationResult(
        success=all(outcome.success for outcome in verdict.outcomes if outcome.error is None),
        results=[_item(*each) for each in zip(judged, suite.expectations, strict=True)],
        suite_name=name,
        meta={"batch_parameters": about, "great_expectations_version": gx.__version__},
    )
    schema = expectationSuiteValidationResultSchema
    described: ExpectationSuiteValidationResult = schema.loads(
        schema.dumps(result.to_json_dict(), sort_keys=True)
    )
    return described


def _item(outcome: Outcome, expectation: Expectation) -> ExpectationValidationResult:
    details = {**outcome.details}
    # waldelta counted these; Great Expectations derives the other figures.
    if "nonnull_count" in details:
        details = _format_map_output(
            {**WITH_EXAMPLES, "include_unexpected_rows": False},
            bool(outcome.success),
            details["element_count"],
            details["nonnull_count"],
            details["unexpected_count"],
            details["partial_unexpected_list"],
        )["result"]
    return ExpectationValidationResult(
        success=bool(outcome.success),
        expectation_config=expectation.configuration,
        result=details,
        exception_info={
            "raised_exception": outcome.raised is not None,
            "exception_message": outcome.raised,
            "exception_traceback": None,
        },
    )


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A result on a page: its mark, the expectation with what doesn't meet it, and what was
    observed, as blocks of Great Expectations' renderers in JSON.

    ``column`` is empty for the table as a whole.
    """

    column: str
    mark: str
    words: list[Any]
    observed: Any


def described(item: ExpectationValidationResult) -> ResultRow:
    """Returns a result in the words of its kind, or of Great Expectations."""
    configuration, words = _configuration(item), list[Any]()
    kind, result = kind_of(configuration.type), {"result": item}
    if (description := configuration.to_domain_obj().description) is not None:
        words = [description]
    elif kind.is_ours:
        template, params = kind.words(configuration.kwargs)
        sentence = {"template": template, "params": params}
        words = [{"content_block_type": "string_template", "string_template": sentence}]
    else:
        context = {
            "configuration": configuration,
            "runtime_configuration": {"include_column_name": False},
        }
        words = _render(LegacyRendererType.PRESCRIPTIVE, configuration.type, context) or [
            configuration.type
        ]
    # What was observed of our kinds has the number of rows; they have no shares of values.
    if not (kind.is_ours and item.result.get("unexpected_count")):
        words += _render(
            LegacyDiagnosticRendererType.UNEXPECTED_STATEMENT, configuration.type, result
        )
    words += _render(LegacyDiagnosticRendererType.UNEXPECTED_TABLE, configuration.type, result)
    observed = _render(LegacyDiagnosticRendererType.OBSERVED_VALUE, configuration.type, result) or [
        "--"
    ]
    mark = (
        "passed" if item.success else "warning" if configuration.severity == "warning" else "failed"
    )
    mark = mark if kind.is_judged(configuration.kwargs) else "not judged yet"
    return ResultRow(str(configuration.kwargs.get("column", "")), mark, words, observed[0])


def _render(renderer: str, kind: str, context: Mapping[str, Any]) -> list[Any]:
    """Returns what a renderer describes, as JSON; nothing where there is none, or where it fails:
    the check's results are in the ledger.
    """
    if (implementation := get_renderer_impl(kind, renderer)) is None:
        return []
    try:
        content: Any = implementation.renderer(**context)
        blocks = content if isinstance(content, list) else [content] if content is not None else []
        return list(RenderedContent.rendered_content_list_to_json(blocks, check_dicts=True))
    except Exception:
        log.exception("Great Expectations can't describe a result of %s", kind)
        return []
