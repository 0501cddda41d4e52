"""The results of measurements, and the file that stores them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
LAST, REFERENCE = RESULTS / "last.json", RESULTS / "reference.json"

Provenance = dict[str, str | int | None]


@dataclass(frozen=True)
class Round:
    """One round of a measurement: seconds, CPU seconds and peak MB by role, and notes."""

    seconds: float
    cpu_s: dict[str, float] = field(default_factory=dict)
    peak_mb: dict[str, float] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """All rounds of one contender at one backlog.

    ``changes`` are those of a round, or rows of a copy.
    """

    workload: str
    backlog: str
    contender: str
    changes: int
    rounds: list[Round]
    baseline: bool = False

    @property
    def name(self) -> str:
        """The name in scores and targets."""
        return "/".join(part for part in (self.workload, self.backlog, self.contender) if part)

    def median(self, read: Callable[[Round], float]) -> float:
        """Returns the median of one figure over the rounds."""
        return statistics.median(read(one) for one in self.rounds)


@dataclass(frozen=True)
class Score:
    """One figure to judge, less is better, with one number per round.

    It is a ratio (×) within the same run, or seconds or megabytes. For a ratio, ``against`` has the
    divisor's seconds, a number for each round in which it was measured.
    """

    name: str
    unit: str
    rounds: list[float]
    against: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def noise(self) -> float:
        """How far the rounds are from their median, as a share of it."""
        return (
            max(abs(one - self.median) for one in self.rounds) / self.median if self.median else 0.0
        )

    @property
    def spread(self) -> float:
        """How far the rounds are from each other, as a share of the median."""
        return (max(self.rounds) - min(self.rounds)) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Result:
    """One run of the benchmark; ``failed`` has the errors by workload.

    A reference is combined from several runs: ``provenance`` has, by workload, the ``machine`` of
    the run that measured it.
    """

    scale: float
    rounds: int
    machine: Provenance
    measurements: list[Measurement]
    scores: list[Score]
    failed: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Provenance] = field(default_factory=dict)


def machine(postgresql: str | None) -> Provenance:
    """Returns what figures depend on: the machine, the code, the versions, and the day."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _commit(),
        "postgresql": postgresql,
        "spark": version("pyspark"),
        "delta": version("delta-spark"),
        "deltalake": version("deltalake"),
    }


def _commit() -> str | None:
    """Returns the checkout's commit, with -dirty when it was changed since; None when git doesn't
    know it.
    """
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(
            command, cwd=RESULTS.parent, check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def write(result: Result, *paths: Path) -> None:
    """Write the result to each of these files."""
    text = ",\n".join(
        f"{json.dumps(key)}: {_lines(value)}" for key, value in asdict(result).items()
    )
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{{\n{text}\n}}\n")


def _lines(value: object) -> str:
    """Format a list with one entry per line, so that diffs show which entries changed."""
    if not value or not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n]"


def read(path: Path) -> Result:
    """The result in a file."""
    document = json.loads(path.read_text())
    measurements = [
        Measurement(**(entry | {"rounds": [Round(**one) for one in entry["rounds"]]}))
        for entry in document.pop("measurements")
    ]
    scores = [Score(**entry) for entry in document.pop("scores")]
    return Result(**document, measurements=measurements, scores=scores)
