"""``make bench-check``: compares the last result with the stored reference.

A ratio is worse when it exceeds the reference by more than the measured noise, provided that it can
be guarded: its divisor lasts long enough, and the reference's rounds agree. Anything with a target
is also worse once it misses a must, whether it was measured before or not. A must that the
reference misses, too, is reported, but fails only when it is missed by more. Shares grow when
everything else gets faster, and other seconds and megabytes depend on the machine, so these aren't
compared.

Scores that the last run didn't measure are reported, but don't fail. The exception are workloads
with a target (targets.py), unless ``--partial`` says that they were left out on purpose.

``--accept`` stores the last result in the reference, and its picture, with its day, commit and
versions. Workloads that weren't measured keep their earlier values, with their own provenance.
Scores are computed from everything in the reference. Scores that can't be guarded, since their
rounds are too far apart, are listed: measure them again.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from rich.console import Console
from rich.table import Table

from benchmarks.plot import draw
from benchmarks.results import LAST, REFERENCE, Result, Score, read, write
from benchmarks.scores import COMPARISONS, scores
from benchmarks.targets import TARGETS, target_of
from benchmarks.workloads import BASELINES, IDLE, WORKLOADS

# A few rounds show less noise than there is. Rounds that are further apart guard nothing.
LEAST_NOISE, MOST_NOISE = 0.05, 0.25
# The minimum seconds of a ratio's divisor: shorter ones are mostly the clock's resolution, which is
# 0.01 s of CPU, and chance.
LEAST_SECONDS, LEAST_CPU_S = 0.5, 0.2
WORSE, BETTER, SAME, MISSING, NEW = "worse", "better", "same", "not measured", "new"
MISSED, KNOWN, UNGUARDED = "must missed", "must missed, as before", "not guarded"
FAILING = (WORSE, MISSED)
# Units of the scores that are compared with the reference.
RELATIVE = ("×",)


@dataclass(frozen=True)
class Finding:
    """One score in the reference, and now; None where it wasn't measured."""

    before: Score | None
    now: Score | None

    @property
    def name(self) -> str:
        """The score's name."""
        return self._either.name

    @property
    def unit(self) -> str:
        """The score's unit."""
        return self._either.unit

    @property
    def _either(self) -> Score:
        found = self.before or self.now
        assert found is not None
        return found

    @property
    def noise(self) -> float:
        """The share by which it may differ by chance; the maximum when it was measured only
        once.
        """
        if self.before is None or 1 in (len(self.before.rounds), len(self.before.against)):
            return MOST_NOISE
        return min(
            max(LEAST_NOISE, self.before.spread, self.now.spread if self.now else 0.0), MOST_NOISE
        )

    @property
    def too_short(self) -> str | None:
        """Why it can't be guarded however often it is measured; None if it can."""
        least = LEAST_CPU_S if "CPU of the source" in self.name else LEAST_SECONDS
        against = [
            statistics.median(one.against) for one in (self.before, self.now) if one and one.against
        ]
        if self.unit in RELATIVE and against and min(against) < least:
            return f"a multiple of {min(against):.2f} s"
        return None

    @property
    def unguarded(self) -> str | None:
        """Why a ratio isn't compared with the reference's; None if it is."""
        if self.unit in RELATIVE and self.before and self.before.noise > MOST_NOISE:
            return (
                self.too_short or f"its rounds lie up to {self.before.noise:.0%} off their median"
            )
        return self.too_short

    @property
    def verdict(self) -> str:
        """The verdict: a missed must has no noise, while a ratio is worse or better only beyond its
        noise.
        """
        if self.now is None:
            return MISSING
        if missed := self._missed():
            return missed
        if self.before is None:
            return NEW
        if self.unit not in RELATIVE:
            return SAME
        if self.unguarded:
            return UNGUARDED
        return self._against_reference(self.before.median, self.now.median)

    def _missed(self) -> str | None:
        target = target_of(self.name)
        if target is None or self.now is None or target.verdict(self.now.median) != "missed":
            return None
        if self.before is None or target.verdict(self.before.median) != "missed":
            return MISSED
        before, now = self.before.median, self.now.median
        excused = 1 + max(self.noise, self.before.noise)
        if _beyond(target.excess(now), target.excess(before) * excused):
            return WORSE
        guarded = self.unit in RELATIVE and not self.unguarded
        return WORSE if guarded and self._against_reference(before, now) == WORSE else KNOWN

    def _against_reference(self, before: float, now: float) -> str:
        if _beyond(now, before * (1 + self.noise)):
            return WORSE
        return BETTER if _beyond(before / (1 + self.noise), now) else SAME


