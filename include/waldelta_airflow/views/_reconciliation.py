"""The page of reconciliation results, and its repair button, which triggers the _reconcile DAG.

The reader needs the permission to trigger that DAG.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waldelta.config import PipelineFile, dag_id_of
from waldelta.lake.ledger import Ledger, Reconciliation
from waldelta.lake.ledger.reconciliations import DIFFERENT, Reconciliations, last_answers
from waldelta.lake.ledger.records import now
from waldelta.monitoring.reconciliation_status import read_compared
from waldelta.monitoring.table_list import replicated_tables
from waldelta_airflow.views._pages import HISTORY_SHOWN
from waldelta_airflow.views._render import render
from waldelta_airflow.views._trigger import Button

_MOST_LISTED = 200
_ROWS_SHOWN = 100


def reconciliation_page(
    base: str, pipeline: PipelineFile, ledger: Ledger, button: Button, *, shows_values: bool
) -> str:
    """Returns the page of each table's last comparison, differing tables first.

    It also shows the errors of later attempts, and all results of 30 days.
    """
    at, kept = now(), Reconciliations(ledger.lake)
    fed = replicated_tables(ledger)
    told = kept.history()
    answers, attempts = last_answers(row for row in told if row.table_name in fed)
    latest = sorted(
        kept.in_full(answers).values(), key=lambda row: (row.status != DIFFERENT, row.table_name)
    )
    history = [row for row in told[::-1] if row.at >= at - HISTORY_SHOWN]
    return render(
        "reconciliation.html",
        base,
        at,
        name=pipeline.pipeline,
        here="reconciliation",
        latest=latest,
        attempts=attempts,
        compared=read_compared(ledger, fed, told),
        different=[row for row in latest if row.status == DIFFERENT],
        history=history[:_MOST_LISTED],
        more_history=max(0, len(history) - _MOST_LISTED),
        button=button,
        is_under_way=button.dag.is_under_way,
        shows_values=shows_values,
        permission=(pipeline.row_values, dag_id_of(pipeline.pipeline, "cdc")),
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
