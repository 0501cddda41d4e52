"""Computes scores from measurements: ours against each baseline next to it, and some of ours
against each other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.results import Measurement, Round, Score
from benchmarks.workloads import BASELINES, PEEK, RECVLOGICAL

_SECONDS = lambda one: one.seconds  # noqa: E731 - a figure of a round, as the others below
_SOURCE_CPU = lambda one: one.cpu_s.get("source", 0.0)  # noqa: E731


MEMORY = {
    "reader's memory": "reader",
    "a worker's memory": "workers",
    "job's memory": "client",
    "JVM's memory": "jvm",
}


@dataclass(frozen=True)
class Comparison:
    """Two measurements of ours, by name, or (``per_change``) their costs per change.

    Measurements of different runs are compared as multiples of a baseline of the same run each:
    that of the contender ``beside``.
    """

    name: str
    of: str
    to: str
    per_change: bool = False
    source_cpu: bool = False
    beside: str = ""


COMPARISONS = (
    Comparison(
        "one-transaction: one ÷ small",
        "one-transaction/one transaction/warm",
        "one-transaction/small transactions/warm",
    ),
    Comparison(
        "tiny-transactions: tiny ÷ small",
        "tiny-transactions/tiny transactions/warm",
        "tiny-transactions/small transactions/warm",
    ),
    Comparison(
        "clustered keys: 50m ÷ 1m",
        "backlog-50m-clustered/warm",
        "backlog-1m-clustered/warm",
        beside=RECVLOGICAL,
    ),
    Comparison(
        "clustered keys: 10m ÷ 1m",
        "backlog-10m-clustered/warm",
        "backlog-1m-clustered/warm",
        beside=RECVLOGICAL,
    ),
    Comparison(
        "random keys: 50m ÷ 1m",
        "backlog-50m-random/warm",
        "backlog-1m-random/warm",
        beside=RECVLOGICAL,
    ),
    Comparison(
        "random keys: 10m ÷ 1m",
        "backlog-10m-random/warm",
        "backlog-1m-random/warm",
        beside=RECVLOGICAL,
    ),
    Comparison(
        "growth: 5,000,000 ÷ 500,000, per change",
        "growth/5,000,000/warm",
        "growth/500,000/warm",
        per_change=True,
    ),
    Comparison(
        "tables: 200 ÷ 20, per change", "tables-200/tasks", "tables-20/tasks", per_change=True
    ),
    Comparison("where: target's filter ÷ none", "where/warm, target's filter", "where/warm"),
    Comparison(
        "where: publication's filter ÷ none", "where/warm, publication's filter", "where/warm"
    ),
    Comparison(
        "where-full: target's filter ÷ none", "where-full/warm, target's filter", "where-full/warm"
    ),
    Comparison("S3 ÷ folder", "store/warm, S3", "store/warm"),
    Comparison(
        "deletion vectors ÷ none", "small-vectors/tasks, deletion vectors", "small-vectors/tasks"
    ),
    Comparison(
        "acknowledge: get ÷ advance, CPU of the source",
        "acknowledge/warm, get",
        "acknowledge/warm, advance",
        source_cpu=True,
    ),
    Comparison(
        "acknowledge: peek ÷ advance, CPU of the source",
        "acknowledge/warm, peek",
        "acknowledge/warm, advance",
        source_cpu=True,
    ),
)


def scores(measurements: Sequence[Measurement]) -> list[Score]:
    """Returns all scores of these measurements; less is better in each."""
    found = [
        *_against_baselines(measurements),
        *_among_ours(measurements),
        *_absolute(measurements),
        *_estimated(measurements),
    ]
    return [score for score in found if score is not None]


def ratio(
    name: str, of: list[float], to: list[float], changes: tuple[int, int] = (1, 1)
) -> Score | None:
    """Returns the ratio of two measurements; None against nothing.

    It is computed round by round where both have the same number of rounds, otherwise against the
    other's median. For costs per change, ``changes`` has the number of changes for either side's
    seconds.
    """
    if not of or not to or not all(to):
        return None
    against = to if len(of) == len(to) else [statistics.median(to)] * len(of)
    more = changes[1] / changes[0]
    return Score(name, "×", [a / b * more for a, b in zip(of, against, strict=True)], to)


def _against_baselines(measurements: Sequence[Measurement]) -> Iterator[Score | None]:
    for ours in measurements:
        for beside in measurements:
            if (
                not beside.baseline
                or beside is ours
                or (ours.workload, ours.backlog) != (beside.workload, beside.backlog)
            ):
                continue
            if ours.baseline and not _is_raw(beside, measurements):
                continue
            yield ratio(
                f"{ours.name} ÷ {beside.contender}",
                _figures(ours, _SECONDS),
                _figures(beside, _SECONDS),
            )
            if ours.workload == "sync" and not ours.baseline:
                yield ratio(
                    f"{ours.name}, unchecked ÷ {beside.contender}",
                    _figures(ours, _unchecked),
                    _figures(beside, _SECONDS),
                )
            if not ours.baseline and beside.contender == PEEK:
                name = f"{ours.name}, CPU of the source ÷ {beside.contender}"
                yield ratio(name, _figures(ours, _SOURCE_CPU), _figures(beside, _SOURCE_CPU))


def raw_baseline(
    workload: str, backlog: str, measurements: Sequence[Measurement]
) -> Measurement | None:
    """Returns the baseline that others of the same backlog are shown as multiples of.

    It is the first one measured there, in the order of all baselines.
    """
    found = [
        m for m in measurements if m.baseline and (m.workload, m.backlog) == (workload, backlog)
    ]
    return min(found, key=lambda one: BASELINES.index(one.contender), default=None)


def _is_raw(one: Measurement, measurements: Sequence[Measurement]) -> bool:
    return raw_baseline(one.workload, one.backlog, measurements) is one


def _among_ours(measurements: Sequence[Measurement]) -> Iterator[Score | None]:
    by_name = {measurement.name: measurement for measurement in measurements}
    for comparison in COMPARISONS:
        of, to = by_name.get(comparison.of), by_name.get(comparison.to)
        if of is None or to is None:
            continue
        read = _SOURCE_CPU if comparison.source_cpu else _SECONDS
        changes = (of.changes, to.changes) if comparison.per_change else (1, 1)
        if not comparison.beside:
            yield ratio(comparison.name, _figures(of, read), _figures(to, read), changes)
            continue
        these, those = (_beside(one, by_name, comparison.beside, read) for one in (of, to))
        if found := ratio(comparison.name, these, those, changes):
            # These aren't multiples, so whether they lasted long enough is decided by seconds.
            yield replace(found, against=_figures(to, read))


def _beside(
    one: Measurement,
    by_name: Mapping[str, Measurement],
    contender: str,
    read: Callable[[Round], float],
) -> list[float]:
    """Returns a measurement as multiples of this contender's in the same run.

    It is empty where that contender wasn't measured.
    """
    other = by_name.get(replace(one, contender=contender).name)
    found = ratio("", _figures(one, read), _figures(other, read)) if other else None
    return found.rounds if found else []


def _absolute(measurements: Sequence[Measurement]) -> Iterator[Score]:
    """Yields seconds where the figure itself counts, and the peak memory of all of ours."""
    ours = [measurement for measurement in measurements if not measurement.baseline]
    for one in ours:
        if one.workload == "idle":
            yield Score(f"{one.name}: seconds", "s", _figures(one, _SECONDS))
        if one.workload.startswith("backlog") and all(
            "check" in measured.notes for measured in one.rounds
        ):
            yield Score(
                f"{one.name}: check's share", "", [m.notes["check"] / m.seconds for m in one.rounds]
            )
        for part in ("apply", "applied", "check"):
            if all(part in measured.notes for measured in one.rounds):
                yield Score(
                    f"{one.name}: {part}", "s", [measured.notes[part] for measured in one.rounds]
                )
        if all(measured.notes.get("tables", 0) > 1 for measured in one.rounds):
            shares = [measured.notes["check"] / measured.notes["tables"] for measured in one.rounds]
            yield Score(f"{one.name}: check, per table", "s", shares)
    for name, role in MEMORY.items():
        peaks = [
            max(peak)
            for one in ours
            if (peak := [m.peak_mb[role] for m in one.rounds if role in m.peak_mb])
        ]
        if peaks:
            yield Score(name, "MB", [max(peaks)])


def _estimated(measurements: Sequence[Measurement]) -> Iterator[Score]:
    """Yields what check estimated for a copy as shares of what the copy had."""
    for one in measurements:
        for part in ("rows", "bytes", "seconds"):
            if all(f"estimated {part}" in measured.notes for measured in one.rounds):
                shares = [measured.notes[f"estimated {part}"] for measured in one.rounds]
                yield Score(f"{one.name}: {part}, estimated ÷ copied", "×", shares)


def _unchecked(one: Round) -> float:
    """Returns the seconds without the stages after the copy: no other contender checks anything."""
    return one.seconds - one.notes.get("check", 0.0) - one.notes.get("report", 0.0)


def _figures(measurement: Measurement, read: Callable[[Round], float]) -> list[float]:
    return [read(one) for one in measurement.rounds]