def _beyond(value: float, limit: float) -> bool:
    return value > limit and not math.isclose(value, limit)


def findings(reference: Result, last: Result) -> list[Finding]:
    """Returns the findings on all scores.

    Memory scores are the maximum over all workloads, so they are compared over workloads in both
    results.
    """
    both = {one.workload for one in reference.measurements} & {
        one.workload for one in last.measurements
    }
    before, now = (
        scores([one for one in result.measurements if one.workload in both])
        for result in (reference, last)
    )
    in_both = {score.name: score for score in now}
    # For workloads in both results, a score is the same in both ways, except for memory. Then
    # everything in the last result is judged, too.
    more = [score for score in scores(last.measurements) if score != in_both.get(score.name)]
    compared = compare(_with(before, scores(reference.measurements)), _with(now, more))
    return compared + [Finding(None, score) for score in more if score.name in in_both]


def _with(found: Sequence[Score], others: Sequence[Score]) -> list[Score]:
    names = {score.name for score in found}
    return [*found, *(score for score in others if score.name not in names)]


def compare(reference: Sequence[Score], last: Sequence[Score]) -> list[Finding]:
    """Compare our scores with those of the reference: ratios, and everything that has a target.

    Scores with a target are included even when the reference lacks them.
    """
    found = {score.name: score for score in last}
    known = {score.name for score in reference}
    guarded = (score for score in reference if score.unit in RELATIVE or target_of(score.name))
    compared = [Finding(score, found.get(score.name)) for score in guarded]
    compared += [
        Finding(None, score) for score in last if score.name not in known and target_of(score.name)
    ]
    return [finding for finding in compared if not _is_of_baseline(finding.name)]


def _is_of_baseline(name: str) -> bool:
    """Returns whether a ratio is of two baselines, on which our code has no influence."""
    return name.split(" ÷ ", maxsplit=1)[0].rsplit("/", 1)[-1] in BASELINES


def comparable(reference: Result, last: Result) -> str | None:
    """Returns why two results can't be compared; None if they can."""
    if reference.scale != last.scale:
        return (
            f"the reference was measured at scale {reference.scale:g}, the last result at"
            f" {last.scale:g}: measure at the same"
        )
    cores = reference.machine.get("cores"), last.machine.get("cores")
    if cores[0] != cores[1]:
        return (
            f"the reference was measured on {cores[0]} cores, the last result on {cores[1]}:"
            " measure on as many, or --accept anew"
        )
    return None


def accept(reference: Result | None, last: Result) -> Result:
    """Returns the new reference: the last result, plus the old reference's other workloads.

    The old ones are kept only if the two results can be compared.
    """
    kept = (
        reference
        if reference and comparable(reference, last) is None
        else replace(last, measurements=[], scores=[])
    )
    measured = dict.fromkeys(one.workload for one in last.measurements)
    measurements = [
        one for one in kept.measurements if one.workload not in measured
    ] + last.measurements
    return replace(
        last,
        measurements=measurements,
        # Computed again: the maximum memory is over all workloads, and some scores compare two
        # workloads that may come from different runs.
        scores=scores(measurements),
        failed={},
        provenance=kept.provenance | dict.fromkeys(measured, last.machine),
    )


