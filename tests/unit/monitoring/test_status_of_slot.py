"""What pages may say of a slot that they don't read themselves."""

from tests.cases import cases
from tests.support.bookkeeping import append_by_kind, minutes, pipeline, run
from waldelta.lake import Lake
from waldelta.lake.ledger import Gap, Ledger
from waldelta.monitoring.overview import read_glance
from waldelta.monitoring.status import last_slot

READ = run("r", minutes(0), wal_status="reserved", retained_bytes=7)
DOWN = run("down", minutes(10), "failed", as_of=None)
BROKE_LATER = run("late", minutes(10), "failed", wal_status="reserved", retained_bytes=9)
LOST = run("lost", minutes(10), "failed", wal_status="lost", retained_bytes=9)
FULL = run("full", minutes(10), wal_status="extended", retained_bytes=6000 << 20)
ENDANGERED = run("near", minutes(10), wal_status="unreserved", retained_bytes=9)

# rows of runs, now, when an idle check succeeded, a failed DAG run -> mark, word, was, read at
SLOTS = [
    ("none", [], 5, None, None, ("unknown", "not recorded", "", None)),
    ("just read", [READ], 5, None, None, ("ok", "healthy", "", 0)),
    ("read by an idle check", [READ], 300, 290, None, ("ok", "healthy", "", 290)),
    ("long ago", [READ], 300, None, None, ("unknown", "not read lately", "healthy", 0)),
    ("a run can't reach it", [READ, DOWN], 15, None, None,
     ("unknown", "not readable", "healthy", 0)),
    ("nor can an idle check", [READ], 15, None, "early", ("unknown", "not readable", "healthy", 0)),
    ("it is reached again", [READ, DOWN], 15, 12, None, ("ok", "healthy", "", 12)),
    ("a run failed after it read it", [READ, BROKE_LATER], 15, None, "late",
     ("ok", "healthy", "", 10)),
    ("it is lost, however long ago", [READ, LOST], 300, None, "lost", ("failed", "lost", "", 10)),
    ("it is in danger", [READ, ENDANGERED], 300, None, None,
     ("warning", "about to be lost", "", 10)),
    ("it keeps much", [READ, FULL], 15, None, None, ("warning", "at risk", "", 10)),
]  # fmt: skip


@cases("rows, at, idle, failed, expected", SLOTS)
def test_a_slot_is_healthy_only_while_that_is_known(lake, rows, at, idle, failed, expected):
    """While PostgreSQL is down, nobody knows."""
    book = Ledger(Lake(lake))
    append_by_kind(book, rows)
    glance = read_glance(pipeline(lake), book, minutes(at))
    found = last_slot(glance, minutes(at), None if idle is None else minutes(idle), failed)
    read_at = None if expected[-1] is None else minutes(expected[-1])
    assert (found.mark, found.word, found.was, found.at) == (*expected[:3], read_at)


def test_a_gap_is_shown_without_what_the_slot_kept_before(lake):
    book = Ledger(Lake(lake))
    book.append(READ)
    book.append(
        Gap(minutes(3), "r", "open", "s", "1", 1, "0/1", 16, 32, "SlotLost", "lost", "run resync")
    )
    found = last_slot(read_glance(pipeline(lake), book, minutes(5)), minutes(5), None, None)
    assert (found.mark, found.word, found.retained_bytes) == ("failed", "SlotLost", None)
