"""What counts as drift, and what becomes of it."""

import re
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from tests.cases import cases
from waldelta.config import PipelineFile
from waldelta.lake.ledger import ColumnState, StorageState, TableState
from waldelta.lake.ledger.records import AttributeState, FileState
from waldelta.pipeline.drift import CatalogTable
from waldelta.pipeline.drift import drift as stage
from waldelta.pipeline.drift.repair_plan import obstacle
from waldelta.pipeline.targets import ReplicatedTarget, TargetSource
from waldelta.pipeline.targets.target_sources import to_text
from waldelta.postgres import Leaf, PgType, PublishedTable, TableColumn, TableId
from waldelta.postgres.publication_membership import Membership, to_texts
from waldelta.row_filter import RowFilter

EVERY = ["delete", "insert", "update"]
INT = PgType(23, -1, "integer")


def find_drift(file, state, table, catalog, mapping=None):
    """Compare a target of the name public.t with its source, by default the table of that name.

    Returns None where there is nothing to report or record.
    """
    mapping = mapping or TargetSource(table.id, frozenset({table.oid}))
    drift = stage.find_drift(file, state, catalog, ReplicatedTarget(table.id, mapping, table))
    return drift if drift.reasons or drift.is_new else None


def pipeline(where=None, drift=None, manage=True):
    publication = {"name": "p", "tables": [{"name": "public.t"}], "manage": manage}
    tables = {"public.t": {"where": where}} if where else {}
    target = {"root": "file:///x", "tables": tables, "drift": drift}
    source = {"conn_id": "c", "slot": "s", "publications": [publication]}
    return PipelineFile.model_validate({"pipeline": "p", "source": source, "target": target})


def state(
    columns=(("id", 1), ("a", 2)),
    row_filter=None,
    own=None,
    later=(),
    leaves=(),
    publishes=(),
    unpublished=(),
):
    states = [
        ColumnState(name, 23, -1, "integer", "int", False, attnum) for name, attnum in columns
    ]
    return TableState(
        datetime(2026, 1, 1, tzinfo=UTC), "r", "public.t", 1, "synced", columns=states,
        row_filter=row_filter,
        target_filter=to_text(RowFilter(own, f"({own})", ("a",))) if own else None,
        later_filters=list(later), publishes=list(publishes), unpublished=list(unpublished),
        storage=StorageState([FileState(oid, oid) for oid in leaves]),
    )  # fmt: skip


def table(columns=(("id", 1), ("a", 2)), row_filter=None, leaves=()):
    listed = tuple(TableColumn(name, attnum, INT, False) for name, attnum in columns)
    kind = "p" if leaves else "r"
    parts = tuple(Leaf(TableId("public", f"t_{oid}"), oid, oid, 0, 0) for oid in leaves)
    return PublishedTable(
        TableId("public", "t"), 1, kind, "d", listed, ("id",), ("id",), ("id",), row_filter, parts,
        (1,), frozenset({"insert", "delete"}), ("p",),
    )  # fmt: skip


