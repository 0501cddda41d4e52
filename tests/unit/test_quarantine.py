"""Rows that came incomplete: which are open, and that a run that is done again writes them once."""

from __future__ import annotations

from waldelta.ledger import now
from waldelta.quarantine import QUARANTINED, REREAD, RESOLVED, IncompleteRow, Quarantine, open_keys

NAME = 'public."it\'s"'


def row(status, key, batch, generation=1, table=NAME):
    return IncompleteRow(now(), "r", status, table, generation, batch, key, ["big"])


def told(quarantine, generation=1):
    return [(r.status, r.key, r.batch) for r in quarantine.rows(NAME, generation)]


def test_a_batch_that_is_done_again_replaces_its_rows(lake):
    """What a killed run wrote for batches it never applied goes; other tables, copies and older batches stay."""
    quarantine = Quarantine(lake)
    assert told(quarantine) == []
    quarantine.replace(NAME, 1, 0, [row(QUARANTINED, "a", 3), row(REREAD, "b", 3)])
    quarantine.replace("public.t", 1, 0, [row(QUARANTINED, "x", 5, table="public.t")])
    quarantine.replace(NAME, 2, 0, [row(QUARANTINED, "a", 5, generation=2)])
    quarantine.replace(NAME, 1, 3, [row(QUARANTINED, "c", 5)])
    quarantine.replace(NAME, 1, 3, [row(RESOLVED, "a", 6), row(QUARANTINED, "a", 6)])
    assert told(quarantine) == [(QUARANTINED, "a", 3), (REREAD, "b", 3), (RESOLVED, "a", 6), (QUARANTINED, "a", 6)]
    quarantine.replace(NAME, 1, 3, [])
    assert told(quarantine) == [(QUARANTINED, "a", 3), (REREAD, "b", 3)]
    assert told(quarantine, generation=2) == [(QUARANTINED, "a", 5)]
    assert quarantine.open_counts({NAME: 1, "public.t": 1}) == {NAME: 1, "public.t": 1}
    assert quarantine.open_counts({NAME: 3}) == {}


def test_the_latest_row_of_a_key_counts():
    """A key is open while its row is neither in the target nor gone from the source."""
    rows = [row(QUARANTINED, "a", 1), row(REREAD, "b", 1), row(QUARANTINED, "c", 1), row(RESOLVED, "c", 2)]
    assert open_keys(rows) == {"a"}
    assert open_keys([*rows, row(QUARANTINED, "c", 3)]) == {"a", "c"}


def test_pruning_keeps_what_is_open_and_what_is_young(lake):
    """However old: an open row is the only trace of what the target lacks."""
    quarantine = Quarantine(lake)
    assert quarantine.prune(now()) == 0
    old = [row(QUARANTINED, "a", 1), row(QUARANTINED, "b", 1), row(RESOLVED, "b", 2), row(REREAD, "c", 2)]
    quarantine.replace(NAME, 1, 0, old)
    quarantine.replace(NAME, 2, 0, [row(RESOLVED, "a", 2, generation=2)])
    oldest = now()
    quarantine.replace(NAME, 1, 2, [row(REREAD, "d", 3)])
    assert quarantine.prune(oldest) == 4
    assert (told(quarantine), told(quarantine, generation=2)) == ([(QUARANTINED, "a", 1), (REREAD, "d", 3)], [])
