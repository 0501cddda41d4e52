"""``doctor``: what an installation, and a pipeline, lack, and what to do about it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from waldelta.cli._installation_checks import (
    CHECK_TIMEOUT_S,
    Check,
    CheckResult,
    CheckStatus,
    check_packages,
    check_workers,
    installation_checks,
    problem_of,
    run_check,
)
from waldelta.cli._output import styled
from waldelta.errors import WaldeltaError
from waldelta.quantities import counted

if TYPE_CHECKING:
    from waldelta.cli._output import Output

# A cluster may first have to start executors.
_SESSION_TIMEOUT_S = 300.0
# By status: the mark, the mark where the terminal can't print it, and the colour.
_MARKS: Mapping[CheckStatus, tuple[str, str, str]] = {
    "ok": ("✓", "ok", "green"),
    "warning": ("⚠", "warning", "yellow"),
    "problem": ("✗", "problem", "bold red"),
}


def examine(path: Path | None, output: Output, *, workers: bool) -> bool:
    """Run the checks of the installation, a pipeline, and Spark's ``workers``; returns whether one
    is a problem.
    """
    found = _results(installation_checks())
    if workers:
        found += run_check("workers", check_workers, _SESSION_TIMEOUT_S)
    if path is not None:
        found += _of_pipeline(path)
    count = Counter(one.status for one in found)
    document = {
        "checks": [asdict(one) for one in found],
        "problems": count["problem"],
        "warnings": count["warning"],
    }
    output.show(document, as_text(found))
    return count["problem"] > 0


def _results(checks: Mapping[str, Check]) -> list[CheckResult]:
    return [one for name, check in checks.items() for one in run_check(name, check)]


def _of_pipeline(path: Path) -> list[CheckResult]:
    try:
        from waldelta.cli._pipeline_checks import NEEDS_SOURCE, pipeline_checks
        from waldelta.config.airflow_connection import take_from_airflow
        from waldelta.jobs import Pipeline

        pipeline = Pipeline.load(path)
        take_from_airflow(pipeline.file.conn_ids, CHECK_TIMEOUT_S)
    except WaldeltaError as err:
        return [problem_of("file", err)]
    loaded = CheckResult("file", "ok", f"pipeline {pipeline.file.pipeline} in {path}")
    checks = pipeline_checks(pipeline, path)
    source = run_check("source", checks.pop("source"))
    if any(one.status == "problem" for one in source):
        checks = {name: check for name, check in checks.items() if name not in NEEDS_SOURCE}
    return [loaded, *source, *_results(checks)]


def as_text(found: Iterable[CheckResult]) -> str:
    """Returns a line for each result, with its remedy below it, and how many need attention."""
    lines, count = [], Counter(one.status for one in found)
    for one in found:
        lines.append(f"{_mark(one.status)} {one.check}: {_indented(one.text)}")
        if one.remedy and one.status != "ok":
            lines.append(f"    {_indented(one.remedy)}")
    lines.append(f"{counted(count['problem'], 'problem')}, {counted(count['warning'], 'warning')}")
    return "\n".join(lines)


def _mark(status: CheckStatus) -> str:
    mark, plain, colour = _MARKS[status]
    encoding = (sys.stdout.encoding or "ascii").lower()
    shown = mark if encoding.startswith("utf") else plain
    return styled(shown, colour)


def _indented(text: str) -> str:
    return text.replace("\n", "\n    ")


def explain_import_error(err: ImportError) -> None:
    """Print which package is missing or broken, in place of a stack trace."""
    sys.stderr.write(f"waldelta can't start: {type(err).__name__}: {err}\n")
    sys.stderr.write(as_text(run_check("packages", check_packages)) + "\n")
