"""The plan between wanted and existing publications, as a table of cases."""

from dataclasses import replace

from tests.cases import cases
from waldelta.config import Publication
from waldelta.postgres import TableId
from waldelta.stages.setup.facts.publications import (
    Mark,
    PublicationState,
    PublicationTable,
    plan_publications,
    wanted_publication,
)

A = PublicationTable(TableId("public", "a"))
B = PublicationTable(TableId("public", "B"))
FILTERED = replace(A, row_filter="(id > 5)")
LISTED = replace(A, columns=("id", "v"))
MARK = "waldelta pipeline x, definition 0123456789ab"


def publication(*tables, **rest):
    return PublicationState("p", tables, comment=MARK, **rest)


CASES = [
    ("same", publication(A), publication(A), []),
    ("same with filter and list", publication(FILTERED, schemas=("s",)),
     publication(FILTERED, schemas=("s",)), []),
    (
        "absent",
        publication(FILTERED, LISTED, schemas=("s",)),
        None,
        [
            (
                'create publication "p" for table only "public"."a" where ((id > 5)), table only'
                ' "public"."a" ("id", "v"), tables in schema "s" with (publish = \'insert, update,'
                " delete, truncate', publish_via_partition_root = false)"
            ),
            f"comment on publication \"p\" is '{MARK}'",
        ],
    ),
    ("add", publication(A, B), publication(A),
     ['alter publication "p" add table only "public"."B"']),
    ("drop", publication(A), publication(A, B),
     ['alter publication "p" drop table only "public"."B"']),
    (
        "filter changed: the others are kept, the schema too",
        publication(FILTERED, B, schemas=("s",)),
        publication(A, B, schemas=("s",)),
        [
            (
                'alter publication "p" set table only "public"."B", table only "public"."a" where'
                ' ((id > 5)), tables in schema "s"'
            )
        ],
    ),
    ("generated columns", publication(A, publishes_generated=True), publication(A),
     ['alter publication "p" set (publish_generated_columns = stored)']),
    (
        "generated columns no longer, and other operations",
        publication(A, publish=frozenset({"insert"})),
        publication(A, publishes_generated=True),
        ["alter publication \"p\" set (publish = 'insert', publish_generated_columns = none)"],
    ),
    ("column list changed, one removed", publication(LISTED), publication(A, B),
     ['alter publication "p" set table only "public"."a" ("id", "v")']),
    ("operations", publication(A, publish=frozenset({"delete", "insert"})), publication(A),
     ["alter publication \"p\" set (publish = 'insert, delete')"]),
    (
        "via root comes first when switched on",
        publication(FILTERED, via_root=True),
        publication(A),
        [
            'alter publication "p" set (publish_via_partition_root = true)',
            'alter publication "p" set table only "public"."a" where ((id > 5))',
        ],
    ),
    (
        "via root comes last when switched off",
        publication(A),
        publication(FILTERED, via_root=True),
        [
            'alter publication "p" set table only "public"."a"',
            'alter publication "p" set (publish_via_partition_root = false)',
        ],
    ),
    (
        "schemas",
        publication(A, schemas=("new",)),
        publication(A, schemas=("old",)),
        [
            'alter publication "p" drop tables in schema "old"',
            'alter publication "p" add tables in schema "new"',
        ],
    ),
    (
        "list to all tables",
        publication(all_tables=True),
        publication(A),
        [
            'drop publication "p"',
            (
                'create publication "p" for all tables with (publish = \'insert, update, delete,'
                " truncate', publish_via_partition_root = false)"
            ),
            f"comment on publication \"p\" is '{MARK}'",
        ],
    ),
    (
        "a comment in a filter can't swallow the parenthesis",
        publication(replace(A, row_filter="id > 5 -- five")),
        publication(A),
        ['alter publication "p" set table only "public"."a" where (id > 5 -- five\n)'],
    ),
    (
        "mark",
        publication(A),
        replace(publication(A), comment="waldelta pipeline x, definition ba9876543210"),
        [f"comment on publication \"p\" is '{MARK}'"],
    ),
]  # fmt: skip


@cases("wanted, actual, statements", CASES)
def test_plan(wanted, actual, statements):
    planned = plan_publications([wanted], {"p": actual} if actual else {})
    assert [s.text() for s in planned] == statements


def test_mark_follows_the_definition():
    """Any change of the entry changes the mark; other comments are none."""
    entry = Publication.model_validate({"name": "p", "tables": [{"name": "public.a"}]})
    other = Publication.model_validate(
        {"name": "p", "tables": [{"name": "public.a", "where": "id > 1"}]}
    )
    mark = Mark.of("x", entry)
    assert Mark.parse(str(mark)) == mark == Mark.parse(wanted_publication("x", entry).comment)
    assert mark != Mark.of("x", other)
    named = Mark.of("x", entry, "x_slot")
    assert (
        Mark.parse(str(named))
        == named
        == Mark.parse(wanted_publication("x", entry, "x_slot").comment)
    )
    assert Mark.parse("waldelta is great") is None
    assert Mark.parse(None) is None


def test_a_publication_keeps_its_mark():
    """What becomes of new tables isn't part of it."""
    entry = Publication(name="p", tables=[{"name": "s.*", "exclude": ["s.a"]}])
    adopting = entry.model_copy(update={"new_tables": "adopt"})
    other = Publication(name="p", tables=[{"name": "s.*"}])
    assert Mark.of("x", entry) == Mark.of("x", adopting) != Mark.of("x", other)
