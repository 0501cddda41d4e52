"""What feeds each target, by publications and pipeline file, and its filter."""

from datetime import UTC, datetime

import pytest

from waldelta.config.pipeline_file import TargetTable
from waldelta.errors import StateError
from waldelta.lake.ledger import TableState
from waldelta.metadata_columns import RELID
from waldelta.pipeline.drift import with_leaves
from waldelta.pipeline.targets import TargetSource
from waldelta.pipeline.targets.target_sources import (
    differing,
    from_text,
    merge_partitions,
    target_sources,
    to_text,
)
from waldelta.postgres import CatalogRelation, Leaf, PgType, PublishedTable, TableColumn, TableId
from waldelta.postgres.catalog import Partition, PublishedRelation
from waldelta.row_filter import Collation, RowFilter


def name(table: str) -> TableId:
    return TableId("public", table)


def published(**tables: tuple[int, ...] | int) -> list[PublishedRelation]:
    """Relations by name: their oid, and those above; partitioned if capitalized."""
    found = []
    for table, told in tables.items():
        oid, *above = told if isinstance(told, tuple) else (told,)
        kind = "p" if table[0].isupper() else "r"
        found.append(PublishedRelation(name(table.lower()), oid, kind, tuple(above)))
    return found


LEAVES = published(p_1=(11, 1), p_2_a=(121, 12, 1), other=9)
TABLES = {
    name("p"): Partition(1),
    name("p_1"): Partition(11, (1,), "(id < 10)"),
    name("p_rest"): Partition(12, (1,), None),
    name("gone"): Partition(99, (), None),
}

