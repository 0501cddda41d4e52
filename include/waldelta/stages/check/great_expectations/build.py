"""Builds Great Expectations' objects for a planned suite, and checks the names and arguments of own
expectations.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import great_expectations as gx
from great_expectations.compatibility import pydantic
from great_expectations.expectations.expectation import Expectation
from great_expectations.expectations.registry import (
    get_expectation_impl,
    list_registered_expectation_implementations,
)

import waldelta.stages.check.great_expectations._custom  # noqa: F401 - it registers ours
from waldelta.errors import ConfigError
from waldelta.stages.check.suite import PlannedExpectation, SuitePlan

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    known = {
        key: impl
        for type_name in list_registered_expectation_implementations()
        for impl in [get_expectation_impl(type_name)]
        for key in (type_name, impl.__name__)
    }
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
        fields = "; ".join(
            f"kwargs.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in err.errors()
        )
        raise ValueError(f"{planned.type}: {fields}") from err
    except (TypeError, ValueError) as err:
        raise ValueError(f"{planned.type}: {err}") from err
