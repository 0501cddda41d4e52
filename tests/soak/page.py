"""Write docs/faults.md from the results of the fault matrix and the random kills.

    python -m tests.soak.page MATRIX.json KILLS.json PAGE.md

What is said about steps and faults is in faults_page.md beside this file; tables and figures come from the results.
"""

from __future__ import annotations

import argparse
import json
import statistics
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

from tests.soak.fault_matrix import FAULTS, STEPS, cells

_DRAFT = Path(__file__).with_name("faults_page.md")


def matrix_table(results: dict[str, Any]) -> str:
    """Steps by faults: ✓ all was well after the next run, ✗ it wasn't, – not reached, · not run; empty: doesn't apply."""
    possible = {(step.name, fault) for step, fault in cells([], [])}
    lines = [f"| step | {' | '.join(FAULTS)} |", f"| --- |{' --- |' * len(FAULTS)}"]
    for step in STEPS:
        marks = [
            _mark(results.get(f"{step.name} | {fault}")) if (step.name, fault) in possible else "" for fault in FAULTS
        ]
        lines.append(f"| `{step.point}`{f' ({step.group})' if step.group else ''} | {' | '.join(marks)} |")
    return "\n".join(lines)


def _mark(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "·"
    if cell["problems"]:
        return "✗"
    return "–" if cell["ended"].startswith("not reached") else "✓"


def figures(matrix: dict[str, Any], kills: dict[str, Any]) -> dict[str, str]:
    """What the page's placeholders stand for."""
    run = [cell for cell in matrix.values() if _mark(cell) in "✓✗"]
    seconds = [cell["seconds"] for cell in run if cell["step"].split(".")[0] not in ("check", "maintain")]
    done = kills["kills"]
    where = sorted(kills["where"].items(), key=lambda pair: -pair[1])
    return {
        "matrix": matrix_table(matrix),
        "cells": str(len(run)),
        "bad": str(sum(bool(cell["problems"]) for cell in run)),
        "days": " and ".join(sorted({cell["at"] for cell in run} | {kills["at"]})),
        "versions": f"PySpark {version('pyspark')}, delta-spark {version('delta-spark')}, PostgreSQL 18",
        "recovery": f"{statistics.median(seconds):.0f}" if seconds else "?",
        "kills": str(sum(done.values())),
        "how": ", ".join(f"{how} {count}" for how, count in sorted(done.items())),
        "where": ", ".join(f"`{step}` {count}" for step, count in where),
        "transactions": str(kills["transactions"]),
        "comparisons": str(kills["comparisons"]),
        "problems": str(len(kills["problems"])),
        "seed": str(kills["seed"]),
    }


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("matrix", "kills", "page"):
        parser.add_argument(name, type=Path)
    options = parser.parse_args()
    matrix, kills = (json.loads(path.read_text()) for path in (options.matrix, options.kills))
    options.page.write_text(Template(_DRAFT.read_text()).substitute(figures(matrix, kills)))


if __name__ == "__main__":
    main()
