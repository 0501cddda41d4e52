"""How preflight learns which expectations Spark can't evaluate."""

from pathlib import Path

import pytest

from tests.support.bookkeeping import pipeline
from tests.support.pipelines import job_of
from waldelta.config.expectation_files import TargetColumns, assign_suites, read_each
from waldelta.errors import SparkUnreachable
from waldelta.findings import Finding
from waldelta.stages.check.great_expectations.own_expectations import (
    MOST_ERRORS,
    MOST_PER_QUERY,
    evaluate_each,
    why_unevaluable,
)
from waldelta.stages.check.judge_suites import SuiteJudge

KIND = "type: expect_target_rows_to_satisfy"

BROKEN = [
    ("none", [], [[0, 1, 2]]),
    ("one", [1], [[0, 1, 2], [0], [1, 2], [1], [2]]),
    ("all", [0, 1, 2], [[0, 1, 2], [0], [1, 2], [1], [2]]),
]


@pytest.mark.parametrize("broken, asked", [c[1:] for c in BROKEN], ids=[c[0] for c in BROKEN])
def test_expectations_are_evaluated_together_and_alone_only_after_a_failure(broken, asked):
    """A pipeline may have thousands, and each Spark job takes a tenth of a second."""
    calls = []

    def evaluate(numbers):
        calls.append([*numbers])
        if {*numbers} & {*broken}:
            raise ZeroDivisionError
        return dict.fromkeys(numbers, "met")

    met, errors = evaluate_each(evaluate, [0, 1, 2])
    assert [*errors] == broken
    assert {*met} == {0, 1, 2} - {*broken}
    assert calls == asked


def test_ten_thousand_are_evaluated_in_groups():
    """One that can't be evaluated has only its group evaluated again."""
    asked = []

    def evaluate(numbers):
        asked.append(len(numbers))
        if 7 in numbers:
            raise ZeroDivisionError
        return dict.fromkeys(numbers, "met")

    met, errors = evaluate_each(evaluate, range(10_000))
    assert (len(met), [*errors]) == (9_999, [7])
    assert max(asked) == MOST_PER_QUERY
    assert sum(asked) < 10_000 + 3 * MOST_PER_QUERY


def test_of_many_that_cannot_be_evaluated_few_are_found():
    """Otherwise ten thousand would take twenty thousand queries."""
    asked = []

    def evaluate(numbers):
        asked.append(numbers)
        raise ZeroDivisionError

    met, errors = evaluate_each(evaluate, range(10_000))
    assert (met, len(errors)) == ({}, 10_000)
    alone = [n for n, err in errors.items() if isinstance(err, ZeroDivisionError)]
    assert alone == [*range(len(alone))]
    assert MOST_ERRORS <= len(alone) < 2 * MOST_ERRORS
    assert "correct those first" in why_unevaluable(errors[9_999])
    assert len(asked) < 100


def test_without_expectations_nothing_is_evaluated():
    assert evaluate_each(lambda _: 1 / 0, []) == ({}, {})


@pytest.fixture
def findings(lake, tmp_path):
    """Judges a suite of these conditions of two tables, where no server answers."""

    def judge(*conditions: str) -> tuple[set[Finding], list[str]]:
        opened = []

        def open_session():
            opened.append("tried")
            raise SparkUnreachable("no answer")

        items = [f'{{{KIND}, kwargs: {{condition: "{c}", meaning: m}}}}' for c in conditions]
        for name in ("a", "b"):
            Path(tmp_path / f"public.{name}.yml").write_text(f"expectations: [{', '.join(items)}]")
        own = assign_suites(read_each(tmp_path), ["public.a", "public.b"])
        judge = SuiteJudge(job_of(pipeline(lake)), open_session)
        columns = TargetColumns({"a": "int", "v": "variant"}, True)
        return (
            {each for name, file in own.by_table.items() for each in judge(name, file, columns)},
            opened,
        )

    return judge


@pytest.mark.parametrize("condition", ["a % 2 = 0", "A > 1", "v = 'x'", "a = 'x'"])
def test_without_spark_one_warning_says_so_for_all_tables(findings, condition):
    """A server that doesn't answer is asked once, whatever the number of tables."""
    (warning,), opened = findings("a > 1", condition)
    assert warning.severity == "warning"
    assert "no Spark session can be opened (SparkUnreachable)" in warning.text
    assert opened == ["tried"]


def test_what_arrow_certainly_evaluates_needs_no_spark(findings):
    """Spark compiles each condition, which takes minutes for ten thousand."""
    assert findings(*(f"a > {n} or a is null" for n in range(100))) == (set(), [])
