"""Final states: random changes against a plain simulation; a damaged target is what it was once it
holds them.
"""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.support.seeds import chosen_random, rounds
from tests.unit.changes.decode.test_collapse import SHAPE, apply_one_by_one, events_table, net_rows
from waldelta.stages.repair.replay._derive_states import final_states, reached


def random_events(random_: random.Random, held: dict) -> list[tuple]:
    """Changes as a source makes them: of rows that are there, onto keys that are free; UPDATEs of
    unknown rows aside.
    """
    keys, events = set(held), []
    for n in range(random_.randrange(1, 30)):
        kind = random_.choice("IIUUUMD")
        free = [key for key in range(12) if key not in keys]
        if kind == "I" and free:
            keys.add(new := random_.choice(free))
            events.append(("I", None, new, f"i{n}", f"t{n}"))
        elif kind in "UMD" and keys:
            old = random_.choice(sorted(keys))
            new = random_.choice([*free, old]) if kind == "M" else old
            keys.remove(old)
            if kind == "D":
                events.append(("D", old, None, None, None))
            else:
                keys.add(new)
                events.append(("U", old, new, f"u{n}", random_.choice(["~", f"t{n}"])))
    return events


def test_a_damaged_target_is_what_it_was():
    """Whatever was done to the rows that were touched, but for values that no change sent."""
    random_ = chosen_random()
    for _ in rounds(400):
        base = {key: (f"b{key}", f"old{key}") for key in range(12) if random_.random() < 0.5}
        events = random_events(random_, base)
        right = apply_one_by_one(base, events)
        touched = {key for event in events for key in event[1:3] if key is not None}
        states = net_rows(final_states(events_table(events), SHAPE)) if events else []
        assert sorted(row[1] for row in states) == sorted(touched)
        for action, key, new, value, toast in states:
            if action == "purge":
                assert key not in right
            else:
                wanted, large = right[key]
                assert (new, value, large if toast == "~" else toast) == (key, wanted, large), key


CASES = {
    "an update of a row that the events show to be missing leaves none": (
        [("D", 1, None, None, None), ("U", 1, 2, "a", "t")],
        [("purge", 1, None, None, None)],
    ),
    "a row that moved on": (
        [("U", 1, 2, "a", "~")],
        [("purge", 1, None, None, None), ("update", 2, 2, "a", "~")],
    ),
    "swapped": (
        [("U", 1, 9, "a", "~"), ("U", 2, 1, "b", "~"), ("U", 9, 2, "c", "~")],
        [("purge", 9, None, None, None), ("update", 1, 1, "b", "~"), ("update", 2, 2, "c", "~")],
    ),
    "deleted and made anew": (
        [("D", 1, None, None, None), ("I", None, 1, "n", "x")],
        [("upsert", 1, 1, "n", "x")],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_states(case):
    """One row per key that is touched."""
    events, expected = CASES[case]
    assert sorted(net_rows(final_states(events_table(events), SHAPE)), key=repr) == sorted(
        expected, key=repr
    )


def test_after_a_truncate_there_are_no_earlier_rows():
    """An update of a row from before it counts for nothing."""
    events = [("U", 1, 1, "a", "t"), ("I", None, 2, "b", "t")]
    assert net_rows(final_states(events_table(events), SHAPE, base_is_empty=True)) == [
        ("upsert", 2, 2, "b", "t")
    ]


def test_after_a_truncate_of_some_rows_alone():
    """Only those have no earlier state."""
    events = [("U", 1, 1, "a", "t"), ("U", 2, 2, "b", "t")]
    shuffled = events_table(events).take([1, 0])
    left = net_rows(final_states(shuffled, SHAPE, base_is_empty=np.array([False, True])))
    assert left == [("update", 2, 2, "b", "t")]


def test_moves_that_hang_together():
    """Whichever way they lead, however long the chain is."""
    source, destination = np.arange(1, 50), np.arange(2, 51)
    assert reached(np.array([25]), source, destination).all()
    assert not reached(np.array([60]), source, destination).any()
    assert reached(np.zeros(0, np.int64), source, destination).sum() == 0
