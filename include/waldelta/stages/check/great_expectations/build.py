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
