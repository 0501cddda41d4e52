"""Which rows enter a drifted target, and when only a whole copy is exact."""

from dataclasses import replace

import pytest

from tests.cases import cases
from tests.unit.pipeline.drift.test_drift import EVERY, member
from tests.unit.pipeline.drift.test_drift import state as drift_state
from tests.unit.pipeline.drift.test_drift import table as drift_table
from waldelta.lake.ledger import StorageState
from waldelta.lake.ledger.records import FileState
from waldelta.pipeline.drift import Repair, is_dear
from waldelta.pipeline.drift.repair_plan import FilterRule, entering, moving_rows, obstacle
from waldelta.postgres import TableId
from waldelta.postgres.catalog import Through
from waldelta.postgres.publication_membership import to_texts
from waldelta.row_filter import RowFilter

ALL = frozenset(EVERY)


# Filters of two publications for all changes; one that lets more through, but for inserts alone.
TWO = frozenset({member(row_filter="(a > 1)"), member("table 2", 2, row_filter="(a < 0)")})
UNLIKE = frozenset(
    {member(row_filter="(a > 1)"), member("table 2", 2, publishes=frozenset({"insert"}))}
)


def state(**changes):
    options = {k: changes.pop(k) for k in ("row_filter", "own", "later", "leaves") if k in changes}
    made = drift_state(publishes=EVERY, **options)
    return replace(
        made, **{"snapshot": "1:1:", "key_columns": ["id"], "relation_ids": [1]} | changes
    )


def table(**changes):
    options = {k: changes.pop(k) for k in ("columns", "row_filter", "leaves") if k in changes}
    return replace(drift_table(**options), **{"publishes": ALL} | changes)


GREATER = {"row_filter": "(a > 1)"}
INSERTS = frozenset({"insert"})
BOTH = {"publications": ("p", "q"), "entries": TWO}
LEAF_INSERTS = {*TWO, replace(member(publishes=INSERTS), relation=2)}
THREE = (("id", 1), ("a", 2), ("b", 3))
OBSTACLES = [
    ("a filter alone", {}, GREATER, None),
    ("a partition came", {"leaves": [2]}, {"leaves": [2, 3]}, None),
    ("it keeps deleted rows", {"mode": "soft_delete"}, GREATER, "kept as soft_delete"),
    ("it keeps every state", {"mode": "history"}, {}, "kept as history"),
    ("no key", {"key_columns": []}, {"key_columns": ()}, "no key"),
    ("another key", {}, {"key_columns": ("a",)}, "another key"),
    ("a column more", {}, {"columns": THREE}, "columns"),
    ("a column that came back", {"unpublished": [2]}, {}, "was added to its column list"),
    ("recreated", {}, {"relation_ids": (2,)}, "isn't the relation"),
    ("told for a while", {"later": ["(a > 2)"]}, {"row_filter": "(a > 2)"}, "changed before"),
    ("two publications", {"entries": to_texts(TWO)}, BOTH, None),
    ("two publications, not known then", {}, BOTH, "same filters"),
    ("two, and one sends inserts alone", {"entries": to_texts(TWO)}, BOTH | {"entries": UNLIKE},
     "same filters"),
    ("it was so when it was copied", {"entries": to_texts(UNLIKE)}, BOTH, "same filters"),
    ("inserts alone", {"publishes": ["insert"]}, {"publishes": INSERTS}, "not every kind"),
    ("truncate since", {}, {"publishes": ALL | {"truncate"}}, "other operations"),
    ("fed by another table", {"source_table": "public.t", "table_name": "public.u"}, {}, None),
    ("not as it was copied", {"source_table": "public.s"}, {}, "another table"),
    ("gathered leaves, of which one came", {"root_id": 1, "relation_ids": [2]},
     {"relation_ids": (2, 3)}, None),
    ("of another root", {"root_id": 9, "relation_ids": [2]}, {"relation_ids": (2,)},
     "isn't the relation"),
    ("one leaf sends inserts alone", {"entries": to_texts(TWO)},
     {"entries": frozenset(LEAF_INSERTS)}, "same filters"),
    ("a partition went", {"leaves": [2, 3]}, {"leaves": [2]}, None),
    ("another took its place", {"leaves": [2, 3]}, {"leaves": [2, 4]}, None),
]  # fmt: skip


@cases("held, present, expected", OBSTACLES)
def test_obstacle(held, present, expected):
    found = obstacle(Repair(state(**held), table(**present)))
    assert found is None if expected is None else expected in found


