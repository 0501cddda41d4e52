"""The ids of a pipeline's DAGs, for DAG files, pages, alerts and messages.

It imports nothing else, because DAG parsing and error messages need only the ids. Prose repeats the
rule: the DAGs' own documentation, two templates and docs/.
"""

from __future__ import annotations

from typing import Literal

DagKind = Literal["setup", "initial_sync", "cdc", "reconcile", "maintenance", "decide", "resync"]


def dag_id_of(pipeline: str, kind: DagKind) -> str:
    """Returns the id of a pipeline's DAG."""
    return f"{pipeline}_{kind}"
