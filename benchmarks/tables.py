"""Prints the result as tables for a terminal: the measurements, then the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.table import Table

from benchmarks.resources import ROLES
from benchmarks.results import Measurement, Result, Round
from benchmarks.scores import ratio, raw_baseline
from benchmarks.targets import TARGETS, target_of
from benchmarks.workloads import NAIVE, NATIVE, PEEK

STYLES = {"aim": "green", "must": "yellow", "missed": "red"}
WIDTH = 190
NO_AIRFLOW = (
    "no Airflow: jobs as its tasks ask for them, without its own start (supervisor, task runner,"
    " the DAG's parse, API)"
)


def measured_table(result: Result) -> Table:
    """Returns one row for each contender.

    It has seconds, multiples of the baselines, CPU and memory by role, and targets.
    """
    table = Table(title=f"scale {result.scale:g}, medians of {result.rounds} rounds (least–most)")
    numbers = ("seconds", "× raw", "× peek", "× native", "× naive")
    for heading in ("workload", "", *numbers, "CPU s", "peak MB", "target"):
        table.add_column(heading, justify="right" if heading in numbers else "left")
    previous = ("", "")
    for one in result.measurements:
        place = (one.workload, one.backlog)
        name = "" if place == previous else " ".join(filter(None, place))
        if name and previous != ("", ""):
            table.add_section()
        previous = place
        table.add_row(
            name,
            one.contender,
            _seconds(one),
            *_multiples(one, result.measurements),
            _by_role(one, "cpu_s"),
            _by_role(one, "peak_mb"),
            _reached(one, result),
            style="dim" if one.baseline else None,
        )
    return table


# The columns of the source's costs per million changes, and how to read them from a round. The
# first is measured by the operating system.
_SOURCE_COSTS: dict[str, Callable[[Round], float | None]] = {
    "CPU s": lambda one: one.cpu_s.get("source"),
    "server s as the run tells it": lambda one: one.notes.get("server_s"),
    "temporary files MB": lambda one: one.notes.get("temporary_mb"),
    "spilled MB": lambda one: one.notes.get("spilled_mb"),
}


def source_table(result: Result) -> Table:
    """Returns what our pipeline cost the source per 1,000,000 changes: medians of the rounds."""
    table = Table(title="load on the source for 1,000,000 changes")
    for heading in ("workload", "", *_SOURCE_COSTS):
        table.add_column(heading, justify="right" if heading in _SOURCE_COSTS else "left")
    for one in result.measurements:
        if all("server_s" in measured.notes for measured in one.rounds) and one.changes:
            costs = (
                one.median(lambda m, read=read: read(m) or 0.0) for read in _SOURCE_COSTS.values()
            )
            figures = [f"{cost * 1e6 / one.changes:.2f}" for cost in costs]
            table.add_row(
                " ".join(filter(None, (one.workload, one.backlog))), one.contender, *figures
            )
    return table


def targets_table(result: Result) -> Table:
    """Returns every target that was measured, and what was reached."""
    caption = NO_AIRFLOW
    if result.scale != 1:
        caption += "; meant for scale 1: smaller runs are mostly what a run costs at any size"
    table = Table(title="to be reached", caption=caption)
    for heading in ("what", "measured", "must", "aim", "reached"):
        table.add_column(heading, justify="left" if heading in ("what", "reached") else "right")
    for target in TARGETS:
        for score in (score for score in result.scores if target_of(score.name) is target):
            verdict = target.verdict(score.median)
            measured = (
                f"{score.median:.2f} {score.unit}"
                if score.median < 100
                else f"{score.median:.0f} {score.unit}"
            )
            row = (
                target.what,
                measured,
                target.limits,
                f"≤ {target.aim:g}" if target.aim else "",
                verdict,
            )
            table.add_row(*row, style=STYLES[verdict])
    return table


def _seconds(one: Measurement) -> str:
    seconds = [measured.seconds for measured in one.rounds]
    spread = f" ({min(seconds):.2f}–{max(seconds):.2f})" if len(seconds) > 1 else ""
    return f"{one.median(lambda measured: measured.seconds):.2f}{spread}"


def _multiples(one: Measurement, measurements: Sequence[Measurement]) -> list[str]:
    raw = raw_baseline(one.workload, one.backlog, measurements)
    beside = {
        m.contender: m
        for m in measurements
        if m.baseline and (m.workload, m.backlog) == (one.workload, one.backlog)
    }
    return [
        _multiple(one, other)
        for other in (raw, beside.get(PEEK), beside.get(NATIVE), beside.get(NAIVE))
    ]


def _multiple(one: Measurement, other: Measurement | None) -> str:
    if other is None or other is one:
        return "1" if other is one else ""
    score = ratio("", [m.seconds for m in one.rounds], [m.seconds for m in other.rounds])
    return "" if score is None else f"{score.median:.2f}"


def _by_role(one: Measurement, figure: str) -> str:
    roles = [
        role for role in ROLES if any(role in getattr(measured, figure) for measured in one.rounds)
    ]
    medians = {
        role: one.median(lambda measured, r=role: getattr(measured, figure).get(r, 0.0))
        for role in roles
    }
    return _line(
        {role: value for role, value in medians.items() if value >= 0.005},
        digits=0 if figure == "peak_mb" else 2,
    )


def _line(values: Mapping[str, float], digits: int) -> str:
    return " ".join(f"{role} {value:.{digits}f}" for role, value in values.items())


def _reached(one: Measurement, result: Result) -> str:
    lines = []
    for score in result.scores:
        target = target_of(score.name)
        if target is None or not _belongs(score.name, one):
            continue
        verdict = target.verdict(score.median)
        limit = f"{target.limits}{score.unit}"
        lines.append(f"[{STYLES[verdict]}]{limit}: {'reached' if verdict != 'missed' else 'missed'}"
                     f"{' and aim' if verdict == 'aim' and target.aim else ''}[/]")  # fmt: skip
    return "\n".join(lines)


def _belongs(score: str, one: Measurement) -> bool:
    return score.startswith((f"{one.name} ÷", f"{one.name}: "))
