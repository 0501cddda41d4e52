"""The tiers of the tests, and what each of them costs.

``make test`` runs the tests without a tier's mark, in this process where that is what a small run
does. ``make test-all`` runs them all on Spark, and those that are marked nightly. ``make soak``
runs those that are marked soak. Each mark has a reason: the ordinary test that fails on the same
defect, or the kind of variant that the test adds.

Every session of pytest records the seconds of its tests. ``make test-profile`` (``python -m
tests.tiers``) writes what was recorded to tests/profile.md and tests/profile.json.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Final

import pytest

from tests.support.machine_load import pandas_import_s
from tests.support.seeds import is_on_spark

ROOT: Final = Path(__file__).parents[1]
# What pytest's option -m gets.
ORDINARY: Final = "not nightly and not soak"
MARKS: Final = ("soak", "nightly")
TIERS: Final = ("test", "test-all", "soak")
# The seconds of every test that ran here, and what of them was recorded in the repository.
SECONDS: Final = ROOT / ".waldelta" / "test-seconds.json"
PROFILE: Final = ROOT / "tests" / "profile.json"
# Two workers for ten minutes, less their starts.
BUDGET_S: Final = 2 * (600 - 20)


def tier(marks: Collection[str]) -> str:
    """Return the first tier that has a test with these marks: "test", "test-all" or "soak"."""
    if "soak" in marks:
        return "soak"
    return "test-all" if "nightly" in marks or is_on_spark() else "test"


def bare_marks(path: Path) -> list[str]:
    """Return the lines of a file with a tier's mark that has no reason of three words or more."""
    tree = ast.parse(path.read_text())
    marks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in MARKS
        and ast.unparse(node.value) == "pytest.mark"
    ]
    reasons = {
        node.func: node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant)
    }
    return [
        f"{path.name}:{mark.lineno}"
        for mark in marks
        if len(str(reasons.get(mark, "")).split()) < 3
    ]


class Record:
    """Records the seconds of each test, beside those of earlier sessions."""

    def __init__(self) -> None:
        self._tiers: dict[str, Counter[str]] = {name: Counter() for name in TIERS}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tiers[tier(report.keywords)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        SECONDS.parent.mkdir(exist_ok=True)
        recorded = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        SECONDS.write_text(
            json.dumps({name: recorded.get(name, {}) | self._tiers[name] for name in TIERS})
        )


def sizes(profile: dict) -> dict[str, tuple[int, float]]:
    """Return the tests and seconds of each tier of a profile (tests/profile.json).

    Files that are gone don't count.
    """
    totals: dict[str, tuple[int, float]] = {}
    for name, files in profile["tiers"].items():
        there = [size for path, size in files.items() if (ROOT / path).exists()]
        totals[name] = (sum(tests for tests, _ in there), sum(seconds for _, seconds in there))
    return totals


def summary(profile: dict) -> list[str]:
    """Return a line for each tier: its tests, its seconds."""
    return [
        f"{name}: {tests:,} tests, {seconds:,.0f} s of a worker"
        for name, (tests, seconds) in sizes(profile).items()
    ]


def write_profile() -> None:
    """Write what was recorded to tests/profile.json and tests/profile.md, and print the tiers."""
    seconds: dict[str, dict[str, float]] = json.loads(SECONDS.read_text())
    files: dict[str, dict[str, list]] = {name: {} for name in TIERS}
    for name, tests in seconds.items():
        for test, took in tests.items():
            entry = files[name].setdefault(test.partition("::")[0], [0, 0.0])
            entry[0], entry[1] = entry[0] + 1, round(entry[1] + took, 2)
    profile = {
        "pandas_import_s": round(pandas_import_s(), 2),
        "tiers": {name: dict(sorted(own.items())) for name, own in files.items()},
    }
    PROFILE.write_text(json.dumps(profile, indent=1) + "\n")
    (ROOT / "tests" / "profile.md").write_text(_page(profile, Counter(seconds["test"])))
    print("\n".join(summary(profile)))


def _page(profile: dict, ordinary: Counter[str]) -> str:
    files: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for test, took in ordinary.items():
        file = test.partition("::")[0]
        files[file] += took
        folders["/".join(file.split("/")[:3]) if "/unit/" not in file else "tests/unit"] += took
    lines = [
        "# Where the time of the tests goes",
        "`make test-profile` writes this page from the last runs on one machine. There, a new",
        f"process took {profile['pandas_import_s']} s of CPU to import pandas.",
        "",
        *(f"- {line}" for line in summary(profile)),
        *_table("`make test`, by folder", "folder", folders, 20),
        *_table("`make test`, by file", "file", files, 40),
        *_table("`make test`, by test", "test", ordinary, 40),
    ]
    return "\n".join([*lines, ""])


def _table(title: str, what: str, seconds: Counter[str], most: int) -> list[str]:
    rows = [f"| `{name}` | {took:,.0f} |" for name, took in seconds.most_common(most)]
    return ["", f"## {title}", f"| {what} | seconds |", "| --- | ---: |", *rows]


if __name__ == "__main__":
    write_profile()
