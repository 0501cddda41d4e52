"""Rows that came incomplete: which are open, and that a run that is done again writes them once."""

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from tests.support.bookkeeping import write_earlier
from waldelta.errors import LateWriter
from waldelta.lake import UNFENCED, Lake
from waldelta.lake.ledger import (
    DISCARDED,
    RESOLVED,
    WAITING,
    Decision,
    Decisions,
    SentMessage,
    now,
    watched_rows,
)
from waldelta.lake.ledger.decisions import COMPLETED, FAILS, Outline
from waldelta.lake.ledger.table import LedgerTable

NAME = 'public."it\'s"'


def row(status, key, batch, generation=1, table=NAME):
    return Decision(now(), "r", status, table, generation, batch, key, ["big"])


def told(quarantine, generation=1):
    return [(r.status, r.key, r.batch) for r in quarantine.rows(NAME, generation)]


def test_a_batch_that_is_done_again_replaces_its_rows(lake):
    """Rows of batches that were never applied go; other tables, copies and batches stay."""
    quarantine = Decisions(Lake(lake))
    assert told(quarantine) == []
    quarantine.replace(NAME, 1, 0, [row(WAITING, "a", 3), row(COMPLETED, "b", 3)])
    quarantine.replace("public.t", 1, 0, [row(WAITING, "x", 5, table="public.t")])
    quarantine.replace(NAME, 2, 0, [row(WAITING, "a", 5, generation=2)])
    quarantine.replace(NAME, 1, 3, [row(WAITING, "c", 5)])
    quarantine.replace(NAME, 1, 3, [row(RESOLVED, "a", 6), row(WAITING, "a", 6)])
    assert told(quarantine) == [
        (WAITING, "a", 3),
        (COMPLETED, "b", 3),
        (RESOLVED, "a", 6),
        (WAITING, "a", 6),
    ]
    quarantine.replace(NAME, 1, 3, [])
    assert told(quarantine) == [(WAITING, "a", 3), (COMPLETED, "b", 3)]
    assert told(quarantine, generation=2) == [(WAITING, "a", 5)]
    assert quarantine.open_counts({NAME: 1, "public.t": 1}) == {NAME: 1, "public.t": 1}
    assert quarantine.open_counts({NAME: 3}) == {}


