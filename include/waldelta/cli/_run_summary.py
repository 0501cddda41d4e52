"""Prints what people read at the end of a run: its targets, stages, WAL, warnings and report."""

from __future__ import annotations

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from waldelta.cli._output import table
from waldelta.pipeline import RunResult
from waldelta.quantities import counted, size

# The columns of each command's summary table, by heading; other commands only list the tables.
_COLUMNS: dict[str, dict[str, str]] = {
    "consume": {
        "inserted": "inserted",
        "updated": "updated",
        "deleted": "deleted",
        "skipped": "skipped",
        "completed": "completed",
        "quarantined": "quarantined",
        "raw_rows": "raw_rows",
        "version": "version",
    },
    "replay": {
        "restored": "inserted",
        "corrected": "updated",
        "removed": "deleted",
        "left out": "skipped",
        "completed": "completed",
        "quarantined": "quarantined",
        "version": "version",
    },
    "decide": {
        "restored": "inserted",
        "corrected": "updated",
        "removed": "deleted",
        "version": "version",
    },
    "resync": {
        "rows compared": "compared",
        "inserted": "inserted",
        "updated": "updated",
        "deleted": "deleted",
        "unchanged": "unchanged",
        "rows copied": "rows",
        "version": "version",
    },
    "reconcile": {
        "rows compared": "compared",
        "differing": "differing",
        "in flight": "in_flight",
        "lacking": "lacking",
        "restored": "inserted",
        "corrected": "updated",
        "removed": "deleted",
        "version": "version",
    },
    "sync": {"rows copied": "rows", "raw_rows": "raw_rows", "version": "version"},
}


def print_summary(result: RunResult, console: Console, stage: str | None = None) -> None:
    """Print what the run, or its one ``stage``, did to each table, with LSN range, lag and
    seconds.
    """
    # Other stages may follow this one, so the run's own status would say nothing new.
    ended = result.stages.get(stage or "")
    status = f", stage {stage}: {ended.status}" if ended is not None else f": {result.status}"
    title = f"{result.verb} {result.run_id}{status}"
    console.print(title, style="table.title", soft_wrap=True, markup=False)
    if result.verb == "validate":
        rows = [[*row.values()] for row in result.expectations()]
        console.print(table(("table", "expectation", "severity", "result"), rows))
    elif result.tables or result.targets.states():
        console.print(_unbroken(_targets(result), console), crop=False)
    stages = ", ".join(
        f"{name} {end.seconds:.1f} s ({', '.join(filter(None, (end.status, end.runner)))})"
        for name, end in result.stages.items()
    )
    console.print(f"stages: {stages or 'none'}")
    if (landed := result.landed).end_lsn is not None:
        console.print(
            f"WAL {landed.start_lsn}..{landed.end_lsn}, {counted(landed.changes, 'change')},"
            f" lag {size(result.reported.lag_bytes)}"
        )
    if bill := result.source.describe():
        console.print(f"source: {bill}", soft_wrap=True)
    if result.store_requests:
        console.print(f"object store: {counted(result.store_requests, 'request')}")
    unmet = () if result.verb == "validate" else result.checked.warned_expectations
    for warning in dict.fromkeys((*result.warnings, *unmet)):
        console.print(f"warning: {warning}", soft_wrap=True, markup=False)
    if (report := result.checked.report) is not None:
        console.print(f"report: {report}", soft_wrap=True)


def _targets(result: RunResult) -> Table:
    columns, states = _COLUMNS.get(result.verb, {}), result.targets.states()
    rows = []
    for name in sorted(result.tables.keys() | states.keys()):
        changes = result.tables.get(name)
        note = f"{name} (truncated)" if changes is not None and changes.truncated else name
        numbers = (getattr(changes, attribute, None) for attribute in columns.values())
        rows.append([note, *numbers, *([states.get(name)] if states else [])])
    return table(["table", *columns, *(["state"] if states else [])], rows, numbers=columns)


def _unbroken(targets: Table, console: Console) -> Table:
    """Give a table the width that its names and numbers need, also beyond the console's."""
    needed = Measurement.get(console, console.options.update(width=1_000), targets).maximum
    targets.width = needed if needed > console.width else None
    return targets
