"""``make bench``: measures workloads next to baselines, and writes a table, JSON and a picture."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import runners
from benchmarks.plot import draw
from benchmarks.results import LAST, RESULTS, Measurement, Result, machine, write
from benchmarks.scores import scores
from benchmarks.stack import Stack
from benchmarks.tables import WIDTH, measured_table, source_table, targets_table
from benchmarks.workloads import WORKLOADS, chosen


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 when everything was measured; missed targets are reported, but don't fail."""
    options = _options(arguments)
    if options.list:
        for workload in WORKLOADS:
            print(f"{'*' if workload.default else ' '} {workload.name:22} {workload.about}")
        return 0
    stem = options.results / f"bench-{time.strftime('%Y%m%d-%H%M%S')}"
    options.results.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=stem.with_suffix(".log"), level=logging.INFO, format="%(asctime)s %(message)s"
    )
    plan = runners.Plan(options.scale, options.rounds)
    measured: list[Measurement] = []
    failed: dict[str, str] = {}
    with Stack() as stack:
        where = machine(stack.sql("show server_version")[0][0])
        for workload in chosen(options.only, everything=options.all):
            print(f"\n{workload.name}: {workload.about}", flush=True)
            try:
                measured += runners.run(stack, workload, plan)
            except Exception as err:
                logging.exception("%s failed", workload.name)
                traceback.print_exc()
                failed[workload.name] = f"{type(err).__name__}: {err}"
            result = Result(plan.scale, plan.rounds, where, measured, scores(measured), failed)
            # Written after each workload, so that hours of measurements survive a later failure.
            write(result, stem.with_suffix(".json"), options.results / LAST.name)
    return _show(result, stem)


def _show(result: Result, stem: Path) -> int:
    console = Console(width=WIDTH)
    console.print(measured_table(result))
    if (bill := source_table(result)).row_count:
        console.print(bill)
    console.print(targets_table(result))
    for workload, error in result.failed.items():
        console.print(f"{workload} failed: {error}", style="red", markup=False)
    picture = stem.with_suffix(".png")
    written = [stem.with_suffix(".json"), *([picture] if draw(result, picture) else [])]
    console.print(f"written: {', '.join(map(str, written))}", soft_wrap=True)
    return int(bool(result.failed))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="these workloads, or patterns of their names",
    )
    parser.add_argument("--all", action="store_true", help="all workloads; takes hours")
    parser.add_argument(
        "--list", action="store_true", help="print the workloads; those with * are the default"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of rows, changes and tables, 0.05 for a try"
    )
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more warms up")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of JSON, picture and log"
    )
    options = parser.parse_args(arguments)
    try:
        chosen(options.only)
    except ValueError as err:
        parser.error(str(err))
    if options.scale <= 0 or options.rounds < 1:
        parser.error("--scale must be above 0, and --rounds 1 at the least")
    return options


if __name__ == "__main__":
    sys.exit(main())