LIST = (("id", 1), ("a", 2), ("b", 3))
GREATER = {"row_filter": "(a > 1)"}
DBA = {"manage": False}
# How the file differs, the target at its copy, the table now; what is said, and if mended.
CASES = [
    ("nothing", {}, {}, {}, None, None),
    ("the same filter", {"where": "a > 5"}, {"own": "a > 5"} | GREATER, GREATER, None, None),
    ("own filter", {"where": "a > 6"}, {"own": "a > 5"}, {},
     r"where is a > 6, but its copy was made with a > 5", True),
    ("new own filter", {"where": "a > 6"}, {}, {}, r"with every row", True),
    ("own filter gone", {}, {"own": "a > 5"}, {}, r"where is gone", True),
    ("own filter, a DBA's publication", {"where": "a > 6"} | DBA, {}, {}, r"every row", True),
    ("own filter, to be told", {"where": "a > 6", "drift": "report"}, {}, {}, r"every row", False),
    ("publication's filter", {}, GREATER, {"row_filter": "(a > 2)"}, r"\(a > 2\).*\(a > 1\)", True),
    ("a DBA's filter", DBA, GREATER, {}, r"filter is true.*\(a > 1\)", False),
    ("a DBA's, mended", DBA | {"drift": "repair"}, {}, GREATER, r"made with true", True),
    ("open since earlier", DBA, {"later": ["(a > 1)", "true"]}, {}, r"filter is true", False),
    ("column list", {}, {"columns": LIST[::2], "unpublished": [2]}, {"columns": LIST},
     r"column a was added", True),
    ("publish set", {}, {"publishes": ["insert"]}, {},
     r"it publishes delete, insert, but at its copy it published insert", True),
    ("an added column", {}, {}, {"columns": LIST}, None, None),
    ("partition came", {}, {"leaves": [10]}, {"leaves": [10, 11]},
     r"partition public\.t_11 was added", False),
    ("partition went", {}, {"leaves": [10, 11]}, {"leaves": [10]},
     r"1 partition left the table", False),
    ("partitions mended", {"drift": "repair"}, {"leaves": [10]}, {"leaves": [10, 11]},
     r"was added", True),
]  # fmt: skip


@cases("file, held, now, reason, mends", CASES)
def test_find_drift(file, held, now, reason, mends):
    """What the file changed is repaired, other changes are reported, unless it says otherwise."""
    drift = find_drift(pipeline(**file), state(**held), table(**now), CatalogTable())
    if reason is None:
        assert drift is None
        return
    assert drift.mends is mends
    (told,) = drift.reasons
    assert re.search(reason, told)


def test_a_partition_made_as_one_is_no_drift():
    """It was empty at first, so all rows were sent; an attached one is reported."""
    present = CatalogTable(
        storage=StorageState([FileState(oid, oid) for oid in (10, 11, 12)]),
        attached={12: "public.t_12"},
    )
    drift = find_drift(pipeline(), state(leaves=[10]), table(leaves=[10, 11, 12]), present)
    assert drift.reasons == (
        "partition public.t_12 was added; PostgreSQL did not send the rows that it already had",
    )
    assert (drift.repair.attached, drift.repair.detached) == ({12}, frozenset())
    assert find_drift(pipeline(), state(leaves=[10]), table(leaves=[10, 11]), present) is None
    late = TargetSource(TableId("public", "t"), frozenset({10, 11}), late=frozenset({11}))
    assert (
        "t_11 was added"
        in find_drift(
            pipeline(), state(leaves=[10]), table(leaves=[10, 11]), present, late
        ).reasons[0]
    )


def test_partitions_that_were_told_are_mended_once_the_file_says_so():
    """What was only told is remembered for it."""
    held = replace(state(leaves=[10, 11]), unrepaired_leaves=[11])
    told = find_drift(pipeline(drift="repair"), held, table(leaves=[10, 11]), CatalogTable())
    assert (told.reasons, told.mends) == (
        (("1 partition changed earlier (added, removed or truncated), which was reported but"
          " not repaired"),),
        True,
    )  # fmt: skip
    assert find_drift(pipeline(), held, table(leaves=[10, 11]), CatalogTable()) is None


def member(entry="table 1", publication=1, **said):
    """What a publication says of the table."""
    entries = frozenset(said.pop("entries", {entry}))
    return Membership(1, publication, entries, **{"publishes": frozenset(EVERY)} | said)


