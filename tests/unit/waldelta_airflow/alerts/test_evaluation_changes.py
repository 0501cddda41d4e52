"""Which alerts a channel gets: begun, still there after a day, worse, or ended."""

import json
from datetime import timedelta

import pytest

from tests.support.bookkeeping import NOON
from waldelta.monitoring.attention import KINDS, Attention, on_names
from waldelta_airflow.alerts.evaluation import compare

ALL = frozenset(KINDS)
HOUR = timedelta(hours=1)


def copy_failed(*tables: str) -> list[Attention]:
    return list(on_names("failed", "failed_copy", tables, "{}: the copy failed"))


def slot(severity="warning", text="the slot keeps 6 GB") -> list[Attention]:
    return [Attention(severity, "slot", text)]


def failed_run(cause: str) -> list[Attention]:
    return [Attention("failed", "failed_run", f"the latest run failed: {cause}: x", cause=cause)]


# What each evaluation finds, by the hours at which they follow each other; what each one sends.
STORIES = {
    "nothing": ([(0, []), (1, [])], [[], []]),
    "begins, lasts, ends": ([(0, slot()), (1, slot()), (2, [])],
     [["new the slot keeps 6 GB"], [], ["recovered the slot keeps 6 GB"]]),
    "figures change": ([(0, slot()), (1, slot(text="the slot keeps 7 GB"))],
     [["new the slot keeps 6 GB"], []]),
    "again after a day": (
        [(0, slot()), (23, slot()), (24, slot()), (25, slot()), (48, slot())],
        [
            ["new the slot keeps 6 GB"],
            [],
            ["lasting the slot keeps 6 GB"],
            [],
            ["lasting the slot keeps 6 GB"],
        ],
    ),
    "gets worse, and better": ([(0, slot()), (1, slot("failed", "lost soon")), (2, slot())],
     [["new the slot keeps 6 GB"], ["new lost soon"], []]),
    "one more table": (
        [(0, copy_failed("a")), (1, copy_failed("a", "b")), (2, copy_failed("b")), (3, [])],
        [
            ["new a: the copy failed"],
            ["new b: the copy failed"],
            ["recovered a: the copy failed"],
            ["recovered b: the copy failed"],
        ],
    ),
    "many tables": (
        [(0, copy_failed(*"abcde")), (1, [])],
        [
            ["new a, b, c and 2 more: the copy failed"],
            ["recovered a, b, c and 2 more: the copy failed"],
        ],
    ),
    "another error": (
        [(0, failed_run("SlotLost")), (1, failed_run("SlotLost")), (2, failed_run("ApplyError"))],
        [
            ["new the latest run failed: SlotLost: x"],
            [],
            ["new the latest run failed: ApplyError: x"],
        ],
    ),
    "two of one kind": ([(0, [*slot(), *slot("failed", "lost soon")]), (1, slot())],
     [["new the slot keeps 6 GB; lost soon"], []]),
    "comes back": ([(0, slot()), (1, []), (2, slot())],
     [["new the slot keeps 6 GB"], ["recovered the slot keeps 6 GB"], ["new the slot keeps 6 GB"]]),
    "a copy in progress": ([(0, [Attention("warning", "copying", "a: copy in progress")])], [[]]),
}  # fmt: skip


@pytest.mark.parametrize(("found", "sent"), STORIES.values(), ids=STORIES)
def test_what_is_sent(found, sent):
    state: dict = {}
    told = []
    for hour, items in found:
        changes = compare(items, ALL, state, NOON + hour * HOUR)
        told.append([f"{alert.state} {alert.attention.text}" for alert in changes.alerts])
        state = json.loads(json.dumps(changes.sent))
    assert told == sent


def test_since_when():
    """The time of the first alert, also a day later and at the end."""
    state, since = {}, []
    for hour, items in ((0, slot()), (24, slot()), (30, [])):
        changes = compare(items, ALL, state, NOON + hour * HOUR)
        since += [alert.since for alert in changes.alerts]
        state = changes.sent
    assert since == [NOON] * 3


def test_what_could_not_be_evaluated_neither_begins_nor_ends():
    state = compare([*slot(), *copy_failed("a")], ALL, {}, NOON).sent
    lost = [Attention("failed", "lake", "its lake can't be read")]
    unread = compare(lost, frozenset({"lake"}), state, NOON + HOUR)
    assert [alert.attention.kind for alert in unread.alerts] == ["lake"]
    again = compare(slot(), ALL, unread.sent, NOON + 2 * HOUR)
    expected = [("recovered", "failed_copy"), ("recovered", "lake")]
    assert sorted((alert.state, alert.attention.kind) for alert in again.alerts) == expected
    assert again.sent.keys() == {"slot:"}


def test_what_is_stored_stays_small():
    """Airflow warns above 64 KB; a message may be long, and tables many."""
    long = Attention("failed", "failed_run", "x " * 500)
    many = copy_failed(*(f"public.table_{n}" for n in range(100)))
    stored = compare([long, *many], ALL, {}, NOON).sent
    assert len(json.dumps(stored)) < 40_000