WRITES = {
    "a batch's rows": lambda quarantine, fence: quarantine.replace(
        NAME, 1, 3, [row(WAITING, "a", 4)], fence
    ),
    "a replay's, or a person's": lambda quarantine, fence: quarantine.add(
        [row(WAITING, "a", 3)], fence
    ),
    "nothing": lambda quarantine, fence: quarantine.replace(NAME, 1, 3, (), fence),
}
MEANWHILE = {
    "told": lambda quarantine: quarantine.replace(NAME, 1, 3, [row(RESOLVED, "a", 5)]),
    "had nothing to tell": lambda quarantine: quarantine.replace(NAME, 1, 3, ()),
    "removed what is staged": lambda quarantine: quarantine.fence(UNFENCED),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("meanwhile", MEANWHILE.values(), ids=MEANWHILE)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_run_that_slept_since_it_asked_writes_nothing(lake, write, meanwhile, is_first):
    """The next one has told the batches, and more: its rows would go, or be open again."""
    quarantine, holders = Decisions(Lake(lake)), ["sleeper"]
    if not is_first:
        quarantine.add([row(WAITING, "a", 2)])

    def check():
        if holders != ["sleeper"]:
            raise LateWriter("it is another run's")
        holders[:] = ["next"]
        meanwhile(quarantine)

    with pytest.raises(LateWriter, match="another run's"):
        write(quarantine, SimpleNamespace(verify=check))
    expected = [] if is_first else [(WAITING, "a", 2)]
    assert told(quarantine) == expected + [(RESOLVED, "a", 5)] * (meanwhile is MEANWHILE["told"])


def test_rows_that_replace_others_come_last_though_a_clock_was_set_back(lake):
    """On a machine whose clock is behind, a row that is resolved would go on being open."""
    quarantine = Decisions(Lake(lake))
    quarantine.add([replace(row(WAITING, "a", 3), at=now() + timedelta(days=1))])
    quarantine.replace(
        NAME, 1, 3, [row(WAITING, "b", 4), row(RESOLVED, "b", 4), row(RESOLVED, "a", 4)]
    )
    assert told(quarantine) == [
        (WAITING, "a", 3),
        (WAITING, "b", 4),
        (RESOLVED, "b", 4),
        (RESOLVED, "a", 4),
    ]
    assert quarantine.open_counts({NAME: 1}) == {}


def test_the_latest_row_of_a_key_counts():
    """A key is open while its row is neither in the target nor gone from the source."""
    rows = [
        row(WAITING, "a", 1),
        row(COMPLETED, "b", 1),
        row(WAITING, "c", 1),
        row(RESOLVED, "c", 2),
    ]
    assert watched_rows(rows).keys() == {"a"}
    assert watched_rows([*rows, row(WAITING, "c", 3)]).keys() == {"a", "c"}


LACKING = {
    "open": ([row(WAITING, "a", 1)], {"a"}),
    "discarded": ([row(WAITING, "a", 1), row(DISCARDED, "a", 1)], {"a"}),
    "there with other values": ([row(COMPLETED, "a", 1)], set()),
    "discarded, and another row stands there":
     ([row(DISCARDED, "a", 1), row(RESOLVED, "a", 2)], set()),
    "of an earlier copy":
     ([row(DISCARDED, "a", 1, generation=0), row(WAITING, "b", 1, generation=0)], set()),
    "of a batch behind the target's":
     ([row(DISCARDED, "a", 3), row(RESOLVED, "a", 4), row(WAITING, "b", 4)], {"a"}),
    "of another table": ([row(DISCARDED, "a", 1, table="public.t")], set()),
}  # fmt: skip


@pytest.mark.parametrize("rows, expected", LACKING.values(), ids=LACKING)
def test_what_a_copy_is_known_to_lack(lake, rows, expected):
    """As of its batch: what somebody discarded is lacking until a row stands there again."""
    quarantine = Decisions(Lake(lake))
    quarantine.add(rows)
    assert quarantine.lacking(NAME, 1, 3).keys() == expected


def test_rows_that_came_without_a_value_are_counted(lake):
    """Of the current copy; not those that a gate keeps out, or that were decided on."""
    quarantine = Decisions(Lake(lake))
    assert quarantine.unknown_counts({NAME: 1}) == {}
    whole = replace(row(WAITING, "gate", 1), columns=[], reason=f"{FAILS}positive")
    unsent = replace(row(WAITING, "update", 1), columns=["v"], reason=f"{FAILS}positive")
    old, other = row(WAITING, "c", 1, generation=2), row(WAITING, "a", 1, table="public.t")
    quarantine.add([row(WAITING, "a", 1), row(WAITING, "b", 1), row(RESOLVED, "b", 2), old, other])
    quarantine.add([whole, unsent])
    quarantine.add([row(WAITING, "d", 3), row(DISCARDED, "d", 3), row(COMPLETED, "e", 3)])
    assert quarantine.unknown_counts({NAME: 1, "public.u": 1}) == {NAME: 1}
    assert quarantine.unknown_counts({}) == {}


def test_what_is_open_is_read_once_for_all_tables_and_without_messages(lake, monkeypatch):
    """And again when another run, or a person, has written since."""
    quarantine, asked, scan = Decisions(Lake(lake)), [], LedgerTable.scan

    def noted(table, columns, *of, **options):
        asked.append(list(columns))
        return scan(table, columns, *of, **options)

    monkeypatch.setattr(LedgerTable, "scan", noted)
    assert quarantine.outlines(NAME, 1) == quarantine.outlines("public.t", 1) == []
    message = SentMessage(4, 7, 1 << 33, 999, b"I\x00\xff")
    told = [replace(row(WAITING, key, 3), messages=[message]) for key in "ab"]
    Decisions(Lake(lake)).add(
        [*told, row(COMPLETED, "x", 3, table="public.t"), row(WAITING, "a", 3, generation=2)]
    )
    expected = [Outline("a", WAITING, 3), Outline("b", WAITING, 3)]
    assert quarantine.outlines(NAME, 1) == expected
    assert quarantine.outlines("public.t", 1) == [Outline("x", COMPLETED, 3)]
    assert len(asked) == 2
    assert all("messages" not in columns for columns in asked)
    Decisions(Lake(lake)).add([row(DISCARDED, "a", 4)])
    assert watched_rows(quarantine.outlines(NAME, 1)).keys() == {"b"}
    (found,) = quarantine.rows(NAME, 1, ["b"])
    assert (found.key, found.messages) == ("b", [message])


def test_pruning_keeps_what_is_open_and_what_is_young(lake):
    """However old: an open or discarded row is the only trace of what the target lacks."""
    quarantine = Decisions(Lake(lake))
    assert quarantine.prune(now()) == 0
    old = [
        row(WAITING, "a", 1),
        row(WAITING, "b", 1),
        row(RESOLVED, "b", 2),
        row(COMPLETED, "c", 2),
    ]
    old += [
        row(WAITING, "e", 1),
        row(DISCARDED, "e", 1),
        row(DISCARDED, "f", 1),
        row(RESOLVED, "f", 2),
    ]
    quarantine.replace(NAME, 1, 0, old)
    quarantine.replace(NAME, 2, 0, [row(RESOLVED, "a", 2, generation=2)])
    oldest = now()
    quarantine.replace(NAME, 1, 2, [row(COMPLETED, "d", 3)])
    assert quarantine.prune(oldest) == 6
    kept = [(WAITING, "a", 1), (WAITING, "e", 1), (DISCARDED, "e", 1), (COMPLETED, "d", 3)]
    assert (told(quarantine), told(quarantine, generation=2)) == (kept, [])


def test_a_table_of_an_older_version_gets_what_it_lacks(lake):
    """Both ways of writing add the columns; rows stay and keep their ids."""
    write_earlier(lake, [row(WAITING, "a", 3)], ["messages", "by", "row_id"])
    quarantine = Decisions(Lake(lake))
    (held,) = quarantine.rows(NAME, 1)
    assert (held.messages, held.by) == (None, None)
    message = SentMessage(4, 7, 1 << 33, 999, b"I\x00\xff")
    quarantine.replace(NAME, 1, 3, [replace(row(WAITING, "b", 4), messages=[message])])
    quarantine.add([replace(held, at=now(), status=DISCARDED, by="me", reason="gone for good")])
    a, b, discarded = quarantine.rows(NAME, 1)
    assert (a, b.messages) == (held, [message])
    assert (discarded.status, discarded.by, discarded.id) == (DISCARDED, "me", held.id)
    assert [(r.key, r.messages) for r in quarantine.open_rows({NAME: 1})] == [("b", [message])]
    assert quarantine.prune(now()) == 0


def test_each_row_has_an_id_of_its_own():
    """Another key, another table, and the same key quarantined anew are other rows."""
    rows = [
        row(WAITING, "a", 1), row(WAITING, "b", 1), row(WAITING, "a", 2),
        row(WAITING, "a", 1, generation=2), row(WAITING, "a", 1, table="public.t"),
    ]  # fmt: skip
    assert len({r.id for r in rows}) == len(rows)


def test_an_id_stays_when_a_repair_carries_the_row_on(lake):
    """An operator decides on one row after the other, each of which is a repair."""
    quarantine, ids = Decisions(Lake(lake)), []
    held = row(WAITING, "a", 1)
    for generation in (1, 2, 3):
        ids.append(held.id)
        quarantine.replace(NAME, generation, -1, [held])
        (found,) = quarantine.open_rows({NAME: generation})
        held = replace(found, row_id=found.id, generation=generation + 1, lsn=100 + generation)
    assert len({*ids, held.id}) == 1
    again = replace(row(WAITING, "a", 9, generation=3), lsn=900)
    quarantine.add([again])
    (found,) = quarantine.open_rows({NAME: 3})
    assert found.id not in ids


CAUSES = ("fails x (y.yml)", "the source has no such row")


def test_a_run_knows_why_it_quarantined_rows(lake):
    quarantine = Decisions(Lake(lake))
    rows = [
        replace(row(WAITING, key, 1), reason=reason, run_id="r1")
        for key, reason in zip("ab", CAUSES, strict=True)
    ]
    quarantine.add(rows[:1])
    assert quarantine.causes("r1", [NAME]) == {NAME: frozenset([True])}
    quarantine.add([*rows[1:], replace(rows[0], run_id="r2", key='{"id": "c"}')])
    assert quarantine.causes("r1", [NAME]) == {NAME: frozenset([True, False])}
    assert quarantine.causes("r3", [NAME]) == quarantine.causes("r1", ["public.u"]) == {}
