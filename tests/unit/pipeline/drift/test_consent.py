"""Questions on changes of source tables: which are open, and that they are read at once."""

import json
from dataclasses import replace

from waldelta.lake import Lake
from waldelta.lake.ledger import ColumnState, Decision, Decisions, Ledger, TableState, now
from waldelta.lake.ledger.table import LedgerTable
from waldelta.pipeline.drift import open_questions

COLUMN = ColumnState("w", 25, -1, "text", "string", False, 3)


def question(table, key, status="waiting", generation=1):
    kind, columns = ("copy", []) if "copy" in key else ("dropped_column", ["w"])
    return Decision(now(), "r", status, table, generation, 0, json.dumps(key), columns, kind=kind)


def test_open_questions(tmp_path, monkeypatch):
    """Of today's copy and columns, if no run has followed them; however many, in one read."""
    ledger = Ledger(Lake((tmp_path / "lake").as_uri()))
    of_w = {"dropped": "w", "attnum": 3, "relation": 7}
    states = [
        TableState(now(), "s", f"public.t{n}", 1, "synced", columns=[COLUMN], relation_ids=[7])
        for n in range(9)
    ]
    states[8] = replace(states[8], columns=[replace(COLUMN, stopped=True)])
    ledger.append_all(states)
    assert open_questions(ledger) == []
    waits = [question("public.t2", of_w), question("public.t1", {"copy": "c", "generation": 1})]
    agreed = replace(question("public.t3", of_w), status="agreed", by="ann")
    others = [
        question("public.t8", of_w, "refused"),
        question("public.t5", of_w | {"relation": 8}),
        question("public.t6", of_w | {"attnum": 4}),
        question("public.t7", {"copy": "c", "generation": 0}, generation=0),
        question("public.gone", of_w),
    ]
    refused = question("public.t4", of_w, "refused")
    Decisions(ledger.lake).add([*waits, agreed, refused, *others])
    reads, read = [], LedgerTable.read
    monkeypatch.setattr(
        LedgerTable, "read", lambda own, *a, **k: reads.append(own.uri) or read(own, *a, **k)
    )
    found = [(row.table_name, row.status) for row in open_questions(ledger)]
    answers = ["waiting", "waiting", "agreed", "refused"]
    assert found == [(f"public.t{n}", status) for n, status in enumerate(answers, 1)]
    assert reads.count(Decisions(ledger.lake).uri) == 1
