"""Reads the gates of tables from the files of own expectations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from waldelta.config.expectation_files import OwnSuiteFile, assign_suites, read_each
from waldelta.errors import ConfigError
from waldelta.lake.ledger import TableState
from waldelta.pipeline import Job
from waldelta.pipeline.targets.quarantined_rows import valid_releases


@dataclass(frozen=True, slots=True)
class TableGate:
    """The gate of one table: its own expectations that judge changes before the merge.

    An operator has released all commits up to ``released`` (a position): they pass expectations
    with ``gate: stop``. ``problem`` is why the table's file of expectations can't be read.
    """

    table: str
    suite: OwnSuiteFile | None = None
    problem: ConfigError | None = None
    released: int = 0


def read_gates(job: Job, states: Sequence[TableState]) -> dict[str, TableGate]:
    """Returns by table the gates of these tables, from the current files of own expectations.

    A file that can't be read may contain a gate, so its table has a gate with a problem.
    """
    folder = job.pipeline.quality.suites
    if folder is None:
        return {}
    generations = {state.table_name: state.generation for state in states}
    suites = assign_suites(read_each(Path(folder)), generations)
    gates = {name: TableGate(name, problem=err) for name, err in suites.refused.items()}
    gated = {
        name: suite
        for name, suite in suites.by_table.items()
        if any(item.gate != "warn" for item in suite.suite.expectations)
    }
    released = valid_releases(job) if gated else {}
    for name, suite in gated.items():
        of_copy = released.get((name, generations[name]))
        gates[name] = TableGate(name, suite, None, 0 if of_copy is None else of_copy.upto_lsn)
    return gates
