"""Where the time of ``make test`` goes: ``python -m tests.profiling PAGE.md``.

Runs ``make test`` with this module as a pytest plugin, and samples the processes meanwhile. The
page lists the seconds by file, by test and by fixture, and the CPU by kind of process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
# Where the plugin writes its lines, one file per process.
FOLDER = "WALDELTA_TEST_PROFILE"
_TICK = os.sysconf("SC_CLK_TCK")
_EVERY_S = 0.5
# What a command line has, and what the process is; the first that fits.
_KINDS = (
    ("SparkConnectServer", "Spark Connect servers (JVM)"),
    ("SparkSubmit", "Spark sessions (JVM)"),
    ("java", "other JVMs"),
    ("pyspark", "Spark's Python workers"),
    ("waldelta.cli", "jobs that Airflow starts"),
    ("-m waldelta", "jobs that Airflow starts"),
    ("spark_jobs", "jobs that Airflow starts"),
    ("scheduler", "Airflow: scheduler and its tasks"),
    ("dag-processor", "Airflow: DAG processor"),
    ("dag_processor", "Airflow: DAG processor"),
    ("api-server", "Airflow: API server"),
    ("api_server", "Airflow: API server"),
    ("airflow", "Airflow: the rest"),
    ("postgres", "PostgreSQL"),
    ("initdb", "PostgreSQL: new clusters"),
    ("chrom", "Chromium"),
    ("pytest", "pytest and what runs in its process"),
    ("xdist", "pytest and what runs in its process"),
    ("execnet", "pytest and what runs in its process"),
    ("python", "other Python"),
)


def _write(kind: str, name: str, seconds: float) -> None:
    if folder := os.environ.get(FOLDER):
        with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
            file.write(json.dumps([kind, name, seconds]) + "\n")


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any) -> Generator[None, Any, Any]:
    """How long the fixture took, with those that it asked for while it ran."""
    began = time.monotonic()
    try:
        return (yield)
    finally:
        _write("fixture", fixturedef.argname, time.monotonic() - began)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Each phase of each test; under xdist the process that runs them all hears of it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        _write(report.when, report.nodeid, report.duration)


def _kind_of(command: str) -> str:
    return next((kind for part, kind in _KINDS if part in command), "others")


class Processes(threading.Thread):
    """Samples the CPU of this machine's processes, those of before left out."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self._before = {pid for pid, *_ in self._look()}
        self._seen: dict[tuple[int, str], tuple[str, float]] = {}
        self._compilers: dict[tuple[int, str], float] = {}

    def run(self) -> None:
        while not self.ended.wait(_EVERY_S):
            for pid, began, command, cpu in self._look():
                if pid in self._before:
                    continue
                held = self._seen.get((pid, began))
                # A forked process is called what its parent is until it runs something else.
                self._seen[pid, began] = (command or (held[0] if held else ""), cpu)
                if "java" in command:
                    self._compilers[pid, began] = _compiling(pid)

    def by_kind(self) -> Counter[str]:
        """Seconds of CPU."""
        found: Counter[str] = Counter()
        for key, (command, cpu) in self._seen.items():
            compiling = self._compilers.get(key, 0.0)
            found[_kind_of(command)] += cpu - compiling
            found["JVMs' compilers"] += compiling
        return found

    def _look(self) -> Iterator[tuple[int, str, str, float]]:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                command = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf8", "replace")
                )
            except OSError:  # it has ended meanwhile
                continue
            cpu = (int(fields[11]) + int(fields[12])) / _TICK
            yield int(folder.name), fields[19], command, cpu


def _compiling(pid: int) -> float:
    """Seconds of CPU of a JVM's compiler threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            name, _, rest = (task / "stat").read_text().rpartition(")")
        except OSError:
            continue
        if "CompilerThre" in name:
            fields = rest.split()
            total += int(fields[11]) + int(fields[12])
    return total / _TICK


def run() -> tuple[float, Counter[str], dict[str, Counter[str]]]:
    """Seconds in all; CPU by kind of process; seconds by phase (or "fixture") and name."""
    with tempfile.TemporaryDirectory(prefix="waldelta-profile-") as folder:
        options = {FOLDER: folder, "PYTEST_ADDOPTS": "-p tests.profiling"}
        sampler, began = Processes(), time.monotonic()
        sampler.start()
        subprocess.run(["make", "test"], cwd=ROOT, env=os.environ | options, check=False)
        seconds = time.monotonic() - began
        sampler.ended.set()
        sampler.join()
        phases: dict[str, Counter[str]] = {}
        for file in Path(folder).glob("*.jsonl"):
            for line in file.read_text().splitlines():
                kind, name, took = json.loads(line)
                phases.setdefault(kind, Counter())[name] += took
    return seconds, sampler.by_kind(), phases


def page() -> str:
    """The whole page, as Markdown."""
    total, cpu, phases = run()
    fixtures = phases.pop("fixture", Counter())
    tests: Counter[str] = sum(phases.values(), Counter())
    files: Counter[str] = Counter()
    for name, took in tests.items():
        files[name.partition("::")[0]] += took
    folders: Counter[str] = Counter()
    for name, took in files.items():
        folders["/".join(name.split("/")[:3]) if "unit" not in name else "tests/unit"] += took
    busy = sum(cpu.values())
    summary = (
        f"{len(tests):,} tests in {total / 60:.1f} minutes on {os.cpu_count()} cores. CPU"
        f" {busy / 60:.1f} minutes, {busy / total / (os.cpu_count() or 1):.0%} of the cores."
    )
    lines = [
        "# Where the time of the tests goes",
        "Written by `make test-profile`, which runs `make test`.",
        "",
        summary,
        *_table("CPU by kind of process", "process", cpu, 20),
        *_table("Seconds by folder", "folder", folders, 20),
        *_table("Seconds by file", "file", files, 40),
        *_table("Seconds by test", "test", tests, 40),
        *_table("Seconds by fixture, in all its uses", "fixture", fixtures, 20),
    ]
    return "\n".join([*lines, ""])


def _table(title: str, what: str, seconds: Counter[str], most: int) -> list[str]:
    rows = [f"| `{name}` | {took:,.0f} |" for name, took in seconds.most_common(most)]
    return ["", f"## {title}", f"| {what} | seconds |", "| --- | ---: |", *rows]


def main() -> None:
    """Run the tests and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.profiling", description=__doc__)
    parser.add_argument("page", type=Path)
    parser.parse_args().page.write_text(page())


if __name__ == "__main__":
    main()
