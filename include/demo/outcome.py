"""Prints the demo's outcome: rows by operation, seconds by stage, differences, and where to
look.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from demo.airflow_client import DagRun
from demo.replay import Operations
from waldelta.lake.ledger import Ledger
from waldelta.quantities import counted

if TYPE_CHECKING:
    from tests.oracles.compare import Difference

APPLIED = ("inserted", "updated", "deleted", "skipped")
STAGES = ("slot_has_changes", "land", "apply", "check", "report")


@dataclass
class DemoOutcome:
    """The demo's results; ``runs`` are those of the CDC DAG."""

    operations: Operations
    seconds: dict[str, float]
    runs: list[DagRun]
    differences: list[Difference]
    ledger: Ledger

    @property
    def difference_count(self) -> int:
        """The number of rows that are on one side only, over all tables."""
        return sum(difference.rows for difference in self.differences)

    @property
    def equal(self) -> bool:
        """Whether every target equals its source; False when nothing was compared."""
        return bool(self.differences) and self.difference_count == 0

    @cached_property
    def results(self) -> list[dict[str, Any]]:
        """The results of the CDC runs, in their order, from the ledger."""
        latest = {
            run.run_id: json.loads(run.result)
            for run in self.ledger.runs()
            if run.verb == "consume"
        }
        return list(latest.values())

    @property
    def changes(self) -> int:
        """The number of landed changes."""
        return sum(int(result.get("changes") or 0) for result in self.results)

    @property
    def report(self) -> str | None:
        """The last run's report."""
        return next((str(r["report"]) for r in reversed(self.results) if r.get("report")), None)

    def applied(self) -> dict[str, Counter[str]]:
        """Returns what all runs did to each target."""
        counts: dict[str, Counter[str]] = {}
        for run in self.ledger.runs():
            for target in run.targets or ():
                count = counts.setdefault(target.table_name, Counter())
                count.update({name: getattr(target, name) for name in APPLIED})
                count["truncated"] += target.truncated
        return counts

    def seconds_of(self, task_id: str) -> float:
        """Returns the seconds of a task over all CDC runs."""
        return sum(
            task.seconds or 0.0
            for run in self.runs
            for task in run.tasks
            if task.task_id == task_id
        )


def show(outcome: DemoOutcome, console: Console) -> None:
    """Print the tables and the verdict."""
    console.print(_source_table(outcome))
    console.print(_target_table(outcome))
    console.print(_seconds_table(outcome))
    busy = outcome.seconds_of("land") + outcome.seconds_of("apply")
    if busy:
        console.print(
            f"changes landed and applied: {outcome.changes:,} in {busy:.1f} s of land and apply: "
            f"[bold]{outcome.changes / busy:,.0f} changes/s[/]"
        )
    for difference in outcome.differences:
        if difference.rows:
            console.print(
                f"[red]✗[/] {difference.table}: {counted(difference.missing, 'row')} missing,"
                f" {difference.extra:,} too many"
            )
            for key in difference.keys:
                console.print(f"    {key}", markup=False)
    mark = "[green]✓[/]" if outcome.equal else "[red]✗[/]"
    console.print(f"{mark} [bold]{counted(outcome.difference_count, 'difference')}[/] between "
                  f"{counted(len(outcome.differences), 'target')} and their source")  # fmt: skip
    console.print(f"report:  {outcome.report or '(none)'}", soft_wrap=True)
    console.print(f"tables:  {outcome.ledger.lake.root}", soft_wrap=True)


def _source_table(outcome: DemoOutcome) -> Table:
    table = _table(
        "changes in the source",
        "insert",
        "update",
        "delete",
        "truncate",
        "rows let through by the filter",
    )
    for difference in outcome.differences:
        name = difference.table.rpartition(".")[2]
        done = [
            outcome.operations[name, operation]
            for operation in ("insert", "update", "delete", "truncate")
        ]
        table.add_row(
            difference.table, *(f"{number:,}" for number in (*done, difference.source_rows))
        )
    return table


def _target_table(outcome: DemoOutcome) -> Table:
    table = _table("changes applied to the targets", *APPLIED, "rows", "differences")
    applied = outcome.applied()
    for difference in outcome.differences:
        arrived = [applied.get(difference.table, Counter())[column] for column in APPLIED]
        numbers = (*arrived, difference.target_rows, difference.rows)
        table.add_row(difference.table, *(f"{number:,}" for number in numbers))
    table.caption = (
        "rows that cross the filter are inserted or deleted; a run applies the changes of a row"
        " as one"
    )
    return table


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("table", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    return table


def _seconds_table(outcome: DemoOutcome) -> Table:
    table = Table(title="seconds by stage", title_justify="left")
    table.add_column("CDC run")
    for stage in (*STAGES, "whole run"):
        table.add_column(stage, justify="right")
    for run in outcome.runs:
        took = {task.task_id: task.seconds or 0.0 for task in run.tasks}
        table.add_row(
            run.run_id,
            *(f"{took.get(stage, 0.0):.1f}" for stage in STAGES),
            f"{run.seconds or 0.0:.1f}",
        )
    table.add_row(
        "all",
        *(f"{seconds:.1f}" for seconds in [outcome.seconds_of(stage) for stage in STAGES]),
        f"{sum(run.seconds or 0.0 for run in outcome.runs):.1f}",
    )
    return table