FIVE, THREE_UP = FilterRule("(a > 5)"), FilterRule("(a > 3)")
ENTERS = "((a > 3)) and not (((a > 5)))"
TRUE_ONLY = FilterRule("((a > 1) IS TRUE)")
ENTERING = [
    # before, after, columns that may be NULL, conditions
    (FIVE, THREE_UP, [], [ENTERS]),
    (FIVE, THREE_UP, ["a"], [ENTERS, '((a > 3)) and ("a" is null) and (((a > 5))) is null']),
    (FIVE, THREE_UP, ["b"], [ENTERS]),
    (FIVE, FilterRule(), [], ["not (((a > 5)))"]),
    (FilterRule(), FIVE, ["a"], []),
    (FilterRule("(a > 5)", "(b > 1)"), FilterRule("(a > 5)", "(b > 0)"), [],
     ["((a > 5)) and ((b > 0)) and not (((b > 1)))"]),
    (FilterRule("(a > 5)", "(b > 1)"), FIVE, [], ["((a > 5)) and not (((b > 1)))"]),
    (FilterRule("(a > 5)", "(b > 1)"), FilterRule("(a > 4)", "(b > 0)"), [],
     ["((a > 4)) and ((b > 0)) and not (((a > 5)) and ((b > 1)))"]),
    # NULL without a column that is.
    (FilterRule("((a % 2) = 0)"), FilterRule(), [], ["((((a % 2) = 0))) is not true"]),
    (FilterRule("(a = ANY ('{1,NULL}'::integer[]))"), FilterRule(), [],
     ["(((a = ANY ('{1,NULL}'::integer[])))) is not true"]),
    (FilterRule("(a = ANY (ARRAY[1, 2]))"), FilterRule(), [], ["not (((a = ANY (ARRAY[1, 2]))))"]),
    (TRUE_ONLY, FilterRule(), ["a"],
     ["not ((((a > 1) IS TRUE)))", '("a" is null) and ((((a > 1) IS TRUE))) is null']),
    (FilterRule("(a > NULL::integer)"), FilterRule(), [], ["(((a > NULL::integer))) is not true"]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after", "nullable", "expected"), ENTERING)
def test_entering(before, after, nullable, expected):
    assert list(entering(before, after, nullable)) == expected


def test_an_attached_partition_enters_whole():
    """The others give what the filter's change lets in; a reported one was waiting."""
    held = state(row_filter="(a > 5)", leaves=[2], unrepaired_leaves=[4])
    own = RowFilter("a < 9", "(a < 9)", ("a",))
    found = moving_rows(Repair(held, table(row_filter="(a > 3)", leaves=[2, 3, 4])), own)
    whole = "((a > 3)) and ((a < 9))"
    # The stored filter is printed from its tree, the server's own are as it prints them.
    enters = f'{whole} and not ((("a" > 5)))'
    leaf = 'only "public"."t_{}"'.format
    nulls = [(leaf(2), f'{whole} and ("a" is null) and ((("a" > 5))) is null')]
    entering_rows = [(choice.relation, choice.condition) for choice in found.enter]
    assert entering_rows == [(leaf(2), enters), *nulls, (leaf(3), whole), (leaf(4), whole)]
    assert {choice.relation for choice in found.leave} == {'"public"."t"'}


def test_leaves_that_are_read_through_one_table_enter_together():
    """A scan of all partitions for each of them would be squared work."""
    root = Through(TableId("public", "t"), 1)
    after = table(row_filter="(a > 3)", leaves=[2, 3, 4, 5])
    after = replace(
        after,
        leaves=tuple(
            replace(leaf, through=root) if leaf.oid > 2 else leaf for leaf in after.leaves
        ),
    )
    files = {oid: oid + 100 for oid in (2, 3, 4, 5)}
    found = moving_rows(Repair(state(row_filter="(a > 3)", leaves=[2, 3]), after), None, files)
    # What the others hold stays as it is; which are attached is read whole.
    attached = found.enter[-1]
    expected = ('"public"."t"', {4: 104, 5: 105}, 1)
    assert (attached.relation, attached.files, attached.root) == expected
    assert attached.condition == "(((a > 3))) and tableoid = any ('{4,5}'::int2[]::oid[])"


LEAVES = [
    # How it stood, leaves now, renewed, away for a while: attached, detached, replaced.
    ("came", state(leaves=[2]), [2, 3], [], [], ({3}, set(), set())),
    ("went", state(leaves=[2, 3]), [2], [], [], (set(), {3}, set())),
    ("another took its place", state(leaves=[2, 3]), [2, 4], [], [], ({4}, {3}, {4})),
    ("emptied", state(leaves=[2, 3]), [2, 3], [3], [], ({3}, set(), {3})),
    ("attached again", state(leaves=[2, 3]), [2, 3], [3], [3], ({3}, {3}, {3})),
    ("told before", state(leaves=[2, 3], unrepaired_leaves=[3, 4]), [2, 3], [], [],
     ({3}, {3, 4}, {3})),
]  # fmt: skip


@cases("held, leaves, renewed, again, expected", LEAVES)
def test_leaves_that_a_repair_looks_at(held, leaves, renewed, again, expected):
    files = [FileState(file.oid, file.relfilenode, "7") for file in held.storage.files]
    held = replace(held, storage=StorageState(files))
    storage = StorageState([FileState(oid, oid, "8" if oid in again else "7") for oid in leaves])
    found = Repair(held, table(leaves=leaves), frozenset(renewed), storage)
    assert (found.attached, found.detached, found.replaced_leaves) == expected


@pytest.mark.parametrize(
    ("rows", "of", "dear"), [(10_000, 10, False), (30_001, 100_000, True), (30_000, 100_000, False)]
)
def test_a_copy_of_everything_may_cost_less(rows, of, dear):
    assert is_dear(rows, of) is dear
