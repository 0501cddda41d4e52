"""Landing and applying at once: what is applied, what is left, and failures."""

import threading
from types import SimpleNamespace

import pytest

from tests.support.waiting import wait_until
from waldelta.errors import LateWriter
from waldelta.lake.changelog import Landed, Transactions
from waldelta.stages.apply._apply_batches import plan_apply_batches, whole_upto
from waldelta.stages.apply.concurrent import Overlap, WholeApplyBatches

WAIT_S = 30


def batch(number):
    return Landed(number, 1, Transactions(), number, None)


def newest(landed):
    return landed[-1].batch if landed else None


class Applying:
    """Notes what is applied; each apply waits until it is let go on."""

    def __init__(self):
        self.upto, self.begun, self.may_end, self.ended = (
            [],
            threading.Event(),
            threading.Event(),
            [],
        )

    def __call__(self, upto, caller):
        self.caller = caller
        self.upto.append(upto)
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        self.ended.append(upto)
        return upto


def test_landing_goes_on_while_what_has_landed_is_applied():
    """The second and third batch land during the first's apply, and are applied together."""
    applying = Applying()
    with Overlap(newest, applying, WAIT_S) as overlap:
        overlap.add(batch(1))
        assert applying.begun.wait(WAIT_S)
        applying.begun.clear()
        overlap.add(batch(2))
        overlap.add(batch(3))
        assert applying.upto == [1]
        applying.may_end.set()
        assert applying.begun.wait(WAIT_S)
    assert applying.upto == applying.ended == [1, 3]


def test_a_step_that_is_whole_later_is_applied_then():
    """Each batch asks anew; what isn't whole is left."""
    upto, applied = [], threading.Event()

    def two(landed):
        return landed[1].batch if len(landed) > 1 else None

    def apply(batch, _):
        upto.append(batch)
        applied.set()
        return batch

    with Overlap(two, apply, WAIT_S) as overlap:
        for number in (1, 2, 3, 4, 5):
            overlap.add(batch(number))
            if number % 2 == 0:
                assert applied.wait(WAIT_S)
                applied.clear()
    assert upto == [2, 4]


def test_targets_that_are_farther_behind_come_step_by_step():
    """Each step is one: what is left of the batches is asked for again."""
    steps, caught_up = iter([-5, -2, 1]), threading.Event()

    def apply(upto, _):
        reached = next(steps)
        if reached == upto:
            caught_up.set()
        return reached

    with Overlap(newest, apply, WAIT_S) as overlap:
        overlap.add(batch(1))
        assert caught_up.wait(WAIT_S)
    assert next(steps, None) is None


@pytest.mark.parametrize("landed", [0, 1, 3])
def test_without_a_whole_step_nothing_is_applied(landed):
    """As is any backlog of one step: it is landed and then applied, as if there were no overlap."""
    applied = []
    with Overlap(lambda _: None, lambda upto, _: applied.append(upto), WAIT_S) as overlap:
        for number in range(1, landed + 1):
            overlap.add(batch(number))
    assert applied == []


def test_an_apply_that_fails_holds_up_no_landing(caplog):
    """It is told, and not tried again before all has landed: whoever applies the rest meets it."""
    calls, has_failed = [], threading.Event()

    def fail(upto, _):
        calls.append(upto)
        has_failed.set()
        raise RuntimeError("no way")

    with Overlap(newest, fail, WAIT_S) as overlap:
        overlap.add(batch(1))
        assert has_failed.wait(WAIT_S)
        overlap.add(batch(2))
        overlap.add(batch(3))
    assert calls == [1]
    assert "no more apply batches run until landing ends: no way" in caplog.text


def test_a_landing_that_fails_waits_for_the_step_under_way():
    """Nothing of a failed run is at work; what had landed behind that step is left."""
    applying = Applying()

    def land():
        with Overlap(newest, applying, WAIT_S) as overlap:
            overlap.add(batch(1))
            assert applying.begun.wait(WAIT_S)
            overlap.add(batch(2))
            threading.Timer(0.05, applying.may_end.set).start()
            raise ValueError("the slot is gone")

    with pytest.raises(ValueError, match="the slot is gone"):
        land()
    assert applying.upto == applying.ended == [1]


