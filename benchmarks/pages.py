"""``python -m benchmarks.pages``: CPU and wall seconds of the Airflow plugin's pages in a large
installation, and of a pipeline with a long history.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks import installation
from tests.support.plugin_app import plugin_app
from waldelta.lake import Lake
from waldelta.lake.ledger import ExpectationResult, Ledger, Run, now
from waldelta.lake.ledger.check_records import keep_results

if TYPE_CHECKING:
    from fastapi.testclient import TestClient

# The maximum CPU seconds of a page; its wall time also depends on other processes.
AT_MOST_S = 0.3
AT_MOST_KB = 150
_NIGHTS = 30
# This pipeline has as many runs as all others together.
LONG = "shop_long"
_PAGES = (
    "",
    "?hours=168",
    "/runs",
    "/runs?failed=true",
    "/expectations",
    "/table/public.table_003",
    "/reconciliation",
    "/waiting",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write an installation, request each page a few times, and print the best times.

    Returns 1 when a page took over ``AT_MOST_S``, or has more than ``AT_MOST_KB``.
    """
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--pipelines", type=int, default=200)
    options.add_argument("--tables", type=int, default=10, help="of each pipeline")
    options.add_argument("--runs", type=int, default=50, help="of each pipeline")
    options.add_argument("--long-runs", type=int, default=10_000, help="of another pipeline")
    options.add_argument("--long-tables", type=int, default=100, help="of that pipeline")
    options.add_argument("--quarantined", type=int, default=10_000, help="in that pipeline")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument(
        "--uncompacted", action="store_true", help="without the maintenance that runs every night"
    )
    options.add_argument("--folder", type=Path, help="where the installation stays")
    asked = options.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="waldelta-pages-") as name:
        folder = asked.folder or Path(name)
        _write(folder, asked)
        title = f"{asked.pipelines:,} pipelines of {asked.tables} tables and {asked.runs} runs"
        table = Table("page", "kB", "CPU ms", "wall ms", "first ms", title=title)
        slow = []
        client = _client(folder)
        first_s = _read_all(client)
        Console().print(f"all pipelines were read {first_s:.1f} s after the first request")
        for path in _paths(client, asked):
            first = _ask(client, path)[1]
            cpu, wall, size = min(_ask(client, path) for _ in range(asked.rounds))
            slow += [path] if cpu > AT_MOST_S or size > AT_MOST_KB << 10 else []
            numbers = (size >> 10, cpu * 1000, wall * 1000, first * 1000)
            table.add_row(path, *(f"{number:,.0f}" for number in numbers))
        Console().print(table)
    if slow:
        sys.stderr.write(f"over {AT_MOST_S:g} s of CPU or {AT_MOST_KB} kB: {', '.join(slow)}\n")
    return int(bool(slow))


def _write(folder: Path, asked: argparse.Namespace) -> None:
    installation.use(folder)
    if (folder / "airflow.db").exists():
        return
    installation.write_installation(folder, asked.pipelines, asked.tables, asked.runs, now())
    installation.write_dags(asked.pipelines, asked.runs, now())
    if asked.long_runs:
        _write_long(folder / "lakes" / LONG, asked)
        installation.write_file(folder, LONG, asked.long_tables, folder / "lakes" / LONG)


def _write_long(lake: Path, asked: argparse.Namespace) -> None:
    root = f"file://{lake}"
    installation.write_history(root, asked.long_tables, asked.long_runs, now())
    installation.compare(root, asked.long_tables, _NIGHTS, now())
    installation.set_aside(root, asked.long_tables, asked.quarantined, now())
    if not asked.uncompacted:
        Ledger(Lake(root)).table(Run).prune(lambda rows: [True] * len(rows))
        Ledger(Lake(root)).table(ExpectationResult).prune(
            lambda rows: keep_results(rows, now() - installation.EVERY * asked.long_runs * 2)
        )


def _client(folder: Path) -> TestClient:
    installation.use(folder)
    from fastapi.testclient import TestClient

    return TestClient(plugin_app("viewer"))


def _read_all(client: TestClient) -> float:
    """Wait until the page of all pipelines has read each; returns the seconds since it was asked.

    A process reads them once, in threads whose CPU time would count as the page's.
    """
    began = time.perf_counter()
    while "being read" in client.get("/").text:
        time.sleep(0.5)
    return time.perf_counter() - began


def _paths(client: TestClient, asked: argparse.Namespace) -> Iterator[str]:
    yield from ("/", "/docs/")
    names = [installation.name_of(min(asked.pipelines, 23)), *([LONG] if asked.long_runs else [])]
    for name in names:
        for page in _PAGES:
            yield f"/p/{name}{page}"
        for page, kind in (("runs", "run/consume"), ("waiting", "waiting/row")):
            text = client.get(f"/p/{name}/{page}").text
            if (link := re.search(rf'href="(/p/{name}/{kind}/[^"]+)"', text)) is not None:
                yield link[1]


def _ask(client: TestClient, path: str) -> tuple[float, float, int]:
    cpu, wall = time.process_time(), time.perf_counter()
    answer = client.get(path)
    answer.raise_for_status()
    return time.process_time() - cpu, time.perf_counter() - wall, len(answer.content)


if __name__ == "__main__":
    sys.exit(main())
