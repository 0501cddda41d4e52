"""Bites follow what the server manages, down and up again, and from run to run."""

from datetime import timedelta

import pytest

from tests.support.pipelines import job_of, pipeline_file
from waldelta.lake.ledger import now
from waldelta.lake.ledger.prune_ledger import prune_ledger
from waldelta.lake.ledger.records import ReadWindowSetting
from waldelta.slot.read.read_window import ReadWindow, ReadWindows

FILE = (512, 600)


def bite(size):
    window_mb, timeout_s = size
    return ReadWindow(int(window_mb * (1 << 20)), timeout_s)


def size_of(one):
    return None if one is None else (one.window_bytes / (1 << 20), one.timeout_s)


AFTER_TIMEOUT = {
    "half of it": ((64, 600), (32, 600)),
    "never less than a megabyte": ((1.5, 600), (1, 600)),
    "of the smallest, twice the time": ((1, 600), (1, 1200)),
    "up to three hours": ((1, 9600), (1, 10800)),
    "and no longer": ((1, 10800), None),
    "nor longer than the file's own": ((1, 30000), None),
}


@pytest.mark.parametrize("was, then", AFTER_TIMEOUT.values(), ids=AFTER_TIMEOUT)
def test_after_a_timeout(was, then):
    assert size_of(bite(was).after_timeout()) == then


AFTER_ANSWER = {
    "soon: twice of it": ((64, 600), 150, True, (128, 600)),
    "not soon: the same": ((64, 600), 151, True, (64, 600)),
    "never more than the file's": ((300, 600), 10, True, FILE),
    "the file's": (FILE, 10, True, FILE),
    "the end of what there is tells nothing of a window": ((64, 600), 0.1, False, (64, 600)),
    "a raised timeout goes first": ((1, 2400), 600, True, (1, 1200)),
    "whatever was read": ((1, 1200), 0.1, False, (1, 600)),
    "down to the file's": ((1, 700), 0.1, True, (1, 600)),
    "but not when it was needed": ((1, 2400), 601, True, (1, 2400)),
}


@pytest.mark.parametrize("was, seconds, is_whole, then", AFTER_ANSWER.values(), ids=AFTER_ANSWER)
def test_after_an_answer(was, seconds, is_whole, then):
    assert size_of(bite(was).after_answer(seconds, bite(FILE), is_whole=is_whole)) == then


KEPT = {
    "a smaller window": ((64, 600), (64, 600)),
    "a raised timeout": ((1, 4800), (1, 4800)),
    "a timeout longer than any": ((1, 21600), (1, 10800)),
    "a window wider than today's file": ((1024, 600), FILE),
    "a timeout of yesterday's file": ((64, 60), (64, 600)),
    "a timeout longer than today's file says, for a window that isn't the smallest": (
        (64, 6000),
        (64, 600),
    ),
}


@pytest.mark.parametrize("was, then", KEPT.values(), ids=KEPT)
def test_what_the_next_run_begins_with(was, then):
    assert size_of(bite(was).within(bite(FILE))) == then


@pytest.fixture
def run(lake):
    """Bites of one more run."""
    file = pipeline_file(lake, "s", batch={"wal_window_mb": 64, "statement_timeout_s": 600})
    return lambda: ReadWindows(job_of(file, run_id="r"))


def test_runs_go_on_where_the_last_one_was(run):
    """Each change is in the ledger at once; nothing while the file's window works."""
    first = run()
    first.answered(1, is_whole=True)
    assert first._job.ledger.table(ReadWindowSetting).newest() is None
    first.timed_out()
    first.timed_out()
    assert (
        prune_ledger(first._job.ledger, now() + timedelta(days=1), None) == 1
    )  # the newest stays, however old
    second = run()
    assert size_of(second.next) == (16, 600)
    second.answered(200, is_whole=True)
    second.answered(1, is_whole=False)
    assert size_of(second.next) == (16, 600)
    for then in (32, 64, 64):
        second.answered(100, is_whole=True)
        assert size_of(second.next) == (then, 600)
    assert second._job.ledger.table(ReadWindowSetting).newest().window_bytes is None
    assert size_of(run().next) == (64, 600)


def test_what_replay_ends_is_another_matter(run):
    """A standby's wait says nothing of speed: the window grows only in the next run."""
    bites = run()
    assert bites.ended_by_replay()
    bites.answered(1, is_whole=True)
    assert size_of(bites.next) == (32, 600)
    assert size_of(run().next) == (64, 600)
    while bites.ended_by_replay():
        pass
    assert size_of(bites.next) == (1, 600)


def test_an_answer_without_room_is_narrowed_for_good(run):
    """By halves where the server limits it; a full disk is met once more at most."""
    bites = run()
    assert bites.lacks_room()
    bites.answered(1, is_whole=True)
    assert size_of(bites.next) == size_of(run().next) == (32, 600)
    assert bites.lacks_room(is_disk_full=True)
    assert size_of(bites.next) == size_of(run().next) == (1, 600)
    assert not bites.lacks_room(is_disk_full=True)
    assert not bites.lacks_room()
