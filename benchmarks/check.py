"""``make bench-check``: what got worse than the stored reference.

A ratio is worse beyond the measured noise; anything that has a target is, too, once it misses a must that the reference reached.
Shares grow when all else gets faster, and other seconds and megabytes are the machine's affair. What the last run didn't measure is
told, and excused.

``--accept`` stores the last result as the reference, and its picture, with the day, the commit and the versions it is of; what is in it of workloads
that weren't measured stays, with its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from benchmarks.plot import draw
from benchmarks.results import LAST, REFERENCE, Result, Score, read, write
from benchmarks.targets import target_of
from benchmarks.workloads import BASELINES

# A few rounds show less noise than there is; rounds that lie far apart don't excuse everything.
LEAST_NOISE, MOST_NOISE = 0.05, 0.25
WORSE, BETTER, SAME, MISSING, MISSED = "worse", "better", "same", "not measured", "must missed"
# Units of what is compared with the reference.
RELATIVE = ("×",)


@dataclass(frozen=True)
class Finding:
    """One score of the reference, what it is now (None: not measured), and by what part either may differ by chance."""

    name: str
    unit: str
    before: float
    now: float | None
    noise: float

    @property
    def verdict(self) -> str:
        """A must that isn't reached any more has no noise; worse or better are ratios only beyond it."""
        if self.now is None:
            return MISSING
        target = target_of(self.name)
        if target and target.verdict(self.now) == "missed" and target.verdict(self.before) != "missed":
            return MISSED
        if self.unit not in RELATIVE:
            return SAME
        if self.now > self.before * (1 + self.noise):
            return WORSE
        return BETTER if self.now < self.before / (1 + self.noise) else SAME


def compare(reference: Sequence[Score], last: Sequence[Score]) -> list[Finding]:
    """What the reference holds of ours beside the last scores: ratios, and whatever has a target."""
    found = {score.name: score for score in last}
    guarded = (score for score in reference if score.unit in RELATIVE or target_of(score.name))
    return [_finding(score, found.get(score.name)) for score in guarded if not _is_of_baseline(score.name)]


def _finding(before: Score, now: Score | None) -> Finding:
    noise = max(LEAST_NOISE, before.noise, now.noise if now else 0.0)
    return Finding(before.name, before.unit, before.median, now.median if now else None, min(noise, MOST_NOISE))


def _is_of_baseline(name: str) -> bool:
    """Whether a ratio is of two baselines, which nobody here can make worse."""
    return name.split(" ÷ ", maxsplit=1)[0].rsplit("/", 1)[-1] in BASELINES


def comparable(reference: Result, last: Result) -> str | None:
    """Why two results can't be compared, if so."""
    if reference.scale != last.scale:
        return f"the reference was measured at scale {reference.scale:g}, the last result at {last.scale:g}: measure at the same"
    cores = reference.machine.get("cores"), last.machine.get("cores")
    if cores[0] != cores[1]:
        return f"the reference was measured on {cores[0]} cores, the last result on {cores[1]}: measure on as many, or --accept anew"
    return None


def accept(reference: Result | None, last: Result) -> Result:
    """The new reference: what was measured last, and what the old one has beside it, if the two can be compared."""
    kept = reference if reference and comparable(reference, last) is None else replace(last, measurements=[], scores=[])
    scored = {score.name for score in last.scores}
    measured = dict.fromkeys(one.workload for one in last.measurements)
    return replace(
        last,
        measurements=[one for one in kept.measurements if one.workload not in measured] + last.measurements,
        scores=[score for score in kept.scores if score.name not in scored] + last.scores,
        failed={},
        provenance=kept.provenance | dict.fromkeys(measured, last.machine),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing got worse or failed, 1 when something did, 2 when there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    parser.add_argument("--accept", action="store_true", help="store the last result as the reference")
    options = parser.parse_args(arguments)
    if not LAST.exists():
        sys.stderr.write("nothing was measured yet: run make bench\n")
        return 2
    last = read(LAST)
    for workload, error in last.failed.items():
        sys.stderr.write(f"{workload} failed: {error}\n")
    if options.accept:
        reference = accept(read(REFERENCE) if REFERENCE.exists() else None, last)
        write(reference, REFERENCE)
        draw(reference, REFERENCE.with_suffix(".png"))
        sys.stdout.write(
            f"{REFERENCE} holds {len(reference.scores)} scores of {len(reference.measurements)} measurements from now on\n"
        )
        return 0
    if not REFERENCE.exists():
        sys.stderr.write("there is no reference: make bench-check ARGS=--accept stores the last result as one\n")
        return 2
    reference = read(REFERENCE)
    if reason := comparable(reference, last):
        sys.stderr.write(reason + "\n")
        return 2
    findings = compare(reference.scores, last.scores)
    _print(findings)
    return int(bool(last.failed) or any(finding.verdict in (WORSE, MISSED) for finding in findings))


def _print(findings: Sequence[Finding]) -> None:
    table = Table(title="the last result against the reference (less is better)")
    for heading in ("score", "reference", "now", "noise", "must", ""):
        table.add_column(heading, justify="left" if heading in ("score", "") else "right")
    for one in findings:
        style = {WORSE: "red", MISSED: "red", BETTER: "green", MISSING: "dim"}.get(one.verdict)
        now = "" if one.now is None else f"{one.now:.2f}"
        noise = f"±{one.noise:.0%}" if one.unit in RELATIVE else ""
        target = target_of(one.name)
        limits = target.limits if target else ""
        table.add_row(one.name, f"{one.before:.2f} {one.unit}", now, noise, limits, one.verdict, style=style)
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
