"""A large installation, made up: many pipelines, their lakes, and their DAGs in Airflow's database.

Few lakes are written, one for each state that a pipeline can be in; the others are copies.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from tests.support.bookkeeping import add_reports
from waldelta.config import DagKind, PipelineFile, dag_id_of, load_pipeline_file
from waldelta.lake import Lake
from waldelta.lake.ledger import (
    COPYING,
    DISCARDED,
    WAITING,
    Decision,
    Decisions,
    ExpectationResult,
    Ledger,
    Reconciliation,
    Run,
    SentMessage,
    TableState,
    TargetCut,
)
from waldelta.lake.ledger.check_records import Reconciliations
from waldelta.stages.check.reports.entries import ReportEntry

DAGS: tuple[DagKind, ...] = (
    "setup",
    "initial_sync",
    "cdc",
    "reconcile",
    "maintenance",
    "decide",
    "resync",
)
EVERY = timedelta(minutes=5)
_PART = 500
_STAGES = ("land", "apply", "check", "report")
_KINDS = (
    "expect_column_values_to_be_unique",
    "expect_column_values_to_not_be_null",
    "row_count",
    "own_rule",
)
_CHECKED_RUNS = 5
_TEXT = """\
pipeline: {name}
source:
  conn_id: {name}_source
  slot: {name}_cdc
  publications: [{{name: {name}_pub, tables: [{tables}]}}]
target: {{root: 'file://{lake}'}}
schedule: "*/5 * * * *"
"""


@dataclass(frozen=True, slots=True)
class State:
    """What a pipeline is like, and of how many pipelines one is like this."""

    name: str
    one_of: int
    ended: timedelta = timedelta(minutes=2)


# The first that fits: a pipeline's number is divisible by ``one_of``.
STATES = (
    State("failed", 23),
    State("quarantine", 17),
    State("late", 29, timedelta(hours=7)),
    State("copying", 31),
    State("healthy", 1),
)


def state_of(number: int) -> State:
    """Returns the state of the pipeline with this number."""
    return next(state for state in STATES if number % state.one_of == 0)


def name_of(number: int) -> str:
    """Returns the name of the pipeline with this number."""
    return f"shop_{number:03}"


def write_installation(folder: Path, pipelines: int, tables: int, runs: int, end: datetime) -> None:
    """Write the pipelines' files, and a lake for each with so many tables and runs."""
    lakes: dict[str, Path] = {}
    for number in range(1, pipelines + 1):
        state, lake = state_of(number), folder / "lakes" / name_of(number)
        pipeline = write_file(folder, name_of(number), tables, lake)
        if state.name in lakes:
            shutil.copytree(lakes[state.name], lake, ignore=shutil.ignore_patterns("data_docs"))
        else:
            lakes[state.name] = lake
            _write_lake(pipeline, state, tables, runs, end)
        _write_reports(pipeline, state, tables, end)


def write_file(folder: Path, name: str, tables: int, lake: Path) -> PipelineFile:
    """Write a pipeline's file; returns the pipeline."""
    path = folder / f"{name}.yml"
    listed = ", ".join(f"{{name: {table}}}" for table in table_names(tables))
    path.write_text(_TEXT.format(name=name, tables=listed, lake=lake))
    return load_pipeline_file(path)


def _write_lake(
    pipeline: PipelineFile, state: State, tables: int, runs: int, end: datetime
) -> None:
    root, end = pipeline.target.root, end - state.ended
    write_history(root, tables, runs, end)
    compare(root, tables, 7, end, 7 if state.name == "failed" else None)
    ledger = Ledger(Lake(root))
    if state.name == "quarantine":
        set_aside(root, tables, 40, end)
    if state.name == "copying":
        ledger.append(TableState(end, "manual__again", table_names(tables)[0], 2, COPYING))
    last = ledger.table(Run).read()[-1]
    status = "failed" if state.name == "failed" else "succeeded"
    ledger.append(replace(last, at=last.at + timedelta(seconds=1), status=status))


def _write_reports(pipeline: PipelineFile, state: State, tables: int, end: datetime) -> None:
    names = table_names(tables)
    for number in range(_CHECKED_RUNS):
        at = end - state.ended - EVERY * number
        failures = ("id isn't negative",) if state.name == "failed" and not number else ()
        run = (at, pipeline.pipeline, run_id(at))
        add_reports(
            pipeline,
            *(ReportEntry(*run, name, number, 4, failures, (), "page") for name in names[:3]),
            name=str(number),
        )


