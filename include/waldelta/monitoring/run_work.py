"""What runs did, in the unit of their verb: changes landed, rows copied, compared or corrected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow.compute as pc

from waldelta.lake.ledger import Ledger, TableState
from waldelta.lake.ledger.records import SYNCED, Run
from waldelta.lake.ledger.table import last_rows
from waldelta.monitoring._run_results import parsed
from waldelta.monitoring.run_history import LANDING, RunLine
from waldelta.quantities import counted

_COPYING = ("sync", "resync")
_CORRECTING = ("replay", "quarantine")
_WRITTEN = ("inserted", "updated", "deleted")

RunKey = tuple[str, str]


def read_copied(ledger: Ledger, lines: Sequence[RunLine]) -> dict[RunKey, dict[str, int]]:
    """Returns by verb and id of each run that copies tables: the rows of each table it copied, in
    all attempts.
    """
    verbs = {line.run_id: line.verb for line in lines if line.verb in _COPYING}
    if not verbs:
        return {}
    chosen = pc.field("run_id").isin(sorted(verbs)) & (pc.field("status") == SYNCED)
    states = ledger.table(TableState).scan(("run_id", "table_name", "rows"), None, chosen)
    found: dict[RunKey, dict[str, int]] = {}
    for row in last_rows(states, ["run_id", "table_name"]).to_pylist():
        run_id = row["run_id"]
        found.setdefault((verbs[run_id], run_id), {})[row["table_name"]] = row["rows"]
    return found


def read_work(ledger: Ledger, lines: Sequence[RunLine]) -> dict[RunKey, str]:
    """Returns in words what each run did; only results of runs that landed nothing are read."""
    found = {
        (line.verb, line.run_id): counted(line.changes, "change")
        for line in lines
        if line.verb in LANDING
    }
    others = [line for line in lines if line.verb not in LANDING]
    if not others:
        return found
    copied = read_copied(ledger, others)
    chosen = pc.field("run_id").isin(sorted({line.run_id for line in others}))
    rows = ledger.table(Run).scan(
        ("at", "verb", "run_id", "result"), min(line.at for line in others), chosen
    )
    for row in last_rows(rows, ["verb", "run_id"]).to_pylist():
        key = (row["verb"], row["run_id"])
        if key not in found:
            tables = parsed(row["result"]).get("tables") or {}
            found[key] = _work(row["verb"], tables, copied.get(key, {}))
    return found


def _work(verb: str, tables: Mapping[str, Mapping[str, Any]], copied: Mapping[str, int]) -> str:
    compared = sum(int(done.get("compared") or 0) for done in tables.values())
    if compared:
        return f"{counted(compared, 'row')} compared"
    if verb in _COPYING:
        latest = {name: int(done["rows"]) for name, done in tables.items() if done.get("rows")}
        return f"{counted(sum({**copied, **latest}.values()), 'row')} copied"
    if verb in _CORRECTING:
        written = sum(int(done.get(name) or 0) for done in tables.values() for name in _WRITTEN)
        return f"{counted(written, 'row')} corrected"
    return ""
