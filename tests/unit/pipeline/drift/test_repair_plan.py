"""Which rows enter a drifted target, and when only a whole copy is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest

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


OBSTACLES = [
    ("a filter alone", state(), table(row_filter="(a > 1)"), None),
    ("a partition came", state(leaves=[2]), table(leaves=[2, 3]), None),
    (
        "it keeps deleted rows",
        state(mode="soft_delete"),
        table(row_filter="(a > 1)"),
        "kept as soft_delete",
    ),
    ("it keeps every state", state(mode="history"), table(), "kept as history"),
    ("no key", state(key_columns=[]), table(key_columns=()), "no key"),
    ("another key", state(), table(key_columns=("a",)), "another key"),
    ("a column more", state(), table(columns=(("id", 1), ("a", 2), ("b", 3))), "columns"),
    ("a column that came back", state(unpublished=[2]), table(), "was added to its column list"),
    ("recreated", state(), table(relation_ids=(2,)), "isn't the relation"),
    (
        "told for a while",
        state(later=["(a > 2)"]),
        table(row_filter="(a > 2)"),
        "filter changed before",
    ),
    (
        "two publications",
        state(entries=to_texts(TWO)),
        table(publications=("p", "q"), entries=TWO),
        None,
    ),
    (
        "two publications, not known then",
        state(),
        table(publications=("p", "q"), entries=TWO),
        "same filters",
    ),
    (
        "two, and one sends inserts alone",
        state(entries=to_texts(TWO)),
        table(publications=("p", "q"), entries=UNLIKE),
        "same filters",
    ),
    (
        "it was so when it was copied",
        state(entries=to_texts(UNLIKE)),
        table(publications=("p", "q"), entries=TWO),
        "same filters",
    ),
    (
        "inserts alone",
        state(publishes=["insert"]),
        table(publishes=frozenset({"insert"})),
        "not every kind",
    ),
    ("truncate since", state(), table(publishes=ALL | {"truncate"}), "other operations"),
    ("fed by another table", state(fed_by="public.t", table_name="public.u"), table(), None),
    ("not as it was copied", state(fed_by="public.s"), table(), "another table"),
    (
        "gathered leaves, of which one came",
        state(root_id=1, relation_ids=[2]),
        table(relation_ids=(2, 3)),
        None,
    ),
    (
        "of another root",
        state(root_id=9, relation_ids=[2]),
        table(relation_ids=(2,)),
        "isn't the relation",
    ),
    (
        "one leaf sends inserts alone",
        state(entries=to_texts(TWO)),
        table(
            entries=frozenset({*TWO, replace(member(publishes=frozenset({"insert"})), relation=2)})
        ),
        "same filters",
    ),
    ("a partition went", state(leaves=[2, 3]), table(leaves=[2]), None),
    ("another took its place", state(leaves=[2, 3]), table(leaves=[2, 4]), None),
]


@pytest.mark.parametrize(
    ("held", "present", "expected"), [case[1:] for case in OBSTACLES], ids=[c[0] for c in OBSTACLES]
)
def test_obstacle(held, present, expected):
    found = obstacle(Repair(held, present))
    assert found is None if expected is None else expected in found


ENTERING = [
    # before, after, columns that may be NULL, conditions
    (FilterRule("(a > 5)"), FilterRule("(a > 3)"), [], ["((a > 3)) and not (((a > 5)))"]),
    (
        FilterRule("(a > 5)"),
        FilterRule("(a > 3)"),
        ["a"],
        ["((a > 3)) and not (((a > 5)))", '((a > 3)) and ("a" is null) and (((a > 5))) is null'],
    ),
    (FilterRule("(a > 5)"), FilterRule("(a > 3)"), ["b"], ["((a > 3)) and not (((a > 5)))"]),
    (FilterRule("(a > 5)"), FilterRule(), [], ["not (((a > 5)))"]),
    (FilterRule(), FilterRule("(a > 5)"), ["a"], []),
    (
        FilterRule("(a > 5)", "(b > 1)"),
        FilterRule("(a > 5)", "(b > 0)"),
        [],
        ["((a > 5)) and ((b > 0)) and not (((b > 1)))"],
    ),
    (
        FilterRule("(a > 5)", "(b > 1)"),
        FilterRule("(a > 5)"),
        [],
        ["((a > 5)) and not (((b > 1)))"],
    ),
    (
        FilterRule("(a > 5)", "(b > 1)"),
        FilterRule("(a > 4)", "(b > 0)"),
        [],
        ["((a > 4)) and ((b > 0)) and not (((a > 5)) and ((b > 1)))"],
    ),
    # NULL without a column that is.
    (FilterRule("((a % 2) = 0)"), FilterRule(), [], ["((((a % 2) = 0))) is not true"]),
    (
        FilterRule("(a = ANY ('{1,NULL}'::integer[]))"),
        FilterRule(),
        [],
        ["(((a = ANY ('{1,NULL}'::integer[])))) is not true"],
    ),
    (FilterRule("(a = ANY (ARRAY[1, 2]))"), FilterRule(), [], ["not (((a = ANY (ARRAY[1, 2]))))"]),
    (
        FilterRule("((a > 1) IS TRUE)"),
        FilterRule(),
        ["a"],
        ["not ((((a > 1) IS TRUE)))", '("a" is null) and ((((a > 1) IS TRUE))) is null'],
    ),
    (FilterRule("(a > NULL::integer)"), FilterRule(), [], ["(((a > NULL::integer))) is not true"]),
]


@pytest.mark.parametrize(("before", "after", "nullable", "expected"), ENTERING)
def test_entering(before, after, nullable, expected):
    assert list(entering(before, after, nullable)) == expected


def test_an_attached_partition_enters_whole():
    """The others are asked for what the change of the filter lets in; one told of earlier has been
    waiting since.
    """
    held = state(row_filter="(a > 5)", leaves=[2], unmended_leaves=[4])
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
    """A scan of all partitions for each of them would be as many scans as there are partitions,
    squared.
    """
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
    assert (attached.relation, attached.files, attached.root) == (
        '"public"."t"',
        {4: 104, 5: 105},
        1,
    )
    assert attached.condition == "(((a > 3))) and tableoid = any ('{4,5}'::int2[]::oid[])"


LEAVES = [
    # How it stood, leaves now, renewed, away for a while: attached, detached, replaced.
    ("came", state(leaves=[2]), [2, 3], [], [], ({3}, set(), set())),
    ("went", state(leaves=[2, 3]), [2], [], [], (set(), {3}, set())),
    ("another took its place", state(leaves=[2, 3]), [2, 4], [], [], ({4}, {3}, {4})),
    ("emptied", state(leaves=[2, 3]), [2, 3], [3], [], ({3}, set(), {3})),
    ("attached again", state(leaves=[2, 3]), [2, 3], [3], [3], ({3}, {3}, {3})),
    (
        "told before",
        state(leaves=[2, 3], unmended_leaves=[3, 4]),
        [2, 3],
        [],
        [],
        ({3}, {3, 4}, {3}),
    ),
]


@pytest.mark.parametrize(
    ("held", "leaves", "renewed", "again", "expected"),
    [c[1:] for c in LEAVES],
    ids=[c[0] for c in LEAVES],
)
def test_leaves_that_a_repair_looks_at(held, leaves, renewed, again, expected):
    files = [FileState(file.oid, file.relfilenode, "7") for file in held.storage.files]
    held = replace(held, storage=StorageState(files))
    storage = StorageState([FileState(oid, oid, "8" if oid in again else "7") for oid in leaves])
    found = Repair(held, table(leaves=leaves), frozenset(renewed), storage)
    assert (found.attached, found.detached, found.replaced) == expected


@pytest.mark.parametrize(
    ("rows", "of", "dear"), [(10_000, 10, False), (30_001, 100_000, True), (30_000, 100_000, False)]
)
def test_a_copy_of_everything_may_cost_less(rows, of, dear):
    assert is_dear(rows, of) is dear
