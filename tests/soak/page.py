"""Write docs/explanation/guarantees.md from the results of the fault matrix and the random kills.

    python -m tests.soak.page PAGE.md [--results FOLDER]

The text is in guarantees_page.md beside this file; tables and figures come from the results.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Any

from tests.soak.results import MATRIX, MATRIX_ON_S3, RESULTS, all_kills, code, matrix
from tests.soak.steps import FOLDER_FAULTS, STEPS, STORE_FAULTS, cells

_CONSUME = ("run.", "land.", "consume.", "apply.")
# What pages call parts and groups of steps, where the fault points' names are hard to understand.
_PARTS = {"reread": "complete rows", "foreign": "external commits", "recopy": "resync mark"}
_GROUPS = {"recopy": "resync"}
_DRAFT = Path(__file__).with_name("guarantees_page.md")


def matrix_table(results: dict[str, Any], *, in_store: bool = False) -> str:
    """Parts of a run by faults; a mark is the worst of its steps': ✗, –, ·, ✓."""
    possible = {(step.name, fault) for step, fault in cells([], [], in_store=in_store)}
    faults = STORE_FAULTS if in_store else FOLDER_FAULTS
    parts: dict[str, list[str]] = {}
    tried = {name for name, _ in possible}
    for step in (step for step in STEPS if step.name in tried):
        part = _named(step.point.partition(".")[0], _PARTS)
        part += f" ({_named(step.group, _GROUPS)})" if step.group else ""
        parts.setdefault(part, []).append(step.name)
    lines = [f"| part |{'|'.join(faults)}|", f"| --- |{' --- |' * len(faults)}"]
    for part, names in parts.items():
        marks = []
        for fault in faults:
            found = {
                _mark(results.get(f"{name} | {fault}"))
                for name in names
                if (name, fault) in possible
            }
            marks.append(next((mark for mark in "✗–·✓" if mark in found), ""))
        lines.append(f"| `{part}` | {' | '.join(marks)} |")
    return "\n".join(lines)


def _named(name: str, names: Mapping[str, str]) -> str:
    return names.get(name, name)


def _mark(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "·"
    if cell["problems"]:
        return "✗"
    return "–" if cell["ended"].startswith("not reached") else "✓"


def figures(
    matrix: dict[str, Any],
    on_s3: dict[str, Any],
    kills: Sequence[dict[str, Any]],
    mends: Sequence[dict[str, Any]],
    current: str,
) -> dict[str, str]:
    """What the page's placeholders stand for; ``current`` is the code of now.

    Cells of steps that are no more count for nothing.
    """
    matrix, on_s3 = _possible(matrix), _possible(on_s3, in_store=True)
    run = _run(matrix)
    # The others' next runs are two, or check the targets too.
    seconds = [cell["seconds"] for cell in run if cell["step"].startswith(_CONSUME)]
    of_s3 = _of_matrix(on_s3, current, in_store=True)
    return {
        **_of_matrix(matrix, current),
        **{f"{name}_on_s3": said for name, said in of_s3.items()},
        "days": _days(sorted({one["at"] for one in (*run, *_run(on_s3), *kills, *mends)})),
        "versions": (
            f"PySpark {version('pyspark')}, delta-spark {version('delta-spark')}, PostgreSQL 18"
        ),
        "recovery": f"{statistics.median(seconds):.0f}" if seconds else "?",
        "kills": "\n".join([_kills(kills), *_mends(mends)]),
    }


def _possible(matrix: dict[str, Any], *, in_store: bool = False) -> dict[str, Any]:
    names = {f"{step.name} | {fault}" for step, fault in cells([], [], in_store=in_store)}
    return {name: cell for name, cell in matrix.items() if name in names}


def _run(matrix: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that were reached."""
    return [cell for cell in matrix.values() if _mark(cell) in "✓✗"]


def _of_matrix(matrix: dict[str, Any], current: str, *, in_store: bool = False) -> dict[str, str]:
    """One matrix's table, and its figures."""
    run = _run(matrix)
    return {
        "matrix": matrix_table(matrix, in_store=in_store),
        "possible": str(len(cells([], [], in_store=in_store))),
        "cells": str(len(run)),
        "bad": str(sum(bool(cell["problems"]) for cell in run)),
        "unreached": str(sum(_mark(cell) == "–" for cell in matrix.values())),
        "older": _older(run, current),
    }


def _days(days: Sequence[str]) -> str:
    return " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "never"


def _older(run: Sequence[dict[str, Any]], current: str) -> str:
    """How many cells are of other code than that of now."""
    of_others = sum(cell["code"] != current for cell in run)
    return f"{of_others} of them ran before the code's last change." * bool(of_others)


def _kills(kills: Sequence[dict[str, Any]]) -> str:
    """One line for each version of PostgreSQL and place of the lake."""
    if not kills:
        return "Not run yet."
    lines = [
        "| PostgreSQL | lake | transactions | runs killed | server stops | problems |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    by_kind: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for one in kills:
        kind = one.get("postgres", 18), one.get("lake", "folder")
        by_kind.setdefault(kind, []).append(one)
    for (version_of, lake), of in sorted(by_kind.items()):
        counts = (
            sum(one["transactions"] for one in of),
            sum(one["runs"] for one in of),
            sum(
                one["kills"].get("server", 0) + one.get("store", {}).get("restart", 0) for one in of
            ),
            sum(len(one["problems"]) for one in of),
        )
        lines.append(f"| {version_of} | {lake} | {' | '.join(f'{count:,}' for count in counts)} |")
    return "\n".join(lines)


def _mends(mends: Sequence[dict[str, Any]]) -> list[str]:
    """One more line for each place of the lake, of copies, repairs and target modes."""
    lines = []
    for where, lake in (("local", "folder"), ("s3", "S3")):
        if of := [one for one in mends if one["lake"] == where]:
            kills = sum(one["kills"] for one in of)
            problems = sum(len(one["problems"]) for one in of)
            lines.append(
                f"| {of[0]['postgres']} | {lake}, repairs | | {kills:,} | 0 | {problems:,} |"
            )
    return lines


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = figures(
        matrix(options.results / MATRIX),
        matrix(options.results / MATRIX_ON_S3),
        all_kills(options.results),
        all_kills(options.results, "mends"),
        code(),
    )
    options.page.write_text(Template(_DRAFT.read_text()).substitute(found))


if __name__ == "__main__":
    main()
