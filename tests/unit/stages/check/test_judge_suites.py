"""How preflight learns which expectations Spark can't evaluate."""

from __future__ import annotations

import pytest

from waldelta.stages.check.judge_suites import failures

BROKEN = [
    ("none", [], [[0, 1, 2]]),
    ("one", [1], [[0, 1, 2], [0], [1], [2]]),
    ("all", [0, 1, 2], [[0, 1, 2], [0], [1], [2]]),
]


@pytest.mark.parametrize("broken, asked", [c[1:] for c in BROKEN], ids=[c[0] for c in BROKEN])
def test_expectations_are_evaluated_together_and_alone_only_after_a_failure(broken, asked):
    """A pipeline may have thousands, and each Spark job takes a tenth of a second."""
    calls = []

    def evaluate(numbers):
        calls.append([*numbers])
        if {*numbers} & {*broken}:
            raise ZeroDivisionError

    assert failures(evaluate, [0, 1, 2]) == dict.fromkeys(broken, "ZeroDivisionError")
    assert calls == asked


def test_without_expectations_nothing_is_evaluated():
    assert failures(lambda _: 1 / 0, []) == {}
