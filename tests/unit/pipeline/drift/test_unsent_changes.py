"""What the catalogs say of rewrites and labels: a column's row, the table's file, as cases."""

from dataclasses import replace

import pytest

from waldelta.lake.ledger import ColumnState, StorageState, TableState, now
from waldelta.lake.ledger.records import AttributeState, FileState, LabelState
from waldelta.pipeline.drift import unsent_changes
from waldelta.pipeline.drift.unsent_changes import may_contain, relabelled, rewritten, to_record


def stored(files, *attributes):
    """Files by oid; attributes as (attnum, xmin, has_missing, default_oid), where it matters."""
    return StorageState(
        [FileState(*f) for f in files.items()], [AttributeState(*a) for a in attributes]
    )


ATTRIBUTES = [(1, 700), (2, 700, True, 90), (3, 700, True)]
BEFORE = stored({1: 10}, *ATTRIBUTES)

# The catalogs now, the columns that may hold other values.
CASES = {
    "nothing": (BEFORE, set()),
    "vacuum full of a table without such values": (stored({1: 11}, *ATTRIBUTES), set()),
    "vacuum full fills in what old rows showed":
     (stored({1: 11}, (1, 700), (2, 800, False, 90), (3, 700, True)), set()),
    "that may have been an ALTER, if the default is gone":
     (stored({1: 11}, (1, 700), (2, 700, True, 90), (3, 800)), {3}),
    "alter type makes the default anew":
     (stored({1: 11}, (1, 700), (2, 800, False, 91), (3, 700, True)), {2}),
    "alter type": (stored({1: 11}, (1, 800), (2, 800, False, 90), (3, 700, True)), {1}),
    "grant, set statistics and the like":
     (stored({1: 10}, (1, 800), (2, 700, True, 90), (3, 700, True)), set()),
    "a new column": (stored({1: 10}, *ATTRIBUTES, (4, 800)), set()),
    "a new column and a new file": (stored({1: 11}, *ATTRIBUTES, (4, 800)), {4}),
    "a dropped column": (stored({1: 11}, (2, 700, True, 90), (3, 700, True)), set()),
    "a leaf that came": (stored({1: 10, 5: 50}, (1, 800), (2, 700, True, 90), (3, 700, True)),
                         set()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_which_columns_a_rewrite_may_have_changed(case):
    present, expected = CASES[case]
    assert rewritten(BEFORE, present) == expected


def state(storage):
    columns = [
        ColumnState(n, 23, -1, "integer", "int", not_null=False, attnum=k)
        for k, n in enumerate("abc", 1)
    ]
    return TableState(now(), "r", "public.t", 1, "synced", columns=columns, storage=storage)


def test_a_target_without_a_record_gets_one():
    """No record says nothing about earlier rewrites."""
    assert unsent_changes(state(StorageState()), BEFORE, ()) == []
    recorded = to_record(state(StorageState()), BEFORE, ())
    assert recorded is not None
    assert recorded.storage == BEFORE


def test_what_is_recorded():
    """Any other storage, but one by which a copy or a new column is judged."""
    assert to_record(state(BEFORE), BEFORE, ()) is None
    assert to_record(state(BEFORE), StorageState(), ()) is None
    for case, (present, expected) in CASES.items():
        recorded = to_record(state(BEFORE), present, ())
        assert (recorded is None) is (bool(expected) or present == BEFORE), case
    (what,) = unsent_changes(state(BEFORE), CASES["alter type"][0], ())
    assert what == "ALTER TABLE rewrote column a, and PostgreSQL doesn't replicate rewrites"
    assert unsent_changes(state(BEFORE), CASES["a new column and a new file"][0], ()) == []


def test_what_came_and_went_is_recorded_while_a_new_column_waits():
    """It was reported and is no news; old files stay, to judge the column's first rows."""
    before = stored({1: 10, 2: 20}, *ATTRIBUTES)
    now_there = stored({1: 11, 3: 30}, *ATTRIBUTES, (4, 800))
    recorded = to_record(state(before), now_there, ())
    assert recorded.storage == stored({1: 10, 3: 30}, *ATTRIBUTES)
    assert to_record(recorded, now_there, ()) is None
    assert rewritten(recorded.storage, now_there) == {4}


# Labels now, where the second column had "sad" and "ok" (oids 5 and 6), and changed columns.
LABELS = {
    "nothing": ([(2, 5, "sad"), (2, 6, "ok")], set()),
    "renamed": ([(2, 5, "blue"), (2, 6, "ok")], {2}),
    "swapped": ([(2, 5, "ok"), (2, 6, "sad")], {2}),
    "added": ([(2, 5, "sad"), (2, 6, "ok"), (2, 7, "glad")], set()),
    "another column of the type": ([(2, 5, "sad"), (2, 6, "ok"), (3, 5, "blue")], set()),
    "an object went": ([(2, 5, "sad")], {2}),
    "the column went": ([(1, 5, "sad")], set()),
}


@pytest.mark.parametrize("case", LABELS)
def test_which_columns_print_otherwise(case):
    labels, expected = LABELS[case]
    then = replace(BEFORE, labels=[LabelState(2, 5, "sad"), LabelState(2, 6, "ok")])
    numbers = {1, 2, 3} if case != "the column went" else {1, 3}
    present = replace(
        BEFORE,
        attributes=[a for a in BEFORE.attributes if a.attnum in numbers],
        labels=[LabelState(*label) for label in labels],
    )
    outdated = relabelled(then, present)
    assert set(outdated) == expected
    # What an earlier version recorded has none, and says nothing.
    assert relabelled(replace(then, labels=[]), present) == {}
    assert (to_record(state(then), present, outdated) is None) is (
        bool(expected) or present == then
    )


DIGEST = "0123456789abcdef" * 2
TEXTS = [
    ("app.orders", "app.orders", True),
    ("app.orders_2", "app.orders", False),
    ("16999", "app.orders", False),
    ("{app.orders,app.items}", "app.items", True),
    ('{"app.\\"Big One\\""}', 'app."Big One"', True),
    ('(1,"app.f(integer)")', "app.f(integer)", True),
    ("crm=r/postgres", "crm", True),
    ("[sad,ok]", "sad", True),
    ("blue", "sad", False),
    # The attributes of a composite type; digests of all objects, or of those in a schema.
    ("(1,x)", "1 2", True),
    ("anything", f"* {DIGEST}", True),
    ("app.orders", f"app.* {DIGEST}", True),
    ("app.orders", f"staging.* {DIGEST}", False),
    ('"My App".orders', f'"My App".* {DIGEST}', True),
]


@pytest.mark.parametrize("text, label, expected", TEXTS)
def test_a_label_in_a_text(text, label, expected):
    assert may_contain(text, label) is expected
