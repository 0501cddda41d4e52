"""The tiers of the tests, and what each of them costs.

``make test`` runs the tests without a tier's mark, in this process where that is what a small run
does. ``make test-all`` runs them all on Spark, and those that are marked nightly. ``make soak``
runs those that are marked soak. Each mark has a reason: the ordinary test that fails on the same
defect, or the kind of variant that the test adds.

Every session of pytest records the seconds of its tests, and which of them used Spark. ``make
test-profile`` (``python -m tests.tiers``) writes tests/profile.md and tests/seconds.json of it.
"""

import ast
import json
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.machine_load import pandas_import_s
from tests.support.seeds import is_long, is_on_spark

ROOT: Final = Path(__file__).parents[1]
# What pytest's option -m gets.
ORDINARY: Final = "not nightly and not soak"
MARKS: Final = ("soak", "nightly", "long")
TIERS: Final = ("test", "test-all", "soak")
# The seconds of every test that ran in this checkout, the page about them, and their sums by file.
SECONDS: Final = ROOT / ".waldelta" / "test-seconds.json"
PROFILE: Final = ROOT / "tests" / "profile.md"
RECORD: Final = ROOT / "tests" / "seconds.json"
# The name of a test's property, and of what a record has of the tests that used Spark.
ON_SPARK: Final = "on Spark"
# Ten minutes of three workers, where a process imports pandas in half a second.
BUDGET_S: Final = 1_800


def tier(marks: Collection[str]) -> str:
    """Return the first tier that has a test with these marks: "test", "test-all" or "soak"."""
    if "soak" in marks:
        return "soak"
    return "test-all" if "nightly" in marks or is_on_spark() else "test"


def limit_s(marks: Collection[str]) -> int | None:
    """Return the seconds until a test with these marks counts as hanging; None: pytest's own."""
    if "soak" in marks or is_long():
        return 7_200
    return 600 if "long" in marks else None


def bare_marks(path: Path) -> list[str]:
    """Return the lines of a file with such a mark whose reason has fewer than three words."""
    text = path.read_text()
    if not any(f"mark.{name}" in text for name in MARKS):
        return []
    nodes = list(ast.walk(ast.parse(text)))
    marks = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and node.attr in MARKS
        and ast.unparse(node.value) == "pytest.mark"
    ]
    reasons = {
        node.func: node.args[0].value
        for node in nodes
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
        self._on_spark: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tiers[tier(report.keywords)][report.nodeid] += report.duration
        if not is_on_spark():
            self._on_spark[report.nodeid] = ON_SPARK in dict(report.user_properties)

    def pytest_sessionfinish(self) -> None:
        if not any(self._tiers.values()):
            return
        SECONDS.parent.mkdir(exist_ok=True)
        recorded = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
        seconds = {name: recorded.get(name, {}) | self._tiers[name] for name in TIERS}
        seconds[ON_SPARK] = recorded.get(ON_SPARK, {}) | self._on_spark
        SECONDS.write_text(json.dumps(seconds))


def tests_on_spark() -> frozenset[str]:
    """Return the tests that used Spark when ``make test-profile`` recorded them."""
    return frozenset(json.loads(RECORD.read_text())[ON_SPARK])


def write_profile() -> None:
    """Write what was recorded to tests/profile.md, and print the tiers' sizes."""
    if not SECONDS.exists():
        raise SystemExit("no test has run in this checkout: run make test first")
    recorded: dict[str, dict[str, float]] = json.loads(SECONDS.read_text())
    on_spark = [test for test, used in recorded.pop(ON_SPARK).items() if used and _is_there(test)]
    tiers = {
        name: {test: took for test, took in tests.items() if _is_there(test)}
        for name, tests in recorded.items()
    }
    pandas_s = pandas_import_s()
    record = {
        "import pandas": round(pandas_s, 2),
        ON_SPARK: on_spark,
        **{name: _by_file(tests) for name, tests in tiers.items()},
    }
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    lines = sizes(record)
    PROFILE.write_text(_page(lines, pandas_s, Counter(tiers["test"])))
    print("\n".join(lines))


def _by_file(tests: Mapping[str, float]) -> dict[str, float]:
    files: Counter[str] = Counter()
    for test, took in tests.items():
        files[test.partition("::")[0]] += took
    return {file: round(took, 1) for file, took in files.items()}


def sizes(record: Mapping[str, Any]) -> list[str]:
    """Return a line about each tier."""
    return [
        f"{name}: {sum(record[name].values()):,.0f} s of a worker in {len(record[name])} files"
        for name in TIERS
    ]


def _is_there(test: str) -> bool:
    return (ROOT / test.partition("::")[0]).exists()


def _page(sizes: list[str], pandas_s: float, ordinary: Counter[str]) -> str:
    files: Counter[str] = Counter()
    folders: Counter[str] = Counter()
    for test, took in ordinary.items():
        file = test.partition("::")[0]
        files[file] += took
        folders["/".join(file.split("/")[:3]) if "/unit/" not in file else "tests/unit"] += took
    lines = [
        "# Where the time of the tests goes",
        "`make test-profile` writes this page from the last runs on one machine. There, a new",
        f"process took {pandas_s:.2f} s of CPU to import pandas.",
        "",
        *(f"- {line}" for line in sizes),
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
