"""``python -m demo.run_demo``: runs everything on real data, from an empty stack, with real
Airflow.

It starts the embedded stack, loads a year of flights as scheduled, and does setup and initial sync.
Then it replays what really happened in slices, with a run of the CDC DAG after each, and finally
compares every target with the source. Exit code 0 means equal.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from demo.airflow_client import AirflowClient, AirflowError, DagRun
from demo.flights import ALL_FLIGHTS, load
from demo.outcome import DemoOutcome, show
from demo.replay import Operations, Slice, plan_slices, prepare, replay
from demo.stack import Stack, StackError
from demo.stack.airflow_entries import environment_of
from waldelta.config import PipelineFile, dag_id_of, load_pipeline_file
from waldelta.errors import StateError, WaldeltaError
from waldelta.lake import is_store_variable
from waldelta.lake.ledger import Ledger
from waldelta.pipeline import ledger_of
from waldelta.quantities import counted

if TYPE_CHECKING:
    from tests.oracles.compare import Difference

CONN_ID = "flights_source"
PIPELINE = "flights"
SETUP, SYNC = dag_id_of(PIPELINE, "setup"), dag_id_of(PIPELINE, "initial_sync")
CDC, RECONCILE = dag_id_of(PIPELINE, "cdc"), dag_id_of(PIPELINE, "reconcile")
MAINTENANCE = dag_id_of(PIPELINE, "maintenance")
RUN_TIMEOUT_S = 900


@dataclass
class Demo:
    """One demo on a running stack; ``flights`` limits it to about that many of the year's
    flights.
    """

    stack: Stack
    console: Console
    flights: int = ALL_FLIGHTS
    slices: int = 4
    seconds: dict[str, float] = field(default_factory=dict)
    operations: Operations = field(default_factory=Operations)

    def run(self) -> DemoOutcome:
        """Run the whole demo; raises AirflowError when a DAG run fails."""
        self.load()
        with self.stack.client() as airflow:
            airflow.wait_for_dags((SETUP, SYNC, CDC, RECONCILE, MAINTENANCE))
            self._set_up_and_copy(airflow)
            for part in plan_slices(self.slices):
                self._replay(part)
                self._run_dag(airflow, CDC, f"apply {part.name}")
            self._reconcile_and_maintain(airflow)
            runs = [airflow.run(CDC, run.run_id) for run in reversed(airflow.runs(CDC))]
        return DemoOutcome(self.operations, self.seconds, runs, self.compare(),
                           self.ledger)  # fmt: skip

    def load(self) -> None:
        """Load the source as scheduled, and decide what will happen."""
        with self._stage("load the year as scheduled") as tell:
            rows = load(self._conninfo, self.flights)
            prepare(self._conninfo)
            tell(f"{counted(sum(rows.values()), 'row')}, {rows['flights']:,} of them flights")

    def compare(self) -> list[Difference]:
        """Compare every target with the source's filtered rows: counts and full content."""
        from tests.oracles.compare import compare_target
        from waldelta.spark import open_runner

        states = self.ledger.table_states()
        names = sorted(
            table.name
            for publication in self.pipeline.source.publications
            for table in publication.tables
        )
        if absent := [name for name in names if name not in states]:
            raise StateError(f"never copied: {', '.join(absent)}: see the log of {SYNC}")
        with (
            self._stage("compare targets with the source") as tell,
            environment_of(self.stack.job_environment()),
        ):
            with open_runner("demo compare") as runner:
                found = []
                for name in names:
                    tell(name, final=False)
                    found.append(
                        compare_target(runner, self._conninfo, self.pipeline, states[name])
                    )
            tell(
                f"{counted(sum(d.rows for d in found), 'difference')} in"
                f" {counted(len(found), 'table')}"
            )
        return found

    @property
    def pipeline(self) -> PipelineFile:
        """The pipeline file, with this stack's lake."""
        with environment_of(places := self.stack.places()):
            return load_pipeline_file(Path(places["WALDELTA_PIPELINES"]) / f"{PIPELINE}.yml")

    @property
    def ledger(self) -> Ledger:
        """The pipeline's ledger, in this stack's lake."""
        pipeline = self.pipeline
        with environment_of(self.stack.job_environment()):
            return ledger_of(pipeline)

    @property
    def _conninfo(self) -> str:
        return self.stack.source_conninfo(CONN_ID)

    def _set_up_and_copy(self, airflow: AirflowClient) -> None:
        airflow.unpause(SETUP)
        airflow.unpause(SYNC)
        self._run_dag(airflow, SETUP, "set up publication and slot")
        # Its first scheduled run finds nothing to do. It runs from the slot's creation on, even
        # while tables are copied.
        airflow.unpause(CDC)
        self._run_dag(airflow, SYNC, "copy the tables")

    def _reconcile_and_maintain(self, airflow: AirflowClient) -> None:
        """Compare with the source once, and run the nightly maintenance, as a production pipeline
        does.

        Airflow starts the run of the past night as soon as the DAG is unpaused, so this waits for
        that run.
        """
        airflow.unpause(RECONCILE)
        self._run_dag(airflow, RECONCILE, "reconcile targets with the source")
        airflow.unpause(MAINTENANCE)
        with self._stage(f"maintain the lake ({MAINTENANCE})") as tell:
            run = airflow.wait_for_scheduled(
                MAINTENANCE, RUN_TIMEOUT_S, on_poll=lambda run: tell(_tasks(run), final=False)
            )
            tell(_tasks(run))

    def _replay(self, part: Slice) -> None:
        with self._stage(f"replay {part.name}") as tell:
            done = replay(
                self._conninfo,
                part,
                lambda rows: tell(f"{counted(rows, 'row')} changed", final=False),
            )
            self.operations.update(done.operations)
            tell(
                f"{counted(done.changes, 'row')} changed in"
                f" {counted(done.transactions, 'transaction')}"
            )

    def _run_dag(self, airflow: AirflowClient, dag_id: str, title: str) -> DagRun:
        with self._stage(f"{title} ({dag_id})") as tell:
            run = airflow.run_to_end(
                dag_id, timeout_s=RUN_TIMEOUT_S, on_poll=lambda run: tell(_tasks(run), final=False)
            )
            tell(_tasks(run))
        return run

    @contextmanager
    def _stage(self, title: str) -> Iterator[Callable[..., None]]:
        """Show progress, then a line with the result and the duration."""
        began = time.monotonic()
        last = ""
        with self.console.status(title) as status:

            def show(text: str, *, final: bool = True) -> None:
                nonlocal last
                last = text if final else last
                status.update(f"{title}: {text}")

            yield show
        self.seconds[title] = time.monotonic() - began
        self.console.print(
            f"[green]✓[/] {title}: {last} [dim]{self.seconds[title]:.1f} s[/]", soft_wrap=True
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; exit code 0 when every target equals its source."""
    given = _parser().parse_args(arguments)
    # A log file has no width, and its reader's window is wider than the eighty columns that rich
    # would assume.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    began = time.monotonic()
    if given.store is not None:  # Variables of another account would mix with the store's.
        for name in filter(is_store_variable, list(os.environ)):
            del os.environ[name]
    stack = Stack(
        given.folder,
        store=given.store is not None,
        report=lambda line: console.print(f"[green]✓[/] {line}", soft_wrap=True),
    )
    try:
        stack.reset()
        with stack:
            outcome = Demo(stack, console, given.flights, given.slices).run()
            show(outcome, console)
    except (StackError, AirflowError, WaldeltaError) as err:
        console.print("[red]✗[/] the demo failed")
        console.print(str(err), markup=False, soft_wrap=True)
        console.print(f"logs: {stack.logs}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: everything that was started is stopped again")
        return 130
    console.print(
        f"total: {time.monotonic() - began:.0f} s; everything is stopped; look around with:"
        " [bold]make up[/]"
    )
    return 0 if outcome.equal else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m demo.run_demo", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--flights", type=int, default=ALL_FLIGHTS, help="about how many flights (default: all)"
    )
    parser.add_argument(
        "--slices", type=int, default=4, help="slices of the year, each followed by a CDC run"
    )
    parser.add_argument(
        "--store",
        choices=["s3"],
        help="have the lake in a local S3 server (default: in the folder)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Stack.folder,
        help="where the data live; an earlier demo's are deleted",
    )
    return parser


def _tasks(run: DagRun) -> str:
    return (
        ", ".join(f"{task.task_id} {_took(task.state, task.seconds)}" for task in run.tasks)
        or run.state
    )


def _took(state: str | None, seconds: float | None) -> str:
    return f"{seconds:.1f} s" if state == "success" and seconds is not None else state or "waiting"


if __name__ == "__main__":
    sys.exit(main())