IN_ROOT = {"p": {"partition_root": True}}
FROM_T = {"from": "public.t", "where": "x"}
CASES = {
    "tables by their names": (LEAVES, {},
     {"p_1": ({11}, "p_1"), "p_2_a": ({121}, "p_2_a"), "other": ({9}, "other")}),
    "a filter": (published(t=7), {"t": {"where": "a > 5"}}, {"t": ({7}, "t", None, "a > 5")}),
    "leaves gathered": (LEAVES, IN_ROOT, {"p": ({11, 121}, "p", 1), "other": ({9}, "other")}),
    "gathered, filtered": (published(p_1=(11, 1)), {"p": {"partition_root": True, "where": "a"}},
     {"p": ({11}, "p", 1, "a")}),
    "nothing to gather": (published(other=9), IN_ROOT, {"other": ({9}, "other")}),
    "published via its root": (published(P=1), IN_ROOT, {"p": ({1}, "p")}),
    "one part via its root": (published(p_1=(11, 1), P_2=(12, 1)), IN_ROOT,
     {"p": ({11}, "p", 1), "p_2": ({12}, "p_2")}),
    "an unknown root": (LEAVES[-1:], {"q": {"partition_root": True}}, {"other": ({9}, "other")}),
    "one table for two": (published(t=7), {"a": FROM_T, "b": FROM_T | {"where": "y"}},
     {"a": ({7}, "t", None, "x"), "b": ({7}, "t", None, "y")}),
    "and kept itself": (published(t=7), {"a": FROM_T, "t": {}},
     {"a": ({7}, "t", None, "x"), "t": ({7}, "t")}),
    "a partition of a root": (published(P=1), {"p_1": {"from": "public.p"}},
     {"p_1": ({1}, "p", None, "(id < 10)")}),
    "and a filter": (published(P=1), {"p_1": {"from": "public.p", "where": "a"}},
     {"p_1": ({1}, "p", None, "((id < 10)) and (a\n)")}),
    "the only partition": (published(P=1), {"p_rest": {"from": "public.p"}},
     {"p_rest": ({1}, "p")}),
    "a partition that left": (published(P=1), {"gone": {"from": "public.p"}}, {"p": ({1}, "p")}),
    "all of a table again": (published(t=7), {"a": {"from": "public.t"}}, {"t": ({7}, "t")}),
    "from what isn't published": (published(t=7), {"a": {"from": "public.u", "where": "x"}},
     {"t": ({7}, "t")}),
    "from itself": (published(t=7), {"t": FROM_T}, {"t": ({7}, "t", None, "x")}),
    "a name that is taken": (published(t=7, u=8), {"u": FROM_T},
     {"t": ({7}, "t"), "u": ({8}, "u", None, "x")}),
    "from a leaf that is gathered": (published(p_1=(11, 1)),
     IN_ROOT | {"a": {"from": "public.p_1", "where": "x"}}, {"p": ({11}, "p", 1)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_feeds_targets(case):
    relations, entries, expected = CASES[case]
    file = {f"public.{n}": TargetTable.model_validate(entry) for n, entry in entries.items()}
    found = target_sources(file, relations, TABLES)
    told = {n: (set(f.relation_ids), f.source.name, f.root_id, f.where) for n, f in found.items()}
    assert told == {
        f"public.{n}": (*want, *[None] * (4 - len(want))) for n, want in expected.items()
    }


INT = PgType(23, -1, "integer")


def relation(*columns: str, key: tuple[str, ...] = ()) -> CatalogRelation:
    numbered = tuple(TableColumn(c, n, INT, c in key) for n, c in enumerate(columns, 1))
    return CatalogRelation(name("p"), 1, "p", "p", "d", True, False, numbered, key, (), ())


def leaf(oid: int, *columns: str, key: tuple[str, ...] = (), **told: object) -> PublishedTable:
    numbered = tuple(TableColumn(c, n, INT, c in key) for n, c in enumerate(columns, 1))
    of = Leaf(name(f"p_{oid}"), oid, oid, 1, 8192)
    made = {"row_filter": None, "publishes": frozenset({"insert"}), **told}
    return PublishedTable(
        of.id, oid, "r", "d", numbered, key, key, key, leaves=(of,), relation_ids=(oid,), **made
    )


BOTH = (RELID, "a", "b")
BY_A, BY_B = {"key": ("a",)}, {"key": ("b",)}
GATHERED = {
    "by the root's key": (
        relation("a", "b", **BY_A), [leaf(2, "a", "b", **BY_A)], BOTH, ("a",)
    ),
    "in the root's order": (
        relation("a", "b", key=("a", "b")), [leaf(2, "b", "a", key=("b", "a"))], BOTH, ("a", "b")
    ),
    "by leaf and key": (
        relation("a", "b"), [leaf(2, "a", "b", **BY_B), leaf(3, "b", "a", **BY_B)], BOTH,
        (RELID, "b"),
    ),
    "by another identity than the root's key": (
        relation("a", "b", **BY_A), [leaf(2, "a", "b", **BY_B)], BOTH, (RELID, "b")
    ),
    "without a key": (relation("a"), [leaf(2, "a"), leaf(3, "a")], (RELID, "a"), ()),
    "keys differ": (
        relation("a", "b"), [leaf(2, "a", "b", **BY_A), leaf(3, "a", "b")], BOTH, ()
    ),
    "what all of them publish": (
        relation("a", "b"), [leaf(2, "a", "b"), leaf(3, "a")], (RELID, "a"), ()
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GATHERED)
def test_leaves_as_one_table(case):
    root, leaves, columns, key = GATHERED[case]
    table = merge_partitions(root, leaves)
    assert tuple(c.name for c in table.columns) == columns
    assert table.key_columns == key
    assert table.relation_ids == tuple(of.oid for of in leaves)


@pytest.mark.parametrize(
    ("leaves", "what"),
    [
        ([leaf(2, "a", key=("a",)), leaf(3, "a", key=("a",))], None),
        ([leaf(2, "a"), leaf(3, "a", "b")], "column lists"),
        ([leaf(2, "a"), leaf(3, "a", row_filter="(a > 1)")], "row filters"),
        ([leaf(2, "a", key=("a",)), leaf(3, "a")], "keys"),
    ],
)
def test_what_leaves_must_have_in_common(leaves, what):
    assert differing(leaves) == what


JOINED = {
    "as it was": (1, [2, 3], {"p": (frozenset(), 1)}, [2, 3]),
    "a new leaf": (1, [11], {"p": ({11, 121}, 1)}, [11, 121]),
    "a leaf that went stays": (1, [11, 121], {"p": ({11}, 1)}, [11, 121]),
    "a leaf that feeds another target": (1, [11, 121], {"p": ({11}, 1), "p_2_a": ({121}, None)},
     [11]),
    "another root": (2, [11], {"p": ({11, 121}, 1)}, [11]),
    "a table as any other": (None, [11], {"p": ({11, 121}, 1)}, [11]),
}  # fmt: skip


def test_leaves_that_were_published_late():
    """They may have had rows before, unlike those that were made while their tree was published."""
    listed = [
        PublishedRelation(name("p_1"), 11, "r", (1,), True),
        PublishedRelation(name("p_2"), 12, "r", (1,)),
    ]
    assert target_sources({"public.p": TargetTable(partition_root=True)}, listed, TABLES)[
        "public.p"
    ].late == {11}


@pytest.mark.parametrize("case", JOINED)
def test_leaves_that_join(case):
    root, held, fed, expected = JOINED[case]
    now = {
        f"public.{n}": TargetSource(name(n), frozenset(oids), root_id)
        for n, (oids, root_id) in fed.items()
    }
    state = TableState(
        datetime(2026, 1, 1, tzinfo=UTC), "r", "public.p", 1, "synced", relation_ids=held,
        root_id=root,
    )  # fmt: skip
    joined = with_leaves(state, now)
    assert joined.relation_ids == expected
    assert (joined is state) == (held == expected)


def test_a_filter_comes_back_as_it_was():
    row_filter = RowFilter(
        "c > 'x'", "(c > 'x'::text)", ("c",), {"c": Collation.CODE_POINT}, Collation.DETERMINISTIC,
        True,
    )  # fmt: skip
    assert from_text(to_text(row_filter)) == row_filter
    assert to_text(None) is None


NO_MAPPING = '{"text": "a", "analysed": "a", "columns": [], "collations": []}'


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"text": 1}', "null", NO_MAPPING])
def test_what_is_no_filter_is_refused(text):
    with pytest.raises(StateError, match="sync the table again"):
        from_text(text)
