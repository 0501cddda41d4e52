"""A sixth of what ``make soak`` runs, for CI: ``python -m tests.soak.shard --minutes 12``.

    python -m tests.soak.shard --minutes N [--number K]

The number of commits chooses the sixth, by files: six numbers in a row cover all tests that are
marked soak. Each result is printed by name; so is what there was no time for, which counts as
neither passed nor failed. The last minutes go to cells of the fault matrix and to random kills. A
test or cell that has begun is waited for, so that it may take some minutes longer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.soak.steps import STEPS

ROOT = Path(__file__).parents[2]
SHARDS = 6
# Of the minutes; the rest is for pytest.
_PROGRAMS_SHARE = 0.25
_WHERE = ("tests/integration", "tests/e2e")


def chosen(tests: list[str], number: int) -> list[str]:
    """The tests of one shard; a file's stay together, since they share what is dear to make."""
    sizes = Counter(test.split("::")[0] for test in tests)
    files = sorted(sizes, key=lambda file: (-sizes[file], file))
    own = {file for place, file in enumerate(files) if place % SHARDS == number % SHARDS}
    return [test for test in tests if test.split("::")[0] in own]


class Results:
    """Results of a run by name; ends it after ``until``, a time.monotonic()."""

    def __init__(self, until: float) -> None:
        self.until = until
        self.found: dict[str, str] = {}
        self._workers: Any = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        # What pytest-xdist asks after each report; it doesn't ask the session.
        self._workers = session.config.pluginmanager.get_plugin("dsession")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.found[report.nodeid] = report.outcome
        if time.monotonic() > self.until:
            self._workers.shouldstop = "the shard's time is up"


def run_tests(tests: list[str], until: float) -> bool:
    """Run them on two workers; returns whether one failed."""
    results = Results(until)
    arguments = ["-q", "-n", "2", "--dist", "loadfile", "-m", "soak"]
    ended = pytest.main([*arguments, *tests], plugins=[results])
    for test in tests:
        print(f"{results.found.get(test, 'no time left'):<13} {test}")
    print("soak shard:", dict(Counter(results.found.get(test, "no time left") for test in tests)))
    broken = ended not in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED)
    return broken or "failed" in results.found.values()


def collected() -> list[str]:
    """The names of all tests that are marked soak."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "soak", *_WHERE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not names:
        raise SystemExit(f"the soak tests can't be collected:\n{done.stdout}{done.stderr}")
    return names


def run_programs(number: int, minutes: float) -> bool:
    """Some cells of the fault matrix and some random kills; returns whether one failed."""
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        steps = ",".join(step.name for step in STEPS[number % SHARDS :: SHARDS])
        for program, more in (("fault_matrix", ["--steps", steps]), ("random_kills", [])):
            command = [sys.executable, "-m", f"tests.soak.{program}", "--results", folder, *more]
            command += ["--minutes", f"{minutes / 2:.1f}", "--seed", str(number)]
            done = subprocess.run(command, cwd=ROOT, check=False)
            failed |= done.returncode != 0
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="a sixth of the soak tests")
    parser.add_argument("--minutes", type=float, required=True, help="how long it may take")
    parser.add_argument("--number", type=int, help="which sixth; default: by the commits' number")
    given = parser.parse_args()
    number = given.number
    if number is None:
        counted = subprocess.check_output(["git", "rev-list", "--count", "HEAD"], cwd=ROOT)
        number = int(counted)
    tests = chosen(collected(), number)
    print(f"soak shard {number % SHARDS + 1} of {SHARDS}: {len(tests)} tests", flush=True)
    ends = time.monotonic() + 60 * given.minutes
    failed = run_tests(tests, ends - 60 * _PROGRAMS_SHARE * given.minutes)
    left = (ends - time.monotonic()) / 60
    if left < 1:  # to the programs, no minutes are no limit
        print("no time left  fault matrix and random kills")
        return int(failed)
    return int(run_programs(number, left) or failed)


if __name__ == "__main__":
    sys.exit(main())