REMOVED = "removed from a publication"
BELOW_TWO = member("table 2", 2, row_filter="(a > 5)")
AWAY = [
    # What published it at its copy, how it is published now, by what, and what is told.
    ("the same entry", [member()], {}, [member()], None),
    ("one more", [member()], {}, [member(), member("table 2", 2)], None),
    ("another one", [member()], {}, [member("table 2")], REMOVED),
    ("one of two stays", [member(), member("table 2", 2)], {}, [member("table 2", 2)], None),
    ("one of two stays, which says less", [member(), BELOW_TWO], {}, [member("table 3"), BELOW_TWO],
     REMOVED),
    ("another filter", [member()], GREATER, [member("table 2", **GREATER)],
     "^its publications' filter is.* true$"),
    ("away, and another filter", [member()], GREATER, [member("table 2", is_apart=True, **GREATER)],
     "filter is .*removed from a publication"),
    ("another column list", [member()], {"columns": LIST[:1]}, [member("table 2", column_list="1")],
     None),
    ("away, and another column list", [member()], {"columns": LIST[:1]},
     [member("table 2", column_list="1", is_apart=True)], REMOVED),
    ("a column was added while it was away", [member()], {"columns": LIST}, [member("table 2")],
     REMOVED),
    ("options there and back", [member(version=1)], {}, [member(version=2)], "other options"),
    ("another owner", [member(version=1)], {}, [member(version=2, owner=3)], None),
    ("not known", [], {}, [member("table 2")], None),
]  # fmt: skip


@cases("then, now, entries, reason", AWAY)
def test_a_table_that_was_out_of_its_publications(then, now, entries, reason):
    """It is told in every run from then on; what is new but explained is recorded."""
    dba, present = pipeline(manage=False), replace(table(**now), entries=frozenset(entries))
    texts = then if any(isinstance(entry, str) for entry in then) else to_texts(then)
    found = find_drift(dba, replace(state(), entries=texts), present, CatalogTable())
    if reason is None:
        assert found is None or (found.reasons, found.state.entries) == ((), to_texts(entries))
        return
    assert re.search(reason, "; ".join(found.reasons))
    again = find_drift(dba, found.state, present, CatalogTable())
    assert (again.reasons, again.is_new) == (found.reasons, False)


INSERTS = frozenset({"insert"})
WITHOUT_V, WITH_V = (("id", 1), ("a", 2)), (("id", 1), ("a", 2), ("v", 3))
LEAF = replace(member("table 3", 2), relation=2)


def looked_at(*entries, columns=WITH_V, row_filter=None):
    """The table as one look finds it."""
    publishes = frozenset().union(*(m.publishes for m in entries))
    return replace(table(columns, row_filter), entries=frozenset(entries), publishes=publishes)


INSERTS_ALONE = looked_at(member(version=2, publishes=INSERTS))
WITHOUT = looked_at(member("table 2", column_list="1 2"), columns=WITHOUT_V)
BACK = f"^it was {REMOVED}"
TWO = {"table 5", "schema 6"}
LOOKS = [
    # What published it at its copy, what each look finds, and what each tells (None: nothing).
    ("operations go and come", [member()],
     [INSERTS_ALONE, looked_at(member(version=3)), looked_at(member(version=3))],
     ["^it publishes insert, but at its copy it published delete, insert, update$",
      f"{BACK} .* other options", BACK]),
    ("operations go, one comes, all come", [member()],
     [INSERTS_ALONE, looked_at(member(version=3, publishes=INSERTS | {"update"})),
      looked_at(member(version=4))],
     ["^it publishes insert, but", "^it publishes insert, update, but", BACK]),
    ("more operations come and go", [member()],
     [looked_at(member(version=2, publishes=frozenset([*EVERY, "truncate"]))),
      looked_at(member(version=3))],
     ["truncate, update, but at its copy", None]),
    ("operations go from one leaf, and come", [member(), LEAF],
     [looked_at(member(), replace(LEAF, version=2, publishes=INSERTS)),
      looked_at(member(), replace(LEAF, version=3))],
     [BACK, BACK]),
    ("a column leaves and comes", [member()], [WITHOUT, looked_at(member("table 3"))],
     [None, "^column v was added to its column list$"]),
    ("a column leaves, and stays away", [member()], [WITHOUT] * 2, [None, None]),
    ("a filter comes and goes", [member()],
     [looked_at(member("table 2", **GREATER), **GREATER), looked_at(member("table 3"))],
     ["^its publications' filter is", "^its publications' filter is"]),
    ("what decides of two entries goes and comes", [member(entries=TWO)],
     [looked_at(member(entries=TWO)), looked_at(member(entries={"table 5", "schema 9"}))],
     [None, BACK]),
]  # fmt: skip


