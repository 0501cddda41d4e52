"""Own expectations that can't be evaluated, by the errors that Spark raises."""

from types import SimpleNamespace

import pytest

from waldelta.stages.check.great_expectations.own_expectations import why_unevaluable


class JavaError:
    """An error of Java as Py4J shows it; only Spark's own have a condition."""

    def __init__(self, condition=None, cause=None, name="org.apache.spark.SparkException"):
        self._cause, self._name = cause, name
        if name.startswith("org.apache.spark"):
            self.getCondition = lambda: condition

    def getClass(self):  # noqa: N802
        return SimpleNamespace(getName=lambda: self._name)

    def getCause(self):  # noqa: N802
        return self._cause


class Py4JJavaError(Exception):
    def __init__(self, java_exception):
        super().__init__("An error occurred while calling o1.collectToPython")
        self.java_exception = java_exception


class SparkError(Exception):
    def getCondition(self):  # noqa: N802
        return "DIVIDE_BY_ZERO"


INVALID = JavaError("INVALID_PARAMETER_VALUE.PATTERN")


@pytest.mark.parametrize(
    ("raised", "why"),
    [
        (SparkError(), "DIVIDE_BY_ZERO"),
        (Py4JJavaError(INVALID), "INVALID_PARAMETER_VALUE.PATTERN"),
        (Py4JJavaError(JavaError(cause=INVALID)), "INVALID_PARAMETER_VALUE.PATTERN"),
        (Py4JJavaError(JavaError(cause=INVALID, name="java.util.ConcurrentException")),
         "INVALID_PARAMETER_VALUE.PATTERN"),
        (Py4JJavaError(JavaError(cause=JavaError(name="java.util.regex.PatternSyntaxException"))),
         "INVALID_PARAMETER_VALUE.PATTERN"),
        (Py4JJavaError(JavaError()), "Py4JJavaError"),
        (ValueError("a row's value"), "ValueError"),
    ],
)  # fmt: skip
def test_the_condition_of_an_error(raised, why):
    """A task's failure names what Spark met, which may be a cause of what Java raised."""
    assert why_unevaluable(raised) == why
