"""``python -m demo.stack up|down|status|psql``: the embedded stack from the command line."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from demo.stack import Stack, StackError
from demo.stack.processes import ended_by_signals
from waldelta.errors import WaldeltaError

# Short programs that read the flights of the lake, as in the README, for
# .venv/bin/python.
READERS = {
    "DuckDB": """\
import duckdb
duckdb.sql("install delta; load delta")
duckdb.sql("select origin, count(*) from delta_scan('{table}') group by origin").show()""",
    "delta-rs": """\
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
query = QueryBuilder().register("flights", DeltaTable("{table}"))
counts = query.execute("select origin, count(*) as flights from flights group by origin")
print(pa.table(counts).to_pandas())""",
    "Spark": """\
from waldelta.spark.session import spark_session
flights = spark_session().read.format("delta").load("{table}")
flights.groupBy("origin").count().show()""",
}
_INDENT = 11


def main(arguments: list[str] | None = None) -> int:
    """Run a command; exit code 0 when it succeeded (status: when the stack is running)."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.stack", description="the embedded stack", allow_abbrev=False
    )
    parser.add_argument("command", choices=("up", "down", "status", "psql"))
    parser.add_argument(
        "--folder", type=Path, default=Stack.folder, help="where its data lives (default .waldelta)"
    )
    given, options = parser.parse_known_args(arguments)
    if options and given.command != "psql":
        parser.error(f"unrecognized arguments: {' '.join(options)}")
    console = Console(highlight=False)
    if given.command == "psql":
        return psql(given.folder, console, options)
    try:
        with ended_by_signals():
            return {"up": up, "down": down, "status": status}[given.command](given.folder, console)
    except (StackError, WaldeltaError) as err:
        console.print(f"[red]✗[/] {given.command} failed")
        console.print(str(err), markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted: everything that was started is stopped again")
        return 130


def up(folder: Path, console: Console) -> int:
    """Start the stack and leave it running."""
    with console.status("starting the stack"):
        stack = Stack(folder, report=lambda line: console.print(f"[green]✓[/] {line}"))
        started = stack.start()
    console.print("the stack is up" if started else "the stack is running already")
    _describe(stack, console)
    return 0


def down(folder: Path, console: Console) -> int:
    """Stop the stack; its data stays."""
    with console.status("stopping the stack"):
        was_running = Stack(folder).stop()
    console.print(
        "the stack is stopped, its data is kept" if was_running else "the stack was not running"
    )
    return 0


def status(folder: Path, console: Console) -> int:
    """Print which parts are alive."""
    stack = Stack(folder)
    running = stack.is_running()
    for part in stack.parts:
        console.print(
            f"{part.name}: {f'process {part.pid}' if part.alive else f'dead, see {part.log}'}"
        )
    if running:
        _describe(stack, console)
    else:
        console.print("the stack is not running: make up")
    return 0 if running else 1


def psql(folder: Path, console: Console, options: list[str]) -> int:
    """Run psql on the demo's source database; ``options`` are psql's own. Returns its exit code."""
    stack = Stack(folder)
    if not stack.is_running():
        console.print("the stack is not running: make up")
        return 1
    program, variables = stack.psql(next(iter(stack.sources)))
    # Ctrl-C cancels psql's statement, and must not end this waiting process.
    signal.signal(signal.SIGINT, lambda *_: None)
    return subprocess.run([program, *options], env=os.environ | variables, check=False).returncode


def _describe(stack: Stack, console: Console) -> None:
    lines = {
        "Airflow": f"{stack.url}  user [bold]{stack.user}[/]  password [bold]{stack.password}[/]",
        "source": (
            "make psql, or one statement: make psql ARGS=\"-c 'select count(*) from flights'\""
        ),
        **_lake(stack),
        "logs": str(stack.logs),
        "stop it": "make down",
    }
    for name, text in lines.items():
        # Brackets in programs aren't markup.
        console.print(f"{name + ':':<{_INDENT}}", text, soft_wrap=True, markup=name == "Airflow")


def _lake(stack: Stack) -> dict[str, str]:
    """Returns how to read the lake; keys of an object store are not shown."""
    text = f"{stack.lake}, a Delta table is <schema>/<table>"
    if (store := stack.object_store) is not None:
        keys = f"keys are in Airflow's connection {store.conn_id}"
        return {"lake": f"{text}, in the S3 server on {store.endpoint}; {keys}"}
    readers = {f"  {name}": _indented(text, stack.lake) for name, text in READERS.items()}
    return {"lake": f"{text}; in .venv/bin/python:"} | readers


def _indented(program: str, lake: str) -> str:
    lines = program.format(table=f"{lake}/public/flights").splitlines()
    return f"\n{' ' * (_INDENT + 1)}".join(lines)


if __name__ == "__main__":
    sys.exit(main())
