"""The rows that targets lack, for people: which, since which change, why, and what did come of them."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from waldelta.errors import ConfigError
from waldelta.job import Job
from waldelta.lsn import Lsn
from waldelta.quarantine import Quarantine


def list_quarantined(job: Job, tables: Collection[str] | None = None) -> list[dict[str, Any]]:
    """Each quarantined row of all targets, or of these; JSON-ready. ``key`` and ``sent`` are PostgreSQL's texts by column.

    Raises ConfigError for a table that isn't a target: an empty answer would read as all well.
    """
    generations = {name: state.generation for name, state in job.table_states().items()}
    if unknown := sorted(set(tables or ()) - generations.keys()):
        raise ConfigError(f"no target is fed by {', '.join(unknown)}: status says which tables there are")
    found = Quarantine(job.pipeline.target.root, job.storage_options).open_rows(generations)
    return [
        {
            "table": row.table_name,
            "key": json.loads(row.key),
            "lsn": str(Lsn(row.lsn)) if row.lsn is not None else None,
            "commit_ts": row.commit_ts.isoformat() if row.commit_ts is not None else None,
            "reason": row.reason,
            "lacking": row.columns,
            "sent": json.loads(row.sent) if row.sent else None,
            "run_id": row.run_id,
        }
        for row in found
        if tables is None or row.table_name in tables
    ]
