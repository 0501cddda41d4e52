"""Planning what becomes of a target's columns, as tables of cases."""

from dataclasses import replace

import pytest

from waldelta.errors import NeedsSync, SchemaChanged
from waldelta.lake.ledger import ColumnState, TableState, now
from waldelta.pgoutput.messages import Relation, RelationColumn
from waldelta.pipeline.drift import CatalogTable
from waldelta.pipeline.drift.catalog_state import CatalogColumn
from waldelta.pipeline.drift.schema_evolution import (
    check_key,
    keeps_values,
    plan_empty,
    plan_evolution,
    plan_ignoring,
    unchanged,
)
from waldelta.postgres import PgType

INT, TEXT, VARCHAR, NUMERIC, TIMESTAMP = 23, 25, 1043, 1700, 1114
TYPES = {(INT, -1): PgType(INT, -1, "integer"), (TEXT, -1): PgType(TEXT, -1, "text")}


def state(*names, key=("id",)):
    columns = [
        ColumnState(n, *_type(n), "integer", "int", not_null=False, attnum=k)
        for k, n in enumerate(names, 1)
    ]
    return TableState(now(), "r", "public.t", 1, "synced", key_columns=list(key), columns=columns)


def relation(*names, key=("id",)):
    return Relation(
        1, "public", "t", "d", tuple(RelationColumn(n, *_type(n), n in key) for n in names)
    )


def _type(name):
    return (TEXT, -1) if name.startswith("text") else (INT, -1)


def present(**columns):
    """name=attnum, or (attnum, missing, unsure, last dropped) as far as they matter."""
    given = {name: c if isinstance(c, tuple) else (c,) for name, c in columns.items()}
    return CatalogTable(
        {name: CatalogColumn(*c, *(None, False)[len(c) - 1 :]) for name, c in given.items()}
    )


