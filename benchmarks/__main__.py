"""``make bench``: all measurements behind the docs' figures, printed as a table and kept as JSON in benchmarks/results/."""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks import decode, drift, main_job, route, source_cost, sync
from benchmarks.measured import Measured

RESULTS = Path(__file__).parent / "results"


PARTS = ("decode", "sync", "main", "filter", "drift", "source")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000, help="rows of the table before the changes")
    parser.add_argument("--changes", type=int, default=1_000_000, help="changes of the backlog")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts; default: all")
    options = parser.parse_args()
    parts: dict[str, Callable[[], list[Measured] | None]] = {
        "decode": lambda: decode.main(decode.ROWS, decode.BATCH),
        "sync": lambda: sync.run(options.rows),
        "main": lambda: main_job.run(options.rows, options.changes),
        "filter": lambda: route.run(options.rows, options.changes),
        "drift": lambda: drift.run(2 * options.rows, options.rows // 200),
        "source": lambda: source_cost.run(options.changes),
    }
    measured = [row for name, part in parts.items() if name in options.only for row in part() or []]
    table = Table(title=f"{options.rows:,} rows, {options.changes:,} changes")
    for heading in ("what", "seconds", "ratio", "to", "details"):
        table.add_column(heading, justify="right" if heading in ("seconds", "ratio") else "left")
    for row in measured:
        notes = ", ".join(f"{name} {value:,}" for name, value in row.notes.items())
        table.add_row(
            row.name, f"{row.seconds:.2f}", f"{row.ratio:.1f}x" if row.ratio else "", row.baseline or "", notes
        )
    Console(width=170).print(table)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json"
    machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
    path.write_text(json.dumps({"machine": machine, "measured": [asdict(row) for row in measured]}, indent=2))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
