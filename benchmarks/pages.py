"""``python -m benchmarks.pages``: CPU and wall seconds of each page of the Airflow plugin over a long history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

from waldelta.expectation_results import ExpectationResult
from waldelta.lake import bookkeeping_uri
from waldelta.ledger import BatchCut, Ledger, Run, TableState
from waldelta.ledger_table import LedgerTable

EVERY = timedelta(minutes=5)
_PART = 500
_STAGES = ("land", "apply", "check", "report")
_KINDS = ("expect_column_values_to_be_unique", "expect_column_values_to_not_be_null", "row_count", "own_rule")


def write_history(root: str, tables: int, runs: int, end: datetime) -> None:
    """A pipeline's ledger as ``runs`` runs over ``tables`` tables leave it, each table changed by every third run.

    Written by the ledger's own writer, many rows a commit, and compacted by it as it goes.
    """
    names = [f"public.table_{n:03}" for n in range(tables)]
    ledger = Ledger(root)
    for name in names:
        ledger.append(
            TableState(end - EVERY * (runs + 1), "manual__sync", name, 1, "synced", key_columns=["id"], rows=1000)
        )
    for kind, made in ((Run, _runs), (BatchCut, _cuts), (ExpectationResult, _results)):
        table = LedgerTable(bookkeeping_uri(root, kind.table), kind.schema)
        for first in range(0, runs, _PART):
            chunk = range(first, min(runs, first + _PART))
            table.extend(list(made(names, chunk, end - EVERY * runs)))


def run_id(at: datetime) -> str:
    """As Airflow names scheduled runs."""
    return f"scheduled__{at.isoformat()}"


def _changed(names: list[str], number: int) -> list[str]:
    return [name for n, name in enumerate(names) if n % 3 == number % 3]


def _runs(names: list[str], numbers: range, first: datetime) -> Iterator[dict[str, Any]]:
    for number in numbers:
        began = first + EVERY * number
        failed = number % 97 == 0
        tables = {name: _table(number) for name in _changed(names, number)}
        result = {"verb": "consume", "run_id": run_id(began), "status": "running", "stages": {}, "tables": tables}
        result |= {"changes": 1000 + number % 500, "passed": names, "lag_bytes": number % 900 * 1000, "warnings": []}
        for n, stage in enumerate(_STAGES):
            result["stages"][stage] = {"status": "succeeded", "seconds": 4.0 + n, "detail": "", "error": None}
            yield {
                "at": began + timedelta(seconds=8 * (n + 1)), "run_id": run_id(began), "verb": "consume",
                "status": "running" if n < 3 else "failed" if failed else "succeeded", "run_type": "scheduled",
                "interval_start": began - EVERY, "interval_end": began, "start_lsn": number << 20, "end_lsn": (number + 1) << 20,
                "changes": 1000 + number % 500, "seconds": 4.0 * (n + 1), "result": json.dumps(result), "as_of": began,
                "lag_before_bytes": (number % 900) << 14, "lag_bytes": number % 900 << 6, "retained_bytes": 32 << 20,
                "wal_status": "reserved",
            }  # fmt: skip


def _table(number: int) -> dict[str, Any]:
    return {
        "inserted": number % 50, "updated": number % 30, "deleted": number % 7, "skipped": 0, "truncated": False, "version": number,
        "rows": None, "reread": 0, "quarantined": 0, "verbatim": 0, "compared": None, "unchanged": None,
    }  # fmt: skip


def _cuts(names: list[str], numbers: range, first: datetime) -> Iterator[dict[str, Any]]:
    for number in numbers:
        changed = set(_changed(names, number))
        blank = {"skipped": 0, "truncated": False, "reread": 0, "quarantined": 0, "verbatim": 0, "generation": 1}
        targets = [
            {"table_name": name, "version": number, "inserted": 5, "updated": 3, "deleted": 1, **blank}
            if name in changed
            else {"table_name": name, "version": number, "inserted": 0, "updated": 0, "deleted": 0, **blank}
            for name in names
        ]
        at = first + EVERY * number
        yield {
            "at": at + timedelta(seconds=16), "run_id": run_id(at), "batch": number + 1, "end_lsn": (number + 1) << 20,
            "commit_ts": at - timedelta(seconds=2), "targets": targets,
        }  # fmt: skip


def _results(names: list[str], numbers: range, first: datetime) -> Iterator[dict[str, Any]]:
    for number in numbers:
        began = first + EVERY * number
        for name in _changed(names, number):
            for n, kind in enumerate(_KINDS):
                yield {
                    "at": began + timedelta(seconds=24), "run_id": run_id(began), "table_name": name, "expectation": kind,
                    "meaning": f"{kind} of {name}", "severity": "warning" if n == 3 else "critical", "origin": "key",
                    "success": not ((n == 3 and number % 11 == 0) or (n == 0 and number % 400 == 0)), "observed": "1,000",
                    "unexpected_count": 0, "version": number,
                }  # fmt: skip