@pytest.mark.parametrize("evolves", [True, False])
@cases("first, looks, told", LOOKS)
def test_what_look_after_look_tells(first, looks, told, evolves):
    """Being as it was again doesn't bring what was never sent, whatever the columns did."""
    present = CatalogTable(storage=StorageState([], [AttributeState(n, 1) for n in (1, 2, 3)]))
    held, found = replace(state(WITH_V, publishes=EVERY), entries=to_texts(first)), []
    for look in looks:
        drift = find_drift(pipeline(manage=False), held, look, present)
        found.append("; ".join(drift.reasons) if drift and drift.reasons else None)
        held = drift.state if drift else held
        if evolves:
            held = replace(held, columns=state([(c.name, c.attnum) for c in look.columns]).columns)
        again = find_drift(pipeline(manage=False), held, look, present)
        assert ("; ".join(again.reasons) if again else None) == found[-1]
        assert again is None or not again.is_new
    assert [bool(text) for text in found] == [bool(pattern) for pattern in told]
    assert all(
        re.search(pattern, text) for pattern, text in zip(told, found, strict=True) if pattern
    )


@pytest.mark.parametrize("row_filter", [None, "(a > 1)"])
def test_what_was_not_sent_meanwhile_is_mended_by_a_copy(row_filter):
    """Nobody knows which rows it concerns."""
    held = replace(
        state(publishes=EVERY),
        entries=to_texts([member()]),
        key_columns=["id"],
        snapshot="1:1:",
        relation_ids=[1],
    )
    entries = frozenset({member("table 2", row_filter=row_filter, is_apart=True)})
    present = replace(table(row_filter=row_filter), entries=entries, publishes=frozenset(EVERY))
    found = find_drift(pipeline(drift="repair"), held, present, CatalogTable())
    assert (found.mends, "filter changed before" in obstacle(found.repair)) == (True, True)


def test_a_renamed_column_is_no_drift():
    """PostgreSQL prints the filter anew, which the ledger takes; another one is reported."""
    held = state(row_filter="((a > 1) AND (id <> ALL (ARRAY[1, 2])))")
    now = [("id", 1), ("b", 2)]
    drift = find_drift(
        pipeline(),
        held,
        table(now, row_filter="((b > 1) AND (id <> ALL (ARRAY[1, 2])))"),
        CatalogTable(),
    )
    assert (drift.reasons, drift.mends, drift.state.row_filter[:8]) == ((), False, "((b > 1)")
    assert find_drift(
        pipeline(),
        held,
        table(now, row_filter="((b > 2) AND (id <> ALL (ARRAY[1, 2])))"),
        CatalogTable(),
    ).mends


def test_filters_since_the_copy_are_recorded_once():
    """Each filter that was in force is kept: rows that any of them let in may be in the target."""
    dba, held = pipeline(manage=False), state(row_filter="(a > 1)")
    first = find_drift(dba, held, table(row_filter="(a > 2)"), CatalogTable())
    assert (first.is_new, first.state.later_filters) == (True, ["(a > 2)"])
    again = find_drift(dba, first.state, table(row_filter="(a > 2)"), CatalogTable())
    assert (again.is_new, len(again.reasons)) == (False, 1)
    back = find_drift(dba, first.state, table(row_filter="(a > 1)"), CatalogTable())
    assert (back.is_new, back.state.later_filters) == (True, ["(a > 2)", "(a > 1)"])
