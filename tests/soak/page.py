"""Write docs/faults.md from the results of the fault matrix and the random kills.

    python -m tests.soak.page PAGE.md [--results FOLDER]

What is said about steps and faults is in faults_page.md beside this file; tables and figures come
from the results.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

from tests.soak.results import RESULTS, all_kills, code, matrix
from tests.soak.steps import FAULTS, STEPS, cells
from waldelta.quantities import counted

_CONSUME = ("run.", "land.", "consume.", "apply.")
_DRAFT = Path(__file__).with_name("faults_page.md")


def matrix_table(results: dict[str, Any]) -> str:
    """Steps by faults: ✓ all was well after the next run, ✗ it wasn't, – not reached, · not run;
    empty: doesn't apply.
    """
    possible = {(step.name, fault) for step, fault in cells([], [])}
    lines = [f"| step | {' | '.join(FAULTS)} |", f"| --- |{' --- |' * len(FAULTS)}"]
    for step in STEPS:
        marks = [
            _mark(results.get(f"{step.name} | {fault}")) if (step.name, fault) in possible else ""
            for fault in FAULTS
        ]
        lines.append(
            f"| `{step.point}`{f' ({step.group})' if step.group else ''} | {' | '.join(marks)} |"
        )
    return "\n".join(lines)


def _mark(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "·"
    if cell["problems"]:
        return "✗"
    return "–" if cell["ended"].startswith("not reached") else "✓"


def figures(
    matrix: dict[str, Any], kills: Sequence[dict[str, Any]], current: str
) -> dict[str, str]:
    """What the page's placeholders stand for; ``current`` is the code of now, as results.code() has
    it.
    """
    run = [cell for cell in matrix.values() if _mark(cell) in "✓✗"]
    # The others' next runs are two, or check the targets too.
    seconds = [cell["seconds"] for cell in run if cell["step"].startswith(_CONSUME)]
    return {
        "matrix": matrix_table(matrix),
        "possible": str(len(cells([], []))),
        "cells": str(len(run)),
        "bad": str(sum(bool(cell["problems"]) for cell in run)),
        "unreached": str(sum(_mark(cell) == "–" for cell in matrix.values())),
        "older": _older(run, current),
        "days": " and ".join(sorted({cell["at"] for cell in run} | {told["at"] for told in kills})),
        "versions": (
            f"PySpark {version('pyspark')}, delta-spark {version('delta-spark')}, PostgreSQL 18"
        ),
        "recovery": f"{statistics.median(seconds):.0f}" if seconds else "?",
        "kills": (
            "\n\n".join([*(_kills(told) for told in kills), *_together(kills)]) or "Not run yet."
        ),
    }


def _older(run: Sequence[dict[str, Any]], current: str) -> str:
    """How many cells are of other code than that of now."""
    of_others = sum(cell["code"] != current for cell in run)
    return (
        f"{of_others} of them were run while this version was written, with code before its last"
        " change." * bool(of_others)
    )


def _in_relation(after: Sequence[float], undisturbed: Sequence[float]) -> str:
    """How long runs after a fault took in relation to those that nothing happened to: medians, in
    seconds, and the slowest.
    """
    if not after or not undisturbed:
        return "not measured this time"
    one, other = statistics.median(after), statistics.median(undisturbed)
    return (
        f"{one:.1f} s (median of {len(after)}; the slowest {max(after):.1f} s), against {other:.1f}"
        f" s of a run that nothing happened to (median of {len(undisturbed)}): **{one / other:.1f}"
        " times** as long"
    )


def _kills(told: dict[str, Any]) -> str:
    how = ", ".join(
        f"{name} {count}" for name, count in sorted(told["kills"].items()) if name != "server"
    )
    where = ", ".join(
        f"`{step}` {count}"
        for step, count in sorted(told["where"].items(), key=lambda pair: -pair[1])
    )
    kills = sum(count for name, count in told["kills"].items() if name != "server")
    return (
        f"**{told['runs']} runs killed** by {kills} kills ({how}) under {told['transactions']}"
        f" transactions, with {counted(told['kills'].get('server', 0), 'stop')} of the server;"
        f" {told['comparisons']} comparisons, **{len(told['problems'])} problems** (rows lost, rows"
        f" doubled, or a run that failed); PostgreSQL {told.get('postgres', 18)}, seed"
        f" {told['seed']}. The last step told before the kill: {where}. The run after the kills"
        f" took {_in_relation(told['recovery'], told['undisturbed'])}."
    )


def _together(kills: Sequence[dict[str, Any]]) -> list[str]:
    if len(kills) < 2:
        return []
    runs, problems = (
        sum(told["runs"] for told in kills),
        sum(len(told["problems"]) for told in kills),
    )
    events = sum(count for told in kills for how, count in told["kills"].items() if how != "server")
    return [f"Together: **{runs} runs killed** by {events} kills, **{problems} problems**."]


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    told = figures(matrix(options.results), all_kills(options.results), code())
    options.page.write_text(Template(_DRAFT.read_text()).substitute(told))


if __name__ == "__main__":
    main()
