"""A share of what ``make test`` leaves out: ``python -m tests.share test-all --minutes 15``.

    python -m tests.share test-all|soak --minutes N [--number K]

The number of commits chooses the share, by files, so that as many numbers in a row as there are
shares cover the tier. Whatever runs when the minutes are over is killed. Each result is printed by
name, and so is what wasn't reached, which counts as neither passed nor failed. A share of the soak
leaves a quarter of its minutes to cells of the fault matrix and to kills.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from tests.soak.steps import STEPS

ROOT: Final = Path(__file__).parents[1]
# Into how many shares a tier is divided; a sixth of the soak each night covers it in a week.
SHARES: Final = {"test-all": 4, "soak": 6}
_MARKED: Final = {"test-all": "(nightly or spark) and not soak", "soak": "soak"}
_PROGRAMS_SHARE: Final = 0.25
_WHERE: Final = ("tests/e2e", "tests/integration", "tests/unit")
# Where the controlling process of pytest writes each result.
_RESULTS: Final = "WALDELTA_SHARE_RESULTS"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a result as soon as there is one; killed tests leave none."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (
        report.when == "call" or report.outcome != "passed"
    ):
        with Path(os.environ[_RESULTS]).open("a") as file:
            print(json.dumps([report.nodeid, report.outcome]), file=file)


def share(tests: list[str], number: int, shares: int) -> list[str]:
    """Return the tests of one share; a file's stay together, because they share fixtures.

    The number shuffles the files: what a share doesn't reach is something else the next time.
    """
    files: dict[str, list[str]] = {}
    for test in tests:
        files.setdefault(test.partition("::")[0], []).append(test)
    own = sorted(files, key=lambda file: (-len(files[file]), file))[number % shares :: shares]
    random.Random(number).shuffle(own)
    return [test for file in own for test in files[file]]


def run_tests(tier: str, tests: list[str], ends: float) -> bool:
    """Run them on two workers until ``ends`` (time.monotonic()); returns whether one failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results"
        file.touch()
        command = [sys.executable, "-m", "pytest", "-p", "tests.share", "-q", "-n", "2"]
        command += ["--dist", "worksteal", "-m", _MARKED[tier], *tests]
        environment = os.environ | {_RESULTS: str(file), "WALDELTA_TESTS_ON_SPARK": "1"}
        run = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
        try:
            status, reports = run.wait(max(1, ends - time.monotonic())), file.read_text()
        except subprocess.TimeoutExpired:
            # What is reported after the interrupt wasn't reached: pytest may call it a crash.
            reports = file.read_text()
            status = _end(run)
        results = dict(json.loads(line) for line in reports.splitlines())
    for test in tests:
        print(f"{results.get(test, 'not reached'):<11} {test}")
    print(f"share of {tier}:", dict(Counter(results.get(t, "not reached") for t in tests)))
    # Killed at the end of its time, pytest has no status of its own.
    return bool(status) or "failed" in results.values()


def _end(run: subprocess.Popen) -> None:
    """End pytest, which has half a minute to stop the servers of its tests."""
    os.killpg(run.pid, signal.SIGINT)
    try:
        run.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()


def collected(tier: str) -> list[str]:
    """Return the names of the tier's tests; raises SystemExit when they can't be collected."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", _MARKED[tier], *_WHERE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if done.returncode or not names:
        raise SystemExit(f"the {tier} tests can't be collected:\n{done.stdout}{done.stderr}")
    return names


def run_programs(number: int, minutes: float) -> bool:
    """Run cells of the fault matrix and both kinds of kills; returns whether a program failed."""
    steps = ",".join(step.name for step in STEPS[number % SHARES["soak"] :: SHARES["soak"]])
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        programs = (
            ["fault_matrix", "--results", folder, "--steps", steps],
            ["random_kills", "--results", folder, *([], ["--connect"], ["--s3"])[number % 3]],
            ["mend_kills", *([], ["--s3"])[number % 2]],
        )
        for program, *more in programs:
            command = [sys.executable, "-m", f"tests.soak.{program}", *more]
            command += ["--minutes", f"{minutes / len(programs):.1f}", "--seed", str(number)]
            done = subprocess.run(command, cwd=ROOT, check=False)
            failed |= done.returncode != 0
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description="a share of the tests that make test leaves out")
    parser.add_argument("tier", choices=SHARES)
    parser.add_argument("--minutes", type=float, required=True, help="how long it may take")
    parser.add_argument("--number", type=int, help="which share; default: by the commits' number")
    given = parser.parse_args()
    number = given.number
    if number is None:
        counted = subprocess.check_output(["git", "rev-list", "--count", "HEAD"], cwd=ROOT)
        number = int(counted)
    ends, shares = time.monotonic() + 60 * given.minutes, SHARES[given.tier]
    tests = share(collected(given.tier), number, shares)
    print(
        f"share {number % shares + 1} of {shares} of {given.tier}: {len(tests)} tests", flush=True
    )
    programs = 60 * given.minutes * _PROGRAMS_SHARE if given.tier == "soak" else 0
    failed = run_tests(given.tier, tests, ends - programs)
    if given.tier == "soak" and (left := (ends - time.monotonic()) / 60) >= 1:
        failed |= run_programs(number, left)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