def test_a_step_that_hangs_holds_up_the_run_for_its_limit_at_the_most(caplog):
    """It is left, reported and ends there: the apply that follows has its own limit."""
    applying = Applying()
    with Overlap(newest, applying, 0.05) as overlap:
        overlap.add(batch(1))
        assert applying.begun.wait(WAIT_S)
        applying.caller.verify()
    assert applying.ended == []
    assert "the apply stage continues without it" in caplog.text
    with pytest.raises(LateWriter):
        applying.caller.verify()
    applying.may_end.set()


def test_a_step_that_was_interrupted_has_a_moment_to_end(caplog):
    """What it holds is free then; that it was over its time already isn't waited for once more."""
    interrupted, ended = threading.Event(), []

    def apply(upto, caller):
        with overlap.limited(interrupted.set):
            assert interrupted.wait(WAIT_S)
        ended.append(upto)
        caller.verify()

    with Overlap(newest, apply, 0.05, grace_s=WAIT_S) as overlap:
        overlap.add(batch(1))
        assert interrupted.wait(WAIT_S)
    assert ended == [1]
    assert "the run interrupts it" in caplog.text
    assert "doesn't end" not in caplog.text


def test_each_step_has_its_own_time():
    """The time of the one before says nothing of a step that begins as landing ends."""
    second, may_end, ended = threading.Event(), threading.Event(), []

    def apply(upto, _):
        if upto == 2:  # before its limit begins, as while its session is made
            second.set()
            assert may_end.wait(WAIT_S)
        with overlap.limited(lambda: None):
            ended.append(upto)
        return upto

    with Overlap(newest, apply, 0.05, grace_s=0.0) as overlap:
        overlap.add(batch(1))
        wait_until(lambda: ended == [1], WAIT_S)
        overlap.add(batch(2))
        assert second.wait(WAIT_S)
        assert overlap._step_wait_s() == 0.05
        may_end.set()
    assert ended == [1, 2]


def test_a_run_that_is_ended_waits_for_nothing():
    """SIGTERM: the session is left at once, and what was being applied isn't gone on with."""
    applying = Applying()

    def land():
        with Overlap(newest, applying, WAIT_S) as overlap:
            overlap.add(batch(1))
            assert applying.begun.wait(WAIT_S)
            overlap.add(batch(2))
            raise SystemExit(1)

    with pytest.raises(SystemExit):
        land()
    assert applying.ended == []
    with pytest.raises(LateWriter):
        applying.caller.verify()
    applying.may_end.set()
    assert applying.upto == [1]


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
    """A step is whole once another batch like the last wouldn't fit: as planned later."""
    assert whole_upto((sizes, 100)) == expected
    if expected is not None:
        following = {**sizes, max(sizes) + 1: sizes[max(sizes)]}
        assert plan_apply_batches((following, 100))[0] == expected


def test_each_batch_is_weighed_once(monkeypatch):
    """Also of a backlog that lands sooner than it is applied; applied ones are forgotten."""
    asked = []

    class Log:
        def bytes_of_batches(self, after, upto):
            asked.append((after, upto))
            return dict.fromkeys(range(after + 1, upto + 1), 1 << 20)

    limits = SimpleNamespace(max_changes=100, wal_window_mb=2)
    whole = WholeApplyBatches(SimpleNamespace(pipeline=SimpleNamespace(batch=limits)))
    monkeypatch.setattr(whole, "_change_log", Log())
    waiting = [batch(number) for number in range(1, 6)]
    assert [whole(waiting[:count]) for count in (1, 2, 3, 5)] == [None, None, None, 4]
    assert whole(waiting[3:]) is None
    assert asked == [(0, 2), (2, 3), (3, 5), (5, 5)]
    assert whole(waiting[2:]) is None


def test_the_tightest_measure_ends_a_step():
    """Messages may leave room where bytes don't."""
    assert whole_upto(({1: 10, 2: 10}, 100), ({1: 60, 2: 30}, 100)) == 2
    assert whole_upto(({1: 10, 2: 10}, 100), ({1: 30, 2: 30}, 100)) is None