def write_dags(pipelines: int, runs: int, end: datetime) -> None:
    """Create Airflow's tables in its database, with the pipelines' DAGs and runs of each."""
    from airflow import settings
    from airflow.models import import_all_models
    from airflow.models.base import Base
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.models.dagrun import DagRun
    from airflow.models.pool import Pool
    from sqlalchemy import insert

    import_all_models()
    settings.configure_orm()
    Base.metadata.create_all(settings.engine)
    with settings.engine.begin() as connection:
        connection.execute(insert(DagBundleModel.__table__).values(name="b", active=True))
        connection.execute(insert(Pool.__table__), list(_pools(pipelines)))
        connection.execute(insert(DagModel.__table__), list(_dags(pipelines, end)))
        connection.execute(insert(DagRun.__table__), list(_dag_runs(pipelines, runs, end)))


def _pools(pipelines: int) -> Iterator[dict[str, object]]:
    for number in range(1, pipelines + 1):
        pool = f"waldelta_{name_of(number)}_cdc"
        yield {"pool": pool, "slots": 1, "include_deferred": False}


def _dags(pipelines: int, end: datetime) -> Iterator[dict[str, object]]:
    for number in range(1, pipelines + 1):
        for kind in DAGS:
            yield {
                "dag_id": dag_id_of(name_of(number), kind),
                "is_paused": False,
                "is_stale": False,
                "timetable_description": "Every 5 minutes" if kind == "cdc" else "",
                "next_dagrun_create_after": end + EVERY - state_of(number).ended,
                "bundle_name": "b",
                "fileloc": "",
                "has_task_concurrency_limits": False,
                "max_active_runs": 1,
                "max_active_tasks": 1,
                "max_consecutive_failed_dag_runs": 0,
            }


def _dag_runs(pipelines: int, runs: int, end: datetime) -> Iterator[dict[str, object]]:
    for number in range(1, pipelines + 1):
        state = state_of(number)
        for n in range(runs):
            at = end - state.ended - EVERY * n
            failed = state.name == "failed" and n == 0
            yield {
                "dag_id": dag_id_of(name_of(number), "cdc"),
                "run_id": run_id(at),
                "run_type": "scheduled",
                "state": "failed" if failed else "running" if number % 19 == n == 0 else "success",
                "run_after": at,
                "start_date": at,
                "clear_number": 0,
                "log_template_id": None,
                "triggered_by": None,
                "backfill_id": None,
            }


def use(folder: Path) -> None:
    """Have Airflow and waldelta in this process use the installation of a folder."""
    os.environ |= {
        "AIRFLOW_HOME": str(folder / "airflow"),
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{folder}/airflow.db",
        "WALDELTA_PIPELINES": str(folder),
    }


def write_history(root: str, tables: int, runs: int, end: datetime) -> None:
    """Write a pipeline's ledger after ``runs`` runs over ``tables`` tables.

    Every third run changes a table. The ledger's own writer writes it, many rows per commit, and
    compacts it on the way.
    """
    names, synced = table_names(tables), end - EVERY * (runs + 1)
    ledger = Ledger(Lake(root))
    for name in names:
        state = TableState(synced, "manual__sync", name, 1, "synced", key_columns=["id"], rows=1000)
        ledger.append(state)
    for kind, made in ((Run, _runs), (ExpectationResult, _results)):
        table = ledger.table(kind)
        for first in range(0, runs, _PART):
            chunk = range(first, min(runs, first + _PART))
            table.extend(list(made(names, chunk, end - EVERY * runs)))


def table_names(tables: int) -> list[str]:
    """Returns the names of this many tables."""
    return [f"public.table_{n:03}" for n in range(tables)]


def compare(root: str, tables: int, nights: int, end: datetime, different: int | None = 7) -> None:
    """Write the results of this many nightly reconciliations of all tables.

    All tables are equal except for the one with this number.
    """
    for night in range(nights, 0, -1):
        at = end - timedelta(days=night)
        found = [
            Reconciliation(
                at, run_id(at), name, "different" if n == different else "equal", version=1
            )
            for n, name in enumerate(table_names(tables))
        ]
        Reconciliations(Lake(root)).add(found)


