"""What a target may claim to hold of its source, by what the ledger knows of its copy."""

from dataclasses import replace

from tests.cases import cases
from tests.support.bookkeeping import minutes
from waldelta.lake import Lake
from waldelta.lake.ledger import ColumnState, Decision, Decisions, Ledger, StorageState, TableState
from waldelta.lake.ledger.records import AttributeState
from waldelta.monitoring.table_list import (
    content_label,
    copied_rows,
    read_table_details,
)
from waldelta.postgres.publication_membership import Membership, to_texts

EVERY = ["delete", "insert", "truncate", "update"]
ID = ColumnState("id", 20, -1, "int8", "bigint", not_null=True, attnum=1)
STATE = TableState(
    minutes(0), "s", "public.a", 1, "synced", publishes=EVERY, columns=[ID], key_columns=["id"]
)
ALL = "all rows and columns of the source"


def entries(*published: tuple[str, str | None]) -> list[str]:
    """Publications by their operations (first letters) and filters."""
    return to_texts(
        Membership(
            7,
            number,
            frozenset({f"table {number}"}),
            publishes=frozenset(name for name in EVERY if name[0] in letters),
            row_filter=row_filter,
        )
        for number, (letters, row_filter) in enumerate(published)
    )


def attributes(*numbers: int) -> StorageState:
    names = {2: "phone"}
    return StorageState(
        attributes=[AttributeState(number, 1, name=names.get(number, "")) for number in numbers]
    )


CONTENT = [
    ("a mirror of all", {}, ALL, ""),
    ("of an earlier version", {"publishes": []}, "what its publications send", ""),
    (
        "inserts only",
        {"publishes": ["insert"]},
        (
            "updates aren't published: rows stay as they were inserted or copied; deletes aren't"
            " published: rows that the source deleted stay; truncates aren't published: rows that"
            " the source truncated stay"
        ),
        "no updates, deletes, truncates",
    ),
    (
        "no inserts",
        {"publishes": ["delete", "truncate", "update"]},
        "inserts aren't published: rows inserted since its copy are missing",
        "no inserts",
    ),
    (
        "deletes were taken away since the copy",
        {"entries": entries(("iut", None))},
        "deletes aren't published: rows that the source deleted stay",
        None,
    ),
    ("two publications together publish all", {"entries": entries(("iu", None), ("dt", None))},
     ALL, None),
    (
        "and by other filters",
        {"entries": entries(("iut", "(id > 1)"), ("dt", None))},
        "its publications send some operations by other filters",
        None,
    ),
    (
        "a column list",
        {"unpublished": [2, 3], "storage": attributes(1, 2, 3)},
        "2 columns of the source not published: phone, column 3",
        None,
    ),
    (
        "a column that is published by now, and one that is gone",
        {"unpublished": [1, 3], "storage": attributes(1)},
        ALL,
        None,
    ),
    ("a row filter", {"row_filter": "(id > 1)"}, "only rows where (id > 1)", "filtered"),
    (
        "the publisher's and its own",
        {"row_filter": "(id > 1)", "target_filter": "id < 9"},
        "only rows where (id > 1) and id < 9",
        "filtered",
    ),
    (
        "other filters at times",
        {"later_filters": ["(id > 1)", "true"]},
        "its publications sent other rows at times since its copy",
        None,
    ),
    ("partitions", {"unrepaired_leaves": [5]}, "1 partition added, removed or truncated", None),
    ("a mode", {"mode": "soft_delete"}, "mode soft_delete: also deleted rows", "soft_delete"),
    (
        "no copy",
        {"copy_skipped": True},
        "no initial copy: earlier rows of the source are missing",
        "without a copy",
    ),
    ("not copied yet", {"status": "copying"}, "its copy isn't complete", ""),
    ("not published any more", {"status": "removed"}, "it is no longer published", ""),
]  # fmt: skip


@cases("more, summary, label", CONTENT)
def test_all_rows_are_claimed_only_of_a_target_that_has_them(lake, more, summary, label):
    ledger, state = Ledger(Lake(lake)), replace(STATE, **more)
    ledger.append(state)
    assert read_table_details(ledger, "public.a").summary == summary
    if label is not None:
        assert content_label(state) == label


def test_rows_kept_out_of_a_target_are_counted(lake):
    """Those in quarantine, and discarded ones that it no longer lists; of this copy only."""
    book, row = (
        Ledger(Lake(lake)),
        Decision(minutes(1), "r", "waiting", "public.a", 1, 1, "1", ["body"]),
    )
    book.append(STATE)
    assert read_table_details(book, "public.a").summary == ALL
    others = [replace(row, key="2"), replace(row, key="3", generation=9)]
    decided = [replace(row, key="2", status="discarded", by="ann")]
    Decisions(book.lake).add([row, *others, *decided])
    assert read_table_details(book, "public.a").summary == (
        "1 row missing or outdated: in quarantine; 1 row missing or outdated: discarded"
    )


def test_rows_are_those_of_the_last_copy(lake):
    """Not those that a repair, or a decision on quarantined rows, read again."""
    ledger = Ledger(Lake(lake))
    for number, (generation, status, snapshot, rows) in enumerate(
        [
            (1, "copying", "", 0),
            (1, "synced", "1:1:", 20),
            (1, "synced", "1:1:", 20),  # a column was added
            (2, "copying", "2:2:", 0),  # a repair begins with its snapshot
            (2, "synced", "2:2:", 1),
        ]
    ):
        ledger.append(
            TableState(
                minutes(number), "r", "public.a", generation, status, snapshot=snapshot, rows=rows
            )
        )
    assert copied_rows(ledger, ["public.a", "public.b"]) == {"public.a": 20}