def too_noisy(reference: Result) -> list[Score]:
    """Returns the scores that a reference can't guard since their rounds are too far apart."""
    itself = compare(reference.scores, reference.scores)
    return [one.before for one in itself if one.before and one.unguarded and not one.too_short]


def judged_workloads() -> list[str]:
    """Returns the names of all workloads with a target, for a measurement or a comparison of it."""
    names = {name for target in TARGETS for name in _judged_by(target.scores)}
    return [one.name for one in WORKLOADS if one.name in names]


def _judged_by(pattern: str) -> list[str]:
    compared = [one for one in COMPARISONS if fnmatchcase(one.name, pattern)]
    where, _, who = re.split(" ÷|:|,", pattern)[0].partition("/")
    measured = [
        one.name
        for one in WORKLOADS
        if fnmatchcase(one.name, where) and who in getattr(one, "contenders", [IDLE])
    ]
    return [name.split("/")[0] for one in compared for name in (one.of, one.to)] + measured


def left_out(last: Result) -> list[str]:
    """Returns workloads with a target that weren't measured; failed ones are reported as failed."""
    tried = {one.workload for one in last.measurements} | last.failed.keys()
    return [name for name in judged_workloads() if name not in tried]


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when nothing got worse, failed or was left out, 1 when something did, 2 without a
    comparison.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check", description=__doc__)
    parser.add_argument(
        "--accept", action="store_true", help="store the last result as the reference"
    )
    parser.add_argument(
        "--partial",
        action="store_true",
        help="excuse that workloads with a limit (targets.py) weren't measured",
    )
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
            f"{REFERENCE} holds {len(reference.scores)} scores of {len(reference.measurements)}"
            " measurements from now on\n"
        )
        for one in too_noisy(reference):
            rounds = ", ".join(f"{value:.2f}" for value in one.rounds)
            sys.stdout.write(
                f"not guarded until it is measured again: {one.name}, rounds of {rounds}\n"
            )
        return 0
    if not REFERENCE.exists():
        sys.stderr.write(
            "there is no reference: make bench-check ARGS=--accept stores the last result as one\n"
        )
        return 2
    reference = read(REFERENCE)
    if reason := comparable(reference, last):
        sys.stderr.write(reason + "\n")
        return 2
    found = findings(reference, last)
    _print(found)
    if missing := left_out(last):
        told = f"NOT MEASURED, THOUGH THEY HAVE LIMITS: {', '.join(missing)}"
        Console(stderr=True).print(told, style="bold red", soft_wrap=True)
    excused = options.partial or not missing
    return int(
        bool(last.failed) or not excused or any(finding.verdict in FAILING for finding in found)
    )


def _print(found: Sequence[Finding]) -> None:
    table = Table(title="the last result against the reference (less is better)")
    for heading in ("score", "reference", "now", "noise", "must", ""):
        table.add_column(heading, justify="left" if heading in ("score", "") else "right")
    for one in found:
        style = {
            WORSE: "red",
            MISSED: "red",
            KNOWN: "yellow",
            BETTER: "green",
            MISSING: "dim",
            UNGUARDED: "dim",
        }
        before, now = (f"{score.median:.2f}" if score else "" for score in (one.before, one.now))
        guarded = one.unit in RELATIVE and not one.unguarded
        noise = f"±{one.noise:.0%}" if guarded else ""
        target = target_of(one.name)
        limits = target.limits if target else ""
        # Added also where the must decided, because the must alone would allow much more.
        verdict = (
            one.verdict
            if one.verdict == MISSING or not one.unguarded
            else f"{one.verdict}; {one.unguarded}"
        )
        table.add_row(
            one.name,
            f"{before} {one.unit}",
            now,
            noise,
            limits,
            verdict,
            style=style.get(one.verdict),
        )
    Console(width=190).print(table)


if __name__ == "__main__":
    sys.exit(main())
