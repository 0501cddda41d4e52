"""Whether a table was out of its publications between two looks at the catalogs."""

import pytest

from waldelta.postgres import connect
from waldelta.postgres.publication_membership import (
    from_texts,
    is_same,
    is_uniform,
    to_texts,
    was_interrupted,
)
from waldelta.postgres.published_tables import read_published_tables

TABLE = "create table t(id int primary key, a int, v text); alter table t replica identity full"
ALL_TABLES, ONE, TWO = (
    ["create publication p for all tables", "create publication q"],
    ["create publication p for table t", "create publication q"],
    ["create publication p for table t", "create publication q for table t where (a > 5)"],
)
BESIDE_SCHEMA = [
    "create publication p for table t where (a > 1), tables in schema public",
    "create publication q",
]
FILTERED = ["create publication p for table t where (a > 1), u", "create publication q"]

# The publications, what is done to them statement by statement, whether it is told of t.
CASES = {
    "nothing": (ONE, [], False),
    "another table comes": (ONE, ["alter publication p add table u"], False),
    "the same once more": (ONE, ["alter publication p set table t, u"], False),
    "out and in": (ONE, ["alter publication p drop table t", "alter publication p add table t"],
                   True),
    "out and in with a column more": (ONE, ["alter publication p drop table t",
                                            "alter table t add n int",
                                            "alter publication p add table t"], True),
    "out and in with a filter": (ONE, ["alter publication p drop table t",
                                       "alter publication p add table t where (a > 1)"], True),
    "out and in with a list": (ONE, ["alter publication p drop table t",
                                     "alter publication p add table t (id, a, v)"], True),
    "a filter": (ONE, ["alter publication p set table t where (a > 1)"], False),
    "a filter, beside others": (FILTERED, ["alter publication p set table u, t where (a > 2)"],
                                False),
    "a column list": (ONE, ["alter publication p set table t (id, a)"], False),
    "a filter for a while": (ONE, ["alter publication p set table t where (a > 1)",
                                   "alter publication p set table t"], True),
    "set out and set in": (FILTERED, ["alter publication p set table u",
                                      "alter publication p set table t where (a > 2), u"], True),
    "a renamed column of the filter": (["create publication p for table t where (v is null)",
                                        "create publication q"], ["alter table t rename v to w"],
                                       False),
    "its schema": (ONE, ["alter publication p set tables in schema public"], False),
    "the table for its schema": (["create publication p for tables in schema public",
                                  "create publication q"],
                                 ["alter publication p set table t where (a > 1)"], True),
    "its schema beside it for a while": (BESIDE_SCHEMA,
                                         ["alter publication p drop tables in schema public",
                                          "alter publication p add tables in schema public"],
                                         True),
    "its schema beside it goes": (BESIDE_SCHEMA,
                                  ["alter publication p drop tables in schema public"], False),
    "options for a while": (ONE, ["alter publication p set (publish = 'insert')",
        "alter publication p set (publish = 'insert, update, delete, truncate')"], True),
    "of all tables": (ALL_TABLES, ["alter publication p set (publish = 'insert')",
        "alter publication p set (publish = 'insert, update, delete, truncate')"], True),
    "by the root for a while": (ONE,
                                ["alter publication p set (publish_via_partition_root = true)",
                                 "alter publication p set (publish_via_partition_root = false)"],
                                True),
    "by the root": (ONE, ["alter publication p set (publish_via_partition_root = true)"], False),
    "operations for a while, and by the root (a limit)": (ONE,
        ["alter publication p set (publish = 'insert')",
        ("alter publication p set (publish = 'insert, update, delete, truncate',"
        " publish_via_partition_root = true)")], False),
    "operations for a while, and an owner (a limit)": (ONE,
        ["alter publication p set (publish = 'insert')",
        "alter publication p set (publish = 'insert, update, delete, truncate')",
        "alter publication p owner to other_owner"], False),
    "fewer operations": (ONE, ["alter publication p set (publish = 'insert')"], False),
    "an owner": (ONE, ["alter publication p owner to other_owner"], False),
    "a comment": (ONE, ["comment on publication p is 'ours'"], False),
    "renamed for a while": (ONE, ["alter publication p rename to r",
                                  "alter publication r rename to p"], True),
    "made again": (ONE, ["drop publication p", "create publication p for table t"], True),
    "one more publication": (ONE, ["alter publication q add table t where (a > 1)"], False),
    "the wider one goes": (TWO, ["alter publication p drop table t"], False),
    "the narrower one goes and comes": (TWO, ["alter publication q drop table t",
                                              "alter publication q add table t where (a > 7)"],
                                        False),
    "the wider one goes and comes": (TWO, ["alter publication p drop table t",
                                           "alter publication p add table t"], True),
    "the wider one gets another filter": (TWO, ["alter publication p set table t where (a < 0)"],
                                          False),
    "both get another filter": (TWO, ["alter publication p set table t where (a < 0)",
                                      "alter publication q set table t where (a > 6)"], True),
    "one for the other": (ONE, ["alter publication p drop table t",
                                "alter publication q add table t"], True),
    "the wider one sends inserts alone": (TWO, ["alter publication p set (publish = 'insert')"],
                                          True),
    "catalogs written anew": (ONE, ["vacuum full pg_publication_rel", "vacuum full pg_publication",
                                    "vacuum freeze pg_publication"], False),
}  # fmt: skip


