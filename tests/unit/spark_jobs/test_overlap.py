"""Landing and applying at once: what is applied meanwhile, what is left, and what happens when one of them fails or is ended."""

from __future__ import annotations

import threading

import pytest

from spark_jobs.overlap import overlap
from spark_jobs.steps import plan_steps, whole_upto
from waldelta.tally import Landed, Transactions

WAIT_S = 30


def batch(number):
    return Landed(number, 1, Transactions(), number, None)


def newest(landed):
    return landed[-1].batch if landed else None


class Applying:
    """Notes what is applied; each apply waits until it is let go on."""

    def __init__(self):
        self.upto, self.begun, self.may_end = [], threading.Event(), threading.Event()

    def __call__(self, upto):
        self.upto.append(upto)
        self.begun.set()
        assert self.may_end.wait(WAIT_S)


def test_landing_goes_on_while_what_has_landed_is_applied():
    """The second and third batch land during the first one's apply, and are applied together; the last is left."""
    applying, second = Applying(), threading.Event()

    def land(on_landed):
        on_landed(batch(1))
        assert applying.begun.wait(WAIT_S)
        applying.begun.clear()
        on_landed(batch(2))
        on_landed(batch(3))
        applying.may_end.set()
        assert applying.begun.wait(WAIT_S)
        on_landed(batch(4))
        second.set()
        return "landed"

    assert overlap(land, newest, applying) == "landed"
    assert second.is_set()
    assert applying.upto == [1, 3]


@pytest.mark.parametrize("landed", [0, 1, 3])
def test_without_a_whole_step_nothing_is_applied(landed):
    """As is any backlog of one step: it is landed and then applied, as if there were no overlap."""
    applied = []

    def land(on_landed):
        for number in range(1, landed + 1):
            on_landed(batch(number))

    overlap(land, lambda _: None, applied.append)
    assert applied == []


def test_an_apply_that_fails_holds_up_no_landing(caplog):
    """It is told, and not tried again before all has landed: whoever applies the rest meets it."""
    calls, has_failed = [], threading.Event()

    def fail(upto):
        calls.append(upto)
        has_failed.set()
        raise RuntimeError("no way")

    def land(on_landed):
        on_landed(batch(1))
        assert has_failed.wait(WAIT_S)
        on_landed(batch(2))
        on_landed(batch(3))
        return 3

    assert overlap(land, newest, fail) == 3
    assert calls == [1]
    assert "nothing more is applied before all has landed: no way" in caplog.text


def test_a_landing_that_fails_is_raised_once_no_apply_is_at_work():
    """What was being applied comes to its end first."""
    applying = Applying()
    ended = []

    def land(on_landed):
        on_landed(batch(1))
        assert applying.begun.wait(WAIT_S)
        threading.Timer(0.05, applying.may_end.set).start()
        raise ValueError("the slot is gone")

    with pytest.raises(ValueError, match="the slot is gone"):
        overlap(land, newest, lambda upto: (applying(upto), ended.append(upto)))
    assert ended == [1]


def test_a_run_that_is_ended_lands_no_further_batch():
    """SIGTERM is raised where changes are applied; the landing beside it ends with the batch that it is at."""
    told, landing_ended = threading.Event(), threading.Event()

    def land(on_landed):
        try:
            on_landed(batch(1))
            assert told.wait(WAIT_S)
            while True:  # until it notices
                on_landed(batch(2))
        except InterruptedError:
            landing_ended.set()
            raise

    def leave(_):
        told.set()
        raise SystemExit(1)

    with pytest.raises(SystemExit):
        overlap(land, newest, leave)
    assert landing_ended.wait(WAIT_S)


@pytest.mark.parametrize(
    "sizes, expected",
    [
        ({}, None),
        ({1: 40}, None),  # another one like it would still fit
        ({1: 60}, 1),
        ({1: 500}, 1),
        ({1: 40, 2: 40}, 2),
        ({1: 60, 2: 10}, None),
        ({1: 60, 2: 60, 3: 10}, 1),
        ({1: 40, 2: 40, 3: 80, 4: 80}, 2),
    ],
)
def test_whole_steps(sizes, expected):
    """A step is whole once another batch like the last one wouldn't fit into it: so it would be planned once that has landed, too."""
    assert whole_upto((sizes, 100)) == expected
    if expected is not None:
        following = {**sizes, max(sizes) + 1: sizes[max(sizes)]}
        assert plan_steps((following, 100))[0] == expected


def test_the_tightest_measure_ends_a_step():
    """Messages may leave room where bytes don't."""
    assert whole_upto(({1: 10, 2: 10}, 100), ({1: 60, 2: 30}, 100)) == 2
    assert whole_upto(({1: 10, 2: 10}, 100), ({1: 30, 2: 30}, 100)) is None