# The target's columns, the relations that came, the catalog now; what is said of it.
FOLLOWED = {
    "nothing": (("id", "a"), [("id", "a")], {"id": 1, "a": 2}, ""),
    "another order": (("id", "a", "b"), [("id", "b", "a")], {"id": 1, "a": 2, "b": 3}, ""),
    "added": (("id", "a"), [("id", "a"), ("id", "a", "b")], {"id": 1, "a": 2, "b": 3}, "added: b"),
    "added with a default": (("id",), [("id", "b")], {"id": 1, "b": (2, "5")}, "added: b"),
    "dropped": (("id", "a"), [("id", "a"), ("id",)], {"id": 1}, "dropped: a"),
    "renamed": (("id", "a"), [("id", "a"), ("id", "b")], {"id": 1, "b": 2}, "renamed: a to b"),
    "the key renamed": (("id", "a"), [("key", "a")], {"key": 1, "a": 2}, "renamed: id to key"),
    "added and dropped": (("id", "a"), [("id", "b")], {"id": 1, "b": 3}, "added: b; dropped: a"),
    "renamed later than these rows": (("id", "a"), [("id", "a")], {"id": 1, "b": 2}, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", FOLLOWED)
def test_what_can_be_followed(case):
    held, relations, now_there, said = FOLLOWED[case]
    before = state(*held)
    came = [relation(*names, key=("id", "key")) for names in relations]
    evolution = plan_evolution(before, came, present(**now_there), TYPES)
    assert evolution.describe() == said
    assert evolution.changes(before) is bool(said)
    assert [c.state.name for c in evolution.columns] == list(relations[-1])
    assert evolution.key_columns == (relations[-1][0],)


# The target's columns by their source's names, those of the last relation, the catalog now, the
# file's mapping now; what is said of it, and whether the table itself changes.
RENAMED = {
    "the same mapping": ({"id": "key", "a": "x"}, ("id", "a"), {"id": 1, "a": 2},
                         {"id": "key", "a": "x"}, "", False),
    "a mapping that is new": ({"id": "id", "a": "a"}, ("id", "a"), {"id": 1, "a": 2},
                              {"id": "key"}, "renamed: id to key", True),
    "one that is gone": ({"id": "id", "a": "x"}, ("id", "a"), {"id": 1, "a": 2},
                         {}, "renamed: x to a", True),
    "renamed on the source, and in the file": (
        {"id": "id", "a": "x"}, ("id", "b"), {"id": 1, "b": 2}, {"b": "x"}, "", False),
    "renamed on the source alone": (
        {"id": "id", "a": "x"}, ("id", "b"), {"id": 1, "b": 2}, {"a": "x"},
        "renamed: x to b", True),
    "a new column": ({"id": "id"}, ("id", "A"), {"id": 1, "A": 2}, {"A": "a_2"},
                     "added: a_2", True),
    "a new column by a former name": (
        {"id": "id", "a": "x"}, ("id", "a", "x"), {"id": 1, "a": 2, "x": 3},
        {"a": "y"}, "added: x; renamed: x to y", True),
}  # fmt: skip


@pytest.mark.parametrize("case", RENAMED)
def test_columns_with_another_name_in_the_lake(case):
    """Source and file may change a name each; what only the ledger has of it alters no table."""
    held, last, now_there, renames, said, alters = RENAMED[case]
    columns = [
        replace(column, name=held[column.name], source_name=column.name)
        if held[column.name] != column.name
        else column
        for column in state(*held).columns
    ]
    before = replace(state(*held), columns=columns, key_columns=[held["id"]])
    came = [relation(*last)]
    evolution = plan_evolution(before, came, present(**now_there), TYPES, renames=renames)
    assert (evolution.describe(), evolution.alters) == (said, alters)
    names = [renames.get(name, name) for name in last]
    assert [c.state.name for c in evolution.columns] == names
    assert [c.state.name_on_source for c in evolution.columns] == list(last)
    assert evolution.key_columns == (names[0],)
    ignoring = plan_ignoring(before, [relation(*held)], present())
    assert ignoring.positions == (tuple(range(len(held))),)


# As above; a word of the reason.
NOT_FOLLOWED = {
    "a value that no catalog tells": (("id",), [("id", "b")], {"id": 1, "b": (2, None, True)},
     "doesn't send"),
    "a name taken over": (("id", "a"), [("id", "a")], {"id": 1, "a": 3}, "took its name"),
    "a column that came and went": (("id",), [("id", "b"), ("id",)], {"id": 1},
     "added and dropped"),
    "a column gone for a while": (("id", "a"), [("id",), ("id", "a")], {"id": 1, "a": 2},
     "removed from the publication and added again"),
    "a column that was there, but not published": (("id", "z", "b"), [("id", "a", "b")],
     {"id": 1, "z": 2, "b": 3, "a": (0,)}, "values for existing rows"),
    "a column that may be another one": (("id",), [("id", "x")],
     {"id": 1, "x": (3, None, False, 2)}, "may not be the same column"),
    "another type": (("id", "a"), [("id", "text_a")], {"id": 1, "text_a": 2}, "changed its type"),
    "the key dropped": (("id", "a"), [("a",)], {"a": 2}, "replica identity"),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_FOLLOWED)
def test_what_needs_a_new_copy(case):
    held, relations, now_there, reason = NOT_FOLLOWED[case]
    with pytest.raises(NeedsSync, match=reason):
        plan_evolution(
            state(*held), [relation(*names) for names in relations], present(**now_there), TYPES
        )


# The target's columns, the relations that came, the catalog now; the columns at the end, what is
# added with which value.
BEGUN_EMPTY = {
    "the same columns": (("id", "a"), [("id", "a")], {"id": 1, "a": 2}, ["id", "a"], {}),
    "a column later": (("id", "a"), [("id",), ("id", "a")], {"id": 1, "a": 2}, ["id", "a"],
     {"a": None}),
    "a column later, with a default": (("id", "a"), [("id",), ("id", "a")],
     {"id": 1, "a": (2, "5")}, ["id", "a"], {"a": "5"}),
    "two columns later, one by one": (("id", "a", "b"), [("id",), ("id", "a"), ("id", "a", "b")],
     {"id": 1, "a": 2, "b": 3}, ["id", "a", "b"], {"a": None, "b": None}),
    "a column that hasn't come yet": (("id", "a", "b"), [("id",), ("id", "a")],
     {"id": 1, "a": 2, "b": 3}, ["id", "a"], {"a": None}),
}  # fmt: skip


@pytest.mark.parametrize("case", BEGUN_EMPTY)
def test_a_target_without_rows_may_have_columns_too_early(case):
    """Its sync read them from the catalog, behind rows that were sent before they came."""
    held, relations, now_there, columns, added = BEGUN_EMPTY[case]
    before = state(*held)
    came = [relation(*names) for names in relations]
    evolution = plan_empty(before, came, present(**now_there), TYPES)
    assert [c.state.name for c in evolution.columns] == columns
    assert {c.state.name: c.fill for c in evolution.columns if c.source is None} == added
    assert evolution.changes(before) is (list(held) != columns)
    assert evolution.only_adds is not bool(added)


def test_a_whole_old_row_has_any_key():
    """With replica identity full every column is flagged."""
    whole = replace(relation("id", "a", key=("id", "a")), replica_identity="f")
    assert plan_evolution(state("id", "a"), [whole], present(id=1, a=2), TYPES).key_columns == (
        "id",
    )


OWN = relation("id", "a")
A, WIDER = relation("id", "a", key=("a",)), relation("id", "a", key=("id", "a"))


@pytest.mark.parametrize("came", [[A], [WIDER], [OWN, A, OWN]])
def test_another_identity_is_another_key(came):
    """Old rows carry its columns only, whatever it is at the end."""
    with pytest.raises(NeedsSync, match="replica identity"):
        plan_evolution(state("id", "a"), came, present(id=1, a=2), TYPES)


@pytest.mark.parametrize(
    ("held", "key", "fits"),
    [
        (("id",), {1}, True),
        (("id",), None, True),
        (("id", "a"), {2}, True),  # fewer columns tell rows apart
        ((), {1}, True),
        (("id",), set(), False),
        (("id",), {2}, False),
        (("id",), {1, 2}, False),
    ],
)
def test_a_key_that_isnt_one_any_more(held, key, fits):
    now_there = replace(present(id=1, a=2), key=None if key is None else frozenset(key))
    if fits:
        check_key(state("id", "a", key=held), now_there)
    else:
        with pytest.raises(NeedsSync, match="was dropped or replaced"):
            check_key(state("id", "a", key=held), now_there)


def test_positions_and_fills():
    """Rows from before a column show its default; a renamed one is read by its old name."""
    came = [relation("id", "a"), relation("id", "b", "c")]
    evolution = plan_evolution(state("id", "a"), came, present(id=1, b=2, c=(3, "7")), TYPES)
    assert evolution.positions == ((0, 1, None), (0, 1, 2))
    assert [c.fill for c in evolution.columns] == [None, None, "7"]
    assert not evolution.only_adds
    assert plan_evolution(state("id"), [relation("id", "b")], present(id=1, b=2), TYPES).only_adds


def test_ignoring_keeps_the_columns():
    evolution = plan_ignoring(state("id", "a"), [relation("id", "b")], present())
    assert not evolution.changes(state("id", "a"))
    assert evolution.positions == ((0, None),)
    with pytest.raises(SchemaChanged, match="its key lost id"):
        plan_ignoring(state("id", "a"), [relation("a")], present())
    with pytest.raises(SchemaChanged, match="its key lost a"):
        plan_ignoring(state("id", "a", key=()), [relation("id", "b")], present())


def test_unchanged_changes_nothing():
    assert not unchanged(state("id", "a")).changes(state("id", "a"))


def numeric(precision, scale):
    return (NUMERIC, (precision << 16 | scale) + 4)


@pytest.mark.parametrize(
    ("old", "new", "keeps"),
    [
        ((INT, -1), (INT, -1), True),
        ((INT, -1), (20, -1), False),
        ((VARCHAR, 14), (VARCHAR, 24), True),
        ((VARCHAR, 14), (VARCHAR, -1), True),
        ((VARCHAR, 14), (VARCHAR, 9), False),
        ((VARCHAR, -1), (VARCHAR, 9), False),
        ((VARCHAR, 14), (TEXT, -1), True),
        ((TEXT, -1), (VARCHAR, -1), True),
        ((TEXT, -1), (VARCHAR, 9), False),
        ((1042, 14), (1042, 24), False),  # char(n) is padded
        (numeric(10, 2), numeric(12, 2), True),
        (numeric(10, 2), numeric(8, 2), False),
        (numeric(10, 2), numeric(12, 4), False),
        (numeric(10, 2), (NUMERIC, -1), True),
        ((NUMERIC, -1), numeric(10, 2), False),
        ((TIMESTAMP, 3), (TIMESTAMP, 6), True),
        ((TIMESTAMP, 3), (TIMESTAMP, -1), True),
        ((TIMESTAMP, 6), (TIMESTAMP, 3), False),
    ],
)
def test_which_types_keep_their_values(old, new, keeps):
    """As ATColumnChangeRequiresRewrite decides."""
    assert keeps_values(old, new) is keeps
