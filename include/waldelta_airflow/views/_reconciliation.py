"""The page of reconciliation results, and its repair button, which triggers the _reconcile DAG.

The reader needs the permission to trigger that DAG.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waldelta.lake.ledger import DIFFERENT, Reconciliation, now
from waldelta.lake.ledger.reconciliations import Reconciliations, last_answers
from waldelta.monitoring.reconciliation_status import read_compared
from waldelta.monitoring.table_list import replicated_tables
from waldelta_airflow.views._access import PipelineRequest
from waldelta_airflow.views._pages import HISTORY_SHOWN
from waldelta_airflow.views._trigger import Button

_MOST_LISTED = 200
_ROWS_SHOWN = 100


def reconciliation_page(request: PipelineRequest, button: Button) -> str:
    """Returns the page of each table's last comparison, differing tables first.

    It also shows the errors of later attempts, and all results of 30 days.
    """
    at, reconciliations = now(), Reconciliations(request.ledger.lake)
    tables = replicated_tables(request.ledger)
    results = reconciliations.history()
    answers, attempts = last_answers(row for row in results if row.table_name in tables)
    latest = sorted(
        reconciliations.in_full(answers).values(),
        key=lambda row: (row.status != DIFFERENT, row.table_name),
    )
    history = [row for row in results[::-1] if row.at >= at - HISTORY_SHOWN]
    return request.render(
        "reconciliation.html",
        at,
        here="reconciliation",
        latest=latest,
        attempts=attempts,
        compared=read_compared(request.ledger, tables, results),
        different=[row for row in latest if row.status == DIFFERENT],
        history=history[:_MOST_LISTED],
        more_history=max(0, len(history) - _MOST_LISTED),
        button=button,
        is_under_way=button.dag.is_under_way,
        more=_more,
        rows_shown=_ROWS_SHOWN,
    )


def _more(row: Reconciliation) -> int:
    """Returns how many differing rows aren't shown."""
    return row.differing - sum(one.rows for one in row.differences[:_ROWS_SHOWN])


def repair_of(tables: Sequence[str]) -> dict[str, Any]:
    """Returns the params of a run that compares these tables again and repairs what differs."""
    return {
        "tables": list(tables),
        "repair": True,
        "reason": "requested on the reconciliation page",
    }
