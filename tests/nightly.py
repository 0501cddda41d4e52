"""Everything that a night has time for, one part after the other: ``make nightly``.

    python -m tests.nightly [--parts test-all,mutations] [--soak-minutes 60]

Each part's output goes to the terminal and to .waldelta/nightly/PART.log. The report at the end
names each test, mutation, cell and combination of versions that failed; the exit status isn't 0
then.
"""

import argparse
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from typing import Final

from tests.tiers import ROOT

LOGS: Final = ROOT / ".waldelta" / "nightly"
# What names a failure in a part's output: pytest, the mutations, the fault matrix and random kills.
_FAILURE: Final = re.compile(
    r"^(?:FAILED|ERROR|failed) .+|.* not caught: .+|.*cells aren't well: .+"
    r"|^seed \d+: .+(?<!, 0 differences)$|^\d+\. .+: (?!works|refused).+",
    re.MULTILINE,
)


def commands(soak_minutes: float) -> dict[str, list[str]]:
    """Return the parts of a night and their commands. The date chooses the share of the soak."""
    module = [sys.executable, "-m"]
    soak = ["soak", "--minutes", str(soak_minutes), "--number", str(datetime.now(UTC).toordinal())]
    return {
        "test-all": ["make", "test-all", "ARGS=--maxfail=0"],
        "mutations": [*module, "tests.mutations"],
        "soak": [*module, "tests.share", *soak],
        "versions": [*module, "tests.soak.versions"],
    }


def run(part: str, command: list[str]) -> tuple[int, list[str]]:
    """Run a part; returns its exit status and the lines of its output that name a failure."""
    LOGS.mkdir(parents=True, exist_ok=True)
    with (LOGS / f"{part}.log").open("w") as log:
        started = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert started.stdout is not None
        for line in started.stdout:
            print(line, end="", flush=True)
            log.write(line)
        status = started.wait()
    return status, _FAILURE.findall((LOGS / f"{part}.log").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    parts = commands(0)
    parser.add_argument("--parts", default=",".join(parts), help="some of " + ", ".join(parts))
    parser.add_argument("--soak-minutes", type=float, default=60)
    given = parser.parse_args()
    report, failed = [], False
    for part in given.parts.split(","):
        began = time.monotonic()
        status, failures = run(part, commands(given.soak_minutes)[part])
        minutes = (time.monotonic() - began) / 60
        failed |= status != 0
        verdict = "passed" if status == 0 else f"FAILED (exit {status})"
        report += [f"{part}: {verdict} in {minutes:.0f} min, {LOGS / part}.log"]
        report += [f"  {line.strip()}" for line in failures]
    print("\n".join(["", "The night:", *report]))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
