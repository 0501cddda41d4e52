"""Classes of the kinds that Great Expectations lacks: it checks their arguments and describes them.

Importing this module registers them, and imports all of Great Expectations.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import wraps
from types import new_class
from typing import Any

from great_expectations.compatibility import pydantic
from great_expectations.expectations.core import ExpectColumnQuantileValuesToBeBetween
from great_expectations.expectations.expectation import (
    BatchExpectation,
    render_suite_parameter_string,
)
from great_expectations.render import (
    LegacyDiagnosticRendererType,
    LegacyRendererType,
    RenderedStringTemplateContent,
)
from great_expectations.render.renderer.renderer import renderer

from waldelta.stages.check.suite.kind import ExpectationKind
from waldelta.stages.check.suite.kinds import KINDS


class _TargetExpectation(BatchExpectation):
    """Base class of our expectations, which their kinds describe and judge without it."""

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

    def _validate(self, *_: Any, **__: Any) -> dict[str, Any]:
        # Great Expectations registers no class without this method.
        raise NotImplementedError(f"{self._kind().type} is judged without Great Expectations")


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
        "success_keys": tuple(kind.arguments),
        **{
            name: pydantic.Field(description=argument.meaning, **argument.options)
            for name, argument in arguments
        },
    }
    name = "".join(word.capitalize() for word in kind.type.split("_"))
    new_class(name, (_TargetExpectation,), exec_body=lambda body: body.update(members))


for _kind in KINDS.values():
    if _kind.arguments:
        register(_kind)
