"""What people read at the end of a run: columns of the verb, the stage's own outcome, warnings."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from waldelta.pipeline import RunResult, StageResult
from waldelta.pipeline.run_result import TableResult
from waldelta.stages.check.suite import QualityReport


def shown(result: RunResult, stage: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=140)
    result.print_summary(console, stage)
    return console.file.getvalue()


HEADINGS = {
    "consume": (
        TableResult(inserted=1234, version=7),
        ["inserted", "skipped", "1,234"],
        ["rows copied"],
    ),
    "sync": (TableResult(rows=99, version=1), ["rows copied", "99", "verbatim"], ["inserted"]),
    "validate": (TableResult(), ["public.t"], ["rows copied", "inserted"]),
    "maintain": (TableResult(), ["public.t"], ["rows copied", "inserted"]),
}


@pytest.mark.parametrize("verb", HEADINGS)
def test_columns_say_what_the_verb_does(verb):
    """Nothing is copied by a check, so nothing says so."""
    table, there, absent = HEADINGS[verb]
    text = shown(RunResult(verb, "r", "succeeded", tables={"public.t": table}))
    assert [word for word in there if word not in text] == []
    assert [word for word in absent if word in text] == []


def test_the_title_of_one_stage_is_how_that_stage_ended():
    """The run isn't over then, but what was asked for is."""
    result = RunResult("consume", "r", "running", {"land": StageResult("succeeded", 1.0)})
    assert "consume r, stage land: succeeded" in shown(result, "land")
    assert "consume r: running" in shown(result)
    result.stages["apply"] = StageResult("failed", 1.0)
    assert "consume r, stage apply: failed" in shown(result, "apply")


def test_the_title_of_a_narrow_table_is_one_line():
    """Maintenance tells no numbers of its tables, and run ids are longer than their names."""
    name = "scheduled__2026-11-25T17:48:19.325406+00:00"
    result = RunResult("maintain", name, "succeeded", tables={"public.t": TableResult()})
    assert shown(result).splitlines()[0] == f"maintain {name}: succeeded"


def test_a_run_that_came_to_no_table_shows_no_empty_one():
    text = shown(RunResult("consume", "r", "failed", {"land": StageResult("failed", 0.1)}))
    assert text.splitlines() == ["consume r: failed", "stages: land 0.1 s (failed)"]


def test_warnings_are_shown_and_kept():
    """Whatever brackets a name has."""
    result = RunResult("consume", "r", warnings=["slot 's' [bold] holds back 9 GB"])
    assert "warning: slot 's' [bold] holds back 9 GB" in shown(result)
    assert RunResult.from_json(result.to_json()).warnings == result.warnings


def test_files_that_fit_no_table_are_told():
    """Once, also by a check that is tried again; and no more once they are gone."""
    result = RunResult("consume", "r")
    for notes in (("x.yml fits no table",), ("x.yml fits no table",)):
        result.add_check(QualityReport("r", (), notes=notes))
    assert (result.unused_suites, result.warnings) == (
        ["x.yml fits no table"],
        ["x.yml fits no table"],
    )
    assert RunResult.from_json(result.to_json()) == result
    result.add_check(QualityReport("r", ()))
    assert result.unused_suites == []