LEAF = """
drop schema if exists s cascade; drop table if exists t, mid, root; create schema s;
create table root(id int primary key) partition by range (id);
create table mid partition of root for values from (0) to (100) partition by range (id);
create table t partition of mid for values from (0) to (10);
"""
BY_ROOT, BY_SCHEMA = "for table root", "for tables in schema public"
UNLOGGED = ["alter table t set unlogged", "alter table t set logged"]

# How the leaf t is published, what is done while the entry stays as it is, whether it is told.
STAYS = {
    "detached and attached": (BY_ROOT, ["alter table mid detach partition t",
        "alter table mid attach partition t for values from (0) to (10)"], True),
    "a table above it": (BY_ROOT, ["alter table root detach partition mid",
        "alter table root attach partition mid for values from (0) to (100)"], True),
    "above what is published": ("for table mid", ["alter table root detach partition mid",
        "alter table root attach partition mid for values from (0) to (100)"], False),
    "detached, in its schema": (BY_SCHEMA, ["alter table mid detach partition t",
        "alter table mid attach partition t for values from (0) to (10)"], False),
    "detached, of all tables": ("for all tables", ["alter table mid detach partition t",
        "alter table mid attach partition t for values from (0) to (10)"], False),
    "another schema": (BY_SCHEMA, ["alter table t set schema s",
                                   "alter table s.t set schema public"], True),
    "another schema, by its root": (BY_ROOT, ["alter table t set schema s",
                                              "alter table s.t set schema public"], False),
    "its root's schema": ("for tables in schema s; alter table root set schema s",
                          ["alter table s.root set schema public",
                           "alter table root set schema s"], True),
    "another beside it": (BY_ROOT,
                          ["create table u_1 partition of mid for values from (10) to (20)"],
                          False),
    "renamed": (BY_SCHEMA, ["alter table t rename to w", "alter table w rename to t"], False),
    "unlogged, which leaves no trace": (BY_SCHEMA, UNLOGGED, False),
    "catalogs written anew": (BY_SCHEMA, ["vacuum full pg_depend", "vacuum full pg_inherits",
                                          "vacuum freeze pg_depend"], False),
}  # fmt: skip


@pytest.fixture
def conn(any_database):
    any_database.execute("drop role if exists other_owner")
    any_database.execute(
        f"{TABLE}; create table u(id int primary key); create role other_owner superuser"
    )
    with connect(any_database.conninfo, "test") as connection:
        yield connection
    any_database.execute("drop publication if exists p, q; drop role other_owner")


def memberships(conn):
    (found,) = [t.entries for t in read_published_tables(conn, ["p", "q"]) if t.id.name == "t"]
    return found


def look_twice(database, conn, begin, statements):
    """Whether it was interrupted by the statements, and whether it is the same again."""
    for statement in ("drop publication if exists p, q", *begin):
        database.execute(statement)
    then = memberships(conn)
    for statement in statements:
        database.execute(statement)
    now = memberships(conn)
    return was_interrupted(from_texts(to_texts(then)), now), is_same(then, now)


def test_what_held_between_two_looks(any_database, conn):
    """Told is what more than one change may have led to, or a change that was taken back."""
    for name, (publications, statements, expected) in CASES.items():
        begin = ("drop table if exists t", TABLE, *publications)
        told, same = look_twice(any_database, conn, begin, statements)
        assert (told, told and same) == (expected, False), name


def test_a_table_that_left_an_entry_which_stayed(any_database, conn):
    """Detached or in another schema for a while: the publications were never altered."""
    for name, (publication, statements, expected) in STAYS.items():
        begin = (LEAF, f"create publication p {publication}")
        told = look_twice(any_database, conn, begin, statements)
        assert told == (expected, not expected), name


def test_by_which_filter_each_operation_goes(any_database, conn):
    """Publications whose filters are ORed are one, unless one of them doesn't send every change."""
    found = []
    for statement in [
        *TWO,
        "alter publication q set (publish = 'insert, truncate')",
        "alter publication p set table u",
    ]:
        any_database.execute(statement)
        found.append(is_uniform(memberships(conn)) if "q" in statement else None)
    assert found == [None, True, True, None]
    assert not is_uniform(memberships(conn))
