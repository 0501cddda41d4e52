"""Reads one run's result as its stages recorded it: JSON of this or an earlier version."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache, partial
from typing import Any

from waldelta.config.parse_text import parse_json
from waldelta.lake.ledger import Ledger
from waldelta.lake.ledger.records import Run
from waldelta.lake.ledger.table import of_run
from waldelta.monitoring.run_history import RunLine

Results = Callable[[RunLine], dict[str, Any]]


def read_result(
    ledger: Ledger, verb: str, run_id: str, since: datetime | None = None
) -> dict[str, Any] | None:
    """Returns the latest result of a run, or None; ``since`` shortens the search."""
    rows = ledger.table(Run).scan(("at", "result"), since, of_run(run_id, verb))
    return parsed(rows["result"][-1].as_py()) if rows.num_rows else None


def parsed(text: str | None) -> dict[str, Any]:
    """Returns a result from the ledger's text; empty when it isn't JSON of a run."""
    try:
        result = parse_json(text or "{}")
    except ValueError:
        return {}
    return result if isinstance(result, dict) else {}


def results_of(ledger: Ledger) -> Results:
    """Returns a function that reads each run's result once."""
    read = cache(partial(read_result, ledger))
    return lambda run: read(run.verb, run.run_id, run.at) or {}