def set_aside(root: str, tables: int, rows: int, end: datetime) -> None:
    """Write this many rows in quarantine, from all tables, as gates would.

    Half as many rows were also discarded, each table's at once.
    """
    held = [_aside(f"public.table_{n % tables:03}", n, end) for n in range(rows)]
    gone = [
        replace(row, status=DISCARDED, key=f'{row.key[:-2]}x"}}', by="ann", run_id=row.table_name)
        for row in held[::2]
    ]
    for first in range(0, rows, _PART):
        Decisions(Lake(root)).add(
            [*held[first : first + _PART], *gone[first // 2 : (first + _PART) // 2]]
        )


def _aside(table_name: str, n: int, at: datetime) -> Decision:
    key, sent = (
        json.dumps({"id": str(n)}),
        json.dumps({"id": str(n), **{f"column_{k}": "x" * 40 for k in range(10)}}),
    )
    messages = [SentMessage(n, 1, n << 20, n, sent.encode())]
    return Decision(
        at,
        run_id(at),
        WAITING,
        table_name,
        1,
        n,
        key,
        [],
        sent,
        n << 20,
        at,
        f"fails {_KINDS[n % 4]}",
        messages,
    )


def run_id(at: datetime) -> str:
    """Returns a run id in the form of Airflow's scheduled runs."""
    return f"scheduled__{at.isoformat()}"


def _changed(names: list[str], number: int) -> list[str]:
    return [name for n, name in enumerate(names) if n % 3 == number % 3]


def _runs(names: list[str], numbers: range, first: datetime) -> Iterator[Run]:
    for number in numbers:
        began = first + EVERY * number
        failed = number % 97 == 0
        tables = {name: _table(number) for name in _changed(names, number)}
        result = {
            "verb": "consume",
            "run_id": run_id(began),
            "status": "running",
            "stages": {},
            "tables": tables,
        }
        result |= {
            "changes": 1000 + number % 500,
            "passed": names,
            "lag_bytes": number % 900 * 1000,
            "warnings": [],
        }
        for n, stage in enumerate(_STAGES):
            result["stages"][stage] = {
                "status": "succeeded",
                "seconds": 4.0 + n,
                "detail": "",
                "error": None,
            }
            yield Run(
                targets=(
                    [_done(name, number, began) for name in tables] if stage == "apply" else []
                ),
                at=began + timedelta(seconds=8 * (n + 1)),
                run_id=run_id(began),
                verb="consume",
                status="running" if n < 3 else "failed" if failed else "succeeded",
                run_type="scheduled",
                interval_start=began - EVERY,
                interval_end=began,
                start_lsn=number << 20,
                end_lsn=(number + 1) << 20,
                changes=1000 + number % 500,
                seconds=4.0 * (n + 1),
                result=json.dumps(result),
                as_of=began,
                lag_before_bytes=(number % 900) << 14,
                lag_bytes=number % 900 << 6,
                retained_bytes=32 << 20,
                wal_status="reserved",
            )


def _table(number: int) -> dict[str, Any]:
    return {
        "inserted": number % 50,
        "updated": number % 30,
        "deleted": number % 7,
        "skipped": 0,
        "truncated": False,
        "version": number,
        "rows": None,
        "completed": 0,
        "quarantined": 0,
        "raw_rows": 0,
        "compared": None,
        "unchanged": None,
    }


def _done(name: str, number: int, began: datetime) -> TargetCut:
    counts = {
        key: value for key, value in _table(number).items() if key in TargetCut.__dataclass_fields__
    }
    return TargetCut(name, 1, commit_ts=began - timedelta(seconds=2), **counts)


def _results(names: list[str], numbers: range, first: datetime) -> Iterator[ExpectationResult]:
    for number in numbers:
        began = first + EVERY * number
        for name in _changed(names, number):
            for n, kind in enumerate(_KINDS):
                yield ExpectationResult(
                    at=began + timedelta(seconds=24),
                    run_id=run_id(began),
                    table_name=name,
                    expectation=kind,
                    meaning=f"{kind} of {name}",
                    severity="warning" if n == 3 else "critical",
                    origin="key",
                    success=not ((n == 3 and number % 11 == 0) or (n == 0 and number % 400 == 0)),
                    observed="1,000",
                    unexpected_count=0,
                    version=number,
                )
